"""Tensors over raw memory, and what can be asked of whole stretches of it at once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import isfinite
from typing import Final

import numpy as np
import torch
from torch import Tensor

from weightledger.registry.weights.arrays import Bytes, writable_view
from weightledger.registry.weights.dtypes import ITEM_BYTES
from weightledger.registry.weights.layout import Spec
from weightledger.registry.weights.leaves import TORCH_DTYPES

_WHOLE: Final = frozenset({"BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64"})
_CHUNK: Final = 1 << 22  # bytes looked at together where there is no pass over the memory itself
# Elements; with one more torch would start its threads, which then spin on the cores that workers are waiting for.
_ALONE: Final = 32767


def region_views(data: Bytes, specs: Sequence[Spec], *, flat: bool = False) -> list[Tensor]:
    """Return a tensor for each place in the data, in order.

    Args:
        data: The data of a file, without its header.
        specs: The places, in ascending order.
        flat: Whether to leave them as rows instead of giving them their shapes.
    """
    # Made outside of inference mode, or they could not be written to outside of it later.
    with torch.inference_mode(False), torch.no_grad():
        rows: list[Tensor] = []
        at = 0
        while at < len(specs):
            stop = _run_end(specs, at)
            rows += _run_rows(data, specs[at:stop])
            at = stop
        return rows if flat else [row.view(spec.shape) for row, spec in zip(rows, specs, strict=True)]


def has_nonfinite(data: Bytes, code: str) -> bool:
    """Tell whether elements of a type, standing side by side, include NaN or an infinity."""
    if code in _WHOLE or data.nbytes == 0:
        return False
    if code.startswith("F8"):
        bad = _nonfinite_bytes(code)
        return any(bool(bad[data[at : at + _CHUNK]].any()) for at in range(0, data.nbytes, _CHUNK))
    # One pass without a temporary: NaN propagates through it, an infinity is an end of the range. Sums would
    # overflow, and halves would be widened in a copy.
    with torch.inference_mode(False), torch.no_grad():
        (row,) = _run_rows(data, [Spec("", "F32" if code == "C64" else code, (), 0, data.nbytes)])
        return not all(map(_finite, torch.split(row, _ALONE)))


def _finite(row: Tensor) -> bool:
    low, high = torch.aminmax(row)
    return isfinite(low.item()) and isfinite(high.item())


def _run_end(specs: Sequence[Spec], at: int) -> int:
    first = specs[at]
    stop = at + 1
    while stop < len(specs) and specs[stop].code == first.code and specs[stop].start == specs[stop - 1].end:
        stop += 1
    return stop


def _run_rows(data: Bytes, specs: Sequence[Spec]) -> list[Tensor]:
    start, end, code = specs[0].start, specs[-1].end, specs[0].code
    dtype, item = TORCH_DTYPES[code], ITEM_BYTES[code]
    if start == end:
        return [torch.empty(0, dtype=dtype) for _ in specs]
    region = torch.from_numpy(writable_view(data[start:end]))
    if region.data_ptr() % item:
        # Only in files of other writers, which need not align their tensors.
        region = region.clone()
    row = region.view(dtype)
    return (
        [row]
        if len(specs) == 1
        else list(torch.split(row, [(spec.end - spec.start) // item for spec in specs]))
    )


@cache
def _nonfinite_bytes(code: str) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    every = torch.arange(256, dtype=torch.uint8).view(TORCH_DTYPES[code])
    result: np.ndarray[tuple[int], np.dtype[np.bool_]] = (~every.float().isfinite()).numpy()
    return result

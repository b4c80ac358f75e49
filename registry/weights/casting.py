"""What is lost when a tensor is converted to another type.

Rules:

* Rounding is what conversion is for: it is no loss, nor is a small number that becomes zero.
* A finite number that becomes infinite, or stops at the type's largest one, is a loss; so is an infinity in a type that
  has none. Numbers that are infinite or NaN already, and stay so, are none.
* Whole numbers, booleans and bare exponents (float8_e8m0fnu) do not round: what they do not hold exactly is a loss.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Final, NamedTuple

import torch
from torch import Tensor

_EXPONENTS: Final = getattr(torch, "float8_e8m0fnu", None)


class Loss(NamedTuple):
    """What a conversion would do to a tensor."""

    text: str
    infinite: bool
    """Whether it is no more than that finite numbers become infinite."""


def loss(source: Tensor, dtype: torch.dtype) -> Loss | None:
    """Return what converting a tensor on the CPU would lose, or None."""
    dtype = torch.float32 if dtype == torch.complex64 else dtype
    if not source.numel() or source.dtype in (dtype, torch.complex64):
        return None
    with torch.inference_mode(False), torch.no_grad():
        if not source.is_floating_point() and dtype != _EXPONENTS:
            return _whole(source, dtype)
        # Torch compares no 8-bit floats.
        values = source.float() if source.element_size() == 1 else source
        if dtype.is_floating_point and dtype != _EXPONENTS:
            return _beyond(values, dtype)
        return _inexact(values.double(), dtype)


def _whole(source: Tensor, dtype: torch.dtype) -> Loss | None:
    # By NumPy, since torch compares no large unsigned integers.
    array = source.numpy()
    low, high = int(array.min()), int(array.max())
    if dtype.is_floating_point:
        lost = [end for end in (low, high) if abs(end) >= _limit(dtype)]
    else:
        least, most = _bounds(dtype)
        lost = [end for end in (low, high) if not least <= end <= most]
    return Loss(f"holds {lost[0]}, which {dtype} does not", _has_infinity(dtype)) if lost else None


def _beyond(values: Tensor, dtype: torch.dtype) -> Loss | None:
    limit = _limit(dtype)
    low, high = (end.item() for end in torch.aminmax(values))
    if -limit < low and high < limit:
        return None
    if not _has_infinity(dtype) and bool(values.isinf().any()):
        return Loss(f"holds infinity, which {dtype} does not have", False)
    beyond = values[values.isfinite() & (values.double().abs() >= limit)]
    if not beyond.numel():
        return None
    shown = f"holds {beyond[0].item():g}, and the largest number of {dtype} is {torch.finfo(dtype).max:g}"
    return Loss(shown, _has_infinity(dtype))


def _inexact(values: Tensor, dtype: torch.dtype) -> Loss | None:
    if dtype == _EXPONENTS:
        exact = values.to(dtype).double() == values
    else:
        least, most = _bounds(dtype)
        exact = (values.trunc() == values) & (values >= least) & (values < float(most) + 1)
    lost = values[~exact]
    return Loss(f"holds {lost[0].item():g}, which {dtype} does not", False) if lost.numel() else None


def _bounds(dtype: torch.dtype) -> tuple[int, int]:
    if dtype == torch.bool:
        return 0, 1
    about = torch.iinfo(dtype)
    return about.min, about.max


@cache
def _limit(dtype: torch.dtype) -> float:
    """Return from where on a number does not round to the type's largest one any more."""
    about = torch.finfo(dtype)
    # Half of the step between neighbours up there.
    return float(about.max + 2.0 ** (math.frexp(about.max)[1] - 1) * about.eps / 2)


@cache
def _has_infinity(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and bool(torch.tensor(math.inf).to(dtype).float().isinf())

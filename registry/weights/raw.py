"""Bytes moved and compared by address, past torch.

Torch copies with several threads from a few ten thousand elements on, and these then spin for milliseconds on the
cores that workers are waiting for. For a small tensor its own cost is several times that of the bytes.

Rules: only plain memory of this process comes here, and whoever gives an address keeps its owner alive.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import Final

from torch import Tensor

SMALL_BYTES: Final = 64 << 10
"""Up to here a move keeps the interpreter lock, which is quicker than giving it up and taking it again."""

_free_move: Final = ctypes.CDLL(None).memmove
_held_move: Final = ctypes.PyDLL(None).memmove
_compare: Final = ctypes.CDLL(None).memcmp
for _function, _result in ((_free_move, None), (_held_move, None), (_compare, ctypes.c_int)):
    _function.argtypes, _function.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t], _result


def is_raw(tensor: Tensor) -> bool:
    """Tell whether a tensor's memory is its content, element by element."""
    return bool(
        tensor.device.type == "cpu"
        and tensor.is_contiguous()
        # Complex ones may become lazily conjugated without anything else about them changing.
        and not tensor.is_complex()
        and not tensor.is_neg()
    )


def move(moves: Iterable[tuple[int, int, int]]) -> None:
    """Copy bytes, each move given as (to, from, how many)."""
    for target, source, nbytes in moves:
        if nbytes <= SMALL_BYTES:
            _held_move(target, source, nbytes)
        else:
            _free_move(target, source, nbytes)


def equal(one: int, other: int, nbytes: int) -> bool:
    """Compare bytes at two addresses."""
    return bool(_compare(one, other, nbytes) == 0)

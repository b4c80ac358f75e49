"""Raw memory as NumPy arrays: page-aligned buffers, and read-only arrays that torch may look at."""

from __future__ import annotations

import mmap
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from weightledger.registry.errors import StorageError

Bytes: TypeAlias = NDArray[np.uint8]


def page_buffer(nbytes: int) -> Bytes:
    """Allocate zeroed, private, page-aligned memory that the system may back with huge pages."""
    if nbytes == 0:
        return np.empty(0, np.uint8)
    try:
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise StorageError(f"{nbytes} bytes of memory cannot be had: {error}") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # Fewer page faults: the first fill of a fresh buffer is twice as quick.
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)


def as_bytes(buffer: bytes | bytearray | memoryview | NDArray[Any]) -> Bytes:
    """Look at a contiguous buffer as bytes, without copying it."""
    if isinstance(buffer, np.ndarray):
        return buffer.reshape(-1).view(np.uint8)
    return np.frombuffer(buffer, np.uint8)


def writable_view(array: NDArray[Any]) -> NDArray[Any]:
    """Return an array over the same memory that claims to be writable, since torch warns of any other.

    Nothing may be written through it unless the memory is known to be writable: pages of an object store are not.
    """
    if array.flags.writeable:
        return array
    return np.asarray(_Unlocked(array))


class _Unlocked:
    """Hands the memory of an array on, and keeps the array alive for as long as it is used."""

    def __init__(self, array: NDArray[Any]) -> None:
        interface = dict(array.__array_interface__)
        interface["data"] = (interface["data"][0], False)
        self.__array_interface__ = interface
        self._owner = array

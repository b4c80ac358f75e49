"""Hashes of content: what makes two snapshots the same one.

Rules:

* A tensor's hash covers its bytes, dtype and shape, and not its name, so that tied names share one hash.
* A value's hash covers its type and content; the order of a dictionary's keys is no part of it.
* A content digest covers the sorted list of names and hashes. It never covers container, key order, strides, device,
  file bytes or metadata.
* Each kind of hash has its own domain, and each list is written as JSON, so that no crafted name, shape or value can
  pass for another.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Final

from blake3 import blake3

from weightledger.registry.values import Json, canonical, dumps

PREFIX: Final = "blake3:"
HASH_CHARS: Final = 64

# A thread pool is built for each hasher that asks for one; below this size it costs more than it gains.
_THREADED_BYTES: Final = 4 << 20


def tensor_hash(dtype: str, shape: Sequence[int], data: bytes | memoryview, *, threads: int = 1) -> str:
    """Hash one tensor.

    Args:
        dtype: Its safetensors code, for example `"F32"`.
        shape: Its sizes.
        data: Its elements, row-major, little-endian.
        threads: How many threads may work on a large one.

    Returns:
        64 hexadecimal digits.
    """
    return tensor_hashes([(dtype, tuple(shape), memoryview(data))], threads=threads)[0]


def tensor_hashes(
    tensors: Iterable[tuple[str, tuple[int, ...], memoryview]], *, threads: int = 1
) -> list[str]:
    """Hash many tensors, each given as in `tensor_hash`; a loop of its own, since a model may have ten thousand."""
    found = []
    for dtype, shape, view in tensors:
        if threads > 1 and view.nbytes >= _THREADED_BYTES:
            hasher = blake3(view, max_threads=threads)
        else:
            hasher = blake3(view)
        # The description comes last, with its length at the very end: the data then starts at blake3's first chunk and
        # is hashed in full-width strides, and the end still says where the data stopped.
        hasher.update(_about(dtype, shape))
        found.append(hasher.hexdigest())
    return found


@lru_cache(maxsize=4096)
def _about(dtype: str, shape: tuple[int, ...]) -> bytes:
    about = dumps(["tensor", dtype, list(shape)]).encode("ascii")
    return about + len(about).to_bytes(8, "little")


def value_hash(encoded: Json) -> str:
    """Hash one non-tensor value, as `values.encode` gave it; returns 64 hexadecimal digits."""
    about = b"value:" + canonical(encoded).encode("ascii")
    return blake3(about + len(about).to_bytes(8, "little")).hexdigest()


def content_digest(hashes: Mapping[str, str]) -> str:
    """Combine the hashes of all names (tied ones each under its own) into `"blake3:<64 hex>"`."""
    listing = dumps(["content", sorted(hashes.items())])
    return PREFIX + blake3(listing.encode("ascii")).hexdigest()

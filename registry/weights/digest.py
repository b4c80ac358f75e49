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

import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Final

from blake3 import blake3

from weightledger.registry.values import Json, canonical, dumps

PREFIX: Final = "blake3:"
HASH_CHARS: Final = 64

_Place = tuple[str, tuple[int, ...], memoryview]
_THREADED_BYTES: Final = 4 << 20
_MANY_THREADS_BYTES: Final = 64 << 20


def threads_for(nbytes: int) -> int:
    """Return how many threads should hash so many bytes: several where they gain more than they take from others."""
    return min(4, os.cpu_count() or 1) if nbytes >= _MANY_THREADS_BYTES else 1


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


def tensor_hashes(tensors: Iterable[_Place], *, threads: int = 1) -> list[str]:
    """Hash many tensors, each given as in `tensor_hash`.

    Args:
        tensors: Type, shape and bytes of each.
        threads: How many threads may work on them.

    Returns:
        64 hexadecimal digits for each, in order.
    """
    if threads == 1:
        return _hash_all(tensors, 1)
    every = list(tensors)
    fair = sum(view.nbytes for _, _, view in every) // threads
    # One that is more than a thread's share has all threads to itself; the others are shared out whole, since a pool
    # that blake3 makes for a single hash costs more than it gains.
    large = [at for at, (_, _, view) in enumerate(every) if view.nbytes > max(fair, _THREADED_BYTES)]
    found = dict(zip(large, _hash_all([every[at] for at in large], threads), strict=True))
    shares = _shares([at for at in range(len(every)) if at not in found], every, threads)
    with ThreadPoolExecutor(threads) as pool:
        try:
            hashed = list(pool.map(lambda share: _hash_all([every[at] for at in share], 1), shares))
        except RuntimeError:
            # The interpreter is ending, and takes no more work for threads.
            hashed = [_hash_all([every[at] for at in share], 1) for share in shares]
    for share, hashes in zip(shares, hashed, strict=True):
        found.update(zip(share, hashes, strict=True))
    return [found[at] for at in range(len(every))]


def _shares(chosen: Sequence[int], every: Sequence[_Place], count: int) -> list[list[int]]:
    """Cut a list of positions into so many runs of about as many bytes."""
    whole = sum(every[at][2].nbytes for at in chosen)
    shares: list[list[int]] = [[] for _ in range(count)]
    done = 0
    for at in chosen:
        shares[min(count - 1, done * count // max(1, whole))].append(at)
        done += every[at][2].nbytes
    return shares


def _hash_all(tensors: Iterable[_Place], threads: int) -> list[str]:
    # A loop of its own, since a model may have ten thousand.
    found = []
    for dtype, shape, view in tensors:
        hasher = blake3(view) if threads == 1 else blake3(view, max_threads=threads)
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

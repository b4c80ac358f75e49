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
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Final

from blake3 import blake3

from weightledger.registry.values import Json, canonical, dumps
from weightledger.registry.weights.listing import Listing, pairs

PREFIX: Final = "blake3:"
HASH_CHARS: Final = 64

_Place = tuple[str, tuple[int, ...], memoryview]
_THREADED_BYTES: Final = 4 << 20
_MANY_THREADS_BYTES: Final = 64 << 20
_ARRIVING_BYTES: Final = 1 << 20


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
    every = list(tensors)
    return row_hashes([view for _, _, view in every], [about(*place[:2]) for place in every], threads=threads)


def row_hashes(rows: Sequence[memoryview], abouts: Sequence[bytes], *, threads: int = 1) -> list[str]:
    """Hash many tensors, as `tensor_hashes` does, with what `about` says of each."""
    if threads == 1:
        return _hash_all(zip(rows, abouts, strict=True), 1)
    every = list(zip(rows, abouts, strict=True))
    fair = sum(view.nbytes for view in rows) // threads
    # One that is more than a thread's share has all threads to itself; the others are shared out whole, since a pool
    # that blake3 makes for a single hash costs more than it gains.
    large = [at for at, view in enumerate(rows) if view.nbytes > max(fair, _THREADED_BYTES)]
    found = dict(zip(large, _hash_all([every[at] for at in large], threads), strict=True))
    shares = _shares([at for at in range(len(every)) if at not in found], rows, threads)
    with ThreadPoolExecutor(threads) as pool:
        try:
            hashed = list(pool.map(lambda share: _hash_all([every[at] for at in share], 1), shares))
        except RuntimeError:
            # The interpreter is ending, and takes no more work for threads.
            hashed = [_hash_all([every[at] for at in share], 1) for share in shares]
    for share, hashes in zip(shares, hashed, strict=True):
        found.update(zip(share, hashes, strict=True))
    return [found[at] for at in range(len(every))]


def arriving_hashes(
    rows: Sequence[memoryview],
    abouts: Sequence[bytes],
    starts: Sequence[int],
    wait: Callable[[int], None],
) -> list[str]:
    """Hash many tensors, as `row_hashes` does, while their bytes are on their way.

    Args:
        starts: Where each begins, in bytes from the beginning of what arrives.
        wait: Waits until the first so many bytes are there.
    """
    hasher = blake3()
    found = []
    for view, described, start in zip(rows, abouts, starts, strict=True):
        hasher.reset()
        for at in range(0, view.nbytes, _ARRIVING_BYTES):
            part = view[at : at + _ARRIVING_BYTES]
            wait(start + at + part.nbytes)
            hasher.update(part)
        hasher.update(described)
        found.append(hasher.digest().hex())
    return found


def _shares(chosen: Sequence[int], rows: Sequence[memoryview], count: int) -> list[list[int]]:
    """Cut a list of positions into so many runs of about as many bytes."""
    whole = sum(rows[at].nbytes for at in chosen)
    shares: list[list[int]] = [[] for _ in range(count)]
    done = 0
    for at in chosen:
        shares[min(count - 1, done * count // max(1, whole))].append(at)
        done += rows[at].nbytes
    return shares


def _hash_all(tensors: Iterable[tuple[memoryview, bytes]], threads: int) -> list[str]:
    # One hasher for all: a model may have ten thousand tensors, and making one takes as long as hashing some kilobytes.
    hasher = blake3() if threads == 1 else blake3(max_threads=threads)
    reset, update, digest = hasher.reset, hasher.update, hasher.digest
    found = []
    for view, described in tensors:
        reset()
        update(view)
        # The description comes last, with its length at the very end: the data then starts at blake3's first chunk and
        # is hashed in full-width strides, and the end still says where the data stopped.
        update(described)
        found.append(digest().hex())
    return found


@lru_cache(maxsize=4096)
def about(dtype: str, shape: tuple[int, ...]) -> bytes:
    """Return what a tensor's hash covers beside its bytes."""
    text = dumps(["tensor", dtype, list(shape)]).encode("ascii")
    return text + len(text).to_bytes(8, "little")


def value_hash(encoded: Json) -> str:
    """Hash one non-tensor value, as `values.encode` gave it; returns 64 hexadecimal digits."""
    about = b"value:" + canonical(encoded).encode("ascii")
    return blake3(about + len(about).to_bytes(8, "little")).hexdigest()


def content_digest(hashes: Mapping[str, str], listing: Listing | None = None) -> str:
    """Combine the hashes of all names into `"blake3:<64 hex>"`.

    Args:
        hashes: The hash of each name, of tied ones too, as the functions above return them.
        listing: What `listing.pairs` made of the names, when it is at hand.
    """
    text = (pairs(hashes) if listing is None else listing).text(hashes)
    return PREFIX + blake3(f'["content",[{text}]]'.encode("ascii")).hexdigest()

"""Which kind of store a path or a URL means."""

from __future__ import annotations

import os

from weightledger.registry import arguments
from weightledger.registry.store.cache import DEFAULT_BYTES, CachedSnapshots
from weightledger.registry.store.local import LocalSnapshots
from weightledger.registry.store.objects import SCHEMES, ObjectSnapshots
from weightledger.registry.store.snapshots import SnapshotStore


def open_snapshots(
    place: str | os.PathLike[str],
    *,
    cache: str | os.PathLike[str] | None = None,
    cache_bytes: int = DEFAULT_BYTES,
) -> SnapshotStore:
    """Make the store of snapshots that is in a folder or in a bucket. Nothing is asked of it, or made there, yet.

    Args:
        place: The path of a folder, or a URL: `s3://bucket/prefix`, `gs://…`, `az://container/prefix`, `memory://name`.
        cache: A folder for copies of what is read from a bucket.
        cache_bytes: What the copies may take up.

    Raises:
        TypeError: It is neither text nor a path.
        ValueError: The URL is of another kind or form, or holds credentials (which are not shown); or there is a cache
            for a folder, which needs none.
    """
    if not is_url(place):
        if cache is not None:
            raise ValueError(
                "expected no cache, since the snapshots are in a folder; leave it out, or name a bucket's URL"
            )
        return LocalSnapshots(arguments.path("snapshots", place))
    scheme = str(place).partition("://")[0]
    if scheme not in SCHEMES:
        known = ", ".join(f"{name}://" for name in SCHEMES)
        raise ValueError(
            f"expected the path of a folder or a URL that begins with one of {known} as the place of snapshots, found "
            f"one that begins with {arguments.shown(scheme + '://')}"
            + ("; leave out file://" if scheme == "file" else "")
        )
    store = ObjectSnapshots(str(place))
    if cache is None:
        return store
    return CachedSnapshots(store, arguments.path("a cache", cache), max_bytes=cache_bytes)


def is_url(place: object) -> bool:
    """Tell whether a place is named by a URL, and not by a path."""
    return isinstance(place, str) and "://" in place

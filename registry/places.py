"""Where a registry is: the one place that chooses its database, its locks and its store of snapshots.

A folder holds all three: `registry.db`, `locks/` and `snapshots/`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from weightledger.registry import arguments
from weightledger.registry.database import Database
from weightledger.registry.database.sqlite import SqliteDatabase
from weightledger.registry.locks import Locks
from weightledger.registry.locks.folder import FolderLocks
from weightledger.registry.log import schema
from weightledger.registry.store.local import LocalSnapshots
from weightledger.registry.store.snapshots import SnapshotStore

_DATABASE: Final = "registry.db"
_OWN_FILES: Final = (
    _DATABASE,
    *(f"{_DATABASE}-{end}" for end in ("wal", "shm", "journal")),
    "snapshots",
    "locks",
)


@dataclass(frozen=True)
class Place:
    """What a registry is made of."""

    location: Path
    """The folder, absolute."""
    uuid: str
    """The registry's identity, 32 hexadecimal digits."""
    database: Database
    locks: Locks
    snapshots: SnapshotStore

    def owns(self, target: Path) -> bool:
        """Tell whether a file is one of the registry's own, without which it is lost."""
        inside = Path(os.path.relpath(os.path.realpath(target), os.path.realpath(self.location)))
        return bool(inside.parts) and inside.parts[0] in _OWN_FILES


def open_place(location: str | os.PathLike[str], *, create: bool, migrate: bool) -> Place:
    """Find a registry's parts, and bring its database to this library's schema.

    Args:
        location: As in `Registry.open`.
        create: Make what is missing.
        migrate: Upgrade an older database.

    Raises:
        NotFoundError: Nothing is there and `create` is off.
        ValueError: The location is no folder's path.
        SchemaError: The database is newer than the library, or older and `migrate` is off.
        CorruptionError: The database is damaged, is no database, or is gone while its snapshots are there.
    """
    folder = check_location(location)
    maker = SqliteDatabase(folder / _DATABASE)
    try:
        uuid = schema.ensure(maker, create=create, migrate=migrate)
    finally:
        maker.close()
    # Made anew after its folder: made before, it would take itself for one that cannot write.
    database = SqliteDatabase(folder / _DATABASE)
    database.tune()
    return Place(folder, uuid, database, FolderLocks(folder), LocalSnapshots(folder / "snapshots"))


def check_location(location: object) -> Path:
    """Return the absolute path of a registry's folder; refuse what would be taken for one of a strange name.

    Raises:
        TypeError: It is no path.
        ValueError: It is a URL, or no file can be called like this.
        StorageError: It is relative, and the working directory is gone.
    """
    if isinstance(location, str) and "://" in location:
        raise ValueError(
            f"expected the path of a folder as a registry's location, found {location!r}; "
            "databases and object stores with a URL are not supported yet"
        )
    return arguments.path("a registry's location", location)


def locks_of(location: str) -> Locks:
    """Return the locks of another registry, which need not be there: a copy has locks of its own."""
    return FolderLocks(Path(location))

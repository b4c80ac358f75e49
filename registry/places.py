"""Where a registry is: the one place that chooses its database, its locks and its store of snapshots.

A folder holds all three: `registry.db`, `locks/` and `snapshots/`. With a PostgreSQL URL, record and locks are on the
server. Snapshots may be in another folder or in a bucket, which is noted in the database.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

from weightledger.registry import arguments
from weightledger.registry.database import Database
from weightledger.registry.database.sqlite import SqliteDatabase
from weightledger.registry.errors import NotFoundError, StorageError
from weightledger.registry.locks import Locks
from weightledger.registry.locks.folder import FolderLocks
from weightledger.registry.log import schema
from weightledger.registry.store.opening import is_url, open_snapshots
from weightledger.registry.store.snapshots import SnapshotStore

if TYPE_CHECKING:
    from weightledger.registry.database.postgres import PostgresDatabase

_DATABASE: Final = "registry.db"
_SNAPSHOTS: Final = "snapshots"
_OWN_FILES: Final = (
    _DATABASE,
    *(f"{_DATABASE}-{end}" for end in ("wal", "shm", "journal")),
    "snapshots",
    "locks",
)
_SERVERS: Final = ("postgresql", "postgresql+psycopg", "postgres")
"""Schemes of a PostgreSQL server's URL."""
_UNNOTED: Final = "memory://"
"""Kept by nobody: for tests."""
_Where: TypeAlias = str | os.PathLike[str] | None


@dataclass(frozen=True)
class Place:
    """What a registry is made of."""

    location: Path | str
    """The folder, absolute; of a server, its URL without a password."""
    uuid: str
    """The registry's identity, 32 hexadecimal digits."""
    database: Database
    locks: Locks
    snapshots: SnapshotStore
    address: str = field(repr=False)
    """What opens it again, in another process; it may hold a password."""
    folders: tuple[Path, ...] = ()
    """Where its own files lie."""

    def owns(self, target: Path) -> bool:
        """Tell whether a file is one of the registry's own, without which it is lost."""
        return any(_is_inside(target, folder) for folder in self.folders)


def _is_inside(target: Path, folder: Path) -> bool:
    inside = Path(os.path.relpath(os.path.realpath(target), os.path.realpath(folder)))
    return not inside.parts or inside.parts[0] != ".."


def open_place(
    location: str | os.PathLike[str],
    *,
    snapshots: str | os.PathLike[str] | None,
    cache: str | os.PathLike[str] | None,
    create: bool,
    migrate: bool,
) -> Place:
    """Find a registry's parts, and bring its database to this library's schema.

    Args:
        location: As in `Registry.open`.
        snapshots: As in `Registry.open`.
        cache: As in `Registry.open`.
        create: Make what is missing.
        migrate: Upgrade an older database.

    Raises:
        NotFoundError: Nothing is there and `create` is off, or nobody said where the snapshots are.
        ValueError: The location is neither a folder's path nor a server's URL.
        SchemaError: The database is newer than the library, or older and `migrate` is off.
        CorruptionError: The database is damaged, is no database, or is gone while its snapshots are there.
        StorageError: The snapshots that were noted, or are named here, belong to another registry.
    """
    found = check_location(location)
    if isinstance(found, str):
        return _on_server(found, snapshots, cache, create=create, migrate=migrate)
    return _in_folder(found, snapshots, cache, create=create, migrate=migrate)


def _in_folder(folder: Path, snapshots: _Where, cache: _Where, *, create: bool, migrate: bool) -> Place:
    maker = SqliteDatabase(folder / _DATABASE)
    try:
        uuid = schema.ensure(maker, create=create, migrate=migrate)
    finally:
        maker.close()
    # Made anew after its folder: made before, it would take itself for one that cannot write.
    database = SqliteDatabase(folder / _DATABASE)
    database.tune()
    try:
        store, elsewhere = _chosen_store(database, uuid, snapshots, cache, folder)
    except BaseException:
        database.close()
        raise
    own = tuple(folder / name for name in _OWN_FILES)
    return Place(folder, uuid, database, FolderLocks(folder), store, str(folder), own + elsewhere)


def check_location(location: object) -> Path | str:
    """Return the absolute path of a registry's folder, or a server's URL; refuse what is neither.

    Raises:
        TypeError: It is no path.
        ValueError: It is a URL of another kind, or no file can be called like this.
        StorageError: It is relative, and the working directory is gone.
    """
    if isinstance(location, str) and "://" in location:
        scheme = location.partition("://")[0]
        if scheme in _SERVERS:
            return location
        raise ValueError(
            "expected the path of a folder, or a URL that begins with postgresql+psycopg://, as a registry's location, "
            f"found one that begins with {scheme}://; snapshots= is where an object store goes"
        )
    return arguments.path("a registry's location", location)


def _on_server(url: str, snapshots: _Where, cache: _Where, *, create: bool, migrate: bool) -> Place:
    database = _connect(url)
    try:
        # Others may be at work on the same server with another version of the library.
        uuid = schema.ensure(database, create=create, migrate=migrate and not database.exists())
        locks = _server_locks(database, uuid)
        store, folders = _chosen_store(database, uuid, snapshots, cache, None)
    except BaseException:
        database.close()
        raise
    return Place(database.name, uuid, database, locks, store, url, folders)


def _connect(url: str) -> PostgresDatabase:
    try:
        from weightledger.registry.database.postgres import PostgresDatabase
    except ImportError as error:
        raise ValueError(
            "expected psycopg, the driver for PostgreSQL, to be installed, but it is missing "
            f"({error}); pip install 'weightledger[postgres]'"
        ) from None
    return PostgresDatabase(url)


def _server_locks(database: PostgresDatabase, uuid: str) -> Locks:
    from weightledger.registry.locks.postgres import PostgresLocks

    return PostgresLocks(database, uuid)


def upgrade(location: str | os.PathLike[str]) -> Path | str:
    """Bring a registry's database to this library's schema, and return where it is, without a password.

    Raises:
        NotFoundError: Nothing is there.
        SchemaError: The database is newer than the library.
    """
    found = check_location(location)
    database: Database = _connect(found) if isinstance(found, str) else SqliteDatabase(found / _DATABASE)
    try:
        schema.ensure(database, create=False, migrate=True)
    finally:
        database.close()
    return database.name if isinstance(found, str) else found


# ---------------------------------------------------------------------- where the snapshots are


def _chosen_store(
    database: Database, uuid: str, given: _Where, cache: _Where, base: Path | None
) -> tuple[SnapshotStore, tuple[Path, ...]]:
    """Return the store of snapshots, and the folder that it is in, if it is in one.

    A place bears the identity of the registry whose it is. The first one is noted in the database, so that later
    openers need not say it; another one is taken only if it bears that identity already.

    Args:
        base: The folder of a registry in one, where its snapshots are by default.
    """
    noted = schema.noted_snapshots(database)
    if noted is not None and base is not None and not is_url(noted):
        noted = str(base / noted)
    default = None if base is None else str(base / _SNAPSHOTS)
    wanted = given if given is None or is_url(given) else str(arguments.path("snapshots", given))
    address = str(wanted or noted or default or "")
    if not address:
        raise NotFoundError(
            f"{database.name}: nobody said where the snapshots of this registry are. Open it once with "
            "snapshots= and a folder that every machine has, or a bucket"
        )
    store = open_snapshots(address, cache=cache)
    owner: str | None = uuid
    if noted is None and address != default and not schema.has_snapshots(database):
        owner = store.claim(uuid)
        if owner == uuid and not address.startswith(_UNNOTED):
            schema.note_snapshots(database, _as_noted(address, base))
    elif address != default:
        owner = store.owner()
    if owner != uuid:
        whose = "no registry" if owner is None else f"the registry {owner}"
        raise StorageError(
            f"{address}: expected the snapshots of the registry {uuid} ({database.name}), found those of {whose}. "
            "Nothing was changed. Check snapshots=, and whether that place is mounted here"
        )
    return store, () if is_url(address) else (Path(address),)


def _as_noted(address: str, base: Path | None) -> str:
    """Return a place as it is noted: relative where it moves with the registry's folder."""
    if base is None or is_url(address) or not _is_inside(Path(address), base):
        return address
    return os.path.relpath(address, base)


def is_alive_at(location: str, run: str) -> bool:
    """Tell whether a run of another registry lives: a copy of a folder has locks of its own.

    Of another server nobody here knows the password, so that its runs count as gone.
    """
    return "://" not in location and FolderLocks(Path(location)).alive(run)

"""The state of the database: made, checked and upgraded by its migrations, and by nothing else.

Rules it keeps:
- A database is at `HEAD`, or nobody reads or writes it. The common open costs two small reads and imports no Alembic.
- Making and upgrading happen in one transaction each, under a lock that dies with its holder: a process killed in
  the middle leaves what was there before.
- Nothing at all is written to a database that is newer, foreign or damaged.
- An upgrade loses no row: tables are counted before and after, and references checked.
- What Alembic says of its work stays out of the host's log; its warnings do not.
"""

from __future__ import annotations

import logging
import os
import threading
import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import Connection, Engine, Select, String, column, func, insert, select, table

from weightledger.registry import files
from weightledger.registry.errors import CorruptionError, InUseError, NotFoundError, SchemaError
from weightledger.registry.log import engine as database
from weightledger.registry.log.models import About
from weightledger.registry.log.runs import file_lock

if TYPE_CHECKING:
    from alembic.config import Config

HEAD = "0002"
LOCK_SECONDS = 300.0
SCRIPTS = "weightledger.migrations:"
_REVISION: Select[str] = select(column("version_num", String)).select_from(table("alembic_version"))

_TALKERS = ("alembic.runtime.plugins", "alembic.runtime.migration")
"""Loggers that Alembic tells its progress to."""

_migrating = threading.Lock()  # Alembic keeps the migration at work in a global


def _new_thread_lock() -> None:
    global _migrating
    _migrating = threading.Lock()


os.register_at_fork(after_in_child=_new_thread_lock)


def ensure(target: Engine | Path, *, create: bool, migrate: bool) -> str:
    """Bring a registry's database to the state that this version of the library uses.

    All or nothing: on error, and when the process is killed, the database stays as it was.

    Args:
        target: The engine, or the path, of the database file.

        create: Make a missing database, and complete an empty one.

        migrate: Upgrade an older one.

    Returns:
        The registry's identity, 32 hexadecimal digits.

    Raises:
        NotFoundError: There is no database and `create` is off.

        SchemaError: It was written by a newer version of the library, by another program, or by an older version
            and `migrate` is off.

        CorruptionError: The file is damaged, or no database, or lost while its snapshots are there.

        InUseError: Another process is making or upgrading it for longer than `LOCK_SECONDS`.
    """
    if isinstance(target, Path):
        engine = database.open_engine(target)
        try:
            return ensure(engine, create=create, migrate=migrate)
        finally:
            engine.dispose()
    engine = target
    path = database.database_path(engine)
    identity = _identity(engine) if files.is_there(path) else None
    if identity is None:
        _refuse(engine, create=create, migrate=migrate)
        _make_folder(path.parent)
        with _alone(path):
            # Somebody else may have done it since the first look.
            identity = _identity(engine) if files.is_there(path) else None
            if identity is None:
                if not files.is_there(path) or revision(engine) is None:
                    _refuse_lost(path)
                _make_file(path)
                _refuse(engine, create=create, migrate=migrate)
                identity = _upgrade(engine)
            database.use_write_ahead_log(engine)
    else:
        database.use_write_ahead_log(engine)
    return identity


def revision(engine: Engine) -> str | None:
    """Return the revision that a database is at; None for one without tables.

    Raises:
        NotFoundError: There is no such file.

        SchemaError: The database belongs to another program.
    """
    with database.reading(engine) as connection:
        tables = database.table_names(connection)
        found = connection.execute(_REVISION).scalars().all() if "alembic_version" in tables else []
    if len(found) == 1 and ("about" in tables or found[0] != HEAD):
        return str(found[0])
    if tables - {"alembic_version"}:
        raise SchemaError(
            f"{database.database_path(engine)}: expected a registry's database, found one of another program, with "
            f"the tables {', '.join(sorted(tables))}. Nothing was written. Choose another folder."
        )
    return None


def alembic_config(connection: Connection | None = None) -> Config:
    """Return the configuration with which Alembic's commands work on an open connection.

    Alembic itself begins and commits nothing there: the transaction is the caller's.
    """
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", SCRIPTS)
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = connection
    return config


def _identity(engine: Engine) -> str | None:
    """Return the identity of a database that is ready for use, else None."""
    if revision(engine) != HEAD:
        return None
    with database.reading(engine) as connection:
        return connection.execute(select(About.uuid)).scalar()


def _refuse(engine: Engine, *, create: bool, migrate: bool) -> None:
    """Raise unless what is missing may be made and what is old may be upgraded."""
    path = database.database_path(engine)
    if not files.is_there(path):
        if not create:
            raise NotFoundError(
                f"{path}: expected a registry's database, found no such file. Check the path, or make a new registry "
                "with `Registry.open(...)` or `weightledger publish`."
            )
        return
    found = revision(engine)
    if found is None or found == HEAD:
        if not create:
            raise NotFoundError(
                f"{path}: expected a registry's database, found an empty one that was never completed. "
                "`Registry.open(...)` or `weightledger publish` completes it."
            )
        return
    if found not in _known_revisions():
        raise SchemaError(
            f"{path}: this registry was written by a newer version of the library: expected revision {HEAD} or an "
            f"older one, found {found}. Nothing was written. Upgrade weightledger."
        )
    if not migrate:
        raise SchemaError(
            f"{path}: expected revision {HEAD}, found the older {found}. Nothing was written. "
            "Run `weightledger upgrade` on it first."
        )


def _refuse_lost(path: Path) -> None:
    """Raise if there is no log, but what it told of: a new one would begin at version 1 again."""
    snapshots = path.parent / "snapshots"
    with _refusals(path):
        count = sum(1 for _ in snapshots.glob("*.safetensors")) if snapshots.is_dir() else 0
    if count:
        raise CorruptionError(
            f"{path}: expected the log of the {count} snapshot files beside it, found "
            f"{'an empty file' if files.is_there(path) else 'no file'}. Nothing was written. "
            "Put the database back from a backup, or choose another folder."
        )


def _known_revisions() -> set[str]:
    with _quietly():
        from alembic.script import ScriptDirectory

    return {script.revision for script in ScriptDirectory.from_config(alembic_config()).walk_revisions()}


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    lock = _migrating
    if not lock.acquire(timeout=LOCK_SECONDS):
        raise InUseError(
            f"{path}: another thread of this process is upgrading a registry for {LOCK_SECONDS:g} s."
        )
    try:
        with file_lock(path.parent / "locks" / "schema", what=f"the schema of {path}", timeout=LOCK_SECONDS):
            yield
    finally:
        lock.release()


def _make_folder(folder: Path) -> None:
    with _refusals(folder):
        missing = [each for each in (folder, *folder.parents) if not each.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        for each in missing:
            files.sync_folder(each.parent)


def _make_file(path: Path) -> None:
    with _refusals(path):
        os.close(files.open_regular(path, os.O_WRONLY | os.O_CREAT))
        files.sync_folder(path.parent)


def _refusals(path: Path) -> AbstractContextManager[None]:
    return files.refusals(
        f"{path}: no registry can be made here",
        "Mend the permissions of the folder, or choose another one.",
    )


@contextmanager
def _quietly() -> Iterator[None]:
    """Keep what Alembic tells of its progress in this thread out of the log; levels and handlers stay the host's."""
    thread = threading.get_ident()

    def is_to_tell(record: logging.LogRecord) -> bool:
        return record.thread != thread or record.levelno >= logging.WARNING

    talkers = [logging.getLogger(name) for name in _TALKERS]
    for talker in talkers:
        talker.addFilter(is_to_tell)
    try:
        yield
    finally:
        for talker in talkers:
            talker.removeFilter(is_to_tell)


def _upgrade(engine: Engine) -> str:
    with _quietly():
        return _upgrade_aloud(engine)


def _upgrade_aloud(engine: Engine) -> str:
    from alembic import command

    with database.rebuilding(engine) as connection:
        before = _row_counts(connection)
        command.upgrade(alembic_config(connection), "head")
        after = _row_counts(connection)
        lost = [
            f"{name} ({rows} → {after[name]})"
            for name, rows in before.items()
            if after.get(name, rows) < rows
        ]
        if lost:
            raise SchemaError(
                f"{database.database_path(engine)}: the upgrade to {HEAD} would have lost rows of {', '.join(lost)}; "
                "it was undone. Keep using the older version of the library and report this."
            )
        identity = connection.execute(select(About.uuid)).scalar()
        if identity is None:
            identity = uuid.uuid4().hex
            connection.execute(insert(About).values(uuid=identity, created_at=datetime.now(UTC)))
    return identity


def _row_counts(connection: Connection) -> dict[str, int]:
    return {
        name: connection.execute(select(func.count()).select_from(table(name))).scalar_one()
        for name in database.table_names(connection) - {"alembic_version"}
    }

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
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from sqlalchemy import Connection, Select, String, column, func, insert, select, table, update

from weightledger.registry.database import Database
from weightledger.registry.errors import InUseError, NotFoundError, SchemaError
from weightledger.registry.log.models import About, Snapshot

if TYPE_CHECKING:
    from alembic.config import Config

HEAD = "0003"
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


def ensure(database: Database, *, create: bool, migrate: bool) -> str:
    """Bring a registry's database to the state that this version of the library uses.

    All or nothing: on error, and when the process is killed, the database stays as it was.

    Args:
        database: The database, which need not be there.
        create: Make a missing database, and complete an empty one.
        migrate: Upgrade an older one.

    Returns:
        The registry's identity, 32 hexadecimal digits.

    Raises:
        NotFoundError: There is no database and `create` is off.
        SchemaError: It was written by a newer version of the library, by another program, or by an older version
            and `migrate` is off.
        CorruptionError: It is damaged, or no database, or lost while its snapshots are there.
        InUseError: Another process is making or upgrading it for longer than `LOCK_SECONDS`.
    """
    identity = _identity(database) if database.exists() else None
    if identity is None:
        _refuse(database, create=create, migrate=migrate)
        with _alone(database):
            # Somebody else may have done it since the first look.
            identity = _identity(database) if database.exists() else None
            if identity is None:
                if not database.exists() or revision(database) is None:
                    database.make()
                _refuse(database, create=create, migrate=migrate)
                identity = _upgrade(database)
            database.tune()  # while nobody else has it open
    else:
        database.tune()
    return identity


def revision(database: Database) -> str | None:
    """Return the revision that a database is at; None for one without tables.

    Raises:
        NotFoundError: There is no such file.

        SchemaError: The database belongs to another program.
    """
    with database.reading() as connection:
        tables = database.table_names(connection)
        found = connection.execute(_REVISION).scalars().all() if "alembic_version" in tables else []
    if len(found) == 1 and ("about" in tables or found[0] != HEAD):
        return str(found[0])
    if tables - {"alembic_version"}:
        raise SchemaError(
            f"{database.name}: expected a registry's database, found one of another program, with "
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


def noted_snapshots(database: Database) -> str | None:
    """Return where a registry's snapshots are, if they are not where its kind has them by itself."""
    with database.reading() as connection:
        return connection.execute(select(About.snapshots)).scalar()


def has_snapshots(database: Database) -> bool:
    """Tell whether a snapshot was ever stored."""
    with database.reading() as connection:
        return connection.execute(select(Snapshot.id).limit(1)).first() is not None


def note_snapshots(database: Database, where: str) -> None:
    """Note where a registry's snapshots are."""
    with database.writing() as connection:
        connection.execute(update(About).values(snapshots=where))


def _identity(database: Database) -> str | None:
    """Return the identity of a database that is ready for use, else None."""
    if revision(database) != HEAD:
        return None
    with database.reading() as connection:
        return connection.execute(select(About.uuid)).scalar()


def _refuse(database: Database, *, create: bool, migrate: bool) -> None:
    """Raise unless what is missing may be made and what is old may be upgraded."""
    path = database.name
    if not database.exists():
        if not create:
            raise NotFoundError(
                f"{path}: expected a registry's database, found no such file. Check the path, or make a new registry "
                "with `Registry.open(...)` or `weightledger publish`."
            )
        return
    found = revision(database)
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


def _known_revisions() -> set[str]:
    with _quietly():
        from alembic.script import ScriptDirectory

    return {script.revision for script in ScriptDirectory.from_config(alembic_config()).walk_revisions()}


@contextmanager
def _alone(database: Database) -> Iterator[None]:
    lock = _migrating
    if not lock.acquire(timeout=LOCK_SECONDS):
        raise InUseError(
            f"{database.name}: another thread of this process is upgrading a registry for {LOCK_SECONDS:g} s."
        )
    try:
        with database.migrating(LOCK_SECONDS):
            yield
    finally:
        lock.release()


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


def _upgrade(database: Database) -> str:
    with _quietly():
        return _upgrade_aloud(database)


def _upgrade_aloud(database: Database) -> str:
    from alembic import command

    with database.rebuilding() as connection:
        before = _row_counts(database, connection)
        command.upgrade(alembic_config(connection), "head")
        after = _row_counts(database, connection)
        lost = [
            f"{name} ({rows} → {after[name]})"
            for name, rows in before.items()
            if after.get(name, rows) < rows
        ]
        if lost:
            raise SchemaError(
                f"{database.name}: the upgrade to {HEAD} would have lost rows of {', '.join(lost)}; "
                "it was undone. Keep using the older version of the library and report this."
            )
        identity = connection.execute(select(About.uuid)).scalar()
        if identity is None:
            identity = uuid.uuid4().hex
            connection.execute(insert(About).values(uuid=identity, created_at=datetime.now(UTC)))
    return identity


def _row_counts(database: Database, connection: Connection) -> dict[str, int]:
    return {
        name: connection.execute(select(func.count()).select_from(table(name))).scalar_one()
        for name in database.table_names(connection) - {"alembic_version"}
    }

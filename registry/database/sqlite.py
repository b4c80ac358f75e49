"""A registry's database as a file of a folder: the one module that knows SQLite.

Rules it keeps:
- A transaction that writes begins with `BEGIN IMMEDIATE`: one that reads first and writes later fails at once with
  "database is locked", whatever the time-out. `reading` and `writing` are the only ways in.
- Opening never makes a file (`make` does, for `schema.ensure`), so a wrong path cannot leave an empty database behind.
  A database is a file: a link is not followed, since locks and snapshots stand beside the name that was given.
- A connection belongs to the process that opened it. After `os.fork` the child opens its own.
- An engine that nobody refers to any more closes its connections; one that was closed makes no new one.
- A transaction begins only on the file that stands under the name. SQLite goes on with one that was deleted or
  replaced, and what it commits there is nobody's to see.
- What the database, SQLAlchemy or a damaged row raises in a transaction leaves through `translate` as an error of this
  library that names the file. Callers check their arguments before they begin one.
"""

from __future__ import annotations

import ctypes
import os
import sqlite3
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote
from weakref import WeakKeyDictionary, WeakSet

from sqlalchemy import (
    URL,
    Connection,
    Engine,
    NullPool,
    PoolProxiedConnection,
    QueuePool,
    create_engine,
    event,
    inspect,
)
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.pool import ConnectionPoolEntry

from weightledger.registry import files
from weightledger.registry.database import OPTION
from weightledger.registry.database.translating import survey, translated
from weightledger.registry.errors import (
    CorruptionError,
    InUseError,
    NotFoundError,
    SchemaError,
    StorageError,
    WeightLedgerError,
)
from weightledger.registry.locks.folder import file_lock

BUSY_SECONDS = 30.0
LONGEST_PATH = 504  # bytes; with its side files SQLite keeps 512
_IMMEDIATE = "weightledger_immediate"
_SIDE_FILES = ("-wal", "-shm", "-journal")


def _nothing() -> None:
    """Check nothing: a file that cannot be written is opened anew by each transaction."""


class JournalWarning(UserWarning):
    """The file system refused SQLite's write-ahead log; the registry works on, with its older rollback journal."""


class _Connection(sqlite3.Connection):
    """Refuses every process but the one that opened it.

    SQLite's locks belong to a process: a forked child that rolls back or closes an inherited connection would undo
    locks and write-ahead state that its parent still relies on.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._owner = os.getpid()
        self.has_log = False
        """Whether the database had its write-ahead log when this connection was made."""
        self.siblings: set[_Connection] = set()
        """The open connections of its engine."""
        self.stuck = False
        """Whether SQLite opened the file for reading alone, since the disk refused more at that moment."""
        self.check_file: Callable[[], None] = _nothing
        """Refuses when another file stands under the name than its engine opened first."""
        _connections.add(self)

    def cursor(self, *args: Any, **kwargs: Any) -> Any:
        self._refuse_strangers()
        return super().cursor(*args, **kwargs)

    def commit(self) -> None:
        self._refuse_strangers()
        super().commit()

    def rollback(self) -> None:
        if self._owner == os.getpid():
            super().rollback()

    def close(self) -> None:
        if self._owner == os.getpid():
            self.siblings.discard(self)
            super().close()

    @contextmanager
    def unsynced(self) -> Iterator[None]:
        """Let transactions that begin and end in here not wait for the disk; only the write-ahead log is safe so."""
        if not self.has_log:
            yield
            return
        self.execute("PRAGMA synchronous=NORMAL")
        try:
            yield
        finally:
            self.execute("PRAGMA synchronous=FULL")

    def _refuse_strangers(self) -> None:
        if self._owner != os.getpid():
            raise StorageError(
                f"This database transaction was begun in process {self._owner}, before the fork that made process "
                f"{os.getpid()}; expected one begun here. Leave the `with` block before forking, or begin anew."
            )


class _Openings:
    """The open connections of one engine. It knows nothing of the engine, so that it can outlive it."""

    def __init__(self) -> None:
        self.connections: set[_Connection] = set()
        self.closed = False
        self.file: tuple[int, int] | None = None
        """Device and inode of the file that was opened first."""

    def check(self, path: Path) -> None:
        if self.closed:
            raise StorageError(
                f"{path}: expected an open registry, but this one was closed; nothing was done. "
                "Open it again with `Registry.open(...)`."
            )

    def check_file(self, path: Path) -> None:
        try:
            found = _identity(path)
        except OSError as error:
            raise StorageError(f"{path} cannot be looked at: {files.reason(error)}") from error
        if self.file is not None and found != self.file:
            raise StorageError(
                f"{path}: expected the file that this registry was opened with, found "
                f"{'no file' if found is None else 'another one'}: it was deleted, moved or replaced. Nothing was "
                "done. Put it back, or open the registry anew with `Registry.open(...)`."
            )

    def close_idle(self) -> None:
        for connection in list(self.connections):
            # At the interpreter's end a daemon thread may be amid a transaction.
            if not connection.in_transaction:
                connection.close()


_connections: WeakSet[_Connection] = WeakSet()
_engines: WeakKeyDictionary[Engine, _Openings] = WeakKeyDictionary()


def _forget_inherited_connections() -> None:
    for connection in list(_connections):
        # Even freeing the object would close the database, so the child keeps each one until it ends.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(connection))
    _connections.clear()
    for engine, openings in list(_engines.items()):
        openings.connections.clear()
        engine.dispose(close=False)


os.register_at_fork(after_in_child=_forget_inherited_connections)


class SqliteDatabase:
    """The database in one file. No connection is made yet, and a missing file stays missing.

    Args:
        path: The database file; any name that the file system accepts. Made absolute here, so that a later change
            of the working directory does not matter.
        read_only: Refuse to write. Works on read-only media and in folders of other users too.
        busy_seconds: How long a statement waits for another process's transaction before it fails.
        vfs: One of SQLite's other file layers, such as `"unix-dotfile"` where a file system has no locks.

    Raises:
        StorageError: The path is longer than SQLite takes.
    """

    def __init__(
        self,
        path: Path,
        *,
        read_only: bool = False,
        busy_seconds: float = BUSY_SECONDS,
        vfs: str | None = None,
    ) -> None:
        self.path = path = Path(os.path.abspath(path))
        length = len(os.fsencode(os.path.realpath(path)))
        if length > LONGEST_PATH:
            raise StorageError(
                f"{path}: expected a path of at most {LONGEST_PATH} bytes, which is SQLite's limit, found one of "
                f"{length}. Nothing was written. Choose a shorter path; a link to this one does not help."
            )
        openings = self._openings = _Openings()
        writable = _writable(path)

        def connect() -> _Connection:
            openings.check(path)
            if writable:
                openings.check_file(path)
            before = _identity(path)
            connection = _connect(path, read_only, busy_seconds, vfs)
            if writable:
                if openings.file is None:
                    openings.file = before
                connection.check_file = partial(openings.check_file, path)
            connection.siblings = openings.connections
            openings.connections.add(connection)
            return connection

        def give_back(
            connection: _Connection | None, record: PoolProxiedConnection | ConnectionPoolEntry
        ) -> None:
            if openings.closed or (connection is not None and connection.stuck):
                record.invalidate()

        # A thread that needs a connection never waits for another thread's. Where nothing can be written, each
        # transaction opens the file anew, since that connection may not notice what the file's owner changes.
        pool: dict[str, Any] = (
            {"poolclass": QueuePool, "max_overflow": -1} if writable else {"poolclass": NullPool}
        )
        self.read_only = read_only or not writable
        """Whether nothing can be written."""
        self.engine = create_engine(
            URL.create("sqlite", database=str(path)),
            creator=connect,
            execution_options={OPTION: weakref.ref(self)},
            **pool,
        )
        """SQLAlchemy's engine."""
        event.listen(self.engine, "begin", _begin)
        event.listen(self.engine, "checkin", give_back)
        _engines[self.engine] = openings
        weakref.finalize(self.engine, openings.close_idle)

    def __repr__(self) -> str:
        return f"<SqliteDatabase {str(self.path)!r}>"

    @property
    def name(self) -> str:
        """The file's path."""
        return str(self.path)

    @property
    def label(self) -> str:
        """The file's name."""
        return self.path.name

    # ------------------------------------------------------------------ transactions

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """Give a connection inside a transaction that sees one state of the database throughout."""
        with self._translate(), self.engine.begin() as connection:
            yield connection

    @contextmanager
    def writing(self, *, durable: bool = True) -> Iterator[Connection]:
        """Give a connection inside a transaction that holds the write lock: commits at the end, or undoes everything.

        Args:
            durable: As `Database.writing` says.

        Raises:
            InUseError: Another process kept the write lock for longer than the database waits.
            StorageError: The disk is full or refuses; nothing was written.
            CorruptionError: The file is damaged.
        """
        with self._translate(), self.engine.connect() as connection:
            connection.execution_options(**{_IMMEDIATE: True})
            raw = _raw(connection)
            with raw.unsynced() if not durable else nullcontext(), connection.begin():
                yield connection

    @contextmanager
    def rebuilding(self) -> Iterator[Connection]:
        """As `writing`, for migrations: tables may be dropped and made anew without their references being followed.

        With references enforced, dropping a table to rebuild it would delete the rows that point at it. They are
        checked once, before the commit.

        Raises:
            SchemaError: References would be broken afterwards; everything was undone.
        """
        with self._translate(), self.engine.connect() as connection:
            raw = _raw(connection)
            raw.execute("PRAGMA foreign_keys=OFF")  # has no effect inside a transaction
            try:
                connection.execution_options(**{_IMMEDIATE: True})
                with connection.begin():
                    yield connection
                    broken = {table for table, *_ in self.broken_references(connection)}
                    if broken:
                        raise SchemaError(
                            f"{self.path}: the change would leave rows of {', '.join(sorted(broken))} that point at "
                            "nothing; it was undone. Keep using the older version of the library and report this."
                        )
            finally:
                raw.execute("PRAGMA foreign_keys=ON")

    def _translate(self) -> AbstractContextManager[None]:
        return translated(sqlite3.Error, lambda error: _as_ours(error, self), lambda: _damage(self))

    # ------------------------------------------------------------------ its life

    def exists(self) -> bool:
        """Tell whether the file is there."""
        return files.is_there(self.path)

    def make(self) -> None:
        """Make the file, empty, if it is not there.

        Raises:
            CorruptionError: There is no log, but what it told of: a new one would begin at version 1 again.
            StorageError: It cannot be made.
        """
        self._refuse_lost()
        with self._refusals():
            os.close(files.open_regular(self.path, os.O_WRONLY | os.O_CREAT))
            files.sync_folder(self.path.parent)

    def _refuse_lost(self) -> None:
        snapshots = self.path.parent / "snapshots"
        with self._refusals():
            count = sum(1 for _ in snapshots.glob("*.safetensors")) if snapshots.is_dir() else 0
        if count:
            raise CorruptionError(
                f"{self.path}: expected the log of the {count} snapshot files beside it, found "
                f"{'an empty file' if self.exists() else 'no file'}. Nothing was written. "
                "Put the database back from a backup, or choose another folder."
            )

    @contextmanager
    def migrating(self, seconds: float) -> Iterator[None]:
        """Be the only process that makes or upgrades the file; its folder is made.

        Raises:
            InUseError: Somebody else is at it for longer than so many seconds.
        """
        folder = self.path.parent
        with self._refusals():
            missing = [each for each in (folder, *folder.parents) if not each.exists()]
            folder.mkdir(parents=True, exist_ok=True)
            for each in missing:
                files.sync_folder(each.parent)
        with file_lock(folder / "locks" / "schema", what=f"the schema of {self.path}", timeout=seconds):
            yield

    def _refusals(self) -> AbstractContextManager[None]:
        return files.refusals(
            f"{self.path}: no registry can be made here",
            "Mend the permissions of the folder, or choose another one.",
        )

    def tune(self) -> None:
        """Turn on the write-ahead log, if it is off: readers and the writer no longer wait for each other.

        The file remembers it. Where the file system cannot (most network ones), the rollback journal stays, and a
        `JournalWarning` says so. A database that is only read stays as it is.
        """
        if self.read_only:
            return
        with self._translate():
            connection = self.engine.raw_connection()
            try:
                cursor = connection.cursor()
                cursor.execute("PRAGMA journal_mode")
                if cursor.fetchone() == ("wal",):
                    return
                reason = _try_write_ahead_log(cursor)
                # Connections were set up for the journal that was in use when they were made.
                connection.invalidate()
            finally:
                connection.close()
        if reason is not None:
            warnings.warn(
                f"{self.path}: expected SQLite's write-ahead log, but it could not be turned on ({reason}). "
                "The registry works on with a rollback journal, slower and with readers waiting for writers. Put it on "
                "a local disk: network file systems often break SQLite's locks.",
                JournalWarning,
                stacklevel=2,
            )

    def close(self) -> None:
        """Close every connection, those in use at the end of their transaction; whoever begins another is refused."""
        self._openings.closed = True
        self.engine.dispose()

    def check_open(self) -> None:
        """Refuse to go on after `close`.

        Raises:
            StorageError: It was closed.
        """
        self._openings.check(self.path)

    # ------------------------------------------------------------------ inside of a transaction

    def table_names(self, conn: Connection) -> set[str]:
        """Return the names of all tables."""
        return set(inspect(conn).get_table_names())

    def broken_references(self, conn: Connection) -> Iterator[tuple[str, int, str, str]]:
        """Yield table, row, column and target of every reference to a row that is not there."""
        for table, key, target, reference in conn.exec_driver_sql("PRAGMA foreign_key_check").all():
            names = conn.exec_driver_sql(f'PRAGMA foreign_key_list("{table}")').all()
            yield table, key, ", ".join(row[3] for row in names if row[0] == reference), target

    def broken_pages(self, conn: Connection) -> list[str]:
        """Return what SQLite itself finds wrong with the file: pages, indices, rows that are out of order."""
        told_by_survey = ("NULL value in", "CHECK constraint failed in")
        found = [str(row[0]) for row in conn.exec_driver_sql("PRAGMA integrity_check(100)").all()]
        return [text for text in found if text != "ok" and not text.startswith(told_by_survey)]

    @contextmanager
    def lenient(self, conn: Connection) -> Iterator[None]:
        """Let text that is no UTF-8 be read, with lone surrogates in the place of wrong bytes."""
        raw = _raw(conn)
        usual, raw.text_factory = raw.text_factory, _any_text
        try:
            yield
        finally:
            raw.text_factory = usual


def _raw(connection: Connection) -> _Connection:
    raw = connection.connection.driver_connection
    assert isinstance(raw, _Connection)
    return raw


def _any_text(text: bytes) -> str:
    return text.decode("utf-8", "surrogateescape")


def table_names(connection: Connection) -> set[str]:
    """Return the names of all tables of the database."""
    return set(inspect(connection).get_table_names())


def _damage(database: SqliteDatabase) -> CorruptionError | None:
    """Look through the whole record for what may have led code astray."""
    try:
        return survey(database)
    except WeightLedgerError:
        return None
    except UnicodeDecodeError as error:
        # Even the words in which SQLite complains are made of damaged names then.
        return _malformed(error, database.path)
    except (SQLAlchemyError, sqlite3.Error) as error:
        cause = getattr(error, "orig", None) or error
        if _primary_code(cause) in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT):
            return _malformed(cause, database.path)
        return None


def _connect(path: Path, read_only: bool, busy_seconds: float, vfs: str | None) -> _Connection:
    if not files.is_there(path):
        raise NotFoundError(
            f"{path}: expected a registry's database, found no such file. Check the path; "
            "`Registry.open(...)` or `weightledger publish` makes a new registry."
        )
    for beside in _SIDE_FILES:
        files.is_there(f"{path}{beside}")  # SQLite would wait for a pipe
    pragmas = ["PRAGMA query_only=ON"] if read_only else []
    if _writable(path):
        # Also for reading: only then can SQLite take in what a killed writer left in the log.
        return _prepare(_open(path, "mode=rw", busy_seconds, vfs), pragmas)
    try:
        return _prepare(_open(path, "mode=ro", busy_seconds, vfs), pragmas)
    except sqlite3.OperationalError:
        # A write-ahead database needs side files, which nobody can make in a folder that cannot be written.
        # Without a log beside it no writer is at work, so the file can be read as one that does not change.
        if path.with_name(path.name + "-wal").exists():
            raise
        return _prepare(_open(path, "immutable=1", busy_seconds, vfs), pragmas)


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_dev, found.st_ino


def _writable(path: Path) -> bool:
    def allowed(each: Path) -> bool:
        return os.access(each, os.W_OK, effective_ids=os.access in os.supports_effective_ids)

    return allowed(path.parent) and (allowed(path) or not path.exists())


def _open(path: Path, options: str, busy_seconds: float, vfs: str | None) -> _Connection:
    if vfs is not None:
        options += f"&vfs={quote(vfs)}"
    return sqlite3.connect(
        f"file:{quote(os.fsencode(path))}?{options}",
        uri=True,
        timeout=busy_seconds,
        isolation_level=None,  # the driver never begins a transaction by itself: `_begin` does
        check_same_thread=False,
        cached_statements=256,
        factory=_Connection,
    )


def _prepare(connection: _Connection, more: list[str]) -> _Connection:
    try:
        (mode,) = connection.execute("PRAGMA journal_mode").fetchone()
        connection.execute("PRAGMA foreign_keys=ON")
        # FULL syncs the log at each commit. A rollback journal is durable only once its folder is synced too.
        connection.has_log = mode == "wal"
        connection.execute(f"PRAGMA synchronous={'FULL' if connection.has_log else 'EXTRA'}")
        for statement in more:
            connection.execute(statement)
    except BaseException:
        connection.close()
        raise
    return connection


def _begin(connection: Connection) -> None:
    raw = _raw(connection)
    raw.check_file()
    try:
        raw.execute("BEGIN IMMEDIATE" if connection.get_execution_options().get(_IMMEDIATE) else "BEGIN")
    except sqlite3.OperationalError as error:
        raw.stuck = _primary_code(error) == sqlite3.SQLITE_READONLY
        raise


def _try_write_ahead_log(cursor: Any) -> str | None:
    """Return None when it is on, else what stood in the way."""
    (timeout,) = cursor.execute("PRAGMA busy_timeout").fetchone()
    deadline = time.monotonic() + timeout / 1000
    while True:
        try:
            (mode,) = cursor.execute("PRAGMA journal_mode=WAL").fetchone()
            cursor.execute(
                "PRAGMA schema_version"
            ).fetchone()  # the first read through the log finds what it lacks
        except sqlite3.OperationalError as error:
            # Two connections that switch at once are told "locked" without the time-out being waited for.
            if _primary_code(error) == sqlite3.SQLITE_BUSY and time.monotonic() < deadline:
                time.sleep(0.01)
                continue
            if _primary_code(error) == sqlite3.SQLITE_FULL:
                raise
            return str(error)
        return None if mode == "wal" else f"journal_mode is {mode!r}"


def _primary_code(error: BaseException | None) -> int | None:
    code = getattr(error, "sqlite_errorcode", None)
    return None if code is None else code & 0xFF


def _as_ours(error: BaseException, database: SqliteDatabase) -> WeightLedgerError:
    code, path = _primary_code(error), database.path
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return InUseError(
            f"{path}: expected the database's lock within the time-out, but another process kept it ({error}). "
            "Nothing was written. Try again, or end the process that holds a transaction open."
        )
    if code in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT):
        return _malformed(error, path)
    if code == sqlite3.SQLITE_FULL:
        return StorageError(
            f"{path}: no space left for the database ({error}). Nothing was written. Make room, then try again."
        )
    if code == sqlite3.SQLITE_READONLY:
        return StorageError(
            f"{path}: expected a database that can be written, found a read-only one ({error}). "
            "Nothing was written. Mend the permissions of the file and its folder, or open it for reading only."
        )
    if code in (sqlite3.SQLITE_PROTOCOL, sqlite3.SQLITE_NOLFS):
        return StorageError(
            f"{path}: the file system does not give SQLite the locks it needs ({error}). "
            "Put the database on a local disk."
        )
    if code in (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM, sqlite3.SQLITE_NOMEM):
        return StorageError(
            f"{path}: the operating system refused to read or write the database ({error}). "
            "Check the disk, the permissions of the file and its folder, and that it stands on a local disk."
        )
    if code == sqlite3.SQLITE_ERROR and str(error).startswith(("no such table", "no such column")):
        return SchemaError(
            f"{path}: expected the tables of this version of the library, found others ({error}). "
            "Run `weightledger upgrade`, or use the library version that wrote it."
        )
    # A row that breaks a rule between rows, text that is no UTF-8: the record is not what was written.
    found = _damage(database)
    if found is not None:
        return found
    if code == sqlite3.SQLITE_CONSTRAINT:
        return CorruptionError(
            f"{path}: expected a record without contradictions, but what was to be written breaks one of its rules "
            f"({error}). Nothing was written. `weightledger verify` looks for damage; report this if there is none."
        )
    return StorageError(
        f"{path}: the database refused ({type(error).__name__}: {error}). Nothing was written. `weightledger verify` "
        "looks for damage; report this if there is none."
    )


def _malformed(error: BaseException, path: Path) -> CorruptionError:
    return CorruptionError(
        f"{path}: expected a registry's SQLite database, found something else or a damaged one ({error}). "
        "Nothing was changed and the weight files are untouched. Restore the database from a backup."
    )

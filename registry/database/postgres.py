"""A registry's database on a PostgreSQL server, for several machines: the one module that knows PostgreSQL.

Rules it keeps:
- A transaction that writes first locks the registry's row in `about`: writers take turns, as they do in a file, and see
  what the one before them committed. Who holds which advisory lock does not matter for what is true.
- A transaction that reads sees one state of the database throughout (REPEATABLE READ).
- A connection that turns out dead when a transaction begins is replaced, within a bound. One that dies later fails the
  transaction, which leaves nothing.
- No wait is endless: connecting, locks, statements and a silent network have time limits, which are set here.
- Errors name server and database, never a password.
- A connection belongs to the process that opened it. After `os.fork` the child opens its own.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final

import psycopg
from sqlalchemy import URL, Connection, Engine, create_engine, event, inspect
from sqlalchemy.engine import make_url
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from weightledger.registry.database import OPTION
from weightledger.registry.database.translating import survey, translated
from weightledger.registry.errors import (
    CorruptionError,
    InUseError,
    SchemaError,
    StorageError,
    WeightLedgerError,
)
from weightledger.registry.locks.runs import this_run

CONNECT_SECONDS: Final = 10.0
"""How long a server that does not answer is tried."""
LOCK_SECONDS: Final = 30
STATEMENT_SECONDS: Final = 600
_KEEPALIVE: Final = {
    "connect_timeout": 10,
    "keepalives": 1,
    "keepalives_idle": 15,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "tcp_user_timeout": 45_000,
}
"""A host that vanished is noticed in at most 60 s, from this end."""
_SETTINGS: Final = {
    "lock_timeout": f"{LOCK_SECONDS}s",
    "statement_timeout": f"{STATEMENT_SECONDS}s",
    "idle_in_transaction_session_timeout": f"{STATEMENT_SECONDS}s",
    "tcp_keepalives_idle": "15",
    "tcp_keepalives_interval": "10",
    "tcp_keepalives_count": "3",
    "tcp_user_timeout": "45000",
    "timezone": "UTC",
    "synchronous_commit": "on",
}
"""The same from the server's end, and what a session must not wait for."""
_READ: Final = "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY"
_WRITE: Final = "SELECT uuid FROM about FOR UPDATE"
_PAUSE: Final = 0.2
_HOPELESS: Final = ("28", "3D", "42")
"""Classes of errors that trying again does not mend: no right, no such database, no such table."""

_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


def _forget_inherited_connections() -> None:
    for engine in list(_engines):
        engine.dispose(close=False)


os.register_at_fork(after_in_child=_forget_inherited_connections)


class PostgresDatabase:
    """The database behind a URL. No connection is made yet.

    Args:
        url: `postgresql+psycopg://user:password@host:port/database`; `?options=-csearch_path%3Dname` chooses a schema.

    Raises:
        ValueError: It is no such URL.
    """

    read_only = False

    def __init__(self, url: str) -> None:
        self.url = _checked(url)
        self.engine = create_engine(
            self.url,
            execution_options={OPTION: weakref.ref(self)},
            connect_args=_KEEPALIVE | {"application_name": application_name()},
            # A thread that needs a connection never waits for another thread's.
            max_overflow=-1,
            pool_use_lifo=True,
        )
        """SQLAlchemy's engine."""
        self._closed = False
        opened: set[Any] = set()
        event.listen(self.engine, "connect", _settle)
        event.listen(self.engine, "connect", lambda connection, record: opened.add(connection))
        event.listen(self.engine, "close", lambda connection, record: opened.discard(connection))
        weakref.finalize(self.engine, _close_idle, opened, os.getpid())
        _engines.add(self.engine)

    def __repr__(self) -> str:
        return f"<PostgresDatabase {self.name}>"

    @property
    def name(self) -> str:
        """Server and database, without a password."""
        return masked(self.url)

    @property
    def label(self) -> str:
        """The database's name."""
        return str(self.url.database)

    # ------------------------------------------------------------------ transactions

    def reading(self) -> AbstractContextManager[Connection]:
        """Give a connection inside a transaction that sees one state of the database throughout."""
        return self._transaction(_READ)

    def writing(self, *, durable: bool = True) -> AbstractContextManager[Connection]:
        """Give a connection inside a transaction that writes: commits at the end, or undoes everything.

        Args:
            durable: Makes no difference: here a process that dies, the server's, may take back what is not on its disk.

        Raises:
            InUseError: Somebody else wrote for longer than the database waits.
            StorageError: The server refuses or is gone; nothing was written.
        """
        return self._transaction(_WRITE)

    def rebuilding(self) -> AbstractContextManager[Connection]:
        """As `writing`, for migrations; before the tables are there as well."""
        return self._transaction("SELECT 1")

    @contextmanager
    def _transaction(self, first: str) -> Iterator[Connection]:
        with self.translating():
            connection = self._begun(first)
            try:
                yield connection
                connection.commit()
            except BaseException:
                if not connection.invalidated:
                    connection.rollback()
                raise
            finally:
                connection.close()

    def _begun(self, first: str) -> Connection:
        """Begin a transaction by a first statement, on a connection that lives."""
        deadline = time.monotonic() + CONNECT_SECONDS
        while True:
            self.check_open()
            try:
                connection = self.engine.connect()
                try:
                    connection.exec_driver_sql(first)
                except BaseException:
                    connection.close()
                    raise
                return connection
            except DBAPIError as error:
                # Nothing was done in it yet, so that it may begin anew.
                if not is_lost(error.orig) or time.monotonic() > deadline:
                    raise
                time.sleep(_PAUSE)

    def translating(self) -> AbstractContextManager[None]:
        """Turn what the driver raises inside into errors of this library."""
        return translated(psycopg.Error, self.as_ours, self._find_damage)

    def _find_damage(self) -> CorruptionError | None:
        try:
            return survey(self)
        except (WeightLedgerError, SQLAlchemyError, psycopg.Error):
            return None

    def as_ours(self, error: BaseException) -> WeightLedgerError:
        """Say what an error of the driver means."""
        state, text = getattr(error, "sqlstate", None) or "", _without_secrets(error, self.url)
        if state == "55P03":
            return InUseError(
                f"{self.name}: expected the registry's row within {LOCK_SECONDS} s, but another process kept it "
                f"({text}). Nothing was written. Try again, or end the process that holds a transaction open."
            )
        if state in ("42P01", "42703"):
            return SchemaError(
                f"{self.name}: expected the tables of this version of the library, found others ({text}). "
                "Run `weightledger upgrade`, or use the library version that wrote it."
            )
        if state == "42501" or state.startswith("25"):
            return StorageError(
                f"{self.name}: expected a user that may read and write the registry's tables ({text}). Nothing was "
                "written. Grant it the right, or name another user in the URL."
            )
        if state.startswith("28") or "authentication failed" in text:
            return StorageError(
                f"{self.name}: the server does not let this user in ({text}). Check user and password: in the URL, "
                "in PGPASSWORD, or in ~/.pgpass."
            )
        if state.startswith("3D") or ('database "' in text and "does not exist" in text):
            return StorageError(
                f"{self.name}: expected a database of that name ({text}). Make it (`createdb`), or check the URL."
            )
        if state.startswith("53"):
            return StorageError(
                f"{self.name}: the server has no room or no connection left ({text}). Nothing was written."
            )
        if state.startswith("22"):
            return StorageError(f"{self.name}: the server refuses a value ({text}). Nothing was written.")
        if state.startswith("23"):
            return self._find_damage() or CorruptionError(
                f"{self.name}: expected a record without contradictions, but what was to be written breaks one of its "
                f"rules ({text}). Nothing was written. `weightledger verify` looks for damage; report this if there "
                "is none."
            )
        if is_lost(error):
            return StorageError(
                f"{self.name}: the server cannot be reached, or was lost on the way ({text}). What was being written "
                "was not committed, unless the connection was lost during the commit itself: look at the log, then "
                "try again."
            )
        return StorageError(
            f"{self.name}: the database refused ({type(error).__name__}: {text}). Nothing was written. "
            "`weightledger verify` looks for damage; report this if there is none."
        )

    # ------------------------------------------------------------------ its life

    def exists(self) -> bool:
        """Tell whether a registry's tables are there."""
        with self._transaction("SELECT 1") as conn:
            return not self.table_names(conn).isdisjoint({"about", "alembic_version"})

    def make(self) -> None:
        """Make sure that tables may be made: nobody else's are there.

        Raises:
            SchemaError: They are.
        """
        with self._transaction("SELECT 1") as conn:
            found = self.table_names(conn)
        if found - {"alembic_version"}:
            raise SchemaError(
                f"{self.name}: expected a registry, or an empty schema, found one of another program, with the tables "
                f"{', '.join(sorted(found)[:10])}. Nothing was written. Give the registry a database or a schema of "
                "its own."
            )

    @contextmanager
    def migrating(self, seconds: float) -> Iterator[None]:
        """Be the only one that makes or upgrades a registry in this database.

        Raises:
            InUseError: Somebody else is at it for longer than so many seconds.
        """
        with self.translating():
            connection = self.own_connection()
        deadline = time.monotonic() + seconds
        with connection:
            while connection.execute("SELECT pg_try_advisory_lock(%s)", [_SCHEMA_LOCK]).fetchone() != (True,):
                if time.monotonic() > deadline:
                    raise InUseError(
                        f"the schema of {self.name}: expected its lock within {seconds:g} s, but another process "
                        "holds it. Nothing was changed. Wait, or end that process."
                    )
                time.sleep(_PAUSE)
            yield

    def tune(self) -> None:
        """Change nothing: settings belong to sessions."""

    def close(self) -> None:
        """Close every connection, those in use at the end of their transaction; whoever begins another is refused."""
        self._closed = True
        self.engine.dispose()

    def check_open(self) -> None:
        """Refuse to go on after `close`.

        Raises:
            StorageError: It was closed.
        """
        if self._closed:
            raise StorageError(
                f"{self.name}: expected an open registry, but this one was closed; nothing was done. "
                "Open it again with `Registry.open(...)`."
            )

    def own_connection(self) -> psycopg.Connection[Any]:
        """Return a connection of the caller's own, outside of the pool, in which each statement is a transaction."""
        arguments, named = self.engine.dialect.create_connect_args(self.url)
        connection: psycopg.Connection[Any] = psycopg.connect(
            *arguments, **{**named, **_KEEPALIVE, "application_name": application_name(), "autocommit": True}
        )
        _settle(connection)
        return connection

    # ------------------------------------------------------------------ inside of a transaction

    def table_names(self, conn: Connection) -> set[str]:
        """Return the names of all tables of the schema."""
        return set(inspect(conn).get_table_names())

    def broken_references(self, conn: Connection) -> Iterator[tuple[str, Any, str, str]]:
        """Yield nothing: the server lets no reference break."""
        return iter(())

    def broken_pages(self, conn: Connection) -> list[str]:
        """Return nothing: the server looks after its own pages."""
        return []

    def lenient(self, conn: Connection) -> AbstractContextManager[None]:
        """Change nothing: the server lets no text in that is no UTF-8."""
        return nullcontext()


_SCHEMA_LOCK: Final = int.from_bytes(b"wl-schma", "big", signed=True)


def application_name() -> str:
    """Return what the server's list of sessions calls this process."""
    run = this_run()
    return f"weightledger {run.user}@{run.host} {run.pid}"[:63]


def masked(url: URL) -> str:
    """Return a URL as it may be shown: server, user and database."""
    user = f"{url.username}@" if url.username else ""
    host = url.host or url.query.get("host") or "local"
    port = f":{url.port}" if url.port else ""
    schema = str(url.query.get("options", "")).rpartition("search_path=")[2]
    return f"postgresql://{user}{host}{port}/{url.database or ''}{'#' + schema if schema else ''}"


def is_lost(error: BaseException | None) -> bool:
    """Tell whether the connection is at fault, so that another one may do."""
    if not isinstance(error, psycopg.OperationalError | psycopg.InterfaceError):
        return False
    state = error.sqlstate or ""
    if state.startswith(_HOPELESS) or (state and not state.startswith(("08", "57P"))):
        return False
    return not any(
        word in str(error) for word in ("authentication failed", "does not exist", "no password supplied")
    )


def _checked(text: str) -> URL:
    try:
        url = make_url(text)
    except (SQLAlchemyError, ValueError) as error:
        raise ValueError(
            "expected a URL such as postgresql+psycopg://user@host/database as a registry's location; it cannot be "
            f"read ({type(error).__name__})"
        ) from None
    if not url.database:
        raise ValueError(f"expected a URL that names a database, found {masked(url)}; add /NAME to it")
    return url.set(drivername="postgresql+psycopg")


def _settle(connection: Any, record: object = None) -> None:
    """Give a new session its limits."""
    before, connection.autocommit = connection.autocommit, True
    settings = ", ".join(f"set_config('{name}', '{value}', false)" for name, value in _SETTINGS.items())
    connection.execute(f"SELECT {settings}")
    connection.autocommit = before


def _close_idle(opened: set[Any], owner: int) -> None:
    """Close the sessions of an engine that nobody refers to any more."""
    for connection in list(opened) if os.getpid() == owner else ():
        # At the interpreter's end a daemon thread may be amid a transaction.
        if connection.info.transaction_status == psycopg.pq.TransactionStatus.IDLE:
            connection.close()


def _without_secrets(error: BaseException, url: URL) -> str:
    text = " ".join(str(error).split())
    secrets = {url.password, url.query.get("password")}
    for secret in secrets:
        if isinstance(secret, str) and secret:
            text = text.replace(secret, "***")
    return text

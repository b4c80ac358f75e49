"""The database that the record is in: what every kind of it does for the rest of the registry.

A kind is one module: it knows how to connect, how a transaction begins and ends, and what the driver's errors mean.
`reading` and `writing` are the only ways in.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, Final, Protocol

from sqlalchemy import Connection, Engine

OPTION: Final = "weightledger_database"
"""The execution option by which a connection leads to its database: a weak reference, as that keeps the engine."""
CONFUSED: Final = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
"""What code raises that met other values than it was written for."""


class Database(Protocol):
    """One database. Making the object makes no connection, and no database that is not there."""

    @property
    def engine(self) -> Engine:
        """SQLAlchemy's engine."""
        ...

    @property
    def name(self) -> str:
        """What an error calls it."""
        ...

    @property
    def label(self) -> str:
        """What a list of faults calls it."""
        ...

    @property
    def read_only(self) -> bool:
        """Whether nothing can be written."""
        ...

    # ------------------------------------------------------------------ transactions

    def reading(self) -> AbstractContextManager[Connection]:
        """Give a connection inside a transaction that sees one state of the database throughout."""
        ...

    def writing(self, *, durable: bool = True) -> AbstractContextManager[Connection]:
        """Give a connection inside a transaction that writes: commits at the end, or undoes everything.

        Args:
            durable: Wait until the disk has it. Otherwise it is everybody's to see and outlives every process, but only
                the next durable transaction brings it over a power loss.

        Raises:
            InUseError: Somebody else wrote for longer than the database waits.
            StorageError: The disk is full or refuses; nothing was written.
            CorruptionError: The record is damaged.
        """
        ...

    def rebuilding(self) -> AbstractContextManager[Connection]:
        """As `writing`, for migrations: tables may be dropped and made anew without their references being followed.

        Raises:
            SchemaError: References would be broken afterwards; everything was undone.
        """
        ...

    # ------------------------------------------------------------------ its life

    def exists(self) -> bool:
        """Tell whether it is there."""
        ...

    def make(self) -> None:
        """Make it, empty, if it is not there.

        Raises:
            CorruptionError: It was there before: the snapshots of its versions still are.
            StorageError: It cannot be made.
        """
        ...

    def migrating(self, seconds: float) -> AbstractContextManager[None]:
        """Be the only one, of all processes and threads, that makes or upgrades it.

        Raises:
            InUseError: Somebody else is at it for longer than so many seconds.
        """
        ...

    def tune(self) -> None:
        """Bring its own settings to what this library wants, where they are kept in it."""
        ...

    def close(self) -> None:
        """Close every connection, those in use at the end of their transaction; whoever begins another is refused."""
        ...

    def check_open(self) -> None:
        """Refuse to go on after `close`.

        Raises:
            StorageError: It was closed.
        """
        ...

    # ------------------------------------------------------------------ inside of a transaction

    def table_names(self, conn: Connection) -> set[str]:
        """Return the names of all tables."""
        ...

    def broken_references(self, conn: Connection) -> Iterator[tuple[str, Any, str, str]]:
        """Yield table, row, column and target of every reference to a row that is not there."""
        ...

    def broken_pages(self, conn: Connection) -> list[str]:
        """Return what the database itself finds wrong with how it is kept."""
        ...

    def lenient(self, conn: Connection) -> AbstractContextManager[None]:
        """Let text that is no UTF-8 be read, with lone surrogates in the place of wrong bytes."""
        ...


def of(conn: Connection) -> Database:
    """Return the database that a connection leads to."""
    found: Database | None = conn.get_execution_options()[OPTION]()
    assert found is not None, "whoever has a connection keeps its database"
    return found

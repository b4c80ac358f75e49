"""Statements that every publish and update runs: compiled by SQLAlchemy once, then run by the driver itself.

Workers wait for a dozen of them in each update, and running one through SQLAlchemy costs several times what the
database needs for it.

Rules
- They run inside of a transaction that `engine` opened, and leave their errors to it.
- Values are converted on the way in, as their column's type wants it. What comes back is as the driver gives it, so
  that only numbers and texts are asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from sqlalchemy import Connection, Dialect
from sqlalchemy.sql import ClauseElement
from sqlalchemy.sql.compiler import SQLCompiler

_Convert = Callable[[Any], Any]


@dataclass(frozen=True)
class _Ready:
    """A statement in the words of one kind of database."""

    dialect: str
    text: str
    names: Sequence[str]
    """The parameters, in the order in which the text has them."""
    fixed: Mapping[str, Any]
    """Those that the statement gives itself, converted."""
    converters: Mapping[str, _Convert]
    by_name: bool
    """Whether the driver takes parameters by name, and not in order."""

    def convert(self, values: Mapping[str, Any]) -> dict[str, Any]:
        found = self.converters
        return {name: found[name](value) if name in found else value for name, value in values.items()}


class Statement:
    """One statement with named parameters.

    Args:
        clause: the statement. An insert gives its columns' parameters itself.
    """

    def __init__(self, clause: ClauseElement) -> None:
        self.clause = clause
        self._ready: _Ready | None = None

    def run(self, conn: Connection, **values: Any) -> None:
        """Run it once."""
        self._execute(conn, values)

    def first(self, conn: Connection, **values: Any) -> Any:
        """Run it once, and return the first row as a tuple; None when there is none."""
        cursor = self._execute(conn, values)
        row = cursor.fetchone()
        cursor.close()
        return row

    def all(self, conn: Connection, **values: Any) -> list[Any]:
        """Run it once, and return the rows as tuples."""
        rows: list[Any] = self._execute(conn, values).fetchall()
        return rows

    def run_each(
        self, conn: Connection, names: Sequence[str], rows: Iterable[tuple[Any, ...]], **common: Any
    ) -> None:
        """Run it for every row.

        Args:
            names: the parameters that differ.
            rows: their values.
            common: what is the same for all rows.
        """
        ready = self._in_words_of(conn.dialect)
        found = [(at, ready.converters[name]) for at, name in enumerate(names) if name in ready.converters]
        if found:
            rows = (_converted(row, found) for row in rows)
        shared = {**ready.fixed, **ready.convert(common)}
        # Thousands of rows: each one is put in order by one call.
        place = {name: at for at, name in enumerate((*names, *shared))}
        ordered, rest = itemgetter(*(place[name] for name in ready.names)), tuple(shared.values())
        found_rows: Any = [ordered(row + rest) for row in rows]
        if ready.by_name:
            found_rows = [dict(zip(ready.names, row, strict=True)) for row in found_rows]
        _cursor(conn).executemany(ready.text, found_rows)

    def _execute(self, conn: Connection, values: Mapping[str, Any]) -> Any:
        ready = self._in_words_of(conn.dialect)
        return _cursor(conn).execute(ready.text, _ordered(ready, {**ready.fixed, **ready.convert(values)}))

    def _in_words_of(self, dialect: Dialect) -> _Ready:
        if self._ready is None or self._ready.dialect != dialect.name:
            self._ready = _compile(self.clause, dialect)
        return self._ready


def _compile(clause: ClauseElement, dialect: Dialect) -> _Ready:
    compiled = clause.compile(dialect=dialect)
    assert isinstance(compiled, SQLCompiler)
    converters = {}
    bound_by_name = {name: bound for bound, name in compiled.bind_names.items()}
    for name, bound in bound_by_name.items():
        convert = bound.type.dialect_impl(dialect).bind_processor(dialect)
        if convert is not None:
            converters[name] = convert
    fixed = {
        name: converters[name](value) if name in converters else value
        for name, value in compiled.params.items()
        if not bound_by_name[name].required
    }
    names = list(bound_by_name) if compiled.positiontup is None else compiled.positiontup
    return _Ready(
        dialect.name, compiled.string, names, fixed, converters, by_name=compiled.positiontup is None
    )


def _converted(row: tuple[Any, ...], converters: Iterable[tuple[int, _Convert]]) -> tuple[Any, ...]:
    values = list(row)
    for at, convert in converters:
        values[at] = convert(values[at])
    return tuple(values)


def _ordered(ready: _Ready, values: Mapping[str, Any]) -> Any:
    if ready.by_name:
        return {name: values[name] for name in ready.names}
    return tuple([values[name] for name in ready.names])


def _cursor(conn: Connection) -> Any:
    return conn.connection.cursor()

"""What of the record cannot be read: cells that hold what their column cannot, rows that point at nothing.

A database file may be changed by anything: a bad disk, another program, a person. Whatever stands in a row, reading it
ends in what the row says, or in an error or a mark that names table, row and column.

Rules
- The usual way is fast: rows are read as ever, and only the types of their values are looked at. Whatever goes wrong on
  it leads to the careful way, which reads the same rows once more, cell by cell.
- A call for one thing raises. A listing goes on: the damaged row is in it, marked, with what could be read.
- Nothing here writes.
"""

from __future__ import annotations

import json
from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from itertools import chain, islice
from typing import Any, Final, TypeAlias, TypeVar

from sqlalchemy import (
    JSON,
    Boolean,
    Column,
    Connection,
    Float,
    Integer,
    Label,
    Select,
    Table,
    func,
    select,
    type_coerce,
)
from sqlalchemy.exc import DBAPIError
from sqlalchemy.types import NULLTYPE, TypeEngine

from weightledger.registry import arguments, database, values
from weightledger.registry.errors import CorruptionError
from weightledger.registry.log.models import (
    VERSION_STATES,
    Base,
    Policy,
    PolicyRef,
    Snapshot,
    UtcDateTime,
    VersionRow,
    fingerprint_of,
)

T = TypeVar("T")
AnySelect: TypeAlias = Select[*tuple[Any, ...]]

_NAMED = 3  # so many damaged cells are named in an error
_CHUNK = 2000
_MOST = 1000  # so many are listed by `survey`; of a database with more the rest is no better


@dataclass(frozen=True)
class Cell:
    """A place in the record that cannot be what it says."""

    table: str
    key: tuple[Any, ...]
    """The row's primary key."""
    column: str
    why: str

    @property
    def where(self) -> str:
        """The cell, in words."""
        key = ", ".join(str(part) if isinstance(part, int) else repr(part) for part in self.key)
        return f"table {self.table}, row {key}, column {self.column}"

    def __str__(self) -> str:
        return f"{self.where}: {self.why}"


class _UnsoundError(Exception):
    """A cell that holds what its column cannot; the text says what was expected."""


# ---------------------------------------------------------------------- reading


def read(
    conn: Connection, statement: AnySelect, named: Mapping[str, Any], build: Callable[[Any], T]
) -> list[T]:
    """Return what is made of the rows of a query.

    Raises:
        CorruptionError: One of them is damaged; names it.
    """
    failure: Exception | None = None
    try:
        rows = conn.execute(statement, named).all()
        if _have_their_types(statement, rows):
            return [build(row) for row in rows]
    except (*database.CONFUSED, CorruptionError, DBAPIError) as error:
        failure = error
    damaged = [cell for _, cells in _carefully(conn, statement, named) for cell in cells]
    if damaged or failure is None:
        # What a query computes has no row of its own.
        raise CorruptionError(told(conn, damaged or survey(conn, _NAMED))) from failure
    raise failure


def listed(
    conn: Connection,
    statement: AnySelect,
    named: Mapping[str, Any],
    build: Callable[[Any, str], T],
    *,
    suspect: bool = False,
) -> list[T]:
    """Return what is made of the rows of a query, damaged ones included.

    Args:
        conn: A connection in a transaction.
        statement: The query.
        named: Its parameters.
        build: Makes a record of a row. The second argument says what of it is damaged, and is empty for a sound row; of
            a damaged one the cells that cannot be read are None.
        suspect: Whether the rows are known to be damaged, however well they can be read.
    """
    try:
        rows = conn.execute(statement, named).all()
        if not rows or (not suspect and _have_their_types(statement, rows)):
            return [build(row, "") for row in rows]
    except (*database.CONFUSED, CorruptionError, DBAPIError):
        pass  # read once more, with care
    return [build(row, "; ".join(map(str, cells))) for row, cells in _carefully(conn, statement, named)]


def told(conn: Connection, cells: Sequence[Cell | str]) -> str:
    """Say that the record is damaged, where, and what to do."""
    where = "; ".join(map(str, cells[:_NAMED])) or "a row cannot be read"
    more = f"; and {len(cells) - _NAMED} more" if len(cells) > _NAMED else ""
    return (
        f"{database.of(conn).name}: expected what this library wrote, but the record is damaged: {where}{more}. "
        "The weight files are untouched. `weightledger verify` lists every damaged row; restore the database from a "
        "backup, or use what is not damaged."
    )


def _have_their_types(statement: AnySelect, rows: Sequence[Any]) -> bool:
    found = {tuple(map(type, row)) for row in rows}
    if not found:
        return True
    allowed = [
        _types(type(each.type), getattr(each, "nullable", True))  # type: ignore[arg-type]
        for each in _columns(statement)
    ]
    return all(each in kinds for types in found for each, kinds in zip(types, allowed, strict=True))


def _columns(statement: AnySelect) -> list[Any]:
    return [each.element if isinstance(each, Label) else each for each in statement.selected_columns]


@cache
def _types(kind: Any, nullable: bool) -> frozenset[type]:
    """Return the Python types of a column's values."""
    found = next((types for base, types in _TYPES.items() if issubclass(kind, base)), {str})
    return frozenset({*found, type(None)} if nullable else found)


_TYPES: Final[Mapping[type[TypeEngine[Any]], set[type]]] = {
    Boolean: {bool},
    Integer: {int},
    Float: {float},
    JSON: {dict, list},
    UtcDateTime: {datetime},
}


def _carefully(
    conn: Connection, statement: AnySelect, named: Mapping[str, Any]
) -> Iterator[tuple[Any, list[Cell]]]:
    """Yield the rows of a query cell by cell: what can be read, and what is wrong with the rest."""
    columns = _columns(statement)
    tables = list(dict.fromkeys(column.table for column in columns if isinstance(column, Column)))
    keys = [list(table.primary_key) for table in tables]
    raw = statement.with_only_columns(
        *(type_coerce(each, NULLTYPE).label(f"c{at}") for at, each in enumerate([*columns, *chain(*keys)])),
        maintain_column_froms=True,
    )
    names = [str(each.name) for each in statement.selected_columns]
    shape: Any = namedtuple("Row", names)  # type: ignore[misc]
    with database.of(conn).lenient(conn):
        found = conn.execute(raw, named).all()
    for row in found:
        rest = iter(row[len(columns) :])
        key_of = {table: tuple(islice(rest, len(parts))) for table, parts in zip(tables, keys, strict=True)}
        missing = {table for table, key in key_of.items() if set(key) == {None}}
        cells = [_pointing_at_nothing(tables[0], key_of[tables[0]], table) for table in missing]
        result: list[Any] = []
        for column, cell in zip(columns, row, strict=False):
            value = cell
            if isinstance(column, Column) and column.table not in missing:
                try:
                    value = judge(column, cell)
                except _UnsoundError as error:
                    value = None
                    cells.append(Cell(column.table.name, key_of[column.table], column.name, str(error)))
            result.append(value)
        if not cells:
            cells = [
                Cell(table.name, key_of[table], name, why)
                for table in tables
                for name, why in _broken_rules(table, zip(columns, row, strict=False))
            ]
        yield shape(*result), cells


def _pointing_at_nothing(table: Any, key: tuple[Any, ...], target: Any) -> Cell:
    names = (
        column.name for column in table.c if any(each.column.table is target for each in column.foreign_keys)
    )
    return Cell(
        table.name, key, next(names, "?"), f"expected to point at a row of {target.name}, which is not there"
    )


def _broken_rules(table: Any, row: Iterable[tuple[Any, Any]]) -> Iterator[tuple[str, str]]:
    rule = _ROW_RULES.get(table.name)
    known = {column.key: cell for column, cell in row if isinstance(column, Column) and column.table is table}
    if rule is not None and len(known) == len(table.c):
        yield from rule(**known)


# ---------------------------------------------------------------------- judging


def judge(column: Any, cell: Any) -> Any:
    """Return the value of a cell as the database's driver gave it.

    Raises:
        _UnsoundError: The column cannot hold it.
    """
    value = _value(column, cell)
    rule = _RULES.get(f"{column.table.name}.{column.name}")
    if rule is not None and value is not None and not rule[0](value):
        raise _UnsoundError(f"expected {rule[1]}, found {arguments.shown(cell)}")
    return value


def _value(column: Any, cell: Any) -> Any:
    kind = column.type
    if cell is None:
        if column.nullable:
            return None
        raise _UnsoundError("expected a value, found none")
    if isinstance(kind, Boolean):
        if type(cell) in (int, bool) and cell in (0, 1):
            return bool(cell)
        raise _UnsoundError(f"expected 0 or 1, found {arguments.shown(cell)}")
    if isinstance(kind, Integer):
        if type(cell) is int:
            return cell
        raise _UnsoundError(f"expected a whole number, found {arguments.shown(cell)}")
    if isinstance(kind, Float):
        if type(cell) in (int, float):
            return float(cell)
        raise _UnsoundError(f"expected a number, found {arguments.shown(cell)}")
    # Drivers of databases that have such types give them as they are.
    if isinstance(kind, UtcDateTime) and isinstance(cell, datetime):
        return cell.astimezone(UTC)
    if isinstance(kind, JSON) and isinstance(cell, dict | list):
        return cell
    if type(cell) is not str:
        raise _UnsoundError(f"expected text, found {arguments.shown(cell)}")
    if values.surrogate(cell):
        raise _UnsoundError(f"expected UTF-8, found {arguments.shown(cell)}")
    if isinstance(kind, UtcDateTime):
        try:
            return datetime.fromisoformat(cell + "+00:00")
        except ValueError:
            raise _UnsoundError(f"expected a time, found {arguments.shown(cell)}") from None
    if isinstance(kind, JSON):
        try:
            return json.loads(cell)
        except (ValueError, RecursionError):
            raise _UnsoundError(f"expected JSON, found {arguments.shown(cell)}") from None
    return cell


def _is_digest(text: str) -> bool:
    return len(text) == 71 and text.startswith("blake3:") and set(text[7:]) <= set("0123456789abcdef")


def _is_kept(found: Any) -> bool:
    try:
        return type(found) is dict and type(values.decode(found)) is dict
    except (CorruptionError, RecursionError):
        return False


def _are_names(found: Any) -> bool:
    return type(found) is list and all(type(name) is str for name in found)


def _one_of(*words: str) -> tuple[Callable[[Any], bool], str]:
    return (lambda text: text in words), f"one of {', '.join(words)}"


_AT_LEAST_1: Final = ((lambda number: number >= 1), "a number of at least 1")
_AT_LEAST_0: Final = ((lambda number: number >= 0), "a number of at least 0")
_DIGEST: Final = (_is_digest, "a digest")
_KEPT: Final = (_is_kept, "values as this library keeps them")
_RULES: Final[Mapping[str, tuple[Callable[[Any], bool], str]]] = {
    "policies.last_number": _AT_LEAST_0,
    "policies.last_order": _AT_LEAST_0,
    "snapshots.digest": _DIGEST,
    "snapshots.file_bytes": _AT_LEAST_0,
    "versions.number": _AT_LEAST_1,
    "versions.state": _one_of(*VERSION_STATES),
    "versions.digest": _DIGEST,
    "versions.parent": _AT_LEAST_1,
    "versions.restores": _AT_LEAST_1,
    "versions.depth": _AT_LEAST_1,
    "versions.metadata": _KEPT,
    "versions.nonfinite": (_are_names, "a list of names"),
    "versions.size_bytes": _AT_LEAST_0,
    "workers.state": _one_of("confirmed", "unknown", "gone", "left"),
    "holdings.number": _AT_LEAST_1,
    "holdings.digest": _DIGEST,
    "holdings.sent_digest": _DIGEST,
    "holdings.order": _AT_LEAST_1,
    "events.details": _KEPT,
}
"""What a column's cells are beyond their type. A kind of event may be one of a newer library, so it may be any."""


# ---------------------------------------------------------------------- the whole record


def survey(conn: Connection, most: int = _MOST) -> list[Cell]:
    """Return the damaged cells of the whole record, of more than `most` only the first; reads every row."""
    with database.of(conn).lenient(conn):
        return list(islice(_everywhere(conn), most))


def versions_at(conn: Connection, policy: PolicyRef, cell: Cell) -> tuple[int, ...]:
    """Return the versions of a policy that a damaged cell belongs to."""
    columns = {
        "versions": (VersionRow.id,),
        "metrics": (VersionRow.id,),
        "snapshots": (VersionRow.snapshot_id, VersionRow.extra_snapshot_id),
        "structures": (VersionRow.structure_id, VersionRow.extra_structure_id),
    }.get(cell.table, ())
    numbers: set[int] = set()
    for column in columns:
        query = select(VersionRow.number).where(VersionRow.policy_id == policy.id, column == cell.key[0])
        numbers.update(number for number in conn.scalars(query) if type(number) is int)
    return tuple(sorted(numbers))


def _everywhere(conn: Connection) -> Iterator[Cell]:
    for table in Base.metadata.sorted_tables:
        cursor = conn.execute(select(*(type_coerce(each, NULLTYPE) for each in table.c)))
        for rows in cursor.partitions(_CHUNK):
            yield from _damaged_among(table, rows)
    for name, key, column, target in database.of(conn).broken_references(conn):
        yield Cell(name, (key,), column, f"expected to point at a row of {target}, which is not there")
    other = (
        select(VersionRow.id, VersionRow.digest, Snapshot.digest)
        .join(Snapshot, Snapshot.id == VersionRow.snapshot_id)
        .where(VersionRow.digest != Snapshot.digest)
    )
    for key, wanted, found in conn.execute(other):
        if not (
            isinstance(wanted, str) and _is_digest(wanted) and isinstance(found, str) and _is_digest(found)
        ):
            continue  # told of already, as a cell
        why = f"expected a file with the content {wanted}, found one with {found}"
        yield Cell("versions", (key,), "snapshot_id", why)
    highest = select(func.coalesce(func.max(VersionRow.number), 0)).where(VersionRow.policy_id == Policy.id)
    behind = select(Policy.id, Policy.last_number).where(Policy.last_number < highest.scalar_subquery())
    for key, number in conn.execute(behind):
        why = f"expected the highest number of a version at least, found {arguments.shown(number)}"
        yield Cell("policies", (key,), "last_number", why)


def _damaged_among(table: Table, rows: Sequence[Any]) -> Iterator[Cell]:
    keys = [at for at, column in enumerate(table.c) if column.primary_key]
    damaged = set()
    for column, cells in zip(table.c, zip(*rows, strict=True), strict=True):
        for at, why in _wrong(column, cells):
            damaged.add(at)
            yield Cell(table.name, tuple(rows[at][key] for key in keys), column.name, why)
    rule = _ROW_RULES.get(table.name)
    if rule is None:
        return
    for at, row in enumerate(rows):
        if at not in damaged:
            for name, why in rule(**dict(zip(table.c.keys(), row, strict=True))):
                yield Cell(table.name, tuple(row[key] for key in keys), name, why)


def _wrong(column: Any, cells: Sequence[Any]) -> Iterator[tuple[int, str]]:
    # Most columns have few different cells. Only of one type, since 1 and 1.0 are one cell to a set.
    types = set(map(type, cells)) - {type(None)}
    alike = len(types) <= 1 and types.isdisjoint({dict, list})
    bad: dict[Any, str] = {}
    for at, cell in enumerate(set(cells) if alike else cells):
        try:
            judge(column, cell)
        except _UnsoundError as error:
            bad[cell if alike else at] = str(error)
    if bad:
        for at, cell in enumerate(cells):
            if (why := bad.get(cell if alike else at)) is not None:
                yield at, why


def _version_rule(
    *, number: int, parent: int | None, restores: int | None, **_: Any
) -> Iterator[tuple[str, str]]:
    for name, older in (("parent", parent), ("restores", restores)):
        if older is not None and older >= number:
            yield name, f"expected a version before v{number}, found {older}"


def _structure_rule(*, fingerprint: str, body: str, **_: Any) -> Iterator[tuple[str, str]]:
    if fingerprint_of(body) != fingerprint:
        yield "body", "expected the text that its fingerprint was taken of, found another one"


def _pin_rule(*, version_id: int | None, alias: str | None, **_: Any) -> Iterator[tuple[str, str]]:
    if (version_id is None) == (alias is None):
        yield "version_id", "expected a version or an alias, found both or neither"


_ROW_RULES: Final[Mapping[str, Callable[..., Iterator[tuple[str, str]]]]] = {
    "versions": _version_rule,
    "structures": _structure_rule,
    "pins": _pin_rule,
}

"""Statements that the driver runs itself say and write what they would through SQLAlchemy."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest
from sqlalchemy import bindparam, insert, select, update
from sqlalchemy.dialects import postgresql

from weightledger.registry.database.sqlite import SqliteDatabase
from weightledger.registry.errors import CorruptionError, InUseError
from weightledger.registry.log import fleet, ledger, schema, versioning
from weightledger.registry.log.models import EventRow, Policy, Run
from weightledger.registry.log.statements import Statement

AT = datetime(2026, 2, 3, 4, 5, 6, 7, tzinfo=timezone(timedelta(hours=2)))
ADD = Statement(
    insert(EventRow).values(
        {column: bindparam(column.key) for column in EventRow.__table__.c if column.key != "id"}
    )
)
EVENT = {
    "policy_id": 1,
    "at": AT,
    "kind": "pin",
    "run_id": "r",
    "user": "ann",
    "version": None,
    "worker": "w",
    "reason": "'; DROP TABLE events; --",
    "details": {"ref": None, "ä": [1, 2.5]},
}


@pytest.fixture
def database(tmp_path: Path) -> Iterator[SqliteDatabase]:
    database = SqliteDatabase(tmp_path / "registry.db", busy_seconds=0.1)
    schema.ensure(database, create=True, migrate=True)
    with database.writing() as conn:
        conn.execute(insert(Policy).values(name="p", last_number=0, last_order=0, created_at=AT))
        conn.execute(insert(Run).values(id="r", user="ann", host="h", pid=1, program="x", started_at=AT))
    yield database
    database.close()


def test_values_are_kept_as_their_columns_want_them(database: SqliteDatabase) -> None:
    with database.writing() as conn:
        conn.execute(insert(EventRow), EVENT)
        ADD.run(conn, **EVENT)
        common = {name: value for name, value in EVENT.items() if name not in ("details", "version")}
        ADD.run_each(conn, ("details", "version"), [(EVENT["details"], None), ({}, 3)], **common)
    with database.reading() as conn:
        first, second, third, fourth = conn.execute(select(EventRow).order_by(EventRow.id)).all()
    assert first[1:] == second[1:] == third[1:]
    assert first.at == AT
    assert first.at.tzinfo is UTC
    assert (fourth.details, fourth.version, fourth.at) == ({}, 3, AT)


def test_values_that_the_statement_gives_itself_need_not_be_given(database: SqliteDatabase) -> None:
    raise_both = Statement(
        update(Policy)
        .where(Policy.id == bindparam("key"))
        .values(last_number=7, last_order=bindparam("order"))
        .returning(Policy.last_number, Policy.last_order)
    )
    with database.writing() as conn:
        assert raise_both.first(conn, key=1, order=9) == (7, 9)
        assert raise_both.first(conn, key=2, order=9) is None
        assert raise_both.all(conn, key=1, order=10) == [(7, 10)]
        with pytest.raises(KeyError, match="order"):
            raise_both.run(conn, key=1)


def test_no_rows_are_no_statements(database: SqliteDatabase) -> None:
    with database.writing() as conn:
        ADD.run_each(conn, ("details",), [], **{name: EVENT[name] for name in EVENT if name != "details"})
    with database.reading() as conn:
        assert conn.execute(select(EventRow)).all() == []


def test_what_fails_undoes_its_transaction(database: SqliteDatabase) -> None:
    with pytest.raises(CorruptionError, match="FOREIGN KEY"), database.writing() as conn:
        ADD.run(conn, **EVENT)
        ADD.run(conn, **EVENT | {"run_id": "nobody"})
    with database.reading() as conn:
        assert conn.execute(select(EventRow)).all() == []


def test_a_lock_that_another_process_keeps_is_an_error_of_ours(database: SqliteDatabase) -> None:
    other = SqliteDatabase(Path(str(database.engine.url.database)), busy_seconds=0.1)
    with other.reading() as conn:
        conn.execute(select(Policy)).all()
        # A read that becomes a write fails at once, and the driver's error is translated.
        with database.writing(), pytest.raises(InUseError, match="lock"), other.reading() as second:
            second.execute(select(Policy)).all()
            ADD.run(second, **EVENT)
    other.close()


def test_every_statement_of_the_log_can_be_said_to_postgresql_too() -> None:
    found = [
        value
        for module in (fleet, ledger, versioning)
        for value in vars(module).values()
        if isinstance(value, Statement)
    ]
    assert len(found) > 15
    for statement in found:
        text = str(statement.clause.compile(dialect=postgresql.dialect()))
        assert text.startswith(("SELECT", "INSERT", "UPDATE"))

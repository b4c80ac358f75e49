"""Connections to the database, with real files, processes and locks."""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest
from sqlalchemy import delete, insert, select, update

from tests.registry.rows import Rows, run_python
from weightledger.registry.database.sqlite import (
    JournalWarning,
    SqliteDatabase,
)
from weightledger.registry.errors import CorruptionError, InUseError, NotFoundError, SchemaError, StorageError
from weightledger.registry.log import schema
from weightledger.registry.log.models import Alias, PinRow, Policy, VersionRow


@pytest.fixture
def database(tmp_path: Path) -> Iterator[SqliteDatabase]:
    database = SqliteDatabase(tmp_path / "registry.db")
    schema.ensure(database, create=True, migrate=True)
    yield database
    database.engine.dispose()


def add_policy(database: SqliteDatabase, name: str) -> None:
    with database.writing() as conn:
        conn.execute(
            insert(Policy).values(name=name, last_number=0, last_order=0, created_at=datetime.now(UTC))
        )


def policies(database: SqliteDatabase) -> list[str]:
    with database.reading() as conn:
        return list(conn.scalars(select(Policy.name).order_by(Policy.id)))


@pytest.mark.parametrize(
    "name", ["a?b#c%20d", "with space", "%41", "späte Läufe ☃", "file:x", "a'b;c\"d", "\udcff"]
)
def test_a_folder_may_be_called_anything(tmp_path: Path, name: str) -> None:
    """SQL-10: the database lands inside that folder and nowhere else, and is found there again."""
    path = tmp_path / name / "registry.db"
    first = SqliteDatabase(path)
    schema.ensure(first, create=True, migrate=True)
    add_policy(first, "main")
    first.engine.dispose()
    assert os.listdir(tmp_path) == [name]  # noqa: PTH208 - as the bytes on the disk are, without Path's reading of them
    assert first.path == path
    again = SqliteDatabase(path)
    assert policies(again) == ["main"]
    again.engine.dispose()


def test_a_relative_path_is_resolved_when_the_engine_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQL-14."""
    monkeypatch.chdir(tmp_path)
    database = SqliteDatabase(Path("runs/registry.db"))
    schema.ensure(database, create=True, migrate=True)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    database.engine.dispose()
    add_policy(database, "main")
    assert policies(database) == ["main"]
    assert list(elsewhere.iterdir()) == []
    database.engine.dispose()


def test_opening_a_missing_file_makes_none(tmp_path: Path) -> None:
    path = tmp_path / "registry.db"
    with pytest.raises(NotFoundError, match=r"registry\.db"), SqliteDatabase(path).reading():
        pass
    with pytest.raises(NotFoundError, match=r"registry\.db"), SqliteDatabase(path).writing():
        pass
    assert list(tmp_path.iterdir()) == []


def test_every_connection_is_set_up_to_be_durable_and_strict(database: SqliteDatabase) -> None:
    with database.reading() as one, database.reading() as other:
        for conn in (one, other):
            pragmas = {
                name: conn.exec_driver_sql(f"PRAGMA {name}").scalar()
                for name in ("journal_mode", "synchronous", "foreign_keys", "busy_timeout")
            }
            assert pragmas == {
                "journal_mode": "wal",
                "synchronous": 2,
                "foreign_keys": 1,
                "busy_timeout": 30000,
            }


def test_only_a_transaction_that_need_not_be_durable_leaves_the_disk_out(database: SqliteDatabase) -> None:
    with database.writing(durable=False) as conn:
        assert conn.exec_driver_sql("PRAGMA synchronous").scalar() == 1, "NORMAL: the log is not synced"
        conn.execute(
            insert(Policy).values(name="seen", last_number=0, last_order=0, created_at=datetime.now(UTC))
        )
    with database.writing() as conn:
        assert conn.exec_driver_sql("PRAGMA synchronous").scalar() == 2, "FULL again"
        assert conn.scalar(select(Policy.name)) == "seen"
    with pytest.raises(ZeroDivisionError), database.writing(durable=False):
        raise ZeroDivisionError
    with database.writing() as conn:
        assert conn.exec_driver_sql("PRAGMA synchronous").scalar() == 2


def test_a_failed_transaction_leaves_nothing(database: SqliteDatabase) -> None:
    with pytest.raises(RuntimeError, match="stop"), database.writing() as conn:
        conn.execute(
            insert(Policy).values(name="main", last_number=0, last_order=0, created_at=datetime.now(UTC))
        )
        raise RuntimeError("stop")
    assert policies(database) == []


def test_a_reader_sees_one_state_throughout(database: SqliteDatabase) -> None:
    with database.reading() as conn:
        before = conn.scalars(select(Policy.name)).all()
        add_policy(database, "main")
        assert conn.scalars(select(Policy.name)).all() == before == []
    assert policies(database) == ["main"]


def test_a_read_that_becomes_a_write_waits_for_other_writers(database: SqliteDatabase) -> None:
    """SQL-01: it waits instead of failing at once, and never overwrites what was written meanwhile."""
    add_policy(database, "main")

    def count_up(_: int) -> None:
        for _ in range(25):
            with database.writing() as conn:
                last = conn.execute(select(Policy.last_number)).scalar_one()
                conn.execute(update(Policy).values(last_number=last + 1))

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(count_up, range(4)))
    with database.reading() as conn:
        assert conn.execute(select(Policy.last_number)).scalar_one() == 100


def test_processes_wait_for_each_other_too(database: SqliteDatabase) -> None:
    """SQL-01, with separate processes."""
    add_policy(database, "main")
    code = """
import sys
from pathlib import Path
from sqlalchemy import select, update
from weightledger.registry.database.sqlite import SqliteDatabase
from weightledger.registry.log.models import Policy
database = SqliteDatabase(Path(sys.argv[1]))
for _ in range(50):
    with database.writing() as conn:
        last = conn.execute(select(Policy.last_number)).scalar_one()
        conn.execute(update(Policy).values(last_number=last + 1))
"""
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda _: run_python(code, database.path), range(4)))
    with database.reading() as conn:
        assert conn.execute(select(Policy.last_number)).scalar_one() == 200


def test_whoever_waits_too_long_is_told_that_the_file_is_in_use(database: SqliteDatabase) -> None:
    impatient = SqliteDatabase(database.path, busy_seconds=0.05)
    with database.writing():
        with pytest.raises(InUseError, match=r"registry\.db.*Nothing was written"), impatient.writing():
            pass
        assert policies(impatient) == []  # readers do not wait
    add_policy(impatient, "main")
    assert policies(database) == ["main"]
    impatient.engine.dispose()


def test_many_threads_have_a_connection_each(database: SqliteDatabase) -> None:
    ready = threading.Barrier(24, timeout=60)

    def read(_: int) -> list[str]:
        with database.reading() as conn:
            ready.wait()
            return list(conn.scalars(select(Policy.name)))

    with ThreadPoolExecutor(24) as threads:
        assert list(threads.map(read, range(24))) == [[]] * 24


def test_without_a_write_ahead_log_it_works_on_and_warns(tmp_path: Path) -> None:
    """SQL-02: SQLite's own layer for file systems without locks has no write-ahead log, as network ones have none."""
    database = SqliteDatabase(tmp_path / "registry.db", vfs="unix-dotfile")
    with pytest.warns(JournalWarning, match="local disk") as warned:
        schema.ensure(database, create=True, migrate=True)
    assert len(warned) == 1
    add_policy(database, "main")
    with database.writing(durable=False) as conn:
        assert conn.exec_driver_sql("PRAGMA synchronous").scalar() == 3, "EXTRA: only a log is safe without"
    with database.reading() as conn:
        assert conn.exec_driver_sql("PRAGMA journal_mode").scalar() == "delete"
        assert conn.exec_driver_sql("PRAGMA synchronous").scalar() == 3  # the folder is synced as well
        assert conn.exec_driver_sql("PRAGMA foreign_keys").scalar() == 1
        assert conn.scalars(select(Policy.name)).all() == ["main"]
    database.engine.dispose()


def test_a_database_that_was_moved_to_such_a_file_system_is_no_missing_version(
    database: SqliteDatabase,
) -> None:
    """SQL-02: what the file system refuses is told as such, with the remedy."""
    add_policy(database, "main")
    database.engine.dispose()
    moved = SqliteDatabase(database.path, vfs="unix-dotfile")
    with pytest.raises(StorageError, match=r"registry\.db.*local disk"):
        policies(moved)


def test_a_copy_that_lost_its_write_ahead_log_gets_it_back(database: SqliteDatabase, tmp_path: Path) -> None:
    add_policy(database, "main")
    with database.reading() as conn:
        conn.connection.driver_connection.execute("COMMIT")  # type: ignore[union-attr]
        conn.connection.driver_connection.execute("VACUUM INTO ?", (str(tmp_path / "copy.db"),))  # type: ignore[union-attr]
    copy = SqliteDatabase(tmp_path / "copy.db")
    copy.tune()
    with copy.reading() as conn:
        assert conn.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
        assert conn.exec_driver_sql("PRAGMA synchronous").scalar() == 2
    assert policies(copy) == ["main"]
    copy.engine.dispose()


FORK = """
import os, sys
from datetime import UTC, datetime
from pathlib import Path
from sqlalchemy import insert
from sqlalchemy.exc import StatementError
from weightledger.registry.database.sqlite import SqliteDatabase
from weightledger.registry.errors import StorageError
from weightledger.registry.log.models import Policy

database = SqliteDatabase(Path(sys.argv[1]))
def add(name):
    with database.writing() as conn:
        conn.execute(insert(Policy).values(name=name, last_number=0, last_order=0, created_at=datetime.now(UTC)))
"""


def test_parent_and_child_both_write_after_a_fork(database: SqliteDatabase) -> None:
    """SQL-03: 1 + 20 + 20 rows, and a sound file; the child ends as any program does."""
    code = (
        FORK
        + """
add("before")
child = os.fork()
for index in range(20):
    add(f"{'parent' if child else 'child'}-{index}")
if child:
    assert os.waitpid(child, 0)[1] == 0
    add("after")
"""
    )
    run_python(code, database.path)
    assert len(policies(database)) == 42
    with database.reading() as conn:
        assert conn.exec_driver_sql("PRAGMA integrity_check").scalar() == "ok"


def test_a_transaction_stays_with_the_process_that_began_it(database: SqliteDatabase) -> None:
    """SQL-03: a fork in the middle of a transaction; the child can neither use, commit nor spoil it."""
    code = (
        FORK
        + """
with database.writing() as conn:
    conn.execute(insert(Policy).values(name="parent", last_number=0, last_order=0, created_at=datetime.now(UTC)))
    child = os.fork()
    if not child:
        try:
            conn.exec_driver_sql("DELETE FROM policies")
        except StatementError as error:
            assert "fork" in str(error)
        else:
            os._exit(1)
        database.engine.dispose()
        sys.exit(0)  # leaves the block: as a commit of the child's would
    status = os.waitpid(child, 0)[1]
assert status == 0, status
"""
    )
    run_python(code, database.path)
    assert policies(database) == ["parent"]


def test_a_child_that_leaves_the_block_is_told_so(database: SqliteDatabase) -> None:
    """SQL-03."""
    code = (
        FORK
        + """
child = None
try:
    with database.writing() as conn:
        conn.execute(insert(Policy).values(name="main", last_number=0, last_order=0, created_at=datetime.now(UTC)))
        child = os.fork()
        if child:
            assert os.waitpid(child, 0)[1] == 0
except StorageError as error:
    assert not child and "before the fork" in str(error)
    os._exit(0)
assert child
"""
    )
    run_python(code, database.path)
    assert policies(database) == ["main"]


def test_times_come_back_aware_and_in_utc(database: SqliteDatabase) -> None:
    """SQL-04: 13:30 at -08:00 is 21:30 UTC."""
    moment = datetime(2024, 1, 1, 13, 30, tzinfo=timezone(timedelta(hours=-8)))
    with database.writing() as conn:
        conn.execute(insert(Policy).values(name="main", last_number=0, last_order=0, created_at=moment))
    with database.reading() as conn:
        found = conn.execute(select(Policy.created_at)).scalar_one()
    assert found == moment
    assert found.isoformat() == "2024-01-01T21:30:00+00:00"
    assert found < datetime.now(UTC)


def test_times_are_compared_in_utc_whatever_the_zone_of_the_machine(database: SqliteDatabase) -> None:
    """SQL-04: order and answers do not depend on TZ, nor on the zone that a question is asked in."""
    code = """
import os, sys, time
os.environ["TZ"] = sys.argv[2]; time.tzset()
from datetime import datetime, timedelta, timezone
from pathlib import Path
from sqlalchemy import insert, select
from weightledger.registry.database.sqlite import SqliteDatabase
from weightledger.registry.log.models import Policy
database = SqliteDatabase(Path(sys.argv[1]))
east = timezone(timedelta(hours=9))
with database.writing() as conn:
    conn.execute(insert(Policy).values(name=sys.argv[2], last_number=0, last_order=0,
        created_at=datetime(2024, 1, 1, 9, 0, 0, 1, tzinfo=east)))
with database.reading() as conn:
    since = datetime(2024, 1, 1, 9, 0, tzinfo=east)
    for moment in conn.scalars(select(Policy.created_at).where(Policy.created_at > since)):
        print(moment.isoformat())
"""
    for zone in ("Asia/Tokyo", "America/Los_Angeles"):
        last = run_python(code, database.path, zone).stdout.split()
    assert last == ["2024-01-01T00:00:00.000001+00:00"] * 2


def test_a_naive_time_is_refused(database: SqliteDatabase) -> None:
    """SQL-04."""
    naive = datetime(2024, 1, 1)  # noqa: DTZ001 - what is refused
    with pytest.raises(ValueError, match="timezone-aware"), database.writing() as conn:
        conn.execute(insert(Policy).values(name="main", last_number=0, last_order=0, created_at=naive))


def test_rows_that_point_at_nothing_are_refused(tmp_path: Path) -> None:
    """SQL-05: by the database itself, for whoever writes to it."""
    rows = Rows(tmp_path)
    rows.version(1)
    with pytest.raises(CorruptionError, match="FOREIGN KEY"), rows.database.writing() as conn:
        conn.execute(
            insert(PinRow).values(
                policy_id=rows.policy.id,
                worker="w0",
                literal=True,
                version_id=999,
                alias=None,
                reason="",
                created_at=datetime.now(UTC),
                run_id="a" * 32,
            )
        )
    with pytest.raises(CorruptionError, match="FOREIGN KEY"):
        rows.pin("w0", alias="nobody")


def test_what_is_held_or_pinned_cannot_be_deleted(tmp_path: Path) -> None:
    """SQL-05: not by a direct session either, nor can an alias that a pin follows."""
    rows = Rows(tmp_path)
    held, pinned, free = rows.version(1), rows.version(2), rows.version(3)
    rows.worker("w0")
    rows.holding("w0", 1, 1, 1, 1.1)
    rows.pin("w0", version=2)
    rows.alias("best", free)
    rows.pin("w1", alias="best")
    for version in (held, pinned, free):
        with pytest.raises(CorruptionError, match="FOREIGN KEY"), rows.database.writing() as conn:
            conn.execute(delete(VersionRow).where(VersionRow.id == version))
    with pytest.raises(CorruptionError, match="FOREIGN KEY"), rows.database.writing() as conn:
        conn.execute(delete(Alias))
    assert rows.counts()["versions"] == 3


def test_a_rebuilt_table_keeps_the_rows_that_point_at_it(tmp_path: Path) -> None:
    """SQL-06: inside `rebuilding` a dropped table takes nothing with it, and references are enforced again after."""
    rows = Rows(tmp_path)
    rows.story()
    before = rows.counts()
    with rows.database.rebuilding() as conn:
        conn.exec_driver_sql("CREATE TABLE copy AS SELECT * FROM runs")
        conn.exec_driver_sql("DROP TABLE runs")
        conn.exec_driver_sql("CREATE TABLE runs AS SELECT * FROM copy")
        conn.exec_driver_sql("CREATE UNIQUE INDEX u ON runs (id)")
        conn.exec_driver_sql("DROP TABLE copy")
    assert rows.counts() == before
    with pytest.raises(CorruptionError, match="FOREIGN KEY"):
        rows.pin("w9", alias="nobody")


def test_a_rebuild_that_leaves_rows_pointing_at_nothing_is_undone(tmp_path: Path) -> None:
    """SQL-06."""
    rows = Rows(tmp_path)
    rows.story()
    before = rows.counts()
    with pytest.raises(SchemaError, match=r"holdings.*undone"), rows.database.rebuilding() as conn:
        conn.exec_driver_sql("DELETE FROM workers")
    assert rows.counts() == before


def test_a_text_file_is_no_database(tmp_path: Path) -> None:
    """SQL-16: the error names the path, and the file is not touched."""
    path = tmp_path / "registry.db"
    path.write_text("this is not a database\n" * 400)
    before = path.read_bytes()
    with pytest.raises(CorruptionError, match=r"registry\.db"):
        schema.ensure(SqliteDatabase(path), create=True, migrate=True)
    assert path.read_bytes() == before


@pytest.mark.parametrize("page", [0, 3])
def test_a_damaged_database_is_told_apart_from_an_empty_one(database: SqliteDatabase, page: int) -> None:
    """SQL-16: its first page overwritten, or one further in."""
    add_policy(database, "main")
    database.engine.dispose()
    path = database.path
    damaged = bytearray(path.read_bytes())
    damaged[4096 * page : 4096 * (page + 1)] = b"\xff" * 4096
    path.write_bytes(damaged)
    again = SqliteDatabase(path)
    with pytest.raises(CorruptionError, match=r"registry\.db.*backup"), again.reading() as conn:
        for name in ("about", "runs", "policies", "snapshots", "structures"):
            conn.exec_driver_sql(f"SELECT * FROM {name}").all()
    again.engine.dispose()
    assert path.read_bytes() == bytes(damaged)


def test_a_full_disk_is_a_storage_error_and_nothing_is_written(database: SqliteDatabase) -> None:
    """CK-11, in the database: SQLite refuses to grow the file; once there is room the next write works."""
    with database.reading() as conn:
        pages = conn.exec_driver_sql("PRAGMA page_count").scalar()
        conn.exec_driver_sql(f"PRAGMA max_page_count={pages}")
    with pytest.raises(StorageError, match=r"registry\.db: no space left"), database.writing() as conn:
        conn.execute(
            insert(Policy),
            [
                {
                    "name": f"{index}-{'x' * 200}",
                    "last_number": 0,
                    "last_order": 0,
                    "created_at": datetime.now(UTC),
                }
                for index in range(500)
            ],
        )
    assert policies(database) == []
    with database.reading() as conn:
        conn.exec_driver_sql("PRAGMA max_page_count=1000000")
    add_policy(database, "main")
    assert policies(database) == ["main"]


def test_a_commit_that_the_disk_refuses_is_a_storage_error(database: SqliteDatabase) -> None:
    """CK-11, in the commit: the system's limit on file sizes stands for the full disk."""
    add_policy(database, "before")
    code = (
        FORK
        + """
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
log = Path(sys.argv[1] + "-wal")
resource.setrlimit(resource.RLIMIT_FSIZE, (log.stat().st_size + 100, resource.RLIM_INFINITY))
try:
    add("refused")
except StorageError as error:
    assert sys.argv[1] in str(error), error
else:
    sys.exit("nothing was refused")
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
add("after")
"""
    )
    run_python(code, database.path)
    assert policies(database) == ["before", "after"]


def test_a_reader_writes_nothing(database: SqliteDatabase) -> None:
    reader = SqliteDatabase(database.path, read_only=True)
    with pytest.raises(StorageError, match="read-only"):
        add_policy(reader, "main")
    assert policies(reader) == []
    reader.engine.dispose()


def test_a_folder_that_cannot_be_written_can_be_read(database: SqliteDatabase, tmp_path: Path) -> None:
    """Media or folders of others: SQLite can make no files beside the database there."""
    add_policy(database, "main")
    database.engine.dispose()
    code = """
import os, shutil, sys, tempfile
from pathlib import Path
from sqlalchemy import select
from weightledger.registry.log import schema
from weightledger.registry.database.sqlite import SqliteDatabase
from weightledger.registry.errors import StorageError
from weightledger.registry.log.models import Policy

schema.ensure(SqliteDatabase(Path(sys.argv[1])), create=False, migrate=False)  # so that nothing is left to import
with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    path = Path(shutil.copy(sys.argv[1], folder))
    path.chmod(0o444)
    folder.chmod(0o555)
    try:
        if os.geteuid() == 0:  # the owner of everything may write everywhere
            os.seteuid(65534)
        database = SqliteDatabase(path)
        schema.ensure(database, create=False, migrate=False)
        with database.reading() as conn:
            assert conn.scalars(select(Policy.name)).all() == ["main"]
        try:
            with database.writing() as conn:
                conn.exec_driver_sql("DELETE FROM policies")
        except StorageError as error:
            assert "read-only" in str(error), error
        else:
            sys.exit("it was written")
        assert os.listdir(folder) == ["registry.db"]
    finally:
        os.seteuid(os.getuid())
        folder.chmod(0o700)
"""
    run_python(code, database.path)


def test_a_write_to_a_table_that_is_missing_asks_for_an_upgrade(database: SqliteDatabase) -> None:
    with pytest.raises(SchemaError, match="weightledger upgrade"), database.reading() as conn:
        conn.exec_driver_sql("SELECT * FROM tomorrow")


def test_errors_from_the_driver_itself_are_translated_too(database: SqliteDatabase) -> None:
    with pytest.raises(CorruptionError), database.reading():
        error = sqlite3.DatabaseError("database disk image is malformed")
        error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
        raise error

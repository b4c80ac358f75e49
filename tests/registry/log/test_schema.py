"""Making, checking and upgrading the database, with processes that are killed half-way."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from alembic.script import ScriptDirectory
from sqlalchemy import text

import weightledger.migrations
from tests.registry.rows import Rows, identity, row_counts, run_python
from weightledger.registry.database.sqlite import SqliteDatabase
from weightledger.registry.errors import CorruptionError, InUseError, NotFoundError, SchemaError
from weightledger.registry.locks.folder import file_lock
from weightledger.registry.log import schema

HEADER = """
from alembic import op
import sqlalchemy as sa
revision, down_revision, branch_labels, depends_on = "{revision}", "{before}", None, None
"""

REBUILD = (
    HEADER
    + """
def upgrade():
    with op.batch_alter_table("versions", recreate="always") as batch:
        batch.add_column(sa.Column("colour", sa.Text(), nullable=True))
        batch.alter_column("message", existing_type=sa.Text(), nullable=True)
    with op.batch_alter_table("workers", recreate="always") as batch:
        batch.alter_column("detail", existing_type=sa.Text(), nullable=True)
"""
)

LOSE = (
    HEADER
    + """
def upgrade():
    op.execute("DELETE FROM events")
"""
)

BREAK = (
    HEADER
    + """
def upgrade():
    op.execute("INSERT INTO metrics (version_id, name, policy_id, value) VALUES (999, 'reward', 999, 1.0)")
"""
)


@pytest.fixture
def later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Pretend that the library has a later revision, 0004: its text is written into the file that is given."""
    scripts = tmp_path / "scripts"
    shutil.copytree(Path(weightledger.migrations.__file__).parent, scripts)
    monkeypatch.setattr(schema, "SCRIPTS", str(scripts))
    monkeypatch.setattr(schema, "HEAD", "0004")
    yield scripts / "versions" / "v0004_later.py"


@pytest.fixture
def old(tmp_path: Path) -> Rows:
    """A registry of today with something in every table."""
    rows = Rows(tmp_path / "old")
    rows.story()
    return rows


def revisions(path: Path) -> list[str]:
    with SqliteDatabase(path).reading() as conn:
        return list(conn.execute(text("SELECT version_num FROM alembic_version")).scalars())


def test_head_is_the_head_of_the_migrations() -> None:
    """`HEAD` is written down so that the common open needs no Alembic; here it is compared with the scripts."""
    scripts = ScriptDirectory.from_config(schema.alembic_config())
    assert scripts.get_heads() == [schema.HEAD]


def test_the_common_open_imports_no_alembic(tmp_path: Path) -> None:
    schema.ensure(SqliteDatabase(tmp_path / "registry.db"), create=True, migrate=True)
    code = """
import sys
from pathlib import Path
from weightledger.registry.database.sqlite import SqliteDatabase
from weightledger.registry.log import schema
schema.ensure(SqliteDatabase(Path(sys.argv[1])), create=True, migrate=True)
print(sorted({name.split(".")[0] for name in sys.modules} & {"alembic", "torch", "ray", "mako"}))
"""
    assert run_python(code, tmp_path / "registry.db").stdout.strip() == "[]"


def test_a_registry_is_made_once_and_keeps_its_identity(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "er" / "registry.db"
    made = schema.ensure(SqliteDatabase(path), create=True, migrate=True)
    assert len(made) == 32
    assert schema.ensure(SqliteDatabase(path), create=False, migrate=False) == made
    engine = SqliteDatabase(path)
    assert schema.ensure(engine, create=True, migrate=True) == made == identity(engine)
    assert revisions(path) == [schema.HEAD]
    assert schema.ensure(SqliteDatabase(tmp_path / "registry.db"), create=True, migrate=True) != made


def test_a_missing_registry_is_not_made_by_those_who_only_look(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "registry.db"
    with pytest.raises(NotFoundError, match=str(path)):
        schema.ensure(SqliteDatabase(path), create=False, migrate=False)
    assert list(tmp_path.iterdir()) == []


def test_threads_that_open_a_new_registry_together_all_succeed(tmp_path: Path) -> None:
    """SQL-07: 4 threads, each several times, on registries that do not exist yet."""
    start = threading.Barrier(4, timeout=60)

    def ensure(_: int) -> list[str]:
        found = []
        for index in range(3):
            start.wait()
            found.append(
                schema.ensure(
                    SqliteDatabase(tmp_path / str(index) / "registry.db"), create=True, migrate=True
                )
            )
        return found

    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(ensure, range(4)))
    assert all(answer == answers[0] for answer in answers)
    for index in range(3):
        assert revisions(tmp_path / str(index) / "registry.db") == [schema.HEAD]
        assert row_counts(SqliteDatabase(tmp_path / str(index) / "registry.db"))["about"] == 1


def test_processes_that_open_a_new_registry_together_all_succeed(tmp_path: Path) -> None:
    """SQL-07: 4 processes; one set of tables, one row in the migration table, one identity."""
    path = tmp_path / "registry.db"
    code = """
import os, sys, time
from pathlib import Path
from weightledger.registry.database.sqlite import SqliteDatabase
from weightledger.registry.log import schema
while time.time() < float(sys.argv[2]): pass
print(schema.ensure(SqliteDatabase(Path(sys.argv[1])), create=True, migrate=True))
"""
    soon = time.time() + 3
    with ThreadPoolExecutor(4) as threads:
        answers = {done.stdout for done in threads.map(lambda _: run_python(code, path, soon), range(4))}
    assert len(answers) == 1
    assert revisions(path) == [schema.HEAD]
    assert row_counts(SqliteDatabase(path))["about"] == 1


def test_a_newer_database_is_refused_and_left_alone(old: Rows) -> None:
    """SQL-09: the error names the revision; not a byte is written."""
    with old.database.writing() as conn:
        conn.execute(text("UPDATE alembic_version SET version_num = 'deadbeef0001'"))
    old.database.engine.dispose()
    before = {path: path.read_bytes() for path in old.path.parent.iterdir() if path.is_file()}
    for create, migrate in ((True, True), (False, False)):
        with pytest.raises(
            SchemaError, match=r"newer version of the library.*deadbeef0001.*Nothing was written"
        ):
            schema.ensure(SqliteDatabase(old.path), create=create, migrate=migrate)
    assert {path: path.read_bytes() for path in old.path.parent.iterdir() if path.is_file()} == before


def test_a_database_of_another_program_is_refused_and_left_alone(tmp_path: Path) -> None:
    """SQL-16: neither completed nor turned into a write-ahead one; also where it has migrations of its own."""
    for name, script in {
        "plain": "CREATE TABLE songs (id INTEGER)",
        "alembic": f"CREATE TABLE songs (id INTEGER); CREATE TABLE alembic_version (version_num TEXT); "
        f"INSERT INTO alembic_version VALUES ('{schema.HEAD}')",
    }.items():
        path = tmp_path / name / "registry.db"
        path.parent.mkdir()
        with sqlite3.connect(path) as foreign:
            foreign.executescript(script)
        foreign.close()
        before = path.read_bytes()
        with pytest.raises(SchemaError, match=r"another program.*songs"):
            schema.ensure(SqliteDatabase(path), create=True, migrate=True)
        assert path.read_bytes() == before
        assert [each.name for each in path.parent.iterdir()] == ["registry.db"]


def test_an_empty_file_is_completed_but_not_by_those_who_only_look(tmp_path: Path) -> None:
    path = tmp_path / "registry.db"
    path.touch()
    with pytest.raises(NotFoundError, match="never completed"):
        schema.ensure(SqliteDatabase(path), create=False, migrate=False)
    assert path.read_bytes() == b""
    made = schema.ensure(SqliteDatabase(path), create=True, migrate=True)
    assert schema.ensure(SqliteDatabase(path), create=False, migrate=False) == made


@pytest.mark.parametrize("empty", [True, False], ids=["empty", "gone"])
def test_a_lost_log_is_not_replaced_while_its_snapshots_are_there(tmp_path: Path, empty: bool) -> None:
    """SQL-16, neighbour: cut to nothing, or deleted; a new log would begin at version 1 again."""
    path = tmp_path / "registry.db"
    made = schema.ensure(SqliteDatabase(path), create=True, migrate=True)
    good = path.read_bytes()
    snapshots = tmp_path / "snapshots"
    snapshots.mkdir()
    (snapshots / "one.safetensors").write_bytes(b"weights")
    for left in tmp_path.glob("registry.db*"):
        left.unlink()
    if empty:
        path.touch()
    with pytest.raises(CorruptionError, match=r"registry\.db.*1 snapshot files.*backup"):
        schema.ensure(SqliteDatabase(path), create=True, migrate=True)
    assert path.exists() == empty and (not empty or path.read_bytes() == b"")
    assert (snapshots / "one.safetensors").read_bytes() == b"weights"
    path.write_bytes(good)
    assert schema.ensure(SqliteDatabase(path), create=True, migrate=True) == made


KILLED = """
import os, signal, sys
from pathlib import Path
from sqlalchemy import Engine, event
from weightledger.registry.database.sqlite import SqliteDatabase
from weightledger.registry.log import schema
left = int(sys.argv[2])
@event.listens_for(Engine, "before_cursor_execute")
def count(conn, cursor, statement, *rest):
    global left
    if not statement.startswith(("SELECT", "PRAGMA")):
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
if len(sys.argv) > 3:
    schema.SCRIPTS, schema.HEAD = sys.argv[3], "0004"
schema.ensure(SqliteDatabase(Path(sys.argv[1])), create=True, migrate=True)
"""


@pytest.mark.parametrize("statement", [1, 2, 15, 30])
def test_a_registry_whose_maker_was_killed_is_completed_by_the_next_open(
    tmp_path: Path, statement: int
) -> None:
    path = tmp_path / "registry.db"
    assert run_python(KILLED, path, statement, check=False).returncode == -signal.SIGKILL
    schema.ensure(SqliteDatabase(path), create=True, migrate=True)
    assert revisions(path) == [schema.HEAD]
    with SqliteDatabase(path).reading() as conn:
        assert conn.exec_driver_sql("PRAGMA integrity_check").scalar() == "ok"


@pytest.mark.parametrize("statement", [2, 5, 9])
def test_an_upgrade_that_was_killed_leaves_the_old_database(old: Rows, later: Path, statement: int) -> None:
    later.write_text(REBUILD.format(revision="0004", before="0003"))
    before = old.counts()
    old.database.engine.dispose()
    killed = run_python(KILLED, old.path, statement, later.parents[1], check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert revisions(old.path) == ["0003"]
    assert row_counts(SqliteDatabase(old.path)) == before
    schema.ensure(SqliteDatabase(old.path), create=True, migrate=True)
    assert revisions(old.path) == ["0004"]
    assert row_counts(SqliteDatabase(old.path)) == before


def test_an_older_database_is_upgraded_and_keeps_every_row(old: Rows, later: Path) -> None:
    """SQL-06: tables that others point at are made anew; the rows of all tables stay, and so do the references."""
    later.write_text(REBUILD.format(revision="0004", before="0003"))
    before, made = old.counts(), identity(old.database)
    assert schema.ensure(old.database, create=True, migrate=True) == made
    assert old.counts() == before
    assert all(before.values())
    assert revisions(old.path) == ["0004"]
    with old.database.reading() as conn:
        assert conn.exec_driver_sql("PRAGMA foreign_key_check").all() == []
        assert conn.exec_driver_sql("PRAGMA foreign_keys").scalar() == 1
        assert conn.exec_driver_sql("SELECT colour FROM versions").all() == [(None,)] * 3


def test_those_who_only_look_do_not_upgrade(old: Rows, later: Path) -> None:
    later.write_text(REBUILD.format(revision="0004", before="0003"))
    with pytest.raises(
        SchemaError, match=r"expected revision 0004, found the older 0003.*weightledger upgrade"
    ):
        schema.ensure(old.database, create=False, migrate=False)
    assert revisions(old.path) == ["0003"]


@pytest.mark.parametrize(
    ("migration", "said"), [(LOSE, r"lost rows of events \(2 → 0\)"), (BREAK, "metrics")]
)
def test_an_upgrade_that_would_lose_something_is_undone(
    old: Rows, later: Path, migration: str, said: str
) -> None:
    """SQL-06: rows that vanish, and rows that would point at nothing."""
    later.write_text(migration.format(revision="0004", before="0003"))
    before = old.counts()
    with pytest.raises(SchemaError, match=said):
        schema.ensure(old.database, create=True, migrate=True)
    assert old.counts() == before
    assert revisions(old.path) == ["0003"]


def test_processes_that_upgrade_together_all_succeed(old: Rows, later: Path) -> None:
    """SQL-07: the upgrade happens once."""
    later.write_text(REBUILD.format(revision="0004", before="0003"))
    old.database.engine.dispose()
    before = row_counts(SqliteDatabase(old.path))
    code = """
import sys
from pathlib import Path
from weightledger.registry.database.sqlite import SqliteDatabase
from weightledger.registry.log import schema
schema.SCRIPTS, schema.HEAD = sys.argv[2], "0004"
print(schema.ensure(SqliteDatabase(Path(sys.argv[1])), create=True, migrate=True))
"""
    with ThreadPoolExecutor(4) as threads:
        answers = {
            done.stdout
            for done in threads.map(lambda _: run_python(code, old.path, later.parents[1]), range(4))
        }
    assert len(answers) == 1
    assert revisions(old.path) == ["0004"]
    assert row_counts(SqliteDatabase(old.path)) == before


def test_whoever_waits_too_long_for_an_upgrade_is_told_who_is_at_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No wait is endless: neither for a process nor for a thread."""
    monkeypatch.setattr(schema, "LOCK_SECONDS", 0.05)
    path = tmp_path / "registry.db"
    with (
        file_lock(tmp_path / "locks" / "schema", what="the schema", timeout=1),
        ThreadPoolExecutor(1) as threads,
    ):
        waiting = threads.submit(schema.ensure, SqliteDatabase(path), create=True, migrate=True)
        with pytest.raises(InUseError, match=f"the schema of .*process {os.getpid()}"):
            waiting.result()
    with schema._migrating, pytest.raises(InUseError, match="another thread"):
        schema.ensure(SqliteDatabase(path), create=True, migrate=True)
    schema.ensure(SqliteDatabase(path), create=True, migrate=True)


def test_the_hosts_log_tells_nothing_of_how_a_registry_is_made(tmp_path: Path) -> None:
    """Neither at INFO nor at DEBUG, and the host's own lines, those of Alembic in another thread too, are all there."""
    code = """
import logging, sys, threading
from pathlib import Path
logging.basicConfig(level=logging.DEBUG, stream=sys.stdout, format="%(name)s: %(message)s")
root = logging.getLogger()
talker, parent = logging.getLogger("alembic.runtime.migration"), logging.getLogger("alembic")
look = lambda: (root.level, list(root.handlers), parent.level, talker.level, root.manager.disable)
before = look()
from weightledger.registry import Registry
from weightledger.registry.database.sqlite import SqliteDatabase
from weightledger.registry.log import schema
upgrade = schema._upgrade_aloud
def beside(engine):
    thread = threading.Thread(target=talker.info, args=("a migration of the host's own",))
    thread.start(); thread.join()
    talker.warning("something is wrong")
    return upgrade(engine)
schema._upgrade_aloud = beside
Registry.open(Path(sys.argv[1]) / "r").close()
talker.info("and after it")
assert look() == before and not talker.filters
"""
    said = run_python(code, tmp_path).stdout.splitlines()
    assert [line for line in said if line.startswith("alembic")] == [
        "alembic.runtime.migration: a migration of the host's own",
        "alembic.runtime.migration: something is wrong",
        "alembic.runtime.migration: and after it",
    ]

"""The migrations: they make what the models say, and open every database that was ever released."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import CommandLine
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from torch import nn

from tests.registry.rows import Rows, identity, row_counts
from weightledger.registry import InvalidWeightsError, Registry
from weightledger.registry.database.sqlite import SqliteDatabase
from weightledger.registry.log import audit, schema
from weightledger.registry.log.models import Base, PolicyRef

DATA = Path(__file__).parent / "data"
ROOT = Path(__file__).parents[2]


def all_revisions() -> list[str]:
    scripts = ScriptDirectory.from_config(schema.alembic_config())
    return [script.revision for script in scripts.walk_revisions()][::-1]


def alembic(folder: Path, *arguments: str) -> None:
    CommandLine(prog="alembic").main(
        ["-c", str(ROOT / "pyproject.toml"), "-x", f"registry={folder}", *arguments]
    )


def test_the_migrations_make_what_the_models_say(tmp_path: Path) -> None:
    rows = Rows(tmp_path)
    with rows.database.reading() as conn:
        context = MigrationContext.configure(
            conn, opts={"compare_type": True, "compare_server_default": True}
        )
        assert compare_metadata(context, Base.metadata) == []


def statements(database: SqliteDatabase) -> dict[str, set[str]]:
    """What makes each table and index, clause by clause: SQLite keeps the text, and what was added stands last."""
    with database.reading() as conn:
        rows = conn.exec_driver_sql("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL").all()
    return {name: clauses(sql) for name, sql in rows}


def clauses(sql: str) -> set[str]:
    """Cut a statement at the commas that stand in no bracket within the outermost one."""
    sql = " ".join(sql.split())
    found, depth = [""], 0
    for character in sql:
        depth += {"(": 1, ")": -1}.get(character, 0)
        if (character, depth) in ((",", 1), ("(", 1), (")", 0)):
            found.append("")
        else:
            found[-1] += character
    return {clause.strip().replace('"', "") for clause in found if clause.strip()}


def test_checks_and_conditions_of_indices_are_those_of_the_models_too(tmp_path: Path) -> None:
    """Alembic's own comparison passes over checks, names of keys, and over what a partial index leaves out."""
    migrated = statements(Rows(tmp_path / "migrated").database)
    path = tmp_path / "made.db"
    path.touch()
    made = SqliteDatabase(path)
    with made.rebuilding() as conn:
        Base.metadata.create_all(conn)
    del migrated["alembic_version"]
    assert migrated == statements(made)


def test_the_way_down_and_up_again_ends_where_it_began(tmp_path: Path) -> None:
    rows = Rows(tmp_path)
    with rows.database.reading() as conn:
        tables = rows.database.table_names(conn)
    with rows.database.rebuilding() as conn:
        command.downgrade(schema.alembic_config(conn), "base")
        assert rows.database.table_names(conn) == {"alembic_version"}
    # What was taken down to nothing counts as never completed.
    schema.ensure(rows.database, create=True, migrate=True)
    with rows.database.reading() as conn:
        assert rows.database.table_names(conn) == tables
        assert compare_metadata(MigrationContext.configure(conn), Base.metadata) == []


@pytest.mark.parametrize("revision", all_revisions())
def test_every_revision_has_a_kept_database_that_opens(revision: str, tmp_path: Path) -> None:
    """SQL-06, from each historic schema, filled: the rows of every table are there afterwards."""
    path = tmp_path / "registry.db"
    shutil.copy(DATA / f"{revision}.db", path)
    before = row_counts(SqliteDatabase(path)) if revision == schema.HEAD else None
    made = schema.ensure(SqliteDatabase(path), create=False, migrate=True)
    database = SqliteDatabase(path)
    assert identity(database) == made
    after = row_counts(database)
    assert all(after.values()), after
    assert before is None or after == before


def test_what_was_recorded_in_a_kept_database_is_still_answered(tmp_path: Path) -> None:
    path = tmp_path / "registry.db"
    shutil.copy(DATA / "0001.db", path)
    schema.ensure(SqliteDatabase(path), create=False, migrate=True)
    policy = PolicyRef(1, "default")
    with SqliteDatabase(path).reading() as conn:
        (worker,) = audit.workers(conn, policy, alive=lambda run: True)
        assert (worker.name, worker.held, worker.target, worker.staleness) == ("w0", 3, 3, 0)
        held = audit.history(conn, policy, version=1, alive=lambda run: True)
        assert [(each.version, each.same_content_as) for each in held] == [(1, None), (3, 1)]
        assert [(pin.worker, pin.version) for pin in audit.pins(conn, policy)] == [("eval-*", 1), ("w1", 2)]
        assert [event.kind for event in audit.events(conn, policy)] == ["publish", "rollback"]


def test_a_registry_of_the_first_schema_goes_on_in_this_one(tmp_path: Path) -> None:
    """With its weights: what it says of names and shapes is read from its files, since no row does."""
    shutil.copytree(DATA / "registry-0001", tmp_path / "old")
    with Registry.open(tmp_path / "old") as registry:
        assert [version.number for version in registry.versions()] == [1, 2, 3, 4, 5]
        assert registry.verify() == []
        assert float(registry.load()["bias"]) == 5.0
        # A name without a glob's characters is one name; what was a glob before stays one, and holds what it held.
        assert [(pin.worker, pin.version, pin.literal) for pin in registry.pins()] == [
            ("env[12]", 1, False),
            ("w0", 1, True),
            ("eval-*", 1, False),
        ]
        targets = {worker.name: worker.target for worker in registry.workers()}
        assert targets == {"env1": 1, "env2": 1, "env[12]": 1, "w0": 1}

        with pytest.raises(
            InvalidWeightsError, match=r"'weight' has the shape \(2, 2\) here, \(1, 2\) there"
        ):
            registry.publish(nn.Linear(2, 2))
        with pytest.raises(InvalidWeightsError, match="'bias' is not here"):
            registry.publish(nn.Linear(2, 1, bias=False))
        assert registry.publish(nn.Linear(2, 1)).parent == 5
        assert (registry.head().dtypes, registry.get(5).dtypes) == ("float32", None)
        assert registry.rollback(3).restores == 3
        registry.publish(nn.Linear(2, 2), restructure=True)
        with pytest.raises(
            InvalidWeightsError, match=r"v3 .*nothing was rolled back(?s:.*)'weight' has the shape"
        ):
            registry.rollback(3)
        assert registry.rollback(3, restructure=True).number == 9


def test_a_damaged_head_of_the_first_schema_is_no_hindrance(tmp_path: Path) -> None:
    """Nobody can tell its names and shapes, and a training must go on."""
    shutil.copytree(DATA / "registry-0001", tmp_path / "old")
    for path in (tmp_path / "old" / "snapshots").iterdir():
        path.write_bytes(b"damaged")
    with Registry.open(tmp_path / "old") as registry:
        assert registry.publish(nn.Linear(2, 2)).number == 6


def test_pins_of_equal_words_become_one_on_the_way_down(tmp_path: Path) -> None:
    path = tmp_path / "registry.db"
    shutil.copy(DATA / "0002.db", path)
    with SqliteDatabase(path).rebuilding() as conn:
        command.downgrade(schema.alembic_config(conn), "0001")
        pins = conn.exec_driver_sql("SELECT worker, version_id FROM pins ORDER BY id").all()
        assert pins == [("eval-*", None), ("w1", 2), ("env[12]", 2)]
    assert statements(SqliteDatabase(path)) == statements(SqliteDatabase(DATA / "0001.db", read_only=True))


def test_migration_files_are_called_by_their_revision() -> None:
    scripts = ScriptDirectory.from_config(schema.alembic_config())
    for script in scripts.walk_revisions():
        assert Path(script.path).name.startswith(f"v{script.revision}_")
        assert script.doc


def test_developers_reach_a_registry_with_alembic_itself(tmp_path: Path) -> None:
    rows = Rows(tmp_path / "a?b#c%20d")
    rows.database.engine.dispose()
    alembic(rows.path.parent, "check")
    alembic(rows.path.parent, "downgrade", "base")
    assert schema.revision(rows.database) is None
    alembic(rows.path.parent, "upgrade", "head")
    schema.ensure(rows.database, create=True, migrate=True)


def test_alembic_without_a_registry_says_how_to_name_one() -> None:
    with pytest.raises(CommandError, match="-x registry=FOLDER"):
        command.current(schema.alembic_config())
    with pytest.raises(CommandError, match="--sql is not supported"):
        command.upgrade(schema.alembic_config(), "head", sql=True)


def test_a_new_migration_starts_from_the_template_with_its_rules(tmp_path: Path) -> None:
    scripts = tmp_path / "scripts"
    shutil.copytree(ROOT / "migrations", scripts)
    rows = Rows(tmp_path / "registry")
    with rows.database.rebuilding() as conn:
        config = schema.alembic_config(conn)
        config.set_main_option("script_location", str(scripts))
        command.revision(config, "colours", rev_id="0004", autogenerate=True)
    (path,) = (scripts / "versions").glob("0004*.py")
    source = path.read_text()
    compile(source, path, "exec")
    assert source.startswith('"""colours\n\nRevision 0004, after 0003.')
    assert "Lose no row." in source
    assert "pass\n" in source

"""One registry in many hands: processes, threads, forks, pickles, working directories, time zones, other users."""

from __future__ import annotations

import os
import pickle
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import delete, insert, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from tests.registry.helpers import (
    exit_code_of,
    extra_file_of,
    file_of,
    files,
    hold,
    in_child,
    in_children,
    memory_folder,
    numbers,
    publish_many,
    value_of,
    weights,
)
from weightledger.registry import (
    ConflictError,
    CorruptionError,
    InUseError,
    NotFoundError,
    Registry,
    SchemaError,
    StorageError,
)
from weightledger.registry.log import fleet
from weightledger.registry.log.models import HoldingRow, PinRow, Policy, VersionRow, Worker
from weightledger.registry.store import local


@pytest.fixture
def memory() -> Iterator[Path]:
    with memory_folder() as folder:
        yield folder


def _publish_values(folder: Path, values: list[float]) -> dict[int, float]:
    with Registry.open(folder) as registry:
        return {registry.publish(weights(value)).number: value for value in values}


# ---------------------------------------------------------------------- many writers


@pytest.mark.parametrize(("processes", "rounds"), [(4, 50), (2, 100)])
def test_processes_that_publish_at_once_get_numbers_of_their_own(
    memory: Path, processes: int, rounds: int
) -> None:
    """SQL-01 and SQL-15: no error, no number twice, and every number has its own writer's content."""
    Registry.open(memory).close()
    work = [(memory, [1000.0 * who + at for at in range(rounds)]) for who in range(1, processes + 1)]
    published: dict[int, float] = {}
    for result in in_children(_publish_values, work):
        assert not published.keys() & result.keys()
        published |= result
    with Registry.open(memory) as registry:
        assert numbers(registry.versions()) == list(range(1, processes * rounds + 1)) == sorted(published)
        assert [version.parent for version in registry.versions()] == [None, *range(1, processes * rounds)]
        assert {number: value_of(registry.load(number)) for number in published} == published
        assert len({version.run for version in registry.versions()}) == processes


def test_threads_and_processes_that_publish_at_once_never_share_a_temporary_file(memory: Path) -> None:
    """CK-13: two threads of each of two processes."""
    published: dict[int, float] = {}
    for result in in_children(_publish_in_threads, [(memory, 1000.0), (memory, 3000.0)]):
        published |= result
    with Registry.open(memory) as registry:
        assert len(published) == len(registry.versions()) == 60
        assert {number: value_of(registry.load(number)) for number in published} == published
        assert registry.verify() == []


def _publish_in_threads(folder: Path, first: float) -> dict[int, float]:
    with Registry.open(folder) as registry, ThreadPoolExecutor(2) as pool:
        calls = [
            (first + at, pool.submit(registry.publish, weights(first + at, 4 + at), restructure=True))
            for at in range(30)
        ]
        return {call.result().number: value for value, call in calls}


def test_of_two_that_publish_on_the_same_parent_one_wins(memory: Path) -> None:
    with Registry.open(memory) as registry:
        registry.publish(weights(0))
        results = in_children(_publish_on, [(memory, value, 1) for value in (1.0, 2.0, 3.0)])
        assert sorted(results) == ["ConflictError", "ConflictError", "v2"]
        assert numbers(registry.versions()) == [1, 2]


def _publish_on(folder: Path, value: float, parent: int) -> str:
    with Registry.open(folder) as registry:
        try:
            return f"v{registry.publish(weights(value), parent=parent).number}"
        except ConflictError as error:
            return type(error).__name__


def test_equal_content_published_beside_a_running_prune_is_always_there(memory: Path) -> None:
    """The publisher's version is the head, so no prune may take its file, whoever shares it."""
    Registry.open(memory).close()
    stop = memory / "stop"
    published, pruned = in_children(_beside, [(memory, stop, "publish"), (memory, stop, "prune")])
    assert published == 60 and pruned > 0
    with Registry.open(memory) as registry:
        assert registry.verify() == []
        registry.prune(keep_last=1)
        stays = {file_of(registry, number).name for number in (59, 60)} | {extra_file_of(registry, 60).name}
        assert set(files(registry)) == stays


def _beside(folder: Path, stop: Path, role: str) -> int:
    done = 0
    with Registry.open(folder) as registry:
        if role == "prune":
            while not stop.exists():
                done += len(registry.prune(keep_last=1))
            return done
        for at in range(60):
            version = registry.publish(weights(at % 3), extra={"same": 1})
            assert value_of(registry.load(version)) == at % 3
            assert registry.load_extra(version) == {"same": 1}
            done += 1
        stop.touch()
    return done


def test_a_reader_never_sees_a_version_that_it_cannot_load(memory: Path) -> None:
    Registry.open(memory).close()
    published, seen = in_children(_write_or_read, [(memory, "write"), (memory, "read")])
    assert published == 60 and seen > 0


def _write_or_read(folder: Path, role: str) -> int:
    with Registry.open(folder) as registry:
        if role == "write":
            return len(publish_many(registry, 60))
        seen = 0
        while not registry.versions() or registry.head().number < 60:
            for version in registry.versions(limit=1):
                assert value_of(registry.load(version)) == version.number
                seen += 1
        return seen


# ---------------------------------------------------------------------- forks, pickles, folders


def test_a_fork_publishes_on_with_connections_of_its_own(tmp_path: Path) -> None:
    """SQL-03."""
    assert exit_code_of(_fork_and_publish, tmp_path / "r") == 0
    with Registry.open(tmp_path / "r") as registry:
        assert numbers(registry.versions()) == list(range(1, 42))
        assert len({version.run for version in registry.versions()}) == 2
        assert registry.verify() == []
        with sqlite3.connect(Path(registry.location) / "registry.db") as plain:
            assert plain.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        plain.close()


def _fork_and_publish(folder: Path) -> None:
    registry = Registry.open(folder)
    registry.publish(weights(0))
    child = os.fork()
    for value in range(20):
        registry.publish(weights(1000 * (child == 0) + value))
    if child == 0:
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def test_a_fork_in_the_middle_of_a_publish_of_another_thread_can_publish(tmp_path: Path) -> None:
    assert exit_code_of(_fork_amid_a_publish, tmp_path / "r") == 0
    with Registry.open(tmp_path / "r") as registry:
        assert sorted(value_of(registry.load(version)) for version in registry.versions()) == [1, 2]


def _fork_amid_a_publish(folder: Path) -> None:
    from weightledger.registry.store import local

    registry = Registry.open(folder)
    reached, go_on = threading.Event(), threading.Event()
    write = local._write

    def slow_write(*arguments: Any) -> None:
        reached.set()
        assert go_on.wait(60)
        write(*arguments)

    local._write = slow_write
    thread = threading.Thread(target=registry.publish, args=(weights(1),))
    thread.start()
    assert reached.wait(60)
    child = os.fork()
    if child == 0:
        local._write = write
        registry.publish(weights(2))
        os._exit(0)
    go_on.set()
    thread.join(60)
    assert os.waitpid(child, 0)[1] == 0


def test_processes_that_make_the_registry_at_once_make_one(tmp_path: Path) -> None:
    """SQL-07."""
    identities = in_children(_identity, [(tmp_path / "new" / "r",)] * 4)
    assert len(set(identities)) == 1


@pytest.mark.folder
def test_a_new_registry_has_a_write_ahead_log_from_its_first_open(tmp_path: Path) -> None:
    """Else whoever reads waits for whoever writes, until somebody opens it again."""
    with Registry.open(tmp_path / "new" / "r") as registry, registry.ledger.reading() as conn:
        assert conn.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"


@pytest.mark.folder
def test_threads_that_make_the_registry_at_once_make_one(tmp_path: Path) -> None:
    """SQL-07."""
    with ThreadPoolExecutor(4) as pool:
        identities = list(pool.map(_identity, [tmp_path / "r"] * 4))
    assert len(set(identities)) == 1
    with sqlite3.connect(tmp_path / "r" / "registry.db") as plain:
        assert plain.execute("SELECT count(*) FROM alembic_version").fetchone() == (1,)
        assert plain.execute("SELECT count(*) FROM about").fetchone() == (1,)
    plain.close()


def _identity(folder: Path) -> str:
    with Registry.open(folder) as registry:
        return registry.uuid


@pytest.mark.folder
def test_a_relative_path_is_the_one_of_the_moment_of_opening(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQL-14: then the working directory changes, and the registry travels into another process."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with Registry.open("runs/r1", policy="main") as registry:
        monkeypatch.chdir("elsewhere")
        registry.publish(weights(1))
        assert registry.location == tmp_path / "runs" / "r1"
        assert in_child(_publish_through, registry) == ("main", 2)
        assert value_of(registry.load(2)) == 2
        again = pickle.loads(pickle.dumps(registry))
        assert (again.location, again.policy, again.uuid) == (registry.location, "main", registry.uuid)
        again.close()
    found = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("registry.db"))
    assert found == [Path("runs/r1/registry.db")]


def _publish_through(registry: Registry) -> tuple[str, int]:
    os.chdir("/")
    with registry:
        return registry.policy, registry.publish(weights(2)).number


def test_a_pickle_of_a_registry_that_is_gone_does_not_make_a_new_one(tmp_path: Path) -> None:
    with Registry.open(tmp_path / "r") as registry:
        data = pickle.dumps(registry)
    shutil.rmtree(tmp_path / "r")
    with pytest.raises(NotFoundError, match=str(tmp_path / "r")):
        pickle.loads(data)
    assert not (tmp_path / "r").exists()


def test_a_temporary_directory_on_another_disk_is_not_used(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CK-14."""
    monkeypatch.setenv("TMPDIR", str(memory))
    monkeypatch.setattr(tempfile, "tempdir", None)
    with Registry.open(tmp_path / "r") as registry:
        for size in (4, 1 << 19):
            registry.publish(weights(1, size), extra={"x": 1}, restructure=True)
            assert value_of(registry.load()) == 1
        registry.export(1, tmp_path / "out.safetensors")
    assert list(memory.iterdir()) == []


@pytest.mark.folder
@pytest.mark.parametrize(
    "name", ["a?b#c%20d", "with spaces", "ümläut 漢字", "mode=ro&x", "a'b\"c", "50%", "x;y"]
)
def test_a_folder_may_have_any_name(tmp_path: Path, name: str) -> None:
    """SQL-10."""
    with Registry.open(tmp_path / name) as registry:
        registry.publish(weights(1))
    assert (tmp_path / name / "registry.db").stat().st_size > 0
    assert list(tmp_path.iterdir()) == [tmp_path / name]
    with Registry.open(tmp_path / name, create=False) as registry:
        assert value_of(registry.load()) == 1


def test_a_folder_that_moved_is_the_same_registry(tmp_path: Path) -> None:
    with Registry.open(tmp_path / "old") as registry:
        registry.publish(weights(1))
        identity = registry.uuid
    (tmp_path / "old").rename(tmp_path / "new")
    with Registry.open(tmp_path / "new") as registry:
        assert registry.uuid == identity and value_of(registry.load()) == 1


def test_a_registry_can_be_closed_twice_and_is_a_context(tmp_path: Path) -> None:
    with Registry.open(tmp_path / "r", policy="main") as registry:
        assert repr(registry) == f"<Registry {str(tmp_path / 'r')!r} policy='main'>"
    registry.close()


def test_times_are_utc_whatever_the_machines_zone(tmp_path: Path) -> None:
    """SQL-04."""
    with Registry.open(tmp_path / "r") as registry:
        at, held = in_child(_publish_in_zone, registry.location, "America/Los_Angeles")
        seen = in_child(_created_at, registry.location, "Asia/Tokyo")
        assert seen == at == registry.head().created_at and at.utcoffset() == timedelta(0)
        assert abs(datetime.now(UTC) - at) < timedelta(minutes=10)
        assert registry.holdings()[0].confirmed_at == held
        assert registry.events(since=at - timedelta(seconds=1)) and not registry.events(
            since=at + timedelta(hours=1)
        )
        with pytest.raises(ValueError, match="aware"):
            registry.events(since=datetime(2026, 1, 1))  # noqa: DTZ001


def _publish_in_zone(folder: Path, zone: str) -> tuple[datetime, datetime | None]:
    os.environ["TZ"] = zone
    time.tzset()
    with Registry.open(folder) as registry:
        at = registry.publish(weights(1)).created_at
        hold(registry, "w", 1)
        return at, registry.holdings()[0].confirmed_at


def _created_at(folder: Path, zone: str) -> datetime:
    os.environ["TZ"] = zone
    time.tzset()
    with Registry.open(folder) as registry:
        return registry.head().created_at


# ---------------------------------------------------------------------- opening what is not fit


def test_a_missing_registry_is_not_made_when_nobody_asked_for_it(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=str(tmp_path / "r")):
        Registry.open(tmp_path / "r", create=False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.folder
def test_a_database_of_a_newer_library_is_refused_and_not_touched(tmp_path: Path) -> None:
    """SQL-09."""
    with Registry.open(tmp_path / "r") as registry:
        registry.publish(weights(1))
    database = tmp_path / "r" / "registry.db"
    with sqlite3.connect(database) as plain:
        plain.execute("UPDATE alembic_version SET version_num = 'deadbeef0001'")
    plain.close()
    before = database.read_bytes()
    with pytest.raises(SchemaError, match=r"newer version.*deadbeef0001.*Upgrade"):
        Registry.open(tmp_path / "r")
    assert database.read_bytes() == before


def _fill_with_text(database: Path) -> None:
    database.write_text("this is not a database\n" * 500)


def _overwrite_first_page(database: Path) -> None:
    with database.open("r+b") as file:
        file.write(b"\xff" * 4096)


@pytest.mark.folder
@pytest.mark.parametrize("damage", [_fill_with_text, _overwrite_first_page])
def test_a_damaged_database_is_told_and_neither_replaced_nor_repaired(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    """SQL-16."""
    with Registry.open(tmp_path / "r") as registry:
        registry.publish(weights(1))
        path = file_of(registry, 1)
    content = path.read_bytes()
    database = tmp_path / "r" / "registry.db"
    damage(database)
    before = database.read_bytes()
    with pytest.raises(CorruptionError, match=f"{database}.*untouched.*backup"):
        Registry.open(tmp_path / "r")
    assert database.read_bytes() == before and path.read_bytes() == content


@pytest.mark.folder
def test_a_database_of_another_program_is_refused(tmp_path: Path) -> None:
    """SQL-16's neighbour."""
    with sqlite3.connect(tmp_path / "registry.db") as plain:
        plain.execute("CREATE TABLE shopping (item TEXT)")
    plain.close()
    with pytest.raises(SchemaError, match=r"another program.*shopping"):
        Registry.open(tmp_path)


@pytest.mark.folder
def test_a_file_where_the_folder_should_be_is_told(tmp_path: Path) -> None:
    (tmp_path / "r").touch()
    with pytest.raises((StorageError, NotFoundError), match=str(tmp_path / "r")):
        Registry.open(tmp_path / "r")


READ_ONLY = """
import os, sys
import torch
from weightledger.registry import Registry, StorageError
import weightledger.registry.weights.codec, weightledger.registry.weights.payload
if os.geteuid() == 0:
    os.setuid(65534)
with Registry.open(sys.argv[1], create=False) as registry:
    assert registry.head().number == 2 and registry.load(1)["w"].tolist() == [1, 1, 1, 1]
    assert len(registry.versions()) == 2 and registry.verify() == [] and registry.target("w").number == 2
    for write in (lambda: registry.publish({"w": torch.zeros(1)}), lambda: registry.rollback(1),
                  lambda: registry.pin("w", 1), lambda: registry.prune(keep_last=1)):
        try:
            write()
        except StorageError as error:
            assert sys.argv[1] in str(error), error
        else:
            raise AssertionError("written into a read-only folder")
"""


@pytest.mark.folder
def test_a_folder_that_cannot_be_written_can_be_read() -> None:
    folder = Path(tempfile.mkdtemp(prefix="weightledger-read-only-"))
    try:
        with Registry.open(folder / "r") as registry:
            publish_many(registry, 2)
        folder.chmod(0o755)
        places = [folder / "r", *(path for path in (folder / "r").rglob("*"))]
        for place in places:
            place.chmod(0o555 if place.is_dir() else 0o444)
        before = sorted(places)
        done = subprocess.run(
            [sys.executable, "-c", READ_ONLY, str(folder / "r")],
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert sorted([folder / "r", *(folder / "r").rglob("*")]) == before
    finally:
        for place in [folder / "r", *(path for path in (folder / "r").rglob("*") if path.is_dir())]:
            place.chmod(0o755)
        shutil.rmtree(folder)


# ---------------------------------------------------------------------- references, kept by the database


def test_rows_that_point_at_nothing_are_refused_in_a_direct_session(tmp_path: Path) -> None:
    """SQL-05."""
    with Registry.open(tmp_path / "r") as registry:
        publish_many(registry, 2)
        hold(registry, "w", 1)
        registry.pin("w", 2)
        with Session(registry.database.engine) as session:
            policy = session.scalar(select(Policy.id))
            run = registry.locks.current().id
            common = {
                "policy_id": policy,
                "literal": True,
                "reason": "",
                "created_at": datetime.now(UTC),
                "run_id": run,
            }
            for statement in (
                insert(PinRow).values(worker="x", version_id=999, alias=None, **common),
                insert(PinRow).values(worker="x", version_id=None, alias="nope", **common),
                update(HoldingRow).values(version_id=999),
                delete(VersionRow).where(VersionRow.number == 1),
                delete(VersionRow).where(VersionRow.number == 2),
            ):
                with pytest.raises(IntegrityError):
                    session.execute(statement)
                session.rollback()
        assert numbers(registry.versions()) == [1, 2]


# ---------------------------------------------------------------------- workers


def test_a_push_is_an_intention_until_the_workers_own_receipt(tmp_path: Path) -> None:
    """Promise 4."""
    with Registry.open(tmp_path / "r") as registry:
        publish_many(registry, 2)
        hold(registry, "w", 1)
        hold(registry, "w", 2, confirm=False)
        (status,) = registry.workers()
        assert (status.held, status.pending, status.target, status.last_held) == (None, 2, 2, 1)
        assert [(each.version, each.state) for each in registry.history()] == [(1, "unknown"), (2, "pending")]


def test_a_worker_of_a_run_that_died_is_unknown_not_still_there(tmp_path: Path) -> None:
    """Promise 4 and RL-11."""
    with Registry.open(tmp_path / "r") as registry:
        publish_many(registry, 2)
        assert exit_code_of(_die_after_a_receipt, registry.location) == -9
        (status,) = registry.workers()
        assert (status.state, status.held, status.last_held) == ("unknown", None, 1)
        hold(registry, "w", 2)  # this run may take it over
        assert registry.workers()[0].held == 2


def _die_after_a_receipt(folder: Path) -> None:
    hold(Registry.open(folder), "w", 1)
    os.kill(os.getpid(), 9)


def test_a_worker_that_a_live_run_steers_is_not_taken_over(tmp_path: Path) -> None:
    with Registry.open(tmp_path / "r") as registry:
        publish_many(registry, 2)
        hold(registry, "w", 1)
        with pytest.raises(InUseError, match=rf"'w'.*'default'.*{registry.locks.current().id}"):
            in_child(_take_over, registry.location)
        assert registry.workers()[0].held == 1


def _take_over(folder: Path) -> None:
    with Registry.open(folder) as registry:
        hold(registry, "w", 2)


def test_orders_grow_across_drivers(tmp_path: Path) -> None:
    """Promise 5, the registry's share of it."""
    with Registry.open(tmp_path / "r") as registry:
        publish_many(registry, 1)
        orders = [in_child(_next_order, registry.location) for _ in range(2)]
        assert orders == [1, 2]


def _next_order(folder: Path) -> int:
    with Registry.open(folder) as registry, registry.ledger.writing() as conn:
        return fleet.next_order(registry.ledger, conn)


# ---------------------------------------------------------------------- one folder, many spellings and lives


def test_a_registry_by_two_spellings_is_one_registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link to the latest run is common, and so is a working directory that changes."""
    (tmp_path / "runs").mkdir()
    (tmp_path / "latest").symlink_to("runs/7")
    monkeypatch.chdir(tmp_path / "runs")
    with Registry.open(tmp_path / "runs" / "7") as first:
        publish_many(first, 1)
        hold(first, "w1", 1)
        monkeypatch.chdir(tmp_path)
        ways = (tmp_path / "latest", "latest", "runs/../runs/7", "runs/./7/")
        for number, way in enumerate(ways, start=2):
            with Registry.open(way) as second:
                assert second.uuid == first.uuid
                assert second.publish(weights(number)).number == number
                hold(second, f"w{number}", number)
                assert [status.state for status in second.workers()] == ["confirmed"] * number
            assert [status.held for status in first.workers()] == list(range(1, number + 1))
            with pytest.raises(InUseError, match="'w1'"):
                in_child(_take_over_the_first, way if isinstance(way, Path) else tmp_path / way)


def _take_over_the_first(folder: Path) -> None:
    with Registry.open(folder) as registry:
        hold(registry, "w1", 1)


def test_a_registry_that_is_made_anew_has_its_workers_to_itself(tmp_path: Path) -> None:
    """A notebook removes the folder and runs its first cells again; what was open before it is closed after it."""
    folder = tmp_path / "r"
    old = Registry.open(folder)
    publish_many(old, 2)
    hold(old, "w", 1)
    shutil.rmtree(folder)
    with Registry.open(folder) as new:
        assert new.uuid != old.uuid
        publish_many(new, 2)
        hold(new, "w", 2)
        old.close()
        assert in_child(_states, folder) == [("confirmed", 2)]
        with pytest.raises(InUseError, match="'w'"):
            in_child(_take_over, folder)
        assert new.workers()[0].held == 2
    assert in_child(_states, folder) == [("unknown", None)]


@pytest.mark.folder
def test_a_run_whose_lock_file_was_removed_keeps_its_workers_from_its_next_push_on(tmp_path: Path) -> None:
    """Somebody who tidies up takes `locks/` for rubbish."""
    with Registry.open(tmp_path / "r") as registry:
        publish_many(registry, 2)
        hold(registry, "w", 1)
        shutil.rmtree(Path(registry.location) / "locks")
        assert in_child(_states, registry.location) == [("unknown", None)]
        _push(registry, "w", 2)
        assert in_child(_states, registry.location) == [("confirmed", 2)]
        with pytest.raises(InUseError, match="'w'"):
            in_child(_take_over, registry.location)


def _push(registry: Registry, worker: str, number: int) -> None:
    """Push as an updater does that claimed its workers long ago."""
    digest = registry.get(number).digest
    with registry.ledger.writing() as conn:
        policy = registry.ledger.policy_ref(conn)
        key = conn.scalar(select(Worker.id).where(Worker.policy_id == policy.id, Worker.name == worker))
        assert key is not None
        order = fleet.intend(registry.ledger, conn, [fleet.Push(key, number, digest)])
    with registry.ledger.writing() as conn:
        receipt = fleet.Settlement(key, worker, "confirmed", order, number, "life-1", digest)
        fleet.settle(registry.ledger, conn, [receipt])


def _states(folder: Path) -> list[tuple[str, int | None]]:
    with Registry.open(folder) as registry:
        return [(status.state, status.held) for status in registry.workers()]


# ---------------------------------------------------------------------- the first publish of a policy


def _die_in_the_first_publish(folder: Path, policy: str, size: int) -> None:
    def die(*_: Any) -> None:
        os.kill(os.getpid(), 9)

    registry = Registry.open(folder, policy=policy)
    local.LocalWriter.sync = die  # type: ignore[method-assign]
    registry.publish(weights(1, size))


@pytest.mark.parametrize("size", [4, 3 << 20], ids=["small", "big"])
def test_a_first_publish_that_dies_leaves_nothing_for_good(tmp_path: Path, size: int) -> None:
    """Its policy has no row yet that would tell its name."""
    with Registry.open(tmp_path / "r") as registry:
        assert exit_code_of(_die_in_the_first_publish, registry.location, "default", size) == -9
        assert exit_code_of(_die_in_the_first_publish, registry.location, "opponent", size) == -9
        with registry.ledger.reading() as conn:
            assert registry.ledger.policies(conn) == []
        assert {fault.kind for fault in registry.verify()} == {"stray"} and len(files(registry)) == 1
        (Path(registry.location) / "snapshots" / ".notes.tmp").touch()
        with Registry.open(tmp_path / "r"):
            assert files(registry) == [".notes.tmp"], "what is none of ours stays"


def test_a_first_publish_that_is_at_work_keeps_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others open the registry, and verify it, while its file has its temporary name."""
    looks: list[tuple[list[str], list[Any]]] = []
    sync = local.LocalWriter.sync

    def look(writer: local.LocalWriter, name: str | None = None) -> None:
        if not looks:
            with Registry.open(tmp_path / "r", policy="other") as other:
                looks.append((files(other), other.verify()))
        sync(writer, name)

    monkeypatch.setattr(local.LocalWriter, "sync", look)
    with Registry.open(tmp_path / "r", policy="first") as registry:
        registry.publish(weights(1))
        ((listing, faults),) = looks
        assert len(listing) == 1 and listing[0].endswith(".tmp") and faults == []
        assert registry.verify() == [] and len(files(registry)) == 1

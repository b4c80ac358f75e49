"""A registry on a PostgreSQL server: what differs from a folder. The other tests run there by `tests/on_postgres`."""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.on_postgres.server import Server, running_server
from tests.registry.damaging import run
from tests.registry.store.buckets import BUCKET, serving, use
from weightledger.registry import (
    ConflictError,
    InUseError,
    NotFoundError,
    Registry,
    SchemaError,
    StorageError,
)
from weightledger.registry.database.postgres import PostgresDatabase, masked
from weightledger.registry.locks.postgres import PostgresLocks
from weightledger.updater.testing import FakeWorkers

PATIENCE = 60


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running_server() as started:
        yield started


@pytest.fixture
def url(server: Server, request: pytest.FixtureRequest) -> str:
    """The URL of a schema of one's own."""
    name = f"s{abs(hash(request.node.name)) % 10**12}"
    server.execute(f"DROP SCHEMA IF EXISTS {name} CASCADE")
    server.execute(f"CREATE SCHEMA {name}")
    return f"{server.url}&options=-csearch_path%3D{name}"


@pytest.fixture
def registry(url: str, tmp_path: Path) -> Iterator[Registry]:
    with Registry.open(url, snapshots=tmp_path / "shared") as opened:
        yield opened


def weights(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((4,), value)}


def value_of(registry: Registry, ref: int | str = "head") -> float:
    loaded = registry.load(ref)
    assert isinstance(loaded, dict)
    return float(loaded["w"][0])


def child(code: str, *arguments: object, pipe: int | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)], stdout=pipe, stdin=pipe, text=True
    )


# ---------------------------------------------------------------------- opening


def test_a_later_opener_need_not_say_where_the_snapshots_are(url: str, registry: Registry) -> None:
    registry.publish(weights(1.0))
    with Registry.open(url, create=False) as later:
        assert value_of(later) == 1.0 and later.uuid == registry.uuid
    assert value_of(pickle.loads(pickle.dumps(registry))) == 1.0


def test_a_new_registry_asks_where_its_snapshots_are_to_be(url: str) -> None:
    with pytest.raises(NotFoundError, match="snapshots="):
        Registry.open(url)


def test_nothing_is_made_where_nothing_is_and_create_is_off(url: str, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="expected a registry"):
        Registry.open(url, snapshots=tmp_path / "shared", create=False)
    assert not (tmp_path / "shared").exists()
    with PostgresDatabase(url).reading() as conn:
        assert PostgresDatabase(url).table_names(conn) == set()


def test_two_registries_never_share_a_place_for_snapshots(
    server: Server, registry: Registry, tmp_path: Path
) -> None:
    registry.publish(weights(1.0))
    server.execute("DROP SCHEMA IF EXISTS other CASCADE")
    server.execute("CREATE SCHEMA other")
    other = f"{server.url}&options=-csearch_path%3Dother"
    with pytest.raises(StorageError, match=registry.uuid):
        Registry.open(other, snapshots=tmp_path / "shared")
    with Registry.open(other, snapshots=tmp_path / "own") as second:
        assert second.uuid != registry.uuid and second.versions() == []


def test_snapshots_that_are_not_mounted_here_are_told(url: str, registry: Registry, tmp_path: Path) -> None:
    registry.publish(weights(1.0))
    (tmp_path / "shared").rename(tmp_path / "elsewhere")
    with pytest.raises(StorageError, match="mounted"):
        Registry.open(url)
    with Registry.open(url, snapshots=tmp_path / "elsewhere") as found:
        assert value_of(found) == 1.0


def test_a_schema_with_tables_of_another_program_is_left_alone(
    server: Server, url: str, tmp_path: Path
) -> None:
    name = url.rpartition("%3D")[2]
    server.execute(f"CREATE TABLE {name}.invoices (id int)")
    with pytest.raises(SchemaError, match="invoices"):
        Registry.open(url, snapshots=tmp_path / "shared")


def test_an_older_schema_is_upgraded_by_the_command_alone(
    server: Server, url: str, registry: Registry, tmp_path: Path
) -> None:
    registry.publish(weights(1.0))
    name = url.rpartition("%3D")[2]
    server.execute(f"UPDATE {name}.alembic_version SET version_num = '0002'")
    server.execute(f"ALTER TABLE {name}.about DROP COLUMN snapshots")
    with pytest.raises(SchemaError, match="weightledger upgrade"):
        Registry.open(url)
    ran = run("--registry", url, "upgrade")
    assert ran.code == 0 and "is upgraded" in ran.out, ran
    with Registry.open(url, snapshots=tmp_path / "shared") as upgraded:
        assert value_of(upgraded) == 1.0


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda url: url.replace("postgres:@", "nobody:hunter2@"), "nobody"),
        (lambda url: url.replace("/postgres?", "/missing?"), "missing"),
    ],
)
def test_who_is_not_let_in_is_told_so_at_once_and_without_the_password(
    url: str, change: Callable[[str], str], says: str, tmp_path: Path
) -> None:
    started = time.monotonic()
    with pytest.raises(StorageError, match=says) as caught:
        Registry.open(change(url), snapshots=tmp_path / "shared")
    assert "hunter2" not in str(caught.value) and time.monotonic() - started < 8


def test_a_server_that_is_not_there_is_one_error_within_a_bound(tmp_path: Path) -> None:
    started = time.monotonic()
    with pytest.raises(StorageError, match="cannot be reached") as caught:
        Registry.open("postgresql+psycopg://ann:hunter2@127.0.0.1:9/db", snapshots=tmp_path / "shared")
    assert "hunter2" not in str(caught.value) and time.monotonic() - started < PATIENCE


@pytest.mark.parametrize(
    "wrong", ["postgresql+psycopg://host", "postgresql://", "postgresql+psycopg://h:port/db"]
)
def test_a_url_that_cannot_be_one_is_refused_by_name(wrong: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="URL"):
        Registry.open(wrong, snapshots=tmp_path / "shared")


def test_a_password_is_in_no_text_about_the_registry(registry: Registry) -> None:
    secret = PostgresDatabase("postgresql+psycopg://ann:hunter2@host:5433/db?password=hunter2")
    assert secret.name == masked(secret.url) == "postgresql://ann@host:5433/db"
    for text in (repr(secret), secret.name, secret.label, repr(registry), repr(registry.place)):
        assert "hunter2" not in text


# ---------------------------------------------------------------------- many at once


def test_writers_of_one_policy_take_turns_and_lose_nothing(url: str, registry: Registry) -> None:
    with ThreadPoolExecutor(4) as threads:
        made = list(threads.map(lambda value: registry.publish(weights(value)).number, range(12)))
    assert sorted(made) == list(range(1, 13))
    assert [version.number for version in registry.versions()] == list(range(1, 13))
    assert registry.verify() == []


PUBLISH = """
import sys, torch
from weightledger.registry import Registry
with Registry.open(sys.argv[1], policy=sys.argv[2]) as registry:
    for value in range(5):
        registry.publish({"w": torch.full((4,), float(value))})
"""


PUBLISH_ONE = """
import sys, torch
from weightledger.registry import Registry
with Registry.open(sys.argv[1]) as registry:
    assert registry.publish({"w": torch.full((4,), 3.0)}).number == 3
"""


def test_processes_write_two_policies_and_share_contents(url: str, registry: Registry) -> None:
    writers = [child(PUBLISH, url, policy) for policy in ("main", "main", "opponent")]
    assert [writer.wait(PATIENCE) for writer in writers] == [0, 0, 0]
    with registry.for_policy("main") as main, registry.for_policy("opponent") as opponent:
        assert [version.number for version in main.versions()] == list(range(1, 11))
        assert [version.number for version in opponent.versions()] == [1, 2, 3, 4, 5]
        assert main.verify() == []
        main.prune(keep_last=1)
        assert [value_of(opponent, number) for number in range(1, 6)] == [0.0, 1.0, 2.0, 3.0, 4.0]


HOLD = """
import sys
from weightledger.registry import Registry
registry = Registry.open(sys.argv[1])
print(registry.locks.keep_alive().id, flush=True)
with registry.locks.policy("default"):
    sys.stdin.read()
"""


def test_a_run_lives_until_its_process_ends_and_its_locks_with_it(url: str, registry: Registry) -> None:
    holder = child(HOLD, url, pipe=subprocess.PIPE)
    assert holder.stdout is not None
    run = holder.stdout.readline().strip()
    try:
        assert registry.locks.alive(run) and not registry.locks.alive("0" * 32)
        deadline = time.monotonic() + PATIENCE
        while not registry.locks.policy_is_held("default") and time.monotonic() < deadline:
            time.sleep(0.05)
        with registry.locks.try_policy("default") as mine:
            assert not mine
        with (
            pytest.raises(InUseError, match=f"weightledger.* {holder.pid}"),
            registry.locks.policy("default", 0.2),
        ):
            pass
    finally:
        holder.kill()
        with holder:
            holder.wait(PATIENCE)
    deadline = time.monotonic() + PATIENCE
    while registry.locks.alive(run) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not registry.locks.alive(run)
    with registry.locks.try_policy("default") as mine:
        assert mine


def test_another_registry_in_the_same_database_has_locks_of_its_own(url: str, registry: Registry) -> None:
    other = PostgresLocks(PostgresDatabase(url), "f" * 32)
    with registry.locks.policy("default"), other.try_policy("default") as mine:
        assert mine
    other.close()


def test_threads_wait_for_each_other_too(registry: Registry) -> None:
    inside = threading.Event()
    done = threading.Event()

    def hold() -> None:
        with registry.locks.policy("default"):
            inside.set()
            done.wait(PATIENCE)

    with ThreadPoolExecutor(1) as threads:
        holding = threads.submit(hold)
        assert inside.wait(PATIENCE)
        with registry.locks.try_policy("default") as mine:
            assert not mine
        done.set()
        holding.result(PATIENCE)
    with registry.locks.policy("default", 5):
        pass


# ---------------------------------------------------------------------- safety by rows


def test_a_writer_that_was_taken_for_dead_does_not_make_its_version_the_head(
    server: Server, url: str, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its session is lost in mid-publish, so that its lock is free; the next opener marks its version lost."""
    registry.publish(weights(1.0))
    store = registry.publisher.store
    create = store.create

    def lose_the_session(file_id: str) -> object:
        writer = create(file_id)
        commit = writer.commit

        def slow(name: str) -> str:
            server.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() "
                "AND application_name LIKE 'weightledger%'"
            )
            assert child(PUBLISH_ONE, url).wait(PATIENCE) == 0
            return commit(name)

        monkeypatch.setattr(writer, "commit", slow)
        return writer

    monkeypatch.setattr(store, "create", lose_the_session)
    with pytest.raises((ConflictError, StorageError), match=r"marked lost|could not be written"):
        registry.publish(weights(2.0))
    monkeypatch.undo()
    assert [(version.number, version.state) for version in registry.versions()] == [
        (1, "stored"),
        (3, "stored"),
    ]
    assert value_of(registry) == 3.0 and registry.verify() == []
    assert registry.publish(weights(4.0)).number == 4


# ---------------------------------------------------------------------- the server goes away


def test_a_server_that_was_restarted_is_used_again_by_open_registries(
    server: Server, registry: Registry
) -> None:
    registry.publish(weights(1.0))
    run = registry.locks.keep_alive().id
    server.stop()
    server.start()
    assert value_of(registry) == 1.0
    assert registry.publish(weights(2.0)).number == 2
    registry.locks.look_again()
    assert registry.locks.alive(run)


def test_an_updater_goes_on_after_a_restart_of_the_server(server: Server, registry: Registry) -> None:
    learner, worker = nn.Linear(2, 1), nn.Linear(2, 1)
    with FakeWorkers(learner, [worker], registry=registry) as updater:
        for value in (1.0, 2.0, 3.0):
            nn.init.constant_(learner.weight, value)
            assert updater.update_weights().ok
            assert torch.equal(worker.weight, torch.full((1, 2), value))
            server.stop()
            server.start()
        assert updater.rollback(1).ok
        assert torch.equal(worker.weight, torch.full((1, 2), 1.0))
        assert torch.equal(learner.weight, torch.full((1, 2), 1.0))
    assert [each.version for each in registry.history()] == [1, 2, 3, 4]


ENDLESS = """
import sys, torch
from weightledger.registry import Registry, WeightLedgerError
registry = Registry.open(sys.argv[1])
value = 0
while True:
    value += 1
    try:
        version = registry.publish({"w": torch.full((4,), float(value))})
    except WeightLedgerError as error:
        print("refused", type(error).__name__, flush=True)
        continue
    print("made", version.number, value, flush=True)
"""


def test_what_was_returned_outlives_a_server_that_is_killed_in_mid_publish(
    server: Server, url: str, registry: Registry
) -> None:
    writer = child(ENDLESS, url, pipe=subprocess.PIPE)
    said: list[str] = []
    assert writer.stdout is not None
    reader = threading.Thread(target=lambda: said.extend(writer.stdout or ()))
    reader.start()
    try:
        for _ in range(3):
            before = len([line for line in said if line.startswith("made")])
            deadline = time.monotonic() + PATIENCE
            while len([line for line in said if line.startswith("made")]) < before + 5:
                assert time.monotonic() < deadline and writer.poll() is None, said[-5:]
                time.sleep(0.01)
            server.kill()
            time.sleep(0.3)
            server.start()
    finally:
        writer.kill()
        with writer:
            writer.wait(PATIENCE)
            reader.join(PATIENCE)
    told = [line.split()[1:] for line in said if line.startswith("made")]
    made = {int(number): int(value) for number, value in told}
    with Registry.open(url) as after:
        assert after.verify() == []
        found = {version.number: value_of(after, version.number) for version in after.versions()}
    assert {number: float(value) for number, value in made.items()}.items() <= found.items()
    assert len(found) <= len(made) + len([line for line in said if line.startswith("refused")]) + 1


def test_record_on_a_server_and_weights_in_a_bucket_need_no_folder_in_common(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A learner here, and a person elsewhere who has the two URLs alone and goes back."""
    learner, worker = nn.Linear(2, 1), nn.Linear(2, 1)
    with serving() as endpoint:
        use(monkeypatch, endpoint.endpoint)
        with (
            Registry.open(url, snapshots=f"s3://{BUCKET}/team") as registry,
            FakeWorkers(learner, [worker], registry=registry) as updater,
        ):
            for value in (1.0, 2.0, 3.0):
                nn.init.constant_(learner.weight, value)
                assert updater.update_weights().ok
            command = [sys.executable, "-m", "weightledger", "--registry", url]
            for words in (
                ["rollback", "--to", "1", "--reason", "collapsed"],
                ["status"],
                ["diff", "1", "2"],
                ["audit"],
            ):
                done = subprocess.run(
                    [*command, *words],
                    cwd=tmp_path,
                    capture_output=True,
                    text=True,
                    timeout=PATIENCE,
                    check=False,
                )
                assert done.returncode == 0, done.stderr
            nn.init.constant_(learner.weight, 4.0)
            assert updater.update_weights().ok
            for module in (learner, worker):
                assert torch.equal(module.weight, torch.full((1, 2), 1.0))
            assert [version.number for version in registry.versions()] == [1, 2, 3, 4]
            assert registry.verify() == []

"""A registry that was closed says so; one that was let go has closed itself; copies live on their own."""

from __future__ import annotations

import gc
import inspect
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.registry.helpers import exit_code_of, in_child, value_of, weights
from weightledger.registry import Registry, StorageError

CALLS: dict[str, Callable[[Registry], Any]] = {
    "__enter__": lambda registry: registry.__enter__(),
    "aliases": lambda registry: registry.aliases(),
    "best": lambda registry: registry.best("reward"),
    "delete_alias": lambda registry: registry.delete_alias("good"),
    "events": lambda registry: registry.events(),
    "export": lambda registry: registry.export(1, Path(registry.location).parent / "out.safetensors"),
    "for_policy": lambda registry: registry.for_policy("other"),
    "get": lambda registry: registry.get(1),
    "head": lambda registry: registry.head(),
    "history": lambda registry: registry.history(),
    "holdings": lambda registry: registry.holdings(),
    "load": lambda registry: registry.load(),
    "load_extra": lambda registry: registry.load_extra(),
    "payload": lambda registry: registry.payload(1),
    "pin": lambda registry: registry.pin("w", 1),
    "pins": lambda registry: registry.pins(),
    "policies": lambda registry: registry.policies(),
    "prune": lambda registry: registry.prune(keep_last=1),
    "publish": lambda registry: registry.publish(weights(3)),
    "publisher": lambda registry: registry.publisher,
    "read": lambda registry: registry.read(1),
    "record_metrics": lambda registry: registry.record_metrics(1, reward=2.0),
    "restore": lambda registry: registry.restore(1, weights(0)),
    "rollback": lambda registry: registry.rollback(),
    "set_alias": lambda registry: registry.set_alias("good", 1),
    "staleness": lambda registry: registry.staleness(1),
    "target": lambda registry: registry.target("w"),
    "tensor_hashes": lambda registry: registry.tensor_hashes(1),
    "unpin": lambda registry: registry.unpin("w"),
    "verify": lambda registry: registry.verify(),
    "versions": lambda registry: registry.versions(),
    "workers": lambda registry: registry.workers(),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with Registry.open(tmp_path / "r") as registry:
        registry.publish(weights(1), metrics={"reward": 1.0}, extra={"epoch": 1})
        registry.publish(weights(2), metrics={"reward": 2.0}, extra={"epoch": 2})
        registry.set_alias("good", 1)
        registry.pin("w", 1)
    return tmp_path / "r"


def database_descriptors(folder: Path) -> int:
    """Count this process's open files of a registry's database."""
    found = 0
    for each in Path("/proc/self/fd").iterdir():
        try:
            found += str(each.readlink()).startswith(str(folder / "registry.db"))
        except FileNotFoundError:
            continue  # that of the listing itself
    return found


def state(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "locks" not in path.parts
    }


def test_every_public_call_is_in_the_table() -> None:
    public = {name for name, _ in inspect.getmembers(Registry) if not name.startswith("_")}
    assert public - {"open", "close"} <= CALLS.keys()


@pytest.mark.parametrize("name", CALLS)
def test_after_close_a_call_says_so_and_does_nothing(folder: Path, name: str) -> None:
    registry = Registry.open(folder)
    registry.load()
    registry.close()
    before = state(folder)
    with pytest.raises(StorageError, match=r"(r/registry\.db|postgresql).*was closed.*Registry\.open"):
        CALLS[name](registry)
    assert state(folder) == before
    assert database_descriptors(folder) == 0
    assert not (folder.parent / "out.safetensors").exists()


def test_a_registry_that_was_closed_can_be_opened_again(folder: Path) -> None:
    registry = Registry.open(folder)
    registry.close()
    registry.close()
    with Registry.open(folder) as again:
        assert again.publish(weights(3)).number == 3
    assert repr(registry) == repr(again)


def test_closing_one_of_two_leaves_the_other_open(folder: Path) -> None:
    with Registry.open(folder) as one, Registry.open(folder) as other:
        one.close()
        assert other.publish(weights(3)).number == 3


def test_a_pickled_copy_outlives_the_registry_that_it_came_from(folder: Path) -> None:
    with Registry.open(folder) as registry:
        with pickle.loads(pickle.dumps(registry)) as copy:
            assert copy.head().number == 2
        assert registry.publish(weights(3)).number == 3
    again = pickle.loads(pickle.dumps(registry))
    assert again.head().number == 3
    again.close()


def test_a_forked_child_that_closes_its_registry_leaves_the_parents_open(folder: Path) -> None:
    assert exit_code_of(_fork_and_close, folder) == 0
    with Registry.open(folder) as registry:
        assert [value_of(registry.load(number)) for number in (3, 4)] == [3, 4]


def _fork_and_close(folder: Path) -> None:
    registry = Registry.open(folder)
    registry.head()
    child = os.fork()
    if child == 0:
        registry.publish(weights(3))
        registry.close()
        try:
            registry.head()
        except StorageError:
            os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    registry.publish(weights(4))


def test_a_transaction_that_is_under_way_ends_before_its_connection_is_closed(folder: Path) -> None:
    registry = Registry.open(folder)
    reading, closed = threading.Event(), threading.Event()
    seen = []

    def read() -> None:
        with registry.ledger.reading() as conn:
            reading.set()
            assert closed.wait(60)
            seen.append(registry.ledger.head(conn).number)

    reader = threading.Thread(target=read)
    reader.start()
    assert reading.wait(60)
    registry.close()
    closed.set()
    reader.join(60)
    assert seen == [2]
    assert database_descriptors(folder) == 0


def test_a_registry_that_is_let_go_closes_the_connections_of_every_thread(folder: Path) -> None:
    registry = Registry.open(folder)
    met = threading.Barrier(4)

    def read(registry: Registry) -> None:
        with registry.ledger.reading() as conn:
            met.wait(60)
            registry.ledger.head(conn)

    threads = [threading.Thread(target=read, args=(registry,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert database_descriptors(folder) > 4
    del registry
    gc.collect()
    assert database_descriptors(folder) == 0


@pytest.mark.parametrize("end", ["", "del registry, head; gc.collect()", "registry.close()"])
def test_no_interpreter_complains_of_a_registry_that_was_left_open(folder: Path, end: str) -> None:
    program = f"""
import gc, sys
from weightledger.registry import Registry
registry = Registry.open(sys.argv[1])
head = registry.head()
{end}
"""
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "default::ResourceWarning", "-c", program, folder],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "ResourceWarning" not in done.stderr
    assert not (folder / "registry.db-wal").exists(), "the last connection took the log in"


# Nobody steers a worker here.
pytestmark = pytest.mark.filterwarnings("ignore:.* is pinned to v")


def test_a_child_process_that_never_closes_leaves_what_it_published(folder: Path) -> None:
    assert in_child(_publish_and_leave, folder) == 3
    with Registry.open(folder) as registry:
        assert value_of(registry.load()) == 3


def _publish_and_leave(folder: Path) -> int:
    return Registry.open(folder).publish(weights(3)).number


def test_a_program_that_ends_with_weights_in_hand_says_nothing(tmp_path: Path) -> None:
    """The weights outlive the modules that watch them: nothing may look for names that are gone by then."""
    program = f"""
import torch
from weightledger import Registry
kept = [{{"w": torch.ones(2)}}, torch.nn.Linear(2, 2)]
registries = [Registry.open({str(tmp_path)!r}, policy=policy) for policy in ("a", "b")]
for registry, weights in zip(registries, kept):
    registry.publish(weights)
    registry.restore(1, weights)
    registry.close()
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=True
    )
    assert (done.stdout, done.stderr) == ("", "")

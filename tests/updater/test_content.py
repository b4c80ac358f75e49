"""Content decides, not numbers: registries that were copied, put back, emptied or moved while their workers live on."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from weightledger.registry import ConflictError, Registry
from weightledger.registry.records import Event, Holding
from weightledger.updater import held_version
from weightledger.updater.testing import FakeWorkers, statuses


def constant(value: float) -> nn.Linear:
    return fill(nn.Linear(3, 2), value)


def fill(module: Any, value: float) -> Any:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(value)
    return module


class Fleet(FakeWorkers):
    """A driver that takes over the workers of another one."""

    def __init__(self, value: float, fakes: list[Any], **options: Any) -> None:
        learner, registry = constant(value), options["registry"]
        if registry.versions():
            # Where the registry is, training goes on.
            registry.restore("head", learner)
        super().__init__(learner, [], **options)
        if fakes:
            self._add_workers(fakes, [f"w{index}" for index in range(len(fakes))])

    def fakes(self) -> list[Any]:
        return [worker.handle for worker in self.workers]

    def values(self) -> list[float]:
        """Read what the workers' modules hold, parameter by parameter."""
        return [sum_of(fake.worker.policy) for fake in self.fakes()]


def sum_of(module: Any) -> float:
    found = {float(number) for parameter in module.parameters() for number in parameter.detach().flatten()}
    assert len(found) == 1, "a mix"
    return found.pop()


def workers(count: int = 2) -> list[Any]:
    with_none = FakeWorkers.__new__(FakeWorkers)
    return [FakeWorkers._fake(with_none, constant(-1.0)) for _ in range(count)]


@contextmanager
def driver(folder: Path, value: float, fakes: list[Any], **options: Any) -> Iterator[Fleet]:
    with Registry.open(folder) as registry, Fleet(value, fakes, registry=registry, **options) as fleet:
        yield fleet


def update(fleet: Fleet, value: float, **options: Any) -> Any:
    fill(fleet.policy_weights, value)
    return fleet.update_weights(**options)


def check_record(registry: Registry, fleet: Fleet) -> None:
    """What is called held is really there, and stretches of a worker never overlap."""
    for status in registry.workers():
        fake = fleet.fakes()[int(status.name[1:])]
        if status.held is not None:
            assert registry.load(status.held)["weight"][0, 0].item() == sum_of(fake.worker.policy)
    by_worker: dict[str, list[Holding]] = {}
    for holding in registry.history():
        by_worker.setdefault(holding.worker, []).append(holding)
    for holdings in by_worker.values():
        confirmed = [one for one in holdings if one.confirmed_at is not None]
        for one, other in pairwise(confirmed):
            assert one.ended_at is not None and other.confirmed_at is not None
            assert one.ended_at <= other.confirmed_at


def jumps(registry: Registry) -> list[Event]:
    return [event for event in registry.events() if event.kind == "order_jump"]


@pytest.mark.folder
@pytest.mark.parametrize("lost", [1, 5])
def test_workers_ahead_of_a_registry_that_was_put_back_are_reached_by_the_next_update(
    tmp_path: Path, lost: int
) -> None:
    fakes = workers()
    with driver(tmp_path / "r", 1.0, fakes) as fleet:
        assert update(fleet, 1.0).ok
    shutil.copytree(tmp_path / "r", tmp_path / "backup")
    with driver(tmp_path / "r", 1.0, fakes) as fleet:
        for number in range(lost):
            assert update(fleet, 2.0 + number).ok
    shutil.rmtree(tmp_path / "r")
    shutil.copytree(tmp_path / "backup", tmp_path / "r")

    with driver(tmp_path / "r", 1.0, fakes) as fleet:
        report = update(fleet, 50.0)
        assert fleet.values() == [50.0, 50.0]
        assert statuses(report.workers) == {"w0": "synced", "w1": "synced"}
        assert all("ahead" in outcome.error for outcome in report.workers.values())
        check_record(fleet.registry, fleet)
        (jump,) = jumps(fleet.registry)
        assert (jump.details["to"], jump.details["from"]) == (1 + lost, 2)
        assert [held_version(fake.worker) for fake in fakes] == [2, 2]
        assert update(fleet, 51.0).ok
        assert fleet.values() == [51.0, 51.0]
        assert len(jumps(fleet.registry)) == 1


@pytest.mark.folder
def test_a_probe_compares_with_the_registrys_version_and_ends_what_is_false(tmp_path: Path) -> None:
    """The worker holds the v2 of before; the registry that was put back has another v2 of the same order."""
    fakes = workers(1)
    with driver(tmp_path / "r", 1.0, fakes) as fleet:
        update(fleet, 1.0)
    shutil.copytree(tmp_path / "r", tmp_path / "backup")
    with driver(tmp_path / "r", 1.0, fakes) as fleet:
        update(fleet, 2.0)
    put_back(tmp_path)
    with driver(tmp_path / "r", 1.0, fakes) as fleet:
        fleet.registry.publish(constant(50.0))
        fleet.adopt()
        last_evidence = fleet.registry.history(worker="w0")[0].confirmed_at
        found = fleet.probe()[0]
        assert (
            not found.matches and found.drift == ("bias", "weight") and "not what is on record" in found.error
        )
        (ended,) = fleet.registry.history(worker="w0")
        assert (ended.version, ended.ended_how, ended.ended_at) == (1, "unknown", last_evidence)
        assert fleet.registry.workers()[0].held is None
        assert update(fleet, 50.0).ok and fleet.values() == [50.0]
        assert fleet.probe()[0].matches
        check_record(fleet.registry, fleet)


def test_a_registry_that_was_made_anew_reaches_its_workers_and_says_who_wrote_before(tmp_path: Path) -> None:
    fakes = workers(1)
    with driver(tmp_path / "r", 1.0, fakes) as fleet:
        for value in (1.0, 2.0, 3.0):
            update(fleet, value)
        before = fleet.registry.uuid
    shutil.rmtree(tmp_path / "r")
    with driver(tmp_path / "r", 1.0, fakes) as fleet:
        assert fleet.registry.uuid != before
        fleet.registry.publish(constant(7.0))
        fleet.adopt()
        found = fleet.probe()[0]
        assert not found.matches and before in found.error and str(tmp_path / "r") in found.error
        assert update(fleet, 7.0).ok and fleet.values() == [7.0]
        assert held_version(fakes[0].worker) == 1 and fleet.probe()[0].matches
        assert jumps(fleet.registry) == []
        check_record(fleet.registry, fleet)


@pytest.mark.folder
def test_a_registry_that_was_put_back_to_before_its_first_version_begins_again(tmp_path: Path) -> None:
    """The same registry, emptied: its numbers and orders begin at one again."""
    fakes = workers(1)
    Registry.open(tmp_path / "r").close()
    shutil.copytree(tmp_path / "r", tmp_path / "backup")
    with driver(tmp_path / "r", 1.0, fakes) as fleet:
        update(fleet, 1.0)
    put_back(tmp_path)
    with driver(tmp_path / "r", 1.0, fakes) as fleet:
        assert update(fleet, 50.0).ok and fleet.values() == [50.0]
        check_record(fleet.registry, fleet)


def test_a_registry_that_was_moved_goes_on_as_before(tmp_path: Path) -> None:
    fakes = workers(1)
    with driver(tmp_path / "r", 1.0, fakes) as fleet:
        update(fleet, 1.0)
    (tmp_path / "r").rename(tmp_path / "moved")
    with driver(tmp_path / "moved", 1.0, fakes) as fleet:
        assert update(fleet, 2.0).ok and fleet.values() == [2.0]
        assert jumps(fleet.registry) == []
        assert [(one.version, one.ended_how) for one in fleet.registry.history()] == [
            (1, "replaced"),
            (2, None),
        ]


def test_of_two_registries_on_one_worker_the_last_write_counts_for_both(tmp_path: Path) -> None:
    fakes = workers(1)
    with driver(tmp_path / "a", 1.0, fakes) as one:
        update(one, 1.0)
        with driver(tmp_path / "b", 9.0, fakes) as other:
            update(other, 9.0)
            assert held_version(fakes[0].worker) == 1
            found = one.probe()[0]
            assert not found.matches and other.registry.uuid in found.error
            assert (one.registry.workers()[0].held, other.registry.workers()[0].held) == (None, 1)
            report = one.update_weights()
            assert report.ok and one.values() == [1.0]
            assert (one.registry.workers()[0].held, one.probe()[0].matches) == (1, True)
            # The other one asks, and is told who wrote.
            report = other.update_weights()
            assert statuses(report.workers) == {"w0": "synced"} and other.values() == [9.0]
            assert one.registry.uuid in report.workers[0].error
            check_record(other.registry, other)


def put_back(folder: Path) -> None:
    shutil.rmtree(folder / "r")
    shutil.copytree(folder / "backup", folder / "r")


@pytest.mark.folder
def test_a_policy_that_is_emptied_under_a_living_updater_is_refused_by_name(tmp_path: Path) -> None:
    """Somebody deletes the versions by hand: the update neither hangs nor publishes."""
    registry = Registry.open(tmp_path)
    with FakeWorkers(constant(1.0), [constant(-1.0)], registry=registry) as fleet:
        fleet.update_weights().raise_for_failures()
        with closing(sqlite3.connect(tmp_path / "registry.db")) as connection, connection:
            connection.execute("DELETE FROM holdings")
            connection.execute("DELETE FROM versions")
        fill(fleet.policy_weights, 3.0)
        for call in (fleet.update_weights, fleet.sync, fleet.rollback):
            with pytest.raises(ConflictError, match=r"no version any more.*was at v1"):
                call()
        assert held_version(fleet.worker(0)) == 1

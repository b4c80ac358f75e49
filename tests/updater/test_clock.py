"""The clock is set back: what is held is found all the same, since order comes from numbers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.registry.damaging import run
from weightledger.registry import Registry
from weightledger.registry.log import ledger
from weightledger.updater.testing import FakeWorkers

START = datetime(2026, 3, 1, 12, tzinfo=UTC)


class Clock(datetime):
    """A clock that goes a minute a look, and can be set."""

    at = START

    @classmethod
    def now(cls, tz: object = None) -> datetime:  # type: ignore[override]
        Clock.at += timedelta(minutes=1)
        return Clock.at


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> type[Clock]:
    Clock.at = START
    monkeypatch.setattr(ledger, "datetime", Clock)
    return Clock


@pytest.fixture
def fleet(tmp_path: Path, clock: type[Clock]) -> Iterator[FakeWorkers]:
    registry = Registry.open(tmp_path)
    with FakeWorkers(nn.Linear(2, 1), [nn.Linear(2, 1) for _ in range(2)], registry=registry) as made:
        yield made


def learn(fleet: FakeWorkers, times: int = 1) -> None:
    for _ in range(times):
        with torch.no_grad():
            fleet.policy_weights.weight.add_(1.0)
        assert fleet.update_weights().ok


def acted(fleet: FakeWorkers) -> set[float]:
    """Return what the workers really have, relative to the learner."""
    return {
        float((fleet.worker(key).policy.weight - fleet.policy_weights.weight).abs().max().item())
        for key in (0, 1)
    }


@pytest.mark.parametrize("back", [timedelta(hours=1), timedelta(days=1)])
@pytest.mark.parametrize("updates", [1, 3])
def test_what_is_held_is_found_after_the_clock_was_set_back(
    fleet: FakeWorkers, clock: type[Clock], back: timedelta, updates: int
) -> None:
    registry = fleet.registry
    learn(fleet, 6)
    before = clock.at
    clock.at -= back
    learn(fleet, updates)
    head, now = 6 + updates, clock.at
    assert acted(fleet) == {0.0}
    for moment in (now, before, before + timedelta(hours=2)):
        assert [(each.worker, each.version) for each in registry.holdings(at=moment)] == [
            ("fake-0", head),
            ("fake-1", head),
        ], moment
        assert {each.worker for each in registry.history(since=moment) if each.version == head} == {
            "fake-0",
            "fake-1",
        }
    assert [(each.version, each.state) for each in registry.holdings()] == [(head, "held")] * 2
    assert [(each.held, each.state, each.staleness) for each in registry.workers()] == [
        (head, "confirmed", 0)
    ] * 2


def test_the_order_of_history_log_and_events_is_that_of_their_numbers(
    fleet: FakeWorkers, clock: type[Clock]
) -> None:
    learn(fleet, 3)
    clock.at -= timedelta(hours=1)
    learn(fleet, 2)
    fleet.rollback(2, "collapsed")
    registry = fleet.registry
    assert [version.number for version in registry.versions()] == [1, 2, 3, 4, 5, 6]
    assert [each.version for each in registry.history(worker="fake-0")] == [1, 2, 3, 4, 5, 6]
    assert [each.order for each in registry.history(worker="fake-0")] == [1, 2, 3, 4, 5, 6]
    numbers = [event.id for event in registry.events()]
    assert numbers == sorted(numbers) and registry.events()[-1].kind == "rollback"


def test_what_was_held_before_the_clock_was_set_back_is_found_by_its_time(
    fleet: FakeWorkers, clock: type[Clock]
) -> None:
    """Where both passes of the clock have the moment, the later holding counts if it covers it."""
    learn(fleet, 2)
    between = clock.at
    learn(fleet, 4)
    clock.at -= timedelta(minutes=3)
    learn(fleet)
    registry = fleet.registry
    assert {each.version for each in registry.holdings(at=between)} == {2}
    assert {each.version for each in registry.history(until=between)} == {1, 2}


def test_a_push_without_an_answer_is_pending_whatever_the_clock_says(
    fleet: FakeWorkers, clock: type[Clock]
) -> None:
    learn(fleet, 3)
    before = clock.at
    clock.at -= timedelta(hours=1)
    fleet.hang(0)
    with torch.no_grad():
        fleet.policy_weights.weight.add_(1.0)
    assert fleet.update_weights().workers[0].status == "timeout"
    registry = fleet.registry
    (status,) = [each for each in registry.workers() if each.name == "fake-0"]
    assert (status.state, status.pending, status.held) == ("unknown", 4, None)
    found = {(each.version, each.state) for each in registry.history(worker="fake-0", since=before)}
    assert found == {(3, "unknown"), (4, "pending")}
    assert found == {
        (each.version, each.state) for each in registry.history(since=before) if each.worker == "fake-0"
    }


def test_a_worker_that_restarts_after_the_clock_was_set_back_is_lost_and_found(
    fleet: FakeWorkers, clock: type[Clock]
) -> None:
    learn(fleet, 2)
    clock.at -= timedelta(hours=1)
    fleet.restart(0)
    learn(fleet)
    registry = fleet.registry
    assert [each.ended_how for each in registry.history(worker="fake-0")] == ["replaced", "lost", None]
    assert [(each.worker, each.version) for each in registry.holdings(at=clock.at)] == [
        ("fake-0", 3),
        ("fake-1", 3),
    ]
    fleet.remove_worker(0)
    assert [each.worker for each in registry.holdings()] == ["fake-1"]


def test_events_since_a_time_leave_out_none_that_came_later_by_number(
    fleet: FakeWorkers, clock: type[Clock]
) -> None:
    learn(fleet, 2)
    moment = clock.at + timedelta(seconds=1)
    registry = fleet.registry
    registry.set_alias("before", 1)
    clock.at -= timedelta(hours=1)
    registry.set_alias("after", 2)
    fleet.rollback(1, "collapsed")
    found = registry.events(since=moment)
    assert [(each.kind, each.version) for each in found] == [("alias", 1), ("alias", 2), ("rollback", 3)]
    assert registry.events(since=moment, limit=2) == found[1:]
    assert registry.events(since=moment + timedelta(days=1)) == []


def test_a_push_that_was_never_confirmed_and_ended_after_the_clock_was_set_back_is_found(
    fleet: FakeWorkers, clock: type[Clock]
) -> None:
    learn(fleet, 2)
    fleet.hang(0)
    with torch.no_grad():
        fleet.policy_weights.weight.add_(1.0)
    assert fleet.update_weights().workers[0].status == "timeout"
    pushed = clock.at
    clock.at -= timedelta(hours=1)
    fleet.remove_worker(0)
    registry = fleet.registry
    (last,) = [each for each in registry.history(worker="fake-0") if each.confirmed_at is None]
    assert last.version == 3 and last.ended_at is not None and last.ended_at < last.pushed_at
    assert last in registry.history(worker="fake-0", since=pushed)
    assert last in registry.history(since=pushed)


def test_the_command_line_prints_no_length_that_is_below_zero(
    fleet: FakeWorkers, clock: type[Clock], tmp_path: Path
) -> None:
    learn(fleet, 3)
    clock.at -= timedelta(hours=1)
    learn(fleet, 2)
    for words in (["audit"], ["audit", "--worker", "fake-0"], ["status"], ["events"], ["log"]):
        ran = run("--registry", str(tmp_path), *words)
        assert ran.code == 0 and not re.search(r"-\d[\d,]* ?(ms|s|min|h|d)\b", ran.out), ran.out
    assert "clock set back" in run("--registry", str(tmp_path), "audit").out

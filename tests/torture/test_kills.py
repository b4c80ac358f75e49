"""A writer that is killed before any of its file system calls, or in the middle of a write, leaves no harm."""

from __future__ import annotations

import pytest

from tests.torture.cases import SCENARIOS
from tests.torture.ground import Call, Ground, share
from tests.torture.shim import CHANGES, Action, Kind, Plan

pytestmark = [pytest.mark.torture, pytest.mark.timeout(1800)]


def kills(calls: list[Call]) -> tuple[list[Plan], list[Plan]]:
    """Return plans for the moments at which a writer can die: before each call, and amid each write."""
    before = [Plan(CHANGES, call.number, Action.KILL) for call in calls]
    amid = [
        Plan(CHANGES, call.number, Action.KILL_HALF_WRITTEN)
        for call in calls
        if call.kind == Kind.WRITE and call.size > 1
    ]
    return before, amid


@pytest.mark.parametrize("name", SCENARIOS)
def test_what_was_returned_outlives_a_writer_killed_at_any_call(ground: Ground, name: str) -> None:
    before, amid = kills(ground.calls_of(name, CHANGES))
    plans = share(before, few=2) + share(amid, few=1, many=50)
    assert ground.each(lambda plan: ground.run(name, plan), plans) == []


def test_what_a_dead_writer_left_is_cleared_away_by_one_that_dies_too(ground: Ground) -> None:
    """The second writer opens, recovers and publishes after a first that died at a call of its own."""
    calls = ground.calls_of("publish", CHANGES)
    first = [Plan(CHANGES, call.number, Action.KILL) for call in calls if "snapshots/" in call.path]
    before, amid = kills(calls)
    for plan in share(first, few=1):
        with ground.folder() as folder:
            start = ground.killed("publish", plan, folder)
            second = share(before + amid, few=2, many=12)
            assert ground.each(lambda each, start=start: ground.run("publish", each, start), second) == []


def test_a_writer_that_dies_beside_another_harms_nothing_of_it(ground: Ground) -> None:
    before, amid = kills(ground.calls_of("publish", CHANGES))
    assert ground.each(ground.run_two, share(before + amid, few=2, many=60)) == []

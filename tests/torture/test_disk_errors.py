"""A disk that fails at any one call, or from it on, is told as an error of the library, and harms nothing.

The same process works on when the disk is well again: each refused call is made a second time, and has to succeed.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.torture.cases import SCENARIOS
from tests.torture.ground import Ground, share
from tests.torture.shim import ERRORS, Action, Kind, Plan

pytestmark = [pytest.mark.torture, pytest.mark.timeout(1800)]


def failures(ground: Ground, name: str) -> Iterator[Plan]:
    """Give a plan for every error that a disk can have, at every call that can have it."""
    calls = ground.calls_of(name, sum(Kind))
    for error, kinds in ERRORS.items():
        possible = [call for call in calls if call.kind & kinds]
        for number, call in enumerate(possible, start=1):
            for again in (False, True):
                yield Plan(kinds, number, Action.FAIL, error, again)
                if call.kind == Kind.WRITE:
                    yield Plan(kinds, number, Action.FAIL_HALF_WRITTEN, error, again)


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_disk_error_at_any_call_is_one_of_the_library_and_harms_nothing(ground: Ground, name: str) -> None:
    plans = share(failures(ground, name), few=2, many=60)
    assert ground.each(lambda plan: ground.run(name, plan), plans) == []

"""TorchRL: a new training on an old registry, which another process left. What acts is looked at in the actors."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.updater.torchrl_parts import (
    borrow,
    collect,
    make_policy,
    report_of,
    seen,
    start_synchronous,
    steer,
    train,
    value_in,
)
from weightledger.registry import ConflictError, InvalidWeightsError, Registry

pytestmark = [pytest.mark.usefixtures("ray_cluster"), pytest.mark.slow, pytest.mark.timeout(400)]

BEFORE = """
import sys
from tests.updater.torchrl_parts import make_policy
from weightledger.registry import Registry

with Registry.open(sys.argv[1]) as registry:
    for step, value in ((1, 0.25), (2, 0.75)):
        registry.publish(make_policy(value), step=step, extra={"steps": step})
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The registry of a training that ended, in a process of its own."""
    subprocess.run([sys.executable, "-c", BEFORE, str(tmp_path)], check=True, timeout=100)
    return tmp_path


@pytest.fixture
def collector() -> Iterator[Any]:
    made = borrow(start_synchronous)
    yield made
    made.weight_updater.close()


@pytest.fixture
def mortal() -> Iterator[Any]:
    """A collector of the test's own: one that raised once gives no more frames."""
    made = start_synchronous()
    yield made
    made.shutdown()


def value_of(policy: Any) -> float:
    return float(policy.module.bias[0].detach())


def test_a_training_that_resumes_plays_its_first_frame_with_the_head(folder: Path, collector: Any) -> None:
    steps: list[int] = []

    def restore(version: Any) -> None:
        with Registry.open(folder) as registry:
            steps.append(registry.load_extra(version)["steps"])

    updater, policy = steer(folder, collector, policy=make_policy(-1.0), start="head", on_rollback=restore)
    assert value_of(policy) == 0.75 and steps == [2], "restored when the collector was registered"
    assert seen(collect(collector)) == {(0.75, 2, 2)}
    assert [value_in(actor) for actor in collector.remote_collectors] == [0.75, 0.75]
    assert [version.number for version in updater.registry.versions()] == [1, 2]
    train(policy, 1.5)
    collector.update_policy_weights_(step=3)
    assert updater.registry.get(3).parent == 2
    assert [value_in(actor) for actor in collector.remote_collectors] == [1.5, 1.5]


def test_a_training_of_which_nobody_said_how_it_begins_sends_nothing(folder: Path, mortal: Any) -> None:
    updater, policy = steer(folder, mortal, policy=make_policy(-1.0), start=None)
    with updater:
        with pytest.raises(ConflictError, match=r'(?s)"head".*"new".*"continue"'):
            collect(mortal)
        assert updater.registry.head().number == 2
        assert updater.registry.history() == [], "nobody was sent anything"
        assert updater.adopt().number == 2 and value_of(policy) == 0.75, "the way out on a living updater"


def test_a_new_training_begins_a_line_and_abandons_what_was(folder: Path, collector: Any) -> None:
    updater, _ = steer(folder, collector, policy=make_policy(-1.0), start="new")
    assert seen(collect(collector)) == {(-1.0, 3, 3)}
    assert updater.registry.get(3).parent is None
    assert updater.registry.staleness(2) is None


def test_weights_that_were_restored_by_the_caller_go_on_from_the_head(folder: Path, collector: Any) -> None:
    policy = make_policy(-1.0)
    with Registry.open(folder) as registry:
        registry.restore("head", policy)
    updater, _ = steer(folder, collector, policy=policy, start="continue")
    assert seen(collect(collector)) == {(0.75, 2, 2)}
    assert not report_of(updater).published


def test_an_empty_registry_takes_any_way_to_begin(tmp_path: Path, collector: Any) -> None:
    for way in ("head", "new", "continue", None):
        updater, _ = steer(tmp_path / str(way), collector, policy=make_policy(0.5), start=way)
        assert seen(collect(collector)) == {(0.5, 1, 1)}
        updater.close()


@pytest.mark.long
def test_a_policy_that_grew_does_not_take_the_head_and_lets_go_of_the_workers(
    folder: Path, mortal: Any
) -> None:
    grown = make_policy(-1.0, width=2)
    with pytest.raises(InvalidWeightsError, match="bias"):
        steer(folder, mortal, policy=grown, start="head")
    assert value_of(grown) == -1.0
    mortal.weight_updater = None
    updater, policy = steer(folder, mortal, policy=make_policy(-1.0), start="head")
    assert value_of(policy) == 0.75, "the workers' names were free"
    assert seen(collect(mortal)) == {(0.75, 2, 2)}
    updater.close()


def test_another_structure_is_published_only_when_that_is_said(folder: Path, collector: Any) -> None:
    """The actors' policies did not grow, so that they refuse it."""
    updater, _ = steer(
        folder, collector, policy=make_policy(-1.0, width=2), start="continue", on_failure="warn"
    )
    with pytest.raises(InvalidWeightsError, match="restructure=True"):
        collector.update_policy_weights_()
    assert updater.registry.head().number == 2
    with pytest.raises(Exception, match="bias"):  # a first push that the worker's own code rejects
        collector.update_policy_weights_(restructure=True)
    assert updater.registry.head().number == 3

"""How an RLlib training begins on a registry that an earlier process filled.

The earlier process is one of its own, run once; each test goes on with a copy of what it left.
"""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ray.rllib.algorithms.ppo import PPO
from ray.rllib.core.rl_module.rl_module import RLModuleSpec

from tests.updater.rllib_before import LEDGER
from tests.updater.rllib_parts import (
    MODULE,
    PATIENCE,
    config,
    fingerprint,
    in_runners,
    in_step,
    learner_fingerprint,
    runner_fingerprints,
    two_agents,
)
from weightledger.registry import Registry
from weightledger.registry.errors import ConflictError
from weightledger.updater.rllib import LedgerCallback, RLlibUpdater, runner_version

pytestmark = [
    pytest.mark.ray,
    pytest.mark.long,
    pytest.mark.timeout(240),
    pytest.mark.usefixtures("ray_cluster"),
    # RLlib's own, of a second Algorithm of several agents in one process.
    pytest.mark.filterwarnings("ignore:.*Overriding environment rllib-multi-agent-env:UserWarning"),
]


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run the earlier process."""
    folder = tmp_path_factory.mktemp("before")
    command = [sys.executable, "-m", "tests.updater.rllib_before", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    return folder


class Before:
    """A copy of what the earlier process left."""

    def __init__(self, left: Path, folder: Path) -> None:
        self.folder = left
        self.seen: dict[str, str] = json.loads((left / "seen.json").read_text())
        for name in ("single", "several"):
            shutil.copytree(left / name, folder / name)
        self.single, self.several = folder / "single", folder / "several"


@pytest.fixture
def before(left: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Before:
    found = Before(left, tmp_path)
    monkeypatch.setenv(LEDGER, str(found.single))
    return found


@pytest.fixture
def build() -> Iterator[Any]:
    """Build Algorithms that are stopped at the end."""
    built = []

    def build(made: Any, location: Path, **options: Any) -> Any:
        built.append(made.callbacks(LedgerCallback.at(location, timeout=PATIENCE, **options)).build_algo())
        return built[-1]

    yield build
    for algorithm in built:
        algorithm.stop()


@pytest.fixture
def restore() -> Iterator[Any]:
    """Make Algorithms from checkpoints, which are stopped at the end."""
    made = []

    def restore(checkpoint: Path, **options: Any) -> Any:
        if options:
            options = {"config": config(0).callbacks(LedgerCallback.at(**options, timeout=PATIENCE))}
        made.append(PPO.from_checkpoint(str(checkpoint), **options))
        return made[-1]

    yield restore
    for algorithm in made:
        algorithm.stop()


def test_nothing_is_published_before_training_begins(tmp_path: Path, build: Any) -> None:
    algorithm = build(config(1), tmp_path)
    registry = RLlibUpdater.of(algorithm)[MODULE].registry
    began = learner_fingerprint(algorithm)
    for _ in range(2):
        assert registry.versions() == []
        assert in_runners(algorithm, functools.partial(fingerprint, MODULE)) == [began]
        algorithm.env_runner_group.sync_weights(
            from_worker_or_learner_group=algorithm.learner_group, inference_only=True
        )
    algorithm.train()
    assert [version.number for version in registry.versions()] == [1, 2]
    assert registry.get(1).digest != registry.get(2).digest
    assert learner_fingerprint(algorithm) != began
    assert in_step(algorithm)


def test_a_new_training_on_an_old_registry_is_asked_how_it_begins(before: Before, build: Any) -> None:
    algorithm = build(config(0), before.single)  # of the same seed: its weights are those of version 1
    began = learner_fingerprint(algorithm, whole=True)
    registry = RLlibUpdater.of(algorithm)[MODULE].registry
    with pytest.raises(ConflictError, match=r'"head".*"new".*"continue"'):
        algorithm.train()
    assert [version.number for version in registry.versions()] == [1, 2, 3, 4]
    assert learner_fingerprint(algorithm, whole=True) == began
    assert RLlibUpdater.of(algorithm)[MODULE].adopt().number == 4
    assert learner_fingerprint(algorithm, whole=True) == before.seen["v4"]
    algorithm.train()
    assert (registry.head().number, registry.head().parent) == (5, 4)
    assert in_step(algorithm)


def test_a_training_that_goes_on_from_the_head_is_restored_whole_before_it_samples(
    before: Before, build: Any
) -> None:
    told: list[tuple[str, int]] = []
    algorithm = build(
        config(0),
        before.single,
        start="head",
        on_rollback=lambda module_id, version: told.append((module_id, version.number)),
    )
    samples: list[tuple[set[str], int | None, str]] = []
    own = algorithm.env_runner.sample

    def sample(**options: Any) -> Any:
        acting, version = runner_fingerprints(algorithm), runner_version(algorithm.env_runner)
        samples.append((acting, version, learner_fingerprint(algorithm, whole=True)))
        return own(**options)

    algorithm.env_runner.sample = sample
    acting = learner_fingerprint(algorithm)
    algorithm.train()
    (first, version, learner), *_ = samples
    assert first != {acting}
    assert (version, learner) == (4, before.seen["v4"])
    assert told == [(MODULE, 4)]
    registry = RLlibUpdater.of(algorithm)[MODULE].registry
    assert (registry.head().number, registry.head().parent) == (5, 4)


def test_a_training_that_begins_anew_abandons_what_was_there_and_can_still_go_back_to_it(
    before: Before, build: Any
) -> None:
    algorithm = build(config(0).debugging(seed=2), before.single, start="new")
    algorithm.train()
    registry = RLlibUpdater.of(algorithm)[MODULE].registry
    assert [registry.get(number).parent for number in (5, 6)] == [None, 5]
    assert [registry.staleness(number) for number in (4, 5, 6)] == [None, 1, 0]
    assert in_step(algorithm)
    assert RLlibUpdater.of(algorithm).rollback(to=3).ok
    assert learner_fingerprint(algorithm, whole=True) == before.seen["v3"]
    assert in_step(algorithm)


def test_a_checkpoint_of_the_head_goes_on_from_it(before: Before, restore: Any) -> None:
    algorithm = restore(before.folder / "checkpoint-4")
    registry = RLlibUpdater.of(algorithm)[MODULE].registry
    assert registry.head().number == 4
    assert learner_fingerprint(algorithm, whole=True) == before.seen["v4"]
    assert in_step(algorithm)
    assert runner_version(algorithm.env_runner) == 4
    algorithm.train()
    assert (registry.head().number, registry.head().parent) == (5, 4)
    assert in_step(algorithm)


def test_an_older_checkpoint_is_a_rollback_on_record(before: Before, restore: Any) -> None:
    algorithm = restore(before.folder / "checkpoint-3")
    registry = RLlibUpdater.of(algorithm)[MODULE].registry
    assert (registry.head().number, registry.head().restores) == (5, 3)
    assert learner_fingerprint(algorithm, whole=True) == before.seen["v3"]
    assert in_step(algorithm)
    algorithm.train()
    assert registry.head().parent == 5
    assert in_step(algorithm)


@pytest.mark.parametrize("start", [None, "head"])
def test_a_checkpoint_of_weights_that_are_no_version_is_not_lost_in_silence(
    start: Any, before: Before, tmp_path: Path, restore: Any
) -> None:
    with Registry.open(tmp_path / "other") as other:
        published = other.publish(Registry.open(before.single).load(1))
    with pytest.raises(ConflictError, match=r'"new".*"continue"|"continue".*"new"'):
        restore(before.folder / "checkpoint-4", location=tmp_path / "other", start=start)
    assert other_head(tmp_path / "other") == published.number


def other_head(location: Path) -> int:
    with Registry.open(location, create=False) as registry:
        return registry.head().number


@pytest.mark.parametrize(("start", "parent"), [("continue", 1), ("new", None)])
def test_a_checkpoint_of_weights_that_are_no_version_goes_on_as_it_is_told_to(
    start: Any, parent: int | None, before: Before, tmp_path: Path, restore: Any
) -> None:
    with Registry.open(tmp_path / "other") as other:
        other.publish(Registry.open(before.single).load(1))
    algorithm = restore(before.folder / "checkpoint-4", location=tmp_path / "other", start=start)
    registry = RLlibUpdater.of(algorithm)[MODULE].registry
    assert (registry.head().number, registry.head().parent) == (2, parent)
    assert learner_fingerprint(algorithm, whole=True) == before.seen["v4"]
    assert in_step(algorithm)


def test_each_module_begins_as_it_is_told_to_and_one_that_is_added_later_anew(
    before: Before, build: Any
) -> None:
    with pytest.raises(ValueError, match=r"start= names \['nobody'\]"):
        build(two_agents(0), before.several, start={"nobody": "head"})
    algorithm = build(two_agents(0), before.several, start={"main": "head", "opponent": "new"})
    updater = RLlibUpdater.of(algorithm)
    main, opponent = updater["main"].registry, updater["opponent"].registry
    heads = {"main": main.head().number, "opponent": opponent.head().number}
    algorithm.train()
    assert main.get(heads["main"] + 1).parent == heads["main"]
    assert opponent.get(heads["opponent"] + 1).parent is None
    with Registry.open(before.several, policy="spare", create=False) as spare:
        last = spare.head().number
        algorithm.add_module("spare", RLModuleSpec.from_module(algorithm.get_module("main")))
        assert (spare.head().number, spare.head().parent) == (last + 1, None)
    algorithm.train()
    assert in_step(algorithm, "main", "opponent", "spare")

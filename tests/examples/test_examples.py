"""The demo does what it tells: measured rewards that fall and recover, and stamps that the record confirms."""

from __future__ import annotations

import importlib
import re
import shlex
import subprocess
import sys
from datetime import datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest

from weightledger.registry import Registry, Version

DEMO = Path(__file__).parent.parent.parent / "docs" / "examples" / "cartpole_rollback.py"

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]


class Demo(NamedTuple):
    folder: Path
    told: str
    earlier: int
    made: list[Version]
    rollback: Version
    restored: int


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    """Run the program twice in one folder; the first run is killed as it learns."""
    folder = tmp_path_factory.mktemp("demo")
    # Of another seed, so that the contents of its versions are others.
    first_run = [sys.executable, DEMO, "--seed", "7"]
    with subprocess.Popen(first_run, cwd=folder, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        assert any(line.startswith("  v3 ") for line in first.stdout)
        first.kill()
    with Registry.open(folder / "runs" / "cartpole") as registry:
        earlier = registry.head().number
    done = subprocess.run(
        [sys.executable, DEMO], cwd=folder, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    assert f"has versions up to v{earlier}, of earlier runs" in done.stdout
    assert "it begins a new line" in done.stdout
    with Registry.open(folder / "runs" / "cartpole", create=False) as registry:
        made = registry.versions()[earlier:]
    (rollback,) = [each for each in made if each.restores is not None]
    assert rollback.restores is not None
    return Demo(folder, done.stdout, earlier, made, rollback, rollback.restores)


def test_the_reward_that_was_recorded_rises_collapses_and_recovers(demo: Demo) -> None:
    rewards = {version.number: version.metrics["reward"] for version in demo.made}
    assert rewards[demo.made[0].number] < 150 < rewards[demo.restored]
    assert max(rewards[number] for number in range(demo.rollback.number - 3, demo.rollback.number)) < 40
    assert sum(rewards[version.number] for version in demo.made[-3:]) / 3 > 150


def test_a_second_run_in_one_folder_continues_the_numbers_and_begins_a_line(demo: Demo) -> None:
    numbers = [version.number for version in demo.made]
    assert numbers == list(range(demo.earlier + 1, demo.earlier + 1 + len(numbers)))
    with Registry.open(demo.folder / "runs" / "cartpole", create=False) as registry:
        assert registry.aliases()["best"] > demo.earlier
        assert demo.made[0].parent is None
        earlier = [registry.get(number) for number in range(1, demo.earlier + 1)]
        assert earlier
        assert {registry.staleness(version) for version in earlier} == {None}


def test_a_stamp_is_proven_only_between_its_receipt_and_the_next_push(
    demo: Demo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(DEMO.parent)
    is_proven = importlib.import_module("cartpole_rollback").is_proven
    with Registry.open(demo.folder / "runs" / "cartpole", create=False) as registry:
        held, following = registry.history(worker="rollout-0")[1:3]
        start, end, moment = held.confirmed_at, following.pushed_at, timedelta(microseconds=1)
        assert start is not None

        def proven(version: int, begun: datetime, ended: datetime) -> bool:
            batch = SimpleNamespace(player="rollout-0", version=version, begun=begun, ended=ended)
            return bool(is_proven(registry, batch))

        assert proven(held.version, start, end)
        assert not proven(held.version + 1, start, end)
        assert not proven(held.version, start - moment, end)
        assert not proven(held.version, start, end + moment)


def test_every_batch_is_proven_from_the_record(demo: Demo) -> None:
    (found,) = re.findall(r"^(\d+) of (\d+) batches", demo.told, re.M)
    rounds = len(re.findall(r"^  v\d+ +[\d,]+ steps ", demo.told, re.M))
    assert found == (str(5 * rounds), str(5 * rounds))


def test_the_optimizer_went_back_with_the_policy(demo: Demo) -> None:
    with Registry.open(demo.folder / "runs" / "cartpole", create=False) as registry:
        rates = [
            registry.load_extra(number)["optimizer"]["param_groups"][0]["lr"]
            for number in (demo.restored, demo.rollback.number - 1, demo.rollback.number + 1)
        ]
    assert rates == [rates[0], 10.0, rates[0]]


def test_the_evaluator_played_the_best_version_and_never_an_abandoned_one(demo: Demo) -> None:
    with Registry.open(demo.folder / "runs" / "cartpole", create=False) as registry:
        played = {
            each.version for each in registry.history(worker="evaluator") if each.version > demo.earlier
        }
        abandoned = {version.number for version in registry.versions() if registry.staleness(version) is None}
        evaluated = {number for number in played if "evaluation" in registry.get(number).metrics}
    assert abandoned
    assert not played & abandoned
    assert evaluated
    assert evaluated == played


def test_every_command_it_suggests_works(demo: Demo) -> None:
    suggested = [shlex.split(line) for line in demo.told.split("Try:\n")[1].splitlines()]
    assert len(suggested) > 3
    for command in suggested:
        done = subprocess.run(
            command, cwd=demo.folder, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stderr

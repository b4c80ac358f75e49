"""RLlib's Algorithms as trials of a tuning run: each keeps its own weights, and goes on where it was."""

from __future__ import annotations

import functools
import time
from pathlib import Path
from typing import Any

import pytest
from ray import tune
from ray.rllib.algorithms.ppo import PPO
from ray.rllib.callbacks.callbacks import RLlibCallback
from ray.tune.schedulers import PopulationBasedTraining

from tests.updater.rllib_parts import MODULE, PATIENCE, config, learner_fingerprint, runner_fingerprints
from weightledger.registry import Registry
from weightledger.updater.rllib import LedgerCallback

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.usefixtures("ray_cluster"),
]

SLOW, FAST = 0.01, 0.02
"""The learning rates of two trials."""


class InStep(RLlibCallback):
    """Puts the tests' own hashes into the result of each iteration, and a score: the learning rate that it began with.

    Args:
        dies: a file; where it is not there, the faster trial makes it and dies after its second iteration.
    """

    def __init__(self, dies: Path | None = None) -> None:
        super().__init__()
        self.dies = dies

    def on_train_result(self, *, algorithm: Any, result: dict[str, Any], **_: Any) -> None:
        result["learner"] = learner_fingerprint(algorithm)
        result["runners"] = sorted(runner_fingerprints(algorithm))
        result["score"] = algorithm.config.lr
        dies = self.dies is not None and algorithm.config.lr == FAST and result["training_iteration"] == 2
        if dies and self.dies is not None and not self.dies.exists():
            self.dies.touch()
            raise RuntimeError("this trial dies")


def tuner(folder: Path, callbacks: list[Any], iterations: int, **options: Any) -> tune.Tuner:
    made = config(0).callbacks(callbacks).training(lr=tune.grid_search([SLOW, FAST]))
    return tune.Tuner(
        PPO,
        param_space=made,
        run_config=tune.RunConfig(
            name="run",
            storage_path=str(folder / "results"),
            stop={"training_iteration": iterations},
            checkpoint_config=tune.CheckpointConfig(checkpoint_frequency=1),
            failure_config=tune.FailureConfig(max_failures=1),
            verbose=0,
        ),
        **options,
    )


def registries(folder: Path, results: Any) -> dict[float, Registry]:
    """Open the registry of each trial, by its learning rate."""
    return {
        result.config["lr"]: Registry.open(folder / Path(result.path).name, create=False)
        for result in results
    }


@pytest.mark.long
def test_each_trial_has_a_registry_of_its_own_and_one_that_died_goes_on_in_it(tmp_path: Path) -> None:
    ledgers = tmp_path / "ledgers"
    callbacks = [
        LedgerCallback.at(ledgers, per_trial=True, timeout=PATIENCE),
        functools.partial(InStep, tmp_path / "died"),
    ]
    results = tuner(tmp_path, callbacks, iterations=3).fit()
    assert (tmp_path / "died").exists()
    assert [result.error for result in results] == [None, None]
    for result in results:
        assert result.metrics is not None
        assert result.metrics["runners"] == [result.metrics["learner"]]
        assert result.metrics["weightledger"][MODULE]["ok"]
    found = registries(ledgers, results)
    assert {each.name for each in ledgers.iterdir()} == {Path(each.location).name for each in found.values()}
    assert len({registry.uuid for registry in found.values()}) == 2
    slow, fast = found[SLOW].versions(), found[FAST].versions()
    assert [version.parent for version in slow] == [None, 1, 2, 3]
    assert len({version.run for version in slow}) == 1
    # It died after version 3 and was restored from the checkpoint of its first iteration, which is version 2.
    assert [version.parent for version in fast] == [None, 1, 2, 2, 4, 5]
    assert [version.restores for version in fast] == [None, None, None, 2, None, None]
    assert len({version.run for version in fast[:3]} | {version.run for version in fast[3:]}) == 2


class Paced(InStep):
    """Lets the trials of a population run side by side."""

    def on_train_result(self, *, algorithm: Any, result: dict[str, Any], **_: Any) -> None:
        super().on_train_result(algorithm=algorithm, result=result)
        time.sleep(1.0)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:Consider boosting PBT performance:UserWarning")
def test_a_trial_that_takes_the_checkpoint_of_another_goes_on_from_it(tmp_path: Path) -> None:
    population = PopulationBasedTraining(
        time_attr="training_iteration",
        metric="score",
        mode="max",
        perturbation_interval=2,
        hyperparam_mutations={"gamma": [0.9, 0.99]},
        quantile_fraction=0.5,
        synch=True,
    )
    ledgers = tmp_path / "ledgers"
    callbacks = [LedgerCallback.at(ledgers, per_trial=True, timeout=PATIENCE, start="continue"), Paced]
    results = tuner(
        tmp_path, callbacks, iterations=4, tune_config=tune.TuneConfig(scheduler=population, num_samples=1)
    ).fit()
    assert [result.error for result in results] == [None, None]
    for result in results:
        assert result.metrics is not None
        assert result.metrics["runners"] == [result.metrics["learner"]]
    first, second = (Registry.open(each, create=False) for each in sorted(ledgers.iterdir()))
    taken = {version.digest for version in first.versions()} & {
        version.digest for version in second.versions()
    }
    assert taken, "one trial went on from the other's weights, which are a version of its own registry now"
    for registry in (first, second):
        assert registry.verify() == []

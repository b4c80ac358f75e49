"""RLlib's Algorithms as trials of a tuning run: each keeps its own weights, and goes on where it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ray import tune
from ray.rllib.algorithms.ppo import PPO
from ray.rllib.callbacks.callbacks import RLlibCallback

from tests.updater.rllib_parts import MODULE, PATIENCE, config, learner_fingerprint, runner_fingerprints
from weightledger.registry import Registry
from weightledger.updater.rllib import LedgerCallback

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("ray_cluster"),
]


class InStep(RLlibCallback):
    """Puts the tests' own hashes into the result of each iteration."""

    def on_train_result(self, *, algorithm: Any, result: dict[str, Any], **_: Any) -> None:
        result["learner"] = learner_fingerprint(algorithm)
        result["runners"] = sorted(runner_fingerprints(algorithm))


def tuner(folder: Path, made: Any, iterations: int, **options: Any) -> tune.Tuner:
    return tune.Tuner(
        PPO,
        param_space=made,
        run_config=tune.RunConfig(
            name="run",
            storage_path=str(folder / "results"),
            stop={"training_iteration": iterations},
            verbose=0,
        ),
        **options,
    )


def registries(folder: Path) -> list[Registry]:
    return [Registry.open(each, create=False) for each in sorted(folder.iterdir())]


def test_two_trials_have_two_registries(tmp_path: Path) -> None:
    ledgers = LedgerCallback.at(tmp_path / "ledgers", per_trial=True, timeout=PATIENCE)
    made = config(0).callbacks([ledgers, InStep]).training(lr=tune.grid_search([0.01, 0.02]))
    results = tuner(tmp_path, made, iterations=2).fit()
    assert [result.error for result in results] == [None, None]
    for result in results:
        assert result.metrics["runners"] == [result.metrics["learner"]]  # pyright: ignore[reportOptionalSubscript]
        assert result.metrics["weightledger"][MODULE]["ok"]  # pyright: ignore[reportOptionalSubscript]
    found = registries(tmp_path / "ledgers")
    assert [registry.location.name for registry in found] == sorted(Path(each.path).name for each in results)
    assert [registry.head().number for registry in found] == [3, 3]
    assert len({registry.uuid for registry in found}) == 2
    assert [len({version.run for version in registry.versions()}) for registry in found] == [1, 1]


def test_a_trial_needs_folders_for_a_registry_of_its_own() -> None:
    with pytest.raises(ValueError, match="per_trial"):
        LedgerCallback.at("postgresql+psycopg://team@db/weights", per_trial=True)

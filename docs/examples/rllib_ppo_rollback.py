# tests: run this
"""Train CartPole with RLlib's PPO, spoil the policy, roll it back, and see what the env runners really hold.

python docs/examples/rllib_ppo_rollback.py
"""

from __future__ import annotations

import tempfile
from typing import Any

import ray
import torch
from ray.rllib.algorithms.ppo import PPOConfig

from weightledger.updater.rllib import LedgerCallback, RLlibUpdater


def main() -> None:
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)  # a cluster of its own
    config = (
        PPOConfig()
        .environment("CartPole-v1")
        .env_runners(num_env_runners=1, num_envs_per_env_runner=4)
        .training(train_batch_size_per_learner=512, minibatch_size=128, num_epochs=4, lr=0.002)
        .callbacks(LedgerCallback.at(tempfile.mkdtemp()))  # all that a config needs
        .debugging(seed=0)
    )
    algorithm = config.build_algo()
    updater = RLlibUpdater.of(algorithm)
    ledger = updater["default_policy"]  # of several modules each has a series of its own

    def train(times: int) -> None:
        for _ in range(times):
            result: dict[str, Any] = algorithm.train()
            told, reward = (
                result["weightledger"]["default_policy"],
                result["env_runners"]["episode_return_mean"],
            )
            print(f"  v{told['version']}  all env runners confirmed: {told['ok']}  mean return {reward:.0f}")

    def held() -> set[tuple[int | None, str | None]]:
        """Hash the weights that are really in the env runners."""
        return {(each.version, each.digest) for each in ledger.probe().values()}

    print("learning")
    train(3)
    good = ledger.registry.head()

    print("spoiled")
    group: Any = algorithm.learner_group
    with torch.no_grad():
        for parameter in group._learner.module["default_policy"].parameters():
            parameter.mul_(-3.0)
    train(2)

    report = updater.rollback(to=good, reason="the policy was spoiled")
    report.raise_for_failures()
    print(f"v{report.version} restores v{good.number}: learner, optimizer and env runners")
    assert held() == {(report.version, good.digest)}

    print("learning on")
    train(2)
    ages = {version.number: ledger.registry.staleness(version) for version in ledger.registry.versions()}
    print("abandoned:", [f"v{number}" for number, age in ages.items() if age is None])
    algorithm.stop()
    ray.shutdown()


if __name__ == "__main__":
    main()

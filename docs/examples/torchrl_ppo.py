# tests: run this
"""TorchRL's PPO on CartPole: two Ray collectors, every frame stamped with its version, and a rollback in the middle.

The two lines are the updater, and `weight_updater=updater`. Then the learning rate is broken on purpose; the policy and
its optimizer go back, and the frames that the abandoned versions gave are dropped from the replay buffer.

    python docs/examples/torchrl_ppo.py [FOLDER]
"""

from __future__ import annotations

import os
import sys
import tempfile
import warnings
from typing import Any

import ray
import torch
from tensordict.nn import TensorDictModule
from torch import nn
from torch.distributions import OneHotCategorical

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # TorchRL warns of its own classes
    from torchrl.collectors.distributed import RayCollector
    from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
    from torchrl.envs import GymEnv, RewardSum, TransformedEnv
    from torchrl.modules import ProbabilisticActor, ValueOperator
    from torchrl.objectives import ClipPPOLoss
    from torchrl.objectives.value import GAE

from weightledger.registry import Registry
from weightledger.updater.torchrl import RayCollectorWeightUpdater

WORKERS, FRAMES = 2, 1024
LEARNING_RATE, BROKEN_RATE = 2e-3, 3.0


def make_environment() -> Any:
    return TransformedEnv(GymEnv("CartPole-v1"), RewardSum())


def body(outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs))


class Learner:
    """Actor, critic and optimizer of PPO, as TorchRL makes them."""

    def __init__(self) -> None:
        self.actor = ProbabilisticActor(
            TensorDictModule(body(2), in_keys=["observation"], out_keys=["logits"]),
            in_keys=["logits"],
            distribution_class=OneHotCategorical,
            return_log_prob=True,
        )
        critic = ValueOperator(body(1), in_keys=["observation"])
        self.advantage = GAE(gamma=0.99, lmbda=0.95, value_network=critic, average_gae=True)
        self.loss = ClipPPOLoss(self.actor, critic, entropy_coeff=0.01)
        self.optimizer = torch.optim.Adam(self.loss.parameters(), lr=LEARNING_RATE)

    def learn(self, batch: Any) -> None:
        """Improve the policy by one batch."""
        with torch.no_grad():
            self.advantage(batch)
        frames = batch.flatten()
        for _ in range(6):
            for part in torch.randperm(len(frames)).split(256):
                losses = self.loss(frames[part])
                total = losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]
                self.optimizer.zero_grad()
                total.backward()
                nn.utils.clip_grad_norm_(self.loss.parameters(), 1.0)
                self.optimizer.step()


def mean_return(batch: Any) -> float:
    """Return what the episodes that ended in a batch were worth, on average."""
    ended = batch["next", "done"].squeeze(-1)
    return batch["next", "episode_reward"][ended].mean().item()


def train(folder: str) -> str:
    """Learn, break, roll back, learn on; return what went wrong, or nothing."""
    learner = Learner()
    registry = Registry.open(folder)
    updater = RayCollectorWeightUpdater(
        learner.actor,
        registry=registry,
        extra=learner.optimizer.state_dict,
        on_rollback=lambda version: learner.optimizer.load_state_dict(registry.load_extra(version)),
        start="new",  # each run is a training of its own; "head" would go on from the last one
    )
    collector: Any = RayCollector(
        [make_environment] * WORKERS,
        learner.actor,
        weight_updater=updater,
        frames_per_batch=WORKERS * FRAMES,
        total_frames=10_000_000,
        sync=True,
        collector_kwargs={"track_policy_version": True},
        remote_configs={"num_cpus": 1, "num_gpus": 0},
    )
    collector.set_seed(0)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(100_000), batch_size=64)
    batches = iter(collector)
    rewards: dict[int, float] = {}

    def play() -> Any:
        collector.update_policy_weights_(message=f"learning rate {learner.optimizer.param_groups[0]['lr']:g}")
        report = updater.last_report
        assert report is not None and report.version is not None
        report.raise_for_failures()
        batch, number = next(batches), report.version
        stamps = batch["next", "policy_version"].unique().tolist()
        assert stamps == batch["policy_version"].unique().tolist() == [number], stamps
        rewards[number] = mean_return(batch)
        registry.record_metrics(number, reward=rewards[number])
        buffer.extend(batch.flatten().select("observation", "action", "policy_version"))
        print(f"  v{number:<3} return {rewards[number]:5.1f}  {'█' * round(rewards[number] / 5)}", flush=True)
        return batch

    print("Learning: each line is one version, played by two collectors.")
    batch = play()
    for _ in range(7):
        learner.learn(batch)
        batch = play()
    best = registry.best("reward")

    print(f"Breaking it: somebody sets the learning rate to {BROKEN_RATE:g}.")
    learner.optimizer.param_groups[0]["lr"] = BROKEN_RATE
    for _ in range(2):
        learner.learn(batch)
        batch = play()
    abandoned = registry.head()

    updater.rollback(best, reason="return collapsed")
    head = registry.head()
    print(
        f"Rolled back: v{head.number} restores v{head.restores}, in the learner, its optimizer and the workers."
    )
    frames = buffer[:]
    keep = updater.lineage_mask(frames)
    buffer.empty()
    buffer.extend(frames[keep])
    print(
        f"Replay buffer: {len(frames)} frames, {len(buffer)} after those of abandoned versions were dropped."
    )

    batch = play()
    learner.learn(batch)
    play()
    collector.shutdown()
    updater.close()

    stamps = set(buffer[:]["policy_version"].tolist())
    if rewards[best.number] < 2 * rewards[1]:
        return f"the policy did not learn: {rewards}"
    if rewards[abandoned.number] > rewards[best.number] / 2:
        return f"the policy did not collapse: {rewards}"
    if rewards[head.number] < rewards[best.number] / 2:
        return f"the rollback did not bring the return back: {rewards}"
    if stamps & {number for number in rewards if registry.staleness(number) is None}:
        return f"frames of abandoned versions are left: {sorted(stamps)}"
    registry.close()
    return ""


if __name__ == "__main__":
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    torch.manual_seed(0)
    ray.init(address="local", include_dashboard=False, log_to_driver=False, num_cpus=WORKERS + 1)
    trouble = train(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
    ray.shutdown()
    sys.exit(trouble or 0)

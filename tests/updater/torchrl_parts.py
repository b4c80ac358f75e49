"""Real RayCollectors of TorchRL, shared by the tests: each is started once, and every test brings its own registry.

The environment's reward is the action, and the policy's action is its bias: so every frame tells which weights acted.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.collectors import MultiSyncCollector
from torchrl.collectors.distributed import RayCollector
from torchrl.data import Composite, Unbounded
from torchrl.envs import EnvBase

from tests.updater.actors import PATIENCE, get
from weightledger.registry import Registry
from weightledger.updater import SyncReport
from weightledger.updater.torchrl import RayCollectorWeightUpdater, StampBatches


class TinyEnv(EnvBase):
    """Episodes of seven steps, in which nothing happens but what the policy does."""

    def __init__(self) -> None:
        super().__init__(device="cpu", batch_size=torch.Size([]))
        self.observation_spec = Composite(observation=Unbounded(torch.Size([4])))
        self.action_spec = Unbounded(torch.Size([1]))
        self.reward_spec = Unbounded(torch.Size([1]))
        self.steps = 0

    def _reset(self, tensordict: TensorDictBase | None = None, **_: Any) -> TensorDictBase:
        self.steps = 0
        done = torch.zeros(1, dtype=torch.bool)
        return TensorDict({"observation": torch.zeros(4), "done": done, "terminated": done.clone()}, [])

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self.steps += 1
        done = torch.tensor([self.steps >= 7])
        reward = tensordict["action"].view(1)
        seen = torch.full((4,), float(self.steps))
        return TensorDict(
            {"observation": seen, "reward": reward, "done": done, "terminated": done.clone()}, []
        )

    def _set_seed(self, seed: int | None) -> None:
        return None


def make_policy(value: float = 0.0, width: int = 1) -> Any:
    """Return a policy whose action is `value`, whatever it sees."""
    policy: Any = TensorDictModule(nn.Linear(4, width), in_keys=["observation"], out_keys=["action"])
    nn.init.zeros_(policy.module.weight)
    return train(policy, value)


def train(policy: Any, value: float) -> Any:
    """Train the policy to act `value`, so to speak."""
    nn.init.constant_(policy.module.bias, value)
    return policy


def weights_of(module: nn.Module) -> Any:
    """Return the weights as TorchRL's users pass them: a locked TensorDict that shares the module's memory."""
    weights: Any = TensorDict.from_module(module)
    return weights.data.lock_()


def start(environments: int, create: Callable[[], Any] = TinyEnv, **options: Any) -> Any:
    """Start a collector whose actors come back after each death."""
    options.setdefault("remote_configs", {"num_cpus": 0, "num_gpus": 0, "max_restarts": -1})
    options.setdefault("collector_kwargs", {"track_policy_version": True})
    return RayCollector(
        [create] * environments,
        frames_per_batch=10 * environments,
        total_frames=1_000_000,
        **options,
    )


def start_synchronous() -> Any:
    return start(2, policy=make_policy(), sync=True, weight_updater=Unused())


def start_asynchronous() -> Any:
    """Without TorchRL's own stamps, and with a policy that only the actors have."""
    return start(
        2,
        policy_factory=make_policy,
        sync=False,
        weight_updater=Unused(),
        collector_kwargs={},
        post_collect_hook=StampBatches(),
    )


def start_nested() -> Any:
    return start(
        1,
        policy=make_policy(),
        sync=True,
        collector_class=MultiSyncCollector,
        num_workers_per_collector=2,
        weight_updater=Unused(),
    )


class Unused(RayCollectorWeightUpdater):
    """Stands where a collector asks for an updater, until a test brings its own."""

    def __init__(self) -> None:
        self._collector = None

    def register_collector(self, collector: Any) -> None:
        self._collector = lambda: collector  # type: ignore[assignment]


_started: dict[Callable[[], Any], Any] = {}


def borrow(start: Callable[[], Any]) -> Any:
    """Return the one collector of a kind; tests that share it run one after another."""
    if start not in _started:
        _started[start] = start()
    return _started[start]


def steer(
    folder: Path, collector: Any, *, policy: Any = None, **options: Any
) -> tuple[RayCollectorWeightUpdater, Any]:
    """Give a collector an updater of a new or existing registry in a folder; return it and its learner."""
    policy = make_policy() if policy is None else policy
    options.setdefault("start", "continue")  # where a folder is used again, the learner goes on
    options.setdefault("timeout", 2 * PATIENCE)  # the first push waits for the actors to be made
    updater = RayCollectorWeightUpdater(policy, registry=Registry.open(folder), **options)
    collector.weight_updater = updater
    return updater, policy


def report_of(updater: RayCollectorWeightUpdater) -> SyncReport:
    assert updater.last_report is not None
    return updater.last_report


def collect(collector: Any) -> TensorDictBase:
    batch = next(iter(collector))
    assert isinstance(batch, TensorDictBase)
    return batch


def seen(batch: Any) -> set[tuple[float, int, int]]:
    """Return each action that was taken, with the stamps of its frame: root and next."""
    parts = (
        batch["action"].flatten(),
        batch["policy_version"].flatten(),
        batch["next", "policy_version"].flatten(),
    )
    return set(zip(*(part.tolist() for part in parts), strict=True))


def value_in(actor: Any) -> float:
    """Read an actor's policy back."""
    state = get(actor.cascade_execute.remote("policy.state_dict"))
    return float(state["module.bias"][0])

"""TorchRL's RayCollector around the weights that are sent. No batch is ever collected."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule

from tests.benchmarks import weights
from tests.benchmarks.timing import Contender
from tests.benchmarks.workers import WAIT, Fleet

with warnings.catch_warnings():
    # TorchRL warns of the classes that it deprecates when it makes its own, and when somebody subclasses them.
    warnings.simplefilter("ignore", DeprecationWarning)
    from torchrl.collectors import Collector, RayWeightUpdater
    from torchrl.collectors.distributed import RayCollector
    from torchrl.data import Composite, Unbounded
    from torchrl.envs import EnvBase

    class WaitingRayWeightUpdater(RayWeightUpdater):
        """TorchRL's stock updater; only, it keeps the answers that the stock one drops, and waits for them."""

        def __init__(self, policy_weights: TensorDictBase) -> None:
            super().__init__(policy_weights, [], 0)
            self._answers: list[Any] = []

        def take(self, collector: Any) -> None:
            """Learn the workers, which are made after the updater."""
            self.remote_collectors = collector.remote_collectors
            self._batches_since_weight_update = [0] * len(self.remote_collectors)

        def _sync_weights_with_worker(self, worker_id: int, server_weights: Any) -> None:
            handle = self.remote_collectors[worker_id]
            self._answers.append(handle.update_policy_weights_.remote(policy_weights=server_weights))
            self._batches_since_weight_update[worker_id] = 0

        def push_weights(self, *arguments: Any, **options: Any) -> None:
            super().push_weights(*arguments, **options)
            answers, self._answers = self._answers, []
            ray.get(answers, timeout=WAIT)


class Stillness(EnvBase):
    """An environment in which nothing happens."""

    def __init__(self) -> None:
        super().__init__(device="cpu", batch_size=torch.Size([]))
        self.observation_spec = Composite(observation=Unbounded(torch.Size([4])))
        self.action_spec = Unbounded(torch.Size([1]))
        self.reward_spec = Unbounded(torch.Size([1]))

    def _reset(self, tensordict: TensorDictBase | None = None, **_: Any) -> TensorDictBase:
        done = torch.zeros(1, dtype=torch.bool)
        return TensorDict({"observation": torch.zeros(4), "done": done, "terminated": done.clone()}, [])

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        done = torch.zeros(1, dtype=torch.bool)
        return TensorDict(
            {
                "observation": torch.zeros(4),
                "reward": tensordict["action"].view(1),
                "done": done,
                "terminated": done.clone(),
            },
            [],
        )

    def _set_seed(self, seed: int | None) -> None:
        return None


@contextmanager
def collector_with(size: int, count: int, *, stock_updater: bool) -> Iterator[tuple[Fleet, Contender]]:
    """Start a RayCollector, and give its workers with TorchRL's own way to update them.

    Args:
        stock_updater: the class that this library replaces; otherwise the default of 0.14, RayWeightSyncScheme.
    """
    net = weights.make(size)
    policy = TensorDictModule(net, in_keys=["observation"], out_keys=["action"])
    view: Any = TensorDict.from_module(policy)
    updater = WaitingRayWeightUpdater(view.data.lock_()) if stock_updater else None
    leaf: Any = Collector
    collector: Any = RayCollector(
        [Stillness] * count,
        policy=policy,
        frames_per_batch=10 * count,
        total_frames=1_000_000,
        sync=True,
        collector_class=leaf,
        collector_kwargs={"auto_register_policy_transforms": False},
        remote_configs={"num_cpus": 1, "num_gpus": 0, "memory": 0},
        weight_updater=updater,
    )
    try:
        if updater is not None:
            updater.take(collector)
        fleet = Fleet(collector.remote_collectors, policy)
        yield (
            fleet,
            Contender(
                "RayWeightUpdater" if stock_updater else "RayWeightSyncScheme",
                collector.update_policy_weights_,
                lambda: weights.change(policy),
                fleet.check,
            ),
        )
    finally:
        # Its workers only: the cluster goes on to the next case.
        collector.shutdown(shutdown_ray=False)

"""Real workers: plain Ray actors, or those of a TorchRL RayCollector; and the proof of what they hold."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import ray
import torch

from tests.benchmarks import weights
from tests.benchmarks.processes import Process

WAIT = 300.0  # seconds that anything here waits for workers


class Player:
    """A plain actor with a policy, as users write it."""

    def __init__(self) -> None:
        self.policy: Any = None
        self.shared: list[torch.Tensor] = []

    def build(self, size: int) -> int:
        """Make a policy of so many bytes; returns the process."""
        self.policy = weights.Net(size)
        return os.getpid()

    def load(self, state: dict[str, torch.Tensor]) -> None:
        self.policy.load_state_dict(state)


class Fleet:
    """Actors that have a `policy`, and the learner whose weights they should hold."""

    def __init__(self, handles: Sequence[Any], learner: Any) -> None:
        self.handles = list(handles)
        self.learner = learner

    def ask(self, question: Any, *arguments: Any) -> list[Any]:
        """Run a function in every worker, given the actor, and return the answers."""
        return ray.get(
            [handle.__ray_call__.remote(question, *arguments) for handle in self.handles], timeout=WAIT
        )

    def check(self, outcome: Any, whole: bool) -> None:
        """Prove that every worker holds what the learner holds.

        Raises:
            AssertionError: one does not, or an updater's report says that a worker failed.
        """
        if hasattr(outcome, "raise_for_failures"):
            outcome.raise_for_failures()
        read, expected = (
            (_digest_of, weights.digest(self.learner)) if whole else (_value_of, weights.value(self.learner))
        )
        found = self.ask(read)
        if found != [expected] * len(self.handles):
            raise AssertionError(f"workers hold {found}, the learner {expected}")


def _value_of(actor: Any) -> float:
    return weights.value(actor.policy)


def _digest_of(actor: Any) -> str:
    return weights.digest(actor.policy)


@contextmanager
def cluster(store: int, *, cpus: int = 64) -> Iterator[None]:
    """Run a Ray cluster on this machine with an object store of at least so many bytes.

    It has more CPUs than the machine, because workers here wait far more than they compute.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is reported to anybody
    ray.init(
        # Without it, a cluster that somebody else runs on this machine would be joined.
        address="local",
        num_cpus=cpus,
        include_dashboard=False,
        object_store_memory=max(200 << 20, store),
        log_to_driver=False,
        namespace="weightledger-bench",
    )
    try:
        yield
    finally:
        ray.shutdown()


def hire(count: int) -> list[Any]:
    """Start so many plain actors and wait until they are there."""
    actor: Any = ray.remote(num_cpus=0)(Player)
    handles = [actor.remote() for _ in range(count)]
    ray.get([handle.build.remote(1024) for handle in handles], timeout=WAIT)
    return handles


def build(handles: Sequence[Any], size: int) -> list[Process]:
    """Give plain actors policies of so many bytes, and return their processes."""
    return [Process(pid) for pid in ray.get([handle.build.remote(size) for handle in handles], timeout=WAIT)]

"""Real actors with real faults, shared by the tests that run on the cluster, and the comparison of record and truth.

Starting an actor costs seconds of importing torch, so tests that do not end their actors borrow them from a pool. A
borrowed actor is known to no registry of the test: what it holds is noted by registry, and each test has its own.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import ray
import torch
from ray.exceptions import ActorDiedError, RayActorError
from torch import nn

from weightledger.registry import Registry
from weightledger.registry.records import Holding, WorkerStatus
from weightledger.registry.weights.live import live_digest
from weightledger.updater import RayRemoteWeightUpdater, SyncReport, acting, held_version
from weightledger.updater.in_worker.receiver import _states
from weightledger.updater.transports.incarnations import find_incarnations
from weightledger.updater.workers.reading import Trouble

PATIENCE = 90.0
"""Seconds after which a test gives up waiting: far more than anything here needs."""


def filled(value: float, width: int = 3) -> nn.Linear:
    """Return a module that tells by every number in it which value it was made of."""
    return fill(nn.Linear(width, 2), value)


def fill(module: nn.Linear, value: float) -> nn.Linear:
    with torch.no_grad():
        module.weight.fill_(value)
        module.bias.fill_(value)
    return module


class Rollouts:
    """A plain class with a policy, as users have them: nothing of it knows of weightledger, but the stamp."""

    def __init__(self, value: float = -1.0, width: int = 3) -> None:
        self.initial = value
        self.policy = filled(value, width)

    def reset(self, value: float = -1.0, width: int = 3) -> None:
        self.__dict__.clear()
        _states.pop(id(self), None)  # what earlier tests pushed
        self.__init__(value, width)  # type: ignore[misc]

    def value(self) -> float:
        """Return the one number that all weights have; a mix would not have one."""
        found = {float(end) for tensor in self.policy.state_dict().values() for end in tensor.aminmax()}
        assert len(found) == 1, f"a mix: {found}"
        return found.pop()

    def digest(self) -> str:
        return live_digest(self.policy)[0]

    def stamp(self, policy: str | None = None) -> int | None:
        return held_version(self, policy)

    def pid(self) -> int:
        return os.getpid()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def wait_for(self, path: str) -> None:
        """Be busy until a file appears."""
        wait_until(lambda: Path(path).exists(), f"{path} to appear")

    def act_until(self, path: str) -> tuple[int | None, list[float], int | None]:
        """Act until a file appears; return the version and the values seen, and the version after that."""
        with acting(self) as version:
            seen = {self.value()}
            while not Path(path).exists():
                seen.add(self.value())
                time.sleep(0.005)
        return version, sorted(seen), held_version(self)

    def change(self, value: float) -> None:
        fill(self.policy, value)

    def die(self) -> None:
        os._exit(1)


remote: Any = ray.remote
"""Untyped, since Ray's annotations know neither the options nor the methods of actors."""

Worker = remote(num_cpus=0, max_restarts=-1)(Rollouts)
"""Comes back after each death."""
Mortal = remote(num_cpus=0)(Rollouts)
"""Dies once."""
Threaded = remote(num_cpus=0, max_concurrency=6)(Rollouts)

_pools: dict[Any, list[Any]] = {}


def borrow(count: int, value: float = -1.0, width: int = 3, *, kind: Any = Worker) -> list[Any]:
    """Return living actors that hold `value`; tests that share them run one after another."""
    pool = _pools.setdefault(kind, [])
    while len(pool) < count:
        pool.append(kind.remote())
    actors = pool[:count]
    for actor in actors:
        restarted(actor)
    get([actor.reset.remote(value, width) for actor in actors])
    return actors


def get(refs: Any) -> Any:
    return ray.get(refs, timeout=PATIENCE)


def wait_until(done: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not done():
        assert time.monotonic() < deadline, f"waited {PATIENCE:g} s for {what}"
        time.sleep(0.02)


def restarted(actor: Any) -> None:
    """Wait until an actor answers, in whatever life."""

    def answers() -> bool:
        try:
            ray.get(actor.pid.remote(), timeout=PATIENCE)
        except ActorDiedError:
            raise
        except RayActorError:
            return False
        return True

    wait_until(answers, "an actor to answer")


def crash(actor: Any) -> None:
    """End the process of an actor from inside, and wait until the cluster knows."""
    (before,) = find_incarnations({0: actor}).values()
    assert isinstance(before, str), before
    actor.die.remote()
    wait_until(
        lambda: find_incarnations({0: actor}).get(0) != before,
        "the cluster to see that an actor's process ended",
    )


def kill(actor: Any) -> None:
    """Kill an actor for good, and wait until the cluster knows."""
    ray.kill(actor)

    def is_dead() -> bool:
        life = find_incarnations({0: actor}).get(0)
        return isinstance(life, Trouble) and life.kind == "dead"

    wait_until(is_dead, "the cluster to see that an actor is dead")


def steer(
    folder: Path, actors: Iterable[Any], *, policy: str = "default", value: float = 1.0, **options: Any
) -> tuple[RayRemoteWeightUpdater, nn.Linear]:
    """Return an updater of a new or existing registry in a folder, and its learner."""
    handles = list(actors)
    learner = filled(value)
    registry = Registry.open(folder, policy=policy)
    options.setdefault("names", [f"w{index}" for index in range(len(handles))])
    options.setdefault("timeout", PATIENCE)
    return RayRemoteWeightUpdater(learner, handles, registry=registry, **options), learner


def learn(updater: RayRemoteWeightUpdater, value: float, **options: Any) -> SyncReport:
    """Train to a value, so to speak, and update."""
    fill(updater.policy_weights, value)
    report = updater.update_weights(**options)
    assert isinstance(report, SyncReport)
    return report


def statuses(report: SyncReport) -> list[str]:
    return [outcome.status for outcome in report.workers.values()]


def status_of(registry: Registry, name: str) -> WorkerStatus:
    (status,) = [status for status in registry.workers() if status.name == name]
    return status


def check_truth(updater: RayRemoteWeightUpdater, living: Iterable[int] | None = None) -> None:
    """Compare the record with what each actor really holds, as read back from the actor.

    Args:
        living: ids of the actors that can answer now; by default all.
    """
    names = {worker.id: worker.name for worker in updater.workers}
    handles = dict(zip(updater.all_worker_ids(), updater.remote_collectors, strict=True))
    ids = list(handles) if living is None else list(living)
    compare(updater.registry, {names[key]: handles[key] for key in ids})


def compare(registry: Registry, actors: Mapping[str, Any]) -> None:
    """As `check_truth`, for named actors. What the record does not claim to know is not compared."""
    statuses = {status.name: status for status in registry.workers()}
    held = {holding.worker: holding for holding in registry.holdings() if holding.state == "held"}
    assert {name for name, status in statuses.items() if status.state == "confirmed"} == set(held)
    digests = dict(zip(actors, get([actor.digest.remote() for actor in actors.values()]), strict=True))
    stamps = get([actor.stamp.remote(registry.policy) for actor in actors.values()])
    for (name, digest), stamp in zip(digests.items(), stamps, strict=True):
        status = statuses[name]
        if status.state != "confirmed":
            assert status.held is None
            continue
        assert status.held is not None
        assert held[name].version == status.held == stamp
        assert held[name].incarnation == status.incarnation
        assert digest == held[name].sent_digest, (
            f"{name} is on record with v{status.held} and holds something else"
        )
        assert status.pending is None
    check_intervals(registry)


def check_intervals(registry: Registry) -> None:
    """Each worker's holdings are whole stretches that follow each other, in the order of their pushes."""
    by_worker: dict[str, list[Holding]] = {}
    for holding in registry.history():
        by_worker.setdefault(holding.worker, []).append(holding)
    for holdings in by_worker.values():
        assert [one.order for one in holdings] == sorted({one.order for one in holdings})
        confirmed = [one for one in holdings if one.confirmed_at is not None]
        for one in confirmed:
            assert one.confirmed_at is not None
            assert one.pushed_at <= one.confirmed_at
            assert one.ended_at is None or one.ended_at >= one.confirmed_at
            assert one.incarnation is not None
        for earlier, later in pairwise(confirmed):
            assert later.confirmed_at is not None
            assert earlier.ended_at is not None
            assert earlier.ended_at <= later.confirmed_at
        assert len([one for one in holdings if one.ended_at is None and one.confirmed_at is None]) <= 1


def ends(registry: Registry, worker: str) -> list[tuple[int, str | None]]:
    """Return each version that a worker was sent, and how its holding ended."""
    return [(holding.version, holding.ended_how) for holding in registry.history(worker=worker)]


def kinds(registry: Registry, worker: str | None = None) -> list[str]:
    """Return the kinds of the events about a worker, oldest first."""
    return [event.kind for event in registry.events(worker=worker)]


def store_bytes() -> int:
    """Return how many bytes the cluster's object stores hold; the cluster knows it some tenths of a second later."""
    name = "object_store_memory"
    return int(ray.cluster_resources()[name] - ray.available_resources().get(name, 0.0))


def check_store_comes_to(most: float, least: float = 0.0) -> None:
    """Wait until the object stores hold so many bytes, and hold them still after what is told late was told."""

    def fits() -> bool:
        return least <= store_bytes() <= most

    def stays() -> bool:
        if not fits():
            return False
        time.sleep(0.3)
        return fits()

    wait_until(stays, f"the object store to hold {least:.0f} to {most:.0f} bytes")

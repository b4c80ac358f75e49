"""An updater inside of an actor that is one of its own workers: the call that updates need not wait for itself."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import ray

from tests.updater.actors import PATIENCE, Rollouts, fill, filled, get, remote
from weightledger.registry import Registry
from weightledger.updater import RayRemoteWeightUpdater, SyncReport, acting, held_version

pytestmark = pytest.mark.usefixtures("ray_cluster")

TIMEOUT = 20.0


class Trainer(Rollouts):
    """Trains, acts, and steers itself and others."""

    def steer(self, folder: str, workers: list[Any], width: int) -> None:
        self.learner = filled(0.0, width)
        own = ray.get_runtime_context().current_actor
        self.updater = RayRemoteWeightUpdater(
            self.learner,
            [own, *workers],
            registry=Registry.open(folder),
            names=["own", *(f"w{index}" for index in range(len(workers)))],
            timeout=TIMEOUT,
        )

    def learn(self, value: float) -> tuple[SyncReport, float, float]:
        fill(self.learner, value)
        began = time.monotonic()
        report = self.updater.update_weights()
        return report, time.monotonic() - began, self.value()

    def learn_while_acting(self, value: float) -> tuple[SyncReport, float, float]:
        with acting(self):
            return self.learn(value)

    def learn_in_a_thread(self, value: float) -> None:
        """Train beside the calls."""
        self.told: list[SyncReport] = []
        thread = threading.Thread(target=lambda: self.told.append(self.learn(value)[0]), daemon=True)
        thread.start()

    def learn_later(self, value: float) -> float:
        fill(self.learner, value)
        self.future = self.updater.update_weights(wait=False)
        return self.value()

    def report(self) -> SyncReport | None:
        if self.told:
            return self.told[0]
        return None

    def later(self) -> SyncReport | None:
        return self.future.result(0) if self.future.done() else None  # type: ignore[no-any-return]

    def held(self) -> tuple[int | None, float]:
        return held_version(self), self.value()

    def probe(self) -> bool:
        return all(found.matches for found in self.updater.probe().values())

    def end(self) -> None:
        self.updater.close()
        self.updater.registry.close()


class AsyncTrainer(Trainer):
    """The same in an event loop."""

    async def learn_in_a_loop(self, value: float) -> tuple[SyncReport, float, float]:
        await asyncio.sleep(0)
        return self.learn(value)


@pytest.mark.parametrize("width", [3, 50_000])
def test_an_actor_brings_itself_and_others_to_a_version(tmp_path: Path, width: int) -> None:
    trainer = remote(num_cpus=0)(Trainer).remote(-1.0, width)
    worker = remote(num_cpus=0)(Rollouts).remote(-1.0, width)
    try:
        get(trainer.steer.remote(str(tmp_path), [worker], width))
        for value in (1.0, 2.0):
            report, seconds, own = get(trainer.learn.remote(value))
            assert report.ok and [each.status for each in report.workers.values()] == ["synced", "synced"]
            assert seconds < TIMEOUT / 2
            assert (own, get(worker.value.remote())) == (value, value)
        assert get(trainer.held.remote()) == (2, 2.0)
        unchanged, seconds, _ = get(trainer.learn.remote(2.0))
        assert [each.status for each in unchanged.workers.values()] == ["current", "current"]
        assert seconds < TIMEOUT / 2
        assert get(trainer.probe.remote())
        busy, seconds, own = get(trainer.learn_while_acting.remote(3.0))
        assert (busy.workers[0].status, own) == ("failed", 2.0) and "acting" in busy.workers[0].error
        assert seconds < TIMEOUT / 2
        after, _, own = get(trainer.learn.remote(3.0))
        assert after.ok and own == 3.0
        with Registry.open(tmp_path) as registry:
            assert {status.name: status.held for status in registry.workers()} == {"own": 3, "w0": 3}
    finally:
        get(trainer.end.remote())
        ray.kill(trainer)
        ray.kill(worker)


def test_beside_the_calls_of_the_actor_a_push_lands_between_two_of_them(tmp_path: Path) -> None:
    trainer = remote(num_cpus=0)(Trainer).remote(-1.0, 3)
    try:
        get(trainer.steer.remote(str(tmp_path), [], 3))
        get(trainer.learn_in_a_thread.remote(1.0))
        assert until(lambda: get(trainer.report.remote())).ok
        assert get(trainer.held.remote()) == (1, 1.0)
        assert get(trainer.learn_later.remote(2.0)) == 1.0, "not in the middle of the call"
        assert until(lambda: get(trainer.later.remote())).ok
        assert get(trainer.held.remote()) == (2, 2.0)
    finally:
        get(trainer.end.remote())
        ray.kill(trainer)


def test_an_async_actor_brings_itself_to_a_version(tmp_path: Path) -> None:
    trainer = remote(num_cpus=0)(AsyncTrainer).remote(-1.0, 3)
    try:
        get(trainer.steer.remote(str(tmp_path), [], 3))
        report, seconds, own = get(trainer.learn_in_a_loop.remote(1.0))
        assert report.ok and own == 1.0
        assert seconds < TIMEOUT / 2
    finally:
        get(trainer.end.remote())
        ray.kill(trainer)


def until(ask: Any) -> Any:
    deadline = time.monotonic() + PATIENCE
    while (found := ask()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found

"""Late, repeated and overlapping pushes: the order number decides, and nothing piles up for a worker that is slow."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.updater.actors import (
    Rollouts,
    Threaded,
    borrow,
    check_store_comes_to,
    check_truth,
    ends,
    fill,
    filled,
    get,
    kinds,
    learn,
    remote,
    status_of,
    statuses,
    steer,
    wait_until,
)
from weightledger.registry import Registry
from weightledger.updater import RayRemoteWeightUpdater, SyncReport, acting, held_version
from weightledger.updater.in_worker.receiver import _state_of, receive
from weightledger.updater.messages import Push, Receipt, ServerWeights

pytestmark = pytest.mark.usefixtures("ray_cluster")


class Recording(RayRemoteWeightUpdater):
    """Keeps what it pushed, so that a test can deliver it once more."""

    def _sync_weights_with_worker(self, worker_id: int, server_weights: ServerWeights) -> Any:
        self.sent = [*getattr(self, "sent", []), server_weights]
        return super()._sync_weights_with_worker(worker_id, server_weights)


def deliver(actor: Any, weights: ServerWeights) -> Receipt:
    """Deliver a push, as a network that was slow would."""
    assert isinstance(weights.push, Push)
    receipt = get(actor.__ray_call__.remote(receive, weights.push, weights.handle))
    assert isinstance(receipt, Receipt)
    return receipt


def test_a_push_that_lands_late_undoes_neither_a_newer_version_nor_a_rollback(tmp_path: Path) -> None:
    """RL-16 and RAY-05, neighbour: what is late is told by its order, not by its version."""
    (worker,) = borrow(1)
    with Registry.open(tmp_path) as registry, Recording(filled(1.0), [worker], registry=registry) as updater:
        for value in (1.0, 2.0, 3.0):
            learn(updater, value)
        updater.rollback(1)
        assert get(worker.value.remote()) == 1.0

        for late in updater.sent[:3]:
            receipt = deliver(worker, late)
            assert receipt.outcome == "stale"
            assert receipt.now is not None
            assert receipt.now.version == 4

        assert get(worker.value.remote()) == 1.0
        check_truth(updater)
        learn(updater, 5.0)
        assert get(worker.value.remote()) == 5.0
        check_truth(updater)


def test_a_push_that_is_delivered_twice_gets_the_same_receipt_and_changes_nothing(tmp_path: Path) -> None:
    (worker,) = borrow(1)
    with Registry.open(tmp_path) as registry, Recording(filled(1.0), [worker], registry=registry) as updater:
        learn(updater, 1.0)

        again = deliver(worker, updater.sent[0])

        assert again.outcome == "applied"
        assert again.now == again.before
        check_truth(updater)


def test_pushes_that_overlap_in_a_threaded_actor_end_with_the_highest_order(tmp_path: Path) -> None:
    """RAY-05: whichever thread comes first, weights and stamp are those of the newest push."""
    (worker,) = borrow(1, kind=Threaded)
    with Registry.open(tmp_path) as registry, Recording(filled(1.0), [worker], registry=registry) as updater:
        for value in range(1, 7):
            learn(updater, float(value))
        _, fresh = borrow(2, kind=Threaded)
        for _ in range(5):
            receipts = get(
                [
                    fresh.__ray_call__.remote(receive, weights.push, weights.handle)
                    for weights in reversed(updater.sent)
                ]
            )
            assert {receipt.outcome for receipt in receipts} <= {"applied", "stale"}
            assert get(fresh.value.remote()) == 6.0
            assert get(fresh.stamp.remote()) == 6


def test_a_slow_load_is_not_overtaken_inside_of_a_threaded_actor(tmp_path: Path) -> None:
    """RAY-05: a load of v1 that takes long, and one of v2 that would be quick, at the same time."""
    gate = tmp_path / "gate"

    def load(worker: Any, weights: Any, version: int) -> None:
        if version == 1:
            worker.wait_for(str(gate))
        worker.policy.load_state_dict(weights)

    (worker,) = borrow(1, kind=Threaded)
    with (
        Registry.open(tmp_path) as registry,
        Recording(filled(1.0), [worker], registry=registry, apply=load, timeout=0.5) as updater,
    ):
        assert statuses(learn(updater, 1.0)) == ["timeout"]
        slow = updater.sent[0]
        assert isinstance(slow.push, Push)
        quick = replace(slow, push=replace(slow.push, order=slow.push.order + 1, version=2))
        repeated = [worker.__ray_call__.remote(receive, one.push, one.handle) for one in (quick, slow)]
        gate.touch()
        first, second = get(repeated)
        assert first.outcome == "applied"
        assert second.outcome in ("applied", "stale")  # it may have had its turn before the quick one
        assert (get(worker.value.remote()), get(worker.stamp.remote())) == (1.0, 2)


def test_no_rollout_of_a_threaded_actor_sees_a_mix_or_a_change(tmp_path: Path) -> None:
    """RL-07: rollouts loop over forwards in several threads while pushes alternate between all-1 and all-2."""
    (worker,) = borrow(1, kind=Threaded)
    updater, _ = steer(tmp_path, [worker])
    with updater:
        learn(updater, 1.0)
        rounds = []
        for turn in range(12):
            gate = tmp_path / f"gate-{turn}"
            acts = [worker.act_until.remote(str(gate)) for _ in range(3)]
            wait_until(lambda: get(worker.__ray_call__.remote(_acting)) > 0, "a rollout to begin")
            future = learn_later(updater, float(turn % 2 + 1))
            gate.touch()
            assert future.result(60).ok
            rounds += get(acts)
        for version, seen, _ in rounds:
            assert version is not None
            assert seen == [updater.registry.load(version)["bias"][0].item()]
        check_truth(updater)


def learn_later(updater: RayRemoteWeightUpdater, value: float) -> Future[SyncReport]:
    """Train to a value, and update while something else goes on."""
    fill(updater.policy_weights, value)
    future = updater.update_weights(wait=False)
    assert isinstance(future, Future)
    return future


def _acting(worker: Any) -> int:
    return _state_of(worker)._acting


def test_rollouts_that_overlap_without_a_gap_do_not_keep_a_push_out(tmp_path: Path) -> None:
    (worker,) = borrow(1, kind=Overlapping)
    updater, _ = steer(tmp_path, [worker], timeout=30.0)
    with updater:
        learn(updater, 1.0)
        loops = [worker.act_in_threads.remote(str(tmp_path / "stop")) for _ in range(3)]
        assert statuses(learn(updater, 2.0)) == ["synced"]
        assert statuses(learn(updater, 3.0)) == ["synced"]
        (tmp_path / "stop").touch()
        for seen in get(loops):
            assert seen == sorted(seen)
            assert set(seen) <= {1, 2, 3}
        check_truth(updater)


@remote(num_cpus=0, max_concurrency=6)
class Overlapping(Rollouts):
    """A threaded actor whose rollouts nest."""

    def act_in_threads(self, path: str) -> list[int | None]:
        seen = []
        while not Path(path).exists():
            with acting(self) as version, acting(self) as again:
                time.sleep(0.05)
                assert version == again == held_version(self)
                seen.append(version)
        return seen


@remote(num_cpus=0, max_concurrency=20)
class Async(Rollouts):
    """An async actor whose rollouts await."""

    async def act(self, path: str) -> tuple[int | None, list[float], int | None]:
        with acting(self) as version:
            seen = {self.value()}
            while not Path(path).exists():
                await asyncio.sleep(0.005)
                seen.add(self.value())
            return version, sorted(seen), held_version(self)

    async def loop(self, path: str) -> list[int | None]:
        seen = []
        while not Path(path).exists():
            async with acting(self) as version:
                await asyncio.sleep(0.05)
                assert version == held_version(self)
                seen.append(version)
        return seen


def test_an_async_actor_is_pushed_to_between_its_rollouts(tmp_path: Path) -> None:
    (worker,) = borrow(1, kind=Async)
    updater, _ = steer(tmp_path, [worker], timeout=30.0)
    with updater:
        learn(updater, 1.0)
        acts = [worker.act.remote(str(tmp_path / "gate")) for _ in range(3)]
        wait_until(lambda: get(worker.__ray_call__.remote(_acting)) == 3, "the rollouts to begin")
        future = learn_later(updater, 2.0)
        (tmp_path / "gate").touch()
        assert statuses(future.result(60)) == ["synced"]
        assert get(acts) == [(1, [1.0], 1)] * 3

        loops = [worker.loop.remote(str(tmp_path / "stop")) for _ in range(3)]
        assert statuses(learn(updater, 3.0)) == ["synced"]
        (tmp_path / "stop").touch()
        for seen in get(loops):
            assert set(seen) <= {2, 3}
        check_truth(updater)


def test_a_worker_that_acts_all_the_time_keeps_its_weights_and_says_so(tmp_path: Path) -> None:
    (worker,) = borrow(1, kind=Threaded)
    updater, _ = steer(tmp_path, [worker], timeout=1.0)
    with updater:
        updater.timeout = 60.0
        learn(updater, 1.0)
        updater.timeout = 1.0
        act = worker.act_until.remote(str(tmp_path / "gate"))
        wait_until(lambda: get(worker.__ray_call__.remote(_acting)) == 1, "the rollout to begin")

        report = learn(updater, 2.0)

        assert statuses(report) == ["failed"]
        assert "still acting" in report.workers[0].error
        assert report.workers[0].held == 1
        check_truth(updater)
        (tmp_path / "gate").touch()
        assert get(act) == (1, [1.0], 1)
        updater.timeout = 60.0
        assert statuses(updater.update_weights()) == ["synced"]
        check_truth(updater)


def test_a_slow_worker_gets_the_newest_version_only_and_nothing_piles_up_for_it(tmp_path: Path) -> None:
    """At most one push is in flight; the newest target takes the place of those that waited."""
    width = 250_000  # 2 MB a version
    workers = borrow(2, width=width)
    updater, _ = steer(tmp_path, workers)
    updater.policy_weights = filled(1.0, width)
    with updater:
        learn(updater, 1.0)
        workers[0].wait_for.remote(str(tmp_path / "gate"))
        updater.timeout = 0.4
        for value in range(2, 12):
            assert statuses(learn(updater, float(value)))[0] == "timeout"
        status = status_of(updater.registry, "w0")
        assert (status.state, status.held, status.pending, status.last_held) == ("unknown", None, 2, 1)
        # The head's bytes, and those of the one push that is in flight.
        check_store_comes_to(2 * 2_500_000, 2 * 2_000_000)
        (tmp_path / "gate").touch()
        updater.timeout = 60.0
        assert statuses(updater.update_weights())[0] == "synced"
        assert get(workers[0].value.remote()) == 11.0
        assert ends(updater.registry, "w0") == [(1, "replaced"), (2, "replaced"), (11, None)]
        assert kinds(updater.registry, "w0") == ["sync_failed"]  # told once, not at each update
        check_truth(updater)

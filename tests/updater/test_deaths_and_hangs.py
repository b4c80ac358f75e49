"""Workers that die, hang, cannot start or lose their bytes: each has its outcome, and the others are not held up."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.exceptions import (
    NodeDiedError,
    ObjectLostError,
    OutOfMemoryError,
    PendingCallsLimitExceeded,
    RayTaskError,
    RpcError,
    WorkerCrashedError,
)
from torch import nn

from tests.updater.actors import (
    Mortal,
    Rollouts,
    borrow,
    check_truth,
    compare,
    crash,
    ends,
    filled,
    get,
    kill,
    kinds,
    learn,
    remote,
    status_of,
    statuses,
    steer,
    wait_until,
)
from weightledger.registry import Registry
from weightledger.registry.errors import SyncError
from weightledger.registry.weights.payload import Payload
from weightledger.updater import RayRemoteWeightUpdater
from weightledger.updater.transports.ray_actors import RayTransport

pytestmark = pytest.mark.usefixtures("ray_cluster")


def test_a_dead_worker_is_named_and_hides_nothing_of_the_others(tmp_path: Path) -> None:
    """RAY-06: the middle one of three is killed; neighbour: the next updates and a probe go on without it."""
    first, last = borrow(2)
    middle = Mortal.remote()
    updater, _ = steer(tmp_path, [first, middle, last])
    with updater:
        learn(updater, 1.0)
        kill(middle)

        report = learn(updater, 2.0)

        assert statuses(report) == ["synced", "dead", "synced"]
        assert report.workers[1].held is None
        with pytest.raises(SyncError, match=r"w1 \(1\): dead"):
            report.raise_for_failures()
        assert get([first.value.remote(), last.value.remote()]) == [2.0, 2.0]
        status = status_of(updater.registry, "w1")
        assert (status.state, status.held, status.last_held) == ("gone", None, 1)
        assert ends(updater.registry, "w1")[0] == (1, "lost")
        assert statuses(learn(updater, 3.0)) == ["synced", "dead", "synced"]
        assert updater.probe()[1].error
        assert kinds(updater.registry, "w1") == ["worker_lost"]  # once, however often it is found dead
        check_truth(updater, [0, 2])


@pytest.mark.parametrize(
    ("error", "kinds_of_trouble"),
    [
        (OutOfMemoryError("killed"), {"restarting", "dead"}),
        (NodeDiedError("gone"), {"restarting", "dead"}),
        (WorkerCrashedError(), {"restarting", "dead"}),
        (RpcError("broken pipe"), {"doubtful"}),
        (PendingCallsLimitExceeded("full"), {"failed"}),
        (TypeError("cannot pickle"), {"failed"}),
        (RayTaskError("receive", "no module of that name", ImportError("weightledger")), {"rejected"}),
        (ObjectLostError("0" * 56, None, ""), {"bytes_lost"}),
    ],
)
def test_what_ray_raises_says_no_more_than_is_known(
    error: Exception, kinds_of_trouble: set[str], tmp_path: Path
) -> None:
    """Killed for want of memory: such a worker holds nothing any more, whatever kind of error says so."""
    updater, _ = steer(tmp_path, borrow(1))
    with updater:
        learn(updater, 1.0)
        worker = updater.workers.get(0)
        incarnation = None if worker.known is None else worker.known.incarnation
        assert updater.transport.explain(worker.handle, error, incarnation).kind in kinds_of_trouble


def test_a_worker_that_dies_while_nothing_is_sent_is_noticed_by_the_next_update(tmp_path: Path) -> None:
    first = borrow(1)[0]
    second = Mortal.remote()
    updater, _ = steer(tmp_path, [first, second])
    with updater:
        learn(updater, 1.0)
        get(second.pid.remote())
        crash(second)

        report = updater.update_weights()

        assert not report.published
        assert statuses(report) == ["current", "dead"]
        assert ends(updater.registry, "w1") == [(1, "lost")]
        check_truth(updater, [0])


def test_one_call_lasts_about_its_timeout_however_many_workers_are_silent(tmp_path: Path) -> None:
    """RAY-03: busy actors, and one that asks for more than there is, take one timeout together."""
    workers = borrow(4)
    huge = remote(num_cpus=64)(Rollouts).remote()
    updater, _ = steer(tmp_path, [*workers, huge], timeout=60.0)
    with updater:
        assert statuses(learn(updater, 1.0, worker_ids=[0, 1, 2, 3])) == ["synced"] * 4
        for worker in workers[:3]:
            worker.wait_for.remote(str(tmp_path / "gate"))
        updater.timeout = 1.5

        began = time.monotonic()
        report = learn(updater, 2.0)
        took = time.monotonic() - began

        assert statuses(report) == ["timeout", "timeout", "timeout", "synced", "timeout"]
        # Four silent workers, one after another, would have taken four times as long.
        assert took < 3 * updater.timeout
        for name, last in (("w0", 1), ("w4", None)):
            status = status_of(updater.registry, name)
            assert (status.state, status.held, status.pending, status.last_held) == ("unknown", None, 2, last)
            assert "v2" in status.detail
        check_truth(updater, [3])
        (tmp_path / "gate").touch()
        updater.timeout = 60.0
        assert statuses(updater.sync([0, 1, 2, 3])) == ["synced", "synced", "synced", "current"]
        assert ends(updater.registry, "w0") == [(1, "replaced"), (2, None)]
        check_truth(updater, [0, 1, 2, 3])
    ray.kill(huge)


def test_a_probe_settles_what_a_timeout_left_open(tmp_path: Path) -> None:
    (worker,) = borrow(1)
    updater, _ = steer(tmp_path, [worker])
    with updater:
        learn(updater, 1.0)
        worker.wait_for.remote(str(tmp_path / "gate"))
        updater.timeout = 0.5
        assert statuses(learn(updater, 2.0)) == ["timeout"]
        assert updater.probe()[0].version is None
        status = status_of(updater.registry, "w0")
        assert (status.state, status.pending) == ("unknown", 2)
        (tmp_path / "gate").touch()
        updater.timeout = 60.0

        found = updater.probe()

        assert (found[0].version, found[0].matches) == (2, True)
        status = status_of(updater.registry, "w0")
        assert (status.state, status.held, status.pending) == ("confirmed", 2, None)
        assert statuses(updater.update_weights()) == ["current"]
        check_truth(updater)


def test_a_worker_that_dies_with_an_unanswered_push_ends_both_its_rows(tmp_path: Path) -> None:
    worker = Mortal.remote()
    updater, _ = steer(tmp_path, [worker])
    with updater:
        learn(updater, 1.0)
        worker.sleep.remote(600)
        updater.timeout = 0.5
        assert statuses(learn(updater, 2.0)) == ["timeout"]
        kill(worker)
        updater.timeout = 60.0

        assert statuses(updater.update_weights()) == ["dead"]

        assert ends(updater.registry, "w0") == [(1, "lost"), (2, "unconfirmed")]
        status = status_of(updater.registry, "w0")
        assert (status.state, status.held, status.pending) == ("gone", None, None)
        check_truth(updater, [])


def test_an_actor_that_never_started_is_dead_and_was_never_anything_else(tmp_path: Path) -> None:
    broken = remote(num_cpus=0)(Unborn).remote()
    updater, _ = steer(tmp_path, [broken, *borrow(1)])
    with updater:
        report = learn(updater, 1.0)
        assert statuses(report) == ["dead", "synced"]
        assert "RuntimeError: no luck" in report.workers[0].error
        assert status_of(updater.registry, "w0").state == "gone"
        check_truth(updater, [1])


class Unborn(Rollouts):
    def __init__(self) -> None:
        raise RuntimeError("no luck")


class Fragile(Rollouts):
    """Its `apply` fails in every way there is."""

    mood = "fine"

    def set_mood(self, mood: str) -> None:
        self.mood = mood

    def load(self, weights: Any) -> Any:
        if self.mood == "half":
            self.policy.weight.data.copy_(weights["weight"])
            raise RuntimeError("half-way")
        if self.mood == "false":
            return False
        if self.mood == "not ok":
            return {"ok": False, "reason": "no memory"}
        if self.mood == "swallow":
            return None
        if self.mood == "exit":
            raise SystemExit("out")
        self.policy.load_state_dict(weights)
        return None


Moody = remote(num_cpus=0)(Fragile)


def load(worker: Any, weights: Any, version: int) -> Any:
    return worker.load(weights)


@pytest.mark.parametrize("mood", ["half", "false", "not ok"])
def test_an_apply_that_fails_is_a_failure_and_the_next_update_mends_it(tmp_path: Path, mood: str) -> None:
    """RAY-07 and RL-18: what the worker's own code did not do is not on record, and nothing has to be reset by hand."""
    (worker,) = borrow(1, kind=Moody)
    updater, _ = steer(tmp_path, [worker], apply=load)
    with updater:
        learn(updater, 1.0)
        get(worker.set_mood.remote(mood))

        report = learn(updater, 2.0)

        assert statuses(report) == ["failed"]
        assert report.workers[0].held is None
        status = status_of(updater.registry, "w0")
        assert (status.state, status.held, status.last_held) == ("unknown", None, 1)
        assert ends(updater.registry, "w0") == [(1, "unknown"), (2, "unconfirmed")]
        assert kinds(updater.registry, "w0") == ["sync_failed"]
        assert get(worker.stamp.remote()) is None
        get(worker.set_mood.remote("fine"))
        assert statuses(updater.update_weights()) == ["synced"]
        check_truth(updater)


def test_an_apply_that_swallows_its_failure_is_seen_by_a_probe_only(tmp_path: Path) -> None:
    """RAY-07, neighbour: to return is to confirm, but the digest of what is there tells another story."""
    (worker,) = borrow(1, kind=Moody)
    updater, _ = steer(tmp_path, [worker], apply=load)
    with updater:
        learn(updater, 1.0)
        assert updater.probe()[0].matches
        get(worker.set_mood.remote("swallow"))

        assert statuses(learn(updater, 2.0)) == ["synced"]

        held = updater.probe()[0]
        assert (held.version, held.matches, held.digest) == (2, False, updater.registry.get(1).digest)
        get(worker.set_mood.remote("fine"))
        assert statuses(updater.update_weights(force=True)) == ["synced"]
        assert updater.probe()[0].matches
        check_truth(updater)


def test_an_apply_that_ends_the_process_is_a_death(tmp_path: Path) -> None:
    worker = Moody.remote()
    updater, _ = steer(tmp_path, [worker, *borrow(1)], apply=None)
    with updater:
        learn(updater, 1.0)
        get(worker.set_mood.remote("exit"))
        updater.apply = load_if_it_can

        report = learn(updater, 2.0)

        assert statuses(report) == ["dead", "synced"]
        assert ends(updater.registry, "w0") == [(1, "lost"), (2, "unconfirmed")]
        check_truth(updater, [1])


def load_if_it_can(worker: Any, weights: Any, version: int) -> Any:
    return (
        worker.load(weights) if hasattr(worker, "load") else worker.policy.load_state_dict(weights) and None
    )


def test_weights_that_do_not_fit_leave_the_worker_whole(tmp_path: Path) -> None:
    """RL-10: the worker holds v3; v4 has another shape. Neighbour: the retry is no skip."""
    workers = borrow(2)
    updater, _ = steer(tmp_path, workers, max_interval=3)
    with updater:
        learn(updater, 1.0)
        get(workers[1].__ray_call__.remote(widen))
        report = learn(updater, 2.0, force=True)
        assert statuses(report) == ["synced", "failed"]
        assert "weight" in report.workers[1].error
        # Whatever the worker acts with after its own code has replaced the policy, it is not v1.
        assert ends(updater.registry, "w1") == [(1, "drifted")]
        (failed,) = updater.registry.events(kind="sync_failed")
        assert (failed.worker, failed.version) == ("w1", 2)
        assert "weight" in failed.reason
        get(workers[1].__ray_call__.remote(narrow))
        # What failed is tried again, the interval does not pass it by.
        assert statuses(updater.update_weights()) == ["current", "synced"]
        check_truth(updater)


def widen(worker: Any) -> None:
    worker.kept, worker.policy = worker.policy, nn.Linear(5, 2)


def narrow(worker: Any) -> None:
    worker.policy = worker.kept


@remote(num_cpus=0)
class Owner:
    """Puts things into the object store, which are lost when it dies."""

    def put(self, array: Any) -> list[Any]:
        return [ray.put(array)]


class Putting(RayTransport):
    """Lets an actor put every version into the object store, small ones too."""

    owner: Any = None

    def put(self, payload: Payload) -> Any:
        if self.owner is None:
            return super().put(payload)
        return get(self.owner.put.remote(payload.buffer))[0]


class Put(RayRemoteWeightUpdater):
    def _make_transport(self, timeout: float, count_bytes: Any) -> Putting:
        self.putting = Putting(timeout=timeout, count_bytes=count_bytes)
        return self.putting


def is_lost(ref: Any) -> bool:
    try:
        ray.get(ref, timeout=60)
    except ObjectLostError:
        return True
    return False


def test_bytes_whose_owner_died_are_read_from_the_file_again(tmp_path: Path) -> None:
    """RAY-02: the process that put the weights is killed, then a worker is synced to them."""
    workers = borrow(2)
    owner = Owner.remote()
    with Registry.open(tmp_path) as registry, Put(filled(1.0), workers, registry=registry) as updater:
        updater.putting.owner = owner
        learn(updater, 1.0, worker_ids=[0])
        lost = updater.source.find(registry.head().digest)
        assert lost is not None
        kill(owner)
        updater.putting.owner = None
        wait_until(lambda: is_lost(lost.handle), "the bytes to be lost")

        report = updater.sync()

        assert statuses(report) == ["current", "synced"]
        assert get(workers[1].value.remote()) == 1.0
        found = updater.source.find(registry.head().digest)
        assert found is not None
        assert found.handle is not lost.handle  # the dead reference is not kept
        learn(updater, 2.0)
        assert statuses(updater.rollback(1)) == ["synced", "synced"]
        check_truth(updater)


def test_drift_is_found_reported_and_mended(tmp_path: Path) -> None:
    """RAY-18, neighbour: the weights that a worker acts with are hashed, whatever its stamp says."""
    workers = borrow(2)
    updater, _ = steer(tmp_path, workers)
    with updater:
        learn(updater, 1.0)
        get(workers[0].change.remote(7.0))

        found = updater.probe()

        assert not found[0].matches
        assert set(found[0].drift) == {"weight", "bias"}
        assert found[1].matches
        assert ends(updater.registry, "w0") == [(1, "drifted")]
        (drift,) = updater.registry.events(kind="drift")
        assert (drift.worker, drift.version, set(drift.details["tensors"])) == ("w0", 1, {"weight", "bias"})
        check_truth(updater)
        assert statuses(updater.update_weights()) == ["synced", "current"]
        assert get(workers[0].value.remote()) == 1.0
        check_truth(updater)


def test_an_interrupt_while_pushes_leave_is_no_push_without_an_end(tmp_path: Path) -> None:
    """Ctrl-C at the worst moment: the next update neither waits for ever nor believes anything."""
    workers = borrow(2)

    class Interrupted(RayRemoteWeightUpdater):
        armed = False

        def _sync_weights_with_worker(self, worker_id: int, server_weights: Any) -> Any:
            if self.armed and worker_id == 1:
                raise KeyboardInterrupt
            return super()._sync_weights_with_worker(worker_id, server_weights)

    with Registry.open(tmp_path) as registry, Interrupted(filled(1.0), workers, registry=registry) as updater:
        learn(updater, 1.0)
        updater.armed = True
        with pytest.raises(KeyboardInterrupt):
            learn(updater, 2.0)
        updater.armed = False
        compare(registry, dict(zip(("collector-0", "collector-1"), workers, strict=True)))

        report = learn(updater, 3.0)

        assert statuses(report) == ["synced", "synced"]
        assert get([worker.value.remote() for worker in workers]) == [3.0, 3.0]
        check_truth(updater)

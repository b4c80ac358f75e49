"""Workers that come and go while training goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ray

from tests.updater.actors import (
    Mortal,
    Rollouts,
    borrow,
    check_truth,
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
)
from weightledger.registry import Registry
from weightledger.registry.errors import ConflictError, InUseError, NotFoundError
from weightledger.updater import RayRemoteWeightUpdater

pytestmark = pytest.mark.usefixtures("ray_cluster")


def test_a_late_joiner_has_its_target_before_it_is_handed_over(tmp_path: Path) -> None:
    """RL-13: the head, or the pin that is set for its group already."""
    workers = borrow(3)
    updater, _ = steer(tmp_path, workers[:1])
    with updater:
        learn(updater, 1.0)
        learn(updater, 2.0)
        with pytest.warns(UserWarning, match="by that glob so far"):
            updater.registry.pin("eval-*", 1)

        plain = updater.add_worker(workers[1], "late")
        assert updater.last_report is not None
        assert updater.last_report.workers[plain].status == "synced"
        pinned = updater.add_worker(workers[2], "eval-0")

        assert get([worker.value.remote() for worker in workers]) == [2.0, 2.0, 1.0]
        assert (updater.all_worker_ids(), plain, pinned) == ([0, 1, 2], 1, 2)
        assert status_of(updater.registry, "eval-0").target == 1
        check_truth(updater)


def test_a_joiner_before_the_first_version_is_not_ready_and_says_so(tmp_path: Path) -> None:
    """RL-13 and RL-22: nothing to send is no failure."""
    workers = borrow(2)
    updater, _ = steer(tmp_path, [])
    with updater:
        updater.add_worker(workers[0], "early")
        status = status_of(updater.registry, "early")
        assert (status.state, status.held, status.target) == ("unknown", None, None)
        report = updater.sync()
        assert (report.version, report.ok) == (None, True)
        assert get(workers[0].value.remote()) == -1.0
        assert get(workers[0].stamp.remote()) is None
        assert statuses(learn(updater, 1.0)) == ["synced"]
        check_truth(updater)


def test_ids_stay_what_they_are_while_workers_come_and_go(tmp_path: Path) -> None:
    """RAY-17: exactly the worker that is named is updated, and an unknown id is an error before anything happens."""
    workers = borrow(4)
    updater, _ = steer(tmp_path, workers[:3])
    with updater:
        learn(updater, 1.0)
        updater.remove_worker(1)
        assert updater.add_worker(workers[3], "w3") == 3
        assert updater.all_worker_ids() == [0, 2, 3]
        assert updater.remote_collectors == [workers[0], workers[2], workers[3]]

        report = learn(updater, 2.0, worker_ids=3)

        assert list(report.workers) == [3]
        assert get([worker.value.remote() for worker in workers]) == [1.0, 1.0, 1.0, 2.0]
        with pytest.raises(NotFoundError, match=r"no worker 1.*\[0, 2, 3\]"):
            learn(updater, 3.0, worker_ids=[0, 1])
        with pytest.raises(NotFoundError, match="no worker 4"):
            updater.sync([4])
        assert updater.registry.head().number == 2
        assert ends(updater.registry, "w1") == [(1, "removed")]
        assert status_of(updater.registry, "w1").state == "gone"
        check_truth(updater)


def test_the_worker_that_was_added_last_can_be_updated_alone(tmp_path: Path) -> None:
    """RAY-17, neighbour: no index is off by one at the end either."""
    workers = borrow(3)
    updater, _ = steer(tmp_path, workers)
    with updater:
        for index in (2, 0):
            learn(updater, float(index), worker_ids=[index])
        assert get([worker.value.remote() for worker in workers]) == [0.0, -1.0, 2.0]
        check_truth(updater)


def test_a_replacement_takes_over_the_name_of_a_dead_worker(tmp_path: Path) -> None:
    dead, spare = Mortal.remote(), borrow(1)[0]
    updater, _ = steer(tmp_path, [dead])
    with updater:
        learn(updater, 1.0)
        kill(dead)
        assert statuses(updater.update_weights()) == ["dead"]
        updater.remove_worker(0)

        assert updater.add_worker(spare, "w0") == 1

        assert ends(updater.registry, "w0") == [(1, "lost"), (1, None)]
        assert kinds(updater.registry, "w0") == ["worker_lost", "worker_removed"]
        check_truth(updater)


def test_a_worker_that_was_removed_and_added_again_is_synced_anew(tmp_path: Path) -> None:
    """Somebody else may have used it in between: what it held is not believed."""
    workers = borrow(1)
    updater, _ = steer(tmp_path, workers)
    with updater:
        learn(updater, 1.0)
        updater.remove_worker(0)
        get(workers[0].change.remote(9.0))

        updater.add_worker(workers[0], "w0")

        assert get(workers[0].value.remote()) == 1.0
        check_truth(updater)


def test_a_worker_that_is_removed_with_a_push_on_its_way_can_be_added_again(tmp_path: Path) -> None:
    (worker,) = borrow(1)
    updater, _ = steer(tmp_path, [worker])
    with updater:
        learn(updater, 1.0)
        worker.wait_for.remote(str(tmp_path / "gate"))
        updater.timeout = 0.3
        assert statuses(learn(updater, 2.0)) == ["timeout"]
        updater.remove_worker(0)
        assert ends(updater.registry, "w0") == [(1, "removed"), (2, "unconfirmed")]
        updater.timeout = 60.0
        (tmp_path / "gate").touch()

        updater.add_worker(worker, "w0")

        assert get(worker.value.remote()) == 2.0
        check_truth(updater)


def test_names_last_across_updaters_and_default_to_the_actors_own(tmp_path: Path) -> None:
    named = remote(num_cpus=0)(Rollouts).options(name="elastic-1").remote()
    (plain,) = borrow(1)
    with Registry.open(tmp_path) as registry:
        with RayRemoteWeightUpdater(filled(1.0), [named, plain], registry=registry) as updater:
            learn(updater, 1.0)
            assert [status.name for status in registry.workers()] == ["collector-1", "elastic-1"]
        assert {status.state for status in registry.workers()} == {"unknown"}
        assert {holding.state for holding in registry.holdings()} == {"unknown"}
        with RayRemoteWeightUpdater(filled(1.0), [named], registry=registry) as updater:
            learn(updater, 2.0)
            assert ends(registry, "elastic-1") == [(1, "replaced"), (2, None)]
            check_truth(updater)
    ray.kill(named)


def test_two_live_updaters_do_not_share_a_name(tmp_path: Path) -> None:
    workers = borrow(2)
    updater, _ = steer(tmp_path, workers[:1])
    with updater:
        learn(updater, 1.0)
        with pytest.raises(InUseError, match="w0"):
            steer(tmp_path, workers[1:], names=["w0"])
        with pytest.raises(InUseError, match="twins"):
            steer(tmp_path, workers, names=["twins", "twins"])
        # Nothing of the refused ones is left: neither a claim nor a name.
        second, _ = steer(tmp_path, workers[1:], names=["w1"])
        second.close()
        check_truth(updater)
    again, _ = steer(tmp_path, workers[1:], names=["w0"])
    again.close()


def test_a_joiner_that_meets_a_foreign_head_is_not_half_added(tmp_path: Path) -> None:
    workers = borrow(2)
    updater, _ = steer(tmp_path, workers[:1])
    with updater:
        learn(updater, 1.0)
        publish_elsewhere(tmp_path, 5.0)
        with pytest.raises(ConflictError, match="published v2"):
            updater.add_worker(workers[1], "w1")
        assert updater.all_worker_ids() == [0]
        updater.adopt()
        updater.add_worker(workers[1], "w1")
        assert get(workers[1].value.remote()) == 5.0
        check_truth(updater)


def publish_elsewhere(folder: Path, value: float) -> None:
    """Publish from another process, as another run."""
    get(_publish.remote(str(folder), value))


@remote(num_cpus=0)
def _publish(folder: str, value: float) -> Any:
    with Registry.open(folder) as registry:
        return registry.publish(filled(value)).number


def test_a_rollback_reaches_everybody_who_is_not_pinned(tmp_path: Path) -> None:
    workers = borrow(3)
    updater, learner = steer(tmp_path, workers, max_interval=4)
    with updater:
        learn(updater, 1.0)
        learn(updater, 2.0, force=True)
        updater.pin(2, 2)

        report = updater.rollback(1, "worse")

        assert statuses(report) == ["synced", "synced", "current"]
        assert get([worker.value.remote() for worker in workers]) == [1.0, 1.0, 2.0]
        assert float(learner.bias[0].detach()) == 1.0
        check_truth(updater)


def test_a_new_actor_takes_the_name_of_a_dead_one_whose_holding_ends_as_lost(tmp_path: Path) -> None:
    (living, late), mortal = borrow(2), Mortal.remote()
    updater, _ = steer(tmp_path, [living, mortal])
    with updater:
        learn(updater, 1.0)
        with pytest.raises(InUseError, match="two workers are called 'w1'"):
            updater.add_worker(late, "w1")
        kill(mortal)  # no update has noticed it
        assert updater.add_worker(late, "w1") == 2
        assert updater.all_worker_ids() == [0, 2]
        assert get(late.value.remote()) == 1.0
        assert ends(updater.registry, "w1") == [(1, "lost"), (1, None)]
        assert kinds(updater.registry, "w1") == ["worker_lost"]
        assert status_of(updater.registry, "w1").held == 1
        assert statuses(learn(updater, 2.0)) == ["synced", "synced"]
        assert get(late.value.remote()) == 2.0
        check_truth(updater)


def test_the_name_is_free_as_well_when_an_update_has_told_of_the_death_before(tmp_path: Path) -> None:
    (late,), mortal = borrow(1), Mortal.remote()
    updater, _ = steer(tmp_path, [mortal])
    with updater:
        learn(updater, 1.0)
        kill(mortal)
        assert statuses(learn(updater, 2.0)) == ["dead"]
        updater.add_worker(late, "w0")
        assert get(late.value.remote()) == 2.0
        assert kinds(updater.registry, "w0") == ["worker_lost"]  # once
        assert statuses(learn(updater, 3.0)) == ["synced"]
        check_truth(updater)

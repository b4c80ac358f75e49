"""An actor that comes back is a new life that holds nothing known, whatever the record said of the old one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.updater.actors import (
    borrow,
    check_truth,
    crash,
    ends,
    get,
    kinds,
    learn,
    restarted,
    status_of,
    statuses,
    steer,
)

pytestmark = pytest.mark.usefixtures("ray_cluster")


def test_a_restarted_actor_is_synced_again_although_the_version_did_not_change(tmp_path: Path) -> None:
    workers = borrow(2)
    updater, _ = steer(tmp_path, workers)
    with updater:
        assert statuses(learn(updater, 1.0)) == ["synced", "synced"]
        before = status_of(updater.registry, "w1")
        crash(workers[1])

        report = updater.update_weights()

        assert not report.published
        assert statuses(report) == ["current", "synced"]
        assert get(workers[1].value.remote()) == 1.0
        after = status_of(updater.registry, "w1")
        assert (after.state, after.held) == ("confirmed", 1)
        assert after.incarnation != before.incarnation
        assert ends(updater.registry, "w1") == [(1, "lost"), (1, None)]
        lost, now = updater.registry.history(worker="w1")
        assert lost.ended_at == before.evidence_at  # nothing is known of it after its last receipt
        assert (lost.incarnation, now.incarnation) == (before.incarnation, after.incarnation)
        assert kinds(updater.registry, "w1") == ["worker_lost"]
        check_truth(updater)


def test_a_restarted_actor_is_not_passed_by_by_the_interval(tmp_path: Path) -> None:
    workers = borrow(2)
    updater, _ = steer(tmp_path, workers, max_interval=5)
    with updater:
        learn(updater, 1.0)
        assert statuses(learn(updater, 2.0)) == ["skipped", "skipped"]
        crash(workers[0])
        restarted(workers[0])

        assert statuses(learn(updater, 3.0)) == ["synced", "skipped"]

        assert get([worker.value.remote() for worker in workers]) == [3.0, 1.0]
        check_truth(updater)


def test_an_actor_that_restarts_between_two_versions_gets_the_newer_one(tmp_path: Path) -> None:
    workers = borrow(1)
    updater, _ = steer(tmp_path, workers)
    with updater:
        learn(updater, 1.0)
        crash(workers[0])
        restarted(workers[0])

        assert statuses(learn(updater, 2.0)) == ["synced"]

        assert ends(updater.registry, "w0") == [(1, "lost"), (2, None)]
        check_truth(updater)


def test_an_actor_whose_call_kills_it_while_a_push_waits_is_pushed_to_in_its_next_life(
    tmp_path: Path,
) -> None:
    workers = borrow(2)
    updater, _ = steer(tmp_path, workers)
    with updater:
        learn(updater, 1.0)
        workers[0].sleep.remote(0.5)
        workers[0].die.remote()  # runs before the push, which is in the queue by then

        report = learn(updater, 2.0)

        assert statuses(report) == ["synced", "synced"]
        assert get([worker.value.remote() for worker in workers]) == [2.0, 2.0]
        assert ends(updater.registry, "w1") == [(1, "replaced"), (2, None)]
        # The push that died with the old life is on record: the worker may have run it.
        assert ends(updater.registry, "w0") == [(1, "lost"), (2, "unconfirmed"), (2, None)]
        check_truth(updater)


def test_a_probe_finds_that_an_actor_came_back(tmp_path: Path) -> None:
    workers = borrow(2)
    updater, _ = steer(tmp_path, workers)
    with updater:
        learn(updater, 1.0)
        crash(workers[0])
        restarted(workers[0])

        found = updater.probe()

        assert (found[0].version, found[0].matches) == (None, False)
        assert (found[1].version, found[1].matches) == (1, True)
        status = status_of(updater.registry, "w0")
        assert (status.state, status.held, status.last_held) == ("unknown", None, 1)
        check_truth(updater)
        assert statuses(updater.sync()) == ["synced", "current"]
        check_truth(updater)


def test_an_actor_that_restarts_with_a_pin_comes_back_to_its_pin(tmp_path: Path) -> None:
    workers = borrow(2)
    updater, _ = steer(tmp_path, workers)
    with updater:
        learn(updater, 1.0)
        learn(updater, 2.0)
        updater.pin(0, 1)
        crash(workers[0])

        assert statuses(updater.update_weights()) == ["synced", "current"]

        assert get([worker.value.remote() for worker in workers]) == [1.0, 2.0]
        check_truth(updater)


def test_two_restarts_in_a_row_are_two_lives(tmp_path: Path) -> None:
    (worker,) = borrow(1)
    updater, _ = steer(tmp_path, [worker])
    with updater:
        for value in (1.0, 2.0):
            learn(updater, value)
            crash(worker)
        assert statuses(updater.update_weights()) == ["synced"]
        confirmed = [one for one in updater.registry.history(worker="w0") if one.confirmed_at is not None]
        assert [(one.version, one.ended_how) for one in confirmed] == [(1, "lost"), (2, "lost"), (2, None)]
        assert len({one.incarnation for one in confirmed}) == 3
        check_truth(updater)

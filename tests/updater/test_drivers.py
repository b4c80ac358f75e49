"""Drivers that are killed at every step, and those that take over the actors they leave behind."""

from __future__ import annotations

import multiprocessing
import pickle
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from tests.updater import driving
from tests.updater.actors import (
    Rollouts,
    compare,
    ends,
    filled,
    get,
    learn,
    remote,
    status_of,
    statuses,
    wait_until,
)
from weightledger.registry import Registry
from weightledger.registry.errors import InUseError
from weightledger.updater import RayRemoteWeightUpdater
from weightledger.updater.in_worker.receiver import receive

pytestmark = pytest.mark.usefixtures("ray_cluster")

NAMES = ("driven-0", "driven-1")
# A fork server would be quicker, but one that was started before the cluster does not know the cluster's token.
_context = multiprocessing.get_context("spawn")


def detached() -> list[Any]:
    """Return two named actors that outlive the driver that made them, holding -1."""
    actors = [
        remote(num_cpus=0)(Rollouts)
        .options(name=name, lifetime="detached", get_if_exists=True, max_concurrency=1)
        .remote()
        for name in NAMES
    ]
    get([actor.reset.remote() for actor in actors])
    return actors


@contextmanager
def driver(folder: Path, moment: str) -> Iterator[tuple[BaseProcess, Connection]]:
    """Run a driver until it dies, or until the block ends."""
    ours, theirs = _context.Pipe()
    address = ray.get_runtime_context().gcs_address
    child = _context.Process(target=driving.main, args=(address, str(folder), NAMES, moment, theirs))
    child.start()
    try:
        yield child, ours
    finally:
        child.kill()
        child.join(60)


def run_to_death(folder: Path, moment: str) -> None:
    with driver(folder, moment) as (child, _):
        child.join(60)
        assert child.exitcode == -signal.SIGKILL


# What each worker may hold by the record of the dead run alone: (pending, last confirmed, how its rows ended).
LEFT: dict[str, tuple[int | None, int]] = {
    "before the intentions": (None, 1),
    "after the intentions": (2, 1),
    "between two pushes": (2, 1),
    "after the pushes": (2, 1),
    "while the file is written": (2, 1),
    "before the receipts are taken": (2, 1),
    "before the receipts are recorded": (2, 1),
    "after the receipts": (None, 2),
}


@pytest.mark.parametrize("moment", [moment for moment in driving.MOMENTS if moment != "stay"])
def test_a_driver_that_is_killed_leaves_no_false_version_and_is_taken_over(
    tmp_path: Path, moment: str
) -> None:
    actors = detached()
    run_to_death(tmp_path, moment)
    pending, last = LEFT[moment]

    with Registry.open(tmp_path) as registry:
        for name in NAMES:
            status = status_of(registry, name)
            assert (status.state, status.held) == ("unknown", None)
            assert (status.pending, status.last_held) == (pending, last)
            assert "is gone" in status.detail
        assert {holding.state for holding in registry.holdings()} == {"unknown"}
        assert registry.head().number == last

        holds = get([actor.value.remote() for actor in actors])
        with RayRemoteWeightUpdater(filled(3.0), actors, registry=registry, start="continue") as updater:
            found = updater.probe()
            assert [found[key].matches for key in (0, 1)] == [True, True]
            # What they say that they hold is what they do hold, be it v1 or the v2 that nobody recorded.
            assert [float(found[key].version or 0) for key in (0, 1)] == holds
            compare(registry, dict(zip(NAMES, actors, strict=True)))

            assert statuses(updater.update_weights()) == ["synced", "synced"]
            assert get([actor.value.remote() for actor in actors]) == [3.0, 3.0]
            for name, value in zip(NAMES, holds, strict=True):
                versions = dict(ends(registry, name))
                assert versions[int(value)] == "replaced"
                assert not [one for one in registry.history(worker=name)[:-1] if one.ended_at is None]
            compare(registry, dict(zip(NAMES, actors, strict=True)))


def test_a_new_driver_that_does_not_ask_finds_by_receipt_what_the_dead_one_pushed(tmp_path: Path) -> None:
    actors = detached()
    run_to_death(tmp_path, "before the receipts are recorded")
    wait_until(lambda: get([actor.value.remote() for actor in actors]) == [2.0, 2.0], "the pushes to land")
    with (
        Registry.open(tmp_path) as registry,
        RayRemoteWeightUpdater(filled(3.0), actors, registry=registry, start="continue") as updater,
    ):
        assert statuses(learn(updater, 3.0)) == ["synced", "synced"]
        for name in NAMES:
            found = [(one.version, one.ended_how) for one in registry.history(worker=name)]
            assert found == [(1, "replaced"), (2, "replaced"), (registry.head().number, None)]
        compare(registry, dict(zip(NAMES, actors, strict=True)))


def test_a_new_driver_serves_the_head_from_its_file_although_nothing_is_published(tmp_path: Path) -> None:
    """RL-21 and RAY-02: the bytes that the dead driver had put are gone with it; nothing waits for a new version."""
    actors = detached()
    run_to_death(tmp_path, "after the receipts")
    get([actor.change.remote(9.0) for actor in actors])
    with (
        Registry.open(tmp_path) as registry,
        RayRemoteWeightUpdater(filled(2.0), actors, registry=registry, start="continue") as updater,
    ):
        report = updater.sync()
        assert (report.version, report.published) == (2, False)
        assert statuses(report) == ["synced", "synced"]
        assert get([actor.value.remote() for actor in actors]) == [2.0, 2.0]
        compare(registry, dict(zip(NAMES, actors, strict=True)))


def test_pushes_of_a_dead_driver_that_land_late_change_nothing(tmp_path: Path) -> None:
    """RL-11 and RL-20, neighbours: numbers and orders grow on across drivers."""
    actors = detached()
    run_to_death(tmp_path, "after the receipts")
    late = [pickle.loads((tmp_path / f"push-2-{key}").read_bytes()) for key in (0, 1)]
    with (
        Registry.open(tmp_path) as registry,
        RayRemoteWeightUpdater(filled(2.0), actors, registry=registry, start="continue") as updater,
    ):
        updater.rollback(1)
        for actor, weights in zip(actors, late, strict=True):
            payload = np.frombuffer(weights.handle, np.uint8)
            receipt = get(actor.__ray_call__.remote(receive, weights.push, payload))
            assert receipt.outcome == "stale"
        assert get([actor.value.remote() for actor in actors]) == [1.0, 1.0]
        compare(registry, dict(zip(NAMES, actors, strict=True)))


def test_a_push_that_waited_in_a_busy_actor_when_its_driver_died_does_not_undo_the_next(
    tmp_path: Path,
) -> None:
    actors = detached()
    run_to_death(tmp_path, "busy")
    with (
        Registry.open(tmp_path) as registry,
        RayRemoteWeightUpdater(
            filled(3.0), actors, registry=registry, start="continue", timeout=1.0
        ) as updater,
    ):
        status = status_of(registry, NAMES[0])
        assert (status.state, status.pending) == ("unknown", 2)
        report = learn(updater, 3.0)
        assert statuses(report)[1] == "synced"
        (tmp_path / "gate").touch()
        updater.timeout = 60.0
        assert updater.update_weights().ok
        assert get([actor.value.remote() for actor in actors]) == [3.0, 3.0]
        compare(registry, dict(zip(NAMES, actors, strict=True)))


def test_two_live_drivers_do_not_steer_the_same_worker(tmp_path: Path) -> None:
    actors = detached()
    with driver(tmp_path, "stay") as (child, line):
        assert line.poll(60)
        assert line.recv() == "done"
        with Registry.open(tmp_path) as registry:
            with pytest.raises(InUseError, match=r"'driven-0'.*steered by run .*alive"):
                RayRemoteWeightUpdater(filled(3.0), actors, registry=registry)
            for name in NAMES:
                status = status_of(registry, name)
                assert (status.state, status.held) == ("confirmed", 2)
            compare(registry, dict(zip(NAMES, actors, strict=True)))
            # Another policy, or another registry, is another matter.
            with RayRemoteWeightUpdater(filled(3.0), actors, registry=registry.for_policy("other")):
                pass
            child.kill()
            child.join(60)
            with RayRemoteWeightUpdater(filled(2.0), actors, registry=registry, start="continue") as updater:
                assert statuses(updater.sync()) == ["synced", "synced"]
                compare(registry, dict(zip(NAMES, actors, strict=True)))


def test_an_updater_that_was_closed_leaves_its_workers_to_other_processes(tmp_path: Path) -> None:
    actors = detached()
    with Registry.open(tmp_path) as registry:
        with RayRemoteWeightUpdater(filled(5.0), actors, registry=registry, start="continue") as updater:
            learn(updater, 1.0)
        # This process lives on, and its run with it.
        run_to_death(tmp_path, "after the receipts")
        assert status_of(registry, NAMES[0]).last_held == 2

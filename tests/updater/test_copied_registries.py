"""Real actors that live on while their registry is copied or put back, with the original's run alive and gone."""

from __future__ import annotations

import hashlib
import multiprocessing
import shutil
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import ray

from tests.updater.actors import PATIENCE, Rollouts, check_truth, filled, get, learn, remote, statuses
from weightledger.registry import Registry
from weightledger.updater import RayRemoteWeightUpdater

pytestmark = pytest.mark.usefixtures("ray_cluster")


def taken_hash(actor: Any) -> str:
    """Hash what the actor's module holds, without asking the library."""
    return str(get(actor.__ray_call__.remote(_hash)))


def _hash(actor: Any) -> str:
    state = actor.policy.state_dict()
    return hashlib.sha256(b"".join(state[name].numpy().tobytes() for name in sorted(state))).hexdigest()


def hash_of(value: float) -> str:
    state = filled(value).state_dict()
    return hashlib.sha256(b"".join(state[name].numpy().tobytes() for name in sorted(state))).hexdigest()


def drive(address: str, folder: str, names: list[str], values: list[float], line: Connection) -> None:
    """Be the driver of another process; it stays until it is answered."""
    ray.init(address=address, namespace="weightledger-tests", log_to_driver=False)
    actors = [ray.get_actor(name) for name in names]
    registry = Registry.open(folder)
    updater = RayRemoteWeightUpdater(resumed(registry), actors, registry=registry, names=["w0", "w1"])
    for value in values:
        assert learn(updater, value).ok
    line.send("done")
    line.recv()


def resumed(registry: Registry) -> Any:
    """Return server weights that continue where the registry is."""
    learner = filled(0.0)
    if registry.versions():
        registry.restore("head", learner)
    return learner


class Other:
    """Another process that updates, and lives until `end`."""

    def __init__(self, folder: Path, names: list[str], values: list[float]) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._line, theirs = spawn.Pipe()
        address = ray.get_runtime_context().gcs_address
        self._process = spawn.Process(target=drive, args=(address, str(folder), names, values, theirs))
        self._process.start()
        assert self._line.poll(PATIENCE), "the other driver is not done"
        assert self._line.recv() == "done"

    def end(self) -> None:
        self._process.kill()
        self._process.join(PATIENCE)


@pytest.mark.parametrize("lost", [1, 5])
def test_workers_of_a_registry_that_was_put_back_get_its_next_version(tmp_path: Path, lost: int) -> None:
    names = [f"{tmp_path.name}-{index}" for index in range(2)]
    actors = [remote(num_cpus=0, name=name)(Rollouts).remote() for name in names]
    folder, backup = tmp_path / "r", tmp_path / "backup"
    try:
        Other(folder, names, [1.0]).end()
        shutil.copytree(folder, backup)
        Other(folder, names, [2.0 + number for number in range(lost)]).end()
        shutil.rmtree(folder)
        shutil.copytree(backup, folder)
        with (
            Registry.open(folder) as registry,
            RayRemoteWeightUpdater(
                resumed(registry), actors, registry=registry, names=["w0", "w1"]
            ) as updater,
        ):
            report = learn(updater, 50.0)
            assert [taken_hash(actor) for actor in actors] == [hash_of(50.0)] * 2
            assert statuses(report) == ["synced", "synced"]
            assert all("ahead of this registry" in outcome.error for outcome in report.workers.values())
            assert all(found.matches for found in updater.probe().values())
            check_truth(updater)
    finally:
        for actor in actors:
            ray.kill(actor)


def test_a_copy_does_not_write_over_workers_that_the_original_steers(tmp_path: Path) -> None:
    names = [f"{tmp_path.name}-{index}" for index in range(2)]
    actors = [remote(num_cpus=0, name=name)(Rollouts).remote() for name in names]
    folder, copied = tmp_path / "r", tmp_path / "copy"
    original = None
    try:
        Other(folder, names, [1.0]).end()
        shutil.copytree(folder, copied)
        original = Other(folder, names, [2.0, 3.0])
        with (
            Registry.open(copied) as registry,
            RayRemoteWeightUpdater(
                resumed(registry), actors, registry=registry, names=["w0", "w1"]
            ) as updater,
        ):
            report = learn(updater, 50.0)
            assert statuses(report) == ["failed", "failed"]
            for outcome in report.workers.values():
                assert "InUseError" in outcome.error and str(folder) in outcome.error
            assert [taken_hash(actor) for actor in actors] == [hash_of(3.0)] * 2, "nothing was written"
            assert [status.held for status in registry.workers()] == [None, None]
            # Once the original's run is gone, the copy goes on.
            original.end()
            assert learn(updater, 51.0).ok
            assert [taken_hash(actor) for actor in actors] == [hash_of(51.0)] * 2
            check_truth(updater)
    finally:
        if original is not None:
            original.end()
        for actor in actors:
            ray.kill(actor)

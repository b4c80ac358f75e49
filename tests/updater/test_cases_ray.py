"""Cases of transport and record that no other file has (RAY-01, 14, 15, 18); the rest is cited where it is tested."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from torch import nn

from tests.updater.actors import (
    Rollouts,
    borrow,
    check_truth,
    crash,
    get,
    learn,
    remote,
    restarted,
    status_of,
    statuses,
    steer,
)
from weightledger.registry import Registry
from weightledger.registry.errors import InUseError
from weightledger.updater import RayRemoteWeightUpdater

pytestmark = pytest.mark.usefixtures("ray_cluster")


def test_a_restarted_actor_is_not_said_to_hold_what_it_held(tmp_path: Path) -> None:
    """RAY-01: v9, `os._exit`, a call again; then the sync to v9, which changes no version, really loads v9."""
    (worker,) = borrow(1)
    updater, _ = steer(tmp_path, [worker])
    with updater:
        for value in range(1, 10):
            learn(updater, float(value))
        crash(worker)
        restarted(worker)
        assert (get(worker.value.remote()), get(worker.stamp.remote())) == (-1.0, None)
        updater.probe()
        status = status_of(updater.registry, "w0")
        assert (status.state, status.held, status.last_held, status.target) == ("unknown", None, 9, 9)

        assert statuses(updater.sync(version=9)) == ["synced"]

        assert (get(worker.value.remote()), get(worker.stamp.remote())) == (9.0, 9)
        check_truth(updater)


def test_a_worker_that_never_held_the_version_is_not_relabelled_after_its_restart(tmp_path: Path) -> None:
    """RAY-01, neighbour: equal content under another number, while the life in between lost it."""
    (worker,) = borrow(1)
    updater, _ = steer(tmp_path, [worker])
    with updater:
        learn(updater, 1.0)
        learn(updater, 2.0)
        updater.rollback(1)
        crash(worker)
        restarted(worker)
        updater.registry.rollback(1)  # v4 has the content of v3, which the dead life held

        report = updater.update_weights()

        assert statuses(report) == ["synced"]
        assert get(worker.value.remote()) == 1.0
        check_truth(updater)


class Tied(nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(2000, 8)
        self.head = nn.Linear(8, 2000, bias=False)
        self.head.weight = self.embed.weight
        with torch.no_grad():
            self.embed.weight.fill_(value)


class WithTies(Rollouts):
    def __init__(self, value: float = -1.0, width: int = 3) -> None:
        super().__init__(value, width)
        self.policy: Any = Tied(value)
        self.pointer = self.policy.embed.weight.data_ptr()

    def tie(self) -> tuple[bool, bool]:
        weight = self.policy.embed.weight
        return self.policy.head.weight is weight, weight.data_ptr() == self.pointer


def test_tied_weights_travel_once_and_stay_tied_in_place(tmp_path: Path) -> None:
    """RAY-14: one tensor of 64 KB, not two; neighbour: many syncs take no new memory for it."""
    worker = remote(num_cpus=0)(WithTies).remote()
    learner = Tied(1.0)
    with (
        Registry.open(tmp_path) as registry,
        RayRemoteWeightUpdater(learner, [worker], registry=registry, names=["tied"]) as updater,
    ):
        for value in (1.0, 2.0, 3.0):
            with torch.no_grad():
                learner.embed.weight.fill_(value)
            assert updater.update_weights().ok
            assert get(worker.tie.remote()) == (True, True)
            assert get(worker.value.remote()) == value
        assert registry.head().size_bytes == 2000 * 8 * 4
        server = updater.source.find(registry.head().digest)
        assert server is not None
        assert server.nbytes < 1.1 * registry.head().size_bytes
        check_truth(updater)
    ray.kill(worker)


def test_an_actor_that_another_updater_of_this_process_steers_is_refused_under_any_name(
    tmp_path: Path,
) -> None:
    """Under two names it would be sent two targets, and the record would believe both."""
    (worker,) = borrow(1)
    updater, policy = steer(tmp_path, [worker])
    with updater:
        learn(updater, 1.0)
        with pytest.raises(InUseError, match="another name; close that updater"):
            RayRemoteWeightUpdater(policy, [worker], registry=updater.registry, names=["alias"])
        assert [status.name for status in updater.registry.workers()] == ["w0"]
    with RayRemoteWeightUpdater(policy, [worker], registry=updater.registry, names=["alias"]) as second:
        assert second.update_weights().ok


def test_a_worker_in_another_namespace_is_steered_by_its_handle(tmp_path: Path) -> None:
    """RAY-15: by a handle every namespace is in reach; a bare name is refused with what to call."""
    away = remote(num_cpus=0)(Rollouts).options(name="w9", namespace="elsewhere").remote()
    (near,) = borrow(1)
    with pytest.raises(TypeError, match=r"found str 'w9'.*ray\.get_actor\('w9', namespace="):
        steer(tmp_path, ["w9"], names=None)
    with pytest.raises(TypeError, match="found type <class"):
        steer(tmp_path, [near, Rollouts], names=None)
    updater, _ = steer(tmp_path, [near, ray.get_actor("w9", namespace="elsewhere")], names=None)
    with updater:
        with pytest.raises(TypeError, match="found int 7"):
            updater.add_worker(7)
        assert statuses(learn(updater, 1.0)) == ["synced", "synced"]
        assert [status.name for status in updater.registry.workers()] == ["collector-0", "w9"]
        check_truth(updater)
    ray.kill(away)


def test_two_actors_of_one_name_in_two_namespaces_need_names_of_their_own(tmp_path: Path) -> None:
    """RAY-15, neighbour: what a worker holds is recorded by name."""
    twins = [
        remote(num_cpus=0)(Rollouts).options(name="twin", namespace=space).remote()
        for space in ("one", "two")
    ]
    with pytest.raises(InUseError, match=r"'twin'.*names="):
        steer(tmp_path, twins, names=None)
    updater, _ = steer(tmp_path, twins, names=["one/twin", "two/twin"])
    with updater:
        learn(updater, 1.0)
        check_truth(updater)
    for twin in twins:
        ray.kill(twin)


class Copying(Rollouts):
    """Acts with a copy of its policy, made once: a trap."""

    def __init__(self, value: float = -1.0, width: int = 3) -> None:
        super().__init__(value, width)
        self.on_device = copy.deepcopy(self.policy)

    def acts_with(self) -> float:
        return float(self.on_device.bias[0].detach())


def test_a_probe_of_what_the_worker_acts_with_shows_a_copy_that_was_never_updated(tmp_path: Path) -> None:
    """RAY-18: acknowledged in one module, acted with another."""
    worker = remote(num_cpus=0)(Copying).remote()
    updater, _ = steer(tmp_path, [worker])
    with updater:
        assert statuses(learn(updater, 1.0)) == ["synced"]
        assert get(worker.acts_with.remote()) == -1.0
        updater.locate = "on_device"

        found = updater.probe()[0]

        assert (found.version, found.matches, set(found.drift)) == (1, False, {"bias", "weight"})
        status = status_of(updater.registry, "w0")
        assert (status.state, status.held) == ("unknown", None)
        # Told where it acts, it is mended.
        assert statuses(updater.update_weights()) == ["synced"]
        assert get(worker.acts_with.remote()) == 1.0
        assert updater.probe()[0].matches
    ray.kill(worker)

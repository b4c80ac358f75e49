"""The object store is a cache of what is in use: bounded, freed, and no hang when a version does not fit."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import ray
import torch

from tests.updater.actors import (
    borrow,
    check_store_comes_to,
    check_truth,
    fill,
    filled,
    get,
    learn,
    statuses,
    steer,
    store_bytes,
)

pytestmark = pytest.mark.usefixtures("ray_cluster")

WIDTH = 125_000  # 1 MB a version
VERSION = 1_000_000 + 50_000  # with its header, for bounds


def test_many_publishes_leave_the_object_store_where_it_was(tmp_path: Path) -> None:
    """RAY-08: a hundred versions of 1 MB; neighbour: also when every report is kept."""
    workers = borrow(2, width=WIDTH)
    updater, _ = steer(tmp_path, workers)
    check_store_comes_to(0)
    with updater:
        updater.policy_weights = filled(0.0, WIDTH)
        reports = []
        most = 0
        for turn in range(100):
            reports.append(learn(updater, float(turn)))
            most = max(most, store_bytes())
        assert all(report.ok for report in reports)
        assert len(updater.source) == 1
        # The head, and what the cluster had not yet seen being freed.
        assert most <= 20 * VERSION
        check_store_comes_to(VERSION)
        check_truth(updater)
    gc.collect()
    check_store_comes_to(0)


def test_only_versions_in_use_are_kept_there(tmp_path: Path) -> None:
    """The head and what is pinned; a version that nobody holds any more goes, and comes back from its file."""
    workers = borrow(3, width=WIDTH)
    updater, _ = steer(tmp_path, workers)
    with updater:
        updater.policy_weights = filled(0.0, WIDTH)
        for value in (1.0, 2.0, 3.0):
            learn(updater, value)
        updater.pin(0, 1)
        updater.pin(1, 2)
        learn(updater, 4.0)
        check_store_comes_to(3 * VERSION, 3 * 1_000_000)
        updater.unpin(0)
        updater.unpin(1)
        check_store_comes_to(VERSION)
        updater.registry.prune(keep_last=1)
        updater.update_weights()
        check_store_comes_to(VERSION)
        assert get([worker.value.remote() for worker in workers]) == [4.0] * 3
        check_truth(updater)


def test_a_version_is_put_once_however_many_workers_and_updates_it_has(tmp_path: Path) -> None:
    """RAY-09, neighbour: once a version, not once a worker, nor once a call."""
    workers = borrow(4, width=WIDTH)
    updater, _ = steer(tmp_path, workers)
    with updater:
        updater.policy_weights = filled(1.0, WIDTH)
        updater.update_weights(worker_ids=[0])
        handle = updater.source.find(updater.registry.head().digest)
        updater.update_weights(worker_ids=[1])
        updater.sync([2, 3])
        again = updater.source.find(updater.registry.head().digest)
        assert handle is not None
        assert again is not None
        assert again.handle is handle.handle
        check_store_comes_to(VERSION)
        check_truth(updater)


def test_a_small_view_does_not_drag_its_storage_along(tmp_path: Path) -> None:
    """RAY-10: three numbers of a storage of 100 MB; neighbour: an expanded tensor."""
    (worker,) = borrow(1)
    updater, _ = steer(tmp_path, [worker], names=["view"])
    big = torch.full((25_000_000,), 5.0)
    with updater:
        weights = {"weight": big[:6].view(2, 3), "bias": torch.tensor(5.0).expand(2)}
        report = updater.update_weights(weights)
        assert statuses(report) == ["synced"]
        assert get(worker.value.remote()) == 5.0
        found = updater.source.find(updater.registry.head().digest)
        assert found is not None
        assert found.nbytes < 10_000
        check_store_comes_to(0)  # so small that it travels inside of the call
        check_truth(updater)


def test_workers_get_tensors_of_their_own_that_they_may_write_to(tmp_path: Path) -> None:
    """RAY-11: writing in a worker reaches neither the stored object nor another worker; `apply` gets writable ones."""
    workers = borrow(2, width=WIDTH)
    updater, _ = steer(tmp_path, workers)
    with updater:
        updater.policy_weights = filled(1.0, WIDTH)
        updater.update_weights(worker_ids=[0])
        get(workers[0].__ray_call__.remote(add_one))
        updater.sync([1])
        assert get([worker.value.remote() for worker in workers]) == [2.0, 1.0]
        updater.apply = load_and_add_one
        learn(updater, 3.0)
        assert get([worker.value.remote() for worker in workers]) == [3.0, 3.0]
        assert get([worker.__ray_call__.remote(given) for worker in workers]) == [4.0, 4.0]
        assert float(updater.registry.load()["bias"][0]) == 3.0


def add_one(worker: object) -> None:
    for parameter in worker.policy.parameters():  # type: ignore[attr-defined]
        parameter.data.add_(1.0)


def load_and_add_one(worker: object, weights: dict[str, torch.Tensor], version: int) -> None:
    worker.policy.load_state_dict(weights)  # type: ignore[attr-defined]
    for tensor in weights.values():
        tensor.add_(1.0)
    worker.given = weights  # type: ignore[attr-defined]


def given(worker: object) -> float:
    return float(worker.given["weight"][0, 0])  # type: ignore[attr-defined]


def test_a_version_that_is_larger_than_the_object_store_arrives_all_the_same(tmp_path: Path) -> None:
    """RAY-09: 480 MB in a store of 400 MB; Ray puts it on disk, which is slow and no hang."""
    store = ray.cluster_resources()["object_store_memory"]
    width = int(store * 1.2) // 8
    workers = borrow(2, width=width)
    updater, _ = steer(tmp_path, workers)
    with updater:
        updater.policy_weights = fill(filled(1.0, width), 1.0)
        report = updater.update_weights()
        assert statuses(report) == ["synced", "synced"]
        assert updater.registry.head().size_bytes > store
        assert get([worker.digest.remote() for worker in workers]) == [updater.registry.head().digest] * 2
        assert updater.registry.verify() == []
        check_truth(updater)
    borrow(2)
    check_store_comes_to(0)

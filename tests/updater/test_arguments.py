"""Arguments of the wrong kind are refused when they are given: nothing is recorded, no worker is touched."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch

from tests.registry.helpers import in_child
from tests.updater.actors import Worker, borrow, filled, get, learn, steer
from weightledger.registry import ConflictError, InUseError, NotFoundError, Registry, SyncError
from weightledger.updater import RayRemoteWeightUpdater

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]


@pytest.fixture
def updater(tmp_path: Path) -> Iterator[RayRemoteWeightUpdater]:
    made, _ = steer(tmp_path / "registry", borrow(2))
    yield made
    made.close()
    made.registry.close()


@pytest.mark.parametrize(
    ("option", "value", "error"),
    [
        ("registry", "runs/cartpole", TypeError),
        ("timeout", None, TypeError),
        ("timeout", float("nan"), ValueError),
        ("timeout", float("inf"), ValueError),
        ("max_interval", 1.5, TypeError),
        ("locate", "", TypeError),
        ("locate", 3, TypeError),
        ("apply", 3, TypeError),
        ("extra", {}, TypeError),
        ("on_rollback", "restore", TypeError),
        ("allow_nonfinite", "*.weight", TypeError),
        ("names", "ab", TypeError),
        ("names", ["", "b"], ValueError),
        ("names", [1, 2], ValueError),
    ],
)
def test_an_option_of_another_kind_is_refused(
    tmp_path: Path, option: str, value: Any, error: type[Exception]
) -> None:
    with Registry.open(tmp_path / "r") as registry:
        options: dict[str, Any] = {"registry": registry, option: value}
        with pytest.raises(error, match=rf"{option}|worker name"):
            RayRemoteWeightUpdater(filled(1.0), borrow(2), **options)
        assert registry.workers() == []


def test_workers_are_a_list_of_handles(tmp_path: Path) -> None:
    (actor,) = borrow(1)
    with Registry.open(tmp_path / "r") as registry:
        wrong: tuple[Any, ...] = (actor, None, [Worker], ["collector"])
        for workers in wrong:
            with pytest.raises(TypeError, match="actor handle"):
                RayRemoteWeightUpdater(filled(1.0), workers, registry=registry)


def test_one_actor_is_one_worker(updater: RayRemoteWeightUpdater) -> None:
    """Under two names it would be sent two targets, and the record of one of them would be wrong."""
    first, _ = updater.remote_collectors
    with pytest.raises(InUseError, match="'again' is the same actor as worker 'w0'"):
        updater.add_worker(first, "again")
    assert updater.all_worker_ids() == [0, 1]
    with pytest.raises(InUseError, match="same actor"):
        RayRemoteWeightUpdater(
            updater.policy_weights, [first, first], registry=updater.registry, names=["a", "b"]
        )
    assert [worker.name for worker in updater.registry.workers()] == ["w0", "w1"]


@pytest.mark.parametrize("key", [5, -1, "0", "all", True, 1.0, [0, "1"]])
def test_an_id_that_no_worker_has_is_not_found(updater: RayRemoteWeightUpdater, key: Any) -> None:
    learn(updater, 1.0)
    for call in (
        lambda: updater.update_weights(worker_ids=key),
        lambda: updater.sync(key),
        lambda: updater.pin(key, 1),
        lambda: updater.unpin(key),
        lambda: updater.remove_worker(key),
    ):
        with pytest.raises(NotFoundError, match=r"worker ids are \[0, 1\]"):
            call()
    assert updater.registry.pins() == []


def test_ids_may_be_numbers_of_any_library(updater: RayRemoteWeightUpdater) -> None:
    learn(updater, 1.0)
    numbers: tuple[Any, ...] = (
        1,
        np.int64(1),
        torch.tensor(1),
        np.array([1]),
        torch.tensor([1]),
        iter([1, 1]),
    )
    for keys in numbers:
        assert list(updater.sync(keys).workers) == [1]


def test_a_closed_updater_leaves_its_workers_alone(updater: RayRemoteWeightUpdater, tmp_path: Path) -> None:
    """Another one may steer them by then, and its record is not ended from here."""
    learn(updater, 1.0)
    updater.close()
    successor, _ = steer(tmp_path / "registry", updater.remote_collectors)
    with successor:
        learn(successor, 2.0)
        with pytest.raises(InUseError, match="is closed"):
            updater.remove_worker(0)
        assert [worker.held for worker in successor.registry.workers()] == [2, 2]


def test_a_pin_that_cannot_be_carried_out_is_not_recorded(
    updater: RayRemoteWeightUpdater, tmp_path: Path
) -> None:
    learn(updater, 1.0)
    updater.registry.pin("w1", 1)
    in_child(publish, str(tmp_path / "registry"))
    for call in (lambda: updater.pin(0, 1), lambda: updater.unpin(1)):
        with pytest.raises(ConflictError):
            call()
    assert [pin.worker for pin in updater.registry.pins()] == ["w1"]


def publish(location: str) -> None:
    with Registry.open(location) as registry:
        registry.publish(filled(7.0))


def test_weights_without_an_instruction_are_pushed_with_one_of_their_own(
    updater: RayRemoteWeightUpdater,
) -> None:
    server = updater._get_server_weights()
    updater._sync_weights_with_worker(0, server)
    assert get([actor.stamp.remote() for actor in updater.remote_collectors]) == [1, None]
    assert [status.held for status in updater.registry.workers()] == [1, None]


def test_without_ray_nothing_is_published(
    updater: RayRemoteWeightUpdater, monkeypatch: pytest.MonkeyPatch
) -> None:
    learn(updater, 1.0)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(SyncError, match="Ray was shut down"):
        learn(updater, 2.0)
    monkeypatch.undo()
    assert updater.registry.head().number == 1

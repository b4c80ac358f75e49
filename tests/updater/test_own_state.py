"""Workers and learners whose modules compute their state dict, or derive something when they load.

What they really use is hashed here, by their parameters and their output, never by their state dict or the report.
"""

# The stubs of torch call every attribute of a module `Tensor | Module`.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportIndexIssue=false

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from torch import Tensor, nn

from tests.registry.weights.test_own_state import COMPUTING, Deaf, Forgetful, fill, real
from weightledger.registry import Registry
from weightledger.registry.errors import InvalidWeightsError
from weightledger.updater import RayRemoteWeightUpdater
from weightledger.updater.testing import FakeWorkers


@pytest.mark.parametrize("name", COMPUTING)
def test_a_worker_that_computes_its_state_plays_what_it_confirms(name: str, tmp_path: Path) -> None:
    learner, worker = COMPUTING[name](), COMPUTING[name]()
    fleet = FakeWorkers(learner, [worker], registry=Registry.open(tmp_path))
    for value in (1.0, 2.0):
        fill(learner, value)
        assert fleet.update_weights().ok
        assert real(worker) == real(learner)
    before = real(learner)
    fill(learner, float("nan"))
    fleet.update_weights()
    assert fleet.rollback(to=1).ok
    assert real(worker) == real(learner) != before
    assert fleet.probe()[0].matches
    assert not fleet.update_weights().published
    fleet.close()


def test_a_worker_that_does_not_take_weights_is_no_holder_of_them(tmp_path: Path) -> None:
    learner, deaf, good = nn.Linear(2, 1), Deaf(2, 1), nn.Linear(2, 1)
    before = real(deaf)
    registry = Registry.open(tmp_path)
    fleet = FakeWorkers(learner, [deaf, good], registry=registry)
    report = fleet.update_weights()
    assert report.workers[0].status == "failed"
    assert "'bias', 'weight'" in report.workers[0].error
    assert (report.workers[0].held, report.workers[1].held) == (None, 1)
    assert real(deaf) == before
    assert real(good) == real(learner)
    assert [holding.worker for holding in registry.holdings()] == ["fake-1"]
    fleet.close()


def test_a_worker_that_can_go_neither_on_nor_back_is_unknown(tmp_path: Path) -> None:
    registry = Registry.open(tmp_path)
    fleet = FakeWorkers(nn.Linear(2, 1), [Forgetful(2, 1)], registry=registry)
    report = fleet.update_weights()
    assert report.workers[0].status == "failed"
    assert "not known" in report.workers[0].error
    assert fleet.worker(0).policy.hidden > 0
    fleet.close()


def test_a_learner_that_does_not_take_weights_is_told_before_the_registry_changes(tmp_path: Path) -> None:
    class Learner(Deaf):
        """Trains, but cannot be set."""

    learner, worker = Learner(2, 1), nn.Linear(2, 1)
    registry = Registry.open(tmp_path)
    fleet = FakeWorkers(learner, [worker], registry=registry)
    for value in (1.0, 2.0):
        fill(learner, value)
        fleet.update_weights()
    before = real(learner)
    with pytest.raises(InvalidWeightsError, match=r"nothing was changed.*'bias', 'weight'"):
        fleet.rollback(to=1)
    assert registry.head().number == 2
    assert real(learner) == before == real(worker)
    # Elsewhere somebody rolls back all the same: the learner does not publish over it.
    registry.rollback(1)
    with pytest.raises(InvalidWeightsError, match="nothing was changed"):
        fleet.update_weights()
    assert registry.head().restores == 1
    fleet.close()


class Twice(nn.Parameter):
    """Derives something whenever torch copies into it; what is written into its memory, it does not notice."""

    twice: Tensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            answer = func(*args, **(kwargs or {}))
            if func is Tensor.copy_:
                args[0].twice = args[0].detach() * 2
            return answer


class Engine:
    """A worker that computes with what its weights derive."""

    def __init__(self) -> None:
        self.policy = nn.Linear(2, 1)
        self.policy.weight = Twice(torch.zeros(1, 2))
        self.policy.weight.twice = torch.zeros(1, 2)

    def act(self) -> list[Any]:
        return [self.policy.weight.detach().tolist(), self.policy.weight.twice.tolist()]


@pytest.mark.ray
def test_a_ray_worker_loads_by_its_own_load_state_dict_when_it_is_asked_to(
    ray_cluster: None, tmp_path: Path
) -> None:
    learner = nn.Linear(2, 1)
    actor: Any = ray.remote(num_cpus=0)(Engine)
    workers = [actor.remote() for _ in range(2)]
    registry = Registry.open(tmp_path)
    updater = RayRemoteWeightUpdater(
        learner, workers, registry=registry, names=["a", "b"], apply="load_state_dict"
    )
    for value in (1.0, 2.0):
        fill(learner, value)
        assert updater.update_weights().ok
        for worker in workers:
            assert ray.get(worker.act.remote(), timeout=60) == [[[value] * 2], [[2 * value] * 2]]
    assert updater.rollback(to=1).ok
    for worker in workers:
        assert ray.get(worker.act.remote(), timeout=60) == [[[1.0] * 2], [[2.0] * 2]]
    assert all(held.matches for held in updater.probe().values())
    updater.close()


def test_asking_for_load_state_dict_where_there_is_none_is_refused(tmp_path: Path) -> None:
    registry = Registry.open(tmp_path)
    fleet = FakeWorkers(
        nn.Linear(2, 1), [dict(nn.Linear(2, 1).state_dict())], registry=registry, apply="load_state_dict"
    )
    (outcome,) = fleet.update_weights().workers.values()
    assert (outcome.status, outcome.held) == ("failed", None)
    assert "expected a module, which loads by its own load_state_dict, found a dict" in outcome.error
    fleet.close()
    with pytest.raises(
        TypeError, match=r"apply must be a callable, 'load_state_dict' or None, found str 'load'"
    ):
        FakeWorkers(nn.Linear(2, 1), [], registry=registry, apply="load")  # type: ignore[arg-type]

"""A user's own transport, built on the four hooks that the base asks for and on nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from weightledger.registry import InUseError, Registry
from weightledger.registry.weights.live import live_digest
from weightledger.registry.weights.payload import Payload
from weightledger.updater import RemoteWeightUpdaterBase, ServerWeights, held_version
from weightledger.updater.in_worker.receiver import receive
from weightledger.updater.messages import is_from_outside
from weightledger.updater.testing import FakeTransport, FakeWorkers


class ThreadUpdater(RemoteWeightUpdaterBase):
    """Workers are objects; a pool of threads carries the weights to them."""

    def __init__(self, policy_weights: Any, workers: list[Any], registry: Registry, **options: Any) -> None:
        super().__init__(policy_weights, registry=registry, **options)
        self.pool = ThreadPoolExecutor(4)
        self._add_workers(workers, [f"t{index}" for index in range(len(workers))])

    def _get_server_weights(self) -> ServerWeights:
        return self._publish(self.policy_weights)

    def _maybe_map_weights(self, weights: Any) -> Any:
        return weights

    def _sync_weights_with_worker(self, worker_id: int, server_weights: ServerWeights) -> Future[Any]:
        worker = self.workers.get(worker_id).handle
        return self.pool.submit(self.carry, worker, server_weights)

    def carry(self, worker: Any, server_weights: ServerWeights) -> Any:
        assert server_weights.push is not None
        if worker.unreachable:
            raise ConnectionError("unplugged")
        return receive(worker, server_weights.push, server_weights.handle)

    def all_worker_ids(self) -> list[int]:
        return self.workers.ids()


def constant(value: float) -> nn.Linear:
    module = nn.Linear(3, 2)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(value)
    return module


@pytest.fixture
def updater(tmp_path: Path) -> Iterator[ThreadUpdater]:
    workers = [SimpleNamespace(policy=constant(-1.0), unreachable=False) for _ in range(3)]
    with ThreadUpdater(constant(1.0), workers, Registry.open(tmp_path), timeout=30.0) as made:
        yield made
        made.pool.shutdown()


def workers(updater: ThreadUpdater) -> list[Any]:
    return [worker.handle for worker in updater.workers]


def values(updater: ThreadUpdater) -> list[float]:
    return [float(worker.policy.weight[0, 0].item()) for worker in workers(updater)]


def check_truth(updater: ThreadUpdater) -> None:
    for status, worker in zip(updater.registry.workers(), workers(updater), strict=True):
        if status.held is not None:
            assert held_version(worker) == status.held
            assert live_digest(worker.policy)[0] == updater.registry.get(status.held).digest


def test_the_base_asks_for_exactly_four_hooks() -> None:
    assert RemoteWeightUpdaterBase.__abstractmethods__ == {
        "_get_server_weights",
        "_maybe_map_weights",
        "_sync_weights_with_worker",
        "all_worker_ids",
    }


def test_versions_receipts_and_reports_are_inherited(updater: ThreadUpdater) -> None:
    report = updater.update_weights(step=1)
    assert report.ok and report.version == 1 and values(updater) == [1.0, 1.0, 1.0]
    assert [status.state for status in updater.registry.workers()] == ["confirmed"] * 3
    assert {outcome.status for outcome in updater.update_weights().workers.values()} == {"current"}
    check_truth(updater)


def test_pins_rollback_and_probe_are_inherited(updater: ThreadUpdater) -> None:
    updater.update_weights()
    updater.update_weights(constant(2.0))
    updater.pin(0, 2)
    assert updater.rollback(1).ok and values(updater) == [2.0, 1.0, 1.0]
    assert all(held.matches for held in updater.probe().values())
    with torch.no_grad():
        workers(updater)[2].policy.bias.zero_()
    assert updater.probe()[2].drift == ("bias",)
    assert updater.sync().ok
    check_truth(updater)


def test_a_transport_that_raises_fails_that_worker_only(updater: ThreadUpdater) -> None:
    workers(updater)[1].unreachable = True
    report = updater.update_weights()
    assert [outcome.status for outcome in report.workers.values()] == ["synced", "failed", "synced"]
    assert "unplugged" in report.workers[1].error and values(updater) == [1.0, -1.0, 1.0]
    check_truth(updater)
    workers(updater)[1].unreachable = False
    assert updater.update_weights().ok and values(updater) == [1.0, 1.0, 1.0]


def test_updates_in_the_background_are_inherited(updater: ThreadUpdater) -> None:
    future = updater.update_weights(wait=False)
    with torch.no_grad():
        updater.policy_weights.weight.fill_(9.0)
    assert future.result(60).ok and values(updater) == [1.0, 1.0, 1.0]


def test_the_interval_is_inherited(tmp_path: Path) -> None:
    worker = SimpleNamespace(policy=constant(-1.0), unreachable=False)
    with ThreadUpdater(
        constant(0.0), [worker], Registry.open(tmp_path), max_interval=1, timeout=30.0
    ) as updater:
        found = []
        for value in range(4):
            updater.policy_weights = constant(float(value))
            found.append(updater.update_weights().workers[0].status)
        assert found == ["synced", "skipped", "synced", "skipped"]
        updater.pool.shutdown()


def test_mapped_weights_are_recorded_as_what_they_are(tmp_path: Path) -> None:
    class Shifted(ThreadUpdater):
        def _maybe_map_weights(self, weights: Any) -> Any:
            return {name: tensor + 1 for name, tensor in weights.items()}

    worker = SimpleNamespace(policy=constant(-1.0), unreachable=False)
    with Shifted(constant(1.0), [worker], Registry.open(tmp_path), timeout=30.0) as updater:
        assert updater.update_weights().ok and values(updater) == [2.0]
        (holding,) = updater.registry.holdings()
        assert holding.digest == live_digest(constant(1.0))[0]
        assert holding.sent_digest == live_digest(worker.policy)[0]
        updater.pool.shutdown()


def test_names_are_claimed_like_those_of_ray_workers(updater: ThreadUpdater) -> None:
    again = [SimpleNamespace(policy=constant(-1.0), unreachable=False)]
    with pytest.raises(InUseError, match="'t0'"):
        ThreadUpdater(constant(1.0), again, updater.registry)


def test_bytes_that_the_transport_cannot_take_leave_no_push_behind(tmp_path: Path) -> None:
    """A full object store: nothing was written, no worker was sent anything, and the next update goes on."""

    class Narrow(FakeTransport):
        full = False

        def put(self, payload: Payload) -> Any:
            if self.full:
                raise MemoryError("no room for it")
            return super().put(payload)

    def large(value: float) -> nn.Linear:
        module = nn.Linear(1100, 1100)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.fill_(value)
        return module

    held, narrow = [large(-1.0) for _ in range(2)], Narrow()
    registry = Registry.open(tmp_path)
    with FakeWorkers(large(1.0), held, registry=registry, transport=narrow, timeout=30.0) as updater:
        updater.update_weights().raise_for_failures()
        narrow.full = True
        with pytest.raises(MemoryError, match="no room"):
            updater.update_weights(large(2.0))
        assert registry.head().number == 1
        assert [version.number for version in registry.versions()] == [1]
        assert [status.held for status in registry.workers()] == [1, 1]
        assert [status.pending for status in registry.workers()] == [None, None]
        narrow.full = False
        report = updater.update_weights(large(3.0))
        assert (report.version, [outcome.held for outcome in report.workers.values()]) == (2, [2, 2])
        assert registry.verify() == []
        assert [updater.worker(key).policy.weight[0, 0].item() for key in (0, 1)] == [3.0, 3.0]


def test_a_rollback_is_followed_although_a_hook_publishes_nothing(tmp_path: Path) -> None:
    """A hook that hands out what it published before never meets the head by itself."""

    class Remembering(ThreadUpdater):
        last: ServerWeights | None = None

        def _get_server_weights(self) -> ServerWeights:
            if self.last is None:
                self.last = super()._get_server_weights()
            return self.last

    held = [SimpleNamespace(policy=constant(-1.0), unreachable=False)]
    registry = Registry.open(tmp_path)
    with Remembering(constant(1.0), held, registry, timeout=30.0) as updater:
        updater.update_weights()
        updater.last = None
        with torch.no_grad():
            for parameter in updater.policy_weights.parameters():
                parameter.fill_(2.0)
        updater.update_weights()
        registry.rollback(1)
        report = updater.update_weights()
        assert (report.adopted, report.version) == (True, 3)
        assert values(updater) == [1.0]
        assert updater.policy_weights.weight[0, 0].item() == 1.0
        check_truth(updater)
        updater.pool.shutdown()


# ------------------------------------------------------------------ no more than the four hooks


class FourHooks(RemoteWeightUpdaterBase):
    """What the original asked of a subclass, and nothing else."""

    def _get_server_weights(self) -> ServerWeights:
        return self._publish(self.policy_weights)

    def _maybe_map_weights(self, weights: Any) -> Any:
        return weights

    def _sync_weights_with_worker(self, worker_id: int, server_weights: ServerWeights) -> Any:
        if is_from_outside(server_weights):
            return self._push_alone(worker_id, server_weights)
        assert server_weights.push is not None
        return receive(FLEET[worker_id], server_weights.push, server_weights.handle)

    def all_worker_ids(self) -> list[int]:
        return sorted(FLEET)


FLEET: dict[int, Any] = {}
"""Workers that only the hooks know of."""


@pytest.fixture
def fleet() -> Iterator[dict[int, Any]]:
    FLEET.update({index: SimpleNamespace(policy=constant(-1.0)) for index in range(2)})
    yield FLEET
    FLEET.clear()


def acted(fleet: dict[int, Any]) -> list[float]:
    return [float(fleet[key].policy.weight[0, 0].item()) for key in sorted(fleet)]


def test_four_hooks_are_enough_for_a_whole_life(tmp_path: Path, fleet: dict[int, Any]) -> None:
    with FourHooks(constant(1.0), registry=Registry.open(tmp_path)) as updater:
        assert updater.update_weights().ok and acted(fleet) == [1.0, 1.0]
        fleet[5] = SimpleNamespace(policy=constant(-1.0))
        assert updater.update_weights(constant(2.0), worker_ids=[0, 5]).ok
        assert acted(fleet) == [2.0, 1.0, 2.0]
        updater.pin(1, 1)
        assert updater.rollback(1).ok and acted(fleet) == [1.0, 1.0, 1.0]
        assert {key: held.matches for key, held in updater.probe().items()} == {0: True, 1: True, 5: True}
        names = [(status.name, status.held) for status in updater.registry.workers()]
        assert names == [("collector-0", 3), ("collector-1", 1), ("collector-5", 3)]


@pytest.mark.parametrize("first", ["pin", "sync", "probe", "rollback"])
def test_whatever_is_called_first_finds_their_workers(
    tmp_path: Path, fleet: dict[int, Any], first: str
) -> None:
    with Registry.open(tmp_path) as registry:
        registry.publish(constant(1.0))
        registry.publish(constant(2.0))
        with FourHooks(constant(2.0), registry=registry) as updater:
            match first:
                case "pin":
                    assert list(updater.pin(1, 1).workers) == [1] and acted(fleet) == [-1.0, 1.0]
                case "sync":
                    assert list(updater.sync().workers) == [0, 1] and acted(fleet) == [2.0, 2.0]
                case "probe":
                    assert list(updater.probe()) == [0, 1]
                case _:
                    assert list(updater.rollback(1).workers) == [0, 1] and acted(fleet) == [1.0, 1.0]


def test_workers_are_given_names_by_the_public_call(tmp_path: Path, fleet: dict[int, Any]) -> None:
    with FourHooks(constant(1.0), registry=Registry.open(tmp_path)) as updater:
        updater.update_weights(worker_ids=[])
        fleet[2] = SimpleNamespace(policy=constant(-1.0))
        assert updater.add_worker(fleet[2], "evaluator") == 2
        assert acted(fleet) == [-1.0, -1.0, 1.0]
        assert updater.update_weights().ok
        assert {status.name for status in updater.registry.workers()} == {
            *("collector-0", "collector-1", "evaluator")
        }
        with pytest.raises(InUseError, match="evaluator"):
            updater.add_worker(object(), "evaluator")


def test_a_push_from_outside_is_an_update_of_its_own_for_one_worker(
    tmp_path: Path, fleet: dict[int, Any]
) -> None:
    with FourHooks(constant(1.0), registry=Registry.open(tmp_path)) as updater:
        receipt = updater._sync_weights_with_worker(1, updater._get_server_weights())
        assert (receipt.outcome, receipt.now.version) == ("applied", 1)
        assert acted(fleet) == [-1.0, 1.0]
        (holding,) = updater.registry.holdings()
        assert (holding.worker, holding.version, holding.order) == ("collector-1", 1, receipt.order)


def test_ids_that_are_no_numbers_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FourHooks, "all_worker_ids", lambda self: ["cuda:0"])
    with (
        FourHooks(constant(1.0), registry=Registry.open(tmp_path)) as updater,
        pytest.raises(TypeError, match="a worker id must be a whole number, found str 'cuda:0'"),
    ):
        updater.update_weights()

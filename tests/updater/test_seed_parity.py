"""The class that this library began as, member by member and row by row of docs/design/seed-parity.md.

Same names, same results where it was right, ours where it was wrong. What of the original still is in the installed
TorchRL runs beside ours.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import ray
from tensordict import TensorDict
from torch import nn
from torchrl.collectors import RayWeightUpdater, WeightUpdaterBase

from tests.updater.actors import (
    Mortal,
    borrow,
    check_truth,
    fill,
    filled,
    get,
    kill,
    learn,
    statuses,
    steer,
)
from tests.updater.torchrl_parts import borrow as borrow_collector
from tests.updater.torchrl_parts import (
    collect,
    make_policy,
    report_of,
    start_synchronous,
    train,
    value_in,
    weights_of,
)
from tests.updater.torchrl_parts import steer as steer_collector
from weightledger.registry import Registry
from weightledger.registry.errors import InUseError, InvalidWeightsError
from weightledger.updater import RayRemoteWeightUpdater, RemoteWeightUpdaterBase, ServerWeights, SyncReport

pytestmark = [pytest.mark.usefixtures("ray_cluster"), pytest.mark.slow, pytest.mark.timeout(400)]

PAGE = Path(__file__).parent.parent.parent / "docs" / "design" / "seed-parity.md"

MEMBERS = {
    "policy_weights",
    "remote_collectors",
    "max_interval",
    "__call__",
    "update_weights",
    "all_worker_ids",
    "_get_server_weights",
    "_maybe_map_weights",
    "_sync_weights_with_worker",
    "_skip_update",
    "register_collector",
    "collector",
}
CLASSES = {"RayRemoteWeightUpdater", "RemoteWeightUpdaterBase"}


def values(updater: RayRemoteWeightUpdater) -> list[float]:
    return [get(handle.value.remote()) for handle in updater.remote_collectors]


class Handle:
    """Something that a weak reference can be made to."""


# ------------------------------------------------------------------ members


def test_the_page_names_every_documented_member_and_each_is_here(tmp_path: Path) -> None:
    table = PAGE.read_text(encoding="utf-8").split("## The interval")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.M)) == MEMBERS | CLASSES
    updater, _ = steer(tmp_path, [])
    with updater:
        assert [name for name in MEMBERS if not hasattr(updater, name)] == []


def test_the_constructor_takes_the_originals_arguments_in_the_originals_order(tmp_path: Path) -> None:
    ours = inspect.signature(RayRemoteWeightUpdater).parameters
    theirs = inspect.signature(RayWeightUpdater).parameters
    assert list(ours)[:3] == list(theirs)[:3] == ["policy_weights", "remote_collectors", "max_interval"]
    workers, policy = borrow(2), filled(1.0)
    with (
        Registry.open(tmp_path) as registry,
        RayRemoteWeightUpdater(policy, workers, -1, registry=registry) as updater,
    ):
        assert updater.policy_weights is policy
        assert updater.remote_collectors == workers
        assert updater.max_interval == 0
        assert updater.all_worker_ids() == [0, 1]
        assert updater.collector is None


def test_the_policy_weights_may_be_the_tensordict_that_the_original_was_given(tmp_path: Path) -> None:
    policy = filled(1.0)
    view = weights_of(policy)
    updater, _ = steer(tmp_path, borrow(1))
    updater.policy_weights = view
    with updater:
        updater()
        fill(policy, 2.0)
        updater()
        assert values(updater) == [2.0]
        updater.rollback(1)
        assert values(updater) == [1.0]
        assert policy.bias[0].item() == 1.0


def test_a_worker_that_is_added_later_is_a_worker(tmp_path: Path) -> None:
    first, second = borrow(2)
    updater, _ = steer(tmp_path, [first])
    with updater:
        learn(updater, 1.0)
        assert updater.add_worker(second, "late") == 1
        assert statuses(learn(updater, 2.0)) == ["synced", "synced"]
        updater.remove_worker(0)
        assert updater.all_worker_ids() == [1]
        assert updater.remote_collectors == [second]


def test_calling_the_updater_is_update_weights_and_gives_a_report(tmp_path: Path) -> None:
    assert list(inspect.signature(RayRemoteWeightUpdater.update_weights).parameters)[1:3] == [
        "weights",
        "worker_ids",
    ]
    updater, learner = steer(tmp_path, borrow(1))
    with updater:
        fill(learner, 4.0)
        assert isinstance(updater(), SyncReport)
        assert values(updater) == [4.0]


def test_server_weights_are_put_once_a_version_whoever_asks(tmp_path: Path) -> None:
    updater, learner = steer(tmp_path, borrow(2), value=1.0)
    with updater:
        first = updater._get_server_weights()
        again = updater._get_server_weights()
        assert isinstance(first, ServerWeights)
        assert (again.version, again.handle is first.handle) == (first.version, True)
        fill(learner, 2.0)
        assert updater._get_server_weights().version == first.version + 1


def test_the_result_of_the_mapping_hook_is_what_is_sent(tmp_path: Path) -> None:
    class Doubling(RayRemoteWeightUpdater):
        def _maybe_map_weights(self, weights: Any) -> Any:
            return {name: 2 * tensor for name, tensor in weights.items()}

    (worker,) = borrow(1)
    with Registry.open(tmp_path) as registry, Doubling(filled(3.0), [worker], registry=registry) as updater:
        updater.update_weights()
        assert get(worker.value.remote()) == 6.0
        assert registry.load()["bias"][0] == 3.0


def test_the_sync_hook_starts_one_push_and_returns_its_receipt_to_be(tmp_path: Path) -> None:
    signature = inspect.signature(RayRemoteWeightUpdater._sync_weights_with_worker)
    assert list(signature.parameters)[1:] == ["worker_id", "server_weights"]
    given: list[Any] = []

    class Watching(RayRemoteWeightUpdater):
        def _sync_weights_with_worker(self, worker_id: int, server_weights: ServerWeights) -> Any:
            given.append(super()._sync_weights_with_worker(worker_id, server_weights))
            return given[-1]

    with Registry.open(tmp_path) as registry, Watching(filled(1.0), borrow(2), registry=registry) as updater:
        updater.update_weights()
        assert [get(ref).outcome for ref in given] == ["applied", "applied"]
        assert all(isinstance(ref, ray.ObjectRef) for ref in given)


def test_the_sync_hook_works_from_outside_and_what_it_did_is_on_record(tmp_path: Path) -> None:
    """With the original's arguments: an id, and what `_get_server_weights` returned or other weights."""
    updater, learner = steer(tmp_path, borrow(2), value=1.0)
    with updater:
        receipt = updater._sync_weights_with_worker(1, updater._get_server_weights())
        assert receipt.outcome == "applied"
        assert values(updater) == [-1.0, 1.0]
        fill(learner, 2.0)
        weights = updater._get_server_weights()
        for worker_id in updater.all_worker_ids():
            updater._sync_weights_with_worker(worker_id=worker_id, server_weights=weights)
        assert values(updater) == [2.0, 2.0]
        assert [status.held for status in updater.registry.workers()] == [2, 2]
        check_truth(updater)
        orders = [holding.order for holding in updater.registry.history()]
        assert len(set(orders)) == 3

        updater._sync_weights_with_worker(0, weights_of(filled(8.0)))
        assert values(updater) == [8.0, 2.0]
        assert updater.registry.head().number == 3
        check_truth(updater)
        with pytest.raises(InvalidWeightsError, match="weight"):
            updater._sync_weights_with_worker(0, nn.Linear(9, 9))  # pyright: ignore[reportArgumentType]


def test_the_sync_hook_of_a_collectors_updater_works_from_outside(tmp_path: Path) -> None:
    collector = borrow_collector(start_synchronous)
    updater, policy = steer_collector(tmp_path, collector)
    with updater:
        train(policy, 4.0)
        updater._sync_weights_with_worker(worker_id=0, server_weights=updater._get_server_weights())
        assert value_in(collector.remote_collectors[0]) == 4.0
        assert [status.held for status in updater.registry.workers()] == [1, None]


def test_asking_whether_to_skip_changes_nothing_and_an_override_takes_effect(tmp_path: Path) -> None:
    class Lazy(RayRemoteWeightUpdater):
        def _skip_update(self, worker_id: int) -> bool:
            return worker_id == 1

    with Registry.open(tmp_path) as registry, Lazy(filled(1.0), borrow(2), registry=registry) as updater:
        learn(updater, 1.0)
        assert statuses(learn(updater, 2.0)) == ["synced", "skipped"]
        assert values(updater) == [2.0, 1.0]
    updater, _ = steer(tmp_path / "plain", borrow(1), max_interval=1)
    with updater:
        learn(updater, 1.0)
        assert [updater._skip_update(0) for _ in range(4)] == [True] * 4
        assert statuses(learn(updater, 2.0)) == ["skipped"]
        assert [updater._skip_update(0) for _ in range(4)] == [False] * 4


def test_a_collector_is_registered_once_and_weakly(tmp_path: Path) -> None:
    updater, _ = steer(tmp_path, [])
    with updater:
        collector: Any = Handle()
        updater.register_collector(collector)
        updater.register_collector(collector)
        assert updater.collector is collector
        other = Handle()
        with pytest.raises(InUseError, match="registered with"):
            updater.register_collector(other)
        del collector
        assert updater.collector is None

    stock = RayWeightUpdater(TensorDict(), [], 0)
    pair = Handle(), Handle()
    for each in pair:
        stock.register_collector(each)
    with pytest.raises(ValueError, match="multiple collectors"):
        _ = stock.collector


def test_the_base_class_asks_for_the_four_methods_of_the_original() -> None:
    assert RemoteWeightUpdaterBase.__abstractmethods__ == {
        "_get_server_weights",
        "_maybe_map_weights",
        "_sync_weights_with_worker",
        "all_worker_ids",
    }
    assert not hasattr(RemoteWeightUpdaterBase._skip_update, "__isabstractmethod__")
    assert issubclass(RayWeightUpdater, WeightUpdaterBase)


# ------------------------------------------------------------------ the interval


def test_the_first_push_comes_at_once_and_then_the_period_is_the_originals(tmp_path: Path) -> None:
    """Seven calls with an interval of two, both on the same collector."""
    collector = borrow_collector(start_synchronous)
    updater, policy = steer_collector(tmp_path, collector, policy=make_policy())
    with updater:
        updater.max_interval = 2
        ours = []
        for value in range(1, 8):
            train(policy, float(value))
            updater.update_weights()
            ours.append(value_in(collector.remote_collectors[0]))
        assert ours == [1, 1, 1, 4, 4, 4, 7]

    train(policy, 0.0)
    stock = RayWeightUpdater(weights_of(policy), collector.remote_collectors, 2)
    collector.weight_updater = stock
    get([actor.update_policy_weights_.remote(stock.policy_weights) for actor in collector.remote_collectors])
    theirs = []
    for value in range(1, 8):
        train(policy, float(value))
        collector.update_policy_weights_()
        theirs.append(value_in(collector.remote_collectors[0]))
    assert theirs == [0, 0, 3, 3, 3, 6, 6]


def test_without_an_interval_every_call_pushes(tmp_path: Path) -> None:
    updater, _ = steer(tmp_path, borrow(1))
    with updater:
        for value in (1.0, 2.0, 3.0):
            assert statuses(learn(updater, value)) == ["synced"]


def test_only_calls_that_name_a_worker_count_for_it(tmp_path: Path) -> None:
    updater, _ = steer(tmp_path, borrow(2), max_interval=2)
    with updater:
        learn(updater, 1.0)
        for value in (2.0, 3.0):
            assert statuses(learn(updater, value, worker_ids=0)) == ["skipped"]
        assert statuses(learn(updater, 4.0)) == ["synced", "skipped"]
        assert values(updater) == [4.0, 1.0]


def test_no_push_by_hand_is_passed_by(tmp_path: Path) -> None:
    updater, _ = steer(tmp_path, borrow(1), max_interval=5)
    with updater:
        learn(updater, 1.0)
        assert statuses(learn(updater, 2.0)) == ["skipped"]
        updater.update_weights(filled(3.0))
        assert values(updater) == [3.0]
        assert statuses(learn(updater, 4.0)) == ["skipped"]
        updater.sync()
        assert values(updater) == [4.0]
        learn(updater, 5.0, force=True)
        assert values(updater) == [5.0]
        updater.rollback(1)
        assert values(updater) == [1.0]

    collector = borrow_collector(start_synchronous)
    policy = make_policy(1.0)
    stock = RayWeightUpdater(weights_of(policy), collector.remote_collectors, 5)
    collector.weight_updater = stock
    before = value_in(collector.remote_collectors[0])
    collector.update_policy_weights_(weights_of(make_policy(before + 1)))
    assert value_in(collector.remote_collectors[0]) == before


def test_a_push_that_was_not_confirmed_does_not_restart_the_count(tmp_path: Path) -> None:
    updater, learner = steer(tmp_path, borrow(1), max_interval=1)
    with updater:
        learn(updater, 1.0)
        assert statuses(learn(updater, 2.0)) == ["skipped"]
        updater.policy_weights = nn.Linear(7, 7)
        assert statuses(updater.update_weights(restructure=True)) == ["failed"]
        updater.policy_weights = learner
        assert statuses(learn(updater, 3.0, restructure=True)) == ["synced"]
        check_truth(updater)


# ------------------------------------------------------------------ the pushes


def test_worker_ids_are_none_or_one_or_many(tmp_path: Path) -> None:
    updater, _ = steer(tmp_path, borrow(3))
    with updater:
        assert list(learn(updater, 1.0).workers) == [0, 1, 2]
        assert list(learn(updater, 2.0, worker_ids=1).workers) == [1]
        assert list(learn(updater, 3.0, worker_ids=[0, 2]).workers) == [0, 2]
        assert values(updater) == [3.0, 2.0, 3.0]


@pytest.mark.parametrize("kind", ["module", "tensordict", "mapping"])
def test_given_weights_are_sent_in_every_form_and_the_live_ones_are_untouched(
    tmp_path: Path, kind: str
) -> None:
    module = filled(8.0)
    given = {
        "module": module,
        "tensordict": weights_of(module),
        "mapping": module.state_dict(),
    }[kind]
    updater, learner = steer(tmp_path, borrow(2))
    with updater:
        learn(updater, 1.0)
        assert statuses(updater.update_weights(given)) == ["synced", "synced"]
        assert values(updater) == [8.0, 8.0]
        assert learner.bias[0].item() == 1.0


def test_weights_that_do_not_fit_are_refused_whole_and_kill_nobody(tmp_path: Path) -> None:
    updater, _ = steer(tmp_path, borrow(2))
    with updater:
        learn(updater, 1.0)
        report = updater.update_weights(nn.Linear(3, 5), restructure=True)
        assert statuses(report) == ["failed", "failed"]
        assert "weight" in report.workers[0].error
        assert values(updater) == [1.0, 1.0]
        assert statuses(learn(updater, 2.0, restructure=True)) == ["synced", "synced"]


def test_one_dead_worker_is_told_and_holds_nobody_up(tmp_path: Path) -> None:
    (living,), mortal = borrow(1), Mortal.remote()
    updater, _ = steer(tmp_path, [mortal, living])
    with updater:
        learn(updater, 1.0)
        kill(mortal)
        assert statuses(learn(updater, 2.0)) == ["dead", "synced"]
        assert get(living.value.remote()) == 2.0


def test_when_an_update_returns_every_worker_has_answered(tmp_path: Path) -> None:
    updater, _ = steer(tmp_path, borrow(2))
    with updater:
        report = learn(updater, 1.0)
        assert [outcome.held for outcome in report.workers.values()] == [1, 1]
        future = updater.update_weights(filled(2.0), wait=False)
        assert [outcome.held for outcome in future.result(60).workers.values()] == [2, 2]


def test_in_synchronous_collection_all_workers_are_updated_before_each_iteration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The asynchronous form is in test_torchrl_updater.py."""
    collector = borrow_collector(start_synchronous)
    monkeypatch.setattr(collector, "update_after_each_batch", True)
    updater, policy = steer_collector(tmp_path, collector)
    with updater:
        batches = iter(collector)
        for value in (1.0, 2.0):
            train(policy, value)
            batch = next(batches)
            assert list(report_of(updater).workers) == [0, 1]
            assert batch["action"].unique().tolist() == [value]


# ------------------------------------------------------------------ stamps


def test_the_stock_tracker_counts_updates_and_lags_a_frame_and_ours_names_versions(tmp_path: Path) -> None:
    collector = borrow_collector(start_synchronous)
    updater, policy = steer_collector(tmp_path, collector)
    with updater:
        updater.update_weights(train(policy, 1.0))
        collect(collector)
        again = collect(collector)
        assert again["policy_version"].unique().tolist() == [1]

    stock = RayWeightUpdater(weights_of(policy), collector.remote_collectors, 0)
    collector.weight_updater = stock
    collector.update_policy_weights_()  # the same weights once more
    batch = collect(collector)
    assert batch["action"].unique().tolist() == [1.0]
    assert batch["next", "policy_version"].unique().tolist() == [2]
    assert batch["policy_version"][:, 0].tolist() == [1, 1]
    assert batch["policy_version"][:, 1:].unique().tolist() == [2]

    updater, policy = steer_collector(tmp_path, collector, policy=policy)
    with updater:
        collector.update_policy_weights_()
        assert not report_of(updater).published
        batch = collect(collector)
        assert batch["policy_version"].unique().tolist() == [1]
        assert batch["next", "policy_version"].unique().tolist() == [1]

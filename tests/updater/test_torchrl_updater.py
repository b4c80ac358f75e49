"""TorchRL's RayCollector with the updater as its `weight_updater=`: synchronous, asynchronous and nested."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torchrl.collectors import MultiAsyncCollector, WeightUpdaterBase

from tests.updater.actors import ends, get, status_of, statuses, wait_until
from tests.updater.torchrl_parts import (
    borrow,
    collect,
    make_policy,
    report_of,
    seen,
    start_asynchronous,
    start_nested,
    start_synchronous,
    steer,
    train,
    value_in,
    weights_of,
)
from weightledger.registry import Registry
from weightledger.registry.errors import InUseError, NotFoundError, SyncError
from weightledger.updater import SyncWarning
from weightledger.updater.messages import Probe, Push, Receipt
from weightledger.updater.torchrl import RayCollectorWeightUpdater
from weightledger.updater.torchrl.worker import receive_in_collector
from weightledger.updater.transports.incarnations import find_incarnations

pytestmark = [pytest.mark.usefixtures("ray_cluster"), pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture
def collector() -> Any:
    return borrow(start_synchronous)


def test_the_updater_is_one_that_torchrl_accepts_and_importing_the_others_does_not_import_torchrl() -> None:
    assert issubclass(RayCollectorWeightUpdater, WeightUpdaterBase)
    type("Users", (RayCollectorWeightUpdater,), {})  # TorchRL's own warning would be an error here
    program = "import sys, weightledger.updater; print('torchrl' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=True
    )
    assert done.stdout.strip() == "False"


def test_update_policy_weights_publishes_and_syncs_all_workers(tmp_path: Path, collector: Any) -> None:
    updater, policy = steer(tmp_path, collector)
    with updater:
        for number, value in enumerate((10.0, 20.0, 30.0), start=1):
            train(policy, value)
            collector.update_policy_weights_(step=100 * number)
            assert statuses(report_of(updater)) == ["synced", "synced"]
            assert seen(collect(collector)) == {(value, number, number)}
        assert [version.step for version in updater.registry.versions()] == [100, 200, 300]
        collector.update_policy_weights_()
        assert not report_of(updater).published
        assert statuses(report_of(updater)) == ["current", "current"]
        assert {held.matches for held in updater.probe().values()} == {True}
        names = [(holding.worker, holding.version) for holding in updater.registry.holdings()]
        assert names == [("collector-0", 3), ("collector-1", 3)]


@pytest.mark.parametrize("kind", ["module", "tensordict", "state dict", "keyword weights", "keyword policy"])
def test_given_weights_are_published_and_the_live_ones_are_left_alone(
    tmp_path: Path, collector: Any, kind: str
) -> None:
    """The documented call forms; with the stock updater a module kills every worker."""
    updater, policy = steer(tmp_path, collector)
    other = make_policy(7.0)
    with updater:
        train(policy, 1.0)
        collector.update_policy_weights_()
        match kind:
            case "module":
                collector.update_policy_weights_(other)
            case "tensordict":
                collector.update_policy_weights_(weights_of(other))
            case "state dict":
                collector.update_policy_weights_(other.state_dict())
            case "keyword weights":
                collector.update_policy_weights_(weights=weights_of(other))
            case _:
                collector.update_policy_weights_(policy=other)
        assert statuses(report_of(updater)) == ["synced", "synced"]
        assert seen(collect(collector)) == {(7.0, 2, 2)}
        assert policy.module.bias.item() == 1.0


def test_worker_ids_and_version_mean_what_they_say(tmp_path: Path, collector: Any) -> None:
    updater, policy = steer(tmp_path, collector)
    with updater:
        for value in (1.0, 2.0):
            collector.update_policy_weights_(train(policy, value))
        collector.update_policy_weights_(version=1, worker_ids=1)
        assert list(report_of(updater).workers) == [1]
        assert [value_in(actor) for actor in collector.remote_collectors] == [2.0, 1.0]
        train(policy, 3.0)
        collector.update_policy_weights_(worker_ids=[0])
        assert [value_in(actor) for actor in collector.remote_collectors] == [3.0, 1.0]
        collector.update_policy_weights_(version=1)
        assert [value_in(actor) for actor in collector.remote_collectors] == [1.0, 1.0]
        assert updater.registry.head().number == 3
        collector.update_policy_weights_()  # the targets were never changed
        assert [value_in(actor) for actor in collector.remote_collectors] == [3.0, 3.0]
        with pytest.raises(NotFoundError, match="12"):
            collector.update_policy_weights_(version=12)
        with pytest.raises(NotFoundError, match="worker 2"):
            collector.update_policy_weights_(worker_ids=2)
        with pytest.raises(ValueError, match="give one of them"):
            collector.update_policy_weights_(policy, version=1)
        with pytest.raises(ValueError, match="by worker index"):
            collector.update_policy_weights_({0: policy.state_dict(), 1: policy.state_dict()})
        assert updater.registry.head().number == 3


def test_the_interval_passes_by_what_the_collectors_loop_asks_for_and_nothing_else(
    tmp_path: Path, collector: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collector, "max_weight_update_interval", 2)
    updater, policy = steer(tmp_path, collector)
    with updater:
        assert updater.max_interval == 2
        told = []
        batches = iter(collector)
        for value in range(1, 8):
            train(policy, float(value))
            next(batches)
            told.append(statuses(report_of(updater))[0])
        # The iteration itself began with the first push, so that no frame is played without a version.
        assert told == ["current", "skipped", "skipped", "synced", "skipped", "skipped", "synced"]
        for value in (8.0, 9.0):
            train(policy, value)
            collector.update_policy_weights_()
            assert statuses(report_of(updater)) == ["synced", "synced"]
            assert [value_in(actor) for actor in collector.remote_collectors] == [value, value]


def test_weights_that_do_not_fit_change_no_worker_and_kill_none(tmp_path: Path, collector: Any) -> None:
    updater, policy = steer(tmp_path, collector)
    with updater:
        collector.update_policy_weights_(train(policy, 1.0))
        with pytest.warns(SyncWarning, match="bias"):
            collector.update_policy_weights_(make_policy(5.0, width=2), restructure=True)
        assert statuses(report_of(updater)) == ["failed", "failed"]
        assert "bias" in report_of(updater).workers[0].error
        assert seen(collect(collector)) == {(1.0, 1, 1)}
        collector.update_policy_weights_(train(policy, 3.0), restructure=True)
        assert seen(collect(collector)) == {(3.0, 3, 3)}


def test_an_exception_in_a_collector_arrives_as_itself_and_its_actor_lives(
    tmp_path: Path, collector: Any
) -> None:
    updater, policy = steer(tmp_path, collector)
    with updater:
        collector.update_policy_weights_(train(policy, 1.0))
        actor = collector.remote_collectors[0]
        before = find_incarnations({0: actor})
        with pytest.raises(AttributeError, match="no_such_attribute"):
            get(actor.cascade_execute.remote("no_such_attribute"))
        assert value_in(actor) == 1.0
        assert find_incarnations({0: actor}) == before


def test_a_rollback_here_or_elsewhere_moves_learner_and_workers(tmp_path: Path, collector: Any) -> None:
    updater, policy = steer(tmp_path, collector)
    with updater:
        for value in (1.0, 2.0, 3.0):
            train(policy, value)
            collector.update_policy_weights_()
        updater.rollback(1, reason="collapsed")
        assert policy.module.bias.item() == 1.0
        assert seen(collect(collector)) == {(1.0, 4, 4)}
        with Registry.open(tmp_path) as elsewhere:
            elsewhere.rollback(2)
        collector.update_policy_weights_()
        assert report_of(updater).adopted
        assert policy.module.bias.item() == 2.0
        assert seen(collect(collector)) == {(2.0, 5, 5)}


def test_a_pinned_worker_stays_where_it_is_while_the_loop_updates(
    tmp_path: Path, collector: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collector, "update_after_each_batch", True)
    updater, policy = steer(tmp_path, collector, names=["rollout", "evaluator"])
    with updater:
        collector.update_policy_weights_(train(policy, 1.0))
        updater.pin(1, 1)
        batches = iter(collector)
        for value in (2.0, 3.0):
            train(policy, value)
            assert seen(next(batches)) == {(value, int(value), int(value)), (1.0, 1, 1)}
        updater.unpin(1)
        assert seen(next(batches)) == {(3.0, 3, 3)}


def test_a_restarted_actor_is_unknown_until_the_next_update_and_its_frames_say_so(
    tmp_path: Path, collector: Any
) -> None:
    """What stock TorchRL does here: old weights under the new stamp, without an error."""
    updater, policy = steer(tmp_path, collector)
    with updater:
        collector.update_policy_weights_(train(policy, 6.0))
        actor = collector.remote_collectors[1]
        (life,) = find_incarnations({0: actor}).values()
        actor.__ray_call__.remote(lambda _: os._exit(1))
        wait_until(
            lambda: isinstance(now := find_incarnations({0: actor}).get(0), str) and now != life,
            "the actor to return",
        )
        assert seen(collect(collector)) == {(6.0, 1, 1), (0.0, 0, 0)}
        collector.update_policy_weights_()
        assert statuses(report_of(updater)) == ["current", "synced"]
        assert seen(collect(collector)) == {(6.0, 1, 1)}
        assert ends(updater.registry, "collector-1") == [(1, "lost"), (1, None)]


def test_the_next_run_takes_the_collector_over_and_goes_on_from_the_same_log(
    tmp_path: Path, collector: Any
) -> None:
    first, policy = steer(tmp_path, collector)
    with first:
        collector.update_policy_weights_(train(policy, 1.0))
        second = RayCollectorWeightUpdater(policy, registry=Registry.open(tmp_path))
        with pytest.raises(InUseError, match="collector-0"):
            collector.weight_updater = second
    second, policy = steer(tmp_path, collector)
    with second:
        collector.update_policy_weights_(train(policy, 2.0))
        assert statuses(report_of(second)) == ["synced", "synced"]
        assert seen(collect(collector)) == {(2.0, 2, 2)}
        with pytest.raises(InUseError, match="registered"):
            second.register_collector(borrow(start_asynchronous))


def test_hooks_of_torchrls_updaters_are_called_after_each_update(tmp_path: Path, collector: Any) -> None:
    updater, policy = steer(tmp_path, collector)
    held: list[int | None] = []
    updater.register_post_hook(lambda: held.append(report_of(updater).version))
    with updater:
        for value in (1.0, 2.0):
            train(policy, value)
            collector.update_policy_weights_()
        updater.push_weights(policy)
        assert held == [1, 2, 2]
        assert updater.collectors == [collector]
        with pytest.raises(TypeError, match="publishes the next one"):
            updater.increment_version()


def test_in_asynchronous_mode_the_worker_that_gave_a_batch_is_the_one_that_is_updated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `policy_factory=`, and stamps by our own hook. In the original the next worker was updated, or none."""
    collector = borrow(start_asynchronous)
    updater, policy = steer(tmp_path, collector)
    monkeypatch.setattr(collector, "max_weight_update_interval", 0)
    with updater:
        collector.update_policy_weights_(train(policy, 1.0))
        batches = iter(collector)
        holds = {0: 1, 1: 1}
        told_apart = 0
        (stamp,) = {version for _, version, _ in seen(next(batches))}
        for value in range(2, 14):
            train(policy, float(value))
            batch = next(batches)  # first updates the worker that gave the one before
            (worker,) = report_of(updater).workers
            assert holds[worker] == stamp
            told_apart += len(set(holds.values())) - 1
            holds[worker] = value
            ((action, stamp, _),) = seen(batch)
            assert action == float(stamp)
        assert told_apart > 0


def test_a_manual_update_in_asynchronous_mode_reaches_busy_workers_between_their_rollouts(
    tmp_path: Path,
) -> None:
    collector = borrow(start_asynchronous)
    updater, policy = steer(tmp_path, collector)
    with updater:
        collector.update_policy_weights_(train(policy, 4.0))
        assert statuses(report_of(updater)) == ["synced", "synced"]
        batches = iter(collector)
        assert seen(next(batches)) == {(4.0, 1, 1)}
        collector.update_policy_weights_(train(policy, 5.0))
        for _ in range(6):
            assert seen(next(batches)) <= {(4.0, 1, 1), (5.0, 2, 2)}
        updater.rollback(1)
        assert policy.module.bias.item() == 4.0
        last = [seen(next(batches)) for _ in range(3)][-1]
        assert last == {(4.0, 3, 3)}


@pytest.mark.long
def test_all_processes_of_a_nested_collector_hold_what_its_receipt_says(tmp_path: Path) -> None:
    collector = borrow(start_nested)
    updater, policy = steer(tmp_path, collector)
    with updater:
        for number, value in enumerate((1.0, 2.0), start=1):
            train(policy, value)
            collector.update_policy_weights_()
            assert statuses(report_of(updater)) == ["synced"]
            batch = collect(collector)
            assert batch.batch_size[1] == 2
            assert seen(batch) == {(value, number, number)}
        collector.update_policy_weights_(version=1)
        assert seen(collect(collector)) == {(1.0, 1, 1)}
        updater.rollback(1)
        assert statuses(report_of(updater)) == ["current"]  # relabelled, in every process
        assert seen(collect(collector)) == {(1.0, 3, 3)}
        assert updater.probe()[0].matches
        (actor,) = collector.remote_collectors
        get(actor.map_fn.remote("policy.module.bias.data.fill_", [(9.0,), (1.0,)]))
        found = updater.probe()[0]
        assert (found.matches, found.drift) == (False, ("module.bias",))
        collector.update_policy_weights_()
        assert seen(collect(collector)) == {(1.0, 3, 3)}
        with pytest.warns(SyncWarning, match="bias"):
            collector.update_policy_weights_(make_policy(5.0, width=2), restructure=True)
        assert statuses(report_of(updater)) == ["failed"]
        assert seen(collect(collector)) == {(1.0, 3, 3)}


@pytest.mark.long
def test_a_nested_collector_that_lost_a_process_is_unknown_and_a_new_actor_gets_its_target(
    tmp_path: Path,
) -> None:
    collector = borrow(start_nested)
    updater, policy = steer(tmp_path, collector)
    (actor,) = collector.remote_collectors
    with updater:
        collector.update_policy_weights_(train(policy, 1.0))
        first, *_ = get(actor.__ray_call__.remote(lambda nested: [each.pid for each in nested.procs]))
        os.kill(first, signal.SIGKILL)
        train(policy, 2.0)
        with pytest.warns(SyncWarning, match="collector-0: failed"):
            collector.update_policy_weights_()
        assert statuses(report_of(updater)) == ["failed"]
        assert report_of(updater).workers[0].held is None
        assert status_of(updater.registry, "collector-0").held is None
        life = find_incarnations({0: actor})
        actor.__ray_call__.remote(lambda _: os._exit(1))
        wait_until(lambda: find_incarnations({0: actor}) not in (life, {}), "the actor to end")
        collector.update_policy_weights_()
        assert statuses(report_of(updater)) == ["synced"]
        assert seen(collect(collector)) == {(2.0, 2, 2)}


def test_a_collector_whose_processes_never_pause_is_refused_with_the_reason() -> None:
    collector = MultiAsyncCollector.__new__(MultiAsyncCollector)
    push = Push(("registry", "default"), "run", 1, "d", "d", 1, 0, "policy")
    receipt = receive_in_collector(collector, push)
    assert isinstance(receipt, Receipt)
    assert receipt.outcome == "kept"
    assert "MultiSyncCollector" in receipt.error
    found: Any = receive_in_collector(collector, Probe(("registry", "default"), "policy", None))
    assert "MultiSyncCollector" in found.error


def test_a_push_that_the_collectors_reject_from_the_first_on_stops_the_loop(
    tmp_path: Path, collector: Any
) -> None:
    """Nothing else would: TorchRL drops the report, and the loop would train on frames of the initial weights."""
    updater, _ = steer(tmp_path, collector, policy=make_policy(1.0, width=2))
    with updater:
        before = [value_in(actor) for actor in collector.remote_collectors]
        with pytest.raises(SyncError, match=r"(?s)collector-1.*bias"):
            collector.update_policy_weights_()
        assert [value_in(actor) for actor in collector.remote_collectors] == before


def test_whoever_asks_for_it_gets_every_failure_as_an_error(tmp_path: Path, collector: Any) -> None:
    updater, policy = steer(tmp_path, collector, on_failure="raise")
    with updater:
        collector.update_policy_weights_(train(policy, 1.0))
        with pytest.raises(SyncError, match="2 of 2 workers"):
            collector.update_policy_weights_(make_policy(5.0, width=2), restructure=True)
        assert seen(collect(collector)) == {(1.0, 1, 1)}
    with pytest.raises(ValueError, match="on_failure"):
        RayCollectorWeightUpdater(policy, registry=updater.registry, on_failure="print")  # type: ignore[arg-type]

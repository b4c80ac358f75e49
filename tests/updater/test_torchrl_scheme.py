"""TorchRL's RayCollector with the updater as one of its `weight_sync_schemes=`, the form that TorchRL keeps."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch

from tests.updater.actors import get, kill, statuses
from tests.updater.torchrl_parts import (
    collect,
    make_policy,
    report_of,
    seen,
    start,
    train,
    value_in,
    weights_of,
)
from weightledger.registry import Registry
from weightledger.registry.errors import InUseError, NotFoundError
from weightledger.updater import SyncWarning
from weightledger.updater.torchrl import RayCollectorWeightSyncScheme, RayCollectorWeightUpdater

pytestmark = [pytest.mark.usefixtures("ray_cluster"), pytest.mark.slow, pytest.mark.timeout(400)]


class Running(NamedTuple):
    collector: Any
    updater: RayCollectorWeightUpdater
    scheme: RayCollectorWeightSyncScheme
    policy: Any


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, ray_cluster: None) -> Iterator[Running]:
    """A collector that got its scheme when it was made, as TorchRL wants it; the tests share its log."""
    policy = make_policy()
    updater = RayCollectorWeightUpdater(policy, registry=Registry.open(tmp_path_factory.mktemp("scheme")))
    scheme = RayCollectorWeightSyncScheme(updater)
    collector = start(2, policy=policy, sync=True, weight_sync_schemes={"policy": scheme})
    yield Running(collector, updater, scheme, policy)
    collector.shutdown()


def head(running: Running) -> int:
    return running.updater.registry.head().number


def test_update_policy_weights_publishes_and_syncs_all_workers(running: Running) -> None:
    for value in (10.0, 20.0):
        train(running.policy, value)
        running.collector.update_policy_weights_(metrics={"reward": value})
        assert statuses(report_of(running.updater)) == ["synced", "synced"]
        assert seen(collect(running.collector)) == {(value, head(running), head(running))}
        assert running.updater.registry.head().metrics == {"reward": value}
    before = head(running)
    running.collector.update_policy_weights_()
    assert head(running) == before
    assert statuses(report_of(running.updater)) == ["current", "current"]


@pytest.mark.parametrize("as_module", [True, False], ids=["module", "tensordict"])
def test_given_weights_are_published_and_the_live_ones_are_left_alone(
    running: Running, as_module: bool
) -> None:
    train(running.policy, 1.0)
    other = make_policy(7.0 + as_module)
    running.collector.update_policy_weights_(other if as_module else weights_of(other))
    assert seen(collect(running.collector)) == {(7.0 + as_module, head(running), head(running))}
    assert running.policy.module.bias.item() == 1.0


def test_worker_ids_and_version_mean_what_they_say(running: Running) -> None:
    """Left to itself TorchRL drops `version=` on its way to a scheme, and would publish the live weights instead."""
    collector, policy = running.collector, running.policy
    first = train(policy, 100.0)
    collector.update_policy_weights_(first)
    wanted = head(running)
    collector.update_policy_weights_(train(policy, 200.0))
    train(policy, 300.0)
    collector.update_policy_weights_(version=wanted, worker_ids=1)
    assert [value_in(actor) for actor in collector.remote_collectors] == [200.0, 100.0]
    assert head(running) == wanted + 1
    collector.update_policy_weights_(worker_ids=[0])
    assert [value_in(actor) for actor in collector.remote_collectors] == [300.0, 100.0]
    collector.update_policy_weights_()
    assert [value_in(actor) for actor in collector.remote_collectors] == [300.0, 300.0]
    with pytest.raises(NotFoundError, match="9999"):
        collector.update_policy_weights_(version=9999)
    with pytest.raises(KeyError, match="critic"):
        collector.update_policy_weights_(policy, model_id="critic")


def test_the_interval_passes_by_what_the_collectors_loop_asks_for_and_nothing_else(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    collector, updater = running.collector, running.updater
    monkeypatch.setattr(collector, "update_after_each_batch", True)
    monkeypatch.setattr(updater, "max_interval", 1)
    collector.update_policy_weights_(train(running.policy, 0.5))
    told, batches = [], iter(collector)
    for value in (1.5, 2.5, 3.5, 4.5):
        train(running.policy, value)
        next(batches)
        told.append(statuses(report_of(updater))[0])
    assert told == ["skipped", "synced", "skipped", "synced"]
    for value in (5.5, 6.5):
        train(running.policy, value)
        collector.update_policy_weights_()
        assert [value_in(actor) for actor in collector.remote_collectors] == [value, value]


def test_a_rollback_moves_learner_and_workers(running: Running) -> None:
    running.collector.update_policy_weights_(train(running.policy, 41.0))
    good = head(running)
    train(running.policy, 42.0)
    running.collector.update_policy_weights_()
    running.updater.rollback(good, reason="collapsed")
    assert running.policy.module.bias.item() == 41.0
    assert seen(collect(running.collector)) == {(41.0, good + 2, good + 2)}
    with Registry.open(running.updater.registry.location) as elsewhere:
        elsewhere.rollback(good + 1)
    running.collector.update_policy_weights_()
    assert running.policy.module.bias.item() == 42.0
    assert seen(collect(running.collector)) == {(42.0, good + 3, good + 3)}


def test_weights_that_do_not_fit_and_exceptions_kill_no_actor(running: Running) -> None:
    """After such a push the stock scheme's next good push fails as well."""
    train(running.policy, 8.0)
    running.collector.update_policy_weights_()
    with pytest.warns(SyncWarning, match="2 of 2 workers"):
        running.collector.update_policy_weights_(make_policy(5.0, width=2), restructure=True)
    assert statuses(report_of(running.updater)) == ["failed", "failed"]
    with pytest.raises(AttributeError, match="no_such_attribute"):
        get(running.collector.remote_collectors[1].cascade_execute.remote("no_such_attribute"))
    running.collector.update_policy_weights_(train(running.policy, 9.0), restructure=True)
    assert statuses(report_of(running.updater)) == ["synced", "synced"]
    assert seen(collect(running.collector)) == {(9.0, head(running), head(running))}


def test_an_actors_copy_of_the_scheme_holds_neither_registry_nor_learner(running: Running) -> None:
    copy = pickle.loads(pickle.dumps(running.scheme))
    assert copy.updater is None
    assert not any(isinstance(value, (Registry, torch.Tensor)) for value in vars(copy).values())


def test_a_dead_actor_is_told_and_the_other_is_updated_and_the_end_closes_the_updater(
    running: Running,
) -> None:
    """Last, as the collector does not outlive it."""
    kill(running.collector.remote_collectors[1])
    train(running.policy, 77.0)
    with pytest.warns(SyncWarning, match="collector-1: dead"):
        running.collector.update_policy_weights_()
    assert statuses(report_of(running.updater)) == ["synced", "dead"]
    assert value_in(running.collector.remote_collectors[0]) == 77.0
    running.collector.shutdown()
    with pytest.raises(InUseError, match="closed"):
        running.updater.update_weights()

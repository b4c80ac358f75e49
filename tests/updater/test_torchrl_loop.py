"""TorchRL's usual loop, `for batch in collector: learn(); collector.update_policy_weights_()`, from its first batch.

What acted is read off the frames (an action is the policy's bias) and hashed in the actors by the test itself.
"""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchrl.collectors import Collector, MultiAsyncCollector, RayWeightUpdater
from torchrl.envs import ParallelEnv

from tests.registry.helpers import in_child
from tests.updater.actors import ends, get, status_of, statuses
from tests.updater.torchrl_parts import (
    TinyEnv,
    borrow,
    collect,
    make_policy,
    report_of,
    seen,
    start,
    start_asynchronous,
    start_nested,
    start_synchronous,
    steer,
    train,
    value_in,
    weights_of,
)
from weightledger.registry import Registry
from weightledger.registry.errors import ConflictError
from weightledger.updater import RayRemoteWeightUpdater, SyncWarning
from weightledger.updater.torchrl import RayCollectorWeightSyncScheme, RayCollectorWeightUpdater

pytestmark = [pytest.mark.usefixtures("ray_cluster"), pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture
def collector() -> Any:
    return borrow(start_synchronous)


def fingerprint(module: nn.Module) -> str:
    """Hash what a module really holds, in the order of its names."""
    told = blake2b()
    for name, tensor in sorted(module.state_dict().items()):
        told.update(name.encode() + tensor.contiguous().numpy().tobytes())
    return told.hexdigest()


def in_actor(collector: Any) -> str:
    return fingerprint(collector.policy)


def in_actors(collector: Any) -> set[str]:
    return set(get([actor.__ray_call__.remote(in_actor) for actor in collector.remote_collectors]))


def publish(folder: Path, weights: Any) -> None:
    with Registry.open(folder) as registry:
        registry.publish(weights)


def write_past(actor: Any, value: float) -> None:
    """Do what TorchRL's own updaters do in an actor."""
    get(actor.update_policy_weights_.remote(policy_or_weights=weights_of(make_policy(value))))


# ------------------------------------------------------------------ the first batch


def test_the_first_batch_of_the_usual_loop_is_played_by_a_version(tmp_path: Path, collector: Any) -> None:
    updater, policy = steer(tmp_path, collector, policy=make_policy(0.5))
    told = []
    with updater:
        for number, batch in enumerate(collector, start=1):
            told.append(seen(batch))
            assert in_actors(collector) == {fingerprint(policy)}
            train(policy, number + 0.5)
            collector.update_policy_weights_()
            if number == 3:
                break
        assert told == [{(0.5, 1, 1)}, {(1.5, 2, 2)}, {(2.5, 3, 3)}]
        assert [version.number for version in updater.registry.versions()] == [1, 2, 3, 4]


def test_the_first_batches_of_an_asynchronous_collector_are_played_by_a_version(tmp_path: Path) -> None:
    collector = borrow(start_asynchronous)
    updater, policy = steer(tmp_path, collector, policy=make_policy(0.5))
    with updater:
        batches = iter(collector)
        for _ in range(3):
            assert seen(next(batches)) == {(0.5, 1, 1)}
        collector.update_policy_weights_(train(policy, 1.5))
        assert [seen(next(batches)) for _ in range(5)][-1] == {(1.5, 2, 2)}


def test_the_first_batch_of_a_nested_collector_is_played_by_a_version(tmp_path: Path) -> None:
    collector = borrow(start_nested)
    updater, _ = steer(tmp_path, collector, policy=make_policy(0.5))
    with updater:
        assert seen(collect(collector)) == {(0.5, 1, 1)}


@pytest.mark.filterwarnings("ignore:The policy is not an nn.Module:UserWarning")
def test_the_first_batch_of_a_collector_with_a_scheme_and_a_factory_is_played_by_a_version(
    tmp_path: Path,
) -> None:
    policy = make_policy(0.5)
    updater = RayCollectorWeightUpdater(policy, registry=Registry.open(tmp_path))
    scheme = RayCollectorWeightSyncScheme(updater)
    collector = start(1, policy_factory=make_policy, sync=True, weight_sync_schemes={"policy": scheme})
    told = []
    for number, batch in enumerate(collector, start=1):
        told.append(seen(batch))
        train(policy, number + 0.5)
        collector.update_policy_weights_()
        if number == 2:
            break
    assert told == [{(0.5, 1, 1)}, {(1.5, 2, 2)}]
    collector.shutdown()


def test_an_update_before_the_first_batch_is_the_one_that_counts(tmp_path: Path, collector: Any) -> None:
    """What was trained since stays unpublished until the loop says so."""
    updater, policy = steer(tmp_path, collector)
    with updater:
        collector.update_policy_weights_(train(policy, 1.0))
        collector.update_policy_weights_(train(policy, 2.0))
        collector.update_policy_weights_(version=1, worker_ids=1)
        train(policy, 3.0)
        assert seen(collect(collector)) == {(2.0, 2, 2), (1.0, 1, 1)}
        assert updater.registry.head().number == 2


def test_a_worker_that_nothing_is_known_of_is_brought_to_its_target_before_the_next_iteration(
    tmp_path: Path, collector: Any
) -> None:
    updater, policy = steer(tmp_path, collector)
    with updater:
        collector.update_policy_weights_(train(policy, 1.0), worker_ids=0)
        train(policy, 2.0)
        assert seen(collect(collector)) == {(1.0, 1, 1)}
        assert statuses(report_of(updater)) == ["synced"]
        assert updater.registry.head().number == 1


def test_a_head_that_another_run_published_stops_the_loop_before_its_first_batch(
    tmp_path: Path, collector: Any
) -> None:
    before = in_actors(collector)
    updater, _ = steer(tmp_path, collector, policy=make_policy(0.5))
    with updater:
        in_child(publish, tmp_path, make_policy(9.0).state_dict())
        # An error of an iteration ends the collector: the shared one is spared that.
        with pytest.raises(ConflictError, match="adopt"):
            updater._begin(collector)
        assert in_actors(collector) == before
        assert updater.adopt().number == 1
        assert seen(collect(collector)) == {(9.0, 1, 1)}


# ------------------------------------------------------------------ writes past the updater


def test_a_checkpoint_loaded_into_the_collector_is_undone_by_the_next_update(
    tmp_path: Path, collector: Any
) -> None:
    """TorchRL restores its own stamp with it, the number of weights that a worker may never have had."""
    updater, policy = steer(tmp_path, collector)
    with updater:
        collector.update_policy_weights_(train(policy, 1.0))
        checkpoint = collector.state_dict()
        collector.update_policy_weights_(train(policy, 2.0))
        collector.load_state_dict(checkpoint)
        assert [value_in(actor) for actor in collector.remote_collectors] == [1.0, 1.0]
        assert status_of(updater.registry, "collector-0").held is None
        assert ends(updater.registry, "collector-1") == [(1, "replaced"), (2, "drifted")]
        collector.update_policy_weights_()
        assert statuses(report_of(updater)) == ["synced", "synced"]
        assert not report_of(updater).published
        assert in_actors(collector) == {fingerprint(policy)}
        assert seen(collect(collector)) == {(2.0, 2, 2)}


def test_after_a_checkpoint_was_loaded_the_next_iteration_plays_the_target(
    tmp_path: Path, collector: Any
) -> None:
    updater, policy = steer(tmp_path, collector)
    with updater:
        collector.update_policy_weights_(train(policy, 1.0))
        state = OrderedDict(collector.state_dict()[0])
        state["policy_state_dict"] = {
            name: torch.full_like(tensor, 7.0) for name, tensor in state["policy_state_dict"].items()
        }
        collector.load_state_dict(state)
        assert [value_in(actor) for actor in collector.remote_collectors] == [7.0, 7.0]
        assert seen(collect(collector)) == {(1.0, 1, 1)}


def test_weights_that_torchrl_writes_into_an_actor_are_stamped_unknown_and_replaced_by_the_next_update(
    tmp_path: Path, collector: Any
) -> None:
    updater, policy = steer(tmp_path, collector)
    with updater:
        for value in (1.0, 2.0):
            collector.update_policy_weights_(train(policy, value))
        write_past(collector.remote_collectors[1], 7.0)
        assert seen(collect(collector)) == {(2.0, 2, 2), (7.0, 0, 0)}
        found = updater.probe()[1]
        assert (found.matches, found.drift) == (False, ("module.bias",))
        collector.update_policy_weights_()
        assert statuses(report_of(updater)) == ["current", "synced"]
        assert in_actors(collector) == {fingerprint(policy)}
        assert seen(collect(collector)) == {(2.0, 2, 2)}


def test_frames_of_unknown_weights_make_the_next_update_push_without_any_probe(
    tmp_path: Path, collector: Any
) -> None:
    updater, policy = steer(tmp_path, collector)
    with updater:
        collector.update_policy_weights_(train(policy, 2.0))
        write_past(collector.remote_collectors[0], 7.0)
        batches = iter(collector)
        assert seen(next(batches)) == {(7.0, 0, 0), (2.0, 1, 1)}
        collector.update_policy_weights_()
        assert statuses(report_of(updater)) == ["synced", "current"]
        assert in_actors(collector) == {fingerprint(policy)}
        assert seen(next(batches)) == {(2.0, 1, 1)}


def test_frames_of_unknown_weights_in_asynchronous_mode_do_so_too(tmp_path: Path) -> None:
    """With our own hook for stamps, in place of TorchRL's."""
    collector = borrow(start_asynchronous)
    updater, policy = steer(tmp_path, collector)
    with updater:
        collector.update_policy_weights_(train(policy, 2.0))
        for actor in collector.remote_collectors:
            write_past(actor, 7.0)
        batches = iter(collector)
        assert seen(next(batches)) == {(7.0, 0, 0)}
        collector.update_policy_weights_()
        assert statuses(report_of(updater)) == ["synced", "synced"]
        assert in_actors(collector) == {fingerprint(policy)}
        assert [seen(next(batches)) for _ in range(4)][-1] == {(2.0, 1, 1)}


# ------------------------------------------------------------------ what is refused, and when


def make(folder: Path, **options: Any) -> Any:
    """Make a small collector with an updater of its own."""
    updater = RayCollectorWeightUpdater(make_policy(), registry=Registry.open(folder))
    return start(1, policy=make_policy(), weight_updater=updater, **options)


def test_a_collector_that_no_push_can_reach_is_refused_when_it_is_made(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"MultiAsyncCollector .*expected Collector .*MultiSyncCollector"):
        make(tmp_path, collector_class=MultiAsyncCollector, num_workers_per_collector=2)


def test_it_is_refused_with_a_scheme_as_well(tmp_path: Path) -> None:
    scheme = RayCollectorWeightSyncScheme(
        RayCollectorWeightUpdater(make_policy(), registry=Registry.open(tmp_path))
    )
    with pytest.raises(TypeError, match="MultiAsyncCollector"):
        start(
            1,
            policy=make_policy(),
            weight_sync_schemes={"policy": scheme},
            collector_class="async",
            num_workers_per_collector=2,
        )


@pytest.mark.filterwarnings("ignore:Using WeightUpdaterBase is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The env passed to Collector is missing transforms:FutureWarning")
def test_a_collector_without_actors_is_refused(tmp_path: Path) -> None:
    updater = RayCollectorWeightUpdater(make_policy(), registry=Registry.open(tmp_path))
    with pytest.raises(TypeError, match="expected a RayCollector, found a Collector"):
        Collector(TinyEnv, make_policy(), frames_per_batch=10, total_frames=10, weight_updater=updater)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("kind", ["core", "scheme as updater", "updater as scheme"])
def test_another_class_where_the_collector_wants_its_own_is_refused_with_the_right_one_named(
    tmp_path: Path, kind: str, collector: Any
) -> None:
    policy, registry = make_policy(), Registry.open(tmp_path)
    if kind == "core":
        actors = collector.remote_collectors
        with RayRemoteWeightUpdater(policy, actors, registry=registry) as wrong:
            with pytest.raises(TypeError, match=r"use .*\.RayCollectorWeightUpdater"):
                start(1, policy=policy, weight_updater=wrong)
            with pytest.raises(TypeError, match=r"use .*\.RayCollectorWeightUpdater"):
                collector.weight_updater = wrong
        assert registry.versions() == []  # TorchRL called it, and nothing was published by that
        return
    updater = RayCollectorWeightUpdater(policy, registry=registry)
    scheme = RayCollectorWeightSyncScheme(updater)
    if kind == "scheme as updater":
        with pytest.raises(TypeError, match="weight_sync_schemes="):
            start(1, policy=policy, weight_updater=scheme)
    else:
        with pytest.raises(TypeError, match=r"RayCollectorWeightSyncScheme\(updater\)"):
            start(1, policy=policy, weight_sync_schemes={"policy": updater})


def test_an_updater_that_no_collector_took_says_so_when_it_is_closed(tmp_path: Path) -> None:
    """RayCollector drops `weight_updater=` without a word where it is given schemes, too."""
    updater = RayCollectorWeightUpdater(make_policy(), registry=Registry.open(tmp_path))
    with pytest.warns(SyncWarning, match="weight_sync_schemes="):
        updater.close()


def test_a_stock_updater_that_takes_the_place_of_ours_is_left_alone(tmp_path: Path, collector: Any) -> None:
    updater, policy = steer(tmp_path, collector)
    with updater:
        collector.weight_updater = RayWeightUpdater(weights_of(policy), collector.remote_collectors, 0)
        collect(collector)
        assert updater.registry.versions() == []


@pytest.mark.long
def test_environments_of_processes_are_stamped_from_the_first_batch_on(tmp_path: Path) -> None:
    """Where TorchRL cannot track versions itself, our hook stamps."""
    from weightledger.updater.torchrl import StampBatches

    policy = make_policy(0.5)
    # The first push waits until the actor has started its processes.
    updater = RayCollectorWeightUpdater(policy, registry=Registry.open(tmp_path), timeout=300.0)
    collector = start(
        1,
        policy=policy,
        sync=True,
        weight_updater=updater,
        collector_kwargs={},
        post_collect_hook=StampBatches(),
        create=lambda: ParallelEnv(2, TinyEnv),
    )
    assert seen(collect(collector)) == {(0.5, 1, 1)}
    collector.shutdown()
    updater.close()

"""Every frame says which version acted, and which frames an abandoned branch gave; in data as TorchRL keeps it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.data.replay_buffers.samplers import StalenessAwareSampler
from torchrl.envs.llm.transforms.policy_version import PolicyVersion

from tests.updater.torchrl_parts import (
    borrow,
    collect,
    make_policy,
    report_of,
    seen,
    start_asynchronous,
    start_synchronous,
    steer,
    train,
)
from weightledger.registry import Registry
from weightledger.updater.torchrl import StampBatches, lineage_mask
from weightledger.updater.torchrl.worker import stamp

pytestmark = [pytest.mark.usefixtures("ray_cluster"), pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture
def collector() -> Any:
    return borrow(start_synchronous)


def test_every_frame_carries_the_version_that_acted_through_all_that_moves_a_worker(
    tmp_path: Path, collector: Any
) -> None:
    """Under both keys, the first frame after each move included: pushes, versions by name, rollbacks, relabels."""
    updater, policy = steer(tmp_path, collector)
    batches = iter(collector)
    frames: list[tuple[float, int, int]] = []
    with updater:
        for value in (1.0, 2.0, 3.0):
            train(policy, value)
            collector.update_policy_weights_()
            frames += seen(next(batches))
        collector.update_policy_weights_(version=2, worker_ids=0)
        frames += seen(next(batches))
        updater.rollback(2)
        # One worker held that content already: it was sent no bytes, and yet stamps the new number.
        assert {outcome.status for outcome in report_of(updater).workers.values()} == {"current", "synced"}
        frames += seen(next(batches))
        train(policy, 5.0)
        collector.update_policy_weights_()
        frames += seen(next(batches))
        acted = {number: updater.registry.load(number)["module.bias"].item() for number in range(1, 6)}
    assert {(action, root, following) for action, root, following in frames} == {
        (acted[number], number, number) for number in range(1, 6)
    }


def test_the_hook_stamps_batches_of_collectors_that_do_not_track_versions(tmp_path: Path) -> None:
    collector = borrow(start_asynchronous)
    updater, policy = steer(tmp_path, collector)
    with updater:
        for value in (1.0, 2.0, 3.0):
            collector.update_policy_weights_(train(policy, value))
        batches = iter(collector)
        batch = [next(batches) for _ in range(4)][-1]
        assert seen(batch) == {(3.0, 3, 3)}
        assert batch["policy_version"].dtype == torch.int64
        assert batch["next", "policy_version"].shape == batch.batch_size


def test_the_hook_writes_into_a_batch_that_a_process_reuses_and_calls_the_hook_behind_it() -> None:
    told = []
    hook = StampBatches(then=lambda batch: told.append(batch["policy_version"].tolist()))
    batch = TensorDict({"action": torch.zeros(3, 1), "next": {"reward": torch.zeros(3, 1)}}, [3])
    hook(batch)
    view = batch["next", "policy_version"]
    batch.lock_()
    hook.version = 7
    hook(batch)
    assert told == [[0, 0, 0], [7, 7, 7]]
    assert view.tolist() == [7, 7, 7]
    assert batch.is_locked


def test_trackers_that_name_versions_by_strings_get_the_number_as_one() -> None:
    class Collecting:
        policy_version_tracker = PolicyVersion("uuid")
        _carrier = TensorDict({"policy_version": torch.zeros(2)}, [2])

    stamp(Collecting, 12)
    assert Collecting.policy_version_tracker.version == "12"
    assert list(Collecting._carrier["policy_version"]) == ["12", "12"]


def test_the_staleness_sampler_and_the_replay_buffer_work_on_the_stamps(
    tmp_path: Path, collector: Any
) -> None:
    """A rollback is a newer version, so that the sampler's difference of numbers never turns negative."""
    updater, policy = steer(tmp_path, collector)
    sampler = StalenessAwareSampler(max_staleness=1)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(200), sampler=sampler, batch_size=32)
    with updater:
        for value in (1.0, 2.0, 3.0):
            train(policy, value)
            collector.update_policy_weights_()
            buffer.extend(collect(collector).flatten())
            sampler.consumer_version = updater.registry.head().number
        assert set(buffer.sample()["policy_version"].tolist()) == {2, 3}
        updater.rollback(1)
        buffer.extend(collect(collector).flatten())
        sampler.consumer_version = updater.registry.head().number
        drawn: Any = torch.cat([buffer.sample() for _ in range(5)])
        assert set(drawn["policy_version"].tolist()) == {3, 4}
        # What the numbers cannot tell: v3 is one publish away, and abandoned.
        keep = updater.lineage_mask(drawn)
        assert set(drawn["policy_version"][keep].tolist()) == {4}


def test_frames_of_an_abandoned_branch_are_dropped_from_a_replay_buffer(
    tmp_path: Path, collector: Any
) -> None:
    updater, policy = steer(tmp_path, collector)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(200), batch_size=16)
    with updater:
        for value in (1.0, 2.0, 3.0):
            train(policy, value)
            collector.update_policy_weights_()
            buffer.extend(collect(collector).flatten())
        updater.rollback(1)
        buffer.extend(collect(collector).flatten())

        frames = buffer[:]
        keep = updater.lineage_mask(frames)
        buffer.empty()
        buffer.extend(frames[keep])

        assert len(buffer) == 40
        assert set(buffer[:]["policy_version"].tolist()) == {1, 4}
        assert set(buffer[:]["action"].flatten().tolist()) == {1.0}


@pytest.fixture
def branched(tmp_path: Path) -> Registry:
    """v4 restores v2, so v3 is abandoned; v5 goes on from there."""
    registry = Registry.open(tmp_path)
    for value in (1.0, 2.0, 3.0):
        registry.publish(make_policy(value))
    registry.rollback(2)
    registry.publish(make_policy(5.0))
    return registry


def test_the_mask_agrees_with_staleness_for_every_version_and_shape(branched: Registry) -> None:
    with branched:
        stamps = torch.arange(-1, 9)
        expected = [number in (1, 2, 4, 5) for number in stamps.tolist()]
        assert lineage_mask(stamps, branched).tolist() == expected
        assert [branched.staleness(number) is not None for number in range(1, 6)] == expected[2:7]
        grid = torch.tensor([[1, 3, 5], [3, 3, 4]])
        assert lineage_mask(grid, branched).tolist() == [[True, False, True], [False, False, True]]
        batch: Any = TensorDict({"next": {"policy_version": grid}, "mine": grid.flip(0)}, [2, 3])
        assert batch[lineage_mask(batch, branched)].batch_size == (3,)
        assert lineage_mask(batch, branched, key="mine").tolist() == [
            [False, False, True],
            [True, False, True],
        ]
        assert lineage_mask(TensorDict({"policy_version": grid}, [2, 3]), branched).sum() == 3
        assert lineage_mask(torch.empty(0, dtype=torch.int64), branched).shape == (0,)


def test_content_counts_so_frames_of_restored_weights_are_in_again(branched: Registry) -> None:
    with branched:
        assert lineage_mask(torch.tensor([3]), branched).tolist() == [False]
        branched.rollback(3)
        assert lineage_mask(torch.tensor([1, 2, 3, 4, 5, 6]), branched).tolist() == [
            True,
            True,
            True,
            True,
            False,
            True,
        ]


def test_a_mask_of_many_versions_is_one_question(tmp_path: Path) -> None:
    with Registry.open(tmp_path) as registry:
        stamps = torch.randint(0, 3_000, (100, 1_000))
        assert not lineage_mask(stamps, registry).any()
        registry.publish(make_policy(1.0))
        assert torch.equal(lineage_mask(stamps, registry), stamps == 1)


def test_a_batch_without_stamps_is_refused_with_what_to_do(branched: Registry) -> None:
    with branched:
        with pytest.raises(KeyError, match="StampBatches"):
            lineage_mask(TensorDict({"action": torch.zeros(2)}, [2]), branched)
        with pytest.raises(TypeError, match="whole numbers"):
            lineage_mask(torch.zeros(2), branched)

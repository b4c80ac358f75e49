"""Cases of RL training that concern workers; those that other files have are cited there."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from tensordict import TensorDict
from torch import nn

from tests.updater.actors import (
    Rollouts,
    borrow,
    check_truth,
    ends,
    fill,
    filled,
    get,
    learn,
    remote,
    status_of,
    statuses,
    steer,
)
from weightledger.registry import Registry
from weightledger.registry.errors import ConflictError, NotFoundError
from weightledger.updater import RayRemoteWeightUpdater

pytestmark = pytest.mark.usefixtures("ray_cluster")


def test_workers_that_are_left_behind_are_shown_with_their_lag(tmp_path: Path) -> None:
    """RL-01: five versions, the rollout workers forgotten; neighbour: only the evaluation worker synced."""
    workers = borrow(3)
    updater, _ = steer(tmp_path, workers, names=["rollout-0", "rollout-1", "eval-0"])
    with updater:
        learn(updater, 1.0)
        for value in (2.0, 3.0, 4.0, 5.0):
            learn(updater, value, worker_ids=[2])
        lag = {
            status.name: (status.held, status.target, status.staleness)
            for status in updater.registry.workers()
        }
        assert lag == {"eval-0": (5, 5, 0), "rollout-0": (1, 5, 4), "rollout-1": (1, 5, 4)}
        check_truth(updater)


def test_what_is_published_later_is_what_the_weights_were_at_the_call(tmp_path: Path) -> None:
    """RL-02 and RL-03: the optimizer steps, and the step counter moves on, right after `wait=False`."""
    width = 500_000
    workers = borrow(2, width=width)
    updater, _ = steer(tmp_path, workers)
    with updater:
        updater.policy_weights = filled(0.0, width)
        futures = []
        metadata: dict[str, Any] = {"step": 0}
        for value in range(1, 5):
            fill(updater.policy_weights, float(value))
            metadata["step"] = value
            futures.append(updater.update_weights(wait=False, step=value, metadata=metadata))
            fill(updater.policy_weights, -50.0)
            metadata["step"] = -50
        assert [future.result(60).version for future in futures] == [1, 2, 3, 4]
        for version in updater.registry.versions():
            weights = updater.registry.load(version)
            assert {float(tensor.min()) for tensor in weights.values()} == {float(version.number)}
            assert {float(tensor.max()) for tensor in weights.values()} == {float(version.number)}
            assert (version.step, version.metadata) == (version.number, {"step": version.number})
        assert get([worker.value.remote() for worker in workers]) == [4.0, 4.0]
        check_truth(updater)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_version_with_nan_or_infinity_reaches_no_worker_unless_allowed(
    tmp_path: Path, poison: float
) -> None:
    """RL-05: it is stored, flagged and refused; a mask that holds -inf on purpose can be let through."""
    workers = borrow(2)
    updater, learner = steer(tmp_path, workers)
    with updater:
        learn(updater, 1.0)
        with torch.no_grad():
            learner.bias[0] = poison
        report = updater.update_weights()
        assert report.published
        assert statuses(report) == ["refused", "refused"]
        assert "bias" in report.workers[0].error
        assert updater.registry.head().nonfinite == ("bias",)
        assert get([worker.value.remote() for worker in workers]) == [1.0, 1.0]
        assert [status.held for status in updater.registry.workers()] == [1, 1]
        check_truth(updater)
        updater.allow_nonfinite = ["weight*"]
        assert statuses(updater.sync()) == ["refused", "refused"]

        report = updater.rollback()

        assert report.ok
        assert updater.registry.head().restores == 1
        assert get([worker.value.remote() for worker in workers]) == [1.0, 1.0]
        check_truth(updater)
        updater.allow_nonfinite = ["bias"]
        assert statuses(updater.sync([0], version=2)) == ["synced"]
        check_truth(updater)


def test_a_version_is_a_number_in_the_log_and_not_a_count_of_calls(tmp_path: Path) -> None:
    """RL-09: v10 in three chunks, v10 twice, and a worker that starts late and gets v10 only."""
    workers = borrow(4)
    updater, _ = steer(tmp_path, workers[:3])
    with updater:
        for value in range(1, 10):
            learn(updater, float(value), worker_ids=[0])
        fill(updater.policy_weights, 10.0)
        for key in (0, 1, 2):
            updater.update_weights(worker_ids=[key])
        assert statuses(updater.sync()) == ["current"] * 3
        assert statuses(updater.update_weights(force=True)) == ["synced"] * 3
        updater.add_worker(workers[3], "late")
        assert get([worker.stamp.remote() for worker in workers]) == [10] * 4
        assert [status.held for status in updater.registry.workers()] == [10] * 4
        check_truth(updater)


def test_numbers_go_on_after_a_resume_and_old_records_are_of_an_earlier_run(tmp_path: Path) -> None:
    """RL-11: five versions, close, another process publishes: v6; neighbour: it had to take the head over first."""
    workers = borrow(1)
    updater, _ = steer(tmp_path, workers)
    with updater:
        for value in range(1, 6):
            learn(updater, float(value))
    resumed = get(_resume.remote(str(tmp_path), workers[0]))
    assert resumed == {"before": 5, "refused": True, "after": 6, "held": 6}
    with Registry.open(tmp_path) as registry:
        runs = [holding.run for holding in registry.history(worker="w0")]
        assert len(set(runs)) == 2
        assert runs[:5] == [runs[0]] * 5
        assert ends(registry, "w0")[-2:] == [(5, "replaced"), (6, None)]
        # The task that resumed is over, and its run is gone: nobody watches the worker.
        assert status_of(registry, "w0").state == "unknown"
    assert get(workers[0].value.remote()) == 6.0


@remote(num_cpus=0, max_calls=1)
def _resume(folder: str, worker: Any) -> dict[str, Any]:
    with Registry.open(folder) as registry:
        other = Registry.open(folder)
        before = registry.head().number
        with RayRemoteWeightUpdater(filled(6.0), [worker], registry=registry, names=["w0"]) as updater:
            refused = updater.head is None
            updater.adopt()
            refused = not refused and float(updater.policy_weights.bias[0].detach()) == 5.0
            learn(updater, 6.0)
            held = status_of(other, "w0").held
        return {"before": before, "refused": refused, "after": other.head().number, "held": held}


def test_a_rollback_brings_the_optimizer_back_with_the_policy(tmp_path: Path) -> None:
    """RL-12: Adam, v1, ten steps, rollback, one more step: the same as if the ten had never been."""

    def train(policy: nn.Module, adam: torch.optim.Optimizer, steps: int) -> None:
        for step in range(steps):
            adam.zero_grad()
            policy(torch.full((1, 3), float(step + 1))).sum().backward()
            adam.step()

    workers = borrow(1)
    learner = filled(1.0)
    adam = torch.optim.Adam(learner.parameters(), lr=0.1)
    train(learner, adam, 3)
    expected = filled(1.0)
    other = torch.optim.Adam(expected.parameters(), lr=0.1)
    train(expected, other, 3)
    train(expected, other, 1)
    with Registry.open(tmp_path) as registry:
        updater = RayRemoteWeightUpdater(
            learner,
            workers,
            registry=registry,
            extra=adam.state_dict,
            on_rollback=lambda version: adam.load_state_dict(registry.load_extra(version)),
        )
        with updater:
            updater.update_weights()
            train(learner, adam, 10)
            updater.update_weights()
            updater.rollback(1, "learning rate")
            train(learner, adam, 1)
            assert all(
                torch.equal(a, b) for a, b in zip(learner.parameters(), expected.parameters(), strict=True)
            )
            updater.update_weights()
            check_truth(updater)


class Normalising(nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.layer = filled(value)
        self.register_buffer("mean", torch.full((3,), value), persistent=False)


def everything(module: nn.Module) -> Any:
    """Return all tensors of a module, those that are no part of its state dict too."""
    tensors: Any = TensorDict.from_module(module)
    return tensors.data


class WithNormaliser(Rollouts):
    def __init__(self, value: float = -1.0, width: int = 3) -> None:
        super().__init__(value, width)
        self.policy: Any = Normalising(value)

    def mean(self) -> float:
        return float(self.policy.mean[0])


def test_a_normaliser_that_is_no_part_of_the_weights_travels_when_it_is_named(tmp_path: Path) -> None:
    """RL-14: not in the module's weights: left alone; in a TensorDict of it: applied and rolled back with them."""
    worker = remote(num_cpus=0)(WithNormaliser).remote()
    learner = Normalising(1.0)
    with (
        Registry.open(tmp_path) as registry,
        RayRemoteWeightUpdater(learner, [worker], registry=registry, names=["w0"]) as updater,
    ):
        assert updater.update_weights().ok
        assert (get(worker.value.remote()), get(worker.mean.remote())) == (1.0, -1.0)
        both = everything(Normalising(2.0))
        assert updater.update_weights(both, restructure=True).ok
        assert (get(worker.value.remote()), get(worker.mean.remote())) == (2.0, 2.0)
        assert updater.probe()[0].matches
        updater.update_weights(everything(Normalising(3.0)))
        updater.sync(version=2)
        assert (get(worker.value.remote()), get(worker.mean.remote())) == (2.0, 2.0)
        assert updater.probe()[0].matches
    ray.kill(worker)


class TiedHead(nn.Module):
    def __init__(self, value: float, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 2, bias=False)
        self.head = nn.Linear(3, 2, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        with torch.no_grad():
            self.embed.weight.fill_(value)
            self.head.weight.fill_(value)


class WithHead(Rollouts):
    def untie(self) -> None:
        self.policy: Any = TiedHead(-1.0, tied=False)

    def both(self) -> tuple[float, float]:
        return float(self.policy.embed.weight[0, 0].detach()), float(self.policy.head.weight[0, 0].detach())


def test_a_tied_head_is_not_left_stale_in_a_worker_without_the_tie(tmp_path: Path) -> None:
    """RL-15: both names get the new values; the probe agrees."""
    worker = remote(num_cpus=0)(WithHead).remote()
    get(worker.untie.remote())
    with (
        Registry.open(tmp_path) as registry,
        RayRemoteWeightUpdater(
            TiedHead(4.0, tied=True), [worker], registry=registry, names=["w0"]
        ) as updater,
    ):
        assert statuses(updater.update_weights()) == ["synced"]
        assert get(worker.both.remote()) == (4.0, 4.0)
        assert updater.probe()[0].matches
    ray.kill(worker)


def test_a_rollback_to_an_older_version_and_the_next_publish_both_arrive(tmp_path: Path) -> None:
    """RL-16: worker at 7, back to 5, then 8 and 9."""
    (worker,) = borrow(1)
    updater, _ = steer(tmp_path, [worker])
    with updater:
        for value in range(1, 8):
            learn(updater, float(value))
        updater.rollback(5)
        assert (get(worker.value.remote()), get(worker.stamp.remote())) == (5.0, 8)
        learn(updater, 9.0)
        assert (get(worker.value.remote()), get(worker.stamp.remote())) == (9.0, 9)
        assert statuses(updater.sync(version=3)) == ["synced"]
        assert (get(worker.value.remote()), get(worker.stamp.remote())) == (3.0, 3)
        assert updater.registry.head().parent == 8
        check_truth(updater)


def test_a_worker_whose_model_has_no_memory_yet_is_a_clear_failure(tmp_path: Path) -> None:
    """RL-17: a model on `meta`; the other worker is not held up, and the first follows once it has memory."""
    workers = borrow(2)
    updater, _ = steer(tmp_path, workers)
    with updater:
        get(workers[0].__ray_call__.remote(to_meta))
        report = learn(updater, 1.0)
        assert statuses(report) == ["failed", "synced"]
        assert "meta" in report.workers[0].error
        get(workers[0].reset.remote())
        assert statuses(updater.update_weights()) == ["synced", "current"]
        check_truth(updater)


def to_meta(worker: Any) -> None:
    worker.policy = nn.Linear(3, 2, device="meta")


class TwoPolicies(Rollouts):
    def __init__(self, value: float = -1.0, width: int = 3) -> None:
        super().__init__(value, width)
        self.opponent = filled(value, width)

    def values(self) -> tuple[float, float]:
        return self.value(), float(self.opponent.bias[0].detach())

    def stamps(self) -> tuple[int | None, int | None]:
        return self.stamp("main"), self.stamp("opponent")


def test_two_policies_of_one_worker_are_two_records(tmp_path: Path) -> None:
    """RL-19: one is updated, the other is untouched; unknown keys are an error."""
    worker = remote(num_cpus=0)(TwoPolicies).remote()
    main, _ = steer(tmp_path, [worker], policy="main")
    other, _ = steer(tmp_path, [worker], policy="opponent", locate="opponent")
    with main, other:
        learn(main, 1.0)
        assert get(worker.values.remote()) == (1.0, -1.0)
        assert get(worker.stamps.remote()) == (1, None)
        for value in (5.0, 6.0, 7.0):
            learn(other, value)
        assert get(worker.values.remote()) == (1.0, 7.0)
        assert get(worker.stamps.remote()) == (1, 3)
        other.rollback(1)
        assert get(worker.values.remote()) == (1.0, 5.0)
        assert (status_of(main.registry, "w0").held, status_of(other.registry, "w0").held) == (1, 4)
        both = {
            f"{part}.{key}": tensor
            for part in ("policy", "opponent")
            for key, tensor in filled(3.0).state_dict().items()
        }
        assert statuses(main.update_weights(both, restructure=True)) == ["failed"]
        assert get(worker.values.remote()) == (1.0, 5.0)
        assert main.probe()[0].matches
        assert other.probe()[0].matches
        check_truth(main)
    ray.kill(worker)


def test_an_equal_step_of_another_run_is_another_version(tmp_path: Path) -> None:
    """RL-20: step 50 of two runs in one folder, while the worker is at step 50 already."""
    (worker,) = borrow(1)
    updater, _ = steer(tmp_path, [worker])
    with updater:
        learn(updater, 1.0, step=50)
        get(_fork.remote(str(tmp_path)))
        with pytest.raises(ConflictError, match="published v2"):
            learn(updater, 1.5, step=51)
        assert get(worker.stamp.remote()) == 1
        updater.adopt()
        assert statuses(updater.update_weights()) == ["synced"]
        assert (get(worker.value.remote()), get(worker.stamp.remote())) == (2.0, 2)
        first, second = updater.registry.versions()
        assert (first.step, second.step) == (50, 50)
        assert first.digest != second.digest
        assert first.run != second.run
        check_truth(updater)


@remote(num_cpus=0)
def _fork(folder: str) -> None:
    with Registry.open(folder) as registry:
        registry.publish(filled(2.0), step=50)


def test_an_empty_registry_says_so_and_touches_no_worker(tmp_path: Path) -> None:
    """RL-22: sync, load, roll back, pin before there is anything; then with one version only."""
    workers = borrow(2)
    updater, _ = steer(tmp_path, workers)
    with updater:
        report = updater.sync()
        assert (report.version, report.ok, statuses(report)) == (None, True, ["current", "current"])
        for wrong in (
            lambda: updater.rollback(),
            lambda: updater.rollback(99),
            lambda: updater.sync(version=1),
            lambda: updater.pin(0, 1),
            lambda: updater.adopt(),
            lambda: updater.registry.load(0),
        ):
            with pytest.raises(NotFoundError):
                wrong()
        assert get([worker.value.remote() for worker in workers]) == [-1.0, -1.0]
        learn(updater, 1.0)
        with pytest.raises(NotFoundError, match="99"):
            updater.rollback(99)
        with pytest.raises(NotFoundError):
            updater.rollback()
        assert [version.number for version in updater.registry.versions()] == [1]
        assert get([worker.value.remote() for worker in workers]) == [1.0, 1.0]
        check_truth(updater)

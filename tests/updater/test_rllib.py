"""RLlib's real PPO on the registry: what env runners really hold, after training, rollbacks, restores and restarts.

One Algorithm with two env runners serves most tests, since building one costs seconds; each test trains it on from
wherever it is. What a runner holds is hashed in the runner, never taken from a number that it reports.
"""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from torch import nn

from tests.updater.rllib_parts import (
    MODULE,
    PATIENCE,
    config,
    fingerprint,
    in_runners,
    in_step,
    runner_fingerprints,
    two_agents,
)
from weightledger.registry import Registry
from weightledger.registry.errors import InUseError, NotFoundError, SyncError
from weightledger.registry.weights.live import live_digest
from weightledger.updater.in_worker.receiver import write_note
from weightledger.updater.messages import Note
from weightledger.updater.rllib import (
    LedgerCallback,
    ModuleUpdater,
    RLlibUpdater,
    batch_versions,
    policy_of,
    runner_version,
    stamp_samples,
)
from weightledger.updater.rllib.runner import ModuleOf
from weightledger.updater.telling import SyncWarning

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.usefixtures("ray_cluster"),
]


def digest(module_id: str, runner: Any) -> str:
    return live_digest(ModuleOf(module_id)(runner))[0]


def digests(algorithm: Any, module_id: str = MODULE) -> list[str]:
    """Hash what the module of each remote env runner really holds."""
    return in_runners(algorithm, functools.partial(digest, module_id))


def numbers(algorithm: Any) -> list[int]:
    """Return RLlib's own number of the weights in each remote env runner."""
    return in_runners(algorithm, lambda runner: runner._weights_seq_no)


def versions(algorithm: Any, module_id: str = MODULE) -> list[int | None]:
    return in_runners(algorithm, functools.partial(runner_version, module_id=module_id))


def train_and_look(algorithm: Any) -> tuple[Any, Any]:
    """Train one iteration; returns its result and a snapshot of the learner as it began."""
    begun: list[Any] = []
    own = algorithm.training_step

    def training_step() -> None:
        begun.append(snapshot(algorithm))
        own()

    algorithm.training_step = training_step
    try:
        return algorithm.train(), begun[0]
    finally:
        del algorithm.training_step


def note_what_samples(runner: Any) -> None:
    """Let an env runner hash what it samples with, whenever it does."""
    own, seen = runner.sample, []

    def sample(**options: Any) -> Any:
        seen.append(fingerprint(MODULE, runner))
        return own(**options)

    runner.sample, runner.seen = sample, seen


def what_sampled(runner: Any) -> list[str]:
    del runner.sample
    return list(runner.seen)


def sample(runner: Any) -> list[Any]:
    return runner.sample(num_timesteps=20)


def learner(algorithm: Any) -> Any:
    return algorithm.learner_group._learner


def learner_digest(algorithm: Any, module_id: str = MODULE) -> str:
    """Hash what env runners should get of the learner's module."""
    return live_digest(RLlibUpdater.of(algorithm).learners.weights(module_id))[0]


def snapshot(algorithm: Any, module_id: str = MODULE) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """Copy all weights of a learner's module, value head included, and the state of its optimizers."""
    whole = RLlibUpdater.of(algorithm).learners.whole(module_id)
    moments = {
        (name, key, what): value.clone()
        for name, optimizer in whole["optimizers"].items()
        for key, state in optimizer["state"].items()
        for what, value in state.items()
    }
    return {name: tensor.clone() for name, tensor in whole["module"].items()}, moments


def equal(first: tuple[dict[Any, Any], ...], second: tuple[dict[Any, Any], ...]) -> bool:
    return all(
        one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
        for one, other in zip(first, second, strict=True)
    )


def head(updater: ModuleUpdater) -> int:
    return updater.registry.head().number


@pytest.fixture(scope="module")
def shared(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    location = tmp_path_factory.mktemp("ledger")
    algorithm = config(2).callbacks(LedgerCallback.at(location, timeout=PATIENCE)).build_algo()
    assert RLlibUpdater.of(algorithm).update()[MODULE].ok
    yield algorithm
    algorithm.stop()


@pytest.fixture
def algorithm(shared: Any) -> Iterator[Any]:
    """An Algorithm whose weights are kept, and whose env runners all follow the head."""
    yield shared
    updater = RLlibUpdater.of(shared)[MODULE]
    for pin in updater.registry.pins():
        updater.registry.unpin(pin.worker)
    assert RLlibUpdater.of(shared).sync()[MODULE].ok


# ---------------------------------------------------------------------- what stock RLlib does


def test_stock_rllib_keeps_abandoned_weights_under_the_old_number_after_a_restore(tmp_path: Path) -> None:
    algorithm = config(1).build_algo()
    try:
        algorithm.train()
        algorithm.save_to_path(tmp_path)
        (saved,), (number,) = digests(algorithm), numbers(algorithm)
        for _ in range(2):
            algorithm.train()
        abandoned = digests(algorithm)
        algorithm.restore_from_path(tmp_path)
        assert abandoned != [saved]
        assert numbers(algorithm) == [number]
        assert digests(algorithm) == abandoned
    finally:
        algorithm.stop()


# ---------------------------------------------------------------------- training


def test_every_weight_that_an_env_runner_gets_is_a_version_confirmed_by_its_digest(algorithm: Any) -> None:
    updater = RLlibUpdater.of(algorithm)[MODULE]
    before = head(updater)
    for step in (1, 2):
        result = algorithm.train()
        version = updater.registry.head()
        assert version.number == before + step
        assert result["weightledger"] == {MODULE: {"version": version.number, "ok": True, "failed": {}}}
        assert digests(algorithm) == [version.digest] * 2
        assert learner_digest(algorithm) == version.digest
        assert [(held.version, held.digest) for held in updater.probe().values()] == [
            (version.number, version.digest)
        ] * 3
    assert {worker.name: worker.held for worker in updater.registry.workers()} == {
        f"env-runner-{index}": before + 2 for index in range(3)
    }


def test_rllibs_own_measure_of_how_old_samples_are_stays_what_it_was(algorithm: Any) -> None:
    for _ in range(2):
        result = algorithm.train()
        assert result["learners"][MODULE]["diff_num_grad_updates_vs_sampler_policy"] == 1
    assert numbers(algorithm) == [learner(algorithm)._weights_seq_no] * 2


def test_an_iterations_score_belongs_to_the_version_that_acted(algorithm: Any) -> None:
    registry = RLlibUpdater.of(algorithm)[MODULE].registry
    acted = registry.head().number
    result = algorithm.train()
    score = result["env_runners"]["episode_return_mean"]
    assert registry.get(acted).metrics == {"episode_return_mean": pytest.approx(score)}
    assert registry.head().number == acted + 1
    assert registry.head().metrics == {}
    assert registry.head().step == result["num_env_steps_sampled_lifetime"]


def test_an_update_with_nothing_learned_publishes_nothing(algorithm: Any) -> None:
    updater = RLlibUpdater.of(algorithm)
    before = head(updater[MODULE])
    report = updater.update()[MODULE]
    assert not report.published
    assert {outcome.status for outcome in report.workers.values()} == {"current"}
    assert head(updater[MODULE]) == before


# ---------------------------------------------------------------------- going back


def test_restoring_a_checkpoint_moves_the_env_runners_and_is_a_rollback_on_record(
    algorithm: Any, tmp_path: Path
) -> None:
    registry = RLlibUpdater.of(algorithm)[MODULE].registry
    algorithm.train()
    saved = registry.head()
    algorithm.save_to_path(tmp_path)
    for _ in range(2):
        algorithm.train()
    before = numbers(algorithm)
    algorithm.restore_from_path(tmp_path)
    assert digests(algorithm) == [saved.digest] * 2
    assert learner_digest(algorithm) == saved.digest
    version = registry.head()
    assert (version.number, version.restores, version.parent) == (
        saved.number + 3,
        saved.number,
        saved.number,
    )
    assert [registry.staleness(saved.number + step) for step in range(4)] == [0, None, None, 0]
    assert versions(algorithm) == [version.number] * 2
    assert all(new > old for new, old in zip(numbers(algorithm), before, strict=True))
    algorithm.train()
    assert registry.head().parent == version.number
    assert digests(algorithm) == [registry.head().digest] * 2


def test_a_checkpoint_of_unknown_weights_is_published_and_reaches_the_env_runners(
    algorithm: Any, tmp_path: Path
) -> None:
    registry = RLlibUpdater.of(algorithm)[MODULE].registry
    algorithm.train()
    with torch.no_grad():
        next(iter(learner(algorithm).module[MODULE].pi.parameters())).add_(1.0)
    changed = learner_digest(algorithm)
    algorithm.learner_group.save_to_path(tmp_path)
    algorithm.train()
    algorithm.restore_from_path(tmp_path, component="learner_group")
    assert learner_digest(algorithm) == changed
    assert digests(algorithm) == [changed] * 2
    assert (registry.head().digest, registry.head().restores) == (changed, None)


def test_a_rollback_restores_the_learner_whole_and_moves_the_env_runners(algorithm: Any) -> None:
    updater = RLlibUpdater.of(algorithm)
    registry = updater[MODULE].registry
    algorithm.train()
    wanted, whole = registry.head(), snapshot(algorithm)
    assert any("vf" in name or "critic" in name for name in whole[0])
    for _ in range(2):
        algorithm.train()
    assert not equal(snapshot(algorithm), whole)
    before = numbers(algorithm)
    report = updater.rollback(to=wanted, reason="the reward collapsed")
    assert report.ok
    assert equal(snapshot(algorithm), whole)
    assert digests(algorithm) == [wanted.digest] * 2
    assert all(new > old for new, old in zip(numbers(algorithm), before, strict=True))
    assert registry.head().restores == wanted.number
    algorithm.train()
    assert digests(algorithm) == [registry.head().digest] * 2 != [wanted.digest] * 2
    assert registry.head().parent == wanted.number + 3


def test_a_rollback_made_elsewhere_takes_effect_at_the_start_of_the_next_iteration(algorithm: Any) -> None:
    updater = RLlibUpdater.of(algorithm)[MODULE]
    algorithm.train()
    wanted, whole, good = updater.registry.head(), snapshot(algorithm), runner_fingerprints(algorithm)
    algorithm.train()
    in_runners(algorithm, note_what_samples)
    with Registry.open(updater.registry.location, policy="default", create=False) as shell:
        shell.rollback(wanted, reason="from a shell")
    result, begun = train_and_look(algorithm)
    assert {each for seen in in_runners(algorithm, what_sampled) for each in seen} == good
    assert equal(begun, whole)
    restored = updater.registry.get(wanted.number + 2)
    assert (restored.restores, restored.metrics) == (
        wanted.number,
        {"episode_return_mean": pytest.approx(result["env_runners"]["episode_return_mean"])},
    )
    assert updater.registry.head().parent == restored.number
    assert updater.registry.head().digest != wanted.digest
    assert digests(algorithm) == [updater.registry.head().digest] * 2


def test_a_rollback_that_the_learner_did_not_take_is_taken_by_the_next_update(
    algorithm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    updater = RLlibUpdater.of(algorithm)
    algorithm.train()
    wanted, whole = updater[MODULE].registry.head(), snapshot(algorithm)
    algorithm.train()
    with monkeypatch.context() as patch:
        patch.setattr(learner(algorithm), "_set_optimizer_state", lambda state: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            updater.rollback(to=wanted)
    _, begun = train_and_look(algorithm)
    assert equal(begun, whole)
    assert updater[MODULE].registry.head().parent == wanted.number + 2
    assert in_step(algorithm)


def test_a_version_without_learner_state_restores_what_it_has_and_warns(
    algorithm: Any, tmp_path: Path
) -> None:
    updater = RLlibUpdater.of(algorithm)
    report = updater[MODULE].update_weights(
        {name: tensor + 1 for name, tensor in updater.learners.weights(MODULE).items()}
    )
    assert report.ok
    bare = updater[MODULE].registry.publish(updater[MODULE].registry.load(), message="no extra")
    with pytest.warns(UserWarning, match="published without the learner's state"):
        assert updater[MODULE].adopt() == bare
    assert learner_digest(algorithm) == bare.digest
    assert updater.sync()[MODULE].ok
    assert digests(algorithm) == [bare.digest] * 2


# ---------------------------------------------------------------------- pins and stamps


def test_a_pinned_env_runner_keeps_its_version_while_training_goes_on(algorithm: Any) -> None:
    updater = RLlibUpdater.of(algorithm)[MODULE]
    wanted = updater.registry.head()
    algorithm.train()
    assert updater.pin(updater.places["train", 1], wanted).ok
    for _ in range(2):
        algorithm.train()
        assert digests(algorithm) == [wanted.digest, updater.registry.head().digest]
        assert versions(algorithm) == [wanted.number, head(updater)]
    updater.unpin(updater.places["train", 1])
    assert digests(algorithm) == [updater.registry.head().digest] * 2


def test_each_chunk_of_an_episode_carries_the_version_that_produced_it(algorithm: Any) -> None:
    updater = RLlibUpdater.of(algorithm)[MODULE]
    old = head(updater)
    updater.pin(updater.places["train", 1], old)
    algorithm.train()
    for episodes, version in zip(in_runners(algorithm, sample), [old, old + 1], strict=True):
        assert {episode.custom_data["policy_version"] for episode in episodes} == {version}
        assert batch_versions(episodes) == [version] * sum(map(len, episodes))
    updater.unpin(updater.places["train", 1])
    for episodes in in_runners(algorithm, sample):
        # The first may go on with an episode that began under the older version.
        assert batch_versions(episodes) == [old + 1] * sum(map(len, episodes))


def test_every_row_of_a_train_batch_carries_its_version(algorithm: Any) -> None:
    updater = RLlibUpdater.of(algorithm)[MODULE]
    old = head(updater)
    updater.pin(updater.places["train", 2], old)
    algorithm.train()
    seen: list[int] = []
    own = learner(algorithm)._update

    def spy(batch: Any, **options: Any) -> Any:
        rows = batch[MODULE]
        seen.extend(rows["policy_version"][rows["loss_mask"]].tolist())
        return own(batch, **options)

    learner(algorithm)._update = spy
    try:
        algorithm.train()
    finally:
        del learner(algorithm)._update
    assert set(seen) == {old, old + 1}


def test_weights_that_somebody_else_wrote_are_stamped_as_unknown(algorithm: Any) -> None:
    updater = RLlibUpdater.of(algorithm)[MODULE]

    def write(runner: Any) -> None:
        runner.set_state(
            {"rl_module": {name: value * 0 for name, value in runner.module.get_state().items()}}
        )

    in_runners(algorithm, write)
    assert versions(algorithm) == [None, None]
    for episodes in in_runners(algorithm, sample):
        assert batch_versions(episodes) == [0] * sum(map(len, episodes))
        assert {episode.custom_data["policy_version"] for episode in episodes} == {None}
    found = updater.probe()
    assert [found[updater.places["train", index]].matches for index in (0, 1, 2)] == [True, False, False]
    assert updater.sync().ok
    assert versions(algorithm) == [head(updater)] * 2


# ---------------------------------------------------------------------- restarts


def test_restarted_env_runners_get_their_targets_before_they_sample_again(algorithm: Any) -> None:
    updater = RLlibUpdater.of(algorithm)[MODULE]
    pinned = updater.registry.head()
    algorithm.train()
    updater.pin(updater.places["train", 1], pinned)
    lives = in_runners(algorithm, lambda runner: os.getpid())
    for pid in lives:
        os.kill(pid, signal.SIGKILL)
    for _ in range(10):  # RLlib notices, waits for the actors to come back, and samples with them again
        result = algorithm.train()
        if (
            algorithm.env_runner_group.num_healthy_remote_env_runners() == 2
            and result["weightledger"][MODULE]["ok"]
        ):
            break
    assert set(in_runners(algorithm, lambda runner: os.getpid())).isdisjoint(lives)
    algorithm.train()
    newest = updater.registry.head()
    assert digests(algorithm) == [pinned.digest, newest.digest]
    assert versions(algorithm) == [pinned.number, newest.number]
    stamps = {stamp for episodes in in_runners(algorithm, sample) for stamp in batch_versions(episodes)}
    assert stamps == {pinned.number, newest.number}


def test_an_env_runner_that_rllib_wrote_into_as_it_came_back_is_sent_its_target_again(algorithm: Any) -> None:
    # One that was only out of reach has kept its process, so nothing but RLlib's word tells that it was written into.
    updater = RLlibUpdater.of(algorithm)[MODULE]
    pinned = updater.registry.head()
    algorithm.train()
    updater.pin(updater.places["train", 1], pinned)
    manager = algorithm.env_runner_group._worker_manager
    manager.set_actor_state(1, healthy=False)
    algorithm.train()
    assert manager.is_actor_healthy(1)
    assert digests(algorithm) == [pinned.digest, updater.registry.head().digest]
    assert versions(algorithm) == [pinned.number, head(updater)]


# ---------------------------------------------------------------------- other Algorithms


def test_each_module_of_a_multi_agent_algorithm_is_a_series_of_its_own(tmp_path: Path) -> None:
    algorithm = two_agents(1).callbacks(LedgerCallback.at(tmp_path, timeout=PATIENCE)).build_algo()
    try:
        updater = RLlibUpdater.of(algorithm)
        assert sorted(updater.modules) == ["main", "opponent"]
        for _ in range(2):
            algorithm.train()
        main, opponent = updater["main"].registry, updater["opponent"].registry
        assert (main.head().number, opponent.head().number) == (3, 3)
        kept = snapshot(algorithm, "opponent")
        with pytest.raises(ValueError, match=r"main.*opponent"):
            updater.rollback(to=1)
        assert updater.rollback(to=2, module_id="main").ok
        assert digests(algorithm, "main") == [main.get(2).digest]
        assert digests(algorithm, "opponent") == [opponent.get(3).digest]
        assert equal(snapshot(algorithm, "opponent"), kept)

        (episodes,) = in_runners(algorithm, lambda runner: runner.sample(num_timesteps=20, force_reset=True))
        held, seen = {"main": 4, "opponent": 3}, {}
        for episode in episodes:
            seen |= episode.custom_data["policy_version"]  # of the agents that still acted in this chunk
            for single in episode.agent_episodes.values():
                assert batch_versions([single]) == [held[single.module_id]] * len(single)
        assert seen == held
        assert main.policies() == ["main", "opponent"]
    finally:
        algorithm.stop()


def test_rllib_goes_on_syncing_the_modules_that_are_not_steered(tmp_path: Path) -> None:
    algorithm = two_agents(1).build_algo()
    try:
        updater = RLlibUpdater(algorithm, tmp_path, modules=["main"], timeout=PATIENCE)
        assert updater.update()["main"].ok
        assert updater["main"].pin(1, 1).ok
        for _ in range(2):
            algorithm.train()
        assert digests(algorithm, "main") == [updater["main"].registry.get(1).digest]
        assert digests(algorithm, "opponent") == [learner_digest(algorithm, "opponent")]
        assert updater["main"].registry.policies() == ["main"]
        with pytest.raises(NotFoundError, match="opponent"):
            updater["opponent"]
    finally:
        algorithm.stop()


def test_evaluation_env_runners_have_targets_of_their_own(tmp_path: Path) -> None:
    told: list[tuple[str, int]] = []
    algorithm = (
        config(0)
        .evaluation(evaluation_num_env_runners=1, evaluation_interval=1, evaluation_duration=1)
        .callbacks(
            LedgerCallback.at(
                tmp_path,
                timeout=PATIENCE,
                on_rollback=lambda module, version: told.append((module, version.number)),
            )
        )
        .build_algo()
    )
    try:
        updater = RLlibUpdater.of(algorithm)
        registry = updater[MODULE].registry
        assert updater.update()[MODULE].ok
        registry.pin("eval-*", 1, reason="the baseline")
        for _ in range(2):
            assert "evaluation" in algorithm.train()
        (actor,) = algorithm.eval_env_runner_group._worker_manager.actors().values()
        held = ray.get(actor.__ray_call__.remote(functools.partial(digest, MODULE)), timeout=PATIENCE)
        assert held == registry.get(1).digest
        assert digest(MODULE, algorithm.env_runner) == registry.get(3).digest
        registry.rollback(2)
        assert updater.update()[MODULE].adopted
        assert told == [(MODULE, 4)]
    finally:
        algorithm.stop()


def test_an_evaluation_beside_training_publishes_no_weights_that_are_half_way_in_an_update(
    tmp_path: Path,
) -> None:
    algorithm = (
        config(0)
        .evaluation(
            evaluation_num_env_runners=1,
            evaluation_interval=1,
            evaluation_duration=1,
            evaluation_parallel_to_training=True,
        )
        .callbacks(LedgerCallback.at(tmp_path, timeout=PATIENCE))
        .build_algo()
    )
    try:
        algorithm.train()
        synced = threading.Event()
        group, own_update = algorithm.eval_env_runner_group, algorithm.learner_group.update
        own_sync = group.sync_weights
        first = next(learner(algorithm).module[MODULE].parameters())

        def update(**options: Any) -> Any:
            with torch.no_grad():
                first.add_(1.0)
            halfway.append(learner_digest(algorithm))
            begun.set()
            assert synced.wait(PATIENCE)
            with torch.no_grad():
                first.sub_(1.0)
            return own_update(**options)

        def sync_weights(**options: Any) -> None:
            assert begun.wait(PATIENCE)
            own_sync(**options)
            synced.set()

        begun, halfway = threading.Event(), []
        algorithm.learner_group.update, group.sync_weights = update, sync_weights
        algorithm.train()
        del algorithm.learner_group.update
        group.sync_weights = own_sync
        registry = RLlibUpdater.of(algorithm)[MODULE].registry
        assert halfway[0] not in {version.digest for version in registry.versions()}
        assert registry.head().number == 3
        (actor,) = group._worker_manager.actors().values()
        held = ray.get(actor.__ray_call__.remote(functools.partial(digest, MODULE)), timeout=PATIENCE)
        assert held == registry.head().digest
    finally:
        algorithm.stop()


# Ray's own settings warn of themselves as they are made.
@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning:ray")
def test_restoring_a_checkpoint_moves_the_evaluation_env_runners_too(tmp_path: Path) -> None:
    algorithm = (
        config(0)
        .evaluation(evaluation_num_env_runners=1)
        .callbacks(LedgerCallback.at(tmp_path / "ledger", timeout=PATIENCE))
        .build_algo()
    )
    try:
        ledger = RLlibUpdater.of(algorithm)[MODULE]
        algorithm.train()
        saved = ledger.registry.head()
        algorithm.save_to_path(tmp_path / "saved")
        for _ in range(2):
            algorithm.train()
        algorithm.restore_from_path(tmp_path / "saved")
        assert ledger.registry.head().restores == saved.number
        (actor,) = algorithm.eval_env_runner_group._worker_manager.actors().values()
        held = ray.get(actor.__ray_call__.remote(functools.partial(digest, MODULE)), timeout=PATIENCE)
        assert held == digest(MODULE, algorithm.env_runner) == saved.digest
        assert {each.version for each in ledger.probe().values()} == {ledger.registry.head().number}
    finally:
        algorithm.stop()


def test_a_learner_in_a_process_of_its_own_is_published_and_rolled_back_whole(tmp_path: Path) -> None:
    algorithm = config(1).learners(num_learners=1, num_cpus_per_learner=0).build_algo()
    try:
        with RLlibUpdater(algorithm, tmp_path, timeout=PATIENCE) as updater:
            algorithm.train()
            wanted, whole = updater[MODULE].registry.head(), snapshot(algorithm)
            algorithm.train()
            assert digests(algorithm) == [updater[MODULE].registry.head().digest] != [wanted.digest]
            assert updater.rollback().ok
            assert equal(snapshot(algorithm), whole)
            assert digests(algorithm) == [wanted.digest]
    finally:
        algorithm.stop()


def test_an_updater_is_one_of_its_kind_and_gives_the_algorithm_back_when_it_is_closed(tmp_path: Path) -> None:
    algorithm = config(1).build_algo()
    try:
        with pytest.raises(NotFoundError, match="LedgerCallback"):
            RLlibUpdater.of(algorithm)
        updater = RLlibUpdater(algorithm, tmp_path, prefix="trial-7/", timeout=PATIENCE)
        with pytest.raises(InUseError, match="already"):
            RLlibUpdater(algorithm, tmp_path)
        registry = Registry.open(tmp_path)
        assert [worker.name for worker in registry.workers()] == [
            "trial-7/env-runner-0",
            "trial-7/env-runner-1",
        ]
        assert updater.update()[MODULE].ok
        updater[MODULE].pin(1, 1)
        algorithm.train()
        assert digests(algorithm) == [registry.get(1).digest]
        assert registry.head().number == 2
        updater.close()
        registry.unpin("trial-7/env-runner-1")
        algorithm.train()
        assert registry.head().number == 2
        # By RLlib's own sync, whose number is above what the pinned env runner was given last.
        acting = digests(algorithm)
        again = RLlibUpdater(algorithm, lambda built: tmp_path if built is algorithm else "nowhere")
        assert again is RLlibUpdater.of(algorithm)
        assert again.update()[MODULE].ok
        assert registry.head().number == 3
        assert acting == [registry.head().digest]
    finally:
        algorithm.stop()
    assert again.closed


def test_only_the_chosen_syncs_of_small_steps_are_published(tmp_path: Path) -> None:
    algorithm = config(0).build_algo()
    try:
        updater = RLlibUpdater(algorithm, tmp_path, every=3)
        for _ in range(7):
            algorithm.training_step()
        assert [version.number for version in updater[MODULE].registry.versions()] == [1, 2, 3]
        assert runner_version(algorithm.env_runner) == 3
        assert updater.update()[MODULE].version == 4
    finally:
        algorithm.stop()


def test_a_callback_without_a_location_says_what_to_write() -> None:
    with pytest.raises(ValueError, match=r"LedgerCallback\.at\(location\)"):
        LedgerCallback().on_algorithm_init(algorithm=None)


def test_an_env_runner_that_rejects_its_first_weights_is_an_error_and_a_later_failure_a_warning(
    tmp_path: Path,
) -> None:
    algorithm = config(0).build_algo()
    runner = algorithm.env_runner
    fitting = runner.module
    spec = (
        config(0)
        .rl_module(model_config={"fcnet_hiddens": [4]})
        .get_rl_module_spec(spaces=runner.get_spaces(), inference_only=True)
    )
    try:
        with RLlibUpdater(algorithm, tmp_path, timeout=PATIENCE) as updater:
            runner.module = spec.build()
            with pytest.raises(SyncError, match=r"env-runner-0[\s\S]*shape"):
                algorithm.train()
            runner.module = fitting
            algorithm.train()
            assert in_step(algorithm)
            runner.module = spec.build()
            with pytest.warns(SyncWarning, match=r"env-runner-0: failed.*shape"):
                algorithm.train()
            runner.module = fitting
            algorithm.train()
            assert in_step(algorithm)
            assert updater[MODULE].registry.head().number == 4
        with RLlibUpdater(algorithm, tmp_path, timeout=PATIENCE, on_failure="raise"):
            runner.module = spec.build()
            with pytest.raises(SyncError, match="env-runner-0"):
                algorithm.train()
        with pytest.raises(ValueError, match="on_failure"):
            RLlibUpdater(algorithm, tmp_path, on_failure="ignore")  # pyright: ignore[reportArgumentType]
    finally:
        algorithm.stop()


def test_an_algorithm_that_sends_weights_in_another_way_is_refused(tmp_path: Path) -> None:
    pulling = SimpleNamespace(
        config=SimpleNamespace(enable_env_runner_and_connector_v2=True, use_env_runner_state_server=True),
        learner_group=object(),
    )
    with pytest.raises(ValueError, match="use_env_runner_state_server"):
        RLlibUpdater(pulling, tmp_path)


def test_a_policy_is_named_by_its_module() -> None:
    assert [policy_of(name) for name in ("default_policy", "main", "opponent")] == [
        "default",
        "main",
        "opponent",
    ]


@pytest.mark.parametrize("as_numpy", [False, True])
def test_a_column_of_stamps_covers_what_a_chunk_looks_back_on_without_claiming_it(as_numpy: bool) -> None:
    class Runner:
        module = nn.Linear(1, 1)

    episode = SingleAgentEpisode(
        observations=[0.0, 1.0, 2.0], actions=[1, 1], rewards=[1.0, 1.0], len_lookback_buffer=0
    )
    chunk = episode.cut(len_lookback_buffer=1)
    chunk.add_env_step(3.0, 1, 1.0)
    chunk = chunk.to_numpy() if as_numpy else chunk
    runner = Runner()
    write_note(runner, ("registry", "default"), Note(5, "digest", "digest", 1, "run"))
    stamp_samples(runner, [chunk])
    chunk.validate()
    assert chunk.custom_data == {"policy_version": 5}
    assert list(chunk.extra_model_outputs["policy_version"].data) == [0, 5]
    assert batch_versions([chunk, episode]) == [5, 0, 0]


def test_importing_the_updater_loads_no_rllib() -> None:
    script = "import sys, weightledger.updater; sys.exit(any(name.startswith('ray.rllib') for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", script], timeout=PATIENCE, check=False).returncode == 0

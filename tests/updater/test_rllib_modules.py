"""RLlib's kinds of modules, steered: after every iteration each env runner acts with what the learner has.

Weights are hashed in the env runner and in the learner, by the tests' own hash.
"""

from __future__ import annotations

import functools
import warnings
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
import torch
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.rllib.core.rl_module.multi_rl_module import MultiRLModuleSpec
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.examples.algorithms.classes.vpg import VPGConfig
from ray.rllib.examples.learners.classes.vpg_torch_learner_shared_optimizer import (
    VPGTorchLearnerSharedOptimizer,
)
from ray.rllib.examples.multi_agent.utils.self_play_callback import SelfPlayCallback
from ray.rllib.examples.rl_modules.classes.random_rlm import RandomRLModule
from ray.rllib.examples.rl_modules.classes.vpg_using_shared_encoder_rlm import (
    SHARED_ENCODER_ID,
    SharedEncoder,
    VPGMultiRLModuleWithSharedEncoder,
    VPGPolicyAfterSharedEncoder,
)

from tests.updater.rllib_parts import (
    MODULE,
    PATIENCE,
    config,
    in_step,
    learner_fingerprint,
    runner_fingerprints,
    two_agents,
)
from weightledger.registry.errors import InvalidWeightsError
from weightledger.updater.rllib import LedgerCallback, RLlibUpdater

pytestmark = [
    pytest.mark.ray,
    pytest.mark.long,
    pytest.mark.timeout(240),
    pytest.mark.usefixtures("ray_cluster"),
    # RLlib's own, of a second Algorithm of several agents in one process.
    pytest.mark.filterwarnings("ignore:.*Overriding environment rllib-multi-agent-env:UserWarning"),
]


def steered(made: Any, location: Path, **options: Any) -> Any:
    return made.callbacks(LedgerCallback.at(location, timeout=PATIENCE, **options)).build_algo()


def test_an_lstm_reaches_the_env_runners_after_every_iteration_and_after_a_rollback(tmp_path: Path) -> None:
    made = config(1).rl_module(
        model_config=DefaultModelConfig(fcnet_hiddens=[8], use_lstm=True, lstm_cell_size=8, max_seq_len=8)
    )
    algorithm = steered(made, tmp_path)
    try:
        seen = []
        for _ in range(3):
            assert algorithm.train()["weightledger"][MODULE]["ok"]
            assert in_step(algorithm)
            seen.append(learner_fingerprint(algorithm, whole=True))
        assert len(set(seen)) == 3
        wanted = RLlibUpdater.of(algorithm)[MODULE].registry.head().number - 1
        assert RLlibUpdater.of(algorithm).rollback(to=wanted).ok
        assert learner_fingerprint(algorithm, whole=True) == seen[1]
        assert in_step(algorithm)
        algorithm.train()
        assert in_step(algorithm)
    finally:
        algorithm.stop()


def test_explicit_specs_and_a_module_without_weights_are_steered_as_they_are(tmp_path: Path) -> None:
    made = (
        two_agents(1, "p0", "p1")
        .multi_agent(
            policies={"p0", "p1", "random"},
            policies_to_train=["p0", "p1"],
        )
        .rl_module(
            model_config=DefaultModelConfig(fcnet_hiddens=[8]),
            rl_module_spec=MultiRLModuleSpec(
                rl_module_specs={
                    "p0": RLModuleSpec(),
                    "p1": RLModuleSpec(),
                    "random": RLModuleSpec(module_class=RandomRLModule),
                }
            ),
        )
    )
    algorithm = steered(made, tmp_path)
    try:
        seen = set()
        for _ in range(2):
            told = algorithm.train()["weightledger"]
            assert {key: each["ok"] for key, each in told.items()} == {"p0": True, "p1": True}
            assert in_step(algorithm, "p0", "p1")
            seen |= runner_fingerprints(algorithm, "p0")
        assert len(seen) == 2
    finally:
        algorithm.stop()


def shared_encoder() -> Any:
    """Return the config of RLlib's example: one encoder for two policies, one optimizer for all three."""
    env = gym.make("CartPole-v1")
    policy = RLModuleSpec(
        module_class=VPGPolicyAfterSharedEncoder, model_config={"embedding_dim": 8, "hidden_dim": 8}
    )
    encoder = RLModuleSpec(
        module_class=SharedEncoder,
        model_config={"embedding_dim": 8},
        observation_space=env.observation_space,
        action_space=env.action_space,
    )
    return (
        two_agents(0, "p0", "p1", base=VPGConfig)
        .training(learner_class=VPGTorchLearnerSharedOptimizer, num_episodes_per_train_batch=2)
        .rl_module(
            rl_module_spec=MultiRLModuleSpec(
                multi_rl_module_class=VPGMultiRLModuleWithSharedEncoder,
                rl_module_specs={SHARED_ENCODER_ID: encoder, "p0": policy, "p1": policy},
            )
        )
    )


def moments(algorithm: Any, module_id: str) -> dict[str, torch.Tensor]:
    """Copy what the one optimizer keeps of a module's parameters."""
    learner = algorithm.learner_group._learner
    (optimizer,) = learner._named_optimizers.values()
    return {
        f"{name} {what}": value.clone()
        for name, parameter in learner.module[module_id].named_parameters()
        for what, value in optimizer.state[parameter].items()
    }


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def test_an_optimizer_that_modules_share_goes_back_for_those_that_go_back_and_for_no_other(
    tmp_path: Path,
) -> None:
    algorithm = steered(shared_encoder(), tmp_path)
    modules = (SHARED_ENCODER_ID, "p0", "p1")
    try:
        for _ in range(2):
            algorithm.train()
            assert in_step(algorithm, *modules)
        updater = RLlibUpdater.of(algorithm)
        then = {key: moments(algorithm, key) for key in modules}
        weights = {key: learner_fingerprint(algorithm, key) for key in modules}
        versions = {key: updater[key].registry.head().number for key in modules}
        algorithm.train()
        now = {key: moments(algorithm, key) for key in modules}
        assert not any(equal(then[key], now[key]) for key in modules)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for key in (SHARED_ENCODER_ID, "p0"):
                assert updater.rollback(to=versions[key], module_id=key).ok
        assert [equal(moments(algorithm, key), then[key]) for key in modules] == [True, True, False]
        assert equal(moments(algorithm, "p1"), now["p1"])
        assert [learner_fingerprint(algorithm, key) == weights[key] for key in modules] == [True, True, False]
        assert in_step(algorithm, *modules)
        algorithm.train()
        assert in_step(algorithm, *modules)
    finally:
        algorithm.stop()


def test_what_a_rollback_could_not_bring_back_is_named(tmp_path: Path) -> None:
    algorithm = steered(config(0), tmp_path)
    try:
        algorithm.train()
        updater = RLlibUpdater.of(algorithm)
        wanted = updater[MODULE].registry.head()
        algorithm.train()
        learner = algorithm.learner_group._learner
        parameters = list(learner.module[MODULE].parameters())
        learner.register_optimizer(
            module_id=MODULE, optimizer_name="late", optimizer=torch.optim.SGD(parameters), params=parameters
        )
        with pytest.warns(UserWarning, match="optimizer 'default_policy_late'"):
            assert updater.rollback(to=wanted).ok
    finally:
        algorithm.stop()


def test_what_a_learner_keeps_beside_a_module_goes_back_with_it(tmp_path: Path) -> None:
    algorithm = steered(config(0).training(use_kl_loss=True, kl_coeff=0.5), tmp_path)
    try:
        algorithm.train()
        updater = RLlibUpdater.of(algorithm)
        wanted = updater[MODULE].registry.head()
        coefficient = algorithm.learner_group._learner.curr_kl_coeffs_per_module[MODULE]
        then = float(coefficient)
        for _ in range(2):
            algorithm.train()
        coefficient.fill_(7.0)
        assert updater.rollback(to=wanted).ok
        assert float(algorithm.learner_group._learner.curr_kl_coeffs_per_module[MODULE]) == then
    finally:
        algorithm.stop()


def test_env_runners_without_a_module_are_not_steered_for_it(tmp_path: Path) -> None:
    algorithm = steered(two_agents(1), tmp_path, on_failure="raise")
    try:
        algorithm.train()
        spec = RLModuleSpec.from_module(algorithm.get_module("main"))
        algorithm.add_module("spare", spec, add_to_env_runners=False)
        algorithm.train()
        updater = RLlibUpdater.of(algorithm)
        assert (len(updater["main"].places), len(updater["spare"].places)) == (2, 0)
        assert updater["spare"].registry.head().number == 1
        assert in_step(algorithm, "main", "opponent")
        algorithm.add_module("spare", spec, add_to_learners=False)
        assert len(updater["spare"].places) == 2
        assert in_step(algorithm, "main", "opponent", "spare")
    finally:
        algorithm.stop()


def test_a_version_that_the_learner_would_take_in_part_is_refused_before_anything_is_changed(
    tmp_path: Path,
) -> None:
    algorithm = steered(config(0), tmp_path)
    try:
        for _ in range(2):
            algorithm.train()
        updater = RLlibUpdater.of(algorithm)
        module = algorithm.learner_group._learner.module[MODULE]
        module.vf = torch.nn.Sequential(torch.nn.Linear(8, 1), torch.nn.Tanh())
        before = learner_fingerprint(algorithm, whole=True)
        with pytest.raises(InvalidWeightsError, match=r"'vf\.0\.weight' is missing.*"):
            updater.rollback()
        assert updater[MODULE].registry.head().number == 3
        assert learner_fingerprint(algorithm, whole=True) == before
        assert in_step(algorithm)
    finally:
        algorithm.stop()


class AlwaysWinning(SelfPlayCallback):
    """RLlib's callback of its self-play example; in CartPole nobody loses."""

    def on_episode_end(self, *, metrics_logger: Any, **_: Any) -> None:
        metrics_logger.log_value("win_rate", 1.0, reduce="mean", window=100)


def test_modules_that_self_play_adds_are_steered_and_those_that_it_removes_are_not(tmp_path: Path) -> None:
    made = (
        two_agents(1)
        .callbacks(
            [
                LedgerCallback.at(tmp_path, timeout=PATIENCE),
                functools.partial(AlwaysWinning, win_rate_threshold=0.5),
            ]
        )
        .multi_agent(
            policies={"main", "random"},
            policy_mapping_fn=lambda agent, episode, **_: (
                "main" if hash(episode.id_) % 2 == agent else "random"
            ),
            policies_to_train=["main"],
        )
        .rl_module(
            model_config=DefaultModelConfig(fcnet_hiddens=[8]),
            rl_module_spec=MultiRLModuleSpec(
                rl_module_specs={
                    "main": RLModuleSpec(),
                    "random": RLModuleSpec(module_class=RandomRLModule),
                }
            ),
        )
    )
    algorithm = made.build_algo()
    try:
        updater = RLlibUpdater.of(algorithm)
        seen: dict[str, str] = {}
        for _ in range(8):  # one is added at the end of each iteration in which an episode ended
            league = algorithm.train()["league_size"]
            frozen = [f"main_v{number}" for number in range(1, league - 1)]
            assert sorted(updater.modules) == ["main", *frozen]
            assert in_step(algorithm, "main", *frozen)
            if frozen and frozen[-1] not in seen:
                seen[frozen[-1]] = learner_fingerprint(algorithm, frozen[-1])
                assert learner_fingerprint(algorithm, "main") == seen[frozen[-1]]
            if len(frozen) == 3:
                break
        # Those that were frozen stay what they were.
        assert len(set(seen.values())) == 3
        assert {key: learner_fingerprint(algorithm, key) for key in seen} == seen
        algorithm.remove_module(
            "main_v1",
            new_agent_to_module_mapping_fn=lambda agent, episode, **_: (
                "main" if hash(episode.id_) % 2 == agent else "main_v2"
            ),
        )
        assert "main_v1" not in updater.modules
        assert in_step(algorithm, "main", "main_v2", "main_v3")
        algorithm.train()
        assert in_step(algorithm, "main", "main_v2", "main_v3")
    finally:
        algorithm.stop()

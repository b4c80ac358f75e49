"""Small RLlib Algorithms for tests, and looks at their real weights that ask nothing of the library."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
import ray
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core.rl_module.multi_rl_module import MultiRLModule
from ray.rllib.examples.envs.classes.multi_agent import MultiAgentCartPole

PATIENCE = 90.0
MODULE = "default_policy"


def config(runners: int, base: Callable[[], Any] = PPOConfig) -> Any:
    return (
        base()
        .environment("CartPole-v1")
        .env_runners(
            num_env_runners=runners,
            num_cpus_per_env_runner=0,
            rollout_fragment_length=32,
            sample_timeout_s=PATIENCE,
        )
        .learners(num_cpus_per_learner=0)
        .training(train_batch_size_per_learner=64, minibatch_size=64, num_epochs=1, lr=0.01)
        .rl_module(model_config={"fcnet_hiddens": [8]})
        .debugging(seed=1)
    )


def two_agents(
    runners: int, first: str = "main", second: str = "opponent", base: Callable[[], Any] = PPOConfig
) -> Any:
    """Return the config of a CartPole that two policies play, each for itself."""
    return (
        config(runners, base)
        .environment(MultiAgentCartPole, env_config={"num_agents": 2})
        .multi_agent(
            policies={first, second},
            policy_mapping_fn=lambda agent, episode, **_: (first, second)[int(agent)],
        )
    )


def in_runners(algorithm: Any, ask: Any) -> list[Any]:
    """Ask each remote env runner, in the order of RLlib's indices."""
    actors = algorithm.env_runner_group._worker_manager.actors()
    return ray.get([actor.__ray_call__.remote(ask) for _, actor in sorted(actors.items())], timeout=PATIENCE)


def everywhere(algorithm: Any, ask: Any) -> list[Any]:
    """Ask each env runner, those of evaluation and those in this process included."""
    found = []
    for group in (algorithm.env_runner_group, algorithm.eval_env_runner_group):
        if group is not None:
            local = group.local_env_runner
            found += [] if local is None or local.module is None else [ask(local)]
            actors = group._worker_manager.actors()
            found += ray.get([actor.__ray_call__.remote(ask) for actor in actors.values()], timeout=PATIENCE)
    return found


def fingerprint(module_id: str, holder: Any, whole: bool = False) -> str:
    """Hash the weights with which a learner's or an env runner's module acts: each name, type, shape and byte."""
    module = holder.module
    if isinstance(module, MultiRLModule):
        module = module[module_id]
    state = module.unwrapped().get_state(inference_only=not whole)
    digest = hashlib.sha256()
    for name, value in sorted(state.items()):
        array = np.ascontiguousarray(value)
        digest.update(f"{name} {array.dtype} {array.shape} ".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def runner_fingerprints(algorithm: Any, module_id: str = MODULE) -> set[str]:
    """Hash what every env runner acts with."""
    return set(everywhere(algorithm, functools.partial(fingerprint, module_id)))


def learner_fingerprint(algorithm: Any, module_id: str = MODULE, *, whole: bool = False) -> str:
    """Hash the same weights of the learners, or with `whole` all of them."""
    ask = functools.partial(fingerprint, module_id, whole=whole)
    (found,) = {answer.get() for answer in algorithm.learner_group.foreach_learner(ask)}
    return found


def in_step(algorithm: Any, *module_ids: str) -> bool:
    """Tell whether every env runner acts with the learner's weights."""
    return all(
        runner_fingerprints(algorithm, module_id) == {learner_fingerprint(algorithm, module_id)}
        for module_id in module_ids or (MODULE,)
    )

"""What runs inside RLlib's env runners: a push, and the stamps of what is sampled.

Rules kept here
- Weights, RLlib's own number for them and the note change in one call. A runner's calls come one after another, so no
  sample lies in between.
- RLlib's number never falls, and it never rises without the weights that belong to it.
- A stamp is given only while nobody else has written into the module since the push.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from weightledger.updater.in_worker.receiver import held_version, receive
from weightledger.updater.messages import Inspection, Probe, Push, Receipt

STAMP = "policy_version"
"""The key of the stamp in an episode's custom data, and of its column in train batches."""

NO_VERSION = 0
"""The stamp of steps whose weights are no known version."""

_SINGLE = ("default_policy", "default")


def policy_of(module_id: str) -> str:
    """Return the policy, that is the series of versions, of an RLModule: its id, and `default` for RLlib's default."""
    return _SINGLE[1] if module_id == _SINGLE[0] else module_id


@dataclass(frozen=True)
class ModuleOf:
    """Find one RLModule in an env runner, of a single agent or of several, and in it what RLlib would sync."""

    module_id: str

    def __call__(self, runner: Any) -> Any:
        """Return where weights are written: the module, or of one that is not inference-only a mapping of that part.

        RLlib builds some with all that learners have, for instance recurrent ones; it syncs the inference-only part
        of those as well, and leaves the rest alone.

        Raises:
            LookupError: the runner has no such module, or it computes what RLlib syncs of it.
        """
        from ray.rllib.core.rl_module.apis import InferenceOnlyAPI

        module = self.module(runner)
        has_more = not module.inference_only and isinstance(module, InferenceOnlyAPI)
        if not has_more:
            return module
        kept = module.get_state(inference_only=True)
        whole = module.state_dict(keep_vars=True)
        live = dict(module.named_parameters(remove_duplicate=False))
        live |= module.named_buffers(remove_duplicate=False)
        computed = [name for name in kept if name not in live or whole.get(name) is not live[name]]
        if computed:
            raise LookupError(
                f"module {self.module_id!r} computes {', '.join(map(repr, computed))} of its state; expected its own "
                "parameters and buffers, since only into those weights can be written"
            )
        return {name: live[name] for name in kept}

    def module(self, runner: Any) -> Any:
        """Return the module itself.

        Raises:
            LookupError: the runner has no such module.
        """
        from ray.rllib.core.rl_module.multi_rl_module import MultiRLModule

        module = runner.module
        if isinstance(module, MultiRLModule):
            if self.module_id not in module:
                raise LookupError(
                    f"the env runner has no module {self.module_id!r}, only {sorted(map(str, module.keys()))}"
                )
            module = module[self.module_id]
        elif module is None:
            raise LookupError(f"the env runner has no module at all, expected {self.module_id!r}")
        return module.unwrapped() if hasattr(module, "unwrapped") else module


def module_ids_in(runner: Any) -> list[str] | None:
    """Return which modules an env runner has; None of a single agent's, which has the one that there is."""
    from ray.rllib.core.rl_module.multi_rl_module import MultiRLModule

    module = runner.module
    if module is None:
        return []
    return list(module.keys()) if isinstance(module, MultiRLModule) else None


def receive_in_runner(runner: Any, push: Push | Probe, payload: Any, number: int) -> Receipt | Inspection:
    """Carry out one instruction in an env runner, as `receiver.receive` does, and give RLlib its number for it.

    RLlib itself loads weights by number only, and takes over the number of those that it did not load; so the number
    is written here, with the weights, and stays what it is when they are refused.
    """
    answer = receive(runner, push, payload)
    if isinstance(answer, Receipt) and answer.outcome in ("applied", "relabelled"):
        runner._weights_seq_no = max(runner._weights_seq_no, number)
    return answer


def runner_version(runner: Any, module_id: str = _SINGLE[0]) -> int | None:
    """Return the version that an env runner acts with, for code that runs in it.

    Returns:
        The version; None before the first push, and when somebody wrote into the module since the last one.
    """
    return held_version(runner, policy_of(module_id))


def stamp_samples(runner: Any, samples: Iterable[Any]) -> None:
    """Stamp what an env runner has just sampled with the versions that produced it.

    Each chunk of an episode gets them in `custom_data["policy_version"]` (for several agents a dictionary by the ids of
    the modules that acted), and each step in `extra_model_outputs["policy_version"]`, which RLlib makes a column of the
    train batch. Steps whose weights are no known version get 0, and so does what a chunk looks back on.

    Args:
        runner: the env runner.
        samples: the episodes that it returns from `sample`. No push lands inside of one `sample`, so each chunk has
            one version.
    """
    for episode in samples:
        agents = getattr(episode, "agent_episodes", None)
        if agents is None:
            version = runner_version(runner)
            episode.custom_data[STAMP] = version
            _add_column(episode, version)
            continue
        versions = {}
        for single in agents.values():
            versions[single.module_id] = runner_version(runner, single.module_id)
            _add_column(single, versions[single.module_id])
        episode.custom_data[STAMP] = versions


def batch_versions(episodes: Sequence[Any]) -> list[int]:
    """Return the versions that produced single-agent episodes, step by step; 0 where that is not known."""
    found: list[int] = []
    for episode in episodes:
        column = episode.extra_model_outputs.get(STAMP)
        steps = [NO_VERSION] * len(episode) if column is None else episode.get_extra_model_outputs(STAMP)
        found.extend(int(step) for step in steps)
    return found


def _add_column(episode: Any, version: int | None) -> None:
    from ray.rllib.env.utils.infinite_lookback_buffer import InfiniteLookbackBuffer

    actions = episode.actions
    stamps = np.full(len(actions) + actions.lookback, NO_VERSION if version is None else version, np.int64)
    stamps[: actions.lookback] = NO_VERSION
    episode.extra_model_outputs[STAMP] = InfiniteLookbackBuffer(
        stamps if episode.is_numpy else list(stamps), lookback=actions.lookback
    )

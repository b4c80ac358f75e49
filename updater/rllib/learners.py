"""RLlib's learners, seen from the driver: the weights that runners get, the whole state that a rollback needs.

A `LearnerGroup` has one learner in this process or several actors; what is asked of them is the same. Tensors are read
where they are: RLlib's own `get_state` turns those without dimensions into plain numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from ray.rllib.utils.lambda_defaultdict import LambdaDefaultDict
from torch import nn

from weightledger.registry.errors import InvalidWeightsError, SyncError


class LearnerGroupLike(Protocol):
    """The part of RLlib's `LearnerGroup` that is used here."""

    @property
    def is_local(self) -> bool:
        """Whether the one learner is in this process."""
        ...

    def foreach_learner(self, func: Callable[..., Any], **options: Any) -> Any:
        """Call a function with each learner."""
        ...


class Learners:
    """Reads and writes the learners of an Algorithm.

    Args:
        group: the Algorithm's `learner_group`.
        timeout: seconds that one question waits for learners in other processes.
    """

    def __init__(self, group: LearnerGroupLike, timeout: float) -> None:
        self.group = group
        self.timeout = timeout

    def module_ids(self) -> dict[str, bool]:
        """Return the ids of the modules that env runners have, too, and whether each has weights."""
        found: dict[str, bool] = self._first(_module_ids)
        return found

    def weights(self, module_id: str) -> dict[str, Any]:
        """Return what env runners get of a module. Of a learner in this process these are its live tensors."""
        found: dict[str, Any] = self._first(partial(_weights, module_id=module_id, inference_only=True))
        return found

    def whole(self, module_id: str) -> dict[str, Any]:
        """Return all that belongs to a module: every weight, the state of what trains it, and its learner's values."""
        found: dict[str, Any] = self._first(partial(_whole, module_id=module_id))
        return found

    def check(self, module_id: str, whole: Mapping[str, Any]) -> None:
        """Make sure that the learners take a module's weights, those that env runners do not have included.

        RLlib itself loads what fits and leaves the rest as it is.

        Raises:
            InvalidWeightsError: they do not fit; names each problem.
        """
        shapes = {name: _shape(value) for name, value in whole["module"].items()}
        problems = self._first(partial(_problems, module_id=module_id, shapes=shapes))
        if problems:
            raise InvalidWeightsError(
                f"the learner's module {module_id!r} does not take this version; nothing was changed:\n  "
                + "\n  ".join(problems)
            )

    def restore(self, module_id: str, whole: Mapping[str, Any]) -> list[str]:
        """Bring a module back in every learner, with what else of `whole` is given.

        Returns:
            What could not be restored, by name.
        """
        return list(self._all(partial(_restore, module_id=module_id, whole=whole))[0])

    def number(self) -> int:
        """Return RLlib's number of the learner's weights, which it raises by one with each update."""
        return int(self._first(_number))

    def raise_number(self, number: int) -> None:
        """Raise RLlib's number, so that what it counts next is above what runners were given."""
        self._all(partial(_raise_number, number=number))

    def _first(self, ask: Callable[[Any], Any]) -> Any:
        if self.group.is_local:
            return self._all(ask)[0]
        manager: Any = self.group._worker_manager  # type: ignore[attr-defined]
        return self._all(ask, remote_actor_ids=manager.healthy_actor_ids()[:1])[0]

    def _all(self, ask: Callable[[Any], Any], **options: Any) -> list[Any]:
        answers = list(self.group.foreach_learner(ask, timeout_seconds=self.timeout, **options))
        for answer in answers:
            if not answer.ok:
                raise answer.get()
        if not answers:
            raise SyncError(
                f"expected an answer of the learners within {self.timeout:g} s, found none; raise timeout="
            )
        return [answer.get() for answer in answers]


def _module_ids(learner: Any) -> dict[str, bool]:
    return {
        key: _has_weights(module.unwrapped())
        for key, module in learner.module.items()
        if not getattr(module.unwrapped(), "learner_only", False)
    }


def _has_weights(module: Any) -> bool:
    return isinstance(module, nn.Module) and bool(module.state_dict())


def _weights(learner: Any, *, module_id: str, inference_only: bool) -> dict[str, Any]:
    module = learner.module[module_id].unwrapped()
    tensors = module.state_dict()
    kept = module.get_state(inference_only=inference_only)
    return {key: _on_cpu(tensors.get(key, value)) for key, value in kept.items()}


def _problems(learner: Any, *, module_id: str, shapes: Mapping[str, Any]) -> list[str]:
    weights = _weights(learner, module_id=module_id, inference_only=False)
    own = {name: _shape(value) for name, value in weights.items()}
    found = [f"{name!r} is missing in the version" for name in own.keys() - shapes.keys()]
    found += [f"{name!r} is in the version, but not in the learner" for name in shapes.keys() - own.keys()]
    found += [
        f"{name!r} has the shape {own[name]} in the learner, {shapes[name]} in the version"
        for name in own.keys() & shapes.keys()
        if own[name] != shapes[name]
    ]
    return sorted(found)


def _shape(value: Any) -> tuple[int, ...] | None:
    return tuple(value.shape) if isinstance(value, (torch.Tensor, np.ndarray)) else None


def _whole(learner: Any, *, module_id: str) -> dict[str, Any]:
    found = _own_optimizers(learner, module_id)
    names = _parameter_names(learner, module_id)
    return {
        "module": _weights(learner, module_id=module_id, inference_only=False),
        "optimizers": {name: _on_cpu(optimizer.state_dict()) for name, optimizer in found.alone.items()},
        "shared_optimizers": {
            name: {
                names[id(parameter)]: _on_cpu(optimizer.state[parameter])
                for parameter in _parameters(optimizer)
                if id(parameter) in names and parameter in optimizer.state
            }
            for name, optimizer in found.shared.items()
        },
        "values": {name: _on_cpu(value) for name, value in _values(learner, module_id).items()},
    }


def _restore(learner: Any, *, module_id: str, whole: Mapping[str, Any]) -> list[str]:
    found = _own_optimizers(learner, module_id)
    alone, shared = whole.get("optimizers", {}), whole.get("shared_optimizers", {})
    states = {name: {"module_id": module_id, "state": state} for name, state in alone.items()}
    for name, parts in shared.items():
        if name in found.shared:
            state = _with_part(found.shared[name], _parameter_names(learner, module_id), parts)
            states[name] = {"module_id": module_id, "state": state}
    # Without a number, which makes RLlib load what is given; with an old one it would keep the abandoned weights.
    learner.set_state({"rl_module": {module_id: dict(whole["module"])}, "optimizer": states})
    given, there = {*alone, *shared}, {*found.alone, *found.shared}
    return [
        *(f"optimizer {name!r} (the version has none)" for name in sorted(there - given)),
        *(f"optimizer {name!r} (the learner has none)" for name in sorted(given - there)),
        *found.strays,
        *_restore_values(learner, module_id, whole.get("values")),
    ]


def _restore_values(learner: Any, module_id: str, values: Mapping[str, Any] | None) -> list[str]:
    there = _values(learner, module_id)
    if values is None:
        return [f"value {name!r} (the version has none)" for name in sorted(there)]
    for name in there.keys() - values.keys():
        # It was not used yet when the version was published, and is made anew.
        del vars(learner)[name][module_id]
    left = []
    for name, value in values.items():
        kept = vars(learner).get(name)
        if isinstance(kept, LambdaDefaultDict):
            with torch.no_grad():
                kept[module_id].copy_(value)
        else:
            left.append(f"value {name!r} (the learner has none)")
    return left


def _with_part(optimizer: Any, names: Mapping[int, str], part: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state as it is, but for the parameters of one module."""
    state: dict[str, Any] = optimizer.state_dict()
    entries = dict(state["state"])
    for at, parameter in enumerate(_parameters(optimizer)):
        name = names.get(id(parameter))
        if name is not None:
            # What has none was not trained yet: its moments begin anew.
            entries.pop(at, None)
            if name in part:
                entries[at] = part[name]
    return state | {"state": entries}


@dataclass(frozen=True)
class _OwnOptimizers:
    """The optimizers that train a module, by the names that a learner's own state has."""

    alone: dict[str, Any]
    """Those that train nothing else."""
    shared: dict[str, Any]
    """Those that train other modules, too: what belongs to a module is the part of its parameters."""
    strays: list[str]
    """What shared ones train that belongs to no module."""


def _own_optimizers(learner: Any, module_id: str) -> _OwnOptimizers:
    """Find the optimizers that train a module, whichever module they were registered for."""
    owners: dict[int, set[str]] = {}
    for key, module in learner.module.items():
        if isinstance(module.unwrapped(), nn.Module):
            for parameter in module.unwrapped().parameters():
                owners.setdefault(id(parameter), set()).add(key)
    found = _OwnOptimizers({}, {}, [])
    for name, optimizer in learner._named_optimizers.items():
        parameters = _parameters(optimizer)
        trained = {key for parameter in parameters for key in owners.get(id(parameter), ())}
        trained |= {learner._optimizer_name_to_module[name]} & set(learner.module.keys())
        if trained == {module_id}:
            found.alone[name] = optimizer
        elif module_id in trained:
            found.shared[name] = optimizer
            strays = sum(id(parameter) not in owners for parameter in parameters)
            if strays:
                found.strays.append(f"{strays} parameters of optimizer {name!r} (they belong to no module)")
    return found


def _parameters(optimizer: Any) -> list[Any]:
    """Return what an optimizer trains, in the order in which its state numbers it."""
    found = {id(each): each for group in optimizer.param_groups for each in group["params"]}
    return list(found.values())


def _parameter_names(learner: Any, module_id: str) -> dict[int, str]:
    module = learner.module[module_id].unwrapped()
    return {id(parameter): name for name, parameter in module.named_parameters()}


def _values(learner: Any, module_id: str) -> dict[str, torch.Tensor]:
    """Return what a learner keeps for a module beside it, such as PPO's KL coefficient and SAC's alpha."""
    return {
        name: kept[module_id]
        for name, kept in vars(learner).items()
        if isinstance(kept, LambdaDefaultDict) and isinstance(kept.get(module_id), torch.Tensor)
    }


def _number(learner: Any) -> int:
    return int(learner._weights_seq_no)


def _raise_number(learner: Any, *, number: int) -> None:
    learner._weights_seq_no = max(learner._weights_seq_no, number)


def _on_cpu(value: Any) -> Any:
    """Return nested state with its tensors where a process without their device can have them."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, Mapping):
        return {key: _on_cpu(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_on_cpu(item) for item in value)
    return value

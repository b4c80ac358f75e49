"""RLlib's learners, seen from the driver: the weights that runners get, the whole state that a rollback needs.

A `LearnerGroup` has one learner in this process or several actors; what is asked of them is the same. Tensors are read
where they are: RLlib's own `get_state` turns those without dimensions into plain numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import torch

from weightledger.registry.errors import SyncError


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

    def module_ids(self) -> list[str]:
        """Return the ids of the modules that env runners have, too."""
        found: list[str] = self._first(_module_ids)
        return found

    def weights(self, module_id: str) -> dict[str, Any]:
        """Return what env runners get of a module. Of a learner in this process these are its live tensors."""
        found: dict[str, Any] = self._first(partial(_weights, module_id=module_id, inference_only=True))
        return found

    def whole(self, module_id: str) -> dict[str, Any]:
        """Return all that belongs to a module: every weight, and its optimizers by name."""
        found: dict[str, Any] = self._first(partial(_whole, module_id=module_id))
        return found

    def restore(self, module_id: str, whole: Mapping[str, Any]) -> None:
        """Bring a module, and the optimizers that are given with it, back, in every learner."""
        self._all(partial(_restore, module_id=module_id, whole=whole))

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


def _module_ids(learner: Any) -> list[str]:
    return [
        key
        for key, module in learner.module.items()
        if not getattr(module.unwrapped(), "learner_only", False)
    ]


def _weights(learner: Any, *, module_id: str, inference_only: bool) -> dict[str, Any]:
    module = learner.module[module_id].unwrapped()
    tensors = module.state_dict()
    kept = module.get_state(inference_only=inference_only)
    return {key: _on_cpu(tensors.get(key, value)) for key, value in kept.items()}


def _whole(learner: Any, *, module_id: str) -> dict[str, Any]:
    # By the names that a learner's own state has; its public method shortens them.
    names = learner._module_optimizers.get(module_id, ())
    return {
        "module": _weights(learner, module_id=module_id, inference_only=False),
        "optimizers": {name: _on_cpu(learner._named_optimizers[name].state_dict()) for name in names},
    }


def _restore(learner: Any, *, module_id: str, whole: Mapping[str, Any]) -> None:
    optimizers = {
        name: {"module_id": module_id, "state": state} for name, state in whole.get("optimizers", {}).items()
    }
    # Without a number, which makes RLlib load what is given; with an old one it would keep the abandoned weights.
    learner.set_state({"rl_module": {module_id: dict(whole["module"])}, "optimizer": optimizers})


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

"""Payload → live target, all or nothing.

Rules:

* Everything is checked before anything is written, and every problem is told in one error. Names, shapes and dtypes
  must fit exactly; a 0-dimensional tensor does not fit one with a single element; `cast=True` lets dtypes differ.
* Tensors are written in place: parameters keep their identity, ties, device, `requires_grad` and lock.
* Extra states and plain values are set first, since setting them may fail; they are put back if it does. Values are
  compared, and only set where they differ.
* A name may differ by `_orig_mod.` anywhere, and by a `module.` that all names of one side carry.
* Of tied target tensors one name in the snapshot is enough, but two must hold the same bytes.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from weightledger.registry import values
from weightledger.registry.errors import InvalidWeightsError
from weightledger.registry.weights import structure
from weightledger.registry.weights.digest import value_hash
from weightledger.registry.weights.fitting import (
    Plan,
    check_content,
    fail,
    make_plan,
    still_good,
)
from weightledger.registry.weights.live import live_digest, set_at
from weightledger.registry.weights.payload import Payload

__all__ = ["CopyResult", "Plan", "check_fit", "copy_into", "live_digest"]


@dataclass(frozen=True)
class CopyResult:
    """What a restore did."""

    cast: tuple[str, ...]
    """Names, sorted, of the tensors whose dtype was converted; their bytes are not the version's any more."""


def copy_into(
    payload: Payload, target: object, *, cast: bool = False, plans: dict[int, Plan] | None = None
) -> CopyResult:
    """Write a snapshot into a live target, in place.

    Args:
        payload: The snapshot, verified.
        target: A module, TensorDict or mapping of tensors (nested too; a state dict writes into its module's
            tensors, but extra state only into the dict).
        cast: Whether a tensor may have another dtype than the snapshot's.
        plans: A dictionary that the caller keeps for its targets: while layout and target stay the same, the checks
            are not made again. It keeps the targets alive.

    Returns:
        Which names were converted.

    Raises:
        InvalidWeightsError: The snapshot does not fit; the text lists every problem. The target is unchanged.
    """
    plan = _plan(payload, target, cast, plans)
    check_content(plan, payload)
    with ExitStack() as undo:
        if plan.live.extras:
            _set_extra_states(plan, payload, undo)
            if still_good(plan, payload, target, cast) is None:
                # A module may replace its tensors, or their memory, when it takes its extra state.
                plan = make_plan(payload, target, cast)
                _keep(plans, target, plan)
        _set_values(plan, payload, undo)
        undo.pop_all()
    _copy(plan, payload)
    return CopyResult(plan.cast)


def check_fit(
    payload: Payload, target: object, *, cast: bool = False, plans: dict[int, Plan] | None = None
) -> None:
    """Find out whether a snapshot fits a target, and write nothing.

    Args:
        payload: The snapshot, verified.
        target: As in `copy_into`.
        cast: As in `copy_into`.
        plans: As in `copy_into`, which need not check again then.

    Raises:
        InvalidWeightsError: It does not; the text lists every problem, as that of `copy_into` would.
    """
    check_content(_plan(payload, target, cast, plans), payload)


def _plan(payload: Payload, target: object, cast: bool, plans: dict[int, Plan] | None) -> Plan:
    plan = None if plans is None else still_good(plans.get(id(target)), payload, target, cast)
    if plan is None:
        plan = make_plan(payload, target, cast)
        _keep(plans, target, plan)
    return plan


def _copy(plan: Plan, payload: Payload) -> None:
    sources: dict[bool, list[Tensor]] = {}
    for group in plan.groups:
        if group.moves is not None:
            group.moves.scatter(payload.buffer.ctypes.data + payload.layout.data_start)
            torch.autograd.graph.increment_version(group.tensors)
            continue
        flat = group.way.flat
        if flat not in sources:
            sources[flat] = payload.views(flat=flat)
        wanted = [sources[flat][at] for at in group.places]
        with torch.inference_mode(group.way.inference), torch.no_grad():
            torch._foreach_copy_(group.rows, wanted)  # pyright: ignore[reportPrivateImportUsage]


def _keep(plans: dict[int, Plan] | None, target: object, plan: Plan) -> None:
    # Plain values live in containers that tell nobody when they change, so each restore looks at them anew.
    if plans is not None and not plan.live.values and not plan.scalars:
        plans[id(target)] = plan


def _set_extra_states(plan: Plan, payload: Payload, undo: ExitStack) -> None:
    for name, part in plan.live.extras.items():
        state = _extra_state(payload, name)
        with _explaining(f"the extra state {name!r} of the target could not be read"):
            before = copy.deepcopy(part.get_extra_state())
        undo.callback(_give_extra_state, part, before)
        with _explaining(f"the target refused the extra state {name!r}"):
            _give_extra_state(part, state)


def _give_extra_state(part: nn.Module, state: Any) -> None:
    with torch.no_grad():
        part.set_extra_state(state)


def _extra_state(payload: Payload, name: str) -> Any:
    if name in payload.values:
        return values.decode(payload.values[name])
    if payload.structure is None and name not in payload.layout.by_name:
        fail([f"the extra state {name!r} has parts, and the snapshot does not say how they are held"])
    # Copies, since a module keeps what it is given, and this memory is soon another version's.
    with torch.inference_mode(False), torch.no_grad():
        own = {
            each: tensor.clone()
            for each, tensor in payload.tensors().items()
            if each == name or each.startswith(f"{name}.")
        }
    if name in own:
        return own[name]
    assert payload.structure is not None
    return structure.rebuild_part(payload.structure, own, payload.values, name)


def _set_values(plan: Plan, payload: Payload, undo: ExitStack) -> None:
    stored = payload.tensors() if plan.scalars else {}
    changes: list[tuple[str, Any, Any]] = [
        (name, plan.live.numpy[name], stored[theirs].to(plan.live.tensors[name].dtype).numpy()[()])
        for name, theirs in plan.scalars.items()
    ]
    for name, now in plan.live.values.items():
        theirs = plan.renamed[name]
        if plan.live.extra_of(theirs) is None and value_hash(payload.values[theirs]) != value_hash(now):
            changes.append((name, values.decode(now), values.decode(payload.values[theirs])))
    for name, before, after in changes:
        with _explaining(f"the value {name!r} could not be set to {after!r:.80}"):
            set_at(plan.live, plan.live.paths[name], after)
        undo.callback(set_at, plan.live, plan.live.paths[name], before)


@contextmanager
def _explaining(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # Whatever a module's own code or a container raises, the target is put back.
        raise InvalidWeightsError(f"{what}; nothing was changed: {error}") from error

"""Payload → live target, all or nothing.

Rules:

* Everything is checked before anything is written, and every problem is told in one error. Names, shapes and dtypes
  must fit exactly; a 0-dimensional tensor does not fit one with a single element; `cast=True` lets dtypes differ, as
  far as no number is lost.
* What is written are the tensors that the target really uses (`proof`). A module that shows others, or that derives
  something when it loads, loads in its own way (`loading`), and proves it or keeps what it held.
* Tensors are written in place: parameters keep their identity, ties, device, `requires_grad` and lock.
* Extra states and plain values are set first, since setting them may fail; they are put back if it does. Values are
  compared, and only set where they differ.
* A name may differ by `_orig_mod.` anywhere, and by a `module.` that all names of one side carry.
* Of tied target tensors one name in the snapshot is enough, but two must hold the same bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weightledger.registry import values
from weightledger.registry.errors import InvalidWeightsError
from weightledger.registry.weights.digest import value_hash
from weightledger.registry.weights.fitting import (
    Plan,
    check_content,
    make_plan,
    still_good,
)
from weightledger.registry.weights.live import live_digest, set_at
from weightledger.registry.weights.loading import Former, NotPutBackError, load, set_extra_states
from weightledger.registry.weights.payload import Payload

__all__ = ["CopyResult", "NotPutBackError", "Plan", "check_fit", "copy_into", "live_digest"]


@dataclass(frozen=True)
class CopyResult:
    """What a restore did."""

    cast: tuple[str, ...]
    """Names, sorted, of the tensors whose dtype was converted; their bytes are not the version's any more."""


def copy_into(
    payload: Payload,
    target: object,
    *,
    cast: bool = False,
    allow_nonfinite: bool | Collection[str] = False,
    own: bool = False,
    plans: dict[int, Plan] | None = None,
) -> CopyResult:
    """Write a snapshot into a live target: in place, or by its own `load_state_dict` if that is how a module works.

    Args:
        payload: The snapshot, verified.
        target: A module, TensorDict or mapping of tensors (nested too; a state dict writes into its module's
            tensors, but extra state only into the dict).
        cast: Whether a tensor may have another dtype than the snapshot's. What that does not hold is refused, by the
            rules of `casting`.
        allow_nonfinite: Whether finite numbers may become infinite when they are cast; or globs of the tensors'
            names, as the snapshot has them.
        own: Whether a module is to load by its own `load_state_dict` in any case.
        plans: A dictionary that the caller keeps for its targets: while layout and target stay the same, the checks
            are not made again. It keeps the targets alive.

    Returns:
        Which names were converted.

    Raises:
        InvalidWeightsError: The snapshot does not fit, or the target did not take it; the text names what. The target
            is unchanged.
        NotPutBackError: The target's own code did not load it, nor what was there before.
    """
    with ExitStack() as undo:
        plan = _ready(payload, target, cast, own, plans, undo, allow_nonfinite)
        if plan.loaded is not None:
            load(plan, payload, lambda: _copy_rest(plan, payload, target))
        else:
            _set_values(plan, payload, undo)
        undo.pop_all()
    if plan.loaded is None:
        _copy(plan, payload)
    return CopyResult(tuple(sorted(write.own for write in plan.cast)))


def check_fit(
    payload: Payload, target: object, *, cast: bool = False, plans: dict[int, Plan] | None = None
) -> None:
    """Find out whether a snapshot fits a target, which holds afterwards what it holds now.

    A module that loads in its own way shows it by doing so; what it held is put back.

    Args:
        payload: The snapshot, verified.
        target: As in `copy_into`.
        cast: As in `copy_into`.
        plans: As in `copy_into`, which need not check again then.

    Raises:
        InvalidWeightsError: It does not; the text lists every problem, as that of `copy_into` would.
        NotPutBackError: As in `copy_into`.
    """
    with ExitStack() as undo:
        plan = _ready(payload, target, cast, False, plans, undo)
        if plan.loaded is not None:
            load(plan, payload, lambda: _copy_rest(plan, payload, target), keep=False)


def _ready(
    payload: Payload,
    target: object,
    cast: bool,
    own: bool,
    plans: dict[int, Plan] | None,
    undo: ExitStack,
    allow_nonfinite: bool | Collection[str] = False,
) -> Plan:
    """Check everything, and set extra states, which may fail; `undo` puts back what was set."""
    plan = _plan(payload, target, cast, own, plans)
    check_content(plan, payload, allow_nonfinite)
    if plan.loaded is None and plan.live.extras:
        undo.callback(Former(plan.live).put_back, "the target did not take its extra state")
        if not set_extra_states(plan, payload):
            # It may follow from the tensors, which come first when a module loads.
            undo.close()
            plan = make_plan(payload, target, cast, own=True)
        elif still_good(plan, payload, target, cast) is None:
            # A module may replace its tensors, or their memory, when it takes its extra state.
            plan = make_plan(payload, target, cast)
            _keep(plans, target, plan)
    return plan


def _plan(payload: Payload, target: object, cast: bool, own: bool, plans: dict[int, Plan] | None) -> Plan:
    plan = None if plans is None or own else still_good(plans.get(id(target)), payload, target, cast)
    if plan is None:
        plan = make_plan(payload, target, cast, own)
        _keep(plans, target, plan)
    return plan


def _copy_rest(plan: Plan, payload: Payload, target: object) -> None:
    if plan.groups:
        # Loading may have given non-persistent buffers other memory.
        _copy(make_plan(payload, target, plan.cast_allowed, own=True), payload)


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
    if plans is not None and plan.steady and not plan.live.values and not plan.scalars:
        plans[id(target)] = plan


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

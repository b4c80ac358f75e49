"""What to do with each worker, decided from what is known. No Ray, no database, no clock.

Rules kept here
- A worker's target is its pin, else the head (or a version asked for this once).
- A worker that holds its target, in the same life, is left alone.
- A worker that holds equal content under another number is relabelled: no bytes are sent.
- A version with NaN or infinity is refused, unless that is allowed.
- The interval passes a worker by only when it holds a version of the head's own lineage and follows the head: what is
  unknown, rolled back, pinned, just unpinned or forced is never passed by.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from weightledger.registry.weights import is_allowed
from weightledger.updater.workers.state import Known

Action = Literal["push", "relabel", "current", "skip", "refuse", "wait"]


@dataclass(frozen=True)
class Target:
    """What a worker should hold."""

    version: int
    sent_digest: str
    pinned: bool
    nonfinite: tuple[str, ...] = ()


class Situation(NamedTuple):
    """Everything that decides about one worker."""

    known: Known | None
    target: Target
    in_flight: bool
    """An earlier push has not been answered yet."""
    forced: bool
    """`sync`, `weights=`, `force=True`, or a rollback was just taken over."""
    resend: bool
    """`force=True`: send the bytes even to a worker that holds them by its receipt."""
    on_lineage: bool
    """What it holds is on the head's lineage: not a branch that a rollback abandoned."""


def decide(
    situation: Situation,
    skip: Callable[[], bool],
    *,
    allow_nonfinite: bool | Collection[str],
    relabels: bool = True,
) -> Action:
    """Decide what to do with one worker.

    Args:
        skip: the interval rule, asked only when it may pass the worker by.
        allow_nonfinite: True, or globs of tensor names that may hold NaN or infinity.
        relabels: whether equal content may be taken over without sending bytes.
    """
    known, target = situation.known, situation.target
    if situation.in_flight:
        return "wait"
    if known is not None and known.version == target.version and not situation.resend:
        return "current"
    if refused_tensors(target.nonfinite, allow_nonfinite):
        return "refuse"
    headlong = situation.forced or known is None or target.pinned or known.pinned or not situation.on_lineage
    if not headlong and skip():
        return "skip"
    if relabels and not situation.resend and known is not None and known.sent_digest == target.sent_digest:
        return "relabel"
    return "push"


def refused_tensors(nonfinite: Sequence[str], allow_nonfinite: bool | Collection[str]) -> tuple[str, ...]:
    """Return the names whose NaN or infinity is not allowed."""
    return tuple(name for name in nonfinite if not is_allowed(name, allow_nonfinite))


def within_interval(passed_by: int, max_interval: int) -> bool:
    """Tell whether a worker that `passed_by` calls have passed by since its last push is passed by once more."""
    return passed_by < max_interval

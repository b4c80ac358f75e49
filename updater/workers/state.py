"""What is known of one worker. Only the table writes these fields."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from weightledger.registry.sync import Stretch
from weightledger.updater.messages import Note, Push

WorkerId = int | str
"""A worker's id, or its name."""
WorkerIds = WorkerId | Iterable[WorkerId]

TroubleKind = Literal["dead", "restarting", "failed", "rejected", "bytes_lost", "doubtful", "silent"]


@dataclass(frozen=True)
class Known:
    """What a worker holds by its last receipt, while nothing has put that in doubt."""

    version: int
    sent_digest: str
    incarnation: str
    pinned: bool
    """Whether it was pinned when it got this, or was last found to hold its target; True when that is not known."""


@dataclass(frozen=True)
class Trouble:
    """What a transport says instead of a receipt.

    `dead`: the worker is gone for good. `restarting`: its process ended, another incarnation may follow. `failed`: the
    push never reached the worker's code, which holds what it held. `rejected`: nor did it here, as the worker cannot
    make out what it was sent: it lacks a module, for instance. `bytes_lost`: nor did it here, as the transport lost the
    weights on the way. `doubtful`: the connection broke, it may have been carried out. `silent`: no answer in time.
    """

    kind: TroubleKind
    detail: str


@dataclass
class InFlight:
    """A push that left and was not answered yet."""

    push: Push
    answer: Any
    """What the transport gave back: a receipt, a future, an object reference."""
    pinned: bool
    started: float = field(default_factory=time.perf_counter)
    told_silent: bool = False
    """Whether the record already says that it was not answered in time."""


@dataclass
class WorkerState:
    """One worker, from `add_worker` to `remove_worker`."""

    id: int
    name: str
    handle: Any
    row: int
    """Key of its row in the registry."""
    known: Known | None = None
    on_record: Stretch | None = None
    """What the registry has of it as held: its open confirmed row."""
    unsettled: tuple[Stretch, ...] = ()
    """Pushes that earlier updaters left without an answer, oldest first; its own is `in_flight`."""
    in_flight: InFlight | None = None
    question: Any = None
    """What the transport gave back for a question that was not answered yet."""
    passed_by: int = 0
    """Calls that named it and passed it by since its last receipt."""
    owed: bool = False
    """Its last push failed: it is sent the bytes again, and the interval does not pass it by."""
    has_confirmed: bool = False
    """It has confirmed a push of this updater before."""
    gone: bool = False
    """It died for good, as far as is known."""


def interval_of(note: Note, incarnation: str) -> Stretch:
    """Turn a worker's own note into the row that stands for it."""
    return Stretch(note.version, note.digest, note.sent_digest, note.order, note.run, incarnation)

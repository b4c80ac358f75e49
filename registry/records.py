"""What callers receive: frozen records, free of database rows and of tensors.

Times are timezone-aware UTC. `to_dict()` gives plain values that `json.dumps` accepts (times as ISO 8601 text,
NaN and infinities as the text "nan", "inf", "-inf").
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal, TypeAlias

VersionState: TypeAlias = Literal["writing", "stored", "pruned", "lost"]
HoldingState: TypeAlias = Literal["held", "pending", "unknown", "ended"]
WorkerState: TypeAlias = Literal["confirmed", "unknown", "gone"]
FaultKind: TypeAlias = Literal["missing", "truncated", "corrupt", "stray"]


def plain(value: Any) -> Any:
    """Reduce a record's field to what JSON holds."""
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    if isinstance(value, Record):
        return value.to_dict()
    return value


class Record:
    """Mixin of every record."""

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON-ready values."""
        return {item.name: plain(getattr(self, item.name)) for item in dataclasses.fields(self)}  # type: ignore[arg-type]


@dataclass(frozen=True)
class Version(Record):
    """One row of a policy's append-only log."""

    policy: str
    number: int
    """1, 2, 3 …; never reused, never lowered."""
    digest: str
    """Content digest, `"blake3:<64 hex>"`."""
    parent: int | None
    """The version that training continued from; None for a first one."""
    restores: int | None
    """The version whose content a rollback brought back; None for a publish."""
    run: str
    """Identity of the process that wrote the row."""
    step: int | None
    metrics: Mapping[str, float] = field(hash=False)
    metadata: Mapping[str, Any] = field(hash=False)
    message: str
    size_bytes: int
    """Bytes of tensor data, tied tensors counted once."""
    created_at: datetime
    stored: bool
    """Whether the weights can be loaded now."""
    state: VersionState
    """`writing`: its writer is at work; `lost`: its writer died half-way; `pruned`: only the row is left."""
    nonfinite: tuple[str, ...]
    """Names of the tensors that hold NaN or infinity."""
    has_extra: bool = False
    """Whether optimizer or other state was stored with it (`load_extra`)."""

    def __repr__(self) -> str:
        what = f" restores v{self.restores}" if self.restores is not None else ""
        return f"<Version {self.policy} v{self.number}{what} {self.state} {self.digest[:19]}>"


@dataclass(frozen=True)
class Holding(Record):
    """One stretch of time in which a worker held a version.

    The worker switched somewhere between `pushed_at` and `confirmed_at`; it is certain from `confirmed_at` on.
    """

    worker: str
    incarnation: str | None
    """The life of the worker process that confirmed it; None while no receipt came."""
    policy: str
    version: int
    digest: str
    """Content digest of the version."""
    sent_digest: str
    """Digest of what the worker really received: another one when weights were mapped or cast on the way."""
    order: int
    """Order number of the push, growing across all drivers of a policy."""
    run: str
    pushed_at: datetime
    confirmed_at: datetime | None
    """None: a push whose receipt never came. The worker may or may not have held it."""
    ended_at: datetime | None
    ended_how: str | None
    """`replaced`; `lost`: the worker died or came back as a new process; `removed` from its updater; `unknown`: its own
    code raised while loading; `drifted`: its weights were changed in place; `unconfirmed`: a push that was never
    settled."""
    state: HoldingState
    """`held`; `pending`: pushed, no receipt yet; `unknown`: open, but a later push is unsettled or the run that
    watched the worker is gone; `ended`."""
    same_content_as: int | None = None
    """Set when a search for this version found the holding by its equal content under another number."""


@dataclass(frozen=True)
class WorkerStatus(Record):
    """What is known of one worker of one policy."""

    name: str
    policy: str
    incarnation: str | None
    state: WorkerState
    """`confirmed`: holds `held`; `unknown`: never confirmed, a push is unsettled, or its run is gone; `gone`."""
    evidence_at: datetime
    """When the state's evidence was recorded."""
    held: int | None
    """Version that the worker is known to hold; None when that is not known."""
    pending: int | None
    """Version of a push that was sent and not settled."""
    target: int | None
    """Version that it should hold: its pin, else the head; None in an empty policy."""
    staleness: int | None
    """As `Registry.staleness(held)`; None when unknown or on an abandoned branch."""
    last_held: int | None
    """Version of the last receipt, whatever happened since; None when there was none."""
    run: str
    detail: str
    """Why the state is what it is, in words."""


@dataclass(frozen=True)
class Pin(Record):
    """A worker, or a glob of worker names, held at a version."""

    worker: str
    ref: int | str
    """A number, or the name of an alias that is followed as it moves."""
    version: int
    """The version that `ref` names now."""
    reason: str
    created_at: datetime
    run: str


@dataclass(frozen=True)
class Event(Record):
    """One line of the append-only journal."""

    id: int
    policy: str
    at: datetime
    kind: str
    """`publish`, `rollback`, `pin`, `unpin`, `alias`, `alias_deleted`, `metrics`, `prune`, `sync_failed`,
    `worker_lost`, `worker_removed`, `drift`, `lost`, `adopt`, `upgrade`."""
    run: str
    user: str
    version: int | None
    worker: str | None
    reason: str
    details: Mapping[str, Any] = field(hash=False)


@dataclass(frozen=True)
class Fault(Record):
    """Something that `verify` found wrong with a stored file."""

    kind: FaultKind
    path: str
    versions: tuple[int, ...]
    """Versions of this policy whose weights or extra state live there; empty for a stray."""
    detail: str


class PruneReport(list[Version]):
    """The versions whose weights were deleted (in a dry run: would be), and why each other one stays."""

    def __init__(self, pruned: list[Version], kept: dict[int, tuple[str, ...]]) -> None:
        super().__init__(pruned)
        self.kept = kept
        """Version number → reasons, for every stored version that stays."""

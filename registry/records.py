"""What callers receive: frozen records, free of database rows and of tensors.

Times are timezone-aware UTC. `to_dict()` gives plain values that `json.dumps` accepts (times as ISO 8601 text,
NaN and infinities as the text "nan", "inf", "-inf").
"""

from __future__ import annotations

import dataclasses
import html
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal, TypeAlias

Weights: TypeAlias = Any
"""What was published: a state dict (an `OrderedDict`), a mapping of tensors, or a `TensorDict`."""

Extra: TypeAlias = Any
"""What `extra=` gave: nested mappings and lists of tensors, numbers and strings."""

VersionState: TypeAlias = Literal["writing", "stored", "pruned", "lost", "damaged"]
HoldingState: TypeAlias = Literal["held", "pending", "unknown", "ended"]
WorkerState: TypeAlias = Literal["confirmed", "unknown", "gone"]
FaultKind: TypeAlias = Literal["missing", "truncated", "corrupt", "stray", "damaged"]


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

    def _repr_html_(self) -> str:
        """Return the fields as a table, for notebooks."""
        return html_table((name, _shown(value)) for name, value in self.to_dict().items())


def html_table(rows: Iterable[Iterable[str]], head: Sequence[str] = ()) -> str:
    """Return rows of text as an HTML table; every text is escaped.

    Args:
        rows: each row's cells. Without `head` the first cell of a row is its heading.
        head: headings of the columns.
    """
    lines = ["<table>"]
    if head:
        lines.append(_html_row(head, "th"))
    for row in rows:
        first, *others = row
        lines.append(_html_row([first, *others], "td", "td" if head else "th"))
    return "\n".join([*lines, "</table>"])


def _html_row(cells: Sequence[str], kind: str, first: str | None = None) -> str:
    kinds = [first or kind, *[kind] * (len(cells) - 1)]
    return (
        "<tr>"
        + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for tag, cell in zip(kinds, cells, strict=True))
        + "</tr>"
    )


def _shown(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, dict):
        return ", ".join(f"{key}={_shown(item)}" for key, item in value.items())
    if isinstance(value, list):
        return ", ".join(map(_shown, value))
    return str(value)


def _moment(value: datetime | None) -> str:
    return "…" if value is None else f"{value:%Y-%m-%d %H:%M:%S}"


def _number(version: int | None) -> str:
    return "nothing known" if version is None else f"v{version}"


@dataclass(frozen=True)
class Version(Record):
    """One row of a policy's append-only log."""

    policy: str
    number: int
    """1, 2, 3 …; never reused, never lowered."""
    digest: str
    """Content digest, `"blake3:<64 hex>"`."""
    parent: int | None
    """The version that training continued from; None begins a new line: what stood before is abandoned by it."""
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
    """`writing`: its writer is at work; `lost`: its writer died half-way; `pruned`: only the row is left;
    `damaged`: not even that can be read. Only listings have such a one; a call for it raises."""
    nonfinite: tuple[str, ...]
    """Names of the tensors that hold NaN or infinity."""
    has_extra: bool = False
    """Whether optimizer or other state was stored with it (`load_extra`)."""
    dtypes: str | None = None
    """How many tensors have which dtype: `"float32"`, `"3 int64, 12 float32"`; None when an older library wrote it."""
    damage: str = ""
    """What of its row cannot be read, which is None here then; empty in a sound record."""

    def __repr__(self) -> str:
        what = f" restores v{self.restores}" if self.restores is not None else ""
        return f"<Version {self.policy} v{self.number}{what} {self.state} {(self.digest or '?')[:19]}>"


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
    damage: str = ""
    """What of its row cannot be read, which is None here then; empty in a sound record."""

    def __repr__(self) -> str:
        ended = self.state if self.ended_how is None else self.ended_how
        return (
            f"<Holding {self.worker} v{self.version} {ended}, "
            f"{_moment(self.confirmed_at or self.pushed_at)} to {_moment(self.ended_at)}>"
        )


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
    damage: str = ""
    """What of its row cannot be read, which is None here then; empty in a sound record."""

    def __repr__(self) -> str:
        pending = "" if self.pending is None else f", v{self.pending} pending"
        target = "none" if self.target is None else f"v{self.target}"
        return (
            f"<WorkerStatus {self.name} {self.state}: holds {_number(self.held)}{pending}, target {target}>"
        )


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
    literal: bool = False
    """Whether `worker` is one worker's name and no glob, whatever characters it has."""
    damage: str = ""
    """What of its row cannot be read, which is None here then; empty in a sound record."""

    def __repr__(self) -> str:
        via = "" if self.ref == self.version else f" by alias {self.ref!r}"
        return f"<Pin {self.worker} v{self.version}{via}>"


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
    damage: str = ""
    """What of its row cannot be read, which is None here then; empty in a sound record."""

    def __repr__(self) -> str:
        about = [
            *([] if self.version is None else [f"v{self.version}"]),
            *([] if self.worker is None else [self.worker]),
        ]
        reason = f": {self.reason}" if self.reason else ""
        return f"<Event {self.id} {' '.join([str(self.kind), *about])} by {self.user}{reason}>"


@dataclass(frozen=True)
class Fault(Record):
    """Something that `verify` found wrong with a stored file, or with a row of the record (`damaged`)."""

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

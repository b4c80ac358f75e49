"""Questions about the record: who held what, who is behind, what happened. Everything here only reads.

Rules it keeps:
- Nothing is said to be held that no receipt confirmed, or whose run is gone: that is unknown.
- Order comes from numbers (order of pushes, ids of events), never from clocks.
- Each question is answered by seeks in indices, and costs as much as its answer is long, however long the record is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple, TypeAlias

from sqlalchemy import (
    ColumnElement,
    Connection,
    Row,
    Select,
    bindparam,
    func,
    or_,
    select,
    union_all,
)

from weightledger.registry.arguments import quoted
from weightledger.registry.errors import CorruptionError, NotFoundError
from weightledger.registry.log import damage
from weightledger.registry.log.heads import head_number
from weightledger.registry.log.models import (
    Alias,
    EventRow,
    HoldingRow,
    PinRow,
    PolicyRef,
    Run,
    VersionRow,
    Worker,
)
from weightledger.registry.log.staleness import (
    chunks,
    no_such_version,
    staleness,
    staleness_of,
    staleness_of_content,
)
from weightledger.registry.log.targets import resolve_target, resolve_targets
from weightledger.registry.records import Event, Holding, HoldingState, Pin, WorkerState, WorkerStatus
from weightledger.registry.values import decode

__all__ = [
    "PolicyRef",
    "describe_runs",
    "events",
    "history",
    "holdings",
    "pins",
    "resolve_target",
    "resolve_targets",
    "staleness",
    "staleness_of",
    "workers",
]

AnyRow: TypeAlias = Row[*tuple[Any, ...]]

_CONFIRMED = HoldingRow.confirmed_at.is_not(None)
_OPEN = HoldingRow.ended_at.is_(None)
_ENDED_EARLY = HoldingRow.ended_at < func.coalesce(HoldingRow.confirmed_at, HoldingRow.pushed_at)
"""Ended before it began: the clock was set back. In the words of the index that has these rows alone."""
_UNSETTLED = 3  # so many pushes of one worker may be without an answer at once
_LONG_AGO = datetime(1, 1, 1, tzinfo=UTC)


# ---------------------------------------------------------------------- pins


_PINS = (
    select(PinRow, VersionRow.number)
    .outerjoin(Alias, (Alias.policy_id == PinRow.policy_id) & (Alias.name == PinRow.alias))
    .outerjoin(VersionRow, VersionRow.id == func.coalesce(PinRow.version_id, Alias.version_id))
    .where(PinRow.policy_id == bindparam("policy"))
    .order_by(PinRow.id)
)


def pins(conn: Connection, policy: PolicyRef) -> list[Pin]:
    """Return the pins, oldest first.

    Raises:
        CorruptionError: One of them is damaged, so that nobody can tell who should hold what.
    """
    return damage.read(conn, _PINS, {"policy": policy.id}, _pin)


def listed_pins(conn: Connection, policy: PolicyRef) -> list[Pin]:
    """Return the pins, oldest first, damaged ones marked."""
    return damage.listed(conn, _PINS, {"policy": policy.id}, _pin)


def _pin(row: Any, damaged: str = "") -> Pin:
    return Pin(
        worker=row.worker,
        ref=row.number if row.alias is None else row.alias,
        version=row.number,
        reason=row.reason,
        created_at=row.created_at,
        run=row.run_id,
        literal=row.literal,
        damage=damaged,
    )


# ---------------------------------------------------------------------- workers


# Of a thousand workers every field is looked up several times, and in a database's row that takes ten times as long.


class _Known(NamedTuple):
    """A worker's row."""

    id: int
    name: str
    run_id: str
    incarnation: str | None
    state: str
    evidence_at: datetime
    detail: str


class _Open(NamedTuple):
    """An open row of the holdings: what a worker holds, or what is on its way to it."""

    worker_id: int
    number: int
    digest: str
    order: int
    pushed_at: datetime


_KNOWN = (
    select(*(Worker.__table__.c[name] for name in _Known._fields))
    .where(Worker.policy_id == bindparam("policy"))
    .order_by(Worker.name)
)
_OPEN_ROWS = select(*(HoldingRow.__table__.c[name] for name in _Open._fields)).where(
    HoldingRow.policy_id == bindparam("policy"), _OPEN
)


def workers(conn: Connection, policy: PolicyRef, alive: Callable[[str], bool]) -> list[WorkerStatus]:
    """Return what is known of each worker, by name.

    Args:
        conn: A connection in a transaction.

        policy: The policy.

        alive: Tells whether a run still lives; asked once for each run.
    """
    read = damage.listed(conn, _KNOWN, {"policy": policy.id}, lambda row, why: (_Known(*row), why))
    known = [row for row, _ in read]
    damaged = {row.id: why for row, why in read if why}
    held, pending = _open_rows(conn, policy, damaged)
    last = _last_confirmed(conn, policy) if any(row.id not in held for row in known) else {}
    targets, doubt = _targets(conn, policy, [row.name for row in known])
    gone_runs = {run for run in {row.run_id for row in known} if run is not None and not alive(run)}
    described = describe_runs(conn, gone_runs)

    statuses: list[tuple[_Known, WorkerState, str, datetime, _Open | None, _Open | None]] = []
    for row in known:
        holding, push = held.get(row.id), pending.get(row.id)
        if row.id in damaged:
            detail = f"its record is damaged: {damaged[row.id]}"
            statuses.append((row, "unknown", detail, row.evidence_at, None, None))
            continue
        state, why = _state_of(row, holding, push, described)
        evidence = row.evidence_at if push is None else max(row.evidence_at, push.pushed_at)
        statuses.append((row, state, why, evidence, holding, push))
    held_contents = {
        holding.digest for _, state, _, _, holding, _ in statuses if holding and state == "confirmed"
    }
    try:
        stale = staleness_of_content(conn, policy, held_contents)
    except CorruptionError as error:
        stale, doubt = {}, doubt or str(error)
    return [
        WorkerStatus(
            name=row.name,
            policy=policy.name,
            incarnation=row.incarnation,
            state=state,
            evidence_at=evidence,
            held=holding.number if holding and state == "confirmed" else None,
            pending=push.number if push else None,
            target=targets.get(row.name),
            staleness=stale.get(holding.digest) if holding and state == "confirmed" else None,
            last_held=holding.number if holding else last.get(row.id),
            run=row.run_id,
            detail=why,
            damage=damaged.get(row.id, doubt),
        )
        for row, state, why, evidence, holding, push in statuses
    ]


def _targets(conn: Connection, policy: PolicyRef, names: Sequence[str]) -> tuple[dict[str, int | None], str]:
    """Return what each worker should hold, and what is damaged if nobody can tell."""
    pinned = listed_pins(conn, policy)
    if any(pin.damage for pin in pinned):
        return {}, "; ".join(pin.damage for pin in pinned if pin.damage)
    try:
        head = head_number(conn, policy)
    except CorruptionError as error:
        return {}, str(error)
    found = resolve_targets((name for name in names if name is not None), pinned, head)
    return {name: target for name, (target, _) in found.items()}, ""


def _state_of(
    row: _Known, holding: _Open | None, push: _Open | None, gone_runs: Mapping[str, str]
) -> tuple[WorkerState, str]:
    if row.state == "gone":
        return "gone", row.detail
    doubts = []
    if push is not None:
        doubts.append(f"a push of v{push.number} is not settled")
    if row.run_id in gone_runs:
        doubts.append(f"{gone_runs[row.run_id]} is gone")
    if row.state == "confirmed" and holding is None and not doubts:
        doubts.append("no receipt says what it holds")
    if row.state == "confirmed" and not doubts:
        return "confirmed", row.detail
    return "unknown", "; ".join([*doubts, row.detail] if row.detail else doubts)


def describe_runs(conn: Connection, runs: Iterable[str]) -> dict[str, str]:
    """Say which processes runs are, by run."""
    described = {}
    for chunk in chunks(sorted(runs)):
        for row in conn.execute(select(Run).where(Run.id.in_(chunk))):
            described[row.id] = f"run {row.id} (process {row.pid} of {row.user} on {row.host})"
    return described


def _open_rows(
    conn: Connection, policy: PolicyRef, damaged: dict[int, str]
) -> tuple[dict[int, _Open], dict[int, _Open]]:
    """Return what each worker confirmed last and still holds, and its newest push that is not settled.

    Args:
        damaged: By worker, what of its rows cannot be read; such an open row is added.
    """
    held: dict[int, _Open] = {}
    pending: dict[int, _Open] = {}
    for found, kind in ((held, _CONFIRMED), (pending, HoldingRow.confirmed_at.is_(None))):
        rows = damage.listed(
            conn, _OPEN_ROWS.where(kind), {"policy": policy.id}, lambda row, why: (_Open(*row), why)
        )
        for each, why in rows:
            if why:
                damaged.setdefault(each.worker_id, why)
            elif each.worker_id not in found or found[each.worker_id].order < each.order:
                found[each.worker_id] = each
    return held, pending


def _last_confirmed(conn: Connection, policy: PolicyRef) -> dict[int, int]:
    """Return the version of each worker's last receipt, by the worker's row."""
    last = (
        select(HoldingRow.number)
        .where(HoldingRow.worker_id == Worker.id, _CONFIRMED)
        .order_by(HoldingRow.order.desc())
        .limit(1)
        .correlate(Worker)
        .scalar_subquery()
    )
    rows = conn.execute(select(Worker.id, last).where(Worker.policy_id == policy.id))
    return {worker: number for worker, number in rows if type(number) is int}


# ---------------------------------------------------------------------- holdings


def holdings(
    conn: Connection, policy: PolicyRef, at: datetime | None = None, *, alive: Callable[[str], bool]
) -> list[Holding]:
    """Return what each worker holds, by its last receipt; by name.

    Args:
        conn: A connection in a transaction.

        policy: The policy.

        at: What they held then: confirmed at or before, and ended after. None for now.

        alive: Tells whether a run still lives; asked once for each run.
    """
    if at is None:
        query = _holdings().where(HoldingRow.policy_id == policy.id, _OPEN, _CONFIRMED)
    else:
        query = _holdings().where(HoldingRow.id.in_(_held_at(policy, at)), _lasted_beyond(at))
    found = _records(conn, policy, query, alive)
    return sorted(found, key=lambda each: (each.worker or "", each.order or 0))


def history(
    conn: Connection,
    policy: PolicyRef,
    worker: str | None = None,
    version: int | None = None,
    since: datetime | None = None,
    until: datetime | None = None,
    limit: int | None = None,
    *,
    alive: Callable[[str], bool],
) -> list[Holding]:
    """Return holdings in the order of their pushes, oldest first.

    Pushes that were never confirmed are among them, since the worker may have run them; those that the worker itself
    refused are not.

    Args:
        conn: A connection in a transaction.

        policy: The policy.

        worker: Only this worker's.

        version: Only of this version's content, under whatever number; the others say so in `same_content_as`.

        since: Only those that lasted beyond this time.

        until: Only those that were pushed before this time.

        limit: Only the newest so many.

        alive: Tells whether a run still lives; asked once for each run.

    Raises:
        NotFoundError: There is no such worker or version.
    """
    query = _holdings().where(
        or_(_CONFIRMED, HoldingRow.ended_how.is_(None), HoldingRow.ended_how != "failed")
    )
    if worker is not None:
        query = query.where(HoldingRow.worker_id == _worker_id(conn, policy, worker))
    if version is not None:
        query = query.where(HoldingRow.version_id.in_(_same_content(conn, policy, version)))
    if until is not None:
        query = query.where(HoldingRow.pushed_at < until)
    if since is not None:
        query = query.where(_lasted_beyond(since))
    if worker is None and version is None:
        if since is None:
            query = query.where(HoldingRow.policy_id == policy.id)
        else:
            query = query.where(HoldingRow.id.in_(_touching(policy, since, until)))
    query = query.order_by(HoldingRow.order.desc(), HoldingRow.id.desc())
    if limit is not None:
        query = query.limit(limit)
    return _records(conn, policy, query, alive, searched=version)[::-1]


def _holdings() -> Select[*tuple[Any, ...]]:
    return select(
        Worker.name,
        HoldingRow.incarnation,
        HoldingRow.number,
        HoldingRow.digest,
        HoldingRow.sent_digest,
        HoldingRow.order,
        HoldingRow.run_id,
        HoldingRow.pushed_at,
        HoldingRow.confirmed_at,
        HoldingRow.ended_at,
        HoldingRow.ended_how,
        HoldingRow.worker_id,
        Worker.run_id.label("watcher"),
        Worker.state,
    ).join(Worker, Worker.id == HoldingRow.worker_id)


def _lasted_beyond(moment: datetime) -> ColumnElement[bool]:
    # What ended before it began lasted until the clock was set back, and nobody knows when that was.
    return or_(_OPEN, HoldingRow.ended_at > moment, _ENDED_EARLY)


def _backwards(policy: PolicyRef) -> Select[*tuple[Any, ...]]:
    """Select the workers in whose history the clock was set back: there times tell nothing of the order."""
    return select(HoldingRow.worker_id).where(HoldingRow.policy_id == policy.id, _ENDED_EARLY)


def _held_at(policy: PolicyRef, moment: datetime) -> Select[*tuple[Any, ...]]:
    """Select the row that may tell what each worker held: one seek a worker, by time.

    Where the clock was set back it is the newest one by order of those that cover the moment.
    """
    backwards = _backwards(policy)
    by_order = (
        select(HoldingRow.id)
        .where(HoldingRow.worker_id == Worker.id, HoldingRow.confirmed_at <= moment, _lasted_beyond(moment))
        .order_by(HoldingRow.order.desc())
        .limit(1)
        .correlate(Worker)
        .scalar_subquery()
    )
    parts = union_all(
        _newest_of_each(policy, HoldingRow.confirmed_at, moment).where(Worker.id.not_in(backwards)),
        select(by_order).where(Worker.id.in_(backwards)),
    ).subquery()
    return select(parts.c[0])


def _newest_of_each(policy: PolicyRef, time: Any, moment: datetime) -> Select[*tuple[Any, ...]]:
    """Select each worker's newest row by a time, up to a moment: one seek a worker."""
    newest = (
        select(HoldingRow.id)
        .where(HoldingRow.worker_id == Worker.id, time <= moment)
        .order_by(time.desc(), HoldingRow.id.desc())
        .limit(1)
        .correlate(Worker)
        .scalar_subquery()
    )
    return select(newest).where(Worker.policy_id == policy.id)


def _touching(policy: PolicyRef, since: datetime, until: datetime | None) -> Select[*tuple[Any, ...]]:
    """Select the rows of all workers that may overlap a span: those pushed inside of it, and those that lasted into it.

    What lasted into it is, of each worker, its newest receipt or one of its newest pushes: an answer settles all pushes
    before it, so that only drivers which died one after another leave several unsettled. What is still open lasts into
    every span, and of workers in whose history the clock was set back each row may.
    """
    oldest = (
        select(HoldingRow.pushed_at)
        .where(HoldingRow.worker_id == Worker.id, HoldingRow.pushed_at <= since)
        .order_by(HoldingRow.pushed_at.desc())
        .offset(_UNSETTLED - 1)
        .limit(1)
        .correlate(Worker)
        .scalar_subquery()
    )
    # One stretch of an index for both kinds: they follow each other, and a worker's pages are read once.
    pushed = (
        select(HoldingRow.id)
        .join(Worker, Worker.id == HoldingRow.worker_id)
        .where(Worker.policy_id == policy.id, HoldingRow.pushed_at >= func.coalesce(oldest, _LONG_AGO))
    )
    if until is not None:
        pushed = pushed.where(HoldingRow.pushed_at < until)
    parts = union_all(
        _newest_of_each(policy, HoldingRow.confirmed_at, since),
        pushed,
        select(HoldingRow.id).where(HoldingRow.policy_id == policy.id, _OPEN),
        select(HoldingRow.id).where(HoldingRow.worker_id.in_(_backwards(policy))),
    ).subquery()
    return select(parts.c[0])


def _worker_id(conn: Connection, policy: PolicyRef, name: str) -> int:
    found = conn.scalar(select(Worker.id).where(Worker.policy_id == policy.id, Worker.name == name))
    if found is None:
        names = list(
            conn.scalars(
                select(Worker.name).where(Worker.policy_id == policy.id).order_by(Worker.name).limit(11)
            )
        )
        known = ", ".join(names[:10]) + (", …" if len(names) > 10 else "") if names else "none yet"
        raise NotFoundError(f"policy {policy.name!r} has no worker {quoted(name)}; its workers are: {known}")
    return found


def _same_content(conn: Connection, policy: PolicyRef, number: int) -> list[int]:
    digest = conn.scalar(
        select(VersionRow.digest).where(VersionRow.policy_id == policy.id, VersionRow.number == number)
    )
    if digest is None:
        raise NotFoundError(no_such_version(conn, policy, number))
    return list(
        conn.scalars(
            select(VersionRow.id).where(VersionRow.policy_id == policy.id, VersionRow.digest == digest)
        )
    )


def _records(
    conn: Connection,
    policy: PolicyRef,
    query: damage.AnySelect,
    alive: Callable[[str], bool],
    searched: int | None = None,
) -> list[Holding]:
    read = damage.listed(conn, query, {}, lambda row, why: (row, why))
    still_open = [row for row, why in read if row.ended_at is None and not why]
    live = {run: alive(run) for run in {row.watcher for row in still_open}}
    unsettled: dict[int, int] = {}
    for chunk in chunks(sorted({row.worker_id for row in still_open})):
        pushes = conn.execute(
            select(HoldingRow.worker_id, func.max(HoldingRow.order))
            .where(HoldingRow.worker_id.in_(chunk), _OPEN, HoldingRow.confirmed_at.is_(None))
            .group_by(HoldingRow.worker_id)
        )
        unsettled.update((worker, order) for worker, order in pushes)

    def state(worker: int, order: int, confirmed: bool, watcher: str, worker_state: str) -> HoldingState:
        if not live[watcher]:
            return "unknown"
        if not confirmed:
            return "pending"
        if worker_state != "confirmed" or unsettled.get(worker, 0) > order:
            return "unknown"
        return "held"

    return [
        Holding(
            worker=name,
            incarnation=incarnation,
            policy=policy.name,
            version=number,
            digest=digest,
            sent_digest=sent,
            order=order,
            run=run,
            pushed_at=pushed,
            confirmed_at=confirmed,
            ended_at=ended,
            ended_how=how,
            state="unknown"
            if damaged
            else state(worker, order, confirmed is not None, watcher, known)
            if ended is None
            else "ended",
            same_content_as=searched if searched not in (None, number) else None,
            damage=damaged,
        )
        # Unpacked, because looking a thousand rows' columns up by name costs as much as reading them.
        for (
            name,
            incarnation,
            number,
            digest,
            sent,
            order,
            run,
            pushed,
            confirmed,
            ended,
            how,
            worker,
            watcher,
            known,
        ), damaged in read
    ]


# ---------------------------------------------------------------------- events


def events(
    conn: Connection,
    policy: PolicyRef,
    kind: str | None = None,
    worker: str | None = None,
    version: int | None = None,
    since: datetime | None = None,
    until: datetime | None = None,
    limit: int | None = None,
) -> list[Event]:
    """Return the journal, oldest first.

    Args:
        conn: A connection in a transaction.

        policy: The policy.

        kind: Only of this kind.

        worker: Only about this worker.

        version: Only about this version.

        since: Only from the first one at or after this time on; a clock that was set back later leaves none out.

        until: Only before this time; with `since`, what has a time in between.

        limit: Only the newest so many.
    """
    query = select(EventRow).where(EventRow.policy_id == policy.id)
    for of, wanted in ((EventRow.kind, kind), (EventRow.worker, worker), (EventRow.version, version)):
        if wanted is not None:
            query = query.where(of == wanted)
    if until is not None:
        query = query.where(EventRow.at < until)
    if since is not None and until is not None:
        query = query.where(EventRow.at >= since)
    elif since is not None:
        first = _first_since(conn, policy, since)
        if first is None:
            return []
        query = query.where(EventRow.id >= first)
    query = query.order_by(EventRow.id.desc())
    if limit is not None:
        query = query.limit(limit)
    return damage.listed(conn, query, {}, lambda row, why: _event(policy, row, why))[::-1]


def _first_since(conn: Connection, policy: PolicyRef, since: datetime) -> int | None:
    """Return the first event at or after a time; None when there is none.

    Order comes from numbers: what follows it was written later, whatever a clock that was set back says. Each look is
    one seek, as long as the newest event is the latest one.
    """
    mine = select(EventRow.id).where(EventRow.policy_id == policy.id)
    since_then = mine.where(EventRow.at >= since).order_by(EventRow.at, EventRow.id).limit(1)
    first = conn.scalar(since_then)
    latest = conn.scalar(mine.order_by(EventRow.at.desc(), EventRow.id.desc()).limit(1))
    if first is None or latest is None or latest >= first:
        return first
    # The clock was set back in between: the span begins before that, if it has events there.
    earlier = conn.scalar(since_then.where(EventRow.id <= latest))
    return first if earlier is None else min(first, earlier)


def _event(policy: PolicyRef, row: Any, damaged: str) -> Event:
    return Event(
        id=row.id,
        policy=policy.name,
        at=row.at,
        kind=row.kind,
        run=row.run_id,
        user=row.user,
        version=row.version,
        worker=row.worker,
        reason=row.reason,
        details={} if row.details is None else decode(row.details),
        damage=damaged,
    )

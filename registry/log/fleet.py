"""Who holds what: every writing transaction over workers and holdings.

Rules kept here
- An intention (a `holdings` row without `confirmed_at`) is committed before its push leaves.
- Only a worker's own receipt confirms a row; nothing else makes a holding.
- A worker has at most one open confirmed row and one open pending row.
- Order numbers only grow. They jump past those of another copy of this registry, with an event.
- What is not known is written as unknown: a silent worker keeps its open rows, a vanished one has them closed at the
  last time that there was evidence for them.
- One live run steers a worker of a policy; another one is refused.
- What is made for each of thousands of workers is a named tuple, which takes half the time of a frozen dataclass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from fnmatch import fnmatchcase
from typing import Literal, NamedTuple

from sqlalchemy import Connection, bindparam, case, insert, select, update
from sqlalchemy.orm import aliased

from weightledger.registry.errors import InUseError, NotFoundError
from weightledger.registry.log.ledger import Ledger, now
from weightledger.registry.log.models import HoldingRow, Policy, UtcDateTime, Worker
from weightledger.registry.log.statements import Statement

Verdict = Literal["confirmed", "seen", "kept", "unknown", "drifted", "silent", "lost", "gone", "removed"]


class Stretch(NamedTuple):
    """An open row of a worker: what it holds, or what was pushed to it."""

    version: int
    digest: str
    sent_digest: str
    order: int
    run: str
    """The run that pushed it."""
    incarnation: str | None


@dataclass(frozen=True)
class Claim:
    """A worker's row as the run that now steers it found it."""

    id: int
    name: str
    held: Stretch | None
    pending: tuple[Stretch, ...]
    """Pushes without an answer, oldest first; several when drivers died one after another."""


class Push(NamedTuple):
    """An intention: this worker is about to be sent that version."""

    worker: int
    version: int
    sent_digest: str


class Settlement(NamedTuple):
    """What became of a worker.

    `confirmed`: its receipt for `order` came. `seen`: it was asked and holds what is on record. `kept`: the push of
    `order` was not applied, it holds what it held. `unknown`: the push of `order` may have been applied in part.
    `drifted`: somebody changed its weights in place. `silent`: no answer in time, the push stays open.
    `lost`: its process ended and what it held with it, another life may follow. `gone`: for good. `removed`: no longer
    steered.
    """

    worker: int
    name: str
    verdict: Verdict
    order: int | None = None
    version: int | None = None
    incarnation: str | None = None
    sent_digest: str | None = None
    detail: str = ""
    tensors: tuple[str, ...] = ()
    """Names of the tensors that drifted."""
    eventful: bool = True
    """Whether the journal tells of it; not when the exchange simply goes on."""


_EVENTS: dict[Verdict, str] = {
    "kept": "sync_failed",
    "unknown": "sync_failed",
    "drifted": "drift",
    "silent": "sync_failed",
    "lost": "worker_lost",
    "gone": "worker_lost",
    "removed": "worker_removed",
}
_STATES: dict[Verdict, str] = {
    "confirmed": "confirmed",
    "seen": "confirmed",
    "kept": "confirmed",
    "unknown": "unknown",
    "drifted": "unknown",
    "silent": "unknown",
    "lost": "unknown",
    "gone": "gone",
    "removed": "gone",
}
_LEFT = "left"
FREE = ("gone", _LEFT)
"""States in which no run steers a worker, even if the one that did lives on."""


_NEXT_ORDER = Statement(
    update(Policy)
    .where(Policy.id == bindparam("policy"))
    .values(last_order=Policy.last_order + 1)
    .returning(Policy.last_order)
)
_LAST_ORDER = Statement(select(Policy.last_order).where(Policy.id == bindparam("policy")))
_CATCH_UP = Statement(
    update(Policy).where(Policy.id == bindparam("policy")).values(last_order=bindparam("o"))
)
_GIVEN = Statement(
    select(HoldingRow.id)
    .where(
        HoldingRow.worker_id == bindparam("w"),
        HoldingRow.order == bindparam("o"),
        HoldingRow.run_id == bindparam("run"),
    )
    .limit(1)
)
_INTEND = Statement(
    insert(HoldingRow).values(
        policy_id=bindparam("policy"),
        worker_id=bindparam("w"),
        version_id=bindparam("version"),
        number=bindparam("number"),
        digest=bindparam("digest"),
        sent_digest=bindparam("sent"),
        order=bindparam("o"),
        run_id=bindparam("run"),
        pushed_at=bindparam("at"),
    )
)
_OPEN = (HoldingRow.worker_id == bindparam("w"), HoldingRow.ended_at.is_(None))
_OPEN_HELD = (*_OPEN, HoldingRow.confirmed_at.is_not(None))
_OPEN_PENDING = (*_OPEN, HoldingRow.confirmed_at.is_(None))
_LAST_EVIDENCE = select(Worker.evidence_at).where(Worker.id == HoldingRow.worker_id).scalar_subquery()

# An earlier life's holding ended with its process, at the last time that there was evidence of it; one of the same life
# was replaced by what the receipt confirms.
_OF_EARLIER_LIFE = HoldingRow.incarnation != bindparam("inc")
_END_PREVIOUS = Statement(
    update(HoldingRow)
    .where(*_OPEN_HELD, HoldingRow.order != bindparam("o"))
    .values(
        ended_at=case((_OF_EARLIER_LIFE, _LAST_EVIDENCE), else_=bindparam("at", type_=UtcDateTime())),
        ended_how=case((_OF_EARLIER_LIFE, "lost"), else_="replaced"),
    )
)
_CONFIRM = Statement(
    update(HoldingRow)
    .where(
        HoldingRow.worker_id == bindparam("w"),
        HoldingRow.order == bindparam("o"),
        HoldingRow.confirmed_at.is_(None),
    )
    .values(
        confirmed_at=bindparam("at"),
        incarnation=bindparam("inc"),
        sent_digest=bindparam("sent"),
        ended_at=None,
        ended_how=None,
    )
)
# Older pushes that were never settled cannot arrive any more: the worker has confirmed a higher order.
_NEWER = aliased(HoldingRow)
_END_OVERTAKEN = Statement(
    update(HoldingRow)
    .where(
        HoldingRow.policy_id == bindparam("policy"),
        HoldingRow.ended_at.is_(None),
        HoldingRow.confirmed_at.is_(None),
        select(_NEWER.id)
        .where(
            _NEWER.worker_id == HoldingRow.worker_id,
            _NEWER.ended_at.is_(None),
            _NEWER.confirmed_at.is_not(None),
            _NEWER.order > HoldingRow.order,
        )
        .exists(),
    )
    .values(ended_at=bindparam("at"), ended_how="unconfirmed")
)
_FAIL = Statement(
    update(HoldingRow)
    .where(
        HoldingRow.worker_id == bindparam("w"),
        HoldingRow.order == bindparam("o"),
        HoldingRow.confirmed_at.is_(None),
    )
    .values(ended_at=bindparam("at"), ended_how="failed")
)
_END_OLDER = Statement(
    update(HoldingRow)
    .where(*_OPEN_PENDING, HoldingRow.order < bindparam("o"))
    .values(ended_at=bindparam("at"), ended_how="unconfirmed")
)
_END_PENDING = Statement(
    update(HoldingRow).where(*_OPEN_PENDING).values(ended_at=bindparam("at"), ended_how=bindparam("how"))
)
_END_HELD = Statement(
    update(HoldingRow).where(*_OPEN_HELD).values(ended_at=_LAST_EVIDENCE, ended_how=bindparam("how"))
)
_HEARD = Statement(
    update(Worker)
    .where(Worker.id == bindparam("w"))
    .values(
        state=bindparam("s"), detail=bindparam("d"), evidence_at=bindparam("at"), incarnation=bindparam("inc")
    )
)
_UNHEARD = Statement(
    update(Worker).where(Worker.id == bindparam("w")).values(state=bindparam("s"), detail=bindparam("d"))
)


def claim(
    ledger: Ledger, conn: Connection, names: Sequence[str], alive: Callable[[str], bool]
) -> list[Claim]:
    """Let this run steer the named workers.

    Args:
        names: lasting names, in the order of the result.
        alive: tells whether a run still lives.

    Raises:
        InUseError: another live run steers one of them. Nothing is claimed then.
    """
    policy, run, at = ledger.policy_ref(conn), ledger.run_id(conn), now()
    rows = {
        row.name: row
        for row in conn.execute(select(Worker).where(Worker.policy_id == policy.id, Worker.name.in_(names)))
    }
    for name, row in rows.items():
        if row.state not in FREE and row.run_id != run and alive(row.run_id):
            raise InUseError(
                f"worker {name!r} of policy {policy.name!r} is steered by run {row.run_id}, which is alive; "
                "close that updater, or give this one other names="
            )
    fresh = [name for name in names if name not in rows]
    if fresh:
        common = {
            "policy_id": policy.id,
            "run_id": run,
            "incarnation": None,
            "state": "unknown",
            "evidence_at": at,
        }
        conn.execute(insert(Worker), [common | {"name": name, "detail": "not synced yet"} for name in fresh])
    if rows:
        taken = [row.id for row in rows.values()]
        conn.execute(
            update(Worker)
            .where(Worker.id.in_(taken))
            .values(run_id=run, state="unknown", detail="taken over, not confirmed by this run yet")
        )
    ids = {
        row.name: row.id
        for row in conn.execute(
            select(Worker.id, Worker.name).where(Worker.policy_id == policy.id, Worker.name.in_(names))
        )
    }
    held, pending = _open_rows(conn, ids.values())
    return [Claim(ids[name], name, held.get(ids[name]), tuple(pending.get(ids[name], ()))) for name in names]


def forgettable(
    ledger: Ledger, conn: Connection, glob: str, alive: Callable[[str], bool]
) -> list[tuple[int, str]]:
    """Return the workers that a glob of names matches, by row and name, if no live run steers one of them.

    Raises:
        NotFoundError: no worker has such a name.
        InUseError: a live run steers one of them.
    """
    policy = ledger.find_policy(conn)
    rows = (
        []
        if policy is None
        else conn.execute(select(Worker).where(Worker.policy_id == policy.id).order_by(Worker.name)).all()
    )
    found = [row for row in rows if fnmatchcase(row.name, glob)]
    if not found:
        names = ", ".join(row.name for row in rows[:10]) + (", …" if len(rows) > 10 else "")
        raise NotFoundError(
            f"policy {ledger.policy!r} has no worker {glob!r} to forget; its workers are: {names or 'none yet'}"
        )
    for row in found:
        if row.state not in FREE and alive(row.run_id):
            raise InUseError(
                f"worker {row.name!r} of policy {ledger.policy!r} cannot be forgotten: run {row.run_id}, which is "
                "alive, steers it; close that updater first"
            )
    return [(row.id, row.name) for row in found]


def forget(ledger: Ledger, conn: Connection, workers: Sequence[tuple[int, str]]) -> None:
    """End what workers, given by row and name, were last known to hold or were pushed: somebody knows them dead."""
    settle(
        ledger, conn, [Settlement(key, name, "gone", detail="forgotten by a prune") for key, name in workers]
    )


def intend(ledger: Ledger, conn: Connection, pushes: Sequence[Push]) -> int:
    """Write down that pushes are about to leave, and return the order number that they all bear.

    Raises:
        NotFoundError: a version has no row.
    """
    # Others believe a pending push for as long as they see this run alive.
    ledger.locks.look_again()
    policy, run, at = ledger.policy_ref(conn), ledger.run_id(conn), now()
    order = next_order(ledger, conn)
    wanted = {push.version for push in pushes}
    places = ledger.places(conn, wanted)
    missing = wanted - places.keys()
    if missing:
        raise NotFoundError(f"no version {min(missing)} in policy {policy.name!r} to push")
    _INTEND.run_each(
        conn,
        ("w", "version", "number", "digest", "sent"),
        [
            (
                push.worker,
                places[push.version].id,
                push.version,
                places[push.version].digest,
                push.sent_digest,
            )
            for push in pushes
        ],
        policy=policy.id,
        run=run,
        at=at,
        o=order,
    )
    return order


def next_order(ledger: Ledger, conn: Connection) -> int:
    """Take the policy's next order number: higher than that of any push by any run."""
    policy = ledger.policy_ref(conn)
    return int(_NEXT_ORDER.first(conn, policy=policy.id)[0])


class Ahead(NamedTuple):
    """A worker that has seen an order which this registry did not give."""

    worker: int
    name: str
    order: int
    run: str
    registry: str
    """Where that run had its registry."""


def is_given(conn: Connection, worker: int, order: int, run: str) -> bool:
    """Tell whether a run pushed to a worker under an order number, by what is on record here."""
    return _GIVEN.first(conn, w=worker, o=order, run=run) is not None


def catch_up(ledger: Ledger, conn: Connection, ahead: Sequence[Ahead]) -> None:
    """Let the next order number be higher than those that workers have seen.

    They saw them from a copy of this registry, or from this one before it was put back to an older state.
    """
    policy = ledger.policy_ref(conn)
    highest = max(ahead, key=lambda one: one.order)
    was = int(_LAST_ORDER.first(conn, policy=policy.id)[0])
    _CATCH_UP.run(conn, policy=policy.id, o=max(was, highest.order))
    names = sorted(one.name for one in ahead)
    ledger.event(
        conn,
        "order_jump",
        worker=names[0] if len(names) == 1 else None,
        reason=f"{', '.join(names)} had seen order {highest.order} of run {highest.run} of the registry at "
        f"{highest.registry}; this one was at {was}",
        details={
            "from": was,
            "to": max(was, highest.order),
            "run": highest.run,
            "registry": highest.registry,
            "workers": names,
        },
    )


def settle(ledger: Ledger, conn: Connection, settlements: Sequence[Settlement]) -> None:
    """Write down what became of pushes and of workers, and what went wrong as events."""
    at = now()
    by_verdict: dict[Verdict, list[Settlement]] = {}
    for item in settlements:
        by_verdict.setdefault(item.verdict, []).append(item)
    if confirmed := by_verdict.get("confirmed"):
        _confirm(conn, ledger.policy_ref(conn).id, confirmed, at)
    if kept := by_verdict.get("kept"):
        _fail(conn, kept, at)
    if unknown := by_verdict.get("unknown"):
        _close_pending(conn, unknown, "unconfirmed", at)
        _close_held(conn, unknown, "unknown")
    if drifted := by_verdict.get("drifted"):
        _close_held(conn, drifted, "drifted")
    for verdict in ("lost", "gone", "removed"):
        if vanished := by_verdict.get(verdict):
            _close_pending(conn, vanished, "unconfirmed", at)
            _close_held(conn, vanished, "removed" if verdict == "removed" else "lost")
    _update_workers(conn, settlements, at)
    ledger.events(
        conn,
        [
            (_EVENTS[item.verdict], item.version, item.name, item.detail, _details(item))
            for item in settlements
            if item.verdict in _EVENTS and item.eventful
        ],
    )


def _details(item: Settlement) -> dict[str, object]:
    details: dict[str, object] = {"outcome": item.verdict, "order": item.order}
    return details | {"tensors": list(item.tensors)} if item.tensors else details


def leave(conn: Connection, workers: Sequence[int], why: str) -> None:
    """Say that nobody watches these workers any more; what they were last known to hold stays on record."""
    if workers:
        conn.execute(
            update(Worker)
            .where(Worker.id == bindparam("w"), Worker.state != "gone")
            .values(state=_LEFT, detail=bindparam("d")),
            [{"w": key, "d": why} for key in workers],
        )


def _confirm(conn: Connection, policy: int, items: Sequence[Settlement], at: datetime) -> None:
    _END_PREVIOUS.run_each(
        conn, ("w", "o", "inc"), [(item.worker, item.order, item.incarnation) for item in items], at=at
    )
    _CONFIRM.run_each(
        conn,
        ("w", "o", "inc", "sent"),
        [(item.worker, item.order, item.incarnation, item.sent_digest) for item in items],
        at=at,
    )
    _END_OVERTAKEN.run(conn, policy=policy, at=at)


def _fail(conn: Connection, items: Sequence[Settlement], at: datetime) -> None:
    _FAIL.run_each(conn, ("w", "o"), [(item.worker, item.order) for item in items], at=at)
    # A push that never reached the worker says nothing of those before it.
    heard = [(item.worker, item.order) for item in items if item.incarnation is not None]
    _END_OLDER.run_each(conn, ("w", "o"), heard, at=at)


def _close_pending(conn: Connection, items: Iterable[Settlement], how: str, at: datetime) -> None:
    _END_PENDING.run_each(conn, ("w",), [(item.worker,) for item in items], at=at, how=how)


def _close_held(conn: Connection, items: Iterable[Settlement], how: str) -> None:
    _END_HELD.run_each(conn, ("w",), [(item.worker,) for item in items], how=how)


def _update_workers(conn: Connection, items: Sequence[Settlement], at: datetime) -> None:
    # Without an incarnation there is no new evidence, so its time must not move: a holding that turns out lost ends
    # there. A push that never reached the worker tells nothing of its state either.
    heard = [item for item in items if item.incarnation is not None]
    unheard = [item for item in items if item.incarnation is None and item.verdict != "kept"]
    _HEARD.run_each(
        conn,
        ("w", "s", "d", "inc"),
        [(item.worker, _STATES[item.verdict], item.detail, item.incarnation) for item in heard],
        at=at,
    )
    if unheard:
        _UNHEARD.run_each(
            conn, ("w", "s", "d"), [(item.worker, _STATES[item.verdict], item.detail) for item in unheard]
        )


def _open_rows(
    conn: Connection, workers: Iterable[int]
) -> tuple[dict[int, Stretch], dict[int, list[Stretch]]]:
    held: dict[int, Stretch] = {}
    pending: dict[int, list[Stretch]] = {}
    query = select(HoldingRow).where(HoldingRow.worker_id.in_(list(workers)), HoldingRow.ended_at.is_(None))
    for row in conn.execute(query.order_by(HoldingRow.order)):
        stretch = Stretch(row.number, row.digest, row.sent_digest, row.order, row.run_id, row.incarnation)
        if row.confirmed_at is None:
            pending.setdefault(row.worker_id, []).append(stretch)
        else:
            held[row.worker_id] = stretch
    return held, pending

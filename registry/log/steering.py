"""What people decide about versions: rollback, aliases, pins, metrics. Each leaves an event.

Callers have checked what does not depend on the log, before they began the transaction.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sqlalchemy import ColumnElement, Connection, and_, delete, insert, select, update

from weightledger.registry import arguments
from weightledger.registry.errors import ConflictError, InUseError, InvalidWeightsError, NotFoundError
from weightledger.registry.log import resolution
from weightledger.registry.log.ledger import Ledger, now
from weightledger.registry.log.models import Alias, PinRow, Worker
from weightledger.registry.log.refs import Meaning
from weightledger.registry.log.targets import holds, is_glob
from weightledger.registry.log.versioning import append_rollback, write_metrics
from weightledger.registry.records import Pin, Version


def rollback_target(
    ledger: Ledger, conn: Connection, to: Meaning | None, expected_head: int | None
) -> Version:
    """Return the version that a rollback restores.

    Raises:
        NotFoundError: nothing is stored, or the wanted version has no weights any more.
        ConflictError: the head is not `expected_head`.
    """
    _expect_head(ledger, conn, expected_head)
    return ledger.previous_content(conn) if to is None else ledger.usable(conn, to, "roll back to")


def roll_back_to(
    ledger: Ledger, conn: Connection, wanted: Version, *, reason: str, expected_head: int | None
) -> Version:
    """Append a version that has the content of an older one, which was looked up in this very log.

    Raises:
        NotFoundError: it has no weights any more.
        ConflictError: the head is not `expected_head`.
    """
    return _restore(ledger, conn, wanted, _expect_head(ledger, conn, expected_head), reason)


def _expect_head(ledger: Ledger, conn: Connection, expected: int | None) -> int:
    head = ledger.head_number(conn)
    if head is None:
        head = ledger.head(conn).number  # raises
    if expected is not None and head != expected:
        raise ConflictError(
            f"rollback of policy {ledger.policy!r} expected the head to be v{expected}, but it is "
            f"v{head}; look at the log and try again"
        )
    return head


def _restore(ledger: Ledger, conn: Connection, wanted: Version, head: int, reason: str) -> Version:
    at = now()
    number = append_rollback(ledger, conn, wanted, at=at, message=reason)
    if number is None:
        wanted = ledger.usable(conn, wanted, "roll back to")  # raises
        raise AssertionError(f"{wanted!r} is stored")
    ledger.event(
        conn,
        "rollback",
        version=number,
        reason=reason,
        details={"restores": wanted.number, "from": head},
    )
    return replace(
        wanted,
        number=number,
        parent=wanted.number,
        restores=wanted.number,
        run=ledger.run_id(conn),
        metrics={},
        metadata={},
        message=reason,
        created_at=at,
    )


def set_alias(ledger: Ledger, conn: Connection, name: str, ref: Meaning) -> None:
    """Let a name stand for a version, wherever it stood before."""
    before = ledger.aliases(conn).get(name)
    target = ledger.usable(conn, ref, f"give alias {name!r} to")
    policy, row = ledger.policy_ref(conn), ledger.row(conn, target.number)
    where = and_(Alias.policy_id == policy.id, Alias.name == name)
    if before is None:
        conn.execute(insert(Alias).values(policy_id=policy.id, name=name, version_id=row.id, moved_at=now()))
    else:
        conn.execute(update(Alias).where(where).values(version_id=row.id, moved_at=now()))
    ledger.event(conn, "alias", version=target.number, details={"alias": name, "before": before})


def delete_alias(ledger: Ledger, conn: Connection, name: str) -> None:
    """Forget an alias.

    Raises:
        NotFoundError: there is no such alias.
        InUseError: a pin follows it.
    """
    before = ledger.aliases(conn)
    if name not in before:
        raise NotFoundError(
            f"no alias {arguments.quoted(name)} in policy {ledger.policy!r}: aliases are: {', '.join(before) or 'none'}"
        )
    followers = [pin.worker for pin in ledger.pins(conn) if pin.ref == name]
    if followers:
        raise InUseError(
            f"alias {name!r} of policy {ledger.policy!r} is followed by the pin of {', '.join(followers)}; unpin first"
        )
    policy = ledger.policy_ref(conn)
    conn.execute(delete(Alias).where(Alias.policy_id == policy.id, Alias.name == name))
    ledger.event(conn, "alias_deleted", version=before[name], details={"alias": name})


def pin(ledger: Ledger, conn: Connection, worker: str, ref: Meaning, *, reason: str, literal: bool) -> Pin:
    """Hold a worker, or a glob of names, at a version; a newer pin of the same name replaces the older."""
    alias = resolution.alias(ledger, conn, ref)
    target = ledger.usable(conn, ref, f"pin {worker!r} to")
    literal = literal or not is_glob(worker)
    at, run = now(), ledger.run_id(conn)
    # Delete and insert, so that the newer of two globs is the one with the higher id.
    conn.execute(delete(PinRow).where(_pins_of(ledger, conn, worker), PinRow.literal == literal))
    conn.execute(
        insert(PinRow).values(
            policy_id=ledger.policy_ref(conn).id,
            worker=worker,
            literal=literal,
            version_id=ledger.row(conn, target.number).id if alias is None else None,
            alias=alias,
            reason=reason,
            created_at=at,
            run_id=run,
        )
    )
    details = {"ref": alias, "literal": True} if literal and is_glob(worker) else {"ref": alias}
    ledger.event(conn, "pin", version=target.number, worker=worker, reason=reason, details=details)
    return Pin(worker, target.number if alias is None else alias, target.number, reason, at, run, literal)


def is_met(ledger: Ledger, conn: Connection, pin: Pin) -> bool:
    """Tell whether a pin holds any worker that was ever steered."""
    names = conn.scalars(select(Worker.name).where(Worker.policy_id == ledger.policy_ref(conn).id))
    return any(holds(pin, name) for name in names)


def unpin(ledger: Ledger, conn: Connection, worker: str, *, literal: bool | None) -> None:
    """Let a worker follow the head again.

    Raises:
        NotFoundError: no pin has exactly that worker or glob.
        ConflictError: a name and a glob read like that, and `literal` does not tell which is meant.
    """
    found = [pin.literal for pin in ledger.pins(conn) if pin.worker == worker]
    literal = literal if is_glob(worker) else None
    if literal is None and len(found) > 1:
        raise ConflictError(
            f"{arguments.quoted(worker)} is pinned in policy {ledger.policy!r} as a worker's name and as a glob; "
            "nothing was changed. Say which with literal=True (the name) or literal=False (the glob)"
        )
    if not found or literal not in (None, *found):
        names = ", ".join(map(_named, ledger.pins(conn)))
        kind = {None: "", True: " as a name", False: " as a glob"}[literal]
        raise NotFoundError(
            f"{arguments.quoted(worker)} is not pinned{kind} in policy {ledger.policy!r}: "
            f"pins are on: {names or 'nothing'}"
        )
    which = found[0] if literal is None else literal
    conn.execute(delete(PinRow).where(_pins_of(ledger, conn, worker), PinRow.literal == which))
    ledger.event(conn, "unpin", worker=worker)


def _pins_of(ledger: Ledger, conn: Connection, worker: str) -> ColumnElement[bool]:
    return and_(PinRow.policy_id == ledger.policy_ref(conn).id, PinRow.worker == worker)


def _named(pin: Pin) -> str:
    return f"{pin.worker} (a name)" if pin.literal and is_glob(pin.worker) else pin.worker


def record_metrics(ledger: Ledger, conn: Connection, ref: Meaning, metrics: Mapping[str, float]) -> Version:
    """Write numbers that were learnt about a version after it was published."""
    found = ledger.resolve(conn, ref)
    write_metrics(ledger, conn, ledger.row(conn, found.number).id, metrics)
    ledger.event(conn, "metrics", version=found.number, details=dict(metrics))
    return ledger.version(conn, found.number)


def best(ledger: Ledger, conn: Connection, metric: str, mode: str) -> Version:
    """Return the stored version with the best finite value; of equal ones the newest.

    Raises:
        NotFoundError: no stored version has a finite value of that metric.
    """
    policy = ledger.find_policy(conn)
    number = None if policy is None else next(resolution.scored(conn, policy, metric, mode), None)
    if number is None:
        raise NotFoundError(
            f"no version with a finite {arguments.quoted(metric)} in policy {ledger.policy!r}"
            f"{ledger.metric_names(conn)}"
        )
    return ledger.version(conn, number)


def check_metrics(metrics: Mapping[str, Any] | None) -> dict[str, float]:
    """Return metrics as plain floats.

    Raises:
        InvalidWeightsError: a name cannot be kept, or a value is no number.
    """
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        raise InvalidWeightsError(f"metrics must map names to numbers, found {arguments.shown(metrics)}")
    result: dict[str, float] = {}
    for name, value in metrics.items():
        if not isinstance(name, str):
            raise InvalidWeightsError(f"metric names are text, found {arguments.shown(name)}")
        try:
            arguments.name("metric", name)
        except ValueError as error:
            raise InvalidWeightsError(str(error)) from None
        result[name] = arguments.real(f"metric {name!r}", value, error=InvalidWeightsError)
    return result

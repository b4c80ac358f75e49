"""What people decide about versions: rollback, aliases, pins, metrics. Each leaves an event."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sqlalchemy import Connection, and_, delete, insert, select, update

from weightledger.registry.errors import ConflictError, InUseError, InvalidWeightsError, NotFoundError
from weightledger.registry.log.ledger import NUMBER, Ledger, Ref, check_name, check_number, check_text, now
from weightledger.registry.log.models import Alias, Metric, PinRow, Snapshot, VersionRow
from weightledger.registry.log.versioning import append_rollback, write_metrics
from weightledger.registry.records import Version


def roll_back(
    ledger: Ledger,
    conn: Connection,
    to: Ref | None,
    *,
    reason: str,
    expected_head: int | None,
) -> Version:
    """Append a version that has the content of an older one.

    Raises:
        NotFoundError: nothing is stored, or the wanted version has no weights any more.
        ConflictError: the head is not `expected_head`.
    """
    head = _expect_head(ledger, conn, expected_head)
    wanted = ledger.previous_content(conn) if to is None else ledger.usable(conn, to, "roll back to")
    return _restore(ledger, conn, wanted, head, reason)


def roll_back_to(
    ledger: Ledger, conn: Connection, wanted: Version, *, reason: str, expected_head: int | None
) -> Version:
    """As `roll_back`, to a version that was looked up in this very log."""
    return _restore(ledger, conn, wanted, _expect_head(ledger, conn, expected_head), reason)


def _expect_head(ledger: Ledger, conn: Connection, expected: int | None) -> int:
    check_number("expected_head", expected)
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
    check_text("reason", reason)
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


def set_alias(ledger: Ledger, conn: Connection, name: str, ref: Ref) -> None:
    """Let a name stand for a version, wherever it stood before."""
    check_name("alias", name)
    if name == "head" or NUMBER.fullmatch(name):
        raise ValueError(
            f"alias {name!r} would be taken for a version; choose a name that is no number or 'head'"
        )
    target = ledger.usable(conn, ref, f"give alias {name!r} to")
    before = ledger.aliases(conn).get(name)
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
            f"no alias {name!r} in policy {ledger.policy!r}: aliases are: {', '.join(before) or 'none'}"
        )
    followers = [pin.worker for pin in ledger.pins(conn) if pin.ref == name]
    if followers:
        raise InUseError(
            f"alias {name!r} of policy {ledger.policy!r} is followed by the pin of {', '.join(followers)}; unpin first"
        )
    policy = ledger.policy_ref(conn)
    conn.execute(delete(Alias).where(Alias.policy_id == policy.id, Alias.name == name))
    ledger.event(conn, "alias_deleted", version=before[name], details={"alias": name})


def pin(ledger: Ledger, conn: Connection, worker: str, ref: Ref, *, reason: str) -> None:
    """Hold a worker, or a glob of names, at a version; a newer pin of the same name replaces the older."""
    check_name("worker", worker)
    check_text("reason", reason)
    alias = ref if isinstance(ref, str) and ref in ledger.aliases(conn) else None
    target = ledger.usable(conn, ref, f"pin {worker!r} to")
    policy = ledger.policy_ref(conn)
    # Delete and insert, so that the newer of two globs is the one with the higher id.
    conn.execute(delete(PinRow).where(PinRow.policy_id == policy.id, PinRow.worker == worker))
    conn.execute(
        insert(PinRow).values(
            policy_id=policy.id,
            worker=worker,
            version_id=ledger.row(conn, target.number).id if alias is None else None,
            alias=alias,
            reason=reason,
            created_at=now(),
            run_id=ledger.run_id(conn),
        )
    )
    ledger.event(conn, "pin", version=target.number, worker=worker, reason=reason, details={"ref": alias})


def unpin(ledger: Ledger, conn: Connection, worker: str) -> None:
    """Let a worker follow the head again.

    Raises:
        NotFoundError: no pin has exactly that worker or glob.
    """
    names = [pin.worker for pin in ledger.pins(conn)]
    if worker not in names:
        raise NotFoundError(
            f"{worker!r} is not pinned in policy {ledger.policy!r}: pins are on: {', '.join(names) or 'nothing'}"
        )
    policy = ledger.policy_ref(conn)
    conn.execute(delete(PinRow).where(PinRow.policy_id == policy.id, PinRow.worker == worker))
    ledger.event(conn, "unpin", worker=worker)


def record_metrics(ledger: Ledger, conn: Connection, ref: Ref, metrics: Mapping[str, float]) -> Version:
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
    if mode not in ("max", "min"):
        raise ValueError(f"mode must be 'max' or 'min', found {mode!r}")
    policy = ledger.find_policy(conn)
    number = None
    if policy is not None:
        infinite = float("inf")
        value = Metric.value.desc() if mode == "max" else Metric.value.asc()
        number = conn.scalar(
            select(VersionRow.number)
            .join(Metric, Metric.version_id == VersionRow.id)
            .join(Snapshot, Snapshot.id == VersionRow.snapshot_id)
            .where(
                Metric.policy_id == policy.id,
                Metric.name == metric,
                Metric.value > -infinite,
                Metric.value < infinite,
                VersionRow.state == "stored",
                Snapshot.stored,
            )
            .order_by(value, VersionRow.number.desc())
            .limit(1)
        )
    if number is None:
        raise NotFoundError(
            f"no version with a finite {metric!r} in policy {ledger.policy!r}{ledger.metric_names(conn)}"
        )
    return ledger.version(conn, number)


def check_metrics(metrics: Mapping[str, Any] | None) -> dict[str, float]:
    """Return metrics as plain floats.

    Raises:
        InvalidWeightsError: a name cannot be kept, or a value is no number.
    """
    result: dict[str, float] = {}
    if metrics is not None and not isinstance(metrics, Mapping):
        raise InvalidWeightsError(
            f"metrics must map names to numbers, found {type(metrics).__name__} {metrics!r}"
        )
    for name, value in (metrics or {}).items():
        if not isinstance(name, str):
            raise InvalidWeightsError(f"metric names are text, found {type(name).__name__} {name!r}")
        try:
            check_name("metric", name)
        except ValueError as error:
            raise InvalidWeightsError(str(error)) from error
        if isinstance(value, (str, bytes)):
            raise InvalidWeightsError(f"metric {name!r} must be a number, found the text {value!r}")
        try:
            result[name] = float(value)
        except (TypeError, ValueError, OverflowError) as error:
            raise InvalidWeightsError(
                f"metric {name!r} must be a number, found {type(value).__name__} {value!r}"
            ) from error
    return result

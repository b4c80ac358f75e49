"""Which version a reference names, looked up in the log. Everything here only reads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from sqlalchemy import Connection, select

from weightledger.registry import arguments
from weightledger.registry.errors import NotFoundError
from weightledger.registry.log import lineage, refs
from weightledger.registry.log.models import Metric, PolicyRef, Snapshot, VersionRow
from weightledger.registry.log.refs import Meaning, Ref
from weightledger.registry.records import Version
from weightledger.registry.values import surrogate

if TYPE_CHECKING:
    from weightledger.registry.log.ledger import Ledger

_CANDIDATES = 5  # so many contents are named when a prefix is not enough


def resolve(ledger: Ledger, conn: Connection, ref: Ref | Meaning) -> Version:
    """Return the version that a reference names.

    Raises:
        NotFoundError: Nothing bears that name, or several contents do; the text says what exists.
        TypeError: It is no reference.
    """
    meaning = refs.parse(ref)
    followed = alias(ledger, conn, meaning)
    if followed is not None:
        return ledger.version(conn, ledger.aliases(conn)[followed])
    match meaning:
        case Version():
            return _same(ledger, conn, meaning)
        case refs.Numbered(number):
            return ledger.version(conn, number)
        case refs.Back():
            return _back(ledger, conn, meaning.publishes)
        case refs.Best():
            return _best(ledger, conn, meaning.metric, meaning.mode)
        case refs.Content():
            return _of_content(ledger, conn, meaning.digits)
        case refs.Other(text):
            known = ", ".join(ledger.aliases(conn)) or "none"
            raise NotFoundError(
                f"no version or alias {arguments.quoted(text)} in policy {ledger.policy!r}: aliases are: {known}; "
                f"{ledger.span(conn)}. {refs.slip(text) or refs.GRAMMAR}"
            )


def alias(ledger: Ledger, conn: Connection, ref: Ref | Meaning) -> str | None:
    """Return the alias that a reference follows wherever it moves; None when it stands for one version."""
    meaning = refs.parse(ref)
    if isinstance(meaning, (Version, refs.Numbered)) or meaning.text == "head":
        return None
    return meaning.text if meaning.text in ledger.aliases(conn) else None


def scored(conn: Connection, policy: PolicyRef, metric: str, mode: str) -> Iterator[int]:
    """Yield the versions with weights and a finite value of a metric, best first, of equal ones the newest."""
    if surrogate(metric):
        return  # no database can be asked for it, so none has it
    infinite = float("inf")
    value = Metric.value.desc() if mode == "max" else Metric.value.asc()
    yield from conn.scalars(
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
    )


def _same(ledger: Ledger, conn: Connection, given: Version) -> Version:
    if given.policy != ledger.policy:
        raise NotFoundError(
            f"{given!r} belongs to policy {given.policy!r}, not to {ledger.policy!r}; open that policy instead"
        )
    found = ledger.version(conn, given.number)
    if found.digest != given.digest:
        raise NotFoundError(
            f"{given!r} belongs to another registry: in this one v{found.number} of policy {ledger.policy!r} has the "
            f"content {found.digest[:19]}; pass the number if that version is meant"
        )
    return found


def _back(ledger: Ledger, conn: Connection, publishes: int) -> Version:
    head, policy = ledger.head(conn), ledger.find_policy(conn)
    assert policy is not None
    if publishes == 0:
        return head
    depth = ledger.row(conn, head.number).depth
    for low, high in ledger.lineage_of_head(conn) if publishes < depth else ():
        # What a rollback restored and the rollback itself stand equally far back: the newer one is the nearer.
        number = conn.scalar(
            select(VersionRow.number)
            .where(
                VersionRow.policy_id == policy.id,
                VersionRow.state == "stored",
                VersionRow.number.between(low, high),
                VersionRow.depth == depth - publishes,
            )
            .order_by(VersionRow.number.desc())
            .limit(1)
        )
        if number is not None:
            return ledger.version(conn, number)
    raise NotFoundError(
        f"nothing in policy {ledger.policy!r} is that many publishes back: the line of the head, v{head.number}, has "
        f"{depth - 1} before it; {ledger.span(conn)}"
    )


def _best(ledger: Ledger, conn: Connection, metric: str, mode: str) -> Version:
    policy, ranges = ledger.find_policy(conn), ledger.lineage_of_head(conn)
    numbers = iter(()) if policy is None else scored(conn, policy, metric, mode)
    number = next((number for number in numbers if lineage.contains(ranges, number)), None)
    if number is None:
        raise NotFoundError(
            f"no stored version on the head's line has a finite {arguments.quoted(metric)} in policy {ledger.policy!r}"
            f"{ledger.metric_names(conn)}"
        )
    return ledger.version(conn, number)


def _of_content(ledger: Ledger, conn: Connection, digits: str) -> Version:
    policy = ledger.find_policy(conn)
    newest: dict[str, int] = {}
    if policy is not None:
        rows = conn.execute(
            select(VersionRow.digest, VersionRow.number)
            .join(Snapshot, Snapshot.id == VersionRow.snapshot_id)
            .where(
                VersionRow.policy_id == policy.id,
                VersionRow.state == "stored",
                # No digest goes on with a "g", and none that begins like this comes after it.
                VersionRow.digest.between(f"blake3:{digits}", f"blake3:{digits}g"),
            )
            .order_by(Snapshot.stored, VersionRow.number)
        )
        newest = {digest: number for digest, number in rows}  # noqa: C416 - rows are no pairs to a type checker
    what = f"'blake3:{digits}' in policy {ledger.policy!r}"
    if not newest:
        raise NotFoundError(f"no version has a content {what}; {ledger.span(conn)}")
    if len(newest) > 1:
        named = [f"{digest} (v{number})" for digest, number in sorted(newest.items())]
        more = f" and {len(named) - _CANDIDATES} more" if len(named) > _CANDIDATES else ""
        raise NotFoundError(
            f"{len(named)} contents begin with {what}: {', '.join(named[:_CANDIDATES])}{more}; give more digits"
        )
    return ledger.version(conn, newest.popitem()[1])

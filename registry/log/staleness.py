"""How far behind the head a version is: the lineage and its contents, read from the database. Everything only reads.

A version's content counts, not its number: after v16 restored v10, whoever holds v10 is up to date.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from sqlalchemy import Connection, Integer, column, func, select, values

from weightledger.registry.errors import CorruptionError, NotFoundError
from weightledger.registry.log import damage, lineage
from weightledger.registry.log.heads import head_number
from weightledger.registry.log.models import PolicyRef, VersionRow

T = TypeVar("T")

_IN_CHUNK = 500  # bound parameters a statement, well under every database's limit


def lineage_of(conn: Connection, policy: PolicyRef, head: int) -> lineage.Ranges:
    """Return the closed number ranges of a head's lineage, newest first."""
    # The state is looked at here: asked for in the query, it would tempt the planner into reading every version.
    jumps = select(VersionRow.number, VersionRow.restores, VersionRow.state).where(
        VersionRow.policy_id == policy.id, VersionRow.restores >= 1
    )
    rollbacks = {
        number: parent for number, parent, state in damage.read(conn, jumps, {}, tuple) if state == "stored"
    }
    beginnings = select(VersionRow.number, VersionRow.state).where(
        VersionRow.policy_id == policy.id, VersionRow.parent.is_(None)
    )
    roots = {number for number, state in damage.read(conn, beginnings, {}, tuple) if state == "stored"}
    try:
        return lineage.ranges(head, rollbacks, roots)
    except ValueError as error:
        raise CorruptionError(damage.told(conn, [str(error)])) from None


def staleness(conn: Connection, policy: PolicyRef, number: int) -> int | None:
    """Count the publishes along the head's lineage since a version's content was last the head's.

    Rollbacks count 0. None when the content is on an abandoned branch only.

    Raises:
        NotFoundError: There is no such version.
    """
    found = staleness_of(conn, policy, [number])
    if number not in found:
        raise NotFoundError(no_such_version(conn, policy, number))
    return found[number]


def staleness_of(conn: Connection, policy: PolicyRef, numbers: Iterable[int]) -> dict[int, int | None]:
    """Answer `staleness` for many versions at once; numbers that no version has are left out."""
    digests: dict[int, str] = {}
    for chunk in chunks(sorted(set(numbers))):
        # A join, since SQLite takes a list of numbers for a reason to read all versions of the policy.
        wanted = values(column("number", Integer)).data([(number,) for number in chunk]).cte("wanted")
        rows = conn.execute(
            select(VersionRow.number, VersionRow.digest)
            .select_from(wanted)
            .join(VersionRow, (VersionRow.policy_id == policy.id) & (VersionRow.number == wanted.c.number))
        )
        digests.update((number, digest) for number, digest in rows)
    stale = staleness_of_content(conn, policy, set(digests.values()))
    return {number: stale.get(digest) for number, digest in digests.items()}


def staleness_of_content(conn: Connection, policy: PolicyRef, digests: Iterable[str]) -> dict[str, int]:
    """Answer by digest; contents that are not on the head's lineage are left out."""
    wanted = sorted(digests)
    head = head_number(conn, policy)
    if head is None or not wanted:
        return {}
    ranges = lineage_of(conn, policy, head)
    newest: dict[str, tuple[int, int]] = {}
    for chunk in chunks(wanted):
        query = select(VersionRow.digest, VersionRow.number, VersionRow.depth, VersionRow.state).where(
            VersionRow.policy_id == policy.id, VersionRow.digest.in_(chunk), VersionRow.number <= head
        )
        for digest, number, depth, state in damage.read(conn, query, {}, tuple):
            if state == "stored" and lineage.contains(ranges, number):
                newest[digest] = max(newest.get(digest, (0, 0)), (number, depth))
    of_head = select(VersionRow.depth).where(VersionRow.policy_id == policy.id, VersionRow.number == head)
    (head_depth,) = damage.read(conn, of_head, {}, lambda row: row.depth)
    return {digest: head_depth - depth for digest, (_, depth) in newest.items()}


def no_such_version(conn: Connection, policy: PolicyRef, number: int) -> str:
    """Say that a version does not exist, and which do."""
    low, high = conn.execute(
        select(func.min(VersionRow.number), func.max(VersionRow.number)).where(
            VersionRow.policy_id == policy.id
        )
    ).one()
    known = "it has none yet" if low is None else f"it has v{low} to v{high}"
    return f"policy {policy.name!r} has no version {number}; {known}"


def chunks(keys: Sequence[T]) -> Iterator[Sequence[T]]:
    """Cut a list into pieces that fit into one statement."""
    for start in range(0, len(keys), _IN_CHUNK):
        yield keys[start : start + _IN_CHUNK]

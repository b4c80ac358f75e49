"""A version's way through the log: a number is taken, the row is written, it becomes stored or lost.

Numbers are taken in the transaction that writes their row. Callers hold the policy's lock.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection, Row, bindparam, delete, insert, literal_column, select, update

from weightledger.registry import values
from weightledger.registry.errors import ConflictError
from weightledger.registry.log.ledger import Entry, FileEntry, Ledger, NewFile, check_number, file_entry, now
from weightledger.registry.log.models import Metric, Policy, Snapshot, VersionRow

_FIND_STORED = (
    select(Snapshot)
    .where(Snapshot.digest == bindparam("digest"), Snapshot.stored)
    .order_by(Snapshot.id.desc())
    .limit(1)
)
_ADD_FILE = insert(Snapshot)
_ADD_VERSION = insert(VersionRow)
_NEXT_NUMBER = (
    update(Policy)
    .where(Policy.id == bindparam("policy"))
    .values(last_number=Policy.last_number + 1)
    .returning(Policy.last_number)
)
_FILE_STORED = update(Snapshot).where(Snapshot.id == bindparam("key")).values(stored=True)
_VERSION_STORED = update(VersionRow).where(VersionRow.id == bindparam("key")).values(state="stored")
_UNFINISHED = select(VersionRow.number, VersionRow.snapshot_id, VersionRow.extra_snapshot_id).where(
    VersionRow.policy_id == bindparam("policy"), VersionRow.state == literal_column("'writing'")
)


def find_stored(conn: Connection, digest: str) -> FileEntry | None:
    """Return a stored file of equal content, of any policy."""
    row = conn.execute(_FIND_STORED, {"digest": digest}).first()
    return None if row is None else file_entry(row)


def add_file(conn: Connection, file: NewFile) -> int:
    """Announce a file that is about to be written; `store_version` makes it stored."""
    made = conn.execute(
        _ADD_FILE,
        {
            "digest": file.digest,
            "uri": file.uri,
            "file_bytes": file.file_bytes,
            "stored": False,
            "deleting": False,
            "created_at": now(),
        },
    ).inserted_primary_key
    assert made is not None
    return int(made[0])


def check_parent(ledger: Ledger, conn: Connection, parent: int | None) -> int | None:
    """Compare the head with the one a writer builds on, and return it.

    Raises:
        ConflictError: `parent` is given and is not the head.
    """
    check_number("parent", parent)
    head = ledger.head_number(conn)
    if parent is not None and parent != (head or 0):
        found = "the policy is empty" if head is None else f"the head is v{head}"
        raise ConflictError(
            f"policy {ledger.policy!r} moved: expected the head to be v{parent}, but {found}; "
            "look at what was published since, then publish again with parent= set to the head"
        )
    return head


def open_version(
    ledger: Ledger,
    conn: Connection,
    entry: Entry,
    *,
    snapshot_id: int,
    structure_id: int,
    extra_snapshot_id: int | None,
    extra_structure_id: int | None,
    parent: int | None,
) -> int:
    """Take the next number and write its row as `writing`."""
    depth = 1
    if parent is not None:
        depth = ledger.row(conn, parent).depth + 1
    return append(
        ledger,
        conn,
        state="writing",
        digest=entry.digest,
        snapshot_id=snapshot_id,
        structure_id=structure_id,
        extra_snapshot_id=extra_snapshot_id,
        extra_structure_id=extra_structure_id,
        parent=parent,
        restores=None,
        depth=depth,
        step=entry.step,
        metadata=values.encode(dict(entry.metadata), "metadata"),
        message=entry.message,
        nonfinite=list(entry.nonfinite),
        size_bytes=entry.size_bytes,
    )


def store_version(ledger: Ledger, conn: Connection, number: int, entry: Entry) -> None:
    """Make a `writing` version the head: its files are durable now."""
    row = ledger.row(conn, number)
    for key in (row.snapshot_id, row.extra_snapshot_id):
        if key is not None:
            conn.execute(_FILE_STORED, {"key": key})
    conn.execute(_VERSION_STORED, {"key": row.id})
    write_metrics(ledger, conn, row, entry.metrics)
    ledger.event(conn, "publish", version=number, reason=entry.message, details={"parent": row.parent})


def lose_version(ledger: Ledger, conn: Connection, number: int, reason: str) -> None:
    """Mark a version whose publish failed or whose writer died; it keeps its number."""
    conn.execute(update(VersionRow).where(VersionRow.id == ledger.row(conn, number).id).values(state="lost"))
    ledger.event(conn, "lost", version=number, reason=reason)


def unfinished(ledger: Ledger, conn: Connection) -> list[tuple[int, list[FileEntry]]]:
    """Return `writing` versions and the files that only they announced."""
    policy = ledger.find_policy(conn)
    if policy is None:
        return []
    rows = conn.execute(_UNFINISHED, {"policy": policy.id}).all()
    result = []
    for number, weights, extra in rows:
        files = [ledger.file(conn, key) for key in (weights, extra) if key is not None]
        result.append((number, [file for file in files if not file.stored]))
    return result


def append(ledger: Ledger, conn: Connection, **columns: Any) -> int:
    """Take the next number and write a row with it."""
    policy = ledger.policy_ref(conn)
    number = conn.execute(_NEXT_NUMBER, {"policy": policy.id}).scalar_one()
    row = columns | {
        "policy_id": policy.id,
        "number": number,
        "run_id": ledger.run_id(conn),
        "created_at": now(),
    }
    conn.execute(_ADD_VERSION, row)
    return number


def write_metrics(ledger: Ledger, conn: Connection, row: Row[Any], metrics: Mapping[str, float]) -> None:
    """Write numbers about a version, replacing older ones of the same names."""
    if not metrics:
        return
    conn.execute(delete(Metric).where(Metric.version_id == row.id, Metric.name.in_(list(metrics))))
    conn.execute(
        insert(Metric),
        [
            # A NaN is not a value that databases agree on; NULL stands for it.
            {
                "version_id": row.id,
                "name": name,
                "policy_id": row.policy_id,
                "value": None if value != value else value,
            }
            for name, value in metrics.items()
        ],
    )

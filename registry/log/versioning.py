"""A version's way through the log: a number is taken, the row is written, it becomes stored or lost.

Numbers are taken in the transaction that writes their row. Callers hold the policy's lock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, and_, bindparam, case, delete, func, insert, literal_column, select, update

from weightledger.registry import values
from weightledger.registry.errors import ConflictError, CorruptionError
from weightledger.registry.log import damage, heads
from weightledger.registry.log.ledger import (
    Entry,
    FileEntry,
    Ledger,
    NewFile,
    Place,
    now,
)
from weightledger.registry.log.models import Metric, PinRow, Policy, Snapshot, VersionRow
from weightledger.registry.log.statements import Statement
from weightledger.registry.records import Version

_FIND_STORED = Statement(
    select(Snapshot.id, Snapshot.digest, Snapshot.uri, Snapshot.file_bytes)
    .where(Snapshot.digest == bindparam("digest"), Snapshot.stored)
    .order_by(Snapshot.id.desc())
    .limit(1)
)
_ADD_FILE = Statement(
    insert(Snapshot)
    .values(
        digest=bindparam("digest"),
        uri=bindparam("uri"),
        file_bytes=bindparam("file_bytes"),
        stored=False,
        deleting=False,
        created_at=bindparam("at"),
    )
    .returning(Snapshot.id)
)
_MADE_LATER = ("id", "released")
_ADD_VERSION = Statement(
    insert(VersionRow)
    .values(
        {
            column: bindparam(f"new_{column.key}")
            for column in VersionRow.__table__.c
            if column.key not in _MADE_LATER
        }
    )
    .returning(VersionRow.id)
)
_SHARED = (
    "policy_id",
    "digest",
    "snapshot_id",
    "structure_id",
    "extra_snapshot_id",
    "extra_structure_id",
    "depth",
    "step",
    "nonfinite",
    "size_bytes",
    "shapes",
    "dtypes",
)
"""Columns in which a rollback is what the version is that it restores."""
_ADD_ROLLBACK = Statement(
    insert(VersionRow)
    .from_select(
        [*_SHARED, "number", "state", "parent", "restores", "run_id", "metadata", "message", "created_at"],
        select(
            *(VersionRow.__table__.c[name] for name in _SHARED),
            bindparam("new_number", type_=VersionRow.number.type),
            literal_column("'stored'"),
            VersionRow.number,
            VersionRow.number,
            bindparam("run", type_=VersionRow.run_id.type),
            bindparam("meta", type_=VersionRow.meta.type),
            bindparam("message", type_=VersionRow.message.type),
            bindparam("at", type_=VersionRow.created_at.type),
        )
        .join(Snapshot, Snapshot.id == VersionRow.snapshot_id)
        .where(
            VersionRow.policy_id == bindparam("policy"),
            VersionRow.number == bindparam("source"),
            VersionRow.state == "stored",
            Snapshot.stored,
        ),
        include_defaults=False,
    )
    .returning(VersionRow.id)
)
_NEXT_NUMBER = Statement(
    update(Policy)
    .where(Policy.id == bindparam("policy"))
    .values(last_number=Policy.last_number + 1)
    .returning(Policy.last_number)
)
_FILE_STORED = Statement(update(Snapshot).where(Snapshot.id == bindparam("key")).values(stored=True))
_VERSION_STORED = Statement(
    update(VersionRow)
    .where(VersionRow.id == bindparam("key"), VersionRow.state == literal_column("'writing'"))
    .values(state="stored")
    .returning(VersionRow.id)
)
_NAMED = 3  # so many damaged cells are named in an error
_WRITING = and_(VersionRow.policy_id == bindparam("policy"), VersionRow.state == literal_column("'writing'"))
_UNFINISHED = select(VersionRow.number).where(_WRITING)
_HEAD = (
    select(func.max(VersionRow.number))
    .where(VersionRow.policy_id == bindparam("policy"), VersionRow.state == "stored")
    .scalar_subquery()
)
_STANDING = Statement(
    select(
        Policy.last_number,
        VersionRow.number,
        func.coalesce(VersionRow.depth, 0),
        VersionRow.digest,
        case((VersionRow.restores.is_(None), VersionRow.step)),
        VersionRow.shapes,
        select(VersionRow.id).where(_WRITING).exists().label("unfinished"),
        select(PinRow.id).where(PinRow.policy_id == bindparam("policy")).exists().label("pinned"),
    )
    .select_from(Policy)
    .outerjoin(VersionRow, and_(VersionRow.policy_id == Policy.id, VersionRow.number == _HEAD))
    .where(Policy.id == bindparam("policy"))
)


@dataclass(frozen=True)
class Standing:
    """Where a policy stands; true for as long as its lock is held."""

    last_number: int = 0
    head: int | None = None
    depth: int = 0
    """Publishes along the lineage from its root to the head."""
    digest: str | None = None
    """The head's content."""
    step: int | None = None
    """The step that the head was published with; None for a rollback, which steps nothing."""
    shapes: str | None = None
    """Hash over the head's names and shapes; None when an older library wrote it."""
    unfinished: bool = False
    """Whether a writer died half-way; see `recovery`."""
    pinned: bool = False
    """Whether there are pins."""


@dataclass(frozen=True)
class Opened:
    """A version whose row is written, and which is not stored yet."""

    number: int
    id: int
    parent: int | None
    abandons: int | None
    """The head before it, when it begins a new line."""
    snapshots: tuple[int, ...]
    """Rows of its files."""
    run: str
    created_at: datetime


def standing(ledger: Ledger, conn: Connection) -> Standing:
    """See, at once, what a publish has to know. The caller holds the policy's lock.

    Raises:
        CorruptionError: nobody can tell which version is the head.
    """
    policy = ledger.find_policy(conn)
    if policy is None:
        return Standing()
    number, head, depth, digest, step, shapes, unfinished, pinned = _STANDING.first(conn, policy=policy.id)
    if not (type(number) is type(depth) is int and type(head) in (int, type(None))):
        raise CorruptionError(damage.told(conn, damage.survey(conn, _NAMED)))
    if number != head:
        heads.check_newest(conn, policy, head)
    return Standing(number, head, depth, digest, step, shapes, bool(unfinished), bool(pinned))


def find_stored(conn: Connection, digest: str) -> FileEntry | None:
    """Return a stored file of equal content, of any policy."""
    row = _FIND_STORED.first(conn, digest=digest)
    if row is None:
        return None
    key, found, uri, file_bytes = row
    return FileEntry(key, found, uri, file_bytes, stored=True)


def add_file(conn: Connection, file: NewFile) -> int:
    """Announce a file that is about to be written; `store_version` makes it stored."""
    made = _ADD_FILE.first(conn, digest=file.digest, uri=file.uri, file_bytes=file.file_bytes, at=now())
    return int(made[0])


def check_parent(ledger: Ledger, found: Standing, parent: int | None) -> None:
    """Compare the head with the one that a writer builds on.

    Raises:
        ConflictError: `parent` is given and is not the head.
    """
    if parent is not None and parent != (found.head or 0):
        head = "the policy is empty" if found.head is None else f"the head is v{found.head}"
        raise ConflictError(
            f"policy {ledger.policy!r} moved: expected the head to be v{parent}, but {head}; "
            "look at what was published since, then publish again with parent= set to the head"
        )


def open_version(
    ledger: Ledger,
    conn: Connection,
    entry: Entry,
    *,
    snapshot_id: int,
    structure_id: int,
    extra_snapshot_id: int | None,
    extra_structure_id: int | None,
    upon: Standing,
    begins_line: bool = False,
) -> Opened:
    """Take the next number and write its row as `writing`; its parent is the head, unless it begins a line.

    Raises:
        ConflictError: somebody else took a number since `upon` was seen.
    """
    at, parent = now(), None if begins_line else upon.head
    number, key = append(
        ledger,
        conn,
        created_at=at,
        state="writing",
        digest=entry.digest,
        snapshot_id=snapshot_id,
        structure_id=structure_id,
        extra_snapshot_id=extra_snapshot_id,
        extra_structure_id=extra_structure_id,
        parent=parent,
        restores=None,
        depth=1 if parent is None else upon.depth + 1,
        step=entry.step,
        metadata=values.encode(dict(entry.metadata), "metadata"),
        message=entry.message,
        nonfinite=list(entry.nonfinite),
        size_bytes=entry.size_bytes,
        shapes=entry.shapes,
        dtypes=entry.dtypes,
    )
    if number != upon.last_number + 1:
        raise ConflictError(
            f"policy {ledger.policy!r} moved: expected to write v{upon.last_number + 1}, but v{number - 1} was written "
            "meanwhile by somebody else. Nothing was written; publish again"
        )
    files = (snapshot_id,) if extra_snapshot_id is None else (snapshot_id, extra_snapshot_id)
    abandons = upon.head if begins_line else None
    return Opened(number, key, parent, abandons, files, ledger.run_id(conn), at)


def store_version(ledger: Ledger, conn: Connection, version: Opened, entry: Entry) -> None:
    """Make a `writing` version the head: its files are durable now.

    Raises:
        ConflictError: it is not `writing` any more: somebody took its writer for dead and marked it lost.
    """
    _FILE_STORED.run_each(conn, ("key",), [(key,) for key in version.snapshots])
    if _VERSION_STORED.first(conn, key=version.id) is None:
        raise ConflictError(
            f"v{version.number} of policy {ledger.policy!r} was marked lost while it was written: its writer was taken "
            "for dead. It is no version; publish again"
        )
    write_metrics(ledger, conn, version.id, entry.metrics)
    details = {"parent": version.parent}
    if version.abandons is not None:
        details["abandons"] = version.abandons
    ledger.event(conn, "publish", version=version.number, reason=entry.message, details=details)


def lose_version(ledger: Ledger, conn: Connection, number: int, reason: str) -> None:
    """Mark a version whose publish failed or whose writer died; it keeps its number.

    Its own files are marked to be deleted, which `lost_files` gives: a file outlives its mark by no means.
    """
    row = ledger.row(conn, number)
    conn.execute(update(VersionRow).where(VersionRow.id == row.id).values(state="lost"))
    own = [key for key in (row.snapshot_id, row.extra_snapshot_id) if key is not None]
    conn.execute(
        update(Snapshot).where(Snapshot.id.in_(own), Snapshot.stored.is_(False)).values(deleting=True)
    )
    ledger.event(conn, "lost", version=number, reason=reason)


def unfinished(ledger: Ledger, conn: Connection) -> list[int]:
    """Return the numbers of `writing` versions."""
    policy = ledger.find_policy(conn)
    return [] if policy is None else list(conn.scalars(_UNFINISHED, {"policy": policy.id}))


def lost_files(ledger: Ledger, conn: Connection) -> list[tuple[int, str]]:
    """Return the files of lost versions that are still to be deleted, by row and URI."""
    policy = ledger.find_policy(conn)
    if policy is None:
        return []
    rows = conn.execute(
        select(Snapshot.id, Snapshot.uri)
        .join(VersionRow, Snapshot.id.in_((VersionRow.snapshot_id, VersionRow.extra_snapshot_id)))
        .where(VersionRow.policy_id == policy.id, VersionRow.state == "lost", Snapshot.deleting)
    )
    return [(key, uri) for key, uri in rows]


def append_rollback(
    ledger: Ledger, conn: Connection, wanted: Version, *, at: datetime, message: str
) -> int | None:
    """Take the next number for a version that has the content of an older one.

    Returns:
        The number; None if the older one is not stored any more, when the transaction must not be committed.
    """
    policy, run = ledger.policy_ref(conn), ledger.run_id(conn)
    number = int(_NEXT_NUMBER.first(conn, policy=policy.id)[0])
    made = _ADD_ROLLBACK.first(
        conn,
        policy=policy.id,
        source=wanted.number,
        new_number=number,
        run=run,
        meta={},
        message=message,
        at=at,
    )
    if made is None:
        return None
    ledger.learn(number, Place(int(made[0]), wanted.digest))
    return number


def append(ledger: Ledger, conn: Connection, **columns: Any) -> tuple[int, int]:
    """Take the next number and write a row with it; returns the number and the row's id."""
    policy = ledger.policy_ref(conn)
    number = int(_NEXT_NUMBER.first(conn, policy=policy.id)[0])
    row = columns | {
        "policy_id": policy.id,
        "number": number,
        "run_id": ledger.run_id(conn),
    }
    made = _ADD_VERSION.first(conn, **{f"new_{name}": value for name, value in row.items()})
    key = int(made[0])
    ledger.learn(number, Place(key, columns["digest"]))
    return number, key


def write_metrics(ledger: Ledger, conn: Connection, version: int, metrics: Mapping[str, float]) -> None:
    """Write numbers about a version, given by its row, replacing older ones of the same names."""
    if not metrics:
        return
    policy = ledger.policy_ref(conn)
    conn.execute(delete(Metric).where(Metric.version_id == version, Metric.name.in_(list(metrics))))
    conn.execute(
        insert(Metric),
        [
            # A NaN is not a value that databases agree on; NULL stands for it.
            {
                "version_id": version,
                "name": name,
                "policy_id": policy.id,
                "value": None if value != value else value,
            }
            for name, value in metrics.items()
        ],
    )

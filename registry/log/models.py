"""The tables. Nothing outside of `registry/` sees these rows.

SQLite and PostgreSQL alike: no type or index here belongs to one of them. Order comes from numbers (`versions.number`,
`holdings.order`, `events.id`), never from times.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    CheckConstraint,
    DateTime,
    Dialect,
    Float,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    MetaData,
    String,
    Text,
    TypeDecorator,
    UniqueConstraint,
    text,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

# SQLite gives rowids (and so its fast inserts) to INTEGER keys only.
Key = BigInteger().with_variant(Integer, "sqlite")


class UtcDateTime(TypeDecorator[datetime]):
    """Aware UTC in Python, whatever the database keeps: SQLite drops the zone, so it is put back here."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        return None if value is None else _in_utc(value)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        return None if value is None else value.astimezone(UTC)

    # SQLite keeps text. Thousands of rows are written and read at once, so times take the short way there and back.

    def bind_processor(self, dialect: Dialect) -> Any:
        return _to_text if dialect.name == "sqlite" else super().bind_processor(dialect)

    def result_processor(self, dialect: Dialect, coltype: object) -> Any:
        return _from_text if dialect.name == "sqlite" else super().result_processor(dialect, coltype)


def _in_utc(value: datetime) -> datetime:
    if value.tzinfo is None:
        raise ValueError(f"expected a timezone-aware datetime, found the naive {value!r}")
    return value.astimezone(UTC)


def _to_text(value: datetime | None) -> str | None:
    return None if value is None else _in_utc(value).replace(tzinfo=None).isoformat(" ", "microseconds")


def _from_text(value: str | None) -> datetime | None:
    return None if value is None else datetime.fromisoformat(value + "+00:00")


class Base(DeclarativeBase):
    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map = {datetime: UtcDateTime, dict[str, Any]: JSON, list[Any]: JSON}


class About(Base):
    """One row: the registry's identity, told to workers so that they never mix two registries up."""

    __tablename__ = "about"
    uuid: Mapped[str] = mapped_column(String(32), primary_key=True)
    created_at: Mapped[datetime]
    snapshots: Mapped[str | None] = mapped_column(Text)
    """Where the snapshots are, if not where the kind of registry has them by itself."""


class Run(Base):
    """One writing process."""

    __tablename__ = "runs"
    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    user: Mapped[str] = mapped_column(Text)
    host: Mapped[str] = mapped_column(Text)
    pid: Mapped[int]
    program: Mapped[str] = mapped_column(Text)
    started_at: Mapped[datetime]


class Policy(Base):
    """A named series of versions, with the counter of its push orders."""

    __tablename__ = "policies"
    id: Mapped[int] = mapped_column(Key, primary_key=True)
    name: Mapped[str] = mapped_column(String(255), unique=True)
    last_number: Mapped[int] = mapped_column(default=0)
    last_order: Mapped[int] = mapped_column(BigInteger, default=0)
    created_at: Mapped[datetime]


@dataclass(frozen=True)
class PolicyRef:
    """A policy's row and name, as other modules pass it on."""

    id: int
    name: str


class Snapshot(Base):
    """One stored file. Several versions may share it; a name is never used again."""

    __tablename__ = "snapshots"
    __table_args__ = (Index(None, "digest", "stored"),)
    id: Mapped[int] = mapped_column(Key, primary_key=True)
    digest: Mapped[str] = mapped_column(String(71))
    uri: Mapped[str] = mapped_column(Text, unique=True)
    file_bytes: Mapped[int] = mapped_column(BigInteger)
    stored: Mapped[bool]
    """False while its writer is at work, after its writer was lost, and after a prune."""
    deleting: Mapped[bool] = mapped_column(default=False)
    """Gone by a prune, or with a writer that died, but the file is not unlinked yet."""
    created_at: Mapped[datetime]


def fingerprint_of(body: str) -> str:
    """Return what a structure's row is known by: the SHA-256 of its text."""
    return hashlib.sha256(body.encode("utf-8", "surrogatepass")).hexdigest()


class Structure(Base):
    """How a version's tensors are put together again; one row however many versions share it."""

    __tablename__ = "structures"
    id: Mapped[int] = mapped_column(Key, primary_key=True)
    fingerprint: Mapped[str] = mapped_column(String(64), unique=True)
    body: Mapped[str] = mapped_column(Text)


VERSION_STATES = ("lost", "stored", "writing")
"""In the order of the text."""
_WRITING = text("state = 'writing'")
_ROOT = text("parent IS NULL")


class VersionRow(Base):
    __tablename__ = "versions"
    __table_args__ = (
        UniqueConstraint("policy_id", "number"),
        CheckConstraint("state IN ('writing', 'stored', 'lost')", name="state"),
        Index(None, "policy_id", "state", "number"),
        Index(None, "policy_id", "digest", "number"),
        Index(None, "policy_id", "restores", "number"),
        Index(None, "snapshot_id"),
        Index(None, "extra_snapshot_id"),
        # Looked for at every publish, and nearly always none.
        Index("ix_versions_writing", "policy_id", sqlite_where=_WRITING),
        # A policy has as many as it has lines of training.
        Index("ix_versions_root", "policy_id", "number", sqlite_where=_ROOT),
    )
    id: Mapped[int] = mapped_column(Key, primary_key=True)
    policy_id: Mapped[int] = mapped_column(ForeignKey("policies.id"))
    number: Mapped[int]
    state: Mapped[str] = mapped_column(String(8))
    digest: Mapped[str] = mapped_column(String(71))
    snapshot_id: Mapped[int] = mapped_column(ForeignKey("snapshots.id"))
    structure_id: Mapped[int] = mapped_column(ForeignKey("structures.id"))
    extra_snapshot_id: Mapped[int | None] = mapped_column(ForeignKey("snapshots.id"))
    extra_structure_id: Mapped[int | None] = mapped_column(ForeignKey("structures.id"))
    parent: Mapped[int | None]
    """NULL begins a line: what stood before is abandoned by it."""
    restores: Mapped[int | None]
    depth: Mapped[int]
    """Publishes along the lineage from its root to here; a rollback has the depth of what it restores."""
    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id"))
    step: Mapped[int | None] = mapped_column(BigInteger)
    meta: Mapped[dict[str, Any]] = mapped_column("metadata")
    message: Mapped[str] = mapped_column(Text)
    nonfinite: Mapped[list[Any]]
    size_bytes: Mapped[int] = mapped_column(BigInteger)
    created_at: Mapped[datetime]
    shapes: Mapped[str | None] = mapped_column(String(64))
    """Hash over the names and shapes of all tensors; NULL in rows that an older library wrote."""
    dtypes: Mapped[str | None] = mapped_column(Text)
    """How many tensors have which dtype, in words; NULL in rows that an older library wrote."""
    released: Mapped[bool | None]
    """Whether its policy's last prune let go of it, so that only another policy keeps its file; NULL: never asked."""


class Metric(Base):
    """One number said of a version; NULL stands for NaN, which is not the same as no row."""

    __tablename__ = "metrics"
    __table_args__ = (Index(None, "policy_id", "name", "value"),)
    version_id: Mapped[int] = mapped_column(ForeignKey("versions.id"), primary_key=True)
    name: Mapped[str] = mapped_column(String(255), primary_key=True)
    policy_id: Mapped[int] = mapped_column(ForeignKey("policies.id"))
    value: Mapped[float | None] = mapped_column(Float(53))


class Alias(Base):
    __tablename__ = "aliases"
    policy_id: Mapped[int] = mapped_column(ForeignKey("policies.id"), primary_key=True)
    name: Mapped[str] = mapped_column(String(255), primary_key=True)
    version_id: Mapped[int] = mapped_column(ForeignKey("versions.id"), index=True)
    moved_at: Mapped[datetime]


class PinRow(Base):
    """Exactly one of `version_id` and `alias` is set; a newer row has the higher id."""

    __tablename__ = "pins"
    __table_args__ = (
        UniqueConstraint("policy_id", "worker", "literal"),
        ForeignKeyConstraint(["policy_id", "alias"], ["aliases.policy_id", "aliases.name"]),
        CheckConstraint("(version_id IS NULL) <> (alias IS NULL)", name="one_ref"),
    )
    id: Mapped[int] = mapped_column(Key, primary_key=True)
    policy_id: Mapped[int] = mapped_column(ForeignKey("policies.id"))
    worker: Mapped[str] = mapped_column(String(255))
    literal: Mapped[bool]
    """Whether `worker` is one worker's name and no glob, whatever characters it has."""
    version_id: Mapped[int | None] = mapped_column(ForeignKey("versions.id"), index=True)
    alias: Mapped[str | None] = mapped_column(String(255))
    reason: Mapped[str] = mapped_column(Text)
    created_at: Mapped[datetime]
    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id"))


class Worker(Base):
    """A lasting name, and what is known of who bears it now."""

    __tablename__ = "workers"
    __table_args__ = (UniqueConstraint("policy_id", "name"),)
    id: Mapped[int] = mapped_column(Key, primary_key=True)
    policy_id: Mapped[int] = mapped_column(ForeignKey("policies.id"))
    name: Mapped[str] = mapped_column(String(255))
    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id"))
    """The run that steers it, or did last."""
    incarnation: Mapped[str | None] = mapped_column(String(255))
    state: Mapped[str] = mapped_column(String(12))
    """`confirmed`, `unknown` or `gone`, as that run last saw it; `left` when its updater was closed."""
    evidence_at: Mapped[datetime]
    detail: Mapped[str] = mapped_column(Text)


_BACKWARDS = text("ended_at < coalesce(confirmed_at, pushed_at)")
_OPEN = text("ended_at IS NULL")


class HoldingRow(Base):
    """Written as an intention before a push leaves; a holding from the receipt on (`confirmed_at`).

    At most one confirmed row and one pending row of a worker are open (`ended_at` NULL).
    """

    __tablename__ = "holdings"
    __table_args__ = (
        UniqueConstraint("worker_id", "order"),
        Index("ix_holdings_worker_confirmed", "worker_id", "confirmed_at"),
        Index("ix_holdings_worker_pushed", "worker_id", "pushed_at"),
        Index("ix_holdings_version_order", "version_id", "order"),
        Index("ix_holdings_policy_order", "policy_id", "order"),
        # Open rows are few however long the history. `ended_at`, always NULL in here, and `order` make SQLite prefer
        # these two small indices to those over all of a worker's rows. PostgreSQL gets the same condition from the
        # migration alone: said here, it would import that dialect at every start.
        Index(
            "ix_holdings_open_worker",
            "worker_id",
            "ended_at",
            "order",
            sqlite_where=_OPEN,
        ),
        Index("ix_holdings_open_policy", "policy_id", "ended_at", sqlite_where=_OPEN),
        # Rows that ended before they began, since the clock was set back: none, nearly always.
        Index("ix_holdings_backwards", "policy_id", "worker_id", sqlite_where=_BACKWARDS),
    )
    id: Mapped[int] = mapped_column(Key, primary_key=True)
    policy_id: Mapped[int] = mapped_column(ForeignKey("policies.id"))
    worker_id: Mapped[int] = mapped_column(ForeignKey("workers.id"))
    version_id: Mapped[int] = mapped_column(ForeignKey("versions.id"))
    number: Mapped[int]
    digest: Mapped[str] = mapped_column(String(71))
    sent_digest: Mapped[str] = mapped_column(String(71))
    order: Mapped[int] = mapped_column(BigInteger)
    incarnation: Mapped[str | None] = mapped_column(String(255))
    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id"))
    pushed_at: Mapped[datetime]
    confirmed_at: Mapped[datetime | None]
    ended_at: Mapped[datetime | None]
    ended_how: Mapped[str | None] = mapped_column(String(12))


class EventRow(Base):
    __tablename__ = "events"
    __table_args__ = (
        Index(None, "policy_id", "id"),
        Index(None, "policy_id", "at"),
        Index(None, "policy_id", "kind", "id"),
        Index(None, "policy_id", "worker", "id"),
        Index(None, "policy_id", "version", "id"),
    )
    id: Mapped[int] = mapped_column(Key, primary_key=True)
    policy_id: Mapped[int] = mapped_column(ForeignKey("policies.id"))
    at: Mapped[datetime]
    kind: Mapped[str] = mapped_column(String(16))
    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id"))
    user: Mapped[str] = mapped_column(Text)
    version: Mapped[int | None]
    worker: Mapped[str | None] = mapped_column(String(255))
    reason: Mapped[str] = mapped_column(Text)
    details: Mapped[dict[str, Any]]

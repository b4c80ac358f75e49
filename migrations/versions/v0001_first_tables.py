"""The first tables.

Revision 0001.
"""

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from alembic import op

revision: str = "0001"
down_revision: str | None = None
branch_labels: Sequence[str] | None = None
depends_on: Sequence[str] | None = None

KEY = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
TIME = sa.DateTime(timezone=True)
WRITING: dict[str, Any] = {
    "sqlite_where": sa.text("state = 'writing'"),
    "postgresql_where": sa.text("state = 'writing'"),
}
OPEN: dict[str, Any] = {
    "sqlite_where": sa.text("ended_at IS NULL"),
    "postgresql_where": sa.text("ended_at IS NULL"),
}


def upgrade() -> None:
    op.create_table(
        "about",
        sa.Column("uuid", sa.String(length=32), nullable=False),
        sa.Column("created_at", TIME, nullable=False),
        sa.PrimaryKeyConstraint("uuid", name="pk_about"),
    )
    op.create_table(
        "policies",
        sa.Column("id", KEY, nullable=False),
        sa.Column("name", sa.String(length=255), nullable=False),
        sa.Column("last_number", sa.Integer(), nullable=False),
        sa.Column("last_order", sa.BigInteger(), nullable=False),
        sa.Column("created_at", TIME, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_policies"),
        sa.UniqueConstraint("name", name="uq_policies_name"),
    )
    op.create_table(
        "runs",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("user", sa.Text(), nullable=False),
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("pid", sa.Integer(), nullable=False),
        sa.Column("program", sa.Text(), nullable=False),
        sa.Column("started_at", TIME, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_runs"),
    )
    op.create_table(
        "snapshots",
        sa.Column("id", KEY, nullable=False),
        sa.Column("digest", sa.String(length=71), nullable=False),
        sa.Column("uri", sa.Text(), nullable=False),
        sa.Column("file_bytes", sa.BigInteger(), nullable=False),
        sa.Column("stored", sa.Boolean(), nullable=False),
        sa.Column("deleting", sa.Boolean(), nullable=False),
        sa.Column("created_at", TIME, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_snapshots"),
        sa.UniqueConstraint("uri", name="uq_snapshots_uri"),
    )
    op.create_index("ix_snapshots_digest_stored", "snapshots", ["digest", "stored"])
    op.create_table(
        "structures",
        sa.Column("id", KEY, nullable=False),
        sa.Column("fingerprint", sa.String(length=64), nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_structures"),
        sa.UniqueConstraint("fingerprint", name="uq_structures_fingerprint"),
    )
    op.create_table(
        "events",
        sa.Column("id", KEY, nullable=False),
        sa.Column("policy_id", KEY, nullable=False),
        sa.Column("at", TIME, nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("run_id", sa.String(length=32), nullable=False),
        sa.Column("user", sa.Text(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=True),
        sa.Column("worker", sa.String(length=255), nullable=True),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("details", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(["policy_id"], ["policies.id"], name="fk_events_policy_id"),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name="fk_events_run_id"),
        sa.PrimaryKeyConstraint("id", name="pk_events"),
    )
    op.create_index("ix_events_policy_id_at", "events", ["policy_id", "at"])
    op.create_index("ix_events_policy_id_id", "events", ["policy_id", "id"])
    op.create_index("ix_events_policy_id_kind_id", "events", ["policy_id", "kind", "id"])
    op.create_index("ix_events_policy_id_version_id", "events", ["policy_id", "version", "id"])
    op.create_index("ix_events_policy_id_worker_id", "events", ["policy_id", "worker", "id"])
    op.create_table(
        "versions",
        sa.Column("id", KEY, nullable=False),
        sa.Column("policy_id", KEY, nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(length=8), nullable=False),
        sa.Column("digest", sa.String(length=71), nullable=False),
        sa.Column("snapshot_id", KEY, nullable=False),
        sa.Column("structure_id", KEY, nullable=False),
        sa.Column("extra_snapshot_id", KEY, nullable=True),
        sa.Column("extra_structure_id", KEY, nullable=True),
        sa.Column("parent", sa.Integer(), nullable=True),
        sa.Column("restores", sa.Integer(), nullable=True),
        sa.Column("depth", sa.Integer(), nullable=False),
        sa.Column("run_id", sa.String(length=32), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=True),
        sa.Column("metadata", sa.JSON(), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("nonfinite", sa.JSON(), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("created_at", TIME, nullable=False),
        sa.CheckConstraint("state IN ('writing', 'stored', 'lost')", name=op.f("ck_versions_state")),
        sa.ForeignKeyConstraint(
            ["extra_snapshot_id"], ["snapshots.id"], name="fk_versions_extra_snapshot_id"
        ),
        sa.ForeignKeyConstraint(
            ["extra_structure_id"], ["structures.id"], name="fk_versions_extra_structure_id"
        ),
        sa.ForeignKeyConstraint(["policy_id"], ["policies.id"], name="fk_versions_policy_id"),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name="fk_versions_run_id"),
        sa.ForeignKeyConstraint(["snapshot_id"], ["snapshots.id"], name="fk_versions_snapshot_id"),
        sa.ForeignKeyConstraint(["structure_id"], ["structures.id"], name="fk_versions_structure_id"),
        sa.PrimaryKeyConstraint("id", name="pk_versions"),
        sa.UniqueConstraint("policy_id", "number", name="uq_versions_policy_id_number"),
    )
    op.create_index("ix_versions_extra_snapshot_id", "versions", ["extra_snapshot_id"])
    op.create_index("ix_versions_policy_id_digest_number", "versions", ["policy_id", "digest", "number"])
    op.create_index("ix_versions_policy_id_restores_number", "versions", ["policy_id", "restores", "number"])
    op.create_index("ix_versions_policy_id_state_number", "versions", ["policy_id", "state", "number"])
    op.create_index("ix_versions_snapshot_id", "versions", ["snapshot_id"])
    op.create_index("ix_versions_writing", "versions", ["policy_id"], **WRITING)
    op.create_table(
        "workers",
        sa.Column("id", KEY, nullable=False),
        sa.Column("policy_id", KEY, nullable=False),
        sa.Column("name", sa.String(length=255), nullable=False),
        sa.Column("run_id", sa.String(length=32), nullable=False),
        sa.Column("incarnation", sa.String(length=255), nullable=True),
        sa.Column("state", sa.String(length=12), nullable=False),
        sa.Column("evidence_at", TIME, nullable=False),
        sa.Column("detail", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["policy_id"], ["policies.id"], name="fk_workers_policy_id"),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name="fk_workers_run_id"),
        sa.PrimaryKeyConstraint("id", name="pk_workers"),
        sa.UniqueConstraint("policy_id", "name", name="uq_workers_policy_id_name"),
    )
    op.create_table(
        "aliases",
        sa.Column("policy_id", KEY, nullable=False),
        sa.Column("name", sa.String(length=255), nullable=False),
        sa.Column("version_id", KEY, nullable=False),
        sa.Column("moved_at", TIME, nullable=False),
        sa.ForeignKeyConstraint(["policy_id"], ["policies.id"], name="fk_aliases_policy_id"),
        sa.ForeignKeyConstraint(["version_id"], ["versions.id"], name="fk_aliases_version_id"),
        sa.PrimaryKeyConstraint("policy_id", "name", name="pk_aliases"),
    )
    op.create_index("ix_aliases_version_id", "aliases", ["version_id"])
    op.create_table(
        "holdings",
        sa.Column("id", KEY, nullable=False),
        sa.Column("policy_id", KEY, nullable=False),
        sa.Column("worker_id", KEY, nullable=False),
        sa.Column("version_id", KEY, nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("digest", sa.String(length=71), nullable=False),
        sa.Column("sent_digest", sa.String(length=71), nullable=False),
        sa.Column("order", sa.BigInteger(), nullable=False),
        sa.Column("incarnation", sa.String(length=255), nullable=True),
        sa.Column("run_id", sa.String(length=32), nullable=False),
        sa.Column("pushed_at", TIME, nullable=False),
        sa.Column("confirmed_at", TIME, nullable=True),
        sa.Column("ended_at", TIME, nullable=True),
        sa.Column("ended_how", sa.String(length=12), nullable=True),
        sa.ForeignKeyConstraint(["policy_id"], ["policies.id"], name="fk_holdings_policy_id"),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name="fk_holdings_run_id"),
        sa.ForeignKeyConstraint(["version_id"], ["versions.id"], name="fk_holdings_version_id"),
        sa.ForeignKeyConstraint(["worker_id"], ["workers.id"], name="fk_holdings_worker_id"),
        sa.PrimaryKeyConstraint("id", name="pk_holdings"),
        sa.UniqueConstraint("worker_id", "order", name="uq_holdings_worker_id_order"),
    )
    op.create_index("ix_holdings_open_policy", "holdings", ["policy_id", "ended_at"], **OPEN)
    op.create_index("ix_holdings_open_worker", "holdings", ["worker_id", "ended_at", "order"], **OPEN)
    op.create_index("ix_holdings_policy_order", "holdings", ["policy_id", "order"])
    op.create_index("ix_holdings_version_order", "holdings", ["version_id", "order"])
    op.create_index("ix_holdings_worker_confirmed", "holdings", ["worker_id", "confirmed_at"])
    op.create_index("ix_holdings_worker_pushed", "holdings", ["worker_id", "pushed_at"])
    op.create_table(
        "metrics",
        sa.Column("version_id", KEY, nullable=False),
        sa.Column("name", sa.String(length=255), nullable=False),
        sa.Column("policy_id", KEY, nullable=False),
        sa.Column("value", sa.Float(precision=53), nullable=True),
        sa.ForeignKeyConstraint(["policy_id"], ["policies.id"], name="fk_metrics_policy_id"),
        sa.ForeignKeyConstraint(["version_id"], ["versions.id"], name="fk_metrics_version_id"),
        sa.PrimaryKeyConstraint("version_id", "name", name="pk_metrics"),
    )
    op.create_index("ix_metrics_policy_id_name_value", "metrics", ["policy_id", "name", "value"])
    op.create_table(
        "pins",
        sa.Column("id", KEY, nullable=False),
        sa.Column("policy_id", KEY, nullable=False),
        sa.Column("worker", sa.String(length=255), nullable=False),
        sa.Column("version_id", KEY, nullable=True),
        sa.Column("alias", sa.String(length=255), nullable=True),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("created_at", TIME, nullable=False),
        sa.Column("run_id", sa.String(length=32), nullable=False),
        sa.CheckConstraint("(version_id IS NULL) <> (alias IS NULL)", name=op.f("ck_pins_one_ref")),
        sa.ForeignKeyConstraint(
            ["policy_id", "alias"], ["aliases.policy_id", "aliases.name"], name="fk_pins_policy_id_alias"
        ),
        sa.ForeignKeyConstraint(["policy_id"], ["policies.id"], name="fk_pins_policy_id"),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name="fk_pins_run_id"),
        sa.ForeignKeyConstraint(["version_id"], ["versions.id"], name="fk_pins_version_id"),
        sa.PrimaryKeyConstraint("id", name="pk_pins"),
        sa.UniqueConstraint("policy_id", "worker", name="uq_pins_policy_id_worker"),
    )
    op.create_index("ix_pins_version_id", "pins", ["version_id"])


def downgrade() -> None:
    op.drop_table("pins")
    op.drop_table("metrics")
    op.drop_table("holdings")
    op.drop_table("aliases")
    op.drop_table("workers")
    op.drop_table("versions")
    op.drop_table("events")
    op.drop_table("structures")
    op.drop_table("snapshots")
    op.drop_table("runs")
    op.drop_table("policies")
    op.drop_table("about")

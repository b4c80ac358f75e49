"""Lines of training, names and shapes of versions, what a prune let go of, pins that are no globs, clocks set back.

Revision 0002, after 0001.
"""

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from alembic import op

revision: str = "0002"
down_revision: str | None = "0001"
branch_labels: Sequence[str] | None = None
depends_on: Sequence[str] | None = None

KEY = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
TIME = sa.DateTime(timezone=True)
ROOT: dict[str, Any] = {
    "sqlite_where": sa.text("parent IS NULL"),
    "postgresql_where": sa.text("parent IS NULL"),
}
BACKWARDS: dict[str, Any] = {
    "sqlite_where": sa.text("ended_at < confirmed_at"),
    "postgresql_where": sa.text("ended_at < confirmed_at"),
}
PINS = sa.table(
    "pins",
    sa.column("id", KEY),
    sa.column("policy_id", KEY),
    sa.column("worker", sa.String),
    sa.column("literal", sa.Boolean),
)


def upgrade() -> None:
    # Of what is there already nobody wrote them down; the files say it.
    op.add_column("versions", sa.Column("shapes", sa.String(length=64), nullable=True))
    op.add_column("versions", sa.Column("dtypes", sa.Text(), nullable=True))
    op.add_column("versions", sa.Column("released", sa.Boolean(), nullable=True))
    op.create_index("ix_versions_root", "versions", ["policy_id", "number"], **ROOT)

    op.create_index("ix_holdings_backwards", "holdings", ["policy_id", "worker_id"], **BACKWARDS)

    op.add_column("pins", sa.Column("literal", sa.Boolean(), nullable=True))
    glob = sa.or_(*(PINS.c.worker.contains(character) for character in "*?["))
    op.execute(PINS.update().values(literal=sa.not_(glob)))
    with op.batch_alter_table("pins", copy_from=_pins("worker", nullable=True)) as pins:
        pins.alter_column("literal", existing_type=sa.Boolean(), nullable=False)
        pins.drop_constraint("uq_pins_policy_id_worker", type_="unique")
        pins.create_unique_constraint("uq_pins_policy_id_worker_literal", ["policy_id", "worker", "literal"])


def downgrade() -> None:
    # Of a name and a glob that read alike the newer one is left: the table as it was holds one of them.
    newer = PINS.alias()
    alike = (newer.c.policy_id == PINS.c.policy_id) & (newer.c.worker == PINS.c.worker)
    op.execute(PINS.delete().where(sa.exists().where(alike, newer.c.id > PINS.c.id)))
    with op.batch_alter_table("pins", copy_from=_pins("worker", "literal", nullable=False)) as pins:
        pins.drop_constraint("uq_pins_policy_id_worker_literal", type_="unique")
        pins.create_unique_constraint("uq_pins_policy_id_worker", ["policy_id", "worker"])
        pins.drop_column("literal")
    op.drop_index("ix_holdings_backwards", "holdings")
    op.drop_index("ix_versions_root", "versions")
    op.drop_column("versions", "released")
    op.drop_column("versions", "dtypes")
    op.drop_column("versions", "shapes")


def _pins(*unique: str, nullable: bool) -> sa.Table:
    """Describe the table as it is, since a database does not tell all of it, to whoever makes it anew."""
    columns = ["policy_id", *unique]
    table = sa.Table(
        "pins",
        sa.MetaData(),
        sa.Column("id", KEY, nullable=False),
        sa.Column("policy_id", KEY, nullable=False),
        sa.Column("worker", sa.String(length=255), nullable=False),
        sa.Column("literal", sa.Boolean(), nullable=nullable),
        sa.Column("version_id", KEY, nullable=True),
        sa.Column("alias", sa.String(length=255), nullable=True),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("created_at", TIME, nullable=False),
        sa.Column("run_id", sa.String(length=32), nullable=False),
        sa.CheckConstraint("(version_id IS NULL) <> (alias IS NULL)", name="ck_pins_one_ref"),
        sa.ForeignKeyConstraint(
            ["policy_id", "alias"], ["aliases.policy_id", "aliases.name"], name="fk_pins_policy_id_alias"
        ),
        sa.ForeignKeyConstraint(["policy_id"], ["policies.id"], name="fk_pins_policy_id"),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name="fk_pins_run_id"),
        sa.ForeignKeyConstraint(["version_id"], ["versions.id"], name="fk_pins_version_id"),
        sa.PrimaryKeyConstraint("id", name="pk_pins"),
        sa.UniqueConstraint(*columns, name=f"uq_pins_{'_'.join(columns)}"),
    )
    sa.Index("ix_pins_version_id", table.c.version_id)
    return table

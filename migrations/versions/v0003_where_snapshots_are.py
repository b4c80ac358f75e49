"""Where the snapshots are, if they are not beside the database; pushes that the clock was set back in.

Revision 0003, after 0002.
"""

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from alembic import op

revision: str = "0003"
down_revision: str | None = "0002"
branch_labels: Sequence[str] | None = None
depends_on: Sequence[str] | None = None


def _where(condition: str) -> dict[str, Any]:
    return {"sqlite_where": sa.text(condition), "postgresql_where": sa.text(condition)}


BACKWARDS = _where("ended_at < coalesce(confirmed_at, pushed_at)")
CONFIRMED = _where("ended_at < confirmed_at")


def upgrade() -> None:
    op.add_column("about", sa.Column("snapshots", sa.Text(), nullable=True))
    # Of a push that nobody confirmed, the clock may have been set back before its end, too.
    op.drop_index("ix_holdings_backwards", "holdings", if_exists=True)
    op.create_index("ix_holdings_backwards", "holdings", ["policy_id", "worker_id"], **BACKWARDS)


def downgrade() -> None:
    op.drop_index("ix_holdings_backwards", "holdings")
    op.create_index("ix_holdings_backwards", "holdings", ["policy_id", "worker_id"], **CONFIRMED)
    op.drop_column("about", "snapshots")

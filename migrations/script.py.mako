"""${message}

Revision ${up_revision}, after ${down_revision | comma,n}.

Rules for authors: state the columns here and import no models, which change later. Rebuild a table inside
`op.batch_alter_table`. Lose no row. Set `HEAD` in registry/log/schema.py, and keep a database of the revision before
under tests/migrations/data/.
"""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op
${imports if imports else ""}
revision: str = ${repr(up_revision)}
down_revision: str | None = ${repr(down_revision)}
branch_labels: Sequence[str] | None = ${repr(branch_labels)}
depends_on: Sequence[str] | None = ${repr(depends_on)}


def upgrade() -> None:
    ${upgrades if upgrades else "pass"}


def downgrade() -> None:
    ${downgrades if downgrades else "pass"}

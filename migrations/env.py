"""Run by Alembic for every command: takes the open connection that the caller put into the configuration.

The library passes its own (`weightledger.registry.log.schema`). On a developer's command line, `-x registry=FOLDER`
names the registry to work on, for `alembic -x registry=FOLDER revision --autogenerate` and the like.
"""

from pathlib import Path

from alembic import context
from alembic.util import CommandError
from sqlalchemy import Connection

from weightledger.registry.database.sqlite import SqliteDatabase
from weightledger.registry.log.models import Base


def run(connection: Connection) -> None:
    """Do what the command asks for, inside the transaction that the connection is in."""
    context.configure(
        connection=connection,
        target_metadata=Base.metadata,
        render_as_batch=True,  # SQLite changes a table by making it anew
        compare_type=True,
        compare_server_default=True,
    )
    with context.begin_transaction():
        context.run_migrations()


given = context.config.attributes.get("connection")
folder = context.get_x_argument(as_dictionary=True).get("registry")
if context.is_offline_mode():
    raise CommandError("migrations need a database to work on: --sql is not supported")
if given is not None:
    run(given)
elif isinstance(folder, str):
    with SqliteDatabase(Path(folder) / "registry.db").rebuilding() as opened:
        run(opened)
else:
    raise CommandError("no database given: name a registry's folder with `alembic -x registry=FOLDER ...`")

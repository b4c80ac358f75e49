"""Lets registries in folders be on a PostgreSQL server, in every process of a test run: see `tests/on_postgres/README`.

A folder keeps its snapshots; its record is in a schema of the server that `WEIGHTLEDGER_TEST_SERVER` names. The folder
holds a note with the schema's name, so that a folder that is deleted and made anew is another registry.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

SERVER = os.environ.get("WEIGHTLEDGER_TEST_SERVER", "")
PLACES = "weightledger.registry.places"
NOTE = ".schema"


class _Finder(importlib.abc.MetaPathFinder):
    """Changes one module when it is imported."""

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> Any:
        if name != PLACES:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.loader is not None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            _divert(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _divert(places: ModuleType) -> None:
    original = places.open_place

    def open_place(location: Any, *, snapshots: Any, cache: Any, create: bool, migrate: bool) -> Any:
        import dataclasses

        from weightledger.registry.errors import NotFoundError

        folder = places.check_location(location)
        if isinstance(folder, str):
            return original(location, snapshots=snapshots, cache=cache, create=create, migrate=migrate)
        note = folder / NOTE
        if not note.exists():
            if not create:
                raise NotFoundError(
                    f"{folder / 'registry.db'}: expected a registry's database, found no such file. "
                    "Check the path, or make a new registry with `Registry.open(...)`."
                )
            folder.mkdir(parents=True, exist_ok=True)
            name = new_schema()
            mine = folder / f".{name}"
            mine.write_text(name)
            try:
                os.link(mine, note)
            except FileExistsError:
                pass  # another process was first
            mine.unlink()
        place = original(
            url_of(note.read_text()),
            snapshots=folder / "snapshots",
            cache=cache,
            create=create,
            migrate=migrate,
        )
        return dataclasses.replace(
            place,
            location=folder,
            address=str(folder),
            folders=tuple(folder / each for each in places._OWN_FILES),
        )

    vars(places)["open_place"] = open_place


def new_schema(source: str | None = None) -> str:
    """Make a registry's tables at once, empty or with the rows of others.

    Migrations have tests of their own, and take half a second.
    """
    import uuid
    from datetime import UTC, datetime

    from sqlalchemy import insert, text

    from weightledger.registry.database.postgres import PostgresDatabase
    from weightledger.registry.log import schema
    from weightledger.registry.log.models import About, Base

    name = f"t{uuid.uuid4().hex[:16]}"
    database = PostgresDatabase(url_of(name))
    with database.rebuilding() as conn:
        conn.execute(text(f"CREATE SCHEMA {name}"))
        Base.metadata.create_all(conn)
        conn.execute(text("CREATE TABLE alembic_version (version_num VARCHAR(32) PRIMARY KEY)"))
        conn.execute(text("INSERT INTO alembic_version VALUES (:head)"), {"head": schema.HEAD})
        if source is None:
            conn.execute(insert(About).values(uuid=uuid.uuid4().hex, created_at=datetime.now(UTC)))
        for table in Base.metadata.sorted_tables if source else ():
            columns = ", ".join(f'"{column.name}"' for column in table.c)
            conn.execute(
                text(f"INSERT INTO {table.name} ({columns}) SELECT {columns} FROM {source}.{table.name}")
            )
            if "id" in table.c and table.name != "runs":
                conn.execute(
                    text(
                        f"SELECT setval(pg_get_serial_sequence('{table.name}', 'id'), "
                        f"(SELECT coalesce(max(id), 0) + 1 FROM {table.name}), false)"
                    )
                )
    database.close()
    return name


def copy_schema(folder: Path) -> None:
    """Give a copied folder a record of its own."""
    note = folder / NOTE
    name = new_schema(note.read_text())
    note.unlink()
    note.write_text(name)


def url_of(name: str) -> str:
    """Return the URL of a schema."""
    separator = "&" if "?" in SERVER else "?"
    return f"{SERVER}{separator}options=-csearch_path%3D{name}"


if SERVER:
    sys.meta_path.insert(0, _Finder())

"""Copies of whole registries, wherever their record is: in a folder, or on the server of `tests/on_postgres`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

ON_SERVER = bool(os.environ.get("WEIGHTLEDGER_TEST_SERVER"))
"""Whether registries in folders have their record on a PostgreSQL server in this run."""


def copy_registry(
    source: str | Path, target: str | Path, *, ignore: Callable[..., Any] | None = None
) -> None:
    """Copy a registry that nobody has open into a folder, which may be there and empty."""
    shutil.copytree(source, target, ignore=ignore, dirs_exist_ok=True)
    if ON_SERVER:
        from tests.on_postgres.sitecustomize import copy_schema

        copy_schema(Path(target))

"""Tests of registry, command line and updater, with every record on a PostgreSQL server."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ON_BOTH = (
    "tests/registry/commands/test_cli.py",
    "tests/registry/test_registry_pins.py",
    "tests/registry/test_registry_publish.py",
    "tests/registry/test_registry_refs.py",
    "tests/registry/test_registry_rollback.py",
    "tests/updater/test_clock.py",
    "tests/updater/test_content.py",
    "tests/updater/test_fake_workers.py",
)
"""What is not about files, nor about rows that a person writes into one; tests marked `folder` are left out."""


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_what_holds_of_a_registry_in_a_folder_holds_of_one_on_a_server() -> None:
    chosen = ["-m", "not folder and not long", *ON_BOTH]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.on_postgres",
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-n",
            "2",
            *chosen,
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1400,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]

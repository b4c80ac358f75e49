"""The tests of registry, log, command line and updater, with every record on a PostgreSQL server."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OF_A_FOLDER = (
    "tests/registry/database",
    "tests/registry/locks",
    "tests/registry/log",
    "tests/registry/weights",
    "tests/registry/test_damaged_headers.py",
    "tests/registry/test_damaged_record.py",
    "tests/registry/test_files.py",
    "tests/registry/test_lost_database.py",
)
"""What is about files, or about rows that a person writes into one."""
ALSO = (
    "tests/updater/test_clock.py",
    "tests/updater/test_content.py",
    "tests/updater/test_fake_workers.py",
    "tests/updater/test_state_machine.py",
)


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_what_holds_of_a_registry_in_a_folder_holds_of_one_on_a_server() -> None:
    left_out = [word for path in OF_A_FOLDER for word in ("--ignore", path)]
    chosen = ["-m", "not folder and not long", "tests/registry", *ALSO, *left_out]
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

"""Runs rows, each in a process of its own, and gathers what they found."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.benchmarks.catalog import Row
from tests.benchmarks.machine import describe
from tests.benchmarks.results import Result
from tests.benchmarks.setting import Setting

ROOT = Path(__file__).parents[2]
TIMEOUT = 900.0  # seconds for one row; several times what it takes on a slow machine


@dataclass(frozen=True)
class Outcome:
    """What became of one row."""

    row: Row
    results: Sequence[Result]
    """Complete when there is no error; else those that were found before it."""
    error: str
    """Empty when it went well."""
    notes: Sequence[str]
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.row.name,
            "title": self.row.title,
            "promise": self.row.promise,
            "seconds": round(self.seconds, 1),
            "error": self.error,
            "notes": list(self.notes),
            "results": [result.to_dict() for result in self.results],
        }


def run_all(
    rows: Sequence[Row], setting: Setting, logs: Path, told: Callable[[Outcome], Any]
) -> tuple[dict[str, Any], list[Outcome]]:
    """Measure rows one after another, telling each as it ends.

    Returns:
        What is written as JSON, and the outcomes.
    """
    began, started_at = time.perf_counter(), datetime.now(UTC)
    machine = describe(Path(setting.scratch))
    outcomes = []
    for row in rows:
        outcome = run(row, setting, logs)
        outcomes.append(outcome)
        told(outcome)
    return {
        "format": 1,
        "started_at": started_at.isoformat(timespec="seconds"),
        "seconds": round(time.perf_counter() - began, 1),
        "quick": setting.quick,
        "machine": machine | {"load_average_after": round(os.getloadavg()[0], 2)},
        "rows": [outcome.to_dict() for outcome in outcomes],
    }, outcomes


def run(row: Row, setting: Setting, logs: Path) -> Outcome:
    """Measure one row in a process of its own. What that process prints is kept in a file named like the row."""
    logs.mkdir(parents=True, exist_ok=True)
    found, log = logs / f"{row.name}.jsonl", logs / f"{row.name}.log"
    found.unlink(missing_ok=True)
    command = [sys.executable, "-m", "tests.benchmarks.child", row.name, json.dumps(setting.to_dict()), found]
    began = time.perf_counter()
    with (
        log.open("wb") as file,
        subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)} | dict(row.env),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        ) as process,
    ):
        try:
            code = process.wait(TIMEOUT)
        except BaseException as error:
            # Its whole session goes, so that no cluster is left behind.
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            code = None
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    error = ""
    if code != 0:
        why = f"no end after {TIMEOUT:g} s" if code is None else f"exit code {code}"
        error = f"{why}; {log}: " + " | ".join(lines[-3:])
    notes = [line for line in lines if line.startswith("left out: ")]
    return Outcome(row, list(_read(found)), error, notes, time.perf_counter() - began)


def _read(path: Path) -> Iterator[Result]:
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            yield Result.from_dict(json.loads(line))

"""How far one update walks through the code: modules, functions, and switches between modules.

    python -m tests.trace_update

Two fake workers, one steady update (new content, same structure), and one update that follows a rollback made
elsewhere. Counts are of this library's own Python functions, by `sys.setprofile` in the caller's thread and in those
that it starts. The fewer, the easier an update is to read.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from weightledger.registry import Registry
from weightledger.updater.testing import FakeWorkers

_ROOT = str(Path(__file__).resolve().parent.parent)
_FOLDERS = ("registry", "updater")


@dataclass
class Walk:
    """What was entered while it was watched."""

    modules: set[str] = field(default_factory=set)
    functions: set[tuple[str, str]] = field(default_factory=set)
    switches: int = 0
    _last: dict[int, str] = field(default_factory=dict)

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        """Take note of a call; what `sys.setprofile` is given."""
        if event != "call":
            return
        module = _module_of(frame.f_code.co_filename)
        # Up to Python 3.11 a comprehension is a function of its own, though nobody would call it one.
        if module is None or frame.f_code.co_name.startswith("<"):
            return
        self.modules.add(module)
        self.functions.add((module, frame.f_code.co_qualname))
        thread = threading.get_ident()
        if self._last.get(thread) != module:
            self.switches += 1
        self._last[thread] = module

    def __str__(self) -> str:
        """Return the counts as one line."""
        return f"{len(self.modules)} modules, {len(self.functions)} functions, {self.switches} switches"


def _module_of(filename: str) -> str | None:
    path = str(Path(filename).resolve()) if "weightledger" in filename else filename
    for folder in _FOLDERS:
        start = f"{_ROOT}/{folder}/"
        if path.startswith(start):
            return path.removeprefix(f"{_ROOT}/")
    return None


def watched(call: Callable[[], object]) -> Walk:
    """Run a call and return where it went."""
    walk = Walk()
    threading.setprofile(walk)
    sys.setprofile(walk)
    try:
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]  # None ends it
    return walk


def steady_and_following() -> tuple[Walk, Walk]:
    """Trace a steady update, and one that follows a rollback made elsewhere."""
    with tempfile.TemporaryDirectory() as folder, Registry.open(folder) as registry:
        learner = torch.nn.Linear(4, 2)
        with FakeWorkers(learner, [torch.nn.Linear(4, 2) for _ in range(2)], registry=registry) as fleet:

            def update() -> None:
                torch.nn.init.normal_(learner.weight)
                assert fleet.update_weights(step=1).ok

            for _ in range(3):
                update()
            steady = watched(update)
            registry.rollback(1)
            following = watched(fleet.update_weights)
            assert fleet.last_report is not None
            assert fleet.last_report.adopted
    return steady, following


def lines_of(folder: str) -> tuple[int, int]:
    """Return how many modules a folder has, and how many lines they have together."""
    files = sorted((Path(_ROOT) / folder).rglob("*.py"))
    return len(files), sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)


def main() -> None:
    """Print the counts."""
    steady, following = steady_and_following()
    sys.stdout.write(f"steady update:        {steady}\nfollowing a rollback: {following}\n")
    for folder in _FOLDERS:
        files, lines = lines_of(folder)
        sys.stdout.write(f"{folder}: {files} files, {lines} lines\n")


if __name__ == "__main__":
    main()

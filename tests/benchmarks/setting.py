"""What one run of the benchmarks was asked for, and which cases follow from it."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.benchmarks.machine import free_memory

KB, MB, GB = 1 << 10, 1 << 20, 1 << 30
SIZES = (64 * KB, MB, 16 * MB, 256 * MB, GB)
QUICK_SIZE, QUICK_WORKERS = 64 * KB, 2


@dataclass(frozen=True)
class Setting:
    """The options of one run."""

    scratch: str
    """A folder on the disk that is measured."""
    sizes: Sequence[int] = ()
    """Bytes of weights; empty for each row's own."""
    workers: Sequence[int] = ()
    """Numbers of workers; empty for each row's own."""
    quick: bool = False

    def grid(
        self,
        defaults: Mapping[int, Sequence[int]],
        *,
        copies: float,
        copies_per_worker: float,
    ) -> list[tuple[int, int]]:
        """Return the cases as (bytes, workers).

        Args:
            defaults: sizes by number of workers, for what was not asked for.
            copies: how many times the weights lie in memory, whatever the number of workers.
            copies_per_worker: how many times more for each worker. Cases that do not fit are left out, and said so.
        """
        if self.quick:
            wanted = [(QUICK_SIZE, QUICK_WORKERS)]
        else:
            wanted = [
                (size, count)
                for count in self.workers or defaults
                for size in self.sizes or defaults.get(count, SIZES)
            ]
        room = 0.85 * free_memory()
        cases = []
        for size, count in wanted:
            need = size * (copies + copies_per_worker * count)
            if need > room:
                print(
                    f"left out: {case_name(size, count)} needs {need / GB:.1f} of {room / GB:.1f} GB of memory"
                )
            else:
                cases.append((size, count))
        return cases

    @contextmanager
    def folder(self, *, memory: bool = False) -> Iterator[Path]:
        """Give a folder for one case, on the disk that is measured or in memory; it is removed afterwards."""
        parent = "/dev/shm" if memory else self.scratch
        Path(parent).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f"weightledger-bench-{os.getpid()}-", dir=parent) as name:
            yield Path(name)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def parse_size(text: str) -> int:
    """Read `64KB`, `1MB`, `1GB` or a number of bytes; units are powers of 1024.

    Raises:
        ValueError: it is none of these.
    """
    found = re.fullmatch(r"(\d+) ?(KB|MB|GB|B|)", text.strip().upper())
    if found is None:
        raise ValueError(f"a size is a number with KB, MB or GB, found {text!r}")
    return int(found[1]) * {"KB": KB, "MB": MB, "GB": GB}.get(found[2], 1)


def size_name(size: int) -> str:
    """Write a size as it is given on the command line."""
    for unit, name in ((GB, "GB"), (MB, "MB"), (KB, "KB")):
        if size >= unit and size % unit == 0:
            return f"{size // unit} {name}"
    return f"{size} B"


def largest(cases: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Return the most bytes and the most workers of all cases; zeros when none was left."""
    return max((size for size, _ in cases), default=0), max((count for _, count in cases), default=0)


def case_name(size: int, workers: int) -> str:
    return f"{size_name(size)}, {workers} worker{'s' if workers != 1 else ''}"

"""Memory, file descriptors and threads of processes, from /proc; bytes in the object stores, from Ray."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_NUMBER = re.compile(r"^- ([a-z ]+): (\d+)$", re.MULTILINE)

# Runs in a process of its own, so that no lock of the measured one delays it.
_WATCH = """
import json, sys, time, select
pids = sys.argv[1:]
peaks = dict.fromkeys(pids, 0)
print("ready", flush=True)
while not select.select([sys.stdin], [], [], 0.002)[0]:
    for pid in pids:
        for line in open(f"/proc/{pid}/status"):
            if line.startswith("RssAnon:"):
                peaks[pid] = max(peaks[pid], int(line.split()[1]) * 1024)
print(json.dumps(peaks))
"""


@dataclass(frozen=True)
class Process:
    """One process of this machine."""

    pid: int

    def private(self) -> int:
        """Return its private bytes; pages of files and of the object store are not among them."""
        for line in Path(f"/proc/{self.pid}/status").read_text(encoding="ascii").splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
        raise LookupError(f"/proc/{self.pid}/status has no RssAnon")

    def descriptors(self) -> int:
        return len(list(Path(f"/proc/{self.pid}/fd").iterdir()))

    def threads(self) -> int:
        return len(list(Path(f"/proc/{self.pid}/task").iterdir()))


@dataclass
class Peaks:
    """The most private bytes that each process had, by process id; filled when the watch ends."""

    by_pid: dict[int, int] = field(default_factory=dict)


@contextmanager
def watch(processes: Sequence[Process]) -> Iterator[Peaks]:
    """Look at processes every few milliseconds while the block runs."""
    peaks = Peaks()
    command = [sys.executable, "-S", "-c", _WATCH, *(str(process.pid) for process in processes)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as watcher:
        assert watcher.stdout is not None
        watcher.stdout.readline()
        yield peaks
        answer, _ = watcher.communicate("end\n", timeout=30)
    peaks.by_pid = {int(pid): peak for pid, peak in json.loads(answer).items()}


class _Heard(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


class StoreUsage:
    """What Ray says of the object store of the node that the caller runs on."""

    def __init__(self) -> None:
        from ray._private import worker

        # Ray tells its store's contents to its log only, where no dashboard runs.
        heard, log = _Heard(), logging.getLogger("ray._raylet")
        propagates, log.propagate = log.propagate, False
        log.addHandler(heard)
        try:
            core: Any = worker.global_worker
            core.core_worker.log_plasma_usage()
        finally:
            log.removeHandler(heard)
            log.propagate = propagates
        self._numbers = {name: int(number) for name, number in _NUMBER.findall("\n".join(heard.lines))}

    @property
    def in_use(self) -> int:
        """Bytes of objects that somebody refers to."""
        return self._numbers["bytes in use"]

    @property
    def received(self) -> int:
        """Bytes of objects that are here and came from other nodes."""
        return self._numbers["bytes received"]


def loopback_bytes() -> int:
    """Return the bytes that ever went over the loopback device: what crosses between nodes of one machine."""
    for line in Path("/proc/net/dev").read_text(encoding="ascii").splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "lo":
            return int(numbers.split()[0])
    raise LookupError("/proc/net/dev has no lo")

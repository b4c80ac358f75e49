"""This process's identity as a writer, kept with what it writes. A forked child is another run."""

from __future__ import annotations

import getpass
import os
import socket
import sys
import threading
import uuid
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path


@dataclass(frozen=True)
class RunInfo:
    """Identity of one writing process, kept with what it wrote."""

    id: str
    user: str
    host: str
    pid: int
    program: str
    started_at: datetime


class _This:
    """The run of this very process, which must not leak into a forked child."""

    def __init__(self) -> None:
        # Re-entrant: closing what nobody refers to any more may begin in the middle of anything.
        self.guard = threading.RLock()
        self.run: RunInfo | None = None


_this = _This()
os.register_at_fork(after_in_child=_this.__init__)  # type: ignore[misc]


def this_run() -> RunInfo:
    """Return this process's run."""
    with _this.guard:
        if _this.run is None:
            _this.run = RunInfo(
                id=uuid.uuid4().hex,
                user=_as_utf8(user_name()),
                host=_as_utf8(socket.gethostname()),
                pid=os.getpid(),
                program=_as_utf8(sys.argv[0] if sys.argv and sys.argv[0] else Path(sys.executable).name),
                started_at=datetime.now(UTC),
            )
        return _this.run


def user_name() -> str:
    """Return who runs this process; containers often have a number without a name."""
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):
        return f"uid-{os.getuid()}"


def _as_utf8(name: str) -> str:
    """Escape what the system takes in a name and a database does not: bytes that are no UTF-8."""
    return name.encode("utf-8", "backslashreplace").decode("utf-8")

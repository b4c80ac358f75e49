"""Builds the shim, and says to it what to do in this process."""

from __future__ import annotations

import ctypes
import errno
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from pathlib import Path

import pytest


class Kind(IntFlag):
    """What a file system call does."""

    OPEN = 1
    CREATE = 2
    WRITE = 4
    SYNC = 8
    RENAME = 16
    LINK = 32
    UNLINK = 64
    TRUNCATE = 128
    MKDIR = 256
    READ = 512


class Action(IntEnum):
    """What happens at the n-th call; the halves apply to writes."""

    NOTHING = 0
    KILL = 1
    KILL_HALF_WRITTEN = 2
    FAIL = 3
    FAIL_HALF_WRITTEN = 4


CHANGES = (
    Kind.CREATE | Kind.WRITE | Kind.SYNC | Kind.RENAME | Kind.LINK | Kind.UNLINK | Kind.TRUNCATE | Kind.MKDIR
)
"""The calls that change a disk; between two of them all moments are alike."""

ERRORS = {
    errno.ENOSPC: Kind.CREATE | Kind.WRITE | Kind.SYNC | Kind.RENAME | Kind.LINK | Kind.TRUNCATE | Kind.MKDIR,
    errno.EDQUOT: Kind.CREATE | Kind.WRITE | Kind.LINK | Kind.TRUNCATE | Kind.MKDIR,
    errno.EIO: CHANGES | Kind.OPEN | Kind.READ,
    errno.EROFS: CHANGES & ~Kind.SYNC,
    errno.EMFILE: Kind.OPEN | Kind.CREATE,
    errno.EACCES: Kind.OPEN | Kind.CREATE | Kind.RENAME | Kind.LINK | Kind.UNLINK | Kind.MKDIR,
}
"""The calls that each error may come from."""


@dataclass(frozen=True)
class Plan:
    """What to do at the n-th call of some kinds."""

    kinds: int
    at: int = 0
    action: int = Action.NOTHING
    error: int = 0
    again: bool = False
    """Whether every later call fails, too."""

    def __str__(self) -> str:
        how = Action(self.action).name.lower().replace("_", " ")
        with_error = f" with {errno.errorcode[self.error]}" if self.error else ""
        return f"{how}{with_error} at call {self.at}{' and from then on' if self.again else ''}"


def build(folder: Path) -> Path:
    """Compile the shim into a folder."""
    shim = folder / "shim.so"
    source = Path(__file__).with_name("shim.c")
    done = subprocess.run(
        [*compiler(), "-shared", "-fPIC", "-O1", "-o", shim, source, "-ldl"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, f"{shlex.join(compiler())} could not build {source}:\n{done.stderr}"
    return shim


def compiler() -> list[str]:
    """Return the command of a C compiler: the system's, or the package that `make` installs where there is none."""
    for name in (os.environ.get("CC", ""), "cc", "gcc", "clang"):
        if name and shutil.which(shlex.split(name)[0]):
            return shlex.split(name)
    if importlib.util.find_spec("ziglang") is not None:
        return [sys.executable, "-m", "ziglang", "cc"]
    pytest.fail(
        "These tests inject crashes and disk errors by a small C library: expected a C compiler ($CC, cc, gcc or "
        "clang), found none. Install one (Debian, Ubuntu: apt-get install gcc), or pip install ziglang."
    )


def arm(folder: Path, plan: Plan, trace: int = -1) -> None:
    """Count this process's calls under a folder from now on; only where the shim was preloaded."""
    ctypes.CDLL(None).torture_arm(
        os.fsencode(folder),
        int(plan.kinds),
        ctypes.c_long(plan.at),
        int(plan.action),
        plan.error,
        int(plan.again),
        trace,
    )


def disarm() -> None:
    """Let every call through again."""
    ctypes.CDLL(None).torture_disarm()

"""A process that has the library imported and the shim preloaded, and forks a child for each job.

A child that is to be killed needs a fresh process; forked from here it costs milliseconds instead of seconds.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Ended:
    """How a job ended."""

    code: int
    """0, or minus the signal that killed the child."""
    value: Any
    """What the function returned; None when it did not."""
    told: str
    """What the child wrote to its standard error, its traceback included."""
    hung: bool = False


class Zygote:
    """The parent's end. One job at a time."""

    def __init__(self, shim: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", "from tests.torture import zygote; zygote.main()"],
            cwd=ROOT,
            env=os.environ | {"LD_PRELOAD": str(shim), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def call(self, function: Callable[..., Any], *arguments: Any, seconds: float = 60) -> Ended:
        """Run a function in a child, and wait at most so many seconds for it."""
        assert self._process.stdin is not None and self._process.stdout is not None
        pickle.dump((function, arguments, seconds), self._process.stdin)
        self._process.stdin.flush()
        ended = pickle.load(self._process.stdout)
        assert isinstance(ended, Ended)
        return ended

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()


def main() -> None:
    """Serve jobs from the standard input until it ends."""
    import tests.torture.cases
    import tests.torture.damage  # noqa: F401 - what the jobs need is imported before the first fork

    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    while True:
        try:
            function, arguments, seconds = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        pickle.dump(_run(function, arguments, seconds, answers), answers)
        answers.flush()


def _run(
    function: Callable[..., Any], arguments: tuple[Any, ...], seconds: float, answers: IO[bytes]
) -> Ended:
    reader, writer = os.pipe()
    with tempfile.TemporaryFile() as told:
        child = os.fork()
        if child == 0:
            os.close(reader)
            answers.close()
            _be_child(function, arguments, writer, told.fileno())
        os.close(writer)
        answer, hung = _read(reader, child, seconds)
        os.close(reader)
        _, status = os.waitpid(child, 0)
        told.seek(0)
        code = os.waitstatus_to_exitcode(status)
        text = told.read().decode(errors="replace")
    return Ended(code, pickle.loads(answer) if answer and code == 0 else None, text, hung)


def _be_child(function: Callable[..., Any], arguments: tuple[Any, ...], writer: int, told: int) -> None:
    code = 1
    try:
        os.dup2(told, 2)
        faulthandler.enable()
        value = pickle.dumps(function(*arguments))
        with os.fdopen(writer, "wb") as answer:
            answer.write(value)
        code = 0
    except BaseException:  # noqa: BLE001 - told to whoever ordered the job
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _read(reader: int, child: int, seconds: float) -> tuple[bytes, bool]:
    deadline, hung = time.monotonic() + seconds, False
    found = bytearray()
    while True:
        ready, _, _ = select.select([reader], [], [], max(0, deadline - time.monotonic()))
        if ready:
            part = os.read(reader, 1 << 20)
            if not part:
                return bytes(found), hung
            found += part
        elif not hung:
            os.kill(child, signal.SIGABRT)  # it tells where it hangs
            deadline, hung = time.monotonic() + 5, True
        else:
            os.kill(child, signal.SIGKILL)
            deadline = time.monotonic() + 60

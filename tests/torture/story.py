"""What a child tells of itself while it works: a line before each call, and one after it.

The lines go to a file outside of the registry by single system calls, so that they are there when the child is killed.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.torture import shim
from weightledger.registry import WeightLedgerError

ALLOWED = WeightLedgerError
"""Nothing else may leave the library, whatever the disk does: the arguments are right."""


class Story:
    """Written by the child.

    Args:
        path: the file.
        errors: "": no error is injected; "once": one call of the operating system fails; "on": from one call on all do.
    """

    def __init__(self, path: Path, errors: str = "") -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        self._errors = errors

    def say(self, what: str, **facts: Any) -> None:
        line = json.dumps({"what": what, "time": time.time(), **facts}) + "\n"
        os.write(self._descriptor, line.encode())

    def call(self, name: str, function: Callable[[], Any], **facts: Any) -> Any:
        """Make a call, and tell of it before and after.

        A call that is refused is made again: a single error is over by then, and of lasting ones the last is, since the
        disk is mended first. So the second call has to succeed.
        """
        facts = {"call": name, **facts}
        self.say("doing", **facts)
        try:
            result = function()
        except ALLOWED as error:
            self.say("refused", error=type(error).__name__, text=str(error), **facts)
            if not self._errors:
                raise
            if self._errors == "on":
                shim.disarm()
            self.say("doing", **facts)
            result = function()
        # A version, or the report of an update.
        number = getattr(result, "number", getattr(result, "version", None))
        digest = getattr(result, "digest", None)
        self.say("done", number=number, digest=digest, **facts)
        return result


def read(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a story; the last may be missing, never half."""
    return (
        [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    )

"""Bytes that are looked at while those behind them are still being read."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Arrival:
    """Something that is read from its beginning to its end by a thread of its own.

    Args:
        read: reads it, and calls what it is given with the number of bytes that are there by now.
    """

    def __init__(self, read: Callable[[Callable[[int], None]], object]) -> None:
        self._read = read
        self._changed = threading.Condition()
        self._bytes = 0
        self._over = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="weightledger-read", daemon=True)

    def __enter__(self) -> Arrival:
        try:
            self._thread.start()
        except RuntimeError:
            self._run()  # the interpreter is ending, and begins no more threads
        return self

    def __exit__(self, *error: object) -> None:
        # Whoever gives up must not leave memory behind that is still being written to.
        if self._thread.ident is not None:
            self._thread.join()

    def wait(self, nbytes: int) -> None:
        """Wait until the first so many bytes are there.

        Raises:
            Exception: what the reading raised, if they will not come.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._over or self._bytes >= nbytes)
            if self._error is not None:
                raise self._error

    def _run(self) -> None:
        try:
            self._read(self._note)
        except BaseException as error:  # noqa: BLE001 - raised in the thread that waits
            self._error = error
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def _note(self, nbytes: int) -> None:
        with self._changed:
            self._bytes = nbytes
            self._changed.notify_all()

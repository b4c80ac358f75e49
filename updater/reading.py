"""What an updater reads from files, and the memory that it lies in.

Fresh memory takes longer to get than a file to read, so it is borrowed from the publisher for the length of one call.
An update in the background borrows nothing: its caller may want to make a copy there at any time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from weightledger.registry import Registry
from weightledger.registry.store.publishing import Loan
from weightledger.registry.weights.arrays import Bytes
from weightledger.registry.weights.payload import Payload


class Calls:
    """Lets one thread in at a time, again and again, and cleans up when it leaves."""

    def __init__(self, clean_up: Callable[[], None]) -> None:
        self._lock = threading.RLock()
        self._depth = 0
        self._clean_up = clean_up

    def is_inside(self) -> bool:
        """Tell whether the thread that asks is the one that is in."""
        return self._lock._is_owned()  # type: ignore[attr-defined,no-any-return]

    def __enter__(self) -> None:
        self._lock.acquire()
        self._depth += 1

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        try:
            if not self._depth:
                self._clean_up()
        finally:
            self._lock.release()


class Reader:
    """Reads and verifies versions; within one call no file is read twice."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self.calls = Calls(self.let_go)
        """The calls at whose end all is let go; what reads outside of them has no part in the buffer."""
        self._at_hand: tuple[Payload, dict[str, Any]] | None = None
        self._loan: Loan | None = None
        """The memory that it lies in, if that is the publisher's."""

    def read(self, number: int, digest: str) -> tuple[Payload, dict[str, Any]]:
        """Return a version's bytes and structure, valid until `let_go`.

        Raises:
            NotFoundError: no such version, or its weights were pruned.
            CorruptionError: the file is missing or damaged.
        """
        at_hand = self._at_hand
        if at_hand is None or at_hand[0].digest != digest:
            self.let_go()
            at_hand = self._at_hand = self._registry.read(number, self._room)
        return at_hand

    def let_go(self) -> None:
        """Forget what was read, since its memory is wanted for something else."""
        self._at_hand = None
        if self._loan is not None and self.calls.is_inside():
            loan, self._loan = self._loan, None
            loan.give_back()

    def _room(self, nbytes: int) -> Bytes | None:
        loan = self._registry.publisher.borrow(nbytes) if self.calls.is_inside() else None
        if loan is None:
            return None
        self._loan = loan
        return loan.buffer

"""What an updater reads from files, and the memory that it lies in.

Fresh memory takes longer to get than a file to read, so it is borrowed from the publisher, until `let_go`. What was
read into it stays as it is until then: a second version is read into memory of its own. An update in the background
has no part in it, since its caller may want to make a copy there at any time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from weightledger.registry.store.publishing import Loan
from weightledger.registry.weights.payload import Payload

if TYPE_CHECKING:
    from weightledger.registry.core import Registry


class Calls:
    """Lets one thread in at a time, again and again, and cleans up when it leaves."""

    def __init__(self, clean_up: Callable[[], None]) -> None:
        self._lock = threading.RLock()
        self._depth = 0
        self._inside: int | None = None
        """The thread that is in."""
        self._clean_up = clean_up

    def is_inside(self) -> bool:
        """Tell whether the thread that asks is the one that is in."""
        return self._inside == threading.get_ident()

    def __enter__(self) -> None:
        self._lock.acquire()
        self._inside = threading.get_ident()
        self._depth += 1

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        try:
            if not self._depth:
                self._clean_up()
                self._inside = None
        finally:
            self._lock.release()


@dataclass(frozen=True)
class _AtHand:
    payload: Payload
    structure: dict[str, Any]
    loan: Loan
    """The memory that it lies in, if that is the publisher's."""


class Reader:
    """Reads and verifies versions; what was read first in a call is not read again."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self.calls = Calls(self.let_go)
        """The calls at whose end all is let go; what reads outside of them has no part in the buffer."""
        self._at_hand: _AtHand | None = None

    def read(self, number: int, digest: str) -> tuple[Payload, dict[str, Any]]:
        """Return a version's bytes and structure, valid until `let_go`.

        Raises:
            NotFoundError: no such version, or its weights were pruned.
            CorruptionError: the file is missing or damaged.
        """
        if not self.calls.is_inside():
            return self._registry.read(number)
        at_hand = self._at_hand
        if at_hand is not None and at_hand.payload.digest == digest:
            return at_hand.payload, at_hand.structure
        if at_hand is not None and at_hand.loan.buffer is not None:
            return self._registry.read(number)
        loan = self._registry.publisher.borrow()
        try:
            payload, structure = self._registry.read(number, loan.room)
        except BaseException:
            loan.give_back()
            raise
        self._at_hand = _AtHand(payload, structure, loan)
        return payload, structure

    def let_go(self) -> None:
        """Forget what was read, since its memory is wanted for something else."""
        if self.calls.is_inside():
            at_hand, self._at_hand = self._at_hand, None
            if at_hand is not None:
                at_hand.loan.give_back()

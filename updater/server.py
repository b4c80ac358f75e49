"""What an update hands out: a version's bytes, ready for the transport, and the small shelf that keeps them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from weightledger.registry.records import Pin, Version
from weightledger.registry.weights.payload import Payload
from weightledger.updater.push import Probe, Push


@dataclass(frozen=True)
class Mark:
    """The part of a version that never changes, as far as an updater needs it."""

    number: int
    digest: str
    nonfinite: tuple[str, ...]


def mark_of(version: Version) -> Mark:
    """Return the mark of a version."""
    return Mark(version.number, version.digest, version.nonfinite)


@dataclass(frozen=True)
class View:
    """What decides about targets, beside the head, at one moment."""

    pins: Sequence[Pin]
    pinned: Mapping[int, Mark]
    """The versions that the pins stand for, by number."""
    lineage: Sequence[tuple[int, int]]
    """The closed number ranges that the head descends through, newest first."""


class Coming:
    """Bytes on their way to the transport, in a thread of their own."""

    def __init__(self, distribute: Callable[[Payload], Any], payload: Payload) -> None:
        self._result: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(
            target=self._run, args=(distribute, payload), name="weightledger-distribute", daemon=True
        )
        self._thread.start()

    def _run(self, distribute: Callable[[Payload], Any], payload: Payload) -> None:
        try:
            self._result = distribute(payload)
        except BaseException as error:  # noqa: BLE001 - raised in the thread that asks for the result
            self._error = error

    def wait(self) -> bool:
        """Wait until the bytes are there, or cannot be; tells which."""
        self._thread.join()
        return self._error is None

    def result(self) -> Any:
        """Return what the transport made of them."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._result


@dataclass(frozen=True)
class ServerWeights:
    """One version, as it is sent to workers."""

    version: int
    digest: str
    """Content digest of the version."""
    sent_digest: str
    """Digest of the bytes that are sent: another one when `_maybe_map_weights` changed them."""
    nonfinite: tuple[str, ...]
    nbytes: int
    carrier: Any = field(repr=False)
    """The `handle`, or what will be it."""
    structure: dict[str, Any] = field(repr=False)
    push: Push | Probe | None = None
    """The instruction that goes with the bytes; None outside of an update."""

    @property
    def handle(self) -> Any:
        """The bytes as the transport keeps them: an object reference, an array; sent once, shared by all workers.

        Raises:
            Exception: the transport could not take them; the error is its own.
        """
        return self.carrier.result() if isinstance(self.carrier, Coming) else self.carrier

    @property
    def mark(self) -> Mark:
        """Which version this is."""
        return Mark(self.version, self.digest, self.nonfinite)


class Shelf:
    """Keeps handed-out bytes by content, so that versions of equal content are handed out once."""

    def __init__(self) -> None:
        self._by_digest: dict[str, ServerWeights] = {}

    def __len__(self) -> int:
        return len(self._by_digest)

    def put(self, weights: ServerWeights) -> None:
        """Keep the bytes of a version."""
        self._by_digest[weights.digest] = weights

    def find(self, digest: str) -> ServerWeights | None:
        """Return bytes of that content."""
        return self._by_digest.get(digest)

    def drop(self, digest: str) -> None:
        """Forget bytes that turned out unusable."""
        self._by_digest.pop(digest, None)

    def keep(self, digests: Collection[str]) -> None:
        """Forget all but these; the transport frees what nobody else refers to."""
        for digest in self._by_digest.keys() - set(digests):
            del self._by_digest[digest]

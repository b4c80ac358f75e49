"""What an update hands out: a version's bytes, ready for the transport, and the small shelf that keeps them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from weightledger.registry.records import Pin, Version
from weightledger.updater.push import Probe, Push


@dataclass(frozen=True)
class Mark:
    """The part of a version that never changes, as far as an updater needs it."""

    number: int
    digest: str
    nonfinite: tuple[str, ...]
    step: int | None = None
    """The step that it was published with; None for a rollback, which steps nothing."""


def mark_of(version: Version) -> Mark:
    """Return the mark of a version."""
    step = None if version.restores is not None else version.step
    return Mark(version.number, version.digest, version.nonfinite, step)


@dataclass(frozen=True)
class View:
    """What decides about targets, beside the head, at one moment."""

    pins: Sequence[Pin]
    pinned: Mapping[int, Mark]
    """The versions that the pins stand for, by number."""
    lineage: Sequence[tuple[int, int]]
    """The closed number ranges that the head descends through, newest first."""


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
    handle: Any = field(repr=False)
    """The bytes as the transport keeps them: an object reference, an array; sent once, shared by all workers."""
    structure: dict[str, Any] = field(repr=False)
    push: Push | Probe | None = None
    """The instruction that goes with the bytes; None outside of an update."""
    hashes: Mapping[str, str] | None = field(default=None, repr=False)
    """Hash of every tensor that is sent, where that is not the version's."""

    @classmethod
    def asking(cls, question: Probe, version: int = 0) -> ServerWeights:
        """Return a question in the place of weights: it goes the same way, without bytes."""
        return cls(version, "", "", (), 0, None, {}, push=question)

    @property
    def mark(self) -> Mark:
        """Which version this is."""
        return Mark(self.version, self.digest, self.nonfinite)


def is_from_outside(weights: Any) -> bool:
    """Tell whether weights carry no instruction, since no update has prepared them for a worker."""
    return not isinstance(weights, ServerWeights) or weights.push is None


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

    def drop(self, digest: str) -> list[ServerWeights]:
        """Forget bytes that turned out unusable, and return them."""
        return [self._by_digest.pop(digest)] if digest in self._by_digest else []

    def keep(self, digests: Collection[str]) -> list[ServerWeights]:
        """Forget all but these, and return the others; the transport frees what nobody refers to any more."""
        return [self._by_digest.pop(digest) for digest in self._by_digest.keys() - set(digests)]

"""What travels between an updater and its workers: pushes and receipts, probes and their answers.

All are small and free of tensors; the weights go beside them as one array.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from weightledger.registry.sync import VersionInfo

Locate = str | Callable[[Any], Any]
"""A dotted attribute of the worker object, or a callable that is given the object and returns the target."""

LOAD_STATE_DICT: Final = "load_state_dict"

Apply = Callable[[Any, Any, int], Any] | Literal["load_state_dict"]
"""`apply(worker, weights, version)`: loads own, writable tensors in the worker's own way. `"load_state_dict"`: the
module that `locate` finds does, by its method of that name."""

Series = tuple[str, str]
"""Registry UUID and policy: what a worker holds is known for each of them."""

Outcome = Literal["applied", "relabelled", "stale", "bytes_wanted", "kept", "busy", "broken"]


@dataclass(frozen=True)
class Push:
    """One instruction to a worker: hold this version, unless you have seen a higher order."""

    series: Series
    run: str
    """The run that sends it."""
    version: int
    digest: str
    """Content digest of the version."""
    sent_digest: str
    """Digest of the bytes beside it: another one when weights were mapped on the way."""
    order: int
    nbytes: int
    """Length of the bytes that belong to it."""
    locate: Locate
    apply: Apply | None = None
    structure: dict[str, Any] | None = field(default=None, repr=False)
    """How a function `apply` gets its weights put together; None without one."""
    cast: bool = False
    allow_nonfinite: bool | tuple[str, ...] = False
    """Whether finite numbers may become infinite when they are cast; or globs of the tensors in which they may."""
    patience: float = 60.0
    """Seconds that the worker may wait for its own `acting` blocks to end."""
    registry: str = ""
    """Where the run has its registry."""
    ignore: tuple[str, ...] = ()
    """Globs of the names of tensors that the worker's own code writes, besides buffers."""


@dataclass(frozen=True)
class Probe:
    """A question to a worker: what do you hold, and what are the bytes really?"""

    series: Series
    locate: Locate
    names: tuple[str, ...] | None
    """Canonical names of the version that it should hold; None for those that its module names itself."""
    patience: float = 60.0
    hashes: bool = True
    """Whether the bytes are hashed; else it only says whether anybody is known to have written into them."""


@dataclass(frozen=True)
class Note:
    """What a worker holds of one series, as it wrote it down itself."""

    version: int
    digest: str
    sent_digest: str
    """Digest of what the worker really holds: another one than the version's when weights were mapped or cast."""
    order: int
    run: str
    cast: tuple[str, ...] = ()
    """Names of tensors that were converted to the worker's dtype."""
    registry: str = ""
    """Where the run had its registry."""


@dataclass(frozen=True)
class Seen:
    """The highest order that a worker has seen of a series, and whose it was."""

    order: int
    run: str
    registry: str
    """Where that run has its registry."""


@dataclass(frozen=True)
class Receipt:
    """A worker's answer to a push.

    `applied`: it holds the version now. `relabelled`: it held equal content already. `stale`: it has seen a higher
    order, or this one with other content, and changed nothing. `bytes_wanted`: it does not hold the content that was to
    be relabelled. `kept`: the weights do not fit, it holds what it held. `busy`: it was still acting when its patience
    ended, it holds what it held. `broken`: the worker's own code raised on the way, what it holds is not known.
    """

    outcome: Outcome
    order: int
    incarnation: str
    now: Note | None
    """What it holds after the push; None when that is not known."""
    before: Note | None
    """What it held before the push; None when that was not known."""
    error: str = ""
    overwritten: str = ""
    """Why what it was sent before is not known to be there any more: somebody wrote over it."""
    last: Seen | None = None
    """The highest order that it had seen before."""


@dataclass(frozen=True)
class Inspection:
    """A worker's answer to a probe."""

    incarnation: str
    note: Note | None
    """What it was sent last, whether it is still there or not."""
    last_order: int
    """The highest order that it has seen."""
    hashes: dict[str, str] | None = field(repr=False)
    """Hash of every tensor that is really in its module, by canonical name; None if it could not be read."""
    digest: str | None
    """Content digest over these."""
    error: str = ""
    overwritten: str = ""
    """As in `Receipt`."""
    buffers: frozenset[str] = frozenset()
    """Names of the tensors that its module's own forward may write."""
    noted: dict[str, str] | None = field(default=None, repr=False)
    """Hash of every tensor as it was written, where the worker had to make them because of a cast."""
    busy: bool = False
    """A push is being carried out, so that nothing can be said."""


@dataclass(frozen=True)
class ServerWeights:
    """One version, as it is sent to workers."""

    version: int
    """Its number; 0 in the record that `_get_server_weights` gets of a copy with `wait=False`, which has none yet."""
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

    @property
    def info(self) -> VersionInfo:
        """Which version this is."""
        return VersionInfo(self.version, self.digest, self.nonfinite)


def is_from_outside(weights: Any) -> bool:
    """Tell whether weights carry no instruction, since no update has prepared them for a worker."""
    return not isinstance(weights, ServerWeights) or weights.push is None

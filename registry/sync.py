"""The record as updaters use it: what is looked at, and what is written, one transaction at a time.

Nothing of the database leaves this module: updaters know versions, pins, settlements and intentions by the names here.

Rules kept here
- Head, pins and lineage are seen at one moment, in one view.
- A version's row and the intentions of its pushes are committed together, and so are its end and the receipts.
- The policy's lock is held from the look at the head until the version is closed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from sqlalchemy import Connection

from weightledger.registry.errors import NotFoundError
from weightledger.registry.log import fleet, lineage, steering, versioning
from weightledger.registry.log.audit import resolve_target
from weightledger.registry.log.fleet import Ahead, Claim, Push, Settlement, Stretch, Verdict
from weightledger.registry.log.refs import Ref
from weightledger.registry.log.refs import parse as parse_ref
from weightledger.registry.log.staleness import staleness_of
from weightledger.registry.places import is_alive_at
from weightledger.registry.records import Pin, Version
from weightledger.registry.store.inspection import check_there
from weightledger.registry.store.publishing import INLINE_BYTES, Draft, Publication, check_step
from weightledger.registry.store.reading import Reader

if TYPE_CHECKING:
    from weightledger.registry.core import Registry
    from weightledger.registry.weights.codec import Content
    from weightledger.registry.weights.payload import Payload

__all__ = [
    "INLINE_BYTES",
    "Ahead",
    "Claim",
    "Draft",
    "HeadState",
    "Move",
    "Pending",
    "PendingPublish",
    "PendingRollback",
    "Push",
    "Ref",
    "Refusal",
    "Settlement",
    "Stretch",
    "Sync",
    "Verdict",
    "VersionInfo",
    "check_step",
    "parse_ref",
]


class VersionInfo(NamedTuple):
    """The part of a version that never changes, as far as an updater needs it."""

    number: int
    digest: str
    nonfinite: tuple[str, ...] = ()
    step: int | None = None
    """The step that it was published with; None for a rollback, which steps nothing."""

    @classmethod
    def of(cls, version: Version) -> VersionInfo:
        """Return that part of a version."""
        step = None if version.restores is not None else version.step
        return cls(version.number, version.digest, version.nonfinite, step)


@dataclass(frozen=True)
class HeadState:
    """What decides about the targets of workers, at one moment."""

    head: VersionInfo | None = None
    """None in an empty policy."""
    pins: Sequence[Pin] = ()
    pinned: Mapping[int, VersionInfo] = field(default_factory=dict)
    """The versions that the pins stand for, by number."""
    lineage: lineage.Ranges = ()
    """The closed ranges of numbers that the head descends through, newest first."""

    def target(self, worker: str) -> tuple[VersionInfo | None, bool]:
        """Return the version that a worker should hold, and whether a pin says so."""
        _, pin = resolve_target(worker, self.pins, None)
        return (self.head, False) if pin is None else (self.pinned[pin.version], True)

    def is_on_lineage(self, number: int) -> bool:
        """Tell whether a version lies on the head's lineage, and not on a branch that was abandoned."""
        return lineage.contains(self.lineage, number)


class Move(NamedTuple):
    """What moved the head since an updater knew it."""

    newest: Version | None
    """The head now; None when the policy is empty by now."""
    foreign: Version | None
    """The newest version that another run published since; None when there were rollbacks only, or own versions."""


class Refusal(NamedTuple):
    """A worker that was not sent its target, as that has NaN or infinity."""

    version: int
    worker: str
    why: str


class Pending(Protocol):
    """A change of the head on its way: looked at, opened with the intentions, closed with the receipts."""

    @property
    def number(self) -> int:
        """The version's number; 0 until its row is written."""

    def open(self, conn: Connection) -> None:
        """Write its row, in the caller's transaction."""

    def close(self, conn: Connection) -> None:
        """Make it the head, in the caller's transaction."""


class PendingPublish(Publication):
    """A version on its way from a copy of the weights to the head. It holds the policy's lock until `end` or `fail`.

    The order is `look`, `decide`, `Sync.write(opens=)`, `store`, `Sync.write(closes=)`, `end`.
    """

    def __init__(self, sync: Sync, draft: Draft) -> None:
        publisher = sync.registry.publisher
        self._sync = sync
        self._lock = ExitStack()
        self._lock.enter_context(publisher.lock())
        try:
            super().__init__(publisher, draft)
        except BaseException:
            self._lock.close()
            raise
        self.next_number = 0
        """The number that the version is going to have, from `look` on."""

    @property
    def info(self) -> VersionInfo:
        """The version that it becomes, from `look` on."""
        return VersionInfo(self.next_number, self.digest, self.nonfinite, self.draft.step)

    def look(self) -> HeadState:
        """Hash the copy while its file is being written, and see where the policy stands."""
        self.hash()
        sync = self._sync
        with sync.ledger.reading() as conn:
            found = self.stand_on(conn)
            state = sync.state(conn, found.head, pinned=found.pinned)
        if found.unfinished:
            sync.registry.publisher.recover()
        self.next_number = found.last_number + 1
        return state

    def decide(self, *, begins_line: bool, restructure: bool) -> None:
        """Decide that it becomes a version, and let big files be written to their end.

        Args:
            begins_line: it has no parent; what stood before is abandoned by it.
            restructure: names and shapes may be others than the head's.

        Raises:
            InvalidWeightsError: they are others, and that is not meant.
        """
        self.begins_line = begins_line
        self.check_structure(restructure=restructure)
        self.seal()

    def end(self) -> None:
        """Let others write: the version is the head, which the transaction has committed."""
        self._sync.grew(self.number, begins_line=self.begins_line)
        self._lock.close()

    def fail(self, error: BaseException) -> None:
        """Take back what can be taken back, and let others write; a number that was taken stays, marked lost."""
        try:
            super().fail(error)
        finally:
            self._lock.close()


class PendingRollback:
    """A rollback on its way: its row is written together with the intentions, which makes it the head.

    It holds the policy's lock until `end`.
    """

    def __init__(self, sync: Sync, wanted: Version, reason: str, expected_head: int | None) -> None:
        self._sync = sync
        self._lock = ExitStack()
        self._lock.enter_context(sync.registry.publisher.lock())
        self._reason = reason
        self._expected = expected_head
        self.wanted = wanted
        self.version: Version | None = None
        """The version that restores it, once its row is written."""
        self.next_number = 0
        """The number that it is going to have, from `look` on."""

    @property
    def number(self) -> int:
        """Its number; 0 until its row is written."""
        return 0 if self.version is None else self.version.number

    @property
    def info(self) -> VersionInfo:
        """The version that it becomes."""
        return VersionInfo(self.next_number, self.wanted.digest, self.wanted.nonfinite)

    def look(self) -> HeadState:
        """See where the policy stands."""
        sync = self._sync
        with sync.ledger.reading() as conn:
            found = versioning.standing(sync.ledger, conn)
            state = sync.state(conn, found.head, pinned=found.pinned)
        self.next_number = found.last_number + 1
        return state

    def open(self, conn: Connection) -> None:
        """Write the row.

        Raises:
            ConflictError: the head is not the expected one.
        """
        self.version = steering.roll_back_to(
            self._sync.ledger, conn, self.wanted, reason=self._reason, expected_head=self._expected
        )

    def close(self, conn: Connection) -> None:
        """Do nothing: a rollback has no file to wait for."""

    def end(self) -> None:
        """Let others write."""
        if self.version is not None:
            self._sync.went_back(self.version)
        self._lock.close()


class Sync:
    """One policy's record, for one updater."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self.ledger = registry.ledger
        self.reader = Reader(registry)
        self._infos: dict[int, VersionInfo] = {}
        self._lineage: tuple[int, lineage.Ranges] | None = None
        """The head whose lineage is known, and that."""

    @property
    def series(self) -> tuple[str, str]:
        """The registry's UUID and the policy: what workers know of each is kept apart."""
        return self.registry.uuid, self.registry.policy

    @property
    def policy(self) -> str:
        """The policy's name."""
        return self.registry.policy

    @property
    def run(self) -> str:
        """The id of the run that writes here."""
        return self.registry.locks.current().id

    def keep_alive(self) -> None:
        """Let others see that this run lives."""
        self.registry.locks.keep_alive()

    # ------------------------------------------------------------------ looking

    def look(self) -> HeadState:
        """See the head, the pins and the lineage."""
        with self.ledger.reading() as conn:
            return self.state(conn, self.ledger.head_number(conn))

    def head(self) -> VersionInfo | None:
        """See the head alone."""
        with self.ledger.reading() as conn:
            number = self.ledger.head_number(conn)
            return None if number is None else self._info(conn, number)

    def moved(self, known: VersionInfo | None) -> Move | None:
        """Tell what moved the head since an updater knew it; None when nothing did."""
        ledger, since = self.ledger, 0 if known is None else known.number
        with ledger.reading() as conn:
            number = ledger.head_number(conn)
            if number == (None if known is None else known.number):
                return None
            run = self.run
            foreign = [
                each for each in ledger.since(conn, since) if each.restores is None and each.run != run
            ]
            newest = None if number is None else ledger.version(conn, number)
            if newest is not None:
                self._infos[newest.number] = VersionInfo.of(newest)
        return Move(newest, foreign[-1] if foreign else None)

    def info(self, number: int) -> VersionInfo:
        """Return what an updater needs of a version.

        Raises:
            NotFoundError: there is no such version.
        """
        if number in self._infos:
            return self._infos[number]
        with self.ledger.reading() as conn:
            return self._info(conn, number)

    def usable(self, ref: Ref, what: str) -> Version:
        """Return a version whose weights are stored.

        Args:
            what: what is to be done with it, for the error.

        Raises:
            NotFoundError: there is none, or its weights were pruned.
        """
        wanted = parse_ref(ref)
        with self.ledger.reading() as conn:
            return self.ledger.usable(conn, wanted, what)

    def rollback_target(self, to: Ref | None) -> Version:
        """Return the version that a rollback restores: `to`, or the nearest of other content on the head's lineage.

        Raises:
            NotFoundError: there is none, or its weights were pruned.
            CorruptionError: its file is missing or has another size.
        """
        wanted = None if to is None else parse_ref(to)
        with self.ledger.reading() as conn:
            found = steering.rollback_target(self.ledger, conn, wanted, None)
            check_there(self.ledger, self.registry.snapshots, conn, found.number)
        return found

    def newest_with(self, digest: str) -> Version | None:
        """Return the newest stored version of some content; None when there is none."""
        try:
            return self.usable(digest, "go back to")
        except NotFoundError:
            return None

    def staleness(self, numbers: Iterable[int]) -> dict[int, int | None]:
        """Return how many publishes along the head's lineage each version is behind; None for abandoned ones."""
        with self.ledger.reading() as conn:
            policy = self.ledger.find_policy(conn)
            return {} if policy is None else staleness_of(conn, policy, numbers)

    def forget_versions(self, *, most: int) -> None:
        """Forget what was seen of versions, which only saves looking them up, if these are more than so many."""
        if len(self._infos) > most:
            self._infos.clear()

    # ------------------------------------------------------------------ changing

    def copy(self, weights: Any, content: Content, *, extra: Any, about: Mapping[str, Any]) -> Draft:
        """Check and copy what is to be published. The caller releases the draft when it is done with it.

        Args:
            content: `weights`, flattened.
            extra: as in `Registry.publish`.
            about: step, metrics, metadata and message.

        Raises:
            InvalidWeightsError: something in it cannot be stored. Nothing was written.
        """
        return self.registry.publisher.draft(weights, content=content, extra=extra, **about)

    def holds(self, content: Content, digest: str) -> bool:
        """Tell whether the buffer still holds exactly this content from the last copy, and it has that digest."""
        return self.registry.publisher.holds(content, digest)

    def warn_if_stuck(self, head: VersionInfo, step: int | None, *, stacklevel: int) -> None:
        """Tell, once for each content, that the weights are the head's still although the step advanced."""
        self.registry.publisher.warn_if_stuck(
            head.number, head.digest, head.step, step, stacklevel=stacklevel + 1
        )

    def publishing(self, draft: Draft) -> PendingPublish:
        """Take the policy's lock, and begin to write a copy's files."""
        return PendingPublish(self, draft)

    def rolling_back(self, wanted: Version, reason: str, expected_head: int | None) -> PendingRollback:
        """Take the policy's lock for a rollback."""
        return PendingRollback(self, wanted, reason, expected_head)

    def write(
        self,
        *,
        settlements: Sequence[Sequence[Settlement]] = (),
        pushes: Sequence[Push] = (),
        opens: Pending | None = None,
        closes: Pending | None = None,
        ahead: Sequence[Ahead] = (),
        refusals: Sequence[Refusal] = (),
        adopted: int | None = None,
    ) -> int:
        """Write down, in one transaction, what became of workers and what is about to happen.

        Args:
            settlements: one batch after the other: what settles an older push comes before what settles a newer one.
            pushes: the intentions of pushes that leave once this is committed.
            opens: a change of the head whose row is written with them.
            closes: a change of the head that is the head from now on.
            ahead: workers that have seen orders which this registry did not give; the next order is beyond theirs.
            refusals: workers that were sent nothing.
            adopted: the version that the server weights are restored to, by whoever asked for it.

        Returns:
            The order of the pushes; 0 when there are none.
        """
        batches = [batch for batch in settlements if batch]
        if not (batches or pushes or opens or closes or ahead or refusals or adopted):
            return 0
        ledger = self.ledger
        with ledger.writing() as conn:
            if opens is not None and not opens.number:
                opens.open(conn)
            for batch in batches:
                fleet.settle(ledger, conn, batch)
            if ahead:
                fleet.catch_up(ledger, conn, ahead)
            if closes is not None:
                closes.close(conn)
            if refusals:
                ledger.events(
                    conn,
                    [
                        ("sync_failed", each.version, each.worker, each.why, {"outcome": "refused"})
                        for each in refusals
                    ],
                )
            if adopted is not None:
                ledger.event(conn, "adopt", version=adopted)
            return fleet.intend(ledger, conn, pushes) if pushes else 0

    # ------------------------------------------------------------------ workers

    def claim(self, names: Sequence[str]) -> list[Claim]:
        """Let this run steer workers.

        Raises:
            InUseError: another live run steers one of them. Nothing is claimed then.
        """
        with self.ledger.writing() as conn:
            return fleet.claim(self.ledger, conn, names, self.registry.locks.alive)

    def leave(self, rows: Sequence[int], why: str) -> None:
        """Say that nobody watches these workers any more."""
        with self.ledger.writing() as conn:
            fleet.leave(conn, rows, why)

    def find_ahead(self, seen: Iterable[Ahead]) -> list[Ahead]:
        """Return those workers that have seen an order which this registry did not give them."""
        with self.ledger.reading() as conn:
            return [each for each in seen if not fleet.is_given(conn, each.worker, each.order, each.run)]

    def is_steered(self, ahead: Ahead) -> bool:
        """Tell whether the run that a worker heard from last is alive, and another one than this."""
        locks = self.registry.locks
        if ahead.run == self.run:
            return False
        # A copy of the registry has locks of its own.
        return locks.alive(ahead.run) or (bool(ahead.registry) and is_alive_at(ahead.registry, ahead.run))

    # ------------------------------------------------------------------ bytes

    def read(self, number: int, digest: str) -> tuple[Payload, dict[str, Any]]:
        """Return a version's verified bytes and structure, valid until `let_go`.

        Raises:
            NotFoundError: no such version, or its weights were pruned.
            CorruptionError: the file is missing or damaged.
        """
        return self.reader.read(number, digest)

    # ------------------------------------------------------------------ what pending changes tell

    def state(self, conn: Connection, head: int | None, *, pinned: bool = True) -> HeadState:
        """See the pins and the lineage of a head, in a view of the caller's."""
        if head is None:
            return HeadState()
        pins = self.ledger.pins(conn) if pinned else []
        infos = {number: self._info(conn, number) for number in {pin.version for pin in pins}}
        known = self._lineage
        if known is None or known[0] != head:
            known = self._lineage = head, self.ledger.lineage_of_head(conn)
        return HeadState(self._info(conn, head), pins, infos, known[1])

    def grew(self, number: int, *, begins_line: bool) -> None:
        """Note that a publish of this updater became the head: it extends the lineage's newest range, or begins one."""
        known, self._lineage = self._lineage, None
        if begins_line:
            self._lineage = number, ((number, number),)
        elif known is not None and known[1]:
            ranges = known[1]
            self._lineage = number, ((ranges[0][0], number), *ranges[1:])

    def went_back(self, version: Version) -> None:
        """Note that a rollback became the head."""
        self._infos[version.number] = VersionInfo.of(version)
        known, self._lineage = self._lineage, None
        if known is not None and version.restores is not None:
            ranges = lineage.after_rollback(known[1], version.number, version.restores)
            self._lineage = None if ranges is None else (version.number, ranges)

    def _info(self, conn: Connection, number: int) -> VersionInfo:
        if number not in self._infos:
            self._infos[number] = VersionInfo.of(self.ledger.version(conn, number))
        return self._infos[number]

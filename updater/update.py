"""One update, from the weights to the report.

The order is the promise. The row of the version and every intention are committed before the first push leaves; the
file becomes durable while workers pull; receipts alone make holdings; what has no answer stays open in the record.
Nobody waits longer than the update's timeout, however many workers are silent.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection

from weightledger.registry.errors import ConflictError
from weightledger.registry.log import fleet, lineage
from weightledger.registry.log.audit import resolve_target
from weightledger.registry.log.fleet import Settlement
from weightledger.registry.records import Pin
from weightledger.registry.store.publishing import INLINE_BYTES, Draft, Publication
from weightledger.registry.weights import codec
from weightledger.registry.weights.payload import Packer, Payload
from weightledger.updater.plan import Action, Known, Situation, Target, decide, refused_tensors
from weightledger.updater.push import Receipt
from weightledger.updater.reports import Status, SyncReport, WorkerOutcome
from weightledger.updater.seats import Flight, Seat, stretch_of
from weightledger.updater.server import Mark, ServerWeights
from weightledger.updater.settling import (
    Reading,
    Trouble,
    is_vouched,
    read_receipt,
    read_trouble,
)

if TYPE_CHECKING:
    from weightledger.updater.base import RemoteWeightUpdaterBase

# How long a version that is durable already waits for receipts, so that both go into one transaction.
_GRACE = 0.25
# How often a worker that is being restarted is looked at.
_REVIVAL_POLL = 0.1
# The part of the time left that a worker may wait for its own `acting` blocks.
_WORKER_SHARE = 0.9


class HeadMovedError(ConflictError):
    """The head moved between the caller's look at it and the lock. Nothing was changed."""


@dataclass
class Request:
    """What the caller asked for."""

    ids: Sequence[int]
    publish: bool = False
    weights: Any = None
    """Weights to publish in place of the live ones."""
    draft: Draft | None = None
    """A copy made in the caller's thread already."""
    version: Mark | None = None
    """Bring the workers to this version once, whatever their targets are."""
    forced: bool = False
    resend: bool = False
    adopted: bool = False
    about: dict[str, Any] = field(default_factory=dict)
    """Step, metrics, metadata and message of the version."""


@dataclass
class _Work:
    """What is to be done with one worker."""

    seat: Seat
    target: Target
    action: Action
    server: ServerWeights | None = None
    reread: bool = False
    """The transport lost the bytes once; they were read from the file again."""


class Update:
    """Carries out one request. `run` is called once."""

    def __init__(self, updater: RemoteWeightUpdaterBase, request: Request) -> None:
        self._up = updater
        self._registry = updater.registry
        self._ledger = updater.registry.ledger
        self.request = request
        self._deadline = time.monotonic() + updater.timeout
        self._stack = ExitStack()
        self._draft: Draft | None = None
        self._publication: Publication | None = None
        self._failure: BaseException | None = None
        self._head: Mark | None = None
        self._pins: list[Pin] = []
        self._pinned: dict[int, Mark] = {}
        self._ready: dict[int, ServerWeights] = {}
        self._outcomes: dict[int, WorkerOutcome] = {}
        self._outstanding: dict[int, _Work] = {}
        """Workers that were sent a push and have not answered."""
        self._reviving: dict[int, _Work] = {}
        """Workers whose process ended and that Ray is starting again."""

    # ------------------------------------------------------------------ the whole

    def run(self) -> SyncReport:
        """Carry the request out and report."""
        with self._stack:
            try:
                if self.request.publish:
                    self._accept(self._up._get_server_weights())
                self._bring_all()
            except BaseException as error:
                self._abandon(error)
                raise
        if self._failure is not None:
            raise self._failure
        return self.report()

    def run_publish(self, weights: Any) -> ServerWeights:
        """Only publish, and wait until that is durable."""
        with self._stack:
            try:
                server = self.publish(weights)
                self._accept(server)
                self._bring_all()
            except BaseException as error:
                self._abandon(error)
                raise
        if self._failure is not None:
            raise self._failure
        return server

    def _accept(self, server: ServerWeights) -> None:
        self._head = server.mark
        self._ready[server.version] = server

    def report(self) -> SyncReport:
        """Say what was done."""
        shown = self._head if self.request.version is None else self.request.version
        return SyncReport(
            version=None if shown is None else shown.number,
            workers={key: self._outcomes[key] for key in self.request.ids},
            published=self._publication is not None,
            adopted=self.request.adopted,
        )

    # ------------------------------------------------------------------ publishing

    def publish(self, weights: Any) -> ServerWeights:
        """Publish weights if their content differs from the head's; the rest of the update makes it durable."""
        draft = self.request.draft
        if draft is None:
            draft = self._up._draft(weights, self.request.about)
        if draft is None:
            return self._serve_head()
        self._draft = draft
        self._stack.callback(draft.release)
        publisher = self._registry.publisher
        lock = self._stack.enter_context(ExitStack())
        lock.enter_context(publisher.lock())
        publication = publisher.begin(draft)
        try:
            spread = (
                _Aside(self._up._distribute, draft.weights.payload) if self._worth_a_thread(draft) else None
            )
            publication.hash()
            with self._ledger.reading() as conn:
                self._check_head(conn)
                number = self._ledger.next_number(conn)
                publication.find_equal(conn)
            head = self._up.head
            if head is not None and publication.digest == head.digest:
                publication.fail(ConflictError("the content is the head's already"))
                lock.close()
                return self._serve(head, draft.weights.payload, draft.weights.structure, spread)
            self._publication = publication
            self._lock = lock
            server = self._outfit(
                number,
                publication.digest,
                publication.nonfinite,
                draft.weights.payload,
                draft.weights.structure,
                spread,
            )
        except BaseException as error:
            publication.fail(error)
            raise
        self._up.shelf.put(server)
        return server

    def _check_head(self, conn: Connection) -> None:
        # Takeovers drain what is in flight first, so the head that the updater knows is the one that the weights were
        # trained from, plus this updater's own publishes.
        found = self._ledger.head_number(conn)
        expected = None if self._up.head is None else self._up.head.number
        if found != expected:
            raise HeadMovedError(
                f"the head of policy {self._ledger.policy!r} moved from "
                f"{'nothing' if expected is None else f'v{expected}'} to v{found} while weights were on their way; "
                "they were not published. The next update looks at the new head first"
            )

    def _worth_a_thread(self, draft: Draft) -> bool:
        return draft.weights.payload.buffer.nbytes >= INLINE_BYTES and not self._up.maps_weights

    def _serve_head(self) -> ServerWeights:
        head = self._up.head
        assert head is not None
        return self._serve_version(head)

    def _serve_version(self, version: Mark) -> ServerWeights:
        found = self._up.shelf.find(version.digest)
        if found is not None:
            return replace(found, version=version.number)
        payload, structure = self._up._read(version.number, version.digest)
        return self._serve(version, payload, structure, None)

    def _serve(
        self, version: Mark, payload: Payload, structure: dict[str, Any], spread: _Aside | None
    ) -> ServerWeights:
        server = self._outfit(version.number, version.digest, version.nonfinite, payload, structure, spread)
        self._up.shelf.put(server)
        return server

    def _outfit(
        self,
        number: int,
        digest: str,
        nonfinite: tuple[str, ...],
        payload: Payload,
        structure: dict[str, Any],
        spread: _Aside | None,
    ) -> ServerWeights:
        sent = digest
        if self._up.maps_weights:
            weights = codec.rebuild(structure, payload.tensors(), payload.values)
            # Packed whatever it returns: it may have written into what it was given.
            content = codec.flatten(self._up._maybe_map_weights(weights), where="mapped weights")
            payload = Packer().pack(content, policy=self._ledger.policy, step=None)
            payload.hash()
            structure, sent = content.structure, payload.digest
        handle = self._up._distribute(payload) if spread is None else spread.result()
        return ServerWeights(number, digest, sent, nonfinite, payload.buffer.nbytes, handle, structure)

    # ------------------------------------------------------------------ planning

    def _bring_all(self) -> None:
        seats = [self._up.seats.get(key) for key in self.request.ids]
        self._look()
        if self._head is None:
            for seat in seats:
                self._note(seat, None, "current", "there is no version yet")
            return
        works = [self._plan(seat) for seat in seats]
        vanished = self._check_lives(works)
        for work in works:
            if work.action in ("push", "relabel"):
                work.server = self._server_for(work.target)
        leaving = [work for work in works if work.action in ("push", "relabel")]
        order = self._commit_intentions(leaving, vanished)
        self._send(leaving, order)
        self._make_durable()
        self._outstanding = {
            work.seat.id: work for work in works if work.action in ("push", "relabel", "wait")
        }
        self._await()
        self._report_standing(works)
        self._up._tidy({self._head.digest} | {mark.digest for mark in self._pinned.values()})

    def _look(self) -> None:
        """See the head, the pins and the versions they name, in one view."""
        with self._ledger.reading() as conn:
            if self._head is None:
                number = self._ledger.head_number(conn)
                self._head = None if number is None else self._up._mark(conn, number)
            self._pins = self._ledger.pins(conn)
            wanted = {pin.version for pin in self._pins}
            self._pinned = {number: self._up._mark(conn, number) for number in wanted}
            self._ranges = self._up._lineage(conn)

    def _target(self, seat: Seat) -> Target:
        assert self._head is not None
        _, pin = resolve_target(seat.name, self._pins, self._head.number)
        mark = self._head if pin is None else self._pinned[pin.version]
        return self._as_target(self.request.version or mark, pinned=pin is not None)

    def _as_target(self, mark: Mark, *, pinned: bool) -> Target:
        # Mapped bytes have a digest of their own, which is known once they were handed out.
        found = self._up.shelf.find(mark.digest)
        sent = mark.digest if found is None else found.sent_digest
        return Target(mark.number, sent, pinned, mark.nonfinite)

    def _plan(self, seat: Seat) -> _Work:
        target = self._target(seat)
        return _Work(seat, target, self._decide(seat, target, self.request.forced))

    def _decide(self, seat: Seat, target: Target, forced: bool) -> Action:
        known = seat.known
        situation = Situation(
            known=known,
            target=target,
            in_flight=seat.flight is not None,
            forced=forced or seat.owed,
            resend=self.request.resend or seat.owed,
            on_lineage=known is not None and lineage.contains(self._ranges, known.version),
        )
        return decide(
            situation,
            lambda: self._up._skip_update(seat.id),
            allow_nonfinite=self._up.allow_nonfinite,
            relabels=self._up.apply is None,
        )

    def _check_lives(self, works: list[_Work]) -> list[Settlement]:
        """Notice restarts of workers that would not be contacted, without waiting for them."""
        quiet = [work for work in works if work.action in ("current", "skip") or work.seat.gone]
        lives = self._up._find_lives([work.seat for work in quiet]) if quiet else {}
        vanished: list[Settlement] = []
        for work in quiet:
            seat, life = work.seat, lives.get(work.seat.id)
            if life is None:
                continue
            if isinstance(life, Trouble):
                if not seat.gone:
                    vanished.append(self._apply(seat, read_trouble(seat, None, life), None))
                self._lose(work, life)
            elif seat.gone or (seat.known is not None and seat.known.incarnation != life):
                trouble = Trouble("restarting", f"it came back as another process ({life})")
                if seat.known is not None:
                    vanished.append(self._apply(seat, read_trouble(seat, None, trouble), None))
                seat.gone = False
                self._redecide(work)
        return vanished

    def _server_for(self, target: Target) -> ServerWeights:
        if target.version not in self._ready:
            with self._ledger.reading() as conn:
                mark = self._up._mark(conn, target.version)
            self._ready[target.version] = self._serve_version(mark)
        return self._ready[target.version]

    # ------------------------------------------------------------------ intentions and pushes

    def _commit_intentions(self, works: Sequence[_Work], vanished: Sequence[Settlement]) -> int:
        opening = self._publication is not None and not self._publication.number
        if not (works or vanished or opening):
            return 0
        with self._ledger.writing() as conn:
            if opening:
                assert self._publication is not None
                self._publication.open(conn)
            fleet.settle(self._ledger, conn, vanished)
            return self._intend(conn, works)

    def _intend(self, conn: Connection, works: Sequence[_Work]) -> int:
        if not works:
            return 0
        return fleet.intend(
            self._ledger,
            conn,
            [
                fleet.Push(work.seat.row, work.target.version, work.server.sent_digest)
                for work in works
                if work.server
            ],
        )

    def _send(self, works: Sequence[_Work], order: int) -> None:
        """Let all pushes leave; nobody is waited for."""
        for work in works:
            seat, server = work.seat, work.server
            assert server is not None
            # A worker that gives up says so while it is still listened to.
            push = self._up._push_for(
                server, order, max(0.0, _WORKER_SHARE * (self._deadline - time.monotonic()))
            )
            # Until the transport has it: an interrupt in between must not leave a push that is never answered.
            flight = Flight(push, Trouble("doubtful", "interrupted while it was sent"), work.target.pinned)
            seat.flight = flight
            bare = work.action == "relabel"
            try:
                flight.handle = self._up._sync_weights_with_worker(
                    seat.id, replace(server, push=push, handle=None if bare else server.handle)
                )
            except Exception as error:  # noqa: BLE001 - one worker's transport must not stop the others
                flight.handle = self._up._explain(seat, error)

    def _make_durable(self) -> None:
        """Finish the file while workers pull. A failure is raised once the receipts were taken."""
        if self._publication is None:
            return
        try:
            self._publication.store()
        except Exception as error:  # noqa: BLE001 - raised once the receipts were taken
            self._failure = error
        # The bytes are in the file and with the transport: the next copy may use the buffer.
        assert self._draft is not None
        self._draft.release()

    # ------------------------------------------------------------------ receipts

    def _await(self) -> None:
        unclosed = self._publication is not None
        while self._outstanding or self._reviving or unclosed:
            left = self._deadline - time.monotonic()
            patience = left
            if unclosed:
                patience = min(patience, _GRACE)
            if self._reviving:
                patience = min(patience, _REVIVAL_POLL)
            answers = self._collect(max(0.0, patience))
            if not answers and left <= 0:
                silent = Trouble("silent", f"no answer within {self._up.timeout:g} s")
                answers = dict.fromkeys(self._outstanding, silent)
            self._take(answers, unclosed, left)
            unclosed = False

    def _collect(self, patience: float) -> dict[int, Any]:
        if not self._outstanding:
            time.sleep(patience if self._reviving else 0.0)
            return {}
        # Those whose answer leads to another push are not made to wait for the slowest.
        eager = any(work.action in ("relabel", "wait") for work in self._outstanding.values())
        handles = {
            key: work.seat.flight.handle for key, work in self._outstanding.items() if work.seat.flight
        }
        return self._up._collect(handles, patience, eager)

    def _take(self, answers: dict[int, Any], unclosed: bool, left: float) -> None:
        """Record a batch of answers, and send what they ask for."""
        earlier: list[Settlement] = []
        settlements: list[Settlement] = []
        again: list[_Work] = []
        for key, answer in answers.items():
            work = self._outstanding.pop(key)
            seat, flight = work.seat, work.seat.flight
            assert flight is not None
            result = answer if isinstance(answer, (Receipt, Trouble)) else self._up._explain(seat, answer)
            if isinstance(result, Receipt):
                reading = read_receipt(seat, flight.push, result)
            else:
                reading = read_trouble(seat, flight.push, result)
            if not (flight.told_silent and reading.status == "timeout"):
                earlier.extend(reading.earlier)
                settlements.append(self._apply(seat, reading, result))
            if isinstance(result, Trouble) and result.kind == "restarting" and left > 0:
                self._lose(work, result)
            elif reading.resend or self._must_reread(work, result):
                work.action = "push"
                again.append(work)
            elif work.action == "wait" and reading.status not in ("timeout", "dead"):
                if self._redecide(work):
                    again.append(work)
                elif self._holds_target(work) and reading.status == "synced":
                    self._note(seat, work.target, "synced", "", time.perf_counter() - flight.started)
            else:
                seconds = time.perf_counter() - flight.started
                self._note(seat, work.target, reading.status, reading.error, seconds)
        back, buried = self._revived(left)
        again += back
        settlements += buried
        if not (settlements or again or unclosed):
            return
        for work in again:
            work.server = self._server_for(work.target)
        with self._ledger.writing() as conn:
            fleet.settle(self._ledger, conn, earlier)
            fleet.settle(self._ledger, conn, settlements)
            if unclosed:
                self._close(conn)
            order = self._intend(conn, again)
        if unclosed:
            self._closed()
        self._send(again, order)
        self._outstanding.update({work.seat.id: work for work in again})

    def _must_reread(self, work: _Work, result: Receipt | Trouble) -> bool:
        """Forget bytes that the transport lost; tells whether they are to be sent once more, from the file."""
        if not isinstance(result, Trouble) or result.kind != "bytes_lost":
            return False
        server = work.server
        if server is not None:
            self._ready.pop(server.version, None)
            found = self._up.shelf.find(server.digest)
            if found is not None and found.handle is server.handle:
                self._up.shelf.drop(server.digest)
        # While the version is being stored there is no file to read yet: the next update sends it.
        storing = self._publication is not None and self._publication.number == work.target.version
        again = not work.reread and not storing
        work.reread = True
        return again

    def _lose(self, work: _Work, trouble: Trouble) -> None:
        """A dead worker is reported; one that is being restarted is waited for, since it acts with initial weights."""
        self._note(work.seat, work.target, "dead", trouble.detail)
        if trouble.kind == "restarting":
            self._reviving[work.seat.id] = work
        work.action = "current"

    def _revived(self, left: float) -> tuple[list[_Work], list[Settlement]]:
        """Return the workers that are back, and the end of those that will not come back.

        Those that did not make it in time stay reported as dead, and unknown on record.
        """
        back: list[_Work] = []
        buried: list[Settlement] = []
        if not self._reviving:
            return back, buried
        lives = self._up._find_lives([work.seat for work in self._reviving.values()])
        for key, work in list(self._reviving.items()):
            life = lives.get(key)
            if isinstance(life, Trouble) and life.kind == "dead":
                buried.append(self._apply(work.seat, read_trouble(work.seat, None, life), life))
                self._note(work.seat, work.target, "dead", life.detail)
                del self._reviving[key]
            elif isinstance(life, str) and left > 0:
                del self._reviving[key]
                if self._redecide(work):
                    back.append(work)
        if left <= 0:
            self._reviving.clear()
        return back, buried

    def _holds_target(self, work: _Work) -> bool:
        known = work.seat.known
        return known is not None and known.version == work.target.version

    def _redecide(self, work: _Work) -> bool:
        """Decide again, now that more is known; tells whether something is to be sent."""
        # Nothing was known of it when the call began, so the interval does not pass it by.
        work.action = self._decide(work.seat, work.target, True)
        if work.action in ("push", "relabel"):
            return True
        self._outcomes.pop(work.seat.id, None)
        return False

    def _apply(self, seat: Seat, reading: Reading, result: Any) -> Settlement:
        """Bring the seat to what the answer says."""
        verdict = reading.settlement.verdict
        flight = seat.flight
        if verdict == "silent":
            seat.known = None
            if flight is not None:
                flight.told_silent = True
            return reading.settlement
        seat.flight = None
        seat.gone, seat.owed = verdict == "gone", verdict == "kept"
        if verdict == "kept" and not isinstance(result, Receipt):
            return reading.settlement
        note = result.now if isinstance(result, Receipt) else None
        known = None
        if note is not None and verdict == "confirmed":
            assert flight is not None
            known = Known(note.version, note.sent_digest, result.incarnation, flight.pinned)
            seat.passed_by = 0
        elif note is not None and verdict == "kept" and is_vouched(seat, note, result.incarnation):
            # Its own word counts only for what the record has: weights that drifted still have their note.
            pinned = seat.known is None or seat.known.pinned
            known = Known(note.version, note.sent_digest, result.incarnation, pinned)
        seat.known, seat.open_pending = known, ()
        seat.open_held = (
            stretch_of(note, result.incarnation) if note is not None and known is not None else None
        )
        return reading.settlement

    def _close(self, conn: Connection) -> None:
        assert self._publication is not None
        if self._failure is None:
            self._publication.close(conn)

    def _closed(self) -> None:
        """The version is the head now, or was lost; either way others may write again."""
        assert self._publication is not None
        if self._failure is not None:
            self._publication.fail(self._failure)
        else:
            self._up._saw_own(self._publication)
        self._lock.close()

    def _abandon(self, error: BaseException) -> None:
        if self._publication is not None:
            self._publication.fail(error)

    # ------------------------------------------------------------------ outcomes

    def _report_standing(self, works: Iterable[_Work]) -> None:
        """Add the workers that nothing was sent to."""
        refusals: list[tuple[str, int | None, str | None, str, dict[str, Any]]] = []
        for work in works:
            if work.seat.id in self._outcomes:
                continue
            if work.action == "skip":
                work.seat.passed_by += 1
                self._note(work.seat, work.target, "skipped", "")
            elif work.action == "refuse":
                names = ", ".join(refused_tensors(work.target.nonfinite, self._up.allow_nonfinite))
                text = f"v{work.target.version} has NaN or infinity in {names}; allow_nonfinite= lets it pass"
                self._note(work.seat, work.target, "refused", text)
                refusals.append(
                    ("sync_failed", work.target.version, work.seat.name, text, {"outcome": "refused"})
                )
            else:
                if work.seat.known is not None:
                    work.seat.known = replace(work.seat.known, pinned=work.target.pinned)
                self._note(work.seat, work.target, "current", "")
        if refusals:
            with self._ledger.writing() as conn:
                self._ledger.events(conn, refusals)

    def _note(
        self, seat: Seat, target: Target | None, status: Status, error: str, seconds: float = 0.0
    ) -> None:
        self._outcomes[seat.id] = WorkerOutcome(
            name=seat.name,
            status=status,
            held=None if seat.known is None else seat.known.version,
            target=None if target is None else target.version,
            error=error,
            seconds=seconds,
        )


class _Aside:
    """Runs one call in a thread of its own and hands its result over."""

    def __init__(self, call: Callable[[Payload], Any], payload: Payload) -> None:
        self._result: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(
            target=self._run, args=(call, payload), name="weightledger-distribute", daemon=True
        )
        self._thread.start()

    def _run(self, call: Callable[[Payload], Any], payload: Payload) -> None:
        try:
            self._result = call(payload)
        except BaseException as error:  # noqa: BLE001 - raised in the thread that asks for the result
            self._error = error

    def result(self) -> Any:
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._result

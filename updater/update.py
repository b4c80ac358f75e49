"""One update, from the weights to the report.

The order is the promise. The row of the version and every intention are committed before the first push leaves. While
workers pull, the file becomes durable, or a rollback restores the server weights. Receipts alone make holdings; what
has no answer stays open in the record.
Nobody waits longer than the update's timeout, however many workers are silent.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection

from weightledger.registry.errors import InUseError
from weightledger.registry.log import fleet, lineage
from weightledger.registry.log.audit import resolve_target
from weightledger.registry.log.fleet import Settlement
from weightledger.updater.claims import is_steered
from weightledger.updater.plan import Action, Known, Situation, Target, decide, refused_tensors
from weightledger.updater.push import Push, Receipt
from weightledger.updater.reports import Status, SyncReport, WorkerOutcome
from weightledger.updater.seats import Flight, Seat, stretch_of
from weightledger.updater.server import Mark, ServerWeights, View
from weightledger.updater.serving import Request, Serving
from weightledger.updater.settling import (
    Reading,
    Trouble,
    is_rejection,
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


@dataclass
class _Work:
    """What is to be done with one worker."""

    seat: Seat
    target: Target
    action: Action
    server: ServerWeights | None = None
    reread: bool = False
    """The transport lost the bytes once; they were read from the file again."""
    remark: str = ""
    """What the report says of it beside its status."""
    ahead: bool = False
    """It had seen a higher order than this registry gave, and was sent the weights again under one beyond it."""


class Update:
    """Carries out one request. `run` is called once."""

    def __init__(self, updater: RemoteWeightUpdaterBase, request: Request) -> None:
        self._up = updater
        self._registry = updater.registry
        self._ledger = updater.registry.ledger
        self.request = request
        self._deadline = time.monotonic() + updater.timeout
        self._stack = ExitStack()
        self._serving = Serving(updater, request, self._stack)
        self._head: Mark | None = None
        self._view = View((), {}, ())
        self._targets: dict[tuple[int, bool], Target] = {}
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
                if self.request.restoration is not None:
                    self._accept(self._serving.roll_back(self.request.restoration))
                elif self.request.publish:
                    self._accept(self._up._get_server_weights())
                self._bring_all()
            except BaseException as error:
                self._serving.abandon(error)
                raise
        if self._serving.failure is not None:
            raise self._serving.failure
        return self.report()

    def run_publish(self, weights: Any) -> ServerWeights:
        """Only publish, and wait until that is durable."""
        with self._stack:
            try:
                server = self._serving.publish(weights)
                self._accept(server)
                self._bring_all()
            except BaseException as error:
                self._serving.abandon(error)
                raise
        if self._serving.failure is not None:
            raise self._serving.failure
        return server

    def publish(self, weights: Any) -> ServerWeights:
        """Publish weights if their content differs from the head's; the rest of the update makes it durable."""
        return self._serving.publish(weights)

    def _accept(self, server: ServerWeights) -> None:
        self._head = server.mark
        self._ready[server.version] = server

    def report(self) -> SyncReport:
        """Say what was done."""
        shown = self._head if self.request.version is None else self.request.version
        return SyncReport(
            version=None if shown is None else shown.number,
            workers={key: self._outcomes[key] for key in self.request.ids},
            published=self._serving.publication is not None,
            adopted=self.request.adopted,
        )

    @property
    def kept(self) -> Mark | None:
        """The head, when what was to be published has its content."""
        return self._serving.kept

    # ------------------------------------------------------------------ planning

    def _bring_all(self) -> None:
        seats = [self._up.seats.get(key) for key in self.request.ids]
        self._look()
        if self._head is None:
            for seat in seats:
                self._note(seat, None, "current", "there is no version yet")
            return
        ended = self._up.asking.hear(seats, wait=False)
        works = [self._plan(seat) for seat in seats]
        for work in works:
            self._remark(work, ended)
        vanished = [*ended.values(), *self._check_lives(works)]
        for work in works:
            if work.action in ("push", "relabel"):
                work.server = self._server_for(work.target)
        leaving = [work for work in works if work.action in ("push", "relabel")]
        order = self._commit_intentions(leaving, vanished)
        self._send(leaving, order)
        quiet = {work.seat.id: work for work in works if work.action in ("current", "skip", "refuse")}
        asked = self._up.asking.ask(work.seat for work in quiet.values())
        self._serving.finish()
        self._outstanding = {
            work.seat.id: work for work in works if work.action in ("push", "relabel", "wait")
        }
        self._await(self._serving.publication is not None)
        self._bring_back(quiet, self._up.asking.hear(asked, wait=True))
        self._report_standing(works)
        self._up._tidy({self._head.digest} | {mark.digest for mark in self._view.pinned.values()})

    def _bring_back(self, quiet: dict[int, _Work], ended: dict[int, Settlement]) -> None:
        """Send their target to workers that were thought to hold it, or something that would do, and do not."""
        if not ended:
            return
        again = []
        for key in ended:
            work = quiet[key]
            self._remark(work, ended)
            if self._redecide(work):
                work.server = self._server_for(work.target)
                again.append(work)
        with self._ledger.writing() as conn:
            fleet.settle(self._ledger, conn, list(ended.values()))
            order = self._intend(conn, again)
        self._send(again, order)
        self._outstanding = {work.seat.id: work for work in again}
        self._await(False)

    def _remark(self, work: _Work, ended: dict[int, Settlement]) -> None:
        if work.seat.id in ended:
            work.remark = f"{ended[work.seat.id].detail}; it was sent its weights again"

    def _look(self) -> None:
        """See the head, the pins and the versions they name, in one view."""
        if self._head is not None and self._serving.view is not None:
            self._view = self._serving.view
            return
        with self._ledger.reading() as conn:
            if self._head is None:
                number = self._ledger.head_number(conn)
                self._head = None if number is None else self._up._mark(conn, number)
            self._view = self._up._look(conn)

    def _target(self, seat: Seat) -> Target:
        assert self._head is not None
        _, pin = resolve_target(seat.name, self._view.pins, self._head.number)
        mark = self._head if pin is None else self._view.pinned[pin.version]
        return self._as_target(self.request.version or mark, pin is not None)

    def _as_target(self, mark: Mark, pinned: bool) -> Target:
        # Thousands of workers have few targets between them.
        target = self._targets.get((mark.number, pinned))
        if target is None:
            # Mapped bytes have a digest of their own, which is known once they were handed out.
            found = self._up.shelf.find(mark.digest)
            sent = mark.digest if found is None else found.sent_digest
            target = self._targets[mark.number, pinned] = Target(mark.number, sent, pinned, mark.nonfinite)
        return target

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
            on_lineage=known is not None and lineage.contains(self._view.lineage, known.version),
        )
        return decide(
            situation,
            lambda: self._up._skip_update(seat.id),
            allow_nonfinite=self._up.allow_nonfinite,
            relabels=not callable(self._up.apply),
        )

    def _check_lives(self, works: list[_Work]) -> list[Settlement]:
        """Notice restarts of workers that would not be contacted, without waiting for them."""
        quiet = [work for work in works if work.action in ("current", "skip", "refuse") or work.seat.gone]
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
            self._ready[target.version] = self._serving.serve(mark)
        return self._ready[target.version]

    # ------------------------------------------------------------------ intentions and pushes

    def _commit_intentions(self, works: Sequence[_Work], vanished: Sequence[Settlement]) -> int:
        opening = self._serving.must_open()
        if not (works or vanished or opening):
            return 0
        with self._ledger.writing() as conn:
            self._serving.open(conn)
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
        # A worker that gives up says so while it is still listened to.
        patience = max(0.0, _WORKER_SHARE * (self._deadline - time.monotonic()))
        outfits: dict[tuple[int, bool], ServerWeights] = {}
        for work in works:
            seat, server, bare = work.seat, work.server, work.action == "relabel"
            assert server is not None
            outfit = outfits.get((id(server), bare))
            if outfit is None:
                push = self._up._push_for(server, order, patience)
                outfit = replace(server, push=push, handle=None if bare else server.handle)
                outfits[id(server), bare] = outfit
            assert isinstance(outfit.push, Push)
            # Until the transport has it: an interrupt in between must not leave a push that is never answered.
            flight = Flight(
                outfit.push, Trouble("doubtful", "interrupted while it was sent"), work.target.pinned
            )
            # An answer that is still to come would speak of what was before.
            self._up._spent.append(seat.question)
            seat.flight, seat.question = flight, None
            try:
                flight.handle = self._up._sync_weights_with_worker(seat.id, outfit)
            except Exception as error:  # noqa: BLE001 - one worker's transport must not stop the others
                flight.handle = self._up._explain(seat, error)

    # ------------------------------------------------------------------ receipts

    def _await(self, unclosed: bool) -> None:
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
        ahead = self._ahead(answers)
        jumps: list[fleet.Ahead] = []
        for key, answer in answers.items():
            work = self._outstanding.pop(key)
            seat, flight = work.seat, work.seat.flight
            assert flight is not None
            result = answer if isinstance(answer, (Receipt, Trouble)) else self._up._explain(seat, answer)
            self.request.answers[key] = result
            if isinstance(result, Receipt):
                reading = read_receipt(seat, flight.push, result)
            else:
                reading = read_trouble(seat, flight.push, result)
            if key in ahead:
                reading = self._read_ahead(work, ahead[key], reading)
                if reading.resend:
                    jumps.append(ahead[key])
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
                    self._note(seat, work.target, "synced", work.remark, time.perf_counter() - flight.started)
            else:
                seconds = time.perf_counter() - flight.started
                rejected = not seat.took and is_rejection(result)
                self._note(seat, work.target, reading.status, reading.error or work.remark, seconds, rejected)
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
            if jumps:
                fleet.catch_up(self._ledger, conn, jumps)
            if unclosed:
                self._serving.close(conn)
            order = self._intend(conn, again)
        if unclosed:
            self._serving.closed()
        self._send(again, order)
        self._outstanding.update({work.seat.id: work for work in again})

    def _ahead(self, answers: dict[int, Any]) -> dict[int, fleet.Ahead]:
        """Find the workers that turned a push down for an order that this registry did not give them."""
        stale = {
            key: answer
            for key, answer in answers.items()
            if isinstance(answer, Receipt) and answer.outcome == "stale" and answer.last is not None
        }
        if not stale:
            return {}
        found = {}
        with self._ledger.reading() as conn:
            for key, receipt in stale.items():
                seat, last = self._outstanding[key].seat, receipt.last
                assert last is not None
                # The same order with other content is not the one on record either.
                if last.order == receipt.order or not fleet.is_given(conn, seat.row, last.order, last.run):
                    found[key] = fleet.Ahead(seat.row, seat.name, last.order, last.run, last.registry)
        return found

    def _read_ahead(self, work: _Work, ahead: fleet.Ahead, reading: Reading) -> Reading:
        """Go on beyond the order that a worker has seen, unless the run that gave it is alive."""
        who = f"run {ahead.run} of the registry at {ahead.registry}"
        if is_steered(self._registry, ahead):
            error = (
                f"{InUseError.__name__}: {who} is alive and steers it, too: it gave order {ahead.order}. Nothing was "
                "sent over that; end that run, or give this updater other workers"
            )
        elif work.ahead:
            error = f"{who} pushes to it at the same time: it has seen order {ahead.order} meanwhile"
        else:
            work.ahead = True
            work.remark = (
                f"it was ahead of this registry: it had seen order {ahead.order} of {who}, which is gone; the orders "
                "go on from there, and it was sent its weights again"
            )
            settlement = reading.settlement._replace(detail=work.remark, eventful=False)
            return reading._replace(settlement=settlement, resend=True, status="failed")
        settlement = reading.settlement._replace(detail=error)
        return reading._replace(settlement=settlement, status="failed", error=error)

    def _must_reread(self, work: _Work, result: Receipt | Trouble) -> bool:
        """Forget bytes that the transport lost; tells whether they are to be sent once more, from the file."""
        if not isinstance(result, Trouble) or result.kind != "bytes_lost":
            return False
        server = work.server
        if server is not None:
            self._ready.pop(server.version, None)
            found = self._up.shelf.find(server.digest)
            if found is not None and found.handle is server.handle:
                self._up._spent += self._up.shelf.drop(server.digest)
        # While the version is being stored there is no file to read yet: the next update sends it.
        storing = self._serving.is_storing(work.target.version)
        again = not work.reread and not storing
        work.reread = True
        return again

    def _lose(self, work: _Work, trouble: Trouble) -> None:
        """A dead worker is reported; one that is being restarted is waited for, since it acts with initial weights."""
        self._note(work.seat, work.target, "failed" if trouble.kind == "doubtful" else "dead", trouble.detail)
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
            if isinstance(life, Trouble) and life.kind != "restarting":
                buried.append(self._apply(work.seat, read_trouble(work.seat, None, life), life))
                self._lose(work, life)
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
        self._up._spent.append(flight)
        seat.flight = None
        seat.gone, seat.owed = verdict == "gone", verdict == "kept"
        if verdict == "kept" and not isinstance(result, Receipt):
            return reading.settlement
        note = result.now if isinstance(result, Receipt) else None
        known = None
        if note is not None and verdict == "confirmed":
            assert flight is not None
            known = Known(note.version, note.sent_digest, result.incarnation, flight.pinned)
            seat.passed_by, seat.took = 0, True
        elif note is not None and verdict == "kept" and is_vouched(seat, note, result.incarnation):
            # Its own word counts only for what the record has: weights that drifted still have their note.
            pinned = seat.known is None or seat.known.pinned
            known = Known(note.version, note.sent_digest, result.incarnation, pinned)
        seat.known, seat.open_pending = known, ()
        seat.open_held = (
            stretch_of(note, result.incarnation) if note is not None and known is not None else None
        )
        return reading.settlement

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
        self,
        seat: Seat,
        target: Target | None,
        status: Status,
        error: str,
        seconds: float = 0.0,
        rejected_first: bool = False,
    ) -> None:
        self._outcomes[seat.id] = WorkerOutcome(
            name=seat.name,
            status=status,
            held=None if seat.known is None else seat.known.version,
            target=None if target is None else target.version,
            error=error,
            seconds=seconds,
            rejected_first=rejected_first,
        )

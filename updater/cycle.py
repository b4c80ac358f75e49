"""One update, from the look at the head to the report: the only way in which the head changes.

A `HeadChange` says how the head moves: `Publish` makes live weights the next version, `Rollback` makes an older content
the next version, `Follow` takes over a head that somebody else moved. Without one, workers are brought to the head that
there is. `Cycle.run` carries all of them out, in one order, which is the promise:

1. The bytes are at hand, and handed to the transport. Nothing is written yet.
2. One transaction commits the version's row and the intention of every push.
3. The pushes leave, all at once.
4. While workers pull, the file becomes durable, or the server weights are restored.
5. Receipts are recorded as they come. The version becomes the head with the first of them.

Receipts alone make holdings; what has no answer stays open in the record. Nobody waits longer than the update's
timeout, however many workers are silent.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from weightledger.registry.errors import ConflictError, InUseError
from weightledger.registry.logs import log, tell_published, tell_rolled_back
from weightledger.registry.records import Version
from weightledger.registry.sync import (
    Ahead,
    Draft,
    HeadState,
    PendingPublish,
    PendingRollback,
    Push,
    Refusal,
    Settlement,
    VersionInfo,
)
from weightledger.registry.weights import Payload
from weightledger.updater import messages
from weightledger.updater.messages import Receipt, ServerWeights
from weightledger.updater.reports import Status, SyncReport, WorkerOutcome
from weightledger.updater.workers.deciding import Action, Target, refused_tensors
from weightledger.updater.workers.reading import Reading, is_rejection
from weightledger.updater.workers.state import Trouble, WorkerState

if TYPE_CHECKING:
    from weightledger.updater.updater import Updater

# How long a version that is durable already waits for receipts, so that both go into one transaction.
_GRACE = 0.25
# How often a worker that is being restarted is looked at.
_REVIVAL_POLL = 0.1
# The part of the time left that a worker may wait for its own `acting` blocks.
_WORKER_SHARE = 0.9


class HeadMovedError(ConflictError):
    """The head moved between the caller's look at it and the lock. Nothing was changed."""


# ---------------------------------------------------------------------- what is asked for


@dataclass
class Publish:
    """Make weights the next version, if their content is not the head's."""

    weights: Any = None
    """These, in place of the live ones."""
    draft: Draft | None = None
    """A copy that was made in the caller's thread already."""
    about: dict[str, Any] = field(default_factory=dict)
    """Step, metrics, metadata and message of the version."""
    restructure: bool = False
    """Names and shapes may be others than the head's."""
    by_hook: bool = True
    """Whether `_get_server_weights` says what is published, as it may be a user's own."""


@dataclass
class Rollback:
    """Make an older version's content the next version."""

    wanted: Version
    payload: Payload | None
    """Its bytes, which the server weights are known to accept; None when they hold its content already."""
    reason: str


@dataclass
class Follow:
    """Take over a head that somebody else moved."""

    version: Version
    payload: Payload
    """Its bytes, which the server weights are known to accept."""
    asked: bool = False
    """Whether the caller asked for it, which is on record then."""


HeadChange = Publish | Rollback | Follow


@dataclass
class Request:
    """What the caller asked for, and what came of it beside the report."""

    ids: Sequence[int] = ()
    """The workers that are brought to their targets."""
    change: HeadChange | None = None
    version: VersionInfo | None = None
    """Bring the workers to this version once, whatever their targets are."""
    forced: bool = False
    resend: bool = False
    server: ServerWeights | None = None
    """The head as a user's `_get_server_weights` has it, which published nothing."""
    restored: Version | None = None
    """The version that the server weights were restored to."""
    answers: dict[int, Receipt | Trouble] = field(default_factory=dict)
    """What the workers answered last, by worker id."""


@dataclass
class _Work:
    """What is to be done with one worker."""

    worker: WorkerState
    target: Target
    action: Action
    server: ServerWeights | None = None
    reread: bool = False
    """The transport lost the bytes once; they were read from the file again."""
    remark: str = ""
    """What the report says of it beside its status."""
    ahead: bool = False
    """It had seen a higher order than this registry gave, and was sent the weights again under one beyond it."""


# ---------------------------------------------------------------------- the cycle


class Cycle:
    """Carries out one request. `run` is called once."""

    def __init__(self, updater: Updater, request: Request) -> None:
        self._up = updater
        self._sync = updater.record
        self._table = updater.workers
        self._transport = updater.transport
        self._source = updater.source
        self._live = updater.live
        self.request = request
        self.thread = threading.get_ident()
        self._deadline = time.monotonic() + updater.timeout
        self._stack = ExitStack()
        self._pending: PendingPublish | PendingRollback | None = None
        """The change of the head, from its look until it is the head or was given up."""
        self._publishes_live = False
        self.published = False
        self.kept: VersionInfo | None = None
        """The head, when what was to be published has its content."""
        self._failure: BaseException | None = None
        """Why the version could not be made durable, or the server weights not restored; raised at the end."""
        self._state: HeadState | None = None
        self._head: VersionInfo | None = None
        self._targets: dict[tuple[int, bool], Target] = {}
        self._servers: dict[int, ServerWeights] = {}
        """What is sent, by version."""
        self._outcomes: dict[int, WorkerOutcome] = {}
        self._outstanding: dict[int, _Work] = {}
        """Workers that were sent a push and have not answered."""
        self._reviving: dict[int, _Work] = {}
        """Workers whose process ended and that the transport is starting again."""

    def run(self) -> SyncReport:
        """Carry the request out and report."""
        with self._stack:
            try:
                self._move_head()
                state = self._look()
                works, ended = self._plan(state)
                leaving = [work for work in works if work.action in ("push", "relabel")]
                order = self._begin(leaving, ended)
                self._send(leaving, order)
                asked = self._up.asking.ask(work.worker for work in works if _is_quiet(work))
                self._finish_head()
                self._outstanding = {
                    work.worker.id: work for work in works if work.action in ("push", "relabel", "wait")
                }
                self._collect(closing=isinstance(self._pending, PendingPublish))
                self._bring_back(works, self._up.asking.hear(asked, wait=True))
                self._report_standing(works)
            except BaseException as error:
                if isinstance(self._pending, PendingPublish):
                    self._pending.fail(error)
                raise
            finally:
                if isinstance(self._pending, PendingRollback):
                    self._pending.end()
        if self._head is not None:
            self._up._keep_bytes_of(state, self._head)
        if self._failure is not None:
            raise self._failure
        return self._report()

    # ------------------------------------------------------------------ 1. the bytes are at hand

    def _move_head(self) -> None:
        match self.request.change:
            case Publish() as change if change.by_hook:
                # It calls `publish` here, or hands out what was published before.
                self._serve(self._up._get_server_weights())
            case Publish() as change:
                self.publish(change.weights)
            case Rollback() as change:
                self._roll_back(change)
            case Follow() as change:
                self._follow(change)
        if self.request.server is not None:
            self._serve(self.request.server)

    def publish(self, weights: Any) -> ServerWeights:
        """Take a copy of weights on its way to be a version, unless it is the head's content."""
        change, live = self.request.change, self._live
        assert isinstance(change, Publish)
        self._publishes_live = weights is live.weights
        draft = change.draft or self._up._copy_of(weights, change.about)
        if draft is None:
            self._state = self._sync.look()
            self._check_head(self._state)
            return self._keep(self._source.serve)
        self._stack.callback(draft.release)
        pending = self._sync.publishing(draft)
        try:
            payload, structure = draft.weights.payload, draft.weights.structure
            beside = self._source.hand_out_beside(payload)
            if beside is not None:
                # Before the buffer is given back, whatever becomes of the version.
                self._stack.callback(beside.wait)
            self._state = pending.look()
            self._check_head(self._state)
            if live.head is not None and pending.digest == live.head.digest and not live.begins_line:
                pending.fail(ConflictError("the content is the head's already"))
                server = self._keep(lambda head: self._source.hand_out(head, payload, structure, beside))
                draft.release()
                return server
            pending.decide(begins_line=live.begins_line, restructure=change.restructure)
            server = self._source.hand_out(pending.info, payload, structure, beside)
        except BaseException as error:
            pending.fail(error)
            raise
        self._pending = pending
        return self._serve(server)

    def _keep(self, hand_out: Callable[[VersionInfo], ServerWeights]) -> ServerWeights:
        self.kept = self._live.head
        assert self.kept is not None
        return self._serve(hand_out(self.kept))

    def _roll_back(self, change: Rollback) -> None:
        head = self._live.head
        self._pending = pending = self._sync.rolling_back(
            change.wanted, change.reason, None if head is None else head.number
        )
        self._state = pending.look()
        self._head = pending.info
        if self.request.ids:
            self._serve(self._source.serve(pending.info, change.wanted.number))

    def _follow(self, change: Follow) -> None:
        self._state = self._sync.look()
        if self._state.head is None or self._state.head.number != change.version.number:
            raise HeadMovedError(self._moved(change.version.number, self._state.head))
        if self.request.ids:
            # Before the memory that it was read into is wanted for something else.
            self._serve(self._source.serve(self._state.head))

    def _check_head(self, state: HeadState) -> None:
        # Takeovers drain what is in flight first, so the head that the updater knows is the one that the weights were
        # trained from, plus this updater's own publishes.
        expected = None if self._live.head is None else self._live.head.number
        if (None if state.head is None else state.head.number) != expected:
            raise HeadMovedError(self._moved(expected, state.head))

    def _moved(self, expected: int | None, found: VersionInfo | None) -> str:
        return (
            f"the head of policy {self._sync.policy!r} moved from "
            f"{'nothing' if expected is None else f'v{expected}'} to "
            f"{'nothing' if found is None else f'v{found.number}'} while weights were on their way; "
            "they were not published. The next update looks at the new head first"
        )

    def _serve(self, server: ServerWeights) -> ServerWeights:
        self._head = server.info
        self._servers[server.version] = server
        return server

    @property
    def step(self) -> int | None:
        """The step that is published with."""
        change = self.request.change
        return change.about.get("step") if isinstance(change, Publish) else None

    @property
    def server(self) -> ServerWeights:
        """What was published, or the head that has its content."""
        assert self._head is not None
        return self._servers[self._head.number]

    def _look(self) -> HeadState:
        state = self._state or self._sync.look()
        if self._head is None:
            self._head = state.head
        self._state = state
        return state

    # ------------------------------------------------------------------ 2. row and intentions

    def _plan(self, state: HeadState) -> tuple[list[_Work], list[Settlement]]:
        """Decide what to do with each worker, once the answers that have come meanwhile are heard.

        Returns:
            The work, and how holdings ended that turned out to be others.
        """
        workers = [self._table.get(key) for key in self.request.ids]
        if self._head is None:
            for worker in workers:
                self._note(worker, None, "current", "there is no version yet")
            return [], []
        heard = self._up.asking.hear(workers, wait=False)
        works = []
        for worker in workers:
            target = self._target(worker)
            works.append(_Work(worker, target, self._decide(worker, target, forced=self.request.forced)))
        self._remark(works, heard)
        ended = [*heard.values(), *self._check_incarnations(works)]
        for work in works:
            if work.action in ("push", "relabel"):
                work.server = self._server_for(work.target)
        return works, ended

    def _target(self, worker: WorkerState) -> Target:
        assert self._state is not None
        info, pinned = self._state.target(worker.name)
        if not pinned:
            info = self._head
        return self._as_target(self.request.version or info, pinned)

    def _as_target(self, version: VersionInfo | None, pinned: bool) -> Target:
        assert version is not None
        # Thousands of workers have few targets between them.
        target = self._targets.get((version.number, pinned))
        if target is None:
            # Mapped bytes have a digest of their own, which is known once they were handed out.
            found = self._source.find(version.digest)
            sent = version.digest if found is None else found.sent_digest
            target = self._targets[version.number, pinned] = Target(
                version.number, sent, pinned, version.nonfinite
            )
        return target

    def _decide(self, worker: WorkerState, target: Target, *, forced: bool) -> Action:
        assert self._state is not None
        up = self._up
        return self._table.decide(
            worker,
            target,
            self._state,
            forced=forced,
            resend=self.request.resend,
            skip=up._skip_update,
            allow_nonfinite=up.allow_nonfinite,
            relabels=not callable(up.apply),
        )

    def _redecide(self, work: _Work) -> bool:
        """Decide again, now that more is known; tells whether something is to be sent."""
        # Nothing was known of it when the call began, so the interval does not pass it by.
        work.action = self._decide(work.worker, work.target, forced=True)
        if work.action in ("push", "relabel"):
            return True
        self._outcomes.pop(work.worker.id, None)
        return False

    def _check_incarnations(self, works: list[_Work]) -> list[Settlement]:
        """Notice restarts of workers that would not be contacted, without waiting for them."""
        quiet = [work for work in works if _is_quiet(work) or work.worker.gone]
        if not quiet:
            return []
        found = self._transport.incarnations({work.worker.id: work.worker.handle for work in quiet})
        ended: list[Settlement] = []
        for work in quiet:
            worker, incarnation = work.worker, found.get(work.worker.id)
            if isinstance(incarnation, Trouble):
                ended += self._table.died(worker, incarnation)
                self._lose(work, incarnation)
            elif incarnation is not None and self._table.is_another(worker, incarnation):
                log.info("worker %s came back as another process", worker.name)
                ended += self._table.came_back(worker, incarnation)
                self._redecide(work)
        return ended

    def _server_for(self, target: Target) -> ServerWeights:
        if target.version not in self._servers:
            self._servers[target.version] = self._source.serve(self._sync.info(target.version))
        return self._servers[target.version]

    def _begin(self, works: Sequence[_Work], ended: Sequence[Settlement]) -> int:
        change = self.request.change
        asked = change.version.number if isinstance(change, Follow) and change.asked else None
        order = self._sync.write(
            opens=self._pending, settlements=[ended], adopted=asked, pushes=self._pushes(works)
        )
        if isinstance(self._pending, PendingRollback):
            self.request.restored = self._pending.version
        return order

    @staticmethod
    def _pushes(works: Iterable[_Work]) -> list[Push]:
        return [
            Push(work.worker.row, work.target.version, work.server.sent_digest)
            for work in works
            if work.server
        ]

    # ------------------------------------------------------------------ 3. the pushes leave

    def _send(self, works: Sequence[_Work], order: int) -> None:
        """Let all pushes leave; nobody is waited for."""
        # A worker that gives up says so while it is still listened to.
        patience = max(0.0, _WORKER_SHARE * (self._deadline - time.monotonic()))
        parcels: dict[tuple[int, bool], tuple[ServerWeights, messages.Push]] = {}
        for work in works:
            worker, server, bare = work.worker, work.server, work.action == "relabel"
            assert server is not None
            parcel = parcels.get((id(server), bare))
            if parcel is None:
                push = self._up._push_for(server, order, patience)
                sent = replace(server, push=push, handle=None if bare else server.handle)
                parcel = parcels[id(server), bare] = sent, push
            in_flight = self._table.sending(worker, parcel[1], pinned=work.target.pinned)
            try:
                in_flight.answer = self._up._sync_weights_with_worker(worker.id, parcel[0])
            except Exception as error:  # noqa: BLE001 - one worker's transport must not stop the others
                in_flight.answer = self._explain(worker, error)
        if works:
            log.debug("%d pushes left under order %d", len(works), order)

    # ------------------------------------------------------------------ 4. durable, or restored

    def _finish_head(self) -> None:
        """Do what need not be done before the pushes leave."""
        try:
            match self.request.change:
                case Publish() if isinstance(self._pending, PendingPublish):
                    self._pending.store()
                    # The bytes are in the file and with the transport: the next copy may have the buffer.
                    self._pending.draft.release()
                case Rollback() as change:
                    assert isinstance(self._pending, PendingRollback)
                    self._pending.end()
                    self._restore(self._pending.version, change.payload)
                case Follow() as change:
                    self._restore(change.version, change.payload)
        except Exception as error:  # noqa: BLE001 - raised once the receipts were taken
            self._failure = error

    def _restore(self, version: Version | None, payload: Payload | None) -> None:
        assert version is not None
        if isinstance(self.request.change, Follow):
            log.info("the server weights follow v%d of policy %r", version.number, version.policy)
        else:
            tell_rolled_back(version)
        self.request.restored = version
        try:
            if payload is None:
                self._live.goes_on_from(version)
            else:
                self._live.restore(version, payload)
        except Exception as error:
            which = "" if version.restores is None else f", which restores v{version.restores},"
            error.add_note(
                f"v{version.number}{which} is the head all the same; the server weights are not restored, which the "
                "next update tries again"
            )
            raise
        finally:
            # Whoever is called back may publish, which needs the memory.
            self._sync.reader.let_go()

    # ------------------------------------------------------------------ 5. receipts

    def _collect(self, *, closing: bool) -> None:
        """Record answers as they come, until all have answered or the time is over.

        Args:
            closing: whether the version becomes the head with the first transaction.
        """
        while self._outstanding or self._reviving or closing:
            left = self._deadline - time.monotonic()
            patience = left
            if closing:
                patience = min(patience, _GRACE)
            if self._reviving:
                patience = min(patience, _REVIVAL_POLL)
            answers = self._wait(max(0.0, patience))
            if not answers and left <= 0:
                silent = Trouble("silent", f"no answer within {self._up.timeout:g} s")
                answers = dict.fromkeys(self._outstanding, silent)
            self._take(answers, left, closing=closing)
            closing = False

    def _wait(self, patience: float) -> Mapping[int, Any]:
        if not self._outstanding:
            time.sleep(patience if self._reviving else 0.0)
            return {}
        # Those whose answer leads to another push are not made to wait for the slowest.
        eager = any(work.action in ("relabel", "wait") for work in self._outstanding.values())
        answers = {
            key: work.worker.in_flight.answer
            for key, work in self._outstanding.items()
            if work.worker.in_flight
        }
        return self._transport.collect(answers, patience, eager)

    def _explain(self, worker: WorkerState, error: BaseException) -> Trouble:
        known = None if worker.known is None else worker.known.incarnation
        return self._transport.explain(worker.handle, error, known)

    def _take(self, found: Mapping[int, Any], left: float, *, closing: bool) -> None:
        """Record a batch of answers, and send what they ask for."""
        answers: dict[int, Receipt | Trouble] = {
            key: answer
            if isinstance(answer, (Receipt, Trouble))
            else self._explain(self._outstanding[key].worker, answer)
            for key, answer in found.items()
        }
        self.request.answers.update(answers)
        earlier: list[Settlement] = []
        settlements: list[Settlement] = []
        again: list[_Work] = []
        jumps: list[Ahead] = []
        ahead = self._find_ahead(answers)
        for key, answer in answers.items():
            work = self._outstanding.pop(key)
            in_flight = work.worker.in_flight
            assert in_flight is not None
            reading = self._table.read(work.worker, answer)
            if key in ahead:
                reading = self._read_ahead(work, ahead[key], reading)
                if reading.resend:
                    jumps.append(ahead[key])
            settled = self._table.settle(work.worker, reading, answer)
            if settled:
                earlier.extend(reading.earlier)
                settlements += settled
            if self._goes_on(work, reading, answer, time.perf_counter() - in_flight.started):
                again.append(work)
        back, buried = self._revived(left)
        again += back
        settlements += buried
        if not (settlements or again or closing):
            return
        for work in again:
            work.server = self._server_for(work.target)
        closes = self._pending if closing and self._failure is None else None
        order = self._sync.write(
            settlements=[earlier, settlements], ahead=jumps, closes=closes, pushes=self._pushes(again)
        )
        if closing:
            self._end_publish()
        self._send(again, order)
        self._outstanding.update({work.worker.id: work for work in again})

    def _goes_on(self, work: _Work, reading: Reading, answer: Receipt | Trouble, seconds: float) -> bool:
        """Tell whether a worker is sent something again; if not, note what came of it."""
        worker = work.worker
        if isinstance(answer, Trouble) and answer.kind == "restarting":
            self._lose(work, answer)
            return False
        if reading.resend or self._must_reread(work, answer):
            work.action = "push"
            return True
        if work.action == "wait" and reading.status not in ("timeout", "dead"):
            if self._redecide(work):
                return True
            if self._holds_target(work) and reading.status == "synced":
                self._note(worker, work.target, "synced", work.remark, seconds)
            return False
        rejected = not worker.has_confirmed and is_rejection(answer)
        self._note(worker, work.target, reading.status, reading.error or work.remark, seconds, rejected)
        return False

    def _end_publish(self) -> None:
        """The version is the head now, or was lost; either way others may write again."""
        pending, self._pending = self._pending, None
        assert isinstance(pending, PendingPublish)
        if self._failure is not None:
            pending.fail(self._failure)
            return
        pending.end()
        self.published = True
        self._live.published(pending.info, live=self._publishes_live)
        tell_published(self._sync.policy, pending.number)

    def _find_ahead(self, answers: Mapping[int, Receipt | Trouble]) -> dict[int, Ahead]:
        """Find the workers that turned a push down for an order that this registry did not give them."""
        seen: dict[int, Ahead] = {}
        same_order: dict[int, Ahead] = {}
        for key, answer in answers.items():
            if isinstance(answer, Receipt) and answer.outcome == "stale" and answer.last is not None:
                worker, last = self._outstanding[key].worker, answer.last
                one = Ahead(worker.row, worker.name, last.order, last.run, last.registry)
                # The same order with other content is not the one on record either.
                (same_order if last.order == answer.order else seen)[key] = one
        if not seen:
            return same_order
        found = set(self._sync.find_ahead(seen.values()))
        return same_order | {key: one for key, one in seen.items() if one in found}

    def _read_ahead(self, work: _Work, ahead: Ahead, reading: Reading) -> Reading:
        """Go on beyond the order that a worker has seen, unless the run that gave it is alive."""
        who = f"run {ahead.run} of the registry at {ahead.registry}"
        if self._sync.is_steered(ahead):
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

    def _must_reread(self, work: _Work, answer: Receipt | Trouble) -> bool:
        """Forget bytes that the transport lost; tells whether they are to be sent once more, from the file."""
        if not isinstance(answer, Trouble) or answer.kind != "bytes_lost":
            return False
        server = work.server
        if server is not None:
            self._servers.pop(server.version, None)
            found = self._source.find(server.digest)
            if found is not None and found.handle is server.handle:
                self._table.spent += self._source.drop(server.digest)
        # While the version is being stored there is no file to read yet: the next update sends it.
        storing = isinstance(self._pending, PendingPublish) and self._pending.number == work.target.version
        again = not work.reread and not storing
        if again:
            log.info("the transport lost v%d; it is sent again from its file", work.target.version)
        work.reread = True
        return again

    # ------------------------------------------------------------------ workers that die and come back

    def _lose(self, work: _Work, trouble: Trouble) -> None:
        """A dead worker is reported; one that is being restarted is waited for, since it acts with initial weights."""
        status: Status = "failed" if trouble.kind == "doubtful" else "dead"
        self._note(work.worker, work.target, status, trouble.detail)
        if trouble.kind == "restarting":
            self._reviving[work.worker.id] = work
        work.action = "current"

    def _revived(self, left: float) -> tuple[list[_Work], list[Settlement]]:
        """Return the workers that are back, and the end of those that will not come back.

        Those that did not make it in time stay reported as dead, and unknown on record.
        """
        back: list[_Work] = []
        buried: list[Settlement] = []
        if not self._reviving:
            return back, buried
        found = self._transport.incarnations(
            {key: work.worker.handle for key, work in self._reviving.items()}
        )
        for key, work in list(self._reviving.items()):
            incarnation = found.get(key)
            if isinstance(incarnation, Trouble) and incarnation.kind != "restarting":
                buried += self._table.died(work.worker, incarnation)
                self._lose(work, incarnation)
                del self._reviving[key]
            elif isinstance(incarnation, str) and left > 0:
                log.info("worker %s is back", work.worker.name)
                del self._reviving[key]
                if self._redecide(work):
                    back.append(work)
        if left <= 0:
            self._reviving.clear()
        return back, buried

    def _bring_back(self, works: Sequence[_Work], heard: Mapping[int, Settlement]) -> None:
        """Send their target to workers that were thought to hold it, or something that would do, and do not."""
        if not heard:
            return
        again = []
        self._remark(works, heard)
        for work in works:
            if work.worker.id in heard and self._redecide(work):
                work.server = self._server_for(work.target)
                again.append(work)
        order = self._sync.write(settlements=[list(heard.values())], pushes=self._pushes(again))
        self._send(again, order)
        self._outstanding = {work.worker.id: work for work in again}
        self._collect(closing=False)

    @staticmethod
    def _remark(works: Iterable[_Work], heard: Mapping[int, Settlement]) -> None:
        for work in works if heard else ():
            if work.worker.id in heard:
                work.remark = f"{heard[work.worker.id].detail}; it was sent its weights again"

    # ------------------------------------------------------------------ the report

    @staticmethod
    def _holds_target(work: _Work) -> bool:
        known = work.worker.known
        return known is not None and known.version == work.target.version

    def _report_standing(self, works: Iterable[_Work]) -> None:
        """Add the workers that nothing was sent to."""
        refusals: list[Refusal] = []
        for work in works:
            worker = work.worker
            if worker.id in self._outcomes:
                continue
            if work.action == "skip":
                self._table.skipped(worker)
                self._note(worker, work.target, "skipped", "")
            elif work.action == "refuse":
                names = ", ".join(refused_tensors(work.target.nonfinite, self._up.allow_nonfinite))
                why = f"v{work.target.version} has NaN or infinity in {names}; allow_nonfinite= lets it pass"
                self._note(worker, work.target, "refused", why)
                refusals.append(Refusal(work.target.version, worker.name, why))
            else:
                self._table.stands(worker, pinned=work.target.pinned)
                self._note(worker, work.target, "current", "")
        self._sync.write(refusals=refusals)

    def _note(
        self,
        worker: WorkerState,
        target: Target | None,
        status: Status,
        error: str,
        seconds: float = 0.0,
        rejected_first: bool = False,
    ) -> None:
        self._outcomes[worker.id] = WorkerOutcome(
            name=worker.name,
            status=status,
            held=None if worker.known is None else worker.known.version,
            target=None if target is None else target.version,
            error=error,
            seconds=seconds,
            rejected_first=rejected_first,
        )

    def _report(self) -> SyncReport:
        shown = self._head if self.request.version is None else self.request.version
        change = self.request.change
        return SyncReport(
            version=None if shown is None else shown.number,
            workers={key: self._outcomes[key] for key in self.request.ids},
            published=self.published,
            adopted=isinstance(change, Follow),
        )


def _is_quiet(work: _Work) -> bool:
    """Tell whether nothing is sent to a worker."""
    return work.action in ("current", "skip", "refuse")

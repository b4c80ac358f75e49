"""`RemoteWeightUpdaterBase`: what every updater does, whatever carries its bytes.

A subclass gives four things: where the server weights come from, how they are mapped, how one worker is sent one push,
and which workers there are. It inherits versions, targets, the interval, intentions, receipts and reports.

Server weights are written in the caller's thread only, inside the calls made here, never behind its back.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

from sqlalchemy import Connection

from weightledger.registry import Registry, arguments, origins
from weightledger.registry.errors import ConflictError, InUseError, InvalidWeightsError
from weightledger.registry.log import fleet, lineage
from weightledger.registry.log.refs import Ref
from weightledger.registry.log.refs import parse as parse_ref
from weightledger.registry.records import Version
from weightledger.registry.store.publishing import Draft, Publication, check_step
from weightledger.registry.weights import codec
from weightledger.registry.weights.layout import Opening
from weightledger.registry.weights.payload import Payload, parse
from weightledger.registry.weights.restore import Plan, check_fit, copy_into, live_digest
from weightledger.registry.weights.reuse import Flattener
from weightledger.updater import claims
from weightledger.updater.asking import Asking
from weightledger.updater.background import UpdateFuture, fill
from weightledger.updater.checks import check_globs, check_interval, check_options, check_timeout
from weightledger.updater.plan import refused_tensors, within_interval
from weightledger.updater.probing import Probing
from weightledger.updater.push import Apply, Inspection, Locate, Probe, Push, Receipt, Series
from weightledger.updater.reading import Reader
from weightledger.updater.reports import Held, SyncReport
from weightledger.updater.seats import Seat, Seats, WorkerId, WorkerIds
from weightledger.updater.server import Mark, ServerWeights, Shelf, View, mark_of
from weightledger.updater.serving import HeadMovedError, Request, Restoration, Serving
from weightledger.updater.settling import Trouble, read_trouble
from weightledger.updater.starting import Origin, Start, check_start, unsaid
from weightledger.updater.update import Update

if TYPE_CHECKING:
    from weightledger.updater.metrics import Observer

_F = TypeVar("_F", bound=Callable[..., Any])


def no_op(hook: _F) -> _F:
    """Mark a `_maybe_map_weights` as changing nothing, so that no work is done to call it."""
    hook.__marked__ = hook  # type: ignore[attr-defined]
    return hook


def publishes(hook: _F) -> _F:
    """Mark a `_get_server_weights` that does nothing but publish: that finds a moved head by itself, under the lock."""
    hook.__marked__ = hook  # type: ignore[attr-defined]
    return hook


def _is_marked(hook: Any) -> bool:
    # A wrapper takes over what its function has, and an object may have a hook of its own.
    function = getattr(hook, "__func__", None)
    return function is not None and getattr(function, "__marked__", None) is function


def _frozen(globs: bool | Collection[str]) -> bool | tuple[str, ...]:
    return globs if isinstance(globs, bool) else tuple(globs)


class _CopiedError(BaseException):
    """Ends `_get_server_weights` once the copy is made. No `Exception`: a hook's own handlers must not catch it."""

    def __init__(self, draft: Draft | None) -> None:
        super().__init__("the weights are copied")
        self.draft = draft


def _release(request: Request, _: Future[SyncReport]) -> None:
    """Give the buffer of an update's copy back, however the update ended."""
    if request.draft is not None:
        request.draft.release()


class RemoteWeightUpdaterBase(ABC):
    """Brings workers to their target version and records what each one holds.

    Args:
        policy_weights: the live server weights: an `nn.Module`, TensorDict or mapping of tensors.
        registry: where versions are kept. Its policy is the series that the workers follow.
        max_interval: exactly so many consecutive `update_weights` calls that name a worker pass it by between two
            pushes; 0 for none.
        locate: where the policy is in a worker: a dotted attribute, or a callable that is given the worker.
        apply: `apply(worker, weights, version)`, for workers that load weights in their own way; or
            `"load_state_dict"`, for modules that do, by their method of that name. By default they are copied in place.
        timeout: seconds that one call waits for workers, all of them together.
        cast: let workers convert to their own dtype; what was converted is recorded, and what that does not hold is
            refused.
        allow_nonfinite: send versions with NaN or infinity, and let `cast` make infinity; True, or globs of the tensor
            names that may hold them.
        extra: called at every publish; the mapping it returns is stored with the version (optimizer, counters).
        on_rollback: called with the version after the server weights were restored to it.
        ignore: globs of the names of tensors that the workers' own code writes: like buffers, they are no drift.
        start: how the training begins on a policy that has versions. `"head"` restores the server weights to the head
            and calls `on_rollback` at once, `"new"` begins a new line and abandons what was before, `"continue"` says
            that the server weights were restored already. On an empty policy all are the same, so that a script that
            can be resumed says `"head"` from its first run on. None is enough where it is plain: on an empty policy,
            while the content is the head's, or when this process published or restored the head from this very
            object; else the first publish is a `ConflictError`.
    """

    begins_at_once: ClassVar[bool] = True
    """Whether `start` is looked at when the updater is made. Where workers come later it is with the first call: their
    names are claimed before the server weights are touched."""
    tells_if_stuck: ClassVar[bool] = True
    """Whether a warning tells that content stays what it is although the step advances."""

    def __init__(
        self,
        policy_weights: Any,
        *,
        registry: Registry,
        max_interval: int = 0,
        locate: Locate = "policy",
        apply: Apply | None = None,
        timeout: float = 60.0,
        cast: bool = False,
        allow_nonfinite: bool | Collection[str] = False,
        extra: Callable[[], Any] | None = None,
        on_rollback: Callable[[Version], object] | None = None,
        ignore: Collection[str] = (),
        start: Start | None = None,
    ) -> None:
        check_options(
            registry=registry,
            locate=locate,
            allow_nonfinite=allow_nonfinite,
            apply=apply,
            callables={"extra": extra, "on_rollback": on_rollback},
        )
        max_interval, timeout = check_interval(max_interval), check_timeout(timeout)
        cast = arguments.flag("cast", cast)
        self.policy_weights = policy_weights
        self.registry = registry
        self.max_interval = max_interval
        self.locate = locate
        self.apply = apply
        self.timeout = timeout
        self.cast = cast
        self.allow_nonfinite = allow_nonfinite
        self.extra = extra
        self.on_rollback = on_rollback
        self.ignore = check_globs("ignore", ignore)
        self.last_report: SyncReport | None = None
        """The report of the last update that ended."""
        self.seats = Seats()
        self.shelf = Shelf()
        self.head: Mark | None = None
        """The head as this updater knows it, which the server weights were trained from if `_origin` says so."""
        self._start = check_start(start)
        self._origin: Origin | None = None
        """None until somebody has to know; then what `start` says, or what is plain."""
        self._marks: dict[int, Mark] = {}
        self._flattener = Flattener()
        self._plans: dict[int, Plan] = {}
        self._opening: Opening | None = None
        """How the bytes began that were parsed last."""
        self._ranges: tuple[tuple[int, int], ...] | None = None
        self.asking = Asking(self)
        self.reader = Reader(registry)
        self._caller = self.reader.calls
        self._running = threading.RLock()
        self._current: Update | None = None
        self._copying: Request | None = None
        self._background: ThreadPoolExecutor | None = None
        self._futures: list[Future[SyncReport]] = []
        self._spent: list[Any] = []
        """What the transport gave and nobody needs any more. It is let go in the caller's thread: a reference of Ray's
        that another thread drops while Ray is being shut down ends the process."""
        self._collector: weakref.ref[Any] | None = None
        self._observer: Observer | None = None
        self._closed = False
        registry.runs.keep_alive()
        self._see_head()

    @property
    def series(self) -> Series:
        """The registry's UUID and the policy: what workers know of each is kept apart."""
        return self.registry.uuid, self.registry.policy

    # ------------------------------------------------------------------ what a subclass gives

    @abstractmethod
    def _get_server_weights(self) -> ServerWeights:
        """Publish the server weights if they changed, and return the record of the version that workers follow.

        `return self._publish(weights)` does that. With `wait=False` it is called twice: in the caller's thread as far
        as the copy that `_publish` makes, and in the background for the rest.
        """

    @abstractmethod
    def _maybe_map_weights(self, weights: Any) -> Any:
        """Return what is sent, given the weights about to be sent, in the kind in which they were published.

        The version stays unmapped, so that a rollback can restore the learner. Mark an override that changes nothing
        with `no_op`.
        """

    @abstractmethod
    def _sync_weights_with_worker(self, worker_id: int, server_weights: ServerWeights) -> Any:
        """Start one push and return its receipt, or something that will be it (a future, an `ObjectRef`).

        In the worker `receiver.receive(worker, server_weights.push, server_weights.handle)` is called: the instruction,
        and the bytes, or None when there are none to send. To be called from outside as well, with what
        `_get_server_weights` returns, it begins with

            if is_from_outside(server_weights):
                return self._push_alone(worker_id, server_weights)
        """

    @abstractmethod
    def all_worker_ids(self) -> list[int]:
        """Return the ids of all workers, in the order in which they were added.

        Those that `add_worker` has not named are steered from the next call on, as `collector-<id>`.
        """

    # ------------------------------------------------------------------ what a subclass may give

    def _skip_update(self, worker_id: int) -> bool:
        """Tell whether the interval passes this worker by in this call. Asked only where it may."""
        return within_interval(self.seats.get(worker_id).passed_by, self.max_interval)

    def _distribute(self, payload: Payload) -> Any:
        """Turn bytes into what `_sync_weights_with_worker` gets as `handle`. Called once a version."""
        return payload.buffer.copy()

    def _fetch(self, handle: Any) -> Any:
        """Turn a handle back into its bytes, as one uint8 array; None when they are lost."""
        return handle

    def _collect(self, handles: Mapping[int, Any], timeout: float, eager: bool) -> dict[int, Any]:
        """Wait for answers: receipts or exceptions by worker id; those that did not come in time are left out.

        Args:
            eager: return as soon as there is one.
        """
        at_hand = (Receipt, Inspection, Trouble, BaseException)
        done: dict[int, Any] = {key: handle for key, handle in handles.items() if isinstance(handle, at_hand)}
        futures = {key: handle for key, handle in handles.items() if isinstance(handle, Future)}
        if futures:
            mode = "FIRST_COMPLETED" if eager else "ALL_COMPLETED"
            wait(futures.values(), timeout=0 if done and eager else timeout, return_when=mode)
            for key, future in futures.items():
                if future.done():
                    done[key] = future.exception() or future.result()
        return done

    def _ask(self, worker_id: int, question: Probe) -> Any:
        """Start asking a worker whether its weights are still what was written, and return what will be the answer.

        In the worker `receiver.receive(worker, question)` is called. None where a transport does not ask: then only
        `probe` tells of weights that the worker's own code wrote over.
        """
        return None

    def _explain(self, seat: Seat, error: BaseException) -> Trouble:
        """Tell what an exception in place of a receipt means for the worker."""
        return Trouble("failed", f"{type(error).__name__}: {error}")

    def _find_lives(self, seats: Sequence[Seat]) -> dict[int, str | Trouble]:
        """Return the incarnation of each worker, or that it is dead, without waiting for busy ones.

        Workers of which nothing can be told are left out.
        """
        return {}

    # ------------------------------------------------------------------ updating

    def update_weights(
        self,
        weights: Any = None,
        worker_ids: WorkerIds | None = None,
        *,
        wait: bool = True,
        force: bool = False,
        step: int | None = None,
        metrics: Mapping[str, Any] | None = None,
        metadata: Mapping[str, Any] | None = None,
        message: str = "",
        restructure: bool = False,
    ) -> Any:
        """Publish the server weights if they changed, and bring workers to their targets.

        After a rollback made elsewhere the server weights are restored instead of published, `on_rollback` is called,
        and the report says `adopted`.

        Args:
            weights: publish these instead; the live ones are untouched.
            worker_ids: only these workers; by default all.
            wait: False returns a `Future[SyncReport]` as soon as the weights are copied.
            force: pass nobody by, and send the bytes even to workers that hold them by their receipt.
            step: as in `Registry.publish`, for the version that is published; so are `metrics`, `metadata`, `message`.
                When the content is the head's, none is published and these are not kept (`report.published` tells);
                `Registry.record_metrics` adds numbers to a version that exists.
            restructure: publish names and shapes that are not the head's, of a model that grew.

        Returns:
            A `SyncReport`, or a future of it. One bad worker stops nobody and raises nothing.

        Raises:
            ConflictError: another run published, or nobody said that this training goes on from the head (`start`).
                Nothing was changed; `adopt()` is the way out.
            InvalidWeightsError: the weights cannot be stored, or have other names or shapes than the head. Nothing was
                changed.
            NotFoundError: no worker has such an id.
        """
        with self._caller:
            self._check_open()
            wait, force = arguments.flag("wait", wait), arguments.flag("force", force)
            request = Request(
                ids=self._ids(worker_ids),
                publish=True,
                weights=weights,
                forced=force or weights is not None,
                resend=force,
                restructure=restructure,
                about={
                    "step": check_step(step),
                    "metrics": metrics,
                    "metadata": metadata,
                    "message": message,
                },
            )
            if wait and self._only_publishes:
                self._begin_training()
                self._drain()
                return self._run_on_head(request)
            # Before any hook is called: one that does not publish would not meet the head, and a copy that is made now
            # is published later.
            self._follow_head(request)
            if wait:
                self._drain()
                return self._run_on_head(request)
            if request.publish:
                self._copy_now(request)
            return self._run_later(request)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Do what `update_weights` does.

        Raises:
            TypeError: TorchRL calls it, to get an updater of its own kind.
        """
        # TorchRL takes whatever is no updater of its own for a function that makes one.
        if str(sys._getframe(1).f_globals.get("__name__")).startswith("torchrl."):
            raise TypeError(
                f"TorchRL cannot use a {type(self).__name__} as its weight_updater=: it passes actors and weights in "
                "its own way; use weightledger.updater.torchrl.RayCollectorWeightUpdater"
            )
        return self.update_weights(*arguments, **options)

    def sync(self, worker_ids: WorkerIds | None = None, version: Ref | None = None) -> SyncReport:
        """Bring workers to their targets, publishing nothing.

        Args:
            worker_ids: only these workers; by default all.
            version: bring them to this version once; their targets stay what they are.

        Raises:
            NotFoundError: no such worker, or no such version, or its weights were pruned.
            ConflictError: as in `update_weights`.
        """
        with self._caller:
            self._check_open()
            request = Request(ids=self._ids(worker_ids), forced=True)
            if version is not None:
                wanted = parse_ref(version)
                with self.registry.ledger.reading() as conn:
                    request.version = mark_of(self.registry.ledger.usable(conn, wanted, "sync workers to"))
            self._follow_head(request)
            self._drain()
            return self._run_here(request)

    def rollback(self, to: Ref | None = None, reason: str = "") -> SyncReport:
        """Go back to an older version: a new version in the log, the server weights in place, every unpinned worker.

        The server weights are restored while workers pull; `on_rollback` is called at the end.

        Args:
            to: as in `Registry.rollback`.
            reason: for the log.

        Raises:
            NotFoundError: there is no such version, or nothing to go back to. Nothing was changed.
            InvalidWeightsError: the server weights do not fit that version. Nothing was changed.
            ConflictError: another run published. Nothing was changed.
        """
        with self._caller:
            self._check_open()
            meant = None if to is None else parse_ref(to)
            arguments.text("reason", reason)
            self._drain()
            self._follow_head(Request(ids=()))
            ledger = self.registry.ledger
            with ledger.reading() as conn:
                wanted = (
                    ledger.previous_content(conn)
                    if meant is None
                    else ledger.usable(conn, meant, "roll back to")
                )
            payload = self._payload_of(wanted)
            self._check_accepts(wanted, payload)
            restoration = Restoration(wanted, payload, reason)
            try:
                return self._run_here(Request(ids=self._ids(None), forced=True, restoration=restoration))
            finally:
                # Whatever ended it: who gave the weights back gives the rest back, too.
                if restoration.version is not None:
                    self._tell_if_restored(restoration.version)

    def pin(self, worker_id: WorkerId, ref: Ref, reason: str = "") -> SyncReport:
        """Hold a worker at a version or alias, in the registry, and bring it there.

        Raises:
            NotFoundError: no such worker or version.
            ConflictError: as in `update_weights`.
        """
        with self._caller:
            self._check_open()
            (key,) = self._ids(worker_id)
            seat = self.seats.get(key)
            # First, so that a head that cannot be followed leaves no pin behind.
            self._follow_head(Request(ids=()))
            self.registry.pin(seat.name, ref, reason=reason, literal=True)
            return self.sync(seat.id)

    def unpin(self, worker_id: WorkerId) -> SyncReport:
        """Let a worker follow the head again, and bring it there.

        Raises:
            NotFoundError: no such worker, or no pin on exactly its name.
            ConflictError: as in `update_weights`.
        """
        with self._caller:
            self._check_open()
            (key,) = self._ids(worker_id)
            seat = self.seats.get(key)
            self._follow_head(Request(ids=()))
            self.registry.unpin(seat.name)
            return self.sync(seat.id)

    def probe(self, ignore: Collection[str] = ()) -> dict[int, Held]:
        """Ask each worker what it holds, hash the weights that really are in its module, compare them with the version.

        What is found is recorded: it settles pushes that were never answered, and drift (weights that somebody changed
        in place) ends the holding, is an event, and makes the next update send the bytes again. Buffers, which a
        module's own forward may write, are no drift; `Held.buffers` names those that differ.

        Args:
            ignore: globs of the names of other tensors that the workers' own code writes, beside the updater's own.

        Raises:
            TypeError: `ignore` is no list of globs.
        """
        with self._caller:
            self._check_open()
            self._seat_all()
            self._drain()
            with self._running:
                return Probing(self, (*self.ignore, *check_globs("ignore", ignore))).run()

    def adopt(self) -> Version:
        """Take over the head: the server weights are restored to it, `on_rollback` is called.

        So a training goes on after another run published, or from what an earlier one left.

        Returns:
            The version that the server weights hold now.

        Raises:
            InvalidWeightsError: they do not fit, or the head has NaN or infinity that is not allowed. Nothing was
                changed.
            NotFoundError: nothing was published yet.
        """
        with self._caller:
            self._check_open()
            self._drain()
            head = self.registry.head()
            bad = refused_tensors(head.nonfinite, self.allow_nonfinite)
            if bad:
                raise InvalidWeightsError(
                    f"the server weights were not restored to v{head.number}, the head of policy {head.policy!r}: it "
                    f"has NaN or infinity in {', '.join(bad)}. Nothing was changed; registry.rollback() goes back to "
                    "a finite version, allow_nonfinite= lets it pass"
                )
            payload = self._payload_of(head)
            # Fits or raises before the journal says anything.
            self._check_accepts(head, payload)
            with self.registry.ledger.writing() as conn:
                self.registry.ledger.event(conn, "adopt", version=head.number)
            self._take_over(head, payload)
            return head

    def close(self) -> None:
        """Wait for what is in flight and let go of the workers. Closing twice is harmless."""
        with self._caller:
            if self._closed:
                return
            self._drain()
            self._closed = True
            if self._background is not None:
                self._background.shutdown()
            claims.release(self.series, [self._worker_of(seat.handle, seat.name) for seat in self.seats])
            self.shelf.keep(())
            self._forget_workers("its updater was closed")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        head = "no version" if self.head is None else f"v{self.head.number}"
        return f"<{type(self).__name__} policy={self.registry.policy!r} {head}, {len(self.seats)} workers>"

    # ------------------------------------------------------------------ workers

    def register_collector(self, collector: Any) -> None:
        """Remember the collector that this updater belongs to, once; only a weak reference is kept.

        Raises:
            InUseError: there is one already.
        """
        if self._collector is not None and self._collector() is not collector:
            raise InUseError(
                f"this updater is registered with {self._collector()!r} already; "
                f"give {arguments.shown(collector)} an updater of its own"
            )
        self._collector = weakref.ref(collector)

    @property
    def collector(self) -> Any:
        """The registered collector; None when there is none, or it is gone."""
        return None if self._collector is None else self._collector()

    def add_worker(self, handle: Any, name: str | None = None) -> int:
        """Steer one more worker, and bring it to its target at once if there is a version.

        Args:
            handle: what stands for the worker; it is only kept.
            name: its lasting name in the registry; by default `collector-<id>`. The name of a dead worker is free.

        Returns:
            Its id; what the first sync did to it is in `last_report`.

        Raises:
            InUseError: its name is taken by a live worker.
            ConflictError: as in `update_weights`; it is not steered then.
        """
        return self._join(handle, f"collector-{self.seats.next_id()}" if name is None else name)

    def _add_workers(
        self, handles: Sequence[Any], names: Sequence[str], *, worker_id: int | None = None
    ) -> list[int]:
        """Steer more workers: claim their names in the registry, and take over what is known of them.

        Args:
            worker_id: the id of a single one that has an id already.
        """
        self._free(names)
        self.seats.check_names(names)
        workers = [self._worker_of(handle, name) for handle, name in zip(handles, names, strict=True)]
        claims.reserve(self, self.series, workers)
        try:
            ledger = self.registry.ledger
            with ledger.writing() as conn:
                found = fleet.claim(ledger, conn, names, self.registry.runs.alive)
        except BaseException:
            claims.release(self.series, workers)
            raise
        added = []
        for handle, claim in zip(handles, found, strict=True):
            seat = self.seats.add(claim.name, handle, claim.id, worker_id)
            # What an earlier run recorded is checked against the next receipt, not believed.
            seat.open_held, seat.open_pending = claim.held, claim.pending
            added.append(seat.id)
        return added

    def _free(self, names: Collection[str]) -> None:
        """Take names from workers that are dead: whoever comes in such a worker's place may bear its name."""
        seats = [seat for seat in self.seats if seat.name in names]
        if not seats:
            return
        self._drain()
        lives = self._find_lives(seats)
        ended = []
        for seat in seats:
            life = lives.get(seat.id)
            if isinstance(life, Trouble) and life.kind == "dead":
                if not seat.gone:
                    ended.append(read_trouble(seat, None, life).settlement)
                self._let_go(seat)
        with self.registry.ledger.writing() as conn:
            fleet.settle(self.registry.ledger, conn, ended)

    def _let_go(self, seat: Seat) -> None:
        self.seats.remove(seat.id)
        claims.release(self.series, [self._worker_of(seat.handle, seat.name)])

    def _worker_of(self, handle: Any, name: str) -> tuple[str, Any]:
        return name, self._identity(handle)

    def _identity(self, handle: Any) -> Any:
        """Return what tells a worker from all others, whatever it is called."""
        return id(handle)

    def _join(self, handle: Any, name: str) -> int:
        """Steer one more worker, and bring it to its target at once."""
        with self._caller:
            self._check_open()
            # First, so that a head that cannot be followed leaves nothing half-added.
            self._follow_head(Request(ids=()))
            (worker_id,) = self._add_workers([handle], [name])
            if self.head is not None:
                self.sync(worker_id)
            return worker_id

    def remove_worker(self, worker_id: WorkerId) -> None:
        """Stop steering a worker; its holding ends as `removed`. Ids of others stay what they are.

        Raises:
            NotFoundError: no worker has that id.
        """
        with self._caller:
            # A closed updater has let go: the worker's record may be another one's by now.
            self._check_open()
            self._drain()
            seat = self.seats.get(worker_id)
            self._let_go(seat)
            settlement = fleet.Settlement(seat.row, seat.name, "removed", detail="removed from its updater")
            with self.registry.ledger.writing() as conn:
                fleet.settle(self.registry.ledger, conn, [settlement])

    def _disbelieve(self, seats: Sequence[Seat], why: str) -> None:
        """End what workers hold on record, as somebody else wrote into them: the next update sends them the bytes."""
        self._drain()
        ended = []
        for seat in seats:
            # A push that is still on its way may have come before the writing or after it.
            if seat.flight is not None:
                version = seat.flight.push.version
                ended.append(fleet.Settlement(seat.row, seat.name, "unknown", version=version, detail=why))
            elif seat.known is not None:
                version = seat.known.version
                ended.append(fleet.Settlement(seat.row, seat.name, "drifted", version=version, detail=why))
            seat.known = seat.open_held = seat.flight = None
        with self.registry.ledger.writing() as conn:
            fleet.settle(self.registry.ledger, conn, ended)

    def _forget_workers(self, why: str) -> None:
        rows = [seat.row for seat in self.seats if not seat.gone]
        with self.registry.ledger.writing() as conn:
            fleet.leave(conn, rows, why)

    def _seat_all(self) -> list[int]:
        """Return the ids of all workers, and steer those that only the subclass knows of so far."""
        ids = list(self.all_worker_ids())
        for key in ids:
            if key not in self.seats:
                arguments.integer("a worker id", key)
                self._add_workers([object()], [f"collector-{key}"], worker_id=key)
        return ids

    def _ids(self, worker_ids: WorkerIds | None) -> list[int]:
        every = self._seat_all()
        if worker_ids is None:
            return every
        named: Any = worker_ids
        # A number is also a NumPy integer or a tensor without dimensions, both of which have an iterator's name.
        if (
            isinstance(named, (str, bytes))
            or not isinstance(named, Iterable)
            or getattr(named, "ndim", None) == 0
        ):
            named = [named]
        return list(dict.fromkeys(self.seats.get(key).id for key in named))

    # ------------------------------------------------------------------ following the head

    def _begin_or_close(self) -> None:
        """Look at `start`, now that the first workers are named; an updater that cannot begin lets go of them."""
        if self.begins_at_once:
            try:
                with self._caller:
                    self._begin_training()
            except BaseException:
                self.close()
                raise

    def _begin_training(self) -> None:
        """Find out, once, what the server weights go on from; `start="head"` restores them."""
        if self._origin is not None:
            return
        self._see_head()
        if self.head is None or self._start == "continue":
            self._origin = "head"
        elif self._start == "new":
            self._origin = "line"
        elif self._start == "head":
            self.adopt()
        else:
            self._origin = "head" if self._went_on_from(self.head) else "unknown"

    def _see_head(self) -> None:
        with self.registry.ledger.reading() as conn:
            number = self.registry.ledger.head_number(conn)
            self.head = None if number is None else self._mark(conn, number)

    def _went_on_from(self, head: Mark) -> bool:
        """Tell whether the server weights are the head's, or were when this process last saw them."""
        known = origins.find(self.series, self._anchor())
        if known is not None and (known.number, known.digest) == (head.number, head.digest):
            return True
        try:
            return live_digest(self.policy_weights)[0] == head.digest
        except InvalidWeightsError:
            # They cannot be published either, which tells why.
            return False

    def _check_origin(self, weights: Any) -> None:
        """Refuse to publish weights of which nobody knows what they go on from, unless they are the head's."""
        if self._origin != "unknown" or self.head is None:
            return
        if live_digest(weights)[0] != self.head.digest:
            raise unsaid(self.registry.policy, self.head.number)
        if weights is self.policy_weights:
            self._origin = "head"

    @property
    def begins_line(self) -> bool:
        """Whether the next version that is published begins a new line."""
        return self._origin == "line"

    def _follow_head(self, request: Request) -> None:
        """Take over what moved the head since the last look, or refuse to go on.

        Runs in the caller's thread, before anything is copied or published.
        """
        self._begin_training()
        ledger = self.registry.ledger
        with ledger.reading() as conn:
            number = ledger.head_number(conn)
            if number != (None if self.head is None else self.head.number):
                since = 0 if self.head is None else self.head.number
                moves = ledger.since(conn, since)
                newest = ledger.version(conn, number) if number is not None else None
                run = self.registry.runs.current().id
                foreign = [move for move in moves if move.restores is None and move.run != run]
                # Weights that go on from nothing in the log have no part in what happens there.
                if foreign and self._origin != "unknown":
                    raise ConflictError(
                        f"run {foreign[-1].run} published v{foreign[-1].number} of policy {ledger.policy!r} while this "
                        f"updater was at v{since}; nothing was changed. adopt() takes over the head, which is "
                        f"v{number}; to train on from v{since}, registry.rollback({since}) first"
                    )
            else:
                newest = None
        if newest is not None and newest.restores is not None and self._origin == "head":
            self._drain()
            payload = self._payload_of(newest)
            self._check_accepts(newest, payload)
            if request.ids:
                # For the workers, before its memory is wanted for something else.
                with ExitStack() as stack:
                    Serving(self, request, stack).serve(mark_of(newest))
            self._take_over(newest, payload)
            request.publish, request.forced, request.adopted = False, True, True
        elif newest is not None:
            self._believe(newest)

    def _payload_of(self, version: Version) -> Payload:
        """Return a version's bytes: those handed out already, else read from its file and verified."""
        found = self.shelf.find(version.digest)
        if found is not None and found.sent_digest == version.digest:
            buffer = self._fetch(found.handle)
            if buffer is not None:
                payload = parse(
                    buffer, f"v{version.number} of policy {version.policy!r}", known=self._opening
                )
                self._opening = payload.opening
                return payload
            self.shelf.drop(version.digest)
        return self.reader.read(version.number, version.digest)[0]

    def _take_over(self, version: Version, payload: Payload) -> None:
        """Follow a version that somebody else made the head."""
        try:
            self._restore(version, payload)
        finally:
            # The callback may publish, which needs the memory.
            self.reader.let_go()
            self._tell_if_restored(version)

    def _check_accepts(self, version: Version, payload: Payload) -> None:
        """Make sure that the server weights take a version, before anything is changed.

        Raises:
            InvalidWeightsError: they do not fit.
        """
        check_fit(payload, self.policy_weights, plans=self._own_plans())

    def _restore(self, version: Version, payload: Payload) -> None:
        """Restore the server weights to the head; training goes on from there."""
        self._restore_server(version, payload)
        self._origin = "head"
        if self.head is not None:
            # Equal content is what was asked for, whatever the step.
            self.head = replace(self.head, step=None)
        self._note_origin(version.number, version.digest)

    def _anchor(self) -> object:
        """Return the object that tells these server weights from all others of this process."""
        return self.policy_weights

    def _note_origin(self, number: int, digest: str) -> None:
        origins.note(self.series, origins.Origin(number, digest), self._anchor())

    def _restore_server(self, version: Version, payload: Payload) -> None:
        """Restore the server weights to a rollback's version."""
        copy_into(payload, self.policy_weights, plans=self._own_plans())
        self._believe(version)

    def _tell_if_restored(self, version: Version) -> None:
        restored = self.head is not None and self.head.number == version.number
        if restored and self.on_rollback is not None:
            self.on_rollback(version)

    def _own_plans(self) -> dict[int, Plan]:
        """Return the checks that were made for the server weights; those of others would keep them alive."""
        if id(self.policy_weights) not in self._plans:
            self._plans.clear()
        return self._plans

    def _believe(self, version: Version) -> None:
        self.head = self._marks[version.number] = mark_of(version)
        known, self._ranges = self._ranges, None
        if known is not None and version.restores is not None:
            self._ranges = lineage.after_rollback(known, version.number, version.restores)

    def _saw_own(self, publication: Publication, *, live: bool) -> None:
        """Note that an update of this updater became the head.

        Args:
            live: whether it published the live server weights.
        """
        mark = Mark(publication.number, publication.digest, publication.nonfinite, publication.draft.step)
        self.head = self._marks[mark.number] = mark
        # A publish extends the newest stretch of the lineage, or begins one.
        if publication.begins_line:
            self._ranges = ((mark.number, mark.number),)
        elif self._ranges:
            self._ranges = ((self._ranges[0][0], mark.number), *self._ranges[1:])
        else:
            self._ranges = None
        self._origin = "head"
        if live:
            self._note_origin(mark.number, mark.digest)

    def _mark(self, conn: Connection, number: int) -> Mark:
        if number not in self._marks:
            self._marks[number] = mark_of(self.registry.ledger.version(conn, number))
        return self._marks[number]

    def _look(self, conn: Connection, *, pinned: bool = True) -> View:
        pins = self.registry.ledger.pins(conn) if pinned else []
        marks = {number: self._mark(conn, number) for number in {pin.version for pin in pins}}
        return View(pins, marks, self._lineage(conn))

    def _lineage(self, conn: Connection) -> tuple[tuple[int, int], ...]:
        if self._ranges is None:
            self._ranges = self.registry.ledger.lineage_of_head(conn)
        return self._ranges

    # ------------------------------------------------------------------ running updates

    @property
    def maps_weights(self) -> bool:
        """Whether `_maybe_map_weights` does anything."""
        return not _is_marked(self._maybe_map_weights)

    @property
    def _only_publishes(self) -> bool:
        return _is_marked(self._get_server_weights)

    def _publish(self, weights: Any) -> ServerWeights:
        """Publish weights if their content changed; for `_get_server_weights`.

        Outside of an update it waits until they are durable.
        """
        if self._current is not None and self._running_here():
            return self._current.publish(self._chosen(self._current.request, weights))
        with self._caller:
            self._check_open()
            if self._copying is not None:
                raise _CopiedError(self._draft(self._chosen(self._copying, weights), self._copying.about))
            request = Request(ids=())
            self._follow_head(request)
            self._drain()
            with self._running:
                update = Update(self, request)
                return update.run_publish(weights)

    def _chosen(self, request: Request, weights: Any) -> Any:
        """Return what an update publishes: the weights that its caller gave, else those of the hook."""
        return weights if request.weights is None else request.weights

    def _copy_now(self, request: Request) -> None:
        """Let `_get_server_weights` come as far as its copy, in the caller's thread; it is called again to go on."""
        self._copying = request
        try:
            self._get_server_weights()
        except _CopiedError as copied:
            request.draft = copied.draft
            request.publish = copied.draft is not None
        finally:
            self._copying = None

    def _draft(self, weights: Any, about: Mapping[str, Any]) -> Draft | None:
        """Copy weights, or tell that they are the head's."""
        publisher = self.registry.publisher
        # What a rollback was restored from may lie where the copy is to be made.
        self.reader.let_go()
        # Only the live weights are remembered: others would be kept alive by that.
        live = weights is self.policy_weights
        content = self._flattener.flatten(weights) if live else codec.flatten(weights)
        self._check_origin(weights)
        if self.head is not None and not self.begins_line and publisher.holds(content, self.head.digest):
            return None
        extra = None if self.extra is None else self.extra()
        return publisher.draft(weights, content=content, extra=extra, **about)

    def _run(self, request: Request) -> SyncReport:
        with self._running:
            began = time.perf_counter()
            update = Update(self, request)
            self._current = update
            try:
                report = update.run()
            finally:
                self._current = None
                self.reader.let_go()
            self.last_report = report
            if update.kept is not None and self.tells_if_stuck:
                head, step = update.kept, request.about.get("step")
                self.registry.publisher.warn_if_stuck(head.number, head.digest, head.step, step, stacklevel=5)
            if self._observer is not None:
                self._observer.observe(self, report, time.perf_counter() - began)
            return report

    def _run_on_head(self, request: Request) -> SyncReport:
        """Run an update; a rollback that came between the look at the head and the lock is taken over, too."""
        while True:
            try:
                return self._run_here(request)
            except HeadMovedError:
                self._follow_head(request)

    def _run_here(self, request: Request) -> SyncReport:
        try:
            return self._run(request)
        finally:
            self._spent.clear()

    def _push_alone(self, worker_id: int, weights: Any) -> Receipt:
        """Bring one worker to weights, whatever its target is, and return its receipt.

        Args:
            weights: what `_get_server_weights` returned; or other weights, which are published then.

        Raises:
            SyncError: it did not confirm them.
        """
        with self._caller:
            self._check_open()
            request = Request(ids=self._ids(worker_id), forced=True, resend=True)
            if isinstance(weights, ServerWeights):
                request.version = weights.mark
            else:
                request.publish, request.weights = True, weights
            self._follow_head(request)
            self._drain()
            self._run_on_head(request).raise_for_failures()
            (answer,) = request.answers.values()
            assert isinstance(answer, Receipt)
            return answer

    def _running_here(self) -> bool:
        return self._running._is_owned()  # type: ignore[attr-defined,no-any-return]

    def _run_later(self, request: Request) -> Future[SyncReport]:
        if self._background is None:
            self._background = ThreadPoolExecutor(1, thread_name_prefix="weightledger-update")
        self._futures = [future for future in self._futures if not future.done()]
        self.reader.let_go()
        future = UpdateFuture()
        future.add_done_callback(functools.partial(_release, request))
        self._background.submit(fill, future, functools.partial(self._run, request))
        self._futures.append(future)
        return future

    def _drain(self) -> None:
        """Wait for updates that run in the background; their errors belong to their futures."""
        wait(self._futures)
        self._futures.clear()
        self._spent.clear()

    def _check_open(self) -> None:
        if self._closed:
            raise InUseError(f"{self!r} is closed; make a new updater on the same registry")

    def _push_for(self, server: ServerWeights, order: int, patience: float) -> Push:
        return Push(
            series=self.series,
            run=self.registry.runs.current().id,
            version=server.version,
            digest=server.digest,
            sent_digest=server.sent_digest,
            order=order,
            nbytes=server.nbytes,
            locate=self.locate,
            apply=self.apply,
            structure=server.structure if callable(self.apply) else None,
            cast=self.cast,
            allow_nonfinite=_frozen(self.allow_nonfinite),
            patience=patience,
            registry=str(self.registry.location),
            ignore=self.ignore,
        )

    def _tidy(self, wanted: Collection[str]) -> None:
        """Let go of bytes that no worker needs any more."""
        self._spent += self.shelf.keep(wanted)
        if len(self._marks) > 4 * (len(wanted) + len(self.seats) + 16):
            self._marks.clear()

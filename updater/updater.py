"""The updater: publishes server weights, and brings workers to their target version on their own receipts.

Server weights are written in the caller's thread only, inside the calls made here, never behind its back.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, overload

from weightledger.registry import Registry, arguments
from weightledger.registry.errors import ConflictError, InUseError, InvalidWeightsError
from weightledger.registry.logs import log
from weightledger.registry.records import Version
from weightledger.registry.sync import Draft, HeadState, Ref, Sync, VersionInfo, check_step
from weightledger.updater.asking import Asking
from weightledger.updater.background import Background, ended
from weightledger.updater.checks import check_globs, check_interval, check_options, check_timeout
from weightledger.updater.cycle import Cycle, Follow, HeadMovedError, Publish, Request, Rollback
from weightledger.updater.live import LiveWeights
from weightledger.updater.membership import Membership
from weightledger.updater.messages import (
    Apply,
    Locate,
    Probe,
    Push,
    Receipt,
    Series,
    ServerWeights,
    is_from_outside,
)
from weightledger.updater.probing import Probing
from weightledger.updater.reports import Held, SyncReport
from weightledger.updater.source import Source
from weightledger.updater.starting import Start, check_start
from weightledger.updater.transports.local import LocalTransport
from weightledger.updater.transports.protocol import Transport
from weightledger.updater.workers.deciding import refused_tensors, within_interval
from weightledger.updater.workers.state import WorkerId, WorkerIds, WorkerState
from weightledger.updater.workers.table import WorkerTable

if TYPE_CHECKING:
    from weightledger.updater.metrics import Observer


class Updater:
    """Brings workers to their target version and records what each one holds.

    Args:
        policy_weights: the live server weights: an `nn.Module`, TensorDict or mapping of tensors.
        registry: where versions are kept. Its policy is the series that the workers follow.
        transport: how workers are reached; by default they are objects of this process.
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
        transport: Transport | None = None,
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
        self.registry = registry
        self.max_interval = check_interval(max_interval)
        self.timeout = check_timeout(timeout)
        self.locate = locate
        self.apply = apply
        self.cast = arguments.flag("cast", cast)
        self.allow_nonfinite = allow_nonfinite
        self.extra = extra
        self.on_rollback = on_rollback
        self.ignore = check_globs("ignore", ignore)
        self.last_report: SyncReport | None = None
        """The report of the last update that ended."""
        self._start = check_start(start)

        self.record = Sync(registry)
        """The record: all that is known of the registry here."""
        self.workers = WorkerTable()
        """What is known of each worker."""
        self.transport: Transport = LocalTransport() if transport is None else transport
        """How workers are reached."""
        self.live = self._make_live(policy_weights)
        """The server weights."""
        self.source = Source(self.record, self.transport, self._mapping)
        """Where the bytes come from that are sent."""
        self.asking = Asking(self)
        self._members = Membership(self, self.record, self.workers, self.transport, self._drain)
        self._background = Background()
        self._caller = self.record.reader.calls
        """Held for the length of each call, so that callers come one after the other."""
        self._running = threading.RLock()
        """Held while a cycle runs, in whichever thread."""
        self._current: Cycle | None = None
        self._copying: Request | None = None
        """The request with `wait=False` whose weights are being copied."""
        self._collector: weakref.ref[Any] | None = None
        self._observer: Observer | None = None
        self._closed = False
        self.record.keep_alive()
        self.live.head = self.record.head()

    def _make_live(self, weights: Any) -> LiveWeights:
        return LiveWeights(weights, self.record)

    @property
    def policy_weights(self) -> Any:
        """The live server weights."""
        return self.live.weights

    @policy_weights.setter
    def policy_weights(self, weights: Any) -> None:
        self.live.weights = weights

    @property
    def head(self) -> VersionInfo | None:
        """The head as this updater knows it."""
        return self.live.head

    @property
    def series(self) -> Series:
        """The registry's UUID and the policy: what workers know of each is kept apart."""
        return self.record.series

    # ------------------------------------------------------------------ updating

    @overload
    def update_weights(
        self,
        weights: Any = None,
        worker_ids: WorkerIds | None = None,
        *,
        wait: Literal[True] = True,
        force: bool = False,
        step: int | None = None,
        metrics: Mapping[str, Any] | None = None,
        metadata: Mapping[str, Any] | None = None,
        message: str = "",
        restructure: bool = False,
    ) -> SyncReport: ...

    @overload
    def update_weights(
        self,
        weights: Any = None,
        worker_ids: WorkerIds | None = None,
        *,
        wait: Literal[False],
        force: bool = False,
        step: int | None = None,
        metrics: Mapping[str, Any] | None = None,
        metadata: Mapping[str, Any] | None = None,
        message: str = "",
        restructure: bool = False,
    ) -> Future[SyncReport]: ...

    @overload
    def update_weights(
        self,
        weights: Any = None,
        worker_ids: WorkerIds | None = None,
        *,
        wait: bool,
        force: bool = False,
        step: int | None = None,
        metrics: Mapping[str, Any] | None = None,
        metadata: Mapping[str, Any] | None = None,
        message: str = "",
        restructure: bool = False,
    ) -> SyncReport | Future[SyncReport]: ...

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
    ) -> SyncReport | Future[SyncReport]:
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
            about = {"step": check_step(step), "metrics": metrics, "metadata": metadata, "message": message}
            request = Request(
                ids=self._ids(worker_ids),
                change=Publish(weights, about=about, restructure=restructure),
                forced=force or weights is not None,
                resend=force,
            )
            if wait:
                self._drain()
            self._look_at_head(request)
            if wait:
                return self._execute(request)
            if isinstance(request.change, Follow):
                # Server weights are written in the caller's thread only.
                return ended(self._execute(request))
            self._copy(request)
            return self._execute_later(request)

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
                request.version = VersionInfo.of(self.record.usable(version, "sync workers to"))
            self._look_at_head(request)
            self._drain()
            return self._execute(request)

    def rollback(self, to: Ref | None = None, reason: str = "") -> SyncReport:
        """Go back to an older version: a new version in the log, the server weights in place, every unpinned worker.

        The server weights are restored while workers pull; `on_rollback` is called at the end.

        Args:
            to: as in `Registry.rollback`.
            reason: for the log.

        Raises:
            NotFoundError: there is no such version, or nothing to go back to. Nothing was changed.
            CorruptionError: its file is missing or damaged. Nothing was changed. Bytes that are still in memory are
                taken from there, and of the file only the size is looked at.
            InvalidWeightsError: the server weights do not fit that version. Nothing was changed.
            ConflictError: another run published. Nothing was changed.
        """
        with self._caller:
            self._check_open()
            arguments.text("reason", reason)
            self._drain()
            self._catch_up()
            wanted = self.record.rollback_target(to)
            payload = self.source.payload_of(wanted)
            self.live.check_accepts(wanted, payload)
            change = Rollback(wanted, payload, reason)
            return self._execute(Request(ids=self._ids(None), forced=True, change=change))

    def pin(self, worker_id: WorkerId, ref: Ref, reason: str = "") -> SyncReport:
        """Hold a worker at a version or alias, in the registry, and bring it there.

        Raises:
            NotFoundError: no such worker or version.
            ConflictError: as in `update_weights`.
        """
        with self._caller:
            self._check_open()
            (key,) = self._ids(worker_id)
            worker = self.workers.get(key)
            # First, so that a head that cannot be followed leaves no pin behind.
            self._catch_up()
            self.registry.pin(worker.name, ref, reason=reason, literal=True)
            return self.sync(worker.id)

    def unpin(self, worker_id: WorkerId) -> SyncReport:
        """Let a worker follow the head again, and bring it there.

        Raises:
            NotFoundError: no such worker, or no pin on exactly its name.
            ConflictError: as in `update_weights`.
        """
        with self._caller:
            self._check_open()
            (key,) = self._ids(worker_id)
            worker = self.workers.get(key)
            self._catch_up()
            self.registry.unpin(worker.name)
            return self.sync(worker.id)

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
            self._take_in_all()
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
            while True:
                head = self.registry.head()
                bad = refused_tensors(head.nonfinite, self.allow_nonfinite)
                if bad:
                    raise InvalidWeightsError(
                        f"the server weights were not restored to v{head.number}, the head of policy {head.policy!r}: "
                        f"it has NaN or infinity in {', '.join(bad)}. Nothing was changed; registry.rollback() goes "
                        "back to a finite version, allow_nonfinite= lets it pass"
                    )
                try:
                    self._run_here(Request(change=self._follow(head, asked=True)))
                except HeadMovedError:
                    continue
                return head

    def close(self) -> None:
        """Wait for what is in flight and let go of the workers. Closing twice is harmless."""
        with self._caller:
            if self._closed:
                return
            self._drain()
            self._closed = True
            self._background.shut_down()
            self.source.keep(())
            self._members.leave("its updater was closed")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        head = "no version" if self.head is None else f"v{self.head.number}"
        return f"<{type(self).__name__} policy={self.registry.policy!r} {head}, {len(self.workers)} workers>"

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
        return self._join(handle, f"collector-{self.workers.next_id()}" if name is None else name)

    def remove_worker(self, worker_id: WorkerId) -> None:
        """Stop steering a worker; its holding ends as `removed`. Ids of others stay what they are.

        Raises:
            NotFoundError: no worker has that id.
        """
        with self._caller:
            # A closed updater has let go: the worker's record may be another one's by now.
            self._check_open()
            self._drain()
            self._members.remove(self.workers.get(worker_id))

    def _add_workers(
        self, handles: Sequence[Any], names: Sequence[str], *, worker_id: int | None = None
    ) -> list[int]:
        """Steer more workers, without bringing them to their targets yet; for subclasses.

        Args:
            worker_id: the id of a single one that has an id already.

        Returns:
            Their ids.

        Raises:
            InUseError: a name or a worker is steered by somebody else, or bears another name here.
        """
        return self._members.add(handles, names, worker_id=worker_id)

    def _join(self, handle: Any, name: str) -> int:
        with self._caller:
            self._check_open()
            # First, so that a head that cannot be followed leaves nothing half-added.
            self._catch_up()
            (worker_id,) = self._add_workers([handle], [name])
            if self.head is not None:
                self.sync(worker_id)
            return worker_id

    def _disbelieve(self, workers: Sequence[WorkerState], why: str) -> None:
        """End what workers hold on record, as somebody else wrote into them: the next update sends them the bytes."""
        self._drain()
        self.record.write(settlements=[self.workers.overwritten(workers, why)])

    def _take_in_all(self) -> list[int]:
        """Return the ids of all workers, and steer those that only `all_worker_ids` knows of so far."""
        ids = list(self.all_worker_ids())
        for key in ids:
            if key not in self.workers:
                arguments.integer("a worker id", key)
                self._add_workers([object()], [f"collector-{key}"], worker_id=key)
        return ids

    def _ids(self, worker_ids: WorkerIds | None) -> list[int]:
        every = self._take_in_all()
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
        return list(dict.fromkeys(self.workers.get(key).id for key in named))

    # ------------------------------------------------------------------ the original's hooks

    def _get_server_weights(self) -> ServerWeights:
        """Publish the live server weights if they changed, hand them to the transport once, and return the record.

        It is called once an update. With `wait=False` the weights are only copied by then, and the record has no number
        yet.
        """
        return self._publish(self.policy_weights)

    def _maybe_map_weights(self, weights: Any) -> Any:
        """Return what is sent to workers, given a copy of the weights about to be sent. Here nothing changes."""
        return weights

    def _sync_weights_with_worker(self, worker_id: int, server_weights: ServerWeights) -> Any:
        """Start one push; returns its receipt, or what will be it.

        Called from outside, with what `_get_server_weights` returns or with other weights, it is an update of its own
        for one worker: it waits, records the receipt and returns it.
        """
        if is_from_outside(server_weights):
            return self._push_alone(worker_id, server_weights)
        assert server_weights.push is not None
        worker = self.workers.get(worker_id)
        return self.transport.send(worker.handle, server_weights.push, server_weights.handle)

    def _skip_update(self, worker_id: int) -> bool:
        """Tell whether the interval passes this worker by in this call. Asked only where it may."""
        return within_interval(self.workers.get(worker_id).passed_by, self.max_interval)

    def all_worker_ids(self) -> list[int]:
        """Return the ids of all workers, in the order in which they were added."""
        return self.workers.ids()

    @property
    def maps_weights(self) -> bool:
        """Whether workers may be sent something else than the version's content."""
        return self._mapping() is not None

    def _mapping(self) -> Callable[[Any], Any] | None:
        """Return `_maybe_map_weights` where it may change something."""
        hook = self._maybe_map_weights
        return None if getattr(hook, "__func__", None) is Updater._maybe_map_weights else hook

    def _publish(self, weights: Any) -> ServerWeights:
        """Publish weights if their content changed; for `_get_server_weights`.

        Outside of an update it waits until they are durable.
        """
        cycle = self._current
        if cycle is not None and cycle.thread == threading.get_ident():
            return cycle.publish(_chosen(cycle.request, weights))
        with self._caller:
            self._check_open()
            if self._copying is not None:
                return self._copy_for(self._copying, _chosen(self._copying, weights))
            self._drain()
            self._catch_up()
            with self._running:
                cycle = Cycle(self, Request(change=Publish(weights, by_hook=False)))
                cycle.run()
                return cycle.server

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
                request.version = weights.info
            else:
                request.change = Publish(weights)
            self._look_at_head(request)
            self._drain()
            self._execute(request).raise_for_failures()
            (answer,) = request.answers.values()
            assert isinstance(answer, Receipt)
            return answer

    # ------------------------------------------------------------------ the head

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
        live = self.live
        if live.origin is not None:
            return
        live.head = self.record.head()
        if live.head is None or self._start == "continue":
            live.origin = "head"
        elif self._start == "new":
            live.origin = "line"
        elif self._start == "head":
            self.adopt()
        else:
            live.origin = "head" if live.went_on_from(live.head) else "unknown"

    def _look_at_head(self, request: Request) -> None:
        """Let a request follow a head that somebody else moved back, in place of what it asked for.

        Runs in the caller's thread, before anything is copied or published.

        Raises:
            ConflictError: another run published. Nothing was changed.
        """
        self._begin_training()
        move = self.record.moved(self.live.head)
        if move is None:
            return
        if move.newest is None:
            raise ConflictError(
                f"policy {self.record.policy!r} has no version any more, and this updater was at "
                f"v{0 if self.live.head is None else self.live.head.number}; nothing was changed. Put the registry "
                "back from a backup, or make a new updater to begin again"
            )
        # Weights that go on from nothing in the log have no part in what happens there.
        if move.foreign is not None and self.live.origin != "unknown":
            since = 0 if self.live.head is None else self.live.head.number
            raise ConflictError(
                f"run {move.foreign.run} published v{move.foreign.number} of policy {self.record.policy!r} while this "
                f"updater was at v{since}; nothing was changed. adopt() takes over the head, which is "
                f"v{move.newest.number}; to train on from v{since}, registry.rollback({since}) first"
            )
        if move.newest.restores is not None and self.live.origin == "head":
            self._drain()
            request.change, request.server, request.forced = self._follow(move.newest), None, True
        else:
            self.live.saw(move.newest)

    def _follow(self, head: Version, *, asked: bool = False) -> Follow:
        """Return the taking over of a head, once the server weights are known to accept it."""
        payload = self.source.payload_of(head)
        self.live.check_accepts(head, payload)
        return Follow(head, payload, asked)

    def _catch_up(self) -> None:
        """Follow a head that somebody else moved back, before something else is done."""
        request = Request()
        self._look_at_head(request)
        if request.change is not None:
            self._execute(request)

    # ------------------------------------------------------------------ copies

    def _copy(self, request: Request) -> None:
        """Let `_get_server_weights` say what is published, and copy that now."""
        self._copying = request
        try:
            record = self._get_server_weights()
        finally:
            self._copying = None
        change = request.change
        if isinstance(change, Publish) and change.by_hook:
            # It published nothing, and handed out what it had.
            request.change, request.server = None, record

    def _copy_for(self, request: Request, weights: Any) -> ServerWeights:
        change = request.change
        assert isinstance(change, Publish)
        self.record.reader.let_go()
        change.weights, change.by_hook = weights, False
        change.draft = self._copy_of(weights, change.about)
        if change.draft is None:
            request.change = None
        return ServerWeights(0, "", "", (), 0, None, {})

    def _copy_of(self, weights: Any, about: Mapping[str, Any]) -> Draft | None:
        """Copy weights, or tell that they are the head's."""
        live = self.live
        # What a rollback was restored from may lie where the copy is to be made.
        self.record.reader.let_go()
        content = live.flatten(weights)
        live.check_origin(weights)
        if live.head is not None and not live.begins_line and self.record.holds(content, live.head.digest):
            return None
        extra = None if self.extra is None else self.extra()
        return self.record.copy(weights, content, extra=extra, about=about)

    # ------------------------------------------------------------------ running cycles

    def _execute(self, request: Request) -> SyncReport:
        """Run an update; a rollback that came between the look at the head and the lock is followed, too."""
        while True:
            try:
                return self._run_here(request)
            except HeadMovedError:
                if isinstance(request.change, Rollback):
                    raise
                log.info("the head of policy %r moved meanwhile; it is looked at again", self.record.policy)
                self._look_at_head(request)

    def _run_here(self, request: Request) -> SyncReport:
        try:
            return self._run(request)
        finally:
            self.workers.spent.clear()
            version, head = request.restored, self.live.head
            # Last of all, also where a worker or a disk failed, if the weights are really back.
            if version is not None and head is not None and head.number == version.number:
                request.restored = None
                if self.on_rollback is not None:
                    self.on_rollback(version)

    def _run(self, request: Request) -> SyncReport:
        with self._running:
            began = time.perf_counter()
            cycle = self._current = Cycle(self, request)
            try:
                report = cycle.run()
            finally:
                self._current = None
                self.record.reader.let_go()
            self.last_report = report
            if cycle.kept is not None and self.tells_if_stuck:
                self.record.warn_if_stuck(cycle.kept, cycle.step, stacklevel=6)
            if self._observer is not None:
                self._observer.observe(
                    report,
                    head=None if self.head is None else self.head.number,
                    held={
                        worker.name: None if worker.known is None else worker.known.version
                        for worker in self.workers
                    },
                    staleness=self.record.staleness,
                    seconds=time.perf_counter() - began,
                )
            return report

    def _execute_later(self, request: Request) -> Future[SyncReport]:
        self.record.reader.let_go()
        change = request.change
        draft = change.draft if isinstance(change, Publish) else None
        # The buffer of the copy is given back however the update ends, also if it never begins.
        return self._background.run(
            lambda: self._run(request), (lambda: None) if draft is None else draft.release
        )

    def _drain(self) -> None:
        """Wait for updates that run in the background."""
        self._background.drain()
        self.workers.spent.clear()

    def _check_open(self) -> None:
        if self._closed:
            raise InUseError(f"{self!r} is closed; make a new updater on the same registry")
        self.transport.check()

    # ------------------------------------------------------------------ what cycles and probes ask for

    def _ask(self, worker: WorkerState, question: Probe) -> Any:
        """Start asking a worker whether its weights are still what was written; None where nobody can be asked."""
        return self.transport.send(worker.handle, question, None)

    def _probe(self, worker: WorkerState, probe: Probe) -> Any:
        """Start a probe of a worker."""
        return self.transport.send(worker.handle, probe, None)

    def _push_for(self, server: ServerWeights, order: int, patience: float) -> Push:
        """Return the instruction to hold a version.

        Args:
            patience: seconds that the worker may wait for its own `acting` blocks to end.
        """
        globs = self.allow_nonfinite
        return Push(
            series=self.series,
            run=self.record.run,
            version=server.version,
            digest=server.digest,
            sent_digest=server.sent_digest,
            order=order,
            nbytes=server.nbytes,
            locate=self.locate,
            apply=self.apply,
            structure=server.structure if callable(self.apply) else None,
            cast=self.cast,
            allow_nonfinite=globs if isinstance(globs, bool) else tuple(globs),
            patience=patience,
            registry=str(self.registry.location),
            ignore=self.ignore,
        )

    def _keep_bytes_of(self, state: HeadState, head: VersionInfo) -> None:
        """Let go of bytes that no worker needs any more."""
        wanted = {head.digest, *(version.digest for version in state.pinned.values())}
        self.workers.spent += self.source.keep(wanted)
        self.record.forget_versions(most=4 * (len(wanted) + len(self.workers) + 16))


def _chosen(request: Request, weights: Any) -> Any:
    """Return what an update publishes: the weights that its caller gave, else those of the hook."""
    change = request.change
    given = change.weights if isinstance(change, Publish) else None
    return weights if given is None else given

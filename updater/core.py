"""`RayRemoteWeightUpdater`: the updater for Ray actors of any class, over `__ray_call__` and the object store."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import (
    ActorDiedError,
    ActorPlacementGroupRemoved,
    ActorUnavailableError,
    ActorUnschedulableError,
    GetTimeoutError,
    NodeDiedError,
    ObjectLostError,
    OutOfMemoryError,
    PendingCallsLimitExceeded,
    RayActorError,
    RayError,
    RayTaskError,
    RuntimeEnvSetupError,
    WorkerCrashedError,
)

from weightledger.registry import Registry, arguments
from weightledger.registry.errors import InUseError
from weightledger.registry.records import Version
from weightledger.registry.weights.payload import Payload
from weightledger.updater.base import RemoteWeightUpdaterBase, no_op, publishes
from weightledger.updater.connection import Connection, ConnectionLostError, ray_get, ray_put, ray_wait
from weightledger.updater.courier import CarryOut, Courier
from weightledger.updater.lives import actor_name, find_lives
from weightledger.updater.metrics import RayMetrics
from weightledger.updater.push import Apply, Locate, Probe
from weightledger.updater.receiver import receive
from weightledger.updater.seats import Seat
from weightledger.updater.server import ServerWeights, is_from_outside
from weightledger.updater.settling import Trouble
from weightledger.updater.starting import Start

# Ray sends arguments up to 100 KB inside the call; through the object store so small ones take twice as long.
_INLINE_BYTES = 96 * 1024
# What Ray raises when the worker's process is no more, or may be no more.
_PROCESS_ENDED = (
    RayActorError,
    OutOfMemoryError,
    NodeDiedError,
    WorkerCrashedError,
    ActorUnschedulableError,
    ActorPlacementGroupRemoved,
    RuntimeEnvSetupError,
)
_LOST = Trouble("doubtful", "Ray was shut down before its answer came, if the push ever reached it")


class RayRemoteWeightUpdater(RemoteWeightUpdaterBase):
    """Publishes server weights and brings Ray actors to their target version, on their own receipts.

    Args:
        policy_weights: the live server weights: an `nn.Module`, TensorDict or mapping of tensors.
        remote_collectors: actor handles, of any actor class; more come by `add_worker`.
        max_interval: exactly so many consecutive `update_weights` calls that name a worker pass it by between two
            pushes; 0 for none.
        registry: where versions are kept.
        names: lasting names of the workers in the registry; by default the actor's Ray name, else `collector-<i>`.
        locate: where the policy is in an actor: a dotted attribute, or a callable that is given the actor.
        apply: `apply(actor, weights, version)` for actors that load own, writable tensors in their own way; or
            `"load_state_dict"` for modules that do, by their method of that name.
        timeout: seconds that one call waits for workers, all of them together.
        cast: let workers convert to their own dtype; what was converted is recorded, and what that does not hold is
            refused.
        allow_nonfinite: send versions with NaN or infinity, and let `cast` make infinity; True, or globs of the tensor
            names that may hold them.
        extra: called at every publish; the mapping it returns is stored with the version (optimizer, counters).
        on_rollback: called with the version after the server weights were restored to it.
        ignore: globs of the names of tensors that the actors' own code writes: like buffers, they are no drift.
        start: how the training begins on a policy that has versions. `"head"` restores the server weights to the head
            and calls `on_rollback` at once, `"new"` begins a new line and abandons what was before, `"continue"` says
            that the server weights were restored already. On an empty policy all are the same, so that a script that
            can be resumed says `"head"` from its first run on. None is enough where it is plain: on an empty policy,
            while the content is the head's, or when this process published or restored the head from this very
            object; else the first publish is a `ConflictError`.

    Raises:
        InUseError: another live updater steers a worker of one of these names.
        InvalidWeightsError: `start="head"`, and the server weights do not fit the head, or it has NaN or infinity that
            is not allowed. Nothing was changed.

    Example:
        ```python
        updater = RayRemoteWeightUpdater(policy, workers, registry=Registry.open("runs/cartpole"), start="head")
        report = updater.update_weights(step=100, metrics={"reward": 87.0})
        updater.rollback(reason="reward collapsed")
        ```
    """

    @property
    def _carry_out(self) -> CarryOut:
        """What is called in an actor, with the actor, an instruction and its bytes."""
        return receive

    def __init__(
        self,
        policy_weights: Any,
        remote_collectors: Sequence[Any],
        max_interval: int = 0,
        *,
        registry: Registry,
        names: Sequence[str] | None = None,
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
        if isinstance(remote_collectors, ActorHandle) or not isinstance(remote_collectors, Iterable):
            raise TypeError(
                f"remote_collectors must be a list of actor handles, found {arguments.shown(remote_collectors)}"
            )
        handles = [_checked(handle) for handle in remote_collectors]
        if isinstance(names, str):
            raise TypeError(f"names= must be a list of names, found the text {arguments.quoted(names)}")
        if names is not None and len(names) != len(handles):
            raise ValueError(
                f"names= must name every worker: expected {len(handles)} names, found {len(names)}"
            )
        super().__init__(
            policy_weights,
            registry=registry,
            max_interval=max_interval,
            locate=locate,
            apply=apply,
            timeout=timeout,
            cast=cast,
            allow_nonfinite=allow_nonfinite,
            extra=extra,
            on_rollback=on_rollback,
            ignore=ignore,
            start=start,
        )
        self._observer = self._metrics = RayMetrics(registry.policy)
        self._courier = Courier()
        self._connection = Connection()
        if handles:
            self._add_workers(handles, list(names) if names is not None else self._default_names(handles))
        self._begin_or_close()

    @property
    def remote_collectors(self) -> list[Any]:
        """The actor handles, in the order of `all_worker_ids`."""
        return [seat.handle for seat in self.seats]

    def add_worker(self, handle: Any, name: str | None = None) -> int:
        """Steer one more actor, and bring it to its target at once if there is a version.

        Args:
            handle: the actor.
            name: its lasting name; by default the actor's Ray name, else `collector-<i>`. The name of a dead worker is
                free: what that one held ends as lost, and its id is not given again.

        Returns:
            Its id; what the first sync did to it is in `last_report`.

        Raises:
            InUseError: its name is taken by a live worker.
            ConflictError: as in `update_weights`; the actor is not steered then.
        """
        return self._join(_checked(handle), name if name is not None else self._default_names([handle])[0])

    def all_worker_ids(self) -> list[int]:
        """Return the ids of all workers, in the order in which they were added."""
        return self.seats.ids()

    @publishes
    def _get_server_weights(self) -> ServerWeights:
        """Publish the live server weights if they changed, put them into the object store once, and return both."""
        return self._publish(self.policy_weights)

    @no_op
    def _maybe_map_weights(self, weights: Any) -> Any:
        """Return what is sent to workers, given a copy of the weights about to be sent. Here nothing changes."""
        return weights

    def _sync_weights_with_worker(self, worker_id: int, server_weights: ServerWeights) -> Any:
        """Start one push to an actor; returns the `ObjectRef` of its receipt.

        Called from outside, with what `_get_server_weights` returns or with other weights, it is an update of its own
        for one worker: it waits, records the receipt and returns it.
        """
        if is_from_outside(server_weights):
            return self._push_alone(worker_id, server_weights)
        return self._send(worker_id, server_weights)

    def _ask(self, worker_id: int, question: Probe) -> Any:
        return self._send(worker_id, ServerWeights.asking(question))

    def _send(self, worker_id: int, server_weights: ServerWeights) -> Any:
        self._connection.check()
        return self._courier.send(self.seats.get(worker_id).handle, self._carry_out, server_weights)

    def _distribute(self, payload: Payload) -> Any:
        # Either way the buffer is free again afterwards.
        if payload.buffer.nbytes <= _INLINE_BYTES:
            return payload.buffer.copy()
        try:
            handle = self._connection.call(ray_put, payload.buffer)
        except ConnectionLostError:
            # The version is kept all the same; there is nobody left to push it to.
            return None
        self._metrics.put(payload.buffer.nbytes)
        return handle

    def _fetch(self, handle: Any) -> Any:
        if not isinstance(handle, ray.ObjectRef):
            return handle
        try:
            return self._connection.call(ray_get, handle, timeout=self.timeout)
        except (ObjectLostError, GetTimeoutError, ConnectionLostError):
            # Evicted, or its owner, its node or its cluster ended; the file has it still.
            return None

    def _collect(self, handles: Mapping[int, Any], timeout: float, eager: bool) -> dict[int, Any]:
        refs = {key: handle for key, handle in handles.items() if isinstance(handle, ray.ObjectRef)}
        done = super()._collect(
            {key: handle for key, handle in handles.items() if key not in refs}, 0.0, True
        )
        if not refs:
            return done
        try:
            return done | self._collect_refs(refs, 0.0 if done and eager else timeout, eager)
        except ConnectionLostError as error:
            return done | dict.fromkeys(refs, error)

    def _collect_refs(self, refs: Mapping[int, Any], timeout: float, eager: bool) -> dict[int, Any]:
        if not eager:
            try:
                answers = self._connection.call(ray_get, list(refs.values()), timeout=timeout)
                return dict(zip(refs, answers, strict=True))
            except RayError:
                # Somebody is slow or failed: look at each by itself, without waiting any longer for the others.
                timeout = 0.0
        ready, rest = self._connection.call(
            ray_wait, list(refs.values()), num_returns=1 if eager else len(refs), timeout=timeout
        )
        if rest and ready:
            # Whatever else has come by now goes into the same transaction.
            ready += self._connection.call(ray_wait, rest, num_returns=len(rest), timeout=0.0)[0]
        done: dict[int, Any] = {}
        for key, ref in refs.items():
            if ref in ready:
                try:
                    done[key] = self._connection.call(ray_get, ref)
                except Exception as error:  # noqa: BLE001 - whatever came in place of a receipt is explained
                    done[key] = error
        return done

    def _explain(self, seat: Seat, error: BaseException) -> Trouble:
        # Of what a task raised Ray's text tells the way through the code first, and what it was last.
        told = getattr(error, "cause", None) or error
        if self._connection.is_lost:
            return _LOST
        text = f"{type(told).__name__}: {' '.join(str(told).split())[:500]}"
        if isinstance(error, _PROCESS_ENDED):
            life = find_lives({seat.id: seat.handle}).get(seat.id)
            if isinstance(life, Trouble):
                return life
            if isinstance(error, ActorDiedError) or life is None:
                return Trouble("restarting", text)
            known = seat.known.incarnation if seat.known is not None else None
            if isinstance(error, ActorUnavailableError) and life == known:
                return Trouble("doubtful", text)
            return Trouble("restarting", text)
        if isinstance(error, ObjectLostError):
            return Trouble("bytes_lost", text)
        if isinstance(error, RayTaskError):
            return Trouble("rejected", text)
        # An error of Ray's own that says nothing of the push leaves open whether it was carried out.
        arrived = isinstance(error, RayError) and not isinstance(error, PendingCallsLimitExceeded)
        return Trouble("doubtful" if arrived else "failed", text)

    def _find_lives(self, seats: Sequence[Seat]) -> dict[int, str | Trouble]:
        try:
            return self._connection.call(find_lives, {seat.id: seat.handle for seat in seats})
        except ConnectionLostError:
            return {seat.id: _LOST for seat in seats}

    def _check_open(self) -> None:
        super()._check_open()
        try:
            self._connection.check()
        except ConnectionLostError as error:
            raise ConnectionLostError(
                f"{self!r}: {error}; nothing was changed. Call ray.init(address=…), get the actors' handles anew and "
                "make a new updater on the same registry"
            ) from None

    def _add_workers(
        self, handles: Sequence[Any], names: Sequence[str], *, worker_id: int | None = None
    ) -> list[int]:
        self._connection.begin()
        # One actor has one policy: under two names it would be sent two targets, and only the later one is true.
        owners = {self._identity(seat.handle): seat.name for seat in self.seats}
        for handle, name in zip(handles, names, strict=True):
            owner = owners.setdefault(self._identity(handle), name)
            if owner != name:
                raise InUseError(
                    f"worker {name!r} is the same actor as worker {owner!r} ({handle!r}); give each actor once"
                )
        return super()._add_workers(handles, names, worker_id=worker_id)

    def _identity(self, handle: Any) -> Any:
        # An adapter may steer a worker of this very process, too.
        return handle._actor_id if isinstance(handle, ActorHandle) else super()._identity(handle)

    def _default_names(self, handles: Sequence[Any]) -> list[str]:
        first = self.seats.next_id()
        return [actor_name(handle) or f"collector-{first + index}" for index, handle in enumerate(handles)]


def _checked(handle: Any) -> Any:
    if not isinstance(handle, ActorHandle):
        hint = (
            f"ray.get_actor({arguments.quoted(handle)}, namespace=…)"
            if isinstance(handle, str)
            else "MyClass.remote(…)"
        )
        raise TypeError(
            f"expected a Ray actor handle as a worker, found {arguments.shown(handle)}; {hint} gives one"
        )
    return handle

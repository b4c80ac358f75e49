"""The transport to Ray actors of any class: `__ray_call__` for instructions, the object store for bytes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
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

from weightledger.registry.weights import Payload
from weightledger.updater.in_worker.receiver import receive
from weightledger.updater.messages import Probe, Push
from weightledger.updater.transports.connection import (
    Connection,
    ConnectionLostError,
    ray_get,
    ray_put,
    ray_wait,
)
from weightledger.updater.transports.incarnations import find_incarnations
from weightledger.updater.transports.local import LocalTransport
from weightledger.updater.transports.packing import CarryOut, Packing
from weightledger.updater.workers.state import Trouble

# Ray sends arguments up to 100 KB inside the call; through the object store so small ones take twice as long.
INLINE_BYTES = 96 * 1024
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


class RayTransport(LocalTransport):
    """Reaches actors of one cluster, for as long as the connection to it lasts.

    Args:
        carry_out: what is called in an actor, with the actor, an instruction and its bytes: an importable function.
        timeout: seconds that reading bytes back from the object store may take.
        count_bytes: told how many bytes went into the object store.
    """

    def __init__(
        self,
        *,
        carry_out: CarryOut = receive,
        timeout: float = 60.0,
        count_bytes: Callable[[int], object] | None = None,
    ) -> None:
        self.connection = Connection()
        self.carry_out = carry_out
        self._timeout = timeout
        self._count_bytes = count_bytes
        self._packing = Packing()

    def check(self) -> None:
        """Refuse to go on without the connection.

        Raises:
            ConnectionLostError: it ended.
        """
        self.connection.check()

    def begin(self) -> None:
        """Remember the connection that there is now."""
        self.connection.begin()

    def identity(self, worker: Any) -> Hashable:
        """Return the actor's id, which all handles of it share."""
        # An adapter may steer a worker of this very process, too.
        return worker._actor_id if isinstance(worker, ActorHandle) else super().identity(worker)

    def put(self, payload: Payload) -> Any:
        """Put the bytes into the object store; small ones are kept for the calls themselves."""
        # Either way the buffer is free again afterwards.
        if payload.buffer.nbytes <= INLINE_BYTES:
            return payload.buffer.copy()
        try:
            handle = self.connection.call(ray_put, payload.buffer)
        except ConnectionLostError:
            # The version is kept all the same; there is nobody left to push it to.
            return None
        if self._count_bytes is not None:
            self._count_bytes(payload.buffer.nbytes)
        return handle

    def fetch(self, handle: Any) -> Any:
        """Read bytes back from the object store."""
        if not isinstance(handle, ray.ObjectRef):
            return handle
        try:
            return self.connection.call(ray_get, handle, timeout=self._timeout)
        except (ObjectLostError, GetTimeoutError, ConnectionLostError):
            # Evicted, or its owner, its node or its cluster ended; the file has it still.
            return None

    def send(self, worker: Any, instruction: Push | Probe, handle: Any) -> Any:
        """Call the actor, and return the `ObjectRef` of its answer."""
        self.connection.check()
        return self._packing.send(worker, self.carry_out, instruction, handle)

    def collect(self, answers: Mapping[int, Any], timeout: float, eager: bool) -> dict[int, Any]:
        """Wait for `ObjectRef`s, and for what `LocalTransport` waits for."""
        refs = {key: answer for key, answer in answers.items() if isinstance(answer, ray.ObjectRef)}
        done = super().collect({key: answer for key, answer in answers.items() if key not in refs}, 0.0, True)
        if not refs:
            return done
        try:
            return done | self._collect_refs(refs, 0.0 if done and eager else timeout, eager)
        except ConnectionLostError as error:
            return done | dict.fromkeys(refs, error)

    def _collect_refs(self, refs: Mapping[int, Any], timeout: float, eager: bool) -> dict[int, Any]:
        if not eager:
            try:
                answers = self.connection.call(ray_get, list(refs.values()), timeout=timeout)
                return dict(zip(refs, answers, strict=True))
            except RayError:
                # Somebody is slow or failed: look at each by itself, without waiting any longer for the others.
                timeout = 0.0
        ready, rest = self.connection.call(
            ray_wait, list(refs.values()), num_returns=1 if eager else len(refs), timeout=timeout
        )
        if rest and ready:
            # Whatever else has come by now goes into the same transaction.
            ready += self.connection.call(ray_wait, rest, num_returns=len(rest), timeout=0.0)[0]
        done: dict[int, Any] = {}
        for key, ref in refs.items():
            if ref in ready:
                try:
                    done[key] = self.connection.call(ray_get, ref)
                except Exception as error:  # noqa: BLE001 - whatever came in place of an answer is explained
                    done[key] = error
        return done

    def explain(self, worker: Any, error: BaseException, incarnation: str | None) -> Trouble:
        """Tell a dead process from a broken connection, lost bytes and a call that never arrived."""
        # Of what a task raised Ray's text tells the way through the code first, and what it was last.
        told = getattr(error, "cause", None) or error
        if self.connection.is_lost:
            return _LOST
        text = f"{type(told).__name__}: {' '.join(str(told).split())[:500]}"
        if isinstance(error, _PROCESS_ENDED):
            now = find_incarnations({0: worker}).get(0)
            if isinstance(now, Trouble):
                return now
            if isinstance(error, ActorDiedError) or now is None:
                return Trouble("restarting", text)
            if isinstance(error, ActorUnavailableError) and now == incarnation:
                return Trouble("doubtful", text)
            return Trouble("restarting", text)
        if isinstance(error, ObjectLostError):
            return Trouble("bytes_lost", text)
        if isinstance(error, RayTaskError):
            return Trouble("rejected", text)
        # An error of Ray's own that says nothing of the push leaves open whether it was carried out.
        arrived = isinstance(error, RayError) and not isinstance(error, PendingCallsLimitExceeded)
        return Trouble("doubtful" if arrived else "failed", text)

    def incarnations(self, workers: Mapping[int, Any]) -> dict[int, str | Trouble]:
        """Ask Ray's own table, so that busy actors need not answer."""
        try:
            return self.connection.call(find_incarnations, workers)
        except ConnectionLostError:
            return dict.fromkeys(workers, _LOST)

"""What runs inside a worker.

Rules kept here
- Nothing is raised across the border: some actors die of an exception in a call. A receipt says what went wrong.
- One lock a worker object covers check, copy and note, so a push that lands late can never undo a newer one.
- An order that is not higher than the highest one seen changes nothing.
- Everything is checked before the first byte is copied.

The state lies on the worker object, under one attribute; objects that take no attributes have it kept beside them.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import Any

from weightledger.updater.push import LOAD_STATE_DICT, Inspection, Locate, Note, Probe, Push, Receipt, Series

_ATTRIBUTE = "_weightledger_held"
# Objects with __slots__; each is kept alive by its entry, so an id is never taken over by another object.
_beside: dict[int, tuple[Any, _State]] = {}
_making = threading.Lock()


class _State:
    """Everything that one worker object knows about its pushes."""

    def __init__(self) -> None:
        self.notes: dict[Series, Note | None] = {}
        self.last_orders: dict[Series, int] = {}
        self.plans: dict[Series, dict[int, Any]] = {}
        self.openings: dict[Series, Any] = {}
        """How the last bytes of each series began: a header that begins like it is not read tensor by tensor again."""
        self._changed = threading.Condition()
        self._acting = 0
        self._pushing = False
        self._waiting = 0
        # Depth of `acting` blocks around the code that asks: each thread and each task has its own.
        self._depth = ContextVar("weightledger_acting", default=0)

    def plans_for(self, series: Series, target: Any) -> dict[int, Any]:
        """Return the checks that were made for a target; those of its predecessors would keep them alive."""
        plans = self.plans.setdefault(series, {})
        if id(target) not in plans:
            plans.clear()
        return plans

    def note(self, series: Series, note: Note | None) -> None:
        """Write down what is held now; the series that was written last stands last."""
        # In one step, since other threads read it without the lock.
        self.notes = {other: kept for other, kept in self.notes.items() if other != series} | {series: note}

    def begin_acting(self) -> None:
        """Keep pushes out until `end_acting`. Many may act at once, also within one thread."""
        with self._changed:
            self._changed.wait_for(self._may_act)
            self._enter()

    async def begin_acting_async(self) -> None:
        """As `begin_acting`, leaving the event loop to others while it waits."""
        while True:
            with self._changed:
                if not self._pushing and (not self._waiting or self._depth.get()):
                    self._enter()
                    return
            await asyncio.sleep(0.001)

    def end_acting(self) -> None:
        """Let pushes in again, once nobody acts."""
        with self._changed:
            self._acting -= 1
            self._depth.set(max(0, self._depth.get() - 1))
            self._changed.notify_all()

    def _enter(self) -> None:
        self._acting += 1
        self._depth.set(self._depth.get() + 1)

    def _may_act(self) -> bool:
        # A waiting push goes first, or overlapping rollouts would keep it out for ever; but a rollout that nests blocks
        # would wait for itself, and so would an event loop whose other tasks are acting.
        return not self._pushing and (not self._waiting or self._depth.get() > 0 or _in_event_loop())

    @contextmanager
    def pushing(self, patience: float) -> Iterator[bool]:
        """Be alone with the worker; gives False when it was still acting after `patience` seconds."""
        with self._changed:
            self._waiting += 1
            free = self._changed.wait_for(lambda: not self._acting and not self._pushing, timeout=patience)
            self._waiting -= 1
            self._pushing = self._pushing or free
            self._changed.notify_all()
        try:
            yield free
        finally:
            if free:
                with self._changed:
                    self._pushing = False
                    self._changed.notify_all()


def receive(worker: Any, push: Push | Probe, payload: Any = None) -> Receipt | Inspection:
    """Carry out one instruction inside the worker: what every transport calls there.

    Args:
        worker: the actor object itself.
        payload: the snapshot as one uint8 array; None asks to relabel equal content that is held already.

    Returns:
        A receipt for a push, an inspection for a probe. Nothing is raised.
    """
    if isinstance(push, Probe):
        return _inspect(worker, push)
    state = _state_of(worker)
    with state.pushing(push.patience) as alone:
        if not alone:
            return _receipt(state, push, "busy", error=f"still acting after {push.patience:g} s")
        before = state.notes.get(push.series)
        try:
            return _carry_out(state, worker, push, payload)
        except Exception as error:  # noqa: BLE001 - nothing may leave the worker as an exception
            # Only what `_carry_out` does not foresee arrives here, so nothing is claimed about what the worker holds.
            state.note(push.series, None)
            return _receipt(state, push, "broken", before=before, error=_text(error))


def _inspect(worker: Any, probe: Probe) -> Inspection:
    from weightledger.registry.weights.restore import live_digest

    state = _state_of(worker)
    with state.pushing(probe.patience) as alone:
        note, last = state.notes.get(probe.series), state.last_orders.get(probe.series, 0)
        if not alone:
            return Inspection(
                incarnation(), note, last, None, None, f"still acting after {probe.patience:g} s"
            )
        try:
            digest, hashes = live_digest(_target(worker, probe.locate), probe.names)
        except Exception as error:  # noqa: BLE001 - nothing may leave the worker as an exception
            return Inspection(incarnation(), note, last, None, None, _text(error))
        return Inspection(incarnation(), note, last, hashes, digest)


def write_note(worker: Any, series: Series, note: Note | None) -> None:
    """Write down what a worker holds; for workers that pass pushes on to parts of them, which hold the weights."""
    _state_of(worker).note(series, note)


def held_version(worker: Any, policy: str | None = None) -> int | None:
    """Return the version that this worker holds, for its own code to stamp what it samples.

    Args:
        worker: the actor object (`self`).
        policy: which policy; may be left out while there is only one. Of one that was pushed from several registries
            the last counts.

    Returns:
        The version, or None before the first push and when it is not known.

    Raises:
        ValueError: the worker holds several policies and `policy` does not say which.
    """
    notes = dict(_state_of(worker).notes)
    found = {name: note for (_, name), note in notes.items() if policy is None or name == policy}
    if len(found) > 1:
        held = ", ".join(repr(name) for name in found)
        raise ValueError(f"this worker holds several policies ({held}); say which with policy=")
    (note,) = found.values() or (None,)
    return None if note is None else note.version


class acting:
    """Keep pushes out for the length of a rollout, in actors whose calls overlap (threaded or async ones).

    `with acting(self) as version:` in threads, `async with acting(self) as version:` in coroutines: there a push that
    waits goes before rollouts that begin later. Entering gives the version that is held all through the block.

    Args:
        worker: the actor object (`self`).
        policy: as in `held_version`.
    """

    def __init__(self, worker: Any, policy: str | None = None) -> None:
        self._worker = worker
        self._policy = policy
        self._state = _state_of(worker)

    def __enter__(self) -> int | None:
        self._state.begin_acting()
        return self._held()

    def __exit__(self, *error: object) -> None:
        self._state.end_acting()

    async def __aenter__(self) -> int | None:
        await self._state.begin_acting_async()
        return self._held()

    async def __aexit__(self, *error: object) -> None:
        self._state.end_acting()

    def _held(self) -> int | None:
        try:
            return held_version(self._worker, self._policy)
        except BaseException:
            self._state.end_acting()
            raise


def _in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _carry_out(state: _State, worker: Any, push: Push, payload: Any) -> Receipt:
    before = state.notes.get(push.series)
    last = state.last_orders.get(push.series, 0)
    if push.order <= last:
        # The same push delivered twice is harmless and gets the answer it got before.
        repeated = before is not None and (before.order, before.version) == (push.order, push.version)
        return _receipt(state, push, "applied" if repeated else "stale", before=before)
    state.last_orders[push.series] = push.order
    if payload is None:
        if before is None or before.sent_digest != push.sent_digest:
            return _receipt(state, push, "bytes_wanted", before=before)
        state.note(push.series, _note(push, push.sent_digest, ()))
        return _receipt(state, push, "relabelled", before=before)

    from weightledger.registry.errors import InvalidWeightsError
    from weightledger.registry.weights import codec
    from weightledger.registry.weights.payload import parse
    from weightledger.registry.weights.restore import NotPutBackError, copy_into, live_digest

    apply = push.apply if callable(push.apply) else None
    target: Any = None
    weights: Any = None
    # From here to the copy anything that goes wrong leaves the worker with what it held.
    try:
        if payload.nbytes != push.nbytes:
            raise ValueError(f"expected {push.nbytes} bytes of v{push.version}, received {payload.nbytes}")
        parsed = parse(payload, f"v{push.version} as received", known=state.openings.get(push.series))
        state.openings[push.series] = parsed.opening
        if apply is None:
            target = _target(worker, push.locate)
        else:
            assert push.structure is not None
            weights = codec.rebuild(push.structure, parsed.tensors(), parsed.values)
    except Exception as error:  # noqa: BLE001 - nothing may leave the worker as an exception
        return _receipt(state, push, "kept", before=before, error=_text(error))
    cast: tuple[str, ...] = ()
    if apply is None:
        own, plans = push.apply == LOAD_STATE_DICT, state.plans_for(push.series, target)
        try:
            cast = copy_into(
                parsed, target, cast=push.cast, allow_nonfinite=push.allow_nonfinite, own=own, plans=plans
            ).cast
        except NotPutBackError:
            raise
        except InvalidWeightsError as error:
            return _receipt(state, push, "kept", before=before, error=_text(error))
    else:
        state.note(push.series, None)
        answer = apply(worker, weights, push.version)
        if answer is False or (isinstance(answer, dict) and answer.get("ok") is False):
            raise RuntimeError(f"apply answered {answer!r}")
    # What was cast on the way is other content than was sent.
    held = push.sent_digest if not cast else live_digest(target, tuple(parsed.layout.by_name))[0]
    state.note(push.series, _note(push, held, cast))
    return _receipt(state, push, "applied", before=before)


def _note(push: Push, held_digest: str, cast: tuple[str, ...]) -> Note:
    return Note(push.version, push.digest, held_digest, push.order, push.run, cast)


def _receipt(
    state: _State, push: Push, outcome: Any, *, before: Note | None = None, error: str = ""
) -> Receipt:
    return Receipt(outcome, push.order, incarnation(), state.notes.get(push.series), before, error)


def _target(worker: Any, locate: Locate) -> Any:
    if callable(locate):
        return locate(worker)
    target = worker
    for name in locate.split("."):
        if not hasattr(target, name):
            raise AttributeError(
                f"locate={locate!r}: {type(target).__name__} has no attribute {name!r}; "
                "say where the policy is with locate= (a dotted attribute, or a callable that is given the worker)"
            )
        target = getattr(target, name)
    return target


def _state_of(worker: Any) -> _State:
    state = _find_state(worker)
    if state is None:
        with _making:
            state = _find_state(worker)
            if state is None:
                state = _State()
                try:
                    # Around the class's own __setattr__: modules and frozen classes have theirs.
                    object.__setattr__(worker, _ATTRIBUTE, state)
                except (AttributeError, TypeError):
                    _beside[id(worker)] = (worker, state)
    return state


def _find_state(worker: Any) -> _State | None:
    state = getattr(worker, "__dict__", {}).get(_ATTRIBUTE)
    if state is None and id(worker) in _beside:
        state = _beside[id(worker)][1]
    return state


def incarnation() -> str:
    """Name this life of this process, in the way that Ray's actor table names it."""
    return _incarnation_of(os.getpid())


@lru_cache(maxsize=1)
def _incarnation_of(pid: int) -> str:
    import ray

    if not ray.is_initialized():
        return f"process:{pid}"
    context = ray.get_runtime_context()
    return life_name(context.get_actor_id() or "driver", context.get_node_id(), pid)


def life_name(actor: str, node: str, pid: int) -> str:
    """Name one life of an actor."""
    return f"{actor}:{node[:12]}:{pid}"


def _text(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception as second:  # noqa: BLE001 - nothing may leave the worker as an exception
        # An error's own text may fail as well, and nothing is raised across the border.
        return f"{type(error).__name__}, whose text could not be made ({type(second).__name__})"

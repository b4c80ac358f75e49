"""What runs inside a worker.

Rules kept here
- Nothing is raised across the border: some actors die of an exception in a call. A receipt says what went wrong.
- One lock a worker object covers check, copy and note, so a push that lands late can never undo a newer one.
- An order that is not higher than the highest one seen changes nothing.
- Everything is checked before the first byte is copied.
- What was written is held until somebody writes over it: another series into the same weights, or the worker's own
  code. From then on nothing is known.

The state lies beside the worker object, so that a copy of the object knows nothing, and whoever saves it saves nothing
of ours.
"""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from weightledger.updater.messages import (
    LOAD_STATE_DICT,
    Inspection,
    Locate,
    Note,
    Outcome,
    Probe,
    Push,
    Receipt,
    Seen,
    Series,
)

if TYPE_CHECKING:
    from weightledger.registry.weights import Watch

# What belongs to each worker object, by its id; the entry goes with the object.
_states: dict[int, tuple[Callable[[], Any], _State]] = {}
_making = threading.Lock()


@dataclass
class _Holding:
    """What was written into a worker last, of one series."""

    note: Note
    push: Push | None = None
    """What wrote it; None for workers that pass pushes on."""
    watch: Watch | None = None
    """Tells of writes into it; None where the worker loads in its own way."""
    plan: Any = None
    """The checks that were made for the target that is watched."""
    hashes: dict[str, str] | None = None
    """Of every tensor, if they had to be made."""
    overwritten: str = ""
    """Why it is not known to be there any more."""


class _State:
    """Everything that one worker object knows about its pushes."""

    def __init__(self) -> None:
        self.holdings: dict[Series, _Holding | None] = {}
        """The series that was written last stands last."""
        self.seen: dict[Series, Push] = {}
        """The push of the highest order."""
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

    def hold(self, series: Series, holding: _Holding | None) -> None:
        """Write down what is held now."""
        # In one step, since other threads read it without the lock.
        others = {other: kept for other, kept in self.holdings.items() if other != series}
        self.holdings = others | {series: holding}

    def last(self, series: Series) -> Seen | None:
        """Return the highest order that was seen of a series."""
        push = self.seen.get(series)
        return None if push is None else Seen(push.order, push.run, push.registry)

    def is_pushing(self) -> bool:
        """Tell whether a push is being carried out."""
        return self._pushing

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
            # A push from inside of the worker's own `acting` block would wait for itself.
            own = self._depth.get() > 0
            free = not own and self._changed.wait_for(
                lambda: not self._acting and not self._pushing, patience
            )
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
            return _Answer(state, worker, push)("busy", error=f"still acting after {push.patience:g} s")
        # A push with bytes writes all of them anyway.
        answer = _Answer(state, worker, push, hurried=payload is not None)
        try:
            return _carry_out(state, worker, push, payload, answer)
        except Exception as error:  # noqa: BLE001 - nothing may leave the worker as an exception
            # Only what `_carry_out` does not foresee arrives here, so nothing is claimed about what the worker holds.
            state.hold(push.series, None)
            return answer("broken", error=_text(error))


def _inspect(worker: Any, probe: Probe) -> Inspection:
    state = _state_of(worker)
    if not probe.hashes:
        return _look(state, worker, probe)
    with state.pushing(probe.patience) as alone:
        found = _look(state, worker, probe)
        if not alone:
            return replace(found, error=f"still acting after {probe.patience:g} s")
        try:
            return _hash(state, worker, probe, found)
        except Exception as error:  # noqa: BLE001 - nothing may leave the worker as an exception
            return replace(found, error=_text(error))


def _look(state: _State, worker: Any, probe: Probe) -> Inspection:
    """Tell what is known without looking at the bytes."""
    holding, last = state.holdings.get(probe.series), state.last(probe.series)
    why = _overwritten(state, worker, probe.series)
    note = None if holding is None else holding.note
    order = 0 if last is None else last.order
    if note is None:
        why = _last_writer(state, probe.series)
    return Inspection(incarnation(), note, order, None, None, overwritten=why, busy=state.is_pushing())


def _hash(state: _State, worker: Any, probe: Probe, found: Inspection) -> Inspection:
    from weightledger.registry.weights import live_digest, written_by_forward

    target = _target(worker, probe.locate)
    digest, hashes = live_digest(target, probe.names)
    buffers = frozenset(written_by_forward(target, hashes)) & hashes.keys()
    holding = state.holdings.get(probe.series)
    push = None if holding is None else holding.push
    watched = push is not None and not callable(push.apply)
    if holding is not None and push is not None and watched and digest == holding.note.sent_digest:
        # Whoever wrote into it, wrote what was there.
        holding.watch, holding.plan = _watch(None, _target(worker, push.locate), None, push.ignore), None
        holding.overwritten = ""
    noted = None if holding is None else holding.hashes
    return replace(found, hashes=hashes, digest=digest, buffers=buffers, noted=noted)


def write_note(worker: Any, series: Series, note: Note | None) -> None:
    """Write down what a worker holds; for workers that pass pushes on to parts of them, which hold the weights."""
    _state_of(worker).hold(series, None if note is None else _Holding(note))


def held_version(worker: Any, policy: str | None = None) -> int | None:
    """Return the version that this worker holds, for its own code to stamp what it samples.

    Args:
        worker: the actor object (`self`).
        policy: which policy; may be left out while there is only one. Of one that was pushed from several registries
            the last counts.

    Returns:
        The version, or None before the first push and when it is not known: somebody else wrote into the weights since,
        the worker's own code or another registry.

    Raises:
        ValueError: the worker holds several policies and `policy` does not say which.
    """
    state = _state_of(worker)
    # Of one name in several registries the last one that was written.
    found = {name: (uuid, name) for uuid, name in state.holdings if policy is None or name == policy}
    if len(found) > 1:
        held = ", ".join(repr(name) for name in found)
        raise ValueError(f"this worker holds several policies ({held}); say which with policy=")
    for series in found.values():
        note = _standing(state, worker, series)
        return None if note is None else note.version
    return None


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


class _Answer:
    """Makes the receipt for one push, from what was known when it came."""

    def __init__(self, state: _State, worker: Any, push: Push, *, hurried: bool = False) -> None:
        self._state, self._push = state, push
        self.before = _standing(state, worker, push.series, hurried=hurried)
        holding = state.holdings.get(push.series)
        self._overwritten = "" if holding is None else holding.overwritten
        self._last = state.last(push.series)

    def __call__(self, outcome: Outcome, *, error: str = "") -> Receipt:
        holding = self._state.holdings.get(self._push.series)
        now = None if holding is None or holding.overwritten else holding.note
        return Receipt(
            outcome,
            self._push.order,
            incarnation(),
            now,
            self.before,
            error,
            overwritten=self._overwritten,
            last=self._last,
        )


def _carry_out(state: _State, worker: Any, push: Push, payload: Any, answer: _Answer) -> Receipt:
    before = answer.before
    last = state.last(push.series)
    if last is not None and push.order <= last.order:
        # The same push delivered twice is harmless and gets the answer it got before. A registry that was put back to
        # an older state gives its numbers again: then run or content is another one.
        same = before is not None and before.order == push.order and _is_same(state.seen[push.series], push)
        return answer("applied" if same else "stale")
    state.seen[push.series] = push
    holding = state.holdings.get(push.series)
    if payload is None:
        whole = holding is not None and (holding.watch is None or holding.watch.is_whole())
        if before is None or before.sent_digest != push.sent_digest or not whole:
            return answer("bytes_wanted")
        assert holding is not None
        state.hold(push.series, replace(holding, note=_note(push, push.sent_digest, ()), push=push))
        return answer("relabelled")

    from weightledger.registry.errors import InvalidWeightsError
    from weightledger.registry.weights import NotPutBackError, copy_into, live_digest, parse, rebuild

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
            weights = rebuild(push.structure, parsed.tensors(), parsed.values)
    except Exception as error:  # noqa: BLE001 - nothing may leave the worker as an exception
        return answer("kept", error=_text(error))
    if apply is not None:
        state.hold(push.series, None)
        told = apply(worker, weights, push.version)
        if told is False or (isinstance(told, dict) and told.get("ok") is False):
            raise RuntimeError(f"apply answered {told!r}")
        state.hold(push.series, _Holding(_note(push, push.sent_digest, ()), push))
        return answer("applied")
    own, plans = push.apply == LOAD_STATE_DICT, state.plans_for(push.series, target)
    try:
        cast = copy_into(
            parsed, target, cast=push.cast, allow_nonfinite=push.allow_nonfinite, own=own, plans=plans
        ).cast
    except NotPutBackError:
        raise
    except InvalidWeightsError as error:
        return answer("kept", error=_text(error))
    # What was cast on the way is other content than was sent.
    held, hashes = (push.sent_digest, None) if not cast else live_digest(target, tuple(parsed.layout.by_name))
    # A module that loads in its own way may have other tensors now.
    plan = None if own else plans.get(id(target))
    watch = _watch(holding, target, plan, push.ignore)
    state.hold(push.series, _Holding(_note(push, held, cast), push, watch, plan, hashes))
    return answer("applied")


def _is_same(one: Push, other: Push) -> bool:
    return (one.run, one.version, one.digest, one.sent_digest) == (
        other.run,
        other.version,
        other.digest,
        other.sent_digest,
    )


def _note(push: Push, held_digest: str, cast: tuple[str, ...]) -> Note:
    return Note(push.version, push.digest, held_digest, push.order, push.run, cast, push.registry)


def _watch(holding: _Holding | None, target: Any, plan: Any, ignore: tuple[str, ...]) -> Watch:
    """Watch a target that was just written to; as long as its plan is good, it consists of the same tensors."""
    from weightledger.registry.weights import Watch

    kept = holding is not None and plan is not None and plan.loaded is None and holding.plan is plan
    watch = holding.watch if holding is not None and kept else None
    if watch is None or watch.target is not target or watch.ignore != ignore:
        watch = Watch(target, ignore)
    watch.remember()
    return watch


def _standing(state: _State, worker: Any, series: Series, *, hurried: bool = False) -> Note | None:
    """Return what a worker holds of a series; None when that is not known."""
    holding = state.holdings.get(series)
    return None if holding is None or _overwritten(state, worker, series, hurried=hurried) else holding.note


def _overwritten(state: _State, worker: Any, series: Series, *, hurried: bool = False) -> str:
    """Tell why what was written of a series is not known to be there any more; empty while it is."""
    holdings = state.holdings
    holding = holdings.get(series)
    if holding is None or holding.overwritten:
        return "" if holding is None else holding.overwritten
    everything = list(holdings.items())
    later = everything[[other for other, _ in everything].index(series) + 1 :]
    if holding.watch is None:
        # Nobody sees what a worker's own `apply` wrote into; one policy of a worker has one place.
        by = next((other for other in reversed(later) if other[0][1] == series[1]), None)
        why = "" if by is None else _written_by(*by)
    elif _is_untouched(holding, worker, hurried):
        why = ""
    else:
        sharing = (
            other
            for other in reversed(later)
            if other[1] is not None
            and other[1].watch is not None
            and other[1].watch.shares_with(holding.watch)
        )
        by = next(sharing, None)
        why = "somebody wrote into its weights" if by is None else _written_by(*by)
        # The tensors are not needed any more, and might be the last of a former policy.
        holding.watch = None
    holding.overwritten = why
    return why


def _is_untouched(holding: _Holding, worker: Any, hurried: bool) -> bool:
    assert holding.watch is not None
    assert holding.push is not None
    try:
        return holding.watch.is_untouched(_target(worker, holding.push.locate), hurried=hurried)
    except Exception:  # noqa: BLE001 - its policy is not where it was any more
        return False


def _last_writer(state: _State, series: Series) -> str:
    """Tell who wrote last into a worker that was never sent anything of a series."""
    others = [item for item in state.holdings.items() if item[0] != series]
    return _written_by(*others[-1]) if others else ""


def _written_by(series: Series, holding: _Holding | None) -> str:
    uuid, policy = series
    if holding is None:
        return f"a push of policy {policy!r} of registry {uuid} was broken off"
    note = holding.note
    where = f" at {note.registry}" if note.registry else ""
    return f"run {note.run} wrote v{note.version} of policy {policy!r} of registry {uuid}{where} over it"


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
                _states[id(worker)] = _reference(worker), state
    return state


def _find_state(worker: Any) -> _State | None:
    found = _states.get(id(worker))
    return found[1] if found is not None and found[0]() is worker else None


def _reference(worker: Any) -> Callable[[], Any]:
    key = id(worker)

    def forget(reference: Any, states: dict[int, Any] = _states) -> None:
        if states.get(key, (None,))[0] is reference:
            del states[key]

    try:
        return weakref.ref(worker, forget)
    except TypeError:
        # An object with __slots__: kept alive, so that no other one is given its id.
        return lambda: worker


def incarnation() -> str:
    """Name this incarnation of this process, in the way that Ray's actor table names it."""
    return _incarnation_of(os.getpid())


@lru_cache(maxsize=1)
def _incarnation_of(pid: int) -> str:
    import ray

    if not ray.is_initialized():
        return f"process:{pid}"
    context = ray.get_runtime_context()
    return incarnation_name(context.get_actor_id() or "driver", context.get_node_id(), pid)


def incarnation_name(actor: str, node: str, pid: int) -> str:
    """Name one incarnation of an actor."""
    return f"{actor}:{node[:12]}:{pid}"


def _text(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception as second:  # noqa: BLE001 - nothing may leave the worker as an exception
        # An error's own text may fail as well, and nothing is raised across the border.
        return f"{type(error).__name__}, whose text could not be made ({type(second).__name__})"

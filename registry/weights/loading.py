"""Payload → a module that loads in its own way, all or nothing.

Some modules show copies in their state dict, or refresh something when they load: a copy in place would miss what they
really use. They are given the snapshot by their own `load_state_dict`, and what came of it is looked at.

Rules:

* Loaded is what the module's state dict shows afterwards, byte for byte and value for value. That its code returned
  proves nothing.
* What it held before is kept until then. If its code raises, or something did not arrive, that is put back and looked
  at in the same way.
* A module keeps what it is given, so it is given tensors of its own.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from weightledger.registry import values
from weightledger.registry.errors import InvalidWeightsError
from weightledger.registry.values import Json
from weightledger.registry.weights import codec, leaves, names, structure
from weightledger.registry.weights.digest import value_hash
from weightledger.registry.weights.fitting import Plan, fail
from weightledger.registry.weights.live import Live, canonical, identity, look_at
from weightledger.registry.weights.payload import Payload

_T = TypeVar("_T")
_CONTAINERS: Final = ("_parameters", "_buffers", "_modules")


class NotPutBackError(InvalidWeightsError):
    """A module did not load a snapshot, and does not hold what it held before either."""


def load(plan: Plan, payload: Payload, copy_rest: Callable[[], None], *, keep: bool = True) -> None:
    """Let a module load a snapshot, and prove it.

    Args:
        plan: How the snapshot fits the module.
        payload: The snapshot, verified.
        copy_rest: Writes what the module's state dict does not show.
        keep: Whether the module shall keep it; otherwise this is a rehearsal, and what it held is put back.

    Raises:
        InvalidWeightsError: It did not; names what did not arrive. The module holds what it held.
        NotPutBackError: It did not, and what it holds now is not known.
    """
    module = plan.live.module
    assert module is not None
    who = f"the load_state_dict of {type(module).__qualname__}"
    own_names = {theirs: name for name, theirs in plan.renamed.items()}
    extras = {own_names[name]: _extra_state(payload, name) for name in plan.live.extras}
    wanted = _wanted(plan, payload, own_names)
    former = Former(plan.live)
    with _untouched("a state dict of its own could not be made for the target"):
        state = _state(plan.live, wanted, extras, payload.structure)
    loaded, why = False, f"{who} was interrupted"
    try:
        with _writing(former.tensors):
            _call_load(module, state)
            copy_rest()
        missed = _shown_by(module).differences(wanted)
        loaded = keep and not missed
        why = f"after {who}, the state dict shows other content in {', '.join(map(repr, missed))}"
    except Exception as error:
        why = f"{who} raised {type(error).__name__}: {error}"
        raise InvalidWeightsError(
            f"the target did not take the snapshot; nothing was changed: {why}"
        ) from error
    finally:
        if not loaded:
            former.put_back(why)
    if missed:
        raise InvalidWeightsError(f"the target did not take the snapshot; nothing was changed: {why}")


def set_extra_states(plan: Plan, payload: Payload) -> bool:
    """Give a module's parts their extra states, and tell whether they took them.

    Raises:
        InvalidWeightsError: One was refused.
    """
    taken = True
    for name, part in plan.live.extras.items():
        state = _extra_state(payload, name)
        try:
            with torch.no_grad():
                part.set_extra_state(state)
                walk = codec.survey({names.EXTRA_STATE: part.get_extra_state()})
        except Exception as error:  # Whatever the part's own code raises, the target is put back.
            raise InvalidWeightsError(
                f"the target refused the extra state {name!r}; nothing was changed: {error}"
            ) from error
        tensors = walk.tensors | {alias: walk.tensors[first] for alias, first in walk.ties.items()}
        found = _Shown(tensors, walk.values, walk.refused)
        taken &= not found.differences(_part_of(payload, name, names.EXTRA_STATE))
    return taken


def _extra_state(payload: Payload, name: str) -> Any:
    """Return the extra state that a snapshot has under a name, in memory of its own.

    Raises:
        InvalidWeightsError: It has parts, and the snapshot does not say how they are held.
    """
    if name in payload.values:
        return values.decode(payload.values[name])
    if payload.structure is None and name not in payload.layout.by_name:
        fail([f"the extra state {name!r} has parts, and the snapshot does not say how they are held"])
    # Copies, since a module keeps what it is given, and this memory is soon another version's.
    with torch.inference_mode(False), torch.no_grad():
        own = {each: tensor.clone() for each, tensor in _part_of(payload, name, name).tensors.items()}
    if name in own:
        return own[name]
    assert payload.structure is not None
    return structure.rebuild_part(payload.structure, own, payload.values, name)


class _Shown(NamedTuple):
    """What a state dict shows, or is to show, by name."""

    tensors: dict[str, Tensor]
    values: dict[str, Json]
    refused: Collection[str] = ()
    """Names of what cannot be kept."""

    def differences(self, wanted: _Shown) -> list[str]:
        """Return the names, sorted, under which something else is wanted."""
        own, other = self.tensors.keys() | self.values.keys(), wanted.tensors.keys() | wanted.values.keys()
        return sorted(name for name in own | other | set(self.refused) if not self._agrees(wanted, name))

    def _agrees(self, wanted: _Shown, name: str) -> bool:
        if name in self.values and name in wanted.values:
            return value_hash(self.values[name]) == value_hash(wanted.values[name])
        one, other = self.tensors.get(name), wanted.tensors.get(name)
        return one is not None and other is not None and leaves.equal(one, other)


def _shown_by(module: nn.Module) -> _Shown:
    live = look_at(module)
    return _Shown(live.tensors, live.values, live.refused)


class Former:
    """What a module held: everything that is needed to put it back, and to tell whether it was."""

    def __init__(self, live: Live) -> None:
        assert live.module is not None
        self._module = live.module
        with _untouched("what the target holds could not be set aside"):
            self._set_aside(live)

    def _set_aside(self, live: Live) -> None:
        self._live = live
        self._parts = [(part, [dict(one) for one in _containers(part)]) for part in self._module.modules()]
        loose = (value for _, containers in self._parts for value in containers[0].values())
        found = {id(one): one for one in (*identity(self._module), *loose) if isinstance(one, Tensor)}
        self.tensors = [one for one in found.values() if leaves.refusal(one) is None]
        with torch.inference_mode(False), torch.no_grad():
            self._memory = [leaves.plain(one).detach() for one in self.tensors]
            self._before = [one.clone() for one in self._memory]
            tensors = {name: tensor.detach().clone() for name, tensor in live.tensors.items()}
        self._shown = _Shown(tensors, copy.deepcopy(live.values))

    def put_back(self, why: str) -> None:
        """Put it back, and look whether it is there.

        Args:
            why: What went wrong, for the error.

        Raises:
            NotPutBackError: The module is not what it was.
        """
        try:
            with _writing(self.tensors):
                if not self._put_back_memory() and not self._left():
                    return
                # What it derives from its weights follows them by its own code only.
                _call_load(self._module, _state(self._live, self._shown, {}, None))
                self._put_back_memory()
            left = self._left()
        except Exception as error:
            raise NotPutBackError(
                f"{why}; and what the target held before could not be put back ({type(error).__name__}: {error}), so "
                "that what it uses now is not known: make it anew"
            ) from error
        if left:
            raise NotPutBackError(
                f"{why}; and what the target held before did not come back in {', '.join(map(repr, left))}, so that "
                "what it uses now is not known: make it anew"
            )

    def _left(self) -> list[str]:
        return _shown_by(self._module).differences(self._shown)

    def _put_back_memory(self) -> bool:
        """Put attributes, tensors and their bytes back; tells whether anything was another one."""
        touched = False
        for part, former in self._parts:
            for now, items in zip(_containers(part), former, strict=True):
                touched |= _put_back_items(now, items)
        for tensor, memory, before in zip(self.tensors, self._memory, self._before, strict=True):
            if leaves.same_memory(leaves.plain(tensor)) != leaves.same_memory(memory):
                tensor.data = memory
                touched = True
            if not leaves.equal(memory, before):
                memory.copy_(before)
                touched = True
        return touched


def _containers(part: nn.Module) -> list[dict[Any, Any]]:
    own = vars(part)
    return [own, *(own[name] for name in _CONTAINERS if isinstance(own.get(name), dict))]


def _put_back_items(now: dict[Any, Any], before: Mapping[Any, Any]) -> bool:
    changed = [key for key, value in before.items() if key not in now or now[key] is not value]
    added = [key for key in now if key not in before]
    # Never emptied in between, since other threads may be calling the module.
    for key in changed:
        now[key] = before[key]
    for key in added:
        del now[key]
    return bool(changed or added)


def _wanted(plan: Plan, payload: Payload, own_names: Mapping[str, str]) -> _Shown:
    """Return what the module's state dict is to show, by the names that it has there."""
    assert plan.loaded is not None
    live, stored = plan.live, payload.tensors()
    with torch.inference_mode(False), torch.no_grad():
        tensors = {name: stored[theirs].to(live.tensors[name].dtype) for name, theirs in plan.loaded.items()}
    kept: dict[str, Json] = {}
    for theirs, value in payload.values.items():
        if live.extra_of(theirs) is None:
            kept[own_names[theirs]] = value
    for name in live.extras:
        part = _part_of(payload, name, own_names[name])
        tensors, kept = tensors | part.tensors, kept | part.values
    return _Shown(tensors, kept)


def _part_of(payload: Payload, name: str, own: str) -> _Shown:
    """Return what a snapshot has under the name of an extra state, as if it were called `own`."""

    def part(found: Mapping[str, _T]) -> dict[str, _T]:
        return {
            own + theirs[len(name) :]: value
            for theirs, value in found.items()
            if theirs == name or theirs.startswith(f"{name}.")
        }

    return _Shown(part(payload.tensors()), part(payload.values))


def _state(
    live: Live, shown: _Shown, extras: Mapping[str, Any], stored: Mapping[str, Json] | None
) -> OrderedDict[Any, Any]:
    """Put a state dict together, in the form of the module's own, of memory of its own.

    Args:
        extras: Extra states by name; without them they are what is shown.
        stored: The structure of the snapshot, if it tells which format each part had.
    """
    keys, tree = live.tree["dict"], live.tree
    nodes = dict(zip(keys, tree.get("items") or [None] * len(keys), strict=True))
    given = {key: extras[canonical(key)] for key in keys if canonical(key) in extras}
    rest = {key: node for key, node in nodes.items() if key not in given}
    built = structure.rebuild(
        {
            "format": structure.FORMAT,
            "ties": live.ties,
            "tree": {"dict": list(rest), "items": list(rest.values())},
        },
        shown.tensors,
        shown.values,
    )
    state = OrderedDict((key, given[key] if key in given else built[key]) for key in keys)
    metadata = copy.deepcopy(getattr(live.root, "_metadata", None))
    if isinstance(metadata, dict) and stored is not None and "metadata" in stored:
        told = structure.read_metadata(stored["metadata"])
        # Of another wrapping the parts have other names; those have the format that this module writes.
        metadata.update({part: about for part, about in told.items() if part in metadata})
    if metadata is not None:
        state._metadata = metadata  # type: ignore[attr-defined]
    return state


def _call_load(module: nn.Module, state: Mapping[Any, Any]) -> None:
    if codec.accepts(module.load_state_dict, "strict"):
        module.load_state_dict(state, strict=True)
    else:
        module.load_state_dict(state)


@contextmanager
def _untouched(what: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # most of all, memory that is short
        raise InvalidWeightsError(f"{what}; nothing was changed: {error}") from error


@contextmanager
def _writing(tensors: Iterable[Tensor]) -> Iterator[None]:
    # Tensors made in inference mode can be written to only there.
    with torch.inference_mode(any(tensor.is_inference() for tensor in tensors)), torch.no_grad():
        yield

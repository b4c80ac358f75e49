"""Are the tensors that a target shows the ones that it uses? And does a module load in a way of its own?

A state dict is what a module says of itself. Hooks and overrides may put copies into it, and a mapping may make its
values anew at each look: what is written there reaches nobody. So a tensor counts as the target's own only if a walk
over the target's objects finds it, or the memory that it looks at.

Rules: looking changes nothing. What is known of a target holds for as long as it consists of the same objects over the
same memory (`live.identity`, `Memory`), so that it is found out once, and not at each update.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import accumulate
from typing import Any, Final, NamedTuple

from torch import Tensor, nn

from weightledger.registry.weights import leaves

_KNOWN: Final = ("torch.nn.", "torch.jit.", "tensordict.", "torchrl.")
"""Packages whose own hooks and overrides read older formats or keep metadata: they show their tensors as they are, and
a copy in place leaves nothing behind that loading would have refreshed."""

_SAVING: Final = ("state_dict", "_save_to_state_dict")
_LOADING: Final = ("_load_from_state_dict",)
_SAVING_HOOKS: Final = ("_state_dict_pre_hooks", "_state_dict_hooks")
_LOADING_HOOKS: Final = ("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")


class Proof(NamedTuple):
    """What was found out about the tensors that a target shows."""

    strangers: tuple[str, ...]
    """Names of tensors that are not the target's own."""
    watched: tuple[Tensor, ...]
    """Tensors of the target's own that others look at. When their memory changes, those look at nothing of it."""


def prove(tensors: Mapping[str, Tensor], arrays: Mapping[str, Any], objects: Iterable[object]) -> Proof:
    """Find out which tensors are a target's own.

    Args:
        tensors: What it shows, by name.
        arrays: The NumPy arrays that some of them look at, by name.
        objects: What it consists of, as `live.identity` lists it.
    """
    every = list(objects)
    known = set(map(id, every))
    unseen = {
        name: tensor
        for name, tensor in tensors.items()
        if id(tensor) not in known and id(arrays.get(name, every)) not in known
    }
    if not unseen:
        return Proof((), ())
    owners = _Owners(one for one in every if isinstance(one, Tensor))
    found = {name: owners.of(tensor) for name, tensor in unseen.items() if tensor.numel()}
    return Proof(
        tuple(name for name, owner in found.items() if owner is None),
        tuple({id(owner): owner for owner in found.values() if owner is not None}.values()),
    )


def shapes_its_state(module: nn.Module) -> bool:
    """Tell whether code of the module's own decides what its state dict shows, and may decide anew at each look."""
    return any(_has_own(part, _SAVING, _SAVING_HOOKS) for part in module.modules())


def loads_in_its_way(module: nn.Module) -> bool:
    """Tell whether code of the module's own runs when it loads a state dict, which a copy in place would pass by."""
    # Only the outermost `load_state_dict` is ever called.
    return _has_own(module, ("load_state_dict",), ()) or any(
        _has_own(part, _LOADING, _LOADING_HOOKS) for part in module.modules()
    )


def _has_own(part: nn.Module, methods: tuple[str, ...], hooks: tuple[str, ...]) -> bool:
    own = vars(part)
    return any(name in own or not _is_known(getattr(type(part), name)) for name in methods) or any(
        not _is_known(hook) for name in hooks for hook in own.get(name, {}).values()
    )


def _is_known(function: Any) -> bool:
    return f"{_module_of(function)}.".startswith(_KNOWN)


def _module_of(function: Any) -> str:
    while isinstance(function, partial):
        function = function.func
    # What torch keeps of a hook is an object around it.
    inner = getattr(function, "hook", function) if type(function).__name__ == "_WrappedHook" else function
    named = inner if hasattr(inner, "__qualname__") else type(inner)
    return str(named.__module__)


class _Owners:
    """The tensors of a target, found by the memory that they look at."""

    def __init__(self, tensors: Iterator[Tensor]) -> None:
        every = [one for one in tensors if leaves.refusal(one) is None and one.numel()]
        self._same = {leaves.same_memory(leaves.plain(one)): one for one in every}
        # Only of these every byte between the first and the last one is their own.
        whole = sorted((one for one in every if one.is_contiguous()), key=_place)
        self._starts = [_place(one) for one in whole]
        self._reaching = list(accumulate(whole, _longer))
        """Of those that begin no later than each, the one that ends last."""

    def of(self, tensor: Tensor) -> Tensor | None:
        """Return the one whose memory a tensor looks at, all of it or a part."""
        same = self._same.get(leaves.same_memory(tensor))
        if same is not None:
            return same
        at = bisect_right(self._starts, _place(tensor)) - 1
        return self._reaching[at] if at >= 0 and _reach(self._reaching[at]) >= _reach(tensor) else None


def _place(tensor: Tensor) -> tuple[str, int]:
    return str(tensor.device), tensor.data_ptr()


def _longer(one: Tensor, other: Tensor) -> Tensor:
    return max(one, other, key=_reach)


def _reach(tensor: Tensor) -> tuple[str, int]:
    return str(tensor.device), leaves.end(tensor)

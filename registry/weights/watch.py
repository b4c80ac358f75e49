"""Did anybody but us write into a worker's weights? Cheap enough to be asked before each rollout.

Rules kept here
- PyTorch counts the writes into a tensor (`_version`), whoever makes them: an optimizer, `load_state_dict`, `copy_`. A
  tensor that was replaced shows, and so does memory that was (`parameter.data = …`, `.to(…)`).
- `parameter.data.copy_(…)`, NumPy and other processes write without being counted. The bytes in the middle of each
  tensor are compared for that: a write to the whole tensor shows there, one to a few other elements does not. Memory of
  other devices than the CPU is not looked at.
- Buffers are no weights: some modules write into theirs as they act. In a target without a single `nn.Parameter`, as a
  plain state dict is, nothing tells them apart, so that every tensor counts.

Only a probe hashes everything.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase
from operator import attrgetter, is_
from typing import Any

import numpy as np
from torch import Tensor, nn

from weightledger.registry.weights import leaves
from weightledger.registry.weights.live import align, identity, look_at, same
from weightledger.registry.weights.memory import Memory

_FEW = 256
"""Of more tensors than these only so many are looked at before each push, which writes them all anyway."""
_PART_BYTES = 64
_writes = attrgetter("_version")


class Watch:
    """The weights of one target as they were at the last `remember`. Keeps them alive.

    Args:
        target: a module, TensorDict or mapping of tensors.
        ignore: globs of the names of tensors that the worker's own code writes, besides buffers.
    """

    def __init__(self, target: Any, ignore: Collection[str] = ()) -> None:
        self.target = target
        self.ignore = tuple(ignore)
        self._weights, self._others = _split(target, self.ignore)
        self._all = _Tensors(self._weights)
        few = self._weights[:: -(-len(self._weights) // _FEW)] if len(self._weights) > _FEW else None
        self._few = self._all if few is None else _Tensors(few)
        self._rest = _Tensors(self._others)
        self._structure: _Tables | _Objects = _Tables.of(target) or _Objects(target)

    def remember(self) -> None:
        """Take what is there now for ours."""
        for tensors in (self._all, self._few, self._rest):
            tensors.remember()

    def is_untouched(self, target: Any, *, hurried: bool = False) -> bool:
        """Tell whether a target, which should be the one that is watched, has the weights that were remembered.

        Args:
            target: what the worker uses now; another container of the same tensors will do.
            hurried: of very many tensors look at some.
        """
        if hurried and self._few is not self._all:
            return target is self.target and self._few.are_untouched()
        if target is self.target and self._structure.is_unchanged():
            return self._all.are_untouched()
        if same(list(_split(target, self.ignore)[0]), list(self._weights)):
            return self._all.are_untouched()
        return Watch(target, self.ignore)._all.look_like(self._all)

    def is_whole(self) -> bool:
        """Tell whether buffers, too, are what was remembered."""
        found = _split(self.target, self.ignore)[1]
        return same(list(found), list(self._others)) and self._rest.are_untouched()

    def shares_with(self, other: Watch) -> bool:
        """Tell whether another watch looks at some of the same memory."""
        return not self._all.places().isdisjoint(other._all.places())


def written_by_forward(target: Any, known_names: Collection[str]) -> set[str]:
    """Return the names of a target's buffers and extra state, which the module's own forward may write.

    Args:
        target: a module, TensorDict or mapping of tensors.
        known_names: the names of a version, as which those of the target are told.
    """
    live = look_at(target)
    weights = {leaves.same_memory(tensor) for tensor in _split(target, ())[0]}
    renamed = align(live.all_names(), set(known_names))
    every = {**live.tensors, **live.optional}
    found = {name for name, tensor in every.items() if leaves.same_memory(tensor) not in weights}
    found |= {name for name in live.values if live.extra_of(name) is not None}
    return {renamed[name] for name in found}


def matches_any(name: str, globs: Iterable[str]) -> bool:
    """Tell whether one of some globs stands for a name."""
    return any(fnmatchcase(name, glob) for glob in globs)


class _Tensors:
    """Some tensors, and what they looked like."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self._tensors = tensors
        # Inference tensors have no counter.
        self._counted = [tensor for tensor in tensors if not tensor.is_inference()]
        self._memory = Memory(tensors)
        # An alias keeps the memory that is read without torch, should the tensor be given another one.
        self._kept = [leaves.plain(tensor).detach() for tensor in tensors if tensor.device.type == "cpu"]
        self._parts = [part for tensor in self._kept if (part := _middle(tensor)) is not None]
        self._writes, self._bytes = 0, b""

    def remember(self) -> None:
        self._writes, self._bytes = sum(map(_writes, self._counted)), b"".join(self._parts)

    def are_untouched(self) -> bool:
        return (
            self._writes == sum(map(_writes, self._counted))
            and self._memory.unchanged()
            and self._bytes == b"".join(self._parts)
        )

    def look_like(self, others: _Tensors) -> bool:
        self.remember()
        places, theirs = (list(map(leaves.same_memory, each._tensors)) for each in (self, others))
        return (self._writes, self._bytes, places) == (others._writes, others._bytes, theirs)

    def places(self) -> set[int]:
        return {tensor.data_ptr() for tensor in self._tensors}


class _Tables:
    """The tables in which a module keeps its parameters and parts: to look into them is sooner done than to walk."""

    def __init__(self, tables: list[dict[str, Any]]) -> None:
        self._tables = tables
        self._entries = [list(table.values()) for table in tables]

    @classmethod
    def of(cls, target: Any) -> _Tables | None:
        """Return a module's tables; None where it has other ones, as scripted modules do."""
        if not isinstance(target, nn.Module):
            return None
        every = [table for part in target.modules() for table in (part._parameters, part._modules)]
        return (
            cls([each for each in every if each]) if all(isinstance(each, dict) for each in every) else None
        )

    def is_unchanged(self) -> bool:
        return all(
            len(table) == len(entries) and all(map(is_, table.values(), entries))
            for table, entries in zip(self._tables, self._entries, strict=True)
        )


class _Objects:
    """The objects of a target of any kind."""

    def __init__(self, target: Any) -> None:
        self._target = target
        self._objects = identity(target)

    def is_unchanged(self) -> bool:
        return same(identity(self._target), self._objects)


def _split(target: Any, ignore: Collection[str]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the weights of a target and its other tensors."""
    if isinstance(target, nn.Module):
        weights, others = list[Tensor](target.parameters()), list(target.buffers())
    else:
        every = list(_leaves(target))
        weights = [tensor for tensor in every if isinstance(tensor, nn.Parameter)] or every
        chosen = set(map(id, weights))
        others = [tensor for tensor in every if id(tensor) not in chosen]
    if ignore:
        live = look_at(target)
        named = {**live.tensors, **live.optional}
        left_out = {leaves.same_memory(each) for name, each in named.items() if matches_any(name, ignore)}
        others += [tensor for tensor in weights if leaves.same_memory(tensor) in left_out]
        weights = [tensor for tensor in weights if leaves.same_memory(tensor) not in left_out]
    return weights, others


def _leaves(target: Any) -> Iterable[Tensor]:
    for item in identity(target):
        if isinstance(item, Tensor):
            yield item
        elif isinstance(item, np.ndarray):
            yield leaves.from_numpy(item)


def _middle(tensor: Tensor) -> Any:
    """Return the bytes in the middle of a tensor, as they are whenever they are looked at."""
    size = tensor.element_size()
    if not tensor.numel():
        return None
    if not tensor.is_contiguous():
        return (ctypes.c_char * size).from_address(tensor.data_ptr())
    whole = tensor.numel() * size
    length = min(whole, _PART_BYTES)
    return (ctypes.c_char * length).from_address(tensor.data_ptr() + (whole - length) // 2)

"""Live weights as a target: their leaves under canonical names, where values are set, what they hold now.

Rules: looking changes nothing. A name means the same here as in `codec`, so that a module, its state dict and a
TensorDict of it are targets of the same snapshots. A module's non-persistent buffers are found too, apart.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from operator import is_
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from weightledger.registry.errors import InvalidWeightsError
from weightledger.registry.values import Json
from weightledger.registry.weights import codec, leaves, names
from weightledger.registry.weights.digest import content_digest, tensor_hash, value_hash
from weightledger.registry.weights.names import Path
from weightledger.registry.weights.structure import Node

_PARTLESS: Final = leaves.PLAIN_CLASSES | {type(None)}

WRAPPER: Final = "module."
"""What data-parallel wrappers put before every name."""


@dataclass
class Live:
    """The leaves of a target."""

    root: Any
    """The container that paths lead through; a state dict for a module."""
    module: nn.Module | None
    tensors: dict[str, Tensor]
    """Canonical name → live tensor, every tied name included."""
    values: dict[str, Json]
    numpy: dict[str, Any]
    paths: dict[str, Path]
    tree: Node
    """How the root holds its leaves, for `structure.rebuild`."""
    ties: dict[str, str]
    """Each further name of a tensor → the first one."""
    optional: dict[str, Tensor] = field(default_factory=dict)
    """Non-persistent buffers: written when a snapshot has them, left alone when it does not."""
    refused: set[str] = field(default_factory=set)
    """Names of the leaves that `problems` tells of."""
    optional_refused: dict[str, str] = field(default_factory=dict)
    """Non-persistent buffers that cannot be written to, and why."""
    extras: dict[str, nn.Module] = field(default_factory=dict)
    """Canonical name of an extra state → the module that gives and takes it."""
    problems: list[str] = field(default_factory=list)

    def extra_of(self, name: str) -> str | None:
        """Return the extra state that a name is, or is part of."""
        return next((own for own in self.extras if name == own or name.startswith(f"{own}.")), None)

    def all_names(self) -> set[str]:
        """Return every name, those of optional and refused leaves included."""
        regular = self.tensors.keys() | self.values.keys() | self.extras.keys() | self.refused
        return regular | self.optional.keys() | self.optional_refused.keys()


def look_at(target: object) -> Live:
    """Find the leaves of a module, TensorDict or mapping.

    Raises:
        InvalidWeightsError: It is none of these.
    """
    td = sys.modules.get("tensordict")
    if td is not None and isinstance(target, td.TensorDictBase):
        module, root = None, target
    elif isinstance(target, nn.Module):
        module, root = target, codec.state_of(target)
    elif isinstance(target, Mapping):
        module, root = None, target
    else:
        raise InvalidWeightsError(
            f"expected a module, TensorDict or mapping to restore into, found {type(target).__qualname__}"
        )
    walk = codec.survey(root)
    tensors = dict(walk.tensors)
    tensors.update({alias: walk.tensors[first] for alias, first in walk.ties.items()})
    live = Live(root, module, tensors, walk.values, walk.numpy, walk.paths, walk.tree, walk.ties)
    live.refused, live.problems = walk.refused, walk.problems
    if module is not None:
        _add_module_parts(live, module)
    return live


def live_digest(target: object, known_names: Collection[str] | None = None) -> tuple[str, dict[str, str]]:
    """Hash what a target holds now.

    Args:
        target: A module, TensorDict or mapping.
        known_names: The names of a version, to compare with: a `module.` prefix is then dropped or added as
            `copy_into` would, non-persistent buffers are left out unless the version has them, and so are further
            names of tied tensors.

    Returns:
        The content digest, and the hash of every name; both compare with those of the version.

    Raises:
        InvalidWeightsError: Something in the target has no content, for example meta tensors; names it.
    """
    live = look_at(target)
    if live.problems:
        raise InvalidWeightsError("the target has no content to hash:\n  " + "\n  ".join(live.problems))
    wanted = {name: name for name in live.tensors.keys() | live.values.keys()}
    if known_names is not None:
        renamed = align(live.all_names(), set(known_names))
        spare = {
            name
            for tied in tied_groups(live.tensors)
            if any(renamed[one] in known_names for one in tied)
            for name in tied
            if renamed[name] not in known_names
        }
        wanted = {name: renamed[name] for name in wanted if name not in spare}
        wanted |= {name: renamed[name] for name in live.optional if renamed[name] in known_names}
    hashes = {new: _hash_of(live, name) for name, new in wanted.items()}
    return content_digest(hashes), dict(sorted(hashes.items()))


def align(own: set[str], other: set[str]) -> dict[str, str]:
    """Map each of one side's names to what the other side calls it.

    Only a `module.` that ALL names of one side carry, and none of the other, is dropped or added.
    """
    if own and other:
        if _all_wrapped(own) and not any(name.startswith(WRAPPER) for name in other):
            return {name: name.removeprefix(WRAPPER) for name in own}
        if _all_wrapped(other) and not any(name.startswith(WRAPPER) for name in own):
            return {name: WRAPPER + name for name in own}
    return {name: name for name in own}


def set_at(live: Live, path: Path, value: Any) -> None:
    """Put a plain value, or a NumPy scalar, where a path leads.

    Raises:
        TypeError: What holds it cannot be changed.
        RuntimeError: A TensorDict there is locked from outside of the target.
    """
    if live.module is not None:
        raise TypeError("a module has no place for plain values other than its extra state")
    holder = live.root
    locked: Any = None
    for key in path[:-1]:
        if locked is None and getattr(holder, "is_locked", False):
            locked = holder
        holder = _step(holder, key)
    if locked is None and getattr(holder, "is_locked", False):
        locked = holder
    if locked is None:
        _put(holder, path[-1], value)
        return
    # Unlocked at the outermost, since a part cannot be unlocked alone.
    locked.unlock_()
    try:
        _put(holder, path[-1], value)
    finally:
        locked.lock_()


def _put(holder: Any, key: Any, value: Any) -> None:
    if hasattr(holder, "tensordicts"):
        before = holder.tensordicts[key]
        holder.tensordicts[key] = type(before)(value, batch_size=before.batch_size)
    elif hasattr(holder, "set_non_tensor"):
        holder.set_non_tensor(key, value)
    else:
        holder[key] = value


def _step(holder: Any, key: Any) -> Any:
    if hasattr(holder, "tensordicts"):
        found = holder.tensordicts[key]
    else:
        found = holder.get(key) if hasattr(holder, "batch_size") else holder[key]
    return found.data if type(found).__name__ == "NonTensorData" else found


def canonical(key: str) -> str:
    """Return the canonical name that a key of a state dict stands for."""
    return names.final(names.join(None, key, leaf=True))


def identity(target: object) -> list[object]:
    """List the objects that a target consists of, keys too: as long as all are the same, so are names and leaves."""
    td = sys.modules.get("tensordict")
    found: list[object] = []
    stack: list[Any] = [target]
    while stack:
        item = stack.pop()
        found.append(item)
        if isinstance(item, Tensor):
            continue
        if td is not None and isinstance(item, td.TensorDictBase):
            if hasattr(item, "tensordicts"):
                stack += item.tensordicts
            else:
                found += item.keys()
                stack += item.values()
        elif isinstance(item, nn.Module):
            for children in (item._parameters, item._buffers, item._modules):
                # Those of scripted modules are no mappings, but have their methods.
                found += children.keys()
                _take(children.values(), found, stack)
            # Another hook may show other tensors, or refresh what was derived from them.
            found += item._state_dict_hooks.values() if item._state_dict_hooks else ()
            found += item._state_dict_pre_hooks.values() if item._state_dict_pre_hooks else ()
            found += item._load_state_dict_pre_hooks.values() if item._load_state_dict_pre_hooks else ()
            found += item._load_state_dict_post_hooks.values() if item._load_state_dict_post_hooks else ()
        elif isinstance(item, Mapping):
            found += item
            _take(item.values(), found, stack)
        elif isinstance(item, (list, tuple)):
            stack += item
    return found


def same(one: list[object], other: list[object]) -> bool:
    """Tell whether two lists hold the same objects."""
    return len(one) == len(other) and all(map(is_, one, other))


def _take(parts: Iterable[Any], found: list[object], stack: list[Any]) -> None:
    every = list(parts)
    # Tensors have no parts of their own; they may be ten thousand.
    if _PARTLESS.issuperset(map(type, every)):
        found += every
    else:
        stack += every


def _all_wrapped(found: Iterable[str]) -> bool:
    return all(name.startswith(WRAPPER) for name in found)


def _add_module_parts(live: Live, module: nn.Module) -> None:
    persistent = {canonical(key) for key in live.root}
    for key, buffer in module.named_buffers(remove_duplicate=False):
        name = canonical(key)
        if name in persistent:
            continue
        reason = leaves.refusal(buffer)
        if reason is None:
            live.optional[name] = leaves.plain(buffer)
        else:
            live.optional_refused[name] = f"{names.show((key,))} {reason}"
    for prefix, part in module.named_modules(remove_duplicate=False):
        if type(part).get_extra_state is not nn.Module.get_extra_state:
            key = f"{prefix}.{names.EXTRA_STATE}" if prefix else names.EXTRA_STATE
            live.extras[canonical(key)] = part


def _hash_of(live: Live, name: str) -> str:
    if name in live.values:
        return value_hash(live.values[name])
    tensor = live.tensors[name] if name in live.tensors else live.optional[name]
    with torch.no_grad():
        plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
        # Through a row of bytes, since NumPy has no name for bfloat16 and the like.
        data: np.ndarray[Any, Any] = plain.view(-1).view(torch.uint8).numpy()
    return tensor_hash(leaves.CODES[tensor.dtype], tensor.shape, data.data)


def tied_groups(tensors: Mapping[str, Tensor]) -> Iterator[list[str]]:
    """Yield the names that stand for one piece of memory, in groups of one or more."""
    groups: dict[tuple[object, ...], list[str]] = {}
    for at, (name, tensor) in enumerate(tensors.items()):
        groups.setdefault(leaves.same_memory(tensor) if tensor.numel() else (at,), []).append(name)
    yield from groups.values()

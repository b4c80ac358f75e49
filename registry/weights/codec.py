"""Weights ⇄ named tensors, values, and the structure that puts them together again.

Rules:

* Nothing is copied here: the tensors of a `Content` are the live ones.
* Nothing is dropped in silence. What cannot be kept is refused, all of it in one error, before anything else happens.
* Nothing is pickled. A structure is JSON, and rebuilding it makes containers, tensors and plain values only.
* Two names are tied when they are one piece of memory seen in one way; equal values tie nothing.
* A list or tuple of plain values is one value; so is a module's extra state or a `NonTensorData` without tensors.
  Dictionaries are containers: each of their leaves has its own name.
* Tensor subclasses, `requires_grad`, devices and lock states are not kept.

`structure` says what a structure looks like and puts it together again.
"""

from __future__ import annotations

import inspect
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import numpy as np
from torch import Tensor, nn

from weightledger.registry import values
from weightledger.registry.errors import InvalidWeightsError
from weightledger.registry.values import Json
from weightledger.registry.weights import leaves, names
from weightledger.registry.weights.names import Key, Path
from weightledger.registry.weights.structure import FORMAT, Node, note_metadata, rebuild

if TYPE_CHECKING:
    from tensordict import TensorDictBase  # type: ignore[import-untyped]

Kind: TypeAlias = Literal["module", "mapping", "tensordict", "extra"]

__all__ = ["Content", "Kind", "Walk", "flatten", "flatten_extra", "rebuild", "survey"]

_STATIC_SCALARS: Final = (np.str_, np.bytes_, np.datetime64, np.timedelta64)


@dataclass(frozen=True)
class Content:
    """Weights taken apart. Holds the live tensors, so it says what they hold now, not what they held."""

    kind: Kind
    tensors: dict[str, Tensor]
    """Canonical name → live tensor; of tied names only the first."""
    ties: dict[str, str]
    """Each other tied name → the first one."""
    values: dict[str, Json]
    """Canonical name → non-tensor value, as `values.encode` gave it."""
    structure: dict[str, Json]
    """What `rebuild` needs."""


def flatten(weights: object, *, where: str = "weights") -> Content:
    """Take weights apart.

    Args:
        weights: A module (its state dict is taken), a TensorDict, or a mapping of tensors, nested or not.
        where: What they are, as an error should call them.

    Raises:
        InvalidWeightsError: Something in them cannot be kept; names every such key and why.
    """
    if isinstance(weights, Tensor):
        raise InvalidWeightsError(
            f"{where}: expected a module, TensorDict or mapping, found a tensor: give it a name"
        )
    if _is_tensordict(weights):
        return _flatten(weights, "tensordict", where)
    if isinstance(weights, nn.Module):
        return _flatten(state_of(weights), "module", where)
    if isinstance(weights, Mapping):
        return _flatten(weights, "mapping", where)
    # The state dict of a tensorclass would lack its text.
    way = ".to_tensordict()" if _is_collection(weights) else ".state_dict()"
    hint = f": pass its {way}" if hasattr(weights, "state_dict") else ""
    raise InvalidWeightsError(
        f"{where}: expected a module, TensorDict or mapping, found {_type(weights)}{hint}"
    )


def flatten_extra(extra: object, *, where: str = "extra") -> Content:
    """Take any nest of mappings, lists, tuples, tensors and plain values apart, for example an optimizer's state.

    Raises:
        InvalidWeightsError: Something in it cannot be kept; names every such key and why.
    """
    return _flatten(extra, "extra", where)


def state_of(module: nn.Module) -> Mapping[str, Any]:
    """Return a module's state dict, with the tensors themselves in it.

    Raises:
        InvalidWeightsError: Its own code raised, or gave something else.
    """
    plain = type(module).state_dict is nn.Module.state_dict or accepts(module.state_dict, "keep_vars")
    try:
        state = module.state_dict(keep_vars=True) if plain else module.state_dict()
    except Exception as error:  # Whatever a module's own code raises, it is the module that cannot be kept.
        raise InvalidWeightsError(
            f"the state_dict of {_type(module)} raised {type(error).__name__}: {error}"
        ) from error
    if not isinstance(state, Mapping):
        raise InvalidWeightsError(
            f"the state_dict of {_type(module)} gave a {_type(state)}, expected a mapping of tensors"
        )
    return state


def survey(root: object) -> Walk:
    """Look at every leaf of a nest of containers, without complaint: `problems` lists what cannot be kept."""
    walk = Walk({})
    walk.tree = walk.node(root, (), None, 0)
    overrides = _resolve(walk)
    if overrides and not walk.problems:
        # Rare, so it is paid for by a second walk rather than by every leaf of the first.
        walk = Walk(overrides)
        walk.tree = walk.node(root, (), None, 0)
    return walk


def _flatten(root: object, kind: Kind, where: str) -> Content:
    walk = survey(root)
    structure: dict[str, Json] = {"format": FORMAT, "kind": kind, "ties": walk.ties, "tree": walk.tree}
    metadata = getattr(root, "_metadata", None)
    if kind != "tensordict" and isinstance(metadata, Mapping):
        structure["metadata"] = walk.metadata(metadata, "_metadata")
    if walk.problems:
        listing = "\n  ".join(walk.problems)
        raise InvalidWeightsError(f"{where} cannot be stored; nothing was written:\n  {listing}")
    return Content(kind, walk.tensors, walk.ties, walk.values, structure)


def _resolve(walk: Walk) -> dict[Path, str]:
    overrides: dict[Path, str] = {}
    for plain, paths in walk.clashes.items():
        try:
            overrides.update(names.resolve(plain, [walk.paths[plain], *paths]))
        except ValueError as error:
            walk.problems.append(str(error))
    return overrides


class Walk:
    """One pass over a nest of containers, which gathers leaves, refusals and names that clash."""

    def __init__(self, overrides: Mapping[Path, str]) -> None:
        self.tree: Node = None
        self.tensors: dict[str, Tensor] = {}
        """Canonical name → live tensor; of tied names only the first."""
        self.ties: dict[str, str] = {}
        self.values: dict[str, Json] = {}
        self.numpy: dict[str, Any] = {}
        """Name → the array or scalar that one of the tensors looks at."""
        self.paths: dict[str, Path] = {}
        """Name → the keys that lead there."""
        self.problems: list[str] = []
        self.refused: set[str] = set()
        """Names of the tensors and arrays among the problems."""
        self.clashes: dict[str, list[Path]] = {}
        self._overrides = overrides
        self._seen: dict[tuple[object, ...], str] = {}

    def node(self, item: object, path: Path, plain: str | None, depth: int) -> Node:
        """Return the node of whatever stands at a path; `plain` is its plain name as a leaf."""
        if isinstance(item, Tensor):
            return self._tensor(item, path, plain)
        if isinstance(item, np.ndarray) or (
            isinstance(item, np.generic) and not isinstance(item, _STATIC_SCALARS)
        ):
            return self._numpy(item, path, plain)
        if depth > values.MAX_DEPTH:
            self._refuse(path, f"is nested deeper than {values.MAX_DEPTH} levels, or holds itself")
            return None
        if _is_collection(item):
            return self._collection(item, path, plain, depth)
        if isinstance(item, nn.Module):
            self._refuse(path, "is a module: pass its .state_dict()")
            return None
        if isinstance(item, Mapping):
            return self._mapping(item, path, depth)
        if type(item) in (list, tuple) and not _plain_sequence(item):
            kind = "list" if type(item) is list else "tuple"
            return {kind: self._sequence(item, path, depth)}  # type: ignore[arg-type]
        return self._value(item, path, plain)

    def _mapping(self, item: Mapping[Any, Any], path: Path, depth: int) -> Node:
        node = self._container("dict", item, path, depth)
        metadata = getattr(item, "_metadata", None)
        if not isinstance(metadata, Mapping):
            if isinstance(item, OrderedDict):
                node["ordered"] = True
        elif path:  # That of the outermost is the structure's own.
            node |= {
                "ordered": True,
                "metadata": self.metadata(metadata, f"the _metadata of {names.show(path)}"),
            }
        return node

    def metadata(self, metadata: Mapping[Any, Any], where: str) -> Json:
        """Return the `_metadata` of a state dict as a structure has it."""
        try:
            return note_metadata(metadata, where)
        except InvalidWeightsError as error:
            self.problems.append(str(error))
            return None

    def _container(self, tag: str, container: Mapping[Any, Any], path: Path, depth: int) -> dict[str, Json]:
        keys: list[Key] = []
        nodes: list[Node] = []
        prefix = self._prefix(path)
        for key, item in container.items():
            if (type(key) is not str and type(key) is not int) or (
                type(key) is str and values.surrogate(key)
            ):
                what = "lone surrogates" if isinstance(key, str) else f"the type {_type(key)}"
                shown = f"the key {key!a:.80} of {names.show(path)}" if path else f"the key {key!a:.80}"
                self.problems.append(f"{shown} has {what}; expected text (UTF-8) or whole numbers as keys")
                continue
            keys.append(key)
            here = (*path, key)
            plain = names.join(prefix, key, leaf=True)
            if names.is_extra_state(key) and _tensor_free(item):
                nodes.append(self._value(item, here, plain))
            else:
                nodes.append(self.node(item, here, plain, depth + 1))
        # The usual case, tensors under their own names only, needs no list of nodes.
        usual = all(node is None for node in nodes)
        return {tag: keys} if usual else {tag: keys, "items": nodes}

    def _sequence(self, items: Iterable[Any], path: Path, depth: int) -> list[Node]:
        prefix = self._prefix(path)
        return [
            self.node(item, (*path, at), names.join(prefix, at, leaf=True), depth + 1)
            for at, item in enumerate(items)
        ]

    def _prefix(self, path: Path) -> str | None:
        prefix = None
        for key in path:
            prefix = names.join(prefix, key, leaf=False)
        return prefix

    def _collection(self, item: Any, path: Path, plain: str | None, depth: int) -> Node:
        td = sys.modules["tensordict"]
        if isinstance(item, td.NonTensorData):
            data = item.data
            inner = (
                self._value(data, path, plain)
                if _tensor_free(data)
                else self.node(data, path, plain, depth + 1)
            )
            return {"nontensor": inner, "batch": list(item.batch_size)}
        if isinstance(item, td.LazyStackedTensorDict):
            kind = "nonstack" if isinstance(item, td.NonTensorStack) else "stack"
            node: Node = {kind: self._sequence(item.tensordicts, path, depth), "dim": item.stack_dim}
            return self._dimension_names(item, node)
        if isinstance(item, (td.TensorDict, td.TensorDictParams)):
            node = self._container("td", item, path, depth)
            return self._dimension_names(item, {**node, "batch": list(item.batch_size)})
        self._refuse(path, f"is a {_type(item)}, whose class would be lost: pass its .to_tensordict()")
        return None

    def _dimension_names(self, item: TensorDictBase, node: Node) -> Node:
        given = item.names
        if any(name is not None for name in given):
            node["names"] = list(given)
        return node

    def _name(self, path: Path, plain: str | None) -> str:
        name = names.final(plain)
        if self._overrides:
            name = self._overrides.get(path, name)
        if name in self.paths:
            self.clashes.setdefault(name, []).append(path)
        else:
            self.paths[name] = path
        return name

    def _tensor(self, tensor: Tensor, path: Path, plain: str | None, source: Any = None) -> Node:
        reason = leaves.refusal(tensor)
        if reason is not None:
            self._refuse(path, reason, plain)
            return None
        name = self._name(path, plain)
        tensor = leaves.plain(tensor)
        first = self._seen.setdefault(leaves.same_memory(tensor), name) if tensor.numel() else name
        if first == name:
            self.tensors[name] = tensor
        else:
            self.ties[name] = first
        derived = name == (plain or "")
        if source is None:
            return None if derived else {"tensor": name}
        self.numpy[name] = source
        return {"array" if isinstance(source, np.ndarray) else "scalar": None if derived else name}

    def _numpy(self, item: Any, path: Path, plain: str | None) -> Node:
        array = isinstance(item, np.ndarray)
        try:
            tensor = leaves.from_numpy(item if array else np.asarray(item))
        except ValueError as error:
            self._refuse(path, str(error), plain)
            return None
        return self._tensor(tensor, path, plain, item)

    def _value(self, item: object, path: Path, plain: str | None) -> Node:
        try:
            encoded = values.encode(item, names.show(path) if path else "the value")
        except InvalidWeightsError as error:
            self.problems.append(str(error))
            return None
        name = self._name(path, plain)
        self.values[name] = encoded
        return {"value": None if name == (plain or "") else name}

    def _refuse(self, path: Path, reason: str, plain: str | None = None) -> None:
        self.refused.add(names.final(plain))
        self.problems.append(f"{names.show(path) if path else 'the value'} {reason}")


# ---------------------------------------------------------------------- small questions


def accepts(function: Callable[..., Any], name: str) -> bool:
    """Tell whether a function takes an argument of that name; one that does not say is taken to."""
    try:
        known = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return True
    return name in known or any(one.kind is inspect.Parameter.VAR_KEYWORD for one in known.values())


def _plain_sequence(item: Any, depth: int = values.MAX_DEPTH) -> bool:
    return depth > 0 and all(
        values.is_plain(part) or (type(part) in (list, tuple) and _plain_sequence(part, depth - 1))
        for part in item
    )


def _tensor_free(item: object, depth: int = values.MAX_DEPTH) -> bool:
    if depth == 0 or isinstance(item, (Tensor, np.ndarray)) or _is_collection(item):
        return False
    parts = item.values() if isinstance(item, Mapping) else item if isinstance(item, (list, tuple)) else ()
    return all(_tensor_free(part, depth - 1) for part in parts)


def _is_tensordict(item: object) -> bool:
    td = sys.modules.get("tensordict")
    return td is not None and isinstance(item, td.TensorDictBase)


def _is_collection(item: object) -> bool:
    # Whoever passes a TensorDict has imported tensordict; whoever does not need not wait for it.
    td = sys.modules.get("tensordict")
    return td is not None and bool(td.is_tensor_collection(item))


def _type(value: object) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"

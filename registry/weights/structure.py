"""Structures: JSON that says how tensors and values were held, and what puts them together again.

    {"format": 1, "kind": "module", "ties": {"head.weight": "embed.weight"}, "metadata": …, "tree": …}

A tree has a node for every container and leaf. `null` is a tensor under the name that its path gives it; every other
node is an object whose first key says what it is:

    {"tensor": name}                        a tensor whose name is not the plain one
    {"array": name}, {"scalar": name}       a NumPy array or scalar
    {"value": name}                         a plain value
    {"dict": keys, "items": nodes}          a dictionary; without `items` all of them are `null`
    {"dict": …, "ordered": true, "metadata": …}  an `OrderedDict`, and its `_metadata` if it is a state dict
    {"list": nodes}, {"tuple": nodes}
    {"td": keys, "items": nodes, "batch": sizes, "names": dimension names}
    {"stack": nodes, "dim": n}              a lazy stack
    {"nontensor": node, "batch": sizes}, {"nonstack": nodes, "dim": n}

In a `_metadata`, `{"$torch.Size": sizes}` and `{"$torch.device": text}` stand for these: TensorDicts note both.

Where a leaf's name is `null`, the path gives that too. Building makes containers, tensors and plain values; no other
class, no code.
"""

from __future__ import annotations

import importlib
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from weightledger.registry import values
from weightledger.registry.errors import CorruptionError
from weightledger.registry.values import Json
from weightledger.registry.weights import names
from weightledger.registry.weights.names import Key

Node: TypeAlias = Any
"""A node of a structure's tree: None, or a JSON object."""

FORMAT: Final = 1
_SIZE: Final = "$torch.Size"
_DEVICE: Final = "$torch.device"


def rebuild(
    structure: Mapping[str, Json],
    tensors: Mapping[str, Tensor],
    kept: Mapping[str, Json],
    *,
    copy: bool = True,
) -> Any:
    """Put weights together again, in the kind that was published.

    Args:
        structure: As `flatten` gave it.
        tensors: Every name, tied ones included.
        kept: The non-tensor values, encoded.
        copy: Whether each leaf gets memory of its own; names that the structure ties stay one tensor. Without it
            the leaves are the tensors given.

    Returns:
        A state dict (`OrderedDict` with `_metadata`) for a module, a dict or `OrderedDict` for a mapping, a
        `TensorDict`, or what `flatten_extra` was given.

    Raises:
        CorruptionError: A name is missing, or the structure is not one of ours.
    """
    if not isinstance(structure, Mapping):
        raise CorruptionError(f"expected a structure, found {type(structure).__name__}")
    if structure.get("format") != FORMAT:
        raise CorruptionError(
            f"expected a structure of format {FORMAT}, found {structure.get('format')!r}: upgrade weightledger"
        )
    try:
        builder = _Builder(dict(structure["ties"]), tensors, kept, copy)
        with torch.inference_mode(False), torch.no_grad():
            built = builder.build(structure["tree"], None, None)
        return _state_dict(built, structure["metadata"]) if "metadata" in structure else built
    except (
        AttributeError,
        IndexError,
        KeyError,
        RecursionError,
        StopIteration,
        TypeError,
        ValueError,
    ) as error:
        raise CorruptionError(
            f"the structure of the snapshot cannot be followed: {type(error).__name__}: {error}"
        ) from error


def _state_dict(built: Mapping[Key, Any], encoded: Json) -> OrderedDict[Key, Any]:
    state, metadata = OrderedDict(built), read_metadata(encoded)
    state._metadata = OrderedDict(metadata) if isinstance(metadata, dict) else metadata  # type: ignore[attr-defined]
    return state


def note_metadata(metadata: Mapping[Any, Any], where: str) -> Json:
    """Encode the `_metadata` of a state dict.

    Raises:
        InvalidWeightsError: It holds something that cannot be kept; names the place.
    """
    return values.encode(_without_classes(metadata), where)


def read_metadata(encoded: Json) -> Any:
    """Return a `_metadata` that `note_metadata` encoded."""
    return _with_classes(values.decode(encoded))


def _without_classes(item: Any) -> Any:
    if isinstance(item, torch.Size):
        return {_SIZE: list(item)}
    if isinstance(item, torch.device):
        return {_DEVICE: str(item)}
    return {key: _without_classes(part) for key, part in item.items()} if isinstance(item, Mapping) else item


def _with_classes(item: Any) -> Any:
    if not isinstance(item, dict):
        return item
    if item.keys() == {_SIZE}:
        return torch.Size(item[_SIZE])
    if item.keys() == {_DEVICE}:
        return torch.device(item[_DEVICE])
    return {key: _with_classes(part) for key, part in item.items()}


def rebuild_part(
    structure: Mapping[str, Json], tensors: Mapping[str, Tensor], kept: Mapping[str, Json], name: str
) -> Any:
    """Put together what stands under one plain name, leaf or container.

    Raises:
        CorruptionError: The structure has nothing of that name.
    """
    found = _find(structure["tree"], None, None, name)
    if found is None:
        raise CorruptionError(f"the structure of the snapshot has nothing named {name!r}")
    with torch.inference_mode(False), torch.no_grad():
        return _Builder(dict(structure["ties"]), tensors, kept, copy=True).build(*found)


def _find(
    node: Node, prefix: str | None, key: Key | None, name: str
) -> tuple[Node, str | None, Key | None] | None:
    if key is not None and names.join(prefix, key, leaf=True) == name:
        return node, prefix, key
    if node is None or not ("dict" in node or "td" in node):
        return None
    inner = None if key is None else names.join(prefix, key, leaf=False)
    keys = node["dict"] if "dict" in node else node["td"]
    nodes = node.get("items") or [None] * len(keys)
    found = (_find(item, inner, child, name) for child, item in zip(keys, nodes, strict=True))
    return next((one for one in found if one is not None), None)


class _Builder:
    """Makes the containers and leaves of one structure."""

    def __init__(
        self, ties: dict[str, str], tensors: Mapping[str, Tensor], kept: Mapping[str, Json], copy: bool
    ) -> None:
        self._ties = ties
        self._tensors = tensors
        self._values = kept
        self._copy = copy
        self._made: dict[str, Tensor] = {}

    def build(self, node: Node, prefix: str | None, key: Key | None) -> Any:
        """Make what a node stands for; `prefix` is the plain name of its container, `key` its place there."""
        plain = None if key is None else names.join(prefix, key, leaf=True)
        if node is None:
            return self._tensor(plain or "")
        tag, body = next(iter(node.items()))
        inner = None if key is None else names.join(prefix, key, leaf=False)
        match tag:
            case "tensor":
                return self._tensor(body)
            case "value":
                return self._value(plain or "" if body is None else body)
            case "array":
                return self._tensor(plain or "" if body is None else body).numpy()
            case "scalar":
                return self._tensor(plain or "" if body is None else body).numpy()[()]
            case "dict":
                made = self._pairs(body, node, inner)
                if "metadata" in node:
                    return _state_dict(OrderedDict(made), node["metadata"])
                return OrderedDict(made) if node.get("ordered") else dict(made)
            case "list" | "tuple":
                items = [self.build(item, inner, at) for at, item in enumerate(body)]
                return items if tag == "list" else tuple(items)
            case "td" | "stack" | "nontensor" | "nonstack":
                return self._collection(tag, node, prefix, key, inner)
        raise CorruptionError(f"structure has the unknown node {tag!r}: upgrade weightledger")

    def _pairs(self, keys: list[Key], node: Node, inner: str | None) -> Iterable[tuple[Key, Any]]:
        nodes = node.get("items") or [None] * len(keys)
        return ((key, self.build(item, inner, key)) for key, item in zip(keys, nodes, strict=True))

    def _collection(
        self, tag: str, node: Node, prefix: str | None, key: Key | None, inner: str | None
    ) -> Any:
        # Imported when there is one to build: whoever keeps plain modules need not wait for it.
        td: Any = importlib.import_module("tensordict")

        if tag == "nontensor":
            return td.NonTensorData(self.build(node["nontensor"], prefix, key), batch_size=node["batch"])
        if tag == "td":
            made = td.TensorDict(dict(self._pairs(node["td"], node, inner)), batch_size=node["batch"])
        else:
            parts = [self.build(item, inner, at) for at, item in enumerate(node[tag])]
            stack = td.NonTensorStack if tag == "nonstack" else td.LazyStackedTensorDict
            made = stack(*parts, stack_dim=node["dim"])
        if "names" in node:
            made.names = node["names"]
        return made

    def _tensor(self, name: str) -> Tensor:
        first = self._ties.get(name, name)
        if first not in self._made:
            try:
                tensor = self._tensors[first]
            except KeyError:
                raise CorruptionError(
                    f"the snapshot lacks the tensor {first!r} that the structure names"
                ) from None
            self._made[first] = tensor.clone(memory_format=torch.contiguous_format) if self._copy else tensor
        return self._made[first]

    def _value(self, name: str) -> Any:
        try:
            return values.decode(self._values[name])
        except KeyError:
            raise CorruptionError(f"the snapshot lacks the value {name!r} that the structure names") from None

"""What two versions must share so that one can take the other's place: the names and shapes of their tensors.

Rules:

* A non-tensor value counts by its name. A module's extra state counts as one, whatever it is made of.
* A `module.` that all names carry (DistributedDataParallel puts it there) is no part of a name, as in a restore.
* dtypes are told apart, since `cast` converts them; they are shown, and refuse nothing.

No torch in here: a rollback asks, and costs no start-up time.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, TypeAlias

from blake3 import blake3

from weightledger.registry.values import Json
from weightledger.registry.weights.dtypes import TORCH_NAMES

Shapes: TypeAlias = Mapping[str, tuple[int, ...] | None]
"""Name → shape of the tensor; None for a value."""

EXTRA_STATE: Final = "_extra_state"
_WRAPPER: Final = "module."
_SHOWN: Final = 10


def shapes_of(
    tensors: Iterable[tuple[str, Sequence[int]]], ties: Mapping[str, str], values: Iterable[str]
) -> Shapes:
    """Return the shapes of a snapshot.

    Args:
        tensors: Name and shape of each tensor.
        ties: Each further name of a tensor → the one among them.
        values: Names of the non-tensor values.
    """
    found: dict[str, tuple[int, ...] | None] = {name: tuple(shape) for name, shape in tensors}
    found |= {alias: found[name] for alias, name in ties.items()}
    found |= dict.fromkeys(values)
    if any(EXTRA_STATE in name for name in found):
        found = dict(_whole_extra_state(name, shape) for name, shape in found.items())
    if found and all(name.startswith(_WRAPPER) for name in found):
        found = {name.removeprefix(_WRAPPER): shape for name, shape in found.items()}
    return found


def shapes_in(header: bytes) -> Shapes:
    """Return the shapes of a snapshot by the JSON of its file's header.

    Raises:
        ValueError: It is no such header.
    """
    try:
        entries = json.loads(header)
        metadata = entries.pop("__metadata__", {})
        ties, values = (json.loads(metadata.get(f"weightledger.{key}", "{}")) for key in ("ties", "values"))
        return shapes_of(((name, entry["shape"]) for name, entry in entries.items()), ties, values)
    except (AttributeError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def fingerprint(shapes: Shapes) -> str:
    """Return a hash over names and shapes, 64 hexadecimal digits."""
    listed: Json = sorted(shapes.items())
    return blake3(json.dumps(listed, separators=(",", ":")).encode("ascii")).hexdigest()


def describe_dtypes(codes: Iterable[str]) -> str:
    """Say how many tensors have which dtype: `float32`, or `3 int64, 12 float32`."""
    counts = Counter(TORCH_NAMES[code] for code in codes)
    if len(counts) == 1:
        return next(iter(counts))
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))


def differences(before: Shapes, after: Shapes) -> str:
    """Say, line by line, what one has and the other has not.

    Args:
        before: Called `there` in the text.
        after: Called `here`.
    """
    lines = [f"{name!r} is not there" for name in after if name not in before]
    lines += [f"{name!r} is not here" for name in before if name not in after]
    lines += [
        f"{name!r} has the shape {_shown(shape)} here, {_shown(before[name])} there"
        for name, shape in after.items()
        if name in before and before[name] != shape
    ]
    more = len(lines) - _SHOWN
    shown = lines if more <= 1 else [*lines[:_SHOWN], f"and {more} more"]
    return "".join(f"\n  {line}" for line in shown)


def _shown(shape: tuple[int, ...] | None) -> str:
    return "of a value that is no tensor" if shape is None else str(shape)


def _whole_extra_state(name: str, shape: tuple[int, ...] | None) -> tuple[str, tuple[int, ...] | None]:
    parts = name.split(".")
    if EXTRA_STATE not in parts:
        return name, shape
    return ".".join(parts[: parts.index(EXTRA_STATE) + 1]), None

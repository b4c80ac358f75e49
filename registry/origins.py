"""Which version a live object was last published as or restored to, by this very process.

A training that goes on with the object that it published or restored needs no word about where its weights come from.
A new object of the same shape, as a notebook's cell makes when it is run again, is another one.
"""

from __future__ import annotations

import os
import weakref
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

Series = tuple[str, str]
"""The registry's UUID, and the policy."""


@dataclass(frozen=True)
class Origin:
    """What an object held when it was last seen."""

    number: int
    digest: str


_known: Final[dict[tuple[Series, int], tuple[weakref.ref[Any], Origin]]] = {}


def note(series: Series, origin: Origin, weights: object) -> None:
    """Remember that an object holds a version now. Of one that takes no weak reference nothing is remembered."""
    anchor = _anchor(weights)
    key = (series, id(anchor))
    known = _known.get(key)
    if known is not None and known[0]() is anchor:
        _known[key] = (known[0], origin)
        return
    with suppress(TypeError):
        # The dictionary is bound, since a module's names are gone when the interpreter ends.
        _known[key] = (weakref.ref(anchor, lambda _, known=_known: known.pop(key, None)), origin)  # type: ignore[misc]


def find(series: Series, weights: object) -> Origin | None:
    """Return what an object was last seen to hold, whatever became of it since; None when it was never seen."""
    anchor = _anchor(weights)
    known = _known.get((series, id(anchor)))
    return known[1] if known is not None and known[0]() is anchor else None


def _anchor(weights: object) -> object:
    """Return what stands for an object: a plain dictionary takes no weak reference, its first tensor does."""
    while type(weights) is dict:
        weights = next(iter(weights.values()), None)
    return weights


# A forked child is another process: it has copies of its parent's objects.
os.register_at_fork(after_in_child=_known.clear)

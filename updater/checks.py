"""What an updater is made with, checked at once: a slip found at 3 a.m., half-way through a rollback, is too late."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

from weightledger.registry import Registry, arguments
from weightledger.updater.messages import LOAD_STATE_DICT


def check_interval(max_interval: Any) -> int:
    """Return how many calls pass a worker by between two pushes; a negative number is none.

    Raises:
        TypeError: it is no whole number.
    """
    return max(0, arguments.integer("max_interval", max_interval))


def check_timeout(timeout: Any) -> float:
    """Return how many seconds a call may wait.

    Raises:
        TypeError: it is no number.
        ValueError: it is not positive and finite.
    """
    seconds = arguments.real("timeout", timeout)
    if not 0 < seconds < math.inf:
        raise ValueError(f"timeout must be positive seconds, since no wait is endless; found {seconds:g}")
    return seconds


def check_globs(name: str, globs: Any) -> tuple[str, ...]:
    """Return globs of tensor names.

    Raises:
        TypeError: it is no list of texts.
    """
    if (
        isinstance(globs, str)
        or not isinstance(globs, Collection)
        or not all(isinstance(one, str) for one in globs)
    ):
        raise TypeError(f"{name} must be a list of globs of tensor names, found {arguments.shown(globs)}")
    return tuple(globs)


def check_options(
    *,
    registry: Any,
    locate: Any,
    allow_nonfinite: Any,
    apply: Any,
    callables: dict[str, Any],
) -> None:
    """Refuse options of another kind than an updater understands.

    Args:
        callables: options that are callables or None, by name.

    Raises:
        TypeError: an option is of another kind.
    """
    if not isinstance(registry, Registry):
        raise TypeError(
            f"registry must be a Registry, as Registry.open gives it, found {arguments.shown(registry)}"
        )
    if not (isinstance(locate, str) and locate) and not callable(locate):
        raise TypeError(
            "locate must be a dotted attribute of the worker, or a callable that is given the worker, "
            f"found {arguments.shown(locate)}"
        )
    # A text is a collection of its letters, which are no globs that anybody meant.
    if isinstance(allow_nonfinite, str) or not isinstance(allow_nonfinite, (bool, Collection)):
        raise TypeError(
            "allow_nonfinite must be True, False, or a list of globs of tensor names, "
            f"found {arguments.shown(allow_nonfinite)}"
        )
    if apply is not None and apply != LOAD_STATE_DICT and not callable(apply):
        raise TypeError(
            f"apply must be a callable, {LOAD_STATE_DICT!r} or None, found {arguments.shown(apply)}"
        )
    for name, value in callables.items():
        if value is not None and not callable(value):
            raise TypeError(f"{name} must be a callable or None, found {arguments.shown(value)}")

"""What a worker should hold: its pin, else the head. Pure rules.

An exact name beats a glob, and of two globs the newer counts. Globs are matched as `fnmatch` does, case by case. A name
with a glob's characters may stand for itself alone (a literal pin), which beats the glob that reads the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase, translate

from weightledger.registry.records import Pin

_GLOB = re.compile(r"[*?[]")


def is_glob(worker: str) -> bool:
    """Tell whether a text has a glob's characters; one without them stands for one name in any case."""
    return _GLOB.search(worker) is not None


def holds(pin: Pin, name: str) -> bool:
    """Tell whether a pin holds the worker of a name, as far as no other pin does."""
    return pin.worker == name or (not pin.literal and fnmatchcase(name, pin.worker))


def resolve_target(name: str, pins: Sequence[Pin], head: int | None) -> tuple[int | None, Pin | None]:
    """Return the version that a worker should hold, and the pin that says so.

    Args:
        name: The worker's name.

        pins: Oldest first.

        head: Where workers without a pin belong; None in an empty policy.
    """
    exact = [pin for pin in pins if pin.worker == name]
    pin = max(exact, key=lambda pin: pin.literal, default=None)
    if pin is None:
        pin = next((pin for pin in reversed(pins) if holds(pin, name)), None)
    return (head, None) if pin is None else (pin.version, pin)


def resolve_targets(
    names: Iterable[str], pins: Sequence[Pin], head: int | None
) -> dict[str, tuple[int | None, Pin | None]]:
    """Answer `resolve_target` for many workers at once."""
    exact = {pin.worker: (pin.version, pin) for pin in sorted(pins, key=lambda pin: pin.literal)}
    globs = [
        (re.compile(translate(pin.worker)).match, (pin.version, pin))
        for pin in reversed(pins)
        if not pin.literal and is_glob(pin.worker)
    ]
    default: tuple[int | None, Pin | None] = (head, None)
    targets = {}
    for name in names:
        target = exact.get(name)
        if target is None:
            target = next((goal for matches, goal in globs if matches(name)), None)
        targets[name] = default if target is None else target
    return targets

"""Taking turns: the only place where a clock runs."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


def nothing(*_: Any) -> None:
    """Do nothing: the default before and after a turn."""


@dataclass(frozen=True)
class Contender:
    """One way to do the work."""

    name: str
    run: Callable[[], Any]
    """What is timed."""
    prepare: Callable[[], Any] = nothing
    """Runs before each turn; changes the weights."""
    check: Callable[[Any, bool], Any] = nothing
    """Runs after each turn with what `run` returned; True asks for all bytes. Raises when the work was not done."""
    tidy: Callable[[], Any] = nothing
    """Runs after the check."""


def interleave(contenders: Sequence[Contender], rounds: int, *, warmups: int = 1) -> dict[str, list[float]]:
    """Let contenders take turns, and return the seconds of each by name, in the order of rounds.

    Args:
        warmups: rounds before the first that counts; they are checked in full.
    """
    seconds: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    gc.collect()
    for count in range(-warmups, rounds):
        for contender in contenders:
            contender.prepare()
            began = time.perf_counter()
            outcome = contender.run()
            took = time.perf_counter() - began
            contender.check(outcome, count <= 0 or count == rounds - 1)
            contender.tidy()
            if count >= 0:
                seconds[contender.name].append(took)
    return seconds


def rounds_for(size: int, *, quick: bool) -> int:
    """Return how many rounds a size gets: enough for a median, few enough to end."""
    if quick:
        return 2
    for limit, rounds in ((2 << 20, 40), (20 << 20, 20), (300 << 20, 9)):
        if size <= limit:
            return rounds
    return 5

"""Which versions a prune keeps, and why. Pure rules.

What is the head, what a rollback goes back to, and what is aliased, pinned, held or pending on a worker stays whatever
the rules say, and so does what shares its file with a version that stays. Order is the number: never a step, a time, or
how a name sorts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, TypedDict

from weightledger.registry import arguments

BestRule: TypeAlias = tuple[str, int] | tuple[str, int, str]

_ACCEPTED = (
    "accepted are keep_last=n and keep_every=n with a whole number n of at least 1, and keep_best=(metric, n) "
    'or (metric, n, "min"); at least one of them'
)
_NAMED = 3  # so many workers are named in a reason, the rest are counted


@dataclass(frozen=True)
class Candidate:
    """A stored version, as the rules see it."""

    number: int
    snapshot: int
    """Row of its file."""
    extra_snapshot: int | None = None
    """Row of its extra state's file. Sharing that keeps nothing: many versions may have equal small extra states."""
    metrics: Mapping[str, float] = field(default_factory=dict, hash=False)


class Needs(TypedDict):
    """Who needs which versions of a policy, whatever the rules say; as `keep_reasons` takes it."""

    head: int | None
    goal: int | None
    aliases: Mapping[int, Sequence[str]]
    pins: Mapping[int, Sequence[str]]
    held: Mapping[int, Sequence[str]]
    pending: Mapping[int, Sequence[str]]


def check_rules(
    keep_last: int | None, keep_every: int | None, keep_best: BestRule | None
) -> tuple[int | None, int | None, BestRule | None]:
    """Return the rules in plain numbers; refuse those that keep nothing, or that are none.

    Raises:
        TypeError: A number of versions is no whole number.
        ValueError: Says which rule is wrong and what is accepted.
    """
    if keep_last is None and keep_every is None and keep_best is None:
        raise ValueError(f"prune: expected a rule, found none: {_ACCEPTED}")
    return (
        None if keep_last is None else _count("keep_last", keep_last),
        None if keep_every is None else _count("keep_every", keep_every),
        None if keep_best is None else _check_best(keep_best),
    )


def keep_reasons(
    candidates: Iterable[Candidate],
    *,
    head: int | None,
    aliases: Mapping[int, Sequence[str]],
    pins: Mapping[int, Sequence[str]],
    held: Mapping[int, Sequence[str]],
    pending: Mapping[int, Sequence[str]] | None = None,
    goal: int | None = None,
    keep_last: int | None = None,
    keep_every: int | None = None,
    keep_best: BestRule | None = None,
) -> dict[int, tuple[str, ...]]:
    """Return why each version stays, in words; those that are missing in the answer may go.

    Args:
        candidates: The stored versions of one policy.

        head: Number of the head; None in an empty policy.

        aliases: Number → the aliases that name it.

        pins: Number → the workers, or globs of them, that are pinned to it.

        held: Number → the workers that hold it, or may.

        pending: Number → the workers that it was pushed to without an answer yet.

        goal: Number that a rollback without a target goes back to; None where there is nothing.

        keep_last: Keep the newest so many.

        keep_every: Keep the numbers that are divisible by this.

        keep_best: Keep the best so many by a metric, the highest or (`"min"`) the lowest. NaN, infinities and versions
            without the metric are never among them; of equal values the newer wins. What is newer than the newest
            version with the metric stays, too, since its score is not known yet.

    Raises:
        TypeError: A number of versions is no whole number.

        ValueError: A rule would keep nothing, or there is none.
    """
    keep_last, keep_every, keep_best = check_rules(keep_last, keep_every, keep_best)
    by_number = {each.number: each for each in candidates}
    numbers = sorted(by_number)
    reasons: dict[int, list[str]] = {number: [] for number in numbers}

    def keep(number: int, reason: str) -> None:
        if number in reasons:
            reasons[number].append(reason)

    needs = Needs(head=head, goal=goal, aliases=aliases, pins=pins, held=held, pending=pending or {})
    for needed, why in reasons_of(needs):
        keep(needed, why)
    if keep_last is not None:
        for number in numbers[-keep_last:]:
            keep(number, f"last {keep_last}")
    if keep_every is not None:
        for number in numbers:
            if number % keep_every == 0:
                keep(number, f"every {keep_every}")
    if keep_best is not None:
        for number in _best(by_number.values(), keep_best):
            keep(number, f"best {keep_best[1]} by {keep_best[0]}")
        metric = keep_best[0]
        scored = max((number for number in numbers if metric in by_number[number].metrics), default=None)
        for number in numbers:
            if scored is not None and number > scored:
                keep(number, f"newer than v{scored}, the newest with {metric}")

    kept_by_file = {by_number[number].snapshot: number for number in numbers if reasons[number]}
    for number in numbers:
        sharer = kept_by_file.get(by_number[number].snapshot)
        if sharer is not None and not reasons[number]:
            keep(number, f"shares its file with v{sharer}")
    return {number: tuple(why) for number, why in reasons.items() if why}


def reasons_of(needs: Needs) -> Iterator[tuple[int, str]]:
    """Give each needed version and why, in words; one that several need comes several times."""
    if needs["head"] is not None:
        yield needs["head"], "head"
    if needs["goal"] is not None:
        yield needs["goal"], "what a rollback goes back to"
    for number, names in needs["aliases"].items():
        for name in sorted(names):
            yield number, f"alias {name}"
    for words, users in (
        ("pinned by", needs["pins"]),
        ("held by", needs["held"]),
        ("pending on", needs["pending"]),
    ):
        for number, names in users.items():
            if names:
                yield number, f"{words} {_listed(names)}"


def released_files(candidates: Iterable[Candidate], kept: Iterable[int]) -> frozenset[int]:
    """Return the rows of the files, of weights and extra state, that only versions outside of `kept` name."""
    staying = set(kept)
    needed: set[int | None] = set()
    going: set[int] = set()
    for each in candidates:
        files = {each.snapshot} if each.extra_snapshot is None else {each.snapshot, each.extra_snapshot}
        (needed if each.number in staying else going).update(files)
    return frozenset(going - needed)


def _check_best(rule: BestRule) -> BestRule:
    mode = "max"
    if isinstance(rule, (tuple, list)) and len(rule) in (2, 3):
        metric, count, *rest = rule
        if rest:
            mode = rest[0]
        if isinstance(metric, str) and metric and isinstance(mode, str) and mode in ("max", "min"):
            return metric, _count("keep_best", count), mode
    raise ValueError(f"prune: keep_best={arguments.shown(rule)}: {_ACCEPTED}")


def _count(rule: str, value: object) -> int:
    try:
        return arguments.count(rule, value, least=1)
    except (TypeError, ValueError) as error:
        raise type(error)(f"prune: {error}: {_ACCEPTED}") from None


def _best(candidates: Iterable[Candidate], rule: BestRule) -> list[int]:
    metric, count = rule[0], rule[1]
    sign = -1 if len(rule) == 3 and rule[2] == "min" else 1
    scores = [
        (sign * each.metrics[metric], each.number)
        for each in candidates
        if math.isfinite(each.metrics.get(metric, math.nan))
    ]
    return [number for _, number in sorted(scores, reverse=True)[:count]]


def _listed(names: Sequence[str]) -> str:
    shown = sorted(set(names))
    if len(shown) <= _NAMED + 1:
        return ", ".join(shown)
    return f"{', '.join(shown[:_NAMED])} and {len(shown) - _NAMED} more"

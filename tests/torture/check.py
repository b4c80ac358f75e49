"""Opens a registry after something happened to whoever wrote to it, and compares it with what the writers told.

What a call returned is there for good; what it did not return is there whole, or was never offered.
"""

from __future__ import annotations

import sqlite3
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.torture.cases import Policy, place, value_of
from tests.torture.story import read
from weightledger.registry import Holding, NotFoundError, Registry, Version
from weightledger.registry.weights.codec import flatten
from weightledger.registry.weights.packing import Packer

CLOCK = 0.005  # seconds between a moment that the child noted and the one that the library noted beside it
AFTERWARDS = 999.0
"""The value that the check itself publishes."""


@dataclass
class Verdict:
    """What was found."""

    problems: list[str] = field(default_factory=list)
    compared: int = 0
    """How many records were compared with what is really there."""


@dataclass
class Told:
    """What the stories say of one policy."""

    returned: dict[int, float] = field(default_factory=dict)
    """By number, the value of each version that a call returned."""
    digests: dict[int, str] = field(default_factory=dict)
    extras: dict[int, bool] = field(default_factory=dict)
    unreturned: Counter[float] = field(default_factory=Counter)
    """How often a call began that could make a version of a value, and did not return."""
    gone: set[int] = field(default_factory=set)
    """Numbers that a prune which returned has taken."""
    may_be_gone: set[int] = field(default_factory=set)


def check(root: Path, *stories: Path) -> Verdict:
    """Look at everything; publish and prune once more. Called in a child of the zygote."""
    verdict = Verdict()
    lines = sorted((line for story in stories for line in read(story)), key=lambda line: line["time"])
    if place(root).exists():
        _check_database(verdict, place(root))
    with Registry.open(place(root)) as registry:
        policies = {line["policy"] for line in lines if "policy" in line} | {"default"}
        assert set(registry.policies()) <= policies
        for policy in sorted(policies):
            with Registry.open(place(root), policy=policy) as seen:
                _check_policy(verdict, seen, told_of(lines, policy))
        _check_names(verdict, registry, lines)
        _check_holdings(verdict, registry, lines)
        verdict.problems += [f"after opening: {fault}" for fault in registry.verify()]
        _go_on(verdict, registry)
    _check_database(verdict, place(root))
    _check_export(verdict, root, lines)
    return verdict


def told_of(lines: list[dict[str, Any]], policy: str) -> Told:
    """Gather what stories say of one policy."""
    told = Told()
    for line in lines:
        if line.get("policy") != policy:
            continue
        if "value" in line:
            change = {"doing": 1, "done": -1}.get(line["what"], 0)
            told.unreturned[line["value"]] += change
            if line["what"] == "done":
                told.returned[line["number"]] = line["value"]
                told.extras[line["number"]] = line.get("extra", False)
                if line["digest"]:
                    told.digests[line["number"]] = line["digest"]
        if "gone" in line:
            told.may_be_gone |= {*line["gone"], *line["may_go"]}
            if line["what"] == "done":
                told.gone |= set(line["gone"])
    return told


def _check_database(verdict: Verdict, folder: Path) -> None:
    path = folder / "registry.db"
    if not path.exists() or path.stat().st_size == 0:
        return
    with closing(sqlite3.connect(path)) as plain:
        for question in ("PRAGMA integrity_check", "PRAGMA foreign_key_check"):
            answer = [row for row in plain.execute(question).fetchall() if row != ("ok",)]
            verdict.problems += [f"{question}: {row}" for row in answer]


def _check_policy(verdict: Verdict, registry: Registry, told: Told) -> None:
    def problem(text: str) -> None:
        verdict.problems.append(f"policy {registry.policy}: {text}")

    shown = registry.versions()
    numbers = [version.number for version in shown]
    if numbers != sorted(set(numbers)):
        problem(f"numbers {numbers} are not in order, or twice")
    for number in told.returned.keys() - set(numbers):
        problem(f"v{number} was returned and is not there")
    unreturned = Counter[float]()
    for version in shown:
        verdict.compared += 1
        found = _look_at(registry, version)
        expected = told.returned.get(version.number)
        if not version.stored:
            if version.number not in told.may_be_gone:
                problem(f"{version!r} lost its weights")
        elif found is None:
            problem(f"{version!r} is a mix")
        elif expected is None:
            unreturned[found] += 1
        elif found != expected:
            problem(f"{version!r} holds {found}, was {expected}")
        if version.number in told.gone and version.stored:
            problem(f"{version!r} was pruned and is still stored")
        if told.digests.get(version.number, version.digest) != version.digest:
            problem(f"{version!r} had the digest {told.digests[version.number]}")
        if version.stored and told.extras.get(version.number):
            verdict.compared += 1
            if registry.load_extra(version)["epoch"] != expected:
                problem(f"{version!r} has the extra state of another")
        if version.parent is not None and version.parent not in numbers:
            problem(f"{version!r} has the parent v{version.parent}, which is none of {numbers}")
    for value, count in unreturned.items():
        if count > told.unreturned[value]:
            problem(f"{count} versions of {value} that no call was making: {shown}")
    stored = [version for version in shown if version.stored]
    if stored and registry.head() != stored[-1]:
        problem(f"the head is {registry.head()!r}, not the newest {stored[-1]!r}")
    for number in _numbers_between(registry, numbers):
        if registry.get(number).state != "lost":
            problem(f"{registry.get(number)!r} is neither shown nor lost")


def _look_at(registry: Registry, version: Version) -> float | None:
    """Return the value of a stored version, read from its file; any number for one that is pruned."""
    if not version.stored:
        return 0.0
    into = Policy(-5, registry.load(version)["w"].numel())
    registry.restore(version, into)
    value = value_of(registry.load(version))
    return value if value == value_of(dict(into.named_parameters())) else None


def _numbers_between(registry: Registry, shown: list[int]) -> Iterator[int]:
    """Give the numbers that have a row and are not shown: those of writers that died."""
    number = 0
    while True:
        number += 1
        if number in shown:
            continue
        try:
            registry.get(number)
        except NotFoundError:
            if number > max(shown, default=0):
                return
            raise
        yield number


def _go_on(verdict: Verdict, registry: Registry) -> None:
    """Publish, load and prune as if nothing had been."""
    before = [version.number for version in registry.versions()]
    taken = [*before, *_numbers_between(registry, before)]
    made = registry.publish(Policy(AFTERWARDS), restructure=True)
    if made.number != max(taken, default=0) + 1:
        verdict.problems.append(f"after {taken} the next number is {made.number}")
    if value_of(registry.load()) != AFTERWARDS or registry.head() != made:
        verdict.problems.append(f"a publish afterwards made {made!r}, the head is {registry.head()!r}")
    registry.prune(keep_last=1)
    verdict.problems += [f"after going on: {fault}" for fault in registry.verify()]
    verdict.compared += 1


# ---------------------------------------------------------------------- names


Names = tuple[tuple[str, str, Any], ...]


def _check_names(verdict: Verdict, registry: Registry, lines: list[dict[str, Any]]) -> None:
    """Aliases, pins and scores are as before a call that did not return, or as after it, never something else."""
    possible: set[Names] = {()}
    for line in lines:
        effect = _effect(line)
        if effect is None:
            continue
        after = {_apply(names, effect) for names in possible}
        possible = after if line["what"] == "done" else possible | after
    held: dict[tuple[str, str], Any] = {
        ("alias", name): number for name, number in registry.aliases().items()
    }
    held |= {("pin", pin.worker): pin.version for pin in registry.pins()}
    held |= {
        ("score", str(version.number)): version.metrics["score"]
        for version in registry.versions()
        if "score" in version.metrics
    }
    found = tuple(sorted((kind, name, value) for (kind, name), value in held.items()))
    verdict.compared += len(found)
    if found not in possible:
        verdict.problems.append(f"names and scores are {found}, expected one of {possible}")


def _effect(line: dict[str, Any]) -> tuple[str, str, Any] | None:
    for kind in ("alias", "pin", "score"):
        if kind in line and line["what"] in ("doing", "done"):
            name, value = line[kind]
            return kind, str(name), value
    return None


def _apply(names: Names, effect: tuple[str, str, Any]) -> Names:
    kind, name, value = effect
    kept = [each for each in names if each[:2] != (kind, name)]
    return tuple(sorted(kept if value is None else [*kept, effect]))


# ---------------------------------------------------------------------- holdings


def _check_holdings(verdict: Verdict, registry: Registry, lines: list[dict[str, Any]]) -> None:
    """Compare the record with what really was in the workers, as the child saw it."""
    got: dict[str, list[tuple[float, float | None]]] = defaultdict(list)
    for line in lines:
        if line["what"] == "got":
            got[line["worker"]].append((line["time"], line["value"]))
    rows: dict[str, list[Holding]] = defaultdict(list)
    for holding in registry.history():
        rows[holding.worker].append(holding)
    told = {float(line["value"]) for line in lines if line.get("value") is not None}
    # By digest: a version may be lost after its weights reached a worker.
    values = {_digest_of(value): value for value in told}
    for status in registry.workers():
        verdict.compared += 1
        if status.held is not None:
            verdict.problems.append(f"the workers died with their driver, yet {status!r}")
    for worker in sorted({*got, *rows}):
        pushed = sorted(rows[worker], key=lambda holding: holding.order)
        verdict.problems += _compare(worker, pushed, got[worker], values)
        verdict.compared += len(pushed)


def _digest_of(value: float) -> str:
    payload = Packer().pack(flatten(Policy(value)), policy="any", step=None)
    payload.hash()
    return payload.digest


def _compare(
    worker: str,
    rows: list[Holding],
    got: list[tuple[float, float | None]],
    values: dict[str, float],
) -> Iterator[str]:
    for time, value in got:
        if value is None:
            yield f"{worker} held a mix at {time}"
        if not any(values[row.digest] == value and row.pushed_at.timestamp() <= time + CLOCK for row in rows):
            yield f"{worker} got {value} at {time}, and no row says so: {rows}"
    for row, following in zip(rows, [*rows[1:], None], strict=True):
        if row.confirmed_at is None:
            continue
        confirmed = row.confirmed_at.timestamp()
        if not any(
            values[row.digest] == value and row.pushed_at.timestamp() - CLOCK <= time <= confirmed + CLOCK
            for time, value in got
        ):
            yield f"{worker} never got what {row!r} says"
        end = float("inf") if following is None else following.pushed_at.timestamp()
        others = [(time, value) for time, value in got if confirmed + CLOCK < time < end - CLOCK]
        for time, value in others:
            if value != values[row.digest]:
                yield f"{worker} got {value} at {time}, while {row!r}"


# ---------------------------------------------------------------------- exports


def _check_export(verdict: Verdict, root: Path, lines: list[dict[str, Any]]) -> None:
    """An exported file is whole, the older or the newer; beside it there is nothing."""
    from safetensors.torch import load_file

    possible: list[int | None] = [None]
    for line in lines:
        if "exported" in line and line["what"] in ("doing", "done"):
            possible = [line["exported"]] if line["what"] == "done" else [*possible, line["exported"]]
    target = root / "out.safetensors"
    found = value_of(_in_order(load_file(target))) if target.exists() else None
    verdict.compared += 1
    if found not in possible:
        verdict.problems.append(f"{target} holds {found}, expected one of {possible}")


def _in_order(state: dict[str, Any]) -> dict[str, Any]:
    return {name: state[name] for name in ("w", "b")}

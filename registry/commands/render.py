"""Lay out versions for people: the log, one version, differences, aliases, faults, a prune.

Rules, kept by `render_workers` too
- Records in, lines and tables out; nothing is asked of a registry and nothing is printed.
- What is not known is `?`, what does not apply is `–`.
- The present is an argument, so that the same records give the same page.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from weightledger.registry.commands import graph
from weightledger.registry.commands.terminal import (
    Block,
    Cell,
    Column,
    Line,
    Span,
    Style,
    Table,
    joined,
    words,
)
from weightledger.registry.commands.wording import (
    UNKNOWN,
    age,
    figure,
    moment,
    ranges,
    size,
    some,
    version_name,
    zone,
    zoned,
)
from weightledger.registry.records import Fault, Pin, PruneReport, Version

METRIC_COLUMNS = 3


@dataclass(frozen=True)
class Marks:
    """What points at versions: the head, aliases and pins."""

    head: int | None
    aliases: Mapping[str, int]
    pins: Sequence[Pin]

    def of(self, number: int) -> Cell:
        """Return the marks of one version, as a list."""
        pinned = [pin.worker or UNKNOWN for pin in self.pins if pin.version == number]
        marks = [words(("head", "good"))] if number == self.head else []
        marks += [words((name, "alias")) for name, found in self.aliases.items() if found == number]
        marks += [words((f"pin {some(pinned, 2)}", "pin"))] if pinned else []
        return joined(marks, (", ", "dim"))


def log(
    versions: Sequence[Version],
    marks: Marks,
    users: Mapping[int, str],
    *,
    older: bool,
    before: Version | None = None,
) -> list[Block]:
    """Lay out the lineage, newest first.

    Args:
        versions: Oldest first, as the registry gives them.
        marks: What points at them.
        users: Who wrote a version, by its number.
        older: Whether older versions were left out.
        before: The newest of those, to compare the first one shown with.
    """
    if not versions:
        return [Line(words("No versions yet."))]
    newest_first = [found for found in reversed(versions) if _has_place(found)]
    if not newest_first:
        return _unplaced(versions)
    drawn = graph.draw([(found.number, found.parent, found.stored) for found in newest_first])
    rows = list(zip(newest_first, drawn, strict=True))
    edge = max(len(row.lanes) for row in drawn)
    tone: dict[int, Style] = {row.number: "" if row.on_lineage else "dim" for row in drawn}
    known = versions if before is None else [before, *versions]
    changes = _changes(known)
    blocks: list[Block] = [
        Table(
            [
                Column("version", [_lanes(row, edge, tone[version.number]) for version, row in rows]),
                Column("step", [_plain(version.step) for version, _ in rows], rank=3, right=True),
                *_metric_columns([version for version, _ in rows]),
                Column(
                    zoned("written", [version.created_at for version, _ in rows]),
                    [words((moment(version.created_at), "dim")) for version, _ in rows],
                    rank=2,
                ),
                Column("by", [words((users.get(version.number, ""), "dim")) for version, _ in rows], rank=6),
                Column(
                    "what",
                    [
                        _what(version, row, marks, changes[version.number], tone[version.number])
                        for version, row in rows
                    ],
                    stretch="cut",
                    least=30,
                ),
            ]
        )
    ]
    legend = [text for text, used in _legend(rows) if used]
    if legend:
        blocks.append(Line(words((", ".join(legend), "dim"))))
    blocks += _unplaced(versions)
    if older:
        blocks.append(Line(words(("Older versions: -n N or --all.", "dim"))))
    return blocks


def _has_place(found: Version) -> bool:
    """Tell whether a version can be drawn: a damaged one may not tell where it belongs."""
    return found.number is not None and (found.parent is None or found.parent < found.number)


def _unplaced(versions: Sequence[Version]) -> list[Block]:
    return [
        Line(words((f"{version_name(found.number)} damaged: ", "bad"), found.damage))
        for found in versions
        if not _has_place(found)
    ]


def version(
    found: Version,
    marks: Marks,
    *,
    staleness: int | None,
    holders: Sequence[str],
    user: str,
    now: datetime,
    same: Sequence[int] = (),
) -> list[Block]:
    """Lay out everything known of one version.

    Args:
        found: The version.
        marks: What points at versions.
        staleness: As the registry gives it.
        holders: Names of the workers that hold its content.
        user: Who wrote it.
        now: The present.
        same: Numbers of the other versions of equal content.
    """
    states: dict[str, Span] = {
        "stored": ("stored", "good"),
        "pruned": ("pruned: only the row is left", "warn"),
        "lost": ("lost: its writer died before it was stored", "bad"),
        "writing": ("being written", "warn"),
    }
    facts: list[tuple[str, Cell]] = [
        ("state", words(states[found.state])),
        ("points here", marks.of(found.number)),
        ("restores", words(version_name(found.restores)) if found.restores is not None else ()),
        (
            "parent",
            words(version_name(found.parent) if found.parent is not None else "none, the first of its line"),
        ),
        ("staleness", words(_staleness(staleness)) if found.state in ("stored", "pruned") else ()),
        ("step", _plain(found.step)),
        ("metrics", words("\n".join(f"{name} {figure(value)}" for name, value in found.metrics.items()))),
        ("metadata", words("\n".join(f"{name} {value!r}" for name, value in found.metadata.items()))),
        ("message", words(found.message)),
        ("held by", words(some(holders, 10))),
        ("same content", words(ranges(same))),
        ("size", words(size(found.size_bytes))),
        ("dtypes", words(found.dtypes or "")),
        ("extra state", words("stored beside it" if found.has_extra else "")),
        ("not finite", words((some(found.nonfinite, 10), "bad"))),
        ("digest", words(found.digest)),
        (
            "written",
            words(f"{moment(found.created_at)} ({zone([found.created_at])}), {age(found.created_at, now)}"),
        ),
        ("by", words(user, " " if user else "", (f"run {found.run}", "dim"))),
    ]
    shown = [(name, cell) for name, cell in facts if cell]
    title = words((version_name(found.number), "title"), f" of policy {found.policy}")
    labels = Column("", [words((f"  {name}", "dim")) for name, _ in shown])
    return [Line(title), Table([labels, Column("", [cell for _, cell in shown], stretch="wrap")])]


def diff(
    before: Version, after: Version, tensors: Mapping[str, Sequence[str]], *, show_all: bool
) -> list[Block]:
    """Lay out how two versions differ, tensor by tensor.

    Args:
        before: The version compared from.
        after: The version compared with.
        tensors: Names under `changed`, `only_a`, `only_b`, `same`.
        show_all: Whether tensors that are the same are listed too.
    """
    a, b = version_name(before.number), version_name(after.number)
    counts = {
        "changed": len(tensors["changed"]),
        f"only in {a}": len(tensors["only_a"]),
        f"only in {b}": len(tensors["only_b"]),
        "the same": len(tensors["same"]),
    }
    summary = (
        ", ".join(f"{count:,} {what}" for what, count in counts.items() if count) or "no tensors in either"
    )
    equal = before.digest == after.digest
    verdict: Span = ("equal content", "good") if equal else (summary, "")
    marks = [words(("  changed", "warn"))] * len(tensors["changed"])
    marks += [words((f"  only in {a}", "bad"))] * len(tensors["only_a"])
    marks += [words((f"  only in {b}", "good"))] * len(tensors["only_b"])
    marks += [words(("  same", "dim"))] * len(tensors["same"]) if show_all else []
    groups = ("changed", "only_a", "only_b", "same") if show_all else ("changed", "only_a", "only_b")
    names = [words(name) for group in groups for name in tensors[group]]
    blocks: list[Block] = [Line(words((f"{a} → {b}", "title"), ": ", verdict))]
    if names:
        blocks.append(Table([Column("", marks), Column("", names, stretch="wrap")]))
    return blocks


def aliases(found: Mapping[str, int]) -> list[Block]:
    """Lay out the aliases."""
    if not found:
        return [Line(words("No aliases."))]
    names = [words((name, "alias")) for name in found]
    return [
        Table([Column("alias", names), Column("version", [words(version_name(n)) for n in found.values()])])
    ]


def faults(found: Sequence[Fault], *, what: str) -> list[Block]:
    """Lay out what `verify` found; `what` names what was read."""
    if not found:
        return [Line(words(("No faults", "good"), f" in {what}."))]
    amount = "1 fault" if len(found) == 1 else f"{len(found):,} faults"
    return [
        Line(words((amount, "bad"), f" in {what}.")),
        Table(
            [
                Column(
                    "fault",
                    [words((fault.kind, "warn" if fault.kind == "stray" else "bad")) for fault in found],
                ),
                Column("versions", [words(ranges(fault.versions) or "–") for fault in found]),
                Column("file", [words(f"{fault.path}\n{fault.detail}") for fault in found], stretch="wrap"),
            ]
        ),
    ]


def prune(report: PruneReport, *, dry_run: bool) -> list[Block]:
    """Lay out what was deleted, and in a dry run why each other version stays."""
    numbers = [found.number for found in report]
    amount = "1 version" if len(numbers) == 1 else f"{len(numbers):,} versions"
    verb = "Would delete" if dry_run else "Deleted"
    if numbers:
        # Versions of equal content share a file, which is counted once.
        files = {found.digest: found.size_bytes for found in report}
        head = words(
            (f"{verb} the weights of {amount}", "warn"), f" ({size(sum(files.values()))}): {ranges(numbers)}."
        )
    else:
        head = words(f"{verb} nothing.")
    if not dry_run:
        stored = len(report.kept)
        return [Line(head), Line(words(f"{stored:,} stored version{' stays' if stored == 1 else 's stay'}."))]
    kept = sorted(report.kept.items())
    return [
        Line(head),
        Table(
            [
                Column("stays", [words(version_name(number)) for number, _ in kept], right=True),
                Column("because", [words("; ".join(reasons)) for _, reasons in kept], stretch="wrap"),
            ]
        ),
    ]


def _lanes(row: graph.GraphRow, edge: int, tone: Style) -> Cell:
    first, rest = row.lanes[:1], row.lanes[1:]
    return words(
        (first, "good"),
        (rest.ljust(edge + 1), "dim"),
        (version_name(row.number), tone),
    )


def _legend(rows: Sequence[tuple[Version, graph.GraphRow]]) -> list[tuple[str, bool]]:
    return [
        ("● lineage of the head", any(not row.on_lineage for _, row in rows)),
        ("○ abandoned", any(found.stored and not row.on_lineage for found, row in rows)),
        ("· pruned", any(not found.stored and not found.damage for found, _ in rows)),
    ]


def _metric_columns(versions: Sequence[Version]) -> list[Column]:
    counts = Counter(name for found in versions for name in found.metrics)
    names = [name for name, _ in counts.most_common(METRIC_COLUMNS)]
    return [
        Column(
            name,
            [words(figure(found.metrics[name]) if name in found.metrics else "") for found in versions],
            rank=1 if index == 0 else 3 + index,
            right=True,
        )
        for index, name in enumerate(names)
    ]


def _changes(versions: Sequence[Version]) -> dict[int, list[Cell]]:
    """Say of each version, given oldest first, what is not as a publish usually is: its content, its dtypes."""
    parents = {found.number: found for found in versions}
    newest: dict[str, int] = {}
    said: dict[int, list[Cell]] = {}
    for found in versions:
        notes: list[Cell] = []
        said[found.number] = notes
        if found.damage:
            continue
        parent = None if found.parent is None else parents.get(found.parent)
        if found.restores is None and found.digest in newest:
            notes.append(words((f"same content as v{newest[found.digest]}", "warn")))
        if parent is not None and None not in (parent.dtypes, found.dtypes) and parent.dtypes != found.dtypes:
            notes.append(words((f"{parent.dtypes} → {found.dtypes}", "warn")))
        newest[found.digest] = found.number
    return said


def _what(found: Version, row: graph.GraphRow, marks: Marks, changes: Sequence[Cell], tone: Style) -> Cell:
    lines = (found.message or "").splitlines()
    phrases: list[Cell] = []
    if found.damage:
        phrases.append(words(("damaged: ", "bad"), found.damage))
    if found.restores is not None:
        phrases.append(words((f"⤺ restores v{found.restores}", "restore")))
    elif found.parent is None and found.number > 1 and not found.damage:
        phrases.append(words(("begins a new line", "restore")))
    elif row.named_parent is not None:
        phrases.append(words((f"from v{row.named_parent}", "dim")))
    notes = [marks.of(found.number), *changes]
    notes += [words(("pruned", "dim"))] if not found.stored and not found.damage else []
    notes += [words(("not finite", "bad"))] if found.nonfinite else []
    noted = joined(notes, (", ", "dim"))
    if noted:
        phrases.append(words(("[", "dim"), *noted, ("]", "dim")))
    if lines:
        phrases.append(words((lines[0] + (" …" if len(lines) > 1 else ""), tone)))
    return joined(phrases, (" ", ""))


def _plain(value: object) -> Cell:
    return words("" if value is None else str(value))


def _staleness(value: int | None) -> str:
    if value is None:
        return "none: its branch was abandoned"
    return {0: "0, its content is the head's", 1: "1 publish behind the head"}.get(
        value, f"{value} publishes behind"
    )

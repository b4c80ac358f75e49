"""Results as a table: in the terminal and as Markdown."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from tests.benchmarks.results import Result, Spread, amount, spread
from tests.benchmarks.running import Outcome

HEAD = ("case", "subject", "median", "reference", "median", "ratio (quartiles)", "promised", "")
MARKERS = ("<!-- results -->", "<!-- end of results -->")
VERDICTS = {True: "reached", False: "NOT REACHED", None: ""}


def lines_of(outcome: Outcome) -> list[tuple[str, ...]]:
    """Return the cells of each line: one a result and reference."""
    return [line for result in outcome.results for line in _lines(result)]


def text(outcome: Outcome) -> str:
    """Return a row for the terminal."""
    head = [f"{outcome.row.name}: {outcome.row.title} ({outcome.seconds:.0f} s)"]
    lines = [HEAD, *lines_of(outcome)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEAD))]
    body = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
    notes = [f"  {note}" for note in outcome.notes]
    failed = [f"  FAILED: {outcome.error}"] if outcome.error else []
    return "\n".join([*head, *(f"  {line.rstrip()}" for line in body), *notes, *failed, ""])


def markdown(report: Mapping[str, Any], outcomes: Sequence[Outcome], folder: str) -> str:
    """Return all rows, and the machine, for a page; `folder` is where the other results are, seen from it."""
    machine = report["machine"]
    libraries = ", ".join(f"{name} {version}" for name, version in machine["libraries"].items() if version)
    parts = [
        f"Measured on {report['started_at'][:10]} in {report['seconds'] / 60:.0f} minutes: {machine['cores']} cores "
        f"({machine['processor']}), {machine['memory_gb']} GB, {machine['kernel']}, Python {machine['python']}, "
        f"SQLite {machine['sqlite']}, {libraries}. Write + fdatasync {machine['write_fdatasync_gb_s']} GB/s on "
        f"{machine['file_system']}, memcpy {machine['memcpy_gb_s']} GB/s. Load average {machine['load_average']} "
        f"before, {machine['load_average_after']} after.",
        f"**{summary(outcomes)}.** All samples: [results.json]({folder}/results.json).",
        f"![Time by size, and how much of each allowance was used]({folder}/results.svg)",
    ]
    for outcome in outcomes:
        cells = [HEAD, ("---",) * len(HEAD), *lines_of(outcome)]
        table = "\n".join("| " + " | ".join(line) + " |" for line in cells)
        promise = f"\n\nPromised: {outcome.row.promise}." if outcome.row.promise else ""
        notes = "".join(f"\n\n{note[0].upper()}{note[1:]}." for note in outcome.notes)
        failed = f"\n\nFailed: {outcome.error}" if outcome.error else ""
        parts.append(f"### {outcome.row.name}\n\n{outcome.row.title}.{promise}\n\n{table}{notes}{failed}")
    return "\n\n".join(parts) + "\n"


def summary(outcomes: Sequence[Outcome]) -> str:
    """Say how many promises were reached."""
    verdicts = [result.reached for outcome in outcomes for result in outcome.results]
    failed = [outcome.row.name for outcome in outcomes if outcome.error]
    reached = f"{verdicts.count(True)} of {len(verdicts) - verdicts.count(None)} promised numbers reached"
    return reached + (f"; could not be measured to the end: {', '.join(failed)}" if failed else "")


def replace_block(page: str, block: str) -> str:
    """Return a page with what lies between its two markers replaced.

    Raises:
        ValueError: it does not have exactly one of each.
    """
    parts = re.split("|".join(map(re.escape, MARKERS)), page)
    if len(parts) != 3:
        raise ValueError(
            f"expected one {MARKERS[0]} and one {MARKERS[1]} in the page, found {len(parts) - 1} of them"
        )
    return f"{parts[0]}{MARKERS[0]}\n\n{block}\n{MARKERS[1]}{parts[2]}"


def _lines(result: Result) -> list[tuple[str, ...]]:
    median = amount(result.value().median, result.unit)
    promised = " or ".join(limit.text(result.unit) for limit in result.limits)
    verdict = VERDICTS[result.reached]
    if not result.references:
        return [(result.case, result.subject, median, "", "", "", promised, verdict)]
    lines = []
    for index, (name, samples) in enumerate(result.references.items()):
        mine = (result.case, result.subject, median) if index == 0 else ("", "", "")
        judged = (promised, verdict) if index == 0 else ("", "")
        middle = amount(spread(samples).median, result.unit)
        lines.append((*mine, name, middle, _ratio(result.ratio(name)), *judged))
    return lines


def _ratio(ratio: Spread) -> str:
    return f"{ratio.median:.2f} ({ratio.low:.2f}–{ratio.high:.2f})"

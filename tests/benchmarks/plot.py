"""The picture of a run: time by size, and every promise beside what was found."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt

from tests.benchmarks.contenders import COPIES, DISK, LEDGER, LEDGER_IN_MEMORY, PUT
from tests.benchmarks.results import Result, spread
from tests.benchmarks.setting import size_name

# Whose line it is; the row that each is taken from is the one where it ran beside its rival.
SOURCES = (
    (LEDGER, "torchrl-scheme", "C0", "o-"),
    (LEDGER_IN_MEMORY, "torchrl-scheme", "C0", "o--"),
    ("RayWeightUpdater", "torchrl-updater", "C3", "s-"),
    ("RayWeightSyncScheme", "torchrl-scheme", "C1", "^-"),
    (PUT, "actors", "C4", "v-"),
    (COPIES, "copies", "C7", "x:"),
    (DISK, "torchrl-scheme", "C2", "+:"),
)


def draw(results: Sequence[Result], path: Path, *, workers: int = 4) -> None:
    """Write the picture as SVG."""
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(15, 0.16 * max(40, len(results))), layout="constrained"
    )
    _times(left, [result for result in results if result.workers == workers], workers)
    _promises(right, [result for result in results if result.limits])
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def _times(axes: Any, results: Sequence[Result], workers: int) -> None:
    sizes: set[int] = set()
    for name, row, colour, style in SOURCES:
        points = []
        for result in results:
            samples = result.samples if result.subject == name else result.references.get(name)
            if result.row == row and samples is not None and result.size is not None:
                points.append((result.size, spread(samples)))
        if points:
            points = sorted(dict(points).items())
            sizes |= {size for size, _ in points}
            xs, found = [size for size, _ in points], [each for _, each in points]
            axes.plot(xs, [each.median * 1000 for each in found], style, color=colour, label=name)
            axes.fill_between(
                xs,
                [each.low * 1000 for each in found],
                [each.high * 1000 for each in found],
                alpha=0.15,
                color=colour,
            )
    axes.set(xscale="log", yscale="log", ylabel="ms (median, quartiles)")
    axes.set_title(f"Publish and confirm, {workers} workers")
    axes.set_xticks(sorted(sizes), [size_name(size) for size in sorted(sizes)])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    if sizes:
        axes.legend(fontsize=8)


def _promises(axes: Any, results: Sequence[Result]) -> None:
    """How much of each allowance was used, by the way in which it comes nearest; left of the line it is reached."""
    used = [min(_used(result, limit) for limit in result.limits) for result in results]
    places = range(len(results))
    axes.scatter(used, places, c=["C2" if result.reached else "C3" for result in results], s=14)
    axes.axvline(1.0, color="black", lw=0.8)
    axes.set_yticks(
        list(places), [f"{each.row}: {each.case}, {each.subject}" for each in results], fontsize=6
    )
    axes.set(xscale="log", xlabel="found / promised", title="Left of the line: reached")
    axes.invert_yaxis()
    axes.grid(alpha=0.3, axis="x")


def _used(result: Result, limit: Any) -> float:
    # A difference may be negative, which a logarithmic axis cannot show.
    return max(result.found(limit) / limit.most, 0.01)

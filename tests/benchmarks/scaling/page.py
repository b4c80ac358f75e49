"""The tables of docs/design/scaling.md: written from constants, and the constants read back from there. Pure.

Each table stands between `<!-- scaling: NAME -->` and `<!-- end of NAME -->`. The constants on the page, in the digits
that are shown there, are what its predictions are made of.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.benchmarks.results import Result, amount
from tests.benchmarks.scaling.model import (
    RETRY,
    UNITS,
    Constants,
    Site,
    from_shown,
    nodes_confirmed_within,
    nodes_within,
    numbers_of,
    predict,
    to_shown,
    with_network,
    workers_within,
)
from tests.benchmarks.setting import GB, MB, size_name

ASSUMED = Site(cores=16, memory_rate=20e9, bandwidth=10 * UNITS["Gbit/s"], latency=50e-6, store=32e9)
"""The nodes of the predictions: nothing of it was measured."""
NETWORKS = (10.0, 100.0)
"""Gbit/s."""
NODES = (1, 4, 16, 64)
WORKERS = (4, 16, 64)
SIZES = (MB, 16 * MB, 256 * MB, GB)
TIMEOUT = 60.0
"""Seconds that an updater waits for its workers by default."""
_MANY = 100_000  # nodes; beyond, the number says nothing but that nodes are not the limit
_WAITS = (0.1, 1.0, 10.0)
_SHOWN = ((1, 4, MB), (4, 16, 16 * MB), (16, 16, 256 * MB), (64, 16, GB), (64, 64, MB))
"""Nodes, workers on each and bytes of which the phases are shown."""


@dataclass(frozen=True)
class Findings:
    """What a measurement gives to the page."""

    constants: Constants
    here: Site
    checked: Sequence[Result]


def findings(results: Sequence[Result]) -> Findings:
    """Sort the results of the row `scaling`.

    Raises:
        KeyError: a constant is missing; the row did not come to its end.
    """
    shown = {result.case: result.samples[0] for result in results if not result.limits}
    return Findings(
        Constants(**from_shown(Constants, shown)),
        Site(**from_shown(Site, shown), shared=True),
        [result for result in results if result.limits],
    )


def measured_blocks(found: Findings, machine: Mapping[str, Any], day: str) -> dict[str, str]:
    """Return the tables that only a measurement can give."""
    return {
        "machine": machine_text(machine, day),
        "constants": constants_table(found.constants),
        "places": places_table(found.here),
        "check": check_table(found.checked),
    }


def derived_blocks(constants: Constants) -> dict[str, str]:
    """Return the tables that follow from the constants."""
    return {
        "predictions": predictions(constants),
        "phases": phases(constants),
        "updater limits": updater_limits(constants),
        "network limits": network_limits(constants),
        "store limits": store_limits(),
    }


# ---------------------------------------------------------------------- tables


def machine_text(machine: Mapping[str, Any], day: str) -> str:
    return (
        f"Measured on {day}: {machine['cores']} cores ({machine['processor']}), {machine['memory_gb']} GB, "
        f"{machine['kernel']}, Python {machine['python']}, ray {machine['libraries']['ray']}, load average "
        f"{machine['load_average']} before it began."
    )


def constants_table(constants: Constants) -> str:
    shown = to_shown(constants)
    lines = [
        (f"`{each.name}`", f"{shown[each.name]:g}", each.unit, each.meaning) for each in numbers_of(Constants)
    ]
    return _table(("constant", "measured", "unit", "what takes it"), lines)


def read_constants(page: str) -> Constants:
    """Read the constants from the page's table.

    Raises:
        KeyError: one of them is not there.
    """
    rows = re.findall(r"^\| `(\w+)` \| ([\d.e+-]+) \|", block(page, "constants"), re.MULTILINE)
    return Constants(**from_shown(Constants, {name: float(value) for name, value in rows}))


def places_table(here: Site) -> str:
    mine, assumed = to_shown(here), to_shown(ASSUMED)
    lines = []
    for each in numbers_of(Site):
        value = f"{assumed[each.name]:g}"
        if each.name == "bandwidth":
            value = " and ".join(f"{network:g}" for network in NETWORKS)
        lines.append((f"`{each.name}`", f"{mine[each.name]:.3g}", value, each.unit, each.meaning))
    return _table(
        (
            "parameter",
            "all nodes of the check together",
            "each node of the predictions",
            "unit",
            "what it is",
        ),
        lines,
    )


def check_table(checked: Sequence[Result]) -> str:
    lines = []
    for result in checked:
        (limit,) = result.limits
        ratio = result.ratio(limit.against)
        lines.append(
            (
                result.case,
                amount(result.references[limit.against][0], "s"),
                amount(result.value().median, "s"),
                f"{ratio.median:.2f} ({ratio.low:.2f}–{ratio.high:.2f})",
                "yes" if result.reached else "**no**",
            )
        )
    within = sum(bool(result.reached) for result in checked)
    most = checked[0].limits[0].most if checked else 0.0
    text = f"{within} of {len(checked)} cases are within a factor {most:g} of the prediction."
    head = ("case", "predicted", "measured", "measured / predicted (quartiles)", f"within {most:g}")
    return f"{_table(head, lines)}\n\n{text}"


def predictions(constants: Constants) -> str:
    """Return one table for each network: seconds of an update by nodes, workers and bytes."""
    parts = []
    for network in NETWORKS:
        site = with_network(ASSUMED, network)
        lines = [
            (
                str(nodes),
                str(each),
                *(amount(predict(constants, site, nodes, each, size).seconds, "s") for size in SIZES),
            )
            for nodes in NODES
            for each in WORKERS
        ]
        head = ("nodes", "workers on each", *map(size_name, SIZES))
        parts.append(f"Network of {network:g} Gbit/s:\n\n{_table(head, lines)}")
    return "\n\n".join(parts)


def phases(constants: Constants) -> str:
    """Return where the time goes in some of the cases of the slowest network."""
    site = with_network(ASSUMED, NETWORKS[0])
    lines = []
    for nodes, each, size in _SHOWN:
        found = predict(constants, site, nodes, each, size)
        columns = (found.before, found.sends, found.pull, found.receipts, found.file, found.recording)
        case = f"{nodes} × {each}, {size_name(size)}"
        lines.append((case, *(amount(seconds, "s") for seconds in columns), amount(found.seconds, "s")))
    head = ("nodes × workers, weights", "before", "sends", "pull", "receipts", "file", "recording", "all")
    return _table(head, lines)


def updater_limits(constants: Constants) -> str:
    lines = [(f"{seconds:g} s", f"{workers_within(constants, seconds):,}") for seconds in _WAITS]
    return _table(("sending, hearing and recording take", "at so many workers"), lines)


def network_limits(constants: Constants) -> str:
    lines = []
    for network in NETWORKS:
        site = with_network(ASSUMED, network)
        egress = site.egress(constants)
        cause = "network" if egress == site.bandwidth else "its object manager"
        for size in SIZES:
            lines.append(
                (
                    f"{network:g} Gbit/s",
                    f"{8 * egress / 1e9:.3g} Gbit/s ({cause})",
                    size_name(size),
                    _nodes(nodes_within(constants, site, size, 1.0)),
                    _nodes(nodes_within(constants, site, size, RETRY)),
                    _nodes(nodes_confirmed_within(constants, site, 16, size, TIMEOUT)),
                )
            )
    head = (
        "network",
        "what leaves the learner's node",
        "weights",
        "nodes it feeds in 1 s",
        f"nodes it feeds before Ray asks again ({RETRY:g} s)",
        f"nodes of 16 workers confirmed in {TIMEOUT:g} s",
    )
    return _table(head, lines)


def store_limits() -> str:
    lines = [
        (size_name(size), *(f"{versions * size / 1e9:.3g} GB" for versions in (2, 3, 6))) for size in SIZES
    ]
    return _table(("weights", "no pin", "1 pinned version", "4 pinned versions"), lines)


def _nodes(count: int) -> str:
    return f"{count:,}" if count < _MANY else f"> {_MANY:,}"


def _table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in [head, ["---"] * len(head), *lines])


# ---------------------------------------------------------------------- the page


def block(page: str, name: str) -> str:
    """Return what stands between the markers of a name.

    Raises:
        ValueError: the page does not have exactly one such pair.
    """
    found = re.findall(_pattern(name), page, re.DOTALL)
    if len(found) != 1:
        raise ValueError(f"expected one block {name!r} in the page, found {len(found)}")
    return str(found[0][1]).strip("\n")


def replace_blocks(page: str, blocks: Mapping[str, str]) -> str:
    """Return a page with what stands between these markers replaced.

    Raises:
        ValueError: it lacks one of them.
    """
    for name, text in blocks.items():
        block(page, name)
        page = re.sub(
            _pattern(name),
            lambda match, text=text: f"{match[1]}\n\n{text}\n\n{match[3]}",
            page,
            flags=re.DOTALL,
        )
    return page


def _pattern(name: str) -> str:
    return rf"(<!-- scaling: {re.escape(name)} -->)(.*?)(<!-- end of {re.escape(name)} -->)"

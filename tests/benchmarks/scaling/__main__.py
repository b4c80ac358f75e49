"""`python -m tests.benchmarks.scaling`: predict from the constants on docs/design/scaling.md, or measure them anew."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.benchmarks import running, table
from tests.benchmarks.catalog import BY_NAME
from tests.benchmarks.machine import describe
from tests.benchmarks.results import Result
from tests.benchmarks.scaling import page as pages
from tests.benchmarks.setting import Setting

PAGE = running.ROOT / "docs" / "design" / "scaling.md"
_BUILD = running.ROOT / "build" / "benchmarks"


def main(arguments: Sequence[str]) -> int:
    """Print or write the page's tables; returns 1 when the measurement did not come to its end."""
    options = _parser().parse_args(arguments)
    text = options.page.read_text(encoding="utf-8")
    if options.measure:
        machine = describe(options.scratch)
        outcome = running.run(BY_NAME["scaling"], Setting(str(options.scratch.resolve())), _BUILD / "logs")
        print(table.text(outcome))
        if outcome.error:
            return 1
        text = _with_measured(text, outcome.results, machine, datetime.now(UTC).date().isoformat())
    elif options.results is not None:
        report = json.loads(options.results.read_text(encoding="utf-8"))
        (row,) = (row for row in report["rows"] if row["name"] == "scaling")
        results = [Result.from_dict(each) for each in row["results"]]
        text = _with_measured(text, results, report["machine"], report["started_at"][:10])
    derived = pages.derived_blocks(pages.read_constants(text))
    if options.measure or options.results is not None or options.write:
        options.page.write_text(pages.replace_blocks(text, derived), encoding="utf-8")
        print(f"written: {options.page}")
    else:
        print("\n\n".join(derived.values()))
    return 0


def _with_measured(text: str, results: Sequence[Result], machine: Mapping[str, Any], day: str) -> str:
    return pages.replace_blocks(text, pages.measured_blocks(pages.findings(results), machine, day))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.scaling", description=__doc__)
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--measure", action="store_true", help="measure the row `scaling` (two minutes) and write every table"
    )
    what.add_argument(
        "--results",
        type=Path,
        metavar="FILE",
        help="write every table from this results.json of `make bench`",
    )
    what.add_argument(
        "--write", action="store_true", help="write the tables that follow from the page's constants"
    )
    parser.add_argument("--page", type=Path, default=PAGE, help="the page (%(default)s)")
    parser.add_argument(
        "--scratch",
        type=Path,
        default=_BUILD / "scratch",
        help="a folder on the disk that is measured (%(default)s)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

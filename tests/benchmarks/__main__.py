"""`python -m tests.benchmarks`: measure, print, save. `python -m tests.benchmarks soak`: look for leaks."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.benchmarks import running, table
from tests.benchmarks.catalog import BY_NAME, ROWS
from tests.benchmarks.setting import Setting, parse_size

DEFAULT_OUT = running.ROOT / "build" / "benchmarks"


def main(arguments: Sequence[str]) -> int:
    """Run the benchmarks; returns 1 when a row could not be measured to its end."""
    if arguments and arguments[0] == "soak":
        from tests.benchmarks import soak

        return soak.main(arguments[1:])
    options = _parser().parse_args(arguments)
    out = options.out.resolve()
    setting = Setting(str(options.scratch.resolve()), options.sizes, options.workers, options.quick)
    rows = [BY_NAME[name] for name in options.rows] if options.rows else ROWS

    def tell(outcome: running.Outcome) -> None:
        print(table.text(outcome), flush=True)

    report, outcomes = running.run_all(rows, setting, DEFAULT_OUT / "logs", tell)
    print(table.summary(outcomes))
    out.mkdir(parents=True, exist_ok=True)
    (out / "results.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if options.page is not None:
        page = options.page.read_text(encoding="utf-8")
        beside = os.path.relpath(out, options.page.resolve().parent)
        block = table.markdown(report, outcomes, beside)
        options.page.write_text(table.replace_block(page, block), encoding="utf-8")

    from tests.benchmarks.plot import draw

    draw([result for outcome in outcomes for result in outcome.results], out / "results.svg")
    print(f"saved in {out}: results.json, results.svg")
    return int(any(outcome.error for outcome in outcomes))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks",
        description=__doc__,
        epilog="rows:\n" + "\n".join(f"  {row.name:18}{row.title}" for row in ROWS),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--sizes",
        type=_sizes,
        default=(),
        metavar="64KB,1MB,…",
        help="bytes of weights, for rows that take sizes",
    )
    parser.add_argument(
        "--workers",
        type=_counts,
        default=(),
        metavar="1,4,…",
        help="numbers of workers, for rows that take them",
    )
    parser.add_argument("--rows", nargs="+", choices=list(BY_NAME), metavar="NAME", help="only these rows")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="the smallest case of each row: does it work? The numbers say nothing",
    )
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="where results are saved (%(default)s)")
    parser.add_argument(
        "--page",
        type=Path,
        metavar="FILE",
        help="also write the tables into this page, between its two markers",
    )
    parser.add_argument(
        "--scratch",
        type=Path,
        default=DEFAULT_OUT / "scratch",
        help="a folder on the disk that is measured (%(default)s)",
    )
    return parser


def _sizes(text: str) -> list[int]:
    return [parse_size(part) for part in text.split(",")]


def _counts(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

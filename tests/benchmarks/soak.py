"""`make bench-soak`: thousands of updates and rollbacks; fails when anything grows that should not.

After a warm-up (a quarter of the run, in which allocators and caches fill) the highest values of the second quarter are
compared with those of the last. Files are pruned on the way, as in a long training.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.benchmarks import weights, workers
from tests.benchmarks.machine import describe
from tests.benchmarks.processes import Process, StoreUsage
from tests.benchmarks.running import ROOT
from tests.benchmarks.setting import MB, QUICK_SIZE, Setting, parse_size, size_name
from weightledger.registry import Registry
from weightledger.updater import RayRemoteWeightUpdater

_MB = 1 << 20
_ROLLBACK_EVERY, _PRUNE_EVERY, _KEEP = 50, 100, 5
_LOOKS = 40  # how often everything is looked at

# What may be added between the second and the last quarter, and what part of the former besides. Memory breathes with
# Ray's own bookkeeping; the others are counts.
_ALLOWED: Mapping[str, tuple[int, float]] = {
    "learner_private_bytes": (12 * _MB, 0.05),
    "worker_private_bytes": (6 * _MB, 0.05),
    "store_bytes": (0, 0.0),
    "learner_descriptors": (4, 0.0),
    "worker_descriptors": (4, 0.0),
    "learner_threads": (2, 0.0),
    "worker_threads": (2, 0.0),
    "snapshot_files": (_PRUNE_EVERY, 0.0),
}


@dataclass(frozen=True)
class Look:
    """Everything at one moment; of workers the highest."""

    updates: int
    seconds: float
    learner_private_bytes: int
    worker_private_bytes: int
    store_bytes: int
    learner_descriptors: int
    worker_descriptors: int
    learner_threads: int
    worker_threads: int
    snapshot_files: int
    database_bytes: int
    """Grows with the record, as it should; only shown."""


def growth(looks: Sequence[Look]) -> list[str]:
    """Say what grew between the second quarter and the last; nothing when all is well."""
    quarter = max(1, len(looks) // 4)
    early, late = looks[quarter : 2 * quarter] or looks[:1], looks[-quarter:]
    found = []
    for name, (most, part) in _ALLOWED.items():
        before = max(getattr(look, name) for look in early)
        after = max(getattr(look, name) for look in late)
        if after > before * (1 + part) + most:
            found.append(
                f"{name} grew from {before:,} to {after:,}; at most {most:,} + {part:.0%} more were expected"
            )
    return found


def run(setting: Setting, updates: int, size: int, count: int) -> Iterator[Look]:
    """Update again and again; yields a look at each interval."""
    with workers.cluster(20 * size), setting.folder() as folder:
        fleet = workers.Fleet(workers.hire(count), weights.make(size))
        processes = workers.build(fleet.handles, size)
        with (
            Registry.open(folder) as registry,
            RayRemoteWeightUpdater(fleet.learner, fleet.handles, registry=registry, timeout=60) as updater,
        ):
            interval = max(1, updates // _LOOKS)
            began = time.perf_counter()
            for number in range(1, updates + 1):
                if number % _ROLLBACK_EVERY == 0:
                    report = updater.rollback(reason="soak")
                else:
                    weights.change(fleet.learner)
                    report = updater.update_weights(step=number)
                report.raise_for_failures()
                if number % _PRUNE_EVERY == 0:
                    registry.prune(keep_last=_KEEP)
                if number % interval == 0:
                    fleet.check(report, True)
                    yield _look(registry, processes, number, time.perf_counter() - began)


def _look(registry: Registry, processes: Sequence[Process], updates: int, seconds: float) -> Look:
    learner = Process(os.getpid())
    return Look(
        updates,
        round(seconds, 2),
        learner.private(),
        max(process.private() for process in processes),
        StoreUsage().in_use,
        learner.descriptors(),
        max(process.descriptors() for process in processes),
        learner.threads(),
        max(process.threads() for process in processes),
        len(list((Path(registry.location) / "snapshots").iterdir())),
        sum(path.stat().st_size for path in Path(registry.location).glob("registry.db*")),
    )


def main(arguments: Sequence[str]) -> int:
    """Run the soak; returns 1 when something grew."""
    options = _parser().parse_args(arguments)
    updates, size, count = (
        (120, QUICK_SIZE, 2) if options.quick else (options.updates, options.size, options.workers)
    )
    setting = Setting(str(options.scratch.resolve()))
    print(f"{updates:,} updates of {size_name(size)}, {count} workers")
    looks = []
    for look in run(setting, updates, size, count):
        looks.append(look)
        print(
            f"{look.updates:>7,}  {look.seconds:7.1f} s  learner {look.learner_private_bytes / _MB:7.1f} MB  "
            f"worker {look.worker_private_bytes / _MB:7.1f} MB  store {look.store_bytes / _MB:6.1f} MB  "
            f"descriptors {look.learner_descriptors}/{look.worker_descriptors}  "
            f"threads {look.learner_threads}/{look.worker_threads}  files {look.snapshot_files}  "
            f"database {look.database_bytes / _MB:.1f} MB",
            flush=True,
        )
    grown = growth(looks)
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    report = {
        "format": 1,
        "updates": updates,
        "size": size,
        "workers": count,
        "machine": describe(Path(setting.scratch)),
        "looks": [asdict(look) for look in looks],
        "grown": grown,
    }
    (out / "soak.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print("\n".join(grown) if grown else "nothing grew", f"saved in {out}: soak.json", sep="\n")
    return int(bool(grown))


def _parser() -> argparse.ArgumentParser:
    default = ROOT / "build" / "benchmarks"
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks soak", description=__doc__)
    parser.add_argument("--updates", type=int, default=10_000)
    parser.add_argument("--size", type=parse_size, default=MB, help="bytes of weights (1MB)")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--quick", action="store_true", help="a hundred small ones: does it work?")
    parser.add_argument("--out", type=Path, default=default, help="where the report is saved (%(default)s)")
    parser.add_argument(
        "--scratch", type=Path, default=default / "scratch", help="a folder on a disk (%(default)s)"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

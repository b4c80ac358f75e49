"""Publish and confirm with the disk taken out, against plain copies: one into shared memory, one out a worker."""

from __future__ import annotations

from collections.abc import Iterator

from tests.benchmarks import weights, workers
from tests.benchmarks.contenders import (
    COPIES,
    LEDGER_IN_MEMORY,
    LEDGER_NO_DISK,
    ledger,
    ledger_no_disk,
    plain_copies,
)
from tests.benchmarks.results import Limit, Result
from tests.benchmarks.setting import MB, SIZES, Setting, case_name, largest
from tests.benchmarks.timing import interleave, rounds_for


def measure(setting: Setting) -> Iterator[Result]:
    cases = setting.grid({4: SIZES}, copies=7, copies_per_worker=1)
    with workers.cluster(5 * largest(cases)[0]):
        handles = workers.hire(largest(cases)[1])
        for size, count in cases:
            fleet = workers.Fleet(handles[:count], weights.make(size))
            workers.build(fleet.handles, size)
            with (
                setting.folder(memory=True) as folder,
                ledger_no_disk(LEDGER_NO_DISK, folder / "dropped", fleet) as ours,
                ledger(LEDGER_IN_MEMORY, folder / "kept", fleet) as in_memory,
                plain_copies(COPIES, fleet) as copies,
            ):
                seconds = interleave([ours, in_memory, copies], rounds_for(size, quick=setting.quick))
            for subject, limits in (
                (LEDGER_NO_DISK, [Limit(1.5, COPIES)] if size >= 256 * MB else []),
                (LEDGER_IN_MEMORY, []),
            ):
                yield Result(
                    "copies",
                    case_name(size, count),
                    subject,
                    seconds[subject],
                    {COPIES: seconds[COPIES]},
                    limits,
                    size=size,
                    workers=count,
                )

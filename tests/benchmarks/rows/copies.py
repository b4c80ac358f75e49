"""Publish and confirm with the disk taken out, against plain copies: one into shared memory, one out a worker."""

from __future__ import annotations

from collections.abc import Iterator

from tests.benchmarks import weights, workers
from tests.benchmarks.contenders import COPIES, LEDGER_IN_MEMORY, ledger, plain_copies
from tests.benchmarks.results import Limit, Result
from tests.benchmarks.setting import MB, SIZES, Setting, case_name, largest
from tests.benchmarks.timing import interleave, rounds_for


def measure(setting: Setting) -> Iterator[Result]:
    cases = setting.grid({4: SIZES}, copies=7, copies_per_worker=1)
    with workers.cluster(3 * largest(cases)[0]):
        handles = workers.hire(largest(cases)[1])
        for size, count in cases:
            fleet = workers.Fleet(handles[:count], weights.make(size))
            workers.build(fleet.handles, size)
            with (
                setting.folder(memory=True) as folder,
                ledger(LEDGER_IN_MEMORY, folder, fleet) as ours,
                plain_copies(COPIES, fleet) as copies,
            ):
                seconds = interleave([ours, copies], rounds_for(size, quick=setting.quick))
            yield Result(
                "copies",
                case_name(size, count),
                LEDGER_IN_MEMORY,
                seconds.pop(LEDGER_IN_MEMORY),
                seconds,
                [Limit(1.5, COPIES)] if size >= 256 * MB else [],
                size=size,
                workers=count,
            )

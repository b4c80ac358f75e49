"""How long `update_weights(wait=False)` holds the learner, against one memcpy of the weights."""

from __future__ import annotations

from collections.abc import Iterator

from tests.benchmarks import weights, workers
from tests.benchmarks.contenders import LEDGER, ledger_held, memcpy
from tests.benchmarks.results import Limit, Result
from tests.benchmarks.setting import MB, SIZES, Setting, case_name, largest
from tests.benchmarks.timing import interleave, rounds_for

MEMCPY = "memcpy"


def measure(setting: Setting) -> Iterator[Result]:
    cases = setting.grid({4: SIZES}, copies=6, copies_per_worker=1)
    with workers.cluster(3 * largest(cases)[0]):
        handles = workers.hire(largest(cases)[1])
        for size, count in cases:
            fleet = workers.Fleet(handles[:count], weights.make(size))
            workers.build(fleet.handles, size)
            with setting.folder() as folder, ledger_held(LEDGER, folder, fleet) as ours:
                seconds = interleave(
                    [ours, memcpy(MEMCPY, fleet.learner)], rounds_for(size, quick=setting.quick)
                )
            yield Result(
                "held",
                case_name(size, count),
                LEDGER,
                seconds.pop(LEDGER),
                seconds,
                [Limit(1.5, MEMCPY) if size >= 16 * MB else Limit(0.001, MEMCPY, "more")],
                size=size,
                workers=count,
            )

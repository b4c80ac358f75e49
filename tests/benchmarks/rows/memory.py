"""Private memory of the learner and of a worker while an update runs, and bytes in the object store after many.

Object-store pages are shared, so they are not among the private bytes. Before it counts, everything is run once with
tiny weights: code that is loaded on first use is no copy of the weights.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from tests.benchmarks import weights, workers
from tests.benchmarks.contenders import LEDGER, ledger
from tests.benchmarks.processes import Process, StoreUsage, watch
from tests.benchmarks.results import Limit, Result
from tests.benchmarks.setting import GB, KB, MB, Setting, case_name, largest
from tests.benchmarks.timing import interleave

# One copy, and a twentieth for everything else.
_ONE_COPY = 1.05


def measure(setting: Setting) -> Iterator[Result]:
    cases = setting.grid({4: (16 * MB, 256 * MB, GB)}, copies=5, copies_per_worker=2)
    with workers.cluster(3 * largest(cases)[0]):
        handles = workers.hire(largest(cases)[1])
        warm = workers.Fleet(handles, weights.make(64 * KB))
        workers.build(handles, 64 * KB)
        with setting.folder() as folder, ledger(LEDGER, folder, warm) as contender:
            interleave([contender], 3)
        for size, count in cases:
            yield from _measure(setting, workers.Fleet(handles[:count], weights.make(size)), size)


def _measure(setting: Setting, fleet: workers.Fleet, size: int) -> Iterator[Result]:
    players = workers.build(fleet.handles, size)
    processes = [Process(os.getpid()), *players]
    exact = weights.nbytes(fleet.learner)
    name, about = case_name(size, len(players)), {"size": size, "workers": len(players), "unit": "B"}
    with setting.folder() as folder, ledger(LEDGER, folder, fleet) as contender:
        contender.prepare()
        before = [process.private() for process in processes]
        with watch(processes) as peaks:
            for _ in range(3):
                contender.run().raise_for_failures()
                contender.prepare()
        extra = [peaks.by_pid[process.pid] - start for process, start in zip(processes, before, strict=True)]
        one = {"the weights": [exact]}
        yield Result(
            "memory",
            name,
            "learner, private bytes beyond its weights",
            [max(0, extra[0])],
            one,
            # In a few pages of weights one could not see the copy for everything else.
            [Limit(_ONE_COPY, "the weights")] if size >= 16 * MB else [],
            **about,
        )
        yield Result(
            "memory", name, "worker, private bytes beyond its policy", [max(0, *extra[1:])], one, **about
        )
        interleave([contender], 3 if setting.quick or size > 100 * MB else 40)
        yield Result(
            "memory",
            name,
            "object store after many publishes",
            [StoreUsage().in_use],
            one,
            [Limit(_ONE_COPY, "the weights")],
            **about,
        )

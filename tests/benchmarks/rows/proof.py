"""Whether a learner and a worker still are what they were proved to be, looked at in every update."""

from __future__ import annotations

from collections.abc import Iterator

from tests.benchmarks import weights, workers
from tests.benchmarks.contenders import LEDGER, ledger
from tests.benchmarks.results import Limit, Result
from tests.benchmarks.setting import MB, Setting, case_name, largest
from tests.benchmarks.timing import Contender, interleave, rounds_for
from weightledger.registry.weights.codec import flatten
from weightledger.registry.weights.fitting import make_plan, still_good
from weightledger.registry.weights.packing import Packer
from weightledger.registry.weights.reuse import Flattener

STEADY, ANEW = "the look at both", "the first proof of both"


def measure(setting: Setting) -> Iterator[Result]:
    cases = setting.grid({4: (MB,)}, copies=6, copies_per_worker=2)
    with workers.cluster(3 * largest(cases)[0]):
        handles = workers.hire(largest(cases)[1])
        for size, count in cases:
            fleet = workers.Fleet(handles[:count], weights.make(size))
            workers.build(fleet.handles, size)
            with setting.folder() as folder, ledger(LEDGER, folder, fleet) as ours:
                contenders = [ours, _steady(size), _anew(size)]
                seconds = interleave(contenders, rounds_for(size, quick=setting.quick))
            update = {LEDGER: seconds[LEDGER]}
            for subject, limits in ((STEADY, [Limit(0.03, LEDGER)]), (ANEW, [])):
                yield Result(
                    "proof",
                    case_name(size, count),
                    subject,
                    seconds[subject],
                    update,
                    limits,
                    size=size,
                    workers=count,
                )


def _steady(size: int) -> Contender:
    learner, worker, flattener = weights.make(size), weights.make(size), Flattener()
    payload = Packer().pack(flattener.flatten(learner))
    plan = make_plan(payload, worker, False)

    def look() -> bool:
        known = flattener.flatten(learner) is flattener._content
        return known and still_good(plan, payload, worker, False) is plan

    def check(same: bool, whole: bool) -> None:
        assert same

    return Contender(STEADY, look, lambda: weights.change(learner), check)


def _anew(size: int) -> Contender:
    learner, worker = weights.make(size), weights.make(size)
    payload = Packer().pack(flatten(learner))

    def prove() -> None:
        Flattener().flatten(learner)
        make_plan(payload, worker, False)

    return Contender(ANEW, prove)

"""Ten thousand fake workers: what planning and recording cost. Sixty-four real ones: what each costs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch

from tests.benchmarks import weights, workers
from tests.benchmarks.results import Limit, Result
from tests.benchmarks.setting import KB, Setting, case_name
from tests.benchmarks.timing import Contender, interleave
from weightledger.registry import Registry
from weightledger.updater import RayRemoteWeightUpdater
from weightledger.updater.messages import ServerWeights
from weightledger.updater.testing import FakeWorkers

_MOST = 0.5  # seconds to plan and record 10,000
_FLAT = 1.25  # cost of one among 64, against one among 16
SUBJECT = "plan and record"


class TimedFakeWorkers(FakeWorkers):
    """Fake workers that note how long they worked themselves, to take it off."""

    applying = 0.0

    def _sync_weights_with_worker(self, worker_id: int, server_weights: ServerWeights) -> Any:
        began = time.perf_counter()
        answer = super()._sync_weights_with_worker(worker_id, server_weights)
        self.applying += time.perf_counter() - began
        return answer


def measure(setting: Setting) -> Iterator[Result]:
    yield from _fakes(setting, 100 if setting.quick else 10_000)
    yield from _actors(setting, 4 if setting.quick else 64)


def _fakes(setting: Setting, count: int) -> Iterator[Result]:
    learner = torch.nn.Linear(2, 1)
    samples: list[float] = []
    with setting.folder() as folder, Registry.open(folder) as registry:
        policies = [torch.nn.Linear(2, 1) for _ in range(count)]
        with TimedFakeWorkers(learner, policies, registry=registry, timeout=workers.WAIT) as fleet:
            for turn in range(2 if setting.quick else 6):
                weights.change(learner)
                fleet.applying = 0.0
                began = time.perf_counter()
                report = fleet.update_weights()
                took = time.perf_counter() - began
                report.raise_for_failures()
                assert all(weights.value(policy) == weights.value(learner) for policy in policies)
                if turn:  # the first has every row to make
                    samples.append(took - fleet.applying)
    limits = [Limit(_MOST, kind="value")]
    yield Result("many-workers", f"{count:,} fake workers", SUBJECT, samples, {}, limits, workers=count)


def _actors(setting: Setting, most: int) -> Iterator[Result]:
    size = 64 * KB
    counts = [most, most // 2, most // 4]
    with workers.cluster(0, cpus=2 * most):
        handles = workers.hire(most)
        learner = weights.make(size)
        fleets = {count: workers.Fleet(handles[:count], learner) for count in counts}
        workers.build(handles, size)
        with (
            setting.folder() as folder,
            Registry.open(folder) as registry,
            RayRemoteWeightUpdater(learner, handles, registry=registry, timeout=workers.WAIT) as updater,
        ):

            def contender(count: int) -> Contender:
                return Contender(
                    str(count),
                    lambda: updater.update_weights(worker_ids=range(count)),
                    lambda: weights.change(learner),
                    fleets[count].check,
                )

            seconds = interleave([contender(count) for count in counts], 2 if setting.quick else 20)
    each = {count: [took / count for took in seconds[str(count)]] for count in counts}
    name = f"one of {most // 4}"
    yield Result(
        "many-workers",
        case_name(size, most),
        f"one of {most} real workers",
        each[most],
        {f"one of {most // 2}": each[most // 2], name: each[most // 4]},
        [Limit(_FLAT, name)],
        size=size,
        workers=most,
    )

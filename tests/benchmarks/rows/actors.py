"""Publish, durable, and confirmed by every worker, against `ray.put(state_dict)` + `load_state_dict` by hand."""

from __future__ import annotations

from collections.abc import Iterator

from tests.benchmarks import weights, workers
from tests.benchmarks.contenders import DISK, LEDGER, PUT, ledger, put_and_load, write_and_sync
from tests.benchmarks.results import Result
from tests.benchmarks.setting import GB, KB, MB, SIZES, Setting, case_name, largest
from tests.benchmarks.timing import interleave, rounds_for


def measure(setting: Setting) -> Iterator[Result]:
    return _measure(setting, "actors", {4: SIZES, 1: (64 * KB, 16 * MB, GB), 16: (64 * KB, 16 * MB)})


def measure_zero_copy(setting: Setting) -> Iterator[Result]:
    """The same; `catalog` sets RAY_ENABLE_ZERO_COPY_TORCH_TENSORS for this process and its cluster."""
    return _measure(setting, "actors-zero-copy", {4: SIZES})


def _measure(setting: Setting, row: str, defaults: dict[int, tuple[int, ...]]) -> Iterator[Result]:
    cases = setting.grid(defaults, copies=6, copies_per_worker=2)
    with workers.cluster(3 * largest(cases)[0]):
        handles = workers.hire(largest(cases)[1])
        for size, count in cases:
            fleet = workers.Fleet(handles[:count], weights.make(size))
            # Those that have no part in it hold nothing big from an earlier case either.
            workers.build(handles[count:], KB)
            workers.build(fleet.handles, size)
            with setting.folder() as folder, ledger(LEDGER, folder, fleet) as ours:
                contenders = [ours, put_and_load(PUT, fleet), write_and_sync(DISK, folder, fleet.learner)]
                seconds = interleave(contenders, rounds_for(size, quick=setting.quick))
            yield Result(
                row,
                case_name(size, count),
                LEDGER,
                seconds.pop(LEDGER),
                seconds,
                size=size,
                workers=count,
            )

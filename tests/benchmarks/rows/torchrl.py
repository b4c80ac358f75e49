"""Publish and confirm on the workers of a real RayCollector, against TorchRL's own two ways to update them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.benchmarks import workers
from tests.benchmarks.collectors import collector_with
from tests.benchmarks.contenders import DISK, LEDGER, LEDGER_NO_DISK, ledger, ledger_no_disk, write_and_sync
from tests.benchmarks.results import Limit, Result
from tests.benchmarks.setting import GB, MB, SIZES, Setting, case_name, largest
from tests.benchmarks.timing import interleave, rounds_for

# Starting a collector of 16 takes longer than all its rounds, so the other numbers of workers get one size or two.
_CASES = {4: SIZES, 1: (MB, 16 * MB), 16: (MB,)}


def measure_updater(setting: Setting) -> Iterator[Result]:
    """Against the class that this library replaces, made to wait for its workers."""
    cases = setting.grid(_CASES, copies=6, copies_per_worker=2.5)
    with workers.cluster(6 * largest(cases)[0]):
        for size, count in cases:
            with (
                setting.folder() as folder,
                collector_with(size, count, stock_updater=True) as (fleet, stock),
                ledger(LEDGER, folder, fleet) as ours,
            ):
                contenders = [ours, stock, write_and_sync(DISK, folder, fleet.learner)]
                seconds = interleave(contenders, rounds_for(size, quick=setting.quick))
            yield Result(
                "torchrl-updater",
                case_name(size, count),
                LEDGER,
                seconds.pop(LEDGER),
                seconds,
                _limits_against_updater(size, stock.name),
                size=size,
                workers=count,
            )


def measure_scheme(setting: Setting) -> Iterator[Result]:
    """Against the default of today, which keeps and records nothing; also with our disk taken out."""
    cases = setting.grid(_CASES, copies=9, copies_per_worker=2)
    with workers.cluster(6 * largest(cases)[0]):
        for size, count in cases:
            with (
                setting.folder() as folder,
                setting.folder(memory=True) as memory,
                collector_with(size, count, stock_updater=False) as (fleet, stock),
                ledger(LEDGER, folder, fleet) as ours,
                ledger_no_disk(LEDGER_NO_DISK, memory, fleet) as without_disk,
            ):
                contenders = [ours, stock, without_disk, write_and_sync(DISK, folder, fleet.learner)]
                seconds = interleave(contenders, rounds_for(size, quick=setting.quick))
            name = case_name(size, count)
            about: dict[str, Any] = {"size": size, "workers": count}
            gloo, disk = seconds[stock.name], seconds[DISK]
            yield Result(
                "torchrl-scheme",
                name,
                LEDGER,
                seconds[LEDGER],
                {stock.name: gloo, DISK: disk},
                _limits_against_scheme(size, stock.name),
                **about,
            )
            yield Result(
                "torchrl-scheme",
                name,
                LEDGER_NO_DISK,
                seconds[LEDGER_NO_DISK],
                {stock.name: gloo},
                [_limit_without_disk(size, stock.name)],
                **about,
            )


def _limits_against_updater(size: int, stock: str) -> list[Limit]:
    if size < 16 * MB:
        return [Limit(1.0, stock)]
    return [Limit(1 / 5 if size >= 256 * MB else 1 / 3, stock), Limit(1.25, DISK)]


def _limits_against_scheme(size: int, stock: str) -> list[Limit]:
    if size < 256 * MB:
        return [Limit(1.25, stock)]
    return [Limit(1.0, stock), Limit(1.25, DISK)]


def _limit_without_disk(size: int, stock: str) -> Limit:
    faster = 2.5 if size >= GB else 1.5 if size >= 256 * MB else 1.0
    return Limit(1 / faster, stock)

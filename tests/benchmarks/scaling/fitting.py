"""From measured times to the constants of the model, by differences. Pure.

Every constant is fitted from calls on one node, or from bare Ray, at sizes and numbers of workers that the model is
never checked at.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from tests.benchmarks.scaling.model import Constants, Site

Case = tuple[int, int]
"""Bytes of weights, workers."""


@dataclass(frozen=True)
class Timeline:
    """When the stages of one update were reached, on one clock."""

    began: float
    ready: float
    """The bytes are hashed and in the object store; where nothing was published, as `began`."""
    sending: float
    """The first push leaves."""
    sent: float
    durable: float
    """The file is durable, and receipts are waited for."""
    arrived: float
    """All receipts are there."""
    taken: float
    """They are unpacked."""
    ended: float
    ready_work: float
    """Core-seconds that the updater's process spent from `began` to `ready`."""
    sending_work: float
    """Core-seconds that the updater's thread spent from `sending` to `sent`."""
    work: float
    """Core-seconds that the updater's process spent from `sending` to `taken`."""


@dataclass(frozen=True)
class Parts:
    """Bare steps of one update, each alone and at two sizes: seconds by bytes."""

    pack: Mapping[int, float]
    hash: Mapping[int, float]
    """By one thread."""
    scan: Mapping[int, float]
    put: Mapping[int, float]
    file: Mapping[int, float]


@dataclass(frozen=True)
class Pulls:
    """Bare `ray.put` objects fetched by other nodes: what a call took longer the first time than the second."""

    one: Mapping[int, float]
    """Seconds by bytes, one node fetching."""
    every: Mapping[int, float]
    """The same, with several nodes fetching the same object at once."""
    nodes: int
    """How many these were."""
    serve: float
    """Core-seconds of the sending node's raylet for one byte."""
    work: float
    """Core-seconds of all raylets, the giving and the receiving process for one fetch of the smallest size."""


@dataclass(frozen=True)
class Measured:
    """Everything that the constants are fitted from."""

    cores: float
    """Cores with nothing to do while all nodes are up and idle."""
    parts: Parts
    fakes: Mapping[int, Sequence[Timeline]]
    """Updates of workers without a transport, by their number."""
    updates: Mapping[int, Sequence[Timeline]]
    """Updates of one actor on the learner's node, by bytes; on the disk that is measured."""
    syncs: Mapping[Case, Sequence[Timeline]]
    """Calls of `sync` that send bytes to actors on the learner's node and publish nothing."""
    worker_work: float
    """Core-seconds of a worker's process, and its share of the raylet's, for one small push."""
    pulls: Pulls


def rate(seconds: Mapping[int, float]) -> float:
    """Return bytes a second from the smallest and the largest size; where noise ate the difference, of the largest."""
    small, large = min(seconds), max(seconds)
    difference = seconds[large] - seconds[small]
    if difference > 0 and large > small:
        return (large - small) / difference
    return large / seconds[large]


def fixed(seconds: Mapping[int, float]) -> float:
    """Return what the smallest size takes beyond its bytes."""
    small = min(seconds)
    return max(0.0, seconds[small] - small / rate(seconds))


def slope(seconds: Mapping[int, float]) -> float:
    """Return seconds for each one more, from the fewest and the most; nothing where noise ate the difference."""
    few, many = min(seconds), max(seconds)
    return max(0.0, (seconds[many] - seconds[few]) / (many - few))


def fit(measured: Measured) -> Constants:
    """Return the constants of the machine that was measured."""
    parts, pulls = measured.parts, measured.pulls
    pack, hashed, scan, put = (rate(each) for each in (parts.pack, parts.hash, parts.scan, parts.put))
    intend = slope(_by_workers(measured.fakes, lambda line: line.sending - line.ready))
    record = slope(_by_workers(measured.fakes, lambda line: line.ended - line.taken))
    small = min(measured.updates)
    lines = measured.updates[small]
    steps = small / pack + small / hashed + small / scan + small / put + fixed(parts.put)
    # Core-seconds, unlike seconds, are hardly more on a machine that has something else to do as well.
    work = {size: _median(each, lambda line: line.ready_work) for size, each in measured.updates.items()}
    prepare = {size: max(1e-9, spent - size / pack) for size, spent in work.items()}

    small = min(size for size, _ in measured.syncs)
    by_workers = {count: lines for (size, count), lines in measured.syncs.items() if size == small}
    few = min(by_workers)
    by_size = {
        size: _median(lines, _under_way) for (size, count), lines in measured.syncs.items() if count == few
    }
    copy = few * rate(by_size)
    return Constants(
        begin=max(0.0, _median(lines, lambda line: line.ready - line.began) - steps),
        pack_rate=pack,
        hash_rate=hashed,
        scan_rate=scan,
        put_fixed=fixed(parts.put),
        put_rate=put,
        prepare_rate=rate(prepare),
        open=max(0.0, _median(lines, lambda line: line.sending - line.ready) - intend),
        intend=intend,
        send=slope(_by_workers(by_workers, lambda line: line.sending_work)),
        file_fixed=fixed(parts.file),
        file_rate=rate(parts.file),
        round_trip=max(0.0, by_size[small] - few * small / copy),
        driver_work=slope(_by_workers(by_workers, lambda line: line.work)),
        worker_work=measured.worker_work,
        copy_rate=copy,
        pull_fixed=fixed(pulls.one),
        pull_rate=rate(pulls.one),
        pull_work=pulls.work,
        serve_rate=1 / pulls.serve if pulls.serve > 0 else pulls.nodes * rate(pulls.every),
        take=slope(_by_workers(by_workers, lambda line: line.taken - line.arrived)),
        record=record,
        close=max(0.0, _median(lines, lambda line: line.ended - line.taken) - record),
    )


def fit_site(measured: Measured, store: float) -> Site:
    """Return the machine as a place where all nodes share its cores and its loopback device."""
    most = max(count for _, count in measured.syncs)
    by_size = {
        size: _median(lines, _under_way) for (size, count), lines in measured.syncs.items() if count == most
    }
    return Site(
        cores=measured.cores,
        memory_rate=most * rate(by_size),
        bandwidth=measured.pulls.nodes * rate(measured.pulls.every),
        latency=0.0,
        store=store,
        shared=True,
    )


def _under_way(line: Timeline) -> float:
    return line.arrived - line.sending


def _by_workers(
    lines: Mapping[int, Sequence[Timeline]], seconds: Callable[[Timeline], float]
) -> dict[int, float]:
    return {workers: _median(each, seconds) for workers, each in lines.items()}


def _median(lines: Sequence[Timeline], seconds: Callable[[Timeline], float]) -> float:
    return median(seconds(line) for line in lines)

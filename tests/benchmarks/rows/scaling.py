"""Measure the constants of the scaling model, then let several Ray nodes on this machine say whether it is right.

The constants come from the learner's node alone and from bare Ray, at sizes and numbers of workers that are not
checked. Then updates run on two and three nodes. All nodes share this machine's cores and its loopback device, and so
do they in the model.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import ray
import torch
from ray.cluster_utils import Cluster

from tests.benchmarks import weights, workers
from tests.benchmarks.machine import free_memory
from tests.benchmarks.results import Limit, Result
from tests.benchmarks.scaling.fitting import Measured, Parts, Pulls, Timeline, fit, fit_site
from tests.benchmarks.scaling.model import Constants, Site, numbers_of, predict, to_shown
from tests.benchmarks.scaling.watching import WatchedFakes, WatchedUpdater
from tests.benchmarks.setting import GB, KB, MB, Setting, size_name
from tests.benchmarks.timing import Contender, interleave
from weightledger.registry import Registry
from weightledger.registry.store.local import LocalSnapshots
from weightledger.updater.in_worker.receiver import _states

ROW = "scaling"
MEASURED, PREDICTED, CONSTANT = "measured", "predicted", "constant of the model"
# What a model of sums and maxima can promise for a machine whose two cores do everything at once.
_FACTOR = 1.5
_CPUS = 4  # that each node tells Ray; workers here ask for none


@dataclass(frozen=True)
class Plan:
    """What is measured, and how often."""

    fit_sizes: tuple[int, int]
    fit_workers: tuple[int, int]
    fakes: tuple[int, int]
    rounds: int
    idle: float
    """Seconds for which processes are looked at while they do nothing."""
    nodes: Sequence[int]
    each: Sequence[int]
    sizes: Sequence[int]


FULL = Plan((256 * KB, 64 * MB), (1, 8), (64, 1024), 9, 1.0, (2, 3), (2, 4), (MB, 16 * MB, 128 * MB))
QUICK = Plan((128 * KB, 512 * KB), (1, 2), (4, 16), 2, 0.1, (2,), (1,), (256 * KB,))


def measure(setting: Setting) -> Iterator[Result]:
    plan = QUICK if setting.quick else FULL
    sizes, each = setting.sizes or plan.sizes, setting.workers or plan.each
    fakes = _fakes(setting, plan)
    others = max(plan.nodes) - 1
    local = max(*plan.fit_workers, *each)
    store = max(200 << 20, 4 * max(*sizes, *plan.fit_sizes))
    with _nodes(others, store) as cluster:
        hired = [_hire(0, local), *(_hire(node, max(each)) for node in range(1, others + 1))]
        ray.get([node[0].__ray_call__.remote(_touch, store) for node in hired], timeout=workers.WAIT)
        measured = _measure(setting, plan, cluster, hired, fakes)
        constants, site = fit(measured), fit_site(measured, store)
        yield from _told(constants)
        yield from _told(site)
        for nodes in plan.nodes:
            for count in each:
                handles = [handle for node in hired[:nodes] for handle in node[:count]]
                for size in sizes:
                    if _fits(size, nodes, count):
                        yield _check(setting, plan, constants, site, nodes, handles, size)


def _told(numbers: Constants | Site) -> Iterator[Result]:
    shown = to_shown(numbers)
    for each in numbers_of(type(numbers)):
        yield Result(ROW, each.name, CONSTANT, [shown[each.name]], unit=each.unit)


# ---------------------------------------------------------------------- the constants


def _measure(
    setting: Setting,
    plan: Plan,
    cluster: Cluster,
    hired: Sequence[Sequence[Any]],
    fakes: Mapping[int, Sequence[Timeline]],
) -> Measured:
    small, many = min(plan.fit_sizes), max(plan.fit_workers)
    syncs, works, updates = {}, {}, {}
    raylet = _raylets(cluster)[0]
    for size in plan.fit_sizes:
        rounds = plan.rounds * (3 if size == small else 1)
        updates[size] = _updates(setting, hired[0][:1], size, rounds)
        for count in plan.fit_workers:
            found = _syncs(setting, plan, raylet, hired[0][:count], size, rounds)
            syncs[size, count], works[size, count] = found
    return Measured(
        cores=_free_cores(2 * plan.idle),
        parts=_parts(setting, plan),
        fakes=fakes,
        updates=updates,
        syncs=syncs,
        worker_work=works[small, many],
        pulls=_pulls(plan, cluster, [node[0] for node in hired[1:]]),
    )


def _fakes(setting: Setting, plan: Plan) -> dict[int, list[Timeline]]:
    """Plan and record, without a transport."""
    lines: dict[int, list[Timeline]] = {}
    for count in plan.fakes:
        learner = torch.nn.Linear(2, 1)
        policies = [torch.nn.Linear(2, 1) for _ in range(count)]
        with (
            setting.folder() as folder,
            Registry.open(folder) as registry,
            WatchedFakes(learner, policies, registry=registry, timeout=workers.WAIT) as fleet,
        ):
            lines[count] = _repeat(learner, fleet, fleet.update_weights, plan.rounds)
    return lines


def _updates(setting: Setting, handles: Sequence[Any], size: int, rounds: int) -> list[Timeline]:
    """Whole updates, on the disk."""
    learner = weights.make(size)
    workers.build(handles, size)
    with setting.folder() as folder, _updater(folder, learner, handles) as (updater, _):
        lines = _repeat(learner, updater, updater.update_weights, rounds)
    workers.Fleet(handles, learner).ask(_forget)
    return lines


def _repeat(learner: Any, updater: Any, call: Callable[[], Any], rounds: int) -> list[Timeline]:
    lines = []
    for _ in range(rounds + 1):
        weights.change(learner)
        report, line = updater.timed(call)
        report.raise_for_failures()
        lines.append(line)
    return lines[1:]  # the first has every row to make


def _syncs(
    setting: Setting, plan: Plan, raylet: int, handles: Sequence[Any], size: int, rounds: int
) -> tuple[list[Timeline], float]:
    """Bring workers to and fro between two versions: pushes with bytes, while nothing is published.

    Returns:
        The stages of the calls that put the bytes anew, and the core-seconds of a worker and the raylet for one push.
    """
    learner = weights.make(size)
    workers.build(handles, size)
    fleet = workers.Fleet(handles, learner)
    lines: list[Timeline] = []
    with setting.folder(memory=True) as folder, _updater(folder, learner, handles) as (updater, _):
        for _ in range(2):
            weights.change(learner)
            updater.update_weights().raise_for_failures()
        with _spending(lambda: [_cpu_seconds(raylet), *fleet.ask(_work)], plan.idle) as spent:
            for _ in range(rounds):
                report, line = updater.timed(lambda: updater.sync(version=1))
                report.raise_for_failures()
                lines.append(line)
                updater.sync().raise_for_failures()
        fleet.check(None, True)
    fleet.ask(_forget)
    return lines[1:], max(0.0, sum(spent)) / (2 * rounds * len(handles))


def _work(actor: Any) -> float:
    return time.process_time()


def _parts(setting: Setting, plan: Plan) -> Parts:
    """Bare steps, each alone."""
    seconds: dict[str, dict[int, float]] = {}
    for size in plan.fit_sizes:
        for name, took in _steps(setting, weights.make(size), plan.rounds).items():
            seconds.setdefault(name, {})[size] = took
    return Parts(**seconds)


def _steps(setting: Setting, learner: Any, rounds: int) -> dict[str, float]:
    found: dict[str, list[float]] = {name: [] for name in ("pack", "hash", "scan", "put", "file")}
    with setting.folder() as folder, Registry.open(folder / "registry") as registry:
        store = LocalSnapshots(folder / "files")
        for turn in range(rounds + 1):
            took, draft = _took(registry.publisher.draft, learner)
            payload = draft.weights.payload
            times = {
                "pack": took,
                "hash": _took(payload.hash)[0],
                "scan": _took(payload.nonfinite)[0],
                "put": _took(ray.put, payload.buffer)[0],
                "file": _took(_write, store, f"turn-{turn}", payload.buffer)[0],
            }
            draft.release()
            store.delete(f"turn-{turn}")
            if turn:  # the first finds memory that was never touched
                for name, each in times.items():
                    found[name].append(each)
    return {name: median(each) for name, each in found.items()}


def _write(store: LocalSnapshots, name: str, buffer: Any) -> None:
    with store.create(name) as writer:
        writer.write_at(0, buffer)
        writer.commit(name)


def _took(call: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
    began = time.perf_counter()
    answer = call(*arguments)
    return time.perf_counter() - began, answer


def _pulls(plan: Plan, cluster: Cluster, remote: Sequence[Any]) -> Pulls:
    """Let workers on other nodes be given an object of the learner's node, without this library."""
    small, large = plan.fit_sizes
    source = {size: torch.zeros(size, dtype=torch.uint8).numpy() for size in plan.fit_sizes}
    raylets, receiver = _raylets(cluster), remote[:1]
    every = {size: _pulled(remote, array, plan.rounds) for size, array in source.items()}
    one, spent = {}, {}

    def look() -> list[float]:
        worker: Any = ray.get(receiver[0].__ray_call__.remote(_work), timeout=workers.WAIT)
        return [*(_cpu_seconds(pid) for pid in raylets), time.process_time(), worker]

    for size, rounds in ((small, 4 * plan.rounds), (large, plan.rounds)):
        with _spending(look, plan.idle) as fetching:
            one[size] = _pulled(receiver, source[size], rounds)
        old = ray.put(source[size])
        with _spending(look, plan.idle) as calling:
            for _ in range(2 * rounds + 2):
                _give(receiver, old)
        spent[size] = [(a - b) / (rounds + 1) for a, b in zip(fetching, calling, strict=True)]
    serve = max(0.0, spent[large][0] - spent[small][0]) / (large - small)
    return Pulls(one, every, len(remote), serve, max(0.0, sum(spent[small])))


def _pulled(handles: Sequence[Any], array: Any, rounds: int) -> float:
    """Return the seconds by which a call with a new object is slower than the next one with the same object."""
    found = []
    for turn in range(rounds + 1):
        reference = ray.put(array)
        first, again = _took(_give, handles, reference)[0], _took(_give, handles, reference)[0]
        if turn:  # the first opens the connections
            found.append(first - again)
    return max(1e-6, median(found))


def _give(handles: Sequence[Any], reference: Any) -> None:
    ray.get([handle.__ray_call__.remote(_nothing, reference) for handle in handles], timeout=workers.WAIT)


def _nothing(actor: Any, array: Any) -> None:
    pass


def _raylets(cluster: Cluster) -> list[int]:
    """Return the processes that keep and send objects: of the learner's node, then of the others."""
    assert cluster.head_node is not None
    nodes = [cluster.head_node, *cluster.worker_nodes]
    return [node.all_processes["raylet"][0].process.pid for node in nodes]


@contextmanager
def _spending(look: Callable[[], list[float]], idle: float) -> Iterator[list[float]]:
    """Fill a list, when the block ends, with the core-seconds of processes beyond what they spend while idle.

    Args:
        look: gives the core-seconds that each has spent so far.
        idle: seconds for which they are looked at before the block.
    """
    spent: list[float] = []
    rested = time.perf_counter()
    before = look()
    time.sleep(idle)
    began, start = time.perf_counter(), look()
    yield spent
    ended, end = time.perf_counter(), look()
    for was, first, last in zip(before, start, end, strict=True):
        spent.append(last - first - (first - was) / (began - rested) * (ended - began))


def _free_cores(seconds: float) -> float:
    """Return how many cores have nothing to do while all nodes are up and idle."""

    def look() -> list[int]:
        line = Path("/proc/stat").read_text(encoding="ascii").partition("\n")[0]
        return [int(each) for each in line.split()[1:9]]

    before = look()
    time.sleep(seconds)
    user, nice, system, idle, waiting, *rest = (b - a for a, b in zip(before, look(), strict=True))
    total = user + nice + system + idle + waiting + sum(rest)
    return max(0.5, len(os.sched_getaffinity(0)) * (idle + waiting) / total)


def _cpu_seconds(pid: int) -> float:
    """Return the core-seconds that a process spent, its ended threads included."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# ---------------------------------------------------------------------- the check


def _check(
    setting: Setting,
    plan: Plan,
    constants: Constants,
    site: Site,
    nodes: int,
    handles: Sequence[Any],
    size: int,
) -> Result:
    learner = weights.make(size)
    workers.build(handles, size)
    fleet = workers.Fleet(handles, learner)
    exact = weights.nbytes(learner)
    rounds = 2 if setting.quick else 15 if size <= 2 * MB else 7 if size <= 32 * MB else 4
    lines: list[Timeline] = []
    with setting.folder() as folder, _updater(folder, learner, handles) as (updater, registry):

        def run() -> Any:
            report, line = updater.timed(updater.update_weights)
            lines.append(line)
            return report

        contender = Contender(
            MEASURED,
            run,
            lambda: weights.change(learner),
            fleet.check,
            lambda: registry.prune(keep_last=1) if size >= 8 * MB else None,
        )
        seconds = interleave([contender], rounds)[MEASURED]
    fleet.ask(_forget)
    each = len(handles) // nodes
    prediction = predict(constants, site, nodes, each, exact)
    case = f"{nodes} nodes × {each} workers, {size_name(size)}"
    _tell_stages(case, lines[1:], prediction)
    return Result(
        ROW,
        case,
        MEASURED,
        seconds,
        {PREDICTED: [prediction.seconds] * len(seconds)},
        [Limit(_FACTOR, PREDICTED, "factor")],
        size=size,
        workers=len(handles),
    )


def _tell_stages(case: str, lines: Sequence[Timeline], prediction: Any) -> None:
    """Print where the time went beside where the model has it, for whoever looks for what is wrong with it."""

    def middle(seconds: Callable[[Timeline], float]) -> str:
        return f"{1000 * median(seconds(line) for line in lines):.1f}"

    print(f"{case}: stage, measured, predicted (ms)")
    for name, found, expected in (
        ("ready", middle(lambda x: x.ready - x.began), prediction.begin + prediction.pack + prediction.ready),
        ("intentions", middle(lambda x: x.sending - x.ready), prediction.intentions),
        ("sends", middle(lambda x: x.sent - x.sending), prediction.sends),
        ("file", middle(lambda x: x.durable - x.sending), prediction.file),
        ("receipts", middle(lambda x: x.taken - x.sending), prediction.receipts),
        ("recording", middle(lambda x: x.ended - x.taken), prediction.recording),
        ("all", middle(lambda x: x.ended - x.began), prediction.seconds),
    ):
        print(f"  {name:12} {found:>9} {1000 * expected:9.1f}")


def _fits(size: int, nodes: int, each: int) -> bool:
    """Tell whether the weights of learner, workers and object stores fit into memory; says so when not."""
    need, room = size * (4 + 3 * nodes + nodes * each), 0.85 * free_memory()
    if need > room:
        print(
            f"left out: {nodes} nodes × {each} workers, {size_name(size)} needs {need / GB:.1f} GB of memory"
        )
    return need <= room


# ---------------------------------------------------------------------- nodes and workers


@contextmanager
def _updater(folder: Path, learner: Any, handles: Sequence[Any]) -> Iterator[tuple[WatchedUpdater, Registry]]:
    with (
        Registry.open(folder / "registry") as registry,
        WatchedUpdater(learner, handles, registry=registry, timeout=workers.WAIT) as updater,
    ):
        yield updater, registry


def _touch(actor: Any, store: int) -> None:
    """Let a node's object store find most of its memory used before: it takes longer the first time."""
    part = torch.zeros(store // 16, dtype=torch.uint8).numpy()
    held = [ray.put(part) for _ in range(12)]
    del held


def _forget(actor: Any) -> None:
    """Let a worker drop what it keeps for its policy; many registries in turn are not what it is made for."""
    _states.pop(id(actor), None)


def _hire(node: int, count: int) -> list[Any]:
    """Start plain actors on one node and wait until they are there."""
    actor: Any = ray.remote(num_cpus=0, resources={_name(node): 0.1})(workers.Player)
    handles = [actor.remote() for _ in range(count)]
    ray.get([handle.build.remote(1024) for handle in handles], timeout=workers.WAIT)
    return handles


def _name(node: int) -> str:
    return f"node-{node}"


@contextmanager
def _nodes(others: int, store: int) -> Iterator[Cluster]:
    """Run the learner's node and so many others, each with a resource of its name."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is reported to anybody
    common: dict[str, Any] = {"num_cpus": _CPUS, "object_store_memory": store, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=common | {"resources": {_name(0): 100}})
    try:
        for node in range(1, others + 1):
            cluster.add_node(**common, resources={_name(node): 100})
        cluster.wait_for_nodes(60)
        ray.init(address=cluster.address, log_to_driver=False, namespace="weightledger-bench")
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()

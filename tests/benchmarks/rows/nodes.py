"""Three nodes with object stores of their own: how many bytes cross to each, however many workers it has."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
from ray.cluster_utils import Cluster

from tests.benchmarks import weights, workers
from tests.benchmarks.contenders import LEDGER, ledger
from tests.benchmarks.processes import store_stats
from tests.benchmarks.results import Limit, Result
from tests.benchmarks.setting import KB, MB, Setting, case_name

_ONCE = 1.01  # the bytes, and the header before them


def measure(setting: Setting) -> Iterator[Result]:
    # Above what Ray sends inside a call (100 KB); below, there is no object to cross.
    sizes = [size for size in setting.sizes if size > 100 * KB] or [MB] + [64 * MB] * (not setting.quick)
    others, each = (1, 2) if setting.quick else (2, 2)
    with _nodes(others, 4 * max(sizes)) as names:
        actor = ray.remote(num_cpus=0)(workers.Player)
        handles = [
            actor.options(resources={name: 0.1}).remote() for name in names for _ in range(each)
        ]
        ray.get([handle.build.remote(1024) for handle in handles], timeout=workers.WAIT)
        home = ray.get_runtime_context().get_node_id()
        for size in sizes:
            fleet = workers.Fleet(handles, weights.make(size))
            workers.build(handles, size)
            with setting.folder() as folder, ledger(LEDGER, folder, fleet) as contender:
                crossed = _crossings(contender, home, 2 if setting.quick else 5)
            exact = weights.nbytes(fleet.learner)
            yield Result(
                "nodes",
                f"{case_name(size, len(handles))}, {others + 1} nodes",
                "most bytes that came to one node in one update",
                crossed,
                {"the weights": [exact] * len(crossed)},
                [Limit(_ONCE, "the weights")],
                unit="B",
                size=size,
                workers=len(handles),
            )


def _crossings(contender: Any, home: str, rounds: int) -> list[float]:
    crossed = []
    for count in range(rounds):
        contender.prepare()
        before = _created()
        outcome = contender.run()
        after = _created()
        contender.check(outcome, count in (0, rounds - 1))
        came = [after[node] - before[node] for node in after if node != home]
        # A worker got its bytes, so they came to its node: nothing seen means that nothing was counted.
        assert all(came), came
        crossed.append(float(max(came)))
    return crossed


def _created() -> dict[str, int]:
    """Return the bytes of all objects that were ever made in each node's store."""
    return {node: stats.cumulative_created_bytes for node, stats in store_stats().items()}


@contextmanager
def _nodes(others: int, store: int) -> Iterator[list[str]]:
    """Run a head node for the learner and so many others, each with a resource of its name."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    memory = max(100 << 20, store)
    common: dict[str, Any] = {"num_cpus": 4, "object_store_memory": memory, "include_dashboard": False}
    nodes = Cluster(initialize_head=True, head_node_args=common)
    try:
        names = [f"node-{index}" for index in range(1, others + 1)]
        for name in names:
            nodes.add_node(**common, resources={name: 100})
        nodes.wait_for_nodes(60)
        ray.init(address=nodes.address, log_to_driver=False, namespace="weightledger-bench")
        yield names
    finally:
        ray.shutdown()
        nodes.shutdown()

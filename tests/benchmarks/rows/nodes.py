"""Three nodes with object stores of their own: how many bytes cross to each, however many workers it has.

What crosses is counted on the loopback device, so nothing else may use it much meanwhile; the median of rounds counts.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
from ray.cluster_utils import Cluster

from tests.benchmarks import weights, workers
from tests.benchmarks.contenders import LEDGER, ledger
from tests.benchmarks.processes import StoreUsage, loopback_bytes
from tests.benchmarks.results import Limit, Result
from tests.benchmarks.setting import KB, MB, Setting, case_name

_ONCE = 1.05  # the bytes, and everything else that nodes say to each other meanwhile


def measure(setting: Setting) -> Iterator[Result]:
    # Above what Ray sends inside a call (100 KB); below, there is no object to cross.
    sizes = [size for size in setting.sizes if size > 100 * KB] or (
        [16 * MB] if setting.quick else [16 * MB, 64 * MB]
    )
    others, each = (1, 2) if setting.quick else (2, 2)
    with _nodes(others, 4 * max(sizes)) as names:
        actor: Any = ray.remote(num_cpus=0)(workers.Player)
        handles = [actor.options(resources={name: 0.1}).remote() for name in names for _ in range(each)]
        ray.get([handle.build.remote(1024) for handle in handles], timeout=workers.WAIT)
        for size in sizes:
            fleet = workers.Fleet(handles, weights.make(size))
            workers.build(handles, size)
            with setting.folder() as folder, ledger(LEDGER, folder, fleet) as contender:
                crossed = _crossings(contender, fleet, others, 2 if setting.quick else 9)
            exact = weights.nbytes(fleet.learner)
            yield Result(
                "nodes",
                f"{case_name(size, len(handles))}, {others + 1} nodes",
                "bytes that crossed in one update, for each other node",
                crossed,
                {"the weights": [exact] * len(crossed)},
                [Limit(_ONCE, "the weights")],
                unit="B",
                size=size,
                workers=len(handles),
            )


def _crossings(contender: Any, fleet: workers.Fleet, others: int, rounds: int) -> list[float]:
    exact = weights.nbytes(fleet.learner)
    crossed = []
    for count in range(-1, rounds):
        contender.prepare()
        before = loopback_bytes()
        outcome = contender.run()
        after = loopback_bytes()
        contender.check(outcome, count in (-1, rounds - 1))
        received = fleet.ask(_received)
        # Also where nothing crossed the loopback device, the bytes did come to each node's own store.
        assert all(each >= exact for each in received), received
        if count >= 0:
            crossed.append((after - before) / others)
    return crossed


def _received(actor: Any) -> int:
    return StoreUsage().received


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

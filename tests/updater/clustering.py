"""A cluster of three nodes with stores of their own, in a process of its own.

`main` plays all scenes and writes what it saw.

Run as `python -m tests.updater.clustering FOLDER`: FOLDER/seen.json then holds one entry a scene.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster
from ray.experimental import get_object_locations
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tests.updater.actors import (
    Rollouts,
    check_truth,
    ends,
    filled,
    get,
    kinds,
    learn,
    remote,
    status_of,
    statuses,
    store_bytes,
    wait_until,
)
from weightledger.registry import Registry
from weightledger.updater import RayRemoteWeightUpdater

STORE = 80_000_000
WIDTH = 3_000_000  # 24 MB a version
SIZE = WIDTH * 8


def kept(most: int) -> bool:
    """Tell whether the stores come to hold at most so many versions that nobody may evict."""
    wait_until(lambda: store_bytes() <= (most + 0.5) * SIZE, f"the stores to hold at most {most} versions")
    return True


def crossings(updater: RayRemoteWeightUpdater) -> float:
    """Return how often a version's bytes cross between nodes in a sync of all workers.

    The nodes are processes of one machine, so the loopback device counts them; the least of three is free of others'.
    """
    counts = []
    for turn in range(3):
        before = loopback_bytes()
        assert learn(updater, 100.0 + turn).ok
        counts.append((loopback_bytes() - before) / SIZE)
    return min(counts)


def loopback_bytes() -> int:
    (line,) = [
        line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:")
    ]
    return int(line.split(":")[1].split()[0])


def where(actor: Any) -> str:
    return str(get(actor.__ray_call__.remote(lambda self: ray.get_runtime_context().get_node_id())))


def places(updater: RayRemoteWeightUpdater) -> int:
    """Return on how many nodes the head's bytes are."""
    server = updater.source.find(updater.registry.head().digest)
    assert server is not None
    return len(get_object_locations([server.handle])[server.handle]["node_ids"])


def main(folder: Path) -> None:
    cluster = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 2,
            "object_store_memory": STORE,
            "include_dashboard": False,
            "resources": {"node0": 1.0},
            # A lost node is noticed after three seconds instead of fifteen.
            "_system_config": {"health_check_period_ms": 1000, "health_check_failure_threshold": 3},
        },
    )
    nodes = [
        cluster.add_node(num_cpus=2, object_store_memory=STORE, resources={f"node{index}": 1.0})
        for index in (1, 2)
    ]
    ray.init(address=cluster.address, namespace="nodes", log_to_driver=False)
    seen: dict[str, Any] = {}
    try:
        play(folder, cluster, nodes, seen)
    finally:
        ray.shutdown()
        cluster.shutdown()
        (folder / "seen.json").write_text(json.dumps(seen))


def worker(node: int) -> Any:
    return remote(num_cpus=0, resources={f"node{node}": 0.01})(Rollouts).remote(-1.0, WIDTH)


def roamer(node: Any) -> Any:
    """Return a worker that may live anywhere, and begins on the node that will be lost."""
    there = NodeAffinitySchedulingStrategy(node.node_id, soft=True)
    kind = remote(num_cpus=0, max_restarts=3, scheduling_strategy=there)(Rollouts)
    while True:
        actor = kind.remote(-1.0, WIDTH)
        if where(actor) == node.node_id:
            return actor
        # A wish, which Ray passes over when it has not yet heard of what the node has.
        ray.kill(actor)


def play(folder: Path, cluster: Cluster, nodes: list[Any], seen: dict[str, Any]) -> None:
    workers = [worker(index) for index in (0, 1, 1, 2, 2)]
    workers.append(roamer(nodes[1]))
    names = ["head-0", "one-0", "one-1", "two-0", "two-1", "roamer"]
    registry = Registry.open(folder / "registry")
    learner = filled(0.0, WIDTH)
    updater = RayRemoteWeightUpdater(learner, workers, registry=registry, names=names, timeout=60.0)
    get([each.pid.remote() for each in workers])

    with updater:
        seen["sync"] = statuses(learn(updater, 1.0))
        seen["sync places"] = places(updater)
        seen["nodes"] = [len({where(each) for each in workers}), where(workers[5]) == nodes[1].node_id]
        check_truth(updater)

        updater.pin(1, 1)
        seen["pin"] = statuses(learn(updater, 2.0))
        seen["pin values"] = get([each.value.remote() for each in workers])
        check_truth(updater)
        seen["rollback"] = statuses(updater.rollback(1))
        seen["rollback values"] = get([each.value.remote() for each in workers])
        check_truth(updater)
        updater.unpin(1)

        seen["crossings"] = crossings(updater)
        for value in range(4, 10):
            learn(updater, float(value))
        seen["kept"] = kept(1)
        check_truth(updater)

        # A node is lost while its workers hold the head, and while a push to all is on its way.
        before = status_of(registry, "roamer").incarnation
        cluster.remove_node(nodes[1], allow_graceful=False)
        began = time.monotonic()
        lost = learn(updater, 30.0)
        seen["loss"] = statuses(lost)
        seen["loss seconds"] = time.monotonic() - began
        wait_until(lambda: statuses(updater.update_weights())[3:5] == ["dead", "dead"], "the loss to be seen")
        wait_until(
            lambda: updater.update_weights().workers[5].status == "current", "the roamer to have moved"
        )
        lost_at = registry.get("head").number
        seen["roamer"] = [get(workers[5].value.remote()), status_of(registry, "roamer").incarnation != before]
        seen["loss states"] = [status_of(registry, name).state for name in names]
        seen["loss held"] = [dict(ends(registry, name))[lost_at - 1] for name in ("two-0", "two-1")]
        seen["loss open"] = [one.worker for one in registry.history() if one.ended_at is None]
        seen["loss kinds"] = kinds(registry, "two-0")
        check_truth(updater, [0, 1, 2, 5])

        # A new node takes the place of the lost one, under the lasting names of its workers.
        cluster.add_node(num_cpus=2, object_store_memory=STORE, resources={"node2": 1.0})
        for key in (3, 4):
            updater.remove_worker(key)
        replaced = [updater.add_worker(worker(2), name) for name in ("two-0", "two-1")]
        seen["replaced"] = [replaced, statuses(learn(updater, 31.0))]
        seen["replaced places"] = places(updater)
        check_truth(updater)
    registry.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

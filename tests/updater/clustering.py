"""A cluster of three nodes with stores of their own, in a process of its own; `main` plays all scenes and writes what it saw.

Run as `python -m tests.updater.clustering FOLDER`: FOLDER/seen.json then holds one entry a scene.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import ray
from ray._private.state import available_resources_per_node, total_resources_per_node
from ray.cluster_utils import Cluster

from tests.updater.actors import Rollouts, check_truth, ends, filled, get, kinds, learn, status_of, statuses, wait_until
from weightledger.registry import Registry
from weightledger.updater import RayRemoteWeightUpdater

STORE = 80_000_000
WIDTH = 600_000  # 4.8 MB a version
SIZE = WIDTH * 8


def used() -> dict[str, int]:
    """Return how many bytes the object store of each node holds."""
    name = "object_store_memory"
    total, free = total_resources_per_node(), available_resources_per_node()
    return {node: int(total[node][name] - free[node].get(name, 0.0)) for node in free}


def copies(updater: RayRemoteWeightUpdater, version: int) -> list[int]:
    """Return the whole copies of a version that each node's store holds, once that stands still."""
    server = updater.shelf.find(updater.registry.get(version).digest)
    assert server is not None
    time.sleep(1.5)
    return sorted(round(nbytes / SIZE) for nbytes in used().values())


def places(updater: RayRemoteWeightUpdater) -> int:
    """Return on how many nodes the head's bytes are."""
    server = updater.shelf.find(updater.registry.head().digest)
    assert server is not None
    return len(ray.experimental.get_object_locations([server.handle])[server.handle]["node_ids"])


def main(folder: Path) -> None:
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 2, "object_store_memory": STORE, "include_dashboard": False},
    )
    nodes = [
        cluster.add_node(num_cpus=2, object_store_memory=STORE, resources={f"node{index}": 1.0}) for index in (1, 2)
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
    where = {f"node{node}": 0.01} if node else None
    return ray.remote(num_cpus=0, resources=where)(Rollouts).remote(-1.0, WIDTH)


def play(folder: Path, cluster: Cluster, nodes: list[Any], seen: dict[str, Any]) -> None:
    workers = [worker(index) for index in (0, 1, 1, 2, 2)]
    # One that may live anywhere, but begins on the node that will be lost.
    roamer = ray.remote(num_cpus=0, max_restarts=3)(Rollouts)
    second = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(nodes[1].node_id, soft=True)
    workers.append(roamer.options(scheduling_strategy=second).remote(-1.0, WIDTH))
    names = ["head-0", "one-0", "one-1", "two-0", "two-1", "roamer"]
    registry = Registry.open(folder / "registry")
    learner = filled(0.0, WIDTH)
    updater = RayRemoteWeightUpdater(learner, workers, registry=registry, names=names, timeout=60.0)
    get([each.pid.remote() for each in workers])

    with updater:
        seen["sync"] = statuses(learn(updater, 1.0))
        seen["sync copies"] = copies(updater, 1)
        seen["sync places"] = places(updater)
        check_truth(updater)

        updater.pin(1, 1)
        seen["pin"] = statuses(learn(updater, 2.0))
        seen["pin values"] = get([each.value.remote() for each in workers])
        check_truth(updater)
        seen["rollback"] = statuses(updater.rollback(1))
        seen["rollback copies"] = copies(updater, 1)
        seen["rollback values"] = get([each.value.remote() for each in workers])
        check_truth(updater)
        updater.unpin(1)

        for value in range(3, 23):
            learn(updater, float(value))
        seen["many copies"] = copies(updater, registry.head().number)
        check_truth(updater)

        # A node is lost while its workers hold the head, and while a push to all is on its way.
        before = status_of(registry, "roamer").incarnation
        cluster.remove_node(nodes[1], allow_graceful=False)
        began = time.monotonic()
        lost = learn(updater, 30.0)
        seen["loss"] = statuses(lost)[:5]
        seen["loss seconds"] = time.monotonic() - began
        wait_until(lambda: updater.update_weights().workers[5].status == "current", "the roamer to have moved")
        seen["roamer"] = [get(workers[5].value.remote()), status_of(registry, "roamer").incarnation != before]
        seen["loss states"] = [status_of(registry, name).state for name in names]
        seen["loss ends"] = [ends(registry, name)[-1] for name in ("two-0", "two-1")]
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

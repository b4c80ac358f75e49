"""A driver in a process of its own, which kills itself at a chosen moment of its second update.

`main` steers named actors, brings them to v1, and publishes v2 until it dies of SIGKILL. The moment `stay` dies at
nothing: it says `done` and waits.
"""

from __future__ import annotations

import os
import pickle
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import ray

from tests.updater.actors import fill, filled, learn, statuses
from weightledger.registry import Registry
from weightledger.registry.store.local import LocalWriter
from weightledger.updater import RayRemoteWeightUpdater
from weightledger.updater.cycle import Cycle
from weightledger.updater.messages import ServerWeights


class Driver(RayRemoteWeightUpdater):
    """Writes down what it pushes, so that somebody can deliver it after its death."""

    fatal = -1

    def _sync_weights_with_worker(self, worker_id: int, server_weights: ServerWeights) -> Any:
        if worker_id == self.fatal:
            die()
        handle = super()._sync_weights_with_worker(worker_id, server_weights)
        bare = ServerWeights(**{**vars(server_weights), "handle": bytes(server_weights.handle)})
        (Path(self.registry.location) / f"push-{server_weights.version}-{worker_id}").write_bytes(
            pickle.dumps(bare)
        )
        return handle


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def before(owner: Any, name: str) -> None:
    """Die when a function is about to be called."""
    setattr(owner, name, lambda *args, **kwargs: die())


def after(owner: Any, name: str) -> None:
    """Die when a function has done its work."""
    function = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> None:
        function(*args, **kwargs)
        die()

    setattr(owner, name, call)


MOMENTS: dict[str, Callable[[Driver], None]] = {
    "before the intentions": lambda driver: before(Cycle, "_begin"),
    "after the intentions": lambda driver: before(Cycle, "_send"),
    "between two pushes": lambda driver: setattr(driver, "fatal", 1),
    "after the pushes": lambda driver: after(Cycle, "_send"),
    "while the file is written": lambda driver: before(LocalWriter, "commit"),
    "before the receipts are taken": lambda driver: before(Cycle, "_collect"),
    "before the receipts are recorded": lambda driver: before(Cycle, "_take"),
    "after the receipts": lambda driver: after(Cycle, "_collect"),
    "stay": lambda driver: None,
}


def main(address: str, folder: str, names: tuple[str, ...], moment: str, line: Connection) -> None:
    """Be the driver.

    Args:
        line: where `done` is said, and an answer awaited.
    """
    ray.init(address=address, namespace="weightledger-tests", log_to_driver=False)
    actors = [ray.get_actor(name) for name in names]
    registry = Registry.open(folder)
    driver = Driver(filled(1.0), actors, registry=registry, timeout=60.0)
    assert statuses(learn(driver, 1.0)) == ["synced"] * len(actors)
    if moment == "busy":
        # The first actor is at work, so that the push to it waits in its queue.
        actors[0].wait_for.remote(str(Path(folder) / "gate"))
        time.sleep(0.2)
        driver.timeout = 0.5
        learn(driver, 2.0)
        die()
    MOMENTS[moment](driver)
    fill(driver.policy_weights, 2.0)
    driver.update_weights()
    assert moment == "stay", "the moment never came"
    line.send("done")
    line.recv()

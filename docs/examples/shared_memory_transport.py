# tests: run this
"""A transport of one's own: workers in plain processes of this machine, weights in shared memory, no Ray.

An `Updater` needs of a transport how an instruction gets to a worker, and its answer back. Here each worker is a
process with a pipe. A version is copied into shared memory once, and every worker reads it there; the memory goes when
no worker needs the version any more. Versions, intentions, receipts, rollbacks, pins and the audit are the ones that
actors get.

    python docs/examples/shared_memory_transport.py
"""

from __future__ import annotations

import multiprocessing
import tempfile
import threading
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import shared_memory
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from torch import nn

from weightledger import Registry
from weightledger.updater import LocalTransport, Trouble, Updater, held_version, receive

START = multiprocessing.get_context("spawn")


class Rollouts:
    """What acts in a worker's process."""

    def __init__(self) -> None:
        self.policy = nn.Linear(4, 2)

    def act(self) -> tuple[float, int | None]:
        """Return what the policy computes for ones, and the version that it is."""
        with torch.no_grad():
            return self.policy(torch.ones(4)).sum().item(), held_version(self)


def serve(pipe: Connection) -> None:
    """Be a worker's process: carry out what comes, one thing after the other."""
    worker = Rollouts()
    while True:
        task = pipe.recv()
        if task == "act":
            pipe.send(worker.act())
            continue
        instruction, name, nbytes = task
        if name is None:
            pipe.send(receive(worker, instruction))
            continue
        memory = shared_memory.SharedMemory(name)
        payload = np.ndarray((nbytes,), np.uint8, memory.buf)
        try:
            pipe.send(receive(worker, instruction, payload))
        finally:
            del payload  # the memory cannot be closed while something points into it
            memory.close()


class Process:
    """One worker, as the updater's process sees it."""

    def __init__(self) -> None:
        self._pipe, other = START.Pipe()
        self.process = START.Process(target=serve, args=(other,), daemon=True)
        self.process.start()
        other.close()
        self._alone = threading.Lock()

    def call(self, task: Any) -> Any:
        """Let the worker do something, and return its answer."""
        with self._alone:
            self._pipe.send(task)
            return self._pipe.recv()

    def stop(self) -> None:
        """End the process."""
        self.process.terminate()
        self.process.join()


class Shared:
    """A version's bytes in shared memory, for as long as somebody refers to this."""

    def __init__(self, data: Any) -> None:
        memory = shared_memory.SharedMemory(create=True, size=data.nbytes)
        self.name, self.nbytes = memory.name, data.nbytes
        self.view: Any = np.ndarray((data.nbytes,), np.uint8, memory.buf)
        self.view[:] = data
        weakref.finalize(self, _release, memory)


def _release(memory: shared_memory.SharedMemory) -> None:
    memory.unlink()
    memory.close()


class ProcessTransport(LocalTransport):
    """Sends instructions through pipes, and weights through shared memory."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(16, thread_name_prefix="worker")

    def put(self, payload: Any) -> Shared:
        """Copy a version into shared memory, once for all workers."""
        return Shared(payload.buffer)

    def fetch(self, handle: Shared) -> Any:
        """Return the bytes."""
        return handle.view.copy()

    def send(self, worker: Process, instruction: Any, handle: Shared | None) -> Any:
        """Return a future of the answer, so that all workers are sent theirs at once."""
        name, nbytes = (None, 0) if handle is None else (handle.name, handle.nbytes)
        return self._threads.submit(worker.call, (instruction, name, nbytes))

    def explain(self, worker: Process, error: BaseException, incarnation: str | None) -> Trouble:
        """Tell a process that ended from an error of another kind."""
        if worker.process.is_alive():
            return Trouble("doubtful", f"{type(error).__name__}: {error}")
        return Trouble("dead", f"its process ended with code {worker.process.exitcode}")

    def incarnations(self, workers: Mapping[int, Process]) -> dict[int, str | Trouble]:
        """Tell which processes ended; the others say themselves which they are."""
        return {
            key: Trouble("dead", f"its process ended with code {worker.process.exitcode}")
            for key, worker in workers.items()
            if not worker.process.is_alive()
        }


class ProcessUpdater(Updater):
    """Steers worker processes."""

    def __init__(self, learner: nn.Module, workers: Sequence[Process], *, registry: Registry) -> None:
        super().__init__(learner, registry=registry, transport=ProcessTransport(), timeout=60.0)
        for index, worker in enumerate(workers):
            self.add_worker(worker, f"process-{index}")


def main() -> None:
    """Train, break the policy, go back, lose a worker."""
    learner = nn.Linear(4, 2)
    workers = [Process() for _ in range(3)]
    with (
        tempfile.TemporaryDirectory() as folder,
        Registry.open(folder) as registry,
        ProcessUpdater(learner, workers, registry=registry) as updater,
    ):
        print(updater.update_weights(step=1))
        good = learner.weight.detach().clone()
        nn.init.constant_(learner.weight, 1e6)
        print(updater.update_weights(step=2), "   a collapsed policy")
        print(updater.rollback(reason="return collapsed"))
        assert torch.equal(learner.weight, good)
        for worker in workers:
            computed, version = worker.call("act")
            print(f"  computes {computed:.3f} with v{version}")
        workers[0].stop()
        nn.init.ones_(learner.weight)
        print(updater.update_weights(step=3))
        for status in registry.workers():
            print(f"  {status.name}: {status.state}, holds {status.held}")
        assert [held.matches for held in updater.probe().values()] == [False, True, True]
    for worker in workers[1:]:
        worker.stop()


if __name__ == "__main__":
    main()

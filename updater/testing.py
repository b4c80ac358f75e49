"""Workers without Ray, for tests of your own code and of ours.

`FakeWorkers` is a real updater on a real registry: planning, intentions, receipts and records are the ones that Ray
actors get, and the code that runs in a worker is the same. Only the transport is a method call, and faults are made by
hand: `hang`, `wake`, `kill`, `restart`, `drift`.

Example:
    >>> import tempfile, torch
    >>> from weightledger.registry import Registry
    >>> learner = torch.nn.Linear(2, 1)
    >>> registry = Registry.open(tempfile.mkdtemp())
    >>> fleet = FakeWorkers(learner, [torch.nn.Linear(2, 1) for _ in range(3)], registry=registry)
    >>> fleet.hang(1)
    >>> report = fleet.update_weights()
    >>> {outcome.name: outcome.status for outcome in report.workers.values()}
    {'fake-0': 'synced', 'fake-1': 'timeout', 'fake-2': 'synced'}
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from weightledger.registry import Registry
from weightledger.updater.in_worker.receiver import receive
from weightledger.updater.messages import Inspection, Probe, Push, Receipt
from weightledger.updater.transports.local import LocalTransport
from weightledger.updater.updater import Updater
from weightledger.updater.workers.state import Trouble


class FakeWorker:
    """One worker object: what would be the actor."""

    def __init__(self, policy: Any) -> None:
        self.policy = policy


@dataclass
class _Fake:
    make: Callable[[], Any]
    worker: FakeWorker
    life: int = 0
    dead: bool = False
    hanging: bool = False
    queue: list[tuple[Future[Any], Push | Probe, Any]] = field(default_factory=list)

    def carry_out(self, instruction: Push | Probe, payload: Any) -> Receipt | Inspection:
        """Do what the worker's process would do."""
        answer = receive(self.worker, instruction, payload)
        return replace(answer, incarnation=f"life-{self.life}")


class FakeTransport(LocalTransport):
    """Method calls, and the faults that are made by hand."""

    def send(self, worker: _Fake, instruction: Push | Probe, handle: Any) -> Any:
        """Carry an instruction out now, or let it wait while the worker hangs."""
        if worker.dead:
            return Trouble("dead", "the worker was killed")
        if not worker.hanging:
            return worker.carry_out(instruction, handle)
        future: Future[Any] = Future()
        worker.queue.append((future, instruction, handle))
        return future

    def incarnations(self, workers: Mapping[int, _Fake]) -> dict[int, str | Trouble]:
        """Return which life each worker is in."""
        return {
            key: Trouble("dead", "the worker was killed") if fake.dead else f"life-{fake.life}"
            for key, fake in workers.items()
        }


class FakeWorkers(Updater):
    """An updater whose workers live in this process.

    Args:
        policy_weights: the live server weights.
        policies: the module (or TensorDict, or mapping) of each worker. A restarted worker gets a fresh copy of it, as
            it was when it was handed in.
        registry: where versions are kept.
        names: lasting names; by default `fake-<id>`.
        timeout: seconds that a call waits for hanging workers; short here, since hanging ones never answer by
            themselves.
        options: as in `Updater`.
    """

    def __init__(
        self,
        policy_weights: Any,
        policies: Sequence[Any],
        *,
        registry: Registry,
        names: Sequence[str] | None = None,
        timeout: float = 0.2,
        **options: Any,
    ) -> None:
        options.setdefault("transport", FakeTransport())
        super().__init__(policy_weights, registry=registry, timeout=timeout, **options)
        if policies:
            fakes = [self._fake(policy) for policy in policies]
            self._add_workers(fakes, names or [f"fake-{index}" for index in range(len(fakes))])
        self._begin_or_close()

    # ------------------------------------------------------------------ faults

    def hang(self, worker_id: int) -> None:
        """Let a worker answer nothing from now on; pushes to it wait in its queue."""
        self._of(worker_id).hanging = True

    def wake(self, worker_id: int, *, newest_first: bool = False) -> None:
        """Let a hanging worker carry out what waits, in the order in which it came, or the other way round."""
        fake = self._of(worker_id)
        fake.hanging = False
        waiting, fake.queue = fake.queue, []
        for future, instruction, payload in reversed(waiting) if newest_first else waiting:
            future.set_result(fake.carry_out(instruction, payload))

    def kill(self, worker_id: int) -> None:
        """Let a worker die for good; what waits in its queue is never answered by it."""
        fake = self._of(worker_id)
        fake.dead = True
        self._fail_queue(fake)

    def restart(self, worker_id: int) -> None:
        """Let a worker come back as a new process, with the policy that it began with."""
        fake = self._of(worker_id)
        self._fail_queue(fake)
        fake.dead = fake.hanging = False
        fake.life += 1
        fake.worker = FakeWorker(fake.make())

    def drift(self, worker_id: int, change: Callable[[Any], object]) -> None:
        """Change a worker's weights in place, behind the updater's back."""
        change(self._of(worker_id).worker.policy)

    def worker(self, worker_id: int) -> FakeWorker:
        """Return the worker object, to look at its `policy` or to ask `held_version`."""
        return self._of(worker_id).worker

    def add_worker(self, policy: Any, name: str | None = None) -> int:
        """Steer one more worker, and bring it to its target at once if there is a version."""
        return self._join(self._fake(policy), f"fake-{self.workers.next_id()}" if name is None else name)

    def _fake(self, policy: Any) -> _Fake:
        kept = copy.deepcopy(policy)
        return _Fake(make=lambda: copy.deepcopy(kept), worker=FakeWorker(policy))

    def _fail_queue(self, fake: _Fake) -> None:
        for future, *_ in fake.queue:
            future.set_result(Trouble("restarting", "its process ended"))
        fake.queue.clear()

    def _of(self, worker_id: int) -> _Fake:
        fake = self.workers.get(worker_id).handle
        assert isinstance(fake, _Fake)
        return fake


def statuses(workers: Mapping[int, Any]) -> dict[str, str]:
    """Return the status of each worker of a report, by name."""
    return {outcome.name: outcome.status for outcome in workers.values()}

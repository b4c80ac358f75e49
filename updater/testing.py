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
from weightledger.updater.base import RemoteWeightUpdaterBase, no_op
from weightledger.updater.push import Inspection, Probe, Receipt
from weightledger.updater.receiver import receive
from weightledger.updater.seats import Seat
from weightledger.updater.server import ServerWeights, is_from_outside
from weightledger.updater.settling import Trouble


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
    queue: list[tuple[Future[Any], ServerWeights]] = field(default_factory=list)


class FakeWorkers(RemoteWeightUpdaterBase):
    """An updater whose workers live in this process.

    Args:
        policy_weights: the live server weights.
        policies: the module (or TensorDict, or mapping) of each worker. A restarted worker gets a fresh copy of it, as
            it was when it was handed in.
        registry: where versions are kept.
        names: lasting names; by default `fake-<id>`.
        timeout: seconds that a call waits for hanging workers; short here, since hanging ones never answer by
            themselves.
        options: as in `RemoteWeightUpdaterBase`.
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
        for future, weights in reversed(waiting) if newest_first else waiting:
            future.set_result(self._carry_out(fake, weights))

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
        return self._join(self._fake(policy), f"fake-{self.seats.next_id()}" if name is None else name)

    # ------------------------------------------------------------------ the transport

    def all_worker_ids(self) -> list[int]:
        """Return the ids of all workers, in the order in which they were added."""
        return self.seats.ids()

    def _get_server_weights(self) -> ServerWeights:
        return self._publish(self.policy_weights)

    @no_op
    def _maybe_map_weights(self, weights: Any) -> Any:
        return weights

    def _sync_weights_with_worker(self, worker_id: int, server_weights: ServerWeights) -> Any:
        if is_from_outside(server_weights):
            return self._push_alone(worker_id, server_weights)
        fake = self._of(worker_id)
        if fake.dead:
            return Trouble("dead", "the worker was killed")
        if not fake.hanging:
            return self._carry_out(fake, server_weights)
        future: Future[Any] = Future()
        fake.queue.append((future, server_weights))
        return future

    def _ask(self, worker_id: int, question: Probe) -> Any:
        return self._sync_weights_with_worker(worker_id, ServerWeights.asking(question))

    def _carry_out(self, fake: _Fake, weights: ServerWeights) -> Receipt | Inspection:
        assert weights.push is not None
        answer = receive(fake.worker, weights.push, weights.handle)
        return replace(answer, incarnation=f"life-{fake.life}")

    def _find_lives(self, seats: Sequence[Seat]) -> dict[int, str | Trouble]:
        return {
            seat.id: Trouble("dead", "the worker was killed")
            if seat.handle.dead
            else f"life-{seat.handle.life}"
            for seat in seats
        }

    def _fake(self, policy: Any) -> _Fake:
        kept = copy.deepcopy(policy)
        return _Fake(make=lambda: copy.deepcopy(kept), worker=FakeWorker(policy))

    def _fail_queue(self, fake: _Fake) -> None:
        for future, _ in fake.queue:
            future.set_result(Trouble("restarting", "its process ended"))
        fake.queue.clear()

    def _of(self, worker_id: int) -> _Fake:
        fake = self.seats.get(worker_id).handle
        assert isinstance(fake, _Fake)
        return fake


def statuses(workers: Mapping[int, Any]) -> dict[str, str]:
    """Return the status of each worker of a report, by name."""
    return {outcome.name: outcome.status for outcome in workers.values()}

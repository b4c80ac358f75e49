"""`RemoteWeightUpdaterBase`: what the original's abstract base was, for transports and mappings of one's own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any

from weightledger.updater.messages import Probe, ServerWeights
from weightledger.updater.updater import Updater
from weightledger.updater.workers.state import WorkerState


class RemoteWeightUpdaterBase(Updater, ABC):
    """An updater whose subclass gives the four methods of the original.

    Where the server weights come from, how they are mapped, how one worker is sent one push, and which workers there
    are. Versions, targets, the interval, intentions, receipts and reports are inherited. `Updater` with a `Transport`
    needs no subclass.
    """

    @abstractmethod
    def _get_server_weights(self) -> ServerWeights:
        """Publish the server weights if they changed, and return the record of the version that workers follow.

        `return self._publish(weights)` does that. It is called once an update. With `wait=False` the weights are only
        copied by then, and the record has no number yet.
        """

    @abstractmethod
    def _maybe_map_weights(self, weights: Any) -> Any:
        """Return what is sent, given the weights about to be sent, in the kind in which they were published.

        The version stays unmapped, so that a rollback can restore the learner.
        """

    @abstractmethod
    def _sync_weights_with_worker(self, worker_id: int, server_weights: ServerWeights) -> Any:
        """Start one push and return its receipt, or a `concurrent.futures.Future` of it.

        In the worker `receiver.receive(worker, server_weights.push, server_weights.handle)` is called: the instruction,
        and the bytes, or None when there are none to send. To be called from outside as well, with what
        `_get_server_weights` returns, it begins with

            if is_from_outside(server_weights):
                return self._push_alone(worker_id, server_weights)
        """

    @abstractmethod
    def all_worker_ids(self) -> list[int]:
        """Return the ids of all workers, in the order in which they were added.

        Those that `add_worker` has not named are steered from the next call on, as `collector-<id>`.
        """

    def _ask(self, worker: WorkerState, question: Probe) -> Any:
        """Ask nothing: only `probe` tells of weights that the worker's own code wrote over."""
        return

    def _probe(self, worker: WorkerState, probe: Probe) -> Any:
        """Send a probe the way that pushes go."""
        return self._sync_weights_with_worker(worker.id, replace(_NO_WEIGHTS, push=probe))


_NO_WEIGHTS = ServerWeights(0, "", "", (), 0, None, {})

"""What an updater asks of a transport.

A transport moves bytes and instructions; it decides nothing and records nothing. In the worker it calls
`receive(worker, instruction, payload)`, which checks, copies and answers.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, Protocol

from weightledger.registry.weights import Payload
from weightledger.updater.messages import Probe, Push
from weightledger.updater.workers.state import Trouble


class Transport(Protocol):
    """Reaches workers. `LocalTransport` has a default for all but how an instruction is sent."""

    def check(self) -> None:
        """Refuse to go on where no worker can be reached any more.

        Raises:
            SyncError: none can.
        """

    def begin(self) -> None:
        """The first worker is about to be steered."""

    def identity(self, worker: Any) -> Hashable:
        """Return what tells a worker from all others, whatever it is called."""

    def put(self, payload: Payload) -> Any:
        """Keep a version's bytes for all workers, and return a handle of them. Called once a version.

        The payload's buffer is used for something else afterwards.
        """

    def fetch(self, handle: Any) -> Any:
        """Return the bytes of a handle, as one uint8 array; None when they are lost."""

    def send(self, worker: Any, instruction: Push | Probe, handle: Any) -> Any:
        """Let a worker carry an instruction out, and return its answer, or what will be it.

        Args:
            handle: from `put`; None when no bytes go with it.
        """

    def collect(self, answers: Mapping[int, Any], timeout: float, eager: bool) -> dict[int, Any]:
        """Wait for answers: receipts, inspections, `Trouble` or exceptions by worker id.

        Args:
            answers: what `send` returned, by worker id.
            timeout: seconds; answers that did not come in time are left out.
            eager: return as soon as there is one.
        """

    def explain(self, worker: Any, error: BaseException, incarnation: str | None) -> Trouble:
        """Tell what an exception in place of an answer means for the worker.

        Args:
            incarnation: the one that it was last heard from; None when nothing is known of it.
        """

    def incarnations(self, workers: Mapping[int, Any]) -> dict[int, str | Trouble]:
        """Return the incarnation of each worker, or that it is dead, without waiting for busy ones.

        Workers of which nothing can be told are left out.
        """

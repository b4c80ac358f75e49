"""The transport to env runners: actors, or the one in this process."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

from ray.actor import ActorHandle

from weightledger.updater.in_worker.receiver import incarnation
from weightledger.updater.messages import Probe, Push
from weightledger.updater.rllib.learners import Learners
from weightledger.updater.rllib.runner import receive_in_runner
from weightledger.updater.transports.ray_actors import RayTransport
from weightledger.updater.workers.state import Trouble


class RunnerTransport(RayTransport):
    """Sends each push with RLlib's own number, which is higher than that of any before it to the same env runner."""

    def __init__(
        self,
        learners: Learners,
        *,
        timeout: float = 60.0,
        count_bytes: Callable[[int], object] | None = None,
    ) -> None:
        super().__init__(timeout=timeout, count_bytes=count_bytes)
        self._learners = learners
        self._numbers: dict[Hashable, int] = {}
        self._counted: tuple[int, int] | None = None
        """The learner's count as it was last looked at, and the order of the push that it was looked at for."""

    def send(self, worker: Any, instruction: Push | Probe, handle: Any) -> Any:
        """Call an actor; call the env runner of this process plainly."""
        number = self._next_number(worker, instruction.order) if isinstance(instruction, Push) else 0
        if is_actor(worker):
            self.connection.check()
            return worker.__ray_call__.remote(receive_in_runner, instruction, handle, number)
        if handle is not None:
            handle = self.fetch(handle)
            if handle is None:
                return Trouble("bytes_lost", "the object store has lost the weights")
        return receive_in_runner(worker, instruction, handle, number)

    def incarnations(self, workers: Mapping[int, Any]) -> dict[int, str | Trouble]:
        """Ask Ray's table of actors; this process is what it is."""
        here: dict[int, str | Trouble] = {
            key: incarnation() for key, worker in workers.items() if not is_actor(worker)
        }
        return here | super().incarnations({key: each for key, each in workers.items() if key not in here})

    def _next_number(self, worker: Any, order: int) -> int:
        """Return RLlib's number for a push.

        While training goes forward it is the learner's own, so that RLlib's metrics stay what they were.
        """
        if self._counted is None or self._counted[1] != order:
            # Once for all pushes that leave together.
            self._counted = self._learners.number(), order
        counted, key = self._counted[0], self.identity(worker)
        number = self._numbers[key] = max(counted, self._numbers.get(key, 0) + 1)
        if number > counted:
            # What RLlib counts next is to be higher still, or an env runner let go of would not load it.
            self._learners.raise_number(number)
            self._counted = number, order
        return number


def is_actor(handle: Any) -> bool:
    """Tell whether an env runner is an actor, and not in this process."""
    return isinstance(handle, ActorHandle)

"""The transport to workers in this process, and what other transports need not write again."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any

from weightledger.registry.weights import Payload
from weightledger.updater.in_worker.receiver import receive
from weightledger.updater.messages import Inspection, Probe, Push, Receipt
from weightledger.updater.workers.state import Trouble

_AT_HAND = (Receipt, Inspection, Trouble, BaseException)


class LocalTransport:
    """Calls worker objects of this process. An answer is at hand, or a `concurrent.futures.Future` of it."""

    def check(self) -> None:
        """Do nothing: workers of this process can be reached."""

    def begin(self) -> None:
        """Do nothing."""

    def identity(self, worker: Any) -> Hashable:
        """Return the object's id."""
        return id(worker)

    def put(self, payload: Payload) -> Any:
        """Return a copy of the bytes."""
        return payload.buffer.copy()

    def fetch(self, handle: Any) -> Any:
        """Return the bytes, which are their own handle."""
        return handle

    def send(self, worker: Any, instruction: Push | Probe, handle: Any) -> Any:
        """Carry an instruction out now."""
        return receive(worker, instruction, handle)

    def collect(self, answers: Mapping[int, Any], timeout: float, eager: bool) -> dict[int, Any]:
        """Return what is at hand, and wait for futures."""
        done: dict[int, Any] = {
            key: answer for key, answer in answers.items() if isinstance(answer, _AT_HAND)
        }
        futures = {key: answer for key, answer in answers.items() if isinstance(answer, Future)}
        if futures:
            mode = "FIRST_COMPLETED" if eager else "ALL_COMPLETED"
            wait(futures.values(), timeout=0 if done and eager else timeout, return_when=mode)
            for key, future in futures.items():
                if future.done():
                    done[key] = future.exception() or future.result()
        return done

    def explain(self, worker: Any, error: BaseException, incarnation: str | None) -> Trouble:
        """Take an exception for a push that never arrived."""
        return Trouble("failed", f"{type(error).__name__}: {error}")

    def incarnations(self, workers: Mapping[int, Any]) -> dict[int, str | Trouble]:
        """Tell nothing: who answers says himself which process he is."""
        return {}


def default_names(first: int, handles: Sequence[Any]) -> list[str]:
    """Return the lasting names of workers that bear none of their own."""
    return [f"collector-{first + index}" for index in range(len(handles))]

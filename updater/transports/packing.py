"""How an instruction gets into an actor: packed once, for all actors that are sent the same one.

Ray takes the arguments of every call apart anew, one by one, which costs more than a small payload itself. So
instruction and small payload travel as one run of bytes; a large payload goes beside it, by reference.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import ray
from ray import cloudpickle

from weightledger.updater.messages import Inspection, Probe, Push, Receipt
from weightledger.updater.transports.connection import ray_get
from weightledger.updater.transports.incarnations import own_actor

CarryOut = Callable[[Any, Any, Any], Receipt | Inspection]
"""`carry_out(actor, instruction, payload)`, as `receiver.receive`: an importable function."""


class Packing:
    """Calls actors, and remembers what it packed last."""

    def __init__(self) -> None:
        self._packed: tuple[Any, Any, CarryOut, bytes] | None = None

    def send(self, actor: Any, carry_out: CarryOut, instruction: Push | Probe, payload: Any) -> Any:
        """Let an actor carry an instruction out.

        Returns:
            The `ObjectRef` of its answer; the answer itself of the actor in which this is called.
        """
        here = own_actor(actor)
        if here is not None:
            return carry_out(
                here, instruction, ray_get(payload) if isinstance(payload, ray.ObjectRef) else payload
            )
        if not _is_plain(instruction):
            # What a user's function has captured, references among it, is Ray's to look through.
            return actor.__ray_call__.remote(carry_out, instruction, payload)
        if isinstance(payload, ray.ObjectRef):
            return actor.__ray_call__.remote(open_parcel, self.pack(carry_out, instruction, None), payload)
        return actor.__ray_call__.remote(open_parcel, self.pack(carry_out, instruction, payload))

    def pack(self, carry_out: CarryOut, instruction: Any, payload: Any) -> bytes:
        """Return an instruction, and a small payload, as one run of bytes; the same ones are packed once."""
        packed = self._packed
        if (
            packed is None
            or packed[0] is not instruction
            or packed[1] is not payload
            or packed[2] is not carry_out
        ):
            # As Ray would: a policy's name may be of a class that only the training script has.
            parcel: bytes = cloudpickle.dumps((carry_out, instruction, payload))  # type: ignore[no-untyped-call]
            packed = self._packed = instruction, payload, carry_out, parcel
        return packed[3]


def open_parcel(actor: Any, parcel: bytes, payload: Any = None) -> Receipt | Inspection:
    """Carry out, inside of an actor, what a `Packing` packed."""
    carry_out, instruction, small = pickle.loads(parcel)
    answer: Receipt | Inspection = carry_out(actor, instruction, small if payload is None else payload)
    return answer


def _is_plain(instruction: Push | Probe) -> bool:
    own = isinstance(instruction, Push) and callable(instruction.apply)
    return isinstance(instruction.locate, str) and not own

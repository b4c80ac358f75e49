"""Taking the same live weights apart again and again, without looking at every tensor anew.

An unchanged model consists of the same objects over the same memory. As long as that is so, its names, ties, refusals
and structure are what they were, and only its values have moved on. Whatever can say something new at each call (plain
values, NumPy arrays, extra states, hooks on a state dict) is taken apart anew every time.
"""

from __future__ import annotations

from torch import nn

from weightledger.registry.weights.codec import Content, flatten
from weightledger.registry.weights.live import identity, same
from weightledger.registry.weights.memory import Memory
from weightledger.registry.weights.proof import prove, shapes_its_state


class Flattener:
    """Remembers one content and the objects that it was found in."""

    def __init__(self) -> None:
        self._content: Content | None = None
        self._objects: list[object] = []
        self._memory = Memory(())

    def flatten(self, weights: object, *, where: str = "weights") -> Content:
        """Take weights apart, as `codec.flatten` does.

        Raises:
            InvalidWeightsError: something in them cannot be kept; names every such key and why.
        """
        objects = identity(weights)
        if self._content is not None and self._unchanged(objects):
            return self._content
        content = flatten(weights, where=where)
        self._content = None
        if content.values or _speaks_for_itself(weights):
            return content
        proof = prove(content.tensors, {}, objects)
        if not proof.strangers:
            self._content, self._objects = content, objects
            self._memory = Memory([*content.tensors.values(), *proof.watched])
        return content

    def _unchanged(self, objects: list[object]) -> bool:
        return same(objects, self._objects) and self._memory.unchanged()


def _speaks_for_itself(weights: object) -> bool:
    if not isinstance(weights, nn.Module):
        return False
    every = (type(part).get_extra_state is not nn.Module.get_extra_state for part in weights.modules())
    return shapes_its_state(weights) or any(every)

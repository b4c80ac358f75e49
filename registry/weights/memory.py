"""Are tensors still where they were, and seen as they were?

`p.data = …`, `set_` and `resize_` keep the object and replace its memory, or the way it is looked at, and nothing but
the tensor itself can tell. So each is asked each time, in passes without Python's loop: there may be ten thousand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from operator import attrgetter, eq
from typing import Any

from torch import Tensor
from torch._C import DisableTorchFunctionSubclass

from weightledger.registry.weights.leaves import PLAIN_CLASSES


class Memory:
    """The memory of some tensors as it was at the beginning. Keeps the tensors alive."""

    __slots__ = ("_long", "_plain", "_short")  # small, since a process may hold thousands

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        every = list(tensors)
        self._plain = all(type(tensor) in PLAIN_CLASSES for tensor in every)
        with nullcontext() if self._plain else DisableTorchFunctionSubclass():
            self._look(every)

    def _look(self, every: list[Tensor]) -> None:
        contiguous = [tensor for tensor in every if tensor.is_contiguous()]
        strided = [tensor for tensor in every if not tensor.is_contiguous()]
        short = [
            _Answers(Tensor.data_ptr, every),
            _Answers(attrgetter("dtype"), every),
            # One bit is asked for sooner than strides, and with the shape it says as much.
            _Answers(Tensor.is_contiguous, contiguous),
            # Nothing else tells of a lazy conjugation.
            _Answers(Tensor.is_conj, [tensor for tensor in every if tensor.is_complex()]),
        ]
        long = [_Answers(attrgetter("shape"), every), _Answers(Tensor.stride, strided)]
        self._short, self._long = ([one for one in some if one.asked] for some in (short, long))

    def unchanged(self) -> bool:
        """Tell whether every tensor gives the answers that it gave then."""
        if not self._plain:
            # A class of its own may answer in its own way.
            with DisableTorchFunctionSubclass():
                return self._same_answers()
        return self._same_answers()

    def _same_answers(self) -> bool:
        # A list of ten thousand shapes would keep the garbage collector busy: those are compared one by one.
        return all(list(map(one.ask, one.asked)) == one.known for one in self._short) and all(
            all(map(eq, map(one.ask, one.asked), one.known)) for one in self._long
        )


class _Answers:
    """What tensors answered to one question."""

    __slots__ = ("ask", "asked", "known")

    def __init__(self, ask: Callable[[Tensor], Any], asked: list[Tensor]) -> None:
        self.ask = ask
        self.asked = asked
        same: dict[Any, Any] = {}
        # Equal ones are kept once.
        self.known = [same.setdefault(answer, answer) for answer in map(ask, asked)]

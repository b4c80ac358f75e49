"""Are tensors still where they were, and seen as they were?

`p.data = …`, `set_` and `resize_` keep the object and replace its memory, or the way it is looked at, and nothing but
the tensor itself can tell. So each is asked each time, in passes without Python's loop: there may be ten thousand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import attrgetter, eq
from typing import Any, Final

from torch import Tensor

_ASKED: Final[tuple[Callable[[Tensor], Any], ...]] = (
    Tensor.data_ptr,
    attrgetter("shape"),
    attrgetter("dtype"),
)


class Memory:
    """The memory of some tensors as it was at the beginning. Keeps the tensors alive."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        every = list(tensors)
        contiguous = [tensor for tensor in every if tensor.is_contiguous()]
        strided = [tensor for tensor in every if not tensor.is_contiguous()]
        questions = [(ask, every) for ask in _ASKED]
        # One bit is asked for sooner than strides, and with the shape it says as much.
        questions += [(Tensor.is_contiguous, contiguous), (Tensor.stride, strided)]
        same: dict[Any, Any] = {}
        # Equal answers are kept once, or ten thousand shapes would keep the garbage collector busy.
        self._answers = [
            (ask, asked, [same.setdefault(answer, answer) for answer in map(ask, asked)])
            for ask, asked in questions
        ]

    def unchanged(self) -> bool:
        """Tell whether every tensor gives the answers that it gave then."""
        return all(all(map(eq, map(ask, asked), answers)) for ask, asked, answers in self._answers)

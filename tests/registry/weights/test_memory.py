"""Whatever replaces a tensor's memory, or the way it is looked at, is noticed; new values are not a change."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from weightledger.registry.weights.memory import Memory


def _other_memory(tensor: Tensor) -> None:
    tensor.data = torch.zeros(4, 6)


def _other_memory_by_set(tensor: Tensor) -> None:
    tensor.set_(torch.zeros(4, 6))  # pyright: ignore[reportArgumentType]


def _another_shape(tensor: Tensor) -> None:
    tensor.data = tensor.data.view(6, 4)


def _fewer_elements(tensor: Tensor) -> None:
    tensor.resize_(2, 6)


def _a_dimension_more(tensor: Tensor) -> None:
    tensor.data = tensor.data.unsqueeze(0)


def _another_type(tensor: Tensor) -> None:
    tensor.data = tensor.data.view(torch.int32)


def _other_strides(tensor: Tensor) -> None:
    # Same place, same shape: only the strides tell.
    tensor.data = tensor.data.as_strided((4, 6), (1, 4))


def _further_into_its_memory(tensor: Tensor) -> None:
    tensor.data = tensor.data.view(-1)[1:].as_strided((4, 6), (5, 1))


@pytest.mark.parametrize(
    "change",
    [
        _other_memory,
        _other_memory_by_set,
        _another_shape,
        _fewer_elements,
        _a_dimension_more,
        _another_type,
        _other_strides,
        _further_into_its_memory,
    ],
)
@pytest.mark.parametrize("at", [0, 299])
def test_one_changed_tensor_among_many_is_noticed(change: Callable[[Tensor], None], at: int) -> None:
    tensors = [torch.arange(24.0).view(4, 6) for _ in range(300)]
    tensors[at].data = torch.zeros(4, 6)
    memory = Memory(tensors)
    assert memory.unchanged()
    change(tensors[at])
    assert not memory.unchanged()


def test_a_strided_tensor_that_gets_other_strides_is_noticed() -> None:
    base = torch.zeros(100)
    tensor = base.as_strided((4, 6), (1, 4))
    memory = Memory([torch.zeros(2), tensor])
    assert memory.unchanged()
    tensor.data = base.as_strided((4, 6), (2, 8))
    assert not memory.unchanged()


def test_a_lazy_conjugation_is_noticed() -> None:
    tensor = nn.Parameter(torch.tensor([1 + 2j, 3 + 4j]))
    memory = Memory([tensor])
    assert memory.unchanged()
    tensor.data = tensor.data.conj()
    assert not memory.unchanged()


def test_new_values_are_no_change() -> None:
    parameters = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(0)), nn.Parameter(torch.tensor(1.0))]
    memory = Memory(parameters)
    with torch.no_grad():
        for parameter in parameters:
            parameter.add_(1)
    assert memory.unchanged()


def test_no_tensors_are_never_changed() -> None:
    assert Memory(()).unchanged()

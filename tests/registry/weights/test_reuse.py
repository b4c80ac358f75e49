"""Remembering how weights were taken apart must never show: each answer is the one that `flatten` gives."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from weightledger.registry.errors import InvalidWeightsError
from weightledger.registry.weights.codec import flatten
from weightledger.registry.weights.reuse import Flattener


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def agree(flattener: Flattener, weights: object) -> None:
    ours, fresh = flattener.flatten(weights), flatten(weights)
    assert list(ours.tensors) == list(fresh.tensors)
    assert ours.ties == fresh.ties
    assert ours.values == fresh.values
    assert ours.structure == fresh.structure
    for name, tensor in fresh.tensors.items():
        assert torch.equal(ours.tensors[name], tensor), name
        assert ours.tensors[name].dtype == tensor.dtype


def test_an_unchanged_module_is_looked_at_once() -> None:
    policy, flattener = model(), Flattener()
    first = flattener.flatten(policy)
    with torch.no_grad():
        policy.get_parameter("0.weight").add_(1)
    assert flattener.flatten(policy) is first
    agree(flattener, policy)


def _swap_memory(policy: nn.Sequential) -> None:
    policy.get_parameter("0.weight").data = torch.ones(4, 3)


def _transpose_in_place(policy: nn.Sequential) -> None:
    weight = policy.get_parameter("0.weight")
    weight.data = weight.data.view(3, 4)


def _change_the_dtype(policy: nn.Sequential) -> None:
    policy.double()


def _replace_a_parameter(policy: nn.Sequential) -> None:
    policy[0].register_parameter("weight", nn.Parameter(torch.zeros(4, 3)))


def _add_a_buffer(policy: nn.Sequential) -> None:
    policy.register_buffer("mean", torch.zeros(3))


def _tie_two_parameters(policy: nn.Sequential) -> None:
    policy[2].register_parameter("again", policy.get_parameter("2.weight"))


def _add_a_layer(policy: nn.Sequential) -> None:
    policy.append(nn.Linear(2, 2))


def _rename_a_layer(policy: nn.Sequential) -> None:
    policy._modules["renamed"] = policy._modules.pop("2")


@pytest.mark.parametrize(
    "change",
    [
        _swap_memory,
        _transpose_in_place,
        _change_the_dtype,
        _replace_a_parameter,
        _add_a_buffer,
        _tie_two_parameters,
        _add_a_layer,
        _rename_a_layer,
    ],
)
def test_every_change_of_a_module_is_seen(change: Callable[[nn.Sequential], None]) -> None:
    policy, flattener = model(), Flattener()
    agree(flattener, policy)
    change(policy)
    agree(flattener, policy)


def test_memory_that_was_freed_is_refused_at_the_next_call() -> None:
    policy, flattener = model(), Flattener()
    flattener.flatten(policy)
    policy.get_parameter("0.weight").untyped_storage().resize_(0)
    with pytest.raises(InvalidWeightsError, match=r"0\.weight"):
        flattener.flatten(policy)


class WithExtraState(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.steps = 0
        self.weight = nn.Parameter(torch.zeros(2))

    def get_extra_state(self) -> dict[str, int]:
        return {"steps": self.steps}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]


def test_extra_state_is_asked_for_every_time() -> None:
    policy, flattener = WithExtraState(), Flattener()
    agree(flattener, policy)
    policy.steps = 7
    agree(flattener, policy)


def test_a_hook_on_the_state_dict_is_asked_every_time() -> None:
    policy, flattener = model(), Flattener()
    names = ["0.weight"]

    def leave_out(module: nn.Module, state: dict[str, object], prefix: str, metadata: object) -> None:
        for name in names:
            state.pop(name)

    policy.register_state_dict_post_hook(leave_out)
    agree(flattener, policy)
    names.append("0.bias")
    agree(flattener, policy)


def test_a_tensordict_and_a_mapping_are_seen_as_they_are_now() -> None:
    nested = TensorDict({"a": torch.zeros(2), "b": {"c": torch.ones(3)}}, [])
    plain = {"a": torch.zeros(2), "n": {"b": torch.ones(1)}}
    for weights in (nested, plain):
        flattener = Flattener()
        agree(flattener, weights)
        weights["a"] = torch.full((2,), 5.0)
        agree(flattener, weights)
        weights["d"] = torch.zeros(1)
        agree(flattener, weights)

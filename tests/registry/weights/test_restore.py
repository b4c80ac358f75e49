"""A snapshot goes into a live target whole, or not at all."""

# The stubs of torch call every submodule `Tensor | Module`, those of tensordict call every entry a Tensor.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportIndexIssue=false, reportAbstractUsage=false

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import (
    MemoryMappedTensor,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    TensorDictParams,
    lazy_stack,
)
from torch import nn

from tests.registry.snapshot_helpers import digest, loaded, packed, seal, stored
from weightledger.registry.errors import InvalidWeightsError
from weightledger.registry.weights.codec import flatten
from weightledger.registry.weights.packing import Packer
from weightledger.registry.weights.payload import Payload, parse
from weightledger.registry.weights.restore import check_fit, copy_into, live_digest


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))


def sent(weights: Any) -> Payload:
    """Pack weights and parse the bytes again, as a worker does."""
    payload = packed(weights)
    seal(payload)
    return parse(payload.buffer.tobytes(), "sent")


def bits(target: Any) -> dict[str, bytes]:
    content = flatten(target)
    return {
        name: tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        for name, tensor in content.tensors.items()
    }


def refused(payload: Payload, target: Any, *parts: str, cast: bool = False) -> str:
    """Restore, expect one error with all parts, and an unchanged target."""
    before = bits(target)
    with pytest.raises(InvalidWeightsError) as caught:
        copy_into(payload, target, cast=cast)
    assert bits(target) == before
    for part in parts:
        assert part in str(caught.value)
    return str(caught.value)


# ---------------------------------------------------------------------- what is kept


def test_a_restored_module_holds_the_version_and_stays_itself() -> None:
    """TO-09: parameters keep identity, `requires_grad` and the optimizer that knows them."""
    source, target = net(), net()
    target[0].weight.requires_grad_(False)
    parameters = list(target.parameters())
    optimizer = torch.optim.SGD([parameter for parameter in parameters if parameter.requires_grad], lr=1.0)
    counters = [parameter._version for parameter in parameters]
    result = copy_into(sent(source), target)
    assert result.cast == ()
    assert live_digest(target)[0] == digest(source)
    assert all(one is other for one, other in zip(parameters, target.parameters(), strict=True))
    assert [parameter.requires_grad for parameter in parameters] == [False, True, True, True, True, True]
    assert all(parameter._version > before for parameter, before in zip(parameters, counters, strict=True))
    target(torch.ones(4, 3)).sum().backward()
    optimizer.step()
    assert not torch.equal(target[2].bias, source[2].bias)
    assert torch.equal(source[2].bias, sent(source).tensors()["2.bias"])


@pytest.mark.parametrize("number", [3, 20_000])
def test_autograd_notices_a_restore(number: int) -> None:
    """A backward pass over weights that were replaced under it would give silently wrong gradients."""
    source, target = nn.Linear(number, 1, bias=False), nn.Linear(number, 1, bias=False)
    loss = target(torch.ones(1, number, requires_grad=True)).sum()
    copy_into(sent(source), target)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_any_kind_of_weights_goes_into_any_kind_of_target() -> None:
    source = net()
    for weights in (source, source.state_dict(), TensorDict.from_module(source)):
        payload = sent(weights)
        plain = {key: torch.zeros_like(tensor) for key, tensor in source.state_dict().items()}
        module, nested = net(), TensorDict.from_module(net()).clone()
        params = TensorDictParams(TensorDict.from_module(net()).data.clone())
        for target in (module, plain, nested, params, net().state_dict()):
            copy_into(payload, target)
            assert live_digest(target)[0] == digest(source)


def test_a_locked_tensordict_is_written_in_place_and_stays_locked() -> None:
    """TD-07."""
    td = TensorDict({"w": torch.zeros(2)}, []).lock_()
    leaf = td["w"]
    copy_into(sent({"w": torch.ones(2)}), td)
    assert td.is_locked
    assert td["w"] is leaf
    assert leaf.tolist() == [1, 1]
    refused(
        sent({"w": torch.ones(2), "x": torch.ones(1)}), td, "'x' is in the snapshot, but not in the target"
    )
    refused(sent({}), td, "'w' is missing in the snapshot")
    assert td.is_locked


def test_a_tied_target_stays_tied() -> None:
    """ST-01, ST-02, TO-09: from a tied snapshot, an untied equal one, and one with a single name."""

    def tied() -> nn.Sequential:
        module = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
        module[1].weight = module[0].weight
        return module

    source = tied()
    untied_equal = {key: tensor.clone() for key, tensor in source.state_dict().items()}
    for weights in (source, untied_equal, {"0.weight": source[0].weight}, {"1.weight": source[0].weight}):
        target = tied()
        copy_into(sent(weights), target)
        assert target[0].weight is target[1].weight
        assert torch.equal(target[1].weight, source[0].weight)
    different = {"0.weight": torch.ones(2, 2), "1.weight": torch.zeros(2, 2)}
    plans: dict[int, Any] = {}
    target = tied()
    copy_into(sent(untied_equal), target, plans=plans)
    refused(sent(different), target, "'0.weight' and '1.weight' are one tensor in the target, and differ")
    with pytest.raises(InvalidWeightsError, match="are one tensor in the target"):
        copy_into(sent(different), target, plans=plans)


def test_an_untied_target_never_gets_only_one_of_a_pair() -> None:
    """RL-15: both names get the values, or a missing name is an error."""
    tied = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    tied[1].weight = tied[0].weight
    target = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    copy_into(sent(tied), target)
    assert torch.equal(target[0].weight, target[1].weight)
    assert torch.equal(target[1].weight, tied[0].weight)
    refused(sent({"0.weight": torch.ones(2, 2)}), target, "'1.weight' is missing in the snapshot")


def test_views_of_any_stride_are_written_in_place() -> None:
    base = torch.zeros(4, 6)
    target = {
        "t": base[:2].t(),
        "s": base[2, ::2],
        "c": torch.zeros(1, 2, 3, 3).to(memory_format=torch.channels_last),
        "z": torch.tensor(0.0),
    }
    weights = {
        "t": torch.arange(12.0).view(6, 2),
        "s": torch.ones(3),
        "c": torch.randn(1, 2, 3, 3),
        "z": torch.tensor(5.0),
    }
    copy_into(sent(weights), target)
    assert all(torch.equal(target[key], tensor) for key, tensor in weights.items())
    assert base[2].tolist() == [1, 0, 1, 0, 1, 0]
    assert not target["c"].is_contiguous()


def test_inference_targets_and_inference_callers_work() -> None:
    """TO-12."""
    with torch.inference_mode():
        frozen = {"w": torch.zeros(3), "c": torch.zeros(2, 3).t()}
    weights = {"w": torch.arange(3.0), "c": torch.ones(3, 2)}
    copy_into(sent(weights), frozen)
    assert all(torch.equal(frozen[key], weights[key]) for key in weights)
    target = nn.Linear(3, 1)
    with torch.inference_mode():
        source = nn.Linear(3, 1)
        copy_into(sent(source), target)
        assert live_digest(target)[0] == digest(source)
    target(torch.ones(1, 3)).sum().backward()


def test_arrays_and_memory_maps_are_written_in_place(tmp_path: Path) -> None:
    array, mapped = (
        np.zeros((2, 3), np.float32),
        MemoryMappedTensor.zeros(2, filename=str(tmp_path / "mapped")),
    )
    scalar = {"inner": [np.float32(0)]}
    target = {"a": array, "m": mapped, "s": scalar, "t": torch.zeros(1)}
    copy_into(
        sent(
            {
                "a": torch.ones(2, 3),
                "m": torch.ones(2),
                "s": {"inner": [torch.tensor(2.5)]},
                "t": torch.ones(1),
            }
        ),
        target,
    )
    assert array.sum() == 6
    assert mapped.tolist() == [1, 1]
    assert scalar["inner"][0] == np.float32(2.5)
    assert type(scalar["inner"][0]) is np.float32
    locked = np.zeros(2, np.float32)
    locked.flags.writeable = False
    refused(sent({"a": torch.ones(2)}), {"a": locked}, "'a' is a read-only array")
    refused(sent({"a": torch.ones(2)}), {"a": np.zeros(2, np.float32)[::-1]}, "'a' is a reversed view")


# ---------------------------------------------------------------------- what is refused


def test_every_difference_is_told_at_once_and_nothing_is_written() -> None:
    """TO-05, TD-14: keys, shapes and types of the whole tree are checked first."""
    target = {
        "fits": torch.zeros(2),
        "shape": torch.zeros(3),
        "type": torch.zeros(2, dtype=torch.int64),
        "gone": torch.zeros(1),
        "sub": {"deep": torch.zeros(1), "tensor": torch.zeros(1), "value": 3},
        "wide": torch.zeros(1).expand(4),
    }
    weights = {
        "fits": torch.ones(2),
        "shape": torch.ones(1),
        "type": torch.tensor([1.9, -1.9]),
        "sub": {"deep": torch.ones(2), "tensor": 1, "value": torch.zeros(1)},
        "new": torch.ones(1),
        "text": "x",
        "wide": torch.ones(4),
    }
    refused(
        sent(weights),
        target,
        "nothing was changed",
        "'shape' has the shape (3,) in the target, (1,) in the snapshot",
        "'type' has the dtype torch.int64 in the target, torch.float32 in the snapshot (cast=True converts it)",
        "'gone' is missing in the snapshot",
        "'new' is in the snapshot, but not in the target",
        "'text' is in the snapshot, but not in the target",
        "'sub.deep' has the shape (1,) in the target, (2,)",
        "'sub.tensor' is a tensor in the target, and a value in the snapshot",
        "'sub.value' is a value in the target, and a tensor in the snapshot",
        "'wide' is an expanded view",
    )


def test_asking_whether_a_snapshot_fits_writes_nothing() -> None:
    target = {"w": torch.zeros(2)}
    check_fit(sent({"w": torch.ones(2)}), target)
    assert target["w"].tolist() == [0, 0]
    with pytest.raises(InvalidWeightsError, match="shape"):
        check_fit(sent({"w": torch.ones(3)}), target)


def test_a_second_layer_that_does_not_fit_leaves_the_first_untouched() -> None:
    """TO-05."""
    wide = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 3))
    narrow = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    refused(
        sent(wide),
        narrow,
        "'1.weight' has the shape (2, 2) in the target, (3, 2) in the snapshot",
        "'1.bias'",
    )
    state = wide.state_dict()
    del state["1.bias"]
    refused(sent(state), wide, "'1.bias' is missing in the snapshot")


def test_a_tensor_without_dimensions_does_not_fit_one_with_a_single_element() -> None:
    """TO-06."""
    refused(
        sent({"w": torch.ones(1)}), {"w": torch.zeros(())}, "shape () in the target, (1,) in the snapshot"
    )
    refused(
        sent({"w": torch.ones(())}), {"w": torch.zeros(1)}, "shape (1,) in the target, () in the snapshot"
    )
    refused(sent({"w": torch.ones(0, 2)}), {"w": torch.zeros(2, 0)}, "shape (2, 0)")


def test_a_dtype_is_converted_on_request_only_and_told() -> None:
    """TO-06: and the target does not pass for the version afterwards."""
    weights = {"w": torch.tensor([1.001]), "n": torch.tensor(3), "same": torch.ones(1)}
    target = {
        "w": torch.zeros(1, dtype=torch.bfloat16),
        "n": torch.tensor(0, dtype=torch.int32),
        "same": torch.zeros(1),
    }
    payload = sent(weights)
    refused(payload, target, "'w' has the dtype torch.bfloat16", "'n' has the dtype torch.int32")
    plans: dict[int, Any] = {}
    for _ in range(2):
        assert copy_into(payload, target, cast=True, plans=plans).cast == ("n", "w")
    assert target["w"].item() == 1.0
    assert live_digest(target)[0] != payload.digest
    refused(payload, target, "cast=True")
    with pytest.raises(InvalidWeightsError, match="dtype"):
        copy_into(payload, target, plans=plans)
    complex_ = sent({"w": torch.ones(2, dtype=torch.complex64)})
    refused(complex_, {"w": torch.zeros(2)}, "cannot be converted", cast=True)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: nn.Linear(3, 2, device="meta"), "'weight' is on the meta device, it has no data"),
        (lambda: nn.LazyLinear(2), "'weight' is not initialised yet: run one forward first"),
    ],
)
def test_a_target_without_data_is_refused_by_name(make: Callable[[], nn.Module], reason: str) -> None:
    """RL-17, TO-08."""
    with pytest.raises(InvalidWeightsError, match=reason) as caught:
        copy_into(sent(nn.Linear(3, 2)), make())
    assert "in the snapshot, but not" not in str(caught.value)
    with pytest.raises(InvalidWeightsError, match=reason):
        live_digest(make())


@pytest.mark.parametrize("target", [torch.zeros(1), None, [torch.zeros(1)], print])
def test_only_modules_tensordicts_and_mappings_are_targets(target: Any) -> None:
    with pytest.raises(InvalidWeightsError, match="expected a module, TensorDict or mapping"):
        copy_into(sent({"w": torch.zeros(1)}), target)


# ---------------------------------------------------------------------- names


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # of torch.compile's own
def test_compiled_and_plain_modules_accept_each_other() -> None:
    """TO-01: at the front, before one child, and under a wrapper."""
    plain, compiled = net(), torch.compile(net())
    partly = nn.Sequential(nn.Linear(3, 2), torch.compile(nn.BatchNorm1d(2)), nn.Linear(2, 2))
    for source in (plain, compiled, partly):
        for target in (net(), torch.compile(net()), copy.deepcopy(partly)):
            copy_into(sent(source), target)
            assert live_digest(target)[0] == digest(plain if source is plain else source)
    nested = {f"_orig_mod.module.{key}": tensor for key, tensor in plain.state_dict().items()}
    target = net()
    copy_into(sent(nested), target)
    assert live_digest(target)[0] == digest(plain)


class Wrapped(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def test_a_wrapper_prefix_is_dropped_when_all_keys_carry_it() -> None:
    """TO-02: in either direction, and the digest compares under the version's names."""
    source, target = net(), net()
    payload = sent(Wrapped(source))
    plans: dict[int, Any] = {}
    for _ in range(2):
        copy_into(payload, target, plans=plans)
    assert live_digest(target)[0] == digest(source)
    assert live_digest(target, payload.layout.by_name)[0] == payload.digest
    wrapped = Wrapped(net())
    copy_into(sent(source), wrapped)
    assert live_digest(wrapped, flatten(source).tensors)[0] == digest(source)


def test_a_prefix_that_only_some_keys_carry_is_an_error_that_mentions_it() -> None:
    """TO-02: never by guessing."""
    state = {"module.a": torch.zeros(1), "b": torch.zeros(1)}
    refused(sent(state), {"a": torch.zeros(1), "b": torch.zeros(1)}, "'a' is missing", "the prefix 'module.'")
    both = {"module.a": torch.zeros(1), "module.b": torch.zeros(1)}
    refused(sent(both), {"a": torch.zeros(1), "module.b": torch.zeros(1)}, "the prefix 'module.'")
    other = {f"actor.{key}": tensor for key, tensor in net().state_dict().items()}
    refused(sent(other), net(), "the prefix 'actor.'")
    refused(sent(net()), {"policy": {"net": net().state_dict()}}, "the prefix 'policy.net.'")


def test_odd_names_find_their_targets() -> None:
    """TD-01, ST-18."""

    def make(value: float) -> dict[str, Any]:
        return {
            "a.b": torch.full((1,), value),
            "a": {"b": torch.full((1,), -value)},
            "%": torch.full((2,), value),
        }

    target = TensorDict(make(0.0), [])
    copy_into(sent(make(3.0)), target)
    assert (float(target["a.b"]), float(target["a", "b"]), target["%"].tolist()) == (3, -3, [3, 3])
    numbers = {0: torch.zeros(1), "0": torch.zeros(1)}
    copy_into(sent({"0": torch.ones(1), 0: torch.full((1,), 2.0)}), numbers)
    assert (float(numbers[0]), float(numbers["0"])) == (2, 1)


# ---------------------------------------------------------------------- buffers, extra state, values


def test_a_buffer_that_is_not_persistent_is_optional() -> None:
    """RL-14: left alone when the snapshot lacks it, written when it has it."""

    def make(value: float) -> nn.Module:
        module = nn.Linear(1, 1)
        module.register_buffer("mean", torch.full((2,), value), persistent=False)
        return module

    source, target = make(5.0), make(1.0)
    payload = sent(source)
    copy_into(payload, target)
    assert target.mean.tolist() == [1, 1]
    assert live_digest(target, payload.layout.by_name)[0] == payload.digest
    whole = sent(TensorDict.from_module(source))
    copy_into(whole, target)
    assert target.mean.tolist() == [5, 5]
    assert live_digest(target, whole.layout.by_name)[0] == whole.digest
    assert live_digest(target)[0] == payload.digest
    wrong = TensorDict.from_module(source).clone()
    wrong["mean"] = torch.zeros(3)
    refused(sent(wrong), target, "'mean' has the shape (2,) in the target, (3,)")
    target.mean = torch.zeros(2, device="meta")
    with pytest.raises(InvalidWeightsError, match="'mean' is on the meta device"):
        copy_into(whole, target)
    copy_into(payload, target)


class Stateful(nn.Module):
    def __init__(self, state: Any, *, refuses: bool = False) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))
        self.state = state
        self.refuses = refuses

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        if self.refuses and state != "old":
            raise ValueError("not this one")
        self.state = state


@pytest.mark.parametrize(
    "state", [{"k": 1}, torch.arange(7), {"scale": torch.ones(3), "n": [1, (2, None)]}, None, b"x"]
)
def test_extra_state_goes_through_the_module_whatever_its_size(state: Any) -> None:
    """TO-07."""
    source = nn.Sequential(Stateful(state), Stateful("b"))
    target = nn.Sequential(Stateful(torch.zeros(2)), Stateful({"other": torch.zeros(1)}))
    plans: dict[int, Any] = {}
    for _ in range(2):
        copy_into(sent(source), target, plans=plans)
        assert live_digest(target)[0] == digest(source)
    assert target[1].state == "b"


def test_extra_state_that_is_refused_is_put_back_everywhere() -> None:
    target = nn.Sequential(Stateful("old"), Stateful("old", refuses=True))
    text = refused(
        sent(nn.Sequential(Stateful("new"), Stateful("new"))),
        target,
        "refused the extra state '1._extra_state'",
    )
    assert "not this one" in text
    assert [part.state for part in target] == ["old", "old"]


def test_missing_and_unexpected_extra_state_is_an_error() -> None:
    refused(sent({"w": torch.zeros(1)}), Stateful(1), "'_extra_state' is missing in the snapshot")
    plain = nn.Module()
    plain.w = nn.Parameter(torch.zeros(1))
    refused(sent(Stateful(1)), plain, "'_extra_state' is in the snapshot, but not in the target")


class Growing(Stateful):
    """Replaces its parameter when it takes its extra state, as some quantised layers do."""

    def set_extra_state(self, state: Any) -> None:
        self.state = state
        self.w = nn.Parameter(torch.zeros(1))


def test_a_module_that_replaces_its_tensors_meanwhile_gets_the_new_ones_written() -> None:
    source, target = Growing({"k": 2}), Growing({"k": 1})
    source.w.data.fill_(9)
    copy_into(sent(source), target)
    assert target.w.tolist() == [9]


def test_values_of_a_mapping_are_set_and_those_of_a_module_hook_are_not() -> None:
    target = {"w": torch.zeros(1), "lr": 0.1, "sub": {"names": ["a"], "n": None}, "list": [torch.zeros(1), 1]}
    weights = {
        "w": torch.ones(1),
        "lr": 0.2,
        "sub": {"names": ["b", "c"], "n": 3},
        "list": [torch.ones(1), 2],
    }
    payload = sent(weights)
    plans: dict[int, Any] = {}
    for _ in range(2):
        copy_into(payload, target, plans=plans)
        assert (target["lr"], target["sub"], target["list"][1]) == (0.2, {"names": ["b", "c"], "n": 3}, 2)  # type: ignore[index]
        assert live_digest(target)[0] == payload.digest
        target["lr"] = 7
    fixed = {"lr": 0.1, "pair": (torch.zeros(1), 1), "w": torch.zeros(1)}
    refused(
        sent({"lr": 0.2, "pair": (torch.ones(1), 2), "w": torch.ones(1)}),
        fixed,
        "'pair.1' could not be set to 2",
    )
    assert fixed["lr"] == 0.1


def test_non_tensor_data_is_set_under_lock_too() -> None:
    """TD-03, TD-04, TD-07."""

    def make(name: str, k: int) -> TensorDict:
        td = TensorDict({"w": torch.zeros(2), "in": TensorDict({}, [2])}, [2])
        td["in"].set_non_tensor("cfg", {"k": k})
        td["name"] = name
        td["stack"] = NonTensorStack(name, "z")
        td["lazy"] = lazy_stack(
            [TensorDict(q=NonTensorData(f"{name}{i}"), x=torch.zeros(())) for i in range(2)]
        )
        return td

    target = make("a", 1).lock_()
    copy_into(sent(make("b", 2)), target)
    assert target["name"] == "b"
    assert target["in", "cfg"] == {"k": 2}
    assert target.get("stack").tolist() == ["b", "z"]
    assert target["lazy"].get("q").tolist() == ["b0", "b1"]
    assert target.is_locked
    assert target["in"].is_locked
    part = target["in"]
    with pytest.raises(InvalidWeightsError, match="'cfg' could not be set"):
        copy_into(sent(make("b", 3)["in"]), part)
    assert target["in", "cfg"] == {"k": 2}
    copy_into(sent(make("b", 2)["in"]), part)


# ---------------------------------------------------------------------- overlapping memory


def test_overlapping_targets_take_what_is_consistent_and_refuse_what_is_not() -> None:
    """ST-03: two views of one buffer cannot hold two values for what they share."""
    flat = torch.zeros(8)
    target = {"a": flat[:5], "b": flat[3:], "c": torch.zeros(2)}
    new = torch.arange(8.0)
    plans: dict[int, Any] = {}
    copy_into(sent({"a": new[:5], "b": new[3:], "c": torch.ones(2)}), target, plans=plans)
    assert flat.tolist() == new.tolist()
    torn = {"a": torch.ones(5), "b": torch.zeros(5), "c": torch.zeros(2)}
    text = refused(sent(torn), target, "'a', 'b' overlap in the target's memory")
    assert "'c'" not in text
    with pytest.raises(InvalidWeightsError, match="overlap"):
        copy_into(sent(torn), target, plans=plans)


def test_interleaved_columns_are_no_overlap() -> None:
    base = torch.zeros(3, 2)
    copy_into(sent({"a": torch.ones(3), "b": torch.full((3,), 2.0)}), {"a": base[:, 0], "b": base[:, 1]})
    assert base.tolist() == [[1, 2]] * 3


# ---------------------------------------------------------------------- plans


def test_a_plan_is_made_once_and_used_while_nothing_changes() -> None:
    source, target = net(), net()
    plans: dict[int, Any] = {}
    first = None
    for step in range(3):
        with torch.no_grad():
            source[0].weight.fill_(step)
        copy_into(sent(source), target, plans=plans)
        (plan,) = plans.values()
        assert live_digest(target)[0] == digest(source)
        first = first or plan
        assert plan is first


def swap_parameter(module: nn.Sequential) -> None:
    module[0].weight = nn.Parameter(torch.zeros(2, 3))


def swap_data(module: nn.Sequential) -> None:
    module[0].weight.data = torch.zeros(2, 3)


def transpose_data(module: nn.Sequential) -> None:
    module[0].weight.data = torch.zeros(3, 2).t()


def swap_layer(module: nn.Sequential) -> None:
    module[2] = nn.Linear(2, 2)


def tie(module: nn.Sequential) -> None:
    module[2].weight = module[2].weight


def swap_buffer(module: nn.Sequential) -> None:
    module[1].running_mean = torch.zeros(2)


@pytest.mark.parametrize("change", [swap_parameter, swap_data, transpose_data, swap_layer, tie, swap_buffer])
def test_a_plan_never_outlives_the_memory_that_it_was_made_for(
    change: Callable[[nn.Sequential], None],
) -> None:
    source, target = net(), net()
    plans: dict[int, Any] = {}
    copy_into(sent(source), target, plans=plans)
    change(target)
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.add_(1)
    copy_into(sent(source), target, plans=plans)
    assert live_digest(target)[0] == digest(source)


def test_a_plan_never_hides_that_a_target_does_not_fit_any_more() -> None:
    source, target = net(), net()
    plans: dict[int, Any] = {}
    payload = sent(source)
    copy_into(payload, target, plans=plans)
    target.add_module("more", nn.Linear(1, 1))
    with pytest.raises(InvalidWeightsError, match=r"'more\.weight' is missing"):
        copy_into(payload, target, plans=plans)
    del target.more
    target[0].weight.data = torch.zeros(3, 2)
    with pytest.raises(InvalidWeightsError, match="shape"):
        copy_into(payload, target, plans=plans)
    target[0].weight.data = torch.zeros(2, 3, dtype=torch.float64)
    with pytest.raises(InvalidWeightsError, match="dtype"):
        copy_into(payload, target, plans=plans)


def test_plans_of_tensordicts_and_mappings_are_checked_the_same_way() -> None:
    weights = {"a": {"w": torch.ones(2)}, "b": torch.ones(1)}
    for target in (TensorDict({"a": {"w": torch.zeros(2)}, "b": torch.zeros(1)}, []), copy.deepcopy(weights)):
        plans: dict[int, Any] = {}
        for _ in range(2):
            copy_into(sent(weights), target, plans=plans)
        target["a"]["w"] = torch.zeros(2)
        copy_into(sent(weights), target, plans=plans)
        assert live_digest(target)[0] == digest(weights)
        target["c"] = torch.zeros(1)
        with pytest.raises(InvalidWeightsError, match="'c' is missing"):
            copy_into(sent(weights), target, plans=plans)


# ---------------------------------------------------------------------- whole round trips


SHAPES = st.lists(st.integers(0, 3), max_size=3).map(tuple)
DTYPES = st.sampled_from(
    [torch.float32, torch.int64, torch.bool, torch.bfloat16, torch.complex64, torch.uint8]
)
NESTS = st.recursive(
    st.tuples(SHAPES, DTYPES),
    lambda inner: st.dictionaries(st.sampled_from(["a", "b", "a.b", "", "0"]), inner, max_size=3),
    max_leaves=6,
).filter(lambda found: isinstance(found, dict))


def build(plan: Any, fill: int) -> Any:
    if isinstance(plan, dict):
        return {key: build(item, fill) for key, item in plan.items()}
    shape, dtype = plan
    return torch.full(shape, fill, dtype=torch.int64).to(dtype)


@given(NESTS)
def test_any_nest_goes_out_and_comes_back_as_itself(plan: Any) -> None:
    source, target = build(plan, 1), build(plan, 0)
    payload = sent(source)
    assert json.loads(json.dumps(payload.structure)) == payload.structure
    copy_into(payload, target)
    assert live_digest(target)[0] == payload.digest == digest(source)
    assert digest(loaded(payload)) == payload.digest


def test_what_is_wrong_is_found_before_a_worker_is_touched(tmp_path: Path) -> None:
    """ST-22: a payload from a file is proven before it is given to anybody."""
    payload = stored({"w": torch.ones(3)}, tmp_path)
    target = {"w": torch.zeros(3)}
    copy_into(payload, target)
    assert target["w"].tolist() == [1, 1, 1]


def test_hashes_of_live_weights_tell_which_tensor_drifted() -> None:
    source, target = net(), net()
    payload = packed(source)
    copy_into(payload, target)
    with torch.no_grad():
        target[2].bias.add_(1)
    _, found = live_digest(target, payload.layout.by_name)
    assert payload.hashes is not None
    assert [name for name in found if found[name] != payload.hashes[name]] == ["2.bias"]


def test_ten_thousand_small_tensors_are_restored_like_few() -> None:
    weights = {f"layer.{at}.weight": torch.full((4,), float(at)) for at in range(10_000)}
    target = {key: torch.zeros(4) for key in weights}
    payload, plans = Packer().pack(flatten(weights)), {}
    for _ in range(2):
        copy_into(payload, target, plans=plans)
    assert live_digest(target)[0] == payload.digest


def many(fill: Callable[[tuple[int, ...]], torch.Tensor]) -> dict[str, torch.Tensor]:
    """So many small tensors that they are moved together, and some among them that cannot be."""
    return {
        f"{at:04}.{name}": tensor
        for at in range(100)
        for name, tensor in {
            "weight": fill((8, 8)),
            "bias": fill((8,)),
            "half": fill((5, 3)).to(torch.bfloat16),
            "long": fill((2,)).to(torch.int64),
            "odd": fill((7,)).to(torch.uint8),
            "none": fill((0, 3)),
            "one": fill(()),
            "turned": fill((6, 4)).t(),
            "complex": torch.view_as_complex(fill((3, 2))),
        }.items()
    }


def test_many_small_tensors_of_every_kind_arrive_in_place() -> None:
    source, target = many(torch.randn), many(torch.zeros)
    addresses = {name: tensor.data_ptr() for name, tensor in target.items()}
    plans: dict[int, Any] = {}
    for step in range(3):
        for tensor in source.values():
            tensor.add_(step)
        counters = {name: tensor._version for name, tensor in target.items()}
        copy_into(sent(source), target, plans=plans)
        assert bits(target) == bits(source)
        assert {name: tensor.data_ptr() for name, tensor in target.items()} == addresses
        assert all(tensor._version > counters[name] for name, tensor in target.items())


@pytest.mark.parametrize("name", ["0000.weight", "0050.bias", "0099.half", "0007.turned", "0042.one"])
def test_one_tensor_among_many_that_got_other_memory_is_written_there(name: str) -> None:
    source, target = many(torch.randn), many(torch.zeros)
    plans: dict[int, Any] = {}
    copy_into(sent(source), target, plans=plans)
    before = target[name].clone()
    left = target[name].data
    target[name].data = torch.zeros_like(target[name]).contiguous()
    for tensor in source.values():
        tensor.add_(1)
    copy_into(sent(source), target, plans=plans)
    assert bits(target) == bits(source)
    assert torch.equal(left, before)


def test_parameters_that_are_views_of_one_row_are_restored_in_place() -> None:
    """As `flatten_parameters` and sharding wrappers leave them."""
    shapes = [(4, 3), (4,), (2, 4), (2,)] * 30
    names = [f"{at:03}" for at in range(len(shapes))]
    row = torch.zeros(sum(torch.Size(shape).numel() for shape in shapes) + 2)
    parts = row[1:-1].split([torch.Size(shape).numel() for shape in shapes])
    target = {name: part.view(shape) for name, part, shape in zip(names, parts, shapes, strict=True)}
    source = {name: torch.randn(shape) for name, shape in zip(names, shapes, strict=True)}
    copy_into(sent(source), target, plans={})
    assert bits(target) == bits(source)
    assert torch.equal(row[1:-1], torch.cat([tensor.view(-1) for tensor in source.values()]))
    assert (row[0], row[-1]) == (0, 0)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_scripted_module_is_restored_like_its_source() -> None:
    source = net()
    target = torch.jit.script(net())
    assert copy_into(packed(source), target, plans={}).cast == ()
    assert live_digest(target)[0] == live_digest(source)[0]


@pytest.mark.parametrize("size", [2, 20_000], ids=["moved as bytes", "copied by torch"])
def test_a_parameter_that_was_conjugated_lazily_since_is_refused_as_at_first(size: int) -> None:
    target, plans = nn.Module(), {}
    target.z = nn.Parameter(torch.zeros(size, dtype=torch.complex64))
    values = torch.full((size,), 1 + 2j)
    copy_into(sent({"z": values}), target, plans=plans)
    assert torch.equal(target.z.detach(), values)
    target.z.data = target.z.data.conj()
    with pytest.raises(InvalidWeightsError, match="lazily conjugated"):
        copy_into(sent({"z": 2 * values}), target, plans=plans)
    assert torch.equal(target.z.detach().resolve_conj(), values.conj().resolve_conj()), "nothing was changed"


def test_a_module_that_takes_other_memory_with_its_extra_state_is_written_where_it_is() -> None:
    class Moving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(4))

        def get_extra_state(self) -> dict[str, int]:
            return {"n": 1}

        def set_extra_state(self, state: Any) -> None:
            self.w.data = torch.zeros(4)

    source, target = Moving(), Moving()
    with torch.no_grad():
        source.w.fill_(5.0)
    copy_into(sent(source), target)
    assert target.w.tolist() == [5.0] * 4

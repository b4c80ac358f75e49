"""A module that computes its state dict, or derives something when it loads: restored in truth, or refused by name.

What a module really uses is looked at here by its parameters, its attributes and its output, never by its state dict.
"""

# The stubs of torch call every attribute of a module `Tensor | Module`.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportIncompatibleMethodOverride=false, reportAssignmentType=false

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.registry.snapshot_helpers import digest, packed, seal
from weightledger.registry import Registry
from weightledger.registry.errors import InvalidWeightsError
from weightledger.registry.weights import codec
from weightledger.registry.weights.live import identity
from weightledger.registry.weights.payload import Payload, parse
from weightledger.registry.weights.restore import NotPutBackError, check_fit, copy_into
from weightledger.registry.weights.reuse import Flattener


def sent(weights: Any) -> Payload:
    payload = packed(weights)
    seal(payload)
    return parse(payload.buffer.tobytes(), "sent")


def real(module: nn.Module) -> str:
    """Hash what a module really computes with: every parameter and buffer, as its parts hold them."""
    total = hashlib.sha256()
    for prefix, part in module.named_modules():
        for name, tensor in [*part._parameters.items(), *part._buffers.items()]:
            if tensor is not None:
                total.update(f"{prefix}.{name}{tensor.dtype}{tuple(tensor.shape)}".encode())
                total.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def fill(module: nn.Module, value: float) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(value)


class Overriding(nn.Linear):
    def state_dict(self, *args: Any, **options: Any) -> Any:
        return {name: tensor.clone() for name, tensor in super().state_dict(*args, **options).items()}


class WithoutArguments(nn.Linear):
    def state_dict(self) -> Any:  # type: ignore[override]
        return {name: tensor.cpu().clone() for name, tensor in super().state_dict().items()}


class Saving(nn.Linear):
    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[prefix + "weight"] = self.weight.detach() * 1.0
        destination[prefix + "bias"] = self.bias


class Deaf(nn.Linear):
    """Takes what it is given without an error, and does nothing with it."""

    def state_dict(self, *args: Any, **options: Any) -> Any:
        return {name: tensor.clone() for name, tensor in super().state_dict(*args, **options).items()}

    def load_state_dict(self, *args: Any, **options: Any) -> Any:
        return None


def copying(module: nn.Module, state: Any, prefix: str, metadata: Any) -> Any:
    return OrderedDict((name, tensor.clone()) for name, tensor in state.items())


def copying_in_place(module: nn.Module, state: Any, prefix: str, metadata: Any) -> None:
    for name in list(state):
        state[name] = state[name].clone()


def hooked() -> nn.Module:
    module = nn.Linear(2, 1)
    module._register_state_dict_hook(copying)
    return module


def post_hooked() -> nn.Module:
    module = nn.Linear(2, 1)
    module.register_state_dict_post_hook(copying_in_place)
    return module


def replaced_on_the_object() -> nn.Module:
    module = nn.Linear(2, 1)
    module.state_dict = lambda *args, **options: copying(  # type: ignore[method-assign]
        module, nn.Module.state_dict(module, *args, **options), "", None
    )
    return module


COMPUTING: dict[str, Callable[[], nn.Module]] = {
    "hook": hooked,
    "post hook": post_hooked,
    "on the object": replaced_on_the_object,
    "override": lambda: Overriding(2, 1),
    "_save_to_state_dict": lambda: Saving(2, 1),
}


def inside(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(2, 2), make())


EVERY_PLACE = (
    COMPUTING
    # Torch gives a submodule's `state_dict` arguments, which this one does not take.
    | {"without arguments": lambda: WithoutArguments(2, 1)}
    | {f"{name}, in a submodule": inside(make) for name, make in COMPUTING.items()}
    | {
        f"{name}, compiled": lambda make=make: torch.compile(make(), backend="eager")
        for name, make in COMPUTING.items()
    }  # type: ignore[misc]
    | {f"{name}, wrapped": lambda make=make: nn.DataParallel(make()) for name, make in COMPUTING.items()}  # type: ignore[misc]
)


@pytest.mark.parametrize("make", EVERY_PLACE.values(), ids=EVERY_PLACE)
def test_a_module_that_computes_its_state_is_really_restored(
    make: Callable[[], nn.Module], tmp_path: Path
) -> None:
    module = make()
    fill(module, 1.0)
    registry = Registry.open(tmp_path / "registry")
    registry.publish(module)
    before = real(module)
    fill(module, 9.0)
    parameters = list(module.parameters())
    registry.restore(1, module)
    assert real(module) == before
    assert all(one is other for one, other in zip(parameters, module.parameters(), strict=True))
    registry.close()


# ---------------------------------------------------------------------- what is derived from weights


class Fused(nn.Module):
    """Computes with a copy of its weights that it makes when it loads, as inference engines do."""

    def __init__(self, refresh: str) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(2, 2), nn.Linear(2, 2)
        if refresh == "post hook":
            self.register_load_state_dict_post_hook(lambda module, keys: module.refresh())
        self.refresh()

    def refresh(self) -> None:
        self.fused = self.two.weight.detach() @ self.one.weight.detach()

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.fused.t()


class FusedByOverride(Fused):
    def load_state_dict(self, *args: Any, **options: Any) -> Any:
        answer = super().load_state_dict(*args, **options)
        self.refresh()
        return answer


class FusedInside(nn.Module):
    """As `Fused`, in a module whose part knows when it is loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))
        self.doubled = self.weight.detach() * 2

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self.doubled = self.weight.detach() * 2

    def forward(self, x: Tensor) -> Tensor:
        return x * self.doubled


DERIVING: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "post hook": (lambda: Fused("post hook"), 2),
    "load_state_dict": (lambda: FusedByOverride(""), 2),
    "_load_from_state_dict": (FusedInside, 3),
    "in a submodule": (lambda: nn.Sequential(FusedInside()), 3),
}


@pytest.mark.parametrize(("make", "width"), DERIVING.values(), ids=DERIVING)
def test_what_a_module_derives_when_it_loads_is_derived_anew(
    make: Callable[[], nn.Module], width: int
) -> None:
    source, target, x = make(), make(), torch.ones(1, width)
    assert not torch.equal(source(x), target(x))
    plans: dict[int, Any] = {}
    for _ in range(2):
        with torch.no_grad():
            for parameter in source.parameters():
                parameter.add_(1)
        source.load_state_dict(source.state_dict())
        copy_into(sent(source), target, plans=plans)
        assert torch.equal(source(x), target(x))
        assert real(source) == real(target)


def test_a_rehearsal_leaves_what_is_derived_as_it_was() -> None:
    source, target, x = Fused("post hook"), Fused("post hook"), torch.ones(1, 2)
    before, output = real(target), target(x)
    check_fit(sent(source), target)
    assert real(target) == before
    assert torch.equal(target(x), output)


# ---------------------------------------------------------------------- all or nothing


def refused(
    target: nn.Module, payload: Payload, *parts: str, kind: type[Exception] = InvalidWeightsError
) -> None:
    """Restore and rehearse; expect the same error with all parts, and the module as it was."""
    for attempt in (copy_into, check_fit):
        before, objects = real(target), identity(target)
        with pytest.raises(kind) as caught:
            attempt(payload, target)  # type: ignore[operator]
        assert type(caught.value) is kind
        for part in parts:
            assert part in str(caught.value)
        assert real(target) == before
        assert all(one is other for one, other in zip(objects, identity(target), strict=True))


def test_a_module_that_does_not_take_what_it_is_given_is_refused_by_key() -> None:
    source, target = nn.Linear(2, 1), Deaf(2, 1)
    refused(target, sent(source), "nothing was changed", "'bias'", "'weight'", "load_state_dict of Deaf")


class Averaged(nn.Linear):
    """Shows averages of its weights, and loads the weights."""

    def __init__(self) -> None:
        super().__init__(2, 1)
        self.mean = torch.zeros(1, 2)

    def state_dict(self, *args: Any, **options: Any) -> Any:
        return {"weight": self.mean.clone(), "bias": self.bias}

    def load_state_dict(self, state: Any, **options: Any) -> Any:
        return super().load_state_dict(state, strict=False)


def test_a_module_that_shows_something_else_than_it_loads_is_refused_by_key() -> None:
    refused(Averaged(), sent(nn.Linear(2, 1)), "'weight'", "nothing was changed")


class Breaking(nn.Module):
    """Loads its first part, derives something, replaces a parameter, and then fails."""

    def __init__(self, error: BaseException | None) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
        self.register_buffer("own", torch.zeros(2), persistent=False)
        self.error = error
        self.derived = self.first.weight.detach() * 2

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        self.loads = 1
        with torch.no_grad():
            self.first.weight.copy_(state["first.weight"])
            self.own.add_(1)
        self.derived = self.first.weight.detach() * 2
        self.second.weight.data = torch.zeros(2, 2)
        self.second.register_parameter("bias", nn.Parameter(torch.zeros(2)))
        if self.error is not None and not torch.equal(state["second.weight"], self.kept):
            raise self.error
        return super().load_state_dict(state, strict)

    @property
    def kept(self) -> Tensor:
        return torch.full((2, 2), 4.0)


@pytest.mark.parametrize(
    "error", [RuntimeError("half-way"), KeyboardInterrupt()], ids=["raises", "interrupted"]
)
def test_a_module_whose_loading_ends_half_way_holds_what_it_held(error: BaseException) -> None:
    target = Breaking(error)
    fill(target, 4.0)
    target.derived = target.first.weight.detach() * 2
    source = Breaking(None)
    before, derived, objects = real(target), target.derived.clone(), identity(target)
    payload = sent({name: tensor.detach().clone() for name, tensor in source.named_parameters()})
    expected = InvalidWeightsError if isinstance(error, Exception) else KeyboardInterrupt
    for attempt in (copy_into, check_fit):
        with pytest.raises(expected):
            attempt(payload, target)
        assert real(target) == before
        assert torch.equal(target.derived, derived)
        assert all(one is other for one, other in zip(objects, identity(target), strict=True))


class Forgetful(nn.Linear):
    """Cannot go back: what it once was told is lost, and it takes nothing else."""

    hidden = 0.0

    def state_dict(self, *args: Any, **options: Any) -> Any:
        return {"weight": self.weight.detach() + type(self).hidden, "bias": self.bias}

    def load_state_dict(self, state: Any, **options: Any) -> Any:
        type(self).hidden += 1.0
        raise RuntimeError("no")


def test_a_module_that_can_neither_go_on_nor_back_is_said_to_be_unknown() -> None:
    with pytest.raises(NotPutBackError, match="is not known: make it anew"):
        copy_into(sent(nn.Linear(2, 1)), Forgetful(2, 1))


def test_a_module_that_replaces_its_tensors_is_believed_when_it_shows_them() -> None:
    class Assigning(nn.Linear):
        def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
            return super().load_state_dict(state, strict, assign=True)

    source, target = nn.Linear(2, 1), Assigning(2, 1)
    payload = packed(source)
    copy_into(payload, target)
    assert real(target) == real(source)
    payload.buffer[:] = 0
    payload.buffer[:] = 0
    assert real(target) == real(source), "the module has memory of its own"


def test_a_module_that_shows_rounded_copies_gets_back_what_it_showed() -> None:
    class Rounded(nn.Linear):
        def state_dict(self, *args: Any, **options: Any) -> Any:
            return {name: tensor.half() for name, tensor in super().state_dict(*args, **options).items()}

    source, target = Rounded(2, 1), Rounded(2, 1)
    copy_into(sent(source), target)
    assert torch.equal(target.weight, source.weight.half().float())
    assert digest(target) == digest(source)


def test_what_does_not_fit_is_told_before_the_module_is_asked_to_load() -> None:
    asked = []

    class Asked(Overriding):
        def load_state_dict(self, *args: Any, **options: Any) -> Any:
            asked.append(args)
            return super().load_state_dict(*args, **options)

    refused(Asked(2, 2), sent(nn.Linear(2, 1)), "'weight' has the shape (2, 2) in the target", "'bias'")
    refused(Asked(2, 1), sent(nn.Linear(2, 1).double()), "cast=True")
    assert asked == []
    target, source = Asked(2, 1), nn.Linear(2, 1).double()
    assert copy_into(sent(source), target, cast=True).cast == ("bias", "weight")
    assert torch.equal(target.weight, source.weight.float())


def test_ties_prefixes_and_loose_buffers_of_a_computing_module_are_served() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(2, 2), nn.Linear(2, 2)
            self.two.weight = self.one.weight
            self.register_buffer("loose", torch.zeros(2), persistent=False)
            self._register_state_dict_hook(copying)

    source, target = Tied(), nn.DataParallel(Tied())
    fill(source, 3.0)
    payload = sent({**source.state_dict(), "loose": torch.ones(2)})
    copy_into(payload, target)
    assert real(source.one) == real(target.module.one)
    assert target.module.two.weight is target.module.one.weight
    assert target.module.loose.tolist() == [1, 1]
    twisted = sent({**source.state_dict(), "two.weight": torch.zeros(2, 2)})
    refused(target, twisted, "one.weight", "two.weight")


class WithState(nn.Linear):
    """Has extra state, and copies in its state dict."""

    def __init__(self, state: Any) -> None:
        super().__init__(2, 1)
        self.state = state
        self._register_state_dict_hook(copying_values)

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        self.state = state


def copying_values(module: nn.Module, state: Any, prefix: str, metadata: Any) -> Any:
    return OrderedDict(
        (name, value.clone() if isinstance(value, Tensor) else value) for name, value in state.items()
    )


@pytest.mark.parametrize(
    "state", [{"k": 1}, torch.arange(7), {"scale": torch.ones(3), "n": [1, (2, None)]}, None]
)
def test_extra_state_of_a_computing_module_arrives(state: Any) -> None:
    source, target = nn.Sequential(WithState(state)), nn.Sequential(WithState({"other": torch.zeros(2)}))
    copy_into(sent(source), target)
    assert real(target) == real(source)
    assert digest(target) == digest(source)
    assert repr(target[0].state) == repr(state)


class Ignoring(nn.Linear):
    """Has extra state that it does not take."""

    def __init__(self, state: Any) -> None:
        super().__init__(2, 1)
        self.state = state

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        return None


@pytest.mark.parametrize(
    ("before", "after"), [(1, 2), ({"a": torch.zeros(2)}, {"a": torch.ones(2)}), ({"a": 1}, {"a": 1, "b": 2})]
)
def test_extra_state_that_a_module_does_not_take_is_refused_by_key(before: Any, after: Any) -> None:
    source, target = nn.Sequential(Ignoring(after)), nn.Sequential(Ignoring(before))
    refused(target, sent(source), "'0._extra_state", "nothing was changed")
    copy_into(sent(nn.Sequential(Ignoring(before))), target)


# ---------------------------------------------------------------------- what is the target's own


class Anew(Mapping[str, Tensor]):
    """Makes its tensors at each look, as readers of files do."""

    def __getitem__(self, key: str) -> Tensor:
        return torch.zeros(2)

    def __iter__(self) -> Iterator[str]:
        return iter(["a", "b"])

    def __len__(self) -> int:
        return 2


def test_a_mapping_that_makes_its_tensors_at_each_look_is_no_target() -> None:
    payload = sent({"n": {"a": torch.ones(2), "b": torch.ones(2)}})
    with pytest.raises(InvalidWeightsError, match=r"'n\.a' is made anew at each look(.|\n)*'n\.b'"):
        copy_into(payload, {"n": Anew()})


class Packed(nn.Module):
    """Keeps one tensor and shows its halves."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Parameter(torch.zeros(4, 2))
        self.register_state_dict_post_hook(self.halve)

    @staticmethod
    def halve(module: Any, state: Any, prefix: str, metadata: Any) -> None:
        state[prefix + "q"], state[prefix + "k"] = state.pop(prefix + "both").split(2)


def test_parts_of_a_parameter_are_written_in_place_wherever_it_lies_now() -> None:
    source, target, plans = Packed(), Packed(), {}
    for value in (1.0, 2.0):
        fill(source, value)
        copy_into(sent(source), target, plans=plans)
        assert real(source) == real(target)
        target.both.data = torch.zeros(4, 2)


class Special(nn.Parameter):
    """A parameter of a class of its own, as sharding and serving libraries have them."""


def test_a_parameter_of_another_class_is_written_where_it_lies_now() -> None:
    source, target, plans = nn.Linear(2, 1), nn.Linear(2, 1), {}
    target.weight = Special(torch.zeros(1, 2))
    for value in (1.0, 2.0):
        fill(source, value)
        copy_into(sent(source), target, plans=plans)
        assert real(source) == real(target)
        target.weight.data = torch.zeros(1, 2)


def test_hooks_that_come_later_are_seen() -> None:
    source, target, plans, x = Fused(""), Fused(""), {}, torch.ones(1, 2)
    copy_into(sent(source), target, plans=plans)
    assert plans[id(target)].loaded is None
    target.register_load_state_dict_post_hook(lambda module, keys: module.refresh())
    copy_into(sent(source), target, plans=plans)
    assert torch.equal(target(x), source(x))

    flattener, live = Flattener(), nn.Linear(2, 1)
    flattener.flatten(live)
    live._register_state_dict_hook(lambda module, state, prefix, meta: {"w": state["weight"].clone()})
    assert list(flattener.flatten(live).tensors) == ["w"]


PLAIN: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(2, 2),
    "batch norm": lambda: nn.BatchNorm1d(2),
    "instance norm": lambda: nn.InstanceNorm1d(2, affine=True, track_running_stats=True),
    "attention": lambda: nn.MultiheadAttention(4, 2),
    "lstm": lambda: nn.LSTM(2, 2),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)),
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(2, 2)),
    "old spectral norm": lambda: nn.utils.spectral_norm(nn.Linear(2, 2)),
    "compiled": lambda: torch.compile(nn.Linear(2, 2), backend="eager"),
}


@pytest.mark.parametrize("make", PLAIN.values(), ids=PLAIN)
def test_modules_that_only_read_old_formats_are_written_in_place_and_planned_once(
    make: Callable[[], nn.Module],
) -> None:
    source, target, plans = make(), make(), {}
    payload = sent(source)
    copy_into(payload, target, plans=plans)
    plan = plans[id(target)]
    assert plan.loaded is None
    copy_into(payload, target, plans=plans)
    assert plans[id(target)] is plan
    flattener = Flattener()
    assert flattener.flatten(target) is flattener.flatten(target)


def test_a_state_dict_that_raises_is_an_error_that_names_the_module() -> None:
    class Raising(nn.Linear):
        def state_dict(self, *args: Any, **options: Any) -> Any:
            raise LookupError("gone")

    for attempt in (
        lambda: codec.flatten(Raising(2, 1)),
        lambda: copy_into(sent(nn.Linear(2, 1)), Raising(2, 1)),
    ):
        with pytest.raises(InvalidWeightsError, match=r"state_dict of .*Raising raised LookupError: gone"):
            attempt()

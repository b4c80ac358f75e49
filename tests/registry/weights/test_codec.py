"""Weights taken apart and put together again: names, ties, structures, refusals."""

# The stubs of torch call every submodule `Tensor | Module`, those of tensordict call every entry a Tensor.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportIndexIssue=false, reportAbstractUsage=false

from __future__ import annotations

import copy
import json
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from tensordict import (
    LazyStackedTensorDict,
    MemoryMappedTensor,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    TensorDictParams,
    lazy_stack,
    tensorclass,
)
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.registry.snapshot_helpers import loaded, packed, round_trip
from weightledger.registry.errors import CorruptionError, InvalidWeightsError
from weightledger.registry.weights import names
from weightledger.registry.weights.codec import Content, flatten, flatten_extra, rebuild


def rebuilt(content: Content, **options: Any) -> Any:
    """Put a content together from its own live tensors, through JSON."""
    tensors = dict(content.tensors)
    tensors.update({alias: tensors[name] for alias, name in content.ties.items()})
    return rebuild(json.loads(json.dumps(content.structure)), tensors, content.values, **options)


def storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def tied_module() -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    module[1].weight = module[0].weight
    return module


# ---------------------------------------------------------------------- names


COMPONENT = st.sampled_from(
    ["a", "b", "a.b", "", ".", "%", "%2E", "a%2Eb", "__metadata__", "0", "é\n/ ", "x._orig_mod.y"]
)
PATHS = st.lists(st.lists(COMPONENT, min_size=1, max_size=3).map(tuple), min_size=1, max_size=6, unique=True)


def nest(paths: list[tuple[str, ...]]) -> dict[str, Any]:
    """Build nested dictionaries with a tensor at each path, leaving out those that run through another one."""
    root: dict[str, Any] = {}
    for at, path in enumerate(paths):
        place: Any = root
        for key in path[:-1]:
            place = place.setdefault(key, {}) if isinstance(place, dict) else None
        if isinstance(place, dict) and path[-1] not in place:
            place[path[-1]] = torch.tensor(at)
    return root


def flat_leaves(root: Any, path: tuple[Any, ...] = ()) -> dict[tuple[Any, ...], Any]:
    if not isinstance(root, dict):
        return {path: root}
    return {
        found: leaf for key, item in root.items() for found, leaf in flat_leaves(item, (*path, key)).items()
    }


@given(PATHS)
def test_names_never_collide_and_lead_back_to_their_keys(paths: list[tuple[str, ...]]) -> None:
    weights = nest(paths)
    content = flatten(weights)
    assert len(content.tensors) == len(flat_leaves(weights))
    assert "__metadata__" not in content.tensors
    back = rebuilt(content)
    assert {path: int(leaf) for path, leaf in flat_leaves(back).items()} == {
        path: int(leaf) for path, leaf in flat_leaves(weights).items()
    }


def test_a_usual_name_stays_as_users_know_it() -> None:
    assert list(flatten(nn.Sequential(nn.Linear(1, 1))).tensors) == ["0.weight", "0.bias"]
    odd = {"": 1, "a/b": 2, "a b": 3, "ü\n": 4}
    assert set(flatten({key: torch.tensor(value) for key, value in odd.items()}).tensors) == set(odd)


def test_a_dotted_key_beside_a_nested_path_keeps_both() -> None:
    """TD-01: the path with the most components keeps the plain name."""
    td = TensorDict({"a.b": torch.ones(2), "a": {"b": torch.zeros(2)}}, [])
    content = flatten(td)
    assert {name: float(tensor.sum()) for name, tensor in content.tensors.items()} == {"a%2Eb": 2, "a.b": 0}
    back = rebuilt(content)
    assert back["a.b"].sum() == 2
    assert back["a", "b"].sum() == 0
    three = {"a": {"b": {"c": torch.tensor(0)}, "b.c": torch.tensor(1)}, "a.b": {"c": torch.tensor(2)}}
    assert set(flatten(three).tensors) == {"a.b.c", "a.b%2Ec", "a%2Eb.c"}


def test_whole_number_keys_stay_apart_from_their_text() -> None:
    """ST-18: `0` and `"0"` are two keys, and a lone `0` has the name that a state dict gives it."""
    content = flatten_extra({0: torch.zeros(1), "0": torch.ones(1)})
    assert set(content.tensors) == {"0", "%i0"}
    assert {key: float(tensor) for key, tensor in rebuilt(content).items()} == {0: 0, "0": 1}
    assert set(flatten_extra({"state": {0: torch.zeros(1)}}).tensors) == {"state.0"}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # of torch.compile's own
def test_the_compiler_prefix_is_no_part_of_a_name_but_comes_back() -> None:
    """TO-01: at the front, before a child, and in the keys of a TensorDict."""
    plain = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    half = nn.Sequential(nn.Linear(1, 1), torch.compile(nn.Linear(1, 1)))
    expected = {"0.weight", "0.bias", "1.weight", "1.bias"}
    for weights in (torch.compile(plain), half, half.state_dict(), TensorDict.from_module(half)):
        content = flatten(weights)
        assert set(content.tensors) == expected
    assert "1._orig_mod.weight" in rebuilt(flatten(half))
    assert set(flatten({"_orig_mod": torch.zeros(1)}).tensors) == {"_orig_mod"}


def test_two_keys_that_differ_by_the_compiler_prefix_only_are_refused() -> None:
    with pytest.raises(InvalidWeightsError, match=r"(?s)_orig_mod\.w.*'w'|'w'.*_orig_mod\.w"):
        flatten({"w": torch.zeros(1), "_orig_mod.w": torch.ones(1)})
    with pytest.raises(InvalidWeightsError, match="_orig_mod"):
        flatten({"a": {"w": torch.zeros(1), "_orig_mod": {"w": torch.zeros(1)}}})


@pytest.mark.parametrize("key", ["\ud800", 1.5, None, ("a", "b"), b"a", True])
def test_a_key_that_no_file_can_hold_is_refused(key: Any) -> None:
    with pytest.raises(InvalidWeightsError, match="key"):
        flatten({"good": torch.zeros(1), "sub": {key: torch.zeros(1)}})


def test_extra_state_is_known_by_its_last_part_only() -> None:
    assert names.is_extra_state("a._extra_state")
    assert not names.is_extra_state("my_extra_state")


# ---------------------------------------------------------------------- ties


def test_a_tie_is_kept_once_and_comes_back_as_one_tensor() -> None:
    """ST-01: both keys come back, and load into a tied and an untied module (ST-02)."""
    module = tied_module()
    content = flatten(module)
    assert list(content.tensors) == ["0.weight"]
    assert content.ties == {"1.weight": "0.weight"}
    back = rebuilt(content)
    assert back["0.weight"] is back["1.weight"]
    module.load_state_dict(back, strict=True)
    assert module[0].weight is module[1].weight
    untied = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    untied.load_state_dict(back, strict=True)
    assert torch.equal(untied[1].weight, module[0].weight)


def test_equal_values_tie_nothing() -> None:
    """ST-02: a key is never dropped because its values happen to equal another key's."""
    content = flatten({key: tensor.clone() for key, tensor in tied_module().state_dict().items()})
    assert set(content.tensors) == {"0.weight", "1.weight"}
    back = rebuilt(content)
    assert storage(back["0.weight"]) != storage(back["1.weight"])


@pytest.mark.parametrize(
    "views",
    [
        lambda flat: (flat[:5], flat[3:]),
        lambda flat: (flat[:4], flat[4:]),
        lambda flat: (flat.view(2, 4), flat),
        lambda flat: (flat.view(2, 4), flat.view(4, 2)),
        lambda flat: (flat.view(2, 4), flat.view(4, 2).t()),
        lambda flat: (flat, flat.view(torch.int32)),
        lambda flat: (torch.complex(flat, flat), torch.complex(flat, flat).conj()),
    ],
)
def test_memory_seen_in_two_ways_is_not_a_tie(
    views: Callable[[Tensor], tuple[Tensor, Tensor]], tmp_path: Path
) -> None:
    """ST-03: values round-trip exactly, each view with its own data."""
    one, other = views(torch.arange(8.0))
    expected = {"a": one.clone(), "b": other.clone()}
    assert flatten({"a": one, "b": other}).ties == {}
    back = round_trip({"a": one, "b": other}, tmp_path)
    assert all(torch.equal(back[key], expected[key]) for key in expected)
    assert storage(back["a"]) != storage(back["b"])


def test_a_lazily_conjugated_view_is_not_tied_to_what_it_conjugates(tmp_path: Path) -> None:
    base = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64)
    back = round_trip({"a": base, "b": base.conj(), "c": base.conj().imag}, tmp_path)
    assert torch.equal(back["b"], base.conj().resolve_conj())
    assert torch.equal(back["c"], -base.imag)


def test_empty_tensors_are_never_tied(tmp_path: Path) -> None:
    """ST-12: all of them have the address 0."""
    weights = {"a": torch.tensor([]), "b": torch.tensor([]), "c": torch.zeros(0, 5), "n": torch.tensor(7)}
    assert flatten(weights).ties == {}
    back = round_trip(weights, tmp_path)
    assert {key: (tuple(tensor.shape), tensor.dtype) for key, tensor in back.items()} == {
        key: (tuple(tensor.shape), tensor.dtype) for key, tensor in weights.items()
    }


def test_loaded_leaves_share_memory_only_where_the_structure_ties_them() -> None:
    """The file of another version may tie what this version does not."""
    shared = torch.ones(3)
    untied = flatten({"a": torch.ones(3), "b": torch.ones(3)})
    back = rebuild(untied.structure, {"a": shared, "b": shared}, {})
    assert len({storage(back["a"]), storage(back["b"]), storage(shared)}) == 3
    tied = flatten({"a": shared, "b": shared})
    again = rebuild(tied.structure, {"a": torch.ones(3), "b": torch.ones(3)}, {})
    assert again["a"] is again["b"]


# ---------------------------------------------------------------------- structures


def test_a_state_dict_comes_back_with_order_and_metadata(tmp_path: Path) -> None:
    """ST-26: users zip it with `parameters()`."""
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    for weights in (module, module.state_dict()):
        back = round_trip(weights, tmp_path)
        assert type(back) is OrderedDict
        assert list(back) == list(module.state_dict())
        assert back._metadata == module.state_dict()._metadata  # type: ignore[attr-defined]
    other = {"z": torch.zeros(1), "a": torch.zeros(1)}
    assert list(round_trip(other, tmp_path)) == ["z", "a"]


@pytest.mark.parametrize("extra", [False, True], ids=["weights", "extra"])
def test_state_dicts_inside_of_others_come_back_as_state_dicts(extra: bool, tmp_path: Path) -> None:
    actor, critic = nn.Sequential(nn.Linear(2, 2)).state_dict(), nn.BatchNorm1d(2).state_dict()
    deep = OrderedDict(z=torch.ones(1), plain={"a": 1}, more=OrderedDict(b=[critic]))
    back = round_trip({"actor": actor, "deep": deep, "critic": critic}, tmp_path, extra=extra)
    assert type(back) is dict
    pairs = [(back["actor"], actor), (back["critic"], critic), (back["deep"]["more"]["b"][0], critic)]
    for found, state in pairs:
        assert type(found) is OrderedDict
        assert list(found) == list(state)
        assert found._metadata == state._metadata
        assert type(found._metadata) is OrderedDict
    assert type(back["deep"]) is type(back["deep"]["more"]) is OrderedDict
    assert list(back["deep"]) == ["z", "plain", "more"]
    assert type(back["deep"]["plain"]) is dict


@pytest.mark.parametrize("extra", [False, True], ids=["weights", "extra"])
def test_a_state_dict_that_torch_refuses_is_refused_after_a_round_trip(extra: bool, tmp_path: Path) -> None:
    """Without its `_metadata` it would pass for one of an old format, and be filled up in silence."""
    critic = nn.BatchNorm1d(2).state_dict()
    del critic["num_batches_tracked"]
    for weights, pick in (
        ({"critic": critic}, lambda back: back["critic"]),
        (critic, lambda back: back),
    ):
        back = pick(round_trip(weights, tmp_path, extra=extra))
        with pytest.raises(RuntimeError, match=r"Missing key.*num_batches_tracked"):
            nn.BatchNorm1d(2).load_state_dict(back)


def test_the_metadata_of_a_part_that_cannot_be_kept_is_refused_by_name() -> None:
    state = nn.Linear(2, 1).state_dict()
    state._metadata[""]["made"] = object()  # type: ignore[attr-defined]
    with pytest.raises(InvalidWeightsError, match=r"the _metadata of 'actor\.0'.*object"):
        flatten({"actor": {"0": state}})


def test_a_structure_without_notes_on_its_dictionaries_is_still_read() -> None:
    """As they were stored before: an OrderedDict inside comes back as a dict."""
    stored = {
        "format": 1,
        "kind": "mapping",
        "ties": {},
        "tree": {"dict": ["actor", "n"], "items": [{"dict": ["weight", "bias"]}, {"value": None}]},
    }
    tensors = {"actor.weight": torch.ones(2), "actor.bias": torch.zeros(1)}
    back = rebuild(stored, tensors, {"n": 3})
    assert (type(back), type(back["actor"]), list(back["actor"]), back["n"]) == (
        dict,
        dict,
        ["weight", "bias"],
        3,
    )
    # And the first key of every node still says what it is, to whoever knows no more.
    nested = flatten({"a": nn.Linear(2, 1).state_dict(), "b": OrderedDict()}).structure
    assert all(next(iter(node)) == "dict" for node in nested["tree"]["items"])
    plain = flatten(nn.Linear(2, 1)).structure
    assert plain["tree"] == {"dict": ["weight", "bias"]}


def test_a_module_with_tensordict_parameters_comes_back_with_what_they_note(tmp_path: Path) -> None:
    module = nn.Module()
    module.params = TensorDictParams(
        TensorDict({"a": torch.ones(2, 3), "b": {"c": torch.ones(2)}}, [2], device="cpu")
    )
    back = round_trip(module, tmp_path)
    assert back._metadata == module.state_dict()._metadata
    noted = back._metadata["params.b"]
    assert (type(noted["batch_size"]), type(noted["device"])) == (torch.Size, torch.device)
    with torch.no_grad():
        module.params.data.zero_()
    module.load_state_dict(back)
    assert module.params["b", "c"].tolist() == [1, 1]


def test_an_empty_state_is_legal_in_every_kind(tmp_path: Path) -> None:
    """ST-14."""
    assert round_trip(nn.Tanh(), tmp_path) == OrderedDict()
    assert round_trip({}, tmp_path) == {}
    assert round_trip(TensorDict({}, [3]), tmp_path).batch_size == (3,)
    assert round_trip([], tmp_path, extra=True) == []


def test_a_mapping_keeps_nests_values_and_arrays(tmp_path: Path) -> None:
    """ST-17: nothing is dropped in silence."""
    weights = {
        "w": torch.zeros(1),
        "quant_type": "nf4",
        "none": None,
        "flag": True,
        "np": np.arange(3, dtype=np.int16),
        "scalar": np.float32(1.5),
        "zero": np.array(2.0),
        "sub": {"x": torch.zeros(1), "empty": {}, "list": [torch.ones(1), 3, (torch.ones(2), "a")]},
        "plain": [1, (2.5, None), "x"],
        "bytes": b"\0\xff",
        "inf": float("inf"),
    }
    back = round_trip(weights, tmp_path)
    assert list(back) == list(weights)
    assert type(back["np"]) is np.ndarray
    assert back["np"].dtype == np.int16
    assert type(back["scalar"]) is np.float32
    assert back["zero"].shape == ()
    assert back["np"].flags.writeable
    assert back["sub"]["empty"] == {}
    assert type(back["sub"]["list"][2]) is tuple
    assert torch.equal(back["sub"]["list"][2][0], torch.ones(2))
    for key in ("quant_type", "none", "flag", "plain", "bytes", "inf"):
        assert back[key] == weights[key]
        assert type(back[key]) is type(weights[key])


def test_an_optimizer_state_comes_back_and_trains_on(tmp_path: Path) -> None:
    """ST-18, TO-11: whole-number keys, floats, lists and tensors are kept."""
    module = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(module.parameters(), lr=0.1, betas=(0.8, 0.9))
    module(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state = optimizer.state_dict()
    back = round_trip({"optimizer": state, "step": 17}, tmp_path, extra=True)
    assert list(back["optimizer"]["state"]) == [0, 1]
    assert back["optimizer"]["param_groups"] == state["param_groups"]
    assert type(back["optimizer"]["param_groups"][0]["betas"]) is tuple
    assert back["step"] == 17
    other = torch.optim.Adam(module.parameters())
    other.load_state_dict(back["optimizer"])
    assert torch.equal(other.state[module.weight]["exp_avg"], optimizer.state[module.weight]["exp_avg"])


def test_other_state_need_not_be_a_mapping(tmp_path: Path) -> None:
    assert torch.equal(round_trip(torch.arange(3), tmp_path, extra=True), torch.arange(3))
    assert round_trip(("MT19937", 3, [1, 2]), tmp_path, extra=True) == ("MT19937", 3, [1, 2])
    assert round_trip(None, tmp_path, extra=True) is None
    state = np.random.RandomState(0).get_state()
    kind, keys, *rest = round_trip(state, tmp_path, extra=True)
    assert kind == state[0]
    assert (keys == state[1]).all()
    assert rest == list(state[2:])
    assert round_trip({"d": defaultdict(int, {3: 4})}, tmp_path, extra=True) == {"d": {3: 4}}


# ---------------------------------------------------------------------- TensorDict


def test_odd_keys_of_a_tensordict_come_back_as_they_were(tmp_path: Path) -> None:
    """TD-02: a dotted key is no nested path."""
    td = TensorDict(
        {"a.b": torch.ones(2), "c": {"d": torch.zeros(2)}, "": torch.ones(1), "x/y \n%": torch.zeros(1)}, []
    )
    back = round_trip(td, tmp_path)
    assert set(back.keys(True, True)) == set(td.keys(True, True))
    assert (back == td).all()


def test_batch_sizes_names_and_empty_parts_come_back(tmp_path: Path) -> None:
    td = TensorDict(
        {"w": torch.zeros(2, 3), "e": TensorDict({}, [2]), "n": {"m": torch.ones(2, 3, 4)}},
        [2, 3],
        names=["t", None],
    )
    td["n"].batch_size = [2, 3, 4]
    back = round_trip(td, tmp_path)
    assert back.batch_size == (2, 3)
    assert back["e"].batch_size == td["e"].batch_size
    assert back["n"].batch_size == (2, 3, 4)
    assert back.names == ["t", None]
    assert list(back.keys()) == list(td.keys())


def test_non_tensor_entries_come_back_with_their_types(tmp_path: Path) -> None:
    """TD-03."""
    td = TensorDict({"w": torch.zeros(2)}, [2])
    td["name"] = "actor"
    td.set_non_tensor("cfg", {"k": 1, "l": [1, (2,)], 3: None})
    td.set_non_tensor("arrays", {"k": np.arange(3), "n": 1})
    back = round_trip(td, tmp_path)
    assert back["name"] == "actor"
    assert back["cfg"] == {"k": 1, "l": [1, (2,)], 3: None}
    assert (back["arrays"]["k"] == np.arange(3)).all()
    assert back.get("name").batch_size == (2,)


def test_a_non_tensor_entry_that_cannot_be_kept_is_refused() -> None:
    td = TensorDict({"w": torch.zeros(2)}, [2])
    td.set_non_tensor("fn", print)
    with pytest.raises(InvalidWeightsError, match="'fn' has the type builtin_function_or_method"):
        flatten(td)


def test_stacked_non_tensor_entries_come_back(tmp_path: Path) -> None:
    """TD-04."""
    td = lazy_stack([TensorDict(q=NonTensorData(str(i)), x=torch.zeros(())) for i in range(3)])
    back = round_trip(td, tmp_path)
    assert isinstance(back, LazyStackedTensorDict)
    assert back.get("q").tolist() == ["0", "1", "2"]
    inner = TensorDict({"s": NonTensorStack("a", "b")}, [2])
    assert round_trip(inner, tmp_path).get("s").tolist() == ["a", "b"]


def test_lazy_stacks_keep_elements_of_any_shape_and_key(tmp_path: Path) -> None:
    """TD-05, TD-06."""
    shapes = lazy_stack([TensorDict(x=torch.zeros(2)), TensorDict(x=torch.ones(3))])
    back = round_trip(shapes, tmp_path)
    assert [tuple(part["x"].shape) for part in back.tensordicts] == [(2,), (3,)]
    keys = lazy_stack(
        [TensorDict(x=torch.zeros(2), a=torch.ones(1)), TensorDict(x=torch.ones(2), b=torch.ones(1))], 0
    )
    back = round_trip(TensorDict({"in": keys}, []), tmp_path)["in"]
    assert [sorted(part.keys()) for part in back.tensordicts] == [["a", "x"], ["b", "x"]]
    assert back.batch_size == (2,)


def test_a_locked_tensordict_is_stored_and_stays_locked(tmp_path: Path) -> None:
    """TD-07."""
    td = TensorDict({"w": torch.zeros(2)}, []).lock_()
    assert not round_trip(td, tmp_path).is_locked
    assert td.is_locked


def test_the_leaves_of_a_consolidated_tensordict_are_not_tied(tmp_path: Path) -> None:
    """TD-08."""
    td = TensorDict({"a": torch.ones(3), "b": {"c": torch.zeros(2, dtype=torch.int64)}}, []).consolidate()
    assert flatten(td).ties == {}
    back = round_trip(td, tmp_path)
    assert (back == td).all()
    assert storage(back["a"]) != storage(back["b", "c"])


def test_parameters_are_stored_detached_as_a_tensordict(tmp_path: Path) -> None:
    """TD-13."""
    params = TensorDictParams(TensorDict({"a": {"w": torch.zeros(2)}, "n": NonTensorData("x")}, []))
    back = round_trip(params, tmp_path)
    assert type(back) is TensorDict
    assert not back["a", "w"].requires_grad
    assert back["n"] == "x"
    assert params["a", "w"].requires_grad


@tensorclass
class Pair:
    a: Tensor
    s: str


def test_a_tensorclass_is_refused_with_a_hint(tmp_path: Path) -> None:
    """TD-13: no silent loss of its text, nor of its class."""
    pair = Pair(a=torch.zeros(2), s="x", batch_size=[])
    for weights in ({"p": pair}, TensorDict({"p": pair}, [])):
        with pytest.raises(InvalidWeightsError, match=r"'p' is a .*Pair.*to_tensordict"):
            flatten(weights)
    with pytest.raises(InvalidWeightsError, match=r"found .*Pair: pass its \.to_tensordict\(\)"):
        flatten(pair)
    back = round_trip(pair.to_tensordict(), tmp_path)
    assert back["s"] == "x"


def test_a_sub_tensordict_and_other_lazy_views_are_refused() -> None:
    td = TensorDict({"a": torch.zeros(3)}, [3])
    with pytest.raises(InvalidWeightsError, match="to_tensordict"):
        flatten({"view": td._get_sub_tensordict(0)})


# ---------------------------------------------------------------------- modules


class WithState(nn.Module):
    def __init__(self, state: Any) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))
        self.state = state

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        self.state = state


@pytest.mark.parametrize("state", [{"k": 1}, {}, None, [1, (2,)], b"\1", {"a": {3: "x"}}])
def test_extra_state_without_tensors_is_one_value(state: Any, tmp_path: Path) -> None:
    """TO-07: kept, and loads with strict checking."""
    module = nn.Sequential(WithState(state))
    content = flatten(module)
    assert set(content.values) == {"0._extra_state"}
    back = round_trip(module, tmp_path)
    assert back["0._extra_state"] == state
    other = nn.Sequential(WithState("other"))
    other.load_state_dict(back, strict=True)
    assert other[0].state == state


def test_extra_state_with_tensors_is_kept(tmp_path: Path) -> None:
    """TO-07."""
    back = round_trip(WithState({"scale": torch.ones(3), "n": 2}), tmp_path)
    assert torch.equal(back["_extra_state"]["scale"], torch.ones(3))
    assert back["_extra_state"]["n"] == 2
    assert torch.equal(round_trip(WithState(torch.arange(5)), tmp_path)["_extra_state"], torch.arange(5))
    with pytest.raises(InvalidWeightsError, match=r"_extra_state.*set"):
        flatten(WithState({1, 2}))


def test_a_module_is_read_at_the_call_with_the_buffers_of_now() -> None:
    """TD-15."""
    module = nn.BatchNorm1d(1)
    module.running_mean = torch.tensor([5.0])
    assert float(flatten(module).tensors["running_mean"]) == 5


def test_a_buffer_that_is_not_persistent_is_in_a_tensordict_only() -> None:
    """RL-14."""
    module = nn.Linear(1, 1)
    module.register_buffer("mean", torch.zeros(1), persistent=False)
    assert "mean" not in flatten(module).tensors
    assert "mean" in flatten(TensorDict.from_module(module)).tensors


def test_nothing_is_copied_by_taking_apart() -> None:
    module = nn.Linear(2, 2)
    assert flatten(module).tensors["weight"] is module.weight
    array = np.zeros(3, np.float32)
    assert flatten({"a": array}).tensors["a"].data_ptr() == array.ctypes.data
    array.flags.writeable = False
    assert flatten({"a": array}).tensors["a"].data_ptr() == array.ctypes.data


# ---------------------------------------------------------------------- kinds of tensors


class Plain(Tensor):
    pass


def test_a_plain_subclass_is_kept_without_its_class(tmp_path: Path) -> None:
    """ST-08: documented; and the neighbour, a memory-mapped tensor."""
    back = round_trip(
        {"w": torch.arange(3).as_subclass(Plain), "m": MemoryMappedTensor.from_tensor(torch.ones(3))},
        tmp_path,
    )
    assert type(back["w"]) is Tensor
    assert type(back["m"]) is Tensor
    assert torch.equal(back["w"], torch.arange(3))


def test_inference_tensors_come_back_as_normal_ones(tmp_path: Path) -> None:
    """TO-12."""
    with torch.inference_mode():
        state = {"w": torch.zeros(2, 2)}
        back = round_trip(state, tmp_path)
    assert not back["w"].is_inference()
    back["w"].add_(1)
    back = round_trip(state, tmp_path)
    back["w"].add_(1)


def meta() -> Tensor:
    return torch.zeros(2, device="meta")


def freed() -> Tensor:
    tensor = torch.zeros(4)
    tensor.untyped_storage().resize_(0)
    return tensor


def shrunk() -> Tensor:
    tensor = torch.zeros(8)[2:].view(2, 3).t()
    tensor.untyped_storage().resize_(20)
    return tensor


def fake() -> Tensor:
    with FakeTensorMode():
        return torch.zeros(2)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
@pytest.mark.filterwarnings("ignore:.*[Qq]uantiz.*")
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (meta, "meta device, it has no data"),
        (lambda: nn.LazyLinear(4).weight, "run one forward first"),
        (lambda: nn.LazyBatchNorm1d().running_mean, "run one forward first"),
        (lambda: torch.eye(3).to_sparse(), "unsupported layout torch.sparse_coo"),
        (lambda: torch.eye(3).to_sparse_csr(), "unsupported layout torch.sparse_csr"),
        (lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]), "nested"),
        (lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged), "nested"),
        (lambda: torch.quantize_per_tensor(torch.randn(4), 0.1, 0, torch.qint8), "quantised.*qint8"),
        (lambda: torch.zeros(2, dtype=torch.complex128), "dtype torch.complex128"),
        (lambda: torch.zeros(2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2), "float4_e2m1fn_x2"),
        (freed, "freed or sharded.*gather to full tensors"),
        (shrunk, "freed or sharded"),
        (fake, "FakeTensor"),
        (lambda: np.zeros(2, np.complex128), "complex128"),
        (lambda: np.array(["a"]), "dtype <U1"),
        (lambda: np.array([object()]), "dtype object"),
        (lambda: np.zeros(2, ">f4"), "byte order"),
        (lambda: np.ma.masked_array([1]), "MaskedArray"),
        (lambda: object(), "type object"),
        (lambda: 1j, "complex"),
        (lambda: nn.Linear(1, 1), "is a module"),
        (lambda: torch.Size([1]), "torch.Size"),
        (lambda: {1, 2}, "set"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_key_and_reason(make: Callable[[], Any], reason: str) -> None:
    """ST-07, ST-08, ST-09, ST-10, ST-11, ST-17, TO-08: one error before anything is written."""
    with pytest.raises(InvalidWeightsError, match=f"(?s)'sub.bad' .*{reason}") as caught:
        flatten({"good": torch.zeros(1), "sub": {"bad": make()}})
    assert "good" not in str(caught.value)


def test_a_sharded_tensor_is_refused(tmp_path: Path) -> None:
    """ST-11: a shard is never stored as if it were the whole."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        sharded = distribute_tensor(torch.arange(4.0), init_device_mesh("cpu", (1,)), [Shard(0)])
        with pytest.raises(
            InvalidWeightsError, match=r"(?s)'w' is a .*DTensor.*gather to full tensors first"
        ):
            flatten({"w": sharded})
        assert flatten({"w": sharded.full_tensor()}).tensors["w"].sum() == 6
    finally:
        dist.destroy_process_group()


def test_a_tensor_inside_of_a_transform_is_refused() -> None:
    def inside(x: Tensor) -> Tensor:
        with pytest.raises(InvalidWeightsError, match="transform"):
            flatten({"w": x})
        return x

    torch.func.vmap(inside)(torch.zeros(2, 3))
    torch.func.grad(lambda x: inside(x).sum())(torch.zeros(2))


def test_every_bad_key_is_named_at_once() -> None:
    weights = {"a": meta(), "b": object(), "c": {"d": freed(), 1.5: 1}, "e": torch.zeros(1)}
    with pytest.raises(InvalidWeightsError) as caught:
        flatten(weights)
    for part in ("'a' is on the meta", "'b' has the type object", "'c.d' needs 16 bytes", "the key 1.5"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    "weights", [torch.zeros(1), None, 3, [torch.zeros(1)], torch.optim.SGD([torch.zeros(1)])]
)
def test_only_modules_tensordicts_and_mappings_are_weights(weights: Any) -> None:
    with pytest.raises(InvalidWeightsError, match="expected a module, TensorDict or mapping"):
        flatten(weights)


def test_a_container_that_holds_itself_is_refused() -> None:
    endless: dict[str, Any] = {"w": torch.zeros(1)}
    endless["self"] = endless
    with pytest.raises(InvalidWeightsError, match="holds itself"):
        flatten(endless)
    ring: list[Any] = [torch.zeros(1)]
    ring.append(ring)
    with pytest.raises(InvalidWeightsError, match="holds itself"):
        flatten_extra(ring)


# ---------------------------------------------------------------------- damage


def test_a_structure_that_names_what_is_not_there_is_a_corruption_error() -> None:
    content = flatten({"a": torch.zeros(1), "v": 1})
    with pytest.raises(CorruptionError, match="lacks the tensor 'a'"):
        rebuild(content.structure, {}, content.values)
    with pytest.raises(CorruptionError, match="lacks the value 'v'"):
        rebuild(content.structure, content.tensors, {})
    newer = {**copy.deepcopy(content.structure), "format": 2}
    with pytest.raises(CorruptionError, match="upgrade"):
        rebuild(newer, content.tensors, content.values)


def test_loaded_weights_are_own_and_writable() -> None:
    """TO-04, TD-12: neither the live weights nor the payload change with them, nor a second load."""
    module = nn.Linear(2, 2)
    payload = packed(TensorDict.from_module(module).data)
    before = module.weight.detach().clone()
    module.weight.data.add_(1)
    one, two = loaded(payload), loaded(payload)
    assert torch.equal(one["weight"], before)
    one["weight"].zero_()
    assert torch.equal(two["weight"], before)
    assert torch.equal(loaded(payload)["weight"], before)
    assert rebuilt(flatten(module), copy=False)["weight"] is module.weight

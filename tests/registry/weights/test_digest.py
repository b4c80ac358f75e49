"""Hashes tell contents apart, and nothing but contents."""

# The stubs of torch call every submodule `Tensor | Module`, those of tensordict call every entry a Tensor.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportIndexIssue=false, reportAbstractUsage=false

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from torch import nn

from tests.registry.snapshot_helpers import digest
from weightledger.registry.values import dumps
from weightledger.registry.weights.digest import content_digest, tensor_hash, tensor_hashes, value_hash
from weightledger.registry.weights.listing import quoted_object


def module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Sequential(nn.Linear(2, 2)))


def test_a_module_its_state_dict_and_its_tensordict_have_one_digest() -> None:
    plain = module()
    nested = {
        "0": dict(plain[0].state_dict()),
        "1": dict(plain[1].state_dict()),
        "2": {"0": plain[2][0].state_dict()},
    }
    forms = [
        plain,
        plain.state_dict(),
        TensorDict.from_module(plain),
        TensorDict.from_module(plain).data,
        nested,
    ]
    assert len({digest(form) for form in forms}) == 1


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # of torch.compile's own
def test_a_compiled_module_has_the_digest_of_the_plain_one() -> None:
    """TO-01: `_orig_mod.` is no part of a name, wherever it stands."""
    plain = module()
    expected = digest(plain)
    state = plain.state_dict()
    assert digest(torch.compile(plain)) == expected
    assert digest({key.replace("2.", "2._orig_mod.", 1): value for key, value in state.items()}) == expected
    assert digest(TensorDict.from_module(torch.compile(plain))) == expected


def test_key_order_strides_and_ties_are_no_part_of_a_digest() -> None:
    base = torch.arange(24.0).view(2, 3, 2, 2)
    expected = digest({"a": base, "b": torch.ones(2), "c": torch.ones(2)})
    assert digest({"b": torch.ones(2), "c": torch.ones(2), "a": base}) == expected
    assert (
        digest(
            {
                "a": base.to(memory_format=torch.channels_last),
                "b": torch.ones(1).expand(2),
                "c": torch.ones(2),
            }
        )
        == expected
    )
    tied = torch.ones(2)
    assert digest({"a": base, "b": tied, "c": tied}) == expected
    assert digest({"a": base.numpy(), "b": np.ones(2, np.float32), "c": tied}) == expected


@pytest.mark.parametrize(
    "other",
    [
        {"x": torch.zeros(4)},
        {"w": torch.zeros(2, 2)},
        {"w": torch.zeros(4, dtype=torch.int32)},
        {"w": -torch.zeros(4)},
        {"w": torch.zeros(4), "v": torch.zeros(4)},
        {"w": torch.zeros(4), "v": 1},
        {"w": torch.zeros(0)},
        {},
    ],
)
def test_another_name_shape_type_bit_or_value_is_another_digest(other: dict[str, object]) -> None:
    assert digest(other) != digest({"w": torch.zeros(4)})


def test_values_count_with_their_types() -> None:
    assert len({digest({"v": value}) for value in (1, 1.0, True, "1", None, [1], (1,))}) == 7


def test_the_digest_of_known_content_never_changes() -> None:
    """Registries outlive releases: these were computed once and stand in databases."""
    content = {"w": torch.arange(4.0), "sub": {"x": torch.tensor([1, 2], dtype=torch.int64)}, "name": "actor"}
    assert digest(content) == "blake3:6b7ff7d38010f094164c1371aa20ca49c25f790d9b2474eb95ec0366ccdc029a"


def test_every_process_computes_the_same_digest() -> None:
    program = (
        "import torch; from weightledger.registry.weights.codec import flatten;"
        "from weightledger.registry.weights.packing import Packer;"
        "print(Packer().pack(flatten({'w': torch.arange(4.0), 'k': {'b': 1, 'a': 'x'}})).digest)"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == digest({"w": torch.arange(4.0), "k": {"a": "x", "b": 1}})


def test_threads_do_not_change_a_hash() -> None:
    data = memoryview(bytes(range(256)) * (1 << 15))
    assert tensor_hash("U8", [len(data)], data, threads=2) == tensor_hash("U8", [len(data)], data)
    sizes = [0, 1, 5 << 20, 4096, *range(300), len(data), 17]
    places = [("U8", (size,), data[:size]) for size in sizes]
    alone = [tensor_hash("U8", [size], data[:size]) for size in sizes]
    for threads in (1, 2, 3, 8):
        assert tensor_hashes(places, threads=threads) == alone
    assert tensor_hashes([], threads=2) == []


@given(
    st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"])), st.text("0123456789abcdef"), max_size=4
    )
)
def test_no_crafted_name_makes_one_list_look_like_another(hashes: dict[str, str]) -> None:
    """Names may hold quotes, commas and digits of their own; joining texts would let them run together."""
    joined = {"".join(f"{name}{one}" for name, one in sorted(hashes.items())): ""}
    assert (content_digest(hashes) == content_digest(joined)) == (hashes == joined)


@given(st.dictionaries(st.text(), st.text("0123456789abcdef", min_size=64, max_size=64), max_size=20))
def test_a_content_digest_covers_the_json_of_the_sorted_pairs(hashes: dict[str, str]) -> None:
    text = dumps(["content", sorted(hashes.items())])
    assert content_digest(hashes) == "blake3:" + blake3(text.encode("ascii")).hexdigest()


@given(st.dictionaries(st.text(), st.text("0123456789abcdef", min_size=64, max_size=64), max_size=20))
def test_a_header_lists_hashes_as_json_within_json(hashes: dict[str, str]) -> None:
    text = quoted_object(hashes).text(hashes)
    assert text == json.dumps(json.dumps(hashes, separators=(",", ":")))


def test_a_value_cannot_pass_for_a_tensor() -> None:
    assert value_hash("") != tensor_hash("U8", [0], b"")
    assert tensor_hash("F32", [2], bytes(8)) != tensor_hash("F32", [2, 1], bytes(8))
    assert tensor_hash("F32", [2], bytes(8)) != tensor_hash("I32", [2], bytes(8))

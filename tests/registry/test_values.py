"""Plain values keep their types through JSON."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightledger.registry.errors import CorruptionError, InvalidWeightsError
from weightledger.registry.values import MAX_DEPTH, canonical, decode, dumps, encode

TEXT = st.text(st.characters(exclude_categories=["Cs"]))
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | TEXT | st.binary()
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(TEXT | st.integers(), inner, max_size=4)
    ),
    max_leaves=12,
)


def same(one: Any, other: Any) -> bool:
    """Compare with types, signs of zero and NaN."""
    if type(one) is not type(other):
        return False
    if isinstance(one, float):
        return (math.isnan(one) and math.isnan(other)) or (
            one == other and math.copysign(1, one) == math.copysign(1, other)
        )
    if isinstance(one, dict):
        return list(map(repr, one)) == list(map(repr, other)) and all(
            same(one[key], other[key]) for key in one
        )
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@given(VALUES)
def test_every_value_comes_back_with_its_type_through_strict_json(value: Any) -> None:
    encoded = encode(value, "value")
    text = json.dumps(encoded, allow_nan=False)
    assert same(decode(json.loads(text)), value)
    assert json.loads(dumps(encoded)) == encoded


@given(st.dictionaries(TEXT | st.integers(), SCALARS, max_size=5))
def test_the_canonical_text_does_not_depend_on_the_order_of_keys(value: dict[Any, Any]) -> None:
    backwards = dict(reversed(value.items()))
    assert canonical(encode(value, "value")) == canonical(encode(backwards, "value"))


def test_plain_values_are_plain_json() -> None:
    value = {"step": 3, "lr": 1e-3, "tag": None, 'é\n"': "\0", "list": [1, "a", True]}
    assert encode(value, "metadata") == value


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 1.0),
        (1, True),
        (0, None),
        ("1", 1),
        ([1], (1,)),
        ({0: 1}, {"0": 1}),
        (b"a", "a"),
        (0.0, -0.0),
        ("nan", math.nan),
    ],
)
def test_values_that_look_alike_stay_different(one: Any, other: Any) -> None:
    assert canonical(encode(one, "value")) != canonical(encode(other, "value"))


def test_a_dictionary_that_looks_like_a_tag_stays_a_dictionary() -> None:
    for value in ({"$tuple": [1]}, {"$float": "nan"}, {"$": 1, "b": 2}, {"$map": [[1, 2]]}):
        assert decode(encode(value, "value")) == value


def test_whole_numbers_of_any_size_come_back() -> None:
    """A reader with 64-bit numbers, or Python's own limit on digits, would lose them otherwise."""
    for value in (2**63 - 1, 2**63, -(2**63) - 1, 10**6000, -(10**6000)):
        assert decode(json.loads(dumps(encode(value, "value")))) == value


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (np.float32(1.5), 1.5),
        (np.float64("inf"), math.inf),
        (np.int8(-3), -3),
        (np.uint64(2**64 - 1), 2**64 - 1),
        (np.bool_(True), True),
        (np.str_("a"), "a"),
    ],
)
def test_numpy_scalars_become_the_number_that_they_equal(value: Any, plain: Any) -> None:
    assert same(decode(encode(value, "value")), plain)


class Text(str):
    __slots__ = ()


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (object(), "object"),
        ({1, 2}, "set"),
        (1j, "complex"),
        (Text("a"), "Text"),
        (np.datetime64(1, "ns"), "datetime64"),
        (np.timedelta64(1, "s"), "timedelta64"),
        (np.longdouble(1), "longdouble"),
        (np.zeros(2), "ndarray"),
        (bytearray(b"a"), "bytearray"),
    ],
)
def test_anything_else_is_refused_by_place_and_type(value: Any, kind: str) -> None:
    """ST-13: refused up front with key and type, and never turned into text."""
    with pytest.raises(InvalidWeightsError, match=kind) as caught:
        encode({"a": [1, value]}, "metadata")
    assert "metadata['a'][1]" in str(caught.value)


@pytest.mark.parametrize("value", ["\ud800", {"\udfff": 1}, ["a", ("\ud83d\ude00",)]])
def test_a_lone_surrogate_is_refused(value: Any) -> None:
    """ST-13: no UTF-8 file can hold one, and two of them side by side would come back as one other character."""
    with pytest.raises(InvalidWeightsError, match="surrogate"):
        encode(value, "metadata")


@pytest.mark.parametrize("key", [1.5, None, ("a",), b"a", True])
def test_a_key_of_another_type_is_refused(key: Any) -> None:
    with pytest.raises(InvalidWeightsError, match="key"):
        encode({key: 1}, "metadata")


def test_a_container_that_holds_itself_is_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(InvalidWeightsError, match="holds itself"):
        encode(endless, "metadata")
    deep: Any = 1
    for _ in range(MAX_DEPTH):
        deep = [deep]
    assert decode(encode(deep, "metadata")) == deep
    with pytest.raises(InvalidWeightsError, match="nested deeper"):
        encode([deep], "metadata")


@pytest.mark.parametrize(
    "stored", [{"$what": 1}, {"$float": 3}, {"$tuple": 3}, {"$map": [1]}, {"$bytes": "?"}, {"$int": "x"}]
)
def test_json_that_nobody_encoded_is_a_corruption_error(stored: Any) -> None:
    with pytest.raises(CorruptionError, match="stored value"):
        decode(stored)

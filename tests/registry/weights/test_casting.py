"""Converting to another type may round. It never makes other numbers of them in silence."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.registry.weights.test_own_state import Overriding, real, sent
from weightledger.registry import Registry
from weightledger.registry.errors import InvalidWeightsError
from weightledger.registry.weights.casting import loss
from weightledger.registry.weights.restore import check_fit, copy_into
from weightledger.updater.testing import FakeWorkers

INF, NAN = math.inf, math.nan
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
SMALL_FLOATS = [torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz]
WHOLE = [
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
]

LOST: list[tuple[Any, torch.dtype, torch.dtype, str]] = [
    (1e6, torch.float64, torch.float16, "holds 1e+06, and the largest number of torch.float16 is 65504"),
    (-1e39, torch.float64, torch.float32, "holds -1e+39"),
    (1e39, torch.float64, torch.complex64, "holds 1e+39"),
    (3.4e38, torch.float32, torch.bfloat16, "holds 3.4e+38"),
    (65520.0, torch.float32, torch.float16, "holds 65520"),
    (70_000, torch.int64, torch.float16, "holds 70000, which torch.float16 does not"),
    (500.0, torch.float32, torch.float8_e4m3fn, "holds 500"),
    (1e6, torch.float32, torch.float8_e5m2, "holds 1e+06"),
    (-300.0, torch.bfloat16, torch.float8_e4m3fnuz, "holds -300"),
    (INF, torch.float32, torch.float8_e4m3fn, "holds infinity, which torch.float8_e4m3fn does not have"),
    (57344.0, torch.float8_e5m2, torch.float8_e4m3fn, "holds 57344"),
    (300, torch.int64, torch.uint8, "holds 300, which torch.uint8 does not"),
    (-1, torch.int8, torch.uint64, "holds -1"),
    (2**64 - 1, torch.uint64, torch.int64, "holds 18446744073709551615"),
    (2, torch.uint8, torch.bool, "holds 2"),
    (0.5, torch.float32, torch.int64, "holds 0.5"),
    (2.0**63, torch.float64, torch.int64, "holds 9.22337e+18"),
    (NAN, torch.float16, torch.int32, "holds nan"),
    (-INF, torch.float32, torch.uint8, "holds -inf"),
    (0.5, torch.float64, torch.bool, "holds 0.5"),
    (3.0, torch.float32, torch.float8_e8m0fnu, "holds 3"),
    (0, torch.int64, torch.float8_e8m0fnu, "holds 0"),
]

KEPT: list[tuple[Any, torch.dtype, torch.dtype]] = [
    (65519.0, torch.float32, torch.float16),  # rounds to the largest
    (1e-30, torch.float32, torch.float16),  # rounds to zero
    (INF, torch.float64, torch.float16),
    (NAN, torch.float32, torch.float8_e4m3fn),
    (2**24 + 1, torch.int64, torch.float32),
    (2**64 - 1, torch.uint64, torch.float32),
    (3.0, torch.float32, torch.int64),
    (-(2.0**63), torch.float64, torch.int64),
    (True, torch.bool, torch.int8),
    (1.0, torch.float16, torch.bool),
    (0.5, torch.float32, torch.float8_e8m0fnu),
    (300.0, torch.float8_e5m2, torch.float16),
    (1.7e308, torch.float64, torch.float64),
    (1.5, torch.float16, torch.complex64),
]


def tensor(value: Any, dtype: torch.dtype) -> Tensor:
    """Return one tensor that is harmless but for one element."""
    found = torch.ones(40_000, dtype=torch.float32).to(dtype)
    found[-1:] = torch.tensor([value], dtype=dtype if dtype.is_floating_point or dtype in WHOLE else None).to(
        dtype
    )
    return found


@pytest.mark.parametrize(("value", "source", "target", "text"), LOST, ids=str)
def test_a_number_that_the_target_cannot_hold_is_refused_by_name(
    value: Any, source: torch.dtype, target: torch.dtype, text: str
) -> None:
    payload = sent({"fine": torch.ones(3, dtype=torch.float64), "w": tensor(value, source)})
    into = {"fine": torch.zeros(3), "w": torch.zeros(40_000).to(target)}
    for attempt in (copy_into, check_fit):
        with pytest.raises(InvalidWeightsError) as caught:
            attempt(payload, into, cast=True)
        assert "nothing was changed" in str(caught.value)
        assert f"'w' {text}" in str(caught.value)
        assert "'fine'" not in str(caught.value)
    assert into["fine"].tolist() == [0, 0, 0]
    assert not into["w"].view(torch.uint8).numpy()[: into["w"].element_size()].any()


@pytest.mark.parametrize(("value", "source", "target"), KEPT, ids=str)
def test_rounding_and_what_is_infinite_already_is_no_loss(
    value: Any, source: torch.dtype, target: torch.dtype
) -> None:
    into = {"w": torch.zeros(40_000).to(target)}
    copy_into(sent({"w": tensor(value, source)}), into, cast=True)
    expected = tensor(value, source).to(target)
    assert np.array_equal(into["w"].view(torch.uint8).numpy(), expected.view(torch.uint8).numpy())


@given(
    st.floats(width=64) | st.integers(-(2**63), 2**63 - 1).map(float),
    st.sampled_from([*FLOATS, *SMALL_FLOATS]),
    st.sampled_from([*FLOATS, *SMALL_FLOATS]),
)
def test_a_float_is_lost_exactly_if_it_does_not_come_back_near(
    value: float, source: torch.dtype, target: torch.dtype
) -> None:
    start = torch.tensor([value], dtype=torch.float64).to(source)
    before, after = start.double().item(), start.to(target).double().item()
    near = abs(after - before) <= abs(before) / 8 + torch.finfo(target).tiny
    fine = math.isnan(after) if math.isnan(before) else after == before if math.isinf(before) else near
    edge = torch.finfo(target).max <= abs(before) <= torch.finfo(target).max * 1.15
    if not edge:
        assert (loss(start, target) is None) == fine, (before, after)


@given(
    st.integers(-(2**63), 2**64 - 1),
    st.sampled_from(WHOLE),
    st.sampled_from([*WHOLE, torch.bool]),
)
def test_a_whole_number_is_lost_exactly_if_it_does_not_come_back(
    value: int, source: torch.dtype, target: torch.dtype
) -> None:
    about = torch.iinfo(source)
    value = about.min + value % (about.max - about.min + 1)
    start = torch.tensor([value], dtype=source)
    most = (0, 1) if target == torch.bool else (torch.iinfo(target).min, torch.iinfo(target).max)
    assert (loss(start, target) is None) == (most[0] <= value <= most[1])


def test_arrays_scalars_and_modules_that_load_themselves_are_checked_too() -> None:
    array = {"w": np.zeros(2, np.float16), "s": np.float16(0)}
    for name in array:
        weights = {"w": torch.ones(2, dtype=torch.float64), "s": torch.tensor(1.0, dtype=torch.float64)}
        weights[name] = weights[name] * 1e6
        with pytest.raises(InvalidWeightsError, match=f"'{name}' holds 1e"):
            copy_into(sent(weights), array, cast=True)
    assert copy_into(sent({"w": torch.ones(2), "s": torch.tensor(1.0)}), array, cast=True).cast == ("s", "w")
    assert array["s"] == 1

    source, target = nn.Linear(2, 1).double(), Overriding(2, 1).half()
    nn.init.constant_(source.weight, 1e6)
    before = real(target)
    with pytest.raises(InvalidWeightsError, match="'weight' holds 1e"):
        copy_into(sent(source), target, cast=True)
    assert real(target) == before


def test_a_restore_that_casts_loses_nothing_in_silence(tmp_path: Path) -> None:
    registry = Registry.open(tmp_path)
    learner, half = nn.Linear(2, 1).double(), nn.Linear(2, 1).half()
    nn.init.constant_(learner.bias, 1e6)
    registry.publish(learner)
    before = real(half)
    with pytest.raises(InvalidWeightsError, match="'bias' holds 1e"):
        registry.restore(1, half, cast=True)
    assert real(half) == before
    registry.close()


def test_a_worker_that_casts_keeps_what_it_held_and_names_the_tensor(tmp_path: Path) -> None:
    registry = Registry.open(tmp_path)
    learner, worker = nn.Linear(2, 1), nn.Linear(2, 1).half()
    fleet = FakeWorkers(learner, [worker], registry=registry, cast=True)
    assert fleet.update_weights().ok
    before = real(worker)
    nn.init.constant_(learner.weight, 1e6)
    for _ in range(2):
        (outcome,) = fleet.update_weights().workers.values()
        assert (outcome.status, outcome.held) == ("failed", 1)
        assert "'weight' holds 1e+06" in outcome.error
        assert real(worker) == before
    assert [holding.version for holding in registry.holdings()] == [1]
    nn.init.constant_(learner.weight, 1.0)
    assert fleet.update_weights().ok
    fleet.close()


@pytest.mark.parametrize("allowed", [True, ["wei*"]], ids=["all", "globs"])
def test_where_infinity_is_allowed_a_mask_may_become_infinite(allowed: Any, tmp_path: Path) -> None:
    learner, worker = nn.Linear(2, 1), nn.Linear(2, 1).bfloat16()
    nn.init.constant_(learner.weight, torch.finfo(torch.float32).min)
    fleet = FakeWorkers(
        learner, [worker], registry=Registry.open(tmp_path), cast=True, allow_nonfinite=allowed
    )
    assert fleet.update_weights().ok
    assert worker.weight.isinf().all()
    if allowed is not True:
        nn.init.constant_(learner.bias, torch.finfo(torch.float32).max)
        (outcome,) = fleet.update_weights().workers.values()
        assert outcome.status == "failed"
        assert "'bias'" in outcome.error
        assert "'weight'" not in outcome.error
    fleet.close()

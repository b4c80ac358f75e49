"""Names and shapes that are not the head's: refused by name, unless they are meant."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from tests.registry.helpers import file_of
from weightledger.registry import InvalidWeightsError, Registry
from weightledger.registry.weights.shapes import describe_dtypes, differences, shapes_in


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    with Registry.open(tmp_path / "r") as opened:
        opened.publish(nn.Linear(3, 2))
        yield opened


def state(registry: Registry) -> tuple[int, list[str]]:
    return len(registry.versions()), sorted(
        path.name for path in (Path(registry.location) / "snapshots").iterdir()
    )


def test_other_shapes_are_refused_by_name_and_nothing_is_written(registry: Registry) -> None:
    before = state(registry)
    with pytest.raises(
        InvalidWeightsError, match=r"v1(?s:.*)'weight' has the shape \(2, 4\) here, \(2, 3\) there"
    ):
        registry.publish(nn.Linear(4, 2))
    assert state(registry) == before
    made = registry.publish(nn.Linear(4, 2), restructure=True)
    assert (made.number, made.parent) == (2, 1)
    # From now on that is the head's.
    registry.publish(nn.Linear(4, 2))
    with pytest.raises(InvalidWeightsError, match="v3"):
        registry.publish(nn.Linear(3, 2))


def test_a_big_snapshot_of_another_shape_leaves_no_file_either(registry: Registry) -> None:
    before = state(registry)
    with pytest.raises(InvalidWeightsError, match="'weight'"):
        registry.publish(nn.Linear(3 << 10, 1 << 10))
    assert state(registry) == before


def test_every_missing_and_every_new_name_is_told(registry: Registry) -> None:
    with pytest.raises(InvalidWeightsError) as caught:
        registry.publish({"weight": torch.zeros(2, 3), "scale": torch.zeros(1)})
    assert "\n  'scale' is not there\n  'bias' is not here\n" in str(caught.value)


def test_averaged_weights_under_other_names_are_refused_and_under_the_same_ones_are_not(
    registry: Registry,
) -> None:
    averaged = torch.optim.swa_utils.AveragedModel(nn.Linear(3, 2))
    with pytest.raises(InvalidWeightsError, match=r"n_averaged(?s:.*)policy of their own"):
        registry.publish(averaged)
    assert registry.publish(averaged.module).number == 2
    with registry.for_policy("averaged") as own:
        assert own.publish(averaged).number == 1


def test_the_same_names_in_another_kind_or_wrapped_as_a_whole_are_no_other_structure(
    registry: Registry,
) -> None:
    module = nn.Linear(3, 2)
    for same in (module.state_dict(), TensorDict.from_module(module), nn.ModuleDict({"module": module})):
        registry.publish(same)
    assert registry.head().number == 4


def test_extra_state_may_change_its_parts(registry: Registry) -> None:
    class Counting(nn.Linear):
        state: dict[str, torch.Tensor]

        def get_extra_state(self) -> dict[str, torch.Tensor]:
            return self.state

    module = Counting(3, 2)
    module.state = {}
    registry.publish(module, restructure=True)
    module.state = {"seen": torch.zeros(3), "more": torch.zeros(1)}
    assert registry.publish(module).number == 3


def test_another_dtype_is_accepted_and_told(registry: Registry) -> None:
    made = registry.publish(nn.Linear(3, 2).to(torch.bfloat16))
    assert (registry.get(1).dtypes, made.dtypes, registry.head().dtypes) == (
        "float32",
        "bfloat16",
        "bfloat16",
    )
    assert registry.rollback(1).dtypes == registry.head().dtypes == "float32"
    mixed = registry.publish({"weight": torch.zeros(2, 3), "bias": torch.zeros(2, dtype=torch.int64)})
    assert mixed.dtypes == "1 float32, 1 int64"


def test_a_rollback_across_a_restructure_is_refused_unless_it_is_meant(registry: Registry) -> None:
    registry.publish(nn.Linear(4, 2), restructure=True)
    before = state(registry)
    for to in (None, 1):
        with pytest.raises(
            InvalidWeightsError, match=r"v1 (?s:.*)nothing was rolled back(?s:.*)'weight'.*\(2, 3\) here"
        ):
            registry.rollback(to)
    assert state(registry) == before
    # Nobody lives here that could not follow.
    assert registry.rollback(1, restructure=True).number == 3
    assert registry.rollback(1).number == 4


LIVING = """
import sys, torch
from weightledger.registry import Registry
from weightledger.updater.testing import FakeWorkers
registry = Registry.open(sys.argv[1])
wide = torch.nn.Linear(4, 2)
registry.publish(wide, restructure=True)
with FakeWorkers(wide, [torch.nn.Linear(4, 2)], registry=registry) as fleet:
    print(fleet.update_weights().version, flush=True)
    sys.stdin.read()
"""


def test_the_live_runs_that_could_not_follow_are_named(registry: Registry) -> None:
    living = subprocess.Popen(
        [sys.executable, "-c", LIVING, str(registry.location)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert living.stdout is not None and living.stdout.readline() == "2\n"
        with pytest.raises(
            InvalidWeightsError, match=rf"could not be followed by run \w+ \(process {living.pid} "
        ):
            registry.rollback(1)
        with pytest.warns(
            UserWarning, match=rf"v3, which restores v1.*cannot be followed by .*process {living.pid} "
        ):
            registry.rollback(1, restructure=True)
    finally:
        living.send_signal(signal.SIGKILL)
        living.communicate(timeout=60)


def test_a_head_whose_file_is_damaged_is_told_apart_by_its_fingerprint(registry: Registry) -> None:
    file_of(registry, 1).write_bytes(b"damaged")
    with pytest.raises(InvalidWeightsError, match="cannot be read, so that they are not named"):
        registry.publish(nn.Linear(4, 2))
    assert registry.publish(nn.Linear(3, 2)).number == 2


def test_of_many_differences_the_first_ten_are_told() -> None:
    text = differences({}, {f"t{at}": (1,) for at in range(30)})
    assert text.count("\n") == 11 and text.endswith("and 20 more")
    assert differences({"a": (1,)}, {"a": (1,)}) == ""
    assert (
        differences({"a": (1,)}, {"a": None})
        == "\n  'a' has the shape of a value that is no tensor here, (1,) there"
    )


@pytest.mark.parametrize(
    "header", [b"{", b"[]", b"3", b'{"a": 1}', b'{"a": {}}', b'{"__metadata__": []}', b"\xff", b"[" * 99999]
)
def test_a_header_that_is_none_is_one_kind_of_error(header: bytes) -> None:
    with pytest.raises(ValueError):
        shapes_in(header)


def test_dtypes_are_counted_when_there_are_several() -> None:
    assert describe_dtypes(["F32", "F32"]) == "float32"
    assert describe_dtypes(["I64", "F32", "F32"]) == "2 float32, 1 int64"
    assert describe_dtypes([]) == ""

"""Publishing: what a version says, what is refused, and that nothing else shares its memory."""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict  # type: ignore[import-untyped]
from torch import nn

from tests.registry.helpers import file_of, files, in_child, numbers, publish_many, value_of, weights
from weightledger.registry import ConflictError, InvalidWeightsError, NotFoundError, Registry
from weightledger.registry.store.local import LocalSnapshots, LocalWriter


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    with Registry.open(tmp_path / "r") as opened:
        yield opened


def test_a_version_says_everything_that_its_publish_said(registry: Registry) -> None:
    before = datetime.now(UTC)
    version = registry.publish(
        weights(1),
        step=7,
        metrics={"reward": 2.5},
        metadata={"lr": 1e-3},
        message="first",
        extra={"epoch": 1},
    )
    assert (version.policy, version.number, version.step, version.message) == ("default", 1, 7, "first")
    assert (version.parent, version.restores, version.state, version.stored) == (None, None, "stored", True)
    assert (dict(version.metrics), dict(version.metadata)) == ({"reward": 2.5}, {"lr": 1e-3})
    assert version.has_extra and version.nonfinite == () and version.size_bytes == 4 * 6
    assert version.digest.startswith("blake3:") and len(version.digest) == 71
    assert before <= version.created_at <= datetime.now(UTC)
    assert version.created_at.utcoffset() == timedelta(0)
    assert version.run == registry.locks.current().id
    assert registry.get(1) == version


def test_numbers_grow_by_one_and_each_parent_is_the_head_before(registry: Registry) -> None:
    versions = publish_many(registry, 3)
    assert [(version.number, version.parent) for version in versions] == [(1, None), (2, 1), (3, 2)]


def test_equal_content_is_a_new_version_on_the_same_file(registry: Registry) -> None:
    first, second = registry.publish(weights(1)), registry.publish(weights(1))
    assert (second.number, second.digest) == (2, first.digest)
    assert file_of(registry, 1) == file_of(registry, 2)
    assert len(files(registry)) == 1


def test_equal_content_is_shared_across_policies_and_kinds(registry: Registry) -> None:
    module = nn.Linear(2, 2)
    registry.publish(module)
    other = registry.for_policy("opponent")
    other.publish(TensorDict.from_module(module))
    assert len(files(registry)) == 1
    assert isinstance(other.load(), TensorDict) and not isinstance(registry.load(), TensorDict)
    other.close()


def test_a_digest_is_the_same_for_module_state_dict_and_tensordict(registry: Registry) -> None:
    module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    versions = [
        registry.publish(each) for each in (module, module.state_dict(), TensorDict.from_module(module))
    ]
    assert len({version.digest for version in versions}) == 1


def test_a_digest_is_the_same_in_another_process(registry: Registry) -> None:
    digest = registry.publish(weights(1)).digest
    assert in_child(_publish_elsewhere, registry.location, 1.0) == digest


def _publish_elsewhere(folder: Path, value: float) -> str:
    with Registry.open(folder) as registry:
        return registry.publish(weights(value)).digest


# ---------------------------------------------------------------------- compare-and-set


def test_a_publish_with_the_head_as_parent_is_accepted(registry: Registry) -> None:
    registry.publish(weights(1), parent=0)
    assert registry.publish(weights(2), parent=1).number == 2


@pytest.mark.parametrize("parent", [0, 1, 3, -1])
def test_a_publish_on_another_parent_changes_nothing(registry: Registry, parent: int) -> None:
    publish_many(registry, 2)
    before = files(registry)
    with pytest.raises(ConflictError, match=rf"'default'.*expected.*v{parent}.*the head is v2.*parent="):
        registry.publish(weights(3), parent=parent)
    assert numbers(registry.versions()) == [1, 2] and files(registry) == before
    assert registry.publish(weights(3)).number == 3


def test_a_parent_in_an_empty_policy_is_a_conflict(registry: Registry) -> None:
    with pytest.raises(ConflictError, match="empty"):
        registry.publish(weights(1), parent=1)


def test_a_parent_that_is_no_number_is_not_called_a_conflict(registry: Registry) -> None:
    head = registry.publish(weights(1))
    for wrong in (head, "1", 1.0, True):
        with pytest.raises(TypeError, match="parent"):
            registry.publish(weights(2), parent=wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="expected_head"):
        registry.rollback(1, expected_head=head)  # type: ignore[arg-type]
    assert numbers(registry.versions()) == [1]


# ---------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"deep.key": torch.empty(2, device="meta")}, "deep.key.*meta"),
        ({"s": torch.eye(2).to_sparse()}, "'?s'?.*sparse"),
        ({"c": torch.zeros(2, dtype=torch.complex128)}, "complex128"),
        ({"o": object()}, "object"),
        (torch.zeros(2), "tensor"),
        (None, "None"),
        ([torch.zeros(2)], "list"),
        (nn.LazyLinear(2), "weight.*initialised"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_weights_that_cannot_be_kept_are_refused_before_anything_is_written(
    registry: Registry, bad: Any, words: str
) -> None:
    """ST-09 and ST-10 among them: neither a row nor a file nor a policy is made."""
    with pytest.raises(InvalidWeightsError, match=f"(?s){words}"):
        registry.publish(bad)
    assert registry.versions() == [] and files(registry) == [] and registry.policies() == []


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"step": 1.5}, "step.*1.5"),
        ({"step": "7"}, "step.*'7'"),
        ({"step": 2**63}, "step.*9223372036854775808"),
        ({"step": -(2**63) - 1}, "step"),
        ({"metrics": {"reward": "high"}}, "reward.*'high'"),
        ({"metrics": {"reward": None}}, "reward.*None"),
        ({"metrics": {3: 1.0}}, "3"),
        ({"metrics": {"": 1.0}}, "metric name"),
        ({"metrics": {"x" * 256: 1.0}}, "metric name"),
        ({"metrics": {"a\nb": 1.0}}, "metric name"),
        ({"metadata": {"when": datetime(2026, 1, 1, tzinfo=UTC)}}, "when.*datetime"),
        ({"metadata": {1: "one"}}, "1"),
        ({"metadata": {"text": "\ud800"}}, "text.*surrogate"),
        ({"message": 7}, "message.*7"),
        ({"message": "\ud800"}, "message.*surrogate"),
        ({"extra": {"schedule": lambda: 0.1}}, "schedule"),
        ({"extra": {"m": torch.empty(1, device="meta")}}, "m.*meta"),
    ],
    ids=lambda value: re.sub(" at 0x[0-9a-f]+", "", str(value)),  # the same in every process that collects
)
def test_what_is_said_of_weights_is_checked_before_anything_is_written(
    registry: Registry, given: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidWeightsError, match=f"(?s){words}"):
        registry.publish(weights(1), **given)
    assert registry.versions() == [] and files(registry) == [] and registry.policies() == []
    assert registry.publish(weights(1)).number == 1, "no number was lost"


def test_numbers_are_kept_as_plain_ones(registry: Registry) -> None:
    version = registry.publish(
        weights(1),
        step=torch.tensor(10),  # type: ignore[arg-type]
        metrics={"a": np.float32(1.5), "b": torch.tensor(2.5), "c": np.int64(3)},
    )
    assert version.step == 10 and type(version.step) is int
    assert dict(version.metrics) == {"a": 1.5, "b": 2.5, "c": 3.0}
    assert {type(value) for value in version.metrics.values()} == {float}
    assert registry.publish(weights(2), step=2**63 - 1).step == 2**63 - 1


# ---------------------------------------------------------------------- what a version is of


def test_metadata_keeps_its_types(registry: Registry) -> None:
    """ST-13, with the neighbours bytes, tuples, big integers and infinities."""
    said = {
        "step": 3,
        "lr": 1e-3,
        "tag": None,
        'é\n"': "\0",
        "b": b"\xff",
        "t": (1, [2]),
        "big": 2**70,
        "inf": math.inf,
    }
    registry.publish(weights(1), metadata=said)
    read = dict(registry.get(1).metadata)
    assert read == said and list(read) == list(said)
    assert [type(value) for value in read.values()] == [type(value) for value in said.values()]


def test_huge_metadata_is_kept(registry: Registry) -> None:
    """ST-25: it belongs to the database."""
    registry.publish(weights(1), metadata={"cfg": "x" * (101 * 2**20)})
    assert len(registry.head().metadata["cfg"]) == 101 * 2**20


def test_a_value_among_the_weights_too_big_for_a_header_leaves_nothing(registry: Registry) -> None:
    """ST-25, inside of the file."""
    with pytest.raises(InvalidWeightsError, match="header"):
        registry.publish({"w": torch.zeros(1), "cfg": "x" * (101 * 2**20)})
    assert registry.versions() == [] and files(registry) == []


def test_metadata_and_metrics_are_those_of_the_call(registry: Registry) -> None:
    """RL-03: what the caller changes afterwards is not the version's."""
    metadata: dict[str, Any] = {"step": 10, "nested": [1]}
    metrics = {"reward": 1.0}
    version = registry.publish(weights(1), metadata=metadata, metrics=metrics)
    metadata["step"], metrics["reward"] = 13, 9.0
    metadata["nested"].append(2)
    for seen in (version, registry.get(1)):
        assert dict(seen.metadata) == {"step": 10, "nested": [1]} and dict(seen.metrics) == {"reward": 1.0}


class _SlowWriter(LocalWriter):
    reached = threading.Event()
    go_on = threading.Event()

    def write_at(self, offset: int, buffer: Any, *, lent: bool = False) -> None:
        type(self).reached.set()
        assert type(self).go_on.wait(60)
        super().write_at(offset, buffer, lent=lent)


class _SlowSnapshots(LocalSnapshots):
    """A disk that waits with every write until the test lets it go on."""

    def create(self, file_id: str) -> LocalWriter:
        made = super().create(file_id)
        made.__class__ = _SlowWriter
        return made


@pytest.mark.parametrize("size", [4, 1 << 19], ids=["small", "big"])
def test_a_version_has_the_weights_of_the_call_although_training_goes_on(tmp_path: Path, size: int) -> None:
    """RL-02: weights, step and extra are copied before the disk is asked."""
    _SlowWriter.reached, _SlowWriter.go_on = threading.Event(), threading.Event()
    registry = Registry.open(tmp_path / "r")
    registry.snapshots = _SlowSnapshots(tmp_path / "r" / "snapshots")
    live, momentum = weights(1, size), {"m": torch.ones(3)}
    step, metadata = torch.tensor(10), {"step": 10}
    writer = threading.Thread(
        target=registry.publish, args=(live,), kwargs={"step": step, "metadata": metadata, "extra": momentum}
    )
    writer.start()
    assert _SlowWriter.reached.wait(60)
    for tensor in (*live.values(), *momentum.values(), step):
        tensor.add_(1)
    metadata["step"] = 13
    _SlowWriter.go_on.set()
    writer.join(60)
    assert value_of(registry.load()) == 1
    assert torch.equal(registry.load_extra()["m"], torch.ones(3))
    assert (registry.head().step, registry.head().metadata["step"]) == (10, 10)
    registry.close()


def test_a_stored_version_does_not_follow_the_live_policy(registry: Registry) -> None:
    """TD-12 and TO-04: a state dict and `TensorDict.from_module` are references; versions are not."""
    module = nn.Linear(2, 2)
    before = module.weight.detach().clone()
    registry.publish(module.state_dict())
    view: Any = TensorDict.from_module(module)
    registry.publish(view.data)
    loaded = registry.load(1)
    module.weight.data.add_(1)
    assert torch.equal(loaded["weight"], before)
    assert torch.equal(registry.load(1)["weight"], before) and torch.equal(registry.load(2)["weight"], before)


def test_tensors_made_in_inference_mode_come_back_as_normal_ones(registry: Registry) -> None:
    """TO-12, with the neighbour that the whole publish runs in inference mode."""
    with torch.inference_mode():
        made = {"w": torch.zeros(2, 2)}
        registry.publish(made)
        registry.publish({"w": torch.ones(2)}, extra={"m": torch.ones(2)}, restructure=True)
        loaded_inside = registry.load(1)["w"]
    loaded_inside.add_(1)
    for tensor in (registry.load(1)["w"], registry.load(2)["w"], registry.load_extra(2)["m"]):
        assert not tensor.is_inference()
        tensor.add_(1)


def test_names_of_nonfinite_tensors_are_told(registry: Registry) -> None:
    version = registry.publish(
        {"ok": torch.zeros(2), "n": torch.tensor([math.nan]), "i": torch.tensor([math.inf])}
    )
    assert version.nonfinite == ("i", "n") and registry.get(1).nonfinite == ("i", "n")


def test_saving_what_was_loaded_changes_neither_the_old_version_nor_the_live_tensors(
    registry: Registry,
) -> None:
    """ST-19: loaded, changed, saved again; saved again unchanged; saved again with other metadata only."""
    registry.publish(weights(1))
    loaded = registry.load(1)
    bytes_before = file_of(registry, 1).read_bytes()
    for tensor in loaded.values():
        tensor.mul_(2)
    registry.publish(loaded)
    registry.publish(loaded)
    registry.publish(registry.load(1), metadata={"note": "again"})
    assert [value_of(registry.load(number)) for number in (1, 2, 3, 4)] == [1, 2, 2, 1]
    assert file_of(registry, 1).read_bytes() == bytes_before
    assert value_of(loaded) == 2


def test_a_later_smaller_version_has_no_key_of_an_earlier_one(registry: Registry) -> None:
    """TD-10: buffers and files of an attempt never mix into another one."""
    registry.publish({"a": torch.zeros(8), "d": torch.ones(8)})
    with pytest.raises(InvalidWeightsError):
        registry.publish({"d": torch.ones(8), "bad": torch.empty(1, device="meta")})
    registry.publish({"a": torch.full((3,), 2.0)}, restructure=True)
    assert list(registry.load()) == ["a"] and registry.load()["a"].tolist() == [2, 2, 2]


def test_a_run_that_comes_back_goes_on_counting(registry: Registry) -> None:
    """RL-11."""
    publish_many(registry, 5)
    number, head = in_child(_resume, registry.location)
    assert (head, number) == (5, 6)
    assert registry.get(6).run != registry.get(5).run


def _resume(folder: Path) -> tuple[int, int]:
    with Registry.open(folder) as registry:
        head = registry.head().number
        return registry.publish(weights(6)).number, head


def test_the_same_step_of_two_runs_is_two_versions(registry: Registry) -> None:
    """RL-20."""
    mine = registry.publish(weights(1), step=50)
    in_child(_publish_step, registry.location, 50)
    theirs = registry.head()
    assert (theirs.number, theirs.step) == (2, 50)
    assert theirs.digest != mine.digest and theirs.run != mine.run


def _publish_step(folder: Path, step: int) -> None:
    with Registry.open(folder) as registry:
        registry.publish(weights(2), step=step)


def test_non_persistent_buffers_are_in_a_tensordict_and_not_in_a_state_dict(registry: Registry) -> None:
    """RL-14: the two kinds differ as torch itself makes them differ; a plain attribute goes into `extra`."""

    class Normaliser(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))
            self.register_buffer("mean", torch.full((1,), 3.0), persistent=False)
            self.count = torch.full((1,), 5.0)

    module = Normaliser()
    registry.publish(module, extra={"mean": module.mean, "count": module.count})
    registry.publish(TensorDict.from_module(module), restructure=True)
    assert list(registry.load(1)) == ["weight"]
    assert sorted(registry.load(2).keys()) == ["mean", "weight"]
    back = registry.rollback(1, restructure=True)
    assert {name: value.item() for name, value in registry.load_extra(back).items()} == {
        "mean": 3.0,
        "count": 5.0,
    }


def test_policies_of_one_registry_count_for_themselves(registry: Registry) -> None:
    publish_many(registry, 2)
    with registry.for_policy("opponent") as opponent:
        assert opponent.publish(weights(9)).number == 1
        assert registry.policies() == opponent.policies() == ["default", "opponent"]
        assert opponent.uuid == registry.uuid
    assert numbers(registry.versions()) == [1, 2]


def test_a_version_of_another_policy_is_not_taken_for_one_of_this(registry: Registry) -> None:
    registry.publish(weights(1))
    with (
        registry.for_policy("opponent") as opponent,
        pytest.raises(NotFoundError, match=r"'default'.*'opponent'"),
    ):
        opponent.get(registry.head())

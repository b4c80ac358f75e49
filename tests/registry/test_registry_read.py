"""Looking versions up and reading them back; empty registries; damaged files."""

from __future__ import annotations

import json
import os
import struct
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tensordict import TensorDict  # type: ignore[import-untyped]
from torch import nn

from tests.registry.helpers import (
    extra_file_of,
    file_of,
    hold,
    in_child,
    numbers,
    publish_many,
    value_of,
    weights,
)
from weightledger.registry import CorruptionError, NotFoundError, Registry, StorageError


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    with Registry.open(tmp_path / "r") as opened:
        yield opened


# ---------------------------------------------------------------------- references


def test_a_version_is_found_by_number_alias_head_and_record(registry: Registry) -> None:
    versions = publish_many(registry, 3)
    registry.set_alias("good", 2)
    assert (
        registry.get(2)
        == registry.get("good")
        == registry.get(versions[1])
        == registry.get("v2")
        == versions[1]
    )
    assert registry.get("head") == registry.head() == versions[2]


@pytest.mark.parametrize(
    "call", ["head", "get", "load", "load_extra", "restore", "rollback", "target", "pin", "best"]
)
def test_an_empty_registry_says_so_and_nothing_hangs(registry: Registry, call: str) -> None:
    """RL-22."""
    calls: dict[str, Callable[[], Any]] = {
        "head": registry.head,
        "get": lambda: registry.get("head"),
        "load": registry.load,
        "load_extra": registry.load_extra,
        "restore": lambda: registry.restore("head", nn.Linear(1, 1)),
        "rollback": registry.rollback,
        "target": lambda: registry.target("w"),
        "pin": lambda: registry.pin("w", "head"),
        "best": lambda: registry.best("reward"),
    }
    with pytest.raises(NotFoundError, match=r"'default'"):
        calls[call]()
    assert registry.versions() == [] and registry.policies() == [] and registry.events() == []


def test_questions_about_nothing_are_answered_with_nothing(registry: Registry) -> None:
    assert (registry.pins(), registry.aliases(), registry.workers()) == ([], {}, [])
    assert (registry.holdings(), registry.history(), registry.verify()) == ([], [], [])
    assert registry.prune(keep_last=1) == []


@pytest.mark.parametrize("ref", [0, 99, -1, "99", "v99", "goood"])
def test_what_does_not_exist_is_not_found_and_what_exists_is_named(
    registry: Registry, ref: int | str
) -> None:
    """RL-22."""
    publish_many(registry, 5)
    registry.set_alias("good", 2)
    for call in (registry.get, registry.load, registry.rollback, registry.staleness):
        with pytest.raises(NotFoundError, match=rf"(?s){str(ref).removeprefix('v')}.*(1\.\.5|good|v1 to v5)"):
            call(ref)


@pytest.mark.parametrize("ref", [None, 1.0, True, b"head", [1]])
def test_what_cannot_name_a_version_is_a_type_error(registry: Registry, ref: Any) -> None:
    registry.publish(weights(1))
    with pytest.raises(TypeError, match="alias"):
        registry.get(ref)


def test_versions_come_oldest_first_and_a_limit_takes_the_newest(registry: Registry) -> None:
    publish_many(registry, 5)
    assert numbers(registry.versions()) == [1, 2, 3, 4, 5]
    assert numbers(registry.versions(limit=2)) == [4, 5]
    assert registry.versions(limit=0) == []
    with pytest.raises(ValueError, match="-1"):
        registry.versions(limit=-1)


def test_a_policy_without_versions_names_the_others(registry: Registry) -> None:
    registry.publish(weights(1))
    with (
        registry.for_policy("opponnet") as other,
        pytest.raises(NotFoundError, match=r"'opponnet'.*'default'"),
    ):
        other.head()


def test_pruned_weights_name_the_nearest_kept_versions(registry: Registry) -> None:
    publish_many(registry, 6)
    registry.set_alias("a", 2)
    registry.prune(keep_last=1)
    with pytest.raises(NotFoundError, match=r"v4.*pruned.*v2 and v5"):
        registry.load(4)
    assert registry.get(4).state == "pruned" and not registry.get(4).stored


def test_a_record_turns_into_json(registry: Registry) -> None:
    registry.publish(weights(1), metrics={"r": float("nan")}, metadata={"b": [1]})
    hold(registry, "w", 1)
    registry.pin("w", 1)
    for record in (registry.head(), registry.pins()[0], registry.events()[0]):
        assert json.loads(json.dumps(record.to_dict(), allow_nan=False))


# ---------------------------------------------------------------------- loading


def test_what_was_loaded_is_the_callers_own(registry: Registry) -> None:
    """TO-04: two loads share nothing, with each other or with the version."""
    registry.publish(weights(1))
    for tensor in registry.load().values():
        tensor.add_(1)
    assert value_of(registry.load()) == 1


def test_keys_come_back_in_the_order_of_the_state_dict(registry: Registry) -> None:
    """ST-26, with its `_metadata`."""
    state = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).state_dict()
    registry.publish(state)
    loaded = registry.load()
    assert list(loaded) == list(state)
    assert loaded._metadata == state._metadata  # type: ignore[attr-defined]


def test_versions_on_one_file_come_back_each_in_its_own_order_and_kind(registry: Registry) -> None:
    """ST-26's neighbour: the structure belongs to the version."""
    a, b = torch.zeros(1), torch.ones(2)
    registry.publish({"a": a, "b": b})
    registry.publish({"b": b, "a": a})
    registry.publish(TensorDict({"b": b, "a": a}, batch_size=[]))
    assert len({file_of(registry, number) for number in (1, 2, 3)}) == 1
    assert (list(registry.load(1)), list(registry.load(2))) == (["a", "b"], ["b", "a"])
    assert isinstance(registry.load(3), TensorDict)
    assert isinstance(registry.load(registry.rollback(3)), TensorDict)


def test_extra_state_comes_back_as_it_was(registry: Registry) -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([parameter])
    parameter.grad = torch.ones(2)
    optimizer.step()
    registry.publish(weights(1), extra={"optimizer": optimizer.state_dict(), "epoch": 3, "best": None})
    loaded = registry.load_extra()
    assert loaded["epoch"] == 3 and loaded["best"] is None
    assert list(loaded["optimizer"]["state"]) == [0], "an optimizer's keys are whole numbers"
    torch.optim.Adam([parameter]).load_state_dict(loaded["optimizer"])


def test_extra_state_is_restored_by_whoever_published_it_and_by_position(registry: Registry) -> None:
    """TO-11: an optimizer's state has positions, not names; the registry gives back exactly the state it was given.

    Whoever may reorder parameters publishes the names beside it, and they come back beside it.
    """
    a, b = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([a, b], lr=0.1, momentum=0.9)
    a.grad, b.grad = torch.ones(1), torch.full((1,), 5.0)
    optimizer.step()
    registry.publish(weights(1), extra={"names": ["a", "b"], "optimizer": optimizer.state_dict()})
    extra = registry.load_extra()
    momenta = [extra["optimizer"]["state"][at]["momentum_buffer"].item() for at in (0, 1)]
    assert dict(zip(extra["names"], momenta, strict=True)) == {"a": 1.0, "b": 5.0}


def test_a_version_without_extra_state_says_so(registry: Registry) -> None:
    registry.publish(weights(1))
    with pytest.raises(NotFoundError, match=r"v1.*'default'.*extra"):
        registry.load_extra(1)


def test_an_empty_extra_is_still_one(registry: Registry) -> None:
    registry.publish(weights(1), extra={})
    assert registry.head().has_extra and registry.load_extra() == {}


def test_an_export_is_read_by_safetensors(registry: Registry, tmp_path: Path) -> None:
    tied = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    tied[1].weight = tied[0].weight
    registry.publish(tied)
    path = registry.export("head", tmp_path / "out.safetensors")
    loaded = load_file(path)
    assert sorted(loaded) == ["0.weight", "1.weight"]
    assert torch.equal(loaded["1.weight"], tied.state_dict()["0.weight"])
    with pytest.raises(StorageError, match="missing-folder"):
        registry.export("head", tmp_path / "missing-folder" / "out.safetensors")


def test_hashes_of_single_tensors_tell_what_changed(registry: Registry) -> None:
    registry.publish({"a": torch.zeros(1), "b": torch.zeros(1)})
    registry.publish({"a": torch.zeros(1), "b": torch.ones(1)})
    before, after = registry.tensor_hashes(1), registry.tensor_hashes(2)
    assert before["a"] == after["a"] and before["b"] != after["b"]


# ---------------------------------------------------------------------- damage


def _cut(length: int) -> Callable[[Path], None]:
    return lambda path: os.truncate(path, length)


def _overwrite(offset: int, data: bytes) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        with path.open("r+b") as file:
            file.seek(offset, os.SEEK_END if offset < 0 else os.SEEK_SET)
            file.write(data)

    return damage


def _append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"\0\0")


def _duplicate_key(path: Path) -> None:
    whole = path.read_bytes()
    (length,) = struct.unpack("<Q", whole[:8])
    header = json.loads(whole[8 : 8 + length])
    entry = json.dumps(header["w"])
    text = whole[8 : 8 + length].rstrip()[:-1] + b',"w":' + entry.encode() + b"}"
    path.write_bytes(struct.pack("<Q", len(text)) + text + whole[8 + length :])


DAMAGE: dict[str, Callable[[Path], object]] = {
    "empty": _cut(0),
    "cut to 4": _cut(4),
    "cut to 8": _cut(8),
    "cut to 20": _cut(20),
    "last byte gone": lambda path: os.truncate(path, path.stat().st_size - 1),
    "two bytes more": _append,
    "header length 10**12": _overwrite(0, struct.pack("<Q", 10**12)),
    "header is no text": _overwrite(8, b"\xff\xff\xff"),
    "last bit flipped": _overwrite(-1, b"\x01"),
    "a name twice": _duplicate_key,
    "another file": lambda path: path.write_bytes(b"PK\x03\x04" * 300),
    "gone": lambda path: path.unlink(),
}


@pytest.mark.parametrize("size", [4, 2 << 20], ids=["small", "verified while it is read"])
@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_of_every_kind_is_one_corruption_error_that_names_version_and_file(
    registry: Registry, kind: str, size: int
) -> None:
    """ST-21, ST-22 and CK-01 (c); the other versions stay usable."""
    registry.publish(weights(1))
    registry.publish({"w": torch.zeros(size)}, restructure=True)
    path = file_of(registry, 2)
    DAMAGE[kind](path)
    target = {"w": torch.full((size,), 7.0)}
    for call in (registry.load, registry.payload, lambda ref: registry.restore(ref, target)):
        with pytest.raises(CorruptionError, match=r"(?s)v2.*default|default.*v2") as caught:
            call(2)
        assert str(path) in str(caught.value)
    assert (target["w"] == 7).all()
    assert [fault.versions for fault in registry.verify()] == [(2,)]
    assert path.exists() == (kind != "gone"), "finding damage deletes nothing"
    assert value_of(registry.load(1)) == 1
    assert value_of(registry.load(registry.rollback(restructure=True))) == 1


def test_damaged_extra_state_leaves_the_weights_usable(registry: Registry) -> None:
    registry.publish(weights(1), extra={"m": torch.zeros(4)})
    _overwrite(-1, b"\x01")(extra_file_of(registry, 1))
    with pytest.raises(CorruptionError, match="extra state of v1"):
        registry.load_extra()
    assert value_of(registry.load()) == 1


class Stateful(nn.Module):
    """Keeps what it is given."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        self.state = state


def test_a_module_keeps_no_memory_of_what_was_restored_into_it(registry: Registry) -> None:
    """What is read lies in the publisher's buffer, which the next publish writes over."""
    source, target = Stateful({"seen": torch.ones(3)}), Stateful({"seen": torch.zeros(3)})
    registry.publish(source)
    registry.publish(Stateful({"seen": torch.full((3,), 2.0)}))
    registry.restore(1, target)
    registry.publish(Stateful({"seen": torch.full((3,), 3.0)}))
    assert target.state["seen"].tolist() == [1, 1, 1]
    assert registry.load(2)["_extra_state"]["seen"].tolist() == [2, 2, 2]


def test_restores_and_publishes_of_many_threads_do_not_write_into_each_other(registry: Registry) -> None:
    size = 300_000
    for number in range(1, 5):
        registry.publish(weights(number, size))

    def restore(number: int) -> None:
        for _ in range(15):
            target = weights(-1, size)
            registry.restore(number, target)
            assert value_of(target) == number

    def publish(number: int) -> None:
        for step in range(10):
            registry.publish(weights(100 * number + step, size))

    with ThreadPoolExecutor(6) as threads:
        running = [threads.submit(restore, number) for number in range(1, 5)]
        running += [threads.submit(publish, number) for number in (1, 2)]
        for each in running:
            each.result(timeout=120)
    assert registry.verify() == []


def test_loaded_tensors_outlive_their_file(registry: Registry) -> None:
    """ST-20: another process cuts the file, then writes into it; what was loaded does not change or crash."""
    registry.publish(weights(1))
    loaded = registry.load()
    payload = registry.payload(1)
    path = file_of(registry, 1)
    in_child(os.truncate, path, 200)
    assert value_of(loaded) == 1 and payload.tensors()["w"].tolist() == [1] * 4
    in_child(path.write_bytes, b"\x09" * 4096)
    assert value_of(loaded) == 1 and payload.tensors()["w"].tolist() == [1] * 4


def test_a_file_that_may_not_be_read_is_a_storage_error_with_its_path(registry: Registry) -> None:
    registry.publish(weights(1))
    path = file_of(registry, 1)
    path.unlink()
    path.symlink_to(path.name)  # refused to everybody, root included
    with pytest.raises(StorageError, match=path.name):
        registry.load()


def test_publishing_needs_one_copy_of_the_weights_and_loading_no_more(tmp_path: Path) -> None:
    """ST-24: the isolation copy is the only one, with the neighbour of loading."""
    size = 200 << 20
    grown = in_child(_peak_growth, tmp_path / "r", size)
    assert grown["publish"] < 1.3 * size
    assert grown["again"] < 0.3 * size, "the buffer is used again"


def _peak_growth(folder: Path, size: int) -> dict[str, int]:
    import resource

    def peak() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    with Registry.open(folder) as registry:
        registry.publish(weights(1))
        live = {"w": torch.ones(size // 8), "v": torch.ones(size // 8)}
        start = peak()
        registry.publish(live, restructure=True)
        first = peak()
        live["w"].add_(1)
        registry.publish(live)
        return {"publish": first - start, "again": peak() - first}


def test_asking_imports_no_torch(registry: Registry) -> None:
    registry.publish(weights(1))
    registry.set_alias("a", 1)
    script = (
        "import sys; from weightledger.registry import Registry\n"
        f"r = Registry.open({str(registry.location)!r})\n"
        "r.head(), r.versions(), r.pin('w', 'a'), r.workers(), r.target('w'), r.rollback, r.prune(keep_last=1)\n"
        "r.publish\n"
        "assert 'torch' not in sys.modules and 'ray' not in sys.modules, 'imported'"
    )
    import subprocess

    subprocess.run([sys.executable, "-c", script], check=True, timeout=100)

"""Where the weights of a registry are, when they are not beside its record: noted once, and never mistaken."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.registry.helpers import weights
from tests.registry.store.buckets import BUCKET, S3, serving, use
from weightledger.registry import CorruptionError, Registry, StorageError
from weightledger.updater.testing import FakeWorkers

pytestmark = pytest.mark.folder


def value_of(registry: Registry) -> float:
    loaded = registry.load()
    assert isinstance(loaded, dict)
    return float(loaded["w"][0])


@pytest.fixture(scope="module")
def s3() -> Iterator[S3]:
    with serving() as endpoint:
        yield endpoint


def test_another_folder_is_noted_and_need_not_be_said_again(tmp_path: Path) -> None:
    with Registry.open(tmp_path / "r", snapshots=tmp_path / "disk2") as registry:
        registry.publish(weights(1.0))
    assert not (tmp_path / "r" / "snapshots").exists()
    assert len(list((tmp_path / "disk2").glob("*.safetensors"))) == 1
    with Registry.open(tmp_path / "r") as again:
        assert value_of(again) == 1.0 and again.verify() == []


def test_a_folder_inside_of_the_registry_moves_with_it(tmp_path: Path) -> None:
    with Registry.open(tmp_path / "r", snapshots=tmp_path / "r" / "weights") as registry:
        registry.publish(weights(1.0))
    shutil.move(tmp_path / "r", tmp_path / "moved")
    with Registry.open(tmp_path / "moved") as again:
        assert value_of(again) == 1.0


def test_two_registries_do_not_share_a_folder(tmp_path: Path) -> None:
    with Registry.open(tmp_path / "a", snapshots=tmp_path / "disk2") as first:
        with pytest.raises(StorageError, match=first.uuid):
            Registry.open(tmp_path / "b", snapshots=tmp_path / "disk2")
        first.publish(weights(1.0))


def test_what_has_weights_beside_it_does_not_lose_them_to_another_place(tmp_path: Path) -> None:
    with Registry.open(tmp_path / "r") as registry:
        registry.publish(weights(1.0))
    with pytest.raises(StorageError, match="no registry"):
        Registry.open(tmp_path / "r", snapshots=tmp_path / "elsewhere")
    assert not (tmp_path / "elsewhere").exists()
    with Registry.open(tmp_path / "r") as again:
        assert value_of(again) == 1.0


def test_a_place_that_was_moved_is_found_where_it_is_said_to_be_now(tmp_path: Path) -> None:
    with Registry.open(tmp_path / "r", snapshots=tmp_path / "disk2") as registry:
        registry.publish(weights(1.0))
    shutil.move(tmp_path / "disk2", tmp_path / "disk3")
    with pytest.raises(StorageError, match="mounted"):
        Registry.open(tmp_path / "r")
    with Registry.open(tmp_path / "r", snapshots=tmp_path / "disk3") as again:
        assert value_of(again) == 1.0


def test_an_export_never_replaces_a_file_of_another_place(tmp_path: Path) -> None:
    with Registry.open(tmp_path / "r", snapshots=tmp_path / "disk2") as registry:
        registry.publish({"w": torch.ones(4)})
        (stored,) = (tmp_path / "disk2").glob("*.safetensors")
        with pytest.raises(Exception, match="own files"):
            registry.export(1, stored)


def test_weights_in_a_bucket_are_published_rolled_back_compared_and_pruned(
    tmp_path: Path, s3: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, s3.endpoint)
    learner, worker = nn.Linear(2, 1), nn.Linear(2, 1)
    with (
        Registry.open(tmp_path / "r", snapshots=f"s3://{BUCKET}/cartpole") as registry,
        FakeWorkers(learner, [worker], registry=registry) as updater,
    ):
        for value in (1.0, 2.0, 3.0):
            nn.init.constant_(learner.weight, value)
            assert updater.update_weights().ok
        assert updater.rollback(1).ok
        for module in (learner, worker):
            assert torch.equal(module.weight, torch.full((1, 2), 1.0))
    assert not (tmp_path / "r" / "snapshots").exists()
    with Registry.open(tmp_path / "r", cache=tmp_path / "cache") as later:
        assert later.verify() == [] and later.head().restores == 1
        assert later.tensor_hashes(1) != later.tensor_hashes(2)
        loaded = later.load(2)
        assert isinstance(loaded, dict) and torch.equal(loaded["weight"], torch.full((1, 2), 2.0))
        assert [version.number for version in later.prune(keep_last=1)] == [2, 3]
        with pytest.raises(StorageError, match=later.uuid):
            Registry.open(tmp_path / "other", snapshots=f"s3://{BUCKET}/cartpole")


def test_a_rollback_to_what_is_gone_from_the_bucket_is_refused(
    tmp_path: Path, s3: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, s3.endpoint)
    with Registry.open(tmp_path / "r", snapshots=f"s3://{BUCKET}/gone") as registry:
        for value in (1.0, 2.0):
            registry.publish(weights(value))
        for uri in registry.snapshots.uris():
            if registry.head().digest.removeprefix("blake3:") not in uri:
                registry.snapshots.delete(uri)
        with pytest.raises(CorruptionError, match="v1"):
            registry.rollback(1)
        assert registry.head().number == 2

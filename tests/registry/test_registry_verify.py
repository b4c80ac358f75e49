"""Verifying: what is wrong with files is told, all of it, and nothing is changed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.registry.helpers import exit_code_of, extra_file_of, file_of, files, publish_many, weights
from weightledger.registry import NotFoundError, Registry
from weightledger.registry.records import Fault
from weightledger.registry.store.local import LocalWriter


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    with Registry.open(tmp_path / "r") as opened:
        yield opened


def test_a_healthy_registry_has_no_faults(registry: Registry) -> None:
    publish_many(registry, 3)
    registry.publish(weights(1), extra={"m": torch.ones(2)})
    registry.rollback(2)
    assert registry.verify() == [] and registry.verify(2) == []


def test_every_fault_is_told_with_its_kind_and_its_versions(registry: Registry) -> None:
    publish_many(registry, 4)
    registry.publish(weights(2), extra={"m": torch.ones(2)})
    paths = {number: file_of(registry, number) for number in (1, 2, 3)}
    paths[1].unlink()
    os.truncate(paths[2], 100)
    flipped = bytearray(paths[3].read_bytes())
    flipped[-1] ^= 1
    paths[3].write_bytes(flipped)
    with extra_file_of(registry, 5).open("ab") as file:
        file.write(b"tail")
    (Path(registry.location) / "snapshots" / "stray.safetensors").touch()
    (Path(registry.location) / "snapshots" / ".stray.tmp").touch()
    before = files(registry)
    found = {(fault.kind, fault.versions, fault.path) for fault in registry.verify()}
    assert found == {
        ("missing", (1,), paths[1].name),
        ("truncated", (2, 5), paths[2].name),
        ("corrupt", (3,), paths[3].name),
        ("corrupt", (5,), extra_file_of(registry, 5).name),
        ("stray", (), "stray.safetensors"),
        ("stray", (), "stray"),
    }
    assert all(fault.detail for fault in registry.verify())
    assert files(registry) == before and registry.get(1).stored, "nothing was changed"


def _die_before_the_row_is_stored(folder: Path) -> None:
    commit = LocalWriter.commit

    def die(writer: LocalWriter, name: str) -> str:
        commit(writer, name)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("unreachable")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalWriter, "commit", die)
        Registry.open(folder).publish(weights(2))


def test_a_file_of_a_dead_writer_is_a_stray_until_the_next_open(registry: Registry) -> None:
    """CK-01 (b), seen by a reader that was open before the writer died."""
    publish_many(registry, 1)
    assert exit_code_of(_die_before_the_row_is_stored, registry.location) == -signal.SIGKILL
    (fault,) = registry.verify()
    assert (fault.kind, fault.versions) == ("stray", ()) and "next open" in fault.detail
    assert registry.head().number == 1
    with Registry.open(registry.location) as after:
        assert after.verify() == [] and len(files(after)) == 1


def test_a_file_of_a_living_writer_is_no_stray(registry: Registry) -> None:
    """CK-01, neighbour: the file has its name, the row is not stored yet."""
    publish_many(registry, 1)
    found: list[Fault] = []
    commit = LocalWriter.commit

    def look(writer: LocalWriter, name: str) -> str:
        uri = commit(writer, name)
        found.extend(registry.verify())
        return uri

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalWriter, "commit", look)
        registry.publish(weights(2))
    assert found == [] and len(files(registry)) == 2


def test_one_version_is_verified_alone(registry: Registry) -> None:
    publish_many(registry, 2)
    file_of(registry, 1).unlink()
    assert registry.verify(2) == [] and [fault.kind for fault in registry.verify(1)] == ["missing"]


def test_a_file_that_cannot_be_opened_hides_no_other_fault(registry: Registry) -> None:
    publish_many(registry, 2)
    first, second = file_of(registry, 1), file_of(registry, 2)
    size = first.stat().st_size
    first.unlink()
    first.mkdir()
    second.unlink()
    faults = {fault.versions: fault.kind for fault in registry.verify()}
    assert faults[(2,)] == "missing" and (1,) in faults and size


def test_versions_that_cannot_be_verified_say_why(registry: Registry) -> None:
    publish_many(registry, 3)
    registry.prune(keep_last=1)
    with pytest.raises(NotFoundError, match=r"v1.*pruned"):
        registry.verify(1)
    with pytest.raises(NotFoundError, match="99"):
        registry.verify(99)


def test_files_of_another_policy_are_no_strays(registry: Registry) -> None:
    publish_many(registry, 1)
    with registry.for_policy("opponent") as opponent:
        opponent.publish(weights(2))
        assert opponent.verify() == registry.verify() == []

"""Going back to, or pinning at, a version whose file is gone or damaged: refused by name, and nothing is changed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.registry.damaging import run
from tests.registry.helpers import file_of, numbers, publish_many, weights
from weightledger.registry import CorruptionError, Registry, StorageError
from weightledger.updater.testing import FakeWorkers


def missing(path: Path) -> None:
    path.unlink()


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def zeroed(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


OF_ANOTHER_SIZE_OR_KIND = [missing, cut, a_pipe, a_folder]
HARMS = [*OF_ANOTHER_SIZE_OR_KIND, flipped, zeroed]
Harm = Callable[[Path], None]


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    with Registry.open(tmp_path / "r") as opened:
        publish_many(opened, 3)
        yield opened


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("to", [2, None])
def test_a_rollback_to_a_damaged_file_is_refused_and_the_head_stays(
    registry: Registry, harm: Harm, to: int | None
) -> None:
    harm(file_of(registry, 2))
    with pytest.raises((CorruptionError, StorageError), match=r"v2"):
        registry.rollback(to)
    assert numbers(registry.versions()) == [1, 2, 3] and registry.load()["w"][0] == 3
    assert registry.rollback(1).number == 4 and registry.load()["w"][0] == 1


@pytest.mark.parametrize("harm", HARMS)
def test_the_command_line_refuses_it_as_well(registry: Registry, harm: Harm) -> None:
    harm(file_of(registry, 2))
    ran = run("--registry", str(registry.location), "rollback", "--to", "2", "--reason", "bad")
    assert ran.code == 1 and "v2" in ran.err and "Traceback" not in ran.err
    assert registry.head().number == 3


@pytest.mark.parametrize("harm", HARMS)
def test_an_updater_refuses_it_and_neither_learner_nor_worker_is_touched(tmp_path: Path, harm: Harm) -> None:
    learner, worker = nn.Linear(2, 1), nn.Linear(2, 1)
    with Registry.open(tmp_path / "r") as registry:
        with FakeWorkers(learner, [nn.Linear(2, 1)], registry=registry) as earlier:
            for value in (1.0, 2.0):
                nn.init.constant_(learner.weight, value)
                assert earlier.update_weights().ok
        # A new driver, which has no bytes in memory.
        with FakeWorkers(learner, [worker], registry=registry, start="continue") as updater:
            assert updater.update_weights().ok
            harm(file_of(registry, 1))
            with pytest.raises((CorruptionError, StorageError), match="v1"):
                updater.rollback(1)
            for module in (learner, worker):
                assert torch.equal(module.weight, torch.full((1, 2), 2.0))
            assert registry.head().number == 2


@pytest.mark.parametrize("harm", OF_ANOTHER_SIZE_OR_KIND)
def test_bytes_that_are_still_in_memory_do_not_hide_that_the_file_is_gone(tmp_path: Path, harm: Harm) -> None:
    learner, worker = nn.Linear(2, 1), nn.Linear(2, 1)
    with (
        Registry.open(tmp_path / "r") as registry,
        FakeWorkers(learner, [worker], registry=registry) as updater,
    ):
        for value in (1.0, 2.0):
            nn.init.constant_(learner.weight, value)
            assert updater.update_weights().ok
        harm(file_of(registry, 1))
        with pytest.raises((CorruptionError, StorageError), match="v1"):
            updater.rollback(1)
        for module in (learner, worker):
            assert torch.equal(module.weight, torch.full((1, 2), 2.0))
        assert registry.head().number == 2


@pytest.mark.parametrize("harm", OF_ANOTHER_SIZE_OR_KIND)
def test_nobody_is_pinned_to_a_version_whose_file_is_gone(registry: Registry, harm: Harm) -> None:
    harm(file_of(registry, 2))
    with pytest.raises((CorruptionError, StorageError), match="v2"):
        registry.pin("w*", 2)
    assert registry.pins() == []


def test_a_head_that_moves_while_the_file_is_read_is_seen(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a default rollback goes back to is chosen again under the lock."""
    read = registry.read
    moved: list[int] = []

    def slow(*arguments: object) -> object:
        if not moved:
            with Registry.open(registry.location) as other:
                moved.append(other.publish(weights(7)).number)
        return read(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(registry, "read", slow)
    assert registry.rollback().restores == 3 and moved == [4]
    assert registry.load()["w"][0] == 3

"""A database that was deleted or replaced under an open registry, and a newest version whose state is damaged."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from weightledger.registry import CorruptionError, Registry, StorageError
from weightledger.updater.testing import FakeWorkers


def weights(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((4,), value)}


def opened(folder: Path) -> Registry:
    registry = Registry.open(folder)
    for value in (1.0, 2.0, 3.0):
        registry.publish(weights(value))
    return registry


def delete_folder(folder: Path) -> None:
    shutil.rmtree(folder)


def delete_database(folder: Path) -> None:
    for path in folder.glob("registry.db*"):
        path.unlink()


def replace_folder(folder: Path) -> None:
    shutil.rmtree(folder)
    with Registry.open(folder) as other:
        other.publish(weights(50.0))


CALLS: dict[str, Callable[[Registry], Any]] = {
    "publish": lambda registry: registry.publish(weights(9.0)),
    "rollback": lambda registry: registry.rollback(1),
    "pin": lambda registry: registry.pin("w*", 1),
    "set_alias": lambda registry: registry.set_alias("good", 1),
    "record_metrics": lambda registry: registry.record_metrics(1, reward=1.0),
    "prune": lambda registry: registry.prune(keep_last=1),
    "head": Registry.head,
    "load": Registry.load,
    "versions": Registry.versions,
    "workers": Registry.workers,
    "verify": Registry.verify,
}


@pytest.mark.parametrize("lose", [delete_folder, delete_database, replace_folder])
@pytest.mark.parametrize("call", CALLS)
def test_a_registry_whose_database_is_gone_says_so_and_writes_nowhere(
    tmp_path: Path, lose: Callable[[Path], None], call: str
) -> None:
    folder = tmp_path / "r"
    with opened(folder) as registry:
        lose(folder)
        before = sorted(str(path.relative_to(folder)) for path in folder.rglob("*.safetensors"))
        for _ in range(2):
            with pytest.raises(StorageError, match=r"(?s)registry\.db: expected the file.*found.*open"):
                CALLS[call](registry)
        assert sorted(str(path.relative_to(folder)) for path in folder.rglob("*.safetensors")) == before
        assert lose is not delete_folder or not (folder / "registry.db").exists()
    if lose is replace_folder:
        with Registry.open(folder) as other:
            assert [version.number for version in other.versions()] == [1]
            assert other.load()["w"].tolist() == [50.0] * 4 and other.verify() == []


def test_a_registry_opened_anew_works_where_another_folder_was_put(tmp_path: Path) -> None:
    registry = opened(tmp_path / "r")
    replace_folder(tmp_path / "r")
    registry.close()
    with Registry.open(tmp_path / "r") as anew:
        assert anew.publish(weights(51.0)).number == 2


@pytest.mark.parametrize("lose", [delete_folder, delete_database, replace_folder])
def test_a_thread_that_connects_later_is_refused_as_well(
    tmp_path: Path, lose: Callable[[Path], None]
) -> None:
    """Its connection is new, and would be one to the other file."""
    with opened(tmp_path / "r") as registry, registry.ledger.reading() as conn:
        registry.ledger.head(conn)
        lose(tmp_path / "r")
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(registry.publish, weights(9.0))
            with pytest.raises(StorageError, match=r"(?s)registry\.db: expected the file.*found.*open"):
                asked.result(timeout=60)


@pytest.mark.parametrize("state", ["garbage", "", "stoqed", "zz", b"\xff"])
def test_a_damaged_newest_version_is_named_and_no_older_one_taken_for_the_head(
    tmp_path: Path, state: Any
) -> None:
    with opened(tmp_path / "r") as registry:
        registry.publish(weights(4.0))
        with closing(sqlite3.connect(tmp_path / "r" / "registry.db", isolation_level=None)) as plain:
            plain.execute("PRAGMA ignore_check_constraints=ON")
            plain.execute("UPDATE versions SET state = ? WHERE number = 4", [state])
        for call in (registry.head, registry.load, lambda: registry.get("head"), registry.rollback):
            with pytest.raises(CorruptionError, match=r"(?s)registry\.db.*v4"):
                call()
        with pytest.raises(CorruptionError, match="v4"):
            registry.publish(weights(5.0))
        with closing(sqlite3.connect(tmp_path / "r" / "registry.db")) as plain:
            assert plain.execute("SELECT max(number) FROM versions").fetchone() == (4,)
        worker = nn.Linear(2, 1)
        before = worker.weight.detach().clone()
        with (
            pytest.raises(CorruptionError, match="v4"),
            FakeWorkers(None, [worker], registry=registry) as updater,
        ):
            updater.sync()
        assert torch.equal(worker.weight, before)
        assert registry.load(2)["w"].tolist() == [2.0] * 4


def test_a_status_with_a_damaged_newest_version_names_no_target(tmp_path: Path) -> None:
    with opened(tmp_path / "r") as registry:
        with FakeWorkers(
            None, [nn.Linear(2, 1)], registry=registry, locate=lambda worker: {"w": torch.zeros(4)}
        ):
            with closing(sqlite3.connect(tmp_path / "r" / "registry.db", isolation_level=None)) as plain:
                plain.execute("PRAGMA ignore_check_constraints=ON")
                plain.execute("UPDATE versions SET state = 'garbage' WHERE number = 3")
            (status,) = registry.workers()
        assert status.target is None and "v3" in status.damage


def test_a_version_whose_writer_died_is_no_damage(tmp_path: Path) -> None:
    with opened(tmp_path / "r") as registry:
        with closing(sqlite3.connect(tmp_path / "r" / "registry.db", isolation_level=None)) as plain:
            plain.execute("UPDATE versions SET state = 'lost' WHERE number = 3")
        assert registry.head().number == 2

"""Several nodes, each with a store of its own: one run of `tests.updater.clustering`, looked at from many sides."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import Any

import pytest

SECONDS = 240

pytestmark = [pytest.mark.long, pytest.mark.timeout(SECONDS + 60)]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the scenes saw. They compare record and truth themselves, at each step."""
    folder = tmp_path_factory.mktemp("nodes")
    child = subprocess.Popen(
        [sys.executable, "-m", "tests.updater.clustering", str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        told, _ = child.communicate(timeout=SECONDS)
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.communicate()
    assert child.returncode == 0, told[-5000:]
    found = json.loads((folder / "seen.json").read_text())
    assert isinstance(found, dict)
    return found


def test_workers_of_all_nodes_are_synced(seen: dict[str, Any]) -> None:
    assert seen["sync"] == ["synced"] * 6


def test_a_version_crosses_to_each_node_once_however_many_workers_it_has(seen: dict[str, Any]) -> None:
    """Two of the three nodes have two or three workers each, and the bytes lie on the first."""
    assert seen["nodes"] == [3, True]
    assert seen["sync places"] == 3
    # To each worker by itself it would be five times.
    assert 1.9 < seen["crossings"] < 2.7


def test_a_pin_holds_one_worker_of_a_node_and_not_its_neighbour(seen: dict[str, Any]) -> None:
    assert seen["pin"] == ["synced", "current", "synced", "synced", "synced", "synced"]
    assert seen["pin values"] == [2.0, 1.0, 2.0, 2.0, 2.0, 2.0]


def test_a_rollback_reaches_the_workers_of_all_nodes(seen: dict[str, Any]) -> None:
    assert seen["rollback"] == ["synced", "current", "synced", "synced", "synced", "synced"]
    assert seen["rollback values"] == [1.0] * 6


def test_no_store_of_any_node_keeps_old_versions(seen: dict[str, Any]) -> None:
    assert seen["kept"]


def test_the_loss_of_a_node_is_the_death_of_its_workers_and_of_no_other(seen: dict[str, Any]) -> None:
    assert seen["loss"][:3] == ["synced"] * 3
    # Until the cluster knows, all that can be said is that the connection broke.
    assert set(seen["loss"][3:5]) <= {"dead", "failed"}
    assert seen["loss seconds"] < 60
    assert seen["loss states"] == ["confirmed", "confirmed", "confirmed", "gone", "gone", "confirmed"]
    assert set(seen["loss held"]) <= {"lost", "unknown"}
    assert sorted(seen["loss open"]) == ["head-0", "one-0", "one-1", "roamer"]
    assert seen["loss kinds"][-1] == "worker_lost"
    assert seen["loss kinds"].count("worker_lost") == 1


def test_a_worker_that_ray_moves_to_another_node_is_a_new_life_and_gets_the_head(
    seen: dict[str, Any],
) -> None:
    assert seen["roamer"] == [30.0, True]


def test_workers_on_a_new_node_take_over_the_names_of_those_that_were_lost(seen: dict[str, Any]) -> None:
    assert seen["replaced"] == [[6, 7], ["synced"] * 6]
    assert seen["replaced places"] == 3

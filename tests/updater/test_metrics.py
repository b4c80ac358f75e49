"""What is told to Ray's metrics, on a real cluster: every number is compared with the registry's own answer."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
from ray.util import metrics

from tests.updater.actors import borrow, filled, learn, statuses, steer
from weightledger.updater.metrics import _instruments

pytestmark = pytest.mark.usefixtures("ray_cluster")

Key = tuple[str, ...]


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> dict[Key, float]:
    """Listen in on Ray's metrics: gauges keep the last value, counters the sum, a histogram its number of values."""
    seen: dict[Key, float] = {}

    def listen(kind: Any, method: str, note: Any) -> None:
        original = getattr(kind, method)

        def call(self: Any, value: float = 1.0, tags: dict[str, str] | None = None) -> None:
            original(self, value, tags)
            key = (self.info["name"], *(tags or {}).values())
            seen[key] = note(seen.get(key, 0.0), value)

        monkeypatch.setattr(kind, method, call)

    listen(metrics.Gauge, "set", lambda before, value: value)
    listen(metrics.Counter, "inc", lambda before, value: before + value)
    listen(metrics.Histogram, "observe", lambda before, value: before + 1)
    return seen


def test_head_versions_and_staleness_are_those_of_the_registry(
    tmp_path: Path, recorded: dict[Key, float]
) -> None:
    workers = borrow(2)
    updater, _ = steer(tmp_path, workers, policy="measured")
    with updater:
        learn(updater, 1.0)
        updater.pin(1, 1)
        learn(updater, 2.0)
        learn(updater, 3.0)
        assert recorded["weightledger_head_version", "measured"] == 3
        for status in updater.registry.workers():
            assert recorded["weightledger_worker_version", "measured", status.name] == status.held
            assert recorded["weightledger_worker_staleness", "measured", status.name] == status.staleness
        assert recorded["weightledger_worker_staleness", "measured", "w1"] == 2
        assert recorded["weightledger_sync_seconds", "measured"] == 4

        updater.rollback(1)
        assert recorded["weightledger_worker_staleness", "measured", "w1"] == 0  # v4 restores what it holds
        updater.pin(1, 3)
        assert math.isnan(recorded["weightledger_worker_staleness", "measured", "w1"])  # an abandoned branch

        updater.remove_worker(1)
        updater.update_weights()
        assert math.isnan(recorded["weightledger_worker_version", "measured", "w1"])


def test_failures_are_counted_by_status_and_leave_the_version_unknown(
    tmp_path: Path, recorded: dict[Key, float]
) -> None:
    workers = borrow(2)
    updater, _ = steer(tmp_path, workers, policy="failing")
    with updater:
        learn(updater, 1.0)
        workers[0].wait_for.remote(str(tmp_path / "gate"))
        updater.timeout = 0.3
        for value in (2.0, 3.0):
            assert statuses(learn(updater, value)) == ["timeout", "synced"]
        assert recorded["weightledger_sync_failures", "failing", "w0", "timeout"] == 2
        assert math.isnan(recorded["weightledger_worker_version", "failing", "w0"])
        assert ("weightledger_sync_failures", "failing", "w1", "timeout") not in recorded
        (tmp_path / "gate").touch()
        updater.timeout = 60.0
        learn(updater, math.nan)
        assert recorded["weightledger_sync_failures", "failing", "w1", "refused"] == 1


def test_bytes_are_counted_once_a_version_and_small_ones_not_at_all(
    tmp_path: Path, recorded: dict[Key, float]
) -> None:
    workers = borrow(2, width=20_000)
    updater, _ = steer(tmp_path, workers, policy="big")
    with updater:
        updater.policy_weights = filled(1.0, 20_000)
        learn(updater, 1.0)
        size = updater.registry.head().size_bytes
        assert size <= recorded["weightledger_put_bytes", "big"] <= 1.1 * size
        updater.sync()
        updater.update_weights()
        assert recorded["weightledger_put_bytes", "big"] <= 1.1 * size
    small, _ = steer(tmp_path, borrow(1), policy="small")
    with small:
        learn(small, 1.0)
        assert ("weightledger_put_bytes", "small") not in recorded


def test_nothing_is_told_twice(tmp_path: Path, recorded: dict[Key, float]) -> None:
    updater, _ = steer(tmp_path, borrow(2), policy="still")
    with updater:
        learn(updater, 1.0)
        recorded.clear()
        updater.update_weights()
        assert {key[0] for key in recorded} == {"weightledger_sync_seconds"}


def test_the_reference_page_tells_of_each_metric_and_its_tags() -> None:
    page = Path(__file__).parents[2] / "docs" / "reference" / "metrics.md"
    rows = re.findall(
        r"^\| `(\w+)` \| (\w+) \| [\w ]+ \| (.*?) \|", page.read_text(encoding="utf-8"), re.MULTILINE
    )
    told = {name: (kind, tuple(re.findall(r"`(\w+)`", tags))) for name, kind, tags in rows}
    made = {
        metric.info["name"]: (type(metric).__name__.lower(), tuple(metric.info["tag_keys"]))
        for metric in vars(_instruments()).values()
    }
    assert told == made

"""Arguments of the wrong kind are refused by name, before anything is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import date, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from tests.registry.helpers import numbers, publish_many, value_of, weights
from weightledger.registry import InUseError, InvalidWeightsError, NotFoundError, Registry

BEFORE_UTC = datetime.min.replace(tzinfo=timezone(timedelta(hours=5)))


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    with Registry.open(tmp_path / "r") as opened:
        publish_many(opened, 3)
        yield opened


@pytest.mark.parametrize("number", [0, -1, 99, 2**63, 2**70, "9" * 30])
def test_a_number_that_no_row_can_have_is_not_found(registry: Registry, number: int | str) -> None:
    with pytest.raises(NotFoundError, match=r"versions are 1\.\.3"):
        registry.get(number)


@pytest.mark.parametrize("key", ["metrics", "metadata"])
@pytest.mark.parametrize("value", ["x", 5, [("a", 1)]])
def test_what_is_no_mapping_is_refused(registry: Registry, key: str, value: Any) -> None:
    with pytest.raises(
        InvalidWeightsError, match=f"{key} must map names to .*, found {type(value).__name__}"
    ):
        registry.publish(weights(9), **{key: value})
    assert registry.head().number == 3


@pytest.mark.parametrize(
    ("limit", "error"), [(-1, ValueError), (1.5, TypeError), ("3", TypeError), (True, TypeError)]
)
def test_a_limit_is_a_whole_number(registry: Registry, limit: Any, error: type[Exception]) -> None:
    calls: list[Callable[..., object]] = [registry.versions, registry.history, registry.events]
    for call in calls:
        with pytest.raises(error, match="limit must"):
            call(limit=limit)


@pytest.mark.parametrize(
    ("moment", "error"),
    [("2026-01-01", TypeError), (date(2026, 1, 1), TypeError), (5, TypeError), (BEFORE_UTC, ValueError)],
)
def test_a_time_is_an_aware_datetime(registry: Registry, moment: Any, error: type[Exception]) -> None:
    for name, call in (("at", registry.holdings), ("since", registry.history), ("until", registry.events)):
        with pytest.raises(error, match=f"{name} must be a "):
            call(**{name: moment})


def test_events_take_every_name_of_a_version(registry: Registry) -> None:
    registry.set_alias("good", 2)
    expected = registry.events(version=2)
    assert [event.kind for event in expected] == ["publish", "alias"]
    assert registry.events(version="good") == registry.events(version=registry.get(2)) == expected
    with pytest.raises(NotFoundError, match="nope"):
        registry.events(version="nope")


@pytest.mark.parametrize("location", ["", "s3://bucket/runs", "mysql://user:secret@host/runs"])
def test_a_url_is_not_taken_for_a_folder(
    location: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"expected the path of a folder|must be a path, found str"):
        Registry.open(location)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["registry.db", "snapshots/x.safetensors", "locks/x"])
def test_an_export_never_replaces_the_registry(registry: Registry, name: str, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(registry.location)
    for folder in (Path(registry.location), tmp_path / "link"):
        with pytest.raises(InUseError, match="the registry's own files; nothing was written"):
            registry.export(1, folder / name)
    assert value_of(registry.load(1)) == 1
    assert registry.export(1, Path(registry.location) / "best.safetensors").exists()


def test_keep_best_by_a_metric_that_nobody_recorded_prunes_nothing(registry: Registry) -> None:
    for number in (1, 2, 3):
        registry.record_metrics(number, reward=4.0 - number)
    for dry_run in (True, False):
        with pytest.raises(
            NotFoundError, match=r"'rewrad'.*nothing was pruned; metrics that were recorded: reward"
        ):
            registry.prune(keep_best=("rewrad", 1), dry_run=dry_run)
    assert numbers(registry.prune(keep_best=("reward", 1))) == []
    registry.publish(weights(9), metrics={"reward": 0.0})
    assert numbers(registry.prune(keep_best=("reward", 1))) == [2]

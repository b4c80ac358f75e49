"""Scores: known late, never NaN, and which version they make the best."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.registry.helpers import publish_many, weights
from weightledger.registry import InvalidWeightsError, NotFoundError, Registry


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    with Registry.open(tmp_path / "r") as opened:
        yield opened


def publish_scores(registry: Registry, *scores: float | None) -> None:
    for value, score in enumerate(scores):
        registry.publish(weights(value), metrics={} if score is None else {"reward": score})


def test_scores_that_come_later_are_added(registry: Registry) -> None:
    registry.publish(weights(1), metrics={"loss": 0.5})
    version = registry.record_metrics(1, reward=3, **{"eval/length": np.float32(2.5)})
    assert (
        dict(version.metrics)
        == {"loss": 0.5, "reward": 3.0, "eval/length": 2.5}
        == dict(registry.head().metrics)
    )


def test_a_score_of_the_same_name_replaces_the_older(registry: Registry) -> None:
    publish_scores(registry, 1.0, 2.0)
    registry.record_metrics(1, reward=9.0)
    assert registry.best("reward").number == 1
    assert [dict(event.details) for event in registry.events(kind="metrics")] == [{"reward": 9.0}]


def test_nan_is_kept_as_nan_and_is_not_the_same_as_no_score(registry: Registry) -> None:
    """SQL-12, with the neighbours of both infinities."""
    registry.publish(
        weights(1), metrics={"nan": math.nan, "up": math.inf, "down": -math.inf, "np": np.float32(1.5)}
    )
    metrics = registry.head().metrics
    assert math.isnan(metrics["nan"]) and "other" not in metrics
    assert (metrics["up"], metrics["down"], metrics["np"]) == (math.inf, -math.inf, 1.5)
    registry.record_metrics(1, late=math.nan)
    assert math.isnan(registry.head().metrics["late"])
    assert registry.events(kind="metrics")[0].to_dict()["details"] == {"late": "nan"}


def test_nan_and_infinities_never_win(registry: Registry) -> None:
    """CK-15."""
    publish_scores(registry, math.nan, 1.0, 3.0, math.nan, 2.0, None, math.inf, -math.inf)
    assert registry.best("reward").number == 3
    assert registry.best("reward", "min").number == 2


@pytest.mark.parametrize("scores", [(math.nan, math.nan), (None,), (math.inf, -math.inf), ()])
def test_without_a_finite_score_there_is_no_best(
    registry: Registry, scores: tuple[float | None, ...]
) -> None:
    """CK-15."""
    publish_scores(registry, *scores)
    with pytest.raises(NotFoundError, match=r"finite 'reward'.*'default'"):
        registry.best("reward")


def test_zero_is_a_score(registry: Registry) -> None:
    """CK-16."""
    publish_scores(registry, 0.0, 0.0, 0.0)
    assert registry.best("reward").number == 3
    registry.publish(weights(9), metrics={"reward": 0.5})
    assert registry.best("reward").number == 4
    assert registry.best("reward", "min").number == 3


def test_of_equal_scores_the_newest_version_wins_however_often_one_asks(registry: Registry) -> None:
    """CK-16."""
    publish_scores(registry, 2.0, 5.0, 5.0, 1.0, 1.0)
    assert {registry.best("reward").number for _ in range(3)} == {3}
    assert registry.best("reward", "min").number == 5


def test_the_best_is_one_that_can_be_loaded(registry: Registry) -> None:
    publish_scores(registry, 9.0, 1.0, 2.0)
    registry.prune(keep_last=2)
    assert registry.best("reward").number == 3


def test_an_unknown_metric_names_those_that_were_recorded(registry: Registry) -> None:
    publish_scores(registry, 1.0)
    with pytest.raises(NotFoundError, match=r"'rewrad'.*reward"):
        registry.best("rewrad")


def test_a_mode_is_max_or_min(registry: Registry) -> None:
    with pytest.raises(ValueError, match=r"'max' or 'min'.*'best'"):
        registry.best("reward", "best")


@pytest.mark.parametrize("bad", ["high", None, b"1", [1.0], 10**400])
def test_what_is_no_number_is_refused_by_name_and_nothing_is_written(registry: Registry, bad: Any) -> None:
    publish_many(registry, 1)
    with pytest.raises(InvalidWeightsError, match="'reward'"):
        registry.record_metrics(1, ok=1.0, reward=bad)
    assert dict(registry.head().metrics) == {} and registry.events(kind="metrics") == []


def test_scores_of_nothing_are_refused(registry: Registry) -> None:
    publish_many(registry, 1)
    with pytest.raises(NotFoundError, match="99"):
        registry.record_metrics(99, reward=1.0)


def test_scores_of_pruned_versions_can_still_be_told(registry: Registry) -> None:
    publish_many(registry, 2)
    registry.prune(keep_last=1)
    assert dict(registry.record_metrics(1, reward=1.0).metrics) == {"reward": 1.0}

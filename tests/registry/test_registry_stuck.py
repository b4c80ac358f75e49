"""Weights that stay what they are while the step advances."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.registry.helpers import weights
from weightledger.registry import Registry


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    with Registry.open(tmp_path / "r") as opened:
        yield opened


def told(registry: Registry, value: float, step: int | None) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        registry.publish(weights(value), step=step)
    assert all(warning.filename == __file__ for warning in caught), "it points at whoever published"
    return [str(warning.message) for warning in caught]


def test_equal_content_at_rising_steps_is_told_once(registry: Registry) -> None:
    assert told(registry, 1, 10) == []
    (text,) = told(registry, 1, 20)
    assert "identical to v1 although the step advanced from 10 to 20" in text
    assert told(registry, 1, 30) == []
    assert [version.number for version in registry.versions()] == [1, 2, 3]
    # Of the next content that stays it is told again.
    assert told(registry, 2, 40) == []
    (text,) = told(registry, 2, 50)
    assert "identical to v4" in text


@pytest.mark.parametrize(("before", "after"), [(10, 10), (10, 5), (None, 10), (10, None), (None, None)])
def test_without_an_advance_equal_content_is_nothing_to_tell(
    registry: Registry, before: int | None, after: int | None
) -> None:
    assert told(registry, 1, before) == told(registry, 1, after) == []


def test_after_a_rollback_equal_content_is_what_was_asked_for(registry: Registry) -> None:
    told(registry, 1, 10)
    told(registry, 2, 20)
    registry.rollback(1)
    assert told(registry, 1, 30) == []


def test_other_policies_are_other_trainings(registry: Registry) -> None:
    told(registry, 1, 10)
    with registry.for_policy("opponent") as opponent:
        assert told(opponent, 1, 20) == []

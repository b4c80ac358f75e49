"""Going back: new numbers for old content, lineage, and what it says about how far behind a version is."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.registry.helpers import files, numbers, publish_many, value_of, weights
from weightledger.registry import ConflictError, InvalidWeightsError, NotFoundError, Registry


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    with Registry.open(tmp_path / "r") as opened:
        yield opened


def test_a_rollback_is_a_new_version_with_the_old_content(registry: Registry) -> None:
    versions = publish_many(registry, 3)
    back = registry.rollback(1, reason="reward fell")
    assert (back.number, back.parent, back.restores, back.message) == (4, 1, 1, "reward fell")
    assert (back.digest, back.stored, back.size_bytes) == (versions[0].digest, True, versions[0].size_bytes)
    assert registry.head() == back and value_of(registry.load()) == 1
    assert len(files(registry)) == 3, "no byte was written"


def test_the_publish_after_a_rollback_descends_from_it(registry: Registry) -> None:
    publish_many(registry, 3)
    registry.rollback(1)
    after = registry.publish(weights(9))
    assert (after.number, after.parent) == (5, 4)


def test_a_rollback_keeps_step_structure_and_extra_of_what_it_restores(registry: Registry) -> None:
    registry.publish(weights(1), step=100, extra={"epoch": 1})
    registry.publish(weights(2), step=200, extra={"epoch": 2})
    back = registry.rollback()
    assert (back.step, back.has_extra) == (100, True) and registry.load_extra() == {"epoch": 1}


def test_by_default_a_rollback_goes_to_the_nearest_other_content(registry: Registry) -> None:
    for value in (1, 2, 3, 3, 3):
        registry.publish(weights(value))
    assert registry.rollback().restores == 2


def test_by_default_a_rollback_goes_behind_all_that_is_not_finite(registry: Registry) -> None:
    """RL-05: NaN, then infinity; both are stored and flagged, and neither is worth going back to."""
    for value in (1, 2, math.nan, math.inf):
        registry.publish(weights(value))
    assert [version.nonfinite for version in registry.versions()] == [(), (), ("b", "w"), ("b", "w")]
    assert registry.rollback().restores == 2


def test_where_nothing_is_finite_a_rollback_goes_to_the_nearest_other_content(registry: Registry) -> None:
    """RL-05, neighbour: a mask that holds -inf on purpose is in every version."""
    for value in (1, 2, 3):
        registry.publish({**weights(value), "mask": torch.tensor([0.0, -math.inf])})
    assert registry.rollback().restores == 2


def test_a_second_rollback_goes_further_back(registry: Registry) -> None:
    publish_many(registry, 4)
    assert [registry.rollback().restores for _ in range(3)] == [3, 2, 1]
    with pytest.raises(NotFoundError, match=r"v7.*'default'"):
        registry.rollback()


def test_a_rollback_never_returns_to_an_abandoned_branch_by_itself(registry: Registry) -> None:
    publish_many(registry, 5)
    registry.rollback(2)  # v6; v3 to v5 are abandoned
    registry.publish(weights(7))
    assert registry.rollback().restores in (2, 6)
    assert value_of(registry.load()) == 2
    assert registry.rollback().restores == 1


def test_an_abandoned_version_can_be_restored_by_name(registry: Registry) -> None:
    publish_many(registry, 3)
    registry.rollback(1)
    back = registry.rollback(3)
    assert (back.number, back.restores, value_of(registry.load())) == (5, 3, 3)


def test_a_rollback_of_a_rollback_restores_its_content(registry: Registry) -> None:
    publish_many(registry, 2)
    first = registry.rollback(1)
    second = registry.rollback(2)
    third = registry.rollback(first)
    assert (third.restores, third.parent, value_of(registry.load())) == (first.number, first.number, 1)
    assert numbers(registry.versions()) == [1, 2, 3, 4, 5] and second.number == 4


def test_a_rollback_with_one_version_only_says_that_there_is_nothing_to_go_back_to(
    registry: Registry,
) -> None:
    """RL-22."""
    registry.publish(weights(1))
    with pytest.raises(NotFoundError, match=r"nothing to roll back to.*v1"):
        registry.rollback()
    with pytest.raises(NotFoundError, match=r"99.*1\.\.1"):
        registry.rollback(99)
    assert numbers(registry.versions()) == [1]


def test_a_rollback_skips_pruned_versions(registry: Registry) -> None:
    publish_many(registry, 5)
    registry.set_alias("keep", 2)
    registry.prune(keep_last=1)
    with pytest.raises(NotFoundError, match=r"v3.*pruned.*v2 and v4"):
        registry.rollback(3)
    assert registry.rollback().restores == 4
    assert registry.rollback().restores == 2


def test_a_rollback_on_another_head_than_expected_changes_nothing(registry: Registry) -> None:
    publish_many(registry, 2)
    with pytest.raises(ConflictError, match=r"'default'.*v1.*v2"):
        registry.rollback(1, expected_head=1)
    assert numbers(registry.versions()) == [1, 2]
    assert registry.rollback(1, expected_head=2).number == 3


def test_compare_and_set_sees_a_rollback(registry: Registry) -> None:
    publish_many(registry, 2)
    registry.rollback(1)
    with pytest.raises(ConflictError, match=r"v2.*v3"):
        registry.publish(weights(9), parent=2)
    assert registry.publish(weights(9), parent=3).number == 4


def test_a_reason_that_no_database_keeps_is_refused(registry: Registry) -> None:
    publish_many(registry, 2)
    with pytest.raises(InvalidWeightsError, match="reason"):
        registry.rollback(1, reason="\ud800")
    assert numbers(registry.versions()) == [1, 2]


def test_every_step_of_the_story_is_an_event(registry: Registry) -> None:
    publish_many(registry, 2)
    registry.rollback(1, reason="worse")
    (event,) = registry.events(kind="rollback")
    assert (event.version, event.reason, event.run) == (3, "worse", registry.locks.current().id)
    assert event.user == registry.locks.current().user and event.at.tzinfo is not None
    assert dict(event.details) == {"restores": 1, "from": 2}


# ---------------------------------------------------------------------- staleness


def test_staleness_counts_publishes_since_a_version_was_head(registry: Registry) -> None:
    publish_many(registry, 4)
    assert [registry.staleness(number) for number in (1, 2, 3, 4)] == [3, 2, 1, 0]


def test_rollbacks_count_nothing_and_abandoned_branches_have_no_staleness(registry: Registry) -> None:
    publish_many(registry, 4)
    back = registry.rollback(2)
    assert [registry.staleness(number) for number in (1, 2, 3, 4, back.number)] == [1, 0, None, None, 0]
    registry.publish(weights(9))
    assert [registry.staleness(number) for number in (1, 2, 3, back.number, 6)] == [2, 1, None, 1, 0]


def test_staleness_goes_by_content_not_by_number(registry: Registry) -> None:
    registry.publish(weights(1))
    registry.publish(weights(2))
    registry.publish(weights(1))  # v3 has the content of v1
    registry.publish(weights(3))
    assert registry.staleness(1) == registry.staleness(3) == 1
    assert registry.staleness(2) == 2


def test_abandoned_content_that_comes_back_is_no_longer_stale(registry: Registry) -> None:
    publish_many(registry, 3)
    registry.rollback(1)
    assert registry.staleness(3) is None
    registry.publish(weights(3))
    assert registry.staleness(3) == 0

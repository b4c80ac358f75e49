"""The lineage of a head, against a walk from parent to parent."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightledger.registry.log import lineage


def log_of(choices: list[int | None]) -> tuple[dict[int, int | None], dict[int, int]]:
    """Build a log: each choice is a publish (None) or a rollback to one of the versions before."""
    parents: dict[int, int | None] = {}
    rollbacks = {}
    for number, choice in enumerate(choices, start=1):
        if choice is None or number == 1:
            parents[number] = number - 1 or None
        else:
            parents[number] = rollbacks[number] = choice % (number - 1) + 1
    return parents, rollbacks


def rooted(parents: dict[int, int | None], roots: set[int]) -> dict[int, int | None]:
    """Let some publishes have no parent."""
    return {number: None if number in roots else parent for number, parent in parents.items()}


def walk(parents: dict[int, int | None], head: int) -> set[int]:
    found, at = set(), head
    while at is not None:
        found.add(at)
        at = parents[at]
    return found


@given(st.lists(st.none() | st.integers(0, 50), min_size=1, max_size=40), st.data())
def test_the_ranges_hold_exactly_what_a_walk_over_parents_finds(
    choices: list[int | None], data: st.DataObject
) -> None:
    parents, rollbacks = log_of(choices)
    head = data.draw(st.integers(1, len(choices)))
    ranges = lineage.ranges(head, rollbacks)
    on_lineage = walk(parents, head)
    assert {number for number in range(len(choices) + 2) if lineage.contains(ranges, number)} == on_lineage
    assert sum(last - first + 1 for first, last in ranges) == len(on_lineage)


@given(st.lists(st.none() | st.integers(0, 50), min_size=1, max_size=40), st.data())
def test_a_version_without_a_parent_ends_the_lineage(choices: list[int | None], data: st.DataObject) -> None:
    parents, rollbacks = log_of(choices)
    publishes = sorted(parents.keys() - rollbacks.keys())
    roots = data.draw(st.sets(st.sampled_from(publishes)))
    head = data.draw(st.integers(1, len(choices)))
    ranges = lineage.ranges(head, rollbacks, roots)
    on_lineage = walk(rooted(parents, roots), head)
    assert {number for number in range(len(choices) + 2) if lineage.contains(ranges, number)} == on_lineage


def test_a_new_line_abandons_what_was_before_and_a_rollback_behind_it_takes_that_back_in() -> None:
    assert lineage.ranges(28, {16: 10}, {1, 27}) == ((27, 28),)
    assert lineage.ranges(29, {16: 10, 29: 26}, {1, 27}) == ((29, 29), (16, 26), (1, 10))


@given(st.lists(st.none() | st.integers(0, 50), min_size=1, max_size=40))
def test_ranges_are_newest_first_and_apart_and_reach_the_first_version(choices: list[int | None]) -> None:
    _, rollbacks = log_of(choices)
    ranges = lineage.ranges(len(choices), rollbacks)
    assert ranges[0][1] == len(choices)
    assert ranges[-1][0] == 1
    assert all(first <= last for first, last in ranges)
    assert all(later[0] > earlier[1] for later, earlier in itertools.pairwise(ranges))


@given(st.lists(st.none() | st.integers(0, 50), min_size=1, max_size=40), st.data())
def test_a_rollbacks_lineage_follows_from_any_lineage_that_its_parent_lies_on(
    choices: list[int | None], data: st.DataObject
) -> None:
    _, rollbacks = log_of(choices)
    known = lineage.ranges(data.draw(st.integers(1, len(choices))), rollbacks)
    number, parent = len(choices) + 1, data.draw(st.integers(1, len(choices)))
    found = lineage.after_rollback(known, number, parent)
    assert (found is None) == (not lineage.contains(known, parent))
    assert found is None or found == lineage.ranges(number, rollbacks | {number: parent})


def test_a_rollback_leaves_out_what_it_abandoned() -> None:
    ranges = lineage.ranges(17, {16: 10})
    assert ranges == ((16, 17), (1, 10))
    assert not any(lineage.contains(ranges, number) for number in range(11, 16))


def test_a_rollback_onto_an_abandoned_branch_takes_that_branch_back_in() -> None:
    assert lineage.ranges(6, {4: 1, 6: 3}) == ((6, 6), (1, 3))


def test_rollbacks_newer_than_the_head_do_not_count() -> None:
    assert lineage.ranges(5, {6: 2, 9: 1}) == ((1, 5),)


def test_an_empty_policy_has_no_lineage() -> None:
    assert lineage.ranges(0, {}) == ()
    assert not lineage.contains((), 1)


@pytest.mark.parametrize("parent", [0, 3, 4])
def test_a_rollback_to_something_that_is_not_older_is_refused(parent: int) -> None:
    with pytest.raises(ValueError, match="v3"):
        lineage.ranges(4, {3: parent})

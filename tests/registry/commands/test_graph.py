"""The lineage graph: which lane a version stands in, and where abandoned branches end."""

from __future__ import annotations

from collections.abc import Set

from hypothesis import given
from hypothesis import strategies as st

from weightledger.registry.commands.graph import draw, lineage


def drawn(parents: dict[int, int | None], pruned: Set[int] = frozenset(), **options: int) -> list[str]:
    newest_first = sorted(parents.items(), reverse=True)
    rows = draw([(number, parent, number not in pruned) for number, parent in newest_first], **options)
    return [
        f"{row.lanes} v{row.number}" + (f" from v{row.named_parent}" if row.named_parent is not None else "")
        for row in rows
    ]


def chain(last: int, **jumps: int) -> dict[int, int | None]:
    """Versions 1 to `last`, each the child of the one before, but for `v5=2`: version 5 continues from 2."""
    parents: dict[int, int | None] = {number: number - 1 for number in range(2, last + 1)}
    parents[1] = None
    return parents | {int(name[1:]): parent for name, parent in jumps.items()}


def test_a_straight_line_of_publishes_is_one_lane() -> None:
    assert drawn(chain(3)) == ["● v3", "● v2", "● v1"]


def test_a_rollback_turns_the_versions_after_its_target_into_an_abandoned_branch() -> None:
    assert drawn(chain(7, v6=3)) == ["● v7", "● v6", "│ ○ v5", "│ ○ v4", "●─╯ v3", "● v2", "● v1"]


def test_pruned_versions_are_told_apart_on_the_lineage_and_beside_it() -> None:
    assert drawn(chain(5, v5=2), {1, 3}) == ["● v5", "│ ○ v4", "│ · v3", "●─╯ v2", "· v1"]


def test_two_rollbacks_to_the_same_version_give_two_branches_that_meet_there() -> None:
    assert drawn(chain(6, v4=2, v6=2)) == ["● v6", "│ ○ v5", "│ ○ v4", "│ │ ○ v3", "●─┴─╯ v2", "● v1"]


def test_a_rollback_into_an_abandoned_branch_takes_the_lineage_with_it() -> None:
    """v5 goes back to 2, v6 goes forward again to 4: now v5 is the abandoned one."""
    assert drawn(chain(6, v5=2, v6=4)) == ["● v6", "│ ○ v5", "● │ v4", "● │ v3", "●─╯ v2", "● v1"]


def test_a_line_that_only_passes_by_is_crossed_and_not_joined() -> None:
    # v7 and v4 meet at 3 while v6's lane, between them, goes on to 2.
    parents = {1: None, 2: 1, 3: 2, 4: 3, 5: 3, 6: 2, 7: 3}
    assert drawn(parents) == ["● v7", "│ ○ v6", "│ │ ○ v5", "│ │ │ ○ v4", "●─┼─┴─╯ v3", "●─╯ v2", "● v1"]


def test_a_lane_whose_versions_are_not_shown_stays_open_to_the_bottom() -> None:
    newest = {number: parent for number, parent in chain(7, v6=2).items() if number >= 4}
    assert drawn(newest) == ["● v7", "● v6", "│ ○ v5", "│ ○ v4"]


def test_a_policy_that_begins_anew_has_two_roots() -> None:
    assert drawn({1: None, 2: 1, 3: None}) == ["● v3", "  ○ v2", "  ○ v1"]


def test_what_a_new_line_abandons_keeps_its_own_branches() -> None:
    parents = chain(8, v6=3) | {8: None}
    assert drawn(parents) == [
        "● v8",
        "  ○ v7",
        "  ○ v6",
        "  │ ○ v5",
        "  │ ○ v4",
        "  ○─╯ v3",
        "  ○ v2",
        "  ○ v1",
    ]
    assert drawn(parents, max_lanes=2) == [
        "● v8",
        "  ○ v7",
        "  ○ v6 from v3",
        "  ○ v5",
        "  ○ v4",
        "  ○ v3",
        "  ○ v2",
        "  ○ v1",
    ]


def test_with_many_rollbacks_the_last_lane_is_reused_and_names_the_parents_it_does_not_reach() -> None:
    parents = chain(11, v3=1, v5=1, v7=1, v9=1, v11=1)
    rows = drawn(parents, max_lanes=3)
    assert rows == [
        "● v11",
        "│ ○ v10",
        "│ ○ v9",
        "│ │ ○ v8",
        "│ │ ○ v7 from v1",
        "│ │ ○ v6",
        "│ │ ○ v5 from v1",
        "│ │ ○ v4",
        "│ │ ○ v3 from v1",
        "│ │ ○ v2",
        "●─┴─╯ v1",
    ]


def test_no_versions_are_no_rows() -> None:
    assert draw([]) == []
    assert lineage({}) == set()


histories = st.lists(st.integers(min_value=0, max_value=10**6), min_size=1, max_size=60).map(
    lambda seeds: {
        # Each version continues from the one before it, or, as a rollback does, from any earlier one.
        number: None if number == 1 else (number - 1 if seed % 3 else 1 + seed % (number - 1))
        for number, seed in enumerate(seeds, 1)
    }
)


@given(histories, st.integers(min_value=2, max_value=9))
def test_the_lineage_is_the_first_lane_and_no_row_is_wider_than_allowed(
    parents: dict[int, int | None], max_lanes: int
) -> None:
    rows = draw(
        [(number, parents[number], True) for number in sorted(parents, reverse=True)], max_lanes=max_lanes
    )
    assert [row.number for row in rows] == sorted(parents, reverse=True)

    ancestors, number = set(), max(parents)
    while number is not None:
        ancestors.add(number)
        number = parents[number]
    for row in rows:
        assert len(row.lanes) <= 2 * max_lanes - 1
        assert row.on_lineage == (row.number in ancestors) == row.lanes.startswith("●")
        assert row.lanes.count("●") + row.lanes.count("○") == 1


@given(histories)
def test_every_parent_is_reached_by_a_line_or_named(parents: dict[int, int | None]) -> None:
    """Follow the drawing down from each version: the line leads to the parent, unless the row names it."""
    rows = draw([(number, parents[number], True) for number in sorted(parents, reverse=True)])
    for index, row in enumerate(rows):
        parent = parents[row.number]
        if row.named_parent is not None:
            assert row.named_parent == parent
            continue
        if parent is None:
            continue
        column = max(row.lanes.find("●"), row.lanes.find("○"))
        for below in rows[index + 1 :]:
            symbol = below.lanes[column]
            if symbol in "●○":
                assert below.number == parent
                break
            if symbol in "╯┴":
                assert below.number == parent
                break
            assert symbol in "│┼"

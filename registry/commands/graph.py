"""Draw the lineage of a policy's versions as a graph of lanes, one row a version, newest first.

Rules
- Lane 0 is the head's lineage: whatever stands further right is an abandoned branch. It ends where a line begins.
- A lane waits for the parent of the version drawn last in it. Lanes that wait for the same version meet there.
- The number of lanes is bounded. In the last one only a direct predecessor continues the line; any other parent is
  named beside the version instead (`GraphRow.named_parent`), so that a hundred rollbacks stay readable.

    ●    v17
    ●    v16  restores v10, so this lane leads there
    │ ○  v15  abandoned
    │ ·  v11  abandoned, its weights pruned
    ●─╯  v10

Pure: numbers in, text out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MAX_LANES = 8


@dataclass(frozen=True)
class GraphRow:
    """One version's row."""

    number: int
    lanes: str
    """The drawing left of the version, without trailing blanks."""
    on_lineage: bool
    """Whether the newest version descends from it, or is it."""
    named_parent: int | None
    """Set where no line leads to the parent, so that the row has to name it."""


def lineage(parents: Mapping[int, int | None]) -> set[int]:
    """Return the newest version and all its ancestors, as far as `parents` (version → parent) reaches."""
    found: set[int] = set()
    number = max(parents, default=None)
    while number is not None and number in parents and number not in found:
        found.add(number)
        number = parents[number]
    return found


def draw(versions: Sequence[tuple[int, int | None, bool]], *, max_lanes: int = MAX_LANES) -> list[GraphRow]:
    """Draw versions given as (number, parent, whether it is stored), newest first.

    Parents that are not among the versions (older than what is shown) leave their lane open to the bottom.

    Args:
        versions: In falling order of their numbers.
        max_lanes: Lanes drawn at most, at least 2.

    Returns:
        One row for each version, in the same order.
    """
    on_lineage = lineage({number: parent for number, parent, _ in versions})
    waiting: list[int | None] = []
    rows = []
    for index, (number, parent, stored) in enumerate(versions):
        meeting = [lane for lane, wanted in enumerate(waiting) if wanted == number]
        if not meeting:
            meeting = [_free_lane(waiting, first=0 if number in on_lineage else 1)]
        own, last = meeting[0], meeting[-1]
        symbol = "·" if not stored else "●" if number in on_lineage else "○"
        lanes = _row(waiting, own, last, meeting, symbol)
        for lane in meeting:
            waiting[lane] = None

        following = versions[index + 1][0] if index + 1 < len(versions) else None
        cut = own == max_lanes - 1 and parent is not None and parent != following
        waiting[own] = None if cut else parent
        while waiting and waiting[-1] is None:
            waiting.pop()
        rows.append(GraphRow(number, lanes, number in on_lineage, parent if cut else None))
    return rows


def _free_lane(waiting: list[int | None], first: int) -> int:
    if None in waiting[first:]:
        return waiting.index(None, first)
    waiting += [None] * max(1, first + 1 - len(waiting))
    return len(waiting) - 1


def _row(waiting: Sequence[int | None], own: int, last: int, meeting: Sequence[int], symbol: str) -> str:
    cells = []
    for lane, wanted in enumerate(waiting):
        joining = own < lane <= last
        if lane == own:
            cell = symbol
        elif joining and lane == last:
            cell = "╯"
        elif joining:
            cell = "┴" if lane in meeting else "─" if wanted is None else "┼"
        else:
            cell = " " if wanted is None else "│"
        cells.append(cell + ("─" if own <= lane < last else " "))
    return "".join(cells).rstrip()

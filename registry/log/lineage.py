"""The lineage of a head: which versions training went through to get there. Pure functions.

Numbers grow by one, and a publish continues from the stored version before it. Only a rollback jumps: its parent is the
version that it restores. A version without a parent begins a line, and the lineage ends there. So a lineage of any
length is a few closed ranges of numbers, newest first, and everything else up to the head was abandoned. Numbers whose
writer died lie inside of ranges too, though they are nobody's parent: whoever asks about a version looks at its state
as well.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from typing import TypeAlias

Ranges: TypeAlias = tuple[tuple[int, int], ...]


def ranges(head: int, rollbacks: Mapping[int, int], roots: Collection[int] = ()) -> Ranges:
    """Return the closed number ranges of a head's lineage, newest first.

    Args:
        head: The version to start from.

        rollbacks: Number of each stored rollback → its parent. Those newer than the head are passed over.

        roots: Numbers of the stored versions that begin a line; 1 counts as one in any case.

    Raises:
        ValueError: A rollback's parent is not older than it.
    """
    jumps = sorted({1, *rollbacks, *roots})
    found = []
    last = head
    while last >= 1:
        first = jumps[bisect_right(jumps, last) - 1]
        parent = rollbacks.get(first)
        if parent is None:
            found.append((first, last))
            break
        if not 1 <= parent < first:
            raise ValueError(f"rollback v{first}: expected a parent from v1 to v{first - 1}, found v{parent}")
        found.append((first, last))
        last = parent
    return tuple(found)


def after_rollback(ranges: Ranges, number: int, parent: int) -> Ranges | None:
    """Return the lineage of a rollback, given any lineage that its parent lies on.

    Args:
        ranges: From `ranges`.

        number: The rollback, newer than all of them.

        parent: The version that it restores.

    Returns:
        Its closed ranges, newest first; None when the parent does not lie on the given lineage.
    """
    if not contains(ranges, parent):
        return None
    older = tuple((first, min(last, parent)) for first, last in ranges if first <= parent)
    return ((number, number), *older)


def contains(ranges: Sequence[tuple[int, int]], number: int) -> bool:
    """Tell whether a number lies on the lineage.

    Args:
        ranges: From `ranges`: newest first, not overlapping.

        number: Any version number.
    """
    # Negated, because `bisect` wants what it searches to grow.
    index = bisect_right(ranges, -number, key=lambda each: -each[1]) - 1
    return index >= 0 and ranges[index][0] <= number <= ranges[index][1]

"""Whatever was done to a file or to a row, every call gives the right weights or an error by name: never others."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.torture import damage
from tests.torture.damage import Harm
from tests.torture.ground import SEED, Ground, share

pytestmark = [pytest.mark.torture, pytest.mark.timeout(1800)]


def test_an_unharmed_registry_gives_everything(ground: Ground) -> None:
    """Else an error for everything would pass for a good answer."""
    assert ground.harm(Harm("extend", "outside", (0,))) == []


def snapshots(files: dict[str, int]) -> list[str]:
    return [name for name in files if name.startswith("snapshots/")]


def harms_to_snapshots(files: dict[str, int]) -> Iterator[Harm]:
    choose = random.Random(SEED)
    names = snapshots(files)
    for name in names:
        size = files[name]
        offsets = sorted({*range(0, 40, 3), *range(0, size, 41), size - 1})
        yield from (Harm("flip", name, (offset, choose.randrange(8))) for offset in offsets)
        yield from (Harm("truncate", name, (keep,)) for keep in (0, 4, 8, 20, size // 2, size - 1))
        yield from (Harm("extend", name, (count,)) for count in (1, 8, 4096))
        yield from (Harm("replace", name, (by,)) for by in damage.REPLACEMENTS)
        yield from (Harm("edit header", name, (edit,)) for edit in damage.HEADER_EDITS)
        yield from (Harm("header", name, (header,)) for header in damage.HEADERS)
        yield from (Harm("header", name, (b"{}", length)) for length in (0, 1, 2**40, 2**63 - 1, 2**64 - 1))
        yield from (Harm("other file", name, (other,)) for other in names if other != name)


def harms_to_other_files(files: dict[str, int]) -> Iterator[Harm]:
    for name in [*(name for name in files if name not in snapshots(files)), "snapshots", "locks"]:
        yield from (Harm("replace", name, (by,)) for by in damage.REPLACEMENTS)
    for name in (f"{damage.DATABASE}-wal", f"{damage.DATABASE}-shm", f"{damage.DATABASE}-journal"):
        yield from (Harm("extend", name, (count,)) for count in (1, 4096))


def harms_to_pages(folder: Path) -> Iterator[Harm]:
    choose = random.Random(SEED)
    content = (folder / damage.DATABASE).read_bytes()
    size = len(content)
    in_use = [offset for offset, byte in enumerate(content) if byte]
    for offset in choose.sample(in_use, 300):
        yield Harm("flip", damage.DATABASE, (offset, choose.randrange(8)))
    yield from (Harm("flip", damage.DATABASE, (offset, 0)) for offset in range(100))
    for keep in (0, 1, 50, 100, 4095, 4096, size // 2, size - 4096, size - 1):
        yield Harm("truncate", damage.DATABASE, (keep,))


def harms_to_rows(folder: Path) -> Iterator[Harm]:
    choose = random.Random(SEED)
    for table, column, rows in damage.columns(folder / damage.DATABASE):
        for row in range(min(rows, 4)):
            for value in damage.ROW_VALUES:
                yield Harm("row", damage.DATABASE, (table, row, column, value))
            for by in ("\0", '"', "7", "}", "é"):
                yield Harm("text", damage.DATABASE, (table, row, column, choose.randrange(10_000), by))


def test_a_damaged_snapshot_never_gives_other_weights(ground: Ground) -> None:
    harms = list(harms_to_snapshots(ground.sound()[1].files))
    assert ground.each(ground.harm, share(harms, few=12, many=700)) == []


def test_a_registry_whose_other_files_are_damaged_never_gives_other_weights(ground: Ground) -> None:
    harms = list(harms_to_other_files(ground.sound()[1].files))
    assert ground.each(ground.harm, share(harms, few=4)) == []


def test_a_database_with_damaged_pages_never_gives_other_weights(ground: Ground) -> None:
    harms = list(harms_to_pages(ground.sound()[0]))
    assert ground.each(ground.harm, share(harms, few=6)) == []


def test_a_database_with_damaged_rows_never_gives_other_weights(ground: Ground) -> None:
    harms = list(harms_to_rows(ground.sound()[0]))
    assert ground.each(ground.harm, share(harms, few=10, many=600)) == []

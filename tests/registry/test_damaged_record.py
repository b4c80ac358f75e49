"""Damage in the database: whatever stands in a cell, calls and commands end in our errors, and name it."""

from __future__ import annotations

import json
import random
import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.registry.damaging import (
    COMMANDS,
    MANY,
    BadText,
    Damage,
    calls,
    complaint,
    copied,
    damages,
    make_story,
    run,
    stray,
    try_calls,
)
from tests.registry.helpers import memory_folder, value_of, weights
from weightledger.registry import CorruptionError, Registry, StorageError


@pytest.fixture(scope="module")
def story() -> Iterator[Path]:
    with memory_folder() as folder:
        make_story(folder / "story")
        yield folder / "story"


@pytest.fixture
def place() -> Iterator[Path]:
    with memory_folder() as folder:
        yield folder


ALL = list(damages())

# ---------------------------------------------------------------------- what is told, and what goes on


@pytest.mark.parametrize(
    ("damage", "where"),
    [
        (
            Damage("versions", "metadata", 1, "{"),
            r"table versions, row 2, column metadata: expected JSON, found str '\{'",
        ),
        (
            Damage("versions", "message", 1, BadText(b"\xff")),
            r"row 2, column message: expected UTF-8, found str '\\udcff'",
        ),
        (
            Damage("versions", "created_at", 1, "now"),
            r"row 2, column created_at: expected a time, found str 'now'",
        ),
        (Damage("versions", "digest", 1, b"\x00"), r"row 2, column digest: expected text, found bytes"),
        (
            Damage("versions", "snapshot_id", 1, 99),
            r"row 2, column snapshot_id: expected to point at a row of snapshots",
        ),
        (Damage("versions", "parent", 1, 7), r"row 2, column parent: expected a version before v2, found 7"),
        (
            Damage("versions", "nonfinite", 1, '"x"'),
            r"""row 2, column nonfinite: expected a list of names, found str '"x"'""",
        ),
        (
            Damage("metrics", "value", 1, "high"),
            r"table metrics, row 2, 'reward', column value: expected a number",
        ),
    ],
    ids=lambda value: f"{value.table}.{value.column}" if isinstance(value, Damage) else "",
)
def test_a_damaged_version_is_named_by_calls_for_it_and_marked_in_listings(
    damage: Damage, where: str, story: Path, place: Path
) -> None:
    folder = copied(story, place / "r")
    damage.do(folder)
    with Registry.open(folder) as registry:
        for call in (registry.get, registry.load, registry.rollback, registry.verify):
            with pytest.raises(CorruptionError, match=where) as caught:
                call(2)
            assert str(folder / "registry.db") in str(caught.value)
        marked = {version.number: version for version in registry.versions()}
        assert sorted(marked) == [1, 2, 3, 4, 5]
        assert re.search(where, marked[2].damage) and (marked[2].state, marked[2].stored) == (
            "damaged",
            False,
        )
        assert [number for number, version in marked.items() if version.damage] == [2]
        (fault,) = registry.verify()
        assert (fault.kind, fault.path, fault.versions) == ("damaged", "registry.db", (2,))
        assert re.search(where, fault.detail)
        with pytest.raises(CorruptionError, match=where):
            registry.prune(keep_last=1)
        assert registry.head().number == 5 and registry.publish(weights(8)).number == 6
        assert value_of(registry.load(1)) == 1


@pytest.mark.parametrize(
    ("damage", "where"),
    [
        (Damage("versions", "metadata", 1, "{"), "log"),
        (Damage("versions", "state", 1, "stoqed"), "log"),
        (Damage("versions", "number", 1, "two"), "log status pin"),
        (Damage("versions", "metadata", -2, "{"), "log status"),
        (Damage("versions", "depth", -2, "deep"), "log status"),
        (Damage("aliases", "name", 0, BadText(b"\xff")), "log status pin"),
        (Damage("pins", "worker", 0, b"\xff"), "log status pin"),
        (Damage("pins", "version_id", 1, 99), "log status pin"),
        (Damage("workers", "evidence_at", 0, "now"), "status"),
        (Damage("workers", "name", 0, BadText(b"\xff")), "status audit"),
        (Damage("holdings", "pushed_at", 2, BadText(b"\xff")), "status audit"),
        (Damage("holdings", "order", 0, "first"), "audit"),
        (Damage("events", "details", 0, "["), "events"),
        (Damage("events", "kind", 0, b"\xff"), "events"),
    ],
    ids=lambda value: f"{value.table}.{value.column}" if isinstance(value, Damage) else "",
)
def test_one_damaged_row_leaves_the_rest_of_an_answer_and_the_exit_code_tells(
    damage: Damage, where: str, story: Path, place: Path
) -> None:
    folder = copied(story, place / "r")
    usual = {
        command: run(command, "--registry", str(folder))
        for command in ("log", "status", "audit", "events", "pin")
    }
    assert {ran.code for ran in usual.values()} == {0}
    damage.do(folder)
    for command, before in usual.items():
        ran = run(command, "--registry", str(folder))
        assert complaint(ran) is None
        assert len(ran.out.splitlines()) >= len(before.out.splitlines()) - 1, (
            f"{command} lost more than a row"
        )
        if command in where.split():
            assert ran.code == 1
            assert "error: the record is damaged" in ran.err and re.search(r"table \w+, row ", ran.err)
            assert ran.err.count("\n") == 1
        elif command != "log":
            assert (ran.code, ran.err) == (0, "")
        as_json = run(command, "--json", "--registry", str(folder))
        # The log is its versions; what points at them is drawn for people only.
        marked = ran.code if command != "log" or damage.table in ("versions", "metrics") else 0
        assert as_json.code == marked and json.loads(as_json.out)


def test_whatever_else_is_damaged_is_found_by_verify(story: Path, place: Path) -> None:
    folder = copied(story, place / "r")
    for damage in (
        Damage("structures", "body", 0, "{}"),
        Damage("policies", "last_number", 0, 2),
        Damage("runs", "started_at", 0, "then"),
        Damage("holdings", "sent_digest", 0, "blake3:xyz"),
        Damage("about", "created_at", 0, ""),
    ):
        damage.do(folder)
    with Registry.open(folder) as registry:
        found = {fault.detail.partition(":")[0]: fault.versions for fault in registry.verify()}
    assert found == {
        "table about, row '" + folder_uuid(folder) + "', column created_at": (),
        "table policies, row 1, column last_number": (),
        "table runs, row '" + run_of(folder) + "', column started_at": (),
        "table structures, row 1, column body": (1, 2, 3, 4, 5),
        "table holdings, row 1, column sent_digest": (),
    }
    ran = run("verify", "--registry", str(folder))
    assert (ran.code, ran.err) == (1, "") and ran.out.startswith("5 faults in 5 stored versions.")


def test_a_number_that_was_given_twice_is_no_error_of_the_database(story: Path, place: Path) -> None:
    folder = copied(story, place / "r")
    Damage("policies", "last_number", 0, 2).do(folder)
    with Registry.open(folder) as registry:
        with pytest.raises(CorruptionError, match="table policies, row 1, column last_number"):
            registry.publish(weights(8))
        assert registry.head().number == 5 and value_of(registry.load()) == 5


def test_an_error_of_the_code_in_a_sound_record_stays_what_it_is(story: Path, place: Path) -> None:
    with Registry.open(copied(story, place / "r")) as registry:
        for wrong in (KeyError("a"), TypeError("b"), AssertionError("c")):
            with pytest.raises(type(wrong)), registry.ledger.reading():
                raise wrong
        with pytest.raises(ZeroDivisionError), registry.ledger.writing():
            raise ZeroDivisionError


# ---------------------------------------------------------------------- whatever it is


@pytest.mark.torture
@pytest.mark.parametrize("part", range(8))
def test_whatever_stands_in_a_cell_only_our_errors_leave(part: int, story: Path, place: Path) -> None:
    chosen = ALL[part::8] if MANY else random.Random(part).sample(ALL[part::8], 3)
    wrong = []
    for at, damage in enumerate(chosen):
        folder = copied(story, place / str(at))
        damage.do(folder)
        wrong += broken_calls(folder, str(damage))
    assert wrong == [], f"{len(wrong)} of {len(chosen)}"


@pytest.mark.torture
@pytest.mark.parametrize("part", range(4))
def test_whatever_stands_in_a_cell_no_command_shows_a_traceback(
    part: int, story: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    source = random.Random(part)
    chosen = ALL[part::4] if MANY else source.sample(ALL[part::4], 2)
    wrong = []
    for at, damage in enumerate(chosen):
        folder = copied(story, place / str(at))
        damage.do(folder)
        for command in COMMANDS if MANY else source.sample(COMMANDS, 12):
            ran = run(*command.split(), "--registry", str(folder))
            if (what := complaint(ran)) is not None:
                wrong.append(f"{damage}: {command}: {what}")
    assert wrong == [], f"{len(wrong)} of {len(chosen)}"


@pytest.mark.torture
@pytest.mark.parametrize("seed", range(200 if MANY else 8))
def test_whatever_bytes_are_in_the_file_only_our_errors_leave(
    seed: int, story: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    folder, source = copied(story, place / "r"), random.Random(seed)
    scribble(folder / "registry.db", source)
    wrong = broken_calls(folder, f"seed {seed}")
    for command in source.sample(COMMANDS, 6):
        ran = run(*command.split(), "--registry", str(folder))
        if (what := complaint(ran)) is not None:
            wrong.append(f"{command}: {what}")
    assert wrong == []


def broken_calls(folder: Path, what: str) -> list[str]:
    """Make every call, and tell of those that an error which is not ours has left."""
    return [
        f"{what}: {name} raised {type(error).__name__}: {str(error)[:200]}"
        for name, error in try_calls(folder, calls()).items()
        if error is not None and stray(error)
    ]


def scribble(path: Path, source: random.Random) -> None:
    """Write bytes over a file, past its first page or not, in one of the ways in which disks do it."""
    data = bytearray(path.read_bytes())
    kind = source.choice(["bits", "bits", "bytes", "zeros", "page", "cut", "swap"])
    page = 4096
    pages = len(data) // page
    at = source.randrange(len(data))
    if kind == "bits":
        for _ in range(source.choice([1, 5, 50])):
            data[source.randrange(len(data))] ^= 1 << source.randrange(8)
    elif kind == "bytes":
        data[at : at + 100] = source.randbytes(100)
    elif kind == "zeros":
        data[at : at + 512] = bytes(512)
    elif kind == "page":
        first = source.randrange(pages) * page
        data[first : first + page] = source.randbytes(page)
    elif kind == "cut":
        del data[at:]
    else:
        one, other = (source.randrange(1, pages) * page for _ in range(2))
        data[one : one + page], data[other : other + page] = (
            data[other : other + page],
            data[one : one + page],
        )
    path.write_bytes(data)


def folder_uuid(folder: Path) -> str:
    with Registry.open(folder) as registry:
        return registry.uuid


def run_of(folder: Path) -> str:
    with Registry.open(folder) as registry:
        return registry.head().run


def test_a_version_that_points_at_the_file_of_another_is_named_and_gives_no_weights(tmp_path: Path) -> None:
    make_story(tmp_path / "r")
    with closing(sqlite3.connect(tmp_path / "r" / "registry.db", isolation_level=None)) as plain:
        plain.execute("UPDATE versions SET snapshot_id = snapshot_id + 1 WHERE number = 1 AND policy_id = 1")
    with Registry.open(tmp_path / "r") as registry:
        for call in (registry.load, registry.tensor_hashes, registry.rollback):
            with pytest.raises(CorruptionError, match="v1 of policy 'default' is damaged"):
                call(1)
        assert registry.head().number == 5
        assert any(fault.versions == (1,) and "content" in fault.detail for fault in registry.verify())


def test_a_first_number_or_a_size_that_is_no_number_is_an_error_of_ours(tmp_path: Path) -> None:
    make_story(tmp_path / "r")
    with closing(sqlite3.connect(tmp_path / "r" / "registry.db", isolation_level=None)) as plain:
        plain.execute("UPDATE policies SET last_number = 'nul' WHERE id = 1")
        plain.execute("UPDATE snapshots SET file_bytes = '[[' WHERE id = 1")
        plain.execute("UPDATE snapshots SET file_bytes = ? WHERE id = 2", [2**62])
    with Registry.open(tmp_path / "r") as registry:
        with pytest.raises(CorruptionError, match="last_number"):
            registry.publish(weights(9))
        with pytest.raises(CorruptionError, match="size in bytes"):
            registry.load(1)
        with pytest.raises((CorruptionError, StorageError)):
            registry.load(2)

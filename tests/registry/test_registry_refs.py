"""References: what each form names, in every call that takes one, and what is said when it names nothing."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.registry.copying import copy_registry
from tests.registry.helpers import memory_folder, numbers, publish_many, value_of, weights
from weightledger.registry import NotFoundError, Registry
from weightledger.registry.log import refs

# Nobody steers a worker here.
pytestmark = pytest.mark.filterwarnings("ignore:.* is pinned to v")


@pytest.fixture(scope="module")
def story() -> Iterator[Path]:
    """v1 to v4; v5 restores v2; v6 from it. v3 and v4 are abandoned."""
    with memory_folder() as folder:
        with Registry.open(folder / "story") as opened:
            for value, reward in ((1, 1.0), (2, 5.0), (3, 9.0), (4, float("nan"))):
                opened.publish(weights(value), metrics={"reward": reward, "loss": -reward})
            opened.rollback(2)
            opened.publish(weights(6), metrics={"reward": 3.0, "a:b": 1.0})
        yield folder / "story"


@pytest.fixture
def registry(story: Path) -> Iterator[Registry]:
    with memory_folder() as folder:
        copy_registry(story, folder / "copy")
        with Registry.open(folder / "copy") as opened:
            yield opened


def add_older_alias(registry: Registry, name: str, number: int) -> None:
    """Write an alias as an older library did, which accepted nearly every name."""
    with sqlite3.connect(Path(registry.location) / "registry.db") as database:
        database.execute(
            "INSERT INTO aliases (policy_id, name, version_id, moved_at) SELECT policy_id, ?, id, created_at "
            "FROM versions WHERE number = ?",
            (name, number),
        )
    database.close()


@pytest.mark.parametrize(
    ("ref", "number"),
    [
        (3, 3),
        ("3", 3),
        ("v3", 3),
        ("003", 3),
        ("head", 6),
        ("head~0", 6),
        ("head~1", 5),
        ("head~2", 1),
        ("best:reward", 2),
        ("best:loss:min", 2),
        ("best:loss", 1),
        ("best:a:b", 6),
    ],
)
def test_each_form_names_its_version(registry: Registry, ref: int | str, number: int) -> None:
    assert registry.get(ref).number == number
    assert registry.get(registry.get(ref)).number == number


def test_going_back_counts_publishes_on_the_line_and_no_rollbacks(registry: Registry) -> None:
    for back in range(3):
        found = registry.get(f"head~{back}")
        assert registry.staleness(found) == back, found
    registry.rollback(1)
    assert numbers([registry.get("head~0")]) == [7]
    with pytest.raises(
        NotFoundError, match=r"the line of the head, v7, has 0 before it; versions are 1\.\.7"
    ):
        registry.get("head~1")


@pytest.mark.folder
def test_lost_numbers_are_passed_by_on_the_way_back(registry: Registry) -> None:
    with sqlite3.connect(Path(registry.location) / "registry.db") as database:
        database.execute("UPDATE versions SET state = 'lost' WHERE number = 6")
    database.close()
    registry.publish(weights(7))
    assert [registry.get(f"head~{back}").number for back in range(3)] == [7, 5, 1]


def test_the_best_is_on_the_heads_line_finite_and_stored(registry: Registry) -> None:
    assert registry.best("reward").number == 3, "which is abandoned"
    registry.pin("w", "best:reward")
    assert registry.pins()[0].ref == 2
    registry.record_metrics(6, reward=7.0)
    assert registry.get("best:reward").number == 6 and registry.pins()[0].version == 2
    registry.publish(weights(8))
    registry.publish(weights(9))
    registry.unpin("w")
    registry.prune(keep_last=1)
    with pytest.raises(
        NotFoundError, match=r"on the head's line has a finite 'reward'.*recorded: a:b, loss, rew"
    ):
        registry.get("best:reward")


def test_a_digest_is_named_by_eight_digits_or_more(registry: Registry) -> None:
    digest = registry.get(4).digest
    for length in (15, 30, len(digest)):
        assert registry.get(digest[:length]).number == 4
        assert registry.get(digest[:7] + digest[7:length].upper()).number == 4
    assert value_of(registry.load(digest[:15])) == 4
    for wrong in (digest[:14], digest + "0", "blake3:" + "g" * 8, "blake3:"):
        with pytest.raises(NotFoundError, match="blake3: needs 8 to 64 hexadecimal digits"):
            registry.get(wrong)
    with pytest.raises(
        NotFoundError, match=r"no version has a content 'blake3:00000000'.*versions are 1\.\.6"
    ):
        registry.get("blake3:00000000")


def test_of_equal_contents_the_newest_that_can_be_loaded_is_meant(registry: Registry) -> None:
    shared = registry.get(2).digest[:20]
    assert registry.get(shared).number == 5, "it restores v2"
    registry.publish(weights(9))
    registry.prune(keep_last=1)
    assert registry.get(shared).number == 5
    made = registry.publish(weights(2))
    assert registry.load(shared) is not None and registry.get(shared).number == made.number


@pytest.mark.folder
def test_digits_that_fit_several_contents_are_refused_with_all_of_them(registry: Registry) -> None:
    one, two = registry.get(1).digest, registry.get(4).digest
    alike = one[:17] + two[17:]
    with sqlite3.connect(Path(registry.location) / "registry.db") as database:
        for table in ("versions", "snapshots"):
            database.execute(f"UPDATE {table} SET digest = ? WHERE digest = ?", (alike, two))
    database.close()
    with pytest.raises(NotFoundError) as caught:
        registry.get(one[:17])
    for text in ("2 contents begin with", f"{one} (v1)", f"{alike} (v4)", "give more digits"):
        assert text in str(caught.value)
    at = next(index for index in range(17, 71) if one[index] != alike[index])
    assert registry.get(one[: at + 1]).number == 1


def test_a_version_of_another_registry_or_policy_is_refused(registry: Registry, tmp_path: Path) -> None:
    with Registry.open(tmp_path / "other") as other:
        foreign, same = other.publish(weights(77)), other.publish(weights(2))
        with pytest.raises(NotFoundError, match="belongs to another registry: in this one v1"):
            registry.load(foreign)
        assert value_of(registry.load(same)) == 2, "number and content are those of this registry"
        with other.for_policy("second") as second:
            mine = second.publish(weights(1))
            with pytest.raises(NotFoundError, match="belongs to policy 'second', not to 'default'"):
                registry.get(mine)
    assert registry.pins() == []


@pytest.mark.parametrize("ref", ["head~1", "best:reward", "v5", "head"])
def test_all_but_aliases_are_pinned_as_numbers(registry: Registry, ref: str) -> None:
    number = registry.get(ref).number
    registry.pin("w", ref)
    assert registry.pins()[0].ref == number
    registry.publish(weights(9), metrics={"reward": 99.0})
    assert registry.target("w").number == number


@pytest.mark.folder
@pytest.mark.parametrize("ref", ["head~1", "best:reward", "HEAD"])
def test_every_call_takes_every_form(registry: Registry, ref: str, tmp_path: Path) -> None:
    if ref == "HEAD":
        add_older_alias(registry, "HEAD", 5)
    number = registry.get(ref).number
    content = {5: 2, 2: 2}[number]
    assert value_of(registry.load(ref)) == content
    assert registry.restore(ref, weights(0)).number == number
    assert registry.export(ref, tmp_path / "out").stat().st_size
    assert registry.tensor_hashes(ref) == registry.tensor_hashes(number)
    assert registry.verify(ref) == [] and registry.staleness(ref) == registry.staleness(number)
    assert registry.history(version=ref) == [] and registry.events(version=ref) == registry.events(
        version=number
    )
    registry.set_alias("a", ref)
    assert registry.aliases()["a"] == number
    assert registry.record_metrics(ref, x=1.0).number == number
    assert registry.rollback(ref).restores == number


@pytest.mark.parametrize(
    ("ref", "hint"),
    [
        ("HEAD", "did you mean 'head'?"),
        (" head", "did you mean 'head'?"),
        ("V3", "did you mean 'v3'?"),
        ("latest", "did you mean 'head'?"),
        ("head~", "head~ needs a whole number"),
        ("head~-1", "head~ needs a whole number"),
        ("best:", "best: needs the name of a metric"),
        ("bset", "a version is named by a number"),
        ("", "a version is named by a number"),
        ("+3", "a version is named by a number"),
        ("stable~1", "a version is named by a number"),
        ("\ud800", "a version is named by a number"),
        ("nul\0", "a version is named by a number"),
        ("x" * 5000, r"\(5000 characters\)"),
    ],
)
def test_what_names_nothing_is_told_what_exists_and_what_was_meant(
    registry: Registry, ref: str, hint: str
) -> None:
    registry.set_alias("stable", 2)
    with pytest.raises(NotFoundError, match=hint) as caught:
        registry.get(ref)
    assert re.search(r"aliases are: stable; versions are 1\.\.6", str(caught.value))
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    "ref", ["9" * 5000, "v" + "9" * 5000, "head~" + "9" * 5000, "best:" + "x" * 5000, "0" * 5000]
)
def test_thousands_of_digits_are_answered_in_few_words(registry: Registry, ref: str) -> None:
    with pytest.raises(NotFoundError) as caught:
        registry.get(ref)
    assert len(str(caught.value)) < 600


RESERVED = (
    *("head", "HEAD", "Head", "latest", "LATEST", "none", "None"),
    *("7", "v7", "V7", "+3", "-3", "1_0", "v1_0", "\u0663", "\uff10\uff17"),
    *("head~1", "HEAD~x", "best:reward", "Best:", "blake3:0011", "best ", " best", "\u2003best"),
)
FREE = ("best", "vv1", "v", "1.0", "nones", "headless", "head-1", "best-reward", "prod~1", "é")


@pytest.mark.parametrize("name", RESERVED)
def test_a_new_alias_never_reads_as_a_reference(registry: Registry, name: str) -> None:
    with pytest.raises(ValueError, match="alias"):
        registry.set_alias(name, 1)
    assert registry.aliases() == {} and registry.events(kind="alias") == []


@pytest.mark.parametrize("name", FREE)
def test_other_names_are_free(registry: Registry, name: str) -> None:
    registry.set_alias(name, 3)
    registry.pin("w", name)
    assert registry.get(name).number == 3 and registry.pins()[0].ref == name


@pytest.mark.folder
@pytest.mark.parametrize(
    "name", ["HEAD", "latest", "None", "+3", "1_0", "best ", "head~1", "best:reward", "blake3:00"]
)
def test_an_older_alias_goes_on_working(registry: Registry, name: str) -> None:
    add_older_alias(registry, name, 3)
    assert registry.get(name).number == 3
    registry.pin("w", name)
    assert registry.pins()[0].ref == name
    registry.set_alias(name, 4)
    assert registry.target("w").number == 4
    registry.unpin("w")
    registry.delete_alias(name)
    with pytest.raises(ValueError, match="alias"):
        registry.set_alias(name, 4)


def test_an_empty_policy_says_so(tmp_path: Path) -> None:
    with Registry.open(tmp_path) as registry:
        for ref in ("head", "head~1", "best:x", "blake3:00000000", 1, "stable"):
            with pytest.raises(NotFoundError, match=r"no versions yet|none"):
                registry.get(ref)


@pytest.mark.parametrize("ref", [1.0, None, True, b"head", ["head"], object()])
def test_what_is_no_reference_is_a_type_error(registry: Registry, ref: object) -> None:
    with pytest.raises(TypeError, match=r"a version is named by .* found"):
        registry.get(ref)  # type: ignore[arg-type]


def test_a_meaning_means_itself() -> None:
    for ref in (7, "v7", "head", "head~2", "best:reward", "best:loss:min", "blake3:00112233", "stable"):
        assert refs.parse(refs.parse(ref)) == refs.parse(ref)


def test_a_pruned_version_is_found_and_says_what_is_kept(registry: Registry) -> None:
    registry.prune(keep_last=1)
    assert registry.get("head~2").state == "pruned"
    with pytest.raises(NotFoundError, match="its weights were pruned; the nearest kept versions are"):
        registry.load("head~2")


def test_a_long_line_is_walked_back_through_many_rollbacks(tmp_path: Path) -> None:
    with Registry.open(tmp_path / "long") as registry:
        publish_many(registry, 5)
        for _ in range(5):
            registry.rollback(3)
            registry.publish(weights(100))
        head = registry.head()
        assert registry.get("head~1").number == head.parent
        assert value_of(registry.load("head~2")) == 2
        with pytest.raises(NotFoundError, match="has 3 before it"):
            registry.get("head~4")

"""What a prune keeps, and why."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightledger.registry.store.retention import Candidate, keep_reasons, released_files


def stored(
    *numbers: int, metric: dict[int, float] | None = None, files: dict[int, int] | None = None
) -> list[Candidate]:
    """Versions with a file each, unless `files` says otherwise; `metric` is their reward."""
    return [
        Candidate(
            number=number,
            snapshot=(files or {}).get(number, 1000 + number),
            metrics={"reward": metric[number]} if metric and number in metric else {},
        )
        for number in numbers
    ]


def kept(candidates: list[Candidate], **given: Any) -> dict[int, tuple[str, ...]]:
    nothing: dict[str, Any] = {"head": candidates[-1].number, "aliases": {}, "pins": {}, "held": {}}
    return keep_reasons(candidates, **(nothing | given))


def test_order_is_the_number_and_not_the_text() -> None:
    """CK-02: 10000 is newer than 9900, which is newer than 9000; so are 9, 10 and 100."""
    assert set(kept(stored(9000, 9900, 10000), keep_last=2)) == {9900, 10000}
    assert set(kept(stored(9, 10, 100), keep_last=2)) == {10, 100}


def test_order_is_the_number_and_not_the_order_of_arrival() -> None:
    """CK-09: neither times nor positions are looked at."""
    assert set(kept(stored(3, 1, 2), head=3, keep_last=2)) == {2, 3}


def test_the_newest_and_the_best_survive_a_keep_last_of_one() -> None:
    """CK-03."""
    versions = stored(1, 2, 3, metric={1: 9.0, 2: 1.0, 3: 2.0})
    assert kept(versions, keep_last=1, keep_best=("reward", 1)) == {
        1: ("best 1 by reward",),
        3: ("head", "last 1"),
    }


@pytest.mark.parametrize(
    "rules",
    [
        {},
        {"keep_last": 0},
        {"keep_last": -1},
        {"keep_last": True},
        {"keep_last": 2.0},
        {"keep_every": 0},
        {"keep_every": -5},
        {"keep_best": ("reward", 0)},
        {"keep_best": ("reward", -1)},
        {"keep_best": ("reward",)},
        {"keep_best": ("", 1)},
        {"keep_best": ("reward", 1, "highest")},
        {"keep_best": "reward"},
        {"keep_last": 3, "keep_every": 0},
    ],
)
def test_a_rule_that_keeps_nothing_is_refused_and_told_what_is_accepted(rules: dict[str, Any]) -> None:
    """CK-03: never "all gone"."""
    with pytest.raises(
        (TypeError, ValueError), match=r"accepted are keep_last=n and keep_every=n .* at least 1"
    ):
        kept(stored(1, 2, 3), **rules)


def test_whatever_is_in_use_stays_and_the_answer_says_why() -> None:
    """CK-04: v1 best, v2 held, v3 pinned, keep the last two of nine; and an alias and a pending push beside them."""
    versions = stored(*range(1, 10), metric=dict.fromkeys(range(2, 10), 0.5) | {1: 3.0})
    assert kept(
        versions,
        aliases={4: ["good", "demo"]},
        pins={3: ["eval-*"]},
        held={2: ["w3"]},
        pending={5: ["w3"]},
        keep_last=2,
        keep_best=("reward", 1),
    ) == {
        1: ("best 1 by reward",),
        2: ("held by w3",),
        3: ("pinned by eval-*",),
        4: ("alias demo", "alias good"),
        5: ("pending on w3",),
        8: ("last 2",),
        9: ("head", "last 2"),
    }


def test_a_thousand_holders_are_counted_rather_than_listed() -> None:
    holders = [f"w{index:04d}" for index in range(1000)]
    reasons = kept(stored(1, 2), held={1: holders}, keep_last=1)
    assert reasons[1] == ("held by w0000, w0001, w0002 and 997 more",)
    assert kept(stored(1, 2), held={1: holders[:4]}, keep_last=1)[1] == (
        "held by w0000, w0001, w0002, w0003",
    )


def test_every_nth_number_stays() -> None:
    assert kept(stored(99, 100, 101, 200, 201), keep_every=100) == {
        100: ("every 100",),
        200: ("every 100",),
        201: ("head",),
    }


def test_nan_and_missing_metrics_are_the_worst() -> None:
    """CK-15: the 3.0 is best, NaN, infinity and no metric never are, even where places stay free."""
    versions = stored(
        *range(9), metric={1: math.nan, 2: 1.0, 3: 3.0, 4: math.nan, 5: 2.0, 6: math.inf, 8: math.nan}
    )
    assert {
        number for number, why in kept(versions, head=7, keep_best=("reward", 1)).items() if why != ("head",)
    } == {3}
    assert set(kept(versions, head=7, keep_best=("reward", 6))) == {2, 3, 5, 7}
    assert set(kept(versions, head=7, keep_best=("reward", 6, "min"))) == {2, 3, 5, 7}


def test_what_is_newer_than_any_score_waits_for_its_own() -> None:
    """A score is known only after a version ran; of the newest ones nobody can tell yet whether they are the best."""
    versions = stored(1, 2, 3, 4, 5, metric={1: 3.0, 2: 1.0, 3: math.nan})
    assert kept(versions, keep_best=("reward", 1)) == {
        1: ("best 1 by reward",),
        4: ("newer than v3, the newest with reward",),
        5: ("head", "newer than v3, the newest with reward"),
    }
    assert set(kept(versions, keep_last=1)) == {5}, "which is a matter of that rule alone"


def test_what_a_rollback_goes_back_to_stays() -> None:
    assert kept(stored(1, 2, 3), goal=1, keep_last=1) == {
        1: ("what a rollback goes back to",),
        3: ("head", "last 1"),
    }
    assert set(kept(stored(2, 3), goal=1, keep_last=1)) == {3}, "one that has no weights any more"


def test_when_all_are_nan_none_is_the_best() -> None:
    """CK-15."""
    assert set(kept(stored(1, 2, 3, metric=dict.fromkeys((1, 2, 3), math.nan)), keep_best=("reward", 2))) == {
        3
    }


def test_zero_is_a_real_value_and_of_equal_ones_the_newer_wins() -> None:
    """CK-16."""
    versions = stored(1, 2, 3, 4, 5, metric={1: 0.0, 2: 0.0, 3: 0.0, 4: 0.5})
    assert set(kept(versions, keep_best=("reward", 1))) == {4, 5}
    assert set(kept(versions, keep_best=("reward", 2))) == {3, 4, 5}
    assert set(kept(versions, keep_best=("reward", 1, "min"))) == {3, 5}


def test_what_shares_its_file_with_a_kept_version_stays() -> None:
    versions = stored(1, 2, 3, 4, files={1: 7, 3: 7})
    assert kept(versions, pins={3: ["w"]}, keep_last=1) == {
        1: ("shares its file with v3",),
        3: ("pinned by w",),
        4: ("head", "last 1"),
    }


def test_a_shared_extra_state_keeps_no_version_and_is_not_released() -> None:
    versions = [Candidate(1, 11, 50), Candidate(2, 12, 50), Candidate(3, 13, 50), Candidate(4, 14, None)]
    reasons = kept(versions, pins={3: ["w"]}, keep_last=1)
    assert set(reasons) == {3, 4}
    assert released_files(versions, reasons) == {11, 12}


def test_a_file_is_released_once_no_kept_version_names_it() -> None:
    versions = [Candidate(1, 11, 51), Candidate(2, 11, 52), Candidate(3, 13, 53)]
    assert released_files(versions, [3]) == {11, 51, 52}
    assert released_files(versions, [2, 3]) == {51}


def test_names_of_versions_that_are_not_stored_are_passed_over() -> None:
    assert set(kept(stored(2, 3), aliases={1: ["old"]}, held={9: ["w"]}, keep_last=1)) == {3}


numbers = st.integers(1, 12)
uses = st.dictionaries(numbers, st.lists(st.sampled_from(["a", "b"]), min_size=1, max_size=2), max_size=3)
rules = st.fixed_dictionaries(
    {},
    optional={
        "keep_last": st.integers(1, 5),
        "keep_every": st.integers(1, 5),
        "keep_best": st.tuples(st.just("reward"), st.integers(1, 3)),
    },
).filter(bool)


@given(
    st.lists(numbers, min_size=1, unique=True),
    uses,
    uses,
    uses,
    uses,
    rules,
    st.dictionaries(numbers, st.integers(1, 4)),
    st.dictionaries(numbers, st.floats(allow_nan=True)),
)
def test_what_is_in_use_never_goes(
    present: list[int],
    aliases: dict[int, list[str]],
    pins: dict[int, list[str]],
    held: dict[int, list[str]],
    pending: dict[int, list[str]],
    given: dict[str, Any],
    files: dict[int, int],
    metric: dict[int, float],
) -> None:
    versions = stored(*present, files=files, metric=metric)
    head = max(present)
    reasons = keep_reasons(
        versions, head=head, aliases=aliases, pins=pins, held=held, pending=pending, **given
    )
    needed = ({head} | aliases.keys() | pins.keys() | held.keys() | pending.keys()) & set(present)
    assert needed <= set(reasons) <= set(present)
    assert all(reasons.values())
    kept_files = {each.snapshot for each in versions if each.number in reasons}
    assert not any(each.snapshot in kept_files for each in versions if each.number not in reasons)
    assert not released_files(versions, reasons) & kept_files

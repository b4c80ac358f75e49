"""What people type: times, pairs and rules are read one way, or refused with what would be accepted."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta, timezone

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from weightledger.registry.commands.options import (
    parse_keep_best,
    parse_metadata,
    parse_metrics,
    parse_pairs,
    parse_time,
)
from weightledger.registry.commands.wording import moment, precise

NOW = datetime(2026, 5, 4, 12, 0, tzinfo=UTC)


@pytest.fixture
def zone(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Set the process's local zone, and put it back."""

    def set_zone(name: str) -> None:
        monkeypatch.setenv("TZ", name)
        time.tzset()

    yield set_zone
    monkeypatch.undo()
    time.tzset()


def read(text: str) -> datetime:
    return parse_time(text, "--at", now=NOW)


@pytest.mark.parametrize(
    ("text", "before"),
    [
        ("90s", timedelta(seconds=90)),
        ("30m", timedelta(minutes=30)),
        ("2h", timedelta(hours=2)),
        ("1.5h", timedelta(minutes=90)),
        ("1d12h", timedelta(hours=36)),
        ("2w", timedelta(weeks=2)),
        (" 2h ", timedelta(hours=2)),
        ("0s", timedelta()),
    ],
)
def test_a_relative_time_is_how_long_ago(text: str, before: timedelta) -> None:
    assert read(text) == NOW - before


def test_a_naive_time_is_local_and_one_with_an_offset_is_not(zone: Callable[[str], None]) -> None:
    """SQL-04: one moment whatever the machine's zone, told in UTC."""
    zone("CET-1CEST,M3.5.0,M10.5.0/3")
    assert read("2026-05-04T13:30") == datetime(2026, 5, 4, 11, 30, tzinfo=UTC)
    assert read("2026-01-04 13:30:05.25") == datetime(2026, 1, 4, 12, 30, 5, 250_000, tzinfo=UTC)
    assert read("2026-05-04T13:30Z") == datetime(2026, 5, 4, 13, 30, tzinfo=UTC)
    assert read("2026-05-04T13:30-08:00") == datetime(2026, 5, 4, 21, 30, tzinfo=UTC)
    assert read("2026-05-04T13:30").tzinfo is UTC


def test_a_date_is_its_first_moment_and_a_time_is_of_today(zone: Callable[[str], None]) -> None:
    zone("CET-1CEST,M3.5.0,M10.5.0/3")
    assert read("2026-05-04") == datetime(2026, 5, 3, 22, 0, tzinfo=UTC)
    assert read("13:30") == datetime(2026, 5, 4, 11, 30, tzinfo=UTC)
    assert read("13:30+00:00") == datetime(2026, 5, 4, 13, 30, tzinfo=UTC)


def test_today_is_the_local_day(zone: Callable[[str], None]) -> None:
    zone("JST-9")
    late = datetime(2026, 5, 4, 20, 0, tzinfo=UTC)
    assert parse_time("01:00", "--at", now=late) == datetime(2026, 5, 4, 16, 0, tzinfo=UTC)


@pytest.mark.parametrize("text", ["2026-10-25T02:30", "2026-03-29T02:30"])
def test_a_time_that_the_clock_showed_twice_or_skipped_is_refused_until_it_has_an_offset(
    zone: Callable[[str], None], text: str
) -> None:
    zone("CET-1CEST,M3.5.0,M10.5.0/3")
    with pytest.raises(
        typer.BadParameter, match=r"skipped .* or showed it twice; add an offset, as in 2026-"
    ):
        read(text)
    assert read(f"{text}+02:00").hour == 0
    assert read(f"{text}+01:00").hour == 1


@pytest.mark.parametrize(
    "text", ["", "yesterday", "2h ago", "2", "2026", "-2h", "2x", "h", "2026-13-01", "25:00", "1h-2m", "NaN"]
)
def test_what_is_no_time_is_refused_with_what_is_accepted(text: str) -> None:
    with pytest.raises(typer.BadParameter, match=r"expected a time, found .*ISO 8601.*30m") as caught:
        read(text)
    assert caught.value.param_hint == "--at"


@pytest.mark.parametrize("text", ["999999999999w", "0001-01-01T00:00+12:00", "99999d9w99999999h"])
def test_a_time_outside_of_the_calendar_is_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="outside of the years 1 to 9999"):
        read(text)


@given(st.datetimes(min_value=datetime(1990, 1, 1), max_value=datetime(2090, 1, 1), timezones=st.just(UTC)))  # noqa: DTZ001 - hypothesis takes naive bounds
def test_a_time_that_is_shown_can_be_typed_back(when: datetime) -> None:
    if (shown := when.astimezone().replace(tzinfo=None)).replace(fold=1).astimezone() != shown.astimezone():
        return
    assert abs(read(precise(when)) - when) < timedelta(milliseconds=1)
    assert abs(read(moment(when)) - when) < timedelta(seconds=1)
    offset = timezone(timedelta(hours=5, minutes=45))
    assert read(when.astimezone(offset).isoformat()) == when


def test_pairs_are_split_at_the_first_equals_sign() -> None:
    assert parse_pairs(["a=1", "b=x=y", "c="], "--x") == {"a": "1", "b": "x=y", "c": ""}


@pytest.mark.parametrize(
    ("pairs", "text"), [(["a"], "'a'"), (["=1"], "'=1'"), (["a=1", "a=2"], "given twice")]
)
def test_a_pair_without_a_name_or_given_twice_is_refused(pairs: list[str], text: str) -> None:
    with pytest.raises(typer.BadParameter, match=text):
        parse_pairs(pairs, "--metric")


def test_metrics_are_numbers_and_nan_is_one() -> None:
    """SQL-12, and infinity beside it."""
    found = parse_metrics(["reward=12.5", "loss=nan", "kl=-inf", "steps=3"], "--metric")
    assert found["reward"] == 12.5
    assert found["loss"] != found["loss"]
    assert found["kl"] == float("-inf")
    assert found["steps"] == 3
    with pytest.raises(typer.BadParameter, match="reward: expected a number, found 'high'"):
        parse_metrics(["reward=high"], "--metric")


def test_metadata_keeps_the_type_of_json_and_takes_the_rest_as_text() -> None:
    """ST-13: values keep their types."""
    pairs = [
        "seed=3",
        "env=CartPole-v1",
        "lr=0.5",
        "on=true",
        "none=null",
        'quoted="3"',
        "list=[1, 2]",
        "nan=NaN",
        "empty=",
    ]
    assert parse_metadata(pairs, "--metadata") == {
        "seed": 3,
        "env": "CartPole-v1",
        "lr": 0.5,
        "on": True,
        "none": None,
        "quoted": "3",
        "list": [1, 2],
        "nan": "NaN",
        "empty": "",
    }


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("reward:3", ("reward", 3, "max")),
        ("loss:1:min", ("loss", 1, "min")),
        ("reward:2:max", ("reward", 2, "max")),
        ("eval:reward:3", ("eval:reward", 3, "max")),
        ("a:3:4", ("a:3", 4, "max")),
        ("eval:loss:2:min", ("eval:loss", 2, "min")),
    ],
)
def test_a_keep_best_rule_may_name_a_metric_with_colons(text: str, rule: tuple[str, int, str]) -> None:
    assert parse_keep_best(text, "--keep-best") == rule


@pytest.mark.parametrize(
    "text", ["reward", "reward:", ":3", "reward:0", "reward:-1", "reward:3:best", "reward:1.5", ""]
)
def test_a_keep_best_rule_that_keeps_nothing_or_says_nothing_is_refused(text: str) -> None:
    """CK-03: none of them may end in "all gone"."""
    with pytest.raises(typer.BadParameter, match=r"METRIC:N.*reward:3"):
        parse_keep_best(text, "--keep-best")

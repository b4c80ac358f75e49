"""What people see: pages laid out from records, at several widths, on terminals and in pipes."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightledger.registry.commands import render, render_workers, terminal
from weightledger.registry.commands.terminal import Block, Column, Line, Table, words
from weightledger.registry.commands.wording import age, figure, natural, ranges, size, some, span, zone
from weightledger.registry.records import Event, Fault, Holding, Pin, PruneReport, Version, WorkerStatus

NOW = datetime(2026, 5, 4, 12, 0, tzinfo=UTC)
RUN = "3fa9c1d2" * 4


@pytest.fixture(autouse=True)
def _utc(monkeypatch: pytest.MonkeyPatch) -> None:
    import time

    monkeypatch.setenv("TZ", "UTC")
    time.tzset()


def version(number: int, **changes: object) -> Version:
    found = Version(
        policy="default",
        number=number,
        digest=f"blake3:{number:064x}",
        parent=number - 1 or None,
        restores=None,
        run=RUN,
        step=number * 100,
        metrics={"reward": number + 0.5},
        metadata={},
        message="",
        size_bytes=1_000_000,
        created_at=NOW - timedelta(minutes=60 - number),
        stored=True,
        state="stored",
        nonfinite=(),
    )
    return replace(found, **changes)  # type: ignore[arg-type]


def worker(name: str, held: int | None = 3, **changes: object) -> WorkerStatus:
    found = WorkerStatus(
        name=name,
        policy="default",
        incarnation="ab12cd34ef",
        state="confirmed",
        evidence_at=NOW - timedelta(seconds=3),
        held=held,
        pending=None,
        target=3,
        staleness=None if held is None else 3 - held,
        last_held=held,
        run=RUN,
        detail="",
    )
    return replace(found, **changes)  # type: ignore[arg-type]


def holding(name: str, number: int, **changes: object) -> Holding:
    pushed = NOW - timedelta(minutes=10)
    found = Holding(
        worker=name,
        incarnation="ab12cd34ef",
        policy="default",
        version=number,
        digest="blake3:d",
        sent_digest="blake3:d",
        order=7,
        run=RUN,
        pushed_at=pushed,
        confirmed_at=pushed + timedelta(milliseconds=12),
        ended_at=None,
        ended_how=None,
        state="held",
    )
    return replace(found, **changes)  # type: ignore[arg-type]


def pin(name: str, number: int, ref: int | str | None = None, reason: str = "") -> Pin:
    return Pin(name, number if ref is None else ref, number, reason, NOW, RUN)


NO_MARKS = render.Marks(None, {}, [])


def lines(blocks: Sequence[Block], width: int | None = None) -> list[str]:
    return [line.plain for line in terminal.compose(blocks, width)]


def page(blocks: Sequence[Block], width: int | None = None) -> str:
    return "\n".join(lines(blocks, width))


# ---------------------------------------------------------------------- log


def test_the_log_draws_a_rollback_its_abandoned_branch_and_what_points_where() -> None:
    versions = [
        version(1),
        version(2, message="stable run"),
        version(3, nonfinite=("w",)),
        version(4, parent=2, restores=2, message="reward collapsed\nsee the wiki"),
        version(5),
    ]
    marks = render.Marks(5, {"best": 2}, [pin("eval-*", 2), pin("canary", 5)])
    assert lines(render.log(versions, marks, dict.fromkeys(range(1, 6), "ann"), older=False)) == [
        "version  step  reward  written (UTC)        by   what",
        "●    v5   500     5.5  2026-05-04 11:05:00  ann  [head, pin canary]",
        "●    v4   400     4.5  2026-05-04 11:04:00  ann  ⤺ restores v2 reward collapsed …",
        "│ ○  v3   300     3.5  2026-05-04 11:03:00  ann  [not finite]",
        "●─╯  v2   200     2.5  2026-05-04 11:02:00  ann  [best, pin eval-*] stable run",
        "●    v1   100     1.5  2026-05-04 11:01:00  ann",
        "● lineage of the head, ○ abandoned",
    ]


def test_the_log_marks_a_new_line_equal_content_and_another_dtype() -> None:
    versions = [
        version(1, dtypes="float32"),
        version(2, digest=version(1).digest, dtypes="float32"),
        version(3, dtypes="bfloat16"),
        version(4, parent=2, restores=2, digest=version(1).digest, dtypes="float32"),
        version(5, parent=None, digest=version(1).digest, dtypes="float32", message="anew"),
        version(6, dtypes=None),
    ]
    bare = [replace(each, step=None, metrics={}) for each in versions]

    def whats(**options: object) -> list[str]:
        shown = lines(render.log(bare[1:], NO_MARKS, {}, older=True, **options))  # type: ignore[arg-type]
        return [line[32:] for line in shown[1:6]]

    assert whats() == [
        "",
        "begins a new line [same content as v4] anew",
        "⤺ restores v2",
        "[float32 → bfloat16]",
        "",
    ]
    # The first one shown is compared with the one that was left out.
    assert whats(before=bare[0])[-1] == "[same content as v1]"


def test_one_version_tells_of_its_equals() -> None:
    shown = page(
        render.version(
            version(3, dtypes="float32"), NO_MARKS, staleness=0, holders=[], user="", now=NOW, same=[1, 2, 7]
        )
    )
    assert "same content  v1–v2, v7" in shown and "dtypes        float32" in shown


def test_a_straight_log_needs_no_legend_and_no_empty_columns() -> None:
    versions = [version(number, step=None, metrics={}) for number in (1, 2)]
    assert lines(render.log(versions, NO_MARKS, {}, older=False)) == [
        "version  written (UTC)        what",
        "●  v2    2026-05-04 11:02:00",
        "●  v1    2026-05-04 11:01:00",
    ]


def test_pruned_versions_stay_in_the_log_and_are_told_apart() -> None:
    versions = [version(1, stored=False, state="pruned", message="first"), version(2)]
    shown = page(render.log(versions, NO_MARKS, {}, older=False))
    assert "·  v1" in shown
    assert "[pruned] first" in shown
    assert "· pruned" in shown


def test_a_log_that_was_limited_says_how_to_see_the_rest() -> None:
    assert lines(render.log([version(7)], NO_MARKS, {}, older=True))[-1] == "Older versions: -n N or --all."
    assert lines(render.log([], NO_MARKS, {}, older=False)) == ["No versions yet."]


def test_the_log_shows_the_most_common_metrics_as_columns() -> None:
    versions = [
        version(1, metrics={"rare": 1.0, "reward": 1.0, "loss": 0.5, "kl": 0.1}),
        version(2, metrics={"reward": 2.0, "loss": 0.25, "kl": float("nan")}),
    ]
    title, newest, *_ = lines(render.log(versions, NO_MARKS, {}, older=False))
    assert title.split()[:5] == ["version", "step", "reward", "loss", "kl"]
    assert newest.split()[2:6] == ["200", "2", "0.25", "nan"]


def test_at_eighty_columns_the_message_keeps_its_room_and_what_is_left_out_is_named() -> None:
    versions = [
        version(n, metrics={"reward": 1.25, "loss": 0.031, "kl": 0.01}, message="a long message " * 5)
        for n in (1, 2)
    ]
    shown = lines(render.log(versions, NO_MARKS, dict.fromkeys((1, 2), "somebody"), older=False), 80)
    assert all(len(line) <= 80 for line in shown)
    assert "a long message a long message" in shown[1]
    assert shown[1].endswith("…")
    assert shown[-1] == "Left out at this width: loss, kl, by."


def test_many_pins_on_one_version_are_summed_up() -> None:
    marks = render.Marks(None, {}, [pin(f"w{index}", 1) for index in range(1000)])
    assert "[pin w0, w1 and 998 more]" in page(render.log([version(1)], marks, {}, older=False))


# ---------------------------------------------------------------------- one version


def test_a_version_is_shown_with_everything_known_of_it() -> None:
    found = version(
        4,
        parent=2,
        restores=2,
        metrics={"reward": 38.0, "loss": float("nan")},
        metadata={"seed": 3, "env": "CartPole-v1"},
        message="reward collapsed\nsee the wiki",
        nonfinite=("layer.weight",),
        has_extra=True,
    )
    marks = render.Marks(4, {"best": 4}, [])
    shown = lines(render.version(found, marks, staleness=0, holders=["w1", "w2"], user="ann", now=NOW))
    assert shown == [
        "v4 of policy default",
        "  state        stored",
        "  points here  head, best",
        "  restores     v2",
        "  parent       v2",
        "  staleness    0, its content is the head's",
        "  step         400",
        "  metrics      reward 38",
        "               loss nan",
        "  metadata     seed 3",
        "               env 'CartPole-v1'",
        "  message      reward collapsed",
        "               see the wiki",
        "  held by      w1, w2",
        "  size         1 MB",
        "  extra state  stored beside it",
        "  not finite   layer.weight",
        f"  digest       {found.digest}",
        "  written      2026-05-04 11:04:00 (UTC), 56 min ago",
        f"  by           ann run {RUN}",
    ]


@pytest.mark.parametrize(
    ("state", "text"),
    [
        ("lost", "lost: its writer died"),
        ("pruned", "pruned: only the row is left"),
        ("writing", "being written"),
    ],
)
def test_a_version_that_cannot_be_loaded_says_why(state: str, text: str) -> None:
    found = version(1, state=state, stored=False)
    shown = page(render.version(found, NO_MARKS, staleness=None, holders=[], user="", now=NOW))
    assert text in shown
    assert ("none: its branch was abandoned" in shown) == (state == "pruned")


# ---------------------------------------------------------------------- differences


def test_a_diff_counts_what_is_the_same_and_lists_the_rest() -> None:
    tensors = {"changed": ["w"], "only_a": ["old"], "only_b": ["new"], "same": ["b", "c"]}
    assert lines(render.diff(version(1), version(2), tensors, show_all=False)) == [
        "v1 → v2: 1 changed, 1 only in v1, 1 only in v2, 2 the same",
        "  changed     w",
        "  only in v1  old",
        "  only in v2  new",
    ]
    assert lines(render.diff(version(1), version(2), tensors, show_all=True))[-2:] == [
        "  same        b",
        "  same        c",
    ]


def test_a_diff_of_equal_content_says_so() -> None:
    same = replace(version(4), digest=version(2).digest)
    tensors: dict[str, list[str]] = {"changed": [], "only_a": [], "only_b": [], "same": ["w"]}
    assert lines(render.diff(version(2), same, tensors, show_all=False)) == ["v2 → v4: equal content"]


# ---------------------------------------------------------------------- workers


def status(workers: Sequence[WorkerStatus], width: int | None = None, **changes: object) -> list[str]:
    options = {"policy": "default", "user": "ann", "now": NOW, "show_all": False, **changes}
    return lines(render_workers.status(version(3), workers, NO_MARKS, **options), width)  # type: ignore[arg-type]


def test_the_status_tells_what_is_known_of_each_worker_and_what_is_not() -> None:
    """RL-01: a worker that lags shows by how much; one that is unknown is not assumed to be where it was."""
    shown = status(
        [
            worker("w1"),
            worker("w10", 1),
            worker(
                "w2", None, state="unknown", pending=3, last_held=2, detail="the run that steered it is gone"
            ),
            worker("w3", None, state="gone", last_held=None, target=2, detail="the actor died"),
            worker("w4", 2, staleness=None, target=2),
            worker("w5", 2, pending=3, detail="waits for its receipt"),
        ]
    )
    assert shown == [
        "policy default  head v3  step 300  reward 3.5  57 min ago by ann",
        "",
        "2 of 6 workers hold their target; 1 unknown, 1 gone",
        "worker  holds     target     behind  pending  state      as of",
        "w1      v3        v3              0           confirmed  3 s ago",
        "w2      ? was v2  v3              ?  v3       unknown    3 s ago",
        "w3      ?         v2              ?           gone       3 s ago",
        "w4      v2        v2      abandoned           confirmed  3 s ago",
        "w5      v2        v3              1  v3       confirmed  3 s ago",
        "w10     v1        v3              2           confirmed  3 s ago",
        "w2: the run that steered it is gone",
        "w3: the actor died",
    ]


def test_workers_that_share_a_reason_are_named_together() -> None:
    unknown = [worker(f"w{n}", None, state="unknown", detail="the run is gone") for n in range(12)]
    assert status(unknown)[-1] == "w0, w1, w2 and 9 more: the run is gone"


def test_in_a_large_fleet_those_that_are_not_at_their_target_are_shown() -> None:
    fleet = [worker(f"w{n}", 2 if n == 700 else 3) for n in range(1000)]
    shown = status(fleet)
    assert "999 of 1,000 workers hold their target" in shown
    assert [line.split()[0] for line in shown[-3:]] == ["worker", "w700", "999"]
    assert shown[-1] == "999 more workers: --all."
    assert len(status(fleet, show_all=True)) == 1004


def test_the_status_of_a_policy_without_versions_or_workers() -> None:
    shown = lines(
        render_workers.status(None, [], NO_MARKS, policy="main", user="", now=NOW, show_all=False),
    )
    assert shown == [
        "policy main: no versions yet",
        "",
        "No workers yet: they appear when an updater first brings them a version.",
    ]


def test_the_status_names_aliases_and_pins() -> None:
    marks = render.Marks(3, {"best": 2}, [pin("eval-*", 2, "best"), pin("canary", 3)])
    head = version(3, parent=2, restores=2, nonfinite=("w",))
    shown = lines(render_workers.status(head, [], marks, policy="p", user="", now=NOW, show_all=False))
    assert shown[:3] == [
        "policy p  head v3  ⤺ restores v2  step 300  reward 3.5  57 min ago  not finite",
        "aliases  best → v2",
        "pins     eval-* → v2 (alias best), canary → v3",
    ]


def test_the_audit_shows_pushes_that_were_never_confirmed_and_equal_content_under_other_numbers() -> None:
    hour = timedelta(minutes=60)
    rows = [
        holding("w1", 4, same_content_as=2, ended_at=NOW, ended_how="replaced", state="ended"),
        holding("w2", 2, sent_digest="blake3:mapped"),
        holding("w3", 2, confirmed_at=None, incarnation=None, state="pending"),
        holding(
            "w4", 2, confirmed_at=None, incarnation=None, ended_at=NOW, ended_how="unconfirmed", state="ended"
        ),
        holding(
            "w5", 2, state="unknown", pushed_at=NOW - hour, confirmed_at=NOW - hour + timedelta(seconds=61)
        ),
    ]
    title = render_workers.audit_title("default", worker=None, version="v2", at=None, since=NOW, until=None)
    assert lines(render_workers.holdings(rows, title=title, now=NOW, older=True), 100) == [
        "Policy default, version v2, since 2026-05-04 12:00:00.000 UTC",
        "worker  version  pushed (UTC)              confirmed  held for  state        weights",
        "w1      v4 = v2  2026-05-04 11:50:00.000      +12 ms    10 min  replaced",
        "w2      v2       2026-05-04 11:50:00.000      +12 ms    10 min  held         mapped or cast",
        "w3      v2       2026-05-04 11:50:00.000     not yet         –  pending",
        "w4      v2       2026-05-04 11:50:00.000       never         –  unconfirmed",
        "w5      v2       2026-05-04 11:00:00.000  +1 min 1 s         ?  unknown",
        "Left out at this width: run, life, order.",
        "Only the newest 5 are shown: -n N or --all.",
    ]
    assert "3fa9c1d2" in page(render_workers.holdings(rows, title=title, now=NOW, older=False))


def test_an_audit_without_an_answer_says_what_was_asked() -> None:
    title = render_workers.audit_title("p", worker="w9", version=None, at=NOW, since=None, until=None)
    assert lines(render_workers.holdings([], title=title, now=NOW, older=False)) == [
        "Policy p, worker w9, held at 2026-05-04 12:00:00.000 UTC",
        "No holdings found.",
    ]


def test_the_journal_shows_who_did_what_and_why() -> None:
    rows = [
        Event(1, "p", NOW, "rollback", RUN, "ann", 4, None, "reward collapsed", {"restores": 2, "from": 3}),
        Event(2, "p", NOW, "worker_lost", RUN, "bob", None, "w2", "the actor died", {"version": None}),
    ]
    assert lines(render_workers.events(rows, older=False)) == [
        "when (UTC)           event        version  worker  by   run       what",
        "2026-05-04 12:00:00  rollback     v4               ann  3fa9c1d2  reward collapsed (restores 2, from 3)",
        "2026-05-04 12:00:00  worker_lost           w2      bob  3fa9c1d2  the actor died",
    ]
    assert lines(render_workers.events([], older=False)) == ["No events found."]


def test_pins_and_aliases_are_listed_or_said_to_be_none() -> None:
    assert lines(render_workers.pins([pin("eval-*", 2, "best", "compare")])) == [
        "worker  version          since (UTC)          reason",
        "eval-*  v2 (alias best)  2026-05-04 12:00:00  compare",
    ]
    assert lines(render_workers.pins([])) == ["No pins: every worker follows the head."]
    assert lines(render.aliases({"best": 2})) == ["alias  version", "best   v2"]
    assert lines(render.aliases({})) == ["No aliases."]


# ---------------------------------------------------------------------- keeping


def test_faults_are_shown_whole_however_narrow_the_terminal_is() -> None:
    path = "/runs/cartpole/snapshots/" + "a" * 64 + "-1f.safetensors"
    faults = [
        Fault("truncated", path, (2, 3, 4, 9), "expected 100 bytes, found 12"),
        Fault("stray", "x", (), "?"),
    ]
    assert lines(render.faults(faults, what="9 stored versions")) == [
        "2 faults in 9 stored versions.",
        "fault      versions   file",
        f"truncated  v2–v4, v9  {path}",
        "                      expected 100 bytes, found 12",
        "stray      –          x",
        "                      ?",
    ]
    narrow = lines(render.faults(faults, what="it"), 60)
    assert all(len(line) <= 60 for line in narrow)
    assert path in "".join(line[22:] for line in narrow)
    assert lines(render.faults([], what="v2")) == ["No faults in v2."]


def test_a_dry_run_shows_why_each_version_stays() -> None:
    """CK-04: what is kept is listed with its reasons."""
    gone = [version(1), version(2), version(4), replace(version(5), digest=version(4).digest)]
    report = PruneReport(gone, {9: ("head", "held by w1"), 3: ("alias best",)})
    assert lines(render.prune(report, dry_run=True)) == [
        "Would delete the weights of 4 versions (3 MB): v1–v2, v4–v5.",
        "stays  because",
        "   v3  alias best",
        "   v9  head; held by w1",
    ]
    assert lines(render.prune(report, dry_run=False)) == [
        "Deleted the weights of 4 versions (3 MB): v1–v2, v4–v5.",
        "2 stored versions stay.",
    ]
    assert lines(render.prune(PruneReport([], {1: ("head",)}), dry_run=False)) == [
        "Deleted nothing.",
        "1 stored version stays.",
    ]


# ---------------------------------------------------------------------- words


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0124, "12 ms"),
        (0.9996, "1 s"),
        (1, "1 s"),
        (59.6, "1 min"),
        (61, "1 min 1 s"),
        (3600, "1 h"),
        (3_660, "1 h 1 min"),
        (3_605, "1 h"),
        (90_000, "1 d 1 h"),
        (10_000_000, "115 d 17 h"),
    ],
)
def test_a_length_of_time_is_told_in_its_two_largest_units(seconds: float, text: str) -> None:
    assert span(seconds) == text


def test_an_age_is_told_also_of_what_lies_ahead_of_this_clock() -> None:
    """CK-09: clocks differ; that is said, not hidden."""
    assert age(NOW - timedelta(seconds=90), NOW) == "1 min 30 s ago"
    assert age(NOW, NOW) == "just now"
    assert age(NOW + timedelta(hours=1), NOW) == "1 h ahead of this clock"


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (999_600, "1 MB"),
        (1_234_567, "1.23 MB"),
        (268e6, "268 MB"),
    ],
)
def test_a_size_is_told_in_decimal_units(count: float, text: str) -> None:
    assert size(int(count)) == text
    assert size(5 * 10**12) == "5 TB"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (38.0, "38"),
        (0.0, "0"),
        (1e12, "1e+12"),
        (0.00001234, "1.234e-05"),
        (3.14159, "3.142"),
        (float("inf"), "inf"),
    ],
)
def test_a_metric_is_told_to_four_digits(value: float, text: str) -> None:
    assert figure(value) == text


def test_names_and_numbers_are_drawn_together() -> None:
    assert some(["a", "b", "c"], 2) == "a, b and 1 more"
    assert some([], 2) == ""
    assert ranges([9, 2, 3, 4]) == "v2–v4, v9"
    assert sorted(["w10", "w2", "a", "w"], key=natural) == ["a", "w", "w2", "w10"]


def test_a_zone_that_changed_between_two_times_is_called_local(monkeypatch: pytest.MonkeyPatch) -> None:
    import time

    monkeypatch.setenv("TZ", "CET-1CEST,M3.5.0,M10.5.0/3")
    time.tzset()
    summer, winter = NOW, NOW - timedelta(days=120)
    assert (zone([summer]), zone([winter]), zone([summer, winter])) == ("CEST", "CET", "local")


# ---------------------------------------------------------------------- terminals and pipes


def test_text_from_users_cannot_move_the_cursor_or_hide() -> None:
    found = version(1, message="\x1b[2Jgone\x07 \u202eevil \x9b31m")
    shown = page(render.log([found], NO_MARKS, {1: "a\x1b[31m"}, older=False))
    assert "\\x1b[2Jgone\\x07 \\u202eevil \\x9b31m" in shown
    assert not any(char in shown for char in "\x1b\x07\u202e\x9b")


def test_markup_of_the_drawing_library_is_plain_text() -> None:
    assert "[bold]x[/bold] :smile:" in page(
        render.log([version(1, message="[bold]x[/bold] :smile:")], NO_MARKS, {}, older=False)
    )


def test_wide_characters_keep_the_columns_aligned() -> None:
    table = Table([Column("a", [words("日本"), words("xy")]), Column("b", [words("1"), words("2")])])
    assert lines([table]) == ["a     b", "日本  1", "xy    2"]


@given(
    st.lists(
        st.tuples(st.text(max_size=30), st.text(max_size=60), st.text(max_size=10)), min_size=1, max_size=5
    ),
    st.integers(min_value=30, max_value=120),
    st.sampled_from(["cut", "wrap"]),
)
def test_a_table_never_runs_over_the_edge_while_something_can_give(
    rows: list[tuple[str, str, str]], width: int, stretch: str
) -> None:
    table = Table(
        [
            Column("id", [words(str(index)) for index in range(len(rows))]),
            Column("first", [words(row[0]) for row in rows], rank=2),
            Column("what", [words(row[1]) for row in rows], stretch=stretch),  # type: ignore[arg-type]
            Column("last", [words(row[2]) for row in rows], rank=1, right=True),
        ]
    )
    composed = terminal.compose([table], width)
    assert all(line.cell_len <= width for line in composed)
    assert all(line.plain == line.plain.rstrip() for line in composed)


def test_into_a_pipe_a_row_is_one_whole_line_without_colours(capsys: pytest.CaptureFixture[str]) -> None:
    terminal.show(
        [Table([Column("a", [words(("x" * 300, "bad"))], stretch="cut"), Column("b", [words("y")])])]
    )
    assert capsys.readouterr().out.splitlines() == ["a" + " " * 301 + "b", "x" * 300 + "  y"]


def shown_on_a_terminal(**environment: str) -> str:
    """Show a styled line in a real process on a real pseudo-terminal, 40 columns wide."""
    program = (
        "from weightledger.registry.commands.terminal import Line, Table, Column, show, words\n"
        "show([Line(words(('⤺ ok', 'good'))), Table([Column('t', [words('x' * 60)], stretch='cut')])])"
    )
    reader, writer = pty.openpty()
    import fcntl
    import struct
    import termios

    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 40, 0, 0))
    keep = {
        name: value
        for name, value in os.environ.items()
        if name not in ("NO_COLOR", "COLUMNS", "FORCE_COLOR")
    }
    subprocess.run(
        [sys.executable, "-c", program],
        stdin=subprocess.DEVNULL,
        stdout=writer,
        env=keep | {"TERM": "xterm-256color"} | environment,
        timeout=60,
        check=True,
    )
    os.close(writer)
    seen = b""
    try:
        while chunk := os.read(reader, 65536):
            seen += chunk
    except OSError:  # Linux reports the closed other end of a terminal in this way
        pass
    os.close(reader)
    return seen.decode()


def test_on_a_terminal_there_are_colours_and_rows_end_at_its_edge() -> None:
    shown = shown_on_a_terminal()
    assert "\x1b[" in shown
    assert "x" * 39 + "…" in shown
    assert "x" * 40 not in shown


def test_no_color_means_no_escape_codes_at_all() -> None:
    shown = shown_on_a_terminal(NO_COLOR="1")
    assert "⤺ ok" in shown
    assert "\x1b" not in shown


def test_a_wished_width_is_kept_also_in_a_pipe(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`watch` reads a pipe and tells its width in COLUMNS."""
    monkeypatch.setenv("COLUMNS", "20")
    terminal.show([Line(words("one two three four five six"))])
    assert capsys.readouterr().out == "one two three four\nfive six\n"


def test_where_the_encoding_has_no_symbols_ascii_takes_their_place(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    terminal.show([Line(words("●─╯ v2 ⤺ v1, naïve"))])
    assert raw.getvalue() == b"*-' v2 < v1, na\\xefve\n"

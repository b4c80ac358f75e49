"""Questions about the record, asked of a real database."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import Connection, event, insert

from tests.registry.rows import RUN, START, Rows, digest, minute
from weightledger.registry.errors import NotFoundError
from weightledger.registry.log import audit
from weightledger.registry.log.models import EventRow, HoldingRow, PolicyRef, Run, Worker
from weightledger.registry.records import Holding, WorkerStatus

DEAD = "d" * 32


def alive(run: str) -> bool:
    return run != DEAD


@pytest.fixture
def rows(tmp_path: Path) -> Rows:
    return Rows(tmp_path)


def ask(rows: Rows, question: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    with rows.database.reading() as conn:
        return question(conn, rows.policy, *arguments, **named)


def workers(rows: Rows) -> dict[str, WorkerStatus]:
    return {status.name: status for status in ask(rows, audit.workers, alive)}


def story_of(rows: Rows, **named: Any) -> list[tuple[str, int, int]]:
    return [
        (each.worker, each.version, each.order) for each in ask(rows, audit.history, alive=alive, **named)
    ]


# ---------------------------------------------------------------------- staleness


def staleness(rows: Rows) -> dict[int, int | None]:
    with rows.database.reading() as conn:
        numbers = range(30)
        together = audit.staleness_of(conn, rows.policy, numbers)
        for number in numbers:
            if number in together:
                assert audit.staleness(conn, rows.policy, number) == together[number]
        return together


def test_staleness_counts_the_publishes_since(rows: Rows) -> None:
    for number in (1, 2, 3, 4):
        rows.version(number)
    assert staleness(rows) == {1: 3, 2: 2, 3: 1, 4: 0}


def test_after_a_rollback_the_restored_content_is_the_newest_and_what_was_left_is_off_the_map(
    rows: Rows,
) -> None:
    """v4 restores v2: who holds v2 is up to date, v3 was abandoned, v5 goes on from v4."""
    for number in (1, 2, 3):
        rows.version(number)
    rows.version(4, 2, restores=2, depth=2)
    assert staleness(rows) == {1: 1, 2: 0, 3: None, 4: 0}
    rows.version(5, depth=3)
    assert staleness(rows) == {1: 2, 2: 1, 3: None, 4: 1, 5: 0}


def test_an_abandoned_version_counts_again_when_its_content_comes_back(rows: Rows) -> None:
    """By restoring it, and by publishing equal weights."""
    rows.version(1)
    rows.version(2)
    rows.version(3, 1, restores=1, depth=1)
    assert staleness(rows)[2] is None
    rows.version(4, 2, restores=2, depth=2)
    assert staleness(rows) == {1: 1, 2: 0, 3: 1, 4: 0}
    rows.version(5, "new", depth=3)
    rows.version(6, 1, depth=4)
    assert staleness(rows) == {1: 0, 2: 2, 3: 0, 4: 2, 5: 1, 6: 0}


def test_what_was_lost_or_is_being_written_is_no_part_of_the_lineage(rows: Rows) -> None:
    rows.version(1)
    rows.version(2, state="lost", depth=2)
    rows.version(3, parent=1, depth=2)
    rows.version(4, depth=3, state="writing")
    assert staleness(rows) == {1: 1, 2: None, 3: 0, 4: None}


def test_staleness_of_an_unknown_version_names_those_that_exist(rows: Rows) -> None:
    with pytest.raises(NotFoundError, match=r"no version 1; it has none yet"):
        ask(rows, audit.staleness, 1)
    rows.version(1)
    rows.version(2)
    with pytest.raises(NotFoundError, match=r"'default' has no version 99; it has v1 to v2"):
        ask(rows, audit.staleness, 99)


def test_policies_do_not_see_each_other(rows: Rows) -> None:
    rows.version(1)
    rows.worker("w0")
    rows.holding("w0", 1, 1, 1, 1.1)
    rows.event("publish", 1, version=1)
    other = PolicyRef(rows.add_policy("opponent").id, "opponent")
    with rows.database.reading() as conn:
        assert audit.workers(conn, other, alive) == []
        assert audit.holdings(conn, other, alive=alive) == []
        assert audit.holdings(conn, other, minute(5), alive=alive) == []
        assert audit.history(conn, other, alive=alive) == []
        assert audit.history(conn, other, since=START, alive=alive) == []
        assert audit.events(conn, other) == []
        assert audit.staleness_of(conn, other, [1]) == {}
        with pytest.raises(NotFoundError, match="none yet"):
            audit.history(conn, other, worker="w0", alive=alive)


# ---------------------------------------------------------------------- workers


def test_a_confirmed_worker_holds_its_version_and_says_how_far_behind_it_is(rows: Rows) -> None:
    """RL-01."""
    for number in range(1, 6):
        rows.version(number)
    rows.worker("w0")
    rows.holding("w0", 1, 1, 1, 1.1, 3.1)
    rows.holding("w0", 3, 2, 3, 3.1)
    status = workers(rows)["w0"]
    assert (status.state, status.held, status.pending, status.target) == ("confirmed", 3, None, 5)
    assert (status.staleness, status.last_held, status.incarnation, status.run) == (2, 3, "life-1", RUN)


def test_a_worker_that_never_answered_holds_nothing_known(rows: Rows) -> None:
    rows.version(1)
    rows.worker("w0", "unknown", detail="not synced yet")
    status = workers(rows)["w0"]
    assert (status.state, status.held, status.last_held, status.staleness) == ("unknown", None, None, None)
    assert (status.target, status.detail) == (1, "not synced yet")


def test_an_unsettled_push_makes_a_worker_unknown(rows: Rows) -> None:
    """Contract, promise 4: "unknown, v2 pending", not a false "still v1"."""
    rows.version(1)
    rows.version(2)
    rows.worker("w0")
    rows.holding("w0", 1, 1, 1, 1.1)
    rows.holding("w0", 2, 2, 5)
    status = workers(rows)["w0"]
    assert (status.state, status.held, status.pending, status.last_held) == ("unknown", None, 2, 1)
    assert status.evidence_at == minute(5)
    assert "a push of v2 is not settled" in status.detail


def test_a_worker_whose_run_is_gone_is_unknown(rows: Rows) -> None:
    """RL-11: the records of a dead run are marked as such, with who it was."""
    rows.version(1)
    rows.add_run(DEAD)
    rows.worker("w0", run=DEAD)
    rows.holding("w0", 1, 1, 1, 1.1)
    status = workers(rows)["w0"]
    assert (status.state, status.held, status.last_held) == ("unknown", None, 1)
    assert f"run {DEAD} (process 2 of bob on other) is gone" in status.detail


def test_a_worker_that_is_gone_stays_gone(rows: Rows) -> None:
    rows.version(1)
    rows.version(2)
    rows.add_run(DEAD)
    rows.worker("w0", "gone", run=DEAD, detail="its node died")
    rows.holding("w0", 1, 1, 1, 1.1, 2.1)
    rows.holding("w0", 2, 2, 2, 2.1, 4, how="lost")
    status = workers(rows)["w0"]
    assert (status.state, status.held, status.last_held, status.detail) == ("gone", None, 2, "its node died")


def test_a_confirmed_worker_without_a_receipt_on_record_is_unknown(rows: Rows) -> None:
    rows.version(1)
    rows.worker("w0")
    rows.holding("w0", 1, 1, 1, None, 2, how="failed")
    status = workers(rows)["w0"]
    assert (status.state, status.held, status.last_held) == ("unknown", None, None)
    assert "no receipt" in status.detail


def test_targets_come_from_pins_and_aliases_and_else_the_head(rows: Rows) -> None:
    """RL-13: whoever comes late has the target of its group at once."""
    first = rows.version(1)
    rows.version(2)
    rows.version(3)
    rows.alias("best", first)
    rows.pin("eval-*", alias="best")
    rows.pin("eval-7", version=2)
    for name in ("eval-1", "eval-7", "train-1"):
        rows.worker(name)
    assert {name: status.target for name, status in workers(rows).items()} == {
        "eval-1": 1,
        "eval-7": 2,
        "train-1": 3,
    }


def test_each_run_is_asked_after_once(rows: Rows) -> None:
    rows.version(1)
    asked: list[str] = []
    for index in range(5):
        rows.worker(f"w{index}")
        rows.holding(f"w{index}", 1, index + 1, 1, 1.1)

    def alive(run: str) -> bool:
        asked.append(run)
        return True

    for question in (lambda c, p: audit.workers(c, p, alive), lambda c, p: audit.holdings(c, p, alive=alive)):
        asked.clear()
        assert len(ask(rows, question)) == 5
        assert asked == [RUN]


# ---------------------------------------------------------------------- holdings and history


@pytest.fixture
def book(rows: Rows) -> Rows:
    """Two workers over ten minutes: v2 was refused by w0 once, a push of v3 to w1 was never answered."""
    rows.version(1)
    rows.version(2)
    rows.version(3)
    rows.version(4, 2, restores=2, depth=2)
    rows.worker("w0")
    rows.worker("w1", "unknown")
    rows.holding("w0", 1, 1, 1, 1.5, 4.5)
    rows.holding("w1", 1, 1, 1, 1.5, 3.5)
    rows.holding("w0", 2, 2, 2, None, 2.5, how="failed")
    rows.holding("w1", 2, 3, 3, 3.5, 8, how="lost")
    rows.holding("w0", 2, 4, 4, 4.5, 9.5)
    rows.holding("w1", 3, 5, 6, None, 8, how="unconfirmed")
    rows.holding("w0", 4, 6, 9, 9.5)
    return rows


@pytest.mark.parametrize(
    ("at", "held"),
    [
        (1, {}),
        (1.5, {"w0": 1, "w1": 1}),
        (3.4, {"w0": 1, "w1": 1}),
        (3.5, {"w0": 1, "w1": 2}),
        (4.5, {"w0": 2, "w1": 2}),
        (7.9, {"w0": 2, "w1": 2}),
        (8, {"w0": 2}),
        (9.5, {"w0": 4}),
        (900, {"w0": 4}),
    ],
)
def test_what_was_held_at_a_moment(book: Rows, at: float, held: dict[str, int]) -> None:
    found: list[Holding] = ask(book, audit.holdings, minute(at), alive=alive)
    assert {each.worker: each.version for each in found} == held
    assert {each.state for each in found if each.ended_at} <= {"ended"}


def test_what_is_held_now(book: Rows) -> None:
    (found,) = ask(book, audit.holdings, alive=alive)
    assert (found.worker, found.version, found.state, found.policy) == ("w0", 4, "held", "default")
    assert (found.digest, found.sent_digest, found.order) == (digest(2), digest(2), 6)
    assert (found.pushed_at, found.confirmed_at, found.ended_at) == (minute(9), minute(9.5), None)


def test_a_moment_may_be_given_in_any_time_zone(book: Rows) -> None:
    """SQL-04."""
    moment = minute(4.5).astimezone(timezone(timedelta(hours=-8)))
    assert len(ask(book, audit.holdings, moment, alive=alive)) == 2


def test_history_is_in_the_order_of_pushes_without_what_workers_refused(book: Rows) -> None:
    assert story_of(book) == [
        ("w0", 1, 1),
        ("w1", 1, 1),
        ("w1", 2, 3),
        ("w0", 2, 4),
        ("w1", 3, 5),
        ("w0", 4, 6),
    ]
    assert story_of(book, limit=2) == [("w1", 3, 5), ("w0", 4, 6)]
    assert story_of(book, limit=0) == []


def test_history_of_a_worker(book: Rows) -> None:
    assert story_of(book, worker="w1") == [("w1", 1, 1), ("w1", 2, 3), ("w1", 3, 5)]
    assert story_of(book, worker="w1", limit=1) == [("w1", 3, 5)]
    with pytest.raises(NotFoundError, match=r"no worker 'w7'; its workers are: w0, w1"):
        story_of(book, worker="w7")


def test_a_push_that_was_never_answered_is_told_since_the_worker_may_have_run_it(book: Rows) -> None:
    found = ask(book, audit.history, worker="w1", alive=alive)[-1]
    assert (found.version, found.confirmed_at, found.ended_how, found.incarnation) == (
        3,
        None,
        "unconfirmed",
        None,
    )


def test_history_of_a_version_finds_equal_content_under_other_numbers(book: Rows) -> None:
    """v4 restores v2: a search for v2 finds who held v4, and says so."""
    found: list[Holding] = ask(book, audit.history, version=2, alive=alive)
    assert [(each.version, each.order, each.same_content_as) for each in found] == [
        (2, 3, None),
        (2, 4, None),
        (4, 6, 2),
    ]
    assert [each.same_content_as for each in ask(book, audit.history, version=4, alive=alive)] == [4, 4, None]
    assert story_of(book, version=2, worker="w0") == [("w0", 2, 4), ("w0", 4, 6)]
    with pytest.raises(NotFoundError, match="no version 9"):
        story_of(book, version=9)


@pytest.mark.parametrize(
    ("since", "until", "orders"),
    [
        (None, 1, []),
        (None, 1.1, [1, 1]),
        (0, 2, [1, 1]),
        (3.5, 4, [1, 3]),
        (4.5, 6, [3, 4]),
        (7, 7.5, [3, 4, 5]),
        (8, 8.5, [4]),
        (9.5, None, [6]),
        (100, None, [6]),
        (9.2, 9.4, [4, 6]),
        (None, None, [1, 1, 3, 4, 5, 6]),
    ],
)
def test_a_span_selects_what_overlaps_it(
    book: Rows, since: float | None, until: float | None, orders: list[int]
) -> None:
    span = {
        "since": None if since is None else minute(since),
        "until": None if until is None else minute(until),
    }
    assert [order for _, _, order in story_of(book, **span)] == orders
    of_w0 = [order for worker, _, order in story_of(book, **span) if worker == "w0"]
    assert [order for _, _, order in story_of(book, worker="w0", **span)] == of_w0


def test_several_pushes_without_an_answer_are_all_found_in_a_span(rows: Rows) -> None:
    """Drivers that died one after another: what each of them sent may have been run."""
    for number in (1, 2, 3, 4):
        rows.version(number)
    rows.worker("w0", "unknown")
    rows.holding("w0", 1, 1, 1, 1.5, 9)
    rows.holding("w0", 2, 2, 2, None, 9, how="unconfirmed")
    rows.holding("w0", 3, 3, 3, None, 9, how="unconfirmed")
    rows.holding("w0", 4, 4, 4, 9)
    assert [order for _, _, order in story_of(rows, since=minute(5), until=minute(6))] == [1, 2, 3, 4]


def test_open_rows_say_how_certain_they_are(rows: Rows) -> None:
    rows.version(1)
    rows.version(2)
    rows.add_run(DEAD)
    for name, run, state in (
        ("held", RUN, "confirmed"),
        ("pushed", RUN, "confirmed"),
        ("orphan", DEAD, "confirmed"),
        ("taken-over", RUN, "unknown"),
    ):
        rows.worker(name, state, run=run)
        rows.holding(name, 1, 1, 1, 1.1)
    rows.holding("pushed", 2, 2, 2)
    rows.holding("orphan", 2, 2, 2)
    found = {(each.worker, each.version): each.state for each in ask(rows, audit.history, alive=alive)}
    assert found == {
        ("held", 1): "held",
        ("pushed", 1): "unknown",
        ("pushed", 2): "pending",
        ("orphan", 1): "unknown",
        ("orphan", 2): "unknown",
        ("taken-over", 1): "unknown",
    }
    now = {each.worker: each.state for each in ask(rows, audit.holdings, alive=alive)}
    assert now == {"held": "held", "pushed": "unknown", "orphan": "unknown", "taken-over": "unknown"}


steps = st.lists(
    st.tuples(
        st.integers(0, 2),  # worker
        st.integers(1, 4),  # version
        st.sampled_from(["confirm", "refuse", "silence", "lose"]),
        st.integers(1, 3),  # minutes until what happens
    ),
    min_size=1,
    max_size=14,
)


@given(steps, st.lists(st.integers(0, 60), min_size=2, max_size=2))
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_spans_and_moments_agree_with_looking_at_every_row(
    rows: Rows, steps: list[tuple[int, int, str, int]], span: list[int]
) -> None:
    """A story with pushes, receipts, refusals, silences and deaths, each answer against the plain definition."""
    since, until = sorted(span)
    records = simulate(steps)
    with rows.database.writing() as conn:
        conn.execute(HoldingRow.__table__.delete())  # type: ignore[attr-defined]
        conn.execute(Worker.__table__.delete())  # type: ignore[attr-defined]
    if not rows.counts()["versions"]:
        for number in (1, 2, 3, 4):
            rows.version(number)
    rows.workers.clear()
    for name in ("w0", "w1", "w2"):
        rows.worker(name)
    for record in records:
        rows.holding(*record)

    def plain(start: float, end: float) -> list[tuple[str, int]]:
        return [
            (worker, order)
            for worker, _, order, pushed, _, ended, how in records
            if how != "failed" and pushed < end and (ended is None or ended > start)
        ]

    found = [(worker, order) for worker, _, order in story_of(rows, since=minute(since), until=minute(until))]
    assert found == plain(since, until)
    newest = [(worker, order) for worker, _, order in story_of(rows, since=minute(since), limit=3)]
    assert newest == plain(since, 1e9)[-3:]
    for version in (1, 2, 3, 4):
        of_version = story_of(rows, version=version, since=minute(since), until=minute(until))
        assert [(worker, order) for worker, _, order in of_version] == [
            (worker, order)
            for worker, number, order, *_ in records
            if number == version and (worker, order) in found
        ]
    moment = [(each.worker, each.order) for each in ask(rows, audit.holdings, minute(since), alive=alive)]
    assert moment == sorted(
        (worker, order)
        for worker, _, order, _, confirmed, ended, _ in records
        if confirmed is not None and confirmed <= since and (ended is None or ended > since)
    )


def simulate(
    steps: list[tuple[int, int, str, int]],
) -> list[tuple[str, int, int, float, float | None, float | None, str | None]]:
    """Play steps as the ledger would write them: an answer settles all pushes before it, a death ends everything."""
    rows: list[list[Any]] = []
    clock = 0.0
    for order, (index, version, what, minutes) in enumerate(steps, start=1):
        worker = f"w{index}"
        row: list[Any] = [worker, version, order, clock, None, None, None]
        silent = [each for each in rows if each[0] == worker and each[4] is None and each[5] is None]
        if len(silent) >= audit._UNSETTLED - 1 and what == "silence":
            what = "confirm"
        clock += minutes
        held = [each for each in rows if each[0] == worker and each[4] is not None and each[5] is None]
        rows.append(row)
        if what == "confirm":
            row[4] = clock
            for each in held:
                each[5], each[6] = clock, "replaced"
            for each in silent:
                each[5], each[6] = clock, "unconfirmed"
        elif what == "refuse":
            for each in [*silent, row]:
                each[5], each[6] = clock, "failed"
        elif what == "lose":
            for each in held:
                each[5], each[6] = clock, "lost"
            for each in [*silent, row]:
                each[5], each[6] = clock, "unconfirmed"
    return [tuple(row) for row in rows]  # type: ignore[misc]


# ---------------------------------------------------------------------- events


def test_events_are_told_oldest_first_by_their_number(rows: Rows) -> None:
    """CK-09: the clock stepped back between the second and the third."""
    first = rows.event("publish", 1, version=1)
    second = rows.event("sync_failed", 5, worker="w0", version=1)
    third = rows.event("publish", 3, version=2)

    def found(**named: Any) -> list[int]:
        return [each.id for each in ask(rows, audit.events, **named)]

    assert found() == [first, second, third]
    assert found(limit=2) == [second, third]
    assert found(kind="publish") == [first, third]
    assert found(worker="w0") == [second]
    assert found(version=1) == [first, second]
    assert found(version=1, kind="publish", limit=1) == [first]
    assert found(since=minute(3)) == [second, third]
    assert found(until=minute(3)) == [first]
    assert found(since=minute(3), until=minute(5)) == [third]


def test_an_event_tells_who_and_when(rows: Rows) -> None:
    rows.event("pin", 2, worker="w0", version=1)
    (event,) = ask(rows, audit.events)
    assert (event.policy, event.kind, event.run, event.user) == ("default", "pin", RUN, "ada")
    assert (event.worker, event.version, event.at, event.details) == ("w0", 1, minute(2), {})


# ---------------------------------------------------------------------- cost


QUESTIONS: dict[str, Callable[[Connection, PolicyRef], Any]] = {
    "workers": lambda conn, policy: audit.workers(conn, policy, alive),
    "workers of a dead run": lambda conn, policy: audit.workers(conn, policy, lambda run: False),
    "held now": lambda conn, policy: audit.holdings(conn, policy, alive=alive),
    "held then": lambda conn, policy: audit.holdings(conn, policy, minute(12.5), alive=alive),
    "a worker's last": lambda conn, policy: audit.history(conn, policy, worker="w3", limit=5, alive=alive),
    "a worker's span": lambda conn, policy: audit.history(
        conn, policy, worker="w3", since=minute(12), until=minute(14), alive=alive
    ),
    "a version's": lambda conn, policy: audit.history(conn, policy, version=12, alive=alive),
    "a version's last": lambda conn, policy: audit.history(conn, policy, version=12, limit=5, alive=alive),
    "a worker's version": lambda conn, policy: audit.history(
        conn, policy, worker="w3", version=12, alive=alive
    ),
    "a span": lambda conn, policy: audit.history(
        conn, policy, since=minute(12), until=minute(14), alive=alive
    ),
    "the last": lambda conn, policy: audit.history(conn, policy, limit=5, alive=alive),
    "the last since": lambda conn, policy: audit.history(
        conn, policy, since=minute(12), limit=5, alive=alive
    )[:0],
    "staleness": lambda conn, policy: audit.staleness_of(conn, policy, [1, 5, 12]),
    "pins": lambda conn, policy: audit.pins(conn, policy),
    "last events": lambda conn, policy: audit.events(conn, policy, limit=5),
    "last of a kind": lambda conn, policy: audit.events(conn, policy, kind="publish", limit=5),
    "last of a worker": lambda conn, policy: audit.events(conn, policy, worker="w3", limit=4),
    "last of a version": lambda conn, policy: audit.events(conn, policy, version=12, limit=5),
    "events of a span": lambda conn, policy: audit.events(conn, policy, since=minute(12), until=minute(14)),
}


def fill(rows: Rows, pushes: int) -> None:
    """Give each of ten workers so many holdings, one a minute and version, and a publish event a version."""
    for number in range(1, 31):
        rows.version(number)
    for index in range(10):
        rows.worker(f"w{index}")
    with rows.database.writing() as conn:
        conn.execute(
            insert(HoldingRow),
            [
                {
                    "policy_id": rows.policy.id,
                    "worker_id": rows.workers[f"w{index}"],
                    "version_id": min(order, 30),
                    "number": min(order, 30),
                    "digest": digest(min(order, 30)),
                    "sent_digest": digest(min(order, 30)),
                    "order": order,
                    "incarnation": "life-1",
                    "run_id": RUN,
                    "pushed_at": minute(order),
                    "confirmed_at": minute(order + 0.5),
                    "ended_at": None if order == pushes else minute(order + 1.5),
                    "ended_how": None if order == pushes else "replaced",
                }
                for order in range(1, pushes + 1)
                for index in range(10)
            ],
        )
        conn.execute(
            insert(EventRow),
            [
                {
                    "policy_id": rows.policy.id,
                    "at": minute(order),
                    "kind": "publish" if order % 2 else "sync_failed",
                    "run_id": RUN,
                    "user": "ada",
                    "version": min(order, 30),
                    "worker": f"w{order % 10}",
                    "reason": "",
                    "details": {},
                }
                for order in range(1, pushes + 1)
            ],
        )


@contextmanager
def steps_of(conn: Connection) -> Iterator[list[int]]:
    """Count SQLite's own steps, by hundreds: a measure of work that no other process disturbs."""
    count = [0]

    def step() -> None:
        count[0] += 1

    raw: Any = conn.connection.driver_connection
    raw.set_progress_handler(step, 100)
    try:
        yield count
    finally:
        raw.set_progress_handler(None, 0)


def test_an_answer_costs_the_same_in_a_record_that_is_thirty_times_as_long(tmp_path: Path) -> None:
    """Contract, section 7: audit questions grow with the logarithm, for answers of equal length."""
    small, large = Rows(tmp_path / "small"), Rows(tmp_path / "large")
    fill(small, 40)
    fill(large, 1200)
    for name, question in QUESTIONS.items():
        if name == "the last since":
            continue  # its candidates are all that followed
        work = []
        answers = []
        for rows in (small, large):
            with rows.database.reading() as conn, steps_of(conn) as count:
                answers.append(len(question(conn, rows.policy)))
            work.append(count[0])
        assert answers[0] == answers[1], name
        assert work[1] <= 1.3 * work[0] + 2, (name, work)


@pytest.mark.parametrize("name", QUESTIONS)
def test_no_question_reads_a_whole_table(rows: Rows, name: str) -> None:
    """By SQLite's own plan for each statement that the question takes."""
    fill(rows, 20)
    statements: list[tuple[str, Any]] = []

    def note(conn: Any, cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        statements.append((statement, parameters))

    event.listen(rows.database.engine, "before_cursor_execute", note)
    with rows.database.reading() as conn:
        QUESTIONS[name](conn, rows.policy)
        raw: Any = conn.connection.driver_connection
        assert statements
        for statement, parameters in statements:
            plan = [line[3] for line in raw.execute(f"EXPLAIN QUERY PLAN {statement}", parameters)]
            assert plan
            assert not [
                line for line in plan if re.match(r"SCAN (holdings|versions|events|workers|runs)", line)
            ]


def test_ten_thousand_runs_and_workers_fit_into_one_question(rows: Rows) -> None:
    """More than a statement may have parameters for."""
    rows.version(1)
    with rows.database.writing() as conn:
        ids = [f"{index:032x}" for index in range(2000)]
        conn.execute(
            insert(Run),
            [
                {
                    "id": each,
                    "user": "u",
                    "host": "h",
                    "pid": 1,
                    "program": "p",
                    "started_at": datetime.now(UTC),
                }
                for each in ids
            ],
        )
        conn.execute(
            insert(Worker),
            [
                {
                    "policy_id": rows.policy.id,
                    "name": f"w{index:05d}",
                    "run_id": ids[index % 2000],
                    "incarnation": None,
                    "state": "unknown",
                    "evidence_at": START,
                    "detail": "",
                }
                for index in range(10_000)
            ],
        )
    found = ask(rows, audit.workers, lambda run: False)
    assert len(found) == 10_000
    assert all("process 1 of u on h" in status.detail for status in found)

"""What an answer means for the record: pure, from every kind of answer to its settlement."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightledger.registry.log.fleet import Stretch, Verdict
from weightledger.updater.messages import Note, Outcome, Push, Receipt
from weightledger.updater.reports import Status
from weightledger.updater.workers.reading import read_receipt, read_trouble
from weightledger.updater.workers.state import InFlight, Trouble, TroubleKind, WorkerState, interval_of

LIFE = "life-1"


def push(version: int = 8, order: int = 12) -> Push:
    return Push(
        ("registry", "default"), "run", version, f"blake3:{version}", f"blake3:{version}", order, 64, "policy"
    )


def note(version: int, order: int, *, cast: tuple[str, ...] = ()) -> Note:
    return Note(version, f"blake3:{version}", f"blake3:{version}", order, "run", cast)


def receipt(outcome: Outcome, now: Note | None, before: Note | None = None, error: str = "") -> Receipt:
    return Receipt(outcome, 12, LIFE, now, before, error)


def worker(*, held: Note | None = None, life: str = LIFE, pending: tuple[Note, ...] = ()) -> WorkerState:
    made = WorkerState(0, "w", object(), 7)
    if held is not None:
        made.on_record = interval_of(held, life)
    made.unsettled = tuple(
        Stretch(one.version, one.digest, one.sent_digest, one.order, one.run, None) for one in pending
    )
    made.in_flight = InFlight(push(), None, False)
    return made


def test_an_applied_push_is_confirmed_under_its_own_order() -> None:
    reading = read_receipt(worker(), push(), receipt("applied", note(8, 12)))
    assert (reading.settlement.verdict, reading.settlement.order, reading.settlement.version) == (
        "confirmed",
        12,
        8,
    )
    assert (reading.settlement.incarnation, reading.settlement.sent_digest) == (LIFE, "blake3:8")
    assert (reading.status, reading.earlier, reading.resend) == ("synced", (), False)


def test_a_relabelled_worker_is_current_and_its_new_number_confirmed() -> None:
    reading = read_receipt(worker(), push(), receipt("relabelled", note(8, 12)))
    assert (reading.settlement.verdict, reading.status) == ("confirmed", "current")


def test_what_was_cast_is_told_in_the_settlement() -> None:
    reading = read_receipt(worker(), push(), receipt("applied", note(8, 12, cast=("weight",))))
    assert "weight" in reading.settlement.detail


def test_a_worker_that_kept_its_weights_failed_and_still_holds_what_is_on_record() -> None:
    old = note(7, 11)
    reading = read_receipt(worker(held=old), push(), receipt("kept", old, old, "wrong shape"))
    assert (reading.settlement.verdict, reading.status, reading.error) == ("kept", "failed", "wrong shape")
    assert reading.earlier == ()


def test_a_first_push_that_does_not_fit_is_a_failed_sync_and_no_lost_worker() -> None:
    reading = read_receipt(worker(), push(), receipt("kept", None, None, "wrong shape"))
    assert (reading.settlement.verdict, reading.earlier) == ("kept", ())


def test_a_process_without_a_note_ends_what_the_record_says_it_holds() -> None:
    reading = read_receipt(
        worker(held=note(7, 11), life="life-0"), push(), receipt("kept", None, None, "wrong shape")
    )
    assert [item.verdict for item in reading.earlier] == ["kept"]
    assert (reading.settlement.verdict, reading.status) == ("lost", "failed")


def test_a_note_that_is_not_the_one_on_record_is_not_believed() -> None:
    reading = read_receipt(worker(held=note(7, 9)), push(), receipt("kept", note(6, 10), note(6, 10), "no"))
    assert [item.verdict for item in reading.earlier] == ["kept"]
    assert reading.settlement.verdict == "unknown"


def test_the_same_order_in_another_life_is_not_the_one_on_record() -> None:
    reading = read_receipt(
        worker(held=note(7, 11), life="life-0"), push(), receipt("kept", note(7, 11), note(7, 11))
    )
    assert reading.settlement.verdict == "unknown"


@pytest.mark.parametrize("outcome", ["applied", "kept", "stale"])
def test_what_a_worker_held_before_settles_a_push_that_a_dead_driver_left(outcome: Outcome) -> None:
    left = note(6, 10)
    now = note(8, 12) if outcome == "applied" else left
    reading = read_receipt(worker(held=note(5, 9), pending=(left,)), push(), receipt(outcome, now, left))
    first = reading.earlier[0]
    assert (first.verdict, first.order, first.version, first.incarnation) == ("confirmed", 10, 6, LIFE)
    assert reading.settlement.verdict == ("confirmed" if outcome == "applied" else "kept")


def test_of_several_unanswered_pushes_the_one_that_arrived_is_confirmed() -> None:
    reading = read_receipt(
        worker(pending=(note(5, 9), note(6, 10))), push(), receipt("applied", note(8, 12), note(5, 9))
    )
    assert [item.order for item in reading.earlier] == [9]


def test_a_push_that_never_arrived_is_not_confirmed_by_what_was_held_before() -> None:
    reading = read_receipt(
        worker(held=note(5, 9), pending=(note(6, 10),)), push(), receipt("applied", note(8, 12), note(5, 9))
    )
    assert reading.earlier == ()


def test_an_overtaken_push_is_superseded() -> None:
    reading = read_receipt(worker(held=note(9, 13)), push(), receipt("stale", note(9, 13), note(9, 13)))
    assert (reading.settlement.verdict, reading.status) == ("kept", "superseded")
    assert "12" in reading.error


def test_code_of_the_worker_that_raised_leaves_it_unknown() -> None:
    reading = read_receipt(worker(held=note(7, 11)), push(), receipt("broken", None, note(7, 11), "boom"))
    assert (reading.settlement.verdict, reading.status, reading.error) == ("unknown", "failed", "boom")


def test_a_worker_that_lacks_the_content_gets_the_bytes() -> None:
    reading = read_receipt(
        worker(held=note(7, 11)), push(), receipt("bytes_wanted", note(7, 11), note(7, 11))
    )
    assert reading.resend
    assert reading.settlement.verdict == "kept"


@pytest.mark.parametrize(
    ("kind", "verdict", "status"),
    [
        ("dead", "gone", "dead"),
        ("restarting", "lost", "dead"),
        ("failed", "kept", "failed"),
        ("doubtful", "unknown", "failed"),
        ("silent", "silent", "timeout"),
    ],
)
def test_each_trouble_has_one_meaning(kind: TroubleKind, verdict: Verdict, status: Status) -> None:
    reading = read_trouble(worker(), push(), Trouble(kind, "why"))
    assert (reading.settlement.verdict, reading.status, reading.error) == (verdict, status, "why")
    assert reading.settlement.incarnation is None, "without a receipt there is no new evidence"


def test_trouble_without_a_push_names_no_order() -> None:
    reading = read_trouble(worker(), None, Trouble("dead", "why"))
    assert (reading.settlement.order, reading.settlement.version) == (None, None)


notes = st.none() | st.builds(note, st.integers(1, 5), st.integers(1, 11))


@given(
    st.sampled_from(["stale", "kept", "bytes_wanted", "broken"]),
    notes,
    notes,
    st.lists(st.builds(note, st.integers(1, 5), st.integers(1, 11)), max_size=2),
    st.sampled_from([LIFE, "life-0"]),
)
def test_nothing_is_confirmed_that_the_worker_does_not_say_it_holds(
    outcome: Outcome, now: Note | None, held: Note | None, pending: list[Note], life: str
) -> None:
    of = worker(held=held, life=life, pending=tuple(pending))
    reading = read_receipt(of, push(), receipt(outcome, now, now))
    assert reading.settlement.verdict != "confirmed"
    for item in reading.earlier:
        if item.verdict == "confirmed":
            assert now is not None and item.order == now.order
    if reading.settlement.verdict == "kept" and held is not None:
        # The record goes on saying what it said, or what was just confirmed.
        confirmed = {item.order for item in reading.earlier if item.verdict == "confirmed"}
        assert now is not None and (now.order == held.order or now.order in confirmed)

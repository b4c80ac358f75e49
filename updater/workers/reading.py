"""What an answer means for the record. Pure: an answer and what was open, in; settlements and an outcome, out.

A receipt also tells what the worker held before. That settles what an earlier, unanswered push really did.
"""

from __future__ import annotations

from typing import NamedTuple

from weightledger.registry.sync import Settlement, Verdict
from weightledger.updater.messages import Inspection, Note, Push, Receipt
from weightledger.updater.reports import Status
from weightledger.updater.workers.state import Trouble, WorkerState, interval_of


class Reading(NamedTuple):
    """What one answer means."""

    earlier: tuple[Settlement, ...]
    """To be written before `settlement`: what the receipt tells of an older push."""
    settlement: Settlement
    status: Status
    error: str
    resend: bool = False
    """The worker wants the bytes of what it was asked to relabel."""


def read_receipt(worker: WorkerState, push: Push, receipt: Receipt) -> Reading:
    """Tell what a receipt means."""
    earlier = _earlier(worker, push, receipt)

    # A relabel that finds other content goes on with the bytes: nothing failed yet.
    eventful = receipt.outcome != "bytes_wanted"

    def settled(verdict: Verdict, detail: str) -> Settlement:
        now = receipt.now
        return Settlement(
            worker=worker.row,
            name=worker.name,
            verdict=verdict,
            order=push.order,
            version=push.version,
            incarnation=receipt.incarnation,
            sent_digest=None if now is None else now.sent_digest,
            detail=detail,
            eventful=eventful or verdict != "kept",
        )

    def not_applied(detail: str) -> tuple[tuple[Settlement, ...], Settlement]:
        kept, doubt = settled("kept", detail), _doubt(worker, receipt)
        return (earlier, kept) if doubt is None else ((*earlier, kept), doubt)

    now = receipt.now
    match receipt.outcome:
        case "applied" | "relabelled" if now is not None and is_of(now, push):
            detail = f"cast to the worker's dtype: {', '.join(now.cast)}" if now.cast else ""
            status: Status = "current" if receipt.outcome == "relabelled" else "synced"
            ended = _false_record(worker, receipt)
            return Reading((*ended, *earlier), settled("confirmed", detail), status, "")
        case "applied" | "relabelled":
            detail = f"its receipt is not for v{push.version}: it says that it holds {told(now)}"
            return Reading(earlier, settled("unknown", detail), "failed", detail)
        case "bytes_wanted":
            return Reading(
                *not_applied("it holds other content than was recorded"), "failed", "", resend=True
            )
        case "stale":
            detail = f"order {push.order} came after a higher one; the worker changed nothing"
            return Reading(*not_applied(detail), "superseded", detail)
        case "kept" | "busy":
            return Reading(*not_applied(receipt.error), "failed", receipt.error)
        case "broken":
            return Reading(earlier, settled("unknown", receipt.error), "failed", receipt.error)


def read_trouble(worker: WorkerState, push: Push | None, trouble: Trouble) -> Reading:
    """Tell what it means that there is no receipt."""
    verdict: Verdict
    status: Status
    match trouble.kind:
        case "dead":
            verdict, status = "gone", "dead"
        case "restarting":
            verdict, status = "lost", "dead"
        case "failed" | "rejected" | "bytes_lost":
            verdict, status = "kept", "failed"
        case "doubtful":
            verdict, status = "unknown", "failed"
        case "silent":
            verdict, status = "silent", "timeout"
    settlement = Settlement(
        worker=worker.row,
        name=worker.name,
        verdict=verdict,
        order=None if push is None else push.order,
        version=None if push is None else push.version,
        detail=trouble.detail,
    )
    return Reading((), settlement, status, trouble.detail)


def is_rejection(answer: Receipt | Trouble) -> bool:
    """Tell whether the worker's own code turned the push down, and is likely to turn down the next one as well."""
    if isinstance(answer, Receipt):
        return answer.outcome in ("kept", "broken")
    return answer.kind == "rejected"


def _earlier(worker: WorkerState, push: Push, receipt: Receipt) -> tuple[Settlement, ...]:
    """An older push that was never answered was carried out if the worker held it before this one."""
    before = receipt.before
    if before is None or before.order == push.order or not was_left_open(worker, before):
        return ()
    return (confirmation(worker, before, receipt.incarnation, "found by a later receipt"),)


def was_left_open(worker: WorkerState, note: Note) -> bool:
    """Tell whether a note is of a push that an earlier updater never got an answer to."""
    return any(
        (push.order, push.run, push.version, push.digest) == (note.order, note.run, note.version, note.digest)
        for push in worker.unsettled
    )


def is_on_record(worker: WorkerState, note: Note, incarnation: str) -> bool:
    """Tell whether a worker's note is of the holding that the registry has of it."""
    return worker.on_record == interval_of(note, incarnation)


def is_vouched(worker: WorkerState, note: Note, incarnation: str) -> bool:
    """Tell whether the registry has, or can still confirm, what a worker's note says."""
    return is_on_record(worker, note, incarnation) or was_left_open(worker, note)


def read_answer(worker: WorkerState, answer: Inspection) -> Settlement | None:
    """Tell what ends the holding on record, by what a worker says of itself; None when it still stands."""
    if answer.busy:
        return None
    note = None if answer.overwritten else answer.note
    return _end(worker, note, answer.incarnation, answer.overwritten)


def off_record(worker: WorkerState, note: Note, incarnation: str) -> Settlement | None:
    """Tell what ends the holding on record, where a worker's note is of another push; None when there is none."""
    return _end(worker, note, incarnation, "")


def is_of(note: Note, push: Push) -> bool:
    """Tell whether a worker's note is of a push, and of its content."""
    if (note.order, note.run, note.version, note.digest) != (push.order, push.run, push.version, push.digest):
        return False
    return note.sent_digest == push.sent_digest or bool(note.cast)


def told(note: Note | None) -> str:
    """Say in words what a worker's note says."""
    if note is None:
        return "nothing known"
    where = f" of the registry at {note.registry}" if note.registry else ""
    return f"v{note.version} by order {note.order} of run {note.run}{where}"


def _false_record(worker: WorkerState, receipt: Receipt) -> tuple[Settlement, ...]:
    """End the holding on record where it did not last until this push."""
    if worker.on_record is None or worker.on_record.incarnation != receipt.incarnation:
        return ()
    found = _end(worker, receipt.before, receipt.incarnation, receipt.overwritten)
    return () if found is None else (found,)


def _doubt(worker: WorkerState, receipt: Receipt) -> Settlement | None:
    """Tell what ends the holding on record, although the push changed nothing; None when it still stands."""
    return _end(worker, receipt.now, receipt.incarnation, receipt.overwritten)


def _end(worker: WorkerState, note: Note | None, incarnation: str, overwritten: str) -> Settlement | None:
    held = worker.on_record
    if held is None or (note is not None and is_vouched(worker, note, incarnation)):
        return None
    verdict: Verdict = "unknown"
    if overwritten:
        verdict, detail = "drifted", f"it does not hold v{held.version} any more: {overwritten}"
    elif note is not None:
        detail = f"it says that it holds {told(note)}, which is not what is on record"
    elif held.incarnation == incarnation:
        detail = "it does not know any more what it holds"
    else:
        verdict, detail = "lost", "it holds nothing that was sent: a new process"
    return Settlement(
        worker.row, worker.name, verdict, version=held.version, incarnation=incarnation, detail=detail
    )


def confirmation(worker: WorkerState, note: Note, incarnation: str, detail: str) -> Settlement:
    """Return the settlement that a worker's own note amounts to."""
    return Settlement(
        worker=worker.row,
        name=worker.name,
        verdict="confirmed",
        order=note.order,
        version=note.version,
        incarnation=incarnation,
        sent_digest=note.sent_digest,
        detail=detail,
    )

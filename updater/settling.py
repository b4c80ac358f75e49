"""What an answer means for the record. Pure: an answer and what was open, in; settlements and an outcome, out.

A receipt also tells what the worker held before. That settles what an earlier, unanswered push really did.
"""

from __future__ import annotations

from dataclasses import dataclass

from weightledger.registry.fleet import Settlement, Verdict
from weightledger.updater.push import Note, Push, Receipt
from weightledger.updater.reports import Status
from weightledger.updater.seats import Seat


@dataclass(frozen=True)
class Trouble:
    """What the transport says instead of a receipt.

    `dead`: the worker is gone for good. `restarting`: its process ended, another life may follow. `failed`: the push
    never reached the worker's code, which holds what it held. `doubtful`: the connection broke, it may have been carried
    out. `silent`: no answer in time.
    """

    kind: str
    detail: str


@dataclass(frozen=True)
class Reading:
    """What one answer means."""

    earlier: tuple[Settlement, ...]
    """To be written before `settlement`: what the receipt tells of an older push."""
    settlement: Settlement
    status: Status
    error: str
    resend: bool = False
    """The worker wants the bytes of what it was asked to relabel."""


def read_receipt(seat: Seat, push: Push, receipt: Receipt) -> Reading:
    """Tell what a receipt means."""
    earlier = _earlier(seat, push, receipt)

    def settled(verdict: Verdict, detail: str) -> Settlement:
        now = receipt.now
        return Settlement(
            worker=seat.row,
            name=seat.name,
            verdict=verdict,
            order=push.order,
            version=push.version,
            incarnation=receipt.incarnation,
            sent_digest=None if now is None else now.sent_digest,
            detail=detail,
        )

    # A process without a note is a new life, whatever the record says of the name.
    still: Verdict = "lost" if receipt.now is None else "kept"
    match receipt.outcome:
        case "applied" | "relabelled":
            cast = receipt.now.cast if receipt.now is not None else ()
            detail = f"cast to the worker's dtype: {', '.join(cast)}" if cast else ""
            status: Status = "current" if receipt.outcome == "relabelled" else "synced"
            return Reading(earlier, settled("confirmed", detail), status, "")
        case "bytes_wanted":
            return Reading(earlier, settled(still, "it holds other content than was recorded"), "failed", "", resend=True)
        case "stale":
            detail = f"order {push.order} came after a higher one; the worker changed nothing"
            return Reading(earlier, settled(still, detail), "superseded", detail)
        case "kept":
            return Reading(earlier, settled(still, receipt.error), "failed", receipt.error)
        case "broken":
            return Reading(earlier, settled("unknown", receipt.error), "failed", receipt.error)


def read_trouble(seat: Seat, push: Push | None, trouble: Trouble) -> Reading:
    """Tell what it means that there is no receipt."""
    verdict: Verdict
    status: Status
    match trouble.kind:
        case "dead":
            verdict, status = "gone", "dead"
        case "restarting":
            verdict, status = "lost", "dead"
        case "failed":
            verdict, status = "kept", "failed"
        case "doubtful":
            verdict, status = "unknown", "failed"
        case _:
            verdict, status = "silent", "timeout"
    settlement = Settlement(
        worker=seat.row,
        name=seat.name,
        verdict=verdict,
        order=None if push is None else push.order,
        version=None if push is None else push.version,
        detail=trouble.detail,
    )
    return Reading((), settlement, status, trouble.detail)


def _earlier(seat: Seat, push: Push, receipt: Receipt) -> tuple[Settlement, ...]:
    """An older push that was never answered was carried out if the worker held it before this one."""
    pending, before = seat.open_pending, receipt.before
    if pending is None or before is None or before.order != pending.order or pending.order == push.order:
        return ()
    return (confirmation(seat, before, receipt.incarnation, "found by a later receipt"),)


def confirmation(seat: Seat, note: Note, incarnation: str, detail: str) -> Settlement:
    """Return the settlement that a worker's own note amounts to."""
    return Settlement(
        worker=seat.row,
        name=seat.name,
        verdict="confirmed",
        order=note.order,
        version=note.version,
        incarnation=incarnation,
        sent_digest=note.sent_digest,
        detail=detail,
    )

"""Attestation: asking every worker what it holds and comparing that with the bytes that are really there."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from weightledger.registry.errors import WeightLedgerError
from weightledger.registry.log import fleet
from weightledger.registry.log.fleet import Settlement
from weightledger.updater.plan import Known
from weightledger.updater.push import Inspection, Note, Probe
from weightledger.updater.reports import Held
from weightledger.updater.seats import Seat, stretch_of
from weightledger.updater.server import ServerWeights
from weightledger.updater.settling import Trouble, confirmation, is_on_record, read_trouble, was_left_open

if TYPE_CHECKING:
    from weightledger.updater.base import RemoteWeightUpdaterBase


class Probing:
    """Carries out one probe of all workers. `run` is called once."""

    def __init__(self, updater: RemoteWeightUpdaterBase) -> None:
        self._up = updater
        self._ledger = updater.registry.ledger
        self._earlier: list[Settlement] = []
        self._settlements: list[Settlement] = []

    def run(self) -> dict[int, Held]:
        """Ask, compare, record."""
        seats = {seat.id: seat for seat in self._up.seats}
        handles = {key: self._ask(seat) for key, seat in seats.items()}
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + self._up.timeout
        while len(answers) < len(handles) and (left := deadline - time.monotonic()) > 0:
            waiting = {key: handle for key, handle in handles.items() if key not in answers}
            answers |= self._up._collect(waiting, left, False)
        found = {}
        for key, seat in seats.items():
            answer = answers.get(key, Trouble("silent", f"no answer within {self._up.timeout:g} s"))
            if isinstance(answer, Inspection):
                found[key] = self._read(seat, answer)
            else:
                trouble = answer if isinstance(answer, Trouble) else self._up._explain(seat, answer)
                found[key] = self._read_trouble(seat, trouble)
        with self._ledger.writing() as conn:
            fleet.settle(self._ledger, conn, self._earlier)
            fleet.settle(self._ledger, conn, self._settlements)
        return found

    def _ask(self, seat: Seat) -> Any:
        # What was cast still has the version's names; what was mapped may have any.
        hashes = None if self._up.maps_weights else self._hashes(seat)
        names = None if hashes is None else tuple(hashes)
        series = (self._up.registry.uuid, self._up.registry.policy)
        probe = Probe(series, self._up.locate, names, self._up.timeout)
        version = 0 if seat.known is None else seat.known.version
        try:
            return self._up._sync_weights_with_worker(
                seat.id, ServerWeights(version, "", "", (), 0, None, {}, push=probe)
            )
        except Exception as error:  # noqa: BLE001 - one worker's transport must not stop the others
            return self._up._explain(seat, error)

    def _expected(self, seat: Seat) -> dict[str, str] | None:
        """Return the per-tensor hashes of what the worker should hold, if a file still tells them."""
        held = seat.open_held
        return None if held is None or held.sent_digest != held.digest else self._hashes(seat)

    def _hashes(self, seat: Seat) -> dict[str, str] | None:
        held = seat.open_held
        if held is None:
            return None
        try:
            return self._up.registry.tensor_hashes(held.version)
        except WeightLedgerError:
            # Pruned or damaged: the digest alone still says whether anything changed.
            return None

    def _read(self, seat: Seat, answer: Inspection) -> Held:
        note = answer.note
        if note is None:
            self._lose(seat, answer)
            error = answer.error or "it was never sent a version"
            return Held(seat.name, None, answer.digest, False, (), answer.incarnation, error)
        self._believe(seat, note, answer)
        if answer.digest is None:
            # It says what it holds, but nobody could look: the next update sends the bytes and takes a receipt.
            seat.known = None
            return Held(seat.name, note.version, None, False, (), answer.incarnation, answer.error)
        if answer.digest == note.sent_digest or callable(self._up.apply):
            # An engine that loads in its own way need not keep the tensors as they were sent.
            return Held(
                seat.name,
                note.version,
                answer.digest,
                answer.digest == note.sent_digest,
                (),
                answer.incarnation,
                "",
            )
        return self._drifted(seat, note, answer)

    def _believe(self, seat: Seat, note: Note, answer: Inspection) -> None:
        flight = seat.flight
        pinned = seat.known is None or seat.known.pinned
        own = flight is not None and flight.push.order == note.order
        if own or was_left_open(seat, note):
            self._earlier.append(confirmation(seat, note, answer.incarnation, "found by a probe"))
            seat.open_held = stretch_of(note, answer.incarnation)
            seat.open_pending = ()
            if flight is not None and own:
                seat.flight, seat.passed_by, pinned = None, 0, flight.pinned
        elif not is_on_record(seat, note, answer.incarnation):
            # Not what the record says; the next update sends the bytes and takes a receipt.
            seat.known = None
            return
        if seat.flight is None and not seat.open_pending:
            seat.known = Known(note.version, note.sent_digest, answer.incarnation, pinned)
            self._settlements.append(
                Settlement(seat.row, seat.name, "seen", incarnation=answer.incarnation, version=note.version)
            )

    def _drifted(self, seat: Seat, note: Note, answer: Inspection) -> Held:
        expected, found = self._expected(seat), answer.hashes or {}
        # Of what was cast or mapped only the whole digest is on record: which tensors changed is not known then.
        names = () if expected is None else expected.keys() | found.keys()
        drift = tuple(
            sorted(name for name in names if expected is None or expected.get(name) != found.get(name))
        )
        which = ", ".join(drift[:20]) or "some tensors"
        text = f"its weights are not v{note.version} any more: {which} changed in place"
        self._settlements = [item for item in self._settlements if item.worker != seat.row]
        self._settlements.append(
            Settlement(
                seat.row,
                seat.name,
                "drifted",
                version=note.version,
                incarnation=answer.incarnation,
                detail=text,
                tensors=drift,
            )
        )
        seat.known = None
        seat.open_held = None
        return Held(seat.name, note.version, answer.digest, False, drift, answer.incarnation, text)

    def _lose(self, seat: Seat, answer: Inspection) -> None:
        if seat.open_held is not None or seat.open_pending or seat.flight is not None:
            detail = "it holds nothing that was sent: a new process"
            self._settlements.append(
                Settlement(seat.row, seat.name, "lost", incarnation=answer.incarnation, detail=detail)
            )
        seat.known = seat.open_held = seat.flight = None
        seat.open_pending = ()

    def _read_trouble(self, seat: Seat, trouble: Trouble) -> Held:
        reading = read_trouble(seat, None, trouble)
        if not (seat.gone and reading.settlement.verdict == "gone"):
            self._settlements.append(reading.settlement)
        seat.known = None
        if reading.settlement.verdict in ("gone", "lost"):
            seat.open_held = seat.flight = None
            seat.open_pending = ()
            seat.gone = reading.settlement.verdict == "gone"
        return Held(seat.name, None, None, False, (), None, trouble.detail)

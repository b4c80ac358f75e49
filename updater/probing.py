"""Attestation: asking every worker what it holds, and comparing the bytes there with the registry's version."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from weightledger.registry.errors import NotFoundError, WeightLedgerError
from weightledger.registry.log import fleet
from weightledger.registry.log.fleet import Settlement
from weightledger.registry.weights.digest import content_digest
from weightledger.updater.plan import Known
from weightledger.updater.push import Inspection, Note, Probe
from weightledger.updater.reports import Held
from weightledger.updater.seats import Seat, stretch_of
from weightledger.updater.server import ServerWeights
from weightledger.updater.settling import (
    Trouble,
    confirmation,
    is_of,
    is_on_record,
    off_record,
    read_trouble,
    told,
    was_left_open,
)
from weightledger.updater.watch import matches_any

if TYPE_CHECKING:
    from weightledger.updater.base import RemoteWeightUpdaterBase


class _Expected(NamedTuple):
    """What should be in a worker's module, by the registry."""

    digest: str | None
    """None when it has no such version."""
    hashes: Mapping[str, str] | None
    """By name; None when only the whole is on record."""


class Probing:
    """Carries out one probe of all workers. `run` is called once.

    Args:
        ignore: globs of the names of tensors that the workers' own code writes, besides buffers.
    """

    def __init__(self, updater: RemoteWeightUpdaterBase, ignore: Collection[str]) -> None:
        self._up = updater
        self._ledger = updater.registry.ledger
        self._ignore = tuple(ignore)
        self._earlier: list[Settlement] = []
        self._settlements: list[Settlement] = []
        self._versions: dict[int, _Expected] = {}

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
        # The names of what it should hold; what was mapped on the way may have any.
        version = self._target(seat) if seat.open_held is None else seat.open_held.version
        hashes = None if version is None else self._version(version).hashes
        names = None if hashes is None else tuple(hashes)
        question = Probe(self._up.series, self._up.locate, names, self._up.timeout)
        try:
            return self._up._sync_weights_with_worker(seat.id, ServerWeights.asking(question, version or 0))
        except Exception as error:  # noqa: BLE001 - one worker's transport must not stop the others
            return self._up._explain(seat, error)

    def _target(self, seat: Seat) -> int | None:
        try:
            return self._up.registry.target(seat.name).number
        except NotFoundError:
            return None

    # ------------------------------------------------------------------ what the registry says

    def _version(self, number: int) -> _Expected:
        """Return what a worker that was sent a version should hold, unless it was cast on the way."""
        if number not in self._versions:
            self._versions[number] = self._look_up(number)
        return self._versions[number]

    def _look_up(self, number: int) -> _Expected:
        try:
            digest = self._up.registry.get(number).digest
        except NotFoundError:
            return _Expected(None, None)
        sent = self._up.shelf.find(digest)
        if sent is not None and sent.sent_digest != digest:
            return _Expected(sent.sent_digest, sent.hashes)
        if sent is None and self._up.maps_weights:
            # What it was mapped to is not known here, not even by name.
            return _Expected(digest, None)
        try:
            return _Expected(digest, self._up.registry.tensor_hashes(number))
        except WeightLedgerError:
            # Pruned or damaged: the digest alone still says whether anything changed.
            return _Expected(digest, None)

    def _expected(self, note: Note, on_record: bool, answer: Inspection) -> _Expected:
        known = self._version(note.version)
        if not on_record or known.digest == note.sent_digest:
            return known
        # What was cast has no file; the worker noted the hashes then, and they make the digest that is on record.
        noted = answer.noted
        proved = noted is not None and content_digest(noted) == note.sent_digest
        return _Expected(note.sent_digest, noted if proved else None)

    # ------------------------------------------------------------------ answers

    def _read(self, seat: Seat, answer: Inspection) -> Held:
        note = answer.note
        if note is None:
            self._lose(seat, answer)
            error = answer.error or answer.overwritten or "it was never sent a version"
            return Held(seat.name, None, answer.digest, False, (), answer.incarnation, error)
        on_record, error = self._believe(seat, note, answer)
        held = Held(seat.name, note.version, answer.digest, False, (), answer.incarnation, error)
        if answer.digest is None:
            # It says what it holds, but nobody could look: the next update sends the bytes and takes a receipt.
            seat.known = None
            return replace(held, error=answer.error)
        expected = self._expected(note, on_record, answer)
        drift, buffers = self._differences(expected, answer)
        same = answer.digest == expected.digest or (bool(buffers) and not drift)
        # An engine that loads in its own way need not keep the tensors as they were sent.
        if on_record and (same or callable(self._up.apply)):
            self._see(seat, note, answer)
            return replace(held, matches=same, buffers=buffers)
        seat.known = None
        if on_record:
            error = self._drifted(seat, note, answer, drift)
        return replace(held, matches=same, drift=drift, buffers=buffers, error=error)

    def _differences(
        self, expected: _Expected, answer: Inspection
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the names of the tensors that drifted, and of those that the worker's own code may write."""
        # Of what was mapped, and of pruned versions, only the whole is on record: which changed is not known then.
        wanted, found = expected.hashes, answer.hashes or {}
        if wanted is None or answer.digest == expected.digest:
            return (), ()
        names = sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
        own = {name for name in names if name in answer.buffers or matches_any(name, self._ignore)}
        return tuple(name for name in names if name not in own), tuple(name for name in names if name in own)

    def _believe(self, seat: Seat, note: Note, answer: Inspection) -> tuple[bool, str]:
        """Tell whether the record has what the worker's note says; if not, the holding on record ends, and why."""
        flight = seat.flight
        own = flight is not None and is_of(note, flight.push)
        if own or was_left_open(seat, note):
            self._earlier.append(confirmation(seat, note, answer.incarnation, "found by a probe"))
            seat.open_held = stretch_of(note, answer.incarnation)
            seat.open_pending = ()
            if flight is not None and own:
                seat.flight, seat.passed_by = None, 0
                seat.known = Known(note.version, note.sent_digest, answer.incarnation, flight.pinned)
        elif not is_on_record(seat, note, answer.incarnation):
            # Not what the record says; the next update sends the bytes and takes a receipt.
            ended = off_record(seat, note, answer.incarnation)
            if ended is not None:
                self._settlements.append(ended)
            seat.open_held = None
            return False, f"it says that it holds {told(note)}, which is not what is on record"
        return True, ""

    def _see(self, seat: Seat, note: Note, answer: Inspection) -> None:
        if seat.flight is None and not seat.open_pending:
            pinned = seat.known is None or seat.known.pinned
            seat.known = Known(note.version, note.sent_digest, answer.incarnation, pinned)
            self._settlements.append(
                Settlement(seat.row, seat.name, "seen", incarnation=answer.incarnation, version=note.version)
            )

    def _drifted(self, seat: Seat, note: Note, answer: Inspection, drift: tuple[str, ...]) -> str:
        which = ", ".join(drift[:20]) or "some tensors"
        by = f" ({answer.overwritten})" if answer.overwritten else ""
        text = f"its weights are not v{note.version} any more: {which} changed in place{by}"
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
        seat.open_held = None
        return text

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

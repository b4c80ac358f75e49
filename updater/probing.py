"""Attestation: asking every worker what it holds, and comparing the bytes there with the registry's version."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from weightledger.registry.errors import NotFoundError, WeightLedgerError
from weightledger.registry.sync import Settlement
from weightledger.registry.weights import content_digest, matches_any
from weightledger.updater.messages import Inspection, Note, Probe
from weightledger.updater.reports import Held
from weightledger.updater.workers.state import Trouble, WorkerState

if TYPE_CHECKING:
    from weightledger.updater.updater import Updater


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

    def __init__(self, updater: Updater, ignore: Collection[str]) -> None:
        self._up = updater
        self._table = updater.workers
        self._ignore = tuple(ignore)
        self._earlier: list[Settlement] = []
        self._settlements: list[Settlement] = []
        self._versions: dict[int, _Expected] = {}

    def run(self) -> dict[int, Held]:
        """Ask, compare, record."""
        workers = {worker.id: worker for worker in self._table}
        asked = {key: self._ask(worker) for key, worker in workers.items()}
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + self._up.timeout
        while len(answers) < len(asked) and (left := deadline - time.monotonic()) > 0:
            waiting = {key: answer for key, answer in asked.items() if key not in answers}
            answers |= self._up.transport.collect(waiting, left, False)
        found = {}
        for key, worker in workers.items():
            answer = answers.get(key, Trouble("silent", f"no answer within {self._up.timeout:g} s"))
            if isinstance(answer, Inspection):
                found[key] = self._read(worker, answer)
            else:
                trouble = answer if isinstance(answer, Trouble) else self._explain(worker, answer)
                found[key] = self._read_trouble(worker, trouble)
        self._up.record.write(settlements=[self._earlier, self._settlements])
        return found

    def _ask(self, worker: WorkerState) -> Any:
        # The names of what it should hold; what was mapped on the way may have any.
        version = self._target(worker) if worker.on_record is None else worker.on_record.version
        hashes = None if version is None else self._version(version).hashes
        names = None if hashes is None else tuple(hashes)
        question = Probe(self._up.record.series, self._up.locate, names, self._up.timeout)
        try:
            return self._up._probe(worker, question)
        except Exception as error:  # noqa: BLE001 - one worker's transport must not stop the others
            return self._explain(worker, error)

    def _explain(self, worker: WorkerState, error: BaseException) -> Trouble:
        known = None if worker.known is None else worker.known.incarnation
        return self._up.transport.explain(worker.handle, error, known)

    def _target(self, worker: WorkerState) -> int | None:
        try:
            return self._up.registry.target(worker.name).number
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
        sent = self._up.source.find(digest)
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

    def _read(self, worker: WorkerState, answer: Inspection) -> Held:
        note, incarnation = answer.note, answer.incarnation
        if note is None:
            self._record(self._table.found_empty(worker, incarnation))
            error = answer.error or answer.overwritten or "it was never sent a version"
            return Held(worker.name, None, answer.digest, False, (), incarnation, error)
        vouched = self._table.vouch(worker, note, incarnation)
        if vouched.confirmed is not None:
            self._earlier.append(vouched.confirmed)
        self._record(vouched.ended)
        held = Held(worker.name, note.version, answer.digest, False, (), incarnation, vouched.error)
        if answer.digest is None:
            # It says what it holds, but nobody could look.
            self._table.doubted(worker)
            return replace(held, error=answer.error)
        expected = self._expected(note, vouched.on_record, answer)
        drift, buffers = self._differences(expected, answer)
        same = answer.digest == expected.digest or (bool(buffers) and not drift)
        # An engine that loads in its own way need not keep the tensors as they were sent.
        if vouched.on_record and (same or callable(self._up.apply)):
            self._record(self._table.seen(worker, note, incarnation))
            return replace(held, matches=same, buffers=buffers)
        error = vouched.error
        if vouched.on_record:
            error = _drift_told(note, answer, drift)
            self._record(self._table.drifted(worker, note, incarnation, error, drift))
        else:
            self._table.doubted(worker)
        return replace(held, matches=same, drift=drift, buffers=buffers, error=error)

    def _record(self, settlement: Settlement | None) -> None:
        if settlement is not None:
            self._settlements.append(settlement)

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

    def _read_trouble(self, worker: WorkerState, trouble: Trouble) -> Held:
        self._record(self._table.did_not_answer(worker, trouble))
        return Held(worker.name, None, None, False, (), None, trouble.detail)


def _drift_told(note: Note, answer: Inspection, drift: tuple[str, ...]) -> str:
    which = ", ".join(drift[:20]) or "some tensors"
    by = f" ({answer.overwritten})" if answer.overwritten else ""
    return f"its weights are not v{note.version} any more: {which} changed in place{by}"

"""The table of an updater's workers: the one owner of what is known of them.

Every event of a worker's life is a method that changes its row here and returns what the record has to say of it. The
database is the record; this is the working copy, which lives as long as the updater.

Rules kept here
- Only a worker's own word makes something known, and only where the record has that, too.
- Silence, death and contradiction make it unknown at once.
- Ids are given once and never again, so they stay stable while workers come and go.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from weightledger.registry import arguments
from weightledger.registry.errors import InUseError, NotFoundError
from weightledger.registry.sync import Claim, HeadState, Settlement
from weightledger.updater.messages import Inspection, Note, Push, Receipt
from weightledger.updater.workers.deciding import Action, Situation, Target, decide
from weightledger.updater.workers.reading import (
    Reading,
    confirmation,
    is_of,
    is_on_record,
    is_vouched,
    off_record,
    read_answer,
    read_receipt,
    read_trouble,
    told,
    was_left_open,
)
from weightledger.updater.workers.state import (
    InFlight,
    Known,
    Trouble,
    WorkerId,
    WorkerState,
    interval_of,
)


class Vouched(NamedTuple):
    """Whether the record has what a worker says that it holds."""

    on_record: bool
    confirmed: Settlement | None = None
    """An older push without an answer that this confirms."""
    ended: Settlement | None = None
    """How the holding on record ended, as the worker holds something else."""
    error: str = ""


class WorkerTable:
    """All workers of an updater, and what is known of each."""

    def __init__(self) -> None:
        self._workers: dict[int, WorkerState] = {}
        self._by_name: dict[str, WorkerState] = {}
        self._next = 0
        self.spent: list[Any] = []
        """What the transport gave and nobody needs any more. Whoever clears it does so in the caller's thread: a
        reference of Ray's that another thread drops while Ray is being shut down ends the process."""

    # ------------------------------------------------------------------ membership

    def __len__(self) -> int:
        return len(self._workers)

    def __iter__(self) -> Iterator[WorkerState]:
        return iter(list(self._workers.values()))

    def __contains__(self, worker_id: object) -> bool:
        return worker_id in self._workers

    def ids(self) -> list[int]:
        """Return the ids in the order in which the workers were added."""
        return list(self._workers)

    def next_id(self) -> int:
        """Return the id that the next worker gets."""
        return self._next

    def check_names(self, names: Iterable[str]) -> None:
        """Refuse a name that another worker of this updater bears.

        Raises:
            InUseError: two live workers would share one name.
            ValueError: it is no name.
        """
        taken = set(self._by_name)
        for name in names:
            arguments.name("worker", name)
            if name in taken:
                raise InUseError(
                    f"two workers are called {name!r}; what a worker holds is recorded by name, so give each its own "
                    "with names="
                )
            taken.add(name)

    def add(self, claim: Claim, handle: Any, worker_id: int | None = None) -> WorkerState:
        """Take a worker in as the registry has it, under the next id or the one that it has already.

        What an earlier run recorded of it is checked against its next receipt, and not believed.
        """
        worker = WorkerState(
            self._next if worker_id is None else worker_id,
            claim.name,
            handle,
            claim.id,
            on_record=claim.held,
            unsettled=claim.pending,
        )
        self._workers[worker.id] = self._by_name[worker.name] = worker
        self._next = max(self._next, worker.id + 1)
        return worker

    def remove(self, worker: WorkerState) -> None:
        """Forget a worker; its id is not given again."""
        del self._workers[worker.id], self._by_name[worker.name]

    def get(self, worker: WorkerId) -> WorkerState:
        """Return a worker by its id or its name.

        Raises:
            NotFoundError: there is none.
        """
        found = self._workers.get(worker) if type(worker) is int else self._find(worker)
        if found is None:
            named = isinstance(worker, int) and not isinstance(worker, bool) and abs(worker) <= arguments.MOST
            asked = str(worker) if named else arguments.shown(worker)
            raise NotFoundError(
                f"no worker {asked}: worker ids are {self.ids()}, their names {list(self._by_name)}"
            )
        return found

    def named(self, names: Collection[str]) -> list[WorkerState]:
        """Return those of the workers that bear one of these names."""
        return [self._by_name[name] for name in names if name in self._by_name]

    def _find(self, worker: Any) -> WorkerState | None:
        if isinstance(worker, str):
            return self._by_name.get(worker)
        try:
            return self._workers.get(arguments.integer("a worker id", worker))
        except TypeError:
            return None

    # ------------------------------------------------------------------ deciding

    def decide(
        self,
        worker: WorkerState,
        target: Target,
        state: HeadState,
        *,
        forced: bool,
        resend: bool,
        skip: Callable[[int], bool],
        allow_nonfinite: bool | Collection[str],
        relabels: bool,
    ) -> Action:
        """Decide what to do with a worker.

        Args:
            target: what it should hold.
            state: the head's lineage.
            forced: the interval passes nobody by.
            resend: send the bytes even to a worker that holds them by its receipt.
            skip: the interval rule for a worker's id, asked only when it may pass the worker by.
            allow_nonfinite: True, or globs of tensor names that may hold NaN or infinity.
            relabels: whether equal content may be taken over without sending bytes.
        """
        known = worker.known
        situation = Situation(
            known=known,
            target=target,
            in_flight=worker.in_flight is not None,
            forced=forced or worker.owed,
            resend=resend or worker.owed,
            on_lineage=known is not None and state.is_on_lineage(known.version),
        )
        return decide(situation, lambda: skip(worker.id), allow_nonfinite=allow_nonfinite, relabels=relabels)

    def skipped(self, worker: WorkerState) -> None:
        """The interval passed it by."""
        worker.passed_by += 1

    def stands(self, worker: WorkerState, *, pinned: bool) -> None:
        """It was found to hold its target."""
        if worker.known is not None:
            worker.known = replace(worker.known, pinned=pinned)

    # ------------------------------------------------------------------ pushes and their answers

    def sending(self, worker: WorkerState, push: Push, *, pinned: bool) -> InFlight:
        """A push is about to leave: until the transport has it, an interrupt must not leave one without an answer."""
        # An answer that is still to come would speak of what was before.
        self._drop_question(worker)
        interrupted = Trouble("doubtful", "interrupted while it was sent")
        worker.in_flight = InFlight(push, interrupted, pinned)
        return worker.in_flight

    def read(self, worker: WorkerState, answer: Receipt | Trouble) -> Reading:
        """Tell what an answer to the push in flight means. Nothing changes yet."""
        assert worker.in_flight is not None
        push = worker.in_flight.push
        return (
            read_receipt(worker, push, answer)
            if isinstance(answer, Receipt)
            else read_trouble(worker, push, answer)
        )

    def settle(self, worker: WorkerState, reading: Reading, answer: Receipt | Trouble) -> list[Settlement]:
        """Believe what an answer was read to mean, and return what the record has to say of it."""
        in_flight, verdict = worker.in_flight, reading.settlement.verdict
        if verdict == "silent":
            told_before = in_flight is not None and in_flight.told_silent
            worker.known = None
            if in_flight is not None:
                in_flight.told_silent = True
            return [] if told_before else [reading.settlement]
        self._land(worker)
        worker.gone, worker.owed = verdict == "gone", verdict == "kept"
        if not isinstance(answer, Receipt):
            if verdict != "kept":
                worker.known, worker.on_record, worker.unsettled = None, None, ()
            return [reading.settlement]
        note, known = answer.now, None
        if note is not None and verdict == "confirmed":
            assert in_flight is not None
            known = Known(note.version, note.sent_digest, answer.incarnation, in_flight.pinned)
            worker.passed_by, worker.has_confirmed = 0, True
        elif note is not None and verdict == "kept" and is_vouched(worker, note, answer.incarnation):
            # Its own word counts only for what the record has: weights that drifted still have their note.
            known = self._known(worker, note, answer.incarnation)
        worker.known, worker.unsettled = known, ()
        worker.on_record = None if note is None or known is None else interval_of(note, answer.incarnation)
        return [reading.settlement]

    # ------------------------------------------------------------------ lives

    def died(self, worker: WorkerState, trouble: Trouble) -> list[Settlement]:
        """Its process ended, by the transport's word and not by an answer; another one may follow."""
        if worker.gone:
            return []
        reading = read_trouble(worker, None, trouble)
        return self.settle(worker, reading, trouble)

    def came_back(self, worker: WorkerState, incarnation: str) -> list[Settlement]:
        """It lives, as this incarnation: what another one held is lost.

        Returns:
            How that ended; nothing when it held nothing known.
        """
        trouble = Trouble("restarting", f"it came back as another process ({incarnation})")
        settlements = (
            [] if worker.known is None else self.settle(worker, read_trouble(worker, None, trouble), trouble)
        )
        worker.gone = False
        return settlements

    def is_another(self, worker: WorkerState, incarnation: str) -> bool:
        """Tell whether an incarnation is not the one that what is known was heard from."""
        return worker.gone or (worker.known is not None and worker.known.incarnation != incarnation)

    def removed(self, worker: WorkerState) -> Settlement:
        """Nobody steers it any more."""
        self.remove(worker)
        return Settlement(worker.row, worker.name, "removed", detail="removed from its updater")

    # ------------------------------------------------------------------ questions and probes

    def asked(self, worker: WorkerState, question: Any) -> None:
        """A question is on its way."""
        worker.question = question

    def heard(self, worker: WorkerState, answer: Any) -> Settlement | None:
        """A question was answered.

        Returns:
            How the holding on record ended; None while the weights are still there, or nothing was known anyway.
        """
        self._drop_question(worker)
        ended = read_answer(worker, answer) if isinstance(answer, Inspection) else None
        if ended is None or worker.known is None:
            return None
        worker.known = worker.on_record = None
        return ended

    def vouch(self, worker: WorkerState, note: Note, incarnation: str) -> Vouched:
        """Compare what a probed worker says that it holds with the record, and believe it where they agree."""
        flight = worker.in_flight
        own = flight is not None and is_of(note, flight.push)
        if own or was_left_open(worker, note):
            confirmed = confirmation(worker, note, incarnation, "found by a probe")
            worker.on_record, worker.unsettled = interval_of(note, incarnation), ()
            if flight is not None and own:
                self._land(worker)
                worker.passed_by = 0
                worker.known = Known(note.version, note.sent_digest, incarnation, flight.pinned)
            return Vouched(True, confirmed)
        if is_on_record(worker, note, incarnation):
            return Vouched(True)
        # The next update sends the bytes and takes a receipt.
        ended = off_record(worker, note, incarnation)
        worker.on_record = None
        return Vouched(
            False, None, ended, f"it says that it holds {told(note)}, which is not what is on record"
        )

    def seen(self, worker: WorkerState, note: Note, incarnation: str) -> Settlement | None:
        """A probe found in it what is on record."""
        if worker.in_flight is not None or worker.unsettled:
            return None
        worker.known = self._known(worker, note, incarnation)
        return Settlement(worker.row, worker.name, "seen", incarnation=incarnation, version=note.version)

    def drifted(
        self, worker: WorkerState, note: Note, incarnation: str, detail: str, tensors: tuple[str, ...]
    ) -> Settlement:
        """A probe found that somebody changed its weights in place."""
        worker.known = worker.on_record = None
        return Settlement(
            worker.row,
            worker.name,
            "drifted",
            version=note.version,
            incarnation=incarnation,
            detail=detail,
            tensors=tensors,
        )

    def doubted(self, worker: WorkerState) -> None:
        """What it holds is not known: the next update sends the bytes and takes a receipt."""
        worker.known = None

    def found_empty(self, worker: WorkerState, incarnation: str) -> Settlement | None:
        """A probe found that it was never sent anything: another process than before."""
        had = worker.on_record is not None or worker.unsettled or worker.in_flight is not None
        self._forget(worker)
        if not had:
            return None
        detail = "it holds nothing that was sent: a new process"
        return Settlement(worker.row, worker.name, "lost", incarnation=incarnation, detail=detail)

    def did_not_answer(self, worker: WorkerState, trouble: Trouble) -> Settlement | None:
        """A probe got no answer from it."""
        settlement = read_trouble(worker, None, trouble).settlement
        known_dead = worker.gone and settlement.verdict == "gone"
        worker.known = None
        if settlement.verdict in ("gone", "lost"):
            self._forget(worker)
            worker.gone = settlement.verdict == "gone"
        return None if known_dead else settlement

    # ------------------------------------------------------------------ foreign writes

    def overwritten(self, workers: Sequence[WorkerState], why: str) -> list[Settlement]:
        """Somebody else wrote into workers: what they held ends, and the next update sends them the bytes."""
        ended = []
        for worker in workers:
            # A push that is still on its way may have come before the writing or after it.
            if worker.in_flight is not None:
                version = worker.in_flight.push.version
                ended.append(Settlement(worker.row, worker.name, "unknown", version=version, detail=why))
            elif worker.on_record is not None:
                version = worker.on_record.version
                ended.append(Settlement(worker.row, worker.name, "drifted", version=version, detail=why))
            worker.known = worker.on_record = None
            self._land(worker)
        return ended

    # ------------------------------------------------------------------ fields

    def _known(self, worker: WorkerState, note: Note, incarnation: str) -> Known:
        pinned = worker.known is None or worker.known.pinned
        return Known(note.version, note.sent_digest, incarnation, pinned)

    def _forget(self, worker: WorkerState) -> None:
        worker.known, worker.on_record, worker.unsettled = None, None, ()
        self._land(worker)

    def _land(self, worker: WorkerState) -> None:
        if worker.in_flight is not None:
            self.spent.append(worker.in_flight)
            worker.in_flight = None

    def _drop_question(self, worker: WorkerState) -> None:
        if worker.question is not None:
            self.spent.append(worker.question)
            worker.question = None

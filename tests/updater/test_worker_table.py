"""The table of workers, played against workers and a record that are a few lines each.

Whatever happens to a worker (late answers, silence, restarts, deaths, foreign writes, another copy of the registry),
what the table calls known is what the worker really holds, and what it believes to be on record is what the record has.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from weightledger.registry.sync import Claim, HeadState, Settlement, Stretch
from weightledger.updater.messages import Inspection, Note, Outcome, Push, Receipt, Seen
from weightledger.updater.workers.deciding import Target
from weightledger.updater.workers.state import Trouble, WorkerState
from weightledger.updater.workers.table import WorkerTable

SERIES = ("registry", "default")
RUN, OTHER, ELSEWHERE = "run", "earlier-run", "run-of-a-copy"
COUNT = 3
STEPS = 60
EXAMPLES = 2000 if os.environ.get("WEIGHTLEDGER_TORTURE") else 60
FIGURES: Counter[str] = Counter()


def digest(version: int) -> str:
    """Return the content of a version; every third one has that of the one before."""
    return f"content-{version - version % 3 // 2}"


def push_of(version: int, order: int, run: str = RUN) -> Push:
    return Push(SERIES, run, version, digest(version), digest(version), order, 8, "policy", registry=run)


@dataclass
class Actor:
    """What a worker's process does with pushes, without any weights."""

    life: int = 1
    alive: bool = True
    note: Note | None = None
    last: Seen | None = None
    last_push: Push | None = None
    overwritten: str = ""
    refuses: Outcome | None = None
    answers: list[tuple[Push, Receipt, int]] = field(default_factory=list)
    """What it answered, on its way to the updater, and how much had happened to it by then."""
    waiting: list[tuple[Push, bool]] = field(default_factory=list)
    """Pushes that it has not looked at yet."""

    @property
    def incarnation(self) -> str:
        return f"life-{self.life}"

    @property
    def standing(self) -> Note | None:
        return None if self.overwritten else self.note

    def carry_out(self, push: Push, bare: bool) -> Receipt:
        """Be `receive`: what a worker does with a push, as far as its notes are concerned."""
        before, overwritten, last = self.standing, self.overwritten, self.last

        def answer(outcome: Outcome, error: str = "") -> Receipt:
            return Receipt(
                outcome,
                push.order,
                self.incarnation,
                self.standing,
                before,
                error,
                overwritten=overwritten,
                last=last,
            )

        if last is not None and push.order <= last.order:
            same = before is not None and before.order == push.order and self.last_push == push
            return answer("applied" if same else "stale")
        self.last, self.last_push = Seen(push.order, push.run, push.registry), push
        note = Note(push.version, push.digest, push.sent_digest, push.order, push.run, (), push.registry)
        if bare:
            if before is None or before.sent_digest != push.sent_digest:
                return answer("bytes_wanted")
            self.note = note
            return answer("relabelled")
        if self.refuses == "kept":
            return answer("kept", "they do not fit")
        if self.refuses == "broken":
            self.note, self.overwritten = None, ""
            return answer("broken", "its own code raised")
        self.note, self.overwritten = note, ""
        return answer("applied")

    def restart(self) -> None:
        self.life += 1
        self.alive = True
        self.note = self.last = self.last_push = None
        self.overwritten = ""


@dataclass
class Row:
    """What the registry has of one worker: at most one holding, and the pushes that were not settled."""

    held: tuple[int, int] | None = None
    """Order and version."""
    pending: dict[int, int] = field(default_factory=dict)
    """Version by order."""
    intended: dict[int, int] = field(default_factory=dict)
    """All that were ever pending: a receipt may confirm one that was given up."""

    def intend(self, order: int, version: int) -> None:
        self.pending[order] = self.intended[order] = version

    def settle(self, item: Settlement) -> None:
        """Do what the record does with a settlement."""
        match item.verdict:
            case "confirmed":
                assert item.order is not None
                assert item.version is not None
                assert item.order in self.intended, "only a push whose intention is on record is confirmed"
                self.held = (item.order, self.intended[item.order])
                assert self.held[1] == item.version
                self.pending = {order: each for order, each in self.pending.items() if order > item.order}
            case "kept":
                self.pending.pop(item.order or 0, None)
                if item.incarnation is not None:
                    self.pending = {
                        order: each for order, each in self.pending.items() if order > (item.order or 0)
                    }
            case "unknown":
                self.pending, self.held = {}, None
            case "drifted":
                self.held = None
            case "lost" | "gone" | "removed":
                self.pending, self.held = {}, None
            case "seen":
                assert self.held is not None
            case "silent":
                pass


class Lives(RuleBasedStateMachine):
    """Random lives of three workers."""

    def __init__(self) -> None:
        super().__init__()
        self.table = WorkerTable()
        self.actors: list[Actor] = []
        self.rows: list[Row] = []
        self.order, self.head = 0, 0
        self.happened = [0] * COUNT
        """How often something happened to each worker that the updater is not told of by itself."""
        self.heard = [0] * COUNT
        """How much of that its newest word knew."""

    def settle(self, key: int, settlements: list[Settlement] | tuple[Settlement, ...]) -> None:
        for each in settlements:
            assert each.name == f"w{key}"
            self.rows[key].settle(each)

    def worker(self, key: int) -> WorkerState:
        return self.table.get(key)

    @initialize(
        left=st.lists(st.sampled_from(["nothing", "held", "pending", "arrived"]), min_size=3, max_size=3)
    )
    def take_over(self, left: list[str]) -> None:
        """An earlier updater left the workers in some state."""
        self.order, self.head = 2, 2
        for key in range(COUNT):
            actor, row, held, pending = Actor(), Row(), None, ()
            first, second = push_of(1, 1, OTHER), push_of(2, 2, OTHER)
            if left[key] != "nothing":
                actor.carry_out(first, bare=False)
                row.held = (1, 1)
                held = Stretch(1, digest(1), digest(1), 1, OTHER, actor.incarnation)
            if left[key] in ("pending", "arrived"):
                row.intend(2, 2)
                pending = (Stretch(2, digest(2), digest(2), 2, OTHER, None),)
            if left[key] == "arrived":
                actor.carry_out(second, bare=False)
                self.happened[key] += 1
            self.actors.append(actor)
            self.rows.append(row)
            self.table.add(Claim(10 + key, f"w{key}", held, pending), actor)

    # ------------------------------------------------------------------ pushes

    @rule(key=st.integers(0, 2), publish=st.booleans())
    def push(self, key: int, publish: bool) -> None:
        """Bring a worker to the head, as an update does, and do not wait for its answer."""
        self.head += publish
        worker, actor = self.worker(key), self.actors[key]
        target = Target(self.head, digest(self.head), False)
        action = self.table.decide(
            worker,
            target,
            HeadState(lineage=((1, self.head),)),
            forced=False,
            resend=False,
            skip=lambda _: False,
            allow_nonfinite=False,
            relabels=True,
        )
        if action == "wait":
            return
        if action == "current":
            self.table.stands(worker, pinned=False)
            return
        assert action in ("push", "relabel")
        self.order += 1
        push = push_of(self.head, self.order)
        self.rows[key].intend(self.order, self.head)
        self.table.sending(worker, push, pinned=False).answer = "on its way"
        actor.waiting.append((push, action == "relabel"))
        FIGURES["pushes"] += 1

    @rule(publish=st.booleans())
    def update(self, publish: bool) -> None:
        """A whole update: every worker that can answer does."""
        self.head += publish
        for key in range(COUNT):
            self.look_at_incarnations(key)
            self.push(key, publish=False)
            for _ in range(2):
                flight = self.worker(key).in_flight
                self.arrive(key, newest_first=True)
                self.answer(key)
                # Content that it was thought to hold under another number is sent, if it holds another one.
                if (
                    flight is None
                    or self.worker(key).in_flight is not None
                    or self.worker(key).known is not None
                ):
                    break
                self.push(key, publish=False)

    @rule(key=st.integers(0, 2), newest_first=st.booleans())
    def arrive(self, key: int, newest_first: bool) -> None:
        """The worker looks at a push that has waited."""
        actor = self.actors[key]
        if actor.waiting and actor.alive:
            push, bare = actor.waiting.pop(-1 if newest_first else 0)
            flight = self.worker(key).in_flight
            if flight is None or flight.push.order != push.order:
                self.happened[key] += 1
            actor.answers.append((push, actor.carry_out(push, bare), self.happened[key]))

    @rule(key=st.integers(0, 2))
    def answer(self, key: int) -> None:
        """The answer to the push in flight reaches the updater; those to older pushes are waited for by nobody."""
        worker, actor = self.worker(key), self.actors[key]
        flight = worker.in_flight
        mine = [each for each in actor.answers if flight is not None and each[0] == flight.push]
        if mine:
            actor.answers.clear()
            _, receipt, happened = mine[0]
            self.take(key, receipt)
            self.heard[key] = happened

    def take(self, key: int, answer: Receipt | Trouble) -> None:
        worker = self.worker(key)
        reading = self.table.read(worker, answer)
        settled = self.table.settle(worker, reading, answer)
        if settled:
            self.settle(key, reading.earlier)
            self.settle(key, settled)
        FIGURES["answers"] += 1

    @rule(key=st.integers(0, 2), kind=st.sampled_from(["silent", "failed", "doubtful", "rejected"]))
    def trouble(self, key: int, kind: Any) -> None:
        """The transport says that there is no answer. Of a push that failed none may have arrived."""
        worker, actor = self.worker(key), self.actors[key]
        if worker.in_flight is None:
            return
        push = worker.in_flight.push
        if kind in ("failed", "rejected"):
            waiting = [each for each in actor.waiting if each[0] == push]
            if not waiting:
                return
            actor.waiting.remove(waiting[0])
        elif kind == "doubtful":
            # It may be carried out still; nobody takes that answer any more.
            self.happened[key] += 1
        self.take(key, Trouble(kind, "why"))

    # ------------------------------------------------------------------ lives

    @rule(key=st.integers(0, 2), with_queue=st.booleans())
    def restart(self, key: int, with_queue: bool) -> None:
        """The process ends and another one comes; what waited is lost, or reaches the new one."""
        actor = self.actors[key]
        actor.restart()
        self.happened[key] += 1
        if not with_queue:
            actor.waiting.clear()
        actor.answers.clear()

    @rule(key=st.integers(0, 2))
    def die(self, key: int) -> None:
        actor = self.actors[key]
        actor.alive = False
        actor.waiting.clear()
        actor.answers.clear()
        self.happened[key] += 1

    @rule(key=st.integers(0, 2))
    def look_at_incarnations(self, key: int) -> None:
        """The updater asks the transport which process a worker is."""
        worker, actor = self.worker(key), self.actors[key]
        if not actor.alive:
            self.settle(key, self.table.died(worker, Trouble("dead", "killed")))
            self.heard[key] = self.happened[key]
        elif self.table.is_another(worker, actor.incarnation):
            self.settle(key, self.table.came_back(worker, actor.incarnation))
            self.heard[key] = self.happened[key]

    # ------------------------------------------------------------------ foreign writes, other registries

    @rule(key=st.integers(0, 2))
    def write_over(self, key: int) -> None:
        """The worker's own code writes into its weights."""
        actor = self.actors[key]
        if actor.alive and actor.note is not None:
            actor.overwritten = "somebody wrote into its weights"
            self.happened[key] += 1

    @rule(key=st.integers(0, 2), ahead=st.integers(1, 3))
    def push_from_a_copy(self, key: int, ahead: int) -> None:
        """A driver on a copy of the registry pushes to the worker, under an order that this one will give, too."""
        actor = self.actors[key]
        if actor.alive:
            actor.carry_out(push_of(self.head + 1, self.order + ahead, ELSEWHERE), bare=False)
            self.happened[key] += 1

    @rule(key=st.integers(0, 2), how=st.sampled_from([None, "kept", "broken"]))
    def refuse(self, key: int, how: Any) -> None:
        self.actors[key].refuses = how

    @rule(key=st.integers(0, 2))
    def overwrite_by_the_adapter(self, key: int) -> None:
        """An adapter knows that a client wrote into the worker: a state that was loaded."""
        actor = self.actors[key]
        if actor.alive and actor.note is not None:
            actor.overwritten = "loaded"
        self.settle(key, self.table.overwritten([self.worker(key)], "loaded"))

    # ------------------------------------------------------------------ questions and probes

    def inspection(self, key: int) -> Inspection:
        actor = self.actors[key]
        note = actor.note
        return Inspection(
            actor.incarnation,
            note,
            0 if actor.last is None else actor.last.order,
            None,
            None if note is None or actor.overwritten else note.sent_digest,
            overwritten=actor.overwritten,
        )

    @rule(key=st.integers(0, 2))
    def ask(self, key: int) -> None:
        """An update asks a worker that it sends nothing to, and hears at once."""
        worker, actor = self.worker(key), self.actors[key]
        if (
            worker.known is None
            or worker.question is not None
            or worker.in_flight is not None
            or not actor.alive
        ):
            return
        self.table.asked(worker, "question")
        ended = self.table.heard(worker, self.inspection(key))
        if ended is not None:
            self.settle(key, [ended])
        self.heard[key] = self.happened[key]

    @rule(key=st.integers(0, 2))
    def probe(self, key: int) -> None:
        worker, actor = self.worker(key), self.actors[key]
        if not actor.alive:
            found = self.table.did_not_answer(worker, Trouble("dead", "killed"))
            self.settle(key, [] if found is None else [found])
            self.heard[key] = self.happened[key]
            return
        answer = self.inspection(key)
        note = answer.note
        if note is None:
            found = self.table.found_empty(worker, answer.incarnation)
            self.settle(key, [] if found is None else [found])
        else:
            vouched = self.table.vouch(worker, note, answer.incarnation)
            for each in (vouched.confirmed, vouched.ended):
                self.settle(key, [] if each is None else [each])
            if not vouched.on_record:
                self.table.doubted(worker)
            elif answer.overwritten:
                drifted = self.table.drifted(worker, note, answer.incarnation, "drifted", ("weight",))
                self.settle(key, [drifted])
            else:
                seen = self.table.seen(worker, note, answer.incarnation)
                self.settle(key, [] if seen is None else [seen])
        self.heard[key] = self.happened[key]
        FIGURES["probes"] += 1

    # ------------------------------------------------------------------ what always holds

    @invariant()
    def what_is_known_is_true(self) -> None:
        for key, actor in enumerate(self.actors):
            worker = self.worker(key)
            known = worker.known
            # A push in flight may have been carried out; the record says that it is pending.
            if known is None or worker.in_flight is not None or self.heard[key] < self.happened[key]:
                continue
            assert actor.alive
            assert known.incarnation == actor.incarnation
            assert actor.standing is not None, f"w{key} is thought to hold v{known.version}"
            assert (actor.standing.version, actor.standing.sent_digest) == (known.version, known.sent_digest)

    @invariant()
    def the_table_believes_to_be_on_record_what_is(self) -> None:
        for key, row in enumerate(self.rows):
            held = self.worker(key).on_record
            assert (None if held is None else (held.order, held.version)) == row.held

    @invariant()
    def a_push_in_flight_has_its_intention_on_record(self) -> None:
        for key, row in enumerate(self.rows):
            flight = self.worker(key).in_flight
            assert flight is None or flight.push.order in row.intended

    @invariant()
    def what_is_known_is_on_record(self) -> None:
        for key in range(len(self.rows)):
            worker = self.worker(key)
            assert worker.known is None or worker.on_record is not None
        FIGURES["steps"] += 1


@pytest.mark.torture
@pytest.mark.timeout(3600)
def test_random_lives_of_workers_leave_nothing_false_in_the_table(record_property: Any) -> None:
    FIGURES.clear()
    run_state_machine_as_test(
        Lives, settings=settings(max_examples=EXAMPLES, stateful_step_count=STEPS, deadline=None)
    )
    record_property("figures", dict(FIGURES))
    assert FIGURES["steps"] > 15 * EXAMPLES
    assert FIGURES["answers"] > EXAMPLES

"""Random lives of a fleet, checked after every step against what the workers' modules really hold.

The updater, registry and receiver are the real ones; workers are fake ones that hang, die, come back, drift and get
pushes late or twice. Drivers close, or die between an intention and its push.
"""

from __future__ import annotations

import atexit
import shutil
import tempfile
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import nn

from tests.registry.copying import copy_registry
from weightledger.registry import NotFoundError, Registry
from weightledger.registry.records import Holding, Version
from weightledger.registry.weights.live import live_digest
from weightledger.updater import SyncReport, claims, held_version
from weightledger.updater.in_worker.receiver import _find_state, receive
from weightledger.updater.messages import Push, ServerWeights
from weightledger.updater.testing import FakeWorkers

WORKERS = ("w0", "w1", "w2")
ids = st.integers(0, len(WORKERS) - 1)
picks = st.data()


class Crash(BaseException):
    """The end of a driver's process, as far as this process can play it."""


class Driver(FakeWorkers):
    """Takes over workers that a former driver left, keeps what it sent, and can die while it sends."""

    def __init__(self, learner: Any, fakes: list[Any], **options: Any) -> None:
        super().__init__(
            learner, [] if fakes else [constant(-1.0) for _ in WORKERS], names=WORKERS, **options
        )
        if fakes:
            self._add_workers(fakes, WORKERS)
        self.sent: list[tuple[int, int, ServerWeights]] = []
        self.dies_at: int | None = None

    def fakes(self) -> list[Any]:
        return [worker.handle for worker in self.workers]

    def _sync_weights_with_worker(self, worker_id: int, server_weights: ServerWeights) -> Any:
        if worker_id == self.dies_at:
            raise Crash
        if isinstance(server_weights.push, Push):
            self.sent.append((worker_id, self._of(worker_id).life, server_weights))
        return super()._sync_weights_with_worker(worker_id, server_weights)

    def vanish(self) -> None:
        """Be gone without a word, as a killed process is."""
        claims.release(self.series, [(worker.name, id(worker.handle)) for worker in self.workers])


@cache
def empty_registry() -> str:
    """Make a registry to copy from: migrating an empty one takes longer than a whole life."""
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder)
    Registry.open(folder).close()
    return folder


def constant(value: float) -> nn.Linear:
    return fill(nn.Linear(2, 1), value)


def fill(module: nn.Linear, value: float) -> nn.Linear:
    with torch.no_grad():
        module.weight.fill_(value)
        module.bias.fill_(value)
    return module


class Fleet(RuleBasedStateMachine):
    """What is known here without asking the registry: faults that nobody can have noticed, each version as it was."""

    @initialize(interval=st.integers(0, 2))
    def begin(self, interval: int) -> None:
        self.folder = tempfile.mkdtemp()
        copy_registry(empty_registry(), self.folder)
        self.interval = interval
        self.learner = constant(0.0)
        self.rollbacks: list[int] = []
        self.versions: dict[int, Version] = {}
        self.orders: dict[tuple[int, int], int] = {}
        self.unnoticed: set[int] = set()  # died or came back since the driver last looked
        self.drifted: set[int] = set()  # hold something else than their own note says
        self.unprobed: set[int] = set()  # of these, whom nobody has looked into
        self.drive([])

    def drive(self, fakes: list[Any]) -> None:
        self.registry = Registry.open(self.folder)
        self.driver = Driver(
            self.learner,
            fakes,
            registry=self.registry,
            timeout=0.02,
            max_interval=self.interval,
            on_rollback=lambda version: self.rollbacks.append(version.number),
        )

    def teardown(self) -> None:
        if hasattr(self, "driver"):
            self.settle_down()
            self.driver.close()
            self.registry.close()
            shutil.rmtree(self.folder)

    # ------------------------------------------------------------------ what a driver does

    @rule(value=st.integers(0, 4))
    def train(self, value: int) -> None:
        fill(self.learner, float(value))

    @rule()
    def diverge(self) -> None:
        fill(self.learner, float("nan"))

    @rule(chosen=st.none() | st.lists(ids, unique=True), later=st.booleans(), force=st.booleans())
    def update(self, chosen: list[int] | None, later: bool, force: bool) -> None:
        adopting = self.moved_elsewhere()
        if later:
            report = self.driver.update_weights(worker_ids=chosen, wait=False, force=force).result()
        else:
            report = self.driver.update_weights(worker_ids=chosen, force=force)
        assert report.adopted == adopting
        assert self.digest_of(self.learner) == self.registry.head().digest
        self.looked_at(report)

    @rule(chosen=st.none() | ids)
    def sync(self, chosen: int | None) -> None:
        self.looked_at(self.driver.sync(chosen))

    @rule(chosen=ids, data=picks)
    def sync_to_a_version(self, chosen: int, data: Any) -> None:
        if numbers := self.stored():
            self.looked_at(self.driver.sync(chosen, version=data.draw(st.sampled_from(numbers))))

    @rule(value=st.integers(5, 6))
    def publish_other_weights(self, value: int) -> None:
        self.looked_at(self.driver.update_weights(constant(float(value))))
        # What the learner trains is not what was published, so the model lets it follow.
        fill(self.learner, float(value))

    @rule(data=picks)
    def roll_back_here(self, data: Any) -> None:
        if numbers := self.stored():
            report = self.driver.rollback(data.draw(st.sampled_from(numbers)), reason="here")
            assert self.digest_of(self.learner) == self.registry.head().digest
            assert self.rollbacks[-1] == report.version == self.registry.head().number
            self.looked_at(report)

    @rule(data=picks)
    def roll_back_elsewhere(self, data: Any) -> None:
        if numbers := self.stored():
            self.registry.rollback(data.draw(st.sampled_from(numbers)), reason="elsewhere")

    @rule(chosen=ids, data=picks)
    def pin_here(self, chosen: int, data: Any) -> None:
        if numbers := self.stored():
            self.looked_at(self.driver.pin(chosen, data.draw(st.sampled_from(numbers))))

    @rule(worker=st.sampled_from([*WORKERS, "w*", "w[01]"]), data=picks)
    def pin_elsewhere(self, worker: str, data: Any) -> None:
        if numbers := self.stored():
            refs = [*numbers, *self.registry.aliases()]
            self.registry.pin(worker, data.draw(st.sampled_from(refs)))

    @rule(data=picks)
    def move_alias(self, data: Any) -> None:
        if numbers := self.stored():
            self.registry.set_alias("best", data.draw(st.sampled_from(numbers)))

    @rule(data=picks)
    def unpin(self, data: Any) -> None:
        if pins := self.registry.pins():
            self.registry.unpin(data.draw(st.sampled_from([pin.worker for pin in pins])))

    @rule()
    def probe(self) -> None:
        found = self.driver.probe()
        self.unnoticed.clear()
        for key, held in found.items():
            fake = self.driver.fakes()[key]
            if not (fake.hanging or fake.dead):
                assert held.digest == self.digest_of(fake.worker.policy)
                assert held.matches == (held.version is not None and held.digest == self.digest(held.version))
                self.unprobed.discard(key)

    @rule(keep=st.integers(1, 2))
    def prune(self, keep: int) -> None:
        aliased = set(self.registry.aliases().values())
        needed = aliased | {pin.version for pin in self.registry.pins()}
        needed |= {open_.version for open_ in self.registry.history() if open_.ended_at is None}
        for version in self.registry.prune(keep_last=keep):
            assert version.number not in needed

    # ------------------------------------------------------------------ what happens to workers

    @rule(chosen=ids)
    def hang(self, chosen: int) -> None:
        self.driver.hang(chosen)

    @rule(chosen=ids, newest_first=st.booleans())
    def wake(self, chosen: int, newest_first: bool) -> None:
        self.driver.wake(chosen, newest_first=newest_first)

    @rule(chosen=ids)
    def kill(self, chosen: int) -> None:
        self.driver.kill(chosen)
        self.unnoticed.add(chosen)

    @rule(chosen=ids)
    def restart(self, chosen: int) -> None:
        self.driver.restart(chosen)
        self.unnoticed.add(chosen)
        self.renew(chosen)

    @rule(chosen=ids)
    def drift(self, chosen: int) -> None:
        self.driver.drift(chosen, lambda policy: fill(policy, 77.0))
        self.drifted.add(chosen)
        self.unprobed.add(chosen)

    @precondition(lambda self: hasattr(self, "driver") and self.driver.sent)
    @rule(data=picks)
    def deliver_again(self, data: Any) -> None:
        key, life, weights = data.draw(st.sampled_from(self.driver.sent))
        fake = self.driver.fakes()[key]
        if fake.life == life and not (fake.dead or fake.hanging):
            before = self.digest_of(fake.worker.policy)
            receive(fake.worker, weights.push, weights.handle)  # type: ignore[arg-type]
            assert self.digest_of(fake.worker.policy) == before

    # ------------------------------------------------------------------ what happens to drivers

    @rule()
    def driver_closes_and_another_begins(self) -> None:
        fakes = self.driver.fakes()
        self.driver.close()
        self.registry.close()
        self.begin_again(fakes)

    @rule(chosen=ids)
    def driver_dies_while_it_sends(self, chosen: int) -> None:
        fakes = self.driver.fakes()
        self.driver.dies_at = chosen
        try:
            self.driver.update_weights(force=True)
        except Crash:
            pass
        self.driver.vanish()
        self.begin_again(fakes)

    def begin_again(self, fakes: list[Any]) -> None:
        # A new driver begins where the log is: it restores the head into its learner, as users do.
        self.drive(fakes)
        try:
            self.registry.restore("head", self.learner)
        except NotFoundError:
            pass

    @rule()
    def settle_down(self) -> None:
        """Once everybody answers, one call brings all to their targets."""
        for key, fake in enumerate(self.driver.fakes()):
            if fake.dead:
                self.driver.restart(key)
                self.renew(key)
            self.driver.wake(key)
        self.probe()
        report = self.driver.sync()
        self.looked_at(report)
        for key, name in enumerate(WORKERS):
            outcome = report.workers[key]
            if report.version is None:
                continue
            target = self.registry.target(name)
            if outcome.status == "refused":
                assert target.nonfinite
                continue
            assert outcome.held == outcome.target == target.number, outcome
            assert self.digest_of(self.driver.worker(key).policy) == target.digest

    # ------------------------------------------------------------------ what always holds

    def looked_at(self, report: SyncReport) -> None:
        """Check a report against the workers; whoever it names was looked at."""
        for key, outcome in report.workers.items():
            self.unnoticed.discard(key)
            fake = self.driver.fakes()[key]
            if outcome.status == "synced":
                self.renew(key)
                assert outcome.held == outcome.target
            if (
                outcome.status in ("synced", "current", "skipped")
                and key not in self.unprobed
                and report.version
            ):
                assert outcome.held is not None
                assert self.digest_of(fake.worker.policy) == self.digest(outcome.held), outcome
            assert (outcome.status == "dead") <= (fake.dead or not report.version)

    @invariant()
    def whatever_is_called_confirmed_is_true(self) -> None:
        if not hasattr(self, "driver"):
            return
        for status in self.registry.workers():
            key = WORKERS.index(status.name)
            fake = self.driver.fakes()[key]
            assert (status.held is not None) == (status.state == "confirmed")
            if any(isinstance(instruction, Push) for _, instruction, _ in fake.queue):
                assert status.state != "confirmed" or key in self.unnoticed, "a push waits in its queue"
            if status.held is None or key in self.unnoticed:
                continue
            assert status.incarnation == f"life-{fake.life}"
            assert held_version(fake.worker) == status.held or key in self.drifted
            assert status.pending is None
            if key not in self.unprobed:
                assert self.digest_of(fake.worker.policy) == self.digest(status.held), status

    @invariant()
    def what_a_worker_stamps_is_what_it_acts_with(self) -> None:
        if not hasattr(self, "driver"):
            return
        for fake in self.driver.fakes():
            number = held_version(fake.worker)
            assert number is None or self.digest_of(fake.worker.policy) == self.digest(number)

    @invariant()
    def a_worker_never_goes_back_in_orders_and_holds_what_its_note_says(self) -> None:
        if not hasattr(self, "driver"):
            return
        for key, fake in enumerate(self.driver.fakes()):
            state = _find_state(fake.worker)
            for holding in [] if state is None else state.holdings.values():
                life = (key, fake.life)
                assert holding is not None
                note = holding.note
                assert note.order >= self.orders.get(life, 0)
                self.orders[life] = note.order
                if key not in self.drifted:
                    assert self.digest_of(fake.worker.policy) == note.sent_digest == self.digest(note.version)

    @invariant()
    def intervals_of_a_worker_do_not_overlap(self) -> None:
        if not hasattr(self, "driver"):
            return
        by_worker: dict[str, list[Holding]] = {}
        for holding in self.registry.history():
            by_worker.setdefault(holding.worker, []).append(holding)
        for holdings in by_worker.values():
            orders = [holding.order for holding in holdings]
            assert orders == sorted(set(orders))
            confirmed = [holding for holding in holdings if holding.confirmed_at is not None]
            for holding in confirmed:
                assert holding.confirmed_at is not None
                assert holding.pushed_at <= holding.confirmed_at
                assert holding.ended_at is None or holding.confirmed_at <= holding.ended_at
            for earlier, later in pairwise(confirmed):
                assert earlier.ended_at is not None and later.confirmed_at is not None
                assert earlier.ended_at <= later.confirmed_at

    @invariant()
    def versions_only_grow_and_never_change(self) -> None:
        if not hasattr(self, "driver"):
            return
        found = {version.number: version for version in self.registry.versions()}
        assert found.keys() >= self.versions.keys()
        new = found.keys() - self.versions.keys()
        assert not new or min(new) > max(self.versions, default=0)
        for number, was in self.versions.items():
            now = found[number]
            assert (now.digest, now.parent, now.restores, now.created_at) == (
                was.digest,
                was.parent,
                was.restores,
                was.created_at,
            )
        self.versions = found

    @invariant()
    def what_is_needed_can_be_loaded(self) -> None:
        if not hasattr(self, "driver") or not self.versions:
            return
        needed = {self.registry.head().number, *self.registry.aliases().values()}
        needed |= {pin.version for pin in self.registry.pins()}
        held = {status.held for status in self.registry.workers() if status.held is not None}
        # A driver that died half-way may leave workers with a version that was never stored; the record says so.
        needed |= {number for number in held if self.registry.get(number).state != "lost"}
        for number in needed:
            assert live_digest(self.registry.load(number))[0] == self.digest(number)

    # ------------------------------------------------------------------ helpers

    def renew(self, key: int) -> None:
        """Note that a worker has fresh weights, in a new life or by a push."""
        self.drifted.discard(key)
        self.unprobed.discard(key)

    def stored(self) -> list[int]:
        return [version.number for version in self.registry.versions() if version.stored]

    def moved_elsewhere(self) -> bool:
        known = self.driver.head
        moves = [
            version for version in self.registry.versions() if known is None or version.number > known.number
        ]
        return bool(moves) and moves[-1].restores is not None

    def digest(self, number: int) -> str:
        return self.registry.get(number).digest

    @staticmethod
    def digest_of(module: Any) -> str:
        return live_digest(module)[0]


Fleet.TestCase.settings = settings(max_examples=20, stateful_step_count=30, deadline=None)
Fleet.TestCase.pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]  # type: ignore[attr-defined]
test_random_lives_of_a_fleet = Fleet.TestCase

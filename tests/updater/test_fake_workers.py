"""The stand-ins that users get for their own tests: real records, faults made by hand."""

from __future__ import annotations

import copy
import doctest
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from weightledger.registry import InvalidWeightsError, NotFoundError, Registry, Version
from weightledger.registry.weights.live import live_digest
from weightledger.updater import held_version, testing
from weightledger.updater.in_worker.receiver import write_note
from weightledger.updater.messages import Push, ServerWeights
from weightledger.updater.testing import FakeTransport, FakeWorkers, statuses

Make = Callable[..., FakeWorkers]


def constant(value: float) -> nn.Linear:
    module = nn.Linear(3, 2)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(value)
    return module


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[FakeWorkers] = []

    def begin(count: int = 2, *, policies: list[Any] | None = None, **options: Any) -> FakeWorkers:
        fleet = FakeWorkers(
            constant(1.0),
            [constant(-1.0) for _ in range(count)] if policies is None else policies,
            registry=options.pop("registry", None) or Registry.open(tmp_path),
            timeout=options.pop("timeout", 0.05),
            **options,
        )
        made.append(fleet)
        return fleet

    yield begin
    for fleet in made:
        fleet.close()


def learn(fleet: FakeWorkers, value: float, **options: Any) -> dict[str, str]:
    with torch.no_grad():
        for parameter in fleet.policy_weights.parameters():
            parameter.fill_(value)
    return statuses(fleet.update_weights(**options).workers)


def value(fleet: FakeWorkers, worker_id: int) -> float:
    return float(fleet.worker(worker_id).policy.weight[0, 0].item())


def states(fleet: FakeWorkers) -> list[tuple[str, int | None, int | None]]:
    return [(status.state, status.held, status.pending) for status in fleet.registry.workers()]


def kinds(fleet: FakeWorkers, worker: str) -> list[str]:
    return [event.kind for event in fleet.registry.events(worker=worker)]


def test_the_example_of_the_module_runs() -> None:
    with warnings.catch_warnings():
        assert doctest.testmod(testing).failed == 0


def test_a_hanging_worker_times_out_and_its_push_stays_pending(make: Make) -> None:
    """RAY-03: the others are updated."""
    fleet = make()
    learn(fleet, 1.0)
    fleet.hang(1)
    assert learn(fleet, 2.0) == {"fake-0": "synced", "fake-1": "timeout"}
    assert states(fleet) == [("confirmed", 2, None), ("unknown", None, 2)]
    fleet.wake(1)
    assert (value(fleet, 1), states(fleet)[1]) == (2.0, ("unknown", None, 2)), (
        "nobody has asked for its receipt yet"
    )
    assert learn(fleet, 2.0) == {"fake-0": "current", "fake-1": "synced"}
    assert states(fleet) == [("confirmed", 2, None)] * 2


def test_only_one_push_waits_for_a_worker_and_the_newest_target_replaces_it(make: Make) -> None:
    fleet = make(1)
    fleet.hang(0)
    for number in range(1, 4):
        assert learn(fleet, float(number)) == {"fake-0": "timeout"}
    assert states(fleet) == [("unknown", None, 1)]
    fleet.wake(0)
    assert learn(fleet, 3.0) == {"fake-0": "synced"} and value(fleet, 0) == 3.0
    assert [(each.version, each.ended_how) for each in fleet.registry.history()] == [
        (1, "replaced"),
        (3, None),
    ]


def test_a_worker_that_was_silent_is_not_passed_by_when_it_answers(make: Make) -> None:
    fleet = make(1, max_interval=5)
    learn(fleet, 1.0)
    fleet.hang(0)
    fleet.update_weights(force=True)
    fleet.wake(0)
    assert learn(fleet, 2.0) == {"fake-0": "synced"} and value(fleet, 0) == 2.0


def test_an_answer_that_comes_late_does_not_stand_for_a_version_that_is_refused(make: Make) -> None:
    """RL-05: after its late receipt the worker is still not sent NaN, and the report says so."""
    fleet = make(1)
    learn(fleet, 1.0)
    fleet.hang(0)
    learn(fleet, 2.0)
    fleet.wake(0)
    assert learn(fleet, float("nan")) == {"fake-0": "refused"}
    assert (value(fleet, 0), states(fleet)) == (2.0, [("confirmed", 2, None)])


def test_a_killed_worker_is_dead_and_gone_and_told_once(make: Make) -> None:
    """RAY-06: the others are where they should be."""
    fleet = make(3)
    learn(fleet, 1.0)
    fleet.kill(1)
    assert learn(fleet, 2.0) == {"fake-0": "synced", "fake-1": "dead", "fake-2": "synced"}
    assert learn(fleet, 3.0)["fake-1"] == "dead"
    assert [state for state, _, _ in states(fleet)] == ["confirmed", "gone", "confirmed"]
    assert kinds(fleet, "fake-1") == ["worker_lost"]


def test_a_restarted_worker_is_noticed_and_sent_what_it_lost(make: Make) -> None:
    """RAY-01: a second update to the same version really loads it."""
    fleet = make(1)
    learn(fleet, 1.0)
    fleet.restart(0)
    assert value(fleet, 0) == -1.0 and held_version(fleet.worker(0)) is None
    assert learn(fleet, 1.0) == {"fake-0": "synced"}
    assert value(fleet, 0) == 1.0
    assert [(each.incarnation, each.ended_how) for each in fleet.registry.history()] == [
        ("life-0", "lost"),
        ("life-1", None),
    ]


def test_a_restarted_worker_comes_back_with_the_policy_that_it_began_with(make: Make) -> None:
    fleet = make(1)
    initial = copy.deepcopy(fleet.worker(0).policy)
    learn(fleet, 5.0)
    fleet.restart(0)
    assert live_digest(fleet.worker(0).policy) == live_digest(initial)


def test_a_killed_worker_that_is_restarted_is_steered_again(make: Make) -> None:
    fleet = make(1)
    learn(fleet, 1.0)
    fleet.kill(0)
    learn(fleet, 2.0)
    fleet.restart(0)
    assert learn(fleet, 2.0) == {"fake-0": "synced"} and states(fleet) == [("confirmed", 2, None)]


def test_what_waits_in_a_killed_worker_is_never_answered_as_done(make: Make) -> None:
    fleet = make(1)
    fleet.hang(0)
    learn(fleet, 1.0)
    fleet.kill(0)
    assert learn(fleet, 1.0) == {"fake-0": "dead"} and states(fleet) == [("gone", None, None)]
    assert [each.confirmed_at for each in fleet.registry.history()] == [None]


def test_drift_is_found_by_a_probe_and_mended_by_the_next_update(make: Make) -> None:
    fleet = make()
    learn(fleet, 1.0)
    fleet.drift(0, lambda policy: policy.bias.data.add_(1))
    assert states(fleet)[0] == ("confirmed", 1, None), "nobody looked"
    found = fleet.probe()
    assert (found[0].matches, found[0].drift, found[1].matches) == (False, ("bias",), True)
    assert states(fleet) == [("unknown", None, None), ("confirmed", 1, None)]
    assert learn(fleet, 1.0) == {"fake-0": "synced", "fake-1": "current"}
    assert kinds(fleet, "fake-0") == ["drift"]


class Wrapped(nn.Module):
    """As data-parallel wrappers are: one more name before every name."""

    def __init__(self) -> None:
        super().__init__()
        self.module = constant(-1.0).half()


def test_a_cast_policy_in_a_wrapper_has_not_drifted(make: Make) -> None:
    """TO-02: the names of a wrapped policy are those of the version, whatever its dtype."""
    fleet = make(policies=[Wrapped(), constant(-1.0).half()], cast=True)
    assert learn(fleet, 0.1) == {"fake-0": "synced", "fake-1": "synced"}
    assert all(held.matches for held in fleet.probe().values())
    fleet.drift(0, lambda policy: policy.module.bias.data.add_(1))
    found = fleet.probe()
    assert [held.matches for held in found.values()] == [False, True]
    assert found[0].drift == ("bias",)


def test_a_callback_that_raises_does_not_keep_workers_from_what_was_rolled_back_to(make: Make) -> None:
    def refuse(_: object) -> None:
        raise RuntimeError("no optimizer")

    fleet = make(1, on_rollback=refuse)
    learn(fleet, 1.0)
    learn(fleet, 2.0)
    with pytest.raises(RuntimeError, match="no optimizer"):
        fleet.rollback(1)
    assert value(fleet, 0) == 1.0 and states(fleet) == [("confirmed", 3, None)]
    assert statuses(fleet.update_weights().workers) == {"fake-0": "current"}


def test_server_weights_that_cannot_be_restored_do_not_keep_workers_from_it_and_are_told(make: Make) -> None:
    fleet = make(1)
    learn(fleet, 1.0)
    learn(fleet, 2.0)
    restore = fleet.live.write

    def refuse(version: Any, payload: Any) -> None:
        raise RuntimeError("the learner does not answer")

    fleet.live.write = refuse  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="does not answer"):
        fleet.rollback(1)
    assert value(fleet, 0) == 1.0 and states(fleet) == [("confirmed", 3, None)]
    fleet.live.write = restore  # type: ignore[method-assign]
    report = fleet.update_weights()
    assert report.adopted and report.version == 3, "not published over: the next update restores them"


def test_a_callback_that_updates_again_finds_the_rollback_done(make: Make) -> None:
    seen = []

    def train_on(version: Version) -> None:
        seen.append((version.number, value(fleet, 0), states(fleet)))
        learn(fleet, 9.0)

    fleet = make(1, on_rollback=train_on)
    learn(fleet, 1.0)
    learn(fleet, 2.0)
    assert fleet.rollback(1).version == 3
    assert seen == [(3, 1.0, [("confirmed", 3, None)])]
    assert value(fleet, 0) == 9.0 and states(fleet) == [("confirmed", 4, None)]


def test_a_rollback_reads_into_memory_that_the_next_publish_writes_over_and_hurts_nobody(make: Make) -> None:
    fleet = make(2)
    for number in (1, 2, 3):
        learn(fleet, float(number))
    for number in (1, 2):
        assert fleet.rollback(number).ok and value(fleet, 0) == value(fleet, 1) == number
        assert live_digest(fleet.policy_weights)[0] == fleet.registry.get(number).digest
        learn(fleet, 10.0 + number)
        assert value(fleet, 0) == 10 + number
    assert fleet.registry.verify() == []
    assert fleet.registry.publisher.borrow().room(10) is not None, "nobody kept the buffer"


def test_a_rollback_that_does_not_fit_gives_the_buffer_back(make: Make) -> None:
    fleet = make(1)
    learn(fleet, 1.0)
    fleet.registry.publish({"other": torch.zeros(3)}, restructure=True)
    with pytest.raises(InvalidWeightsError):
        fleet.adopt()
    assert fleet.registry.publisher.borrow().room(10) is not None


def test_an_update_in_the_background_reads_beside_the_copy_that_is_made_meanwhile(make: Make) -> None:
    """A pinned version is read from its file while the caller copies the next one into the publisher's buffer."""
    fleet = make(2)
    learn(fleet, 1.0)
    learn(fleet, 2.0)
    fleet.registry.pin("fake-0", 1)
    for step in range(20):
        fleet.source.keep(())
        fleet.restart(0)
        with torch.no_grad():
            fleet.policy_weights.weight.fill_(3.0 + step)
        future = fleet.update_weights(wait=False)
        with torch.no_grad():
            fleet.policy_weights.weight.fill_(-5.0)
        assert future.result(60).ok
        assert value(fleet, 0) == 1.0 and value(fleet, 1) == 3.0 + step


def test_a_rollback_restores_its_own_version_though_another_one_is_read_for_a_pinned_worker(
    make: Make,
) -> None:
    fleet = make(2)
    for number in (1, 2, 3):
        learn(fleet, float(number))
    fleet.registry.pin("fake-0", 2)
    assert fleet.rollback(1).ok
    assert (value(fleet, 0), value(fleet, 1)) == (2.0, 1.0)
    assert (
        live_digest(fleet.policy_weights)[0] == fleet.registry.head().digest == fleet.registry.get(1).digest
    )


def test_whoever_interrupts_the_wait_for_workers_still_gets_the_optimizer_back(make: Make) -> None:
    told: list[int] = []
    fleet = make(1, on_rollback=lambda version: told.append(version.number))
    learn(fleet, 1.0)
    learn(fleet, 2.0)

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    fleet.transport.collect = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        fleet.rollback(1)
    del fleet.transport.collect
    assert told == [3] and live_digest(fleet.policy_weights)[0] == fleet.registry.get(1).digest
    assert fleet.update_weights().ok and told == [3]


@pytest.mark.parametrize("how", ["update_weights", "sync", "rollback", "adopt"])
def test_a_callback_may_publish_by_the_registry(
    make: Make, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weightledger.registry.store.publishing._BUFFER_PATIENCE", 5.0)
    fleet = make(1)
    for number in (1, 2, 3):
        learn(fleet, float(number))
    fleet.on_rollback = lambda version: fleet.registry.publish(constant(9.0))
    if how == "rollback":
        fleet.rollback(1)
    else:
        with Registry.open(fleet.registry.location) as other:
            other.rollback(1)
        getattr(fleet, how)()
    assert fleet.registry.head().number == 5
    fleet.on_rollback = None
    fleet.sync()
    assert value(fleet, 0) == 9.0


def test_a_background_update_sends_what_was_adopted_and_not_what_is_copied_next(make: Make) -> None:
    """The caller is held up right after it handed the update over, and the transport is slow."""
    arrived: list[tuple[int, float]] = []

    class Slow(FakeTransport):
        def put(self, payload: Any) -> Any:
            time.sleep(0.1)
            return super().put(payload)

        def send(self, worker: Any, instruction: Any, handle: Any) -> Any:
            receipt = super().send(worker, instruction, handle)
            if isinstance(instruction, Push):
                arrived.append((instruction.version, worker.worker.policy.weight[0, 0].item()))
            return receipt

    fleet = make(0)
    for number in (1, 2, 3):
        learn(fleet, float(number))
    fleet.close()
    with FakeWorkers(
        fleet.policy_weights, [constant(-1.0)], registry=fleet.registry, transport=Slow(), timeout=10.0
    ) as slow:
        with Registry.open(fleet.registry.location) as other:
            other.rollback(1)
        first = slow.update_weights(wait=False)
        with torch.no_grad():
            slow.policy_weights.weight.fill_(7.0)
        second = slow.update_weights(wait=False)
        assert first.result(60).adopted and second.result(60).ok
    assert arrived == [(4, 1.0), (5, 7.0)]


class Own(FakeWorkers):
    """Has a hook of its own."""

    def _get_server_weights(self) -> ServerWeights:
        return self._publish(self.policy_weights)


def test_an_extra_that_fails_does_not_keep_a_rollback_from_being_followed(tmp_path: Path) -> None:
    """The optimizer is broken, which is why somebody went back; the callback mends it."""
    broken = []

    def extra() -> dict[str, int]:
        if broken:
            raise RuntimeError("the optimizer is broken")
        return {"steps": 1}

    registry = Registry.open(tmp_path)
    with Own(
        constant(1.0),
        [constant(-1.0)],
        registry=registry,
        extra=extra,
        on_rollback=lambda version: broken.clear(),
    ) as fleet:
        learn(fleet, 1.0)
        learn(fleet, 2.0)
        broken.append(True)
        with pytest.raises(RuntimeError, match="optimizer is broken"):
            learn(fleet, 3.0)
        registry.rollback(1)
        assert fleet.update_weights().adopted and value(fleet, 0) == 1.0


class Remembering(Own):
    """Hands out what it published once."""

    cached: ServerWeights | None = None

    def _get_server_weights(self) -> ServerWeights:
        if self.cached is None:
            self.cached = super()._get_server_weights()
        return self.cached


@pytest.mark.parametrize("kind", [Own, Remembering])
def test_a_rollback_is_followed_whatever_becomes_of_the_hook(tmp_path: Path, kind: type[Own]) -> None:
    registry = Registry.open(tmp_path)
    with kind(constant(1.0), [constant(-1.0)], registry=registry) as fleet:
        learn(fleet, 1.0)
        fleet.cached = None  # type: ignore[attr-defined]
        learn(fleet, 2.0)
        if kind is Own:
            known = fleet._get_server_weights()
            fleet._get_server_weights = lambda: known  # type: ignore[method-assign]
        registry.rollback(1)
        assert fleet.update_weights().adopted and value(fleet, 0) == 1.0


def test_a_worker_that_drifted_and_refuses_a_push_is_not_said_to_hold_what_it_held(make: Make) -> None:
    fleet = make(1)
    learn(fleet, 1.0)
    fleet.drift(0, lambda policy: policy.bias.data.add_(1))
    fleet.probe()
    report = fleet.update_weights(nn.Linear(4, 2), restructure=True)
    assert report.workers[0].status == "failed" and report.workers[0].held is None
    assert states(fleet) == [("unknown", None, None)]
    fleet.rollback(1)
    assert value(fleet, 0) == 1.0 and states(fleet) == [("confirmed", 3, None)]


def test_a_first_push_that_does_not_fit_is_a_failed_sync(make: Make) -> None:
    fleet = make(policies=[nn.Linear(4, 2)])
    assert learn(fleet, 1.0) == {"fake-0": "failed"}
    assert kinds(fleet, "fake-0") == ["sync_failed"] and fleet.registry.history() == []
    assert states(fleet) == [("unknown", None, None)]


def test_a_probe_settles_a_push_that_was_never_answered(make: Make) -> None:
    fleet = make(1)
    fleet.hang(0)
    learn(fleet, 1.0)
    fleet.wake(0)
    assert fleet.probe()[0].version == 1 and states(fleet) == [("confirmed", 1, None)]
    assert learn(fleet, 1.0) == {"fake-0": "current"}


def test_a_probe_of_a_hanging_worker_says_that_nothing_is_known(make: Make) -> None:
    fleet = make(1)
    learn(fleet, 1.0)
    fleet.hang(0)
    found = fleet.probe()[0]
    assert not found.matches and found.version is None and "no answer" in found.error
    assert states(fleet) == [("unknown", None, None)]
    fleet.wake(0)
    assert learn(fleet, 1.0) == {"fake-0": "synced"}


def test_pushes_that_are_carried_out_in_the_wrong_order_end_with_the_newest(
    make: Make, tmp_path: Path
) -> None:
    """RAY-05: a push of a driver that is gone arrives after that of its successor."""

    class Successor(FakeWorkers):
        def __init__(self, fakes: list[Any]) -> None:
            super().__init__(
                constant(9.0), [], registry=Registry.open(tmp_path), timeout=0.05, start="continue"
            )
            self._add_workers(fakes, ["fake-0"])

    first = make(1)
    fakes = [worker.handle for worker in first.workers]
    first.hang(0)
    learn(first, 1.0)
    first.close()
    with Successor(fakes) as second:
        learn(second, 2.0)
        second.wake(0, newest_first=True)
        assert value(second, 0) == 2.0 and held_version(second.worker(0)) == 2
        assert learn(second, 2.0) == {"fake-0": "synced"}
        assert [(each.version, each.ended_how) for each in second.registry.history()] == [
            (1, "unconfirmed"),
            (2, None),
        ]


def test_a_push_that_a_gone_driver_left_is_settled_by_the_next_receipt(make: Make, tmp_path: Path) -> None:
    class Successor(FakeWorkers):
        def __init__(self, fakes: list[Any]) -> None:
            super().__init__(
                constant(9.0), [], registry=Registry.open(tmp_path), timeout=0.05, start="continue"
            )
            self._add_workers(fakes, ["fake-0"])

    first = make(1)
    fakes = [worker.handle for worker in first.workers]
    first.hang(0)
    learn(first, 1.0)
    first.wake(0)  # carried out, and nobody is left to take the receipt
    first.close()
    with Successor(fakes) as second:
        assert states(second) == [("unknown", None, 1)]
        assert learn(second, 2.0) == {"fake-0": "synced"}
        history = second.registry.history()
        assert [(each.version, each.ended_how) for each in history] == [(1, "replaced"), (2, None)]
        assert all(each.confirmed_at is not None for each in history)


def test_equal_content_is_relabelled_unless_workers_load_in_their_own_way(make: Make) -> None:
    loaded: list[int] = []
    plain, own = (
        make(1, names=["plain"]),
        make(1, names=["own"], apply=lambda _, __, version: loaded.append(version)),
    )
    for fleet in (plain, own):
        learn(fleet, 1.0)
    plain.registry.rollback(1)
    assert statuses(plain.update_weights().workers) == {"plain": "current"}
    assert statuses(own.update_weights().workers) == {"own": "synced"}
    assert held_version(plain.worker(0)) == held_version(own.worker(0)) == 2 and loaded[-1] == 2


def test_a_worker_that_lost_what_was_to_be_relabelled_is_sent_the_bytes(make: Make) -> None:
    fleet = make(1)
    learn(fleet, 1.0)
    # Its note goes, and its life does not change: only the worker can tell.
    write_note(fleet.worker(0), fleet.series, None)
    fleet.drift(0, lambda policy: policy.weight.data.zero_())
    fleet.registry.rollback(1)
    assert statuses(fleet.update_weights().workers) == {"fake-0": "synced"} and value(fleet, 0) == 1.0
    assert states(fleet) == [("confirmed", 2, None)]


def test_workers_come_and_go(make: Make) -> None:
    fleet = make(1)
    learn(fleet, 1.0)
    late = fleet.add_worker(constant(-1.0))
    assert (late, value(fleet, late)) == (1, 1.0) and fleet.all_worker_ids() == [0, 1]
    fleet.remove_worker(0)
    assert fleet.all_worker_ids() == [1] and learn(fleet, 2.0) == {"fake-1": "synced"}
    with pytest.raises(NotFoundError, match="worker 0"):
        fleet.hang(0)


def test_policies_of_workers_may_be_tensordicts_and_mappings(make: Make) -> None:
    from tensordict import TensorDict

    held = dict(constant(-1.0).state_dict())
    nested = TensorDict(constant(-1.0).state_dict())
    fleet = make(policies=[held, nested])
    assert learn(fleet, 3.0) == {"fake-0": "synced", "fake-1": "synced"}
    assert bool((held["weight"] == 3).all()) and bool((nested["bias"] == 3).all())


def test_a_fleet_of_nobody_publishes(make: Make) -> None:
    fleet = make(0)
    assert learn(fleet, 1.0) == {} and fleet.registry.head().number == 1


class RolledBackMidway(FakeWorkers):
    """Somebody else rolls back after the updater has looked at the head, and before it holds the lock."""

    interfere = False

    def _get_server_weights(self) -> ServerWeights:
        if self.interfere:
            self.interfere = False
            with Registry.open(self.registry.location) as elsewhere:
                elsewhere.rollback(1, reason="from elsewhere")
        return super()._get_server_weights()


def test_a_rollback_that_comes_at_the_last_moment_is_taken_over_and_not_an_error(tmp_path: Path) -> None:
    with RolledBackMidway(constant(1.0), [constant(-1.0)], registry=Registry.open(tmp_path)) as fleet:
        learn(fleet, 1.0)
        learn(fleet, 2.0)
        fleet.interfere = True
        fleet.policy_weights.bias.data.fill_(3.0)
        report = fleet.update_weights()
        assert (report.adopted, report.published, report.version) == (True, False, 3)
        assert value(fleet, 0) == 1.0
        assert float(fleet.policy_weights.bias[0].item()) == 1.0
        assert [version.restores for version in fleet.registry.versions()] == [None, None, 1]

"""How a training begins on a policy that has versions: never by sending weights that nobody trained.

What workers and learners really hold is hashed here, and not asked of the product.
"""

from __future__ import annotations

import hashlib
import os
import signal
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.registry.helpers import exit_code_of, in_child
from weightledger.registry import ConflictError, InUseError, InvalidWeightsError, NotFoundError, Registry
from weightledger.updater.testing import FakeWorkers, statuses

Make = Callable[..., FakeWorkers]

THREE_WAYS = r'(?s)versions up to v2.*"head".*"new".*"continue"'


def net(seed: int, width: int = 3) -> nn.Linear:
    """Return weights that somebody has initialised, each seed to others."""
    torch.manual_seed(seed)
    return nn.Linear(width, 2)


def sha(module: Any) -> str:
    """Hash the numbers that are really in a module."""
    found = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        found.update(name.encode() + tensor.detach().numpy().tobytes())
    return found.hexdigest()


def step(module: nn.Module, by: float = 1.0) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(by)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[FakeWorkers] = []

    def begin(policy: Any, **options: Any) -> FakeWorkers:
        registry = options.pop("registry", None) or Registry.open(tmp_path / "r")
        width = options.pop("width", 3)
        fleet = FakeWorkers(
            policy, [net(100 + seed, width) for seed in range(2)], registry=registry, timeout=0.05, **options
        )
        made.append(fleet)
        return fleet

    yield begin
    for fleet in made:
        fleet.close()
        fleet.registry.close()


def held(fleet: FakeWorkers) -> list[str]:
    return [sha(fleet.worker(key).policy) for key in fleet.all_worker_ids()]


def parents(registry: Registry) -> list[int | None]:
    return [version.parent for version in registry.versions()]


def train(folder: Path, *, start: Any = None, crash: bool = False) -> tuple[str, int]:
    """Train in a process of its own: two updates, then perhaps die without a word."""
    policy = net(1)
    optimizer = torch.optim.Adam(policy.parameters())
    count = [0]

    def restore(version: Any) -> None:
        extra = fleet_registry.load_extra(version)
        optimizer.load_state_dict(extra["optimizer"])
        count[0] = extra["count"]

    fleet_registry = Registry.open(folder)
    with FakeWorkers(
        policy,
        [net(2)],
        registry=fleet_registry,
        start=start,
        extra=lambda: {"optimizer": optimizer.state_dict(), "count": count[0]},
        on_rollback=restore,
    ) as fleet:
        for _ in range(2):
            policy(torch.ones(3)).sum().backward()
            optimizer.step()
            count[0] += 10
            assert fleet.update_weights(step=count[0]).ok
        assert held(fleet) == [sha(policy)]
        if crash:
            os.kill(os.getpid(), signal.SIGKILL)
    return sha(policy), count[0]


def test_untrained_weights_are_refused_and_the_three_ways_are_named(make: Make, tmp_path: Path) -> None:
    trained, _ = in_child(train, tmp_path / "r")
    policy = net(9)
    fleet = make(policy)
    before = (sha(policy), held(fleet))
    for call in (
        fleet.update_weights,
        lambda: fleet.update_weights(wait=False),
        lambda: fleet.update_weights(weights=net(10)),
        fleet._get_server_weights,
    ):
        with pytest.raises(ConflictError, match=THREE_WAYS):
            call()
    assert (sha(policy), held(fleet)) == before
    assert parents(fleet.registry) == [None, 1]
    # Without a word workers may follow what is there, and the learner is nobody's to touch.
    assert fleet.sync().ok
    assert held(fleet) == [trained] * 2 and sha(policy) == before[0]
    with pytest.raises(ConflictError, match=THREE_WAYS):
        fleet.update_weights()


def test_head_restores_the_learner_whole_and_at_once(make: Make, tmp_path: Path) -> None:
    """After a crash: weights, optimizer and step are the ones that the dead process published last."""
    assert exit_code_of(_train_and_die, tmp_path / "r") == -signal.SIGKILL
    policy = net(9)
    optimizer = torch.optim.Adam(policy.parameters())
    restored: list[tuple[int, str, int]] = []

    def restore(version: Any) -> None:
        extra = registry.load_extra(version)
        optimizer.load_state_dict(extra["optimizer"])
        restored.append((version.number, sha(policy), extra["count"]))

    registry = Registry.open(tmp_path / "r")
    fleet = make(policy, registry=registry, start="head", on_rollback=restore)
    published = sha_of_stored(registry, 2)
    assert restored == [(2, published, 20)] and sha(policy) == published
    assert {int(state["step"]) for state in optimizer.state.values()} == {2}
    assert [event.version for event in registry.events(kind="adopt")] == [2]
    step(policy)
    assert fleet.update_weights(step=30).ok
    assert held(fleet) == [sha(policy)] * 2
    assert parents(registry) == [None, 1, 2] and registry.staleness(2) == 1


def _train_and_die(folder: Path) -> None:
    train(folder, crash=True)


def sha_of_stored(registry: Registry, number: int) -> str:
    module = net(0)
    module.load_state_dict(registry.load(number))
    return sha(module)


def test_head_is_right_from_the_first_run_on(tmp_path: Path) -> None:
    runs = [in_child(_train_from_head, tmp_path / "r") for _ in range(3)]
    assert [count for _, count in runs] == [20, 40, 60]
    with Registry.open(tmp_path / "r") as registry:
        assert parents(registry) == [None, 1, 2, 3, 4, 5]
        assert [sha_of_stored(registry, number) for number in (2, 4, 6)] == [found for found, _ in runs]


def _train_from_head(folder: Path) -> tuple[str, int]:
    return train(folder, start="head")


def test_new_begins_a_line_that_abandons_what_was_before(make: Make, tmp_path: Path) -> None:
    in_child(train, tmp_path / "r")
    policy = net(9)
    called: list[Any] = []
    fleet = make(policy, start="new", on_rollback=called.append)
    untrained = sha(policy)
    registry = fleet.registry
    assert fleet.update_weights(step=0).published
    assert sha(policy) == untrained and held(fleet) == [untrained] * 2 and called == []
    assert parents(registry) == [None, 1, None]
    assert [registry.staleness(number) for number in (1, 2, 3)] == [None, None, 0]
    assert registry.events(kind="publish")[-1].details == {"parent": None, "abandons": 2}
    with pytest.raises(NotFoundError, match="begins at v3"):
        registry.rollback()
    step(policy)
    assert fleet.update_weights(step=10).ok
    assert parents(registry)[-1] == 3
    assert [registry.staleness(number) for number in (2, 3, 4)] == [None, 1, 0]
    assert fleet.rollback().ok
    assert (registry.head().restores, sha(policy)) == (3, untrained)
    # What was abandoned can be gone back to by name.
    assert fleet.rollback(2).ok
    assert held(fleet) == [sha_of_stored(registry, 2)] * 2
    assert [registry.staleness(number) for number in (1, 2, 3, 4)] == [1, 0, None, None]


def test_a_new_line_begins_even_with_the_heads_own_content(make: Make) -> None:
    policy = net(1)
    with make(policy) as first:
        first.update_weights()
    fleet = make(policy, start="new")
    assert fleet.update_weights().published
    assert not fleet.update_weights().published
    assert parents(fleet.registry) == [None, None]


def test_a_new_line_may_have_any_structure_and_later_versions_of_it_may_not(make: Make) -> None:
    with make(net(1)) as first:
        first.update_weights()
    fleet = make(net(1, width=5), start="new", width=5)
    assert fleet.update_weights().ok
    fleet.policy_weights = net(1)
    with pytest.raises(InvalidWeightsError, match=r"\(2, 3\) here, \(2, 5\) there"):
        fleet.update_weights()
    assert parents(fleet.registry) == [None, None]


def test_a_new_line_is_begun_by_a_background_update_too(make: Make) -> None:
    with make(net(1)) as first:
        first.update_weights()
    policy = net(2)
    fleet = make(policy, start="new")
    futures = []
    for _ in range(2):
        step(policy)
        futures.append(fleet.update_weights(wait=False))
    assert [future.result(60).version for future in futures] == [2, 3]
    assert parents(fleet.registry) == [None, None, 2]
    assert held(fleet) == [sha(policy)] * 2


def test_continue_is_the_callers_word(make: Make, tmp_path: Path) -> None:
    in_child(train, tmp_path / "r")
    policy = net(9)
    fleet = make(policy, start="continue")
    fleet.registry.restore("head", policy)
    step(policy)
    assert fleet.update_weights().ok
    assert parents(fleet.registry) == [None, 1, 2] and held(fleet) == [sha(policy)] * 2


@pytest.mark.parametrize("start", [None, "head", "new", "continue"])
def test_on_an_empty_policy_every_way_is_the_same(make: Make, start: Any) -> None:
    policy = net(1)
    called: list[Any] = []
    fleet = make(policy, start=start, on_rollback=called.append)
    assert fleet.update_weights().ok
    step(policy)
    assert fleet.update_weights().ok
    assert parents(fleet.registry) == [None, 1] and called == [] and held(fleet) == [sha(policy)] * 2


def test_nothing_need_be_said_while_the_content_is_the_heads(make: Make, tmp_path: Path) -> None:
    """As it is when somebody restored it before: then training goes on from there, whatever it does next."""
    in_child(train, tmp_path / "r")
    for change_first in (False, True):
        policy = net(9)
        state = Registry.open(tmp_path / "r").load()
        policy.load_state_dict(state)
        with make(policy) as fleet:
            if change_first:
                step(policy)
            assert fleet.update_weights().published == change_first
            step(policy)
            assert fleet.update_weights().ok and held(fleet) == [sha(policy)] * 2
    assert parents(Registry.open(tmp_path / "r")) == [None, 1, 2, 3, 4]


def test_the_very_object_that_this_process_published_or_restored_goes_on(make: Make) -> None:
    policy = net(1)
    with make(policy) as fleet:
        fleet.update_weights()
    step(policy)
    with make(policy) as fleet:
        assert fleet.update_weights().version == 2
        fleet.rollback(1)
    step(policy)
    with make(policy) as fleet:
        assert fleet.update_weights().version == 4
    restored = net(9)
    with Registry.open(fleet.registry.location) as registry:
        registry.restore("head", restored)
        step(restored)
        registry.publish(restored)
    step(restored)
    with make(restored) as fleet:
        assert fleet.update_weights().version == 6
        assert parents(fleet.registry) == [None, 1, 1, 3, 4, 5]
    # The other one is none of the head's any more.
    with make(policy) as fleet, pytest.raises(ConflictError, match="v6"):
        fleet.update_weights()


@pytest.mark.parametrize("kind", ["state dict", "dictionary"])
def test_a_mapping_is_known_again_by_its_tensors(make: Make, kind: str) -> None:
    module = net(1)
    policy: Any = module.state_dict() if kind == "state dict" else dict(module.state_dict())
    with make(policy) as fleet:
        fleet.update_weights()
    step(module)
    with make(policy) as fleet:
        assert fleet.update_weights().version == 2
    other = {name: tensor.clone() + 1 for name, tensor in policy.items()}
    with make(other) as fleet, pytest.raises(ConflictError, match=THREE_WAYS):
        fleet.update_weights()


def test_a_notebooks_cell_that_is_run_twice_is_a_new_training(make: Make) -> None:
    def cell(**options: Any) -> tuple[FakeWorkers, nn.Module]:
        policy = net(int.from_bytes(os.urandom(4)))
        return make(policy, **options), policy

    fleet, policy = cell()
    with fleet:
        fleet.update_weights()
        step(policy)
        fleet.update_weights()
    trained = sha(policy)
    fleet, policy = cell()
    with fleet:
        with pytest.raises(ConflictError, match=THREE_WAYS):
            fleet.update_weights()
        assert sha_of_stored(fleet.registry, 2) == trained and len(fleet.registry.versions()) == 2
        fleet.adopt()
        assert sha(policy) == trained
        step(policy)
        assert fleet.update_weights().version == 3
    fleet, policy = cell(start="new")
    with fleet:
        assert fleet.update_weights().version == 4
        assert parents(fleet.registry) == [None, 1, 2, None]


def test_a_forked_child_is_another_process() -> None:
    from weightledger.registry import origins

    policy = net(1)
    origins.note(("uuid", "default"), origins.Origin(1, "blake3:"), policy)
    assert origins.find(("uuid", "default"), policy) is not None
    assert origins.find(("uuid", "other"), policy) is None
    assert origins.find(("uuid", "default"), net(1)) is None
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, b"known" if origins.find(("uuid", "default"), policy) else b"new")
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reader, 10) == b"new"
    os.close(reader)
    os.close(writer)


def test_the_names_are_claimed_before_the_learner_is_touched(make: Make) -> None:
    owner = make(net(1))
    owner.update_weights()
    policy = net(9)
    before = sha(policy)
    with pytest.raises(InUseError, match="fake-0"):
        FakeWorkers(policy, [net(2)], registry=owner.registry, start="head")
    assert sha(policy) == before


def test_a_head_that_does_not_fit_or_is_not_finite_is_refused_by_name_and_lets_go(make: Make) -> None:
    policy = net(1)
    with make(policy) as fleet:
        fleet.update_weights()
        with torch.no_grad():
            policy.bias[0] = float("nan")
        fleet.update_weights()
    called: list[Any] = []
    for wrong, told in ((net(9), "v2.*NaN or infinity in bias"), (net(9, width=5), "weight")):
        before = sha(wrong)
        with pytest.raises(InvalidWeightsError, match=told):
            make(wrong, start="head", on_rollback=called.append, allow_nonfinite=wrong.in_features == 5)
        assert sha(wrong) == before and called == []
    # Nobody steers the workers, and one that says that it may be so begins.
    with make(net(9), start="head", allow_nonfinite=["bias"], on_rollback=called.append) as fleet:
        assert [version.number for version in called] == [2]
        assert bool(fleet.policy_weights.bias[0].isnan())
    with make(net(9)) as fleet, pytest.raises(InvalidWeightsError, match="bias"):
        fleet.adopt()


def test_a_rollback_elsewhere_is_not_written_over_weights_that_have_no_part_in_it(make: Make) -> None:
    with make(net(1)) as first:
        for _ in range(2):
            first.update_weights()
            step(first.policy_weights)
    policy = net(9)
    before = sha(policy)
    fleet = make(policy)
    fleet.registry.rollback(1)
    with pytest.raises(ConflictError, match="v3"):
        fleet.update_weights()
    assert fleet.sync().ok and sha(policy) == before
    assert held(fleet) == [sha_of_stored(fleet.registry, 1)] * 2
    fleet.close()
    fleet = make(policy, start="new")
    fleet.registry.rollback(2)
    assert fleet.update_weights().published and sha(policy) == before
    assert parents(fleet.registry) == [None, 1, 1, 2, None]


def test_a_rollback_is_a_word_too(make: Make) -> None:
    """Whoever names the version to go back to has said where training goes on."""
    with make(net(1)) as first:
        for _ in range(2):
            first.update_weights()
            step(first.policy_weights)
    for start in (None, "new"):
        policy = net(9)
        with make(policy, start=start) as fleet:
            assert fleet.rollback(1).ok
            assert sha(policy) == sha_of_stored(fleet.registry, 1)
            step(policy)
            assert fleet.update_weights().ok
            version = fleet.registry.head()
            assert version.parent == version.number - 1 and fleet.registry.get(version.parent).restores == 1  # pyright: ignore[reportArgumentType]


def test_workers_that_join_before_anybody_decided_get_the_head(make: Make) -> None:
    with make(net(1)) as first:
        first.update_weights()
    for start in (None, "new"):
        with make(net(9), start=start) as fleet:
            joined = fleet.add_worker(net(50))
            assert sha(fleet.worker(joined).policy) == sha_of_stored(fleet.registry, 1)
            assert fleet.pin(0, 1).ok and fleet.unpin(0).ok
            assert len(fleet.registry.versions()) == 1


def test_two_trainings_do_not_begin_on_one_policy_at_once(make: Make) -> None:
    """Of two that begin a line, each by its own, the second is told of the first."""
    with make(net(1)) as first:
        first.update_weights()
    fleet = make(net(9), start="new")
    assert in_child(_begin_a_line, fleet.registry.location) == 2
    with pytest.raises(ConflictError, match="published v2"):
        fleet.update_weights()
    assert parents(fleet.registry) == [None, None]


def _begin_a_line(folder: Path) -> int:
    with (
        Registry.open(folder) as registry,
        FakeWorkers(net(3), [net(4)], names=["other"], registry=registry, start="new") as fleet,
    ):
        version = fleet.update_weights().version
        assert version is not None
        return version


def test_what_is_no_way_to_begin_is_refused(make: Make) -> None:
    for wrong in ("tail", "", True, 3, b"head"):
        with pytest.raises(ValueError, match="start= must be one of 'head', 'new', 'continue'"):
            make(net(1), start=wrong)


class Late(FakeWorkers):
    """An updater whose workers come after it was made."""

    begins_at_once = False


def test_where_workers_come_later_the_first_call_begins(tmp_path: Path) -> None:
    in_child(train, tmp_path)
    with Registry.open(tmp_path) as registry:
        for start, published in (("head", False), (None, None), ("new", True)):
            policy = net(9)
            before = sha(policy)
            called: list[Any] = []
            with Late(policy, [], registry=registry, start=start, on_rollback=called.append) as late:
                assert sha(policy) == before and called == []
                if published is None:
                    with pytest.raises(ConflictError, match=THREE_WAYS):
                        late.update_weights()
                    continue
                late._add_workers([late._fake(net(5))], ["late"])
                assert late.update_weights().published == published
                assert len(called) == (start == "head")
                assert held(late) == [sha(policy)] == [sha_of_stored(registry, registry.head().number)]


# ---------------------------------------------------------------------- structure


def test_a_policy_that_grew_is_published_when_that_is_said(make: Make, tmp_path: Path) -> None:
    in_child(train, tmp_path / "r")
    grown = net(9, width=5)
    fleet = make(grown, start="continue", width=5)
    before = held(fleet)
    with pytest.raises(
        InvalidWeightsError, match=r"v2(?s:.*)'weight' has the shape \(2, 5\) here, \(2, 3\) there"
    ):
        fleet.update_weights()
    future = fleet.update_weights(wait=False)
    with pytest.raises(InvalidWeightsError, match="restructure=True"):
        future.result(60)
    assert held(fleet) == before and len(fleet.registry.versions()) == 2
    assert fleet.registry.verify() == []
    assert fleet.update_weights(restructure=True).ok
    assert parents(fleet.registry) == [None, 1, 2] and held(fleet) == [sha(grown)] * 2
    # A rollback across it fits neither the learner nor the workers.
    with pytest.raises(InvalidWeightsError, match="weight"):
        fleet.rollback()
    with pytest.raises(InvalidWeightsError, match="nothing was rolled back"):
        fleet.registry.rollback(2)
    assert held(fleet) == [sha(grown)] * 2 and fleet.registry.head().number == 3
    # Whoever took the smaller one back may go back.
    fleet.policy_weights = net(1)
    for key in fleet.all_worker_ids():
        fleet.worker(key).policy = net(2)
    assert fleet.rollback(2).ok
    assert held(fleet) == [sha_of_stored(fleet.registry, 2)] * 2


# ---------------------------------------------------------------------- names and reports


def test_wherever_an_id_is_taken_the_name_is_too(make: Make) -> None:
    fleet = make(net(1), names=["w0", "env[12]"])
    report = fleet.update_weights(worker_ids="w0")
    assert statuses(report.workers) == {"w0": "synced"}
    assert report["w0"] is report[0] is report.workers[0]
    with pytest.raises(NotFoundError, match=r"'env\[12\]'.*w0 \(0\)"):
        report["env[12]"]
    step(fleet.policy_weights)
    assert fleet.update_weights(worker_ids=["env[12]", 0])["env[12]"].status == "synced"
    assert fleet.sync("w0", version=1)["w0"].held == 1
    assert fleet.pin("env[12]", 1)["env[12]"].held == 1
    assert [(pin.worker, pin.literal) for pin in fleet.registry.pins()] == [("env[12]", True)]
    assert fleet.unpin("env[12]")["env[12]"].held == 2
    fleet.remove_worker("w0")
    assert fleet.all_worker_ids() == [1]
    with pytest.raises(NotFoundError, match=r"'w0'.*\[1\].*\['env\[12\]'\]"):
        fleet.sync("w0")


def test_hooks_get_numbers(make: Make) -> None:
    seen: list[Any] = []

    class Seeing(FakeWorkers):
        def _skip_update(self, worker_id: int) -> bool:
            seen.append(worker_id)
            return super()._skip_update(worker_id)

        def _sync_weights_with_worker(self, worker_id: int, server_weights: Any) -> Any:
            seen.append(worker_id)
            return super()._sync_weights_with_worker(worker_id, server_weights)

    owner = make(net(1))
    with Seeing(net(1), [net(2)], names=["only"], registry=owner.registry) as fleet:
        fleet.update_weights(worker_ids="only")
        step(fleet.policy_weights)
        fleet.update_weights(worker_ids=["only"])
    assert seen == [0, 0, 0]


def test_a_pin_by_id_moves_no_other_worker(make: Make) -> None:
    fleet = make(net(1), names=["env[12]", "env1"])
    fleet.update_weights()
    first = sha(fleet.policy_weights)
    step(fleet.policy_weights)
    fleet.update_weights()
    fleet.pin(0, 1)
    assert fleet.update_weights().ok
    assert held(fleet) == [first, sha(fleet.policy_weights)]


def test_content_that_stays_while_the_step_advances_is_told_once(make: Make) -> None:
    fleet = make(net(1))

    def told(step: int | None, **options: Any) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            report = fleet.update_weights(step=step, **options)
            assert not options or not report.result(60).published
        return [str(warning.message) for warning in caught]

    assert told(10) == told(10) == told(None) == told(5) == []
    (text,) = told(20)
    assert "identical to v1 although the step advanced from 10 to 20" in text
    assert told(30) == told(40, wait=False) == []
    step(fleet.policy_weights)
    assert told(50) == []
    (text,) = told(60)
    assert "identical to v2" in text
    fleet.rollback(1)
    assert told(70) == told(80) == [], "a rollback's content is meant"


def test_weights_restored_to_the_head_after_the_updater_was_made_go_on_from_it(tmp_path: Path) -> None:
    with Registry.open(tmp_path / "r") as registry:
        registry.publish(nn.Linear(2, 1))
        learner, worker = nn.Linear(2, 1), nn.Linear(2, 1)
        with FakeWorkers(learner, [worker], registry=registry) as updater:
            registry.restore("head", learner)
            nn.init.constant_(learner.weight, 7.0)
            assert updater.update_weights().ok
            assert torch.equal(worker.weight, torch.full((1, 2), 7.0))
        assert registry.head().number == 2 and registry.head().parent == 1

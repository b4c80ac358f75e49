"""Every member of the updater, as users call it, on real Ray actors.

What an actor holds is always read back from the actor. Faults of processes are in test_restarts.py and its neighbours.
"""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from tests.updater.actors import (
    PATIENCE,
    Mortal,
    borrow,
    check_truth,
    fill,
    filled,
    get,
    learn,
    statuses,
    steer,
)
from weightledger.registry import (
    ConflictError,
    InUseError,
    InvalidWeightsError,
    NotFoundError,
    Registry,
    SyncError,
    Version,
    WeightLedgerError,
)
from weightledger.registry.weights.live import live_digest
from weightledger.updater import RayRemoteWeightUpdater, SyncReport
from weightledger.updater.messages import ServerWeights

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]


@pytest.fixture
def made() -> Iterator[list[RayRemoteWeightUpdater]]:
    """Collect updaters, to close them whatever becomes of the test."""
    updaters: list[RayRemoteWeightUpdater] = []
    yield updaters
    for updater in updaters:
        updater.close()
        updater.registry.close()


@pytest.fixture
def start(tmp_path: Path, made: list[RayRemoteWeightUpdater]) -> Callable[..., RayRemoteWeightUpdater]:
    """Make an updater of two actors, in a registry of this test's own."""

    def begin(count: int = 2, *, policy: str = "default", **options: Any) -> RayRemoteWeightUpdater:
        actors = options.pop("actors", None) or borrow(count)
        updater, _ = steer(tmp_path / "registry", actors, policy=policy, **options)
        made.append(updater)
        return updater

    return begin


Start = Callable[..., RayRemoteWeightUpdater]


def values(updater: RayRemoteWeightUpdater) -> list[float]:
    return [float(value) for value in get([actor.value.remote() for actor in updater.remote_collectors])]


def stamps(updater: RayRemoteWeightUpdater) -> list[int | None]:
    return list(get([actor.stamp.remote(updater.registry.policy) for actor in updater.remote_collectors]))


def command(folder: Path, *words: str) -> str:
    """Run the command line, as another process."""
    program = Path(sys.executable).parent / "weightledger"
    done = subprocess.run(
        [program, *words, "--registry", folder], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def elsewhere(updater: RayRemoteWeightUpdater, *words: str) -> str:
    return command(Path(updater.registry.location), *words)


def published_elsewhere(updater: RayRemoteWeightUpdater, value: float, tmp_path: Path) -> None:
    """Let another process, and so another run, publish."""
    save_file(
        {name: tensor.contiguous() for name, tensor in filled(value).state_dict().items()},
        tmp_path / "other.st",
    )
    elsewhere(updater, "publish", str(tmp_path / "other.st"))


# ---------------------------------------------------------------------- making one


def test_an_update_publishes_and_every_worker_confirms(start: Start) -> None:
    updater = start()
    report = updater.update_weights(step=7, metrics={"reward": 1.5}, metadata={"seed": 3}, message="first")
    assert (report.version, report.published, report.adopted, report.ok) == (1, True, False, True)
    assert (
        statuses(report) == ["synced", "synced"]
        and values(updater) == [1.0, 1.0]
        and stamps(updater) == [1, 1]
    )
    version = updater.registry.head()
    assert (version.step, version.metrics, version.metadata) == (7, {"reward": 1.5}, {"seed": 3})
    assert version.message == "first"
    assert updater.last_report is report
    check_truth(updater)


def test_calling_the_updater_is_an_update(start: Start) -> None:
    updater = start()
    assert updater(step=1).version == 1 and values(updater) == [1.0, 1.0]


def test_unchanged_weights_are_no_new_version_and_nobody_is_sent_anything(start: Start) -> None:
    updater = start()
    updater.update_weights()
    report = updater.update_weights(step=2)
    assert (report.version, report.published) == (1, False) and statuses(report) == ["current", "current"]
    assert len(updater.registry.versions()) == 1


def test_the_learner_may_be_a_tensordict_or_a_mapping(start: Start) -> None:
    from tensordict import TensorDict

    updater = start()
    updater.policy_weights = TensorDict(filled(4.0).state_dict())
    assert updater.update_weights().ok and values(updater) == [4.0, 4.0]
    updater.policy_weights = dict(filled(5.0).state_dict())
    assert updater.update_weights().ok and values(updater) == [5.0, 5.0]


def test_workers_are_named_by_ray_else_by_number_else_by_the_caller(tmp_path: Path) -> None:
    named = Mortal.options(name="evaluator").remote()
    registry = Registry.open(tmp_path)
    with RayRemoteWeightUpdater(filled(1.0), [named, *borrow(1)], registry=registry) as updater:
        assert updater.all_worker_ids() == [0, 1]
        assert [status.name for status in registry.workers()] == ["collector-1", "evaluator"]
        assert updater.add_worker(borrow(2)[1], "mine") == 2
        assert updater.all_worker_ids() == [0, 1, 2] and len(updater.remote_collectors) == 3
        updater.remove_worker(1)
        assert updater.all_worker_ids() == [0, 2]
        assert updater.add_worker(borrow(1)[0]) == 3, "ids are never given again"
        assert [status.name for status in registry.workers()] == [
            "collector-1",
            "collector-3",
            "evaluator",
            "mine",
        ]


def test_names_must_be_as_many_as_workers_and_all_different(tmp_path: Path) -> None:
    registry, actors = Registry.open(tmp_path), borrow(2)
    with pytest.raises(ValueError, match="expected 2 names, found 1"):
        RayRemoteWeightUpdater(filled(1.0), actors, registry=registry, names=["a"])
    with pytest.raises(InUseError, match="'a'"):
        RayRemoteWeightUpdater(filled(1.0), actors, registry=registry, names=["a", "a"])
    assert registry.workers() == []


@pytest.mark.parametrize("timeout", [0, -1.0])
def test_a_timeout_that_is_none_is_refused(tmp_path: Path, timeout: float) -> None:
    with pytest.raises(ValueError, match="timeout"):
        RayRemoteWeightUpdater(filled(1.0), [], registry=Registry.open(tmp_path), timeout=timeout)


def test_an_updater_without_workers_publishes_and_takes_workers_later(start: Start) -> None:
    """RL-13: who comes late is at its target before it is used."""
    updater = start(0)
    assert updater.update_weights().version == 1
    with pytest.warns(UserWarning, match="by that glob so far"):
        updater.registry.pin("eval*", 1)
    learn(updater, 2.0)
    late, evaluator = borrow(2)
    updater.add_worker(late, "late")
    updater.add_worker(evaluator, "eval-0")
    assert stamps(updater) == [2, 1] and values(updater) == [2.0, 1.0]
    check_truth(updater)


def test_an_empty_registry_has_nothing_to_sync(start: Start) -> None:
    """RL-22: asking too early is answered, and changes nobody."""
    updater = start()
    report = updater.sync()
    assert report.version is None and report.ok and values(updater) == [-1.0, -1.0]
    with pytest.raises(NotFoundError, match="no versions yet"):
        updater.rollback()
    with pytest.raises(NotFoundError, match="99"):
        updater.sync(version=99)
    with pytest.raises(NotFoundError, match="no versions yet"):
        updater.adopt()


def test_two_updaters_of_one_process_cannot_steer_one_name(start: Start) -> None:
    first = start()
    with pytest.raises(InUseError, match=r"'w0'.*'default'.*close"):
        start()
    start(policy="opponent")  # what a worker holds is known for each policy by itself
    first.close()
    assert start().update_weights().ok


def test_two_live_processes_cannot_steer_one_name(start: Start, tmp_path: Path) -> None:
    program = textwrap.dedent("""
        import sys, torch
        from weightledger.registry import Registry
        from weightledger.updater.testing import FakeWorkers
        registry = Registry.open(sys.argv[1])
        fleet = FakeWorkers(torch.nn.Linear(3, 2), [torch.nn.Linear(3, 2)], registry=registry, names=["w0"])
        fleet.update_weights()
        print("ready", flush=True)
        sys.stdin.readline()
        fleet.close()
        print("closed", flush=True)
        sys.stdin.readline()
    """)
    with subprocess.Popen(
        [sys.executable, "-c", program, tmp_path / "registry"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdin is not None and child.stdout is not None
        try:
            assert child.stdout.readline() == "ready\n"
            with pytest.raises(InUseError, match=r"'w0'.*alive"):
                start()
            child.stdin.write("\n")
            child.stdin.flush()
            assert child.stdout.readline() == "closed\n"
            # Its process lives on, but nobody steers the worker any more.
            updater = start()
            updater.adopt()
            assert updater.update_weights().ok
        finally:
            child.kill()


# ---------------------------------------------------------------------- the interval


def test_the_interval_passes_by_exactly_so_many_calls(start: Start) -> None:
    updater = start(max_interval=2)
    found = [statuses(learn(updater, float(value)))[0] for value in range(7)]
    assert found == ["synced", "skipped", "skipped", "synced", "skipped", "skipped", "synced"]
    assert values(updater) == [6.0, 6.0]


def test_only_calls_that_name_a_worker_count_for_it(start: Start) -> None:
    updater = start(max_interval=1)
    learn(updater, 0.0)
    assert statuses(learn(updater, 1.0, worker_ids=0)) == ["skipped"]
    assert statuses(learn(updater, 2.0, worker_ids=[1])) == ["skipped"]
    assert statuses(learn(updater, 3.0, worker_ids=[0])) == ["synced"]
    assert statuses(learn(updater, 4.0)) == ["skipped", "synced"]


@pytest.mark.parametrize(
    "urgent",
    [
        lambda updater: updater.sync(),
        lambda updater: updater.update_weights(force=True),
        lambda updater: updater.update_weights(filled(9.0)),
        lambda updater: updater.update_weights(wait=False, force=True).result(PATIENCE),
        lambda updater: updater.rollback(),
    ],
    ids=["sync", "force", "weights", "force-later", "rollback"],
)
def test_what_is_urgent_is_never_passed_by(start: Start, urgent: Callable[[Any], SyncReport]) -> None:
    updater = start(max_interval=5)
    for value in range(3):
        learn(updater, float(value))
    report = urgent(updater)
    assert set(statuses(report)) <= {"synced", "current"}
    head = updater.registry.head()
    assert stamps(updater) == [head.number] * 2
    check_truth(updater)


def test_a_rollback_made_elsewhere_is_never_passed_by(start: Start) -> None:
    updater = start(max_interval=5)
    for value in range(3):
        learn(updater, float(value))
    updater.registry.rollback(2)
    assert statuses(updater.update_weights()) == ["synced", "synced"] and values(updater) == [1.0, 1.0]


def test_a_changed_pin_is_never_passed_by(start: Start) -> None:
    updater = start(max_interval=5)
    for value in range(3):
        learn(updater, float(value))
    updater.registry.pin("w0", 2)
    assert statuses(updater.update_weights()) == ["synced", "skipped"]
    updater.registry.unpin("w0")
    assert statuses(updater.update_weights()) == ["synced", "skipped"]


def test_an_unpinned_worker_is_not_passed_by_though_its_pin_never_moved_it(start: Start) -> None:
    updater = start(max_interval=5)
    learn(updater, 0.0)
    updater.registry.pin("w0", 1)
    assert statuses(learn(updater, 1.0)) == ["current", "skipped"]
    updater.registry.unpin("w0")
    assert statuses(learn(updater, 2.0)) == ["synced", "skipped"]


def test_a_probe_does_not_forget_that_a_worker_was_pinned(start: Start) -> None:
    updater = start(max_interval=5)
    learn(updater, 0.0)
    updater.pin(0, 1)
    learn(updater, 1.0)
    updater.probe()
    updater.registry.unpin("w0")
    assert statuses(learn(updater, 2.0)) == ["synced", "skipped"]


def test_a_worker_that_holds_nothing_known_is_never_passed_by(start: Start) -> None:
    updater = start(max_interval=5)
    learn(updater, 0.0)
    updater.close()
    again = start(max_interval=5)
    again.adopt()
    assert statuses(learn(again, 1.0)) == ["synced", "synced"]


# ---------------------------------------------------------------------- choosing workers and weights


def test_only_the_workers_that_are_named_are_updated(start: Start) -> None:
    """RAY-17: exactly that worker, by what the actors hold; the last one too."""
    updater = start(3)
    assert list(updater.update_weights(worker_ids=1).workers) == [1]
    assert values(updater) == [-1.0, 1.0, -1.0]
    assert list(learn(updater, 2.0, worker_ids=[2, 2]).workers) == [2]
    assert values(updater) == [-1.0, 1.0, 2.0]
    assert list(learn(updater, 3.0, worker_ids=iter([torch.tensor(0)])).workers) == [0]
    assert learn(updater, 4.0, worker_ids=[]).workers == {}
    assert values(updater) == [3.0, 1.0, 2.0] and updater.registry.head().number == 4
    check_truth(updater)


@pytest.mark.parametrize("unknown", [3, -1, [0, 3]])
def test_an_unknown_worker_is_an_error_and_nothing_happens(start: Start, unknown: Any) -> None:
    updater = start()
    for call in (updater.update_weights, updater.sync):
        with pytest.raises(NotFoundError, match=r"worker.*\[0, 1\]"):
            call(worker_ids=unknown)
    assert updater.registry.versions() == [] and values(updater) == [-1.0, -1.0]
    with pytest.raises(NotFoundError, match="worker"):
        updater.remove_worker(7)
    with pytest.raises(NotFoundError, match="worker"):
        updater.pin(7, "head")


def test_given_weights_are_published_and_the_live_ones_stay(start: Start) -> None:
    updater = start()
    updater.update_weights()
    report = updater.update_weights(filled(5.0).state_dict(), message="from a colleague")
    assert report.version == 2 and values(updater) == [5.0, 5.0]
    assert live_digest(updater.policy_weights)[0] == live_digest(filled(1.0))[0]
    assert updater.update_weights().version == 3 and values(updater) == [1.0, 1.0]
    check_truth(updater)


def test_force_sends_the_bytes_even_to_who_holds_them(start: Start) -> None:
    updater = start()
    updater.update_weights()
    get(updater.remote_collectors[0].change.remote(9.0))
    assert statuses(updater.update_weights(force=True)) == ["synced", "synced"]
    assert values(updater) == [1.0, 1.0]
    check_truth(updater)


def test_an_unchanged_update_mends_what_a_workers_own_code_wrote_over(start: Start) -> None:
    updater = start()
    updater.update_weights()
    assert statuses(updater.update_weights()) == ["current", "current"]
    get(updater.remote_collectors[0].change.remote(9.0))
    assert stamps(updater) == [None, 1]
    report = updater.update_weights()
    assert (statuses(report), values(updater)) == (["synced", "current"], [1.0, 1.0])
    assert "somebody wrote into its weights" in report.workers[0].error
    assert stamps(updater) == [1, 1]
    check_truth(updater)


def test_weights_that_cannot_be_kept_are_refused_before_anything_happens(start: Start) -> None:
    updater = start()
    updater.update_weights()
    for later in (False, True):
        with pytest.raises(InvalidWeightsError, match="weight"):
            updater.update_weights({"weight": torch.ones(2, 3, device="meta")}, wait=not later)
        with pytest.raises(InvalidWeightsError, match="reward"):
            updater.update_weights(filled(2.0), metrics={"reward": "much"}, wait=not later)
    assert updater.registry.head().number == 1 and stamps(updater) == [1, 1]
    assert learn(updater, 3.0).ok


# ---------------------------------------------------------------------- in the background


def test_weights_are_those_of_the_call_whatever_the_optimizer_does_next(start: Start) -> None:
    """RL-02 and RL-03: the copy is made before the call returns, that of the metadata too."""
    updater = start()
    about = {"step": torch.tensor(10), "names": ["a"]}
    futures = []
    for value in range(1, 6):
        fill(updater.policy_weights, float(value))
        futures.append(
            updater.update_weights(wait=False, step=about["step"], metadata={"names": about["names"]})
        )
        fill(updater.policy_weights, 99.0)
        about["step"] += 1  # type: ignore[operator]
        about["names"].append("b")  # type: ignore[attr-defined]
    reports = [future.result(PATIENCE) for future in futures]
    assert [report.version for report in reports] == [1, 2, 3, 4, 5]
    for value, version in enumerate(updater.registry.versions(), start=1):
        assert version.digest == live_digest(filled(float(value)))[0]
        assert version.step == 9 + value and version.metadata["names"] == ["a"] + ["b"] * (value - 1)
    assert values(updater) == [5.0, 5.0] and updater.last_report is reports[-1]


def test_a_background_update_of_unchanged_weights_publishes_nothing(start: Start) -> None:
    updater = start()
    first = updater.update_weights(wait=False).result(PATIENCE)
    second = updater.update_weights(wait=False).result(PATIENCE)
    assert (first.published, second.published) == (True, False) and statuses(second) == ["current", "current"]


def test_a_call_that_waits_comes_after_those_in_flight(start: Start) -> None:
    updater = start()
    future: Future[SyncReport] = updater.update_weights(wait=False)
    assert learn(updater, 2.0).version == 2
    assert future.done() and future.result().version == 1 and values(updater) == [2.0, 2.0]


def test_close_waits_for_what_is_in_flight(start: Start) -> None:
    updater = start()
    future = updater.update_weights(wait=False)
    updater.close()
    assert future.done() and future.result().ok and values(updater) == [1.0, 1.0]


def test_nothing_goes_on_after_close(start: Start) -> None:
    *actors, late = borrow(3)
    updater = start(actors=actors)
    updater.update_weights()
    updater.close()
    updater.close()
    calls: list[Callable[[], Any]] = [
        updater.update_weights,
        updater.sync,
        updater.rollback,
        updater.probe,
        updater.adopt,
        updater._get_server_weights,
        lambda: updater.pin(0, 1),
        lambda: updater.unpin(0),
        lambda: updater.add_worker(late, "late"),
    ]
    for call in calls:
        with pytest.raises(InUseError, match="closed"):
            call()
    assert updater.registry.pins() == []
    assert [status.state for status in updater.registry.workers()] == ["unknown", "unknown"]


def test_a_head_that_moved_while_weights_were_on_their_way_is_told_by_the_future(
    start: Start, tmp_path: Path
) -> None:
    updater = start(timeout=PATIENCE)
    learn(updater, 1.0)
    learn(updater, 2.0)
    gate = tmp_path / "gate"
    busy = updater.remote_collectors[0].wait_for.remote(str(gate))
    fill(updater.policy_weights, 3.0)
    first = updater.update_weights(wait=False)  # its pushes wait for the busy worker
    fill(updater.policy_weights, 4.0)
    second = updater.update_weights(wait=False)  # copied, and next in line
    while updater.registry.head().number < 3:
        assert not first.done() or first.exception() is None
    elsewhere(updater, "rollback", "--to", "1", "--reason", "collapse")
    gate.touch()
    get(busy)
    assert first.result(PATIENCE).version == 3
    with pytest.raises(ConflictError, match="moved"):
        second.result(PATIENCE)
    assert [version.restores for version in updater.registry.versions()] == [None, None, None, 1]
    report = updater.update_weights()
    assert (report.version, report.adopted) == (4, True) and values(updater) == [1.0, 1.0]


# ---------------------------------------------------------------------- hooks


def test_get_server_weights_publishes_once_and_returns_the_record(start: Start) -> None:
    updater = start()
    server = updater._get_server_weights()
    assert isinstance(server, ServerWeights)
    assert (server.version, server.digest) == (1, updater.registry.head().digest)
    assert updater._get_server_weights().version == 1 and len(updater.registry.versions()) == 1
    assert values(updater) == [-1.0, -1.0], "nobody is sent anything"
    assert statuses(updater.update_weights()) == ["synced", "synced"]


class Averaged(RayRemoteWeightUpdater):
    """Publishes something else than the live weights."""

    def _get_server_weights(self) -> ServerWeights:
        return self._publish(filled(float(self.policy_weights.weight[0, 0].detach()) * 10))


class Halved(RayRemoteWeightUpdater):
    """Sends float16 to workers, in a mapping of its own."""

    def _maybe_map_weights(self, weights: Any) -> Any:
        return {name: tensor.half() for name, tensor in weights.items()}


class Doubled(RayRemoteWeightUpdater):
    """Maps in place."""

    def _maybe_map_weights(self, weights: Any) -> Any:
        for tensor in weights.values():
            tensor.mul_(2)
        return weights


class Picky(RayRemoteWeightUpdater):
    """Passes one worker by, always."""

    def _skip_update(self, worker_id: int) -> bool:
        return worker_id == 1


class Watching(RayRemoteWeightUpdater):
    """Counts what it starts."""

    started: list[tuple[int, int]]

    def _sync_weights_with_worker(self, worker_id: int, server_weights: ServerWeights) -> Any:
        self.started.append((worker_id, server_weights.version))
        return super()._sync_weights_with_worker(worker_id, server_weights)


def of_class(kind: type[RayRemoteWeightUpdater], made: list[Any], folder: Path, **options: Any) -> Any:
    updater = kind(filled(1.0), borrow(2), registry=Registry.open(folder), names=["w0", "w1"], **options)
    made.append(updater)
    return updater


@pytest.mark.parametrize("later", [False, True])
def test_overriding_what_is_published_takes_effect(made: list[Any], tmp_path: Path, later: bool) -> None:
    updater = of_class(Averaged, made, tmp_path)
    for value in (1.0, 2.0):
        fill(updater.policy_weights, value)
        report = updater.update_weights(wait=not later)
        fill(updater.policy_weights, 7.0)
        report = report.result(PATIENCE) if later else report
        assert report.ok and values(updater) == [value * 10, value * 10]
        assert updater.registry.head().digest == live_digest(filled(value * 10))[0]
    given = updater.update_weights(filled(5.0), wait=not later)
    assert (given.result(PATIENCE) if later else given).ok and values(updater) == [5.0, 5.0]


def test_overriding_the_mapping_takes_effect_and_the_version_stays_unmapped(
    made: list[Any], tmp_path: Path
) -> None:
    updater = of_class(Doubled, made, tmp_path)
    for value in (1.0, 2.0):
        fill(updater.policy_weights, value)
        assert updater.update_weights().ok and values(updater) == [2 * value, 2 * value]
        assert updater.registry.head().digest == live_digest(filled(value))[0]
        for holding in updater.registry.holdings():
            assert holding.digest == updater.registry.head().digest
            assert holding.sent_digest == live_digest(filled(2 * value))[0]
    check_truth(updater)
    assert all(held.matches for held in updater.probe().values())
    assert updater.rollback(1).ok and values(updater) == [2.0, 2.0]
    assert live_digest(updater.policy_weights)[0] == live_digest(filled(1.0))[0]
    assert updater.registry.verify() == []


def test_a_mapping_to_another_dtype_reaches_workers_that_cast(made: list[Any], tmp_path: Path) -> None:
    updater = of_class(Halved, made, tmp_path, cast=True)
    fill(updater.policy_weights, 0.1)
    assert updater.update_weights().ok
    assert values(updater) == [float(torch.tensor(0.1).half())] * 2
    check_truth(updater)


def test_overriding_the_interval_takes_effect(made: list[Any], tmp_path: Path) -> None:
    updater = of_class(Picky, made, tmp_path)
    assert statuses(updater.update_weights()) == ["synced", "synced"], (
        "who holds nothing known is not asked about"
    )
    fill(updater.policy_weights, 2.0)
    assert statuses(updater.update_weights()) == ["synced", "skipped"]
    assert values(updater) == [2.0, 1.0]


def test_overriding_the_push_takes_effect(made: list[Any], tmp_path: Path) -> None:
    updater = of_class(Watching, made, tmp_path)
    updater.started = []
    updater.update_weights()
    updater.update_weights()
    assert updater.started == [(0, 1), (1, 1)]


def test_a_push_that_cannot_be_started_fails_that_worker_only(made: list[Any], tmp_path: Path) -> None:
    class Broken(RayRemoteWeightUpdater):
        def _sync_weights_with_worker(self, worker_id: int, server_weights: ServerWeights) -> Any:
            if worker_id == 0:
                raise OSError("no route")
            return super()._sync_weights_with_worker(worker_id, server_weights)

    updater = of_class(Broken, made, tmp_path)
    report = updater.update_weights()
    assert statuses(report) == ["failed", "synced"] and "no route" in report.workers[0].error
    check_truth(updater)


def test_a_collector_is_registered_once(start: Start) -> None:
    updater = start()
    collector, other = nn.Linear(1, 1), nn.Linear(1, 2)
    updater.register_collector(collector)
    updater.register_collector(collector)
    assert updater.collector is collector
    with pytest.raises(InUseError, match="registered"):
        updater.register_collector(other)
    assert updater.collector is collector


# ---------------------------------------------------------------------- targets


def test_sync_publishes_nothing(start: Start) -> None:
    updater = start()
    updater.update_weights()
    fill(updater.policy_weights, 2.0)
    report = updater.sync()
    assert (report.version, report.published) == (1, False) and values(updater) == [1.0, 1.0]


def test_sync_to_a_version_is_for_this_once(start: Start) -> None:
    updater = start()
    for value in (1.0, 2.0, 3.0):
        learn(updater, value)
    report = updater.sync(0, version=1)
    assert report.version == 1 and statuses(report) == ["synced"] and values(updater) == [1.0, 3.0]
    assert [status.target for status in updater.registry.workers()] == [3, 3]
    assert [status.staleness for status in updater.registry.workers()] == [2, 0]
    check_truth(updater)
    assert statuses(updater.update_weights()) == ["synced", "current"] and values(updater) == [3.0, 3.0]


def test_pins_hold_a_worker_whatever_the_head_does(start: Start) -> None:
    updater = start()
    learn(updater, 1.0)
    learn(updater, 2.0)
    assert statuses(updater.pin(0, 1, reason="compare")) == ["synced"] and values(updater) == [1.0, 2.0]
    learn(updater, 3.0)
    updater.rollback(2)
    assert values(updater) == [1.0, 2.0] and updater.registry.pins()[0].reason == "compare"
    assert statuses(updater.unpin(0)) == ["synced"] and values(updater) == [2.0, 2.0]
    check_truth(updater)
    with pytest.raises(NotFoundError, match="not pinned"):
        updater.unpin(0)
    with pytest.raises(NotFoundError, match="99"):
        updater.pin(0, 99)


def test_pins_made_by_the_command_line_are_carried_out(start: Start) -> None:
    updater = start()
    learn(updater, 1.0)
    learn(updater, 2.0)
    elsewhere(updater, "pin", "w*", "1")
    assert statuses(updater.update_weights()) == ["synced", "synced"] and values(updater) == [1.0, 1.0]
    elsewhere(updater, "pin", "w1", "2")
    updater.sync()
    assert values(updater) == [1.0, 2.0], "an exact name beats a glob"
    elsewhere(updater, "unpin", "w*")
    updater.sync()
    assert values(updater) == [2.0, 2.0]
    check_truth(updater)


def test_a_pin_on_an_alias_follows_it(start: Start) -> None:
    updater = start()
    for value in (1.0, 2.0, 3.0):
        learn(updater, value)
    updater.registry.set_alias("best", 1)
    updater.pin(0, "best")
    assert values(updater) == [1.0, 3.0]
    elsewhere(updater, "alias", "best", "2")
    assert statuses(updater.update_weights()) == ["synced", "current"] and values(updater) == [2.0, 3.0]
    check_truth(updater)


def test_equal_content_under_a_new_number_is_told_without_sending_it(start: Start) -> None:
    updater = start()
    learn(updater, 1.0)
    updater.registry.publish(filled(1.0), message="the same again")
    report = updater.update_weights()
    assert report.version == 2 and statuses(report) == ["current", "current"]
    assert stamps(updater) == [2, 2]
    check_truth(updater)


# ---------------------------------------------------------------------- going back


def test_a_rollback_brings_learner_and_workers_back_under_a_new_number(start: Start) -> None:
    """RL-16: an older content, a newer number."""
    seen: list[Version] = []
    updater = start(on_rollback=seen.append)
    weight = updater.policy_weights.weight
    for value in (1.0, 2.0, 3.0):
        learn(updater, value)
    report = updater.rollback(1, reason="collapse")
    assert (report.version, report.ok, statuses(report)) == (4, True, ["synced", "synced"])
    assert values(updater) == [1.0, 1.0] and stamps(updater) == [4, 4]
    assert updater.policy_weights.weight is weight and bool((weight == 1).all())
    head = updater.registry.head()
    assert (head.restores, head.parent, head.message) == (1, 1, "collapse")
    assert [version.number for version in seen] == [4]
    assert learn(updater, 5.0).version == 5 and updater.registry.head().parent == 4
    check_truth(updater)


def test_a_rollback_without_a_version_goes_to_the_nearest_other_content(start: Start) -> None:
    updater = start()
    learn(updater, 1.0)
    learn(updater, 2.0)
    updater.rollback()
    assert values(updater) == [1.0, 1.0]
    with pytest.raises(NotFoundError, match="nothing to roll back to"):
        updater.rollback()


def test_a_version_that_the_learner_refuses_changes_nothing(start: Start) -> None:
    updater = start()
    learn(updater, 1.0)
    learn(updater, 2.0)
    before, events = updater.registry.versions(), updater.registry.events()
    updater.policy_weights = filled(3.0, width=4)
    with pytest.raises(InvalidWeightsError, match="weight"):
        updater.rollback(1)
    assert updater.registry.versions() == before and updater.registry.events() == events
    assert bool((updater.policy_weights.weight == 3).all()) and values(updater) == [2.0, 2.0]


def test_a_rollback_by_the_command_line_is_taken_over_instead_of_published_over(start: Start) -> None:
    seen: list[int] = []
    updater = start(on_rollback=lambda version: seen.append(version.number))
    learn(updater, 1.0)
    learn(updater, 2.0)
    elsewhere(updater, "rollback", "--to", "1", "--reason", "collapse")
    fill(updater.policy_weights, 9.0)
    report = updater.update_weights(step=3)
    assert (report.version, report.published, report.adopted) == (3, False, True)
    assert values(updater) == [1.0, 1.0] and bool((updater.policy_weights.weight == 1).all()) and seen == [3]
    assert learn(updater, 4.0).version == 4
    elsewhere(updater, "rollback", "--to", "2", "--reason", "again")
    assert updater.sync(0).adopted and values(updater) == [2.0, 4.0] and seen == [3, 5]
    check_truth(updater)


def test_a_background_update_after_a_rollback_elsewhere_takes_it_over_in_the_callers_thread(
    start: Start,
) -> None:
    updater = start()
    learn(updater, 1.0)
    learn(updater, 2.0)
    updater.registry.rollback(1)
    fill(updater.policy_weights, 9.0)
    future = updater.update_weights(wait=False)
    assert bool((updater.policy_weights.weight == 1).all()), "written inside of the call"
    assert future.result(PATIENCE).adopted and values(updater) == [1.0, 1.0]


def test_a_rollback_elsewhere_that_the_learner_refuses_is_an_error_and_changes_nothing(start: Start) -> None:
    updater = start()
    learn(updater, 1.0)
    updater.registry.publish(filled(2.0, width=4), restructure=True)
    updater.registry.publish(filled(3.0, width=4))
    updater.registry.rollback(2)
    with pytest.raises(InvalidWeightsError, match="weight"):
        updater.update_weights()
    assert values(updater) == [1.0, 1.0] and updater.registry.head().number == 4
    elsewhere(updater, "rollback", "--to", "1", "--reason", "mend", "--restructure")
    assert updater.update_weights().ok and values(updater) == [1.0, 1.0]


def train(policy: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    torch.manual_seed(seed)
    optimizer.zero_grad()
    policy(torch.randn(8, 3)).square().mean().backward()
    optimizer.step()


def test_after_a_rollback_training_goes_on_as_if_it_had_never_left(start: Start) -> None:
    """RL-12: the optimizer goes back with the weights."""
    torch.manual_seed(0)
    policy, straight = nn.Linear(3, 2), nn.Linear(3, 2)
    straight.load_state_dict(policy.state_dict())
    optimizer, other = (torch.optim.Adam(each.parameters(), lr=0.1) for each in (policy, straight))
    counters = {"steps": 0}

    def bring_back(version: Version) -> None:
        extra = updater.registry.load_extra(version)
        optimizer.load_state_dict(extra["optimizer"])
        counters.update(extra["counters"])

    updater = start(
        extra=lambda: {"optimizer": optimizer.state_dict(), "counters": counters}, on_rollback=bring_back
    )
    updater.policy_weights = policy
    for seed in range(3):
        train(policy, optimizer, seed)
        counters["steps"] += 1
        updater.update_weights(step=seed)
    for seed in range(100, 105):
        train(policy, optimizer, seed)
        counters["steps"] += 1
    updater.update_weights()
    updater.rollback(3, reason="detour")
    assert counters == {"steps": 3} and updater.registry.head().has_extra
    for seed in range(3, 6):
        train(policy, optimizer, seed)
    for seed in range(6):
        train(straight, other, seed)
    for mine, theirs in zip(policy.parameters(), straight.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_another_runs_publish_is_a_conflict_until_it_is_adopted(start: Start, tmp_path: Path) -> None:
    """RL-20: two runs in one registry never take each other's weights for their own."""
    *actors, late = borrow(3)
    updater = start(actors=actors)
    learn(updater, 1.0)
    published_elsewhere(updater, 5.0, tmp_path)
    fill(updater.policy_weights, 2.0)
    calls: list[Callable[[], Any]] = [
        updater.update_weights,
        lambda: updater.update_weights(wait=False),
        updater.sync,
        updater.rollback,
        lambda: updater.add_worker(late, "late"),
    ]
    for call in calls:
        with pytest.raises(ConflictError, match=r"v2.*adopt"):
            call()
    assert values(updater) == [1.0, 1.0] and updater.registry.head().number == 2
    assert bool((updater.policy_weights.weight == 2).all()) and updater.all_worker_ids() == [0, 1]
    adopted = updater.adopt()
    assert adopted.number == 2 and bool((updater.policy_weights.weight == 5).all())
    assert updater.update_weights().version == 2 and values(updater) == [5.0, 5.0]
    assert "adopt" in {event.kind for event in updater.registry.events()}
    assert learn(updater, 6.0).version == 3
    check_truth(updater)


def test_the_way_out_of_a_conflict_that_its_text_names_works(start: Start, tmp_path: Path) -> None:
    updater = start()
    learn(updater, 1.0)
    published_elsewhere(updater, 5.0, tmp_path)
    with pytest.raises(ConflictError, match=r"registry\.rollback\(1\)"):
        updater.update_weights()
    updater.registry.rollback(1)
    updater.adopt()
    assert learn(updater, 2.0).version == 4 and values(updater) == [2.0, 2.0]


def test_own_publishes_through_the_registry_are_no_conflict(start: Start) -> None:
    updater = start()
    learn(updater, 1.0)
    updater.registry.publish(filled(8.0), message="by hand")
    assert learn(updater, 2.0).version == 3 and updater.registry.head().parent == 2


def test_adopting_weights_that_do_not_fit_changes_nothing(start: Start) -> None:
    updater = start()
    learn(updater, 1.0)
    updater.registry.publish(filled(2.0, width=4), restructure=True)
    with pytest.raises(InvalidWeightsError, match="weight"):
        updater.adopt()
    assert bool((updater.policy_weights.weight == 1).all())


# ---------------------------------------------------------------------- what workers make of it


def test_a_probe_reads_what_is_really_in_each_worker(start: Start) -> None:
    """RAY-18: what a worker says and what it holds are two things."""
    updater = start()
    updater.update_weights()
    assert all(held.matches and not held.drift for held in updater.probe().values())
    get(updater.remote_collectors[1].change.remote(9.0))
    found = updater.probe()
    assert found[0].matches and not found[1].matches
    assert found[1].drift == ("bias", "weight") and found[1].digest == live_digest(filled(9.0))[0]
    assert [status.state for status in updater.registry.workers()] == ["confirmed", "unknown"]
    assert [event.worker for event in updater.registry.events(kind="drift")] == ["w1"]
    assert statuses(updater.update_weights()) == ["current", "synced"] and values(updater) == [1.0, 1.0]
    check_truth(updater)


def test_a_drifted_worker_that_refuses_the_next_version_is_not_believed(start: Start) -> None:
    updater = start()
    updater.update_weights()
    get(updater.remote_collectors[1].change.remote(9.0))
    updater.probe()
    report = updater.update_weights(filled(2.0, width=4), restructure=True)
    assert report.workers[0].held == 1 and report.workers[1].held is None
    check_truth(updater)
    updater.rollback(1)
    assert values(updater) == [1.0, 1.0]
    check_truth(updater)


def test_nan_is_published_and_sent_to_nobody(start: Start) -> None:
    """RL-05: the version is kept and flagged, the workers keep what they hold."""
    updater = start()
    learn(updater, 1.0)
    with torch.no_grad():
        updater.policy_weights.weight[0, 0] = float("inf")
    report = updater.update_weights()
    assert (report.version, report.ok, statuses(report)) == (2, False, ["refused", "refused"])
    assert "weight" in report.workers[0].error and values(updater) == [1.0, 1.0]
    assert updater.registry.head().nonfinite == ("weight",)
    with pytest.raises(SyncError, match=r"w0.*refused.*weight"):
        report.raise_for_failures()
    check_truth(updater)
    assert updater.rollback().ok and learn(updater, 2.0).ok


@pytest.mark.parametrize(("allowed", "status"), [(True, "synced"), (("w*",), "synced"), (("b*",), "refused")])
def test_nan_may_be_allowed_altogether_or_by_name(start: Start, allowed: Any, status: str) -> None:
    updater = start(allow_nonfinite=allowed)
    with torch.no_grad():
        updater.policy_weights.weight.fill_(float("-inf"))
    assert statuses(updater.update_weights()) == [status, status]


def test_wrong_shapes_fail_and_nobody_is_changed(start: Start) -> None:
    """RL-10 and TO-05: the record says what they kept, and the next good version is sent."""
    updater = start()
    learn(updater, 1.0)
    report = updater.update_weights(filled(2.0, width=4), restructure=True)
    assert statuses(report) == ["failed", "failed"] and [one.held for one in report.workers.values()] == [
        1,
        1,
    ]
    assert "(2, 3)" in report.workers[0].error and "(2, 4)" in report.workers[0].error
    assert values(updater) == [1.0, 1.0] and stamps(updater) == [1, 1]
    assert {event.kind for event in updater.registry.events(worker="w0")} == {"sync_failed"}
    check_truth(updater)
    with pytest.raises(SyncError, match=r"2 of 2.*\n.*w0.*v2.*holds v1"):
        report.raise_for_failures()
    assert learn(updater, 3.0, restructure=True).ok


def test_a_dtype_that_differs_is_refused_unless_cast_and_then_recorded(start: Start) -> None:
    """TO-06: rounded weights have a digest of their own."""
    updater = start()
    updater.policy_weights = filled(0.1).double()
    assert statuses(updater.update_weights()) == ["failed", "failed"]
    updater.close()
    casting = start(cast=True)
    casting.policy_weights = filled(0.1).double()
    assert casting.update_weights().ok
    for holding in casting.registry.holdings():
        assert holding.digest == casting.registry.head().digest != holding.sent_digest
    assert "cast" in casting.registry.workers()[0].detail and "weight" in casting.registry.workers()[0].detail
    assert all(held.matches for held in casting.probe().values())
    check_truth(casting)


def test_locate_may_be_a_callable(start: Start) -> None:
    updater = start(locate=lambda actor: actor.policy)
    assert updater.update_weights().ok and values(updater) == [1.0, 1.0]


def test_a_policy_that_is_not_there_is_named(start: Start) -> None:
    updater = start(locate="policy.actor")
    report = updater.update_weights()
    assert statuses(report) == ["failed", "failed"]
    assert "policy.actor" in report.workers[0].error and "locate" in report.workers[0].error


def test_workers_that_load_in_their_own_way_are_given_own_weights_and_the_version(start: Start) -> None:
    def load(actor: Any, weights: Any, version: int) -> None:
        for tensor in weights.values():
            tensor.add_(version)
        actor.policy.load_state_dict(weights)

    updater = start(apply=load)
    assert learn(updater, 1.0).ok and values(updater) == [2.0, 2.0] and stamps(updater) == [1, 1]
    assert learn(updater, 10.0).ok and values(updater) == [12.0, 12.0]
    assert updater.registry.verify() == []


def test_a_loader_that_raises_leaves_that_worker_unknown(start: Start) -> None:
    """RL-18: what comes next works, without a reset by hand."""

    def load(actor: Any, weights: Any, version: int) -> Any:
        if version == 2 and actor.initial == -7.0:
            raise RuntimeError("half-way")
        actor.policy.load_state_dict(weights)

    actors = borrow(2)
    get(actors[1].reset.remote(-7.0))
    updater = start(actors=actors, apply=load)
    learn(updater, 1.0)
    report = learn(updater, 2.0)
    assert statuses(report) == ["synced", "failed"] and "half-way" in report.workers[1].error
    assert report.workers[1].held is None and stamps(updater) == [2, None]
    assert [status.state for status in updater.registry.workers()] == ["confirmed", "unknown"]
    assert learn(updater, 3.0).ok and stamps(updater) == [3, 3]


def _opponent(actor: Any) -> Any:
    if not hasattr(actor, "opponent"):
        actor.opponent = filled(0.0)
    return actor.opponent


def test_workers_can_stamp_what_they_sample(start: Start) -> None:
    """RL-19: what an actor holds is known for each policy by itself."""
    main, opponent = start(policy="main"), start(policy="opponent", locate=_opponent)
    learn(main, 1.0)
    learn(main, 2.0)
    learn(opponent, 3.0)
    actor = main.remote_collectors[0]
    assert get([actor.stamp.remote("main"), actor.stamp.remote("opponent")]) == [2, 1]
    # What is written into one place by two of them is known of the last one alone.
    same = start(policy="same", actors=main.remote_collectors)
    learn(same, 4.0)
    stamped = get([actor.stamp.remote(policy) for policy in ("main", "opponent", "same")])
    assert stamped == [None, 1, 1]
    learn(main, 2.0)
    stamped = get([actor.stamp.remote(policy) for policy in ("main", "opponent", "same")])
    assert stamped == [2, 1, None]
    with pytest.raises(ValueError, match=r"policies.*policy="):
        get(actor.stamp.remote())


def test_a_report_can_be_written_down(start: Start) -> None:
    updater = start()
    report = updater.update_weights()
    told = json.loads(json.dumps(report.to_dict()))
    assert told["version"] == 1 and told["ok"] and told["workers"]["0"]["status"] == "synced"
    assert set(told["workers"]["0"]) == {
        *("name", "status", "held", "target", "error", "seconds", "rejected_first")
    }
    report.raise_for_failures()


def test_every_refusal_is_one_of_the_librarys_errors(start: Start) -> None:
    updater = start()
    updater.update_weights()
    for call in (
        lambda: updater.sync(9),
        lambda: updater.sync(version="nothing"),
        lambda: updater.rollback(77),
        lambda: updater.pin(0, "nothing"),
        lambda: updater.unpin(0),
        lambda: updater.remove_worker(9),
    ):
        with pytest.raises(WeightLedgerError) as caught:
            call()
        assert len(str(caught.value)) > 20 and len(caught.value.args) == 1


def test_a_removed_worker_keeps_what_it_holds_and_is_forgotten(start: Start) -> None:
    updater = start()
    updater.update_weights()
    updater.remove_worker(1)
    assert list(learn(updater, 2.0).workers) == [0]
    assert [status.state for status in updater.registry.workers()] == ["confirmed", "gone"]
    assert updater.registry.history(worker="w1")[-1].ended_how == "removed"
    assert values(updater) == [2.0]


def test_an_updater_says_what_it_is(start: Start) -> None:
    updater = start()
    assert repr(updater) == "<RayRemoteWeightUpdater policy='default' no version, 2 workers>"
    updater.update_weights()
    assert repr(updater) == "<RayRemoteWeightUpdater policy='default' v1, 2 workers>"

"""Pruning takes files, never rows, and nothing that anyone needs."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.registry import helpers
from tests.registry.helpers import (
    StubbornSnapshots,
    exit_code_of,
    extra_file_of,
    file_of,
    files,
    hold,
    in_child,
    numbers,
    publish_many,
    value_of,
    weights,
)
from weightledger.registry import InUseError, NotFoundError, Registry
from weightledger.registry.log.ledger import Ledger
from weightledger.registry.store import local
from weightledger.registry.store.local import LocalSnapshots


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    with Registry.open(tmp_path / "r") as opened:
        yield opened


def stored(registry: Registry) -> list[int]:
    return [version.number for version in registry.versions() if version.stored]


def test_rows_stay_and_files_go(registry: Registry) -> None:
    publish_many(registry, 5)
    report = registry.prune(keep_last=2)
    assert numbers(report) == [1, 2, 3] and {version.state for version in report} == {"pruned"}
    assert numbers(registry.versions()) == [1, 2, 3, 4, 5] and stored(registry) == [4, 5]
    assert files(registry) == sorted([file_of(registry, 4).name, file_of(registry, 5).name])
    assert registry.get(1) == report[0]
    assert [event.details["versions"] for event in registry.events(kind="prune")] == [[1, 2, 3]]
    assert registry.verify() == []


def test_a_prune_reads_only_versions_that_have_their_weights(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A training that prunes as it goes must not pay, in time and memory, for all that it ever pruned."""
    publish_many(registry, 30)
    registry.prune(keep_last=2)
    publish_many(registry, 3)
    read: list[int] = []
    look = Ledger._read

    def counted(ledger: Ledger, *asked: Any) -> Any:
        found = look(ledger, *asked)
        read.append(len(found))
        return found

    monkeypatch.setattr(Ledger, "_read", counted)
    assert numbers(registry.prune(keep_last=2)) == [29, 30, 31]
    assert sum(read) == 5 + 2, "the five, and the head and what a rollback goes back to once more"


def test_pruning_again_finds_nothing_more(registry: Registry) -> None:
    publish_many(registry, 5)
    registry.prune(keep_last=2)
    assert registry.prune(keep_last=2) == [] and len(registry.events(kind="prune")) == 1


def test_a_dry_run_tells_what_would_go_and_changes_nothing(registry: Registry) -> None:
    publish_many(registry, 5)
    registry.set_alias("good", 2)
    before, listing = registry.events(), files(registry)
    would = registry.prune(keep_last=2, dry_run=True)
    assert numbers(would) == [1, 3] and all(version.stored for version in would)
    goal = "what a rollback goes back to"
    assert would.kept == {2: ("alias good",), 4: (goal, "last 2"), 5: ("head", "last 2")}
    assert registry.events() == before and files(registry) == listing
    assert numbers(registry.prune(keep_last=2)) == numbers(would)


def test_order_is_the_number_not_the_step(registry: Registry) -> None:
    """CK-02."""
    for value, step in enumerate((9000, 9900, 10000)):
        registry.publish(weights(value), step=step)
    registry.prune(keep_last=2)
    assert [version.step for version in registry.versions() if version.stored] == [9900, 10000]
    assert registry.head().step == 10000


@pytest.mark.parametrize(
    "rules",
    [
        {},
        {"keep_last": 0},
        {"keep_last": -1},
        {"keep_last": True},
        {"keep_last": 1.5},
        {"keep_every": 0},
        {"keep_best": ("reward", 0)},
        {"keep_best": "reward"},
        {"keep_best": ("reward", 1, "most")},
        {"keep_last": 1, "keep_every": 0},
    ],
    ids=str,
)
def test_a_rule_that_keeps_nothing_is_refused(registry: Registry, rules: dict[str, Any]) -> None:
    """CK-03."""
    publish_many(registry, 3)
    with pytest.raises((TypeError, ValueError), match=r"prune.*accepted"):
        registry.prune(**rules)
    assert stored(registry) == [1, 2, 3]


def test_the_newest_and_the_best_survive(registry: Registry) -> None:
    """CK-03."""
    for value, reward in enumerate((9.0, 1.0, 2.0, math.nan)):
        registry.publish(weights(value), metrics={"reward": reward})
    registry.prune(keep_last=1, keep_best=("reward", 1))
    assert stored(registry) == [1, 3, 4], "v3 is what a rollback goes back to"


def test_a_nan_is_the_worst_score(registry: Registry) -> None:
    """CK-15."""
    for value, reward in enumerate((math.nan, 1.0, 3.0, math.nan, 2.0, math.nan)):
        registry.publish(weights(value), metrics={"reward": reward})
    registry.prune(keep_best=("reward", 2))
    assert stored(registry) == [3, 5, 6], "v6 is the head"


def test_every_nth_and_the_lowest_can_be_kept(registry: Registry) -> None:
    for value in range(1, 11):
        registry.publish(weights(value), metrics={"loss": abs(value - 3)})
    registry.prune(keep_every=5, keep_best=("loss", 2, "min"))
    assert stored(registry) == [3, 4, 5, 9, 10], "of v2 and v4, equally good, the newer stays"


@pytest.mark.filterwarnings("ignore:'eval-.*is pinned to v3, but no worker")
def test_what_is_best_held_pinned_aliased_or_pending_stays(registry: Registry) -> None:
    """CK-04, with a push that was never answered, and a worker whose run is gone."""
    publish_many(registry, 11)
    for number in registry.versions():
        registry.record_metrics(number, reward=9.0 if number.number == 1 else 1.0)
    hold(registry, "w", 2)
    registry.pin("eval-*", 3)
    registry.set_alias("paper", 4)
    hold(registry, "slow", 5, confirm=False)
    assert exit_code_of(_hold_and_die, registry.location) == 0
    report = registry.prune(keep_last=2, keep_best=("reward", 1))
    assert stored(registry) == [1, 2, 3, 4, 5, 6, 10, 11]
    why = {number: " ".join(reasons) for number, reasons in report.kept.items()}
    for number, word in {
        1: "reward",
        2: "w",
        3: "eval-*",
        4: "paper",
        5: "pending on slow",
        6: r"orphan (its run is gone)",
        10: "2",
    }.items():
        assert word in why[number]


def _hold_and_die(folder: Path) -> None:
    hold(Registry.open(folder), "orphan", 6)


def _prune_all_but_the_head(folder: Path) -> None:
    with Registry.open(folder) as registry:
        registry.prune(keep_last=1)


def test_a_load_that_has_begun_ends_though_its_version_is_pruned(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CK-06: another process prunes between the opening of the file and the reading of it."""
    publish_many(registry, 3)
    fill = local._fill

    def late(*arguments: Any) -> None:
        in_child(_prune_all_but_the_head, registry.location)
        fill(*arguments)

    monkeypatch.setattr(local, "_fill", late)
    assert value_of(registry.load(1)) == 1
    assert stored(registry) == [2, 3] and len(files(registry)) == 2


@pytest.mark.parametrize("call", ["load", "load_extra", "tensor_hashes", "payload"])
def test_a_load_that_comes_too_late_says_that_its_version_was_pruned(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """CK-06, neighbour: pruned between the look at the row and the opening of the file, which is no damage."""
    registry.publish(weights(1), extra={"m": torch.ones(2)})
    registry.publish(weights(2))
    registry.publish(weights(3))
    opened = LocalSnapshots._opened

    def late(store: LocalSnapshots, uri: str) -> Any:
        in_child(_prune_all_but_the_head, registry.location)
        return opened(store, uri)

    monkeypatch.setattr(LocalSnapshots, "_opened", late)
    with pytest.raises(NotFoundError, match=r"v1 .*pruned.*nearest kept versions are.*2"):
        getattr(registry, call)(1)


def test_a_file_that_a_kept_version_shares_stays(registry: Registry) -> None:
    registry.publish(weights(1))
    registry.publish(weights(2))
    registry.rollback(1)  # v3 is the head, on the file of v1, and v2 is abandoned
    report = registry.prune(keep_last=1)
    assert stored(registry) == [1, 3] and "v3" in report.kept[1][0]
    assert value_of(registry.load(1)) == value_of(registry.load(3)) == 1


def test_a_file_that_another_policy_shares_stays(registry: Registry) -> None:
    publish_many(registry, 3)
    with registry.for_policy("opponent") as opponent:
        opponent.publish(weights(1))
        report = registry.prune(keep_last=1)
        assert report == [] and "v1 of another policy, 'opponent'" in report.kept[1][0]
        assert value_of(opponent.load()) == 1


def test_extra_state_goes_with_its_last_version(registry: Registry) -> None:
    for value in (1, 2, 3, 4):
        registry.publish(weights(value), extra={"m": torch.full((3,), float(max(value, 2)))})
    first, shared = extra_file_of(registry, 1), extra_file_of(registry, 3)
    assert first == extra_file_of(registry, 2) and first != shared
    registry.prune(keep_last=1)
    assert not first.exists() and shared.exists()
    assert registry.load_extra()["m"].tolist() == [4, 4, 4]
    with pytest.raises(NotFoundError, match=r"v1.*pruned.*v3"):
        registry.load_extra(1)


def test_equal_content_after_a_prune_is_written_anew(registry: Registry) -> None:
    registry.publish(weights(1))
    gone = file_of(registry, 1)
    registry.publish(weights(2))
    registry.publish(weights(3))
    registry.prune(keep_last=1)
    registry.publish(weights(1))
    assert value_of(registry.load()) == 1 and file_of(registry, 4) != gone
    assert not registry.get(1).stored, "a version that was pruned stays so"


def test_clocks_and_file_times_decide_nothing(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    """CK-09: the clock is set back by an hour, and v1's file is touched."""
    from datetime import timedelta

    from weightledger.registry.log import ledger, versioning

    registry.publish(weights(1))
    earlier = ledger.now() - timedelta(hours=1)
    monkeypatch.setattr(ledger, "now", lambda: earlier)
    monkeypatch.setattr(versioning, "now", lambda: earlier)
    registry.publish(weights(2))
    os.utime(file_of(registry, 1))
    assert registry.get(2).created_at < registry.get(1).created_at
    assert registry.head().number == 2 and numbers(registry.versions(limit=1)) == [2]
    assert [event.version for event in registry.events()] == [1, 2]
    registry.publish(weights(3))
    registry.prune(keep_last=1)
    assert stored(registry) == [2, 3]


# ---------------------------------------------------------------------- deletions that fail


def test_a_file_that_cannot_be_deleted_is_told_and_tried_again(registry: Registry) -> None:
    """CK-08: a folder stands in the file's place, so that even root cannot unlink it."""
    publish_many(registry, 3)
    path = file_of(registry, 1)
    path.unlink()
    path.mkdir()
    with pytest.warns(UserWarning, match=rf"1 file.*tried again.*{path.name}"):
        report = registry.prune(keep_last=1)
    assert numbers(report) == [1] and stored(registry) == [2, 3]
    with pytest.raises(NotFoundError, match=r"v1.*pruned"):
        registry.load(1)
    assert registry.publish(weights(9)).number == 4, "training goes on"
    path.rmdir()
    path.touch()
    assert numbers(registry.prune(keep_last=3)) == []
    assert not path.exists() and registry.verify() == []


def test_a_store_that_never_deletes_does_not_stop_training(registry: Registry) -> None:
    """CK-08's neighbour."""
    publish_many(registry, 3)
    willing, registry.snapshots = registry.snapshots, StubbornSnapshots(Path(registry.location) / "snapshots")
    with pytest.warns(UserWarning, match=r"1 file.*busy"):
        registry.prune(keep_last=1)
    registry.publish(weights(9))
    assert stored(registry) == [2, 3, 4] and len(files(registry)) == 4
    registry.snapshots = willing
    registry.prune(keep_last=2)
    assert len(files(registry)) == 2


def test_a_prune_that_dies_before_deleting_is_finished_by_the_next(registry: Registry) -> None:
    publish_many(registry, 3)
    assert exit_code_of(_prune_and_die, registry.location) == -9
    assert stored(registry) == [2, 3] and len(files(registry)) == 3
    assert registry.verify() == []
    registry.prune(keep_last=1)
    assert len(files(registry)) == 2


def _prune_and_die(folder: Path) -> None:
    registry = Registry.open(folder)
    LocalSnapshots.delete = lambda self, uri: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
    registry.prune(keep_last=1)


def test_a_failed_publish_under_keep_one_leaves_the_old_version(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CK-12."""
    from weightledger.registry import StorageError

    registry.publish(weights(1))
    with monkeypatch.context() as patch:
        patch.setattr(local, "_write", helpers._no_space)
        with pytest.raises(StorageError):
            registry.publish(weights(2))
        registry.prune(keep_last=1)
    assert registry.head().number == 1 and value_of(registry.load()) == 1


# ---------------------------------------------------------------------- what a rollback goes back to


def test_a_rollback_always_has_what_it_would_have_gone_back_to(registry: Registry) -> None:
    """Rolled back and pruned in turn; the content that is gone back to is looked at, not the answer."""
    publish_many(registry, 10)
    assert value_of(registry.load(registry.rollback())) == 9
    report = registry.prune(keep_last=3, dry_run=True)
    assert report.kept[8] == ("what a rollback goes back to",) and 8 not in numbers(report)
    registry.prune(keep_last=3)
    assert stored(registry) == [8, 9, 10, 11]
    assert value_of(registry.load(registry.rollback())) == 8
    registry.prune(keep_last=3)
    with pytest.raises(NotFoundError, match="nothing to roll back to"):
        registry.rollback()  # v7 was no longer what a rollback would go back to when it went


def test_two_rollbacks_in_a_row_find_what_the_prune_between_them_left(registry: Registry) -> None:
    publish_many(registry, 5)
    registry.prune(keep_last=1)
    assert stored(registry) == [4, 5]
    assert value_of(registry.load(registry.rollback())) == 4
    registry.prune(keep_last=1)
    assert stored(registry) == [4, 6]


def test_the_version_to_go_back_to_is_a_finite_one(registry: Registry) -> None:
    """A run that broke three versions ago, and a prune that keeps less than that."""
    publish_many(registry, 3)
    for value in (4, 5, 6):
        registry.publish(weights(value) | {"w": torch.tensor([math.nan, value, 0, 0])})
    report = registry.prune(keep_last=2)
    assert numbers(report) == [1, 2, 4] and report.kept[3] == ("what a rollback goes back to",)
    assert value_of(registry.load(registry.rollback())) == 3


def test_where_no_version_is_finite_the_nearest_one_stays(registry: Registry) -> None:
    """A mask may hold infinities on purpose."""
    for value in range(4):
        registry.publish({"mask": torch.tensor([-math.inf, value])})
    assert numbers(registry.prune(keep_last=1)) == [1, 2]
    assert registry.rollback().restores == 3


# ---------------------------------------------------------------------- contents that policies share


@pytest.fixture
def opponent(registry: Registry) -> Iterator[Registry]:
    """Self-play: the opponent's pool takes what the learner published."""
    with registry.for_policy("opponent") as opened:
        yield opened


def test_contents_that_two_policies_share_go_when_neither_keeps_them(
    registry: Registry, opponent: Registry
) -> None:
    publish_many(registry, 6)
    for version in registry.versions():
        opponent.publish(registry.load(version), extra={"of": version.number})
    assert len(files(registry)) == 12
    report = registry.prune(keep_last=2)
    assert report == [] and stored(registry) == [1, 2, 3, 4, 5, 6]
    assert report.kept[1] == ("shares its file with v1 of another policy, 'opponent'",)
    assert numbers(opponent.prune(keep_last=3, dry_run=True)) == [1, 2, 3] and len(files(registry)) == 12
    gone = opponent.prune(keep_last=3)
    assert numbers(gone) == [1, 2, 3]
    assert stored(registry) == stored(opponent) == [4, 5, 6] and len(files(registry)) == 6
    (event,) = registry.events(kind="prune")
    assert event.details["versions"] == [1, 2, 3] and "'opponent'" in event.reason
    assert registry.verify() == opponent.verify() == []
    assert value_of(opponent.load(4)) == 4 and opponent.load_extra(4) == {"of": 4}


def test_a_shared_content_stays_while_the_other_policy_needs_it(
    registry: Registry, opponent: Registry
) -> None:
    """Needs are looked at when it would go, not when the other policy was pruned."""
    publish_many(registry, 7)
    for version in registry.versions():
        opponent.publish(registry.load(version))
    registry.prune(keep_last=1)
    registry.set_alias("paper", 1)
    hold(registry, "w", 3)
    registry.pin("w", 2)
    registry.rollback(4)
    gone = opponent.prune(keep_last=1)
    assert numbers(gone) == [5]
    assert stored(registry) == [1, 2, 3, 4, 6, 7, 8] and stored(opponent) == [1, 2, 3, 4, 6, 7]
    assert [value_of(registry.load(number)) for number in (1, 2, 3, 4)] == [1, 2, 3, 4]


def test_a_policy_that_changes_its_mind_keeps_what_it_let_go_of(
    registry: Registry, opponent: Registry
) -> None:
    publish_many(registry, 5)
    for version in registry.versions():
        opponent.publish(registry.load(version))
    registry.prune(keep_last=1)
    registry.prune(keep_last=5)
    assert opponent.prune(keep_last=1) == []
    registry.prune(keep_last=1)
    assert numbers(opponent.prune(keep_last=1)) == [], (
        "the opponent let go of them, so that they went just now"
    )
    assert stored(registry) == stored(opponent) == [4, 5]


def test_an_extra_state_that_a_policy_still_needs_outlives_shared_weights(
    registry: Registry, opponent: Registry
) -> None:
    for value in (1, 2, 3):
        registry.publish(weights(value), extra={"seed": 7})
    opponent.publish(weights(1))
    opponent.publish(weights(9), extra={"seed": 7})
    opponent.publish(weights(10))
    registry.prune(keep_last=1)
    assert numbers(opponent.prune(keep_last=1)) == [1]
    assert stored(registry) == [2, 3] and stored(opponent) == [2, 3]
    assert registry.load_extra(3) == opponent.load_extra(2) == {"seed": 7}
    assert registry.verify() == []


# ---------------------------------------------------------------------- workers that are known to be dead


def test_a_dead_workers_version_stays_until_the_worker_is_forgotten(registry: Registry) -> None:
    publish_many(registry, 11)
    assert exit_code_of(_hold_and_die, registry.location) == 0
    assert stored(registry) and numbers(registry.prune(keep_last=1)) == [1, 2, 3, 4, 5, 7, 8, 9]
    before = registry.history()
    plan = registry.prune(keep_last=1, forget_worker="orph*", dry_run=True)
    assert numbers(plan) == [6] and registry.history() == before
    assert numbers(registry.prune(keep_last=1, forget_worker="orph*")) == [6]
    (status,) = registry.workers()
    assert (status.state, status.held, status.last_held) == ("gone", None, 6)
    (holding,) = registry.history()
    assert holding.ended_how == "lost" and holding.ended_at is not None
    assert [event.worker for event in registry.events(kind="worker_lost")] == ["orphan"]


def test_a_worker_of_a_live_run_is_not_forgotten(registry: Registry) -> None:
    publish_many(registry, 5)
    hold(registry, "w1", 1)
    hold(registry, "w2", 2, confirm=False)
    with pytest.raises(InUseError, match=rf"'w1'.*{registry.locks.current().id}.*close that updater"):
        registry.prune(keep_last=1, forget_worker="w*")
    with pytest.raises(NotFoundError, match=r"no worker 'x\*' to forget; its workers are: w1, w2"):
        registry.prune(keep_last=1, forget_worker="x*")
    for name in ("", 7, "\n"):
        with pytest.raises(ValueError, match="worker name"):
            registry.prune(keep_last=1, forget_worker=name)  # type: ignore[arg-type]
    assert stored(registry) == [1, 2, 3, 4, 5] and registry.workers()[0].held == 1

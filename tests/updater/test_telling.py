"""Workers that did not get their weights are told where a loop drops the report: as a warning, or as an error."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from weightledger.registry import Registry
from weightledger.registry.errors import SyncError
from weightledger.updater import SyncReport, SyncWarning
from weightledger.updater.telling import check_on_failure, tell_failures
from weightledger.updater.testing import FakeWorkers


def linear(width: int = 1, value: float = 0.0) -> nn.Linear:
    layer = nn.Linear(2, width)
    nn.init.constant_(layer.weight, value)
    return layer


def fleet(folder: Path, *policies: Any, **options: Any) -> FakeWorkers:
    return FakeWorkers(linear(value=1.0), policies, registry=Registry.open(folder), **options)


def fail_to_load(worker: Any, weights: Any, version: int) -> None:
    raise RuntimeError("the engine has no memory")


def quiet(report: SyncReport) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tell_failures(report, "raise")


def test_nothing_is_told_where_nothing_failed(tmp_path: Path) -> None:
    with fleet(tmp_path, linear(), linear(), max_interval=1) as updater:
        quiet(updater.update_weights())
        quiet(updater.update_weights())
        updater.policy_weights = linear(value=2.0)
        report = updater.update_weights()
        assert {outcome.status for outcome in report.workers.values()} == {"skipped"}
        quiet(report)


def test_a_worker_that_takes_nothing_from_the_first_push_on_is_an_error_even_where_warnings_are_asked_for(
    tmp_path: Path,
) -> None:
    with fleet(tmp_path, linear(), linear(width=5)) as updater:
        report = updater.update_weights()
        assert [outcome.rejected_first for outcome in report.workers.values()] == [False, True]
        with pytest.raises(SyncError, match=r"(?s)1 of 2 workers.*fake-1.*weight") as raised:
            tell_failures(report, "warn")
        assert "fake-0" not in str(raised.value)
        assert torch.equal(updater.worker(0).policy.weight, torch.ones(1, 2))


@pytest.mark.parametrize("option", ["locate", "apply"])
def test_no_policy_where_it_should_be_and_an_apply_that_raises_are_such_rejections(
    tmp_path: Path, option: str
) -> None:
    options: dict[str, Any] = {"locate": "polcy"} if option == "locate" else {"apply": fail_to_load}
    with fleet(tmp_path, linear(), **options) as updater:
        report = updater.update_weights()
        assert report.workers[0].rejected_first
        with pytest.raises(SyncError, match="polcy" if option == "locate" else "no memory"):
            tell_failures(report, "warn")


def test_a_worker_that_took_weights_before_is_warned_of_and_raises_only_when_that_is_asked_for(
    tmp_path: Path,
) -> None:
    with fleet(tmp_path, linear(), linear()) as updater:
        updater.update_weights()
        report = updater.update_weights(linear(width=3), restructure=True)
        assert {outcome.status for outcome in report.workers.values()} == {"failed"}
        with pytest.warns(SyncWarning, match=r"2 of 2 workers .*fake-0: failed: .*weight.*; fake-1: failed"):
            tell_failures(report, "warn")
        with pytest.raises(SyncError, match="fake-1"):
            tell_failures(report, "raise")


@pytest.mark.parametrize("fault", ["timeout", "dead", "refused"])
def test_no_answer_death_and_weights_with_nan_are_warned_of_even_at_the_first_push(
    tmp_path: Path, fault: str
) -> None:
    with fleet(tmp_path, linear(), linear()) as updater:
        match fault:
            case "timeout":
                updater.hang(1)
            case "dead":
                updater.kill(1)
            case _:
                updater.policy_weights = linear(value=float("nan"))
        report = updater.update_weights()
        assert report.workers[1].status == fault
        with pytest.warns(SyncWarning, match=f"fake-1: {fault}"):
            tell_failures(report, "warn")
        with pytest.raises(SyncError, match="fake-1"):
            tell_failures(report, "raise")


def test_a_worker_that_only_was_busy_has_rejected_nothing(tmp_path: Path) -> None:
    with fleet(tmp_path, linear()) as updater:
        from weightledger.updater import acting

        with acting(updater.worker(0)):
            report = updater.update_weights()
        assert report.workers[0].status == "failed"
        assert not report.workers[0].rejected_first
        with pytest.warns(SyncWarning, match="still acting"):
            tell_failures(report, "warn")


def test_a_failure_that_lasts_has_one_text_so_that_python_shows_it_once(tmp_path: Path) -> None:
    with fleet(tmp_path, linear(), linear()) as updater:
        updater.kill(1)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("default")
            for value in (1.0, 2.0, 3.0):
                updater.policy_weights = linear(value=value)
                tell_failures(updater.update_weights(), "warn")
        assert len(told) == 1


def test_several_series_are_told_together(tmp_path: Path) -> None:
    with fleet(tmp_path / "a", linear()) as one, fleet(tmp_path / "b", linear(width=4)) as other:
        reports = [one.update_weights(), other.update_weights()]
        with pytest.raises(SyncError, match="1 of 1"):
            tell_failures(reports, "warn")


def test_another_value_of_on_failure_is_refused() -> None:
    assert [check_on_failure(value) for value in ("warn", "raise")] == ["warn", "raise"]
    with pytest.raises(ValueError, match="on_failure must be 'warn' or 'raise', found 'ignore'"):
        check_on_failure("ignore")

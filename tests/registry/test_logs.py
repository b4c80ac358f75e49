"""The library's log: silent by itself, and at `INFO` it tells what a person would ask for."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from weightledger.registry import Registry
from weightledger.updater.testing import FakeTransport, FakeWorkers


def messages(caplog: pytest.LogCaptureFixture, level: int = logging.INFO) -> list[str]:
    return [
        each.getMessage() for each in caplog.records if each.name == "weightledger" and each.levelno >= level
    ]


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.DEBUG, logger="weightledger")
    return caplog


def test_nothing_is_written_by_a_host_that_has_no_handler(tmp_path: Path) -> None:
    program = f"""
import torch
from weightledger import Registry
with Registry.open({str(tmp_path / "runs")!r}) as registry:
    registry.publish({{"w": torch.ones(2)}})
    registry.publish({{"w": torch.zeros(2)}})
    registry.rollback()
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=True
    )
    assert (done.stdout, done.stderr) == ("", "")


def test_publishes_rollbacks_and_followed_heads_are_told(
    tmp_path: Path, told: pytest.LogCaptureFixture
) -> None:
    registry, learner = Registry.open(tmp_path), nn.Linear(2, 1)
    with FakeWorkers(learner, [nn.Linear(2, 1)], registry=registry) as fleet:
        fleet.update_weights()
        nn.init.constant_(learner.weight, 5.0)
        fleet.update_weights()
        fleet.rollback(1, "collapsed")
        registry.rollback(2, reason="it was good after all")
        told.clear()
        assert fleet.update_weights().adopted
        assert messages(told) == ["the server weights follow v4 of policy 'default'"]
    with Registry.open(tmp_path) as again:
        told.clear()
        again.publish({"weight": torch.ones(1, 2), "bias": torch.ones(1)})
        again.rollback(1, reason="no")
        assert messages(told) == [
            "v5 of policy 'default' is published",
            "v6 of policy 'default' is published: it restores v1 (no)",
        ]


def test_an_update_that_publishes_and_one_that_rolls_back_are_told_once(
    tmp_path: Path, told: pytest.LogCaptureFixture
) -> None:
    learner = nn.Linear(2, 1)
    with FakeWorkers(learner, [nn.Linear(2, 1)], registry=Registry.open(tmp_path)) as fleet:
        fleet.update_weights()
        nn.init.constant_(learner.weight, 5.0)
        fleet.update_weights()
        fleet.rollback(1, "collapsed")
    assert messages(told) == [
        "v1 of policy 'default' is published",
        "v2 of policy 'default' is published",
        "v3 of policy 'default' is published: it restores v1 (collapsed)",
    ]


def test_a_restarted_worker_is_told_and_steps_are_for_debugging(
    tmp_path: Path, told: pytest.LogCaptureFixture
) -> None:
    with FakeWorkers(nn.Linear(2, 1), [nn.Linear(2, 1)], registry=Registry.open(tmp_path)) as fleet:
        fleet.update_weights()
        fleet.restart(0)
        told.clear()
        fleet.update_weights()
    assert messages(told) == ["worker fake-0 came back as another process"]
    assert any("pushes left" in each for each in messages(told, logging.DEBUG))


def test_a_failure_in_the_background_is_a_warning(tmp_path: Path, told: pytest.LogCaptureFixture) -> None:
    class Failing(FakeTransport):
        def put(self, payload: Any) -> Any:
            raise OSError("no such device")

    with FakeWorkers(
        nn.Linear(2, 1), [nn.Linear(2, 1)], registry=Registry.open(tmp_path), transport=Failing()
    ) as fleet:
        future = fleet.update_weights(wait=False)
        assert isinstance(future.exception(60), OSError)
    assert messages(told, logging.WARNING) == ["an update in the background failed: OSError: no such device"]

"""Updates that nobody waits for: what becomes of them when Ray is shut down, and who hears of their failures."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from weightledger.registry import Registry
from weightledger.updater import SyncWarning
from weightledger.updater.testing import FakeTransport, FakeWorkers

PATIENCE = 110

PROGRAM = """
import sys, time
import ray, torch
from pathlib import Path
from torch import nn
from weightledger.registry import Registry
from weightledger.updater import RayRemoteWeightUpdater, held_version

class Worker:
    def __init__(self):
        self.policy = nn.Linear(4, 2)
    def sleep(self, seconds):
        time.sleep(seconds)
    def held(self):
        return held_version(self)

def connect():
    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, namespace="shut")
    return [ray.remote(num_cpus=0)(Worker).options(name=f"w{index}").remote() for index in range(2)]

registry = Registry.open(sys.argv[1])
workers = connect()
policy = nn.Linear(4, 2)
updater = RayRemoteWeightUpdater(policy, workers, registry=registry, timeout=60)
updater.update_weights().raise_for_failures()
for worker in workers:
    worker.sleep.remote(60)
nn.init.constant_(policy.weight, 7.0)
future = updater.update_weights(wait=False, message="in the background")
time.sleep(float(sys.argv[2]))
ray.shutdown()
"""


def run(folder: Path, delay: float, rest: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM + rest, str(folder), str(delay)],
        env=os.environ | {"RAY_USAGE_STATS_ENABLED": "0"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


def check_kept(folder: Path) -> None:
    with Registry.open(folder) as registry:
        head = registry.head()
        assert (head.number, head.message) == (2, "in the background")
        assert torch.equal(registry.load()["weight"], torch.full((2, 4), 7.0))
        assert registry.verify() == []
        assert {worker.held for worker in registry.workers()} == {None}


@pytest.mark.slow
def test_an_update_in_the_background_outlives_ray_and_its_version_is_kept(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        0.0,
        """
report = future.result(60)
assert not ray.is_initialized(), "a cluster was started"
print([(outcome.status, outcome.held) for outcome in report.workers.values()])
updater.close()
""",
    )
    assert (done.returncode, done.stdout) == (0, "[('failed', None), ('failed', None)]\n"), done.stderr
    check_kept(tmp_path)


@pytest.mark.long
def test_workers_of_a_later_cluster_never_get_the_old_push_and_the_updater_says_what_to_do(
    tmp_path: Path,
) -> None:
    """They bear the names of the old ones."""
    done = run(
        tmp_path,
        0.5,
        """
workers = connect()
future.result(60)
assert ray.get([worker.held.remote() for worker in workers], timeout=60) == [None, None]
try:
    updater.update_weights()
except Exception as error:
    print(type(error).__name__, "make a new updater" in str(error))
updater.close()
new = RayRemoteWeightUpdater(policy, workers, registry=registry, timeout=60)
print(new.update_weights())
assert ray.get([worker.held.remote() for worker in workers], timeout=60) == [2, 2]
""",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["ConnectionLostError True", "v2: 2 synced"]


@pytest.mark.slow
def test_a_failure_in_the_background_that_nobody_asked_for_is_told_at_the_latest_when_the_program_ends(
    tmp_path: Path,
) -> None:
    done = run(tmp_path, 1.0, "")  # while its workers are waited for
    assert done.returncode == 0
    check_kept(tmp_path)
    assert "SyncWarning: an update with wait=False failed, and nobody asked for its result" in done.stderr
    assert "2 of 2 workers did not get their weights (w0: failed: Ray was shut down" in done.stderr


# ------------------------------------------------------------------ failures that nobody asked for


def fleet(folder: Path, **options: Any) -> FakeWorkers:
    return FakeWorkers(nn.Linear(2, 1), [nn.Linear(2, 1)], registry=Registry.open(folder), **options)


def let_go(updater: FakeWorkers, *, ask: str = "") -> list[str]:
    """Update in the background, ask the future for something or not, and return what is told once it is let go."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        future = updater.update_weights(wait=False)
        if ask == "result":
            try:
                future.result(PATIENCE)
            except OSError:
                pass
        elif ask:
            getattr(future, ask)(PATIENCE)
        del future
        updater._drain()
        gc.collect()
    return [str(each.message) for each in told if each.category is SyncWarning]


def test_workers_that_failed_are_told_when_the_future_is_let_go_unasked(tmp_path: Path) -> None:
    with fleet(tmp_path) as updater:
        updater.kill(0)
        (told,) = let_go(updater)
        assert "nobody asked for its result: 1 of 1 workers" in told and "fake-0: dead" in told
        assert let_go(updater, ask="result") == []


@pytest.mark.parametrize("ask", ["", "result", "exception"])
def test_an_exception_is_told_when_the_future_is_let_go_unasked(tmp_path: Path, ask: str) -> None:
    class Failing(FakeTransport):
        def put(self, payload: Any) -> Any:
            raise OSError("no such device")

    with fleet(tmp_path, transport=Failing()) as updater:
        told = let_go(updater, ask=ask)
        assert told == (
            []
            if ask
            else [
                "an update with wait=False failed, and nobody asked for its result: OSError: no such device"
            ]
        )


def test_nothing_is_told_of_an_update_that_did_its_work(tmp_path: Path) -> None:
    with fleet(tmp_path) as updater:
        assert let_go(updater) == []
        assert updater.worker(0).policy.weight.equal(updater.policy_weights.weight)


def test_a_failure_may_still_be_asked_for_after_the_updater_was_closed(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with fleet(tmp_path) as updater:
            updater.kill(0)
            future = updater.update_weights(wait=False)
        assert not future.result(0).ok
        del future
        gc.collect()


def test_an_update_that_is_cancelled_before_it_began_gives_its_copy_back(tmp_path: Path) -> None:
    """Its buffer is the only one: whoever copies next waits for it."""
    go = threading.Event()

    class Slow(FakeTransport):
        def put(self, payload: Any) -> Any:
            go.wait(PATIENCE)
            return super().put(payload)

    with fleet(tmp_path, transport=Slow()) as updater:
        first = updater.update_weights(wait=False)
        nn.init.constant_(updater.policy_weights.weight, 3.0)
        waiting = threading.Timer(0.3, go.set)
        waiting.start()
        second = updater.update_weights(wait=False)
        cancelled = second.cancel()
        assert first.result(PATIENCE).version == 1
        updater._drain()
        assert updater.update_weights().version == 2
        assert cancelled or second.result(PATIENCE).version == 2

"""Actors that any exception in a call kills: a float from `__len__` breaks Ray's own handling of errors in them.

TorchRL's remote collectors are such (their `__len__` returns infinity), so nothing that we run in an actor may raise.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from ray.exceptions import ActorDiedError
from torch import nn

from tests.updater.actors import (
    Rollouts,
    borrow,
    check_truth,
    crash,
    get,
    kill,
    learn,
    remote,
    status_of,
    statuses,
    steer,
)
from weightledger.updater.in_worker.receiver import receive
from weightledger.updater.messages import Push

pytestmark = pytest.mark.usefixtures("ray_cluster")


class Collector(Rollouts):
    def __len__(self) -> float:  # type: ignore[override]
        return math.inf

    def fail(self) -> None:
        raise RuntimeError("anything")


Fatal = remote(num_cpus=0)(Collector)


def refuse(worker: Any, weights: Any, version: int) -> None:
    raise RuntimeError("the engine has no memory")


def get_lost(worker: Any) -> Any:
    raise LookupError("no policy here")


def test_an_exception_in_a_call_does_kill_such_an_actor() -> None:
    """What the other tests stand on; when Ray mends this, they lose nothing."""
    actor = Fatal.remote()
    with pytest.raises(ActorDiedError):
        get(actor.fail.remote())


def test_no_push_that_cannot_be_carried_out_kills_the_actor(tmp_path: Path) -> None:
    (actor,) = borrow(1, kind=Fatal)
    life = get(actor.pid.remote())
    updater, _ = steer(tmp_path, [actor])
    with updater:
        assert statuses(learn(updater, 1.0)) == ["synced"]

        bad: list[dict[str, torch.Tensor]] = [
            {"weight": torch.ones(4, 4), "bias": torch.ones(2)},
            {"weight": torch.ones(2, 3)},
            {"weight": torch.ones(2, 3), "bias": torch.ones(2), "more": torch.ones(1)},
            {"weight": torch.ones(2, 3, dtype=torch.int64), "bias": torch.ones(2)},
            {"nothing.like.it": torch.ones(2)},
        ]
        for weights in bad:
            report = updater.update_weights(weights, restructure=True)
            assert statuses(report) == ["failed"]
            assert report.workers[0].error
            assert report.workers[0].held == 1
            assert get(actor.value.remote()) == 1.0
            check_truth(updater)

        for locate in ("no_policy", "policy.weight.nothing", get_lost, "pid"):
            updater.locate = locate
            assert statuses(learn(updater, 2.0, force=True, restructure=True)) == ["failed"]
            assert updater.probe()[0].error
        updater.locate = "policy"
        updater.apply = refuse
        assert statuses(learn(updater, 3.0)) == ["failed"]
        assert status_of(updater.registry, "w0").state == "unknown"
        updater.apply = None

        assert statuses(learn(updater, 4.0)) == ["synced"]
        assert get(actor.pid.remote()) == life
        check_truth(updater)


def test_bytes_that_are_not_what_they_should_be_are_refused_alive(tmp_path: Path) -> None:
    (actor,) = borrow(1, kind=Fatal)
    life = get(actor.pid.remote())
    updater, _ = steer(tmp_path, [actor])
    with updater:
        learn(updater, 1.0)
        server = updater.source.find(updater.registry.head().digest)
        assert server is not None
        order = 1000
        for payload in (server.handle[:-1], server.handle[:100], server.handle * 0 + 255, "no array", 7):
            order += 1
            push: Push = updater._push_for(server, order, 1.0)
            receipt = get(actor.__ray_call__.remote(receive, push, payload))
            assert receipt.outcome == "kept"
            assert receipt.error
        assert get(actor.value.remote()) == 1.0
        assert get(actor.pid.remote()) == life


def test_such_an_actor_is_probed_rolled_back_and_pinned_like_any_other(tmp_path: Path) -> None:
    (actor,) = borrow(1, kind=Fatal)
    updater, _ = steer(tmp_path, [actor])
    with updater:
        learn(updater, 1.0)
        learn(updater, 2.0)
        assert statuses(updater.rollback(1)) == ["synced"]
        assert statuses(updater.pin(0, 2)) == ["synced"]
        assert updater.probe()[0].matches
        get(actor.__ray_call__.remote(set_policy, "meta"))
        found = updater.probe()[0]
        assert not found.matches
        assert statuses(updater.sync()) == ["failed"]  # meta weights take nothing, and nothing dies of it
        get(actor.__ray_call__.remote(set_policy, "cpu"))
        assert statuses(updater.sync()) == ["synced"]
        check_truth(updater)


def set_policy(worker: Any, device: str) -> None:
    worker.policy = nn.Linear(3, 2, device=device)


def test_when_such_an_actor_does_die_that_is_what_is_on_record(tmp_path: Path) -> None:
    """A death by its own code, while others go on."""
    mortal = Fatal.remote()
    updater, _ = steer(tmp_path, [mortal, *borrow(1)])
    with updater:
        learn(updater, 1.0)
        crash(mortal)
        assert statuses(learn(updater, 2.0)) == ["dead", "synced"]
        check_truth(updater, [1])
    kill(mortal)

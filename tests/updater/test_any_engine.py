"""`apply=`: workers that are no modules load weights by a method of their own, and are told the version.

The engine here is the one of docs/examples/any_engine.py: fused half-precision weights, a `load_weights` that answers.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from ray import cloudpickle

from weightledger.registry import Registry
from weightledger.updater import RayRemoteWeightUpdater

EXAMPLES = Path(__file__).parent.parent.parent / "docs" / "examples"
PATIENCE = 60.0

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]


def weights(value: float, **more: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((2, 4), value), "bias": torch.full((2,), value)} | more


@pytest.fixture(scope="module")
def example() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        return importlib.import_module("any_engine")


@pytest.fixture(scope="module")
def actors(ray_cluster: None, example: Any) -> Iterator[list[Any]]:
    """Two engines for all tests, each of which begins with them as they were made."""
    # The example's folder is on no worker's path, so the class goes there by value.
    cloudpickle.register_pickle_by_value(example)
    actor: Any = ray.remote(num_cpus=0)(example.Engine)
    made = [actor.remote() for _ in range(2)]
    yield made
    for each in made:
        ray.kill(each)


def begin_again(engine: Any) -> None:
    engine.__dict__.clear()  # with what earlier tests pushed
    engine.__init__()


class Engines:
    """The engines and the updater that steers them."""

    def __init__(self, actors: list[Any], apply: Callable[..., Any], registry: Registry) -> None:
        self.actors = actors
        self.ask(begin_again)
        self.updater = RayRemoteWeightUpdater(
            weights(0.0),
            self.actors,
            registry=registry,
            names=["engine-a", "engine-b"],
            apply=apply,
            timeout=PATIENCE,
        )

    def publish(
        self, given: dict[str, torch.Tensor], *, restructure: bool = False
    ) -> dict[str, tuple[str, int | None]]:
        report = self.updater.update_weights(given, restructure=restructure)
        return {outcome.name: (outcome.status, outcome.held) for outcome in report.workers.values()}

    def ask(self, question: Callable[..., Any], *arguments: Any) -> None:
        calls = [actor.__ray_call__.remote(question, *arguments) for actor in self.actors]
        ray.get(calls, timeout=PATIENCE)

    def answers(self) -> list[dict[str, Any]]:
        return ray.get([actor.generate.remote([0.0] * 4) for actor in self.actors], timeout=PATIENCE)

    def values(self) -> list[float]:
        return [answer["answer"][0] for answer in self.answers()]

    def stamps(self) -> list[tuple[int | None, int | None]]:
        """Return the version by our note, and by the engine's own word."""
        return [(answer["version"], answer["engine"]) for answer in self.answers()]


@pytest.fixture
def engines(actors: list[Any], example: Any, tmp_path: Path) -> Iterator[Engines]:
    running = Engines(actors, example.load, Registry.open(tmp_path))
    yield running
    running.updater.close()


def test_the_engines_own_method_gets_the_weights_and_their_version(engines: Engines) -> None:
    assert engines.publish(weights(1.0)) == {"engine-a": ("synced", 1), "engine-b": ("synced", 1)}
    assert engines.values() == [1.0, 1.0]
    assert engines.publish(weights(2.0)) == {"engine-a": ("synced", 2), "engine-b": ("synced", 2)}
    assert engines.values() == [2.0, 2.0]
    assert engines.stamps() == [(2, 2), (2, 2)]


def test_a_rollback_reaches_the_engine_as_a_new_version_with_the_old_content(engines: Engines) -> None:
    for value in (1.0, 2.0, 3.0):
        engines.publish(weights(value))
    assert engines.updater.rollback(to=1, reason="nonsense").ok
    assert engines.values() == [1.0, 1.0]
    assert engines.stamps() == [(4, 4), (4, 4)]


def test_a_version_of_equal_content_is_loaded_again_so_that_the_engine_learns_its_number(
    engines: Engines,
) -> None:
    engines.publish(weights(1.0))
    engines.updater.registry.rollback(1, reason="the same content under a new number")
    assert engines.updater.sync().ok
    assert engines.stamps() == [(2, 2), (2, 2)]


def test_a_pinned_engine_keeps_what_it_serves(engines: Engines) -> None:
    engines.publish(weights(1.0))
    engines.publish(weights(2.0))
    assert engines.updater.pin(1, 1, reason="approved").ok
    assert engines.publish(weights(3.0)) == {"engine-a": ("synced", 3), "engine-b": ("current", 1)}
    assert engines.values() == [3.0, 1.0]
    assert engines.updater.unpin(1).ok
    assert engines.values() == [3.0, 3.0]


def test_what_the_engine_refuses_by_false_is_not_counted_as_held(engines: Engines) -> None:
    engines.publish(weights(1.0))
    found = engines.publish(weights(2.0, scale=torch.ones(1)), restructure=True)
    assert found == {"engine-a": ("failed", None), "engine-b": ("failed", None)}
    assert "False" in engines.updater.last_report.workers[0].error  # type: ignore[union-attr]
    assert [(status.state, status.held) for status in engines.updater.registry.workers()] == [
        ("unknown", None)
    ] * 2
    assert engines.updater.rollback(to=1, reason="wrong names").ok
    assert engines.stamps() == [(3, 3), (3, 3)]
    held = {
        holding.version
        for holding in engines.updater.registry.history(worker="engine-a")
        if holding.confirmed_at
    }
    assert held == {1, 3}


def test_what_the_engine_holds_is_unknown_after_its_method_raised(engines: Engines) -> None:
    engines.publish(weights(1.0))
    report = engines.updater.update_weights(weights(float("inf")))
    assert {outcome.status for outcome in report.workers.values()} == {"refused"}, (
        "it is not even sent by default"
    )

    engines.updater.allow_nonfinite = True
    report = engines.updater.update_weights(weights(float("inf")), force=True)
    assert [(outcome.status, outcome.held) for outcome in report.workers.values()] == [("failed", None)] * 2
    assert "half precision" in report.workers[0].error
    assert [status.held for status in engines.updater.registry.workers()] == [None, None]
    assert engines.updater.rollback(to=1, reason="not finite").ok
    assert engines.values() == [1.0, 1.0]


def test_one_engine_that_fails_stops_no_other(actors: list[Any], example: Any, tmp_path: Path) -> None:
    load = example.load

    def picky(engine: Any, given: Any, version: int) -> Any:
        if getattr(engine, "full", False) and version == 2:
            raise MemoryError("no room for a second copy")
        return load(engine, given, version)

    running = Engines(actors, picky, Registry.open(tmp_path))
    ray.get(actors[1].__ray_call__.remote(lambda engine: setattr(engine, "full", True)), timeout=PATIENCE)
    running.publish(weights(1.0))
    assert running.publish(weights(2.0)) == {"engine-a": ("synced", 2), "engine-b": ("failed", None)}
    # It raised before it paused, so it still answers with its old weights; nobody vouches for them.
    assert running.values() == [2.0, 1.0]
    assert running.stamps() == [(2, 2), (None, 1)]
    assert running.publish(weights(3.0)) == {"engine-a": ("synced", 3), "engine-b": ("synced", 3)}
    assert running.stamps() == [(3, 3), (3, 3)]
    running.updater.close()

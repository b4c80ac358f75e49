"""Every module of the zoo: published, changed, restored; sent to a worker, rolled back. Or refused by name.

What a module holds is hashed here, from its parts, and what it computes is compared: nothing is asked of the product.
"""

# pyright: reportArgumentType=false

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from tests.zoo import ZOO, born, truth
from weightledger.registry import Registry
from weightledger.registry.errors import InvalidWeightsError
from weightledger.updater import RayRemoteWeightUpdater
from weightledger.updater.testing import FakeWorkers

pytestmark = pytest.mark.filterwarnings(
    "ignore"
)  # what these libraries say of their own and of each other's age

SOUND = [name for name, kind in ZOO.items() if not kind.refused]
REFUSED = [name for name, kind in ZOO.items() if kind.refused]


def test_the_zoo_is_large_and_every_change_shows() -> None:
    assert len(SOUND) > 70
    for name in SOUND:
        module = born(name, 0)
        before = truth(name, module)
        assert before == truth(name, module), f"{name}: to look changes it"
        assert before == truth(name, born(name, 0)), f"{name}: it is not made the same twice"
        ZOO[name].change(module)
        assert all(one != other for one, other in zip(before[1:], truth(name, module)[1:], strict=True)), name


@pytest.mark.parametrize("name", SOUND)
def test_a_module_that_was_published_and_changed_is_restored_whole(name: str, tmp_path: Path) -> None:
    module = born(name, 0)
    with Registry.open(tmp_path) as registry:
        registry.publish(module)
        before = truth(name, module)
        ZOO[name].change(module)
        assert truth(name, module) != before
        registry.restore(1, module)
        assert truth(name, module) == before
        # Into another one of its kind, too.
        other = born(name, 1)
        ZOO[name].change(other)
        registry.restore(1, other)
        assert truth(name, other) == before


@pytest.mark.parametrize("name", SOUND)
def test_a_worker_holds_and_computes_what_the_learner_does(name: str, tmp_path: Path) -> None:
    learner, worker = born(name, 0), born(name, 1)
    ZOO[name].change(worker)
    with (
        Registry.open(tmp_path) as registry,
        FakeWorkers(learner, [worker], registry=registry, timeout=5) as fleet,
    ):
        truths = []
        for _ in range(3):
            fleet.update_weights().raise_for_failures()
            truths.append(truth(name, learner))
            assert truth(name, worker) == truths[-1]
            ZOO[name].change(learner)
        fleet.rollback(to=1).raise_for_failures()
        assert truth(name, learner) == truth(name, worker) == truths[0]
        assert fleet.probe()[0].matches
        assert not fleet.update_weights().published


@pytest.mark.parametrize("name", REFUSED)
def test_a_module_that_cannot_be_kept_is_refused_by_name(name: str, tmp_path: Path) -> None:
    with Registry.open(tmp_path) as registry:
        with pytest.raises(InvalidWeightsError, match=ZOO[name].refused):
            registry.publish(born(name, 0))
        assert registry.versions() == []
        registry.publish({"0.weight": torch.zeros(4, 3), "0.bias": torch.zeros(4)})
        with pytest.raises(InvalidWeightsError, match=ZOO[name].refused):
            registry.restore(1, born(name, 0))


class Keeper:
    """An actor that keeps several modules."""

    def __init__(self, names: list[str]) -> None:
        self.zoo = {name: born(name, 1) for name in names}

    def truth(self, name: str) -> Any:
        return truth(name, self.zoo[name])


class At:
    """Finds one module in a `Keeper`."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, keeper: Keeper) -> Any:
        return keeper.zoo[self._name]


BY_RAY = [
    "lstm",
    "tied weights",
    "weight norm",
    "averaged",
    "compiled",
    "extra state, a dictionary",
    "a packed projection, shown in parts",
    "a packed projection, shown in copies",
    "derived when loaded",
    "tensordict parameters in a module",
    "actor and critic",
    "vecnorm",
    "rllib ppo, recurrent",
]


@pytest.mark.ray
def test_an_actor_holds_and_computes_what_the_learner_does(ray_cluster: None, tmp_path: Path) -> None:
    actor: Any = ray.remote(num_cpus=0)(Keeper)
    keeper = actor.remote(BY_RAY)
    for name in BY_RAY:
        learner = born(name, 0)
        with (
            Registry.open(tmp_path, policy=name) as registry,
            RayRemoteWeightUpdater(
                learner, [keeper], registry=registry, names=["keeper"], locate=At(name)
            ) as updater,
        ):
            truths = []
            for _ in range(2):
                updater.update_weights().raise_for_failures()
                truths.append(truth(name, learner))
                assert ray.get(keeper.truth.remote(name), timeout=60) == truths[-1], name
                ZOO[name].change(learner)
            updater.rollback(to=1).raise_for_failures()
            assert truth(name, learner) == ray.get(keeper.truth.remote(name), timeout=60) == truths[0], name
            assert updater.probe()[0].matches, name
    ray.kill(keeper)

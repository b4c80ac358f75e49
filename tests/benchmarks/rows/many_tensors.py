"""Ten thousand small tensors, against one tensor of the same bytes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ray
import torch
from torch import nn

from tests.benchmarks import weights, workers
from tests.benchmarks.results import Limit, Result
from tests.benchmarks.setting import Setting
from tests.benchmarks.timing import Contender, interleave
from weightledger.registry import Registry
from weightledger.updater import RayRemoteWeightUpdater

MANY, ONE = "many tensors", "one tensor"
_EACH = 1024  # elements: 4 KB


class Pieces(nn.Module):
    """So many parameters of so many elements."""

    def __init__(self, pieces: int, elements: int) -> None:
        super().__init__()
        self.pieces = nn.ParameterList([torch.zeros(elements) for _ in range(pieces)])


class Holder:
    """A worker with both policies."""

    def __init__(self, pieces: int) -> None:
        self.many = Pieces(pieces, _EACH)
        self.one = Pieces(1, pieces * _EACH)


def measure(setting: Setting) -> Iterator[Result]:
    pieces, count = (100, 2) if setting.quick else (10_000, 4)
    learners = {"many": Pieces(pieces, _EACH), "one": Pieces(1, pieces * _EACH)}
    size = weights.nbytes(learners["one"])
    actor: Any = ray.remote(num_cpus=0)(Holder)
    with workers.cluster(8 * size):
        handles = [actor.remote(pieces) for _ in range(count)]
        with setting.folder() as folder:
            contenders, closing = [], []
            for attribute, name in (("many", MANY), ("one", ONE)):
                registry = Registry.open(folder / attribute)
                updater = RayRemoteWeightUpdater(
                    learners[attribute], handles, registry=registry, locate=attribute, timeout=workers.WAIT
                )
                closing += [updater, registry]
                contenders.append(_contender(name, updater, handles, attribute))
            seconds = interleave(contenders, 2 if setting.quick else 15)
            for each in closing:
                each.close()
    yield Result(
        "many-tensors",
        f"{pieces:,} × 4 KB, {count} workers",
        MANY,
        seconds[MANY],
        {ONE: seconds[ONE]},
        [Limit(2.0, ONE)],
        size=size,
        workers=count,
    )


def _contender(name: str, updater: RayRemoteWeightUpdater, handles: list[Any], attribute: str) -> Contender:
    learner = updater.policy_weights

    def check(report: Any, whole: bool) -> None:
        report.raise_for_failures()
        read = weights.digest if whole else weights.value
        found = ray.get(
            [handle.__ray_call__.remote(_read, attribute, whole) for handle in handles], timeout=60
        )
        assert found == [read(learner)] * len(handles)

    def tidy() -> None:
        updater.registry.prune(keep_last=1)

    return Contender(name, updater.update_weights, lambda: weights.change(learner), check, tidy)


def _read(holder: Any, attribute: str, whole: bool) -> Any:
    return (weights.digest if whole else weights.value)(getattr(holder, attribute))

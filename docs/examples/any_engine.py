# tests: run this
"""Weights for an engine that is not a module: it loads them by its own method, and is told which version they are.

Inference engines keep weights in a layout of their own, here one fused array in half precision, and take them by a
call of theirs. `apply=` is that call: `apply(actor, weights, version)`. What the engine answers counts: False or an
exception means that the version is not held, and what is held then is not known.

    python docs/examples/any_engine.py
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import ray
import torch
from torch import nn

from weightledger.registry import Registry
from weightledger.updater import RayRemoteWeightUpdater, held_version


class Engine:
    """Stands for an inference engine: fused weights in half precision, loaded while no request runs."""

    def __init__(self) -> None:
        self.fused = np.zeros((2, 5), np.float16)
        self.version: int | None = None
        self.loading = True

    def pause(self) -> None:
        """Take no requests from now on, so that no answer is a mix of two versions."""
        self.loading = True

    def load_weights(self, named: Iterable[tuple[str, torch.Tensor]], version: int) -> bool:
        """Load named tensors in the engine's own layout; False when they are none of its weights."""
        weights = dict(named)
        if weights.keys() != {"weight", "bias"}:
            return False
        if not all(torch.isfinite(tensor).all() for tensor in weights.values()):
            raise FloatingPointError(f"v{version} has numbers that half precision cannot hold")
        self.fused = torch.cat([weights["weight"], weights["bias"][:, None]], dim=1).half().numpy()
        self.version, self.loading = version, False
        return True

    def generate(self, prompt: list[float]) -> dict[str, Any]:
        """Answer, and tell which version answered; None when that is not known."""
        if self.loading:
            raise RuntimeError("the engine has no weights to answer with")
        answer = self.fused @ np.array([*prompt, 1.0], np.float16)
        return {"answer": answer.tolist(), "version": held_version(self), "engine": self.version}


def load(engine: Engine, weights: Mapping[str, torch.Tensor], version: int) -> bool:
    """Hand one version to an engine: what `apply=` is given. The tensors are its own to keep or change."""
    engine.pause()
    return engine.load_weights(weights.items(), version)


def main() -> None:
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)  # a cluster of its own
    actor: Any = ray.remote(num_cpus=0)(Engine)
    engines = [actor.remote() for _ in range(2)]
    policy = nn.Linear(4, 2)
    registry = Registry.open(tempfile.mkdtemp())
    updater = RayRemoteWeightUpdater(
        policy, engines, registry=registry, names=["engine-a", "engine-b"], apply=load, timeout=30
    )

    def train(value: float) -> None:
        with torch.no_grad():
            policy.weight.fill_(value)
            policy.bias.fill_(value)
        report = updater.update_weights()
        print(f"v{report.version}:", {out.name: (out.status, out.held) for out in report.workers.values()})

    def ask() -> None:
        for engine in engines:
            print("   ", ray.get(engine.generate.remote([1.0, 0.0, 0.0, 0.0]), timeout=30))

    train(1.0)
    train(2.0)
    ask()

    print("\nengine-b stays at v1")
    updater.pin(1, 1, reason="serves what was approved").raise_for_failures()
    train(3.0)
    ask()

    print("\nback to v2")
    updater.rollback(to=2, reason="v3 answers nonsense").raise_for_failures()
    ask()

    print("\nweights that the engine refuses are not counted as held")
    report = updater.update_weights({"weight": torch.ones(2, 4), "biases": torch.ones(2)}, restructure=True)
    print("   ", report.workers[0].status, "holds", report.workers[0].held, "-", report.workers[0].error)
    updater.rollback(to=2, reason="published under the wrong names").raise_for_failures()
    ask()

    for holding in registry.history(worker="engine-a"):
        print(f"engine-a held v{holding.version}: {holding.ended_how or 'it still does'}")
    updater.close()
    ray.shutdown()


if __name__ == "__main__":
    main()

"""Trainings of an earlier process, for tests of how a later one goes on.

Run as `python -m tests.updater.rllib_before FOLDER`: FOLDER/single and FOLDER/several are registries then,
FOLDER/checkpoint-<version> checkpoints, and FOLDER/seen.json tells what the learner's weights were at each version.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import ray
from ray.rllib.core.rl_module.rl_module import RLModuleSpec

from tests.updater.rllib_parts import MODULE, PATIENCE, config, learner_fingerprint, two_agents
from weightledger.updater.rllib import LedgerCallback, RLlibUpdater

LEDGER = "TESTS_RLLIB_LEDGER"
"""The environment variable that says where the registry is: a checkpoint keeps its callback."""


def where(algorithm: Any) -> str:
    return os.environ[LEDGER]


def single(folder: Path) -> dict[str, str]:
    """Train to version 4; checkpoints of versions 3 and 4 are kept."""
    os.environ[LEDGER] = str(folder / "single")
    algorithm = config(0).callbacks(LedgerCallback.at(where, timeout=PATIENCE)).build_algo()
    seen = {}
    for _ in range(3):
        algorithm.train()
        version = RLlibUpdater.of(algorithm)[MODULE].registry.head().number
        seen[f"v{version}"] = learner_fingerprint(algorithm, whole=True)
        algorithm.save_to_path(folder / f"checkpoint-{version}")
    algorithm.stop()
    return seen


def several(folder: Path) -> dict[str, str]:
    """Train two modules, and a third that is added later."""
    algorithm = two_agents(0).callbacks(LedgerCallback.at(folder / "several", timeout=PATIENCE)).build_algo()
    algorithm.train()
    algorithm.add_module("spare", RLModuleSpec.from_module(algorithm.get_module("main")))
    algorithm.train()
    seen = {module: learner_fingerprint(algorithm, module, whole=True) for module in ("main", "opponent")}
    algorithm.stop()
    return seen


def main(folder: Path) -> None:
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    (folder / "seen.json").write_text(json.dumps(single(folder) | several(folder)))
    ray.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

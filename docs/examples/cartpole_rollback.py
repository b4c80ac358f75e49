"""Learn CartPole on Ray, break the policy on purpose, roll it back, and prove from the record who ran what.

Four rollout workers follow the newest version of a policy; an evaluator is pinned to the alias `best`. When the
measured reward collapses, learner, optimizer and workers go back to `best`, and learning goes on. Nothing is staged but
the cause: the program ends with an error if the policy did not learn, did not collapse, or did not recover, or if one
batch carries a version that the record does not confirm.

    python docs/examples/cartpole_rollback.py [--registry runs/cartpole] [--seed 0]
"""

from __future__ import annotations

import argparse
import logging
import shlex
import subprocess
import sys
import time
from pathlib import Path
from statistics import fmean
from typing import Any

import ray
import torch
from cartpole_ppo import Batch, Learner, Player

from weightledger.registry import Registry, Version
from weightledger.updater import RayRemoteWeightUpdater

ROLLOUT_WORKERS = 4
LEARNED, COLLAPSED = 400.0, 40.0  # mean return of 32 episodes; 500 is perfect, 9 is the fastest way to fall


class Training:
    """One learner, four rollout workers and an evaluator, joined by the updater."""

    def __init__(self, registry: Registry, seed: int) -> None:
        self.registry, self.learner = registry, Learner()
        self.rollouts: list[Batch] = []  # the newest version's, to learn from
        self.batches: list[Batch] = []  # all of them, for the proof at the end
        self.steps, self.best = 0, -1.0
        names = [*(f"rollout-{index}" for index in range(ROLLOUT_WORKERS)), "evaluator"]
        actor: Any = ray.remote(num_cpus=0.25)(Player)
        self.players = [
            actor.remote(name, 100 * seed + index, greedy=name == "evaluator")
            for index, name in enumerate(names)
        ]
        self.updater = RayRemoteWeightUpdater(
            self.learner.policy,
            self.players,
            registry=registry,
            names=names,
            extra=self.learner.extra,  # stored with every version, never sent to workers
            on_rollback=self.restore_optimizer,
            start="new",  # what earlier runs left in the folder stays there, and is abandoned
        )
        self.updater.update_weights(worker_ids=[], message="untrained")  # published, sent to nobody yet
        registry.set_alias("best", "head")
        registry.pin("evaluator", "best", reason="plays whatever is best so far")

    def restore_optimizer(self, version: Version) -> None:
        # A policy that goes back while its optimizer stays is pushed the same wrong way again. Adam's state holds the
        # learning rate, too, so this also mends what broke it.
        self.learner.load_extra(self.registry.load_extra(version))

    def play(self, note: str = "") -> float:
        """Bring every worker to its target, let all of them play, and record what was measured."""
        report = self.updater.update_weights(step=self.steps, message=note)
        report.raise_for_failures()
        version = report.version
        assert version is not None, "something is published by now"
        *self.rollouts, evaluation = ray.get([player.play.remote() for player in self.players])
        self.batches += [*self.rollouts, evaluation]
        self.steps += sum(batch.steps for batch in self.rollouts)
        reward = fmean(value for batch in self.rollouts for value in batch.returns)
        self.registry.record_metrics(version, reward=reward)
        self.registry.record_metrics(evaluation.version, evaluation=fmean(evaluation.returns))
        mark = ""
        if reward > self.best:
            self.best, mark = reward, "best so far"
            self.registry.set_alias("best", version)  # the evaluator's pin follows at the next update
        bar = "█" * round(reward / 20)
        print(
            f"  v{version:<4}{self.steps:>8,} steps   return {reward:3.0f} {bar:<25}  {note or mark}",
            flush=True,
        )
        return reward

    def improve(self, note: str = "") -> float:
        """Learn from the newest rollouts, and measure what came of it."""
        self.learner.learn(self.rollouts)
        return self.play(note)


def is_proven(registry: Registry, batch: Batch) -> bool:
    """Tell whether the record confirms a batch's stamp from its first step to its last.

    A worker switches somewhere between the push of a version and its own receipt. So the stamp is certain if its
    receipt came before the batch began, and no other push left before the batch ended. (Begin and end are times of this
    machine, as the record's are; across machines the clocks would have to agree.)
    """
    overlapping = registry.history(worker=batch.player, since=batch.begun, until=batch.ended)
    return [row.version for row in overlapping] == [batch.version] and all(
        row.confirmed_at is not None and row.confirmed_at <= batch.begun for row in overlapping
    )


def show(registry: str, *arguments: str) -> None:
    """Run the command line as a user would, in a process of its own."""
    command = ["--registry", registry, *arguments]
    print(f"\n$ weightledger {shlex.join(command)}", flush=True)
    subprocess.run([sys.executable, "-m", "weightledger.registry.cli", *command], check=True)


def run(training: Training, registry: Registry, location: str) -> str:
    """Learn, break, roll back, learn on; return what went wrong, or nothing."""
    print("\nLearning: each line is one version, played by four workers.")
    rewards = [training.play()]
    while rewards[-1] < LEARNED:
        if len(rewards) > 80:
            return f"the policy did not learn: mean return {rewards[-1]:.0f} after 80 updates"
        rewards.append(training.improve())

    print("\nBreaking it: somebody sets the learning rate to 10.")
    training.learner.optimizer.param_groups[0]["lr"] = 10.0
    broken: list[float] = []
    while len(broken) < 3 or max(broken[-3:]) > COLLAPSED:
        if len(broken) == 12:
            return f"the policy did not collapse: mean returns {broken}"
        broken.append(training.improve("learning rate 10"))
    abandoned = registry.head()

    print(
        f"\nThe return fell from {training.best:.0f} to {broken[-1]:.0f}. Rolling back to the alias `best`:"
    )
    started = time.perf_counter()
    report = training.updater.rollback("best", reason=f"reward collapsed to {broken[-1]:.0f}")
    report.raise_for_failures()
    milliseconds = 1000 * (time.perf_counter() - started)
    head = registry.head()
    print(
        f"  v{head.number} restores v{head.restores} in the learner, its critic and optimizer, and on "
        f"{len(report.workers)} workers, in {milliseconds:.0f} ms"
    )
    print("\nLearning goes on from there.")
    recovered = [
        training.play(f"the weights of v{head.restores} again"),
        *(training.improve() for _ in range(6)),
    ]

    show(location, "log", "-n", str(len(broken) + 12))
    show(location, "status")
    show(location, "audit", "--version", str(abandoned.number))

    doubtful = [batch for batch in training.batches if not is_proven(registry, batch)]
    proven = len(training.batches) - len(doubtful)
    print(
        f"\n{proven} of {len(training.batches)} batches ({sum(batch.steps for batch in training.batches):,} steps): "
        "the record confirms the version that they are stamped with."
    )
    if doubtful:
        return "unproven stamps: " + ", ".join(f"{batch.player} v{batch.version}" for batch in doubtful)
    if fmean(recovered[-3:]) < LEARNED / 2:
        return f"the policy did not recover: mean returns {recovered}"
    print(
        f"Mean return: {max(rewards):.0f} learnt, {broken[-1]:.0f} broken, {fmean(recovered[-3:]):.0f} at the end."
    )
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--registry", default="runs/cartpole", help="its folder (default: %(default)s)")
    parser.add_argument(
        "--seed", type=int, default=0, help="another one learns another way (default: %(default)s)"
    )
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)
    print("Starting Ray …", flush=True)
    ray.init(
        address="local",  # a cluster of its own, whatever RAY_ADDRESS says
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=200_000_000,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    with Registry.open(options.registry) as registry:
        if earlier := registry.versions(limit=1):
            print(
                f"\n{options.registry} has versions up to v{earlier[0].number}, of earlier runs. This one trains from "
                "scratch, so that it begins a new line."
            )
        training = Training(registry, options.seed)
        with training.updater:
            trouble = run(training, registry, options.registry)
    ray.shutdown()
    if trouble:
        print(f"error: {trouble}", file=sys.stderr)
        return 1

    script = Path(sys.executable).with_name("weightledger")
    command = script.relative_to(Path.cwd()) if script.is_relative_to(Path.cwd()) else script
    print("\nThe registry is still there. Try:")
    for arguments in (
        "log",
        "diff best head",
        "audit --worker rollout-0",
        "rollback --to best --reason 'why not'",
    ):
        print(f"  {shlex.join([str(command), '--registry', options.registry])} {arguments}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Learn CartPole on Ray, break the policy on purpose, roll it back, and prove from the record who ran what.

Four rollout workers follow the newest version of a policy; an evaluator is pinned to the alias `best`. When the
measured reward collapses, learner, optimizer and workers go back to `best`, and learning goes on. Nothing is staged but
the cause: the program ends with an error if the policy did not learn, did not collapse, or did not recover.

    python docs/examples/cartpole_rollback.py [--registry runs/cartpole] [--seed 0]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from statistics import fmean

import gymnasium as gym
import ray
import torch
from torch import nn
from torch.distributions import Categorical

from weightledger.registry import Holding, Registry, Version
from weightledger.updater import RayRemoteWeightUpdater, held_version

ROLLOUT_WORKERS = 4
ENVS = 8  # episodes that a worker plays side by side
LEARNED, COLLAPSED = (
    400.0,
    40.0,
)  # mean return of 32 episodes; 500 is perfect, about 9 is the fastest way to fall
GAMMA, LAMBDA, CLIP = 0.99, 0.95, 0.2


def network(outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs))


@dataclass
class Batch:
    """Whole episodes, one a column; time runs down the rows, and `alive` tells which rows an episode reached."""

    worker: str
    version: int | None  # the stamp: what the worker held when it played these
    begun: datetime
    ended: datetime
    observations: torch.Tensor  # one row more than the others: what was seen last
    actions: torch.Tensor
    log_probs: torch.Tensor
    alive: torch.Tensor
    fell: torch.Tensor  # by column: False if the pole still stood when time was up

    @property
    def returns(self) -> list[float]:
        return self.alive.sum(0).tolist()  # CartPole pays 1 a step


class Player:
    """A Ray actor with a policy of its own. It knows of weightledger only to stamp its batches."""

    def __init__(self, name: str, seed: int) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(seed)
        self.name = name
        self.policy = network(
            2
        )  # the updater finds it by its name, `policy`, and writes into it between two calls
        self.envs = gym.make_vec("CartPole-v1", num_envs=ENVS)
        self.envs.reset(seed=seed)

    @torch.no_grad()
    def play(self, *, greedy: bool = False) -> Batch:
        """Play one episode in each environment, to its end: a return then belongs to exactly one version."""
        version, begun = held_version(self), datetime.now(UTC)
        observation = torch.as_tensor(self.envs.reset()[0])
        alive = torch.ones(ENVS, dtype=torch.bool)
        fell = torch.zeros(ENVS, dtype=torch.bool)
        observations, rows = [observation], []
        while alive.any():
            logits = self.policy(observation)
            choice = Categorical(logits=logits)
            action = logits.argmax(1) if greedy else choice.sample()
            rows.append((action, choice.log_prob(action), alive))
            seen, _, terminated, truncated, _ = self.envs.step(action.numpy())
            observation = torch.as_tensor(seen)
            observations.append(observation)
            fell = fell | (alive & torch.as_tensor(terminated))
            alive = alive & ~torch.as_tensor(terminated | truncated)
        actions, log_probs, lived = (torch.stack(column) for column in zip(*rows, strict=True))
        return Batch(
            self.name,
            version,
            begun,
            datetime.now(UTC),
            torch.stack(observations),
            actions,
            log_probs,
            lived,
            fell,
        )


class Learner:
    """PPO with a critic. Only the policy is published; critic and optimizer are kept beside each version."""

    def __init__(self) -> None:
        self.policy, self.critic = network(2), network(1)
        self.optimizer = torch.optim.Adam([*self.policy.parameters(), *self.critic.parameters()], lr=2.5e-3)

    def extra(self) -> dict[str, object]:
        return {"critic": self.critic.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_extra(self, extra: dict[str, dict[str, object]]) -> None:
        self.critic.load_state_dict(extra["critic"])
        self.optimizer.load_state_dict(extra["optimizer"])

    def learn(self, batches: Iterable[Batch]) -> None:
        parts = [self._samples(batch) for batch in batches]
        observations, actions, log_probs, advantages, targets = (
            torch.cat(column) for column in zip(*parts, strict=True)
        )
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        for _ in range(4):
            for chosen in torch.randperm(len(actions)).split(max(128, len(actions) // 8)):
                now = Categorical(logits=self.policy(observations[chosen])).log_prob(actions[chosen])
                ratio = (now - log_probs[chosen]).clamp(-20, 20).exp()
                gain = torch.min(
                    ratio * advantages[chosen], ratio.clamp(1 - CLIP, 1 + CLIP) * advantages[chosen]
                )
                error = self.critic(observations[chosen]).squeeze(1) - targets[chosen]
                self.optimizer.zero_grad()
                (nn.functional.smooth_l1_loss(error, torch.zeros_like(error)) - gain.mean()).backward()
                nn.utils.clip_grad_norm_(self.policy.parameters(), 0.5)
                nn.utils.clip_grad_norm_(self.critic.parameters(), 0.5)
                self.optimizer.step()

    @torch.no_grad()
    def _samples(self, batch: Batch) -> tuple[torch.Tensor, ...]:
        """Return what the episodes' living rows give: observations, actions, log probs, advantages, value targets."""
        values = self.critic(batch.observations).squeeze(2)
        advantages = torch.zeros(batch.alive.shape)
        following = torch.zeros(ENVS)
        last = batch.alive.sum(0) - 1
        for t in reversed(range(len(advantages))):
            # Nothing follows a fall; an episode that was only cut short would have gone on.
            ahead = values[t + 1] * ~((last == t) & batch.fell)
            following = 1 + GAMMA * ahead - values[t] + GAMMA * LAMBDA * following * (last > t)
            advantages[t] = following
        targets = advantages + values[:-1]
        flat = (batch.observations[:-1], batch.actions, batch.log_probs, advantages, targets)
        return tuple(column[batch.alive] for column in flat)


class Training:
    """One learner, four rollout workers and an evaluator, joined by the updater."""

    def __init__(self, registry: Registry, seed: int) -> None:
        self.registry, self.learner = registry, Learner()
        self.batches: list[Batch] = []  # all of them, for the proof at the end
        self.rollouts: list[Batch] = []  # the newest version's, to learn from
        self.steps, self.best = 0, -1.0
        names = [*(f"rollout-{index}" for index in range(ROLLOUT_WORKERS)), "evaluator"]
        actor = ray.remote(num_cpus=0.25)(Player)
        self.players = [actor.remote(name, 100 * seed + index) for index, name in enumerate(names)]
        self.updater = RayRemoteWeightUpdater(
            self.learner.policy,
            self.players,
            registry=registry,
            names=names,
            extra=self.learner.extra,
            on_rollback=self.restore_learner,
        )
        self.updater.update_weights(message="untrained").raise_for_failures()
        registry.set_alias("best", "head")
        registry.pin("evaluator", "best", reason="plays whatever is best so far")

    def restore_learner(self, version: Version) -> None:
        # A policy that goes back while its optimizer stays is pushed the same wrong way again. Adam's state holds the
        # learning rate, too, so this also mends what broke it.
        self.learner.load_extra(self.registry.load_extra(version))

    def play(self, note: str = "") -> float:
        """Bring every worker to its target, let all of them play, and record what was measured."""
        report = self.updater.update_weights(step=self.steps, message=note)
        report.raise_for_failures()
        *self.rollouts, evaluation = ray.get(
            [player.play.remote(greedy=player is self.players[-1]) for player in self.players]
        )
        self.batches += [*self.rollouts, evaluation]
        self.steps += sum(int(batch.alive.sum()) for batch in self.rollouts)
        reward = fmean(value for batch in self.rollouts for value in batch.returns)
        self.registry.record_metrics(report.version, reward=reward)
        self.registry.record_metrics(evaluation.version, evaluation=fmean(evaluation.returns))
        if reward > self.best:
            self.best = reward
            self.registry.set_alias("best", report.version)  # the evaluator's pin follows at the next update
        print(
            f"  v{report.version:<4}{self.steps:>8,} steps   return {reward:5.0f} {'█' * round(reward / 20):<25}"
            f"   best v{self.registry.aliases()['best']:<4} {note}",
            flush=True,
        )
        return reward

    def improve(self, note: str = "") -> float:
        self.learner.learn(self.rollouts)
        return self.play(note)


def unproven(registry: Registry, batches: list[Batch]) -> list[Batch]:
    """Return the batches whose stamp the record does not confirm.

    A worker switches somewhere between the push of a version and its receipt. So it certainly held one from that one's
    receipt until the next push left, and a batch has to lie between the two. (Times of one machine are compared here;
    across machines their clocks would have to agree.)
    """
    certain: dict[tuple[str, int | None], list[tuple[datetime, datetime]]] = {}
    for worker in {batch.worker for batch in batches}:
        rows: list[Holding | None] = [*registry.history(worker=worker), None]
        for row, following in pairwise(rows):
            if row is not None and row.confirmed_at is not None:
                ends = [row.ended_at, following and following.pushed_at]
                until = min((end for end in ends if end is not None), default=datetime.now(UTC))
                certain.setdefault((worker, row.version), []).append((row.confirmed_at, until))
    return [
        batch
        for batch in batches
        if not any(
            start <= batch.begun and batch.ended <= until
            for start, until in certain.get((batch.worker, batch.version), [])
        )
    ]


def show(registry: Registry, *arguments: str) -> None:
    """Run the command line as a user would, in a process of its own."""
    print(f"\n$ weightledger {' '.join(arguments)}", flush=True)
    program = [sys.executable, "-m", "weightledger.registry.cli", "--registry", str(registry.location)]
    subprocess.run([*program, *arguments], check=True)


def run(registry: Registry, seed: int) -> str:
    """Learn, break, roll back, learn on; return what went wrong, or nothing."""
    training = Training(registry, seed)
    print("\nLearning: each line is one version, played by four workers.")
    reward, rounds = training.play(), 0
    while reward < LEARNED:
        if rounds == 80:
            return f"the policy did not learn: mean return {reward:.0f} after {rounds} updates"
        reward, rounds = training.improve(), rounds + 1

    print("\nBreaking it: somebody sets the learning rate to 10.")
    training.learner.optimizer.param_groups[0]["lr"] = 10.0
    collapsed: list[float] = []
    while len(collapsed) < 3 or max(collapsed[-3:]) > COLLAPSED:
        if len(collapsed) == 12:
            return f"the policy did not collapse: mean returns {collapsed}"
        collapsed.append(training.improve("learning rate 10"))
    broken = registry.head()

    print(f"\nReward collapsed from {training.best:.0f} to {collapsed[-1]:.0f}: back to the alias `best`.")
    started = time.perf_counter()
    report = training.updater.rollback("best", reason=f"reward collapsed to {collapsed[-1]:.0f}")
    report.raise_for_failures()
    milliseconds = 1000 * (time.perf_counter() - started)
    head = registry.head()
    print(
        f"  v{head.number} restores v{head.restores}: learner, critic, optimizer and {len(report.workers)} workers "
        f"in {milliseconds:.0f} ms"
    )

    print("\nLearning goes on from there.")
    recovered = [training.play(f"the weights of v{head.restores}"), *(training.improve() for _ in range(6))]

    show(registry, "log", "-n", str(len(collapsed) + 12))
    show(registry, "status")
    show(registry, "audit", "--version", str(broken.number))

    doubtful = unproven(registry, training.batches)
    played = sum(batch.alive.sum().item() for batch in training.batches)
    print(
        f"\n{len(training.batches) - len(doubtful)} of {len(training.batches)} batches ({played:,} steps) carry the "
        "version that the record says their worker held, all through the batch."
    )
    training.updater.close()
    if doubtful:
        return "stamps that the record does not confirm: " + ", ".join(
            f"{batch.worker} v{batch.version} at {batch.begun:%H:%M:%S.%f}" for batch in doubtful
        )
    if fmean(recovered[-3:]) < LEARNED / 2:
        return f"the policy did not recover: mean returns {recovered}"
    print(
        f"Mean return: {training.best:.0f} at best, {collapsed[-1]:.0f} broken, {fmean(recovered[-3:]):.0f} now."
    )
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--registry", default="runs/cartpole", help="folder of the registry (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)
    ray.init(
        address="local",  # a cluster of its own, whatever RAY_ADDRESS says
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=200_000_000,
        log_to_driver=False,
        logging_level="ERROR",
    )
    with Registry.open(options.registry) as registry:
        trouble = run(registry, options.seed)
    ray.shutdown()
    if trouble:
        print(f"error: {trouble}", file=sys.stderr)
        return 1
    beside = Path(sys.executable).with_name("weightledger")
    command = f"{beside if beside.exists() else 'weightledger'} --registry {options.registry}"
    print("\nThe registry is still there. Try:")
    for arguments in (
        "log",
        "diff best head",
        "audit --worker rollout-0",
        "rollback --to best --reason 'why not'",
    ):
        print(f"  {command} {arguments}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

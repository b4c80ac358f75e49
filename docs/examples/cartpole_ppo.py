"""The learning part of `cartpole_rollback.py`: plain PPO in plain PyTorch, and the actor that plays.

It knows weightledger by one call: a player asks which version it holds, to stamp what it plays.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import gymnasium as gym
import torch
from torch import Tensor, nn

from weightledger.updater import held_version

ENVS = 8  # episodes that one player plays side by side
GAMMA, LAMBDA, CLIP = 0.99, 0.95, 0.2


def network(outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs))


@dataclass
class Batch:
    """Whole episodes, one a column, time running down the rows."""

    player: str
    version: int | None
    """The stamp: what the player held when it played these."""
    begun: datetime
    ended: datetime
    observations: Tensor
    """One row more than the others: what was seen last."""
    actions: Tensor
    log_probs: Tensor
    alive: Tensor
    """Which rows an episode reached."""
    fell: Tensor
    """By column: False if the pole still stood when time was up."""

    @property
    def returns(self) -> list[float]:
        return [float(steps) for steps in self.alive.sum(0)]  # CartPole pays 1 a step

    @property
    def steps(self) -> int:
        return int(self.alive.sum())


class Player:
    """An actor with a policy of its own, into which the updater writes between two calls."""

    def __init__(self, name: str, seed: int, *, greedy: bool = False) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(seed)
        self.name, self.greedy = name, greedy
        self.policy = network(2)
        self.envs = gym.make_vec("CartPole-v1", num_envs=ENVS)
        self.envs.reset(seed=seed)

    @torch.no_grad()
    def play(self) -> Batch:
        """Play one episode in each environment, to its end: a return then belongs to exactly one version."""
        version, begun = held_version(self), datetime.now(UTC)
        observation = torch.as_tensor(self.envs.reset()[0])
        alive, fell = torch.ones(ENVS, dtype=torch.bool), torch.zeros(ENVS, dtype=torch.bool)
        observations, rows = [observation], []
        while alive.any():
            logits = self.policy(observation).log_softmax(1)
            action = logits.argmax(1) if self.greedy else logits.exp().multinomial(1).squeeze(1)
            rows.append((action, logits.gather(1, action[:, None]).squeeze(1), alive))
            seen, _, terminated, truncated, _ = self.envs.step(action.numpy())
            observation = torch.as_tensor(seen)
            observations.append(observation)
            fell = fell | (alive & torch.as_tensor(terminated))
            alive = alive & ~torch.as_tensor(terminated | truncated)
        actions, log_probs, lived = (torch.stack(column) for column in zip(*rows, strict=True))
        seen_all = torch.stack(observations)
        return Batch(self.name, version, begun, datetime.now(UTC), seen_all, actions, log_probs, lived, fell)


class Learner:
    """PPO with a critic. Only the policy is for the players; critic and optimizer are kept beside it."""

    def __init__(self) -> None:
        self.policy, self.critic = network(2), network(1)
        self.optimizer = torch.optim.Adam([*self.policy.parameters(), *self.critic.parameters()], lr=2.5e-3)

    def extra(self) -> dict[str, Any]:
        return {"critic": self.critic.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_extra(self, extra: dict[str, Any]) -> None:
        self.critic.load_state_dict(extra["critic"])
        self.optimizer.load_state_dict(extra["optimizer"])

    def learn(self, batches: Iterable[Batch]) -> None:
        parts = zip(*(self._samples(batch) for batch in batches), strict=True)
        observations, actions, log_probs, advantages, targets = (torch.cat(part) for part in parts)
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        size = max(128, len(actions) // 8)
        for _ in range(4):
            order = torch.randperm(len(actions))
            for chosen in (order[start : start + size] for start in range(0, len(order), size)):
                logits = self.policy(observations[chosen]).log_softmax(1)
                now = logits.gather(1, actions[chosen][:, None]).squeeze(1)
                ratio = (now - log_probs[chosen]).clamp(-20, 20).exp()
                gain = advantages[chosen]
                clipped = torch.min(ratio * gain, ratio.clamp(1 - CLIP, 1 + CLIP) * gain)
                error = nn.functional.smooth_l1_loss(self.critic(observations[chosen])[:, 0], targets[chosen])
                self.optimizer.zero_grad()
                (error - clipped.mean()).backward()
                nn.utils.clip_grad_norm_(self.policy.parameters(), 0.5)
                nn.utils.clip_grad_norm_(self.critic.parameters(), 0.5)
                self.optimizer.step()

    @torch.no_grad()
    def _samples(self, batch: Batch) -> tuple[Tensor, ...]:
        """Return observations, actions, log probabilities, advantages and value targets of the living rows."""
        values = self.critic(batch.observations).squeeze(2)
        advantages = torch.zeros(batch.alive.shape)
        advantage = torch.zeros(ENVS)
        last = batch.alive.sum(0) - 1
        for t in reversed(range(len(advantages))):
            # Nothing follows a fall; an episode that was only cut short would have gone on.
            ahead = values[t + 1] * ~((last == t) & batch.fell)
            advantage = 1 + GAMMA * ahead - values[t] + GAMMA * LAMBDA * advantage * (last > t)
            advantages[t] = advantage
        rows = (batch.observations[:-1], batch.actions, batch.log_probs, advantages, advantages + values[:-1])
        return tuple(row[batch.alive] for row in rows)

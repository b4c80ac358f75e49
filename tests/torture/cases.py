"""What the children do while calls are counted: everything that writes to a registry.

Each scenario begins with what its `prepare` made, and tells a story of what it does.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from alembic import command
from torch import Tensor, nn

from tests.torture import shim
from tests.torture.story import Story
from weightledger.registry import Registry
from weightledger.registry.database.sqlite import SqliteDatabase
from weightledger.registry.log import schema
from weightledger.registry.store.publishing import INLINE_BYTES
from weightledger.updater.testing import FakeWorkers

SMALL = 4
BIG = INLINE_BYTES // 4 + 1000
"""Elements of weights that a thread of their own writes to disk."""


class Policy(nn.Module):
    """Weights that tell by every element which value they were made of."""

    def __init__(self, value: float, size: int = SMALL) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.empty(size))
        self.b = nn.Parameter(torch.empty(2))
        self.fill(value)

    def fill(self, value: float) -> None:
        with torch.no_grad():
            self.w.fill_(value)
            self.b.copy_(torch.tensor([value, -value]))


def value_of(state: dict[str, Tensor]) -> float | None:
    """Return the value that weights were made of; None for a mix."""
    value = state["b"][0].item()
    whole = list(state) == ["w", "b"] and bool((state["w"] == value).all()) and state["b"][1].item() == -value
    return value if whole else None


def extra_of(value: float, size: int) -> dict[str, Any]:
    return {"momentum": torch.full((size,), -float(value)), "epoch": int(value)}


@dataclass(frozen=True)
class Scenario:
    """What a child does."""

    name: str
    run: Callable[[Path, Story], None]
    prepare: Callable[[Path, Story], None]


def place(root: Path) -> Path:
    """Return the folder of the registry in the folder whose calls are counted."""
    return root / "r"


def run(name: str, root: Path, told: Path, plan: shim.Plan, trace: Path | None = None) -> None:
    """Run a scenario with the calls under its folder counted. Called in a child of the zygote."""
    errors = "" if plan.action < shim.Action.FAIL else "on" if plan.again else "once"
    story = Story(told, errors)
    into = -1 if trace is None else os.open(trace, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    shim.arm(root, plan, into)
    SCENARIOS[name].run(root, story)


def prepare(name: str, root: Path, told: Path) -> None:
    """Make what a scenario begins with. Called in a child of the zygote."""
    SCENARIOS[name].prepare(root, Story(told))


# ---------------------------------------------------------------------- what they are made of


def opened(root: Path, story: Story) -> Registry:
    registry = story.call("open", lambda: Registry.open(place(root)))
    assert isinstance(registry, Registry)
    return registry


def publish(registry: Registry, story: Story, value: float, size: int = SMALL, extra: bool = False) -> None:
    story.call(
        "publish",
        lambda: registry.publish(
            Policy(value, size),
            step=int(value),
            metrics={"reward": value},
            metadata={"value": value},
            extra=extra_of(value, size) if extra else None,
        ),
        policy=registry.policy,
        value=value,
        extra=extra,
    )


def close(registry: Registry, story: Story) -> None:
    story.call("close", registry.close)


def with_versions(count: int, size: int = SMALL) -> Callable[[Path, Story], None]:
    def make(root: Path, story: Story) -> None:
        registry = opened(root, story)
        for value in range(1, count + 1):
            publish(registry, story, value, size)
        close(registry, story)

    return make


def nothing(root: Path, story: Story) -> None:
    """Begin with no registry at all."""


# ---------------------------------------------------------------------- scenarios


def publish_small(root: Path, story: Story) -> None:
    registry = opened(root, story)
    publish(registry, story, 10)
    publish(registry, story, 11, extra=True)
    close(registry, story)


def publish_big(root: Path, story: Story) -> None:
    registry = opened(root, story)
    publish(registry, story, 10, BIG, extra=True)
    close(registry, story)


def publish_equal(root: Path, story: Story) -> None:
    """Content that is stored already, and content that another policy has."""
    registry = opened(root, story)
    publish(registry, story, 1)
    other = story.call("open", lambda: registry.for_policy("other"))
    publish(other, story, 1)
    publish(other, story, 20)
    publish(registry, story, 20)
    close(other, story)
    close(registry, story)


def roll_back(root: Path, story: Story) -> None:
    registry = opened(root, story)
    story.call("rollback", lambda: registry.rollback(1, reason="torture"), policy="default", value=1)
    publish(registry, story, 10)
    story.call("rollback", registry.rollback, policy="default", value=1)
    close(registry, story)


def many_with_names(root: Path, story: Story) -> None:
    registry = opened(root, story)
    for value in range(1, 7):
        publish(registry, story, value, extra=value % 2 == 0)
    story.call("set_alias", lambda: registry.set_alias("good", 2), alias=["good", 2])
    story.call("pin", lambda: registry.pin("w0", 3), pin=["w0", 3])
    close(registry, story)


def prune(root: Path, story: Story) -> None:
    """v2 has an alias, v3 a pin, v5 and v6 are the newest."""
    registry = opened(root, story)
    story.call("prune", lambda: registry.prune(keep_last=2), policy="default", gone=[1, 4], may_go=[])
    publish(registry, story, 10)
    story.call("prune", lambda: registry.prune(keep_last=2), policy="default", gone=[1, 4, 5], may_go=[6])
    close(registry, story)


def name(root: Path, story: Story) -> None:
    registry = opened(root, story)
    story.call("set_alias", lambda: registry.set_alias("good", 4), alias=["good", 4])
    story.call("set_alias", lambda: registry.set_alias("best-one", 5), alias=["best-one", 5])
    story.call("pin", lambda: registry.pin("w*", "good"), pin=["w*", 4])
    story.call("pin", lambda: registry.pin("w0", 5), pin=["w0", 5])
    story.call("unpin", lambda: registry.unpin("w0"), pin=["w0", None])
    story.call("delete_alias", lambda: registry.delete_alias("best-one"), alias=["best-one", None])
    story.call("record_metrics", lambda: registry.record_metrics(2, score=0.5), score=[2, 0.5])
    close(registry, story)


class Watched(FakeWorkers):
    """Tells what really is in a worker after each push, by looking at its tensors."""

    story: Story

    def _sync_weights_with_worker(self, worker_id: int, server_weights: Any) -> Any:
        answer = super()._sync_weights_with_worker(worker_id, server_weights)
        state = dict(self.worker(worker_id).policy.named_parameters())
        self.story.say("got", worker=f"w{worker_id}", value=value_of(state))
        return answer


def update(root: Path, story: Story) -> None:
    registry = opened(root, story)
    learner = Policy(0)
    workers = [Policy(-1), Policy(-2), Policy(-3)]

    def begin() -> Watched:
        return Watched(learner, workers, registry=registry, names=["w0", "w1", "w2"], timeout=5)

    updater = story.call("begin", begin)
    updater.story = story

    def learn(value: float) -> int:
        learner.fill(value)
        report = story.call(
            "update", lambda: updater.update_weights(step=int(value)), policy="default", value=value
        )
        number = report.version
        assert isinstance(number, int)
        return number

    first = learn(1)
    second = learn(2)
    story.call("pin", lambda: registry.pin("w2", first), pin=["w2", first])
    learn(3)
    story.call("updater.rollback", lambda: updater.rollback(second), policy="default", value=2)
    learn(4)
    story.call("close", updater.close)
    close(registry, story)


def export(root: Path, story: Story) -> None:
    registry = opened(root, story)
    target = root / "out.safetensors"
    for number in (1, 2):
        story.call("export", lambda number=number: registry.export(number, target), exported=number)
    close(registry, story)


def older(root: Path, story: Story) -> None:
    """Make a registry, and take it down to the first schema."""
    many_with_names(root, story)
    database = SqliteDatabase(place(root) / "registry.db")
    with database.rebuilding() as conn:
        command.downgrade(schema.alembic_config(conn), "0001")
    database.close()


SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario("first publish", publish_small, nothing),
        Scenario("publish", publish_small, with_versions(2)),
        Scenario("big publish", publish_big, with_versions(1, BIG)),
        Scenario("equal publish", publish_equal, with_versions(2)),
        Scenario("rollback", roll_back, with_versions(3)),
        Scenario("prune", prune, many_with_names),
        Scenario("names", name, many_with_names),
        Scenario("migration", publish_small, older),
        Scenario("update", update, nothing),
        Scenario("export", export, with_versions(2)),
    )
}


def two_writers(root: Path, told: Path, told_by_other: Path, plan: shim.Plan) -> int:
    """Publish from two processes at once, one of which the plan meets; returns how that one ended."""
    child = os.fork()
    if child == 0:
        story = Story(told)
        shim.arm(root, plan)
        registry = opened(root, story)
        for value in range(100, 104):
            publish(registry, story, value)
        os._exit(0)
    story = Story(told_by_other)
    registry = opened(root, story)
    for value in range(200, 206):
        publish(registry, story, value)
    story.call("set_alias", lambda: registry.set_alias("other", 1), alias=["other", 1])
    _, status = os.waitpid(child, 0)
    publish(registry, story, 206)
    close(registry, story)
    return os.waitstatus_to_exitcode(status)

"""Writes into a worker's weights that are not ours: noticed by the worker at once, and mended by the next update."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictParams
from torch import nn
from torchrl.envs import VecNormV2
from torchrl.modules import EGreedyModule, NoisyLinear

from weightledger.registry import Registry
from weightledger.updater import acting, held_version
from weightledger.updater.testing import FakeWorkers, statuses

Write = Callable[[Any], object]


def net(value: float) -> nn.Sequential:
    return fill(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)), value)


def fill(module: Any, value: float) -> Any:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(value)
    return module


def values(module: Any) -> set[float]:
    return {float(number) for each in module.parameters() for number in each.detach().flatten()}


def hashes(module: nn.Module) -> dict[str, bytes]:
    """Hash every tensor and extra state of a module."""
    found = {}
    for name, item in module.state_dict().items():
        for key, part in item.items() if isinstance(item, dict) else [("", item)]:
            data = part.detach().numpy().tobytes() if isinstance(part, torch.Tensor) else repr(part).encode()
            found[f"{name}.{key}" if key else name] = hashlib.sha256(data).digest()
    return found


class Fleet(FakeWorkers):
    """Counts what is sent."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.pushes: list[int] = []
        self.questions: list[int] = []
        super().__init__(*arguments, **options)

    def _sync_weights_with_worker(self, worker_id: int, server_weights: Any) -> Any:
        self.pushes.append(worker_id)
        return super()._sync_weights_with_worker(worker_id, server_weights)

    def _ask(self, worker: Any, question: Any) -> Any:
        self.questions.append(worker.id)
        return super()._ask(worker, question)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Fleet]]:
    made: list[Any] = []

    def begin(learner: Any = None, policies: list[Any] | None = None, **options: Any) -> Fleet:
        learner = net(1.0) if learner is None else learner
        policies = [net(-1.0) for _ in range(2)] if policies is None else policies
        registry = Registry.open(tmp_path / str(len(made)))
        made.append(Fleet(learner, policies, registry=registry, **options))
        return made[-1]

    yield begin
    for fleet in made:
        fleet.close()
        fleet.registry.close()


def step(module: Any) -> None:
    optimizer = torch.optim.Adam(module.parameters(), lr=1.0)
    module(torch.randn(8, 3)).sum().backward()
    optimizer.step()


def replace_parameter(module: Any) -> None:
    module[2].weight = nn.Parameter(torch.full((2, 4), 9.0))


def through_numpy(module: Any) -> None:
    module[0].weight.detach().numpy()[:] = 9.0


def by_another_memory(module: Any) -> None:
    module[0].weight.data = torch.full((4, 3), 9.0)


WRITES: dict[str, Write] = {
    "load_state_dict": lambda module: module.load_state_dict(net(9.0).state_dict()),
    "load_state_dict(assign=True)": lambda module: module.load_state_dict(net(9.0).state_dict(), assign=True),
    "an optimizer": step,
    "one element": lambda module: (
        fill(module[2].bias[:1].detach(), 9.0) if False else module[2].bias.detach()[0].fill_(9.0)
    ),
    "parameter.data.copy_": lambda module: module[2].weight.data.copy_(torch.full((2, 4), 9.0)),
    "parameter.data = …": by_another_memory,
    "TensorDict.data.update_": lambda module: TensorDict.from_module(module).data.update_(  # pyright: ignore[reportAttributeAccessIssue]
        TensorDict.from_module(net(9.0)).data  # pyright: ignore[reportAttributeAccessIssue]
    ),
    "a parameter that was replaced": replace_parameter,
    "a part that was replaced": lambda module: module.__setitem__(2, fill(nn.Linear(4, 2), 9.0)),
    "NumPy": through_numpy,
    "another precision": lambda module: module.half(),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_what_the_workers_own_code_writes_is_noticed_and_the_next_update_pushes(
    make: Callable[..., Fleet], write: Write
) -> None:
    fleet = make()
    assert fleet.update_weights().ok
    worker = fleet.worker(0)
    write(worker.policy)
    assert held_version(worker) is None
    with acting(worker) as version:
        assert version is None
    if worker.policy[0].weight.dtype == torch.half:
        worker.policy.float()

    report = fleet.update_weights()

    assert statuses(report.workers) == {"fake-0": "synced", "fake-1": "current"}
    assert "somebody wrote into its weights" in report.workers[0].error
    assert values(worker.policy) == {1.0}
    assert held_version(worker) == 1
    ended, held = fleet.registry.history(worker="fake-0")
    assert (ended.ended_how, held.ended_how) == ("drifted", None)
    assert ended.ended_at == ended.confirmed_at, "the last evidence"
    assert [event.kind for event in fleet.registry.events(worker="fake-0")] == ["drift"]
    assert statuses(fleet.update_weights().workers) == {"fake-0": "current", "fake-1": "current"}


def test_a_policy_that_was_replaced_is_noticed(make: Callable[..., Fleet]) -> None:
    fleet = make()
    fleet.update_weights()
    fleet.worker(1).policy = net(9.0)
    assert held_version(fleet.worker(1)) is None
    assert statuses(fleet.update_weights().workers) == {"fake-0": "current", "fake-1": "synced"}
    assert values(fleet.worker(1).policy) == {1.0} and held_version(fleet.worker(1)) == 1


def test_a_write_to_a_few_elements_that_nobody_counts_is_found_by_a_probe_only(
    make: Callable[..., Fleet],
) -> None:
    """The limit that is documented."""
    fleet = make(nn.Linear(1000, 2), [nn.Linear(1000, 2)])
    fleet.update_weights()
    fleet.worker(0).policy.weight.data[0, 0] += 1.0
    assert held_version(fleet.worker(0)) == 1
    assert statuses(fleet.update_weights().workers) == {"fake-0": "current"}
    found = fleet.probe()[0]
    assert (found.matches, found.drift) == (False, ("weight",))
    assert statuses(fleet.update_weights().workers) == {"fake-0": "synced"}
    assert torch.equal(fleet.worker(0).policy.weight, fleet.policy_weights.weight)


def test_equal_bytes_written_by_others_are_what_was_sent_once_a_probe_has_seen_them(
    make: Callable[..., Fleet],
) -> None:
    fleet = make()
    fleet.update_weights()
    fill(fleet.worker(0).policy, 1.0)
    assert held_version(fleet.worker(0)) is None
    assert fleet.probe()[0].matches
    assert held_version(fleet.worker(0)) == 1
    assert statuses(fleet.update_weights().workers) == {"fake-0": "current", "fake-1": "current"}


def in_training(module: Any) -> None:
    module.train()
    for _ in range(3):
        module(torch.randn(8, 3) + 5.0)


class Explorer(nn.Sequential):
    """A policy that explores, as TorchRL makes them."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(3, 2), EGreedyModule(spec=None, eps_init=1.0, annealing_num_steps=10))  # pyright: ignore[reportArgumentType]


class Normed(nn.Module):
    """A policy that normalises what it sees by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = VecNormV2(in_keys=["observation"], out_keys=["observation"], reduce_batch_dims=True)
        self.head = nn.Linear(3, 2)
        self.see()

    def see(self) -> None:
        seen = TensorDict(observation=torch.randn(8, 3) + 5.0, batch_size=[8])
        self.norm._step(seen, seen)


MODULES: dict[str, tuple[Callable[[], nn.Module], Write]] = {
    "BatchNorm": (lambda: net(1.0), in_training),
    "InstanceNorm": (
        lambda: nn.Sequential(
            nn.Linear(3, 4),
            nn.Unflatten(1, (2, 2)),
            nn.InstanceNorm1d(2, affine=True, track_running_stats=True),
        ),
        in_training,
    ),
    "spectral norm": (
        lambda: nn.Sequential(nn.Linear(3, 40), nn.utils.parametrizations.spectral_norm(nn.Linear(40, 30))),
        in_training,
    ),
    "spectral norm of old": (lambda: nn.utils.spectral_norm(nn.Linear(3, 2)), in_training),
    "NoisyLinear": (lambda: NoisyLinear(3, 2), lambda module: module.reset_noise()),
    "EGreedyModule": (Explorer, lambda module: module[1].step(3)),
    "VecNormV2": (Normed, lambda module: module.see()),
}


@pytest.mark.parametrize(("make_module", "act"), MODULES.values(), ids=MODULES)
def test_what_a_modules_own_forward_writes_is_no_drift(
    make: Callable[..., Fleet], make_module: Callable[[], nn.Module], act: Write
) -> None:
    learner = make_module()
    fleet = make(learner, [make_module()])
    report = fleet.update_weights()
    assert report.ok, report.workers
    worker = fleet.worker(0)
    before = hashes(worker.policy)
    act(worker.policy)
    written = {name for name, found in hashes(worker.policy).items() if before[name] != found}
    assert written, "it writes into its buffers"
    assert held_version(worker) == 1
    assert statuses(fleet.update_weights().workers) == {"fake-0": "current"}

    found = fleet.probe()[0]

    assert (found.matches, found.drift, found.error) == (True, (), "")
    assert set(found.buffers) == written
    assert held_version(worker) == 1
    assert fleet.registry.workers()[0].held == 1
    assert fleet.registry.events(worker="fake-0") == []

    # A parameter beside them is drift all the same.
    fill(worker.policy, 9.0)
    found = fleet.probe()[0]
    assert not found.matches and found.drift and set(found.buffers) >= written - set(found.drift)
    assert statuses(fleet.update_weights().workers) == {"fake-0": "synced"}
    assert hashes(worker.policy) == hashes(learner)


def test_a_parameter_that_the_forward_writes_is_left_out_by_name(make: Callable[..., Fleet]) -> None:
    """An embedding with `max_norm` scales its rows down as it is used."""
    policies = [nn.Sequential(nn.Embedding(4, 3, max_norm=0.1), nn.Linear(3, 2)) for _ in range(2)]
    plain, told = (
        make(policies[0], [_twin(policies[0])]),
        make(policies[1], [_twin(policies[1])], ignore=["0.*"]),
    )
    for fleet in (plain, told):
        fleet.update_weights()
        fleet.worker(0).policy(torch.arange(4))
    assert (held_version(plain.worker(0)), held_version(told.worker(0))) == (None, 1)
    found = plain.probe(ignore=["0.weight"])[0]
    assert (found.matches, found.buffers) == (True, ("0.weight",))
    assert plain.probe()[0].drift == ("0.weight",)
    assert (told.probe()[0].matches, told.probe()[0].buffers) == (True, ("0.weight",))
    assert statuses(told.update_weights().workers) == {"fake-0": "current"}


def _twin(module: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Embedding(4, 3, max_norm=0.1), nn.Linear(3, 2))


def test_buffers_that_moved_are_sent_when_equal_content_gets_a_new_number(make: Callable[..., Fleet]) -> None:
    fleet = make()
    fleet.update_weights()
    in_training(fleet.worker(0).policy)
    fleet.registry.rollback(1, reason="again")
    fleet.pushes.clear()
    assert statuses(fleet.update_weights().workers) == {"fake-0": "synced", "fake-1": "current"}
    assert fleet.pushes == [0, 1, 0]
    assert float(fleet.worker(0).policy[1].running_mean.abs().sum()) == 0.0


@pytest.mark.parametrize(
    "hold",
    [
        lambda: TensorDict.from_module(net(-1.0)),
        lambda: TensorDictParams(TensorDict.from_module(net(-1.0))),
        lambda: TensorDict.from_module(net(-1.0)).data,  # pyright: ignore[reportAttributeAccessIssue]
        lambda: dict(net(-1.0).state_dict()),
        lambda: net(-1.0).state_dict(keep_vars=True),
    ],
    ids=[
        "TensorDict of a module",
        "TensorDictParams",
        "TensorDict",
        "state dict",
        "state dict of parameters",
    ],
)
def test_writes_into_tensordicts_and_mappings_are_noticed(
    make: Callable[..., Fleet], hold: Callable[[], Any]
) -> None:
    fleet = make(net(1.0), [hold()])
    assert fleet.update_weights().ok
    held = fleet.worker(0).policy
    assert held_version(fleet.worker(0)) == 1
    flat = dict(held.flatten_keys(".").items()) if hasattr(held, "flatten_keys") else held
    with torch.no_grad():
        flat["0.weight"].fill_(9.0)
    assert held_version(fleet.worker(0)) is None
    assert statuses(fleet.update_weights().workers) == {"fake-0": "synced"}
    assert float(flat["0.weight"].detach().min()) == 1.0


def test_where_the_policy_is_may_be_answered_with_a_new_container_each_time(
    make: Callable[..., Fleet],
) -> None:
    fleet = make(policies=[net(-1.0)], locate=lambda worker: worker.policy.state_dict())
    fleet.update_weights()
    assert held_version(fleet.worker(0)) == 1
    assert statuses(fleet.update_weights().workers) == {"fake-0": "current"}
    fill(fleet.worker(0).policy, 9.0)
    assert held_version(fleet.worker(0)) is None
    assert statuses(fleet.update_weights().workers) == {"fake-0": "synced"}


def test_of_very_many_tensors_each_counts(make: Callable[..., Fleet]) -> None:
    def many() -> nn.Module:
        return nn.ParameterList([nn.Parameter(torch.zeros(3)) for _ in range(1000)])

    fleet = make(fill(many(), 1.0), [many()])
    fleet.update_weights()
    for number in (0, 1, 501, 999):
        assert held_version(fleet.worker(0)) == 1
        with torch.no_grad():
            fleet.worker(0).policy[number].fill_(9.0)
        assert held_version(fleet.worker(0)) is None
        assert statuses(fleet.update_weights().workers) == {"fake-0": "synced"}
        assert values(fleet.worker(0).policy) == {1.0}


def test_a_worker_that_the_interval_would_pass_by_is_sent_what_was_written_over(
    make: Callable[..., Fleet],
) -> None:
    fleet = make(max_interval=3)
    fleet.update_weights()
    fill(fleet.worker(0).policy, 9.0)
    fill(fleet.policy_weights, 2.0)
    assert statuses(fleet.update_weights().workers) == {"fake-0": "synced", "fake-1": "skipped"}
    assert values(fleet.worker(0).policy) == {2.0}


def test_a_pinned_worker_is_sent_its_own_version_again_while_others_go_on(make: Callable[..., Fleet]) -> None:
    fleet = make()
    fleet.update_weights()
    fleet.pin(0, 1)
    fill(fleet.policy_weights, 2.0)
    assert statuses(fleet.update_weights().workers) == {"fake-0": "current", "fake-1": "synced"}
    fill(fleet.worker(0).policy, 9.0)
    fill(fleet.policy_weights, 3.0)
    assert statuses(fleet.update_weights().workers) == {"fake-0": "synced", "fake-1": "synced"}
    assert (values(fleet.worker(0).policy), values(fleet.worker(1).policy)) == ({1.0}, {3.0})


def test_a_busy_worker_is_asked_once_and_mended_when_it_has_answered(make: Callable[..., Fleet]) -> None:
    fleet = make()
    fleet.update_weights()
    fill(fleet.worker(0).policy, 9.0)
    fleet.hang(0)
    fleet.questions.clear()
    began = time.monotonic()
    for _ in range(20):
        assert statuses(fleet.update_weights().workers) == {"fake-0": "current", "fake-1": "current"}
    assert time.monotonic() - began < 2.0
    assert fleet.questions.count(0) == 1
    fleet.wake(0)
    assert statuses(fleet.update_weights().workers) == {"fake-0": "synced", "fake-1": "current"}
    assert values(fleet.worker(0).policy) == {1.0}


def test_an_answer_that_comes_after_the_next_push_says_nothing_of_it(make: Callable[..., Fleet]) -> None:
    fleet = make(timeout=0.05)
    fleet.update_weights()
    fill(fleet.worker(0).policy, 9.0)
    fleet.hang(0)
    fleet.update_weights()
    fill(fleet.policy_weights, 2.0)
    assert statuses(fleet.update_weights().workers)["fake-0"] == "timeout"
    fleet.wake(0)
    assert statuses(fleet.update_weights().workers) == {"fake-0": "synced", "fake-1": "current"}
    assert statuses(fleet.update_weights().workers) == {"fake-0": "current", "fake-1": "current"}
    assert values(fleet.worker(0).policy) == {2.0}
    # The question before the push was answered in its receipt.
    assert [(each.version, each.ended_how) for each in fleet.registry.history(worker="fake-0")] == [
        (1, "drifted"),
        (2, None),
    ]

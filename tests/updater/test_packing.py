"""Instructions packed once for many actors. What real actors make of them is tested wherever an updater pushes."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from tests.updater.test_receiver import SERIES, packed
from weightledger.updater.in_worker.receiver import receive
from weightledger.updater.messages import Push, Receipt, ServerWeights
from weightledger.updater.transports.packing import Packing, open_parcel


def outfit(**rest: Any) -> ServerWeights:
    buffer, digest, structure = packed(nn.Linear(3, 2))
    push = Push(
        SERIES,
        "run",
        1,
        digest,
        digest,
        1,
        buffer.nbytes,
        rest.pop("locate", "policy"),
        structure=structure,
        **rest,
    )
    return ServerWeights(1, digest, digest, (), buffer.nbytes, buffer, structure, push)


def test_a_parcel_opened_in_a_worker_is_carried_out() -> None:
    weights, worker = outfit(), SimpleNamespace(policy=nn.Linear(3, 2))
    parcel = Packing().pack(receive, weights.push, weights.handle)
    receipt = open_parcel(worker, parcel)
    assert isinstance(receipt, Receipt) and receipt.outcome == "applied"
    other = SimpleNamespace(policy=nn.Linear(3, 2))
    apart = Packing().pack(receive, weights.push, None)
    assert open_parcel(other, apart, weights.handle).now == receipt.now  # type: ignore[union-attr]
    assert torch.equal(worker.policy.weight, other.policy.weight)


def test_a_name_of_a_class_that_only_the_script_has_is_packed_as_ray_would() -> None:
    """As when a policy is a member of a `StrEnum` in the training script: no worker can import that."""

    class Name(str):
        """Cannot be imported by anybody."""

    weights = outfit()
    assert isinstance(weights.push, Push)
    push = replace(weights.push, series=("registry", Name("main")))
    parcel = Packing().pack(receive, push, weights.handle)
    receipt = open_parcel(SimpleNamespace(policy=nn.Linear(3, 2)), parcel)
    assert isinstance(receipt, Receipt) and receipt.outcome == "applied"


def test_the_same_instruction_is_packed_once_and_another_one_anew() -> None:
    packing, weights = Packing(), outfit()
    first = packing.pack(receive, weights.push, weights.handle)
    assert packing.pack(receive, weights.push, weights.handle) is first
    assert packing.pack(receive, weights.push, None) is not first
    assert packing.pack(receive, outfit(cast=True).push, weights.handle) != first

"""What runs inside TorchRL's collectors: a push, and the stamps that go with it.

Rules kept here
- Nothing is raised across the border, and what TorchRL's own code raises no longer ends the actor.
- Weights and stamps change in one call. A collector's calls come one after another, so no frame lies in between.
- A collector that runs others in processes of their own holds what all of them hold: each gives a receipt, and only
  equal receipts make one.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase  # type: ignore[import-untyped]
from torch import nn

from weightledger.updater.in_worker.receiver import held_version, incarnation, receive, write_note
from weightledger.updater.messages import Inspection, Probe, Push, Receipt, Series

with warnings.catch_warnings():
    # TorchRL warns of its own classes when it makes them.
    warnings.simplefilter("ignore", DeprecationWarning)
    from torchrl.collectors import BaseCollector, Collector, MultiCollector, MultiSyncCollector  # type: ignore[import-untyped]
    from torchrl.weight_update import WeightSyncScheme  # type: ignore[import-untyped]

NO_VERSION = 0
"""The stamp of frames whose weights are no known version: those that the collector was made with, for instance."""

_INNER = "weightledger"
"""Under this id each process of a multi-process collector has its receiver."""
_INSIDE = "_weightledger_inside"
"""An attribute of such a collector once they have."""
_SERIES = "_weightledger_series"
"""An attribute of a collector: which of the series that it may hold its stamps tell of, the one pushed last."""


class StampBatches:
    """Stamp every frame with the version that produced it, where the collector does not track versions itself.

    For `RayCollector(..., post_collect_hook=StampBatches())`. Each batch is one rollout, and no push lands inside of a
    rollout, so all its frames get the same number, under `"policy_version"` and `("next", "policy_version")`; 0 while
    the weights are no known version. Where frames go into a replay buffer one by one (`extend_buffer=False`) there is
    no batch to stamp: turn on `track_policy_version` there.

    Args:
        then: another hook, called with the stamped batch.
    """

    def __init__(self, then: Callable[[TensorDictBase], None] | None = None) -> None:
        self.version = NO_VERSION
        """What the collector holds; the updater writes it with every push."""
        self.then = then

    def __call__(self, batch: TensorDictBase) -> None:
        """Stamp one batch in place."""
        # In place where they are: processes of a collector reuse one batch, in memory that they share, and lock it.
        with batch.unlock_():
            for key in ("policy_version", ("next", "policy_version")):
                if key in batch.keys(include_nested=True):
                    batch.fill_(key, self.version)
                else:
                    shape, device = batch.batch_size, batch.device
                    batch.set(key, torch.full(shape, self.version, dtype=torch.int64, device=device))
        if self.then is not None:
            self.then(batch)


def receive_in_collector(collector: Any, push: Push | Probe, payload: Any = None) -> Receipt | Inspection:
    """Carry out one instruction in a collector, as `receiver.receive` does, and stamp what it collects from now on."""
    try:
        survive_errors(collector)
        if isinstance(collector, BaseCollector) and (refusal := why_refused(type(collector))):
            return _unchanged(push, refusal)
        if isinstance(collector, MultiCollector):
            return _receive_in_each(collector, push, payload)
        answer: Receipt | Inspection = receive(collector, push, payload)
        if isinstance(answer, Receipt):
            if isinstance(collector, Collector):
                stamp_rollouts(collector, push.series)
            stamp(collector, NO_VERSION if answer.now is None else answer.now.version)
        return answer
    except Exception as error:  # noqa: BLE001 - nothing may leave the worker as an exception
        text = f"{type(error).__name__}: {error}"
        if isinstance(push, Push):
            write_note(collector, push.series, None)
            return Receipt("broken", push.order, incarnation(), None, None, text)
        return Inspection(incarnation(), None, 0, None, None, text)


def why_refused(kind: type) -> str:
    """Tell why a kind of collector cannot be steered; empty when it can."""
    if issubclass(kind, (Collector, MultiSyncCollector)):
        return ""
    return (
        f"{kind.__name__} collects while it is asked for nothing, so no push can reach it between two rollouts, and it "
        "would act with its initial weights; expected Collector ('single') or MultiSyncCollector ('sync') as "
        "collector_class="
    )


def survive_errors(collector: Any) -> None:
    """Let the actor outlive exceptions of its methods.

    Ray asks a failed actor for its truth value, which Python answers by the length; a collector without an end has
    infinity for that, so the question fails as well, and that ends the process.
    """
    if "__bool__" not in vars(type(collector)):
        type(collector).__bool__ = lambda self: True


def stamp_rollouts(collector: Any, series: Series) -> None:
    """Stamp each rollout with what the collector holds as it begins: somebody may have written into its weights."""
    vars(collector)[_SERIES] = series
    if "rollout" in vars(collector):
        return
    find = weakref.ref(collector)

    @functools.wraps(type(collector).rollout)
    def rollout() -> Any:
        owner: Any = find()
        held = held_version(owner, vars(owner)[_SERIES][1])
        stamp(owner, NO_VERSION if held is None else held)
        return type(owner).rollout(owner)

    collector.rollout = rollout


def release(collector: Any) -> None:
    """Let TorchRL stamp again as it does by itself, once nobody pushes any more."""
    vars(collector).pop("rollout", None)


def stamp(collector: Any, version: int) -> None:
    """Let a collector stamp what it collects from now on with a version."""
    tracker = getattr(collector, "policy_version_tracker", None)
    if tracker is not None:
        tracker.version = version if tracker.version_type in (int, "int") else str(version)
        # The frame that waits to be acted on was stamped when its observation was made, under the weights before.
        carrier = getattr(collector, "_carrier", None)
        if carrier is not None and "policy_version" in carrier:
            tracker._step(None, carrier)
    hook = getattr(collector, "post_collect_hook", None)
    hook = getattr(hook, "fn", hook)
    if isinstance(hook, StampBatches):
        hook.version = version


class InnerReceiver(WeightSyncScheme):  # type: ignore[misc]
    """Receives pushes in each process of a multi-process collector.

    Only what TorchRL calls a scheme is given its collector in there, and can be called from outside.
    """

    def create_transport(self, **_: Any) -> Any:
        """Refuse: the collector's own pipes carry everything."""
        raise NotImplementedError("pushes come by the collector's pipes")

    def _init_on_receiver_impl(self, model_id: str, context: Any = None, **_: Any) -> None:
        self.model_id, self.context = model_id, context

    def take(self, push: Push | Probe, payload: torch.Tensor | None) -> Receipt | Inspection:
        """Carry out one instruction in this process."""
        collector: Any = self.context
        _unshare(collector.policy)
        return receive_in_collector(collector, push, None if payload is None else payload.numpy())


def _receive_in_each(collector: Any, push: Push | Probe, payload: Any) -> Receipt | Inspection:
    if _INSIDE not in vars(collector):
        _call_each(
            collector, "register_scheme_receiver", {_INNER: InnerReceiver()}, synchronize_weights=False
        )
        vars(collector)[_INSIDE] = True
    shared = None if payload is None else _in_shared_memory(payload)
    answers = _call_each(collector, f"_receiver_schemes['{_INNER}'].take", push, shared)
    if isinstance(push, Probe):
        return _one_inspection(push, answers)
    receipt = _one_receipt(collector, push, answers)
    # The outer object's own code may ask what it holds, too.
    write_note(collector, push.series, receipt.now)
    stamp(collector, NO_VERSION if receipt.now is None else receipt.now.version)
    return receipt


def _one_receipt(collector: Any, push: Push, answers: list[Receipt]) -> Receipt:
    first = answers[0]
    before = first.before if all(answer.before == first.before for answer in answers) else None
    if all((answer.outcome, answer.now) == (first.outcome, first.now) for answer in answers):
        return replace(first, incarnation=incarnation(), before=before)
    if any(answer.outcome == "bytes_wanted" for answer in answers):
        return Receipt("bytes_wanted", push.order, incarnation(), None, before)
    told = "; ".join(
        f"process {index}: {answer.outcome}{' ' + answer.error if answer.error else ''}"
        for index, answer in enumerate(answers)
    )
    error = f"its processes do not hold the same: {told}"
    return Receipt("broken", push.order, incarnation(), None, before, error)


def _one_inspection(probe: Probe, answers: list[Inspection]) -> Inspection:
    first = answers[0]
    told = {(answer.note, answer.digest, bool(answer.overwritten)) for answer in answers}
    if len(told) == 1:
        return replace(first, incarnation=incarnation())
    # One that differs is shown, so that what differs in it is told.
    differing = (one for one in answers if one.note is None or one.overwritten)
    odd = next(
        differing, next((one for one in answers if one.note and one.digest != one.note.sent_digest), first)
    )
    return replace(odd, incarnation=incarnation(), error=odd.error or "its processes do not hold the same")


def _unchanged(push: Push | Probe, error: str) -> Receipt | Inspection:
    if isinstance(push, Probe):
        return Inspection(incarnation(), None, 0, None, None, error)
    return Receipt("kept", push.order, incarnation(), None, None, error)


def _call_each(collector: Any, path: str, *arguments: Any, **options: Any) -> list[Any]:
    count = collector.num_workers
    return list(collector.map_fn(path, [arguments] * count, [options] * count))


def _in_shared_memory(payload: Any) -> Any:
    """Copy a payload once for all processes; through a pipe each would get a copy of its own, in small pieces."""
    shared: Any = torch.empty(payload.nbytes, dtype=torch.uint8)
    shared.share_memory_()
    np.copyto(shared.numpy(), payload)
    return shared


def _unshare(policy: Any) -> None:
    """Give a process its own weights: shared ones change under rollouts, and one receipt would speak for others."""
    if isinstance(policy, nn.Module):
        tensors: list[Any] = [*policy.parameters(), *policy.buffers()]
        for tensor in tensors:
            if tensor.is_shared():
                tensor.data = tensor.data.clone()

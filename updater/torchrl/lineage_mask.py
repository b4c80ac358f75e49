"""Which frames of a batch are worth learning from after a rollback: those of the head's own lineage."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase  # type: ignore[import-untyped]

from weightledger.registry import Registry
from weightledger.registry.sync import Sync


def lineage_mask(batch: Any, registry: Registry, *, key: Any = None) -> torch.Tensor:
    """Tell which frames were produced by versions on the head's lineage, and not by a branch that was abandoned.

    As in `Registry.staleness`, a version's content counts: after v16 restored v10, frames of v10 and v16 are in, those
    of v11 to v15 are out. So are frames without a known version.

    Args:
        batch: a TensorDict of frames, or a tensor of their versions.
        registry: of the policy whose versions these are.
        key: where the batch has the versions; by default `("next", "policy_version")`, else `"policy_version"`.

    Returns:
        A bool tensor in the shape of the stamps.

    Raises:
        KeyError: the batch has no stamps.
    """
    stamps: Any = _stamps(batch, key) if isinstance(batch, TensorDictBase) else torch.as_tensor(batch)
    if stamps.is_floating_point() or stamps.dtype == torch.bool:
        raise TypeError(f"versions are whole numbers, found stamps of {stamps.dtype}")
    found, places = stamps.unique(return_inverse=True)
    numbers = found.tolist()
    stale = Sync(registry).staleness(numbers)
    on_lineage = [stale.get(number) is not None for number in numbers]
    return torch.tensor(on_lineage, dtype=torch.bool, device=found.device)[places]


def _stamps(batch: TensorDictBase, key: Any) -> Any:
    keys = [("next", "policy_version"), "policy_version"] if key is None else [key]
    for each in keys:
        stamps = batch.get(each, None)
        if stamps is not None:
            return stamps
    raise KeyError(
        f"the batch has no stamps under {' or '.join(map(repr, keys))}; collect with "
        "collector_kwargs={'track_policy_version': True} or post_collect_hook=StampBatches()"
    )

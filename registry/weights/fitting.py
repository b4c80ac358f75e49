"""Does a snapshot fit a target? Every problem at once, or a plan of what is copied where.

Rules: nothing is written here. A plan is good for every snapshot of the same layout, for as long as the target consists
of the same objects over the same memory; what depends on a snapshot's bytes is checked apart, each time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from weightledger.registry.errors import InvalidWeightsError
from weightledger.registry.weights import leaves, raw
from weightledger.registry.weights.casting import loss
from weightledger.registry.weights.layout import Spec
from weightledger.registry.weights.live import Live, align, identity, look_at, same, tied_groups
from weightledger.registry.weights.memory import Memory
from weightledger.registry.weights.moves import Moves
from weightledger.registry.weights.names import is_allowed
from weightledger.registry.weights.payload import Payload
from weightledger.registry.weights.proof import loads_in_its_way, prove, shapes_its_state


@dataclass
class Plan:
    """A checked way from one layout into one target; good for as long as both stay what they are."""

    fingerprint: str
    cast_allowed: bool
    objects: list[object]
    live: Live
    renamed: dict[str, str]
    """Target name → snapshot name."""
    scalars: dict[str, str]
    """NumPy scalars of the target, which are replaced instead of written to → snapshot name."""
    cast: tuple[Write, ...]
    """Those whose type differs from the snapshot's."""
    groups: list[Group]
    memory: Memory
    """What is written to, as it was when it was checked."""
    must_equal: list[tuple[str, Spec, Spec]]
    """Places that must hold the same bytes, since the target keeps both in one tensor."""
    overlaps: list[list[Write]]
    """Targets that share some of their memory."""
    loaded: dict[str, str] | None
    """Names that the target module takes by its own `load_state_dict` → snapshot name; None when all is copied in
    place. Only the non-persistent buffers are in `groups` otherwise."""
    steady: bool
    """Whether the target will show the same tensors again while its objects stay the same."""


@dataclass(frozen=True)
class Write:
    """One target tensor and what is written to it."""

    own: str
    stored: str
    spec: Spec
    tensor: Tensor


@dataclass(frozen=True)
class Way:
    """How tensors are copied: what one call may take together."""

    flat: bool
    """Whether the target is contiguous, so that rows are copied and no view of the source needs a shape."""
    inference: bool
    raw: bool
    """Whether bytes are moved without torch, whose own cost a small tensor is more than that of its bytes."""


@dataclass(frozen=True)
class Group:
    """Tensors that are copied in one way."""

    way: Way
    places: list[int]
    """Positions in the layout."""
    tensors: list[Tensor]
    rows: list[Tensor]
    """What torch writes to: the tensors, or one-dimensional views of them."""
    moves: Moves | None
    """How their bytes come there, where torch does not copy them."""


def make_plan(payload: Payload, target: object, cast: bool, own: bool = False) -> Plan:
    """Check a target against a snapshot's names, shapes and types.

    Args:
        own: Whether a module is to load in its own way even if it could be written to in place.

    Raises:
        InvalidWeightsError: It does not fit; the text lists every problem.
    """
    live = look_at(target)
    if own and live.module is None:
        raise InvalidWeightsError(
            f"expected a module, which loads by its own load_state_dict, found a {type(target).__qualname__}, which is "
            "written to in place: leave apply= out, or locate the module"
        )
    objects = identity(target)
    layout, by_name = payload.layout, payload.layout.by_name
    stored = by_name.keys() | payload.values.keys()
    renamed = align(live.all_names(), set(stored))
    live.extras = {renamed[name]: part for name, part in live.extras.items()}

    problems = list(live.problems)
    problems += [text for name, text in live.optional_refused.items() if renamed[name] in stored]
    missing = _missing_values(live, payload, renamed)
    writes: list[Write] = []
    must_equal: list[tuple[str, Spec, Spec]] = []
    every = {**live.tensors, **live.optional}
    shown = {name: tensor for name, tensor in every.items() if live.extra_of(renamed[name]) is None}
    proof = prove(shown, live.numpy, objects)
    loads = own or bool(proof.strangers) or (live.module is not None and loads_in_its_way(live.module))
    if live.module is None:
        problems += [_stranger(name) for name in proof.strangers]
    loaded: dict[str, str] | None = {} if loads and live.module is not None else None
    for tied in tied_groups(every):
        regular = [name for name in tied if live.extra_of(renamed[name]) is None]
        present = [name for name in regular if renamed[name] in by_name]
        if not present:
            missing += [name for name in regular if name not in live.optional]
            continue
        problems += _fit(present, renamed, every[present[0]], by_name, cast)
        first = by_name[renamed[present[0]]]
        if loaded is not None:
            loaded |= {name: first.name for name in regular if name in live.tensors}
        else:
            problems += _unwritable(present[0], every[present[0]], live.numpy.get(present[0]))
        writes.append(Write(present[0], renamed[present[0]], first, every[present[0]]))
        tie = " and ".join(repr(name) for name in present)
        others = (by_name[renamed[name]] for name in present[1:])
        must_equal += [(tie, first, other) for other in others if other is not first]
    unexpected = stored - set(renamed.values())
    unexpected -= {name for name in unexpected if live.extra_of(name) is not None}
    problems += _absences(live, sorted(missing), sorted(unexpected), payload, renamed)
    if problems:
        fail(problems)

    converted = tuple(write for write in writes if leaves.CODES[write.tensor.dtype] != write.spec.code)
    scalars = {
        write.own: write.stored
        for write in writes
        if loaded is None and isinstance(live.numpy.get(write.own), np.generic)
    }
    left = scalars if loaded is None else loaded
    writes = [write for write in writes if write.own not in left]
    return Plan(
        layout.fingerprint,
        cast,
        objects,
        live,
        renamed,
        scalars,
        converted,
        _grouped(writes, layout.specs),
        Memory([*(write.tensor for write in writes), *proof.watched]),
        must_equal,
        _overlapping(writes),
        loaded,
        loaded is None and (live.module is None or not shapes_its_state(live.module)),
    )


def _stranger(name: str) -> str:
    return (
        f"{name!r} is made anew at each look at the target, so that what is written to it is lost: pass a module, a "
        "TensorDict or a dictionary that holds the tensors themselves"
    )


def _missing_values(live: Live, payload: Payload, renamed: dict[str, str]) -> list[str]:
    stored = payload.layout.by_name.keys() | payload.values.keys()
    plain = (name for name in live.values if live.extra_of(renamed[name]) is None)
    missing = [name for name in plain if renamed[name] not in payload.values]
    extras = (name for name in live.extras if not any(live.extra_of(one) == name for one in stored))
    return missing + list(extras)


def _unwritable(name: str, tensor: Tensor, array: Any) -> Iterator[str]:
    if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        yield f"{name!r} is an expanded view in the target, several elements of one memory: make it .contiguous()"
    if tensor.is_conj() or tensor.is_neg():
        yield f"{name!r} is a lazily conjugated or negated view in the target: resolve it first"
    if isinstance(array, np.ndarray) and not array.flags.writeable:
        yield f"{name!r} is a read-only array in the target: pass a writable one"
    elif isinstance(array, np.ndarray) and any(stride < 0 for stride in array.strides):
        yield f"{name!r} is a reversed view of an array in the target: pass the array itself"


def _fit(
    tied: list[str], renamed: dict[str, str], tensor: Tensor, by_name: dict[str, Spec], cast: bool
) -> Iterator[str]:
    for name in tied:
        spec = by_name[renamed[name]]
        if tensor.shape != spec.shape:
            yield f"{name!r} has the shape {tuple(tensor.shape)} in the target, {spec.shape} in the snapshot"
        dtype = leaves.TORCH_DTYPES[spec.code]
        if tensor.dtype != dtype and not (cast and _castable(dtype, tensor.dtype)):
            how = "they cannot be converted" if cast else "cast=True converts it"
            yield f"{name!r} has the dtype {tensor.dtype} in the target, {dtype} in the snapshot ({how})"


def _castable(source: torch.dtype, target: torch.dtype) -> bool:
    if source.is_complex and not target.is_complex:
        return False
    try:
        torch.empty(1, dtype=target).copy_(torch.zeros(1, dtype=source))
    except (RuntimeError, NotImplementedError):
        return False
    return True


def _absences(
    live: Live, missing: list[str], unexpected: list[str], payload: Payload, renamed: dict[str, str]
) -> Iterator[str]:
    for name in missing:
        stored = renamed.get(name, name)
        if name in live.tensors and stored in payload.values:
            yield f"{name!r} is a tensor in the target, and a value in the snapshot"
        elif name in live.values and stored in payload.layout.by_name:
            yield f"{name!r} is a value in the target, and a tensor in the snapshot"
        else:
            yield f"{name!r} is missing in the snapshot"
    for name in unexpected:
        yield f"{name!r} is in the snapshot, but not in the target"
    prefixes = _prefixes(missing, unexpected)
    if prefixes:
        yield f"(names differ by the prefix {' or '.join(map(repr, prefixes))}: save and restore the same level)"


def _prefixes(missing: list[str], unexpected: list[str]) -> list[str]:
    found: set[str] = set()
    for longer, shorter in ((unexpected, set(missing)), (missing, set(unexpected))):
        for name in longer:
            at = name.find(".")
            while at >= 0:
                if name[at + 1 :] in shorter:
                    found.add(name[: at + 1])
                at = name.find(".", at + 1)
    return sorted(found)[:3]


def _overlapping(writes: list[Write]) -> list[list[Write]]:
    spans = sorted(
        ((str(write.tensor.device), write.tensor.data_ptr(), leaves.end(write.tensor)), at)
        for at, write in enumerate(writes)
        if write.tensor.numel()
    )
    clusters: list[list[Write]] = []
    device, reach = "", 0
    for (where, start, end), at in spans:
        if clusters and where == device and start < reach:
            clusters[-1].append(writes[at])
        else:
            clusters.append([writes[at]])
            reach = 0
        device, reach = where, max(reach, end)
    return [cluster for cluster in clusters if len(cluster) > 1]


def check_content(plan: Plan, payload: Payload, allow_nonfinite: bool | Collection[str] = False) -> None:
    """Check what depends on the bytes, which a plan for the same layout cannot know.

    Args:
        allow_nonfinite: Whether finite numbers may become infinite when they are converted; or globs of the names,
            as the snapshot has them, in which they may.

    Raises:
        InvalidWeightsError: The target cannot hold them; the text names every tensor.
    """
    data = payload.buffer[payload.layout.data_start :]
    problems = [
        f"{shown} are one tensor in the target, and differ in the snapshot"
        for shown, one, other in plan.must_equal
        if one.code != other.code
        or one.shape != other.shape
        or not np.array_equal(data[one.start : one.end], data[other.start : other.end])
    ]
    problems += _losses(plan.cast, payload, allow_nonfinite)
    problems += [text for cluster in plan.overlaps if (text := _torn(cluster, payload)) is not None]
    if problems:
        fail(problems)


def _losses(
    converted: Iterable[Write], payload: Payload, allow_nonfinite: bool | Collection[str]
) -> Iterator[str]:
    for write in converted:
        lost = loss(payload.tensors()[write.stored], write.tensor.dtype)
        if lost is not None and not (lost.infinite and is_allowed(write.stored, allow_nonfinite)):
            yield f"{write.own!r} {lost.text}: the target would hold something else"


def _torn(cluster: list[Write], payload: Payload) -> str | None:
    """Rehearse writes to shared memory aside, and tell whether a tensor would not hold its own values after all."""
    shown = ", ".join(repr(write.own) for write in cluster)
    low = min(write.tensor.data_ptr() for write in cluster)
    stored = payload.tensors()
    with torch.inference_mode(False), torch.no_grad():
        scratch = torch.empty(max(leaves.end(write.tensor) for write in cluster) - low, dtype=torch.uint8)
        aside = []
        for write in cluster:
            tensor, item = write.tensor, write.tensor.element_size()
            offset = tensor.data_ptr() - low
            if offset % item:
                return f"{shown} overlap in the target's memory without being aligned: give each memory of its own"
            row = scratch[: scratch.numel() // item * item].view(tensor.dtype)
            aside.append(row.as_strided(tensor.shape, tensor.stride(), offset // item))
            aside[-1].copy_(stored[write.stored])
        for write, rehearsed in zip(cluster, aside, strict=True):
            wanted = stored[write.stored].to(rehearsed.dtype)
            if not leaves.equal(rehearsed, wanted):
                return f"{shown} overlap in the target's memory, and the snapshot differs in the part that they share"
    return None


def fail(problems: list[str]) -> NoReturn:
    """Raise the one error that lists all problems."""
    listing = "\n  ".join(problems)
    raise InvalidWeightsError(f"the snapshot does not fit the target; nothing was changed:\n  {listing}")


def _grouped(writes: list[Write], specs: tuple[Spec, ...]) -> list[Group]:
    place = {spec.name: at for at, spec in enumerate(specs)}
    found: dict[Way, list[Write]] = {}
    for write in sorted(writes, key=lambda one: place[one.spec.name]):
        found.setdefault(_way(write.tensor, write.spec), []).append(write)
    return [_group(way, chosen, place) for way, chosen in found.items()]


def _group(way: Way, writes: list[Write], place: dict[str, int]) -> Group:
    tensors = [write.tensor for write in writes]
    rows: list[Tensor] = []
    moves = None
    if way.raw:
        # What is done to all of them is done sooner in the order in which they were made.
        tensors.sort(key=Tensor.data_ptr)
        pieces = ((write.spec, write.tensor.data_ptr()) for write in writes)
        moves = Moves((spec.start, address, spec.end - spec.start) for spec, address in pieces)
    else:
        with torch.inference_mode(way.inference), torch.no_grad():
            # A view has its tensor's version counter, so that autograd notices the write all the same.
            rows = [tensor.view(-1) if way.flat else tensor for tensor in tensors]
    return Group(way, [place[write.spec.name] for write in writes], tensors, rows, moves)


def _way(tensor: Tensor, spec: Spec) -> Way:
    flat, inference = tensor.is_contiguous(), tensor.is_inference()
    as_it_is = raw.is_raw(tensor) and leaves.CODES[tensor.dtype] == spec.code
    return Way(flat, inference, as_it_is and not inference and spec.end - spec.start <= raw.SMALL_BYTES)


def still_good(plan: Plan | None, payload: Payload, target: object, cast: bool) -> Plan | None:
    """Return the plan if neither layout nor target changed since it was made, else None."""
    if plan is None or plan.cast_allowed != cast or plan.fingerprint != payload.layout.fingerprint:
        return None
    if not same(identity(target), plan.objects):
        return None
    return plan if plan.memory.unchanged() else None

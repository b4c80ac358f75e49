"""What is measured against what: each function makes one contender. All change the learner before each turn."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from blake3 import blake3
from safetensors.torch import save_file

from tests.benchmarks import weights
from tests.benchmarks.machine import write_durably
from tests.benchmarks.timing import Contender
from tests.benchmarks.workers import WAIT, Fleet
from weightledger.registry import Registry
from weightledger.updater import RayRemoteWeightUpdater

# From here on old files are removed after each round; small ones may stay until the case ends.
_PRUNE_BYTES = 8 << 20

LEDGER = "weightledger"
LEDGER_IN_MEMORY = "weightledger, registry in memory"
LEDGER_NO_DISK = "weightledger, no disk"
DISK = "write + fdatasync"
COPIES = "plain copies"
PUT = "ray.put + load_state_dict"


def _changed(learner: Any) -> Any:
    return lambda: weights.change(learner)


@contextmanager
def ledger(name: str, folder: Path, fleet: Fleet) -> Iterator[Contender]:
    """Publish and push with this library; done when it is durable and every worker has confirmed."""
    with (
        Registry.open(folder / "registry") as registry,
        RayRemoteWeightUpdater(fleet.learner, fleet.handles, registry=registry, timeout=WAIT) as updater,
    ):
        yield Contender(
            name,
            updater.update_weights,
            _changed(fleet.learner),
            fleet.check,
            _pruner(registry, fleet.learner),
        )


@contextmanager
def ledger_no_disk(name: str, folder: Path, fleet: Fleet) -> Iterator[Contender]:
    """Do all that `ledger` does, except that the bytes of the file go nowhere; the database lies in `folder`.

    A file system in memory would not take the disk out: its own pages cost more than the copies that are measured.
    """
    with Registry.open(folder / "registry") as registry:
        registry.snapshots = _Dropped(registry.snapshots)  # type: ignore[assignment]
        with RayRemoteWeightUpdater(fleet.learner, fleet.handles, registry=registry, timeout=WAIT) as updater:
            yield Contender(name, updater.update_weights, _changed(fleet.learner), fleet.check)


@contextmanager
def ledger_held(name: str, folder: Path, fleet: Fleet) -> Iterator[Contender]:
    """Start the same and go on: done when the caller may change its weights again."""
    with (
        Registry.open(folder / "registry") as registry,
        RayRemoteWeightUpdater(fleet.learner, fleet.handles, registry=registry, timeout=WAIT) as updater,
    ):
        yield Contender(
            name,
            lambda: updater.update_weights(wait=False),
            _changed(fleet.learner),
            lambda future, whole: fleet.check(future.result(WAIT), whole),
            _pruner(registry, fleet.learner),
        )


@contextmanager
def ledger_publish(name: str, folder: Path, learner: Any) -> Iterator[Contender]:
    """Only publish: done when it is durable."""
    with Registry.open(folder / "registry") as registry:

        def check(version: Any, whole: bool) -> None:
            if whole:
                target = weights.Net(weights.nbytes(learner))
                registry.restore(version, target)
                assert weights.digest(target) == weights.digest(learner)

        yield Contender(
            name, lambda: registry.publish(learner), _changed(learner), check, _pruner(registry, learner)
        )


def put_and_load(name: str, fleet: Fleet) -> Contender:
    """What people do by hand: one `ray.put` of the state dict, `load_state_dict` in every worker."""

    def run() -> None:
        reference = ray.put(fleet.learner.state_dict())
        ray.get([handle.load.remote(reference) for handle in fleet.handles], timeout=WAIT)

    return Contender(name, run, _changed(fleet.learner), fleet.check)


@contextmanager
def plain_copies(name: str, fleet: Fleet) -> Iterator[Contender]:
    """Copy into shared memory once, and out once in every worker, all at the same time."""
    path = Path(f"/dev/shm/weightledger-bench-{os.getpid()}")
    sources = weights.tensors(fleet.learner)
    with path.open("xb") as file:
        file.truncate(weights.nbytes(fleet.learner))
    try:
        targets = _views(path, sources)
        fleet.ask(_attach, path)

        @torch.no_grad()
        def run() -> None:
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source)
            fleet.ask(_copy_out)

        yield Contender(name, run, _changed(fleet.learner), fleet.check)
    finally:
        fleet.ask(_detach)
        path.unlink()


def write_and_sync(name: str, folder: Path, learner: Any) -> Contender:
    """Write the same bytes, from where they are, to a new file and make them durable."""
    path = folder / "plain"

    def check(_: Any, whole: bool) -> None:
        assert path.stat().st_size == weights.nbytes(learner)
        if whole:
            hasher = blake3()
            hasher.update_mmap(path)
            assert hasher.hexdigest() == weights.digest(learner)

    return Contender(
        name, lambda: write_durably(path, _parts(learner)), _changed(learner), check, path.unlink
    )


def save_safetensors(name: str, folder: Path, learner: Any) -> Contender:
    """Call safetensors' `save_file` for the state dict, and make the file durable."""
    path = folder / "plain"

    def run() -> None:
        save_file(learner.state_dict(), path)
        with path.open("rb") as file:
            os.fdatasync(file.fileno())

    def check(_: Any, whole: bool) -> None:
        assert path.stat().st_size > weights.nbytes(learner)

    return Contender(name, run, _changed(learner), check, path.unlink)


def memcpy(name: str, learner: Any) -> Contender:
    """Copy as many bytes once, from one ready buffer into another."""
    source = np.empty(weights.nbytes(learner), np.uint8)
    target = np.empty_like(source)

    def prepare() -> None:
        weights.change(learner)
        _pack(learner, source)

    def check(_: Any, whole: bool) -> None:
        assert not whole or np.array_equal(source, target)

    return Contender(name, lambda: np.copyto(target, source), prepare, check)


class _Dropped:
    """A store whose files are empty: their names and their order are kept, their bytes are not."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def create(self, file_id: str) -> Any:
        return _Dropping(self._store.create(file_id))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


class _Dropping:
    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def write_at(self, offset: int, buffer: Any, *, lent: bool = False) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return getattr(self._writer, name)


def _pack(learner: Any, buffer: np.ndarray[Any, Any]) -> None:
    start = 0
    for part in _parts(learner):
        buffer[start : start + part.nbytes] = part
        start += part.nbytes


def _parts(learner: Any) -> list[np.ndarray[Any, Any]]:
    return [tensor.reshape(-1).view(torch.uint8).numpy() for tensor in weights.tensors(learner)]


def _pruner(registry: Registry, learner: Any) -> Any:
    def tidy() -> None:
        if weights.nbytes(learner) >= _PRUNE_BYTES:
            registry.prune(keep_last=1)

    return tidy


def _views(path: Path, like: list[Any]) -> list[torch.Tensor]:
    """Return tensors of these shapes that lie one after another in a shared file."""
    with path.open("r+b") as file:
        flat = torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)
    views, start = [], 0
    for tensor in like:
        views.append(flat[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
        start += tensor.nbytes
    return views


def _attach(actor: Any, path: Path) -> None:
    actor.shared = _views(path, weights.tensors(actor.policy))


def _detach(actor: Any) -> None:
    actor.shared = []


@torch.no_grad()
def _copy_out(actor: Any) -> None:
    for target, source in zip(weights.tensors(actor.policy), actor.shared, strict=True):
        target.copy_(source)

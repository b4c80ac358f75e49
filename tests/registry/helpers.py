"""Small weights, real child processes and small disks, shared by the tests of the registry.

Children come from a fork server that has imported torch and the registry once, so that a test can afford dozens of
them. What they run are functions of this package's modules, called by reference.
"""

from __future__ import annotations

import errno
import multiprocessing
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weightledger.registry import Registry, StorageError, Version
from weightledger.registry import files as own_files
from weightledger.registry.log import fleet
from weightledger.registry.store import local
from weightledger.registry.store.local import LocalSnapshots

PATIENCE = 100.0
"""Seconds after which a child counts as hung; far more than any of them needs."""

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    [
        "pytest",
        "weightledger.registry.store.publishing",
        "tests.registry.test_durability",
        "tests.registry.test_registry_prune",
    ]
)


def weights(value: float, size: int = 4) -> dict[str, Tensor]:
    """Return weights that tell by their bytes which value they were made of."""
    return {"w": torch.full((size,), float(value)), "b": torch.tensor([float(value), -float(value)])}


def value_of(loaded: dict[str, Tensor]) -> float:
    """Return the value that `weights` made them of, having seen that every byte agrees with it."""
    value = float(loaded["b"][0])
    expected = weights(value, loaded["w"].numel())
    assert list(loaded) == list(expected)
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)
    return value


def publish_many(registry: Registry, count: int) -> list[Version]:
    """Publish contents 1, 2, 3 …"""
    return [registry.publish(weights(value)) for value in range(1, count + 1)]


def numbers(versions: list[Version]) -> list[int]:
    return [version.number for version in versions]


def file_of(registry: Registry, number: int) -> Path:
    """Return the path of a version's snapshot file."""
    with registry.ledger.reading() as conn:
        weights_file, _ = registry.ledger.files_of(conn, number)
    return Path(registry.location) / "snapshots" / weights_file.uri


def extra_file_of(registry: Registry, number: int) -> Path:
    with registry.ledger.reading() as conn:
        _, extra_file = registry.ledger.files_of(conn, number)
    assert extra_file is not None
    return Path(registry.location) / "snapshots" / extra_file.uri


def files(registry: Registry) -> list[str]:
    """Return the names of everything in the snapshots folder but its owner's note, hidden files included."""
    folder = Path(registry.location) / "snapshots"
    return sorted({entry.name for entry in folder.iterdir()} - {".registry"}) if folder.is_dir() else []


def hold(registry: Registry, worker: str, number: int, *, confirm: bool = True) -> None:
    """Let a worker hold a version by a push and, if confirmed, its receipt, as an updater does."""
    registry.locks.keep_alive()
    digest = registry.get(number).digest
    with registry.ledger.writing() as conn:
        (claim,) = fleet.claim(registry.ledger, conn, [worker], registry.locks.alive)
        order = fleet.intend(registry.ledger, conn, [fleet.Push(claim.id, number, digest)])
    if confirm:
        with registry.ledger.writing() as conn:
            receipt = fleet.Settlement(claim.id, worker, "confirmed", order, number, "life-1", digest)
            fleet.settle(registry.ledger, conn, [receipt])


# ---------------------------------------------------------------------- processes


def in_child(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in a process of its own, and return what it returns."""
    with ProcessPoolExecutor(1, mp_context=_context) as pool:
        return pool.submit(function, *arguments).result(PATIENCE)


def in_children(function: Callable[..., Any], arguments: list[tuple[Any, ...]]) -> list[Any]:
    """Call a function once for each tuple of arguments, all at the same time, each in a process of its own."""
    barrier = _context.Manager().Barrier(len(arguments))
    with ProcessPoolExecutor(len(arguments), mp_context=_context) as pool:
        calls = [pool.submit(_together, barrier, function, each) for each in arguments]
        return [call.result(PATIENCE) for call in calls]


def _together(barrier: Any, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    barrier.wait(PATIENCE)
    return function(*arguments)


def exit_code_of(function: Callable[..., Any], *arguments: Any) -> int:
    """Run a function in a process of its own and return how that ended: 0, or minus the signal that killed it."""
    child = _context.Process(target=function, args=arguments)
    child.start()
    child.join(PATIENCE)
    code = child.exitcode
    assert code is not None, "the child hangs"
    child.close()
    return code


class Fuse:
    """Kills the process that it burns in at its nth step, as `kill -9` would; at step 0 never."""

    def __init__(self, steps: int) -> None:
        self.left = steps

    def step(self) -> None:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def after(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Make a function burn one step after each call."""

        def call(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            self.step()
            return result

        return call

    def lay(self, registry: Registry) -> None:
        """Put a step behind everything that a publish does to the disk and to the database."""
        for owner, name in (
            (local.LocalSnapshots, "create"),
            (local.LocalWriter, "write_at"),
            (os, "fdatasync"),
            (Path, "hardlink_to"),
            (Path, "unlink"),
            (own_files, "sync_folder"),
        ):
            setattr(owner, name, self.after(getattr(owner, name)))
        registry.ledger.writing = self._after(registry.ledger.writing)  # type: ignore[method-assign]

    def _after(self, transaction: Callable[..., Any]) -> Callable[..., Any]:
        @contextmanager
        def wrapped(**options: Any) -> Iterator[Any]:
            with transaction(**options) as conn:
                yield conn
                self.step()  # all said, nothing committed
            self.step()

        return wrapped


# ---------------------------------------------------------------------- disks


class SmallDisk:
    """A folder on a disk that can be filled to its last byte."""

    def __init__(self, folder: Path, real: bool, monkeypatch: Any) -> None:
        self.folder = folder
        self._real = real
        self._monkeypatch = monkeypatch

    @contextmanager
    def full(self, leave: int = 0) -> Iterator[None]:
        """Leave only so many free bytes for the length of the block."""
        if not self._real:
            with self._monkeypatch.context() as patch:
                patch.setattr(local, "_write", _no_space)
                yield
            return
        filler = self.folder / "filler"
        with filler.open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError as error:
                assert error.errno == errno.ENOSPC
            if leave:
                file.truncate(file.tell() - leave)
        try:
            yield
        finally:
            filler.unlink()


def _no_space(fd: int, view: memoryview, offset: int) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@contextmanager
def small_disk(megabytes: int, monkeypatch: Any) -> Iterator[SmallDisk]:
    """Mount a small disk in memory; without the right to mount, give a folder whose writes can be refused."""
    folder = Path(tempfile.mkdtemp(prefix="small-disk-"))
    command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)]
    real = os.geteuid() == 0 and subprocess.run(command, capture_output=True, check=False).returncode == 0
    try:
        yield SmallDisk(folder, real, monkeypatch)
    finally:
        if real:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def memory_folder() -> Iterator[Path]:
    """Give a folder on a disk in memory where there is one: for many rounds, when durability is not the question."""
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="weightledger-", dir=place) as name:
        yield Path(name)


class StubbornSnapshots(LocalSnapshots):
    """A store that cannot delete, as a busy network share or an immutable file does."""

    def delete(self, uri: str) -> None:
        path = self._path(uri)
        raise StorageError(f"{path} could not be removed: it is busy")

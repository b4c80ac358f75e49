"""Snapshot files on a local disk."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.registry.snapshot_helpers import loaded, packed, seal, stored
from weightledger.registry.errors import CorruptionError, StorageError
from weightledger.registry.store.local import LocalSnapshots
from weightledger.registry.store.snapshots import SnapshotStore
from weightledger.registry.testing import SnapshotStoreTests
from weightledger.registry.weights.arrays import page_buffer
from weightledger.registry.weights.payload import parse


class TestLocalSnapshots(SnapshotStoreTests):
    """The store that ships passes the tests that ship."""

    def make_store(self, folder: Path) -> SnapshotStore:
        return LocalSnapshots(folder)


def committed(store: LocalSnapshots, content: bytes, name: str = "one.safetensors") -> str:
    with store.create(f"for-{name}") as writer:
        writer.write_at(0, content)
        return writer.commit(name)


def test_an_empty_store_makes_no_folder_until_it_is_written_to(tmp_path: Path) -> None:
    store = LocalSnapshots(tmp_path / "a" / "snapshots")
    assert (store.uris(), store.leftovers(), store.size("x")) == ([], [], None)
    assert list(tmp_path.iterdir()) == []
    committed(store, b"x")
    assert store.uris() == ["one.safetensors"]


def test_the_temporary_file_stands_beside_its_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CK-14: a temporary directory on another disk plays no part."""
    monkeypatch.setenv("TMPDIR", "/dev/shm")
    store = LocalSnapshots(tmp_path)
    with store.create("id-1") as writer:
        assert [path.name for path in tmp_path.iterdir()] == [".id-1.tmp"]
        writer.write_at(0, b"x")
        writer.commit("one.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["one.safetensors"]


@pytest.mark.parametrize("size", [(8 << 20) - 1, 8 << 20, (40 << 20) + 3])
@pytest.mark.parametrize("offset", [0, 1, 4096])
def test_large_writes_are_whole_however_they_are_aligned(size: int, offset: int, tmp_path: Path) -> None:
    """Direct I/O takes whole pages from whole pages only; the rest goes the usual way."""
    store, content = LocalSnapshots(tmp_path), page_buffer(size)
    content[:] = np.arange(size, dtype=np.uint32).astype(np.uint8)
    with store.create("id-1") as writer:
        writer.write_at(offset, content[offset:])
        writer.write_at(0, content[:offset])
        uri = writer.commit("one.safetensors")
    assert (store.read(uri) == content).all()


def test_a_file_system_without_direct_writes_takes_large_files_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def refusing(path: Any, flags: int, *rest: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct I/O here")
        return real(path, flags, *rest)

    monkeypatch.setattr(os, "open", refusing)
    content = page_buffer(9 << 20)
    content[:] = 7
    store = LocalSnapshots(tmp_path)
    assert (store.read(committed(store, content.tobytes())) == 7).all()


class FullDisk:
    """Lets some bytes through, then says what a full disk says."""

    def __init__(self, room: int, code: int = errno.ENOSPC) -> None:
        self.room = room
        self.code = code
        self.real = os.pwrite

    def __call__(self, fd: int, data: memoryview, offset: int) -> int:
        if offset + len(data) > self.room:
            raise OSError(self.code, os.strerror(self.code))
        return self.real(fd, data, offset)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("size", [5000, 20 << 20])
def test_a_full_disk_is_named_and_leaves_nothing(
    code: int, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CK-11, CK-10: older files stay, and the next write works once there is room."""
    store = LocalSnapshots(tmp_path)
    old = committed(store, b"old", "old.safetensors")
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", FullDisk(4096, code))
        writer = store.create("id-1")
        with pytest.raises(
            StorageError, match=rf"\.id-1\.tmp could not be written \({size} bytes needed\)"
        ) as caught:
            writer.write_at(0, page_buffer(size))
        assert isinstance(caught.value.__cause__, OSError)
        assert store.leftovers() == []
        writer.abort()
    assert store.read(old).tobytes() == b"old"
    assert store.size(committed(store, bytes(size), "new.safetensors")) == size


@pytest.mark.parametrize("call", ["fdatasync", "fsync"])
def test_a_disk_that_cannot_make_a_file_durable_leaves_none(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CK-11: not even one that already has its name, since nobody was told of it."""
    store = LocalSnapshots(tmp_path)

    def failing(fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, call, failing)
    with pytest.raises(StorageError, match="Input/output error"):
        committed(store, b"x")
    assert list(tmp_path.iterdir()) == []


def test_a_full_file_system_is_named_and_leaves_nothing() -> None:
    """CK-11, on a real one: `/dev/full` is what every Linux has."""
    store = LocalSnapshots(Path("/dev/full"))
    with pytest.raises(StorageError, match="/dev/full"):
        committed(store, b"x")


def test_a_file_that_cannot_be_opened_is_a_storage_error(tmp_path: Path) -> None:
    store = LocalSnapshots(tmp_path)
    (tmp_path / "folder.safetensors").mkdir()
    with pytest.raises(StorageError, match=r"folder\.safetensors"):
        store.read("folder.safetensors")
    with pytest.raises(StorageError, match=r"folder\.safetensors"):
        store.delete("folder.safetensors")
    assert store.uris() == []


def test_what_was_written_after_a_sync_is_made_durable_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []

    def fdatasync(fd: int) -> None:
        synced.append(os.fstat(fd).st_size)

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    with LocalSnapshots(tmp_path).create("one") as writer:
        writer.write_at(0, b"abc")
        writer.sync()
        writer.write_at(3, b"def")
        writer.commit("one.safetensors")
    with LocalSnapshots(tmp_path).create("two") as writer:
        writer.write_at(0, b"abcdef")
        writer.sync()
        writer.commit("two.safetensors")
    assert synced == [3, 6, 6]


def test_where_links_are_not_possible_a_rename_still_overwrites_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusing(self: Path, target: Path) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(Path, "hardlink_to", refusing)
    store = LocalSnapshots(tmp_path)
    uri = committed(store, b"one")
    with store.create("other") as writer:
        writer.write_at(0, b"two")
        with pytest.raises(StorageError, match="the name is taken"):
            writer.commit(uri)
    assert store.read(uri).tobytes() == b"one"
    assert store.leftovers() == []


def test_what_was_loaded_does_not_change_with_its_file(tmp_path: Path) -> None:
    """ST-19, ST-20: cut short or written over from outside, the tensors stay what they were."""
    payload = stored({"w": torch_arange()}, tmp_path)
    mine = loaded(payload)["w"]
    path = tmp_path / "0.safetensors"
    os.truncate(path, 200)
    assert mine.tolist() == payload.tensors()["w"].tolist() == list(range(1000))
    with pytest.raises(CorruptionError):
        parse(LocalSnapshots(tmp_path).read("0.safetensors"), "cut")


def test_storing_what_was_loaded_leaves_the_first_file_alone(tmp_path: Path) -> None:
    """ST-19."""
    first = stored({"w": torch_arange()}, tmp_path)
    before = (tmp_path / "0.safetensors").read_bytes()
    state = loaded(first)
    state["w"].mul_(2)
    second = stored(state, tmp_path)
    assert (tmp_path / "0.safetensors").read_bytes() == before
    assert second.tensors()["w"][999] == 1998
    assert first.tensors()["w"][999] == 999


def test_a_writer_that_was_killed_leaves_a_leftover_and_no_file(tmp_path: Path) -> None:
    """CK-01 (a), TD-10: what it wrote never mixes into a later file."""
    program = (
        "import os, sys; from weightledger.registry.store.local import LocalSnapshots;"
        "writer = LocalSnapshots(sys.argv[1]).create('dead-1'); writer.write_at(0, b'd' * 100_000);"
        "os.kill(os.getpid(), 9)"
    )
    run = subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False)
    assert run.returncode == -9
    store = LocalSnapshots(tmp_path)
    assert (store.uris(), store.leftovers()) == ([], ["dead-1"])
    store.discard("dead-1")
    back = stored({"a": torch_arange()}, tmp_path)
    assert set(back.tensors()) == {"a"}


def test_reading_and_writing_files_needs_no_torch() -> None:
    program = (
        "import sys, weightledger.registry.store.local, weightledger.registry.values;"
        "import weightledger.registry.weights.digest;"
        "print({'torch', 'ray', 'tensordict'} & set(sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"


def test_packed_bytes_reach_the_disk_as_they_are(tmp_path: Path) -> None:
    payload = packed({"w": torch_arange()})
    seal(payload)
    store = LocalSnapshots(tmp_path)
    assert store.read(committed(store, payload.buffer.tobytes())).tobytes() == payload.buffer.tobytes()


def torch_arange() -> Any:
    import torch

    return torch.arange(1000)

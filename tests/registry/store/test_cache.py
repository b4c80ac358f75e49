"""Copies of remote files on a local disk: bounded, shared, and never in the way of what is right."""

from __future__ import annotations

import errno
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.registry.snapshot_helpers import packed, seal
from weightledger.registry.errors import CorruptionError, StorageError
from weightledger.registry.log.ledger import FileEntry
from weightledger.registry.store.cache import CachedSnapshots
from weightledger.registry.store.inspection import is_whole, read_payload
from weightledger.registry.store.local import LocalSnapshots
from weightledger.registry.store.objects import ObjectSnapshots
from weightledger.registry.store.opening import open_snapshots
from weightledger.registry.store.snapshots import SnapshotStore
from weightledger.registry.testing import SnapshotStoreTests
from weightledger.registry.weights.arrays import Bytes


class TestCachedSnapshots(SnapshotStoreTests):
    def make_store(self, folder: Path) -> SnapshotStore:
        return CachedSnapshots(LocalSnapshots(folder / "far"), folder / "near")


class TestCachedSnapshotsInMemory(SnapshotStoreTests):
    finds_leftovers = False

    def make_store(self, folder: Path) -> SnapshotStore:
        return CachedSnapshots(ObjectSnapshots(f"memory:/{folder}"), folder / "near")


class Far(LocalSnapshots):
    """Counts what is read of it."""

    reads = 0

    def read(
        self, uri: str, into: Bytes | None = None, arrived: Callable[[int], None] | None = None
    ) -> Bytes:
        self.reads += 1
        return super().read(uri, into, arrived)


@pytest.fixture
def far(tmp_path: Path) -> Far:
    return Far(tmp_path / "far")


@pytest.fixture
def near(tmp_path: Path, far: Far) -> CachedSnapshots:
    return CachedSnapshots(far, tmp_path / "near", max_bytes=3_500_000)


def content(seed: int, nbytes: int = 1_000_000) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def put(store: SnapshotStore, seed: int) -> str:
    with store.create(f"id-{seed}") as writer:
        writer.write_at(0, content(seed))
        return writer.commit(f"{seed}.safetensors")


def read(store: SnapshotStore, uri: str) -> bytes:
    return store.read(uri, np.empty(1_000_000, np.uint8)).tobytes()


def copies(store: CachedSnapshots) -> list[Path]:
    return sorted(store.folder.iterdir())


def test_a_second_read_is_of_the_copy(far: Far, near: CachedSnapshots) -> None:
    uri = put(near, 1)
    for _ in range(3):
        assert read(near, uri) == content(1).tobytes()
        assert near.read(uri).tobytes() == content(1).tobytes()
    assert far.reads == 1
    near.delete(uri)
    assert copies(near) == []


def test_the_copies_used_last_stay_within_the_bound(far: Far, near: CachedSnapshots) -> None:
    uris = [put(near, seed) for seed in range(4)]
    now = time.time()
    for age, uri in enumerate(uris[:3]):
        read(near, uri)
        for path in copies(near):
            if path.stat().st_mtime > now - 1:
                os.utime(path, (now - 100 + age, now - 100 + age))
    read(near, uris[0])  # used again: the second one is the oldest now
    read(near, uris[3])
    assert len(copies(near)) == 3 and far.reads == 4
    for uri in (uris[0], uris[2], uris[3]):
        read(near, uri)
    assert far.reads == 4
    read(near, uris[1])
    assert far.reads == 5


def test_a_file_larger_than_the_bound_is_read_without_a_copy(far: Far, tmp_path: Path) -> None:
    store = CachedSnapshots(far, tmp_path / "near", max_bytes=999_999)
    uri = put(store, 1)
    assert read(store, uri) == content(1).tobytes()
    assert not store.folder.exists()


@pytest.mark.parametrize("nbytes", [0, 1, 999_999, 1_000_001])
def test_a_copy_of_another_size_is_fetched_anew(nbytes: int, far: Far, near: CachedSnapshots) -> None:
    uri = put(near, 1)
    read(near, uri)
    os.truncate(copies(near)[0], nbytes)
    assert read(near, uri) == content(1).tobytes()
    assert read(near, uri) == content(1).tobytes()
    assert far.reads == 2


@pytest.fixture
def weights(far: Far) -> tuple[FileEntry, torch.Tensor]:
    payload = packed({"w": torch.randn(300_000)})
    seal(payload)
    with far.create("id-1") as writer:
        writer.write_at(0, payload.buffer)
        uri = writer.commit("one.safetensors")
    return FileEntry(1, payload.digest, uri, payload.buffer.nbytes, True), payload.tensors()["w"].clone()


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1000] ^= 1
    path.write_bytes(data)


def test_a_copy_with_wrong_bytes_is_found_by_the_digest_and_fetched_anew(
    far: Far, near: CachedSnapshots, weights: tuple[FileEntry, torch.Tensor]
) -> None:
    file, tensor = weights
    read_payload(near, file, "v1")
    flip(copies(near)[0])
    assert torch.equal(read_payload(near, file, "v1").tensors()["w"], tensor)
    assert torch.equal(read_payload(near, file, "v1").tensors()["w"], tensor)
    assert far.reads == 2


def test_a_whole_copy_does_not_hide_a_damaged_file(
    far: Far, near: CachedSnapshots, weights: tuple[FileEntry, torch.Tensor]
) -> None:
    """Who asks if the file is whole is not told of its copy, and nothing is shared with it."""
    file, _ = weights
    assert is_whole(near, file)
    flip(Path(far.where(file.uri)))
    assert not is_whole(near, file)
    with pytest.raises(CorruptionError):
        read_payload(near, file, "v1")


def full(descriptor: int, data: memoryview, offset: int) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_only_means_no_copy(
    far: Far, near: CachedSnapshots, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    uri = put(near, 1)
    with caplog.at_level(logging.WARNING), monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        for _ in range(3):
            assert read(near, uri) == content(1).tobytes()
        assert copies(near) == []
    assert [record.getMessage() for record in caplog.records] == [
        f"the cache {near.folder} is not used: [Errno 28] No space left on device"
    ]
    assert read(near, uri) == read(near, uri) == content(1).tobytes()
    assert far.reads == 4


def test_a_folder_that_cannot_be_one_only_means_no_copies(far: Far, tmp_path: Path) -> None:
    (tmp_path / "near").write_text("a file")
    store = CachedSnapshots(far, tmp_path / "near")
    uri = put(store, 1)
    assert read(store, uri) == read(store, uri) == content(1).tobytes()
    store.forget(uri)
    store.delete(uri)
    assert store.uris() == []


def test_a_link_in_the_place_of_a_copy_is_not_followed(
    far: Far, near: CachedSnapshots, tmp_path: Path
) -> None:
    uri = put(near, 1)
    read(near, uri)
    copy = copies(near)[0]
    (tmp_path / "other").write_bytes(bytes(1_000_000))
    copy.unlink()
    copy.symlink_to(tmp_path / "other")
    assert read(near, uri) == content(1).tobytes()
    assert (tmp_path / "other").read_bytes() == bytes(1_000_000)


def test_a_read_that_fails_leaves_no_copy(far: Far, near: CachedSnapshots) -> None:
    uri = put(near, 1)
    os.truncate(far.where(uri), 10)
    with pytest.raises(CorruptionError):
        read(near, uri)
    assert copies(near) == []


def test_what_a_killed_process_left_goes_with_the_next_copy(
    far: Far, near: CachedSnapshots, tmp_path: Path
) -> None:
    uri = put(near, 1)
    program = (
        "import os, sys; import numpy as np\n"
        "from weightledger.registry.store.cache import CachedSnapshots\n"
        "from weightledger.registry.store.local import LocalSnapshots\n"
        "store = CachedSnapshots(LocalSnapshots(sys.argv[1]), sys.argv[2])\n"
        "store.read('1.safetensors', np.empty(1_000_000, np.uint8), lambda done: os.kill(os.getpid(), 9))"
    )
    run = subprocess.run([sys.executable, "-c", program, far.folder, near.folder], check=False, timeout=60)
    assert run.returncode == -signal.SIGKILL
    assert [path.suffix for path in copies(near)] == [".part"]
    assert read(near, uri) == content(1).tobytes()
    assert [path.suffix for path in copies(near)] == [".copy"]


def used(store: CachedSnapshots) -> int:
    """Return what the files of a cache take up, as far as they are still there."""
    sizes = []
    for path in copies(store):
        try:
            sizes.append(path.stat().st_size)
        except FileNotFoundError:
            pass
    return sum(sizes)


def test_many_processes_share_a_cache(far: Far, near: CachedSnapshots) -> None:
    """Each reads what it asks for, while copies come and go; in the end they are within the bound."""
    near.folder.mkdir()
    for seed in range(6):
        put(near, seed)
    program = (
        "import sys, random; import numpy as np\n"
        "from hashlib import sha256\n"
        "from weightledger.registry.store.cache import CachedSnapshots\n"
        "from weightledger.registry.store.local import LocalSnapshots\n"
        "far = LocalSnapshots(sys.argv[1])\n"
        "near = CachedSnapshots(far, sys.argv[2], max_bytes=3_500_000)\n"
        "draw = random.Random(int(sys.argv[3]))\n"
        "wanted = {uri: sha256(far.read(uri)).digest() for uri in far.uris()}\n"
        "for turn in range(150):\n"
        "    uri = draw.choice(sorted(wanted))\n"
        "    if draw.random() < 0.1: near.forget(uri)\n"
        "    data = near.read(uri, np.empty(1_000_000, np.uint8))\n"
        "    assert sha256(data).digest() == wanted[uri], uri\n"
    )
    children = [
        subprocess.Popen([sys.executable, "-W", "error", "-c", program, far.folder, near.folder, str(seed)])
        for seed in range(4)
    ]
    most, deadline = 0, time.monotonic() + 90
    while any(child.poll() is None for child in children) and time.monotonic() < deadline:
        most = max(most, used(near))
        time.sleep(0.002)
    assert [child.wait(1) for child in children] == [0] * 4
    # Each process may be about to make room for what it has just begun.
    assert 0 < most <= 3_500_000 + 4 * 1_000_000
    assert 0 < used(near) <= 3_500_000
    assert {path.suffix for path in copies(near)} == {".copy"}


def test_stores_that_share_a_folder_never_share_copies(tmp_path: Path) -> None:
    stores = [CachedSnapshots(Far(tmp_path / name), tmp_path / "near") for name in ("a", "b")]
    for seed, store in enumerate(stores):
        with store.create("id") as writer:
            writer.write_at(0, content(seed))
            writer.commit("same.safetensors")
    for _ in range(2):
        for seed, store in enumerate(stores):
            assert read(store, "same.safetensors") == content(seed).tobytes()


def test_a_cache_stands_before_a_bucket_and_not_before_a_folder(tmp_path: Path) -> None:
    store = open_snapshots("memory://some", cache=tmp_path / "near", cache_bytes=5)
    assert isinstance(store, CachedSnapshots) and store.max_bytes == 5
    with pytest.raises(ValueError, match="expected no cache, since the snapshots are in a folder"):
        open_snapshots(tmp_path / "far", cache=tmp_path / "near")
    with pytest.raises(ValueError, match="expected a number of bytes for the cache, found -1"):
        CachedSnapshots(store, tmp_path, max_bytes=-1)


def test_what_the_store_refuses_is_its_own_error(far: Far, near: CachedSnapshots) -> None:
    Path(far.where("folder.safetensors")).mkdir(parents=True)
    with pytest.raises(StorageError, match=r"folder\.safetensors"):
        near.read("folder.safetensors")

"""One rule for files of ours: no link is followed, nothing is waited for, and what is refused is named."""

from __future__ import annotations

import errno
import os
import pty
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.registry.helpers import exit_code_of, file_of, files, in_child, publish_many, value_of, weights
from weightledger.registry import CorruptionError, Registry, StorageError, WeightLedgerError
from weightledger.registry import files as own_files
from weightledger.registry.locks.folder import FolderLocks
from weightledger.registry.store import local
from weightledger.registry.store.local import LocalSnapshots

pytestmark = pytest.mark.timeout(60)

KINDS = ["link", "dangling link", "loop", "pipe", "socket", "folder"]


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    with Registry.open(tmp_path / "r") as opened:
        yield opened


def put(kind: str, path: Path, elsewhere: Path) -> None:
    """Let something that is no regular file stand at a path; links lead to `elsewhere`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    if kind == "link":
        path.symlink_to(elsewhere)
    elif kind == "dangling link":
        path.symlink_to(elsewhere.with_name("nowhere"))
    elif kind == "loop":
        path.symlink_to(path.name)
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        with socket.socket(socket.AF_UNIX) as made:
            # A socket's path is short, so that it is bound from beside it.
            here = Path.cwd()
            os.chdir(path.parent)
            try:
                made.bind(path.name)
            finally:
                os.chdir(here)


# ---------------------------------------------------------------------- snapshots


@pytest.mark.parametrize("kind", KINDS)
def test_a_snapshot_that_is_no_file_is_told_and_not_waited_for(
    registry: Registry, tmp_path: Path, kind: str
) -> None:
    publish_many(registry, 2)
    path = file_of(registry, 1)
    copy = tmp_path / "copy"
    copy.write_bytes(path.read_bytes())
    put(kind, path, copy)
    target = {"w": torch.zeros(4), "b": torch.zeros(2)}
    calls: list[Callable[[], Any]] = [
        lambda: registry.load(1),
        lambda: registry.restore(1, target),
        lambda: registry.tensor_hashes(1),
        lambda: registry.export(1, tmp_path / "out.safetensors"),
    ]
    for call in calls:
        with pytest.raises((CorruptionError, StorageError), match=path.name):
            call()
    assert not target["w"].any() and not (tmp_path / "out.safetensors").exists()
    (fault,) = registry.verify()
    assert (fault.kind, fault.versions, fault.path) == ("corrupt", (1,), path.name)
    made = registry.publish(weights(1))
    assert value_of(registry.load(made)) == 1, (
        "equal content is written anew, and not shared with what is no file"
    )
    assert copy.exists() and not (tmp_path / "nowhere").exists()


def test_a_loop_of_links_hides_no_other_fault(registry: Registry) -> None:
    publish_many(registry, 3)
    put("loop", file_of(registry, 1), Path())
    file_of(registry, 3).unlink()
    put("loop", Path(registry.location) / "snapshots" / "stray.safetensors", Path())
    assert {(fault.kind, fault.versions) for fault in registry.verify()} == {
        ("corrupt", (1,)),
        ("missing", (3,)),
    }


def test_a_snapshots_folder_may_be_a_link(tmp_path: Path) -> None:
    """A large disk elsewhere is a common reason for it."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "snapshots").symlink_to(tmp_path / "disk")
    with Registry.open(tmp_path / "r") as registry:
        publish_many(registry, 3)
        assert value_of(registry.load(2)) == 2 and registry.verify() == []
        registry.prune(keep_last=1, keep_every=2)
        assert [path.name for path in (tmp_path / "disk").iterdir()] and len(files(registry)) == 2


# ---------------------------------------------------------------------- locks


@pytest.mark.parametrize("kind", KINDS)
def test_a_lock_that_is_no_file_is_refused_and_what_it_leads_to_stays(tmp_path: Path, kind: str) -> None:
    precious = tmp_path / "precious"
    precious.write_bytes(b"x" * 2000)
    put(kind, FolderLocks(tmp_path).policy_file("main"), precious)
    with pytest.raises(StorageError, match="policy-"), FolderLocks(tmp_path).policy("main", timeout=1):
        pass
    with pytest.raises(StorageError, match="policy-"), FolderLocks(tmp_path).try_policy("main"):
        pass
    keeper = FolderLocks(tmp_path)
    put(kind, tmp_path / "locks" / f"run-{keeper.current().id}", precious)
    with pytest.raises(StorageError, match="run-"):
        keeper.keep_alive()
    with pytest.raises(StorageError, match="run-"):
        keeper.alive(keeper.current().id)
    assert precious.read_bytes() == b"x" * 2000 and not (tmp_path / "nowhere").exists()


def test_a_lock_that_has_a_second_name_is_held_and_not_written_to(tmp_path: Path) -> None:
    """As in a copy of hard links, or if somebody gave their own file the lock's name."""
    precious = tmp_path / "precious"
    precious.write_bytes(b"x" * 2000)
    lock = FolderLocks(tmp_path).policy_file("main")
    lock.parent.mkdir()
    lock.hardlink_to(precious)
    with FolderLocks(tmp_path).policy("main"), FolderLocks(tmp_path).try_policy("main") as mine:
        assert not mine
    assert precious.read_bytes() == b"x" * 2000


# ---------------------------------------------------------------------- the database


def _open_and_look(folder: Path) -> str:
    try:
        with Registry.open(folder) as registry:
            return repr(registry.head())
    except WeightLedgerError as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("name", ["registry.db", "registry.db-wal", "registry.db-shm", "registry.db-journal"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_database_that_is_no_file_is_refused_and_not_waited_for(
    tmp_path: Path, kind: str, name: str
) -> None:
    with Registry.open(tmp_path / "r") as registry:
        publish_many(registry, 1)
    elsewhere = tmp_path / "elsewhere"
    path = tmp_path / "r" / name
    if path.exists():
        path.rename(elsewhere)
    else:
        elsewhere.touch()
    before = elsewhere.read_bytes()
    put(kind, path, elsewhere)
    said = in_child(_open_and_look, tmp_path / "r")
    assert said.startswith("StorageError") and name in said
    assert elsewhere.read_bytes() == before and not (tmp_path / "nowhere").exists()


# ---------------------------------------------------------------------- exports


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o444, 0o755])
def test_an_export_keeps_the_mode_of_the_file_that_it_replaces(
    registry: Registry, tmp_path: Path, mode: int
) -> None:
    publish_many(registry, 1)
    target = tmp_path / "out.safetensors"
    target.write_bytes(b"old")
    target.chmod(mode)
    registry.export(1, target)
    assert stat.S_IMODE(target.stat().st_mode) == mode and target.stat().st_size > 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.safetensors", "r"]


def test_a_new_export_has_the_mode_that_new_files_have(registry: Registry, tmp_path: Path) -> None:
    publish_many(registry, 1)
    (tmp_path / "plain").touch()
    registry.export(1, tmp_path / "out.safetensors")
    assert (tmp_path / "out.safetensors").stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.parametrize("kind", KINDS)
def test_an_export_replaces_nothing_but_a_file(registry: Registry, tmp_path: Path, kind: str) -> None:
    publish_many(registry, 1)
    target, elsewhere = tmp_path / "out.safetensors", tmp_path / "elsewhere"
    elsewhere.write_bytes(b"mine")
    put(kind, target, elsewhere)
    before = target.lstat()
    with pytest.raises(StorageError, match=r"out\.safetensors is not written over: it is a .*another path"):
        registry.export(1, target)
    after = target.lstat()
    assert (after.st_mode, after.st_ino) == (before.st_mode, before.st_ino)
    assert elsewhere.read_bytes() == b"mine" and not (tmp_path / "nowhere").exists()


def test_an_export_replaces_no_device(registry: Registry) -> None:
    publish_many(registry, 1)
    one, other = pty.openpty()
    try:
        name = os.ttyname(other)
        with pytest.raises(StorageError, match=f"{name} is not written over: it is a device"):
            registry.export(1, name)
    finally:
        os.close(one)
        os.close(other)


def test_an_export_that_fails_names_the_path_that_was_asked_for(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_many(registry, 1)
    target = tmp_path / "nowhere" / "out.safetensors"
    with pytest.raises(StorageError, match="there is no folder") as caught:
        registry.export(1, target)
    assert str(target) in str(caught.value) and ".tmp" not in str(caught.value)
    longest = tmp_path / ("x" * 243 + ".safetensors")
    assert registry.export(1, longest).exists(), "a name that is as long as a name can be"

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match=r"out\.safetensors.*No space left.*make room") as caught:
        registry.export(1, tmp_path / "out.safetensors")
    assert ".tmp" not in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r", longest.name]


# ---------------------------------------------------------------------- what cannot be removed


class Refusing:
    """Stands in for a function of the operating system that works no more, for paths that it is told of."""

    def __init__(self, function: Callable[..., Any], when: Callable[[str], bool] = lambda path: True) -> None:
        self.function = function
        self.when = when
        self.refused: list[str] = []

    def __get__(self, instance: object, owner: type) -> Callable[..., Any]:
        return lambda *args, **kwargs: self(instance, *args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        path = str(args[0])
        if self.when(path):
            self.refused.append(path)
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return self.function(*args, **kwargs)


@pytest.mark.parametrize("size", [4, 3 << 20], ids=["small", "big"])
def test_a_disk_that_neither_writes_nor_removes_is_one_storage_error(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """As one that was mounted anew for reading only; the next open clears away what stayed."""
    registry.publish(weights(1, size))
    with monkeypatch.context() as patch:
        patch.setattr(local, "_write", Refusing(local._write))
        patch.setattr(Path, "unlink", Refusing(Path.unlink))
        with pytest.raises(StorageError, match="could not be written") as caught:
            registry.publish(weights(2, size))
    assert any("could not be removed either" in note for note in caught.value.__notes__)
    assert registry.head().number == 1
    with Registry.open(registry.location) as again:
        assert len(files(again)) == 1 and again.verify() == []


def test_a_writer_that_is_left_tells_what_it_could_not_remove(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LocalSnapshots(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", Refusing(Path.unlink))
        with pytest.raises(StorageError, match=r"\.one\.tmp could not be removed"), store.create("one"):
            pass
        with pytest.raises(ZeroDivisionError) as caught, store.create("two"):
            raise ZeroDivisionError
        assert any(".two.tmp could not be removed" in note for note in caught.value.__notes__)
    assert store.leftovers() == ["one", "two"]


@pytest.mark.parametrize("also", [False, True], ids=["once", "for good"])
def test_a_publish_that_fails_when_its_file_has_its_name_leaves_no_stray(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, also: bool
) -> None:
    """The temporary name cannot be removed, and maybe not the file's own name either."""
    publish_many(registry, 1)
    refusing = Refusing(Path.unlink, lambda path: also or path.endswith(".tmp"))
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refusing)
        with pytest.raises(StorageError, match="could not be written"):
            registry.publish(weights(2))
        assert refusing.refused
        assert [fault.kind for fault in registry.verify()] == ["stray"], "the temporary file"
    assert registry.get(2).state == "lost" and registry.head().number == 1
    with Registry.open(registry.location) as again:
        assert len(files(again)) == 1 and again.verify() == []
        assert again.publish(weights(2)).number == 3


def _lose_a_version_and_die(folder: Path) -> None:
    """Die after the row says that the version is lost, before its file is deleted."""
    registry = Registry.open(folder)
    commit, delete = local.LocalWriter.commit, LocalSnapshots.delete

    def fail(writer: local.LocalWriter, name: str) -> str:
        commit(writer, name)
        raise StorageError("no")

    def die(store: LocalSnapshots, uri: str) -> None:
        os.kill(os.getpid(), 9)
        delete(store, uri)

    local.LocalWriter.commit = fail  # type: ignore[method-assign]
    LocalSnapshots.delete = die  # type: ignore[method-assign]
    registry.publish(weights(2))


def test_a_file_of_a_lost_version_goes_however_its_writer_ends(registry: Registry) -> None:
    publish_many(registry, 1)
    assert exit_code_of(_lose_a_version_and_die, registry.location) == -9
    assert len(files(registry)) == 2 and registry.get(2).state == "lost"
    with Registry.open(registry.location) as again:
        assert len(files(again)) == 1 and again.verify() == []


def test_what_a_prune_beside_it_removes_is_no_stray(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is there when the folder is listed, and gone with its row when the rows are asked."""
    publish_many(registry, 3)
    listed = LocalSnapshots.uris
    calls: list[list[str]] = []

    def list_then_prune(store: LocalSnapshots) -> list[str]:
        found = listed(store)
        if not calls:
            calls.append(found)
            registry.prune(keep_last=1)
        return found

    monkeypatch.setattr(LocalSnapshots, "uris", list_then_prune)
    assert registry.verify() == [] and len(calls[0]) == 3


# ---------------------------------------------------------------------- the module itself


def test_a_pipe_with_a_writer_at_the_other_end_is_no_file_either(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    opened = threading.Event()

    def write() -> None:
        descriptor = os.open(tmp_path / "pipe", os.O_RDWR)
        opened.set()
        done.wait(30)
        os.close(descriptor)

    done = threading.Event()
    thread = threading.Thread(target=write)
    thread.start()
    assert opened.wait(30)
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    for flags in (os.O_RDONLY, os.O_WRONLY, os.O_RDWR, os.O_RDWR | os.O_CREAT):
        with pytest.raises(own_files.IrregularFileError, match="it is a pipe"):
            own_files.open_regular(tmp_path / "pipe", flags)
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
    done.set()
    thread.join()


def test_folders_on_the_way_may_be_links(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    os.close(own_files.open_regular(tmp_path / "link" / "file", os.O_WRONLY | os.O_CREAT))
    assert (tmp_path / "real" / "file").is_file()
    assert own_files.is_there(tmp_path / "link" / "file")
    assert not own_files.is_there(tmp_path / "link" / "other")
    assert not own_files.is_there(tmp_path / "real" / "file" / "below a file")
    with pytest.raises(StorageError, match=r"x cannot be used: File name too long"):
        own_files.is_there(tmp_path / ("x" * 300))

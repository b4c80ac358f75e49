"""Runs and locks, with real processes that are really killed."""

from __future__ import annotations

import errno
import fcntl
import gc
import getpass
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.registry.rows import run_python
from weightledger.registry.errors import InUseError, StorageError
from weightledger.registry.locks import file_tag
from weightledger.registry.locks.folder import FolderLocks, file_lock
from weightledger.registry.locks.runs import user_name

KEEP = """
import sys
from pathlib import Path
from weightledger.registry.locks.folder import FolderLocks
keeper = FolderLocks(Path(sys.argv[1]))
print(keeper.keep_alive().id, flush=True)
sys.stdin.read()
"""

LOCK = """
import sys
from pathlib import Path
from weightledger.registry.locks.folder import FolderLocks
with FolderLocks(Path(sys.argv[1])).policy(sys.argv[2]):
    print("locked", flush=True)
    sys.stdin.read()
"""


@contextmanager
def child(code: str, *arguments: object) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run a program until its first line, which is given with it; it ends with the block at the latest."""
    process = subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdin is not None
    try:
        yield process, process.stdout.readline().strip()
    finally:
        process.stdin.close()
        process.wait(timeout=60)
        process.stdout.close()


def kill(process: subprocess.Popen[str]) -> None:
    os.kill(process.pid, signal.SIGKILL)
    process.wait(timeout=60)


def test_a_process_is_one_run_however_many_keepers_it_has(tmp_path: Path) -> None:
    run = FolderLocks(tmp_path / "one").current()
    assert FolderLocks(tmp_path / "two").current() == run
    assert (len(run.id), run.pid, run.user) == (32, os.getpid(), user_name())
    assert run.started_at.utcoffset() is not None
    assert run.program


def test_a_run_that_never_asked_for_it_is_not_alive(tmp_path: Path) -> None:
    keeper = FolderLocks(tmp_path)
    assert not keeper.alive(keeper.current().id)
    assert not keeper.alive("f" * 32)
    assert list(tmp_path.iterdir()) == []


def test_a_run_is_alive_while_its_process_lives_and_dead_after_a_kill(tmp_path: Path) -> None:
    keeper = FolderLocks(tmp_path)
    with child(KEEP, tmp_path) as (process, run):
        assert keeper.alive(run)
        assert keeper.alive(run)
        kill(process)
        assert not keeper.alive(run)


def test_a_dead_run_leaves_no_lock_file_once_somebody_asked(tmp_path: Path) -> None:
    with child(KEEP, tmp_path) as (process, run):
        kill(process)
    assert [path.name for path in (tmp_path / "locks").iterdir()] == [f"run-{run}"]
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(FolderLocks(tmp_path).alive, [run] * 8)) == [False] * 8
    assert list((tmp_path / "locks").iterdir()) == []


def test_this_process_is_alive_to_itself_until_its_last_keeper_closes(tmp_path: Path) -> None:
    first, second = FolderLocks(tmp_path), FolderLocks(tmp_path)
    run = first.keep_alive().id
    assert first.keep_alive().id == run == second.keep_alive().id
    assert first.alive(run)
    first.close()
    first.close()
    assert second.alive(run)
    assert first.alive(run)
    second.close()
    assert not second.alive(run)
    assert list((tmp_path / "locks").iterdir()) == []


def test_others_see_this_process_alive(tmp_path: Path) -> None:
    keeper = FolderLocks(tmp_path)
    run = keeper.keep_alive().id
    code = (
        "import sys; from pathlib import Path; from weightledger.registry.locks.folder import FolderLocks\n"
    )
    code += "print(FolderLocks(Path(sys.argv[1])).alive(sys.argv[2]))"
    assert run_python(code, tmp_path, run).stdout.strip() == "True"
    keeper.close()
    assert run_python(code, tmp_path, run).stdout.strip() == "False"


def test_a_run_is_alive_per_folder(tmp_path: Path) -> None:
    here, there = FolderLocks(tmp_path / "here"), FolderLocks(tmp_path / "there")
    run = here.keep_alive().id
    assert not there.alive(run)
    here.close()


def test_a_lock_that_looks_free_for_a_moment_still_ends_up_held(tmp_path: Path) -> None:
    """Those who look remove a free file; the owner notices and locks the file that is really there."""
    code = """
import sys, threading
from pathlib import Path
from weightledger.registry.locks.folder import FolderLocks
folder = Path(sys.argv[1])
keeper, other = FolderLocks(folder), FolderLocks(folder)
run = keeper.current().id
stop = threading.Event()
def look():
    while not stop.is_set():
        other.alive(run)
threads = [threading.Thread(target=look) for _ in range(3)]
for thread in threads: thread.start()
for _ in range(200):
    keeper.keep_alive()
    assert (folder / "locks" / f"run-{run}").exists()
    keeper.close()
stop.set()
for thread in threads: thread.join()
"""
    run_python(code, tmp_path)


def test_a_forked_child_is_another_run_and_does_not_keep_its_parent_alive(tmp_path: Path) -> None:
    code = """
import os, signal, sys
from pathlib import Path
from weightledger.registry.locks.folder import FolderLocks
keeper = FolderLocks(Path(sys.argv[1]))
parent = keeper.keep_alive()
read, write = os.pipe()
if os.fork() == 0:
    os.close(write)
    os.read(read, 1)  # until the parent is dead
    child = keeper.current()
    assert child.id != parent.id and child.pid == os.getpid()
    while keeper.alive(parent.id): pass  # the kernel closes a dead process's files in an order of its own
    assert keeper.keep_alive() == child and keeper.alive(child.id)
    keeper.close()
    print("child is done", flush=True)
    os._exit(0)
os.close(read)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = run_python(code, tmp_path, check=False)
    assert done.returncode == -signal.SIGKILL
    assert done.stdout == "child is done\n", done.stderr


def test_a_child_that_ends_first_leaves_its_parent_alive(tmp_path: Path) -> None:
    code = """
import os, subprocess, sys
from pathlib import Path
from weightledger.registry.locks.folder import FolderLocks
keeper = FolderLocks(Path(sys.argv[1]))
run = keeper.keep_alive().id
child = os.fork()
if child == 0:
    keeper.close()
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
look = "import sys; from pathlib import Path; from weightledger.registry.locks.folder import FolderLocks;"
look += "sys.exit(not FolderLocks(Path(sys.argv[1])).alive(sys.argv[2]))"
sys.exit(subprocess.run([sys.executable, "-c", look, sys.argv[1], run]).returncode)
"""
    run_python(code, tmp_path)


def test_a_user_without_a_name_is_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown() -> str:
        raise KeyError("getpwuid(): uid not found: 4711")

    assert user_name() == getpass.getuser()
    monkeypatch.setattr(getpass, "getuser", unknown)
    assert user_name() == f"uid-{os.getuid()}"


def test_a_policy_lock_keeps_other_processes_out_and_names_its_holder(tmp_path: Path) -> None:
    with child(LOCK, tmp_path, "main") as (process, said):
        assert said == "locked"
        with (
            pytest.raises(InUseError, match=rf"policy 'main'.*process {process.pid} of .* on "),
            FolderLocks(tmp_path).policy("main", timeout=0.1),
        ):
            pass
        with FolderLocks(tmp_path).try_policy("main") as mine:
            assert not mine
        with FolderLocks(tmp_path).policy("opponent", timeout=0.1):
            pass


def test_a_policy_lock_dies_with_its_holder(tmp_path: Path) -> None:
    with child(LOCK, tmp_path, "main") as (process, _):
        kill(process)
        with FolderLocks(tmp_path).try_policy("main") as mine:
            assert mine


def test_a_policy_lock_keeps_other_threads_out(tmp_path: Path) -> None:
    inside = 0
    most = 0
    rounds = 0

    def enter(_: int) -> None:
        nonlocal inside, most, rounds
        for _ in range(50):
            with FolderLocks(tmp_path).policy("main"):
                inside += 1
                most = max(most, inside)
                rounds += 1
                inside -= 1

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(enter, range(4)))
    assert (most, rounds) == (1, 200)


def test_processes_take_turns(tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
from weightledger.registry.locks.folder import FolderLocks
counter = Path(sys.argv[1]) / "counter"
for _ in range(50):
    with FolderLocks(Path(sys.argv[1])).policy("main"):
        counter.write_text(str(int(counter.read_text()) + 1))
"""
    (tmp_path / "counter").write_text("0")
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda _: run_python(code, tmp_path), range(4)))
    assert (tmp_path / "counter").read_text() == "200"


def test_a_thread_that_waits_for_another_gives_up_in_time(tmp_path: Path) -> None:
    with FolderLocks(tmp_path).policy("main"), ThreadPoolExecutor(1) as threads:

        def enter() -> None:
            with FolderLocks(tmp_path).policy("main", timeout=0.05):
                pass

        def attempt() -> bool:
            with FolderLocks(tmp_path).try_policy("main") as mine:
                return mine

        with pytest.raises(InUseError, match=f"process {os.getpid()}"):
            threads.submit(enter).result()
        assert not threads.submit(attempt).result()
    with FolderLocks(tmp_path).try_policy("main") as mine:
        assert mine


def test_whoever_waited_gets_the_lock_when_it_is_let_go(tmp_path: Path) -> None:
    got = threading.Event()

    def enter() -> None:
        with FolderLocks(tmp_path).policy("main", timeout=60):
            got.set()

    with child(LOCK, tmp_path, "main") as (process, _):
        waiting = threading.Thread(target=enter)
        waiting.start()
        assert not got.is_set()
        kill(process)
        waiting.join(timeout=60)
        assert got.is_set()


def test_a_lock_is_free_again_after_an_error_inside(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="inside"), FolderLocks(tmp_path).policy("main"):
        raise RuntimeError("inside")
    with FolderLocks(tmp_path).try_policy("main") as mine:
        assert mine


def test_a_fork_while_the_lock_is_held_leaves_it_to_the_parent(tmp_path: Path) -> None:
    """The child neither has it nor keeps it from ending with its holder."""
    code = """
import os, signal, sys
from pathlib import Path
from weightledger.registry.locks.folder import FolderLocks
folder = Path(sys.argv[1])
read, write = os.pipe()
ready, tried = os.pipe()
with FolderLocks(folder).policy("main"):
    if os.fork() == 0:
        os.close(write)
        with FolderLocks(folder).try_policy("main") as mine:
            assert not mine
        os.write(tried, b".")
        os.read(read, 1)  # until the parent is dead
        with FolderLocks(folder).policy("main", timeout=30):
            pass
        print("child is done", flush=True)
        os._exit(0)
    os.read(ready, 1)  # until the child has tried
    os.kill(os.getpid(), signal.SIGKILL)
"""
    done = run_python(code, tmp_path, check=False)
    assert done.returncode == -signal.SIGKILL
    assert done.stdout == "child is done\n", done.stderr


@pytest.mark.parametrize("name", ["a/b", "../up", "x" * 255, "späte Läufe ☃", "CON"])
def test_a_policy_may_be_called_anything(tmp_path: Path, name: str) -> None:
    with FolderLocks(tmp_path).policy(name):
        assert [path.parent for path in tmp_path.rglob("*") if path.is_file()] == [tmp_path / "locks"]
    assert FolderLocks(tmp_path).policy_file("main") != FolderLocks(tmp_path).policy_file("MAIN")


def test_a_folder_where_no_lock_can_be_made_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "locks").write_text("in the way")
    with pytest.raises(StorageError, match="locks"), FolderLocks(tmp_path).policy("main"):
        pass
    with pytest.raises(StorageError, match="locks"):
        FolderLocks(tmp_path).keep_alive()
    with pytest.raises(StorageError, match="locks"):
        FolderLocks(tmp_path).alive("f" * 32)


def test_a_file_system_without_locks_is_a_storage_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    open_files = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    with pytest.raises(StorageError, match="file system with locks"), FolderLocks(tmp_path).policy("main"):
        pass
    with pytest.raises(StorageError, match="file system with locks"):
        FolderLocks(tmp_path).keep_alive()
    assert len(os.listdir("/proc/self/fd")) == open_files  # noqa: PTH208


def test_a_damaged_note_still_names_another_process(tmp_path: Path) -> None:
    path = FolderLocks(tmp_path).policy_file("main")
    path.parent.mkdir()
    for note in (b"", b"{", b"[]", b"\xff"):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, note, 0)
        with (
            pytest.raises(InUseError, match="another process holds it"),
            FolderLocks(tmp_path).policy("main", timeout=0.01),
        ):
            pass
        os.close(descriptor)


def test_a_lock_of_something_else_names_that(tmp_path: Path) -> None:
    path = tmp_path / "locks" / "schema"
    with file_lock(path, what="the schema", timeout=1), ThreadPoolExecutor(1) as threads:

        def enter() -> None:
            with file_lock(path, what="the schema", timeout=0.01):
                pass

        with pytest.raises(InUseError, match=r"the schema: expected its lock within 0\.01 s"):
            threads.submit(enter).result()


# ---------------------------------------------------------------------- one folder, many spellings and lives

ALIVE = "import sys; from pathlib import Path; from weightledger.registry.locks.folder import FolderLocks\n"
ALIVE += "print(FolderLocks(Path(sys.argv[1])).alive(sys.argv[2]))"


def seen_alive(folder: Path, run: str) -> bool:
    """Ask another process."""
    return run_python(ALIVE, folder, run).stdout.strip() == "True"


def spellings(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Return ways to name one folder."""
    link = folder.with_name(f"link-to-{folder.name}")
    link.symlink_to(folder, target_is_directory=True)
    monkeypatch.chdir(folder.parent)
    return [folder, link, Path(folder.name), Path(link.name), folder / ".." / folder.name, link / "."]


def test_a_folder_by_many_spellings_has_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "r").mkdir()
    keepers = [FolderLocks(each) for each in spellings(tmp_path / "r", monkeypatch)]
    run = keepers[0].keep_alive().id
    for keeper in keepers:
        assert keeper.keep_alive().id == run
    for keeper in keepers[:-1]:
        keeper.close()
        assert all(each.alive(run) for each in keepers) and seen_alive(tmp_path / "r", run)
    keepers[-1].close()
    assert not keepers[0].alive(run) and list((tmp_path / "r" / "locks").iterdir()) == []


def test_a_folder_that_is_mounted_at_a_second_place_has_one_run(tmp_path: Path) -> None:
    """A hard link is what a mount is to us: another path to the very file, that no path resolves to the first."""
    here, there = tmp_path / "here", tmp_path / "there"
    first, second = FolderLocks(here), FolderLocks(there)
    run = first.keep_alive().id
    (there / "locks").mkdir(parents=True)
    (there / "locks" / f"run-{run}").hardlink_to(here / "locks" / f"run-{run}")
    assert second.alive(run) and second.keep_alive().id == run
    first.close()
    assert second.alive(run)
    second.close()


def test_threads_queue_at_a_policy_however_they_spell_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "r").mkdir()
    ways = spellings(tmp_path / "r", monkeypatch)
    inside = most = rounds = 0

    def enter(way: Path) -> None:
        nonlocal inside, most, rounds
        for _ in range(30):
            with FolderLocks(way).policy("main"):
                inside += 1
                most = max(most, inside)
                rounds += 1
                inside -= 1

    with ThreadPoolExecutor(len(ways)) as threads:
        list(threads.map(enter, ways))
    assert (most, rounds) == (1, 30 * len(ways))


def test_a_folder_that_is_made_anew_has_its_run_alive(tmp_path: Path) -> None:
    """As in a notebook that clears the folder and runs its first cells again."""
    folder = tmp_path / "r"
    old = FolderLocks(folder)
    run = old.keep_alive().id
    shutil.rmtree(folder)
    folder.mkdir()
    assert not old.alive(run) and not seen_alive(folder, run)
    new = FolderLocks(folder)
    assert new.keep_alive().id == run
    assert new.alive(run) and old.alive(run) and seen_alive(folder, run)
    old.close()
    assert new.alive(run) and seen_alive(folder, run), (
        "the old folder's keeper takes nothing from the new one"
    )
    new.close()
    assert not seen_alive(folder, run)


def test_a_run_whose_lock_was_removed_is_alive_again_when_it_looks(tmp_path: Path) -> None:
    keeper, never = FolderLocks(tmp_path), FolderLocks(tmp_path)
    run = keeper.keep_alive().id
    open_files = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    for remove in (lambda: shutil.rmtree(tmp_path / "locks"), (tmp_path / "locks" / f"run-{run}").unlink):
        remove()
        never.look_again()
        assert not seen_alive(tmp_path, run)
        keeper.look_again()
        assert keeper.alive(run) and seen_alive(tmp_path, run)
    assert len(os.listdir("/proc/self/fd")) == open_files  # noqa: PTH208
    keeper.close()
    keeper.look_again()
    assert not keeper.alive(run)


def test_a_policys_files_are_known_by_their_tag_before_the_policy_is(tmp_path: Path) -> None:
    tag = file_tag("main")
    assert not FolderLocks(tmp_path).tag_is_held(tag)
    with FolderLocks(tmp_path).try_tag(tag) as free:
        assert free
    with child(LOCK, tmp_path, "main") as (process, _):
        assert FolderLocks(tmp_path).tag_is_held(tag) and not FolderLocks(tmp_path).tag_is_held(
            file_tag("other")
        )
        with FolderLocks(tmp_path).try_tag(tag) as free:
            assert not free
        with FolderLocks(tmp_path).try_tag(file_tag("other")) as free:
            assert free
        kill(process)
    with FolderLocks(tmp_path).try_tag(tag) as free, FolderLocks(tmp_path).try_policy("main") as mine:
        assert free and not mine, "nobody writes while the tag is locked"


def test_a_keeper_that_is_let_go_keeps_nothing_alive(tmp_path: Path) -> None:
    first, second = FolderLocks(tmp_path), FolderLocks(tmp_path)
    run = first.keep_alive().id
    second.keep_alive()
    del first
    gc.collect()
    assert second.alive(run) and seen_alive(tmp_path, run)
    del second
    gc.collect()
    assert not FolderLocks(tmp_path).alive(run) and not seen_alive(tmp_path, run)

"""The locks of a registry in a folder: files that the operating system locks, and unlocks when their holder dies.

Rules it keeps:
- Liveness is an operating-system lock, never a process id or a heartbeat: the kernel drops it however the process
  ends, and a reused process id cannot revive it.
- A lock is the file itself, by device and inode: two spellings of one folder share it, and a folder that is made anew
  under an old name has locks of its own.
- A forked child is another run, and never keeps its parent's locks alive.
- Every wait has a time-out, and whoever gives up says who holds the lock.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TypeAlias

from weightledger.registry import files
from weightledger.registry.errors import InUseError, StorageError
from weightledger.registry.locks import LOCK_SECONDS, TAG_CHARS, policy_key
from weightledger.registry.locks.runs import RunInfo, this_run

_FIRST_PAUSE, _LONGEST_PAUSE = 0.0005, 0.01
_NOTE_BYTES = 512
_BUSY = (errno.EAGAIN, errno.EACCES)
_MEND = "Mend the permissions of the registry's folder, or remove what is in the way."

_Identity: TypeAlias = tuple[int, int]
"""Device and inode of a file."""
_LockKey: TypeAlias = tuple[_Identity | str, str]
"""The folder, by its path while there is none, and the name of a lock file."""


class FolderLocks:
    """Locks as files in `locks/` of a registry's folder.

    All of a process agree on its run, so that two registries opened beside each other are one writer.
    """

    def __init__(self, folder: Path) -> None:
        self._locks = Path(os.path.abspath(folder)) / "locks"
        self._kept = False
        # Whoever forgets to close it keeps nobody alive; at the very end the process's own end does that.
        weakref.finalize(self, _let_go, id(self)).atexit = False

    def __repr__(self) -> str:
        return f"<FolderLocks {self._locks} run {self.current().id}>"

    def current(self) -> RunInfo:
        """Return this process's run."""
        return this_run()

    def keep_alive(self) -> RunInfo:
        """Let every process that shares the folder see this run as alive, until this process ends or `close`.

        Raises:
            StorageError: The lock file could not be made, or the file system has no locks.
        """
        run = self.current()
        _process.hold(id(self), self._lock_file(run.id))
        self._kept = True
        return run

    def look_again(self) -> None:
        """Make the lock file of a run that is kept alive anew, if somebody removed it or its folder.

        Raises:
            StorageError: The lock file could not be made, or the file system has no locks.
        """
        if self._kept:
            self.keep_alive()

    def alive(self, run_id: str) -> bool:
        """Tell whether a process keeps that run alive now; a run that never asked for it is not.

        The lock file of a dead run is removed on the way.

        Raises:
            StorageError: The lock file could not be read, or the file system has no locks.
        """
        path = self._lock_file(run_id)
        return _process.holds(path) or _someone_holds(path)

    def close(self) -> None:
        """Stop keeping this process's run alive, once everybody of the folder that asked for it is closed."""
        self._kept = False
        _process.let_go(id(self))

    def _lock_file(self, run_id: str) -> Path:
        return self._locks / f"run-{run_id}"

    # ------------------------------------------------------------------ policies

    @contextmanager
    def policy(self, policy: str, timeout: float = LOCK_SECONDS) -> Iterator[None]:
        """Hold the one lock of a policy, against other processes and other threads. It is not re-entrant.

        Args:
            policy: Name of the policy.
            timeout: Seconds to wait for the present holder.

        Raises:
            InUseError: Somebody else kept the lock for that long; names them.
            StorageError: The lock file could not be made, or the file system has no locks.
        """
        with file_lock(self.policy_file(policy), what=f"policy {policy!r}", timeout=timeout):
            yield

    @contextmanager
    def try_policy(self, policy: str) -> Iterator[bool]:
        """Hold the lock of a policy if it is free now; gives whether it was."""
        with _try_lock(self.policy_file(policy), f"policy {policy!r}") as mine:
            yield mine

    def policy_is_held(self, policy: str) -> bool:
        """Tell whether somebody, this process included, holds the lock of a policy. Changes nothing."""
        return _is_locked(self.policy_file(policy))

    @contextmanager
    def try_tag(self, tag: str) -> Iterator[bool]:
        """Hold the locks of all policies whose temporary files begin with a tag, if they are free now.

        Gives whether they were. A policy need not be known for that: before its first version is stored it has no row.
        """
        with ExitStack() as held:
            yield all(held.enter_context(_try_lock(path, "temporary files")) for path in self._tagged(tag))

    def tag_is_held(self, tag: str) -> bool:
        """Tell whether somebody holds the lock of a policy whose temporary files begin with a tag. Changes nothing."""
        return any(_is_locked(path) for path in self._tagged(tag))

    def policy_file(self, policy: str) -> Path:
        """Return the lock file of a policy."""
        return self._locks / _policy_file(policy)

    def _tagged(self, tag: str) -> list[Path]:
        # Whoever writes made the lock file first, and nobody removes it: without one there is no writer.
        with files.refusals(f"{self._locks} cannot be listed", _MEND):
            try:
                names = os.listdir(self._locks)  # noqa: PTH208 - names are all that is asked for
            except FileNotFoundError:
                return []
        return sorted(self._locks / name for name in names if name.startswith(f"policy-{tag[:TAG_CHARS]}"))


@lru_cache(maxsize=256)
def _policy_file(policy: str) -> str:
    return f"policy-{policy_key(policy)}"


@contextmanager
def _try_lock(path: Path, what: str) -> Iterator[bool]:
    with _thread_lock(path, timeout=0) as mine:
        descriptor = _try_lock_file(path) if mine else None
        if descriptor is None:
            yield False
            return
        with _held(descriptor, what):
            yield True


@contextmanager
def file_lock(path: Path, *, what: str, timeout: float) -> Iterator[None]:
    """Hold a lock that ends with its holder, against other processes and other threads.

    Args:
        path: The lock file; made when missing, and never removed, since a waiting process may have it open.

        what: What the lock protects, for messages.

        timeout: Seconds to wait for the present holder.

    Raises:
        InUseError: Somebody else kept the lock for that long; names them.

        StorageError: The lock file could not be made, or the file system has no locks.
    """
    deadline = time.monotonic() + timeout
    with _thread_lock(path, timeout) as mine:
        descriptor = _wait_for_lock_file(path, deadline) if mine else None
        if descriptor is None:
            raise InUseError(
                f"{what}: expected its lock within {timeout:g} s, but {_holder(path)} holds it. "
                f"Nothing was changed. Wait, or end that process (lock file {path})."
            )
        with _held(descriptor, what):
            yield


def _is_locked(path: Path) -> bool:
    descriptor = _open_if_there(path)
    if descriptor is None:
        return False
    try:
        return not _lock(descriptor, path, fcntl.LOCK_SH)
    finally:
        _process.close(descriptor)


@dataclass
class _RunLock:
    """The lock of this process's run in one folder."""

    path: Path
    descriptor: int
    keepers: set[int] = field(default_factory=set)
    """Who asked for it, by identity: a keeper that asks twice is one."""


class _Process:
    """What belongs to this very process and must not leak into a forked child."""

    def __init__(self) -> None:
        # Re-entrant: closing what nobody refers to any more may begin in the middle of anything.
        self._guard = threading.RLock()
        self._run_locks: dict[_Identity, _RunLock] = {}
        self._thread_locks: dict[_LockKey, threading.Lock] = {}
        self._descriptors: set[int] = set()

    def thread_lock(self, key: _LockKey) -> threading.Lock:
        with self._guard:
            return self._thread_locks.setdefault(key, threading.Lock())

    def hold(self, keeper: int, path: Path) -> None:
        """Hold the lock of this process's run for a keeper; of a file that is gone or another one by now, anew."""
        with self._guard:
            found = _identity(path)
            lock = None if found is None else self._run_locks.get(found)
            if lock is None:
                descriptor = _wait_for_lock_file(path, time.monotonic() + 10)
                if descriptor is None:
                    raise InUseError(
                        f"{path}: expected the lock of a run that is new, found it held. Start again."
                    )
                lock = _RunLock(path, descriptor)
                self._run_locks[_identity_of(os.fstat(descriptor))] = lock
            if keeper not in lock.keepers:
                self.let_go(keeper)
                lock.keepers.add(keeper)

    def holds(self, path: Path) -> bool:
        with self._guard:
            return _identity(path) in self._run_locks

    def let_go(self, keeper: int) -> None:
        with self._guard:
            for found, lock in list(self._run_locks.items()):
                if keeper not in lock.keepers:
                    continue
                lock.keepers.remove(keeper)
                if not lock.keepers:
                    del self._run_locks[found]
                    if _leads_to(lock.path, lock.descriptor):
                        with suppress(OSError):  # whoever asks next removes it
                            lock.path.unlink()
                    self.close(lock.descriptor)

    def opened(self, descriptor: int) -> None:
        self._descriptors.add(descriptor)

    def close(self, descriptor: int) -> None:
        # Closing twice could hit a file that was opened in between under the same number.
        if descriptor in self._descriptors:
            self._descriptors.remove(descriptor)
            os.close(descriptor)

    def forget(self) -> None:
        """Become a new process, after a fork.

        The child closes its copies without unlocking: unlocking one would unlock the parent's, keeping one open
        would hold the parent's lock beyond the parent's death.
        """
        for descriptor in self._descriptors:
            os.close(descriptor)
        self.__init__()  # type: ignore[misc]


_process = _Process()


def _let_go(keeper: int) -> None:
    _process.let_go(keeper)


os.register_at_fork(after_in_child=_process.forget)


@contextmanager
def _thread_lock(path: Path, timeout: float) -> Iterator[bool]:
    # Threads queue here rather than at the file, where waiting means asking again and again.
    key = _lock_key(path)
    lock = _process.thread_lock(key)
    mine = lock.acquire(timeout=timeout) if timeout > 0 else lock.acquire(blocking=False)
    try:
        yield mine
    finally:
        # After a fork inside the block, the child's lock is a new one that nobody holds.
        if mine and _process.thread_lock(key) is lock:
            lock.release()


def _lock_key(path: Path) -> _LockKey:
    """Return what is the same for every spelling of a lock file's path."""
    folder = _identity(path.parent, follow=True)
    return (str(path.parent) if folder is None else folder), path.name


@contextmanager
def _held(descriptor: int, what: str) -> Iterator[None]:
    try:
        run = this_run()
        note = _note(what, run.pid, run.host, run.user)
        # It only serves messages, so a full disk is no reason to refuse the lock. A holder that comes again finds its
        # note there: writing would have the file system's journal wait for the disk.
        with suppress(OSError):
            # A file that has a second name elsewhere may be somebody's own.
            if os.pread(descriptor, _NOTE_BYTES + 1, 0) != note and os.fstat(descriptor).st_nlink == 1:
                os.pwrite(descriptor, note, 0)
        yield
    finally:
        _process.close(descriptor)


@lru_cache(maxsize=64)
def _note(what: str, pid: int, host: str, user: str) -> bytes:
    # Of one length always: a file that never changes its size costs the file system's journal less.
    note = {"what": what, "pid": pid, "host": host, "user": user}
    return json.dumps(note).encode().ljust(_NOTE_BYTES)


def _holder(path: Path) -> str:
    try:
        descriptor = files.open_regular(path, os.O_RDONLY)
        try:
            note = json.loads(os.pread(descriptor, _NOTE_BYTES, 0))
        finally:
            os.close(descriptor)
        return f"process {note['pid']} of {note['user']} on {note['host']}"
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return "another process"


def _wait_for_lock_file(path: Path, deadline: float) -> int | None:
    pause = _FIRST_PAUSE
    while (descriptor := _try_lock_file(path)) is None:
        left = deadline - time.monotonic()
        if left <= 0:
            return None
        time.sleep(min(pause, left))
        pause = min(2 * pause, _LONGEST_PAUSE)
    return descriptor


def _try_lock_file(path: Path) -> int | None:
    """Return the descriptor that holds the lock, or None when somebody else does."""
    with files.refusals(f"{path} cannot be made a lock", _MEND):
        try:
            descriptor = files.open_regular(path, os.O_RDWR | os.O_CREAT)
        except FileNotFoundError:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = files.open_regular(path, os.O_RDWR | os.O_CREAT)
    _process.opened(descriptor)
    try:
        if _lock(descriptor, path, fcntl.LOCK_EX) and _leads_to(path, descriptor):
            return descriptor
    except BaseException:
        _process.close(descriptor)
        raise
    _process.close(descriptor)
    return None


def _leads_to(path: Path, descriptor: int) -> bool:
    # Whoever looked between our open and our lock saw a free file and removed it: a lock on it would bind nobody.
    return _identity(path) == _identity_of(os.fstat(descriptor))


def _identity(path: Path, *, follow: bool = False) -> _Identity | None:
    try:
        return _identity_of(os.stat(path, follow_symlinks=follow))  # noqa: PTH116 - looked at in every publish
    except OSError:
        return None  # whoever opens it is told why


def _identity_of(found: os.stat_result) -> _Identity:
    return found.st_dev, found.st_ino


def _open_if_there(path: Path) -> int | None:
    with files.refusals(f"{path} cannot be read as a lock", _MEND):
        try:
            descriptor = files.open_regular(path, os.O_RDONLY)
        except FileNotFoundError:
            return None
    _process.opened(descriptor)
    return descriptor


def _someone_holds(path: Path) -> bool:
    descriptor = _open_if_there(path)
    if descriptor is None:
        return False
    try:
        # Shared, so that two who look at once do not take each other for the owner.
        if not _lock(descriptor, path, fcntl.LOCK_SH):
            return True
        if _leads_to(path, descriptor):
            with suppress(OSError):  # a folder that cannot be written keeps the file; the answer is the same
                path.unlink()
        return False
    finally:
        _process.close(descriptor)


def _lock(descriptor: int, path: Path, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _BUSY:
            return False
        raise StorageError(
            f"{path}: expected a file system with locks, but it refused one ({files.reason(error)}). "
            "Put the registry on a disk that has them."
        ) from error
    return True

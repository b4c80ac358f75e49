"""Who writes, and whether they are still alive: identity of processes, and locks that die with their holder.

Rules it keeps:
- Liveness is an operating-system lock, never a process id or a heartbeat: the kernel drops it however the process
  ends, and a reused process id cannot revive it.
- A forked child is another run, and never keeps its parent's locks alive.
- Every wait has a time-out, and whoever gives up says who holds the lock.
"""

from __future__ import annotations

import errno
import fcntl
import getpass
import hashlib
import json
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path

from weightledger.registry.errors import InUseError, StorageError

_FIRST_PAUSE, _LONGEST_PAUSE = 0.0005, 0.01
_NOTE_BYTES = 512
_BUSY = (errno.EAGAIN, errno.EACCES)


@dataclass(frozen=True)
class RunInfo:
    """Identity of one writing process, kept with what it wrote."""

    id: str
    user: str
    host: str
    pid: int
    program: str
    started_at: datetime


class RunKeeper:
    """The runs of one registry: which one this process is, and which ones still live.

    All keepers of a process agree on its run, so that two registries opened beside each other are one writer.
    """

    def __init__(self, folder: Path) -> None:
        self._locks = Path(os.path.abspath(folder)) / "locks"
        self._kept: str | None = None

    def __repr__(self) -> str:
        return f"<RunKeeper {self._locks} run {self.current().id}>"

    def current(self) -> RunInfo:
        """Return this process's run."""
        return _process.run()

    def keep_alive(self) -> RunInfo:
        """Let every process that shares the folder see this run as alive, until this process ends or `close`.

        Raises:
            StorageError: The lock file could not be made, or the file system has no locks.
        """
        run = self.current()
        if self._kept != run.id:
            _process.hold(self._lock_file(run.id))
            self._kept = run.id
        return run

    def alive(self, run_id: str) -> bool:
        """Tell whether a process keeps that run alive now; a run that never asked for it is not.

        The lock file of a dead run is removed on the way.
        """
        path = self._lock_file(run_id)
        return _process.holds(path) or _someone_holds(path)

    def close(self) -> None:
        """Stop keeping this process's run alive, once every keeper of the folder that asked for it is closed."""
        kept, self._kept = self._kept, None
        if kept is not None and kept == self.current().id:
            _process.let_go(self._lock_file(kept))

    def _lock_file(self, run_id: str) -> Path:
        return self._locks / f"run-{run_id}"


@contextmanager
def policy_lock(folder: Path, policy: str, timeout: float = 60.0) -> Iterator[None]:
    """Hold the one lock of a policy, against other processes and other threads. It is not re-entrant.

    Args:
        folder: The registry's folder.

        policy: Name of the policy.

        timeout: Seconds to wait for the present holder.

    Raises:
        InUseError: Somebody else kept the lock for that long; names them.

        StorageError: The lock file could not be made, or the file system has no locks.
    """
    with file_lock(policy_lock_file(folder, policy), what=f"policy {policy!r}", timeout=timeout):
        yield


@contextmanager
def try_policy_lock(folder: Path, policy: str) -> Iterator[bool]:
    """Hold the lock of a policy if it is free now; gives whether it was."""
    path = policy_lock_file(folder, policy)
    with _thread_lock(path, timeout=0) as mine:
        descriptor = _try_lock_file(path) if mine else None
        if descriptor is None:
            yield False
            return
        with _held(descriptor, f"policy {policy!r}"):
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


def policy_lock_file(folder: Path, policy: str) -> Path:
    """Return the lock file of a policy."""
    return Path(os.path.abspath(folder)) / "locks" / _policy_file(policy)


@lru_cache(maxsize=256)
def _policy_file(policy: str) -> str:
    # A hash, because a policy's name may be longer than a file's, or differ from another only by case.
    return f"policy-{hashlib.sha256(policy.encode()).hexdigest()[:32]}"


def file_tag(policy: str) -> str:
    """Return what the temporary files of a policy begin with."""
    return hashlib.sha256(policy.encode()).hexdigest()[:8] + "-"


def policy_is_locked(folder: Path, policy: str) -> bool:
    """Tell whether somebody, this process included, holds the lock of a policy. Changes nothing."""
    path = policy_lock_file(folder, policy)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    _process.opened(descriptor)
    try:
        return not _lock(descriptor, path, fcntl.LOCK_SH)
    finally:
        _process.close(descriptor)


def user_name() -> str:
    """Return who runs this process; containers often have a number without a name."""
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):
        return f"uid-{os.getuid()}"


class _Process:
    """What belongs to this very process and must not leak into a forked child."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._run: RunInfo | None = None
        self._run_locks: dict[Path, tuple[int, int]] = {}
        self._thread_locks: dict[Path, threading.Lock] = {}
        self._descriptors: set[int] = set()

    def run(self) -> RunInfo:
        with self._guard:
            if self._run is None:
                self._run = RunInfo(
                    id=uuid.uuid4().hex,
                    user=user_name(),
                    host=socket.gethostname(),
                    pid=os.getpid(),
                    program=sys.argv[0] if sys.argv and sys.argv[0] else Path(sys.executable).name,
                    started_at=datetime.now(UTC),
                )
            return self._run

    def thread_lock(self, path: Path) -> threading.Lock:
        with self._guard:
            return self._thread_locks.setdefault(path, threading.Lock())

    def hold(self, path: Path) -> None:
        with self._guard:
            descriptor, users = self._run_locks.get(path, (None, 0))
            if descriptor is None:
                descriptor = _wait_for_lock_file(path, time.monotonic() + 10)
                if descriptor is None:
                    raise InUseError(
                        f"{path}: expected the lock of a run that is new, found it held. Start again."
                    )
            self._run_locks[path] = (descriptor, users + 1)

    def holds(self, path: Path) -> bool:
        with self._guard:
            return path in self._run_locks

    def let_go(self, path: Path) -> None:
        with self._guard:
            descriptor, users = self._run_locks.pop(path)
            if users > 1:
                self._run_locks[path] = (descriptor, users - 1)
                return
            with suppress(OSError):  # whoever asks next removes it
                path.unlink()
            self.close(descriptor)

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
os.register_at_fork(after_in_child=_process.forget)


@contextmanager
def _thread_lock(path: Path, timeout: float) -> Iterator[bool]:
    # Threads queue here rather than at the file, where waiting means asking again and again.
    lock = _process.thread_lock(path)
    mine = lock.acquire(timeout=timeout) if timeout > 0 else lock.acquire(blocking=False)
    try:
        yield mine
    finally:
        # After a fork inside the block, the child's lock is a new one that nobody holds.
        if mine and _process.thread_lock(path) is lock:
            lock.release()


@contextmanager
def _held(descriptor: int, what: str) -> Iterator[None]:
    try:
        run = _process.run()
        note = _note(what, run.pid, run.host, run.user)
        # It only serves messages, so a full disk is no reason to refuse the lock. A holder that comes again finds its
        # note there: writing would have the file system's journal wait for the disk.
        with suppress(OSError):
            if os.pread(descriptor, _NOTE_BYTES + 1, 0) != note:
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
        note = json.loads(path.read_bytes())
        return f"process {note['pid']} of {note['user']} on {note['host']}"
    except (OSError, ValueError, KeyError, TypeError):
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
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    try:
        try:
            descriptor = os.open(path, flags, 0o666)
        except FileNotFoundError:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, flags, 0o666)
    except OSError as error:
        raise StorageError(
            f"{path}: expected to make a lock file, but the operating system refused ({error}). "
            "Mend the permissions of the registry's folder."
        ) from error
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
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _someone_holds(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise StorageError(
            f"{path}: expected to read a run's lock file, but the operating system refused ({error}). "
            "Mend the permissions of the registry's folder."
        ) from error
    _process.opened(descriptor)
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
            f"{path}: expected a file system with locks, but it refused one ({error}). "
            "Put the registry on a disk that has them."
        ) from error
    return True

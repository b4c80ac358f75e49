"""How files of ours are opened, named and removed: one rule for all of them.

Rules:

* A link in the last component is never followed. A folder on the way may be a link.
* Only a regular file is opened. A pipe, a device or a socket in its place is not waited for.
* What the operating system refuses is a `StorageError` that names the file, and neither a raw `OSError` nor the name of
  a temporary file that nobody asked for.
* What cannot be removed while another error is on its way is told with that error, and never hides it.
"""

from __future__ import annotations

import errno
import os
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Final

from weightledger.registry.errors import StorageError

_OPENING: Final = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)
_KINDS: Final = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


class IrregularFileError(OSError):
    """Something else than a regular file stands under a name."""


def open_regular(path: str | os.PathLike[str], flags: int, mode: int = 0o666) -> int:
    """Open a regular file, and nothing else, without waiting; return its descriptor.

    Args:
        path: The file.
        flags: As for `os.open`.
        mode: Permissions of a file that is made, less the process's umask.

    Raises:
        IrregularFileError: It is a link, a folder, a pipe, a device or a socket.
        OSError: The operating system refused.
    """
    try:
        descriptor = os.open(path, flags | _OPENING, mode)
    except OSError:
        _check_regular(path)
        raise
    try:
        _check_kind(os.fstat(descriptor).st_mode)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def is_there(path: str | os.PathLike[str]) -> bool:
    """Tell whether a regular file is there.

    Raises:
        StorageError: Something else is there, or nobody can look.
    """
    with refusals(f"{path} cannot be used"):
        return regular_stat(path) is not None


def regular_stat(path: str | os.PathLike[str]) -> os.stat_result | None:
    """Look at a regular file; None when nothing is there.

    Raises:
        IrregularFileError: It is a link, a folder, a pipe, a device or a socket.
        OSError: Nobody can look.
    """
    try:
        found = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    _check_kind(found.st_mode)
    return found


def sync_folder(folder: str | os.PathLike[str]) -> None:
    """Make the names in a folder durable: a new file is on disk only once the folder that holds its name is."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Remove a file; one that is not there is no error.

    Raises:
        StorageError: It is there and cannot be removed.
    """
    with refusals(f"{path} could not be removed"):
        path.unlink(missing_ok=True)


def discard(path: Path, error: BaseException) -> None:
    """Remove a file because of an error; if that fails too, the error tells of it."""
    try:
        path.unlink(missing_ok=True)
    except OSError as second:
        error.add_note(f"{path} could not be removed either: {reason(second)}")


@contextmanager
def refusals(what: str, remedy: str = "") -> Iterator[None]:
    """Turn what the operating system refuses inside into a `StorageError`.

    Args:
        what: Names the file, and what was to be done with it.
        remedy: What to do about it, as a sentence; for a full disk that is known.
    """
    try:
        yield
    except OSError as error:
        advice = ": make room" if error.errno in _FULL else f". {remedy}" if remedy else ""
        raise StorageError(f"{what}: {reason(error)}{advice}") from error


def reason(error: OSError) -> str:
    """Return what the operating system said, without the name of the file."""
    return error.strerror or str(error)


def check_replaceable(target: Path) -> os.stat_result | None:
    """Look at what a file that a user named would replace; None when nothing is there.

    Raises:
        StorageError: It is no regular file, or nobody can look.
    """
    with refusals(f"{target} is not written over", "Remove it, or choose another path."):
        found = regular_stat(target)
        has_folder = found is not None or target.parent.is_dir()
    if not has_folder:
        raise StorageError(
            f"{target} cannot be written: there is no folder {target.parent}. Make it, or choose another"
        )
    return found


@contextmanager
def replacing(target: Path, nbytes: int) -> Iterator[BinaryIO]:
    """Write a file that a user named. It appears whole or not at all, and keeps the mode of the file that it replaces.

    Args:
        target: The file.
        nbytes: How large it will be, for messages.

    Raises:
        StorageError: It cannot be written, or what is there is a link, a folder, a pipe, a device or a socket.
    """
    before = check_replaceable(target)
    temporary = target.with_name(f".weightledger-{uuid.uuid4().hex}.tmp")
    with refusals(f"{target} could not be written ({nbytes} bytes)"):
        descriptor = open_regular(
            temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666 if before is None else 0o600
        )
        try:
            with os.fdopen(descriptor, "wb") as file:
                yield file
                file.flush()
                if before is not None:
                    _make_alike(descriptor, before)
                os.fsync(descriptor)
            temporary.replace(target)
        except BaseException as error:
            discard(temporary, error)
            raise


def _make_alike(descriptor: int, before: os.stat_result) -> None:
    made = os.fstat(descriptor)
    if (made.st_uid, made.st_gid) != (before.st_uid, before.st_gid):
        try:
            os.fchown(descriptor, before.st_uid, before.st_gid)
        except PermissionError:
            pass  # only root may give files away; the mode is kept all the same
    os.fchmod(descriptor, stat.S_IMODE(before.st_mode))


def _check_regular(path: str | os.PathLike[str]) -> None:
    """Say it, if what could not be opened is something else than a file; pass when nobody can tell."""
    try:
        found = os.lstat(path).st_mode
    except OSError:
        return
    _check_kind(found)


def _check_kind(mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "something else")
        raise IrregularFileError(errno.EINVAL, f"it is {kind}, and no regular file")

"""Snapshot files in a folder of a local disk: where bytes become durable.

Rules:

* A file is written under a temporary name in the folder that it will stay in, made durable, then given its name. Its
  name is never used again, and a file that has its name is never written to or cut short, only removed.
* What the disk refuses is a `StorageError` that names the path and the bytes that were needed. What should be there
  and is not, or is shorter than it should be, is a `CorruptionError`.
* The folder may be a link, and a file may not: `files` says how they are opened.
* URIs are names relative to the store; a store can be moved as a folder.

NumPy is imported where bytes are moved, so that questions about the record do not wait for it.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

from weightledger.registry import files
from weightledger.registry.errors import CorruptionError, StorageError
from weightledger.registry.weights.layout import LENGTH_BYTES, header_bytes

if TYPE_CHECKING:
    from weightledger.registry.weights.arrays import Bytes

from weightledger.registry.store.snapshots import Buffer

PAGE: Final = 4096  # bytes; what direct writes are aligned to
_DIRECT_BYTES: Final = (
    512 << 10
)  # from here on a write goes past the page cache, which halves what it costs the caller
_OWNER: Final = ".registry"
_CHUNK: Final = 32 << 20  # bytes a system call
_WATCHED_CHUNK: Final = 1 << 20  # the same, when somebody waits for what comes first


class LocalSnapshots:
    """Keeps snapshot files in a folder of a local disk."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)

    def __repr__(self) -> str:
        return f"<LocalSnapshots {self.folder}>"

    def create(self, file_id: str) -> LocalWriter:
        """Begin a file under a temporary id that nobody else uses."""
        path = self._temporary(file_id)
        with _storing(path, 0):
            if not self.folder.is_dir():
                self.folder.mkdir(parents=True, exist_ok=True)
                files.sync_folder(self.folder.parent)
            # O_EXCL: two writers never share one temporary file, nor does one continue another's.
            fd = files.open_regular(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        return LocalWriter(path, fd)

    def read(
        self, uri: str, into: Bytes | None = None, arrived: Callable[[int], None] | None = None
    ) -> Bytes:
        """Read a whole file, into memory of its own."""
        from weightledger.registry.weights.arrays import page_buffer

        with self._opened(uri) as fd:
            size = os.fstat(fd).st_size
            if into is not None and into.nbytes != size:
                raise CorruptionError(f"{self._path(uri)}: expected {into.nbytes} bytes, found {size}")
            target = page_buffer(size) if into is None else into
            _fill(fd, target.data, self._path(uri), arrived)
        return target

    def read_header(self, uri: str) -> bytes:
        """Read the JSON header of a file without its data."""
        with self._opened(uri) as fd:
            prefix = os.pread(fd, LENGTH_BYTES, 0)
            length = header_bytes(prefix, os.fstat(fd).st_size, str(self._path(uri)))
            header = bytearray(LENGTH_BYTES + length)
            _fill(fd, memoryview(header), self._path(uri))
        return bytes(header[LENGTH_BYTES:])

    def size(self, uri: str) -> int | None:
        """Return the size in bytes of a committed file, or None when there is none."""
        path = self._path(uri)
        with _reading(path, "looked at"):
            found = files.regular_stat(path)
        return None if found is None else found.st_size

    def forget(self, uri: str) -> bool:
        """Return False: nothing is kept nearer than the files."""
        self._path(uri)
        return False

    def where(self, uri: str) -> str:
        """Return the path of a committed file."""
        return str(self._path(uri))

    def delete(self, uri: str) -> None:
        """Remove a committed file; readers that have it open keep it."""
        files.remove(self._path(uri))

    def owner(self) -> str | None:
        """Return the identity of the registry that claimed this folder; None when none did."""
        path = self.folder / _OWNER
        with _reading(path, "read"):
            try:
                descriptor = files.open_regular(path, os.O_RDONLY)
            except FileNotFoundError:
                return None
            try:
                return os.read(descriptor, 100).decode("ascii", "replace").strip()
            finally:
                os.close(descriptor)

    def claim(self, registry: str) -> str:
        """Write a registry's identity into the folder, which is made, unless another one's is there."""
        path = self.folder / _OWNER
        with _storing(path, len(registry)):
            self.folder.mkdir(parents=True, exist_ok=True)
            try:
                descriptor = files.open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            except FileExistsError:
                return self.owner() or ""
            try:
                os.write(descriptor, registry.encode())
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            files.sync_folder(self.folder)
        return registry

    def uris(self) -> list[str]:
        """Return the names of all committed files, sorted."""
        return sorted(name for name in self._listing() if not name.startswith("."))

    def leftovers(self) -> list[str]:
        """Return the temporary ids of files that were neither committed nor aborted, sorted."""
        return sorted(
            name.removeprefix(".").removesuffix(".tmp")
            for name in self._listing()
            if name.startswith(".") and name.endswith(".tmp")
        )

    def discard(self, file_id: str) -> None:
        """Remove a left-over temporary file; one that is not there is no error."""
        files.remove(self._temporary(file_id))

    def _path(self, uri: str) -> Path:
        if (
            not isinstance(uri, str)
            or uri in ("", ".", "..")
            or "/" in uri
            or "\0" in uri
            or uri.startswith(".")
        ):
            raise CorruptionError(f"expected the name of a snapshot file, found {uri!r}")
        return self.folder / uri

    def _temporary(self, file_id: str) -> Path:
        if not file_id or "/" in file_id or "\0" in file_id:
            raise ValueError(f"expected a file id without slashes, found {file_id!r}")
        return self.folder / f".{file_id}.tmp"

    def _listing(self) -> list[str]:
        try:
            return [entry.name for entry in os.scandir(self.folder) if entry.is_file(follow_symlinks=False)]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StorageError(f"{self.folder} cannot be listed: {files.reason(error)}") from error

    @contextmanager
    def _opened(self, uri: str) -> Iterator[int]:
        path = self._path(uri)
        with _reading(path, "opened"):
            fd = files.open_regular(path, os.O_RDONLY)
        try:
            with _reading(path, "read"):
                yield fd
        finally:
            os.close(fd)


@contextmanager
def _reading(path: Path, done: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise CorruptionError(
            f"{path} is missing: restore it from a backup, or go back to another version"
        ) from error
    except OSError as error:
        raise StorageError(f"{path} cannot be {done}: {files.reason(error)}") from error


class LocalWriter:
    """One temporary file of a `LocalSnapshots`."""

    def __init__(self, path: Path, fd: int) -> None:
        self._path = path
        self._fd: int | None = fd
        self._direct: int | None = None
        self._end = 0
        self._synced = False

    def write_at(self, offset: int, buffer: Buffer, *, lent: bool = False) -> None:
        """Write bytes at an offset; large ones past the page cache, where disk and alignment allow it."""
        from weightledger.registry.weights.arrays import as_bytes

        view = as_bytes(buffer).data
        self._end = max(self._end, offset + view.nbytes)
        self._synced = False
        with self._storing():
            done = self._write_direct(offset, view) if view.nbytes >= _DIRECT_BYTES else 0
            _write(self._open_fd(), view[done:], offset + done)

    def sync(self, name: str | None = None) -> None:
        """Make durable what was written."""
        with self._storing():
            os.fdatasync(self._open_fd())
        self._synced = True

    def commit(self, name: str) -> str:
        """Make the file durable under a name that was never used before."""
        final = self._path.with_name(name)
        if "/" in name or name.startswith(".") or not name:
            raise ValueError(f"expected a file name that does not begin with a dot, found {name!r}")
        self._open_fd()
        if not self._synced:
            self.sync()
        with self._storing():
            self._close()
            linked = _give_name(self._path, final)
            try:
                if linked:
                    self._path.unlink()
                # The name is durable only when the folder is.
                files.sync_folder(final.parent)
            except BaseException as error:
                files.discard(final, error)
                raise
        return name

    def abort(self) -> None:
        """Remove what was written. Does nothing after a commit or an abort."""
        if self._fd is not None:
            with files.refusals(
                f"{self._path} could not be removed", "The next open of the registry tries again."
            ):
                try:
                    self._close()
                finally:
                    self._path.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.abort()
        except StorageError as second:
            if error is None:
                raise
            error.add_note(str(second))

    def _write_direct(self, offset: int, view: memoryview) -> int:
        """Write the whole pages of a buffer by direct I/O; return how many bytes that were (0: not possible here)."""
        from weightledger.registry.weights.arrays import as_bytes

        address = as_bytes(view).ctypes.data
        if not hasattr(os, "O_DIRECT") or offset % PAGE or address % PAGE:
            return 0
        whole = view.nbytes - view.nbytes % PAGE
        try:
            if self._direct is None:
                self._direct = files.open_regular(self._path, os.O_WRONLY | os.O_DIRECT)
            _write(self._direct, view[:whole], offset)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            return 0  # A file system without direct I/O, or one that wants another alignment.
        return whole

    def _open_fd(self) -> int:
        if self._fd is None:
            raise StorageError(f"{self._path} was committed or aborted already: create a new file")
        return self._fd

    def _close(self) -> None:
        open_ones = [fd for fd in (self._fd, self._direct) if fd is not None]
        self._fd = self._direct = None
        for fd in open_ones:
            os.close(fd)

    @contextmanager
    def _storing(self) -> Iterator[None]:
        try:
            with _storing(self._path, self._end):
                yield
        except BaseException as error:
            try:
                self._close()
            except OSError as second:
                error.add_note(f"{self._path} could not be closed either: {files.reason(second)}")
            files.discard(self._path, error)
            raise


@contextmanager
def _storing(path: Path, nbytes: int) -> Iterator[None]:
    with files.refusals(f"{path} could not be written ({nbytes} bytes needed)"):
        yield


def _write(fd: int, view: memoryview, offset: int) -> None:
    done = 0
    while done < view.nbytes:
        done += os.pwrite(fd, view[done : done + _CHUNK], offset + done)


def _fill(fd: int, view: memoryview, path: Path, arrived: Callable[[int], None] | None = None) -> None:
    done = 0
    chunk = _CHUNK if arrived is None else _WATCHED_CHUNK
    while done < view.nbytes:
        got = os.preadv(fd, [view[done : done + chunk]], done)
        if got == 0:
            raise CorruptionError(f"{path} was cut short while it was read: {done} of {view.nbytes} bytes")
        done += got
        if arrived is not None:
            arrived(done)


def _give_name(temporary: Path, final: Path) -> bool:
    """Give a file its name, and tell whether it still has the temporary one, too."""
    try:
        # A link fails when the name is taken; a rename would silently replace the file that has it.
        final.hardlink_to(temporary)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
            raise
        if os.path.lexists(final):
            raise FileExistsError(errno.EEXIST, "the name is taken", str(final)) from None
        temporary.replace(final)
        return False
    return True

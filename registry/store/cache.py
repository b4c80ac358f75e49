"""Copies of remote snapshot files on a local disk, in front of any store.

Rules:

* A copy is written under a temporary name and then named, so that nobody reads half of one. Processes share the folder
  without a lock: two that miss the same file both fetch it, and the later copy takes the place of the first.
* A copy counts only if it has the file's size. That its bytes are right is for whoever reads to say, by the digest:
  `forget` drops a copy, and the next read is of the file itself.
* Whether a file is there, and what is there, is always asked of the store.
* The copies that were used last stay, up to a number of bytes. A reader that has one open keeps it.
* Whatever goes wrong with the folder, reading goes on without it; it is said once.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from weightledger.registry import files
from weightledger.registry.errors import CorruptionError, StorageError
from weightledger.registry.logs import log
from weightledger.registry.store.local import LocalSnapshots
from weightledger.registry.store.snapshots import SnapshotStore, SnapshotWriter

if TYPE_CHECKING:
    from weightledger.registry.weights.arrays import Bytes

DEFAULT_BYTES: Final = 20 << 30
_END: Final = ".copy"
_BEGUN: Final = ".part"


class CachedSnapshots:
    """A store whose files are read from copies nearby.

    Args:
        store: Where the files are.
        folder: Where the copies are; it is made when it is needed, and may be shared by processes and registries.
        max_bytes: What the copies may take up; the one that was used longest ago goes first.
    """

    def __init__(
        self, store: SnapshotStore, folder: str | os.PathLike[str], *, max_bytes: int = DEFAULT_BYTES
    ) -> None:
        if max_bytes < 0:
            raise ValueError(f"expected a number of bytes for the cache, found {max_bytes}")
        self.store = store
        self.folder = Path(folder)
        self.max_bytes = max_bytes
        self._copies = LocalSnapshots(self.folder)
        self._told = False

    def __repr__(self) -> str:
        return f"<CachedSnapshots {self.store!r} in {self.folder}>"

    # ------------------------------------------------------------------ reading

    def read(
        self, uri: str, into: Bytes | None = None, arrived: Callable[[int], None] | None = None
    ) -> Bytes:
        """Read a whole file, from its copy if there is one."""
        from weightledger.registry.weights.arrays import page_buffer

        copy = self._copy_of(uri)
        target = into
        if target is None:
            size = self.store.size(uri)
            if size is None:
                return self.store.read(uri)  # which tells what is missing
            target = page_buffer(size)
        if self._read_copy(copy, target, arrived):
            return target
        filling = _Filling(self, copy, target, arrived)
        try:
            self.store.read(uri, target, filling.note)
        except BaseException:
            filling.drop()
            raise
        filling.keep()
        return target

    def read_header(self, uri: str) -> bytes:
        """Ask the store: a header is a short read, and a copy may be damaged."""
        return self.store.read_header(uri)

    def forget(self, uri: str) -> bool:
        """Drop the copy of a file, so that the next read is of the file itself; return True."""
        self._drop(self._copy_of(uri))
        return True

    def _read_copy(self, copy: str, target: Bytes, arrived: Callable[[int], None] | None) -> bool:
        try:
            if self._copies.size(copy) is None:
                return False
            self._copies.read(copy, target, arrived)
            os.utime(self.folder / copy)
        except CorruptionError:
            # Another size than the file's, or gone since.
            self._drop(copy)
            return False
        except (StorageError, OSError) as error:
            self.tell(error)
            return False
        return True

    # ------------------------------------------------------------------ what the store does

    def create(self, file_id: str) -> SnapshotWriter:
        """Begin a file in the store. It is copied when it is first read."""
        return self.store.create(file_id)

    def size(self, uri: str) -> int | None:
        """Ask the store."""
        return self.store.size(uri)

    def where(self, uri: str) -> str:
        """Ask the store."""
        return self.store.where(uri)

    def delete(self, uri: str) -> None:
        """Remove a file from the store, and its copy."""
        self.store.delete(uri)
        self._drop(self._copy_of(uri))

    def owner(self) -> str | None:
        """Ask the store."""
        return self.store.owner()

    def claim(self, registry: str) -> str:
        """Claim the store's place."""
        return self.store.claim(registry)

    def uris(self) -> list[str]:
        """Ask the store."""
        return self.store.uris()

    def leftovers(self) -> list[str]:
        """Ask the store."""
        return self.store.leftovers()

    def discard(self, file_id: str) -> None:
        """Remove a left-over file from the store."""
        self.store.discard(file_id)

    # ------------------------------------------------------------------ the folder

    def _copy_of(self, uri: str) -> str:
        """Return the name of a file's copy: another store in the same folder has other ones."""
        return hashlib.blake2b(self.store.where(uri).encode(), digest_size=20).hexdigest() + _END

    def _drop(self, copy: str) -> None:
        try:
            (self.folder / copy).unlink(missing_ok=True)
        except OSError as error:
            self.tell(error)

    def tell(self, error: Exception) -> None:
        """Say once that the folder cannot be used, and why."""
        if not self._told:
            self._told = True
            log.warning("the cache %s is not used: %s", self.folder, error)

    def begin(self, nbytes: int) -> tuple[int, Path] | None:
        """Open a file of so many bytes for a copy; None when there is no room for one."""
        if nbytes > self.max_bytes:
            return None
        path = self.folder / f"{uuid.uuid4().hex}{_BEGUN}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            descriptor = files.open_regular(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        except OSError as error:
            self.tell(error)
            return None
        try:
            # Held while it is written: one that nobody holds was left by a process that died.
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Its size from now on: who makes room after this counts it, so that all together keep the bound.
            os.ftruncate(descriptor, nbytes)
            if self._make_room(path.name):
                return descriptor, path
            path.unlink(missing_ok=True)
        except BlockingIOError:
            pass  # taken for one that was left, by a process that makes room; it removes it
        except OSError as error:
            self.tell(error)
            path.unlink(missing_ok=True)
        os.close(descriptor)
        return None

    def _make_room(self, own: str) -> bool:
        """Remove what was used longest ago, until all is within the bound; False if what is being written is not."""
        copies: list[tuple[float, int, str]] = []
        total = 0
        for entry in os.scandir(self.folder):
            try:
                found = entry.stat(follow_symlinks=False)
                if entry.name.endswith(_END):
                    copies.append((found.st_mtime, found.st_size, entry.path))
                elif not entry.name.endswith(_BEGUN) or (entry.name != own and _remove_if_left(entry.path)):
                    continue
                total += found.st_size
            except FileNotFoundError:
                continue  # another process was quicker
        for _, size, path in sorted(copies):
            if total <= self.max_bytes:
                break
            Path(path).unlink(missing_ok=True)
            total -= size
        return total <= self.max_bytes


def _remove_if_left(path: str) -> bool:
    """Remove a file that a dead process began; tell whether it was one."""
    descriptor = files.open_regular(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        Path(path).unlink(missing_ok=True)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


class _Filling:
    """A copy that is written while its file arrives."""

    def __init__(
        self, cache: CachedSnapshots, copy: str, target: Bytes, arrived: Callable[[int], None] | None
    ) -> None:
        self._cache = cache
        self._copy = copy
        self._target = target
        self._arrived = arrived
        self._done = 0
        self._begun = cache.begin(target.nbytes)

    def note(self, nbytes: int) -> None:
        """Take what has arrived, after whoever waits for it was told."""
        if self._arrived is not None:
            self._arrived(nbytes)
        self._write(nbytes)

    def keep(self) -> None:
        """Name the copy, now that the file is there."""
        self._write(self._target.nbytes)
        self._end(lambda path: path.replace(self._cache.folder / self._copy))

    def drop(self) -> None:
        """Leave nothing of it."""
        self._end(lambda path: path.unlink(missing_ok=True))

    def _write(self, nbytes: int) -> None:
        if self._begun is None:
            return
        view = self._target.data
        try:
            while self._done < nbytes:
                self._done += os.pwrite(self._begun[0], view[self._done : nbytes], self._done)
        except OSError as error:
            self._cache.tell(error)
            self.drop()

    def _end(self, how: Callable[[Path], object]) -> None:
        if self._begun is None:
            return
        (descriptor, path), self._begun = self._begun, None
        try:
            how(path)
        except FileNotFoundError:
            pass  # taken for one that was left, between its making and its lock
        except OSError as error:
            self._cache.tell(error)
        finally:
            os.close(descriptor)

"""What every store of snapshots does: a kind of store is one module.

A name is never used again. Whoever holds a `SnapshotWriter` commits or aborts it; an error of the store aborts it at
once. A URI is relative to the store, so that a store can be moved.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self, TypeAlias

if TYPE_CHECKING:
    from weightledger.registry.weights.arrays import Bytes

Buffer: TypeAlias = "bytes | bytearray | memoryview | Bytes"


class SnapshotWriter(Protocol):
    """A file that is being written. As a context manager it aborts at the end unless it was committed."""

    def write_at(self, offset: int, buffer: Buffer, *, lent: bool = False) -> None:
        """Write bytes at an offset, in any order, from any one thread at a time.

        Args:
            offset: Where, in bytes from the file's beginning.
            buffer: The bytes.
            lent: The caller leaves them as they are until `commit` or `abort`, so that they need not be copied.

        Raises:
            StorageError: The disk refused; the writer is aborted.
        """
        ...

    def sync(self, name: str | None = None) -> None:
        """Make durable what was written, so that `commit` has less to do. Nobody sees it yet.

        Args:
            name: What `commit` is going to name it, if that is known.

        Raises:
            StorageError: The disk refused; the writer is aborted.
        """
        ...

    def commit(self, name: str) -> str:
        """Make the file durable under a name that was never used before, and return its URI.

        Raises:
            StorageError: The disk refused, or the name is taken; the writer is aborted.
        """
        ...

    def abort(self) -> None:
        """Remove what was written. Does nothing after a commit or an abort.

        Raises:
            StorageError: It cannot be removed.
        """
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class SnapshotStore(Protocol):
    """Keeps snapshot files. `weightledger.registry.testing.SnapshotStoreTests` tests any implementation."""

    def create(self, file_id: str) -> SnapshotWriter:
        """Begin a file under a temporary id that nobody else uses.

        Raises:
            StorageError: It cannot be created, or the id is in use.
        """
        ...

    def read(
        self, uri: str, into: Bytes | None = None, arrived: Callable[[int], None] | None = None
    ) -> Bytes:
        """Read a whole file.

        Args:
            uri: As `commit` returned it.
            into: A uint8 array of the file's size to read into; a new one is made when it is left out.
            arrived: Called on the way, with the number of bytes from the beginning on that are there.

        Raises:
            CorruptionError: It is missing, or has another size than `into`.
            StorageError: It is there and cannot be read, or is no regular file.
        """
        ...

    def read_header(self, uri: str) -> bytes:
        """Read the JSON header of a file without its data; errors as those of `read`."""
        ...

    def size(self, uri: str) -> int | None:
        """Return the size in bytes of a committed file, or None when there is none.

        Raises:
            StorageError: Nobody can look, or it is no regular file.
        """
        ...

    def forget(self, uri: str) -> bool:
        """Drop what is kept of a committed file nearer than the file itself, so that the next read is of that.

        Returns:
            Whether this store keeps such copies, so that a second read may find what the first did not.
        """
        ...

    def where(self, uri: str) -> str:
        """Say where a committed file is, so that whoever reads an error finds it."""
        ...

    def delete(self, uri: str) -> None:
        """Remove a committed file; one that is not there is no error.

        Raises:
            StorageError: It is there and cannot be removed.
        """
        ...

    def owner(self) -> str | None:
        """Return the identity of the registry that claimed this place; None when none did.

        Raises:
            StorageError: Nobody can look.
        """
        ...

    def claim(self, registry: str) -> str:
        """Write a registry's identity down here, unless another one's is.

        Returns:
            The identity that is here now.

        Raises:
            StorageError: It cannot be written.
        """
        ...

    def uris(self) -> list[str]:
        """Return the URIs of all committed files, sorted."""
        ...

    def leftovers(self) -> list[str]:
        """Return the temporary ids of files that were neither committed nor aborted, sorted."""
        ...

    def discard(self, file_id: str) -> None:
        """Remove a left-over temporary file; one that is not there is no error."""
        ...

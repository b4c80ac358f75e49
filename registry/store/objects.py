"""Snapshot files as objects of a bucket: S3 and what speaks like it, Google Cloud Storage, Azure, or memory for tests.

Rules:

* Names are random and never used again: that is what keeps one writer from another's object. A file of one part is put
  only where its name is absent. A larger one is uploaded in parts, which nobody sees until the last request makes them
  one object; a failed or aborted upload removes them.
* The header stands first in a file and is known last, and parts are numbered as they are handed over. So an upload
  begins when the whole file and its name are known, in `sync`, and ends in `commit`: between them it runs beside the
  caller.
* A request that went wrong is tried again within a bound, and every wait has one. A put that got no answer is looked
  up: each object bears a mark of the put that made it.
* What the client says when it fails may hold URLs, headers and parts of credentials. An error of ours is written
  anew, from the status, the store's own code for it, and what is known of the place; the client's is not its cause.
* Credentials, region and endpoint are the environment's, and never a part of a URL, an error or a pickle.

`obstore` is imported when a request is made, so that nobody pays for it who keeps snapshots in a folder.
"""

from __future__ import annotations

import os
import re
import threading
import uuid
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self, TypeVar

from weightledger.registry import arguments
from weightledger.registry.errors import CorruptionError, StorageError
from weightledger.registry.logs import log
from weightledger.registry.store.snapshots import Buffer
from weightledger.registry.weights.layout import LENGTH_BYTES, header_bytes

if TYPE_CHECKING:
    from obstore.store import ClientConfig, MemoryStore, ObjectStore, RetryConfig

    from weightledger.registry.weights.arrays import Bytes

T = TypeVar("T")

SCHEMES: Final = ("s3", "gs", "az", "memory")
PART_BYTES: Final = 8 << 20
"""From twice as many bytes on, a file is uploaded in parts of that size or a little more."""
_MOST_PARTS: Final = 9_000  # S3 takes 10,000
_UPLOADS: Final = 4  # parts under way at a time, each a request
_RANGE_BYTES: Final = 16 << 20
_READS: Final = 4  # ranges under way at a time
_FIRST_BYTES: Final = 64 << 10  # of a header: most are shorter
_TRIES: Final = 3  # of a request that the client does not try again by itself
_OWNER: Final = ".registry"
_MARK: Final = "writer"  # the metadata's key; Azure takes letters only

_memories: dict[str, MemoryStore] = {}
_lock = threading.Lock()
_used_by: int | None = None
"""The process that the client's threads live in."""


@dataclass(frozen=True)
class Patience:
    """How long a store is waited for, in seconds.

    Attributes:
        connect: For a connection.
        request: For the answer to one request, all of its bytes included.
        retries: How often a request that failed is sent again, at most.
        retrying: From so long after the first request on, it is not sent again.
    """

    connect: float = 5.0
    request: float = 120.0
    retries: int = 8
    retrying: float = 120.0

    @property
    def longest(self) -> float:
        """The bound of one call of the client: it begins its last request at the end of `retrying`."""
        return self.retrying + 2 * self.request + self.connect + 30.0


@dataclass(frozen=True)
class Bucket:
    """Where the objects are: a scheme, a bucket (of Azure a container), and a prefix, which may be empty."""

    scheme: str
    name: str
    prefix: str

    def __str__(self) -> str:
        return f"{self.scheme}://{self.name}" + (f"/{self.prefix}" if self.prefix else "")


def parse_url(url: str) -> Bucket:
    """Read the URL of an object store.

    Raises:
        ValueError: It has another form. Nothing of it is shown, since it may hold a password.
    """
    scheme, mark, rest = url.partition("://")
    if not mark or scheme not in SCHEMES:
        known = ", ".join(f"{name}://" for name in SCHEMES)
        raise ValueError(f"expected the URL of an object store, which begins with one of {known}")
    form = f"expected {scheme}://BUCKET/PREFIX"
    if "@" in rest or "?" in rest or "#" in rest:
        raise ValueError(
            f"{form} and nothing else, found more, which is not shown here since it may be a secret: credentials and "
            "endpoint are read from the environment"
        )
    if not rest.isprintable() or "%" in rest or "\\" in rest:
        raise ValueError(f"{form} of plain characters, found {arguments.shown(url)}")
    name, _, prefix = rest.partition("/")
    if ":" in name:
        raise ValueError(
            f"{form}, found a colon in the bucket's name: an endpoint is read from the environment"
        )
    parts = prefix.rstrip("/").split("/") if prefix.rstrip("/") else []
    if not name or any(part in ("", ".", "..") for part in parts):
        raise ValueError(f"{form}, found {arguments.shown(url)}")
    return Bucket(scheme, name, "/".join(parts))


class ObjectSnapshots:
    """Keeps snapshot files in a bucket.

    Args:
        url: `s3://bucket/prefix`, `gs://…`, `az://container/prefix`, or `memory://name`, which ends with the process.
        patience: How long the store is waited for.

    Raises:
        ValueError: The URL has another form.
    """

    def __init__(self, url: str, *, patience: Patience | None = None) -> None:
        self.bucket = parse_url(url)
        self._patience = Patience() if patience is None else patience
        self._made: ObjectStore | None = None
        self._ids: set[str] = set()

    def __repr__(self) -> str:
        return f"<ObjectSnapshots {self.bucket}>"

    def __reduce__(self) -> tuple[Callable[..., ObjectSnapshots], tuple[str, Patience]]:
        return _remade, (str(self.bucket), self._patience)

    # ------------------------------------------------------------------ writing

    def create(self, file_id: str) -> ObjectWriter:
        """Begin a file under an id that nobody else uses. The store is not asked for anything yet."""
        _check_id(file_id)
        with _lock:
            if file_id in self._ids:
                raise StorageError(f"{self.bucket}: the id {file_id} is in use already")
            self._ids.add(file_id)
        return ObjectWriter(self, file_id)

    def release(self, file_id: str) -> None:
        """Let an id go whose writer is done."""
        self._ids.discard(file_id)

    def put(self, name: str, pieces: Sequence[memoryview], what: str) -> None:
        """Put a file of one part, only where its name is absent.

        Args:
            name: The object's name below the prefix.
            pieces: Its bytes.
            what: How an error names what was to be done.
        """
        self.client()  # it tells what is not installed
        from obstore.exceptions import AlreadyExistsError

        mark, problem = uuid.uuid4().hex, None
        for _ in range(_TRIES):
            problem = self._try_to_put(name, pieces, mark)
            if problem is None:
                return
            raced = isinstance(problem, AlreadyExistsError)
            # It may have arrived, now or at an earlier try, and only the answer was lost.
            if (raced or _is_transport(problem)) and self.bears(name, mark):
                return
            if raced and _code(problem) != "ConditionalRequestConflict":
                raise StorageError(f"{what}: the name is taken")
            if not raced and not _is_transport(problem):
                break
        raise _error(what, problem)

    def _try_to_put(self, name: str, pieces: Sequence[memoryview], mark: str) -> Exception | None:
        client, attributes = self.client(), {_MARK: mark}
        import obstore
        from obstore.exceptions import AlreadyExistsError

        try:
            obstore.put(client, name, list(pieces), mode="create", attributes=attributes)
            return None
        except NotImplementedError:
            pass  # switched off in the environment, for a store that knows of no conditions
        except Exception as error:  # noqa: BLE001 - every error of the client is told in our words
            return error
        if self.size(name) is not None:
            return AlreadyExistsError(name)
        try:
            obstore.put(client, name, list(pieces), use_multipart=False, attributes=attributes)
            return None
        except Exception as error:  # noqa: BLE001 - as above
            return error

    def bears(self, name: str, mark: str) -> bool:
        """Tell whether an object is there and was made by the put or upload with that mark."""
        client = self.client()
        import obstore

        try:
            found = obstore.get(client, name, options={"head": True})
        except Exception:  # noqa: BLE001 - who asks has an error to tell already
            return False
        return dict(found.attributes).get(_MARK) == mark

    # ------------------------------------------------------------------ reading

    def read(
        self, uri: str, into: Bytes | None = None, arrived: Callable[[int], None] | None = None
    ) -> Bytes:
        """Read a whole file by ranges, some at a time, that arrive in their order."""
        from weightledger.registry.weights.arrays import page_buffer

        name = self._name(uri)
        first, size = self._range(name, 0, _RANGE_BYTES)
        if into is not None and into.nbytes != size:
            raise CorruptionError(f"{self.where(uri)}: expected {into.nbytes} bytes, found {size}")
        target = page_buffer(size) if into is None else into

        def fetch(start: int) -> int:
            end = min(start + _RANGE_BYTES, size)
            _copy(target, start, self._range(name, start, end)[0])
            return end

        _copy(target, 0, first)
        note = (lambda done: None) if arrived is None else arrived
        note(len(first))
        for end in _in_order(fetch, range(len(first), size, _RANGE_BYTES)):
            note(end)
        return target

    def read_header(self, uri: str) -> bytes:
        """Read the JSON header of a file without its data."""
        name = self._name(uri)
        first, size = self._range(name, 0, _FIRST_BYTES)
        length = header_bytes(bytes(first[:LENGTH_BYTES]), size, self.where(uri))
        end = LENGTH_BYTES + length
        rest = b"" if end <= len(first) else bytes(self._range(name, len(first), end)[0])
        return (bytes(first) + rest)[LENGTH_BYTES:end]

    def size(self, uri: str) -> int | None:
        """Return the size in bytes of a committed file, or None when there is none."""
        name, client = self._name(uri), self.client()
        import obstore

        try:
            return self._ask(
                f"{self.where(uri)} cannot be looked at", lambda: int(obstore.head(client, name)["size"])
            )
        except _MissingError:
            pass
        # The answer to such a request has no text, so that it does not tell a missing object from a missing bucket.
        self._check_bucket()
        return None

    def where(self, uri: str) -> str:
        """Return the URL of a committed file."""
        return f"{self.bucket}/{self._name(uri)}"

    # ------------------------------------------------------------------ keeping

    def delete(self, uri: str) -> None:
        """Remove a committed file; one that is not there is no error."""
        name, client = self._name(uri), self.client()
        import obstore

        try:
            self._ask(f"{self.where(uri)} could not be removed", lambda: obstore.delete(client, name))
        except _MissingError:
            pass

    def forget(self, uri: str) -> bool:
        """Return False: nothing is kept nearer than the bucket."""
        self._name(uri)
        return False

    def owner(self) -> str | None:
        """Return the identity of the registry that claimed this prefix; None when none did."""
        client = self.client()
        import obstore

        try:
            found = self._ask(
                f"{self.bucket}/{_OWNER} cannot be read",
                lambda: bytes(obstore.get_range(client, _OWNER, start=0, length=100)),
            )
        except _MissingError:
            return None
        return found.decode("ascii", "replace").strip()

    def claim(self, registry: str) -> str:
        """Write a registry's identity under the prefix, unless another one's is there; return the one that is."""
        found = self.owner()
        if found is not None:
            return found
        what = f"{self.bucket}/{_OWNER} could not be written"
        try:
            self.put(_OWNER, [memoryview(registry.encode())], what)
        except StorageError:
            found = self.owner()
            if found is None:
                raise
            return found
        return registry

    def uris(self) -> list[str]:
        """Return the names of all committed files, sorted."""
        client = self.client()
        import obstore

        try:
            found = self._ask(
                f"{self.bucket} cannot be listed",
                lambda: [str(each["path"]) for each in obstore.list_with_delimiter(client)["objects"]],
            )
        except _MissingError:
            return []
        return sorted(name for name in found if not name.startswith("."))

    def leftovers(self) -> list[str]:
        """Return nothing: parts that a killed writer left have no id, and go by the bucket's lifecycle rule."""
        return []

    def discard(self, file_id: str) -> None:
        """Do nothing: what was not committed is no object."""

    # ------------------------------------------------------------------ asking

    @property
    def patience(self) -> Patience:
        """How long the store is waited for."""
        return self._patience

    def client(self) -> ObjectStore:
        """Return the client, made at its first use.

        Raises:
            StorageError: It is not installed, it cannot be made, or this process is the fork of one that used it.
        """
        global _used_by
        with _lock:
            if _used_by is None:
                _used_by = os.getpid()
            if _used_by != os.getpid():
                # Its threads did not come along: a request would wait for ever.
                raise StorageError(
                    f"{self.bucket} cannot be used here: process {os.getpid()} was forked from {_used_by}, which uses "
                    "object stores, and a fork does not take its network threads along. Start processes by spawn "
                    "(multiprocessing.get_context('spawn'))"
                )
            if self._made is None:
                self._made = self._make()
            return self._made

    def _make(self) -> ObjectStore:
        try:
            import obstore.store
        except ImportError as error:
            raise StorageError(
                f"{self.bucket} cannot be opened: obstore, the client for object stores, is missing ({error}); "
                "pip install 'weightledger[s3]'"
            ) from None
        patience, bucket = self._patience, self.bucket
        options: ClientConfig = {
            "connect_timeout": timedelta(seconds=patience.connect),
            "timeout": timedelta(seconds=patience.request),
            "allow_http": _endpoint_is_plain(bucket.scheme),
        }
        retry: RetryConfig = {
            "max_retries": patience.retries,
            "retry_timeout": timedelta(seconds=patience.retrying),
            "backoff": {
                "init_backoff": timedelta(milliseconds=100),
                "max_backoff": timedelta(seconds=10),
                "base": 2,
            },
        }
        prefix = bucket.prefix or None
        problem = None
        try:
            match bucket.scheme:
                case "s3":
                    # One at a time: not every store that speaks S3 knows how to remove many.
                    return obstore.store.S3Store(
                        bucket.name,
                        prefix=prefix,
                        client_options=options,
                        retry_config=retry,
                        disable_bulk_delete=True,
                    )
                case "gs":
                    return obstore.store.GCSStore(
                        bucket.name, prefix=prefix, client_options=options, retry_config=retry
                    )
                case "az":
                    return obstore.store.AzureStore(
                        bucket.name, prefix=prefix, client_options=options, retry_config=retry
                    )
                case _:
                    return _memories.setdefault(str(bucket), obstore.store.MemoryStore())
        except Exception as error:  # noqa: BLE001 - told in our words
            problem = error
        raise _error(f"{bucket} cannot be opened", problem)

    def _ask(self, what: str, call: Callable[[], T]) -> T:
        """Ask for what may be asked for twice: the client itself does not ask again when an answer was cut.

        Raises:
            _MissingError: There is no such object.
            StorageError: Anything else; `what` begins its text.
        """
        problem: Exception | None = None
        for _ in range(_TRIES):
            try:
                return call()
            except Exception as error:  # noqa: BLE001 - every error of the client is told in our words
                problem = error
            if not _was_cut(problem):
                break
        # Outside of the handler: the client's error, which may hold secrets, is not even its context.
        if isinstance(problem, FileNotFoundError) and _code(problem) != "NoSuchBucket":
            raise _MissingError(what)
        raise _error(what, problem)

    def _range(self, name: str, start: int, end: int) -> tuple[memoryview, int]:
        """Return the bytes of an object from start to end, or to its own end, and its size."""
        where, client = f"{self.bucket}/{name}", self.client()
        import obstore

        def ask() -> tuple[memoryview, int]:
            found = obstore.get(client, name, options={"range": (start, end)})
            size = int(found.meta["size"])
            return memoryview(found.bytes()), size

        tries = 0
        while True:
            tries += 1
            try:
                data, size = self._ask(f"{where} cannot be read", ask)
            except _MissingError:
                raise CorruptionError(
                    f"{where} is missing: restore it from a backup, or go back to another version"
                ) from None
            except StorageError:
                if start == 0 and self.size(name) == 0:
                    return memoryview(b""), 0  # it has no first byte to ask for
                raise
            expected = max(min(end, size) - start, 0)
            if data.nbytes == expected:
                return data, size
            if tries == _TRIES:
                raise StorageError(
                    f"{where} cannot be read: expected {expected} bytes from {start} on, found {data.nbytes}"
                )

    def _check_bucket(self) -> None:
        client = self.client()
        import obstore
        from obstore.exceptions import PermissionDeniedError

        def look() -> None:
            try:
                for _ in obstore.list(client, prefix=_OWNER, chunk_size=1):
                    break
            except PermissionDeniedError:
                pass  # who may read need not be allowed to list

        try:
            self._ask(f"{self.bucket} cannot be looked at", look)
        except _MissingError:
            pass

    def _name(self, uri: str) -> str:
        if (
            not isinstance(uri, str)
            or not uri.isprintable()
            or uri in ("", ".", "..")
            or "/" in uri
            or uri.startswith(".")
        ):
            raise CorruptionError(f"expected the name of a snapshot file, found {uri!r}")
        return uri


class _MissingError(StorageError):
    """There is no such object."""


class ObjectWriter:
    """A file of an `ObjectSnapshots` that is being written: kept in memory, and uploaded once it has its name."""

    def __init__(self, store: ObjectSnapshots, file_id: str) -> None:
        self._store = store
        self._file_id = file_id
        self._pieces: list[tuple[int, memoryview]] = []
        self._upload: _Upload | None = None
        self._open = True

    def write_at(self, offset: int, buffer: Buffer, *, lent: bool = False) -> None:
        """Take bytes at an offset: a copy of them, unless they are lent."""
        from weightledger.registry.weights.arrays import as_bytes

        self._check_open()
        self._stop()
        view = as_bytes(buffer)
        if view.nbytes:
            self._pieces.append((offset, (view if lent else view.copy()).data))

    def sync(self, name: str | None = None) -> None:
        """Upload the parts of a large file whose name is known; nobody sees it before `commit`."""
        self._check_open()
        if name is not None and self._nbytes >= 2 * PART_BYTES:
            with self._failing():
                self._carry(name, _Upload.hand_over)

    def commit(self, name: str) -> str:
        """Make the file an object under a name that was never used before."""
        if "/" in name or name.startswith(".") or not name or not name.isprintable():
            raise ValueError(f"expected a file name that does not begin with a dot, found {name!r}")
        self._check_open()
        with self._failing():
            if self._nbytes < 2 * PART_BYTES:
                self._store.put(name, self._whole(), self._what(name))
            else:
                self._carry(name, _Upload.complete)
        self._close()
        return name

    def abort(self) -> None:
        """Remove what was uploaded. Does nothing after a commit or an abort."""
        if self._open:
            self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()

    @property
    def _nbytes(self) -> int:
        return max((offset + piece.nbytes for offset, piece in self._pieces), default=0)

    def _what(self, name: str) -> str:
        return f"{self._store.bucket}/{name} ({self._file_id}) could not be written ({self._nbytes} bytes needed)"

    def _carry(self, name: str, step: Callable[[_Upload], None]) -> None:
        """Do a step of the upload; one whose answer was cut, which the client does not ask for again, begins anew."""
        if self._upload is not None and self._upload.name != name:
            self._stop()
        if self._upload is None and self._store.size(name) is not None:
            raise StorageError(f"{self._what(name)}: the name is taken")
        for turn in range(_TRIES):
            upload = self._begin(name)
            try:
                step(upload)
                return
            except StorageError:
                if turn == _TRIES - 1 or not upload.was_cut:
                    raise
            self._upload = None

    def _begin(self, name: str) -> _Upload:
        if self._upload is None:
            self._upload = _Upload(self._store, name, self._whole(), self._what(name))
            # A writer that is neither committed nor aborted must not leave a thread that waits for ever.
            weakref.finalize(self, self._upload.give_up)
        return self._upload

    def _whole(self) -> list[memoryview]:
        """Return the file's bytes from its beginning to its end."""
        pieces = sorted(self._pieces, key=lambda piece: piece[0])
        at = 0
        for offset, piece in pieces:
            if offset != at:
                return [self._pasted()]
            at += piece.nbytes
        return [piece for _, piece in pieces]

    def _pasted(self) -> memoryview:
        """Return the bytes of pieces that overlap or leave gaps, as a file would hold them."""
        from weightledger.registry.weights.arrays import page_buffer

        whole = page_buffer(self._nbytes)
        for offset, piece in self._pieces:
            whole[offset : offset + piece.nbytes] = piece
        return whole.data

    def _stop(self) -> None:
        upload, self._upload = self._upload, None
        if upload is not None:
            upload.abort()

    def _close(self) -> None:
        self._open = False
        self._stop()
        self._pieces.clear()
        self._store.release(self._file_id)

    def _check_open(self) -> None:
        if not self._open:
            raise StorageError(
                f"{self._store.bucket} ({self._file_id}) was committed or aborted already: create a new file"
            )

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Abort when what is done inside fails."""
        try:
            yield
        except BaseException:
            self.abort()
            raise


class _Abandoned(Exception):
    """The upload is not wanted any more."""


class _Upload:
    """A file on its way in parts, by a thread. The client asks for its pieces, and for its end, which `complete` gives.

    Args:
        store: Where it goes.
        name: The object's name below the prefix.
        pieces: Its bytes, in their order.
        what: How an error names what was to be done.
    """

    def __init__(self, store: ObjectSnapshots, name: str, pieces: Sequence[memoryview], what: str) -> None:
        self.name = name
        self._store = store
        self._what = what
        self._mark = uuid.uuid4().hex
        self._pieces: list[memoryview] | None = list(pieces)
        nbytes = sum(piece.nbytes for piece in pieces)
        # Whole parts, so that little is left to send when the end is told.
        self._part = nbytes // min(nbytes // PART_BYTES, _MOST_PARTS)
        self._changed = threading.Condition()
        self._taken = 0
        self._handed_over = self._over = self._wanted = self._unwanted = False
        self._problem: BaseException | None = None
        # Made here: who lacks the client or credentials is told by the caller's thread.
        self._client = store.client()
        self._thread = threading.Thread(target=self._run, name="weightledger-upload", daemon=True)
        self._thread.start()

    def hand_over(self) -> None:
        """Wait until all but a few parts are stored."""
        self._wait(lambda: self._handed_over)
        self._raise()

    def complete(self) -> None:
        """Make the parts one object, and wait until it is."""
        with self._changed:
            self._wanted = True
            self._changed.notify_all()
        self._wait(lambda: False)
        if self._problem is not None and self._store.bears(self.name, self._mark):
            return  # it arrived, and only the answer was lost
        self._raise()

    @property
    def was_cut(self) -> bool:
        """Whether it ended since an answer came only in part."""
        return _was_cut(self._problem)

    def give_up(self) -> None:
        """Tell the thread to stop, without waiting for it."""
        with self._changed:
            self._unwanted = True
            self._changed.notify_all()

    def abort(self) -> None:
        """Remove the parts; does nothing once it is over."""
        self.give_up()
        self._thread.join(self._store.patience.longest)
        problem = self._problem
        if self._thread.is_alive() or not (problem is None or isinstance(problem, _Abandoned)):
            log.info("%s: its parts may be left, which the bucket's lifecycle rule removes", self._what)

    def _wait(self, ready: Callable[[], bool]) -> None:
        """Wait until something is so or all is over: as long as it moves, and within the client's bounds."""
        with self._changed:
            while not (ready() or self._over):
                before = self._taken
                if not self._changed.wait_for(
                    lambda: ready() or self._over or self._taken != before,  # noqa: B023 - called within the turn
                    self._store.patience.longest,
                ):
                    raise StorageError(f"{self._what}: the store does not answer")

    def _raise(self) -> None:
        if self._problem is not None:
            raise _error(self._what, self._problem)

    def _run(self) -> None:
        import obstore

        problem: BaseException | None = None
        try:
            obstore.put(
                self._client,
                self.name,
                self._parts(),
                use_multipart=True,
                chunk_size=self._part,
                max_concurrency=_UPLOADS,
                attributes={_MARK: self._mark},
            )
        except BaseException as error:  # noqa: BLE001 - told in the thread that waits
            problem = error
        with self._changed:
            self._problem, self._pieces, self._over = problem, None, True
            self._changed.notify_all()

    def _parts(self) -> Iterator[memoryview]:
        for piece in self._pieces or ():
            for at in range(0, piece.nbytes, self._part):
                with self._changed:
                    self._taken += 1
                    self._changed.notify_all()
                    if self._unwanted:
                        raise _Abandoned
                yield piece[at : at + self._part]
        with self._changed:
            self._handed_over = True
            self._changed.notify_all()
            # Ends with the writer: by commit, by abort, or when nobody has it any more.
            self._changed.wait_for(lambda: self._wanted or self._unwanted)
            if self._unwanted:
                raise _Abandoned


def _remade(url: str, patience: Patience) -> ObjectSnapshots:
    return ObjectSnapshots(url, patience=patience)


def _check_id(file_id: str) -> None:
    if not file_id or "/" in file_id or "\0" in file_id:
        raise ValueError(f"expected a file id without slashes, found {file_id!r}")


def _copy(target: Bytes, start: int, data: memoryview) -> None:
    from weightledger.registry.weights.arrays import as_bytes

    target[start : start + data.nbytes] = as_bytes(data)


def _in_order(fetch: Callable[[int], int], starts: Sequence[int]) -> Iterator[int]:
    """Do it for each, some at a time, and yield what it returns in their order."""
    if len(starts) < 2:
        yield from map(fetch, starts)
        return
    with ThreadPoolExecutor(_READS, "weightledger-read") as pool:
        waiting: list[Future[int]] = []
        left = iter(starts)
        try:
            for start in left:
                waiting.append(pool.submit(fetch, start))
                if len(waiting) > _READS:
                    yield waiting.pop(0).result()
            while waiting:
                yield waiting.pop(0).result()
        finally:
            # Nobody may write into the caller's memory once it has it back: those under way are waited for.
            for each in waiting:
                each.cancel()


# ---------------------------------------------------------------------- what the client said

_STATUS: Final = re.compile(r"status code: (\d{3})")
_CODE: Final = re.compile(r"<Code>([A-Za-z]{1,60})</Code>")
_RETRIES: Final = re.compile(r"after (\d+) retries")
_ADVICE: Final = {
    "NoSuchBucket": "there is no such bucket: make it, or mend the URL",
    "ContainerNotFound": "there is no such container: make it, or mend the URL",
    "SignatureDoesNotMatch": "the credentials in the environment are not accepted",
    "InvalidAccessKeyId": "the credentials in the environment are not accepted",
    "ExpiredToken": "the credentials in the environment have expired",
    "AccessDenied": "the credentials in the environment have no right to do this, or the bucket has another owner",
    "SlowDown": "the store asks for fewer requests: try again later",
}
_STATUSES: Final = {
    "301": "the bucket is in another region: set AWS_REGION",
    "401": "the credentials in the environment are not accepted",
    "403": "the credentials in the environment have no right to do this",
    "404": "there is no such bucket: make it, or mend the URL",
    "412": "the name is taken",
}
_TRANSPORT: Final = (
    ("kind: Timeout", "no answer in time"),
    ("TimedOut", "no answer in time"),
    (
        "kind: Connect",
        "no connection to the store: look at the endpoint in the environment, and at the network",
    ),
    ("kind: Interrupted", "the connection broke"),
    ("kind: Request", "the connection broke"),
    ("kind: Body", "the connection broke"),
    ("kind: Decode", "the connection broke"),
    ("kind: Unknown", "the connection broke"),
)
_CUT: Final = ("kind: Interrupted", "kind: Body", "kind: Decode", "kind: Unknown")
_SETTINGS: Final = (
    ("169.254.169.254", "there are no credentials in the environment, and the machine gives none"),
    ("metadata.google.internal", "there are no credentials in the environment, and the machine gives none"),
    ("Account must be specified", "the environment has no AZURE_STORAGE_ACCOUNT_NAME"),
    ("without LOCATION", "the bucket is in another region: set AWS_REGION"),
    ("scheme is not allowed", "the endpoint has no TLS: set AWS_ALLOW_HTTP=true if that is meant"),
)


def _code(error: BaseException) -> str:
    found = _CODE.search(str(error))
    return "" if found is None else found[1]


def _is_transport(error: BaseException) -> bool:
    """Tell whether it is unknown if the request arrived."""
    text = str(error)
    return not _STATUS.search(text) and any(mark in text for mark, _ in _TRANSPORT)


def _was_cut(error: BaseException | None) -> bool:
    """Tell whether an answer came only in part."""
    return error is not None and any(mark in str(error) for mark in _CUT)


def _error(what: str, error: BaseException | None) -> StorageError:
    """Say what went wrong, of the client's words only what cannot be a secret."""
    text, code = str(error), _code(error) if error is not None else ""
    status = _STATUS.search(text)
    retries = _RETRIES.search(text)
    for mark, said in _SETTINGS:
        if mark in text:
            return StorageError(f"{what}: {said}")
    if status is not None:
        answer = f"the store answered {status[1]}" + (f" {code}" if code else "")
        advice = _ADVICE.get(code) or _STATUSES.get(status[1], "")
        said = answer + (f" ({advice})" if advice else "")
    else:
        said = next((words for mark, words in _TRANSPORT if mark in text), "")
        said = said or f"the client failed with {type(error).__name__}"
    return StorageError(f"{what}: {said}" + (f", after {retries[1]} retries" if retries else ""))


def _endpoint_is_plain(scheme: str) -> bool:
    """Tell whether the environment names an endpoint without TLS, which is meant then."""
    names = {
        "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
        "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
    }.get(scheme, ())
    found = next((value for name in names if (value := os.environ.get(name))), "")
    return found.startswith("http://")

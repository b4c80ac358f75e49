"""How weights become a version: copy, write and hash side by side, take a number, make it durable, make it the head.

The order is the promise. The file's body may be written early, under a temporary name that a later open can recognise;
the row says `writing` before the file gets its name; the row says `stored` only after file and folder are on disk. A
process that dies in between leaves a `writing` row and a free lock, which the next open turns into `lost`.

A publish of content that is already stored shares that file instead of writing another one.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError

from weightledger.registry import arguments, values
from weightledger.registry.errors import InUseError, InvalidWeightsError, NotFoundError, WeightLedgerError
from weightledger.registry.locks import file_tag
from weightledger.registry.log import steering, versioning
from weightledger.registry.log.ledger import Entry, FileEntry, Ledger, NewFile
from weightledger.registry.log.versioning import Opened, Standing
from weightledger.registry.records import Version
from weightledger.registry.store.inspection import is_whole
from weightledger.registry.store.recovery import clear_lost, recover_locked
from weightledger.registry.store.restructuring import Form, check_publish
from weightledger.registry.store.snapshots import SnapshotStore, SnapshotWriter
from weightledger.registry.weights import codec
from weightledger.registry.weights.arrays import Bytes
from weightledger.registry.weights.digest import threads_for
from weightledger.registry.weights.packing import Packer
from weightledger.registry.weights.payload import Payload

# Below this a thread costs more than the write that it would take off the caller's hands.
INLINE_BYTES = 4 << 20
# How long a copy waits for the one before it to be written, in seconds.
_BUFFER_PATIENCE = 300.0


@dataclass
class Part:
    """One file's worth of a draft: the weights, or the extra state."""

    payload: Payload
    structure: dict[str, Any]


@dataclass
class Draft:
    """A copy of everything that is to be published, made at the call. Nothing of it is written yet."""

    weights: Part
    extra: Part | None
    step: int | None
    metrics: dict[str, float]
    metadata: dict[str, Any]
    message: str
    _release: Callable[[], None] = field(repr=False, default=lambda: None)

    def release(self) -> None:
        """Give the buffer back for the next draft."""
        self._release()


class Loan:
    """The publisher's buffer in the hands of somebody who reads a file, from `room` until `give_back`."""

    def __init__(self, lend: Callable[[int], Bytes | None], release: Callable[[], None]) -> None:
        self._lend = lend
        self._release = release
        self.buffer: Bytes | None = None

    def room(self, nbytes: int) -> Bytes | None:
        """Return the buffer, of so many bytes; None while a copy in it is needed. Called once."""
        self.buffer = self._lend(nbytes)
        return self.buffer

    def give_back(self) -> None:
        """Let the next copy have it. Does nothing when there was none to give, or twice."""
        if self.buffer is not None:
            self.buffer = None
            self._release()


class Publisher:
    """Makes versions of one policy."""

    def __init__(self, ledger: Ledger, store: SnapshotStore) -> None:
        self.ledger = ledger
        self.store = store
        self._packer = Packer()
        self._buffer = threading.Lock()
        self._held_digest: str | None = None
        self.pid = os.getpid()
        """The process that may use it: a fork copies its buffer and lock as they are at that moment, maybe in use."""
        self._told_stuck: str | None = None
        """The content of which it was told that it stays while the step advances."""

    # ------------------------------------------------------------------ copying

    def draft(
        self,
        weights: Any,
        *,
        step: int | None = None,
        metrics: Mapping[str, Any] | None = None,
        metadata: Mapping[str, Any] | None = None,
        message: str = "",
        extra: Any = None,
        content: codec.Content | None = None,
    ) -> Draft:
        """Check and copy what is to be published. The caller releases the draft when it is done with it.

        Args:
            content: `weights` already flattened, when the caller has done so.

        Raises:
            InvalidWeightsError: something in it cannot be stored. Nothing was written.
        """
        step, numbers, kept = check_words(step, metrics, metadata, message)
        content = codec.flatten(weights) if content is None else content
        more = None if extra is None else codec.flatten_extra(extra)
        if not self._buffer.acquire(timeout=_BUFFER_PATIENCE):
            raise InUseError(
                f"the copy of policy {self.ledger.policy!r} that was made before is still being written after "
                f"{_BUFFER_PATIENCE:g} s; nothing was changed. Look at what its thread waits for, then publish again"
            )
        self._held_digest = None
        try:
            payload = self._packer.pack(content, policy=self.ledger.policy, step=step)
            aside = None
            if more is not None:
                # A packer of its own: this buffer is wanted for the length of one publish only.
                aside = Part(Packer().pack(more, policy=self.ledger.policy, step=step), more.structure)
            return Draft(
                Part(payload, content.structure), aside, step, numbers, kept, message, self._release_once()
            )
        except BaseException:
            self._buffer.release()
            raise

    def borrow(self) -> Loan:
        """Offer the buffer to whoever reads a file. While it is lent, the next draft waits."""
        return Loan(self._lend, self._buffer.release)

    def _lend(self, nbytes: int) -> Bytes | None:
        if not self._buffer.acquire(blocking=False):
            return None
        self._held_digest = None
        try:
            return self._packer.room(nbytes)
        except BaseException:
            self._buffer.release()
            raise

    def holds(self, content: codec.Content, digest: str) -> bool:
        """Tell whether the buffer still holds exactly this content from the last draft, and it has that digest."""
        if self._held_digest != digest:
            return False
        with self._buffer:
            return self._held_digest == digest and self._packer.holds(content)

    def hashed(self, digest: str) -> None:
        """Note the digest of what the buffer holds, while its draft is not released yet."""
        self._held_digest = digest

    def _release_once(self) -> Callable[[], None]:
        released = threading.Event()

        def release() -> None:
            if not released.is_set():
                released.set()
                self._buffer.release()

        return release

    # ------------------------------------------------------------------ publishing

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Be the only writer of this policy."""
        with self.ledger.locks.policy(self.ledger.policy):
            yield

    def recover(self) -> None:
        """Settle the rows that a dead writer left. The caller holds the lock."""
        # Files without a row wait for the next open: a publish must not slow down as the folder fills.
        recover_locked(self.ledger, self.store)

    def publish(self, draft: Draft, parent: int | None = None, *, restructure: bool = False) -> Version:
        """Store a draft durably and append its version.

        Args:
            parent: the number that the head must have (0: the policy must be empty); None takes any.
            restructure: accept names and shapes that are not the head's.

        Raises:
            ConflictError: the head has another number. Nothing was written.
            InvalidWeightsError: the weights have other names or shapes than the head. Nothing was written.
            StorageError: the disk refused. No version is offered, no file is left.
        """
        with self.lock():
            publication = self.begin(draft)
            try:
                publication.hash()
                with self.ledger.reading() as conn:
                    found = publication.stand_on(conn)
                if found.unfinished:
                    self.recover()
                versioning.check_parent(self.ledger, found, parent)
                publication.check_structure(restructure=restructure)
                # Most of what can go wrong on a disk goes wrong here, while there is no row that would have to be
                # marked lost.
                publication.write()
                # Nobody was told the number, so a power loss may take the row back; a dead process cannot.
                with self.ledger.writing(durable=False) as conn:
                    publication.open(conn)
                publication.store()
                with self.ledger.writing() as conn:
                    publication.close(conn)
            except BaseException as error:
                publication.fail(error)
                raise
        if found.head is not None and found.digest == publication.digest:
            self.warn_if_stuck(found.head, publication.digest, found.step, draft.step, stacklevel=4)
        return publication.version()

    def warn_if_stuck(
        self, head: int, digest: str, before: int | None, step: int | None, *, stacklevel: int
    ) -> None:
        """Tell, once for each content, that the head has it still although the step advanced.

        Args:
            head: the head's number.
            digest: its content.
            before: the step that it was published with; None for a rollback, after which equal content is meant.
            step: the step by now.
            stacklevel: as in `warnings.warn`, which is called here.
        """
        if before is None or step is None or step <= before or self._told_stuck == digest:
            return
        self._told_stuck = digest
        warnings.warn(
            f"the weights of policy {self.ledger.policy!r} are identical to v{head} although the step advanced from "
            f"{before} to {step}: does the optimizer step the weights that are published?",
            stacklevel=stacklevel,
        )

    def begin(self, draft: Draft) -> Publication:
        """Start writing a draft's files. The caller holds the lock until the publication is closed or failed."""
        return Publication(self, draft)

    def new_file_id(self) -> str:
        """Return a name part that was never used before and tells the policy that it belongs to."""
        return file_tag(self.ledger.policy) + uuid.uuid4().hex[:16]


class Publication:
    """One draft on its way to being a version: hash, open, store, close; or fail."""

    def __init__(self, publisher: Publisher, draft: Draft) -> None:
        self._publisher = publisher
        self._ledger = publisher.ledger
        self._store = publisher.store
        self.draft = draft
        self.opened: Opened | None = None
        """The version's row, from `open` on."""
        self._upon = Standing()
        self.begins_line = False
        """Whether the version has no parent: what stood before is abandoned by it."""
        self._weights = _FileJob(draft.weights, publisher)
        try:
            self._extra = None if draft.extra is None else _FileJob(draft.extra, publisher)
        except BaseException as error:
            # Its body is being written from a buffer that the caller is about to give back.
            _abort(self._weights, error)
            raise
        self.nonfinite: tuple[str, ...] = ()

    @property
    def number(self) -> int:
        """The version's number; 0 before `open`."""
        return 0 if self.opened is None else self.opened.number

    @property
    def digest(self) -> str:
        """The content digest, from `hash` on."""
        return self.draft.weights.payload.digest

    def hash(self) -> None:
        """Compute the digests and look for NaN and infinities, while the files are being written."""
        weights = self.draft.weights.payload
        if threads_for(weights.buffer.nbytes) == 1:
            self._hash_all()
            self.nonfinite = weights.nonfinite()
        else:
            with ThreadPoolExecutor(1) as aside:
                try:
                    look = aside.submit(weights.nonfinite)
                except RuntimeError:
                    look = None  # the interpreter is ending, and takes no more work for threads
                self._hash_all()
                self.nonfinite = weights.nonfinite() if look is None else look.result()
        self._publisher.hashed(self.digest)

    def _hash_all(self) -> None:
        for job in self._jobs():
            job.part.payload.hash()

    def write(self) -> None:
        """Write the files to their end, under temporary names; the number is known since `stand_on`."""
        for job in self._jobs():
            job.seal(self._upon.last_number + 1)
            job.join()

    def seal(self) -> None:
        """Let the threads that write big files do so to their end."""
        for job in self._jobs():
            if job.is_big:
                job.seal(self._upon.last_number + 1)

    def stand_on(self, conn: Connection) -> Standing:
        """See where the policy stands, and find stored files of equal content: a damaged one is not shared."""
        self._upon = versioning.standing(self._ledger, conn)
        for job in self._jobs():
            file = versioning.find_stored(conn, job.part.payload.digest)
            if file is not None:
                job.may_share = file.uri if is_whole(self._store, file) else None
        return self._upon

    def check_structure(self, *, restructure: bool) -> None:
        """Refuse other names or shapes than those of the head that `stand_on` saw, unless they are meant.

        Raises:
            InvalidWeightsError: they differ; names them.
        """
        layout, upon = self.draft.weights.payload.layout, self._upon
        if restructure or self.begins_line or upon.head is None or upon.shapes == layout.shapes_fingerprint:
            return
        with self._ledger.reading() as conn:
            weights = Form(layout.shapes_fingerprint, lambda: layout.shapes)
            check_publish(self._ledger, self._store, conn, upon.head, weights)

    def open(self, conn: Connection) -> None:
        """Take a number and write the row, in the caller's transaction, upon what `stand_on` saw."""
        for job in self._jobs():
            job.share(self._shareable(conn, job))
        self.opened = versioning.open_version(
            self._ledger,
            conn,
            self.entry(),
            snapshot_id=self._weights.announce(self._ledger, conn),
            structure_id=self._ledger.structure_id(conn, self.draft.weights.structure),
            extra_snapshot_id=None if self._extra is None else self._extra.announce(self._ledger, conn),
            extra_structure_id=(
                None
                if self.draft.extra is None
                else self._ledger.structure_id(conn, self.draft.extra.structure)
            ),
            upon=self._upon,
            begins_line=self.begins_line,
        )

    def store(self) -> None:
        """Make the files durable under their names."""
        for job in self._jobs():
            job.finish(self.number)

    def close(self, conn: Connection) -> None:
        """Make the version the head, in the caller's transaction."""
        assert self.opened is not None
        versioning.store_version(self._ledger, conn, self.opened, self.entry())

    def version(self) -> Version:
        """Return the version as its row says it, once it is stored."""
        assert self.opened is not None
        entry = self.entry()
        return Version(
            policy=self._ledger.policy,
            number=self.opened.number,
            digest=entry.digest,
            parent=self.opened.parent,
            restores=None,
            run=self.opened.run,
            step=entry.step,
            metrics=entry.metrics,
            metadata=entry.metadata,
            message=entry.message,
            size_bytes=entry.size_bytes,
            created_at=self.opened.created_at,
            stored=True,
            state="stored",
            nonfinite=entry.nonfinite,
            has_extra=self._extra is not None,
            dtypes=entry.dtypes,
        )

    def fail(self, error: BaseException) -> None:
        """Take back what can be taken back; a number that was taken stays, marked lost."""
        # Until it is marked lost its row may even say `stored`: a file that has its name stays until an open can tell.
        unnamed_only = True
        try:
            if self.number:
                with self._ledger.writing() as conn:
                    if self._ledger.version(conn, self.number).state == "stored":
                        # Interrupted after the commit: the version is whole, its files stay.
                        return
                    versioning.lose_version(
                        self._ledger, conn, self.number, f"{type(error).__name__}: {error}"
                    )
            unnamed_only = False
        except NotFoundError:
            unnamed_only = False  # the number went back with the transaction that took it
        except (WeightLedgerError, SQLAlchemyError, sqlite3.Error) as second:
            error.add_note(f"v{self.number} could not be marked lost ({second}); the next open does it")
        finally:
            for job in self._jobs():
                _abort(job, error, unnamed_only=unnamed_only)
        if self.number and not unnamed_only:
            self._clear(error)

    def _clear(self, error: BaseException) -> None:
        """Delete what the version that is marked lost had stored; what stays keeps its mark for the next open."""
        try:
            for why in clear_lost(self._ledger, self._store):
                error.add_note(f"{why}; the next open tries again")
        except (WeightLedgerError, SQLAlchemyError, sqlite3.Error) as second:
            error.add_note(
                f"the files of v{self.number} could not be cleared away ({second}); the next open does it"
            )

    def entry(self) -> Entry:
        """Return what the version's row says."""
        draft = self.draft
        return Entry(
            digest=self.digest,
            size_bytes=draft.weights.payload.layout.data_bytes,
            nonfinite=self.nonfinite,
            step=draft.step,
            metrics=draft.metrics,
            metadata=draft.metadata,
            message=draft.message,
            shapes=draft.weights.payload.layout.shapes_fingerprint,
            dtypes=draft.weights.payload.layout.dtypes,
        )

    def _jobs(self) -> list[_FileJob]:
        return [self._weights] if self._extra is None else [self._weights, self._extra]

    def _shareable(self, conn: Connection, job: _FileJob) -> FileEntry | None:
        if job.may_share is None:
            return None
        # Still stored in this transaction, and the very file that was read: a prune cannot take it any more.
        found = versioning.find_stored(conn, job.part.payload.digest)
        return found if found is not None and found.uri == job.may_share else None


def _abort(job: _FileJob, error: BaseException, *, unnamed_only: bool = False) -> None:
    """Abort because of an error, which tells of what cannot be removed."""
    try:
        job.abort(unnamed_only=unnamed_only)
    except WeightLedgerError as second:
        error.add_note(f"a file of it could not be removed: {second}")


class _FileJob:
    """Writes one payload to one file. Under its temporary name it may be whole before there is a row."""

    def __init__(self, part: Part, publisher: Publisher) -> None:
        self.part = part
        self._store = publisher.store
        self.file_id = publisher.new_file_id()
        self._writer: SnapshotWriter | None = None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._header: bytes | None = None
        self._ready = threading.Event()
        """The header is there, or will never be."""
        self._shared: FileEntry | None = None
        self.may_share: str | None = None
        """A stored file of equal content that was read and found whole."""
        self._uri: str | None = None
        self.is_big = part.payload.buffer.nbytes >= INLINE_BYTES
        if self.is_big:
            self._write_aside()

    @property
    def _name(self) -> str:
        return f"{self.part.payload.digest.removeprefix('blake3:')}-{self.file_id}.safetensors"

    def seal(self, version: int) -> None:
        """Give the file its header, with which it is written to its end: a big one by its thread, a small one now.

        Args:
            version: the number that the version is going to have.
        """
        if self.may_share is not None or self._header is not None:
            return
        self._header = self.part.payload.sealed(version=version, structure=self.part.structure)
        self._ready.set()
        if not self.is_big:
            self._writer = self._store.create(self.file_id)
            self._write()

    def _write_aside(self) -> None:
        self._writer = self._store.create(self.file_id)
        thread = threading.Thread(target=self._write, name="weightledger-write", daemon=True)
        try:
            thread.start()
        except BaseException as error:
            _abort(self, error)
            raise
        self._thread = thread

    def _write(self) -> None:
        assert self._writer is not None
        start = self.part.payload.layout.data_start
        try:
            self._writer.write_at(start, self.part.payload.buffer[start:], lent=True)
            self._ready.wait()
            if self._header is not None:
                self._writer.write_at(0, self._header)
                self._writer.sync(self._name)
        except BaseException as error:  # noqa: BLE001 - `join` raises it in the thread that publishes
            self._error = error

    def join(self) -> None:
        """Wait until the file is written to its end, if it has its header."""
        if self._thread is not None and self._header is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            raise self._error

    def share(self, entry: FileEntry | None) -> None:
        self._shared = entry
        if entry is None:
            self.may_share = None

    def announce(self, ledger: Ledger, conn: Connection) -> int:
        if self._shared is not None:
            return self._shared.id
        return versioning.add_file(
            conn, NewFile(self.part.payload.digest, self._name, self.part.payload.buffer.nbytes)
        )

    def finish(self, version: int) -> None:
        if self._shared is not None:
            self.abort()
            return
        self.seal(version)
        self.join()
        assert self._writer is not None
        self._uri = self._writer.commit(self._name)
        self._writer = None

    def abort(self, *, unnamed_only: bool = False) -> None:
        """Leave no file behind; one that has its name already goes too, unless a stored row may name it."""
        self._ready.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._writer is not None:
            writer, self._writer = self._writer, None
            writer.abort()
        if self._uri is not None and not unnamed_only:
            self._store.delete(self._uri)
            self._uri = None


def check_words(
    step: Any, metrics: Mapping[str, Any] | None, metadata: Mapping[str, Any] | None, message: str
) -> tuple[int | None, dict[str, float], dict[str, Any]]:
    """Return step, metrics and metadata as they are kept.

    Raises:
        InvalidWeightsError: one of them, or the message, cannot be kept.
    """
    numbers = steering.check_metrics(metrics)
    kept = check_metadata(metadata)
    whole = check_step(step)
    arguments.text("message", message)
    return whole, numbers, kept


def check_metadata(metadata: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a copy of metadata whose every value can be kept with its type.

    Raises:
        InvalidWeightsError: a key is no text, or a value is none that can be kept.
    """
    if metadata is None:
        return {}
    if not isinstance(metadata, Mapping):
        raise InvalidWeightsError(f"metadata must map names to values, found {arguments.shown(metadata)}")
    for key in metadata:
        if not isinstance(key, str):
            raise InvalidWeightsError(f"metadata keys are text, found {arguments.shown(key)}")
    kept = values.decode(values.encode(dict(metadata), "metadata"))
    assert isinstance(kept, dict)
    return kept


def check_step(step: Any) -> int | None:
    """Return a step as a plain int.

    Raises:
        InvalidWeightsError: it is no whole number, or none that 64 bits hold.
    """
    return None if step is None else arguments.within_64_bits("step", step, error=InvalidWeightsError)

"""Where the bytes come from that an update sends: live weights that become a version, or a version that is stored.

A publication stays open for as long as the update needs: its row and the intentions of the pushes are committed
together, and so are its end and the receipts. The policy's lock is held in between.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection

from weightledger.registry.errors import ConflictError
from weightledger.registry.log import steering, versioning
from weightledger.registry.records import Version
from weightledger.registry.store.publishing import INLINE_BYTES, Draft, Publication
from weightledger.registry.weights import codec
from weightledger.registry.weights.packing import Packer
from weightledger.registry.weights.payload import Payload
from weightledger.updater.server import Mark, ServerWeights, View

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weightledger.updater.base import RemoteWeightUpdaterBase


class HeadMovedError(ConflictError):
    """The head moved between the caller's look at it and the lock. Nothing was changed."""


@dataclass
class Restoration:
    """A rollback: what the server weights and the workers go back to."""

    wanted: Version
    payload: Payload
    """The bytes of `wanted`, which the server weights are known to accept."""
    reason: str
    version: Version | None = None
    """The version that restores it, once it is in the log."""


@dataclass
class Request:
    """What the caller asked for."""

    ids: Sequence[int]
    publish: bool = False
    weights: Any = None
    """Weights to publish in place of the live ones."""
    draft: Draft | None = None
    """A copy made in the caller's thread already."""
    restoration: Restoration | None = None
    """Roll back first."""
    version: Mark | None = None
    """Bring the workers to this version once, whatever their targets are."""
    forced: bool = False
    resend: bool = False
    adopted: bool = False
    restructure: bool = False
    """Publish names and shapes that are not the head's."""
    answers: dict[int, Any] = field(default_factory=dict)
    """What the workers answered last: receipts, or what came in their place; by worker id."""
    about: dict[str, Any] = field(default_factory=dict)
    """Step, metrics, metadata and message of the version."""


class Serving:
    """Gives one update its bytes, and carries its publication, if it has one, to the end."""

    def __init__(self, updater: RemoteWeightUpdaterBase, request: Request, stack: ExitStack) -> None:
        self._up = updater
        self._ledger = updater.registry.ledger
        self._registry = updater.registry
        self._request = request
        self._stack = stack
        self._draft: Draft | None = None
        self._lock = ExitStack()
        self.publication: Publication | None = None
        """What this update publishes; None when nothing changed."""
        self.view: View | None = None
        """Pins and lineage, if they were seen together with the head that was published upon."""
        self.kept: Mark | None = None
        """The head, when what was to be published has its content."""
        self._live = False
        self.failure: BaseException | None = None
        """Why the publication could not be made durable, or the server weights not restored; raised once the receipts
        were taken."""

    def publish(self, weights: Any) -> ServerWeights:
        """Publish weights if their content differs from the head's; the rest of the update makes it durable."""
        self._live = weights is self._up.policy_weights
        draft = self._request.draft
        if draft is None:
            try:
                draft = self._up._draft(weights, self._request.about)
            except Exception:
                # What cannot be copied may be why somebody went back.
                with self._ledger.reading() as conn:
                    self._check_head(self._ledger.head_number(conn))
                raise
        if draft is None:
            with self._ledger.reading() as conn:
                self._check_head(self._ledger.head_number(conn))
                self.view = self._up._look(conn)
            return self._serve_head()
        self._draft = draft
        self._stack.callback(draft.release)
        publisher = self._registry.publisher
        lock = self._stack.enter_context(ExitStack())
        lock.enter_context(publisher.lock())
        publication = publisher.begin(draft)
        try:
            spread = None
            if self._worth_a_thread(draft):
                spread = _Aside(self._up._distribute, draft.weights.payload)
                # Before the buffer is given back, whatever becomes of the publication.
                self._stack.callback(spread.wait)
            publication.hash()
            with self._ledger.reading() as conn:
                found = publication.look(conn)
                self.view = self._up._look(conn, pinned=found.pinned)
            if found.unfinished:
                publisher.recover()
            self._check_head(found.head)
            head = self._up.head
            if self._up.begins_line:
                publication.begins_line = True
            elif head is not None and publication.digest == head.digest:
                publication.fail(ConflictError("the content is the head's already"))
                lock.close()
                self.kept = head
                return self._serve(head, draft.weights.payload, draft.weights.structure, spread)
            publication.check_structure(restructure=self._request.restructure)
            self.publication, self._lock = publication, lock
            publication.seal()
            server = self._outfit(
                found.last_number + 1,
                publication.digest,
                publication.nonfinite,
                draft.weights.payload,
                draft.weights.structure,
                spread,
            )
        except BaseException as error:
            publication.fail(error)
            raise
        self._up.shelf.put(server)
        return server

    def roll_back(self, restoration: Restoration) -> ServerWeights:
        """Take the number of a rollback, whose row is written together with the intentions."""
        self._lock = self._stack.enter_context(ExitStack())
        self._lock.enter_context(self._registry.publisher.lock())
        with self._ledger.reading() as conn:
            found = versioning.standing(self._ledger, conn)
            self.view = self._up._look(conn, pinned=found.pinned)
        wanted = restoration.wanted
        return self.serve(Mark(found.last_number + 1, wanted.digest, wanted.nonfinite), wanted.number)

    def _check_head(self, found: int | None) -> None:
        # Takeovers drain what is in flight first, so the head that the updater knows is the one that the weights were
        # trained from, plus this updater's own publishes.
        expected = None if self._up.head is None else self._up.head.number
        if found != expected:
            raise HeadMovedError(
                f"the head of policy {self._ledger.policy!r} moved from "
                f"{'nothing' if expected is None else f'v{expected}'} to v{found} while weights were on their way; "
                "they were not published. The next update looks at the new head first"
            )

    def _worth_a_thread(self, draft: Draft) -> bool:
        return draft.weights.payload.buffer.nbytes >= INLINE_BYTES and not self._up.maps_weights

    def _serve_head(self) -> ServerWeights:
        self.kept = self._up.head
        assert self.kept is not None
        return self.serve(self.kept)

    def serve(self, version: Mark, source: int | None = None) -> ServerWeights:
        """Return a version's bytes as they were handed out before, or read them from the file.

        Args:
            source: the number of a stored version of that content; its own by default.
        """
        found = self._up.shelf.find(version.digest)
        if found is not None:
            return replace(found, version=version.number)
        payload, structure = self._up.reader.read(
            version.number if source is None else source, version.digest
        )
        return self._serve(version, payload, structure, None)

    def _serve(
        self, version: Mark, payload: Payload, structure: dict[str, Any], spread: _Aside | None
    ) -> ServerWeights:
        server = self._outfit(version.number, version.digest, version.nonfinite, payload, structure, spread)
        self._up.shelf.put(server)
        return server

    def _outfit(
        self,
        number: int,
        digest: str,
        nonfinite: tuple[str, ...],
        payload: Payload,
        structure: dict[str, Any],
        spread: _Aside | None,
    ) -> ServerWeights:
        sent, hashes = digest, None
        if self._up.maps_weights:
            weights = codec.rebuild(structure, payload.tensors(), payload.values)
            # Packed whatever it returns: it may have written into what it was given.
            content = codec.flatten(self._up._maybe_map_weights(weights), where="mapped weights")
            payload = Packer().pack(content, policy=self._ledger.policy, step=None)
            payload.hash()
            structure, sent, hashes = content.structure, payload.digest, payload.hashes
        handle = self._up._distribute(payload) if spread is None else spread.result()
        nbytes = payload.buffer.nbytes
        return ServerWeights(number, digest, sent, nonfinite, nbytes, handle, structure, hashes=hashes)

    # ------------------------------------------------------------------ the publication's way

    def must_open(self) -> bool:
        """Tell whether the version's row is still to be written."""
        restoration = self._request.restoration
        if restoration is not None:
            return restoration.version is None
        return self.publication is not None and not self.publication.number

    def open(self, conn: Connection) -> None:
        """Write the version's row, in the caller's transaction."""
        if not self.must_open():
            return
        restoration = self._request.restoration
        if restoration is not None:
            head = self._up.head
            restoration.version = steering.roll_back_to(
                self._ledger,
                conn,
                restoration.wanted,
                reason=restoration.reason,
                expected_head=None if head is None else head.number,
            )
        elif self.publication is not None:
            self.publication.open(conn)

    def finish(self) -> None:
        """Do what need not be done before the pushes leave, while workers pull: store the file, restore the server."""
        restoration = self._request.restoration
        try:
            if restoration is not None:
                self._restore(restoration)
            elif self.publication is not None:
                self.publication.store()
        except Exception as error:  # noqa: BLE001 - raised once the receipts were taken
            if restoration is not None and restoration.version is not None:
                error.add_note(
                    f"v{restoration.version.number}, which restores v{restoration.wanted.number}, is the head all the "
                    "same; the server weights are not restored, which the next update tries again"
                )
            self.failure = error
        if self._draft is not None:
            # The bytes are in the file and with the transport: the next copy may have the buffer.
            self._draft.release()

    def _restore(self, restoration: Restoration) -> None:
        # The row is committed.
        self._lock.close()
        assert restoration.version is not None
        try:
            self._up._restore(restoration.version, restoration.payload)
        finally:
            self._up.reader.let_go()

    def is_storing(self, number: int) -> bool:
        """Tell whether a version has no file yet, since this update is about to store it."""
        return self.publication is not None and self.publication.number == number

    def close(self, conn: Connection) -> None:
        """Make the version the head, in the caller's transaction."""
        if self.publication is not None and self.failure is None:
            self.publication.close(conn)

    def closed(self) -> None:
        """The version is the head now, or was lost; either way others may write again."""
        assert self.publication is not None
        if self.failure is not None:
            self.publication.fail(self.failure)
        else:
            self._up._saw_own(self.publication, live=self._live)
        self._lock.close()

    def abandon(self, error: BaseException) -> None:
        """Take back what can be taken back."""
        if self.publication is not None:
            self.publication.fail(error)


class _Aside:
    """Hands bytes to the transport in a thread of its own."""

    def __init__(self, distribute: Callable[[Payload], Any], payload: Payload) -> None:
        self._result: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(
            target=self._run, args=(distribute, payload), name="weightledger-distribute", daemon=True
        )
        self._thread.start()

    def _run(self, distribute: Callable[[Payload], Any], payload: Payload) -> None:
        try:
            self._result = distribute(payload)
        except BaseException as error:  # noqa: BLE001 - raised in the thread that asks for the result
            self._error = error

    def wait(self) -> None:
        """Wait until the bytes are there, or cannot be."""
        self._thread.join()

    def result(self) -> Any:
        """Return what the transport made of them."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._result

"""Where the bytes come from that an update sends: handed to the transport before, just copied, or read from a file."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

from weightledger.registry.records import Version
from weightledger.registry.sync import INLINE_BYTES, Sync, VersionInfo
from weightledger.registry.weights import Opening, Packer, Payload, flatten, parse, rebuild
from weightledger.updater.messages import ServerWeights
from weightledger.updater.transports.protocol import Transport

Structure = dict[str, Any]
"""How named tensors are put together again in the kind that was published."""


class Source:
    """Hands versions to the transport, each content once, and keeps what workers still need.

    Args:
        mapping: what is sent, given the weights about to be sent; None where they are sent as they are.
    """

    def __init__(
        self, sync: Sync, transport: Transport, mapping: Callable[[], Callable[[Any], Any] | None]
    ) -> None:
        self._sync = sync
        self._transport = transport
        self._mapping = mapping
        self._kept: dict[str, ServerWeights] = {}
        """What the transport has, by content."""
        self._opening: Opening | None = None
        """How the bytes began that were parsed last."""

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, digest: str) -> ServerWeights | None:
        """Return what the transport has of some content."""
        return self._kept.get(digest)

    def serve(self, version: VersionInfo, source: int | None = None) -> ServerWeights:
        """Return a version's bytes as they were handed out before, or read them from the file.

        Args:
            source: the number of a stored version of that content; its own by default.
        """
        found = self._kept.get(version.digest)
        if found is not None:
            return replace(found, version=version.number)
        payload, structure = self._sync.read(version.number if source is None else source, version.digest)
        return self.hand_out(version, payload, structure, None)

    def hand_out(
        self, version: VersionInfo, payload: Payload, structure: Structure, beside: Beside | None
    ) -> ServerWeights:
        """Hand a version's bytes to the transport, mapped if they are to be.

        Args:
            beside: what hands them out already; None to do it now.
        """
        sent, hashes, mapping = version.digest, None, self._mapping()
        if mapping is not None:
            weights = rebuild(structure, payload.tensors(), payload.values)
            # Packed whatever it returns: it may have written into what it was given.
            content = flatten(mapping(weights), where="mapped weights")
            payload = Packer().pack(content, policy=self._sync.policy, step=None)
            payload.hash()
            structure, sent, hashes = content.structure, payload.digest, payload.hashes
        handle = self._transport.put(payload) if beside is None else beside.result()
        server = ServerWeights(
            version.number,
            version.digest,
            sent,
            version.nonfinite,
            payload.buffer.nbytes,
            handle,
            structure,
            hashes=hashes,
        )
        self._kept[version.digest] = server
        return server

    def hand_out_beside(self, payload: Payload) -> Beside | None:
        """Begin to hand bytes to the transport in a thread of its own, where that is worth one."""
        if payload.buffer.nbytes < INLINE_BYTES or self._mapping() is not None:
            return None
        return Beside(self._transport.put, payload)

    def payload_of(self, version: Version) -> Payload:
        """Return a version's bytes as they were published: from the transport, else read and verified."""
        found = self._kept.get(version.digest)
        if found is not None and found.sent_digest == version.digest:
            buffer = self._transport.fetch(found.handle)
            if buffer is not None:
                name = f"v{version.number} of policy {version.policy!r}"
                payload = parse(buffer, name, known=self._opening)
                self._opening = payload.opening
                return payload
            self.drop(version.digest)
        return self._sync.read(version.number, version.digest)[0]

    def drop(self, digest: str) -> list[ServerWeights]:
        """Forget bytes that turned out unusable, and return them."""
        return [self._kept.pop(digest)] if digest in self._kept else []

    def keep(self, digests: Collection[str]) -> list[ServerWeights]:
        """Forget all but these, and return the others; the transport frees what nobody refers to any more."""
        return [self._kept.pop(digest) for digest in self._kept.keys() - set(digests)]


class Beside:
    """Hands bytes to the transport in a thread of its own."""

    def __init__(self, put: Callable[[Payload], Any], payload: Payload) -> None:
        self._result: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(
            target=self._run, args=(put, payload), name="weightledger-put", daemon=True
        )
        self._thread.start()

    def _run(self, put: Callable[[Payload], Any], payload: Payload) -> None:
        try:
            self._result = put(payload)
        except BaseException as error:  # noqa: BLE001 - raised in the thread that asks for the result
            self._error = error

    def wait(self) -> None:
        """Wait until the bytes are there, or cannot be."""
        self._thread.join()

    def result(self) -> Any:
        """Return the transport's handle of them."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._result

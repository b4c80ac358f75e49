"""What the tests of the tensor side share: weights → file → weights, as the registry does it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from weightledger.registry.store.local import LocalSnapshots
from weightledger.registry.weights import codec
from weightledger.registry.weights.packing import Packer
from weightledger.registry.weights.payload import Payload, parse


def packed(weights: Any, *, extra: bool = False) -> Payload:
    """Pack weights, or other state, into a payload of their own."""
    content = codec.flatten_extra(weights) if extra else codec.flatten(weights)
    payload = Packer().pack(content, policy="test", step=7)
    payload.hash()
    return payload


def seal(payload: Payload, version: int = 1) -> None:
    """Make a payload's buffer what its file would be."""
    payload.buffer.data[: payload.layout.data_start] = payload.sealed(version=version)


def stored(weights: Any, folder: Path, *, extra: bool = False) -> Payload:
    """Pack, seal, write to a file, read it back, parse and prove it."""
    payload = packed(weights, extra=extra)
    seal(payload)
    store = LocalSnapshots(folder)
    with store.create("one") as writer:
        writer.write_at(payload.layout.data_start, payload.buffer[payload.layout.data_start :])
        writer.write_at(0, payload.buffer[: payload.layout.data_start])
        uri = writer.commit(f"{len(store.uris())}.safetensors")
    back = parse(store.read(uri), uri)
    back.check(payload.digest, uri)
    return back


def loaded(payload: Payload) -> Any:
    """Put a payload's own structure together, in memory of its own."""
    assert payload.structure is not None
    return codec.rebuild(payload.structure, payload.tensors(), payload.values)


def round_trip(weights: Any, folder: Path, *, extra: bool = False) -> Any:
    """Store weights in a file and load them from it."""
    return loaded(stored(weights, folder, extra=extra))


def digest(weights: Any) -> str:
    """Return the content digest of weights."""
    return packed(weights).digest

"""Weights → payload: every tensor copied once, straight into its place in one buffer that is used again and again.

Rules:

* A payload that a `Packer` gave out is valid until its next `pack`.
* Tensors whose memory is their content are moved as bytes; torch copies those with strides, lazy views or a device.
* The same `Content` object again means the same tensors over the same memory: its owner has looked.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from weightledger.registry.values import canonical
from weightledger.registry.weights import raw
from weightledger.registry.weights.arrays import Bytes, page_buffer
from weightledger.registry.weights.codec import Content
from weightledger.registry.weights.layout import (
    LENGTH_BYTES,
    Layout,
    Spec,
    arrange,
    header_block,
    header_parts,
    quoted,
    sealed_room,
    with_room,
)
from weightledger.registry.weights.leaves import CODES
from weightledger.registry.weights.moves import Moves, Piece
from weightledger.registry.weights.payload import Payload
from weightledger.registry.weights.views import region_views

_SAME_SIZE_INTS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Packer:
    """Copies weights into one reusable buffer."""

    def __init__(self) -> None:
        self._memory = page_buffer(0)
        self._payload: Payload | None = None
        self._schema: list[Any] | None = None
        self._content: weakref.ref[Content] | None = None
        self._way: _Way | None = None
        self._header: _Header | None = None

    def pack(self, content: Content, *, policy: str = "default", step: int | None = None) -> Payload:
        """Copy the tensors of a content as they are now.

        The header is not sealed: it names tensors and structure, without what changes from version to version (hashes,
        step, number). So the next one is the same, and whoever reads it need not read it again.

        Raises:
            InvalidWeightsError: The header would be larger than safetensors readers accept.
        """
        again = self._content is not None and self._content() is content
        schema = self._schema if again and self._schema is not None else _schema_of(content)
        header = self._header
        if header is None or not again or header.policy != policy:
            header = self._arrange(content, schema, policy)
        layout = header.layout
        buffer = self._room_for(layout)
        if not again or self._way is None or self._payload is None or self._payload.buffer is not buffer:
            self._way = _Way(content, buffer, layout)
        payload = Payload(buffer, layout, content.values)
        payload.structure, payload.policy, payload.step = content.structure, policy, step
        payload.quoted = (content.structure, header.structure)
        before = self._payload
        if before is not None and before.layout is layout and before.buffer is buffer:
            payload.rows = before.rows
        self._payload = None
        self._way.copy(content)
        buffer.data[: layout.data_start] = header.block
        # Only now: what failed on the way must not be taken for the schema of what the buffer holds.
        self._payload, self._schema, self._content = payload, schema, weakref.ref(content)
        self._header = header
        return payload

    def room(self, nbytes: int) -> Bytes:
        """Give the buffer to something else of so many bytes; what was packed is not there any more."""
        self._payload = self._way = None
        return self._memory_for(nbytes)

    def holds(self, content: Content) -> bool:
        """Tell whether a content is, bit for bit, what the buffer holds; stops at the first difference.

        Names, types, shapes, bytes and values count; which names are tied does not.
        """
        payload = self._payload
        if payload is None or content.values.keys() != payload.values.keys():
            return False
        by_name = payload.layout.by_name
        names: Collection[str] = by_name
        if self._content is None or self._content() is not content:
            names = [*content.tensors, *content.ties]
            if set(names) != by_name.keys():
                return False
        if any(canonical(value) != canonical(payload.values[name]) for name, value in content.values.items()):
            return False
        base = payload.buffer.ctypes.data + payload.layout.data_start
        data = payload.data()
        compared: set[tuple[str, int]] = set()
        with torch.no_grad():
            for name in names:
                spec = by_name[name]
                first = content.ties.get(name, name)
                tensor = content.tensors[first]
                if (first, spec.start) in compared and tensor.numel():
                    continue
                compared.add((first, spec.start))
                if CODES[tensor.dtype] != spec.code or tensor.shape != spec.shape:
                    return False
                if not _equal(tensor, base + spec.start, data, spec):
                    return False
        return True

    def _arrange(self, content: Content, schema: list[Any], policy: str) -> _Header:
        known = None if self._payload is None else self._payload.layout
        if known is None or schema != self._schema:
            layout = arrange(
                ((name, CODES[tensor.dtype], tensor.shape) for name, tensor in content.tensors.items()),
                content.ties,
                content.values,
            )
            known = None
        else:
            layout = known
        structure = quoted(content.structure)
        parts = header_parts(layout, values=content.values, structure=structure, policy=policy)
        needed = sealed_room(layout, parts)
        if known is None or needed > known.data_start - LENGTH_BYTES:
            known = with_room(layout, needed)
        return _Header(known, header_block(known, parts), structure, policy)

    def _room_for(self, layout: Layout) -> Bytes:
        if self._payload is not None and self._payload.layout is layout:
            return self._payload.buffer
        return self._memory_for(layout.nbytes)

    def _memory_for(self, nbytes: int) -> Bytes:
        if not nbytes <= self._memory.nbytes <= 2 * nbytes:
            self._payload = self._way = None
            # Given back before the next is taken, so that two never stand side by side.
            self._memory = page_buffer(0)
            self._memory = page_buffer(nbytes)
        return self._memory[:nbytes]


@dataclass(frozen=True)
class _Header:
    """What stands before the data, and what it was made for."""

    layout: Layout
    block: bytes
    structure: bytes
    """As `quoted` made it, for the sealed header."""
    policy: str


class _Way:
    """How the tensors of one content come into one buffer."""

    def __init__(self, content: Content, buffer: Bytes, layout: Layout) -> None:
        self._base = buffer.ctypes.data + layout.data_start
        pieces: list[Piece] = []
        self._names: list[str] = []
        """Of the tensors that torch copies; they themselves would be kept alive by this."""
        specs: list[Spec] = []
        for spec in layout.specs:
            tensor = content.tensors[spec.name]
            if raw.is_raw(tensor):
                pieces.append((spec.start, tensor.data_ptr(), spec.end - spec.start))
            else:
                self._names.append(spec.name)
                specs.append(spec)
        self._moves = Moves(pieces)
        self._rows = region_views(buffer[layout.data_start :], specs)

    def copy(self, content: Content) -> None:
        self._moves.gather(self._base)
        if self._names:
            sources = [content.tensors[name] for name in self._names]
            with torch.inference_mode(False), torch.no_grad():
                torch._foreach_copy_(self._rows, sources)  # pyright: ignore[reportPrivateImportUsage]


def _schema_of(content: Content) -> list[Any]:
    tensors = [(name, tensor.dtype, tensor.shape) for name, tensor in content.tensors.items()]
    return [tensors, content.ties, list(content.values)]


def _equal(tensor: Tensor, address: int, data: Bytes, spec: Spec) -> bool:
    if spec.start == spec.end:
        return True
    if raw.is_raw(tensor):
        return raw.equal(tensor.data_ptr(), address, spec.end - spec.start)
    (stored,) = region_views(data, [spec])
    integers = _SAME_SIZE_INTS[tensor.element_size()]
    # Compared as whole numbers: NaN equals itself then, and 0.0 does not equal -0.0.
    live = tensor.resolve_conj().resolve_neg().view(integers).cpu()
    return torch.equal(live, stored.view(integers))

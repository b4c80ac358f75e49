"""One snapshot as one contiguous buffer: the bytes that are hashed, written, sent and read.

Rules:

* A `Packer` owns one buffer and fills it again and again; a payload that it gave out is valid until the next `pack`.
* Packing copies each tensor once, straight into its place; nothing holds a second copy of the weights.
* A payload that came from a file was checked by `parse` (header) and is proven by `check` (data).
* Tensors given out are views of the buffer. It may be memory that nobody may write to: copy before writing.
"""

from __future__ import annotations

import ctypes
import os
import uuid
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Final

import torch
from torch import Tensor

from weightledger.registry.errors import CorruptionError, StorageError
from weightledger.registry.values import Json, canonical
from weightledger.registry.weights.arrays import Bytes, as_bytes, page_buffer
from weightledger.registry.weights.codec import Content
from weightledger.registry.weights.digest import content_digest, tensor_hashes, value_hash
from weightledger.registry.weights.layout import (
    LENGTH_BYTES,
    Layout,
    Spec,
    arrange,
    header_text,
    read_header,
    sealed_room,
    with_room,
    write_header,
)
from weightledger.registry.weights.leaves import CODES
from weightledger.registry.weights.views import has_nonfinite, region_views

_LIBC: Final = ctypes.CDLL(None)
_memcmp: Final = _LIBC.memcmp
_memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_memcmp.restype = ctypes.c_int

_SAME_SIZE_INTS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Payload:
    """A snapshot in memory."""

    def __init__(self, buffer: Bytes, layout: Layout, values: Mapping[str, Json]) -> None:
        self.buffer = buffer
        """The whole file."""
        self.layout = layout
        self.values = dict(values)
        """Name → non-tensor value, encoded."""
        self.hashes: dict[str, str] | None = None
        """Name → hash of every tensor (tied names included) and value; None until `hash`, or when the file had none."""
        self.structure: dict[str, Json] | None = None
        """How the first version with this content was built; None in a plain safetensors file."""
        self.policy: str | None = None
        self.version: int | None = None
        """The version that the file was written for; others may share it."""
        self.step: int | None = None
        self._digest: str | None = None
        self._tensors: dict[str, Tensor] | None = None

    def __repr__(self) -> str:
        about = (self._digest or "unhashed")[:19]
        return f"<Payload {len(self.layout.by_name)} tensors {self.buffer.nbytes} bytes {about}>"

    @property
    def digest(self) -> str:
        """Content digest: what `hash` found, or what the file's header says."""
        if self._digest is None:
            self.hash()
        assert self._digest is not None
        return self._digest

    def hash(self, threads: int = 1) -> str:
        """Compute the hashes from the bytes as they are now, and keep them.

        Returns:
            The content digest.
        """
        self.hashes = self._compute(threads)
        self._digest = content_digest(self.hashes)
        return self._digest

    def check(self, digest: str, what: str, *, threads: int = 1) -> None:
        """Prove that the bytes are the ones that were stored.

        Args:
            digest: The content digest that was recorded.
            what: What an error should call the payload.
            threads: How many threads may hash.

        Raises:
            CorruptionError: They are not; names the tensors and values whose bytes differ.
        """
        found = self._compute(threads)
        claimed = self.hashes
        if claimed is not None:
            wrong = sorted(name for name in found if found[name] != claimed.get(name))
            if wrong:
                raise CorruptionError(
                    f"{what} is damaged: other bytes than were stored in {_listed(wrong)}; "
                    "restore the file from a backup, or go back to another version"
                )
        total = content_digest(found)
        if total != digest:
            raise CorruptionError(
                f"{what} holds other content than was recorded: expected {digest}, found {total}"
            )
        self.hashes, self._digest = found, total

    def seal(
        self, *, version: int | None = None, structure: dict[str, Json] | None = None, threads: int = 1
    ) -> None:
        """Write the final header into the room that was kept for it: hashes, digest, structure, origin.

        Args:
            version: The number of the version that the file is written for.
            structure: What `rebuild` needs; that of the packed content when it is left out.
            threads: How many threads may hash, if nobody has hashed yet.
        """
        if self.hashes is None:
            self.hash(threads)
        if structure is not None:
            self.structure = structure
        self.version = version
        text = header_text(
            self.layout,
            values=self.values,
            structure=self.structure,
            policy=self.policy or "",
            step=self.step,
            version=version,
            digest=self.digest,
            hashes=self.hashes,
        )
        write_header(self.buffer.data, self.layout, text)

    def nonfinite(self) -> tuple[str, ...]:
        """Return the names, sorted, of all tensors that hold NaN or an infinity; tied names each."""
        data = self._data()
        suspects: list[Spec] = []
        for code, specs in _runs(self.layout.specs):
            # One pass over neighbours of a type; each by itself only when that pass met something.
            if has_nonfinite(data[specs[0].start : specs[-1].end], code):
                suspects += [spec for spec in specs if has_nonfinite(data[spec.start : spec.end], code)]
        found = {spec.name for spec in suspects}
        found |= {alias for alias, name in self.layout.ties.items() if name in found}
        return tuple(sorted(found))

    def tensors(self) -> dict[str, Tensor]:
        """Return every tensor, tied names included, as a view of the buffer. Copy before writing to one."""
        if self._tensors is None:
            views = dict(zip((spec.name for spec in self.layout.specs), self.views(), strict=True))
            views.update({alias: views[name] for alias, name in self.layout.ties.items()})
            self._tensors = views
        return dict(self._tensors)

    def views(self, *, flat: bool = False) -> list[Tensor]:
        """Return the tensors in the layout's order, as they are or as rows, as views of the buffer."""
        return region_views(self._data(), self.layout.specs, flat=flat)

    def array_for(self, name: str) -> Bytes:
        """Return the bytes of one tensor, as a view of the buffer."""
        spec = self.layout.by_name[name]
        return self._data()[spec.start : spec.end]

    def _data(self) -> Bytes:
        return self.buffer[self.layout.data_start : self.layout.nbytes]

    def _compute(self, threads: int) -> dict[str, str]:
        data = self.buffer.data[self.layout.data_start :]
        places = ((spec.code, spec.shape, data[spec.start : spec.end]) for spec in self.layout.specs)
        found = dict(
            zip(
                (spec.name for spec in self.layout.specs), tensor_hashes(places, threads=threads), strict=True
            )
        )
        found.update({alias: found[name] for alias, name in self.layout.ties.items()})
        found.update({name: value_hash(value) for name, value in self.values.items()})
        return found


class Packer:
    """Copies weights into one reusable buffer."""

    def __init__(self) -> None:
        self._memory = page_buffer(0)
        self._payload: Payload | None = None
        self._schema: list[Any] | None = None
        self._content: weakref.ref[Content] | None = None
        self._rows: list[Tensor] = []

    def pack(self, content: Content, *, policy: str = "default", step: int | None = None) -> Payload:
        """Copy the tensors of a content as they are now.

        The header is complete but not sealed: it names tensors and structure, without hashes and version.

        Raises:
            InvalidWeightsError: The header would be larger than safetensors readers accept.
        """
        # The same content again has the same names, types and shapes: its owner has looked.
        again = self._content is not None and self._content() is content
        schema = self._schema if again and self._schema is not None else _schema_of(content)
        layout, text = self._arrange(content, schema, policy, step)
        buffer = self._room_for(layout)
        payload = Payload(buffer, layout, content.values)
        payload.structure, payload.policy, payload.step = content.structure, policy, step
        if self._payload is None or self._payload.layout is not layout or self._payload.buffer is not buffer:
            self._rows = payload.views()
        self._payload = None
        sources = [content.tensors[spec.name] for spec in layout.specs]
        with torch.inference_mode(False), torch.no_grad():
            if sources:
                torch._foreach_copy_(self._rows, sources)  # pyright: ignore[reportPrivateImportUsage]
        write_header(buffer.data, layout, text)
        # Only now: what failed on the way must not be taken for the schema of what the buffer holds.
        self._payload, self._schema, self._content = payload, schema, weakref.ref(content)
        return payload

    def holds(self, content: Content) -> bool:
        """Tell whether a content is, bit for bit, what the buffer holds; stops at the first difference.

        Names, types, shapes, bytes and values count; which names are tied does not.
        """
        payload = self._payload
        if payload is None or content.values.keys() != payload.values.keys():
            return False
        by_name = payload.layout.by_name
        names = dict.fromkeys(content.tensors) | content.ties
        if names.keys() != by_name.keys():
            return False
        if any(canonical(value) != canonical(payload.values[name]) for name, value in content.values.items()):
            return False
        base = payload.buffer.ctypes.data + payload.layout.data_start
        data = payload._data()
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

    def _arrange(
        self, content: Content, schema: list[Any], policy: str, step: int | None
    ) -> tuple[Layout, bytes]:
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
        text = header_text(
            layout, values=content.values, structure=content.structure, policy=policy, step=step
        )
        needed = sealed_room(layout, text)
        if known is not None and needed <= known.data_start - LENGTH_BYTES:
            return known, text
        return with_room(layout, needed), text

    def _room_for(self, layout: Layout) -> Bytes:
        if self._payload is not None and self._payload.layout is layout:
            return self._payload.buffer
        if not layout.nbytes <= self._memory.nbytes <= 2 * layout.nbytes:
            self._payload, self._rows = None, []
            # Given back before the next is taken, so that two never stand side by side.
            self._memory = page_buffer(0)
            self._memory = page_buffer(layout.nbytes)
        return self._memory[: layout.nbytes]


def parse(buffer: Bytes | bytes | memoryview, what: str, *, known: Layout | None = None) -> Payload:
    """Read a whole file that is in memory. Its header is checked, its data is not: see `Payload.check`.

    Args:
        buffer: The file. A plain safetensors file is accepted too; its `hashes` and `structure` are None.
        what: What an error should call it.
        known: A layout that it may have again, which spares most of the work.

    Raises:
        CorruptionError: It is cut short, has a tail, or its header is damaged.
    """
    array = as_bytes(buffer)
    layout, header = read_header(array.data, what, known)
    payload = Payload(array, layout, header.values)
    payload.hashes, payload.structure, payload._digest = header.hashes, header.structure, header.digest
    payload.policy, payload.version, payload.step = header.policy, header.version, header.step
    return payload


def write_plain(payload: Payload, path: str | os.PathLike[str]) -> None:
    """Write a safetensors file with every name in it (tied ones each with its data), which any reader loads.

    The file appears whole or not at all.

    Raises:
        StorageError: It could not be written.
    """
    target = Path(path)
    by_name = payload.layout.by_name
    layout = arrange(((name, spec.code, spec.shape) for name, spec in by_name.items()), {}, ())
    text = b"{" + layout.entries + (b"," if layout.entries else b"") + b'"__metadata__":{"format":"pt"}}'
    layout = with_room(layout, len(text))
    header = bytearray(layout.data_start)
    write_header(memoryview(header), layout, text)
    with _whole_file(target, layout.nbytes) as file:
        file.write(header)
        for spec in layout.specs:
            file.write(payload.array_for(spec.name).data)


@contextmanager
def _whole_file(target: Path, nbytes: int) -> Iterator[BinaryIO]:
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex[:12]}.tmp")
    try:
        try:
            with temporary.open("xb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise StorageError(f"{target} could not be written ({nbytes} bytes): {error}") from error


def _schema_of(content: Content) -> list[Any]:
    tensors = [(name, tensor.dtype, tensor.shape) for name, tensor in content.tensors.items()]
    return [tensors, content.ties, list(content.values)]


def _runs(specs: tuple[Spec, ...]) -> Iterator[tuple[str, list[Spec]]]:
    run: list[Spec] = []
    for spec in specs:
        if run and run[0].code != spec.code:
            yield run[0].code, run
            run = []
        run.append(spec)
    if run:
        yield run[0].code, run


def _equal(tensor: Tensor, address: int, data: Bytes, spec: Spec) -> bool:
    nbytes = spec.end - spec.start
    if nbytes == 0:
        return True
    plain = not tensor.is_conj() and not tensor.is_neg()
    if tensor.device.type == "cpu" and plain and tensor.is_contiguous():
        return bool(_memcmp(tensor.data_ptr(), address, nbytes) == 0)
    (stored,) = region_views(data, [spec])
    integers = _SAME_SIZE_INTS[tensor.element_size()]
    # Compared as whole numbers: NaN equals itself then, and 0.0 does not equal -0.0.
    live = tensor.resolve_conj().resolve_neg().view(integers).cpu()
    return torch.equal(live, stored.view(integers))


def _listed(names: list[str], most: int = 20) -> str:
    shown = ", ".join(repr(name) for name in names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"

"""One snapshot as one contiguous buffer: the bytes that are hashed, written, sent and read.

Rules:

* Nothing holds a second copy of the weights: hashing, writing and reading all look at this buffer.
* A payload that came from a file was checked by `parse` (header) and is proven by `check` (data).
* A file is read and proven without torch, which takes longer to load than most files: only tensors need it.
* Tensors given out are views of the buffer. It may be memory that nobody may write to: copy before writing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from weightledger.registry import files
from weightledger.registry.errors import CorruptionError
from weightledger.registry.values import Json
from weightledger.registry.weights.arrays import Bytes, as_bytes
from weightledger.registry.weights.digest import (
    about,
    arriving_hashes,
    content_digest,
    row_hashes,
    threads_for,
    value_hash,
)
from weightledger.registry.weights.layout import (
    Layout,
    Opening,
    Spec,
    arrange,
    header_block,
    header_parts,
    quoted,
    read_header,
    with_room,
)

if TYPE_CHECKING:
    from torch import Tensor


class Rows(NamedTuple):
    """What the hashes of tensors are made of, in the layout's order."""

    data: Sequence[memoryview]
    abouts: Sequence[bytes]


class Payload:
    """A snapshot in memory."""

    def __init__(
        self, buffer: Bytes, layout: Layout, values: Mapping[str, Json], digest: str | None = None
    ) -> None:
        self.buffer = buffer
        """The whole file."""
        self.layout = layout
        self.values = dict(values)
        """Name → non-tensor value, encoded."""
        self.hashes: dict[str, str] | None = None
        """Name → hash of every tensor (tied names included) and value; None until `hash`, or when the file had none."""
        self.structure: dict[str, Json] | None = None
        """How the first version with this content was built; None in a plain safetensors file."""
        self.quoted: tuple[object, bytes] | None = None
        """A structure and what `layout.quoted` made of it, when that was done already."""
        self.policy: str | None = None
        self.version: int | None = None
        """The version that the file was written for; others may share it."""
        self.step: int | None = None
        self.opening: Opening | None = None
        """What `parse` read before the data."""
        self.rows: Rows | None = None
        """What is hashed; another payload with this layout in this buffer has the same."""
        self._digest = digest
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

    def hash(self) -> str:
        """Compute the hashes from the bytes as they are now, and keep them.

        Returns:
            The content digest.
        """
        self.hashes = self._compute()
        self._digest = content_digest(self.hashes, self.layout.pairs)
        return self._digest

    def check(self, digest: str, what: str, wait: Callable[[int], None] | None = None) -> None:
        """Prove that the bytes are the ones that were stored.

        Args:
            digest: The content digest that was recorded.
            what: What an error should call the payload.
            wait: Waits until the first so many bytes of the buffer are there; all are when it is left out.

        Raises:
            CorruptionError: They are not; names the tensors and values whose bytes differ.
        """
        found = self._compute(wait)
        claimed = self.hashes
        if claimed is not None:
            wrong = sorted(name for name in found if found[name] != claimed.get(name))
            if wrong:
                raise CorruptionError(
                    f"{what} is damaged: other bytes than were stored in {_listed(wrong)}; "
                    "restore the file from a backup, or go back to another version"
                )
        total = content_digest(found, self.layout.pairs)
        if total != digest:
            raise CorruptionError(
                f"{what} holds other content than was recorded: expected {digest}, found {total}"
            )
        self.hashes, self._digest = found, total

    def sealed(self, *, version: int | None = None, structure: dict[str, Json] | None = None) -> bytes:
        """Return what a file has before the data: the final header, with hashes, digest, structure and origin.

        The buffer keeps its own header, since others may be reading it.

        Args:
            version: The number of the version that the file is written for.
            structure: What `rebuild` needs; that of the packed content when it is left out.
        """
        if self.hashes is None:
            self.hash()
        chosen = self.structure if structure is None else structure
        known = self.quoted is not None and self.quoted[0] is chosen
        parts = header_parts(
            self.layout,
            values=self.values,
            structure=self.quoted[1] if self.quoted is not None and known else quoted(chosen),
            policy=self.policy or "",
            step=self.step,
            version=version,
            digest=self.digest,
            hashes=self.hashes,
        )
        return header_block(self.layout, parts)

    def nonfinite(self) -> tuple[str, ...]:
        """Return the names, sorted, of all tensors that hold NaN or an infinity; tied names each."""
        from weightledger.registry.weights.views import has_nonfinite

        data = self.data()
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
        from weightledger.registry.weights.views import region_views

        return region_views(self.data(), self.layout.specs, flat=flat)

    def array_for(self, name: str) -> Bytes:
        """Return the bytes of one tensor, as a view of the buffer."""
        spec = self.layout.by_name[name]
        return self.data()[spec.start : spec.end]

    def data(self) -> Bytes:
        """Return the bytes behind the header."""
        return self.buffer[self.layout.data_start : self.layout.nbytes]

    def _compute(self, wait: Callable[[int], None] | None = None) -> dict[str, str]:
        specs = self.layout.specs
        if self.rows is None:
            data = self.buffer.data[self.layout.data_start :]
            abouts = [about(spec.code, spec.shape) for spec in specs]
            self.rows = Rows([data[spec.start : spec.end] for spec in specs], abouts)
        if wait is None:
            hashes = row_hashes(*self.rows, threads=threads_for(self.layout.data_bytes))
        else:
            starts = [self.layout.data_start + spec.start for spec in specs]
            hashes = arriving_hashes(*self.rows, starts, wait)
        found = dict(zip((spec.name for spec in specs), hashes, strict=True))
        found.update({alias: found[name] for alias, name in self.layout.ties.items()})
        found.update({name: value_hash(value) for name, value in self.values.items()})
        return found


def parse(buffer: Bytes | bytes | memoryview, what: str, *, known: Opening | None = None) -> Payload:
    """Read a whole file that is in memory. Its header is checked, its data is not: see `Payload.check`.

    Args:
        buffer: The file. A plain safetensors file is accepted too; its `hashes` and `structure` are None.
        what: What an error should call it.
        known: The opening of another payload that it may begin like, which spares most of the work.

    Raises:
        CorruptionError: It is cut short, has a tail, or its header is damaged.
    """
    array = as_bytes(buffer)
    opening = read_header(array.data, what, known)
    header = opening.header
    payload = Payload(array, opening.layout, header.values, header.digest)
    payload.opening = opening
    payload.hashes, payload.structure = header.hashes, header.structure
    payload.policy, payload.version, payload.step = header.policy, header.version, header.step
    return payload


def write_plain(payload: Payload, path: str | os.PathLike[str]) -> None:
    """Write a safetensors file with every name in it (tied ones each with its data), which any reader loads.

    The file appears whole or not at all, and keeps the mode of a file that it replaces.

    Raises:
        StorageError: It could not be written, or what is there is no regular file.
    """
    target = Path(path)
    by_name = payload.layout.by_name
    layout = arrange(((name, spec.code, spec.shape) for name, spec in by_name.items()), {}, ())
    text = b"{" + layout.entries + (b"," if layout.entries else b"") + b'"__metadata__":{"format":"pt"}}'
    layout = with_room(layout, len(text))
    with files.replacing(target, layout.nbytes) as file:
        file.write(header_block(layout, [text]))
        for spec in layout.specs:
            file.write(payload.array_for(spec.name).data)


def _runs(specs: tuple[Spec, ...]) -> Iterator[tuple[str, list[Spec]]]:
    run: list[Spec] = []
    for spec in specs:
        if run and run[0].code != spec.code:
            yield run[0].code, run
            run = []
        run.append(spec)
    if run:
        yield run[0].code, run


def _listed(names: list[str], most: int = 20) -> str:
    shown = ", ".join(repr(name) for name in names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"

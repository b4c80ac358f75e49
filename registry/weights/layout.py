"""Where everything stands in a snapshot: the safetensors layout, written and read without torch.

    8 bytes      length of the header, little-endian
    header       JSON: the tensors, then `__metadata__` (text → text); padded with blanks
    data         the tensors, without gaps, in the order of the header

Rules:

* Data starts at a multiple of 4096 bytes, so that a disk can take it as it is. Tensors stand by element size,
  largest first, then by name: each is aligned.
* Tied names stand in the file once; `weightledger.ties` tells the others.
* The header's room is reserved before its text is known, so that data never moves when hashes and version are added.
* A sealed header ends with a hash of its own text. With the hashes of the tensors, every bit of the file is covered.
* Whatever is wrong with a file's header is one `CorruptionError` that names the file.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final, NoReturn

from blake3 import blake3

from weightledger.registry.errors import CorruptionError, InvalidWeightsError
from weightledger.registry.values import Json, dumps
from weightledger.registry.weights.dtypes import ITEM_BYTES
from weightledger.registry.weights.listing import Listing, pairs, quoted_object
from weightledger.registry.weights.shapes import Shapes, describe_dtypes, fingerprint, shapes_of

LENGTH_BYTES: Final = 8
MAX_HEADER_BYTES: Final = 100_000_000  # the safetensors readers' own limit

_WHOLE: Final = re.compile(r"-?[0-9]{1,40}")
_METADATA: Final = "__metadata__"
_METADATA_MARK: Final = b'"__metadata__":{'
_SUM_MARK: Final = b',"weightledger.sum":"'
_ROOM: Final = (
    4096  # bytes; a header grows in such steps: a longer step moves nothing, and disks take whole pages
)
_SEAL_ROOM: Final = (
    400  # bytes; the keys of step, version, digest, hashes and sum, and the values of all but the hashes
)


@dataclass(frozen=True)
class Spec:
    """One tensor's place."""

    name: str
    code: str
    """Element type, as safetensors writes it."""
    shape: tuple[int, ...]
    start: int
    """First byte, counted from the start of the data."""
    end: int
    """One past the last byte."""


@dataclass(frozen=True)
class Layout:
    """Where each tensor of a file stands."""

    specs: tuple[Spec, ...]
    """In the order of the data; tied names once."""
    ties: Mapping[str, str]
    """Each further name of a tensor → the name that stands in `specs`."""
    value_names: tuple[str, ...]
    """Names of the non-tensor values, sorted."""
    data_start: int
    """Offset of the data in the file, bytes."""
    nbytes: int
    """Size of the whole file."""
    entries: bytes
    """The header's text about the tensors, without the braces around it."""

    @property
    def data_bytes(self) -> int:
        """Bytes of tensor data."""
        return self.nbytes - self.data_start

    @cached_property
    def by_name(self) -> dict[str, Spec]:
        """Each name's place, tied names included."""
        found = {spec.name: spec for spec in self.specs}
        found.update({alias: found[name] for alias, name in self.ties.items()})
        return found

    @cached_property
    def fingerprint(self) -> str:
        """Hash over names, types, shapes, places, ties and value names: what fits one target fits it again."""
        more = dumps([sorted(self.ties.items()), sorted(self.value_names)])
        return blake3(self.entries + b"\n" + more.encode("ascii")).hexdigest()

    @cached_property
    def shapes(self) -> Shapes:
        """What another version must share to take this one's place."""
        return shapes_of(((spec.name, spec.shape) for spec in self.specs), self.ties, self.value_names)

    @cached_property
    def shapes_fingerprint(self) -> str:
        """Hash over these."""
        return fingerprint(self.shapes)

    @cached_property
    def dtypes(self) -> str:
        """How many tensors have which dtype, in words."""
        return describe_dtypes(spec.code for spec in self.specs)

    @cached_property
    def pairs(self) -> Listing:
        """What a content digest covers, for all names."""
        return pairs([*self.by_name, *self.value_names])

    @cached_property
    def quoted_hashes(self) -> Listing:
        """What the header says of the hashes of all names."""
        return quoted_object([*self.by_name, *self.value_names])

    @cached_property
    def hashes_room(self) -> int:
        """Bytes that the header needs for the hashes of all names."""
        return len(self.quoted_hashes.text(defaultdict(lambda: "0" * 64)))


@dataclass(frozen=True)
class Header:
    """What a file's header says beside the places of its tensors."""

    values: dict[str, Json]
    hashes: dict[str, str] | None
    """Name → hash of every tensor and value; None in a file that was not sealed by us."""
    digest: str | None
    structure: dict[str, Json] | None
    policy: str | None
    version: int | None
    step: int | None
    metadata: dict[str, str]
    """All of it, as the file has it."""


def arrange(
    tensors: Iterable[tuple[str, str, Sequence[int]]], ties: Mapping[str, str], value_names: Iterable[str]
) -> Layout:
    """Give each tensor (name, code, shape) its place; `with_room` adds the header's size."""
    ordered = sorted(tensors, key=lambda item: (-ITEM_BYTES[item[1]], item[0]))
    specs: list[Spec] = []
    at = 0
    for name, code, shape in ordered:
        end = at + ITEM_BYTES[code] * math.prod(shape)
        specs.append(Spec(name, code, tuple(shape), at, end))
        at = end
    return Layout(tuple(specs), dict(ties), tuple(sorted(value_names)), 0, at, entries_text(specs))


def entries_text(specs: Iterable[Spec]) -> bytes:
    """Return the header's text about the tensors."""
    entries = {
        spec.name: {"dtype": spec.code, "shape": spec.shape, "data_offsets": (spec.start, spec.end)}
        for spec in specs
    }
    return json.dumps(entries, separators=(",", ":"))[1:-1].encode("ascii")


def with_room(layout: Layout, needed: int) -> Layout:
    """Return the layout with room for a header of so many bytes, and for one that is a little longer.

    Raises:
        InvalidWeightsError: No reader would open a file with such a header.
    """
    if needed > MAX_HEADER_BYTES - _ROOM:
        raise InvalidWeightsError(
            f"the names, shapes and non-tensor values need a header of {needed} bytes; safetensors files hold at most "
            f"{MAX_HEADER_BYTES}: keep large values outside of the weights"
        )
    room = -(-(needed + LENGTH_BYTES) // _ROOM) * _ROOM
    return replace(layout, data_start=room, nbytes=room + layout.data_bytes)


def header_parts(
    layout: Layout,
    *,
    values: Mapping[str, Json],
    structure: bytes,
    policy: str,
    step: int | None = None,
    version: int | None = None,
    digest: str | None = None,
    hashes: Mapping[str, str] | None = None,
) -> list[bytes]:
    """Return the JSON of a header in parts, sealed when digest and hashes are given.

    Of many tensors it is more than a megabyte, so that it is put together once, by `header_block`.

    Args:
        structure: What `quoted` made of it.
        hashes: The hash of every name, in hexadecimal digits.
    """
    metadata = {"format": "pt", "weightledger": "1", "weightledger.policy": policy}
    for key, number in (("step", step), ("version", version)):
        if number is not None:
            metadata[f"weightledger.{key}"] = str(number)
    if layout.ties:
        metadata["weightledger.ties"] = _compact(layout.ties)
    if values:
        metadata["weightledger.values"] = _compact(values)
    comma = b"," if layout.entries else b""
    parts = [b"{", layout.entries, comma, b'"__metadata__":', _compact(metadata)[:-1].encode("ascii")]
    parts += [b',"weightledger.structure":', structure]
    if hashes is None or digest is None:
        return [*parts, b"}}"]
    parts.append(f',"weightledger.digest":{_compact(digest)},"weightledger.hashes":'.encode("ascii"))
    parts.append(layout.quoted_hashes.text(hashes).encode("ascii"))
    total = blake3()
    for part in parts:
        total.update(part)
    return [*parts, _SUM_MARK, total.hexdigest().encode("ascii"), b'"}}']


def quoted(structure: Json) -> bytes:
    """Return a structure as the header has it, a JSON text within a JSON text."""
    return _compact(_compact(structure)).encode("ascii")


def sealed_room(layout: Layout, unsealed: Sequence[bytes]) -> int:
    """Return the bytes that a header will need at most once it is sealed, whatever its hashes, step and version."""
    return sum(map(len, unsealed)) + layout.hashes_room + _SEAL_ROOM


def header_block(layout: Layout, parts: Sequence[bytes]) -> bytes:
    """Return everything that stands before the data: the length, and the header in the room that it was given.

    Raises:
        InvalidWeightsError: It is longer than the room that was reserved.
    """
    room, needed = layout.data_start - LENGTH_BYTES, sum(map(len, parts))
    if needed > room:
        raise InvalidWeightsError(
            f"the header needs {needed} bytes, {room} were reserved: pack the weights again"
        )
    return b"".join([room.to_bytes(LENGTH_BYTES, "little"), *parts, b" " * (room - needed)])


def header_bytes(prefix: bytes, size: int, what: str) -> int:
    """Read a header's length from a file's first bytes, and check it against the file's size.

    Raises:
        CorruptionError: The file is too short, or the length is not one that a header has.
    """
    if len(prefix) < LENGTH_BYTES:
        raise CorruptionError(f"{what} is cut short: expected a header, found {size} bytes in all")
    length = int.from_bytes(prefix[:LENGTH_BYTES], "little")
    if length > min(MAX_HEADER_BYTES, size - LENGTH_BYTES):
        raise CorruptionError(
            f"{what} is cut short or damaged: its header claims {length} bytes, the whole file has {size}"
        )
    return length


@dataclass(frozen=True)
class Opening:
    """What stands before the data of a file, read and checked."""

    text: bytes
    layout: Layout
    header: Header


def read_header(buffer: memoryview, what: str, known: Opening | None = None) -> Opening:
    """Read and check the header of a whole file.

    Args:
        buffer: The file, as bytes.
        what: What an error should call it.
        known: How another file begins; spares most of the work when this one begins like it, all of it when they are
            the same.

    Raises:
        CorruptionError: The header does not describe this file.
    """
    size = buffer.nbytes
    length = header_bytes(bytes(buffer[:LENGTH_BYTES]), size, what)
    data_start = LENGTH_BYTES + length
    text = bytes(buffer[LENGTH_BYTES:data_start])
    if known is not None and known.text == text and known.layout.nbytes == size:
        return known
    _check_sum(text, what)
    if known is not None and _starts_like(text, known.layout):
        before = known.layout
        at = 1 + len(before.entries) + (1 if before.entries else 0)
        parsed = _parse(b"{" + text[at:], what)
        specs, entries, data_bytes = before.specs, before.entries, before.data_bytes
        metadata = _metadata(parsed.pop(_METADATA, {}), what)
        if parsed:
            _fail(what, "names a tensor after its metadata")
    else:
        parsed = _parse(text, what)
        metadata = _metadata(parsed.pop(_METADATA, {}), what)
        specs = _specs(parsed, what)
        entries = entries_text(specs)
        data_bytes = specs[-1].end if specs else 0
    if data_start + data_bytes != size:
        raise CorruptionError(
            f"{what} does not have the size that its header tells: "
            f"expected {data_start + data_bytes} bytes, found {size}"
        )
    header, ties = _header(metadata, specs, what)
    layout = Layout(specs, ties, tuple(sorted(header.values)), data_start, size, entries)
    return Opening(text, layout, header)


# ---------------------------------------------------------------------- reading, step by step


def _starts_like(text: bytes, known: Layout) -> bool:
    comma = b"," if known.entries else b""
    return text.startswith(b"{" + known.entries + comma + _METADATA_MARK)


def _check_sum(text: bytes, what: str) -> None:
    # Quotes inside of JSON texts are escaped, so that the mark can stand for the key only.
    at = text.find(_SUM_MARK)
    if at < 0:
        return
    found = text[at + len(_SUM_MARK) :].partition(b'"')[0]
    if blake3(text[:at]).hexdigest().encode("ascii") != found:
        raise CorruptionError(
            f"the header of {what} is damaged: it does not have the hash that it was sealed with"
        )


def _parse(text: bytes, what: str) -> dict[str, Any]:
    try:
        parsed = json.loads(text.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise CorruptionError(f"the header of {what} is damaged: {error}") from error
    if not isinstance(parsed, dict):
        _fail(what, "is no JSON object")
    return parsed


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the name {twice!r} stands in it twice")
    return found


def _specs(entries: dict[str, Any], what: str) -> tuple[Spec, ...]:
    specs = []
    for name, entry in entries.items():
        if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
            _fail(what, f"does not describe the tensor {name!r} by dtype, shape and data_offsets")
        code, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not isinstance(code, str) or code not in ITEM_BYTES:
            _fail(what, f"gives {name!r} the dtype {code!r}, which torch cannot hold")
        if not _whole_numbers(shape) or not _whole_numbers(offsets) or len(offsets) != 2:
            _fail(what, f"gives {name!r} the shape {shape!r:.80} and offsets {offsets!r:.80}")
        if offsets[1] - offsets[0] != ITEM_BYTES[code] * math.prod(shape):
            _fail(
                what,
                f"gives {name!r} ({code}, shape {shape}) the {offsets[1] - offsets[0]} bytes at {offsets}",
            )
        specs.append(Spec(name, code, tuple(shape), offsets[0], offsets[1]))
    specs.sort(key=lambda spec: (spec.start, spec.end))
    at = 0
    for spec in specs:
        if spec.start != at:
            how = "overlaps the one before" if spec.start < at else f"leaves a gap of {spec.start - at} bytes"
            _fail(what, f"has a tensor {spec.name!r} that {how}")
        at = spec.end
    return tuple(specs)


def _whole_numbers(found: Any) -> bool:
    return isinstance(found, list) and all(type(number) is int and number >= 0 for number in found)


def _metadata(found: Any, what: str) -> dict[str, str]:
    if not isinstance(found, dict) or not all(isinstance(text, str) for text in found.values()):
        _fail(what, "has metadata that is not text")
    return found


def _header(metadata: dict[str, str], specs: Sequence[Spec], what: str) -> tuple[Header, dict[str, str]]:
    if "weightledger" not in metadata:
        return Header({}, None, None, None, None, None, None, metadata), {}
    if metadata["weightledger"] != "1":
        raise CorruptionError(
            f"{what} has format {metadata['weightledger']!r}, expected '1': upgrade weightledger to read it"
        )
    ties = _json(metadata, "ties", what) or {}
    values = _json(metadata, "values", what) or {}
    hashes = _json(metadata, "hashes", what)
    own = {spec.name for spec in specs}
    if not all(isinstance(name, str) and name in own for name in ties.values()) or own & ties.keys():
        _fail(what, "ties names to tensors that are not there")
    names = own | ties.keys() | values.keys()
    if len(names) != len(own) + len(ties) + len(values):
        _fail(what, "gives one name to a tensor and to a value")
    if hashes is not None and (
        hashes.keys() != names or not all(isinstance(one, str) for one in hashes.values())
    ):
        _fail(what, "does not have one hash for each name")
    if hashes is not None and "weightledger.sum" not in metadata:
        _fail(what, "is sealed, but lacks the hash of its own text")
    version, step = (_number(metadata, key, what) for key in ("version", "step"))
    header = Header(
        values,
        hashes,
        metadata.get("weightledger.digest"),
        _json(metadata, "structure", what),
        metadata.get("weightledger.policy"),
        version,
        step,
        metadata,
    )
    return header, ties


def hashes_in(header: bytes, what: str) -> dict[str, str]:
    """Read the hashes of all tensors and values out of a file's header, by name.

    Raises:
        CorruptionError: The header is damaged, or has none.
    """
    _check_sum(header, what)
    metadata = _metadata(_parse(header, what).pop(_METADATA, {}), what)
    hashes = _json(metadata, "hashes", what)
    if hashes is None or not all(isinstance(one, str) for one in hashes.values()):
        _fail(what, "does not have one hash for each name")
    return hashes


def _json(metadata: dict[str, str], key: str, what: str) -> dict[str, Any] | None:
    text = metadata.get(f"weightledger.{key}")
    return None if text is None else _parse(text.encode("utf-8", "replace"), f"{what} ({key})")


def _number(metadata: dict[str, str], key: str, what: str) -> int | None:
    text = metadata.get(f"weightledger.{key}")
    if text is None:
        return None
    if not _WHOLE.fullmatch(text):
        _fail(what, f"has the {key} {text!r:.80}, expected a whole number")
    return int(text)


def _compact(found: Json) -> str:
    return json.dumps(found, ensure_ascii=True, allow_nan=False, separators=(",", ":"))


def _fail(what: str, finding: str) -> NoReturn:
    raise CorruptionError(f"the header of {what} is damaged: it {finding}")

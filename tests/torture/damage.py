"""Damage to a registry's files and rows, and what every call says afterwards: the right weights, or an error by name.

A child makes a copy of a whole registry, does one harm to it, and asks everything.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sqlite3
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from tests.torture.cases import Policy, extra_of, value_of
from weightledger.registry import NotFoundError, Registry, WeightLedgerError
from weightledger.updater.testing import FakeWorkers

DATABASE = "registry.db"


@dataclass(frozen=True)
class Harm:
    """One harm to one file of a registry, or to one row of its database."""

    kind: str
    path: str
    details: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Sound:
    """What an unharmed registry holds."""

    contents: dict[int, str]
    """By number, a hash of the weights that were published."""
    hashes: dict[int, dict[str, str]]
    """By number, what `tensor_hashes` says."""
    files: dict[str, int]
    """The size of every file."""


# ---------------------------------------------------------------------- a registry with everything in it


def make(folder: Path) -> Sound:
    """Make a registry that has a row in every table. Called in a child of the zygote."""
    published: list[Any] = []

    def publish(weights: Any, **more: Any) -> None:
        registry.publish(weights, metadata={"note": "é", "n": [1, None]}, message="m", **more)
        published.append(weights)

    with Registry.open(folder) as registry:
        publish(Policy(1), step=1, metrics={"reward": 1.0}, extra=extra_of(1, 4))
        publish(Policy(2), step=2, metrics={"reward": 2.0})
        publish(_nested(3.0), restructure=True)
        publish(_tensordict(4.0), restructure=True)
        publish(Policy(5), restructure=True)
        published.append(Policy(2))
        registry.rollback(2, reason="back")
        registry.set_alias("good", 2)
        registry.pin("w1", 1, reason="hold")
        registry.pin("w*", "good")
        registry.record_metrics(5, reward=float("nan"), score=1.5)
        with FakeWorkers(None, [Policy(-1), Policy(-2)], registry=registry, names=["w0", "w1"]) as updater:
            assert updater.sync().ok
        hashes = {number: dict(registry.tensor_hashes(number)) for number in range(1, len(published) + 1)}
        contents = {number: _content(weights) for number, weights in enumerate(published, start=1)}
        assert contents == {number: _content(registry.load(number)) for number in contents}
        assert registry.verify() == []
    files = {
        str(path.relative_to(folder)): path.stat().st_size
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    return Sound(contents, hashes, files)


def _nested(value: float) -> dict[str, Any]:
    return {
        "net": {"w": torch.full((3, 2), value), "b": torch.full((2,), -value)},
        "scale": torch.tensor(value),
    }


def _tensordict(value: float) -> TensorDict:
    return TensorDict({"w": torch.full((2, 3), value), "deep": {"b": torch.full((2,), value)}}, [2])


def _content(weights: Any) -> str:
    """Return a hash of the names and bytes of weights, made without the library."""
    total = hashlib.sha256()
    for name, tensor in sorted(_leaves("", weights)):
        data = tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} {len(data)}\n".encode() + data)
    return total.hexdigest()


def _leaves(prefix: str, weights: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(weights, torch.nn.Module):
        weights = dict(weights.named_parameters())
    if isinstance(weights, Mapping | TensorDictBase):
        for name, value in weights.items():
            yield from _leaves(f"{prefix}/{name}", value)
    else:
        yield prefix, weights


# ---------------------------------------------------------------------- harms


def harm(folder: Path, what: Harm) -> bool:
    """Do it; tells whether it could be done."""
    path = folder / what.path
    return _HARMS[what.kind](path, *what.details) is not False


def _flip(path: Path, offset: int, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1 << bit
    path.write_bytes(data)


def _header(path: Path, header: bytes, length: int | None = None) -> None:
    """Put another header before the data of a snapshot."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    path.write_bytes(
        (len(header) if length is None else length).to_bytes(8, "little") + header + data[start:]
    )


def _edit_header(path: Path, edit: str) -> None:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    names = [name for name in header if name != "__metadata__"]
    first = header[names[0]]
    edits: dict[str, Callable[[], object]] = {
        "no metadata": lambda: header.pop("__metadata__"),
        "no tensor": lambda: [header.pop(name) for name in names],
        "one tensor less": lambda: header.pop(names[-1]),
        "other name": lambda: header.update(other=header.pop(names[0])),
        "other shape": lambda: first.update(shape=[1, *first["shape"]]),
        "negative shape": lambda: first.update(shape=[-1]),
        "shape of text": lambda: first.update(shape="4"),
        "huge shape": lambda: first.update(shape=[2**62, 2**62]),
        "other dtype": lambda: first.update(dtype="I32"),
        "no dtype": lambda: first.pop("dtype"),
        "unknown dtype": lambda: first.update(dtype="F13"),
        "dtype of a number": lambda: first.update(dtype=5),
        "offsets swapped": lambda: first.update(data_offsets=first["data_offsets"][::-1]),
        "offsets beyond": lambda: first.update(data_offsets=[0, 2**40]),
        "offsets of text": lambda: first.update(data_offsets=["0", "16"]),
        "no offsets": lambda: first.pop("data_offsets"),
        "tensor of a list": lambda: header.update({names[0]: [1, 2]}),
        "metadata of a list": lambda: header.update(__metadata__=[1]),
        "metadata of numbers": lambda: header.update(__metadata__=dict.fromkeys(header["__metadata__"], 1)),
        "metadata emptied": lambda: header.update(__metadata__=dict.fromkeys(header["__metadata__"], "")),
        "metadata of braces": lambda: header.update(__metadata__=dict.fromkeys(header["__metadata__"], "{}")),
        "metadata of depth": lambda: header.update(
            __metadata__=dict.fromkeys(header["__metadata__"], "[" * 100_000)
        ),
        "a surrogate": lambda: header.update({"\ud800": header.pop(names[0])}),
    }
    edits[edit]()
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


HEADER_EDITS = (
    "no metadata", "no tensor", "one tensor less", "other name", "other shape", "negative shape", "shape of text",
    "huge shape", "other dtype", "no dtype", "unknown dtype", "dtype of a number", "offsets swapped", "offsets beyond",
    "offsets of text", "no offsets", "tensor of a list", "metadata of a list", "metadata of numbers",
    "metadata emptied", "metadata of braces", "metadata of depth", "a surrogate",
)  # fmt: skip
HEADERS = (
    b"",
    b"{",
    b"{}",
    b"[]",
    b"null",
    b"\xff\xfe{}",
    b"[" * 200_000,
    b'{"a":' * 50_000,
    b'{"w":{"w":1}}',
)


def _replace(path: Path, by: str) -> None:
    outside = path.parent.parent / "outside"
    if by == "a link elsewhere":
        path.rename(outside)
        path.symlink_to(outside)
        return
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    if by == "a folder":
        path.mkdir()
    elif by == "a loop of links":
        path.symlink_to(path.name)
    elif by == "a pipe":
        os.mkfifo(path)
    elif by == "a file":
        path.write_bytes(b"not what it was")
    else:
        assert by == "nothing"


REPLACEMENTS = ("nothing", "a file", "a folder", "a loop of links", "a pipe", "a link elsewhere")


def _other_file(path: Path, other: str) -> None:
    shutil.copyfile(path.parent.parent / other, path)


def _truncate(path: Path, size: int) -> None:
    os.truncate(path, size)


def _extend(path: Path, count: int) -> None:
    with path.open("ab") as file:
        file.write(bytes(count))


def _set_row(path: Path, table: str, row: int, column: str, value: Any) -> bool:
    """Write a value into the n-th row of a table, as a damaged page would: no rule of the schema is asked."""
    with closing(sqlite3.connect(path, isolation_level=None)) as plain:
        plain.execute("PRAGMA foreign_keys=OFF")
        plain.execute("PRAGMA ignore_check_constraints=ON")
        (rowid,) = plain.execute(
            f'SELECT rowid FROM "{table}" ORDER BY rowid LIMIT 1 OFFSET ?', [row]
        ).fetchone()
        if value == ["neighbour"]:
            source = f'(SELECT "{column}" FROM "{table}" WHERE rowid != {rowid} ORDER BY rowid LIMIT 1)'
            value = None
        elif isinstance(value, list):
            source, value = "CAST(? AS TEXT)", bytes.fromhex(value[0])
        else:
            source = "?"
        given = [] if "?" not in source else [value]
        try:
            plain.execute(f'UPDATE "{table}" SET "{column}" = {source} WHERE rowid = {rowid}', given)
        except (sqlite3.IntegrityError, OverflowError):
            return False
    return True


def _edit_text(path: Path, table: str, row: int, column: str, index: int, by: str) -> bool:
    """Replace one character of a text."""
    with closing(sqlite3.connect(path, isolation_level=None)) as plain:
        question = f'SELECT rowid, "{column}" FROM "{table}" ORDER BY rowid LIMIT 1 OFFSET ?'
        rowid, text = plain.execute(question, [row]).fetchone()
        if not isinstance(text, str) or not text:
            return False
        index %= len(text)
        changed = text[:index] + by + text[index + 1 :]
        if changed == text:
            return False
        try:
            plain.execute(f'UPDATE "{table}" SET "{column}" = ? WHERE rowid = ?', [changed, rowid])
        except sqlite3.IntegrityError:
            return False
    return True


_HARMS: dict[str, Callable[..., bool | None]] = {
    "flip": _flip,
    "truncate": _truncate,
    "extend": _extend,
    "replace": _replace,
    "other file": _other_file,
    "header": _header,
    "edit header": _edit_header,
    "row": _set_row,
    "text": _edit_text,
}

ROW_VALUES: tuple[Any, ...] = (
    None, "", "garbage", "{", "[]", "{}", "null", '"x"', "NaN", "9" * 30, "2026-13-45 99:99:99", "[" * 5000,
    -1, 0, 1, 2**62, 1.5, 1e308, float("inf"), b"\xff\xfe\x00", ["fffe00"], ["neighbour"],
)  # fmt: skip
"""What a row gets; a list of hexadecimal digits is text that is no UTF-8."""


def columns(path: Path) -> list[tuple[str, str, int]]:
    """Return every (table, column, number of rows) of a database."""
    with closing(sqlite3.connect(path)) as plain:
        tables = [name for (name,) in plain.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        return [
            (table, column[1], plain.execute(f'SELECT count(*) FROM "{table}"').fetchone()[0])
            for table in sorted(tables)
            if not table.startswith("sqlite_")
            for column in plain.execute(f'PRAGMA table_info("{table}")')
        ]


# ---------------------------------------------------------------------- asking everything


def look(start: Path, sound: Sound, what: Harm) -> list[str] | None:
    """Do a harm to a copy, then ask everything; None when the harm could not be done. Called in a child."""
    with tempfile.TemporaryDirectory(dir=start.parent) as scratch:
        folder = Path(scratch) / "r"
        shutil.copytree(start, folder, symlinks=True)
        if not harm(folder, what):
            return None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return list(_ask(folder, sound, what))


def _ask(folder: Path, sound: Sound, what: Harm) -> Iterator[str]:
    """Ask all questions of one open registry: who only reads first, then who writes."""
    opened: list[Registry] = []
    yield from _answer("open", lambda _: opened.append(Registry.open(folder)), None)
    for registry in opened:
        with registry:
            for name, question in _questions(folder, sound, what).items():
                yield from _answer(name, question, registry)


def _answer(name: str, question: Callable[[Any], str | None], registry: Registry | None) -> Iterator[str]:
    try:
        wrong = question(registry)
    except WeightLedgerError as error:
        if len(str(error)) < 10:
            yield f"{name}: an error that says nothing: {error!r}"
    except Exception:  # noqa: BLE001 - that nothing else comes is what is tested
        yield f"{name}:\n{traceback.format_exc()[-1500:]}"
    else:
        if wrong:
            yield f"{name}: {wrong}"


def _questions(folder: Path, sound: Sound, what: Harm) -> dict[str, Callable[[Registry], str | None]]:
    questions: dict[str, Callable[[Registry], str | None]] = {}
    for number, content in sound.contents.items():

        def load(registry: Registry, number: int = number, content: str = content) -> str | None:
            return None if _content(registry.load(number)) == content else "other weights"

        def hashes(registry: Registry, number: int = number) -> str | None:
            return None if registry.tensor_hashes(number) == sound.hashes[number] else "other hashes"

        questions[f"load v{number}"] = load
        questions[f"tensor_hashes v{number}"] = hashes

    def load_extra(registry: Registry) -> str | None:
        extra, right = registry.load_extra(1), extra_of(1, 4)
        same = torch.equal(extra["momentum"], right["momentum"]) and extra["epoch"] == right["epoch"]
        return None if same and extra.keys() == right.keys() else f"other extra state: {extra}"

    def restore(registry: Registry) -> str | None:
        policy = Policy(-9)
        try:
            registry.restore(1, policy)
        except WeightLedgerError:
            return None if value_of(policy.state_dict()) == -9 else "the target was changed"
        return None if value_of(policy.state_dict()) == 1 else f"other weights: {policy.state_dict()}"

    def export(registry: Registry) -> str | None:
        from safetensors.torch import load_file

        target = folder.parent / "out.safetensors"
        registry.export(2, target)
        found = load_file(target)
        return (
            None if value_of({name: found[name] for name in ("w", "b")}) == 2 else f"other weights: {found}"
        )

    def publish(registry: Registry) -> str | None:
        made = registry.publish(Policy(50))
        return None if value_of(registry.load(made)) == 50 else "other weights"

    def publish_equal(registry: Registry) -> str | None:
        made = registry.publish(Policy(2))
        return None if value_of(registry.load(made)) == 2 else "other weights"

    def roll_back(registry: Registry) -> str | None:
        # Where the row of the policy's name is damaged, v1 is what was published above.
        right = _content(registry.load(1))
        made = registry.rollback(1)
        try:
            return None if _content(registry.load(made)) == right else "other weights"
        except WeightLedgerError as error:
            return f"v{made.number} is the head and cannot be loaded: {error}"

    def verify(registry: Registry) -> str | None:
        """Find every fault of a file that a load finds."""
        named = {number for fault in registry.verify() for number in fault.versions}
        for number in sound.contents:
            try:
                registry.load(number)
            except NotFoundError:
                continue
            except WeightLedgerError as error:
                if number not in named and what.path.startswith("snapshots/"):
                    return f"v{number} is not named, though {error}"
        return None

    def update(registry: Registry) -> str | None:
        worker = Policy(-3)
        with FakeWorkers(None, [worker], registry=registry, names=["w5"], timeout=1) as updater:
            report = updater.sync()
        value = value_of(worker.state_dict())
        return None if value in (-3, 1, 2, 5) and (value == -3 or report.ok) else f"{report} left {value}"

    def ask(call: Callable[[Registry], object]) -> Callable[[Registry], None]:
        def asked(registry: Registry) -> None:
            repr(call(registry))

        return asked

    return questions | {
        "load_extra": load_extra,
        "restore": restore,
        "export": export,
        "aliases": ask(Registry.aliases),
        "best": ask(lambda registry: registry.best("reward")),
        "events": ask(Registry.events),
        "get by alias": ask(lambda registry: registry.get("good")),
        "head": ask(Registry.head),
        "history": ask(Registry.history),
        "history of a version": ask(lambda registry: registry.history(version=2)),
        "holdings": ask(Registry.holdings),
        "pins": ask(Registry.pins),
        "policies": ask(Registry.policies),
        "staleness": ask(lambda registry: registry.staleness(1)),
        "target": ask(lambda registry: registry.target("w0")),
        "versions": ask(Registry.versions),
        "workers": ask(Registry.workers),
        "verify": verify,
        "update": update,
        "publish": publish,
        "publish what is stored": publish_equal,
        "rollback": roll_back,
        "pin": ask(lambda registry: registry.pin("w9", 2)),
        "set_alias": ask(lambda registry: registry.set_alias("bad", 1)),
        "record_metrics": ask(lambda registry: registry.record_metrics(1, reward=3.0)),
        "prune": ask(lambda registry: registry.prune(keep_last=2)),
    }

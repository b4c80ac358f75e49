"""Damaged and hostile headers of files, and structures in the database: the right weights, or an error by name."""

from __future__ import annotations

import json
import os
import random
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from blake3 import blake3

from weightledger.registry import CorruptionError, Registry, WeightLedgerError

MANY = 4000 if os.environ.get("WEIGHTLEDGER_TORTURE") == "1" else 150
WEIGHTS = {"a": torch.ones(3), "b": torch.arange(4.0), "c": torch.zeros(2, 2), "d": torch.full((1,), 7.0)}


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    with Registry.open(tmp_path / "r") as opened:
        opened.publish(WEIGHTS, extra={"steps": 5, "moment": torch.ones(2)})
        opened.publish({name: tensor + 1 for name, tensor in WEIGHTS.items()})
        yield opened


def database(registry: Registry) -> Path:
    return Path(registry.location) / "registry.db"


def change(registry: Registry, statement: str, *values: Any) -> None:
    """Change the database behind the library's back."""
    with closing(sqlite3.connect(database(registry))) as connection, connection:
        assert connection.execute(statement, values).rowcount > 0


def file_of(registry: Registry, number: int) -> Path:
    digest = registry.get(number).digest.removeprefix("blake3:")
    (path,) = (Path(registry.location) / "snapshots").glob(f"{digest}-*")
    return path


def reseal(header: dict[str, Any]) -> bytes:
    """Return a header as somebody writes it who knows the format and seals it, too."""
    metadata = header["__metadata__"]
    metadata.pop("weightledger.sum", None)
    text = json.dumps(header, separators=(",", ":"))
    before = text[:-2] + ',"weightledger.sum":"'
    mark = before.index(',"weightledger.sum":"')
    return (before + blake3(text[:mark].encode()).hexdigest() + '"}}').encode()


def rewrite(path: Path, alter: Callable[[dict[str, Any]], Any]) -> None:
    """Put another header before a file's data, in the room that the old one had or in more."""
    whole = path.read_bytes()
    room = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + room])
    altered = alter(header)
    text = altered if isinstance(altered, bytes) else reseal(header)
    text += b" " * max(0, room - len(text))
    path.chmod(0o600)
    path.write_bytes(len(text).to_bytes(8, "little") + text + whole[8 + room :])


# ---------------------------------------------------------------------- structures in the database


def test_a_structure_with_a_flipped_bit_is_an_error_and_not_three_of_four_tensors(registry: Registry) -> None:
    """A key of the tree is hidden by a bit that turns it into another one."""
    with closing(sqlite3.connect(database(registry))) as connection:
        (body,) = connection.execute("SELECT body FROM structures ORDER BY id LIMIT 1").fetchone()
    damaged = body.replace('"d"', '"c"', 1)
    assert damaged != body
    change(registry, "UPDATE structures SET body = ? WHERE body = ?", damaged, body)
    for call in (registry.load, lambda: registry.load(1)):
        with pytest.raises(
            CorruptionError, match=r"(?s)put together is damaged.*SHA-256.*registry\.db from a backup"
        ):
            call()
    (fault,) = registry.verify()
    assert (fault.kind, fault.versions) == ("damaged", (1, 2))
    assert "fingerprint" in fault.detail
    assert [each.kind for each in registry.verify(1)] == ["damaged"]


@pytest.mark.parametrize("body", ["7", "null", "[1]", "{", "", 7, b"\xff", '{"format": 1}', "[" * 50_000])
def test_a_structure_that_is_none_is_an_error_by_name(registry: Registry, body: Any) -> None:
    change(registry, "UPDATE structures SET body = ? WHERE id = 1", body)
    with pytest.raises(CorruptionError, match=r"v2|v1"):
        registry.load()
    assert any(fault.kind == "damaged" for fault in registry.verify())


@pytest.mark.parametrize(
    "body",
    [
        '{"format": 1, "ties": 3, "tree": null}',
        '{"format": 1, "ties": {}, "tree": 5}',
        '{"format": 1, "ties": {}, "tree": {}}',
        '{"format": 1, "ties": {}, "tree": {"dict": 5}}',
        '{"format": 1, "ties": {}, "tree": {"dict": ["a"], "items": [null, null]}}',
        '{"format": 1, "ties": {}, "tree": {"td": ["a"], "batch": "x"}}',
        '{"format": 1, "ties": {}, "tree": {"value": ["a"]}}',
        '{"format": 1, "ties": {}, "tree": {"unknown": 1}}',
        '{"format": 1, "ties": {}}',
        '{"format": 1, "ties": {}, "tree": ' + '{"list": [' * 2000 + "null" + "]}" * 2000 + "}",
    ],
)
def test_a_structure_that_somebody_made_up_whole_is_an_error_by_name(registry: Registry, body: str) -> None:
    """Its fingerprint is right, too."""
    import hashlib

    print_of = hashlib.sha256(body.encode()).hexdigest()
    change(registry, "UPDATE structures SET body = ?, fingerprint = ? WHERE id = 1", body, print_of)
    with pytest.raises(CorruptionError):
        registry.load()


# ---------------------------------------------------------------------- headers of files


def other_hashes(header: dict[str, Any]) -> None:
    hashes = json.loads(header["__metadata__"]["weightledger.hashes"])
    hashes["a"] = "0" * len(hashes["a"])
    header["__metadata__"]["weightledger.hashes"] = json.dumps(hashes)


def test_hashes_that_a_header_tells_are_compared_with_the_digest(registry: Registry) -> None:
    sound = registry.tensor_hashes(1)
    assert sound.keys() == WEIGHTS.keys() and registry.tensor_hashes(1) == sound
    rewrite(file_of(registry, 1), other_hashes)
    with pytest.raises(CorruptionError, match=r"(?s)header of v1.*its hashes make blake3:.*the record has"):
        registry.tensor_hashes(1)
    with pytest.raises(CorruptionError):
        registry.load(1)
    assert [fault.kind for fault in registry.verify()] == ["corrupt"]


def with_metadata(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def alter(header: dict[str, Any]) -> None:
        header["__metadata__"][f"weightledger.{key}"] = value

    return alter


def with_entry(**entry: Any) -> Callable[[dict[str, Any]], None]:
    def alter(header: dict[str, Any]) -> None:
        header["a"] |= entry

    return alter


HOSTILE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "two signs": with_metadata("version", "--5"),
    "no ASCII digits": with_metadata("step", "٣"),
    "a long number": with_metadata("step", "9" * 5000),
    "a step that is no text": with_metadata("step", 5),
    "hashes that are a list": with_metadata("hashes", "[1]"),
    "hashes that are a number": with_metadata("hashes", "7"),
    "hashes of another kind": with_metadata("hashes", '{"a": 1}'),
    "hashes nested deep": with_metadata("hashes", "[" * 100_000),
    "ties that are a list": with_metadata("ties", "[]"),
    "ties to nothing": with_metadata("ties", '{"x": "y"}'),
    "ties to no name": with_metadata("ties", '{"x": ["a"]}'),
    "values that hide a tensor": with_metadata("values", '{"a": 1}'),
    "a structure nested deep": with_metadata("structure", "[" * 100_000),
    "a lone surrogate": with_metadata("structure", "\ud800"),
    "another format": lambda header: header["__metadata__"].update(weightledger="2"),
    "a huge shape": with_entry(shape=[2**62, 2**62]),
    "a negative shape": with_entry(shape=[-1]),
    "a shape of text": with_entry(shape="3"),
    "huge offsets": with_entry(data_offsets=[0, 2**63]),
    "offsets the wrong way round": with_entry(data_offsets=[12, 0]),
    "an unknown dtype": with_entry(dtype="F3"),
    "a dtype that is a list": with_entry(dtype=["F32"]),
    "metadata that is text": lambda header: header.update(__metadata__="x") or json.dumps(header).encode(),
    "no object": lambda _: b"[]",
    "nothing": lambda _: b"",
    "nested deep": lambda _: b"[" * 100_000,
    "no UTF-8": lambda _: b'{"\xff": 1}',
    "a name twice": lambda _: b'{"a": 1, "a": 2}',
}


def questions(registry: Registry) -> dict[str, Callable[[], Any]]:
    """Everything that reads a file."""
    into = {name: torch.zeros_like(tensor) for name, tensor in WEIGHTS.items()}
    return {
        "load": lambda: registry.load(1),
        "load_extra": lambda: registry.load_extra(1),
        "tensor_hashes": lambda: registry.tensor_hashes(1),
        "payload": lambda: registry.payload(1),
        "export": lambda: registry.export(1, Path(registry.location).parent / "out.safetensors"),
        "restore": lambda: registry.restore(1, into),
        "rollback": lambda: registry.rollback(1, restructure=True),
        "verify": registry.verify,
        "publish": lambda: registry.publish(WEIGHTS, restructure=True),
    }


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_header_leaves_as_an_error_of_the_library(registry: Registry, kind: str) -> None:
    rewrite(file_of(registry, 1), HOSTILE[kind])
    for name, call in questions(registry).items():
        try:
            found = call()
        except WeightLedgerError as error:
            assert str(error), name
            continue
        assert name not in ("load", "payload", "export", "restore"), f"{name} took it: {found!r}"
        if name == "verify":
            assert "corrupt" in {fault.kind for fault in found}


@pytest.mark.torture
@pytest.mark.timeout(3600)
def test_random_damage_to_headers_and_structures_is_an_error_or_the_right_weights(registry: Registry) -> None:
    """Bytes are changed, cut, doubled and moved; whatever answers gives what was published."""
    rng, seen = random.Random(7), {"errors": 0, "answers": 0}
    path = file_of(registry, 1)
    sound, room = path.read_bytes(), int.from_bytes(path.read_bytes()[:8], "little")
    hashes = registry.tensor_hashes(1)
    path.chmod(0o600)
    for _ in range(MANY):
        damaged = bytearray(sound)
        for _ in range(rng.randint(1, 3)):
            at, length = rng.randrange(8 + room), rng.randint(1, 8)
            match rng.randrange(4):
                case 0:
                    damaged[at] ^= 1 << rng.randrange(8)
                case 1:
                    damaged[at : at + length] = rng.randbytes(length)
                case 2:
                    del damaged[at : at + length]
                case _:
                    damaged[at:at] = damaged[at : at + length]
        path.write_bytes(damaged)
        for name in ("load", "tensor_hashes", "verify", "restore"):
            try:
                answer = questions(registry)[name]()
            except WeightLedgerError:
                seen["errors"] += 1
                continue
            seen["answers"] += 1
            if name == "load":
                assert all(torch.equal(answer[key], WEIGHTS[key]) for key in WEIGHTS)
            elif name == "tensor_hashes":
                assert answer == hashes
    path.write_bytes(sound)
    assert registry.verify() == []
    assert seen["errors"] > MANY

"""One buffer in the safetensors layout: packed, hashed, sealed, parsed and checked."""

# The stubs of torch call every submodule `Tensor | Module`, those of tensordict call every entry a Tensor.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportIndexIssue=false, reportAbstractUsage=false

from __future__ import annotations

import gc
import json
import resource
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.registry.snapshot_helpers import loaded, packed, seal, stored
from weightledger.registry.errors import CorruptionError, InvalidWeightsError, StorageError
from weightledger.registry.weights import layout as layouts
from weightledger.registry.weights.codec import flatten
from weightledger.registry.weights.leaves import TORCH_DTYPES
from weightledger.registry.weights.packing import Packer
from weightledger.registry.weights.payload import Payload, parse, write_plain


def one_of_each() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = {
        code: torch.randint(0, 2, (3, 5), dtype=torch.uint8, generator=generator).to(dtype)
        for code, dtype in TORCH_DTYPES.items()
    }
    return {**made, "scalar": torch.tensor(7), "empty": torch.zeros(0, 4, dtype=torch.float16)}


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def sealed(weights: object) -> bytes:
    payload = packed(weights)
    seal(payload, version=3)
    return payload.buffer.tobytes()


# ---------------------------------------------------------------------- the format


def test_every_dtype_round_trips_bit_for_bit_in_any_reader(tmp_path: Path) -> None:
    """ST-07: the whole list, through our reader and through that of safetensors."""
    weights = one_of_each()
    weights["F32"] = torch.tensor([[float("nan"), -0.0, float("inf")]])
    payload = stored(weights, tmp_path)
    mine = loaded(payload)
    theirs = load_file(tmp_path / "0.safetensors")
    for name, tensor in weights.items():
        for found in (mine[name], theirs[name]):
            assert found.dtype == tensor.dtype
            assert found.shape == tensor.shape
            assert bits(found) == bits(tensor)


def test_the_installed_safetensors_holds_no_dtype_that_is_refused_here() -> None:
    from safetensors.torch import _TYPES

    assert {code for code, dtype in _TYPES.items() if dtype is not None} <= set(TORCH_DTYPES)


@pytest.mark.parametrize("name", ["", "a.b", "/", "a b\n", "ü", '"\\', "50%", "__metadata__", "\0", "😀"])
def test_a_file_with_an_odd_name_opens_in_any_reader(name: str, tmp_path: Path) -> None:
    payload = stored({name: torch.arange(3)}, tmp_path)
    with safe_open(tmp_path / "0.safetensors", framework="pt") as file:
        (found,) = file.keys()
        assert torch.equal(file.get_tensor(found), torch.arange(3))
        assert file.metadata()["format"] == "pt"
    assert list(loaded(payload)) == [name]


def test_data_is_page_aligned_and_tensors_are_aligned_without_gaps() -> None:
    layout = packed(one_of_each()).layout
    assert layout.data_start % 4096 == 0
    at = 0
    for spec in layout.specs:
        assert spec.start == at
        assert spec.start % layouts.ITEM_BYTES[spec.code] == 0
        at = spec.end
    assert layout.data_start + at == layout.nbytes


def test_tied_data_is_stored_once_and_both_names_are_read() -> None:
    """ST-01."""
    tied = torch.arange(1000.0)
    payload = packed({"a": tied, "b": tied})
    assert payload.layout.data_bytes == 4000
    assert torch.equal(payload.tensors()["b"], tied)
    assert payload.hashes is not None
    assert payload.hashes["a"] == payload.hashes["b"]


def test_a_sealed_file_tells_its_story_without_the_database() -> None:
    back = parse(sealed({"w": torch.zeros(2), "v": ("x", 1)}), "file")
    assert (back.policy, back.version, back.step) == ("test", 3, 7)
    assert back.values == {"v": {"$tuple": ["x", 1]}}
    assert back.structure is not None
    assert back.hashes is not None
    assert set(back.hashes) == {"w", "v"}
    back.check(back.digest, "file")


def test_an_unsealed_payload_can_be_read_too() -> None:
    payload = packed({"w": torch.arange(2)})
    back = parse(payload.buffer, "sent")
    assert back.hashes is None
    assert torch.equal(back.tensors()["w"], torch.arange(2))
    assert back.digest == payload.digest


def test_a_plain_safetensors_file_can_be_read(tmp_path: Path) -> None:
    """Other writers align their data less, and this one not at all."""
    weights = {"w": torch.arange(4.0), "odd": torch.tensor([1, 2, 3], dtype=torch.uint8)}
    save_file(weights, tmp_path / "plain.safetensors")
    back = parse((tmp_path / "plain.safetensors").read_bytes(), "plain")
    assert back.hashes is None
    assert back.structure is None
    assert all(torch.equal(back.tensors()[name], tensor) for name, tensor in weights.items())
    header = (
        b'{"b":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},'
        b'"f":{"dtype":"F32","shape":[2],"data_offsets":[1,9]}}'
    )
    crooked = len(header).to_bytes(8, "little") + header + b"\7" + np.array([1, 2], np.float32).tobytes()
    assert parse(crooked, "crooked").tensors()["f"].tolist() == [1, 2]


def test_an_exported_file_has_every_name_and_loads_anywhere(tmp_path: Path) -> None:
    tied = torch.arange(4.0)
    payload = packed({"a": tied, "b": tied, "c": torch.zeros(0), "v": 1})
    write_plain(payload, tmp_path / "out.safetensors")
    found = load_file(tmp_path / "out.safetensors")
    assert set(found) == {"a", "b", "c"}
    assert torch.equal(found["b"], tied)
    with safe_open(tmp_path / "out.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert [path.name for path in tmp_path.iterdir()] == ["out.safetensors"]
    with pytest.raises(StorageError, match="nowhere"):
        write_plain(payload, tmp_path / "nowhere" / "out.safetensors")
    (tmp_path / "folder").mkdir()
    with pytest.raises(StorageError, match="folder"):
        write_plain(payload, tmp_path / "folder")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "out.safetensors"]


# ---------------------------------------------------------------------- packing


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.arange(6.0).view(2, 3).t(),
        torch.ones(1).expand(4),
        torch.arange(10)[::3],
        torch.randn(4, dtype=torch.complex64).conj(),
        torch.randn(3).requires_grad_(),
    ],
)
def test_any_strides_are_packed_row_by_row(tensor: Tensor) -> None:
    """ST-04, ST-05: values and shape are kept, and what is loaded is writable."""
    packer = Packer()
    content = flatten({"w": tensor})
    payload = packer.pack(content)
    assert packer.holds(content)
    back = loaded(payload)["w"]
    assert torch.equal(back, tensor.detach())
    back.add_(1)
    with torch.no_grad():
        changed = tensor.detach().clone(memory_format=torch.contiguous_format)
        changed.view(-1)[-1] += 1
    assert not packer.holds(flatten({"w": changed}))


def test_the_buffer_is_used_again_while_the_schema_stays() -> None:
    module = nn.Linear(8, 8)
    packer = Packer()
    first = packer.pack(flatten(module), step=9)
    address = first.buffer.ctypes.data
    with torch.no_grad():
        module.weight.add_(1)
    second = packer.pack(flatten(module), step=1_000_000)
    assert second.buffer.ctypes.data == address
    assert second.layout is first.layout
    assert torch.equal(second.tensors()["weight"], module.weight)
    third = packer.pack(flatten(nn.Linear(8, 9)))
    assert third.layout.fingerprint != second.layout.fingerprint
    assert third.tensors()["weight"].shape == (9, 8)


def test_hashes_are_those_of_the_bytes_that_the_buffer_holds_now() -> None:
    """What is hashed is remembered from pack to pack, and must follow layout and buffer."""
    packer = Packer()
    small = {f"p{at}": torch.full((5,), float(at)) for at in range(40)}
    others = {**small, "p7": torch.zeros(6)}, {**small, "p7": torch.zeros(5, 1)}, {"w": torch.zeros(4, 50)}
    for weights in (small, small, *others, small):
        content = flatten(weights)
        for _ in range(2):
            for tensor in weights.values():
                tensor.add_(1)
            assert packer.pack(content).digest == packed(weights).digest


def test_a_step_and_a_number_of_any_length_find_room_in_a_sealed_header() -> None:
    # Names of every length, so that one leaves no more room than is kept for the seal.
    for length in range(1, 1500):
        payload = Packer().pack(flatten({"w" * length: torch.zeros(3)}), step=-(2**63))
        head = payload.sealed(version=2**63 - 1)
        back = parse(head + payload.data().tobytes(), "file")
        assert (back.step, back.version) == (-(2**63), 2**63 - 1)


def test_a_sealed_header_has_the_structure_that_was_asked_for() -> None:
    content = flatten({"a": torch.zeros(1), "b": {"c": torch.ones(1)}})
    payload = Packer().pack(content)
    other = {**content.structure, "kind": "extra"}
    assert parse(payload.sealed() + payload.data().tobytes(), "own").structure == content.structure
    file = payload.sealed(structure=other) + payload.data().tobytes()
    assert parse(file, "other").structure == other


def test_a_packed_payload_does_not_follow_the_live_weights() -> None:
    """TO-04, RL-02: bit for bit what the weights were at the call."""
    module = nn.Linear(2, 2)
    before = module.weight.detach().clone()
    payload = packed(module.state_dict())
    module.weight.data.add_(1)
    assert torch.equal(payload.tensors()["weight"], before)


@pytest.mark.parametrize(
    "other",
    [
        {"w": torch.tensor([1.0, float("nan"), 0.0]), "v": 1, "x": torch.ones(1)},
        {"w": torch.tensor([1.0, float("nan"), -0.0]), "v": 2},
        {"w": torch.tensor([1.0, float("nan"), -0.0]), "v": 1.0},
        {"w": torch.tensor([1.0, float("nan"), 0.0]), "v": 1},
        {"w": torch.tensor([[1.0, float("nan"), -0.0]]), "v": 1},
        {"u": torch.tensor([1.0, float("nan"), -0.0]), "v": 1},
        {"w": torch.tensor([1.0, float("nan"), -0.0]).view(torch.int32), "v": 1},
        {"w": torch.tensor([1.0, float("nan"), -0.0])},
    ],
)
def test_a_buffer_holds_a_content_only_bit_for_bit(other: dict[str, object]) -> None:
    packer = Packer()
    weights = {"w": torch.tensor([1.0, float("nan"), -0.0]), "v": 1}
    assert not packer.holds(flatten(weights))
    packer.pack(flatten(weights))
    assert packer.holds(flatten({"v": 1, "w": weights["w"].clone()}))  # type: ignore[attr-defined]
    assert not packer.holds(flatten(other))


def test_ties_do_not_decide_what_a_buffer_holds() -> None:
    tied, packer = torch.ones(3), Packer()
    packer.pack(flatten({"a": tied, "b": tied}))
    assert packer.holds(flatten({"a": torch.ones(3), "b": torch.ones(3)}))
    assert not packer.holds(flatten({"a": torch.ones(3), "b": torch.zeros(3)}))
    packer.pack(flatten({"a": torch.ones(3), "b": torch.zeros(3)}))
    assert not packer.holds(flatten({"a": tied, "b": tied}))
    packer.pack(flatten({"a": torch.zeros(0), "b": torch.zeros(0, 2)}))
    assert packer.holds(flatten({"a": torch.zeros(0), "b": torch.zeros(0, 2)}))


def test_weights_of_inference_mode_are_packed_inside_and_outside_of_it() -> None:
    """TO-12."""
    packer = Packer()
    with torch.inference_mode():
        content = flatten({"w": torch.arange(3.0)})
        first = packer.pack(content)
        assert first.tensors()["w"].tolist() == [0, 1, 2]
        assert first.nonfinite() == ()
    assert packer.pack(content).tensors()["w"].tolist() == [0, 1, 2]
    assert packer.pack(flatten({"w": torch.ones(3)})).tensors()["w"].tolist() == [1, 1, 1]


def test_the_same_content_is_copied_as_it_is_now_however_its_memory_reads() -> None:
    """Bytes are moved where memory is content; strides and lazy conjugation are not in the bytes."""
    base = torch.arange(6.0)
    wave = torch.tensor([1 + 2j, 3 - 4j])
    weights = {"w": base, "t": base.view(2, 3).t(), "c": wave.conj(), "big": torch.zeros(100_000)}
    packer, content = Packer(), flatten(weights)
    for turn in range(3):
        found = packer.pack(content).tensors()
        for name, tensor in weights.items():
            assert torch.equal(found[name], tensor), name
        assert packer.holds(content)
        base += turn
        weights["big"] += 1
        assert not packer.holds(content)


def test_a_packer_keeps_nobodys_tensors_alive() -> None:
    weights = {"w": torch.ones(3), "t": torch.ones(2, 3).t(), "c": torch.tensor([1j, 2j])}
    watched = [weakref.ref(tensor) for tensor in weights.values()]
    packer = Packer()
    packer.pack(flatten(weights))
    weights.clear()
    gc.collect()
    assert [ref() for ref in watched] == [None, None, None]


def test_a_tensor_that_becomes_lazily_conjugated_keeps_its_meaning() -> None:
    weights = {"c": torch.tensor([1 + 2j, 3 - 4j])}
    packer, content = Packer(), flatten(weights)
    packer.pack(content)
    weights["c"].data = weights["c"].data.conj()
    assert packer.pack(content).tensors()["c"].tolist() == [1 - 2j, 3 + 4j]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", [0, 32_766, 32_767, 32_768, 99_999])
def test_one_bad_number_is_found_wherever_it_stands(place: int, bad: float, dtype: torch.dtype) -> None:
    weights = torch.ones(100_000, dtype=dtype)
    assert packed({"w": weights}).nonfinite() == ()
    weights[place] = bad
    assert packed({"w": weights}).nonfinite() == ("w",)


def test_a_header_that_no_reader_would_open_is_refused() -> None:
    """ST-25: and the packer works on."""
    packer = Packer()
    with pytest.raises(InvalidWeightsError, match=r"header of 1.* bytes"):
        packer.pack(flatten({"w": torch.zeros(1), "cfg": "x" * (101 * 2**20)}))
    assert packer.pack(flatten({"w": torch.zeros(1)})).layout.data_bytes == 4


def test_a_pack_that_failed_is_not_taken_for_what_the_buffer_holds() -> None:
    """CK-10: the schema of the failed one comes again, with a value that fits."""
    packer = Packer()
    packer.pack(flatten({"w": torch.zeros(1)}))
    with pytest.raises(InvalidWeightsError):
        packer.pack(flatten({"w": torch.zeros(2), "cfg": "x" * (101 * 2**20)}))
    content = flatten({"w": torch.ones(2), "cfg": "x"})
    payload = packer.pack(content)
    assert payload.tensors()["w"].tolist() == [1, 1]
    assert packer.holds(content)


def test_packing_needs_one_copy_of_the_state() -> None:
    """ST-24: peak memory grows by less than 1.3 times the state, hashing and looking for NaN included."""
    program = """
import resource, torch
from weightledger.registry.weights.codec import flatten
from weightledger.registry.weights.packing import Packer
size = 400 << 20
weights = {f"w{i}": torch.ones(size // 16, dtype=dtype) for i, dtype in enumerate([torch.float32, torch.bfloat16] * 2)}
size = sum(tensor.nbytes for tensor in weights.values())
Packer().pack(flatten({"warm": torch.ones(100)})).nonfinite()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
packer = Packer()
for _ in range(2):
    payload = packer.pack(flatten(weights))
    payload.hash(); payload.nonfinite(); payload.sealed(version=1)
    assert packer.holds(flatten(weights))
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 / size)
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert float(run.stdout) < 1.3
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss > 0


# ---------------------------------------------------------------------- NaN and infinities


@pytest.mark.parametrize("code", [code for code in TORCH_DTYPES if code[0] in "BFC" and code != "BOOL"])
def test_nan_and_infinities_are_found_in_every_dtype_that_has_them(code: str) -> None:
    """RL-05: the tensors are named; numbers that only sum up to an infinity are not."""
    dtype = TORCH_DTYPES[code]
    largest = torch.full((70,), torch.finfo(dtype).max, dtype=torch.float64).to(dtype)
    for bad in ("nan", "inf", "-inf"):
        value = torch.tensor(float(bad)).to(dtype)
        finite = value.isfinite() if dtype.is_complex else value.float().isfinite()
        expected = () if finite else ("bad",)
        weights = {"a": largest, "bad": torch.cat([largest, value.view(1)]), "z": largest}
        assert packed(weights).nonfinite() == expected


def test_whole_numbers_are_never_taken_for_nan() -> None:
    """RL-05: bytes of integers and masks may look like NaN."""
    weights = {
        "i": torch.full((4,), -1),
        "u": torch.full((4,), 255, dtype=torch.uint8),
        "b": torch.ones(4, dtype=torch.bool),
    }
    assert packed(weights).nonfinite() == ()
    assert packed({"e": torch.zeros(0)}).nonfinite() == ()


def test_a_tie_is_told_under_each_name_and_an_imaginary_part_counts() -> None:
    bad = torch.tensor([1.0, float("nan")])
    good = torch.zeros(2)
    weights = {"a": bad, "b": bad, "c": good, "d": torch.complex(good, bad)}
    assert packed(weights).nonfinite() == ("a", "b", "d")


# ---------------------------------------------------------------------- reading what is damaged


SAMPLE = sealed({"w": torch.zeros(4), "b": torch.arange(3), "v": {"k": 1}})


def header_of(file: bytes) -> tuple[dict[str, object], bytes]:
    length = int.from_bytes(file[:8], "little")
    return json.loads(file[8 : 8 + length]), file[8 + length :]


def with_header(header: object, data: bytes, *, raw: bytes | None = None) -> bytes:
    text = json.dumps(header).encode() if raw is None else raw
    return len(text).to_bytes(8, "little") + text + data


@pytest.mark.parametrize("size", [0, 4, 7, 8, 20, 4095, len(SAMPLE) - 1])
def test_a_truncated_file_is_one_corruption_error(size: int) -> None:
    """ST-21."""
    with pytest.raises(CorruptionError, match="v3 of default"):
        parse(SAMPLE[:size], "v3 of default")


@pytest.mark.parametrize(
    "damage",
    [
        lambda file: file + b"\0\0",
        lambda file: file + b"\0",
        lambda file: (10**12).to_bytes(8, "little") + file[8:],
        lambda file: (2**64 - 1).to_bytes(8, "little") + file[8:],
        lambda file: (100_000_001).to_bytes(8, "little") + bytes(100_000_100),
        lambda file: bytes(len(file)),
        lambda file: b"\xff" * len(file),
        lambda file: b"not a snapshot at all",
    ],
)
def test_a_padded_file_or_garbage_is_one_corruption_error(damage: Callable[[bytes], bytes]) -> None:
    """ST-21."""
    with pytest.raises(CorruptionError, match="v3 of default"):
        parse(damage(SAMPLE), "v3 of default")


ENTRY = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        ([], "no JSON object"),
        ({"a": 1}, "describe"),
        ({"a": {**ENTRY, "more": 1}}, "describe"),
        ({"a": {**ENTRY, "dtype": "F128"}}, "F128"),
        ({"a": {**ENTRY, "dtype": ["F32"]}}, "dtype"),
        ({"a": {**ENTRY, "shape": [1.0]}}, "shape"),
        ({"a": {**ENTRY, "shape": [True]}}, "shape"),
        ({"a": {**ENTRY, "shape": [-1]}}, "shape"),
        ({"a": {**ENTRY, "shape": [2]}}, "bytes at"),
        ({"a": {**ENTRY, "data_offsets": [4, 0]}}, "bytes at"),
        ({"a": {**ENTRY, "data_offsets": [0]}}, "offsets"),
        ({"a": ENTRY, "b": ENTRY}, "overlaps"),
        ({"a": ENTRY, "b": {**ENTRY, "data_offsets": [8, 12]}}, "gap"),
        ({"a": {**ENTRY, "data_offsets": [4, 8]}}, "gap"),
        ({"a": {**ENTRY, "shape": [10**30], "data_offsets": [0, 4 * 10**30]}}, "size"),
        ({"a": ENTRY, "__metadata__": []}, "not text"),
        ({"a": ENTRY, "__metadata__": {"x": 1}}, "not text"),
        ({"a": ENTRY, "__metadata__": {"weightledger": "2"}}, "upgrade"),
        ({"a": ENTRY, "__metadata__": {"weightledger": "1", "weightledger.ties": '{"b": "zz"}'}}, "ties"),
        ({"a": ENTRY, "__metadata__": {"weightledger": "1", "weightledger.ties": '{"b": ["a"]}'}}, "ties"),
        ({"a": ENTRY, "__metadata__": {"weightledger": "1", "weightledger.ties": "[]"}}, "JSON object"),
        ({"a": ENTRY, "__metadata__": {"weightledger": "1", "weightledger.values": '{"a": 1}'}}, "one name"),
        (
            {"a": ENTRY, "__metadata__": {"weightledger": "1", "weightledger.hashes": '{"b": "0"}'}},
            "one hash",
        ),
        ({"a": ENTRY, "__metadata__": {"weightledger": "1", "weightledger.step": "seven"}}, "step"),
        ({"a": ENTRY, "__metadata__": {"weightledger": "1", "weightledger.structure": "{"}}, "structure"),
    ],
)
def test_a_header_that_does_not_describe_its_file_is_a_corruption_error(header: object, reason: str) -> None:
    with pytest.raises(CorruptionError, match=f"(?s)some file.*{reason}"):
        parse(with_header(header, bytes(4)), "some file")


def test_a_name_that_stands_twice_is_a_corruption_error() -> None:
    """ST-22: safetensors loads such a file without complaint."""
    one = b'"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
    with pytest.raises(CorruptionError, match="twice"):
        parse(with_header(None, bytes(4), raw=b"{" + one + b"," + one + b"}"), "file")
    deep = b"[" * 100_000
    with pytest.raises(CorruptionError, match="damaged"):
        parse(with_header(None, b"", raw=deep), "file")


def test_a_flipped_bit_is_named() -> None:
    """ST-22."""
    damaged = bytearray(SAMPLE)
    layout = parse(SAMPLE, "file").layout
    damaged[layout.data_start + layout.by_name["w"].end - 1] ^= 0x40
    payload = parse(damaged, "v3 of default")
    with pytest.raises(
        CorruptionError, match=r"v3 of default is damaged: other bytes than were stored in 'w'"
    ):
        payload.check(
            packed({"w": torch.zeros(4), "b": torch.arange(3), "v": {"k": 1}}).digest, "v3 of default"
        )


@settings(max_examples=300)
@given(st.integers(0, len(SAMPLE) - 1), st.integers(0, 7))
def test_no_flipped_bit_anywhere_in_a_file_goes_unnoticed(at: int, bit: int) -> None:
    """ST-22: length, names, blanks, structure, hashes and data alike."""
    digest = parse(SAMPLE, "file").digest
    damaged = bytearray(SAMPLE)
    damaged[at] ^= 1 << bit
    with pytest.raises(CorruptionError, match="some file"):
        parse(damaged, "some file").check(digest, "some file")


def test_every_bit_of_the_text_of_a_header_is_covered() -> None:
    """ST-22: the part that property tests would seldom hit, since most of a small file is blank."""
    digest = parse(SAMPLE, "file").digest
    text = SAMPLE[: SAMPLE.rindex(b"}") + 1]
    for at in range(len(text)):
        damaged = bytearray(SAMPLE)
        damaged[at] ^= 1
        with pytest.raises(CorruptionError):
            parse(damaged, "file").check(digest, "file")


@settings(max_examples=300)
@given(st.binary(max_size=200), st.booleans())
def test_garbage_never_raises_anything_else(garbage: bytes, framed: bool) -> None:
    data = with_header(None, b"", raw=garbage) if framed else garbage
    try:
        parse(data, "file")
    except CorruptionError as error:
        assert "file" in str(error)


def test_content_under_another_digest_is_a_corruption_error() -> None:
    payload = parse(SAMPLE, "file")
    with pytest.raises(CorruptionError, match="holds other content than was recorded"):
        payload.check("blake3:" + "0" * 64, "file")


def test_our_reader_refuses_what_safetensors_refuses() -> None:
    for size in (0, 4, 8, 20, len(SAMPLE) - 1):
        with pytest.raises(SafetensorError):
            from safetensors import deserialize

            deserialize(SAMPLE[:size])


# ---------------------------------------------------------------------- known layouts, read-only memory


def test_a_known_layout_spares_the_work_and_changes_nothing() -> None:
    first = parse(sealed({"w": torch.zeros(4), "b": torch.arange(3), "v": 1}), "first")
    other = sealed({"w": torch.ones(4), "b": torch.arange(3), "v": 2})
    quick, slow = parse(other, "file", known=first.opening), parse(other, "file")
    assert quick.layout == slow.layout
    assert quick.layout.specs is first.layout.specs
    assert (quick.values, quick.hashes, quick.digest, quick.structure) == (
        slow.values,
        slow.hashes,
        slow.digest,
        slow.structure,
    )
    assert quick.layout.fingerprint == first.layout.fingerprint
    third = sealed({"w": torch.ones(5)})
    assert parse(third, "file", known=first.opening).layout == parse(third, "file").layout
    empty = parse(sealed({}), "empty").opening
    assert parse(third, "file", known=empty).layout == parse(third, "file").layout
    assert parse(sealed({}), "file", known=empty).tensors() == {}


def test_the_same_header_is_not_read_again_and_other_data_is_still_seen() -> None:
    first = packed({"w": torch.zeros(4)})
    one = parse(first.buffer.tobytes(), "one")
    again = Packer().pack(flatten({"w": torch.ones(4)}), policy="test", step=1_000_000)
    two = parse(again.buffer, "two", known=one.opening)
    assert two.opening is one.opening
    assert two.tensors()["w"].tolist() == [1, 1, 1, 1]
    with pytest.raises(CorruptionError, match="expected"):
        parse(first.buffer.tobytes() + b"more", "longer", known=one.opening)


def test_a_known_layout_does_not_hide_names_after_the_metadata() -> None:
    first = parse(sealed({"w": torch.zeros(1)}), "first")
    extra = b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"__metadata__":{},"x":1}'
    with pytest.raises(CorruptionError, match="after its metadata"):
        parse(with_header(None, bytes(4), raw=extra), "file", known=first.opening)


def test_read_only_memory_is_looked_at_without_a_warning_and_kept_alive() -> None:
    array = np.frombuffer(SAMPLE, np.uint8)
    assert not array.flags.writeable
    tensors = parse(array, "file").tensors()
    del array
    assert tensors["b"].tolist() == [0, 1, 2]
    bytes_of_b = parse(np.frombuffer(SAMPLE, np.uint8), "file").array_for("b")
    assert bytes_of_b.view(np.int64).tolist() == [0, 1, 2]


def test_a_payload_shows_what_it_is() -> None:
    payload = packed({"w": torch.zeros(4)})
    assert isinstance(payload, Payload)
    assert repr(payload).startswith("<Payload 1 tensors 4112 bytes blake3:")

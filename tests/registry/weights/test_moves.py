"""However pieces lie, each arrives in its place, and nothing else is touched."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightledger.registry.weights.moves import Moves, Piece

_FILL = 170


def both_ways(pieces: Sequence[tuple[int, int, int]], stretch_bytes: int, memory_bytes: int) -> None:
    """Move pieces (offset in the stretch, offset in the memory, bytes), and compare with slices."""
    rng = np.random.default_rng(0)
    stretch, memory = (rng.integers(0, 256, size, dtype=np.uint8) for size in (stretch_bytes, memory_bytes))
    wanted_stretch, wanted_memory = stretch.copy(), memory.copy()
    moves = Moves((start, memory.ctypes.data + at, nbytes) for start, at, nbytes in pieces)
    for start, at, nbytes in pieces:
        wanted_memory[at : at + nbytes] = stretch[start : start + nbytes]
    moves.scatter(stretch.ctypes.data)
    assert np.array_equal(memory, wanted_memory)
    memory[:] = rng.integers(0, 256, memory_bytes, dtype=np.uint8)
    for start, at, nbytes in pieces:
        wanted_stretch[start : start + nbytes] = memory[at : at + nbytes]
    before = memory.copy()
    moves.gather(stretch.ctypes.data)
    assert np.array_equal(stretch, wanted_stretch)
    assert np.array_equal(memory, before)


@pytest.mark.parametrize("size", [1, 3, 4, 16, 100, 4096, 5000, 65536, 70000])
@pytest.mark.parametrize("count", [0, 1, 15, 16, 40])
def test_pieces_of_one_size_that_stand_in_order(size: int, count: int) -> None:
    both_ways(
        [(at * size, (count - 1 - at) * (size + 7), size) for at in range(count)],
        max(1, count * size),
        max(1, count * (size + 7)),
    )


@pytest.mark.parametrize("size", [2, 4096, 6000])
def test_pieces_of_one_size_with_others_between_them(size: int) -> None:
    pieces, start, at = [], 0, 3
    for index in range(60):
        for nbytes in (size, 5 * (index % 3) + 1):
            pieces.append((start, at, nbytes))
            start += nbytes
            at += nbytes + index % 4
    both_ways(pieces, start, at + 8)


def test_pieces_that_lie_side_by_side_at_both_ends_are_one() -> None:
    moves = Moves((at * 8, 4096 + at * 8, 8) for at in range(1000))
    assert moves._single == [(0, 4096, 8000)]
    assert not moves._groups
    both_ways([(at * 8, at * 8 + (at >= 500), 8) for at in range(1000)], 8000, 8001)


def test_one_piece_of_the_stretch_may_have_many_places() -> None:
    stretch = np.arange(8, dtype=np.uint8)
    memory = np.full(40 * 10, _FILL, np.uint8)
    Moves((0, memory.ctypes.data + at * 10, 8) for at in range(40)).scatter(stretch.ctypes.data)
    assert np.array_equal(memory.reshape(40, 10)[:, :8], np.broadcast_to(stretch, (40, 8)))
    assert (memory.reshape(40, 10)[:, 8:] == _FILL).all()


def test_empty_pieces_are_nothing() -> None:
    moves = Moves([(0, 0, 0)] * 100)
    moves.gather(0)
    moves.scatter(0)


def test_read_only_memory_can_be_scattered_from() -> None:
    stretch = bytes(range(200))
    memory = np.zeros(400, np.uint8)
    address = np.frombuffer(stretch, np.uint8).ctypes.data
    Moves((at * 4, memory.ctypes.data + at * 8, 4) for at in range(50)).scatter(address)
    assert memory.reshape(50, 8)[:, :4].tobytes() == stretch


def test_places_that_lie_on_either_side_of_the_stretch_are_no_obstacle() -> None:
    whole = np.full(3 * 64 * 40, _FILL, np.uint8)
    low, stretch, high = np.split(whole, 3)
    stretch[:] = np.arange(stretch.size) % 251
    pieces: list[Piece] = [(at * 64, (low if at % 2 else high).ctypes.data + at * 64, 64) for at in range(40)]
    wanted = stretch.copy()
    Moves(pieces).scatter(stretch.ctypes.data)
    assert np.array_equal(stretch, wanted)
    for at in range(40):
        side, other = (low, high) if at % 2 else (high, low)
        assert np.array_equal(side[at * 64 : at * 64 + 64], wanted[at * 64 : at * 64 + 64])
        assert (other[at * 64 : at * 64 + 64] == _FILL).all()


def test_places_too_far_apart_for_one_array_are_moved_one_by_one() -> None:
    far = [(at * 65536, 1 + (at % 2) * (1 << 47) + at * 70000, 65536) for at in range(40)]
    moves = Moves(far)
    assert moves._single == far
    assert not moves._groups


@given(
    st.lists(
        st.tuples(st.sampled_from([1, 2, 4, 8, 24, 100]), st.integers(0, 3), st.integers(0, 3)), max_size=120
    ),
    st.randoms(use_true_random=False),
)
def test_any_pieces_in_any_order(plan: list[tuple[int, int, int]], random: Random) -> None:
    pieces: list[tuple[int, int, int]] = []
    start = at = 0
    for nbytes, gap, other_gap in plan:
        pieces.append((start + gap, at + other_gap, nbytes))
        start, at = start + gap + nbytes, at + other_gap + nbytes
    # The same places in another order.
    places = [(place, nbytes) for _, place, nbytes in pieces]
    by_size: dict[int, list[int]] = {}
    for place, nbytes in places:
        by_size.setdefault(nbytes, []).append(place)
    for found in by_size.values():
        random.shuffle(found)
    both_ways([(start, by_size[nbytes].pop(), nbytes) for start, _, nbytes in pieces], start + 1, at + 1)

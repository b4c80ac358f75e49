"""Many small pieces moved between one stretch of memory and places all over, in a few calls.

A call a piece costs more than the bytes of a small tensor, and a model may have ten thousand. So where they go is
worked out once:

* Pieces that lie side by side at both ends are one piece.
* Pieces of one size are elements of one type to NumPy, whatever their bytes mean. An array whose elements begin at each
  byte of the memory between the first and the last of them has each of them at an index, and one assignment moves all.
  What lies between is not touched.
* The rest is moved piece by piece.

Rules: those of `raw`. Pieces may overlap only where they agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from weightledger.registry.weights import raw

Piece: TypeAlias = tuple[int, int, int]
"""Offset in the stretch, address of its place, bytes."""

_MANY: Final = 16  # pieces; fewer are moved sooner one by one
_SCATTERED_BYTES: Final = 4 << 10
"""Up to here pieces that stand in the stretch without a rhythm are worth the second copy that NumPy makes of them."""
_AT_ONCE: Final = 1 << 20  # bytes an assignment, which keeps the interpreter lock
_MOST_BYTES: Final = 1 << 62  # of all elements of an array that overlap, as NumPy counts them


class Moves:
    """Pieces that are moved again and again."""

    __slots__ = ("_groups", "_single")

    def __init__(self, pieces: Iterable[Piece]) -> None:
        self._single: list[Piece] = []
        self._groups: list[_Group] = []
        by_size: dict[int, list[Piece]] = {}
        for piece in _merged(pieces):
            if piece[2] <= raw.SMALL_BYTES:
                by_size.setdefault(piece[2], []).append(piece)
            else:
                self._single.append(piece)
        for size, found in by_size.items():
            self._add(size, found)

    def gather(self, base: int) -> None:
        """Copy every piece from its place into the stretch that begins at an address."""
        for group in self._groups:
            group.gather(base)
        raw.move((base + start, address, nbytes) for start, address, nbytes in self._single)

    def scatter(self, base: int) -> None:
        """Copy every piece from the stretch that begins at an address to its place."""
        for group in self._groups:
            group.scatter(base)
        raw.move((address, base + start, nbytes) for start, address, nbytes in self._single)

    def _add(self, size: int, pieces: Sequence[Piece]) -> None:
        scattered: list[Piece] = []
        for run in _rhythmic(pieces):
            step = run[-1][0] - run[-2][0] if len(run) >= _MANY else 0
            # Without a step they are copies of one piece.
            if step and _in_reach(run):
                self._groups.append(_group(size, run, slice(0, step * len(run), step)))
            else:
                scattered += run
        if len(scattered) >= _MANY and size <= _SCATTERED_BYTES and _in_reach(scattered):
            first = scattered[0][0]
            at = np.array([start - first for start, _, _ in scattered], np.intp)
            self._groups.append(_group(size, scattered, at))
        else:
            self._single += scattered


@dataclass(frozen=True)
class _Group:
    """Pieces of one size."""

    size: int
    first: int
    """Offset of the first of them in the stretch."""
    span: int
    """From the beginning of the first to the end of the last, in the stretch."""
    inside: slice | NDArray[np.intp]
    """Where each begins, counted from the first."""
    places: NDArray[Any]
    """Elements of that size from every byte of the memory that holds the places."""
    at: NDArray[np.intp]
    """Where each place begins among them."""

    def gather(self, base: int) -> None:
        stretch = _elements(base + self.first, self.span, self.size)
        for some in self._shares():
            if isinstance(self.inside, slice):
                stretch[self.inside][some] = self.places[self.at[some]]
            else:
                stretch[self.inside[some]] = self.places[self.at[some]]

    def scatter(self, base: int) -> None:
        stretch = _elements(base + self.first, self.span, self.size)
        for some in self._shares():
            if isinstance(self.inside, slice):
                self.places[self.at[some]] = stretch[self.inside][some]
            else:
                self.places[self.at[some]] = stretch[self.inside[some]]

    def _shares(self) -> Iterable[slice]:
        step = max(1, _AT_ONCE // self.size)
        return (slice(at, at + step) for at in range(0, len(self.at), step))


def _group(size: int, pieces: Sequence[Piece], inside: slice | NDArray[np.intp]) -> _Group:
    low, high = _reach(pieces)
    at = np.array([address - low for _, address, _ in pieces], np.intp)
    span = pieces[-1][0] + size - pieces[0][0]
    return _Group(size, pieces[0][0], span, inside, _elements(low, high - low, size), at)


def _elements(address: int, span: int, size: int) -> NDArray[Any]:
    """Return an array of elements of a size, one from each byte of a stretch of memory on."""
    return np.asarray(_Memory(address, span - size + 1, size))


class _Memory:
    """Hands memory to NumPy by address; nothing is kept alive by it."""

    def __init__(self, address: int, count: int, size: int) -> None:
        # Written to or not, as its user does: pages of an object store are only ever read here.
        self.__array_interface__ = {
            "version": 3,
            "data": (address, False),
            "shape": (count,),
            "strides": (1,),
            "typestr": f"|V{size}",
        }


def _merged(pieces: Iterable[Piece]) -> list[Piece]:
    found: list[Piece] = []
    for start, address, nbytes in sorted(pieces):
        if nbytes == 0:
            continue
        if found:
            before, place, length = found[-1]
            if before + length == start and place + length == address:
                found[-1] = (before, place, length + nbytes)
                continue
        found.append((start, address, nbytes))
    return found


def _rhythmic(pieces: Sequence[Piece]) -> Iterable[list[Piece]]:
    """Cut pieces, in the order of their offsets, into runs that stand at equal distances."""
    run: list[Piece] = []
    for piece in pieces:
        if len(run) > 1 and piece[0] - run[-1][0] != run[1][0] - run[0][0]:
            yield run
            run = []
        run.append(piece)
    if run:
        yield run


def _reach(pieces: Sequence[Piece]) -> tuple[int, int]:
    places = [address for _, address, _ in pieces]
    return min(places), max(places) + pieces[0][2]


def _in_reach(pieces: Sequence[Piece]) -> bool:
    low, high = _reach(pieces)
    return (high - low) * pieces[0][2] < _MOST_BYTES

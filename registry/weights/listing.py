"""Texts that give a hash for each of many names. All of a text but the hashes is made once: names seldom change."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping


class Listing:
    """A text with a hash after each of its pieces but the last."""

    def __init__(self, names: Iterable[str], pieces: Iterable[str], end: str) -> None:
        self._names = list(names)
        self._parts = [part for piece in pieces for part in (piece, "")]
        self._parts.append(end)

    def text(self, hashes: Mapping[str, str]) -> str:
        """Return the text with these hashes, which are hexadecimal digits: nothing in them is escaped."""
        parts = self._parts.copy()
        parts[1::2] = [hashes[name] for name in self._names]
        return "".join(parts)


def pairs(names: Iterable[str]) -> Listing:
    """List pairs of name and hash, sorted: `["a","…"],["b","…"]`."""
    ordered = sorted(names)
    pieces = [f'"],[{json.dumps(name)},"' for name in ordered]
    if not pieces:
        return Listing((), (), "")
    pieces[0] = pieces[0].removeprefix('"],')
    return Listing(ordered, pieces, '"]')


def quoted_object(names: Iterable[str]) -> Listing:
    r"""Map names to hashes, as a JSON text within a JSON text: `"{\"a\":\"…\",\"b\":\"…\"}"`."""
    ordered = list(names)
    pieces = [json.dumps(f'",{json.dumps(name)}:"')[1:-1] for name in ordered]
    if not pieces:
        return Listing((), (), '"{}"')
    pieces[0] = '"{' + pieces[0].removeprefix(r"\",")
    return Listing(ordered, pieces, r'\"}"')

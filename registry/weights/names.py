"""Canonical names: one text for each tensor or value, the same whatever holds it.

Rules:

* A name is the path's components joined by dots: `layer.weight`, as users know it from a state dict.
* `_orig_mod` (put there by `torch.compile`) is no part of a name, wherever it stands before the last component.
* Names never collide. `%` is always written `%25`. Where several paths have the same plain name, the one with the
  most components keeps it; in the others, dots inside of components are written `%2E` and whole-number keys `%i0`.
* Paths that differ by `_orig_mod` only are refused, since a name could not tell them apart.
* `__metadata__`, which safetensors keeps for itself, is written `%5F_metadata__`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Final, TypeAlias

Key: TypeAlias = str | int
Path: TypeAlias = tuple[Key, ...]

COMPILED: Final = "_orig_mod"
EXTRA_STATE: Final = "_extra_state"
_RESERVED: Final = {"__metadata__": "%5F_metadata__"}


def join(prefix: str | None, key: Key, *, leaf: bool) -> str | None:
    """Append a key to a plain name.

    Args:
        prefix: Plain name of the container; None for the outermost one.
        key: The key in that container.
        leaf: Whether a tensor or value stands there; its own last part is kept even when it is `_orig_mod`.

    Returns:
        The plain name; None when nothing but `_orig_mod` was met so far.
    """
    text = _component(key, leaf)
    if text is None:
        return prefix
    return text if prefix is None else f"{prefix}.{text}"


def final(plain: str | None) -> str:
    """Return the canonical name for a plain one that no other path has."""
    return "" if plain is None else _RESERVED.get(plain, plain)


def resolve(plain: str, paths: Iterable[Path]) -> dict[Path, str]:
    """Give different names to paths that share a plain name.

    Raises:
        ValueError: Two of the paths differ by `_orig_mod` only; the text names both.
    """
    parts: dict[Path, Path] = {}
    owners: dict[tuple[tuple[type, Key], ...], Path] = {}
    for path in paths:
        parts[path] = _components(path)
        # 0 and "0" differ, as True == 1 does not matter here: keys are text or whole numbers.
        typed = tuple((type(part), part) for part in parts[path])
        if typed in owners:
            raise ValueError(
                f"{show(owners[typed])} and {show(path)} differ by {COMPILED!r} only: rename or drop one"
            )
        owners[typed] = path
    longest = max(len(part) for part in parts.values())
    keepers = [path for path, part in parts.items() if len(part) == longest]
    return {
        path: final(plain) if keepers == [path] else final(".".join(_escape(part) for part in parts[path]))
        for path in parts
    }


def show(path: Sequence[Key]) -> str:
    """Return a path as an error message should name it."""
    if all(type(key) is str and key and "." not in key and key.isprintable() for key in path):
        return repr(".".join(map(str, path)))
    return ascii(path[0]) if len(path) == 1 else ascii(tuple(path))


def is_allowed(name: str, allowed: bool | Collection[str]) -> bool:
    """Tell whether all names are allowed, or one of the globs says that this one is."""
    return allowed if isinstance(allowed, bool) else any(fnmatchcase(name, glob) for glob in allowed)


def is_extra_state(key: Key) -> bool:
    """Tell whether a state-dict key is that of what a module's `get_extra_state` returned."""
    return type(key) is str and (key == EXTRA_STATE or key.endswith("." + EXTRA_STATE))


def _component(key: Key, leaf: bool) -> str | None:
    if type(key) is int:
        return str(key)
    text = str(key)
    if "%" in text:
        text = text.replace("%", "%25")
    if COMPILED not in text:
        return text
    *head, last = text.split(".")
    kept = [part for part in head if part != COMPILED]
    if leaf or last != COMPILED:
        kept.append(last)
    return ".".join(kept) if kept else None


def _components(path: Path) -> Path:
    parts: list[Key] = []
    for at, key in enumerate(path):
        text = _component(key, at == len(path) - 1)
        if text is not None:
            parts.append(key if type(key) is int else text)
    return tuple(parts)


def _escape(part: Key) -> str:
    return f"%i{part}" if type(part) is int else str(part).replace(".", "%2E")

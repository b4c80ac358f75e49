"""How a version is named. Pure rules: text in, what it means out.

| reference | means |
| --- | --- |
| `7`, `"7"`, `"v7"` | the version of that number |
| `"head"` | the newest stored version |
| `"head~2"` | two publishes back on the head's line; rollbacks count 0 |
| `"best:reward"`, `"best:loss:min"` | the stored version on the head's line with a metric's highest value, or lowest |
| `"blake3:1f0e9a2b"` | the version with that content: at least eight digits of its digest |
| any other text | an alias |

An alias that bears one of the later forms was made before they were; it goes on working, and wins. New ones are
refused, in any case and with blanks around them, so that nobody has to know what wins.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, TypeAlias

from weightledger.registry import arguments
from weightledger.registry.records import Version

Ref: TypeAlias = int | str | Version
"""What a version can be named by; whole numbers of NumPy and torch, too."""

GRAMMAR = (
    "a version is named by a number (7 or v7), an alias, 'head', 'head~2' (publishes back on its line), "
    "'best:METRIC' or 'best:METRIC:min', or 'blake3:' with at least 8 digits of its digest"
)
DIGITS_LEAST, DIGITS_MOST = 8, 64

_NUMBER = re.compile(r"v?([0-9]+)")
_BACK = re.compile(r"head~([0-9]+)")
_BEST = re.compile(r"best:(.+?)(:min)?", re.DOTALL)
_CONTENT = re.compile(rf"blake3:([0-9a-f]{{{DIGITS_LEAST},{DIGITS_MOST}}})", re.IGNORECASE)
_RESERVED = re.compile(r"head|latest|none|head~.*|best:.*|blake3:.*", re.DOTALL)
_LONGEST = len(str(arguments.MOST))


@dataclass(frozen=True)
class Numbered:
    """The version of a number, which need not exist."""

    number: int


@dataclass(frozen=True)
class Back:
    """The version so many publishes back on the head's line; 0 is the head itself."""

    text: str
    publishes: int


@dataclass(frozen=True)
class Best:
    """The best stored version on the head's line."""

    text: str
    metric: str
    mode: Literal["max", "min"]


@dataclass(frozen=True)
class Content:
    """The version whose digest begins with these digits."""

    text: str
    digits: str


@dataclass(frozen=True)
class Other:
    """What only an alias can be called."""

    text: str


Meaning: TypeAlias = Version | Numbered | Back | Best | Content | Other
"""What a reference means. Where it keeps its text, an older alias may be called so, and is meant then."""


def parse(ref: Ref | Meaning) -> Meaning:
    """Tell what a reference means; a meaning means itself.

    Raises:
        TypeError: It is none.
    """
    if isinstance(ref, (Version, Numbered, Back, Best, Content, Other)):
        return ref
    if not isinstance(ref, str):
        try:
            return Numbered(arguments.integer("a reference", ref))
        except TypeError:
            raise TypeError(f"{GRAMMAR}, or is a Version; found {arguments.shown(ref)}") from None
    if found := _NUMBER.fullmatch(ref):
        return Numbered(_whole(found[1]))
    if ref == "head":
        return Back(ref, 0)
    if found := _BACK.fullmatch(ref):
        return Back(ref, _whole(found[1]))
    if found := _BEST.fullmatch(ref):
        return Best(ref, found[1], "min" if found[2] else "max")
    if found := _CONTENT.fullmatch(ref):
        return Content(ref, found[1].lower())
    return Other(ref)


def check_new_alias(name: str) -> None:
    """Refuse a name that reads as a reference, or nearly so.

    Raises:
        ValueError: It does.
    """
    if name != name.strip():
        raise ValueError(f"alias {name!r} has blanks around it, which nobody sees: leave them out")
    if (
        _RESERVED.fullmatch(name.casefold())
        or _is_number(name)
        or _is_number(name[1:] if name[0] in "vV" else "")
    ):
        raise ValueError(f"alias {name!r} would be taken for a version: choose another name; {GRAMMAR}")


def slip(text: str) -> str:
    """Return what may be wrong with a reference that names nothing; empty when nothing can be said."""
    plain = text.strip().casefold()
    if plain != text and not isinstance(parse(plain), Other):
        return f"did you mean {plain!r}?"
    if plain == "latest":
        return "did you mean 'head'?"
    if plain.startswith("head~"):
        return "head~ needs a whole number of publishes to go back"
    if plain.startswith("best:"):
        return "best: needs the name of a metric"
    if plain.startswith("blake3:"):
        return f"blake3: needs {DIGITS_LEAST} to {DIGITS_MOST} hexadecimal digits"
    return ""


def _whole(digits: str) -> int:
    # Python refuses to read thousands of digits, and no row has a number of more than nineteen.
    digits = digits.lstrip("0")
    return int(digits or 0) if len(digits) <= _LONGEST else arguments.MOST + 1


def _is_number(text: str) -> bool:
    # As `int` reads it: signs, underscores and the digits of all scripts.
    try:
        int(text)
    except ValueError:
        return False
    return True

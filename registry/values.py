"""Plain Python values ⇄ strict JSON, types kept.

Rules:

* `None`, `bool`, `int`, `float` (NaN and infinities too), `str`, `bytes`, `list`, `tuple` and `dict` with `str` or
  `int` keys come back with the type they had. Anything else is refused by name, never turned into text.
* What JSON can say stays plain JSON; the rest becomes an object with one `$tag`. The text is strict JSON: no bare
  `NaN`, no lone surrogate, no number that a 64-bit reader would round.
* Subclasses are refused, since they would not come back; NumPy scalars become the Python number that they equal.
* A dictionary keeps its order, but order is no part of `canonical`, which is what hashes are made of.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import re
import sys
from collections.abc import Mapping
from typing import Any, Final, TypeAlias

from weightledger.registry.errors import CorruptionError, InvalidWeightsError

Json: TypeAlias = Any
"""What `json.loads` may return."""

MAX_DEPTH: Final = 100
"""Levels of nesting that are kept; also what stops a container that holds itself."""

_INT64: Final = 2**63
_SURROGATE: Final = re.compile("[\ud800-\udfff]")
_SCALARS: Final = (type(None), bool, int, float, str)
_FLOATS: Final = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def encode(value: object, where: str) -> Json:
    """Turn a value into JSON that `decode` turns back into the same value.

    Args:
        value: None, a number, text, bytes, or lists, tuples and dictionaries of them.
        where: What the value is, as an error should call it, for example `"metadata"`.

    Raises:
        InvalidWeightsError: The value, or one inside of it, cannot be kept; names the place and the type.
    """
    return _encode(value, where, MAX_DEPTH)


def decode(encoded: Json) -> Any:
    """Turn JSON made by `encode` back into the value.

    Raises:
        CorruptionError: The JSON was not made by `encode`.
    """
    if isinstance(encoded, list):
        return [decode(item) for item in encoded]
    if not isinstance(encoded, dict):
        return encoded
    tag = next(iter(encoded), "")
    if not tag.startswith("$"):
        return {key: decode(item) for key, item in encoded.items()}
    body = encoded[tag]
    try:
        match tag:
            case "$tuple":
                return tuple(decode(item) for item in body)
            case "$map":
                return {decode(key): decode(item) for key, item in body}
            case "$float":
                return _FLOATS[body]
            case "$int":
                return int(body, 16)
            case "$bytes":
                return base64.b64decode(body, validate=True)
    except (TypeError, ValueError, KeyError, AttributeError, binascii.Error) as error:
        raise CorruptionError(f"stored value {tag!r} cannot be read: found {body!r:.80}") from error
    raise CorruptionError(
        f"stored value has the unknown tag {tag!r}: it was written by a newer version, or damaged"
    )


def dumps(encoded: Json) -> str:
    """Return the one text that stands for this JSON: keys sorted, ASCII, no blanks."""
    return json.dumps(encoded, sort_keys=True, ensure_ascii=True, allow_nan=False, separators=(",", ":"))


def canonical(encoded: Json) -> str:
    """Return the text that equal values share, whatever the order of their dictionaries' keys."""
    text = dumps(encoded)
    return dumps(_sorted_maps(encoded)) if '"$map"' in text else text


def is_plain(value: object) -> bool:
    """Tell whether a value is a scalar that `encode` may keep: None, a number, text or bytes (not a NumPy one)."""
    return type(value) in _SCALARS or type(value) is bytes


def surrogate(text: str) -> bool:
    """Tell whether a text holds a lone surrogate, which no UTF-8 file can hold."""
    return not text.isascii() and _SURROGATE.search(text) is not None


def _encode(value: Any, where: str, depth: int) -> Json:
    kind = type(value)
    if value is None or kind is bool:
        return value
    if kind is str:
        return _text(value, where)
    if kind is int:
        return value if -_INT64 <= value < _INT64 else {"$int": hex(value)}
    if kind is float:
        return value if math.isfinite(value) else {"$float": str(value)}
    if kind is bytes:
        return {"$bytes": base64.b64encode(value).decode("ascii")}
    if depth == 0:
        raise InvalidWeightsError(
            f"{where} is nested deeper than {MAX_DEPTH} levels, or holds itself: flatten it before it is stored"
        )
    if kind is list or kind is tuple:
        items = [_encode(item, f"{where}[{at}]", depth - 1) for at, item in enumerate(value)]
        return items if kind is list else {"$tuple": items}
    if isinstance(value, Mapping):
        return _encode_mapping(value, where, depth - 1)
    return _encode(_from_numpy(value, where), where, depth)


def _encode_mapping(value: Mapping[Any, Any], where: str, depth: int) -> Json:
    pairs: list[tuple[Json, Json]] = []
    tagged = False
    for key, item in value.items():
        if type(key) is not str and type(key) is not int:
            raise InvalidWeightsError(
                f"{where} has the key {key!r:.80} of type {_name(key)}; expected text or whole numbers as keys"
            )
        tagged = tagged or not isinstance(key, str) or key.startswith("$")
        pairs.append((_encode(key, f"a key of {where}", 0), _encode(item, f"{where}[{key!r}]", depth)))
    return {"$map": [list(pair) for pair in pairs]} if tagged else dict(pairs)


def _text(value: str, where: str) -> str:
    if surrogate(value):
        raise InvalidWeightsError(
            f"{where} is the text {ascii(value)[:80]}, which has a lone surrogate and is no UTF-8"
        )
    return value


def _from_numpy(value: Any, where: str) -> object:
    # A NumPy scalar cannot exist before NumPy was imported, so that reading commands need not import it.
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic):
        exact = (numpy.bool_, numpy.integer, numpy.floating, numpy.str_, numpy.bytes_)
        plain = value.item()
        # `timedelta64` counts as an integer, and `longdouble.item()` is no Python float.
        if isinstance(value, exact) and not isinstance(value, numpy.timedelta64) and is_plain(plain):
            return plain
    raise InvalidWeightsError(
        f"{where} has the type {_name(value)}, which cannot be kept; expected None, a number, text, bytes, "
        f"or lists, tuples and dictionaries of them: convert it{_hint(value)}"
    )


def _hint(value: object) -> str:
    for method in ("tolist", "to_dict", "state_dict"):
        if callable(getattr(value, method, None)):
            return f", for example with .{method}()"
    return ""


def _name(value: object) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _sorted_maps(encoded: Json) -> Json:
    if isinstance(encoded, list):
        return [_sorted_maps(item) for item in encoded]
    if not isinstance(encoded, dict):
        return encoded
    if "$map" in encoded:
        pairs = [[key, _sorted_maps(item)] for key, item in encoded["$map"]]
        return {"$map": sorted(pairs, key=lambda pair: dumps(pair[0]))}
    return {key: _sorted_maps(item) for key, item in encoded.items()}

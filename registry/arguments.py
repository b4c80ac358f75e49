"""What a call is given, judged by one rule before anything is read or written.

Rules
- A whole number is an `int`, a NumPy integer, or an integer array or tensor without dimensions. A real number is a
  whole number, a `float`, a NumPy float, or a floating array or tensor without dimensions.
- `bool`, complex numbers, text, and arrays that have dimensions, if only one element, are no numbers.
- What is refused is named, with what was expected and what was found, in few words however long or hostile that is.

NumPy and torch are not imported for it: a value of theirs cannot exist before they are.
"""

from __future__ import annotations

import operator
import os
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from weightledger.registry.errors import InvalidWeightsError, StorageError
from weightledger.registry.values import surrogate

MOST: Final = 2**63 - 1
"""The largest whole number that a database keeps, and more than there can be rows."""

_SHOWN = 80
_LONGEST_NAME = 255
_LONGEST_PATH = 4096  # bytes, the last a zero: what Linux takes
_LONG_INT = 10**_SHOWN


def integer(what: str, value: object, *, error: type[Exception] = TypeError) -> int:
    """Return a whole number as a plain `int`.

    Args:
        what: How the error calls it.
        value: What was given.
        error: Raised for anything else.
    """
    if type(value) is int:
        return value
    found = _number(value)
    if isinstance(found, int):
        return found
    raise error(f"{what} must be a whole number, found {shown(value)}{_hint(value)}")


def real(what: str, value: object, *, error: type[Exception] = TypeError) -> float:
    """Return a real number as a plain `float`; NaN and infinities are numbers.

    Args:
        what: How the error calls it.
        value: What was given.
        error: Raised for anything else, and for a whole number that is too large for a float.
    """
    if type(value) is float:
        return value
    found = _number(value)
    if found is not None:
        try:
            return float(found)
        except OverflowError:
            pass
    raise error(f"{what} must be a number, found {shown(value)}{_hint(value)}")


def within_64_bits(what: str, value: object, *, error: type[Exception] | None = None) -> int:
    """Return a whole number that a database keeps.

    Args:
        what: How the error calls it.
        value: What was given.
        error: Raised for anything else; by default a `TypeError`, and a `ValueError` for a number that is too large.
    """
    found = integer(what, value, error=error or TypeError)
    if -MOST - 1 <= found <= MOST:
        return found
    raise (error or ValueError)(f"{what} must fit into 64 bits, found {shown(value)}")


def count(what: str, value: object, *, least: int = 0) -> int:
    """Return how many are wanted; more than there can be are as many as there can be.

    Raises:
        TypeError: It is no whole number.
        ValueError: It is less than `least`.
    """
    found = integer(what, value)
    if found < least:
        raise ValueError(
            f"{what} must {'not be negative' if least == 0 else f'be at least {least}'}, found {shown(found)}"
        )
    return min(found, MOST)


def name(what: str, value: object) -> str:
    """Return a name that is given to a policy, a worker, an alias or a metric.

    Raises:
        ValueError: It is no printable text of 1 to 255 characters.
    """
    if (
        not isinstance(value, str)
        or not value.strip()
        or len(value) > _LONGEST_NAME
        or not value.isprintable()
    ):
        raise ValueError(
            f"expected printable text of 1 to 255 characters as {what} name, found {shown(value)}"
        )
    return value


def text(what: str, value: object) -> str:
    """Return text that is to be kept.

    Raises:
        InvalidWeightsError: It is no text, or none that a database keeps.
    """
    if not isinstance(value, str):
        raise InvalidWeightsError(f"{what} must be text, found {shown(value)}")
    if surrogate(value):
        raise InvalidWeightsError(
            f"{what} must be text, found {shown(value)}, which has a lone surrogate and is no UTF-8"
        )
    return value


def sought(what: str, value: object) -> str:
    """Return a name that is looked for; it need not be one that anything can have.

    Raises:
        TypeError: It is no text.
        ValueError: It is no UTF-8, so that no database can be asked for it.
    """
    if not isinstance(value, str):
        raise TypeError(f"{what} must be text, found {shown(value)}")
    if surrogate(value):
        raise ValueError(
            f"{what} must be text, found {shown(value)}, which has a lone surrogate and is no UTF-8"
        )
    return value


def path(what: str, value: object) -> Path:
    """Return a path of the file system, absolute; `~` is somebody's home.

    Raises:
        TypeError: It is no path.
        ValueError: No file can be called like this, or there is no such home.
        StorageError: It is relative, and the working directory is gone.
    """
    if not isinstance(value, (str, os.PathLike)) or not isinstance(found := os.fspath(value), str):
        raise TypeError(f"{what} must be a path, found {shown(value)}")
    if not found or "\0" in found:
        raise ValueError(f"{what} must be a path, found {shown(found)}")
    try:
        whole = os.path.abspath(Path(found).expanduser())
    except RuntimeError as error:
        raise ValueError(f"{what} must be a path, found {shown(found)}: {error}") from None
    except OSError as error:
        raise StorageError(
            f"{what} {quoted(found)} is relative, but there is no working directory: {error.strerror}. "
            "Give an absolute path."
        ) from error
    if len(os.fsencode(whole)) >= _LONGEST_PATH:
        raise ValueError(f"{what} must be a path of less than {_LONGEST_PATH} bytes, found {shown(found)}")
    return Path(whole)


def moment(what: str, value: object) -> datetime:
    """Return a time.

    Raises:
        TypeError: It is no datetime.
        ValueError: It is one without a time zone, or one that UTC cannot hold.
    """
    if not isinstance(value, datetime):
        raise TypeError(f"{what} must be a timezone-aware datetime, found {shown(value)}")
    if value.tzinfo is None:
        raise ValueError(f"{what} must be a timezone-aware datetime, found the naive {value!r}")
    try:
        value.astimezone(UTC)
    except OverflowError:
        raise ValueError(f"{what} must be a time that UTC can hold, found {value!r}") from None
    return value


def flag(what: str, value: object) -> bool:
    """Return a choice between yes and no, of Python or NumPy.

    Raises:
        TypeError: It is something else, that would count as yes or no by accident.
    """
    numpy = sys.modules.get("numpy")
    if isinstance(value, bool) or (numpy is not None and isinstance(value, numpy.bool_)):
        return bool(value)
    raise TypeError(f"{what} must be True or False, found {shown(value)}")


def quoted(text: str) -> str:
    """Return text as an error quotes it, cut short where no name is so long."""
    return repr(text) if len(text) <= _LONGEST_NAME else f"{text[:_SHOWN]!r}… ({len(text)} characters)"


def shown(value: object) -> str:
    """Return the type of a value and what it looks like, cut short."""
    if value is None:
        return "None"
    kind = type(value).__qualname__
    if isinstance(value, int) and not -_LONG_INT < value < _LONG_INT:
        return f"{kind} of {int.bit_length(value)} bits"
    if isinstance(value, (str, bytes)):
        value = value[: _SHOWN + 1]
    try:
        looks = repr(value)
    except Exception:  # noqa: BLE001 - what cannot show itself is refused like anything else
        return kind
    looks = " ".join(looks.split())
    return f"{kind} {looks}" if len(looks) <= _SHOWN else f"{kind} {looks[:_SHOWN]}…"


def _number(value: object) -> int | float | None:
    """Return the number that a value is or holds; None when it is none."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return operator.index(value)
    if isinstance(value, float):
        return float.__float__(value)
    return _held(value)


def _held(value: Any) -> int | float | None:
    if _is_numpy(value):
        kind = value.dtype.kind if value.ndim == 0 else ""
        return float(value) if kind == "f" else int(value) if kind and kind in "iu" else None
    if _is_tensor(value) and value.ndim == 0:
        try:
            number = value.item()
        except RuntimeError:
            return None  # it has no value: a meta tensor
        # Neither a bool, a complex number, nor the float that a quantised tensor stands for.
        return number if type(number) is (float if value.dtype.is_floating_point else int) else None
    return None


def _is_numpy(value: object) -> bool:
    numpy = sys.modules.get("numpy")
    # Arrays of other classes (masked ones, those with units) are more than their numbers.
    return numpy is not None and (isinstance(value, numpy.generic) or type(value) is numpy.ndarray)


def _is_tensor(value: object) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _hint(value: Any) -> str:
    if not (_is_numpy(value) or _is_tensor(value)) or value.ndim == 0:
        return ""
    return (
        f", which has {value.ndim} dimension{'' if value.ndim == 1 else 's'}: take the element that is meant"
    )

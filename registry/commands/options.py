"""Read what is typed on the command line: times, `NAME=VALUE` pairs, retention rules.

Rules
- What cannot be read is a usage error that shows what is accepted (exit code 2); what cannot be found is the
  library's error (exit code 1).
- A time without an offset is local. One that the local clock skipped or showed twice is refused, not guessed.

Nothing here opens a registry.
"""

import json
import re
from collections.abc import Sequence
from datetime import UTC, date, datetime, time, timedelta
from typing import Any, Literal

import typer

from weightledger.registry.arguments import MOST

KeepBest = tuple[str, int, Literal["min", "max"]]

TIME_HELP = (
    "ISO 8601 (2026-05-04T13:30, 2026-05-04, 13:30; local time unless it ends in Z or an offset), "
    "or how long ago (90s, 30m, 2h, 1d12h)."
)

_UNITS = {"w": 604_800.0, "d": 86_400.0, "h": 3_600.0, "m": 60.0, "s": 1.0}
_AGO = re.compile(r"(?:\d+(?:\.\d+)?[wdhms])+")
_PART = re.compile(r"(\d+(?:\.\d+)?)([wdhms])")
_KEEP_BEST = re.compile(r"(?P<metric>.+):(?P<count>[1-9]\d*)(?::(?P<mode>min|max))?")


def parse_time(text: str, option: str, *, now: datetime | None = None) -> datetime:
    """Read a moment.

    Args:
        text: ISO 8601, a time of today, or how long ago. A date alone is its first moment.
        option: What it was given for, named by the error.
        now: The present, aware; taken from the clock when left out.

    Returns:
        The moment, in UTC.

    Raises:
        typer.BadParameter: It is none of these, or a local time that the clock skipped or showed twice.
    """
    now = now or datetime.now(UTC)
    text = text.strip()
    try:
        if _AGO.fullmatch(text):
            return now - timedelta(seconds=sum(float(n) * _UNITS[unit] for n, unit in _PART.findall(text)))
        found = _iso(text, now.astimezone().date())
        if found is None:
            raise typer.BadParameter(
                f"expected a time, found {text!r}. Accepted: {TIME_HELP}", param_hint=option
            )
        moments = {found.replace(fold=fold).astimezone(UTC) for fold in (0, 1)}
    except (OverflowError, ValueError):
        raise typer.BadParameter(
            f"{text!r} lies outside of the years 1 to 9999.", param_hint=option
        ) from None
    if len(moments) > 1:
        raise typer.BadParameter(
            f"the local clock skipped {text!r} or showed it twice; add an offset, as in "
            f"{found.astimezone().isoformat()}.",
            param_hint=option,
        )
    return moments.pop()


def parse_pairs(pairs: Sequence[str], option: str) -> dict[str, str]:
    """Split `NAME=VALUE` at the first `=`. A name given twice is refused."""
    found: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise typer.BadParameter(f"expected NAME=VALUE, found {pair!r}.", param_hint=option)
        if name in found:
            raise typer.BadParameter(f"{name!r} is given twice.", param_hint=option)
        found[name] = value
    return found


def parse_metrics(pairs: Sequence[str], option: str) -> dict[str, float]:
    """Read `NAME=NUMBER` pairs; `nan` and `inf` are numbers."""
    metrics = {}
    for name, value in parse_pairs(pairs, option).items():
        try:
            metrics[name] = float(value)
        except ValueError:
            raise typer.BadParameter(
                f"{name}: expected a number, found {value!r}.", param_hint=option
            ) from None
    return metrics


def parse_metadata(pairs: Sequence[str], option: str) -> dict[str, Any]:
    """Read `NAME=VALUE` pairs; a value that is JSON keeps its type, anything else is text."""
    return {name: _json_or_text(value) for name, value in parse_pairs(pairs, option).items()}


def parse_keep_best(text: str, option: str) -> KeepBest:
    """Read `METRIC:N` or `METRIC:N:min`; a metric's own name may contain colons."""
    rule = _KEEP_BEST.fullmatch(text)
    if rule is None:
        raise typer.BadParameter(
            f"expected METRIC:N or METRIC:N:min with N of at least 1 (reward:3, loss:3:min), found {text!r}.",
            param_hint=option,
        )
    # More than there can be are as many as there can be, and Python refuses to read thousands of digits.
    count = int(rule["count"]) if len(rule["count"]) < 19 else MOST
    return rule["metric"], count, "min" if rule["mode"] == "min" else "max"


def _iso(text: str, today: date) -> datetime | None:
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        pass
    try:
        # Without asking for the colon, a bare 2026 would be read as 20:26.
        return datetime.combine(today, time.fromisoformat(text)) if ":" in text else None
    except ValueError:
        return None


def _json_or_text(value: str) -> Any:
    try:
        return json.loads(value, parse_constant=_not_json)
    except (ValueError, RecursionError):
        return value


def _not_json(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")

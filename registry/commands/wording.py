"""Put versions, times, sizes and lists into words for people.

Times are shown in the local zone without naming it, in a form that the command line's own options read back. What is
not known, as in a damaged row, is `?`.
"""

import re
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Final

from weightledger.registry.records import Pin

_UNITS = ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))


UNKNOWN = "?"


def version_name(number: int | None) -> str:
    """Return how a version is written: `v12`."""
    return UNKNOWN if number is None else f"v{number}"


def moment(time: datetime | None) -> str:
    """Return a time in the local zone, to the second."""
    return UNKNOWN if time is None else _local(time).strftime("%Y-%m-%d %H:%M:%S")


def precise(time: datetime | None) -> str:
    """Return a time in the local zone, to the millisecond."""
    return UNKNOWN if time is None else _local(time).isoformat(" ", "milliseconds")[:23]


def zone(times: Iterable[datetime | None]) -> str:
    """Return the name of the local zone at these times, or `local` where it changed between them."""
    names = {_local(time).tzname() or "local" for time in times if time is not None}
    return names.pop() if len(names) == 1 else "local"


def _local(time: datetime) -> datetime:
    try:
        return time.astimezone()
    except OverflowError:
        return time  # a day before the year 1 or after 9999 there


def age(time: datetime | None, now: datetime) -> str:
    """Return how long ago a time was; one ahead of this machine's clock is said to be so."""
    if time is None:
        return UNKNOWN
    seconds = (now - time).total_seconds()
    if seconds < -1:
        return f"{span(-seconds)} ahead of this clock"
    return "just now" if seconds < 1 else f"{span(seconds)} ago"


SET_BACK: Final = "clock set back"


def length(start: datetime, end: datetime) -> str:
    """Return how long something lasted; nobody knows when the clock was set back meanwhile."""
    seconds = (end - start).total_seconds()
    return SET_BACK if seconds < 0 else span(seconds)


def span(seconds: float) -> str:
    """Return a length of time in its two largest units."""
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    whole = round(seconds)
    parts: list[str] = []
    for length, unit in _UNITS:
        if whole >= length or parts:
            parts.append(f"{whole // length} {unit}")
            whole %= length
        if len(parts) == 2:
            break
    return parts[0] if len(parts) == 1 or parts[1].startswith("0 ") else " ".join(parts)


def size(count: int) -> str:
    """Return a number of bytes in decimal units."""
    amount = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 999.5:
            return f"{count} B" if unit == "B" else f"{amount:.3g} {unit}"
        amount /= 1000
    return f"{amount:,.3g} TB"


def figure(value: float) -> str:
    """Return a metric: whole ones whole, others to four digits."""
    whole = float(value).is_integer()
    return f"{value:.0f}" if whole and abs(value) < 1e9 else f"{value:.4g}"


def some(names: Sequence[str], limit: int) -> str:
    """Return names as a list that says how many it leaves out."""
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit:,} more"


def ranges(numbers: Iterable[int]) -> str:
    """Return version numbers with runs drawn together: `v1–v4, v7`."""
    runs: list[list[int]] = []
    for found in sorted(numbers):
        if runs and found == runs[-1][1] + 1:
            runs[-1][1] = found
        else:
            runs.append([found, found])
    return ", ".join(f"v{low}" if low == high else f"v{low}–v{high}" for low, high in runs)


def natural(name: str | None) -> list[int | str]:
    """Return a sorting key that puts `collector-2` before `collector-10`."""
    return [int(part) if index % 2 else part for index, part in enumerate(re.split(r"(\d+)", name or ""))]


def pin_target(pin: Pin) -> str:
    """Return what a pin holds its worker at, and the alias that it follows."""
    name = version_name(pin.version)
    return f"{name} (alias {pin.ref})" if isinstance(pin.ref, str) else name


def zoned(title: str, times: Iterable[datetime | None]) -> str:
    """Return the title of a column of times, with the zone that they are shown in."""
    return f"{title} ({zone(times)})"

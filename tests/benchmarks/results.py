"""What a row yields, and how it is judged. Pure: no clock, no files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median, quantiles
from typing import Any, Literal

Kind = Literal["ratio", "more", "value", "factor"]


@dataclass(frozen=True)
class Limit:
    """One way to reach a promise: the median is at most so much."""

    most: float
    against: str = ""
    """Name of the reference; empty for a plain value."""
    kind: Kind = "ratio"
    """`ratio`: of the reference. `more`: above the reference, in the result's unit. `value`: in that unit.
    `factor`: of the reference, or the reference of it, whichever is more."""

    def text(self, unit: str) -> str:
        if self.kind == "ratio":
            return f"≤ {self.most:.3g} × {self.against}"
        if self.kind == "more":
            return f"≤ {self.against} + {amount(self.most, unit)}"
        if self.kind == "factor":
            return f"{self.against} within a factor {self.most:.3g}"
        return f"≤ {amount(self.most, unit)}"


@dataclass(frozen=True)
class Spread:
    """A median with the quartiles around it."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Result:
    """One subject in one case, beside its references in the same rounds."""

    row: str
    case: str
    subject: str
    samples: Sequence[float]
    """Of the subject, one a round."""
    references: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Samples of each reference, by name, in the same rounds."""
    limits: Sequence[Limit] = ()
    """Reached when any of these is."""
    unit: str = "s"
    """`s`, `B` or a word for what is counted."""
    size: int | None = None
    """Bytes of weights."""
    workers: int | None = None

    def value(self) -> Spread:
        return spread(self.samples)

    def ratio(self, reference: str) -> Spread:
        return spread([a / b for a, b in zip(self.samples, self.references[reference], strict=True)])

    def found(self, limit: Limit) -> float:
        """Return the median that the limit is about."""
        if limit.kind == "value":
            return self.value().median
        if limit.kind == "ratio":
            return self.ratio(limit.against).median
        if limit.kind == "factor":
            ratio = self.ratio(limit.against).median
            return max(ratio, 1 / ratio)
        pairs = zip(self.samples, self.references[limit.against], strict=True)
        return median(a - b for a, b in pairs)

    def met(self) -> Limit | None:
        """Return the first limit that is reached."""
        return next((limit for limit in self.limits if self.found(limit) <= limit.most), None)

    @property
    def reached(self) -> bool | None:
        """Whether what is promised was reached; None when nothing is."""
        return None if not self.limits else self.met() is not None

    def to_dict(self) -> dict[str, Any]:
        """Return samples, what follows from them, and the verdict."""
        met = self.met()
        return asdict(self) | {
            "value": asdict(self.value()),
            "ratios": {name: asdict(self.ratio(name)) for name in self.references},
            "limits": [
                asdict(limit) | {"text": limit.text(self.unit), "found": self.found(limit)}
                for limit in self.limits
            ],
            "reached": self.reached,
            "reached_by": None if met is None else met.text(self.unit),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Result:
        """Read back what `to_dict` gave."""
        limits = [Limit(each["most"], each["against"], each["kind"]) for each in data["limits"]]
        names = ("row", "case", "subject", "samples", "references", "unit", "size", "workers")
        return cls(**{name: data[name] for name in names}, limits=limits)


def spread(samples: Sequence[float]) -> Spread:
    """Return median and quartiles; of fewer than four samples the extremes."""
    if len(samples) < 4:
        return Spread(median(samples), min(samples), max(samples))
    low, middle, high = quantiles(samples, n=4, method="inclusive")
    return Spread(middle, low, high)


def amount(value: float, unit: str) -> str:
    """Write a value with its unit."""
    if unit == "s":
        return f"{value * 1000:.3g} ms" if value < 0.9995 else f"{value:.3g} s"
    if unit == "B":
        return f"{value / 2**20:,.1f} MB"
    return f"{value:,.3g} {unit}"

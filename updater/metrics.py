"""What an updater tells `ray.util.metrics`: names, units and tags are those of docs/reference/metrics.md.

Rules kept here
- Only what changed is recorded, so that an update costs the same however many workers stand still.
- What is not known is NaN, never an old number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Protocol

from ray.util.metrics import Counter, Gauge, Histogram

from weightledger.updater.reports import FAILURES, SyncReport

_BOUNDARIES = [0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0]


Staleness = Callable[[set[int]], dict[int, int | None]]


class Observer(Protocol):
    """Somebody who is told of each update that ended."""

    def observe(
        self,
        report: SyncReport,
        *,
        head: int | None,
        held: Mapping[str, int | None],
        staleness: Staleness,
        seconds: float,
    ) -> None:
        """Take note of a report, in the thread that ran the update.

        Args:
            head: number of the head.
            held: the version that each worker of the updater is known to hold, by name, named in the update or not.
            staleness: tells how far versions are behind the head.
            seconds: from the begin of the update to its end, the copy of the weights included.
        """


class _Instruments:
    """The metrics themselves; Ray wants one of each name in a process."""

    def __init__(self) -> None:
        self.head = Gauge("weightledger_head_version", "Number of the head.", ("policy",))
        self.version = Gauge(
            "weightledger_worker_version",
            "Version that a worker is known to hold; NaN while that is not known.",
            ("policy", "worker"),
        )
        self.staleness = Gauge(
            "weightledger_worker_staleness",
            "Publishes along the head's lineage that a worker is behind; NaN when unknown or on an abandoned branch.",
            ("policy", "worker"),
        )
        self.seconds = Histogram(
            "weightledger_sync_seconds",
            "Seconds of one update, from its begin to the last receipt.",
            boundaries=_BOUNDARIES,
            tag_keys=("policy",),
        )
        self.failures = Counter(
            "weightledger_sync_failures",
            "Times that a worker did not confirm its target, by status.",
            ("policy", "worker", "status"),
        )
        self.put_bytes = Counter("weightledger_put_bytes", "Bytes put into the object store.", ("policy",))


@lru_cache(maxsize=1)
def _instruments() -> _Instruments:
    return _Instruments()


class RayMetrics:
    """Observes one updater."""

    def __init__(self, policy: str) -> None:
        self._policy = {"policy": policy}
        self._to = _instruments()
        self._head: int | None = None
        self._told: dict[str, tuple[float, float]] = {}
        self._staleness: dict[int, int | None] = {}

    def put(self, nbytes: int) -> None:
        """Count bytes that went into the object store."""
        self._to.put_bytes.inc(nbytes, self._policy)

    def observe(
        self,
        report: SyncReport,
        *,
        head: int | None,
        held: Mapping[str, int | None],
        staleness: Staleness,
        seconds: float,
    ) -> None:
        """Record what an update did and where it left every worker of the updater, named in it or not."""
        self._to.seconds.observe(seconds, self._policy)
        for outcome in report.workers.values():
            if outcome.status in FAILURES:
                self._to.failures.inc(1, self._policy | {"worker": outcome.name, "status": outcome.status})
        if head is not None and head != self._head:
            self._head = head
            self._to.head.set(head, self._policy)
            self._staleness.clear()
        others = {version for version in held.values() if version is not None and version != head}
        if not others <= self._staleness.keys():
            self._staleness = staleness(others)
        for name, version in held.items():
            stale = 0 if version == head else self._staleness.get(version) if version is not None else None
            self._tell(name, _number(version), _number(stale))
        for name in self._told.keys() - held.keys():
            self._tell(name, math.nan, math.nan)
            del self._told[name]

    def _tell(self, worker: str, version: float, stale: float) -> None:
        before = self._told.get(worker, (None, None))
        tags = self._policy | {"worker": worker}
        # By text, since NaN is not equal to itself.
        if str(before[0]) != str(version):
            self._to.version.set(version, tags)
        if str(before[1]) != str(stale):
            self._to.staleness.set(stale, tags)
        self._told[worker] = (version, stale)


def _number(value: int | None) -> float:
    return math.nan if value is None else float(value)

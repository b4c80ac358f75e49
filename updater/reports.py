"""What callers of an updater receive."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from weightledger.registry.errors import NotFoundError, SyncError
from weightledger.registry.records import Record, html_table

Status = Literal["synced", "current", "skipped", "superseded", "refused", "failed", "timeout", "dead"]

_NAMED = 3
"""Workers named in one line for each kind of failure."""

FAILURES: frozenset[Status] = frozenset({"refused", "failed", "timeout", "dead"})


@dataclass(frozen=True)
class WorkerOutcome(Record):
    """What one update did to one worker."""

    name: str
    status: Status
    """`synced`: confirmed its target now. `current`: held it already, no weights were sent. `skipped`: passed by, by
    the interval. `superseded`: a newer push took its place. `refused`: the version has NaN or infinity. `failed`: it
    kept its old weights, or it is unknown if its own `apply` raised. `timeout`: no answer, unknown. `dead`."""
    held: int | None
    """Version that it is known to hold now; None when that is not known."""
    target: int | None
    """Version that it should hold."""
    error: str
    """What went wrong, in words; empty when nothing did."""
    seconds: float
    """From the push to its receipt, 0 when none was sent."""
    rejected_first: bool = False
    """Whether the worker's own code rejected the first weights that it was sent by this updater: they do not fit, the
    policy is not found, or `apply` raised. The next ones will hardly fare better."""

    def __repr__(self) -> str:
        held = "holds nothing known" if self.held is None else f"holds v{self.held}"
        error = f": {self.error}" if self.error else ""
        return f"<WorkerOutcome {self.name} {self.status}, {held}{error}>"


@dataclass(frozen=True)
class SyncReport(Record):
    """What one update did."""

    version: int | None
    """The head that the workers follow; None in an empty policy."""
    workers: Mapping[int, WorkerOutcome]
    """By worker id."""
    published: bool = False
    """Whether this update appended the version."""
    adopted: bool = False
    """Whether this update first took over a rollback made elsewhere: nothing was published then."""

    def __getitem__(self, worker: int | str) -> WorkerOutcome:
        """Return what was done to one worker, by its id or its name.

        Raises:
            NotFoundError: it was not named in this update.
        """
        found = self.workers.get(worker) if isinstance(worker, int) else None
        if found is None:
            found = next((each for each in self.workers.values() if each.name == worker), None)
        if found is None:
            names = ", ".join(f"{each.name} ({key})" for key, each in self.workers.items())
            raise NotFoundError(f"no worker {worker!r} in this report: it tells of {names or 'nobody'}")
        return found

    @property
    def ok(self) -> bool:
        """Whether no worker failed. Skipped and superseded ones did not fail."""
        return not self.failed

    @property
    def failed(self) -> dict[int, WorkerOutcome]:
        """The workers that are not where they should be, by id."""
        return {key: outcome for key, outcome in self.workers.items() if outcome.status in FAILURES}

    def raise_for_failures(self) -> None:
        """Raise if a worker failed.

        Raises:
            SyncError: names each failed worker, its status and why.
        """
        if self.failed:
            lines = [
                f"{outcome.name} ({key}): {outcome.status}, target v{outcome.target}, "
                f"{'what it holds is not known' if outcome.held is None else f'holds v{outcome.held}'}"
                f"{': ' + outcome.error if outcome.error else ''}"
                for key, outcome in self.failed.items()
            ]
            raise SyncError(
                f"{len(lines)} of {len(self.workers)} workers did not confirm their target:\n  "
                + "\n  ".join(lines)
            )

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON-ready values."""
        return super().to_dict() | {"ok": self.ok}

    def __str__(self) -> str:
        """Return one line that a person reads: `v101: 996 synced, 3 timeout (env-3, env-7, env-9)`."""
        by_status: dict[Status, list[str]] = {}
        for outcome in self.workers.values():
            by_status.setdefault(outcome.status, []).append(outcome.name)
        parts = []
        for status, names in by_status.items():
            shown = ", ".join([*names[:_NAMED], *(["…"] if len(names) > _NAMED else [])])
            parts.append(f"{len(names)} {status}" + (f" ({shown})" if status in FAILURES else ""))
        head = "no version" if self.version is None else f"v{self.version}"
        return f"{head}: {', '.join(parts) or 'no workers'}"

    def __repr__(self) -> str:
        return f"<SyncReport {self}>"

    def _repr_html_(self) -> str:
        """Return the outcomes as a table, for notebooks."""
        columns = ("name", "status", "held", "target", "error")
        rows = (
            ["–" if (value := getattr(outcome, name)) is None else str(value) for name in columns]
            for outcome in self.workers.values()
        )
        return html_table(rows, head=columns)


@dataclass(frozen=True)
class Held(Record):
    """What a probe found in one worker."""

    name: str
    version: int | None
    """Version by the worker's own note; None when it has none."""
    digest: str | None
    """Digest of the weights that really are in its module; None when they could not be read."""
    matches: bool
    """Whether these are the registry's version of that number, but for `buffers`."""
    drift: tuple[str, ...]
    """Names of the tensors that differ from it and should not."""
    incarnation: str | None
    error: str
    buffers: tuple[str, ...] = ()
    """Names of the tensors that differ, as they may: buffers and extra state, which a module's own forward writes
    (running statistics, exploration rates), and what `ignore=` names."""

    def __repr__(self) -> str:
        version = "nothing known" if self.version is None else f"v{self.version}"
        found = "matches" if self.matches else self.error or "does not match"
        return f"<Held {self.name} {version}: {found}>"

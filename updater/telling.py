"""How an adapter tells of workers that did not get their weights, where its loop drops the report.

Rules kept here
- A push that failed is never silent: it is a warning, or an error where the caller asked for one.
- A worker whose own code rejects the first weights that it is sent will reject the next ones, too: always an error.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any, Literal, get_args

from weightledger.updater.reports import SyncReport

OnFailure = Literal["warn", "raise"]
"""What an adapter does when a worker did not get its weights."""


class SyncWarning(UserWarning):
    """A worker did not get its weights, and nobody reads the report that says so."""


def check_on_failure(value: Any) -> OnFailure:
    """Return `on_failure=` if it is a value that adapters understand.

    Raises:
        ValueError: it is none.
    """
    if value not in get_args(OnFailure):
        raise ValueError(f"on_failure must be 'warn' or 'raise', found {value!r}")
    return value  # type: ignore[no-any-return]


def tell_failures(reports: SyncReport | Iterable[SyncReport], on_failure: OnFailure) -> None:
    """Tell of the workers that did not get their weights. The record has them already, and the others were updated.

    Args:
        reports: what one update did, or each of several series' updates.
        on_failure: `"raise"` raises for each failure; `"warn"` only for a worker whose own code rejected the first
            weights that it was sent.

    Raises:
        SyncError: names the failed workers, their status and why.
    """
    failed = [
        report for report in ([reports] if isinstance(reports, SyncReport) else reports) if not report.ok
    ]
    for report in failed:
        if on_failure == "raise" or any(outcome.rejected_first for outcome in report.failed.values()):
            report.raise_for_failures()
    for report in failed:
        warnings.warn(failures_of(report), SyncWarning, stacklevel=3)


def failures_of(report: SyncReport) -> str:
    """Tell of a report's failures in one line; empty when there are none.

    It says nothing that differs from one update to the next, so that Python shows a failure that lasts only once.
    """
    if report.ok:
        return ""
    told = "; ".join(
        f"{outcome.name}: {outcome.status}: {' '.join(outcome.error.split())}"
        for outcome in report.failed.values()
    )
    return f"{len(report.failed)} of {len(report.workers)} workers did not get their weights ({told})"

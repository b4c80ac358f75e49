"""Which updater of this process steers which worker. Of other processes the registry tells."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from typing import Any, Final

from weightledger.registry.errors import InUseError
from weightledger.updater.messages import Series

_Worker = tuple[str, Any]
"""Lasting name, and what tells its handle from all others."""

_owners: Final[weakref.WeakValueDictionary[tuple[Series, str, Any], Any]] = weakref.WeakValueDictionary()
_asking: Final = threading.Lock()


def reserve(owner: Any, series: Series, workers: Iterable[_Worker]) -> None:
    """Let an updater steer workers of a series.

    Raises:
        InUseError: another live updater steers one of them, under this name or another. Nothing is reserved then.
    """
    wanted = list(workers)
    with _asking:
        for name, identity in wanted:
            other = _owners.get((series, "name", name))
            if other is not None and other is not owner:
                raise InUseError(
                    f"worker {name!r} of policy {series[1]!r} is steered by {other!r} of this process; close that "
                    "updater, or give this one other names="
                )
            other = _owners.get((series, "handle", identity))
            if other is not None and other is not owner:
                # Under two names it would be sent two targets, and each updater would believe its own.
                raise InUseError(
                    f"worker {name!r} of policy {series[1]!r} is steered by {other!r} of this process, under another "
                    "name; close that updater first"
                )
        for worker in wanted:
            _owners.update(dict.fromkeys(_keys(series, worker), owner))


def release(series: Series, workers: Iterable[_Worker]) -> None:
    """Let others steer them."""
    with _asking:
        for worker in workers:
            for key in _keys(series, worker):
                _owners.pop(key, None)


def _keys(series: Series, worker: _Worker) -> list[tuple[Series, str, Any]]:
    name, identity = worker
    return [(series, "name", name), (series, "handle", identity)]

"""Which updater of this process steers which worker. Other processes are told by the registry."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Final

from weightledger.registry.errors import InUseError
from weightledger.updater.push import Series

_owners: Final[weakref.WeakValueDictionary[tuple[Series, str], Any]] = weakref.WeakValueDictionary()
_asking: Final = threading.Lock()


def reserve(owner: Any, series: Series, names: Sequence[str]) -> None:
    """Let an updater steer workers of a series, by their lasting names.

    Raises:
        InUseError: another live updater steers one of them. Nothing is reserved then.
    """
    with _asking:
        for name in names:
            other = _owners.get((series, name))
            if other is not None and other is not owner:
                raise InUseError(
                    f"worker {name!r} of policy {series[1]!r} is steered by {other!r} of this process; close that "
                    "updater, or give this one other names="
                )
        _owners.update({(series, name): owner for name in names})


def release(series: Series, names: Iterable[str]) -> None:
    """Let others steer them."""
    with _asking:
        for name in names:
            _owners.pop((series, name), None)

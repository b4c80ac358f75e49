"""The connection to Ray that an updater works by.

Whatever is called here never makes Ray start a cluster of its own, as its public functions do when there is none: an
update in the background may outlive `ray.shutdown()`, and what is started then has none of the workers. Nor does a push
go to a cluster that came afterwards.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Final, TypeVar

import ray

from weightledger.registry.errors import SyncError

_T = TypeVar("_T")

# Without the part that connects first.
ray_get: Final = inspect.unwrap(ray.get)
ray_put: Final = inspect.unwrap(ray.put)
ray_wait: Final = inspect.unwrap(ray.wait)
_context: Final = inspect.unwrap(ray.get_runtime_context)


class ConnectionLostError(SyncError):
    """Ray was shut down, or is connected to another cluster, since the updater got its workers."""


class Connection:
    """One connection of this process to a cluster. It begins with the first worker."""

    def __init__(self) -> None:
        self._name: str | None = None

    def begin(self) -> None:
        """Remember the connection that there is now, if none is known yet."""
        if self._name is None:
            self._name = _current()

    @property
    def is_lost(self) -> bool:
        """Whether it ended, so that no worker can be reached any more."""
        return self._name is not None and _current() != self._name

    def check(self) -> None:
        """Refuse to go on without it.

        Raises:
            ConnectionLostError: it ended.
        """
        if self.is_lost:
            raise ConnectionLostError(
                "Ray was shut down, or is connected to another cluster, since the updater got its workers, so none of "
                "them can be reached"
            )

    def call(self, function: Callable[..., _T], *arguments: Any, **options: Any) -> _T:
        """Call a function that needs the connection.

        Raises:
            ConnectionLostError: it ended before, or meanwhile.
        """
        self.check()
        try:
            return function(*arguments, **options)
        except (Exception, SystemExit):
            # Ray ends a thread that waits for an answer when it is shut down, or says that it is not connected.
            self.check()
            raise


def _current() -> str | None:
    if not ray.is_initialized():
        return None
    try:
        context = _context()
        return f"{context.get_session_name()} {context.get_job_id()}"
    except (AttributeError, RuntimeError):
        # It ends at this moment.
        return None

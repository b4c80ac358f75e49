"""Updates that nobody waits for: the future that stands for one, and tells of a failure that nobody asked for."""

from __future__ import annotations

import atexit
import warnings
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Final

from weightledger.registry.logs import log
from weightledger.updater.reports import SyncReport
from weightledger.updater.telling import SyncWarning, failures_of

_alive: Final[weakref.WeakSet[UpdateFuture]] = weakref.WeakSet()


class UpdateFuture(Future[SyncReport]):
    """The report to come of an update with `wait=False`.

    If the update failed and nobody has asked for its result by the time that the future is let go, that is a
    `SyncWarning`, as asyncio tells of exceptions that were never retrieved.
    """

    _asked = False

    def __init__(self) -> None:
        super().__init__()
        _alive.add(self)

    def result(self, timeout: float | None = None) -> SyncReport:
        """Return the report, or raise what the update raised; waits up to `timeout` seconds."""
        try:
            return super().result(timeout)
        finally:
            self._asked = self._asked or self.done()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return what the update raised, None if nothing; waits up to `timeout` seconds."""
        try:
            return super().exception(timeout)
        finally:
            self._asked = self._asked or self.done()

    def __del__(self) -> None:
        self.tell()

    def tell(self) -> None:
        """Tell of a failure that nobody has asked for so far, once."""
        if self._asked or not self.done() or self.cancelled():
            return
        self._asked = True
        error = super().exception()
        told = failures_of(super().result()) if error is None else f"{type(error).__name__}: {error}"
        if told:
            warnings.warn(
                f"an update with wait=False failed, and nobody asked for its result: {told}",
                SyncWarning,
                stacklevel=3,
            )


@atexit.register
def _tell_the_rest() -> None:
    # What lives until the program ends is let go when nobody can be told any more.
    for future in list(_alive):
        future.tell()


def fill(future: UpdateFuture, run: Callable[[], SyncReport]) -> None:
    """Run an update for its future, unless that was cancelled before."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        report = run()
    except BaseException as error:  # noqa: BLE001 - whoever asks for the result gets it
        # As text: a record that keeps the error would keep the future, which then could not tell.
        log.warning("an update in the background failed: %s", f"{type(error).__name__}: {error}")
        future.set_exception(error)
        # The error's traceback has this frame: the future would keep itself alive, and never tell.
        del future
    else:
        future.set_result(report)


class Background:
    """Runs updates one after the other in a thread of their own, and knows which have not ended."""

    def __init__(self) -> None:
        self._threads: ThreadPoolExecutor | None = None
        self._futures: list[UpdateFuture] = []

    def run(self, update: Callable[[], SyncReport], after: Callable[[], object]) -> Future[SyncReport]:
        """Run an update later.

        Args:
            after: called when it ended, however it ended, also when it was cancelled.
        """
        if self._threads is None:
            self._threads = ThreadPoolExecutor(1, thread_name_prefix="weightledger-update")
        self._futures = [future for future in self._futures if not future.done()]
        future = UpdateFuture()
        future.add_done_callback(lambda _: after())
        self._threads.submit(fill, future, update)
        self._futures.append(future)
        return future

    def drain(self) -> None:
        """Wait for the updates that have not ended; their errors belong to their futures."""
        wait(self._futures)
        self._futures.clear()

    def shut_down(self) -> None:
        """Take no more updates, and wait for those that there are."""
        if self._threads is not None:
            self._threads.shutdown()


def ended(report: SyncReport) -> Future[SyncReport]:
    """Return the future of an update that has ended."""
    future = UpdateFuture()
    future.set_result(report)
    return future

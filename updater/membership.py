"""Who is steered: names are claimed in the registry and in this process, before a worker is taken into the table."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from weightledger.registry import arguments
from weightledger.registry.errors import InUseError
from weightledger.registry.sync import Settlement, Sync
from weightledger.updater import claims
from weightledger.updater.transports.protocol import Transport
from weightledger.updater.workers.state import Trouble, WorkerState
from weightledger.updater.workers.table import WorkerTable


class Membership:
    """Lets workers in and out of an updater's table.

    Args:
        owner: the updater that steers them.
        settled: waits until no update is in flight.
    """

    def __init__(
        self,
        owner: Any,
        sync: Sync,
        table: WorkerTable,
        transport: Transport,
        settled: Callable[[], object],
    ) -> None:
        self._owner = owner
        self._sync = sync
        self._table = table
        self._transport = transport
        self._settled = settled

    def add(self, handles: Sequence[Any], names: Sequence[str], *, worker_id: int | None = None) -> list[int]:
        """Steer more workers.

        Args:
            worker_id: the id of a single one that has an id already.

        Raises:
            InUseError: a name or a worker is steered by somebody else, or bears another name here.
        """
        for name in names:
            arguments.name("worker", name)
        self._transport.begin()
        self._check_once(handles, names)
        self._free(names)
        self._table.check_names(names)
        places = [self._place(handle, name) for handle, name in zip(handles, names, strict=True)]
        claims.reserve(self._owner, self._sync.series, places)
        try:
            found = self._sync.claim(names)
        except BaseException:
            claims.release(self._sync.series, places)
            raise
        return [
            self._table.add(claim, handle, worker_id).id for handle, claim in zip(handles, found, strict=True)
        ]

    def remove(self, worker: WorkerState) -> None:
        """Stop steering a worker; its holding ends as `removed`."""
        self._let_go(worker)
        self._sync.write(settlements=[[self._table.removed(worker)]])

    def leave(self, why: str) -> None:
        """Say that nobody steers these workers any more; what they were last known to hold stays on record."""
        claims.release(self._sync.series, [self._place(worker.handle, worker.name) for worker in self._table])
        self._sync.leave([worker.row for worker in self._table if not worker.gone], why)

    def _check_once(self, handles: Sequence[Any], names: Sequence[str]) -> None:
        # One worker has one policy: under two names it would be sent two targets, and only the later one is true.
        owners = {self._transport.identity(worker.handle): worker.name for worker in self._table}
        for handle, name in zip(handles, names, strict=True):
            owner = owners.setdefault(self._transport.identity(handle), name)
            if owner != name:
                raise InUseError(
                    f"worker {name!r} is the same actor as worker {owner!r} ({handle!r}); give each actor once"
                )

    def _free(self, names: Collection[str]) -> None:
        """Take names from workers that are dead: whoever comes in such a worker's place may bear its name."""
        bearers = self._table.named(names)
        if not bearers:
            return
        self._settled()
        found = self._transport.incarnations({worker.id: worker.handle for worker in bearers})
        ended: list[Settlement] = []
        for worker in bearers:
            state = found.get(worker.id)
            if isinstance(state, Trouble) and state.kind == "dead":
                ended += self._table.died(worker, state)
                self._let_go(worker)
                self._table.remove(worker)
        self._sync.write(settlements=[ended])

    def _let_go(self, worker: WorkerState) -> None:
        claims.release(self._sync.series, [self._place(worker.handle, worker.name)])

    def _place(self, handle: Any, name: str) -> tuple[str, Any]:
        return name, self._transport.identity(handle)

"""What an updater remembers of its workers while it lives. The database is the record; this is the working copy."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from weightledger.registry import arguments
from weightledger.registry.errors import InUseError, NotFoundError
from weightledger.registry.log.fleet import Stretch
from weightledger.updater.plan import Known
from weightledger.updater.push import Note, Push

WorkerId = int | str
"""A worker's id, or its name."""
WorkerIds = WorkerId | Iterable[WorkerId]


@dataclass
class Flight:
    """A push that left and was not answered yet."""

    push: Push
    handle: Any
    """What the transport gave back: a receipt, a future, an object reference."""
    pinned: bool
    started: float = field(default_factory=time.perf_counter)
    told_silent: bool = False
    """Whether the record already says that it was not answered in time."""


@dataclass
class Seat:
    """One worker, from `add_worker` to `remove_worker`."""

    id: int
    name: str
    handle: Any
    row: int
    """Key of its row in the registry."""
    known: Known | None = None
    open_held: Stretch | None = None
    """The open confirmed row that the registry has of it."""
    open_pending: tuple[Stretch, ...] = ()
    """Open rows of pushes that earlier updaters left unsettled, oldest first; its own push is `flight`."""
    flight: Flight | None = None
    question: Any = None
    """What the transport gave back for a question that was not answered yet."""
    passed_by: int = 0
    """Calls that named it and passed it by since its last receipt."""
    owed: bool = False
    """Its last push failed: it is sent the bytes again, and the interval does not pass it by."""
    took: bool = False
    """It has confirmed a push of this updater before."""
    gone: bool = False
    """It died for good, as far as is known."""


class Seats:
    """All workers of an updater. Ids are given once and never again, so they stay stable while workers come and go."""

    def __init__(self) -> None:
        self._seats: dict[int, Seat] = {}
        self._by_name: dict[str, Seat] = {}
        self._next = 0

    def __len__(self) -> int:
        return len(self._seats)

    def __iter__(self) -> Iterator[Seat]:
        return iter(list(self._seats.values()))

    def __contains__(self, worker_id: object) -> bool:
        return worker_id in self._seats

    def ids(self) -> list[int]:
        """Return the ids in the order in which the workers were added."""
        return list(self._seats)

    def next_id(self) -> int:
        """Return the id that the next worker gets."""
        return self._next

    def check_names(self, names: Iterable[str]) -> None:
        """Refuse a name that another worker of this updater bears.

        Raises:
            InUseError: two live workers would share one name.
            ValueError: it is no name.
        """
        taken = set(self._by_name)
        for name in names:
            arguments.name("worker", name)
            if name in taken:
                raise InUseError(
                    f"two workers are called {name!r}; what a worker holds is recorded by name, so give each its own "
                    "with names="
                )
            taken.add(name)

    def add(self, name: str, handle: Any, row: int, worker_id: int | None = None) -> Seat:
        """Give a worker the next id, or the one that it has already."""
        seat = Seat(self._next if worker_id is None else worker_id, name, handle, row)
        self._seats[seat.id] = self._by_name[name] = seat
        self._next = max(self._next, seat.id + 1)
        return seat

    def remove(self, worker: WorkerId) -> Seat:
        """Forget a worker; its id is not given again."""
        seat = self.get(worker)
        del self._seats[seat.id], self._by_name[seat.name]
        return seat

    def get(self, worker: WorkerId) -> Seat:
        """Return a worker by its id or its name.

        Raises:
            NotFoundError: there is none.
        """
        found = self._seats.get(worker) if type(worker) is int else self._find(worker)
        if found is None:
            named = isinstance(worker, int) and not isinstance(worker, bool) and abs(worker) <= arguments.MOST
            asked = str(worker) if named else arguments.shown(worker)
            raise NotFoundError(
                f"no worker {asked}: worker ids are {self.ids()}, their names {list(self._by_name)}"
            )
        return found

    def _find(self, worker: Any) -> Seat | None:
        if isinstance(worker, str):
            return self._by_name.get(worker)
        try:
            return self._seats.get(arguments.integer("a worker id", worker))
        except TypeError:
            return None


def stretch_of(note: Note, incarnation: str) -> Stretch:
    """Turn a worker's own note into the row that stands for it."""
    return Stretch(note.version, note.digest, note.sent_digest, note.order, note.run, incarnation)

"""One RLModule's weights, from the learner to the env runners: what an `RLlibUpdater` has one of for each module.

Rules kept here
- Env runners get the inference-only state; the learner's whole module and its optimizers are the version's extra state.
- Every push carries a number higher than all before it to that env runner, and the learner counts on from there.
- A learner that went back to an older version's weights is recorded as a rollback, however it was restored.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from ray.actor import ActorHandle
from sqlalchemy import Connection, func, select

from weightledger.registry import Registry
from weightledger.registry.errors import ConflictError, NotFoundError
from weightledger.registry.log.models import Snapshot, VersionRow
from weightledger.registry.log.refs import Ref
from weightledger.registry.records import Version
from weightledger.registry.weights.live import live_digest
from weightledger.registry.weights.payload import Payload
from weightledger.registry.weights.restore import copy_into
from weightledger.updater.core import RayRemoteWeightUpdater
from weightledger.updater.push import Probe, Push
from weightledger.updater.receiver import incarnation
from weightledger.updater.reports import SyncReport
from weightledger.updater.rllib_learners import Learners
from weightledger.updater.rllib_runner import ModuleOf, receive_in_runner
from weightledger.updater.seats import Seat, WorkerIds
from weightledger.updater.server import ServerWeights, is_from_outside
from weightledger.updater.settling import Trouble
from weightledger.updater.starting import Start

Place = tuple[str, int]
"""Which env runner: `train` or `eval`, and RLlib's index of it; 0 is the one in this process."""


class ModuleUpdater(RayRemoteWeightUpdater):
    """The updater of one RLModule: a `RayRemoteWeightUpdater` whose server weights are a learner's.

    An `RLlibUpdater` makes one a module and gives it its workers. Everything that an updater does is here: `pin`,
    `rollback`, `probe`, `sync`.

    Args:
        learners: where the weights come from, and go back to.
        module_id: which module.
        registry: where versions are kept.
        options: as in `RayRemoteWeightUpdater`; `extra` is the learner's own.
        start: how the training begins on a policy that has versions; it is looked at in the first call.
        on_rollback: called with the version after the learner was restored to it.
    """

    # RLlib builds an Algorithm first and restores it afterwards.
    begins_at_once = False
    # RLlib's steps advance also while it trains other modules, or nothing yet.
    tells_if_stuck = False

    def __init__(
        self,
        learners: Learners,
        module_id: str,
        *,
        registry: Registry,
        start: Start | None = None,
        on_rollback: Callable[[Version], object] | None = None,
        **options: Any,
    ) -> None:
        self.learners = learners
        self.module_id = module_id
        self.places: dict[Place, int] = {}
        """The worker id of each env runner."""
        self._numbers: dict[int, int] = {}
        self._counted: int | None = None
        self._whole: tuple[int, dict[str, Any]] | None = None
        """The learner's state of a version that is about to be restored, with its number."""
        super().__init__(
            learners.weights(module_id),
            [],
            registry=registry,
            locate=ModuleOf(module_id),
            extra=functools.partial(learners.whole, module_id),
            on_rollback=on_rollback,
            start=start,
            **options,
        )

    def update_weights(
        self,
        weights: Any = None,
        worker_ids: WorkerIds | None = None,
        *,
        restored: bool = False,
        **options: Any,
    ) -> Any:
        """Publish the learner's weights if they changed, and bring env runners to their targets.

        A learner that holds an older version's weights again went back to it, for instance by `restore_from_path`:
        that is recorded as a rollback, so the branch in between is abandoned.

        Args:
            weights: as in `RayRemoteWeightUpdater.update_weights`; so are all others, and what is raised.
            restored: the learner was just restored by other means.

        Raises:
            ConflictError: also when `start="head"` would replace what the learner was just restored to, and no version
                has it.
        """
        with self._caller:
            if weights is None:
                self.refresh()
                if restored and self._origin is None:
                    self._check_restored()
                self._begin_training()
                # Weights of which nobody said that they were restored may be those of any new training.
                if self._origin == "head" or (restored and self._origin == "unknown"):
                    options["force"] = self._record_return() or options.get("force", False)
            return super().update_weights(weights, worker_ids, **options)

    __call__ = update_weights

    def rollback(self, to: Ref | None = None, reason: str = "") -> SyncReport:
        """Go back to an older version: the learner whole, with its optimizers, and every unpinned env runner.

        Args:
            to: as in `Registry.rollback`.
            reason: for the log.

        Raises:
            NotFoundError: as in `RayRemoteWeightUpdater.rollback`; so are `InvalidWeightsError` and `ConflictError`.
        """
        with self._caller:
            self.refresh()
            return super().rollback(to, reason)

    def adopt(self) -> Version:
        """Take over a head that another run published: the learner is restored to it, with its optimizers."""
        with self._caller:
            self.refresh()
            return super().adopt()

    def refresh(self) -> None:
        """Look at the learner's weights; its module may be another one than before."""
        self.policy_weights = self.learners.weights(self.module_id)

    def seats_at(self, place: Place, handle: Any) -> bool:
        """Tell whether this env runner is steered."""
        return place in self.places and self.seats.get(self.places[place]).handle is handle

    def place(self, wanted: Mapping[Place, tuple[str, Any]]) -> None:
        """Steer exactly these env runners, by name and handle. Those that are known already keep their ids."""
        for place, worker_id in list(self.places.items()):
            if place not in wanted or not self.seats_at(place, wanted[place][1]):
                self.remove_worker(worker_id)
                del self.places[place]
        new = [place for place in wanted if place not in self.places]
        if new:
            names, handles = zip(*(wanted[place] for place in new), strict=True)
            self.places |= zip(new, self._add_workers(handles, names), strict=True)

    def forget(self, places: Collection[Place]) -> None:
        """Believe nothing of env runners that RLlib wrote into; they are sent their target at the next update."""
        for place in places:
            if place in self.places:
                self.seats.get(self.places[place]).known = None

    # ------------------------------------------------------------------ the transport

    def _run(self, request: Any) -> SyncReport:
        with self._running:
            self._counted = None
            return super()._run(request)

    def _sync_weights_with_worker(self, worker_id: int, server_weights: ServerWeights) -> Any:
        """Start one push: to an actor, or by a plain call to the env runner in this process."""
        if is_from_outside(server_weights):
            return self._push_alone(worker_id, server_weights)
        handle, push, content = self.seats.get(worker_id).handle, server_weights.push, server_weights.handle
        assert push is not None
        number = self._next_number(worker_id) if isinstance(push, Push) else 0
        if is_actor(handle):
            self._connection.check()
            return handle.__ray_call__.remote(receive_in_runner, push, content, number)
        if content is not None:
            content = self._fetch(content)
            if content is None:
                return Trouble("bytes_lost", "the object store has lost the weights")
        return receive_in_runner(handle, push, content, number)

    def _ask(self, worker_id: int, question: Probe) -> Any:
        return self._sync_weights_with_worker(worker_id, ServerWeights.asking(question))

    def _next_number(self, worker_id: int) -> int:
        """Return RLlib's number for a push: higher than that of any before it to the same env runner.

        While training goes forward it is the learner's own, so that RLlib's metrics stay what they were.
        """
        if self._counted is None:
            self._counted = self.learners.number()
        number = self._numbers[worker_id] = max(self._counted, self._numbers.get(worker_id, 0) + 1)
        if number > self._counted:
            # What RLlib counts next is to be higher still, or an env runner let go of would not load it.
            self.learners.raise_number(number)
            self._counted = number
        return number

    def _find_lives(self, seats: Sequence[Seat]) -> dict[int, str | Trouble]:
        here: dict[int, str | Trouble] = {
            seat.id: incarnation() for seat in seats if not is_actor(seat.handle)
        }
        return here | super()._find_lives([seat for seat in seats if seat.id not in here])

    # ------------------------------------------------------------------ the learner

    def _record_return(self) -> bool:
        """Record that the learner went back to an older version by other means than ours; tells whether it did."""
        self._drain()
        ledger, head = self.registry.ledger, self.head
        if head is None:
            return False
        digest = live_digest(self.policy_weights)[0]
        with ledger.reading() as conn:
            # Whoever moved the head meanwhile is followed, or refused, by the update itself.
            if digest == head.digest or ledger.head_number(conn) != head.number:
                return False
            number = self._find_version(conn, digest)
        if number is None:
            return False
        version = self.registry.rollback(
            number, reason="the learner was restored to these weights", expected_head=head.number
        )
        self._believe(version)
        self._origin = "head"
        self._note_origin(version.number, version.digest)
        return True

    def _find_version(self, conn: Connection, digest: str) -> int | None:
        """Return the newest stored version of some content."""
        policy = self.registry.ledger.find_policy(conn)
        if policy is None:
            return None
        found: int | None = conn.scalar(
            select(func.max(VersionRow.number))
            .join(Snapshot, Snapshot.id == VersionRow.snapshot_id)
            .where(
                VersionRow.policy_id == policy.id,
                VersionRow.state == "stored",
                VersionRow.digest == digest,
                Snapshot.stored,
            )
        )
        return found

    def _check_restored(self) -> None:
        """Refuse to replace what the learner was restored to with the head, if the registry does not have it."""
        ledger = self.registry.ledger
        if self._start != "head":
            return
        digest = live_digest(self.policy_weights)[0]
        with ledger.reading() as conn:
            head = ledger.head_number(conn)
            if head is None or self._find_version(conn, digest) is not None:
                return
        raise ConflictError(
            f"the learner's module {self.module_id!r} was restored to weights that are no version of policy "
            f'{ledger.policy!r}, and start="head" would replace them with v{head}; nothing was changed. '
            'start="continue" goes on from them, "new" begins a new line with them'
        )

    def _anchor(self) -> object:
        # The learner's tensors are looked at anew each time, or are another process's.
        return self.learners.group

    def _check_accepts(self, version: Version, payload: Payload) -> None:
        super()._check_accepts(version, payload)
        whole = self._load_whole(version)
        if whole is not None:
            self.learners.check(self.module_id, whole)

    def _load_whole(self, version: Version) -> dict[str, Any] | None:
        """Return the learner's state that a version was published with, or the one that it restores."""
        number = version.restores or version.number
        if self._whole is None or self._whole[0] != number:
            try:
                self._whole = number, self.registry.load_extra(version)
            except NotFoundError:
                return None
        return self._whole[1]

    def _restore_server(self, version: Version, payload: Payload) -> None:
        copy_into(payload, self.policy_weights)
        # Before it is believed: should a learner not answer, the next update sees the rollback again.
        self._restore_learner(version)
        self._believe(version)

    def _restore_learner(self, version: Version) -> None:
        whole = self._load_whole(version)
        self._whole = None
        if whole is None:
            whole = {"module": self.policy_weights}
            warnings.warn(
                f"v{version.number} of policy {version.policy!r} was published without the learner's state: of module "
                f"{self.module_id!r} only the weights that env runners have were restored, and neither its other "
                "weights nor its optimizers",
                stacklevel=2,
            )
        left = self.learners.restore(self.module_id, whole)
        if left and "optimizers" in whole:
            warnings.warn(
                f"of module {self.module_id!r} the weights of v{version.number} of policy {version.policy!r} were "
                f"restored, and all else but {', '.join(left)}",
                stacklevel=2,
            )


def is_actor(handle: Any) -> bool:
    """Tell whether an env runner is an actor, and not in this process."""
    return isinstance(handle, ActorHandle)

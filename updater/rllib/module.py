"""One RLModule's weights, from the learner to the env runners: what an `RLlibUpdater` has one of for each module.

Rules kept here
- Env runners get the inference-only state; the learner's whole module and its optimizers are the version's extra state.
- Every push carries a number higher than all before it to that env runner, and the learner counts on from there.
- A learner that went back to an older version's weights is recorded as a rollback, however it was restored.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any

from weightledger.registry import Registry
from weightledger.registry.errors import ConflictError
from weightledger.registry.records import Version
from weightledger.registry.sync import Ref
from weightledger.updater.cycle import Request, Rollback
from weightledger.updater.ray_updater import RayRemoteWeightUpdater
from weightledger.updater.reports import SyncReport
from weightledger.updater.rllib.learners import Learners
from weightledger.updater.rllib.live import LearnerWeights
from weightledger.updater.rllib.runner import ModuleOf
from weightledger.updater.rllib.transport import RunnerTransport
from weightledger.updater.starting import Start
from weightledger.updater.workers.state import WorkerIds

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
                if restored and self.live.origin is None:
                    self._check_restored()
                self._begin_training()
                # Weights of which nobody said that they were restored may be those of any new training.
                if self.live.origin == "head" or (restored and self.live.origin == "unknown"):
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

    def steers(self, place: Place, handle: Any) -> bool:
        """Tell whether this env runner is steered."""
        return place in self.places and self.workers.get(self.places[place]).handle is handle

    def place(self, wanted: Mapping[Place, tuple[str, Any]]) -> None:
        """Steer exactly these env runners, by name and handle. Those that are known already keep their ids."""
        for place, worker_id in list(self.places.items()):
            if place not in wanted or not self.steers(place, wanted[place][1]):
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
                self.workers.doubted(self.workers.get(self.places[place]))

    # ------------------------------------------------------------------ the parts that differ

    def _make_live(self, weights: Any) -> LearnerWeights:
        return LearnerWeights(weights, self.record, self.learners, self.module_id)

    def _make_transport(self, timeout: float, count_bytes: Callable[[int], object] | None) -> RunnerTransport:
        return RunnerTransport(self.learners, timeout=timeout, count_bytes=count_bytes)

    # ------------------------------------------------------------------ the learner

    def _record_return(self) -> bool:
        """Record that the learner went back to an older version by other means than ours; tells whether it did."""
        self._drain()
        head = self.head
        if head is None:
            return False
        digest = self.live.digest()
        # Whoever moved the head meanwhile is followed, or refused, by the update itself.
        if digest == head.digest or self.record.moved(head) is not None:
            return False
        wanted = self.record.newest_with(digest)
        if wanted is None:
            return False
        self._run(Request(change=Rollback(wanted, None, "the learner was restored to these weights")))
        return True

    def _check_restored(self) -> None:
        """Refuse to replace what the learner was restored to with the head, if the registry does not have it."""
        head = self.record.head()
        if self._start != "head" or head is None or self.record.newest_with(self.live.digest()) is not None:
            return
        raise ConflictError(
            f"the learner's module {self.module_id!r} was restored to weights that are no version of policy "
            f'{self.record.policy!r}, and start="head" would replace them with v{head.number}; nothing was changed. '
            'start="continue" goes on from them, "new" begins a new line with them'
        )

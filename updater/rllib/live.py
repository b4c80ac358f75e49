"""The server weights of an RLModule: a learner's, which is restored whole, with its optimizers."""

from __future__ import annotations

import warnings
from typing import Any

from weightledger.registry.errors import NotFoundError
from weightledger.registry.records import Version
from weightledger.registry.sync import Sync
from weightledger.registry.weights import Payload, copy_into
from weightledger.updater.live import LiveWeights
from weightledger.updater.rllib.learners import Learners


class LearnerWeights(LiveWeights):
    """What env runners need of a learner's module; the rest of the learner goes back with it."""

    def __init__(self, weights: Any, sync: Sync, learners: Learners, module_id: str) -> None:
        super().__init__(weights, sync)
        self._registry = sync.registry
        self._learners = learners
        self._module_id = module_id
        self._whole: tuple[int, dict[str, Any]] | None = None
        """The learner's state of a version that is about to be restored, with its number."""

    @property
    def anchor(self) -> object:
        """The learners: their tensors are looked at anew each time, or are another process's."""
        return self._learners.group

    def check_accepts(self, version: Version, payload: Payload) -> None:
        """Make sure that the learner takes a version, too, before anything is changed."""
        super().check_accepts(version, payload)
        whole = self._load_whole(version)
        if whole is not None:
            self._learners.check(self._module_id, whole)

    def write(self, version: Version, payload: Payload) -> None:
        """Restore the learner. Should it not answer, the head is not believed, and the next update tries again."""
        copy_into(payload, self.weights)
        whole = self._load_whole(version)
        self._whole = None
        if whole is None:
            whole = {"module": self.weights}
            warnings.warn(
                f"v{version.number} of policy {version.policy!r} was published without the learner's state: of module "
                f"{self._module_id!r} only the weights that env runners have were restored, and neither its other "
                "weights nor its optimizers",
                stacklevel=2,
            )
        left = self._learners.restore(self._module_id, whole)
        if left and "optimizers" in whole:
            warnings.warn(
                f"of module {self._module_id!r} the weights of v{version.number} of policy {version.policy!r} were "
                f"restored, and all else but {', '.join(left)}",
                stacklevel=2,
            )

    def _load_whole(self, version: Version) -> dict[str, Any] | None:
        """Return the learner's state that a version was published with, or the one that it restores."""
        number = version.restores or version.number
        if self._whole is None or self._whole[0] != number:
            try:
                self._whole = number, self._registry.load_extra(version)
            except NotFoundError:
                return None
        return self._whole[1]

"""The server weights: what a training runs on, and which version it goes on from."""

from __future__ import annotations

from typing import Any

from weightledger.registry import origins
from weightledger.registry.errors import InvalidWeightsError
from weightledger.registry.records import Version
from weightledger.registry.sync import Sync, VersionInfo
from weightledger.registry.weights import (
    Content,
    Flattener,
    Payload,
    Plan,
    check_fit,
    copy_into,
    flatten,
    live_digest,
)
from weightledger.updater.starting import Origin, unsaid


class LiveWeights:
    """The live server weights of one updater. They are written in the caller's thread only, by `restore`.

    Args:
        weights: an `nn.Module`, TensorDict or mapping of tensors; None for an updater that follows others' publishes.
    """

    def __init__(self, weights: Any, sync: Sync) -> None:
        self.weights = weights
        self.head: VersionInfo | None = None
        """The head as the updater knows it, which the weights were trained from if `origin` says so."""
        self.origin: Origin | None = None
        """What the weights go on from; None until somebody has to know."""
        self._sync = sync
        self._flattener = Flattener()
        self._plans: dict[int, Plan] = {}

    @property
    def begins_line(self) -> bool:
        """Whether the next version that is published begins a new line."""
        return self.origin == "line"

    @property
    def anchor(self) -> object:
        """The object that tells these weights from all others of this process."""
        return self.weights

    # ------------------------------------------------------------------ reading them

    def flatten(self, weights: Any) -> Content:
        """Return weights, these or others, as named tensors."""
        # Only these are remembered: others would be kept alive by that.
        return self._flattener.flatten(weights) if weights is self.weights else flatten(weights)

    def digest(self) -> str:
        """Return the content digest.

        Raises:
            InvalidWeightsError: they cannot be a version.
        """
        return live_digest(self.weights)[0]

    def went_on_from(self, head: VersionInfo) -> bool:
        """Tell whether they are the head's, or were when this process last saw them."""
        if self._hold_as_noted(head):
            return True
        try:
            return self.digest() == head.digest
        except InvalidWeightsError:
            # They cannot be published either, which tells why.
            return False

    def _hold_as_noted(self, head: VersionInfo) -> bool:
        """Tell whether this process published or restored the head from or into them."""
        known = origins.find(self._sync.series, self.anchor)
        return known is not None and (known.number, known.digest) == (head.number, head.digest)

    def check_origin(self, weights: Any) -> None:
        """Refuse to publish weights of which nobody knows what they go on from, unless they are the head's.

        Raises:
            ConflictError: nobody said.
        """
        if self.origin != "unknown" or self.head is None:
            return
        # They may have been restored to the head after this updater was made.
        restored = weights is self.weights and self._hold_as_noted(self.head)
        if not restored and live_digest(weights)[0] != self.head.digest:
            raise unsaid(self._sync.policy, self.head.number)
        if weights is self.weights:
            self.origin = "head"

    def check_accepts(self, version: Version, payload: Payload) -> None:
        """Make sure that they take a version, before anything is changed.

        Raises:
            InvalidWeightsError: it does not fit.
        """
        check_fit(payload, self.weights, plans=self._own_plans())

    # ------------------------------------------------------------------ what becomes of them

    def restore(self, version: Version, payload: Payload) -> None:
        """Write a version into them, which is the head; training goes on from there."""
        self.write(version, payload)
        self.goes_on_from(version)

    def write(self, version: Version, payload: Payload) -> None:
        """Write a version's content into them, in place."""
        copy_into(payload, self.weights, plans=self._own_plans())

    def goes_on_from(self, version: Version) -> None:
        """Note that they hold the head's content, whatever they held before."""
        # Equal content is what was asked for, whatever the step.
        self.head = VersionInfo.of(version)._replace(step=None)
        self.origin = "head"
        self._note(self.head)

    def saw(self, head: Version) -> None:
        """Note a head that they have no part in."""
        self.head = VersionInfo.of(head)

    def published(self, version: VersionInfo, *, live: bool) -> None:
        """Note that this updater's own publish became the head.

        Args:
            live: whether these weights were published, and not others.
        """
        self.head, self.origin = version, "head"
        if live:
            self._note(version)

    def _note(self, version: VersionInfo) -> None:
        origins.note(self._sync.series, origins.Origin(version.number, version.digest), self.anchor)

    def _own_plans(self) -> dict[int, Plan]:
        """Return the checks that were made for these weights; those of others would keep them alive."""
        if id(self.weights) not in self._plans:
            self._plans.clear()
        return self._plans

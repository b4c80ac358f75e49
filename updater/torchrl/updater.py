"""TorchRL's `RayCollector` on the registry, by its `weight_updater=` or by its `weight_sync_schemes=`.

Rules kept here
- Both ways lead to the same updater and the same push.
- `update_policy_weights_` means what it says: a call by hand is passed by no interval, a version is brought as named.
- Nothing here is imported by `weightledger.updater`; TorchRL is needed only by those who import this module.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torchrl.weight_update import WeightSyncScheme  # type: ignore[import-untyped]

from weightledger.registry import Registry
from weightledger.registry.records import Version
from weightledger.registry.sync import Ref
from weightledger.updater.messages import Apply, Locate
from weightledger.updater.ray_updater import RayRemoteWeightUpdater
from weightledger.updater.reports import SyncReport
from weightledger.updater.starting import Start
from weightledger.updater.telling import OnFailure, SyncWarning, check_on_failure, tell_failures
from weightledger.updater.torchrl.collector import (
    after_loading,
    around_updates,
    before_collecting,
    check_collector,
    give_back,
    in_loop_of,
)
from weightledger.updater.torchrl.lineage_mask import lineage_mask
from weightledger.updater.torchrl.worker import (
    NO_VERSION,
    StampBatches,
    receive_in_collector,
    release,
    survive_errors,
)
from weightledger.updater.workers.state import WorkerIds

__all__ = [
    "NO_VERSION",
    "RayCollectorWeightSyncScheme",
    "RayCollectorWeightUpdater",
    "StampBatches",
    "lineage_mask",
]

_KEYWORDS = ("version", "force", "step", "metrics", "metadata", "message", "restructure")
"""What `update_policy_weights_` takes beyond TorchRL's own arguments."""


with warnings.catch_warnings():
    # TorchRL warns of each class that is made of this one, its own included: it means to keep schemes only.
    warnings.simplefilter("ignore", DeprecationWarning)
    from torchrl.collectors import WeightUpdaterBase  # type: ignore[import-untyped]

    class _Accepted(RayRemoteWeightUpdater, WeightUpdaterBase):  # type: ignore[misc]
        """An updater that TorchRL accepts as one of its own. All that both have is ours."""

        def __init_subclass__(cls) -> None:
            # Users' classes are made without that warning, which would name them and not what they can do about it.
            pass


class RayCollectorWeightUpdater(_Accepted):
    """The updater that a TorchRL `RayCollector` calls: `RayCollector(..., weight_updater=updater)`.

    It takes the collector's actors when the collector registers itself, and those that are added later at the next
    call. Then `collector.update_policy_weights_()` publishes and syncs; what came of it is in `last_report`.

    Args:
        policy_weights: the live server weights, which the learner trains: the module given to the collector as
            `policy=`, or with `policy_factory=` one of the same names.
        remote_collectors: actors to steer besides the collector's own.
        max_interval: exactly so many consecutive updates that the collector's own loop makes pass a worker by between
            two pushes; by default the collector's `max_weight_update_interval`.
        registry: where versions are kept.
        names: lasting names of the workers in the registry; by default `collector-<i>`.
        locate: where the policy is in a collector.
        apply: as in `RayRemoteWeightUpdater`; so are `timeout`, `cast`, `allow_nonfinite`, `extra`, `on_rollback`,
            `ignore`.
        start: how the training begins on a policy that has versions, as in `RayRemoteWeightUpdater`. It is looked at
            when the collector registers itself, once its workers' names are claimed.
        on_failure: TorchRL drops the report of `update_policy_weights_`, so a worker that did not get its weights is
            told as a `SyncWarning`, or with `"raise"` as a `SyncError`. A worker whose own code rejects the first
            weights that it is sent (they do not fit, no policy is found, `apply` raised) is an error either way.

    Example:
        ```python
        updater = RayCollectorWeightUpdater(policy, registry=Registry.open("runs/cartpole"), start="head")
        collector = RayCollector(environments, policy, weight_updater=updater, frames_per_batch=400)
        ```
    """

    _carry_out = staticmethod(receive_in_collector)
    # The workers come with the collector.
    begins_at_once = False

    def __init__(
        self,
        policy_weights: Any,
        remote_collectors: Sequence[Any] = (),
        max_interval: int | None = None,
        *,
        registry: Registry,
        names: Sequence[str] | None = None,
        locate: Locate = "policy",
        apply: Apply | None = None,
        timeout: float = 60.0,
        cast: bool = False,
        allow_nonfinite: bool | Collection[str] = False,
        extra: Callable[[], Any] | None = None,
        on_rollback: Callable[[Version], object] | None = None,
        ignore: Collection[str] = (),
        start: Start | None = None,
        on_failure: OnFailure = "warn",
    ) -> None:
        self.on_failure = check_on_failure(on_failure)
        super().__init__(
            policy_weights,
            (),
            0 if max_interval is None else max_interval,
            registry=registry,
            locate=locate,
            apply=apply,
            timeout=timeout,
            cast=cast,
            allow_nonfinite=allow_nonfinite,
            extra=extra,
            on_rollback=on_rollback,
            ignore=ignore,
            start=start,
        )
        self._names = None if names is None else list(names)
        self._follows_collector = max_interval is None
        self._by_hand = False
        self._take(remote_collectors)

    # ------------------------------------------------------------------ what TorchRL calls

    def __call__(
        self,
        policy_or_weights: Any = None,
        worker_ids: WorkerIds | None = None,
        *,
        version: Ref | None = None,
        force: bool = False,
        step: int | None = None,
        metrics: Mapping[str, Any] | None = None,
        metadata: Mapping[str, Any] | None = None,
        message: str = "",
        restructure: bool = False,
    ) -> SyncReport:
        """Do what `update_policy_weights_` was asked for.

        Args:
            policy_or_weights: publish these and sync them: a module, TensorDict or mapping. By default the live server
                weights, if they changed.
            worker_ids: only these workers, by their index in the collector; by default all.
            version: publish nothing, and bring the workers to this version once. Their targets stay: the next update
                brings them back to the head, unless `rollback` or `pin` says otherwise.
            force: as in `update_weights`; so are `step`, `metrics`, `metadata`, `message`, `restructure`.

        Raises:
            ConflictError: another run published. Nothing was changed; `adopt()` is the way out.
            InvalidWeightsError: the weights cannot be stored. Nothing was changed.
            NotFoundError: no such worker or version.
            SyncError: workers did not get their weights: see `on_failure`. The others were updated.
        """
        self._take_new()
        if version is not None:
            if policy_or_weights is not None:
                raise ValueError(
                    "update_policy_weights_ was given weights and a version; weights are published as the next "
                    "version, a version is brought to the workers as it is: give one of them"
                )
            report = self.sync(worker_ids, version)
        else:
            _check_one_policy(policy_or_weights)
            with self._caller:
                self._by_hand = not in_loop_of(self.collector)
                try:
                    report = self.update_weights(
                        policy_or_weights,
                        worker_ids,
                        force=force,
                        step=step,
                        metrics=metrics,
                        metadata=metadata,
                        message=message,
                        restructure=restructure,
                    )
                finally:
                    self._by_hand = False
        self._call_post_hooks()
        tell_failures(report, self.on_failure)
        return report

    def push_weights(self, policy_or_weights: Any = None, worker_ids: Any = None, **about: Any) -> Any:
        """Do what `update_policy_weights_` was asked for, under TorchRL's other name for it."""
        return self(policy_or_weights, worker_ids, **about)

    def register_collector(self, collector: Any) -> None:
        """Belong to a collector, and steer its actors. TorchRL calls this.

        Raises:
            InUseError: it belongs to another collector already, or another live updater steers workers of such names.
            InvalidWeightsError: `start="head"`, and the policy does not take the head. Nothing was changed.
            TypeError: no push could reach the collector's actors: see `check_collector`.
        """
        check_collector(collector)
        super().register_collector(collector)
        if self._follows_collector:
            self.max_interval = max(0, collector.max_weight_update_interval)
        self._take_new()
        try:
            with self._caller:
                self._begin_training()
        except BaseException:
            super().close()
            raise
        before_collecting(collector, self._begin)
        after_loading(collector, self._forget_all)

    def close(self) -> None:
        """Wait for what is in flight and let go of the workers. Closing twice is harmless."""
        if not self._closed and self._collector is None and not len(self.workers):
            warnings.warn(
                "no collector has ever taken this updater, so it has brought weights to nobody: RayCollector drops "
                "weight_updater= where weight_sync_schemes= is given, too",
                SyncWarning,
                stacklevel=2,
            )
        if not self._closed and self.is_connected:
            for handle in self.remote_collectors:
                # Nobody waits for it.
                handle.__ray_call__.remote(release)
        collector = self.collector
        if not self._closed and collector is not None and collector.weight_updater in (None, self):
            give_back(collector)
        super().close()

    def init_on_sender(self, *_: Any, **__: Any) -> None:
        """Refuse: this is what TorchRL asks of a scheme.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            "an updater is no scheme: give RayCollector weight_updater=updater, or "
            'weight_sync_schemes={"policy": RayCollectorWeightSyncScheme(updater)}'
        )

    @property
    def collectors(self) -> list[Any]:
        """The registered collector, in a list."""
        return [self.collector]

    def increment_version(self) -> None:
        """Refuse: a version is what was published, not a count.

        Raises:
            TypeError: always.
        """
        raise TypeError("versions are not counted up by hand; update_policy_weights_ publishes the next one")

    # ------------------------------------------------------------------ data

    def lineage_mask(self, batch: Any, key: Any = None) -> torch.Tensor:
        """Tell which frames of a batch come from versions of the head's lineage: see `lineage_mask`."""
        return lineage_mask(batch, self.registry, key=key)

    # ------------------------------------------------------------------ what differs from any other actor

    def all_worker_ids(self) -> list[int]:
        """Return the ids of all workers: their indices in the collector."""
        self._take_new()
        return super().all_worker_ids()

    def _begin(self, collector: Any) -> None:
        """Let no frame be played with weights that have no version; asked before each iteration."""
        if self._closed or collector.weight_updater not in (None, self):
            return
        with self._caller:
            _connect(collector)
            self._take_new()
            if self.last_report is None:
                collector.update_policy_weights_()
            elif unknown := [worker.id for worker in self.workers if worker.known is None]:
                # What the learner has by now is published when its owner says so.
                tell_failures(self.sync(unknown), self.on_failure)

    def _forget_all(self) -> None:
        with self._caller:
            if not self._closed:
                self._disbelieve(list(self.workers), "its collector's state was loaded, the policy with it")

    def _skip_update(self, worker_id: int) -> bool:
        """Tell whether the interval passes this worker by: never if the update was asked for by hand."""
        return not self._by_hand and super()._skip_update(worker_id)

    def _take_new(self) -> None:
        """Steer the actors that the collector has by now; at the end it has none, and what was known stays."""
        collector = self.collector
        if collector is not None and not self._closed:
            steered = set(self.remote_collectors)
            self._take([handle for handle in collector.remote_collectors if handle not in steered])

    def _take(self, handles: Sequence[Any]) -> None:
        if not handles:
            return
        self._add_workers(handles, self._names_for(handles))
        for handle in handles:
            # At once, since an environment may fail before the first push. Nobody waits for it: each push does it, too.
            handle.__ray_call__.remote(survive_errors)

    def _names_for(self, handles: Sequence[Any]) -> list[str]:
        if self._names is None:
            return self._default_names(handles)
        first = self.workers.next_id()
        if len(self._names) < first + len(handles):
            raise ValueError(
                f"names= must name every worker: the collector has {first + len(handles)}, "
                f"found {len(self._names)} names"
            )
        return self._names[first : first + len(handles)]


class RayCollectorWeightSyncScheme(WeightSyncScheme):  # type: ignore[misc]
    """The same updater in the form that TorchRL keeps: `RayCollector(..., weight_sync_schemes={"policy": scheme})`.

    The collector closes the updater when it shuts down.

    Args:
        updater: does the work; `update_policy_weights_` takes the same arguments as with `weight_updater=`.
    """

    def __init__(self, updater: RayCollectorWeightUpdater) -> None:
        super().__init__()
        self.updater: RayCollectorWeightUpdater | None = updater
        self._asked: dict[str, Any] = {}

    def send(self, weights: Any = None, worker_ids: WorkerIds | None = None) -> None:
        """Do what `update_policy_weights_` was asked for: see `RayCollectorWeightUpdater.__call__`."""
        assert self.updater is not None, "an actor's copy of the scheme sends nothing"
        self.updater(weights, worker_ids, **self._asked)

    def shutdown(self) -> None:
        """Close the updater."""
        super().shutdown()
        updater = self.__dict__.get("updater")
        if updater is not None:
            updater.close()

    def create_transport(self, **_: Any) -> Any:
        """Refuse: actors are called directly."""
        raise NotImplementedError("pushes are actor calls; there is no transport beside them")

    @property
    def model(self) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """None, so that TorchRL hands over no copy of the live weights where none were given."""
        return

    def __getstate__(self) -> dict[str, Any]:
        # Each actor is sent a copy, though it has nothing to do there.
        return super().__getstate__() | {"updater": None, "_asked": {}}  # type: ignore[no-any-return]

    def _init_on_sender_impl(self, model_id: str, context: Any = None, **_: Any) -> None:
        assert self.updater is not None
        self.model_id, self.context = model_id, context
        self.updater.register_collector(context)
        around_updates(context, self._update)

    def _init_on_receiver_impl(self, model_id: str, context: Any = None, **_: Any) -> None:
        self.model_id, self.context = model_id, context

    def _setup_connection_and_weights_on_sender_impl(self, **_: Any) -> None:
        pass

    def _setup_connection_and_weights_on_receiver_impl(self, **_: Any) -> None:
        pass

    def register_collector(self, _: Any) -> None:
        """Refuse: this is what TorchRL asks of an updater.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            "a scheme is no updater: give RayCollector "
            'weight_sync_schemes={"policy": scheme}, or weight_updater=scheme.updater'
        )

    def _update(self, collector: Any, method: Callable[..., object], *arguments: Any, **options: Any) -> None:
        """Let a collector's `update_policy_weights_` take our keywords: TorchRL drops them on the way to a scheme."""
        self._asked = {name: options.pop(name) for name in _KEYWORDS if name in options}
        _connect(collector)
        try:
            method(collector, *arguments, **options)
        finally:
            self._asked = {}


def _connect(collector: Any) -> None:
    """Say that schemes of ours are connected: TorchRL would wait without end for an actor that does not answer."""
    schemes = (collector._weight_sync_schemes or {}).values()
    if all(isinstance(scheme, RayCollectorWeightSyncScheme) for scheme in schemes):
        collector._weight_sync_initialized = True


def _check_one_policy(weights: Any) -> None:
    if isinstance(weights, Mapping) and len(weights) and all(isinstance(key, int) for key in weights):
        raise ValueError(
            f"expected the weights of one policy, found weights by worker index {sorted(weights)}; publish each as a "
            "version and pin its worker there, or give each worker a policy and an updater of its own"
        )

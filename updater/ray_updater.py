"""`RayRemoteWeightUpdater`: the updater for Ray actors of any class."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, ClassVar

from ray.actor import ActorHandle

from weightledger.registry import Registry, arguments
from weightledger.registry.records import Version
from weightledger.updater.in_worker.receiver import receive
from weightledger.updater.messages import Apply, Locate
from weightledger.updater.metrics import RayMetrics
from weightledger.updater.starting import Start
from weightledger.updater.transports.connection import ConnectionLostError
from weightledger.updater.transports.incarnations import actor_name
from weightledger.updater.transports.packing import CarryOut
from weightledger.updater.transports.ray_actors import RayTransport
from weightledger.updater.updater import Updater


class RayRemoteWeightUpdater(Updater):
    """Publishes server weights and brings Ray actors to their target version, on their own receipts.

    Args:
        policy_weights: the live server weights: an `nn.Module`, TensorDict or mapping of tensors.
        remote_collectors: actor handles, of any actor class; more come by `add_worker`.
        max_interval: exactly so many consecutive `update_weights` calls that name a worker pass it by between two
            pushes; 0 for none.
        registry: where versions are kept.
        names: lasting names of the workers in the registry; by default the actor's Ray name, else `collector-<i>`.
        locate: where the policy is in an actor: a dotted attribute, or a callable that is given the actor.
        apply: `apply(actor, weights, version)` for actors that load own, writable tensors in their own way; or
            `"load_state_dict"` for modules that do, by their method of that name.
        timeout: seconds that one call waits for workers, all of them together.
        cast: let workers convert to their own dtype; what was converted is recorded, and what that does not hold is
            refused.
        allow_nonfinite: send versions with NaN or infinity, and let `cast` make infinity; True, or globs of the tensor
            names that may hold them.
        extra: called at every publish; the mapping it returns is stored with the version (optimizer, counters).
        on_rollback: called with the version after the server weights were restored to it.
        ignore: globs of the names of tensors that the actors' own code writes: like buffers, they are no drift.
        start: how the training begins on a policy that has versions. `"head"` restores the server weights to the head
            and calls `on_rollback` at once, `"new"` begins a new line and abandons what was before, `"continue"` says
            that the server weights were restored already. On an empty policy all are the same, so that a script that
            can be resumed says `"head"` from its first run on. None is enough where it is plain: on an empty policy,
            while the content is the head's, or when this process published or restored the head from this very
            object; else the first publish is a `ConflictError`.

    Raises:
        InUseError: another live updater steers a worker of one of these names.
        InvalidWeightsError: `start="head"`, and the server weights do not fit the head, or it has NaN or infinity that
            is not allowed. Nothing was changed.

    Example:
        ```python
        updater = RayRemoteWeightUpdater(policy, workers, registry=Registry.open("runs/cartpole"), start="head")
        report = updater.update_weights(step=100, metrics={"reward": 87.0})
        updater.rollback(reason="reward collapsed")
        ```
    """

    _carry_out: ClassVar[CarryOut] = staticmethod(receive)
    """What is called in an actor, with the actor, an instruction and its bytes."""

    def __init__(
        self,
        policy_weights: Any,
        remote_collectors: Sequence[Any],
        max_interval: int = 0,
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
    ) -> None:
        if isinstance(remote_collectors, ActorHandle) or not isinstance(remote_collectors, Iterable):
            raise TypeError(
                f"remote_collectors must be a list of actor handles, found {arguments.shown(remote_collectors)}"
            )
        handles = [_checked(handle) for handle in remote_collectors]
        if isinstance(names, str):
            raise TypeError(f"names= must be a list of names, found the text {arguments.quoted(names)}")
        if names is not None and len(names) != len(handles):
            raise ValueError(
                f"names= must name every worker: expected {len(handles)} names, found {len(names)}"
            )
        metrics = RayMetrics(registry.policy) if isinstance(registry, Registry) else None
        transport = self._make_transport(timeout, None if metrics is None else metrics.put)
        super().__init__(
            policy_weights,
            registry=registry,
            transport=transport,
            max_interval=max_interval,
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
        self._observer, self._ray = metrics, transport
        if handles:
            self._add_workers(handles, list(names) if names is not None else self._default_names(handles))
        self._begin_or_close()

    @property
    def is_connected(self) -> bool:
        """Whether the actors can be reached: not after `ray.shutdown()`."""
        return not self._ray.connection.is_lost

    def _make_transport(self, timeout: float, count_bytes: Callable[[int], object] | None) -> RayTransport:
        return RayTransport(carry_out=type(self)._carry_out, timeout=timeout, count_bytes=count_bytes)

    @property
    def remote_collectors(self) -> list[Any]:
        """The actor handles, in the order of `all_worker_ids`."""
        return [worker.handle for worker in self.workers]

    def add_worker(self, handle: Any, name: str | None = None) -> int:
        """Steer one more actor, and bring it to its target at once if there is a version.

        Args:
            handle: the actor.
            name: its lasting name; by default the actor's Ray name, else `collector-<i>`. The name of a dead worker is
                free: what that one held ends as lost, and its id is not given again.

        Returns:
            Its id; what the first sync did to it is in `last_report`.

        Raises:
            InUseError: its name is taken by a live worker.
            ConflictError: as in `update_weights`; the actor is not steered then.
        """
        return self._join(_checked(handle), name if name is not None else self._default_names([handle])[0])

    def _check_open(self) -> None:
        try:
            super()._check_open()
        except ConnectionLostError as error:
            raise ConnectionLostError(
                f"{self!r}: {error}; nothing was changed. Call ray.init(address=…), get the actors' handles anew and "
                "make a new updater on the same registry"
            ) from None

    def _default_names(self, handles: Sequence[Any]) -> list[str]:
        first = self.workers.next_id()
        return [actor_name(handle) or f"collector-{first + index}" for index, handle in enumerate(handles)]


def _checked(handle: Any) -> Any:
    if not isinstance(handle, ActorHandle):
        hint = (
            f"ray.get_actor({arguments.quoted(handle)}, namespace=…)"
            if isinstance(handle, str)
            else "MyClass.remote(…)"
        )
        raise TypeError(
            f"expected a Ray actor handle as a worker, found {arguments.shown(handle)}; {hint} gives one"
        )
    return handle

"""RLlib's Algorithms on the registry: every weight that an env runner gets is a version, confirmed by its receipt.

Rules kept here
- A steered Algorithm has one way for weights: whenever RLlib would sync them, they are published and pushed by us. So
  pins hold between two updates, and what runners act with always has a name.
- Each RLModule is a series of its own. Nothing here is imported by `weightledger.updater`.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import MappingProxyType, new_class
from typing import Any, Self

import ray
from ray.exceptions import RayError
from ray.rllib.callbacks.callbacks import RLlibCallback
from ray.rllib.core import COMPONENT_RL_MODULE

from weightledger.registry import Registry, arguments
from weightledger.registry.errors import InUseError, NotFoundError
from weightledger.registry.records import Version
from weightledger.registry.sync import Ref
from weightledger.updater.reports import SyncReport
from weightledger.updater.rllib.learners import Learners
from weightledger.updater.rllib.module import ModuleUpdater, Place
from weightledger.updater.rllib.runner import (
    NO_VERSION,
    STAMP,
    batch_versions,
    module_ids_in,
    policy_of,
    runner_version,
    stamp_samples,
)
from weightledger.updater.rllib.transport import is_actor
from weightledger.updater.starting import Start, check_start
from weightledger.updater.telling import OnFailure, check_on_failure, tell_failures

__all__ = [
    "NO_VERSION",
    "STAMP",
    "LedgerCallback",
    "ModuleUpdater",
    "RLlibUpdater",
    "batch_versions",
    "policy_of",
    "runner_version",
    "stamp_samples",
]

Location = str | Path | Callable[[Any], str | Path]
"""A registry's folder, or a callable that is given the Algorithm and returns it."""

_attached: weakref.WeakValueDictionary[int, RLlibUpdater] = weakref.WeakValueDictionary()


class RLlibUpdater:
    """Keeps the weights of an Algorithm in a registry, and its env runners at their targets, evaluation ones included.

    From here on it stands in for `EnvRunnerGroup.sync_weights`: whenever RLlib would send weights, they are published
    if they changed, and pushed. The Algorithm's own `stop` closes it.

    Args:
        algorithm: a built Algorithm of RLlib's new API stack.
        location: the registry's folder, or a callable that is given the Algorithm and returns it, so that each trial
            of a tuning run has its own.
        modules: ids of the modules to steer; by default all, also those that are added later. RLlib goes on syncing
            the others.
        every: of the syncs that RLlib makes as it trains, publish one in so many learner updates; meanwhile env runners
            keep the version that they have. For algorithms that sync after each small step, as DQN and SAC do. The end
            of an iteration and calls by hand always publish.
        prefix: put before the lasting names of the env runners, `env-runner-<index>` and `eval-env-runner-<index>`.
        on_rollback: called with module id and version after the learner was restored to it.
        start: how the training begins on a policy that has versions: as in `RayRemoteWeightUpdater`, or a mapping of it
            by module id. It is looked at when training begins, or the learner is restored from a checkpoint, and not
            when the Algorithm is built; nothing is published before. Weights that were restored and are a version's
            go on from there: a rollback to it is recorded. Modules that are added later begin anew.
        restructure: publish names and shapes that are not the head's, of a network that grew.
        on_failure: an env runner that did not get its weights is told as a `SyncWarning`, or with `"raise"` as a
            `SyncError`, as training drops the reports. One whose own code rejects the first weights that it is sent is
            an error either way.
        options: for each module's updater: `timeout`, `max_interval`, `cast`, `allow_nonfinite`.

    Raises:
        InUseError: the Algorithm has an updater already, or another live one steers env runners of these names.
        ValueError: the Algorithm sends weights in a way that cannot be steered, `every` is less than 1, or `start`
            names no module of it.

    Example:
        ```python
        algorithm = config.build_algo()
        updater = RLlibUpdater(algorithm, "runs/cartpole")
        algorithm.train()
        updater.rollback(to=3, reason="reward collapsed")
        ```
    """

    def __init__(
        self,
        algorithm: Any,
        location: Location,
        *,
        modules: Collection[str] | None = None,
        every: int = 1,
        prefix: str = "",
        on_rollback: Callable[[str, Version], object] | None = None,
        on_failure: OnFailure = "warn",
        start: Start | Mapping[str, Start | None] | None = None,
        restructure: bool = False,
        **options: Any,
    ) -> None:
        if id(algorithm) in _attached:
            raise InUseError(f"{algorithm} has an updater already: RLlibUpdater.of(algorithm)")
        _check(algorithm)
        self._algorithm = weakref.ref(algorithm)
        self._location = location(algorithm) if callable(location) else location
        self._chosen = None if modules is None else frozenset(modules)
        self._every = arguments.count("every", every, least=1)
        self._restructure = restructure
        self._published_at = 0
        self._begun = False
        """Whether anything was published or judged yet; until then RLlib's own syncs go through."""
        self._restores = False
        """Whether the learner is being restored by RLlib's own means."""
        self._trains_meanwhile = False
        """Whether an iteration runs whose evaluation is at the same time as its training."""
        self._prefix = prefix
        self._on_rollback = on_rollback
        self._on_failure = check_on_failure(on_failure)
        self._options = options
        self._lock = threading.RLock()
        self._closed = False
        self.learners = Learners(algorithm.learner_group, options.get("timeout", 60.0))
        self.modules: dict[str, ModuleUpdater] = {}
        """The updater of each steered module, by module id."""
        self.acted: dict[str, int] = {}
        """The version of each module that acted until the newest one of its training was published."""
        self.groups: dict[str, Any] = {
            tag: group
            for tag, group in (
                ("train", algorithm.env_runner_group),
                ("eval", algorithm.eval_env_runner_group),
            )
            if group is not None
        }
        self._starts: Mapping[str, Start | None] = {}
        try:
            self._starts = self._starts_of(start)
            self._reconcile()
        except BaseException:
            self.close()
            raise
        self._starts = {}
        for tag, group in self.groups.items():
            self._stand_in(tag, group)
        self._stand_in_around(algorithm)
        _attached[id(algorithm)] = self
        weakref.finalize(algorithm, _attached.pop, id(algorithm), None)

    @classmethod
    def of(cls, algorithm: Any) -> RLlibUpdater:
        """Return the updater of an Algorithm.

        Raises:
            NotFoundError: it has none.
        """
        found = _attached.get(id(algorithm))
        if found is None:
            raise NotFoundError(
                f"{algorithm} has no updater: give its config callbacks(LedgerCallback.at(location)), or make an "
                "RLlibUpdater for it"
            )
        return found

    def __getitem__(self, module_id: str) -> ModuleUpdater:
        """Return the updater of one module."""
        if module_id not in self.modules:
            raise NotFoundError(f"no module {module_id!r} is steered: there are {sorted(self.modules)}")
        return self.modules[module_id]

    def update(
        self, module_ids: Iterable[str] | None = None, *, only: Collection[Place] | None = None, **about: Any
    ) -> dict[str, SyncReport]:
        """Publish what changed in the learner, and bring env runners to their targets.

        Args:
            module_ids: only these modules; by default all.
            only: only these env runners; by default all.
            about: `step` (by default the env steps sampled so far), `metrics`, `metadata`, `message`.

        Returns:
            A report by module id.

        Raises:
            ConflictError: another run published, or nobody said how this training begins: see `start`. Nothing was
                changed.
            SyncError: env runners did not get their weights: see `on_failure`. The others were updated.
        """
        about.setdefault("step", self._steps())
        about.setdefault("restructure", self._restructure)
        with self._lock:
            before = {key: each.head for key, each in self.modules.items()}
            reports = self._each(
                module_ids, only, lambda updater, workers: updater.update_weights(worker_ids=workers, **about)
            )
            for module_id, report in reports.items():
                head = before.get(module_id)
                if (report.published or report.adopted) and head is not None:
                    self.acted[module_id] = head.number
            self._published_at, self._begun = self.learners.number(), True
            tell_failures(reports.values(), self._on_failure)
            return reports

    def sync(
        self, module_ids: Iterable[str] | None = None, *, only: Collection[Place] | None = None
    ) -> dict[str, SyncReport]:
        """Bring env runners to their targets, publishing nothing.

        A rollback made elsewhere is followed: the learner is restored, too.

        Args:
            module_ids: only these modules; by default all.
            only: only these env runners; by default all.

        Returns:
            A report by module id.

        Raises:
            ConflictError: another run published. Nothing was changed.
            SyncError: env runners did not get their weights: see `on_failure`. The others were updated.
        """
        reports = self._each(module_ids, only, lambda updater, workers: updater.sync(workers))
        tell_failures(reports.values(), self._on_failure)
        return reports

    def rollback(
        self, to: Ref | None = None, reason: str = "", *, module_id: str | None = None
    ) -> SyncReport:
        """Go back to an older version of a module: the learner whole, and every unpinned env runner.

        Args:
            to: as in `Registry.rollback`.
            reason: for the log.
            module_id: which module; may be left out while there is only one.

        Raises:
            ValueError: there are several modules and `module_id` does not say which.
        """
        with self._lock:
            self._reconcile()
            if module_id is None:
                if len(self.modules) != 1:
                    raise ValueError(f"say which module with module_id=: there are {sorted(self.modules)}")
                (module_id,) = self.modules
            return self[module_id].rollback(to, reason)

    def forget(self, group: Any, indices: Collection[int]) -> None:
        """Bring env runners that RLlib wrote into by itself, as it does after a restart, to their targets."""
        with self._lock:
            places = [
                (tag, index) for tag, known in self.groups.items() if known is group for index in indices
            ]
            for updater in self.modules.values():
                updater.forget(places)
            self.sync(only=places)

    @property
    def closed(self) -> bool:
        """Whether it has let go of the Algorithm."""
        return self._closed

    def close(self) -> None:
        """Let go of the env runners; RLlib syncs weights by itself again. Closing twice is harmless."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for group in self.groups.values():
                for name in ("sync_weights", "sync_env_runner_states", "stop"):
                    vars(group).pop(name, None)
            for updater in self.modules.values():
                _close(updater)
            algorithm = self._algorithm()
            if algorithm is not None and _attached.get(id(algorithm)) is self:
                for name in self._around():
                    vars(algorithm).pop(name, None)
                del _attached[id(algorithm)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {', '.join(map(repr, self.modules.values()))}>"

    # ------------------------------------------------------------------ modules and env runners

    def _each(
        self,
        module_ids: Iterable[str] | None,
        only: Collection[Place] | None,
        do: Callable[[ModuleUpdater, list[int] | None], SyncReport],
    ) -> dict[str, SyncReport]:
        with self._lock:
            self._reconcile()
            chosen = list(self.modules) if module_ids is None else list(module_ids)
            reports = {}
            for module_id in chosen:
                updater = self[module_id]
                workers = (
                    None if only is None else [updater.places[key] for key in only if key in updater.places]
                )
                reports[module_id] = do(updater, workers)
            return reports

    def _reconcile(self) -> None:
        """Follow the modules and env runners that the Algorithm has now."""
        if self._closed:
            raise InUseError(f"{self!r} is closed; make a new one for the Algorithm")
        found = self._found()
        for gone in self.modules.keys() - set(found):
            _close(self.modules.pop(gone))
        for module_id in found:
            if module_id not in self.modules:
                self.modules[module_id] = self._steer(module_id)
        env_runners = self._env_runners()
        updaters = [self.modules[module_id] for module_id in found]
        unsteered = {
            place: handle
            for place, (_, handle) in env_runners.items()
            if not all(updater.steers(place, handle) for updater in updaters)
        }
        lacking = self._lacking(unsteered, found) if unsteered else {}
        for module_id in found:
            self.modules[module_id].place(
                {
                    place: worker
                    for place, worker in env_runners.items()
                    if module_id not in lacking.get(place, ())
                }
            )

    def _found(self) -> list[str]:
        """Return the ids of the modules that are to be steered."""
        return [
            key
            for key, has_weights in self.learners.module_ids().items()
            if has_weights and (self._chosen is None or key in self._chosen)
        ]

    def _lacking(
        self, env_runners: Mapping[Place, Any], module_ids: Collection[str]
    ) -> dict[Place, set[str]]:
        """Ask env runners which of these modules they do not have; those that do not answer count as having all."""
        answers = {place: module_ids_in(each) for place, each in env_runners.items() if not is_actor(each)}
        asked = {
            each.__ray_call__.remote(module_ids_in): place
            for place, each in env_runners.items()
            if is_actor(each)
        }
        for ref in (
            ray.wait(list(asked), num_returns=len(asked), timeout=self.learners.timeout)[0] if asked else ()
        ):
            # The push will say what is the matter.
            with contextlib.suppress(RayError):
                answers[asked[ref]] = ray.get(ref)
        return {place: set(module_ids) - set(had) for place, had in answers.items() if had is not None}

    def _steer(self, module_id: str) -> ModuleUpdater:
        registry = Registry.open(self._location, policy=policy_of(module_id))
        told = None if self._on_rollback is None else functools.partial(self._on_rollback, module_id)
        return ModuleUpdater(
            self.learners,
            module_id,
            registry=registry,
            on_rollback=told,
            start=self._starts.get(module_id, "new"),
            **self._options,
        )

    def _starts_of(self, start: Start | Mapping[str, Start | None] | None) -> dict[str, Start | None]:
        """Return how each module begins that there is now."""
        found = self._found()
        if not isinstance(start, Mapping):
            return dict.fromkeys(found, check_start(start))
        unknown = start.keys() - set(found)
        if unknown:
            raise ValueError(
                f"start= names {sorted(unknown)}: the modules that are steered are {sorted(found)}"
            )
        return {module_id: check_start(start.get(module_id)) for module_id in found}

    def _env_runners(self) -> dict[Place, tuple[str, Any]]:
        found: dict[Place, tuple[str, Any]] = {}
        for tag, group in self.groups.items():
            name = self._prefix + ("env-runner" if tag == "train" else "eval-env-runner")
            local = group.local_env_runner
            if getattr(local, "module", None) is not None:
                found[tag, 0] = (f"{name}-0", local)
            for index, actor in group._worker_manager.actors().items():
                found[tag, index] = (f"{name}-{index}", actor)
        return found

    def _steps(self) -> int:
        algorithm = self._algorithm()
        counted = (
            0
            if algorithm is None
            else algorithm.metrics.peek(("env_runners", "num_env_steps_sampled_lifetime"), default=0)
        )
        return int(counted)

    # ------------------------------------------------------------------ in RLlib's place

    def _stand_in(self, tag: str, group: Any) -> None:
        """Take the place of a group's own methods, on this one object; `close` gives them back."""
        stock_sync, stock_states, stock_stop = group.sync_weights, group.sync_env_runner_states, group.stop

        @functools.wraps(stock_sync)
        def sync_weights(
            policies: Any = None,
            from_worker_or_learner_group: Any = None,
            to_worker_indices: Any = None,
            **options: Any,
        ) -> None:
            if tag == "eval" and self._trains_meanwhile:
                # They were brought to their targets as the iteration began: its learner may be half-way in an update.
                return
            if not (self._begun or self._restores):
                stock_sync(policies, from_worker_or_learner_group, to_worker_indices, **options)
                return
            self._reconcile()
            asked = self.learners.module_ids() if policies is None else list(policies)
            others = [key for key in asked if key not in self.modules]
            if others:
                stock_sync(others, from_worker_or_learner_group, to_worker_indices, **options)
            steered = [key for key in asked if key in self.modules]
            places = self._places(tag, group, to_worker_indices)
            restored = self._restores or self.learners.number() < self._published_at
            if from_worker_or_learner_group is not self.learners.group:
                self.sync(steered, only=places)
            elif restored:
                # RLlib syncs a restored learner with one group only: the others would keep what was abandoned. It may
                # have restored the module of the env runner in this process by itself, too.
                self.update(steered, restored=True, force=True)
            elif self._is_due():
                self.update(steered, only=places)
            else:
                self.sync(steered, only=places)

        @functools.wraps(stock_states)
        def sync_env_runner_states(*, rl_module_state: Any = None, **options: Any) -> None:
            if rl_module_state is None:
                stock_states(**options)
                return
            if not self._begun:
                stock_states(rl_module_state=rl_module_state, **options)
                return
            stock_states(rl_module_state=self._of_others(rl_module_state), **options)
            if self._is_due():
                self.update(only=self._places(tag, group, options.get("env_runner_indices_to_update")))

        @functools.wraps(stock_stop)
        def stop() -> None:
            self.close()
            stock_stop()

        group.sync_weights, group.sync_env_runner_states, group.stop = (
            sync_weights,
            sync_env_runner_states,
            stop,
        )

    def _around(self) -> dict[str, Callable[[], AbstractContextManager[None]]]:
        """Return what is done around methods of the Algorithm."""
        return {
            "step": self._iterating,
            "training_step": self._training,
            "restore_from_path": self._restoring,
            "set_state": self._restoring,
        }

    def _stand_in_around(self, algorithm: Any) -> None:
        for name, around in self._around().items():
            setattr(algorithm, name, _within(around, getattr(algorithm, name)))

    @contextmanager
    def _iterating(self) -> Iterator[None]:
        """Look at the registry as an iteration begins, so that none is spent on weights that were rolled back."""
        algorithm = self._algorithm()
        if self._begun:
            self.sync()
        else:
            self.update(message="training began")
        self._trains_meanwhile = algorithm is not None and bool(
            algorithm.config.evaluation_parallel_to_training
        )
        try:
            yield
        finally:
            self._trains_meanwhile = False

    @contextmanager
    def _training(self) -> Iterator[None]:
        if not self._begun:
            self.update(message="training began")
        yield

    @contextmanager
    def _restoring(self) -> Iterator[None]:
        outer, self._restores = self._restores, True
        try:
            yield
        finally:
            self._restores = outer

    def _is_due(self) -> bool:
        since = self.learners.number() - self._published_at
        return since < 1 or since >= self._every

    def _places(self, tag: str, group: Any, indices: Iterable[int] | None) -> list[Place]:
        # RLlib always brings the env runner in this process along: it restores others from it.
        wanted = group._worker_manager.actor_ids() if indices is None else indices
        return [(tag, index) for index in (0, *wanted)]

    def _of_others(self, state: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return what is left of the modules' state without the steered ones."""
        modules = state.get(COMPONENT_RL_MODULE)
        if isinstance(modules, ray.ObjectRef):
            modules = ray.get(modules, timeout=self.learners.timeout)
        others = {key: weights for key, weights in (modules or {}).items() if key not in self.modules}
        # Without a number: it tells of the steered ones, too, and RLlib loads what has none.
        return {COMPONENT_RL_MODULE: others} if others else None


class LedgerCallback(RLlibCallback):
    """Keeps an Algorithm's weights in a registry, by its config alone.

    ```python
    config.callbacks(LedgerCallback.at("runs/cartpole"))
    ```

    With it the Algorithm gets an `RLlibUpdater` when it is built (`RLlibUpdater.of(algorithm)` returns it), every
    weight that RLlib syncs is a version, everything sampled is stamped, restarted env runners are brought to their
    targets, and `train()` tells in `result["weightledger"]`, by module id, the version and the env runners that failed.

    A subclass may set `location` and `options` itself.
    """

    location: Location | None = None
    """As in `RLlibUpdater`."""
    options: Mapping[str, Any] = MappingProxyType({})
    """As in `RLlibUpdater`."""

    def __init__(self) -> None:
        super().__init__()
        self.updater: RLlibUpdater | None = None
        """The Algorithm's updater; None in env runners, where the callback stamps."""

    @classmethod
    def at(cls, location: Location, *, per_trial: bool = False, **options: Any) -> type[Self]:
        """Return the callback for a registry there: what `AlgorithmConfig.callbacks` takes.

        Args:
            location: as in `RLlibUpdater`; so are the options. A relative path is one of the process that calls this:
                Tune gives each trial a working folder of its own, which it deletes.
            per_trial: give each trial of a tuning run a registry of its own, in a folder of `location` that is named
                like the trial's: it stays the same when the trial is restored.

        Raises:
            ValueError: `per_trial` with a location in which there are no folders.
        """
        if not callable(location) and "://" not in str(location):
            folder = os.path.abspath(location)
            location = functools.partial(_trial_folder, folder) if per_trial else folder
        elif per_trial:
            raise ValueError(f"per_trial=True makes folders in a folder; found location={location!r}")
        # RLlib makes its callbacks without arguments, here and in each env runner.
        own = {"__module__": cls.__module__, "location": location, "options": options}
        made: type[Self] = new_class(cls.__name__, (cls,), {}, lambda namespace: namespace.update(own))
        return made

    def on_algorithm_init(self, *, algorithm: Any, **_: Any) -> None:
        """Give the Algorithm its updater. Nothing is published until it trains or is restored."""
        location = type(self).location  # of the class, or a callable would be taken for a method
        if location is None:
            raise ValueError(f"where is the registry? Use callbacks({type(self).__name__}.at(location))")
        try:
            self.updater = RLlibUpdater(algorithm, location, **self.options)
        except InUseError as error:
            if getattr(algorithm, "_storage", None) is not None:  # Tune's
                error.add_note(
                    "each trial of a tuning run needs a registry of its own: "
                    "LedgerCallback.at(location, per_trial=True)"
                )
            raise

    def on_train_result(self, *, result: dict[str, Any], **_: Any) -> None:
        """Publish what the iteration left, give the versions that acted their score, and tell in the result."""
        updater = self.updater
        if updater is None or updater.closed:
            return
        reports = updater.update()
        score = result.get("env_runners", {}).get("episode_return_mean", math.nan)
        for module_id, number in updater.acted.items():
            if module_id in updater.modules and not math.isnan(score):
                updater[module_id].registry.record_metrics(number, episode_return_mean=float(score))
        updater.acted.clear()
        result["weightledger"] = {
            module_id: {
                "version": report.version,
                "ok": report.ok,
                "failed": {outcome.name: outcome.status for outcome in report.failed.values()},
            }
            for module_id, report in reports.items()
        }

    def on_env_runners_recreated(
        self, *, env_runner_group: Any, env_runner_indices: list[int], **_: Any
    ) -> None:
        """Bring restarted env runners, which RLlib gave the weights of the one in this process, to their targets."""
        if self.updater is not None and not self.updater.closed:
            self.updater.forget(env_runner_group, env_runner_indices)

    def on_sample_end(self, *, env_runner: Any = None, samples: Any = (), **_: Any) -> None:
        """Stamp what was sampled."""
        stamp_samples(env_runner, samples)


def _within(
    around: Callable[[], AbstractContextManager[None]], stock: Callable[..., Any]
) -> Callable[..., Any]:
    @functools.wraps(stock)
    def call(*arguments: Any, **options: Any) -> Any:
        with around():
            return stock(*arguments, **options)

    return call


def _trial_folder(location: str, algorithm: Any) -> Path:
    # RLlib's Algorithms do not know their trial's id, but their folder has its name.
    return Path(location, Path(algorithm.logdir).name)


def _close(updater: ModuleUpdater) -> None:
    updater.close()
    updater.registry.close()


def _check(algorithm: Any) -> None:
    config = algorithm.config
    if not config.enable_env_runner_and_connector_v2 or algorithm.learner_group is None:
        raise ValueError(
            f"{algorithm} runs on RLlib's old API stack; expected one with a LearnerGroup and EnvRunners: leave "
            "config.api_stack() as it is by default"
        )
    if getattr(config, "use_env_runner_state_server", False):
        raise ValueError(
            "env runners that pull their weights from RLlib's state server cannot be steered; "
            "leave use_env_runner_state_server off"
        )

"""`Registry`: the versions of one policy in one place, and who should run and did run which.

Joins the log (SQL) and the snapshots (files). Modules that need torch are imported where tensors are touched, so that
questions and pins cost no start-up time.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from weightledger.registry import arguments, files, origins, places
from weightledger.registry.errors import CorruptionError, InUseError, NotFoundError
from weightledger.registry.log import audit, steering
from weightledger.registry.log.ledger import Ledger
from weightledger.registry.log.refs import Ref, check_new_alias, parse
from weightledger.registry.logs import tell_published, tell_rolled_back
from weightledger.registry.records import (
    Event,
    Extra,
    Fault,
    Holding,
    Pin,
    PruneReport,
    Version,
    Weights,
    WorkerStatus,
)
from weightledger.registry.store import inspection
from weightledger.registry.store.pruning import prune
from weightledger.registry.store.recovery import recover
from weightledger.registry.store.retention import check_rules

if TYPE_CHECKING:
    from weightledger.registry.store.publishing import Publisher
    from weightledger.registry.weights.arrays import Bytes
    from weightledger.registry.weights.payload import Payload


class Registry:
    """A versioned weight registry, seen through one policy.

    Open it with `Registry.open`. It may be used from many threads, opened by many processes, pickled (a copy opens the
    same place again) and carried over a fork.

    Example:
        >>> import tempfile, torch
        >>> registry = Registry.open(tempfile.mkdtemp())
        >>> version = registry.publish(torch.nn.Linear(2, 1), step=100, metrics={"reward": 12.5})
        >>> version.number, registry.head().metrics
        (1, {'reward': 12.5})
    """

    def __init__(self, place: places.Place, policy: str) -> None:
        self.place = place
        self.location = place.location
        """The folder, absolute; of a server, its URL without a password."""
        self.policy = policy
        self.uuid = place.uuid
        """The registry's own identity, 32 hexadecimal digits, made once."""
        self.database = place.database
        self.locks = place.locks
        self.snapshots = place.snapshots
        self.ledger = Ledger(place.database, place.locks, policy)
        self._publisher: Publisher | None = None

    @classmethod
    def open(
        cls,
        location: str | os.PathLike[str],
        *,
        policy: str = "default",
        snapshots: str | os.PathLike[str] | None = None,
        cache: str | os.PathLike[str] | None = None,
        create: bool = True,
        migrate: bool = True,
    ) -> Self:
        """Open a registry, in a folder or on a PostgreSQL server.

        Args:
            location: a folder, which will hold `registry.db` and `snapshots/`; relative paths are resolved now. Or a
                server's URL, `postgresql+psycopg://user@host/database` (the extra `postgres`).
            policy: the series of versions to see.
            snapshots: where the weights are, if not beside the record: a folder, or a bucket's URL (`s3://bucket/prefix`,
                `gs://`, `az://`; the extra `s3`). It is noted at the first open, so that later ones need not say it.
            cache: a folder of this machine for copies of what is read from a bucket; bounded.
            create: make what is missing.
            migrate: bring an older database in a folder up to this library's schema, under a lock. One on a server is
                upgraded by `weightledger upgrade` alone.

        Raises:
            NotFoundError: nothing is there and `create` is off.
            ValueError: the location is neither a folder's path nor a PostgreSQL URL, psycopg is not installed, or the
                policy's name is none.
            StorageError: the server cannot be reached or lets nobody in, or the snapshots belong to another registry.
            SchemaError: the database is newer than the library, or older and `migrate` is off.
            CorruptionError: the database file is damaged, is no database, or is gone while its snapshots are there.
        """
        arguments.name("policy", policy)
        create, migrate = arguments.flag("create", create), arguments.flag("migrate", migrate)
        place = places.open_place(location, snapshots=snapshots, cache=cache, create=create, migrate=migrate)
        recover(place.database, place.locks, place.snapshots)
        return cls(place, policy)

    def for_policy(self, policy: str) -> Self:
        """Return the same registry, seen through another policy."""
        self.database.check_open()
        return type(self).open(self.place.address, policy=policy, create=False)

    def close(self) -> None:
        """Release the database and the buffers; every call after it raises `StorageError`, which says so.

        Closing twice is harmless. A registry that is let go without it releases them, too.
        """
        self._publisher = None
        self.locks.close()
        self.database.close()

    def __enter__(self) -> Self:
        self.database.check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return (_reopen, (type(self), self.place.address, self.policy))

    def __repr__(self) -> str:
        return f"<Registry {str(self.location)!r} policy={self.policy!r}>"

    @property
    def publisher(self) -> Publisher:
        """What turns weights into versions; for updaters that publish and distribute at the same time."""
        from weightledger.registry.store.publishing import Publisher

        self.database.check_open()
        if self._publisher is None or self._publisher.pid != os.getpid():
            self._publisher = Publisher(self.ledger, self.snapshots)
        return self._publisher

    # ------------------------------------------------------------------ publishing and reading

    def publish(
        self,
        weights: Any,
        *,
        step: int | None = None,
        metrics: Mapping[str, Any] | None = None,
        metadata: Mapping[str, Any] | None = None,
        message: str = "",
        parent: int | None = None,
        extra: Any = None,
        restructure: bool = False,
    ) -> Version:
        """Copy weights, store them durably and append a version, the new head.

        It is always a new version, also of content that the head has already; a warning tells when the step advanced
        all the same.

        Args:
            weights: an `nn.Module`, a TensorDict or a mapping of tensors, nested too. Tensors of any device.
            step: the training step they belong to.
            metrics: numbers known already; NaN is kept as NaN. More come by `record_metrics`.
            metadata: values of plain types, kept with their types.
            message: one line for the log.
            parent: publish only if the head has this number (0: only into an empty policy).
            extra: more state of the same moment (optimizer, counters): nested mappings and lists of tensors, numbers,
                strings. Stored beside the weights, never sent to workers.
            restructure: accept names and shapes that are not the head's, of a model that grew. Another dtype needs no
                word.

        Returns:
            The new version; when this returns it survives `kill -9` and power loss.

        Raises:
            InvalidWeightsError: something cannot be stored, or names or shapes are not the head's; every such key is
                named. Nothing was written.
            ConflictError: the head is not `parent`. Nothing was written.
            StorageError: the disk refused. No version is offered.
        """
        restructure = arguments.flag("restructure", restructure)
        if parent is not None:
            parent = arguments.within_64_bits("parent", parent)
        draft = self.publisher.draft(
            weights, step=step, metrics=metrics, metadata=metadata, message=message, extra=extra
        )
        try:
            version = self.publisher.publish(draft, parent, restructure=restructure)
        finally:
            draft.release()
        self._note_origin(version, weights)
        tell_published(self.policy, version.number)
        return version

    def head(self) -> Version:
        """Return the newest stored version.

        Raises:
            NotFoundError: nothing was published yet.
        """
        with self.ledger.reading() as conn:
            return self.ledger.head(conn)

    def get(self, ref: Ref) -> Version:
        """Return the version that a reference names.

        Args:
            ref: a number or `"v7"`; an alias; `"head"`; `"head~2"`, so many publishes back on the head's line, where
                rollbacks count 0; `"best:reward"` or `"best:loss:min"`, the best stored one on the head's line;
                `"blake3:1f0e9a2b"`, at least eight digits of a digest; or a `Version` of this registry. The same holds
                wherever a version is asked for.

        Raises:
            NotFoundError: there is none, or a digest's digits fit several contents; the text says what exists.
            TypeError: it is no reference.
        """
        wanted = parse(ref)
        with self.ledger.reading() as conn:
            return self.ledger.resolve(conn, wanted)

    def versions(self, limit: int | None = None) -> list[Version]:
        """Return stored and pruned versions, oldest first; with a limit the newest so many."""
        limit = _count(limit)
        with self.ledger.reading() as conn:
            return self.ledger.versions(conn, limit)

    def policies(self) -> list[str]:
        """Return the names of all policies in this registry."""
        with self.ledger.reading() as conn:
            return self.ledger.policies(conn)

    def load(self, ref: Ref = "head") -> Weights:
        """Read a version's weights: an own, writable copy, verified against the digest.

        Returns:
            A state dict (key order and `_metadata` kept) for a module or mapping, a TensorDict for a TensorDict.
            Tensors are on the CPU.

        Raises:
            NotFoundError: no such version, or its weights were pruned.
            CorruptionError: the file is missing or damaged.
        """
        from weightledger.registry.weights import codec

        payload, structure = self.read(ref)
        return codec.rebuild(structure, payload.tensors(), payload.values)

    def load_extra(self, ref: Ref = "head") -> Extra:
        """Read the extra state that was published with a version.

        Raises:
            NotFoundError: no such version, it was pruned, or it has no extra state.
            CorruptionError: the file is missing or damaged.
        """
        from weightledger.registry.weights import codec

        wanted = parse(ref)
        with self.ledger.reading() as conn:
            version = self.ledger.usable(conn, wanted, "load the extra state of")
            found = self.ledger.extra_stored_as(conn, version.number)
        if found is None:
            raise NotFoundError(
                f"v{version.number} of policy {self.policy!r} has no extra state: it was published without extra="
            )
        file, structure = found
        with self._reading(version):
            payload = inspection.read_payload(
                self.snapshots, file, f"the extra state of {self._name(version)}"
            )
        return codec.rebuild(structure, payload.tensors(), payload.values)

    def restore(self, ref: Ref, into: Any, *, cast: bool = False) -> Version:
        """Copy a version's weights in place into a live module, TensorDict or mapping: all or nothing.

        Ties, `requires_grad`, device and lock state of the target stay as they are. A non-persistent buffer that the
        version lacks is left alone. A module that shows copies in its state dict, or derives something when it loads,
        loads by its own `load_state_dict`; what came of it is compared with the version.

        Args:
            cast: accept other dtypes and convert. Rounding is no loss; a number that becomes infinite or another one
                is, and is refused.

        Raises:
            NotFoundError: no such version, or its weights were pruned.
            CorruptionError: the file is missing or damaged.
            InvalidWeightsError: the weights do not fit, or a module that loads them itself did not take them; every
                difference is named and the target is as it was (or the text says that it could not be put back).
        """
        from weightledger.registry.weights.restore import copy_into

        wanted, cast = parse(ref), arguments.flag("cast", cast)
        with self.ledger.reading() as conn:
            version = self.ledger.usable(conn, wanted, "restore")
        # Fresh memory takes longer to get than a file to read; who never publishes here has no buffer to lend.
        loan = None if self._publisher is None else self.publisher.borrow()
        try:
            copy_into(self.read(version, None if loan is None else loan.room)[0], into, cast=cast)
        finally:
            if loan is not None:
                loan.give_back()
        self._note_origin(version, into)
        return version

    def payload(self, ref: Ref) -> Payload:
        """Read a version's file into one buffer and verify it, for whoever distributes it.

        Raises:
            NotFoundError: no such version, or its weights were pruned.
            CorruptionError: the file is missing or damaged.
        """
        return self.read(ref)[0]

    def read(
        self, ref: Ref, room: Callable[[int], Bytes | None] | None = None
    ) -> tuple[Payload, dict[str, Any]]:
        """As `payload`, together with the structure in which the version was published.

        Args:
            room: gives a uint8 buffer of so many bytes to read into, or None where it has none.
        """
        wanted = parse(ref)
        with self.ledger.reading() as conn:
            version = self.ledger.usable(conn, wanted, "load")
            file, structure = self.ledger.stored_as(conn, version.number)
        with self._reading(version):
            into = None if room is None else room(file.file_bytes)
            return inspection.read_payload(self.snapshots, file, self._name(version), into), structure

    def export(self, ref: Ref, path: str | os.PathLike[str]) -> Path:
        """Write a version as a plain safetensors file that any reader loads; tied tensors under every name.

        Raises:
            NotFoundError: no such version, or its weights were pruned.
            CorruptionError: the stored file is missing or damaged.
            StorageError: the target cannot be written, or is a link, a folder, a pipe or a device. The mode of a file
                that is replaced is kept.
            InUseError: the target is one of the registry's own files.
        """
        from weightledger.registry.weights.payload import write_plain

        target = arguments.path("path", path)
        self._check_not_own(target)
        files.check_replaceable(target)  # before a large file is read for nothing
        write_plain(self.payload(ref), target)
        return target

    def tensor_hashes(self, ref: Ref) -> dict[str, str]:
        """Return the hash of every tensor and kept value by name, from the file's header; reads no tensor.

        Raises:
            NotFoundError: no such version, or its weights were pruned.
            CorruptionError: the file is missing or its header is damaged.
        """
        wanted = parse(ref)
        with self.ledger.reading() as conn:
            version = self.ledger.usable(conn, wanted, "compare")
            file, _ = self.ledger.files_of(conn, version.number)
        with self._reading(version):
            return inspection.read_hashes(self.snapshots, file, self._name(version))

    # ------------------------------------------------------------------ deciding

    def rollback(
        self,
        to: Ref | None = None,
        *,
        reason: str = "",
        expected_head: int | None = None,
        restructure: bool = False,
    ) -> Version:
        """Append a version that has the content of an older one, and make it the head.

        Args:
            to: what to restore; by default the nearest stored version on the head's lineage that differs from the head,
                and has no NaN or infinity if there is such a one.
            reason: for the log.
            expected_head: roll back only if the head has this number.
            restructure: go back also to a version whose names or shapes are not the head's. Live runs that train with
                the head's could not follow; a warning names them.

        Raises:
            NotFoundError: there is no such version, it was pruned, or there is nothing to go back to.
            ConflictError: the head is another one. Nothing was changed.
            InvalidWeightsError: its names or shapes are not the head's. Nothing was changed.
            CorruptionError: its file is missing or damaged: all of it is read first. Nothing was changed.
        """
        from weightledger.registry.store.restructuring import check_rollback

        wanted = None if to is None else parse(to)
        restructure = arguments.flag("restructure", restructure)
        arguments.text("reason", reason)
        if expected_head is not None:
            expected_head = arguments.within_64_bits("expected_head", expected_head)
        made = None
        while made is None:
            with self.ledger.reading() as conn:
                sought = steering.rollback_target(self.ledger, conn, wanted, expected_head)
            self.read(sought)  # before anybody has to wait for it
            with self.locks.policy(self.policy), self.ledger.writing() as conn:
                version = steering.rollback_target(self.ledger, conn, wanted, expected_head)
                if version.number != sought.number:
                    continue  # the head or the alias moved meanwhile
                unable = check_rollback(
                    self.ledger,
                    self.snapshots,
                    conn,
                    version,
                    alive=self.locks.alive,
                    restructure=restructure,
                )
                made = steering.roll_back_to(self.ledger, conn, version, reason=reason, expected_head=None)
        if unable:
            warnings.warn(
                f"v{made.number}, which restores v{made.restores}, has other names or shapes than the head before it: "
                f"it cannot be followed by {unable}",
                stacklevel=2,
            )
        tell_rolled_back(made)
        return made

    def pin(self, worker: str, ref: Ref, *, reason: str = "", literal: bool = False) -> None:
        """Hold a worker, or a glob of worker names, at a version.

        An alias is followed wherever it moves; any other reference resolves now. An exact name beats a glob, and of two
        globs the newer wins. A new pin on the same name replaces the older. One that holds no worker known so far is
        made all the same, with a warning: a name may be mistyped, or its worker may still come.

        Args:
            worker: a name, or a glob: `"eval-*"`.
            ref: as in `get`.
            reason: for the log.
            literal: take `worker` for one worker's name, whatever characters it has: `"env[12]"` is a glob that means
                `env1` and `env2` otherwise.

        Raises:
            NotFoundError: no such version, or its weights were pruned.
            CorruptionError: its file is missing or has another size.
            ValueError: that is no worker's name.
        """
        arguments.name("worker", worker)
        arguments.text("reason", reason)
        wanted, literal = parse(ref), arguments.flag("literal", literal)
        with self.ledger.writing() as conn:
            made = steering.pin(self.ledger, conn, worker, wanted, reason=reason, literal=literal)
            inspection.check_there(self.ledger, self.snapshots, conn, made.version)
            met = steering.is_met(self.ledger, conn, made)
        if not met:
            what = "name" if made.literal else "glob"
            warnings.warn(
                f"{worker!r} is pinned to v{made.version}, but no worker of policy {self.policy!r} is known by that "
                f"{what} so far",
                stacklevel=2,
            )

    def unpin(self, worker: str, *, literal: bool | None = None) -> None:
        """Remove the pin on exactly this name or glob.

        Args:
            literal: True for a pin that was made with `literal=True`, False for a glob; wanted only where both read
                the same.

        Raises:
            NotFoundError: there is none.
            ConflictError: both are there, and `literal` does not say which.
        """
        arguments.sought("worker", worker)
        if literal is not None:
            literal = arguments.flag("literal", literal)
        with self.ledger.writing() as conn:
            steering.unpin(self.ledger, conn, worker, literal=literal)

    def pins(self) -> list[Pin]:
        """Return all pins, oldest first; a damaged one is marked."""
        with self.ledger.reading() as conn:
            policy = self.ledger.find_policy(conn)
            return [] if policy is None else audit.listed_pins(conn, policy)

    def target(self, worker: str) -> Version:
        """Return the version that a worker should hold: its pin, else the head.

        Raises:
            NotFoundError: nothing was published yet.
        """
        arguments.sought("worker", worker)
        with self.ledger.reading() as conn:
            head = self.ledger.head(conn)
            number, _ = audit.resolve_target(worker, self.ledger.pins(conn), head.number)
            return head if number is None else self.ledger.version(conn, number)

    def set_alias(self, name: str, ref: Ref) -> None:
        """Let a name stand for a version; pins that follow the alias move with it.

        Raises:
            NotFoundError: no such version, or its weights were pruned.
            ValueError: the name could be taken for another reference, or is none.
        """
        arguments.name("alias", name)
        wanted = parse(ref)
        if name not in self.aliases():
            check_new_alias(name)
        with self.ledger.writing() as conn:
            steering.set_alias(self.ledger, conn, name, wanted)

    def delete_alias(self, name: str) -> None:
        """Forget an alias.

        Raises:
            NotFoundError: there is no such alias.
            InUseError: a pin follows it.
        """
        arguments.sought("alias", name)
        with self.ledger.writing() as conn:
            steering.delete_alias(self.ledger, conn, name)

    def aliases(self) -> dict[str, int]:
        """Return every alias and the number it stands for."""
        with self.ledger.reading() as conn:
            return self.ledger.aliases(conn)

    def record_metrics(self, ref: Ref, /, **metrics: Any) -> Version:
        """Write numbers learnt about a version after it ran; an older value of the same name is replaced.

        Raises:
            NotFoundError: no such version.
            InvalidWeightsError: a value is no number.
        """
        checked, wanted = steering.check_metrics(metrics), parse(ref)
        with self.ledger.writing() as conn:
            return steering.record_metrics(self.ledger, conn, wanted, checked)

    def best(self, metric: str, mode: str = "max") -> Version:
        """Return the stored version with the best finite value; of equal ones the newest.

        NaN and infinities never win.

        Args:
            mode: `"max"` or `"min"`.

        Raises:
            NotFoundError: no stored version has a finite value of that metric.
            ValueError: the mode is another one.
        """
        arguments.sought("metric", metric)
        if not isinstance(mode, str) or mode not in ("max", "min"):
            raise ValueError(f"mode must be 'max' or 'min', found {arguments.shown(mode)}")
        with self.ledger.reading() as conn:
            return steering.best(self.ledger, conn, metric, mode)

    # ------------------------------------------------------------------ asking

    def workers(self) -> list[WorkerStatus]:
        """Return what is known of every worker that was ever steered, by name."""
        with self.ledger.reading() as conn:
            policy = self.ledger.find_policy(conn)
            return [] if policy is None else audit.workers(conn, policy, self.locks.alive)

    def holdings(self, at: datetime | None = None) -> list[Holding]:
        """Return what each worker holds, or held at a moment.

        Args:
            at: an aware datetime. Between a push and its receipt this is the older holding; the newer one is in
                `history`, and the switch lies between its `pushed_at` and `confirmed_at`.
        """
        at = _moment("at", at)
        with self.ledger.reading() as conn:
            policy = self.ledger.find_policy(conn)
            return [] if policy is None else audit.holdings(conn, policy, at, alive=self.locks.alive)

    def history(
        self,
        *,
        worker: str | None = None,
        version: Ref | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        limit: int | None = None,
    ) -> list[Holding]:
        """Return who held what, oldest first; pushes that were never confirmed are among them, without `confirmed_at`.

        Args:
            worker: only this worker.
            version: only this version, found by content: holdings of an equal version say so in `same_content_as`.
            since: only what was held after this aware datetime.
            until: only what was held before this aware datetime.
            limit: only the newest so many.

        Raises:
            NotFoundError: no such version.
        """
        since = _moment("since", since)
        until = _moment("until", until)
        limit, worker = _count(limit), _sought("worker", worker)
        wanted = None if version is None else parse(version)
        with self.ledger.reading() as conn:
            number = None if wanted is None else self.ledger.resolve(conn, wanted).number
            policy = self.ledger.find_policy(conn)
            if policy is None:
                return []
            return audit.history(
                conn,
                policy,
                worker=worker,
                version=number,
                since=since,
                until=until,
                limit=limit,
                alive=self.locks.alive,
            )

    def staleness(self, version: Ref) -> int | None:
        """Count the publishes along the head's lineage since a version's content was last the head's.

        Rollbacks count 0. None when its branch was abandoned.

        Raises:
            NotFoundError: no such version.
        """
        wanted = parse(version)
        with self.ledger.reading() as conn:
            found = self.ledger.resolve(conn, wanted)
            policy = self.ledger.find_policy(conn)
            assert policy is not None
            return audit.staleness(conn, policy, found.number)

    def events(
        self,
        *,
        kind: str | None = None,
        worker: str | None = None,
        version: Ref | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        limit: int | None = None,
    ) -> list[Event]:
        """Return the journal, oldest first; with a limit the newest so many.

        Raises:
            NotFoundError: no such version.
        """
        since = _moment("since", since)
        until = _moment("until", until)
        limit = _count(limit)
        kind, worker = _sought("kind", kind), _sought("worker", worker)
        wanted = None if version is None else parse(version)
        with self.ledger.reading() as conn:
            number = None if wanted is None else self.ledger.resolve(conn, wanted).number
            policy = self.ledger.find_policy(conn)
            if policy is None:
                return []
            return audit.events(
                conn, policy, kind=kind, worker=worker, version=number, since=since, until=until, limit=limit
            )

    # ------------------------------------------------------------------ keeping

    def verify(self, ref: Ref | None = None) -> list[Fault]:
        """Re-read files and compare them with the record: missing, truncated, changed, strays. Changes nothing.

        Args:
            ref: only this version; by default all of this policy, and strays.

        Raises:
            NotFoundError: no such version, or it was pruned.
        """
        wanted = None if ref is None else parse(ref)
        return inspection.verify(self.ledger, self.snapshots, wanted)

    def prune(
        self,
        *,
        keep_last: int | None = None,
        keep_every: int | None = None,
        keep_best: tuple[str, int] | tuple[str, int, str] | None = None,
        forget_worker: str | None = None,
        dry_run: bool = False,
    ) -> PruneReport:
        """Delete the snapshot files of versions that no rule keeps and nobody needs; the rows stay.

        The head, what a rollback goes back to, and what is pinned, aliased, held or pending on a worker, or shares its
        file with a kept version of any policy, always stays. A worker whose run is gone may live on, so that what it
        was last known to hold stays, too, until it is forgotten.

        Args:
            keep_last: keep the newest so many.
            keep_every: keep numbers divisible by this.
            keep_best: keep the best so many by a metric: `("reward", 3)`, or `("loss", 3, "min")`; and what is newer
                than the newest version with that metric.
            forget_worker: a name, or a glob of names, of workers that are known to be dead: what they were last known
                to hold is ended as lost.
            dry_run: delete nothing, only say what would go.

        Returns:
            The versions whose weights are gone; `.kept` says why each other one stays.

        Raises:
            TypeError: a number of versions is no whole number.
            ValueError: a rule that keeps nothing, or no rule at all.
            NotFoundError: no stored version has the metric that `keep_best` names, or no worker has such a name.
                Nothing was pruned.
            InUseError: a live run steers a worker that should be forgotten. Nothing was pruned.
        """
        keep_last, keep_every, keep_best = check_rules(keep_last, keep_every, keep_best)
        dry_run = arguments.flag("dry_run", dry_run)
        if forget_worker is not None:
            arguments.name("worker", forget_worker)
        report, undeleted = prune(
            self.ledger,
            self.snapshots,
            keep_last=keep_last,
            keep_every=keep_every,
            keep_best=keep_best,
            forget_worker=forget_worker,
            dry_run=dry_run,
        )
        if undeleted:
            warnings.warn(
                f"pruned, but {len(undeleted)} file(s) could not be deleted yet and will be tried again at the next "
                f"prune: {'; '.join(undeleted)}",
                stacklevel=2,
            )
        return report

    # ------------------------------------------------------------------ helpers

    @contextmanager
    def _reading(self, version: Version) -> Iterator[None]:
        """Read a version's files; one that is pruned meanwhile is not found, which is no corruption."""
        try:
            yield
        except CorruptionError:
            with self.ledger.reading() as conn:
                self.ledger.usable(conn, version, "load")
            raise

    def _note_origin(self, version: Version, weights: object) -> None:
        origins.note((self.uuid, self.policy), origins.Origin(version.number, version.digest), weights)

    def _name(self, version: Version) -> str:
        return f"v{version.number} of policy {self.policy!r}"

    def _check_not_own(self, target: Path) -> None:
        # What stands there is replaced, and without these files the registry is lost.
        if self.place.owns(target):
            raise InUseError(
                f"{target} is one of the registry's own files; nothing was written. Choose another path"
            )


def _reopen(kind: type[Registry], location: str, policy: str) -> Registry:
    return kind.open(location, policy=policy, create=False)


def _moment(what: str, time: datetime | None) -> datetime | None:
    return None if time is None else arguments.moment(what, time)


def _count(limit: int | None) -> int | None:
    return None if limit is None else arguments.count("limit", limit)


def _sought(what: str, name: str | None) -> str | None:
    return None if name is None else arguments.sought(what, name)

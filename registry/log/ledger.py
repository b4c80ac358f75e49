"""The log of a policy: every writing transaction over versions, aliases, pins, metrics and events.

Rules kept here
- A number is taken in the transaction that writes its row; numbers never fall and are never reused.
- The head is the newest version whose state is `stored`; `writing` and `lost` rows are never a head, target or parent.
- Rows are appended. What changes: a version's state, a snapshot's `stored`, aliases, pins, metrics; each with an event.
- Callers that publish, roll back or recover hold the policy's lock; the transactions alone keep readers consistent.

No torch in here: the command line lives on these calls.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

from sqlalchemy import (
    Connection,
    Row,
    Text,
    and_,
    bindparam,
    cast,
    func,
    insert,
    or_,
    select,
)
from sqlalchemy.orm import InstrumentedAttribute

from weightledger.registry import arguments, values
from weightledger.registry.database import Database
from weightledger.registry.errors import CorruptionError, NotFoundError
from weightledger.registry.locks import Locks
from weightledger.registry.log import audit, damage, heads, resolution
from weightledger.registry.log.audit import PolicyRef
from weightledger.registry.log.models import (
    VERSION_STATES,
    Alias,
    EventRow,
    Metric,
    Policy,
    Run,
    Snapshot,
    Structure,
    VersionRow,
    fingerprint_of,
)
from weightledger.registry.log.refs import Meaning, Ref
from weightledger.registry.log.staleness import lineage_of
from weightledger.registry.log.statements import Statement
from weightledger.registry.records import Pin, Version

_STRUCTURES = 64  # remembered at once; a run of training has one or two
_KNOWN_PLACES = 1024  # remembered at once; an update needs those of the head and of the pins
_IN_CHUNK = 500  # bound parameters a statement, well under every database's limit

_POLICY = select(Policy.id).where(Policy.name == bindparam("policy"))
_ROW = select(VersionRow).where(
    VersionRow.policy_id == bindparam("policy"), VersionRow.number == bindparam("number")
)
# A row whose snapshot is not there must not vanish: it is damaged.
_VERSIONS = (
    select(VersionRow, Snapshot.stored.label("file_stored"))
    .outerjoin(Snapshot, Snapshot.id == VersionRow.snapshot_id)
    .where(VersionRow.policy_id == bindparam("policy"))
)
_NO_STATE = or_(
    VersionRow.state < VERSION_STATES[0],
    *(and_(VersionRow.state > low, VersionRow.state < high) for low, high in pairwise(VERSION_STATES)),
    VersionRow.state > VERSION_STATES[-1],
)
"""What is in none of the states, asked for so that an index finds it."""
_VERSION = _VERSIONS.where(VersionRow.number == bindparam("number"))
_ALIASES = (
    select(Alias.name, VersionRow.number)
    .outerjoin(VersionRow, VersionRow.id == Alias.version_id)
    .where(Alias.policy_id == bindparam("policy"))
    .order_by(Alias.name)
)
_METRICS = select(Metric.version_id, Metric.name, Metric.value).where(
    Metric.version_id.in_(bindparam("versions", expanding=True))
)


def _kept_in(snapshot: InstrumentedAttribute[Any], structure: InstrumentedAttribute[Any]) -> Statement:
    """Ask for the file that a column of a version names, and how its content is put together."""
    return Statement(
        select(
            Snapshot.id,
            Snapshot.digest,
            Snapshot.uri,
            Snapshot.file_bytes,
            Snapshot.stored,
            Structure.fingerprint,
            Structure.body,
            VersionRow.digest,
        )
        .select_from(VersionRow)
        .join(Snapshot, Snapshot.id == snapshot)
        .join(Structure, Structure.id == structure)
        .where(VersionRow.policy_id == bindparam("policy"), VersionRow.number == bindparam("number"))
    )


_STORED_AS = _kept_in(VersionRow.snapshot_id, VersionRow.structure_id)
_EXTRA_STORED_AS = _kept_in(VersionRow.extra_snapshot_id, VersionRow.extra_structure_id)
_FILE = select(Snapshot).where(Snapshot.id == bindparam("snapshot"))
_PLACES = select(VersionRow.number, VersionRow.id, VersionRow.digest).where(
    VersionRow.policy_id == bindparam("policy"), VersionRow.number.in_(bindparam("numbers", expanding=True))
)
_RUN = select(Run.id).where(Run.id == bindparam("run"))
_ADD_EVENT = Statement(
    insert(EventRow).values(
        {column: bindparam(column.key) for column in EventRow.__table__.c if column.key != "id"}
    )
)


@dataclass(frozen=True)
class FileEntry:
    """A snapshot row, as publishing and reading need it."""

    id: int
    digest: str
    uri: str
    file_bytes: int
    stored: bool

    def __post_init__(self) -> None:
        """Refuse what no library wrote, before anything is read by it."""
        if type(self.file_bytes) is not int or self.file_bytes < 0 or not isinstance(self.uri, str):
            raise CorruptionError(
                "the record of a snapshot file is damaged: expected a name and a size in bytes, found "
                f"{arguments.shown(self.uri)} and {arguments.shown(self.file_bytes)}. `weightledger verify` lists "
                "every damaged row; restore the database from a backup"
            )


@dataclass(frozen=True)
class Place:
    """What never changes of a version: its row, and the digest of its content."""

    id: int
    digest: str


@dataclass(frozen=True)
class NewFile:
    """A file that is about to be stored."""

    digest: str
    uri: str
    file_bytes: int


@dataclass(frozen=True)
class Entry:
    """What a publish says of its version, beside the weights themselves."""

    digest: str
    size_bytes: int
    nonfinite: tuple[str, ...]
    step: int | None
    metrics: Mapping[str, float]
    metadata: Mapping[str, Any]
    message: str
    shapes: str
    """Hash over names and shapes."""
    dtypes: str
    """In words."""


def now() -> datetime:
    """Return the present time, aware UTC."""
    return datetime.now(UTC)


class Ledger:
    """Reads and writes the log of one policy in one database."""

    def __init__(self, database: Database, locks: Locks, policy: str) -> None:
        self.database = database
        self.locks = locks
        self.policy = policy
        self._known: PolicyRef | None = None
        self._recorded_run: str | None = None
        self._structures: dict[str, int] = {}
        self._fingerprinted: tuple[Any, str] = (None, "")
        """The structure that was looked up last, and its fingerprint: that of an unchanged model is the same object."""
        self._places: dict[int, Place] = {}

    # ------------------------------------------------------------------ transactions and identities

    def reading(self) -> AbstractContextManager[Connection]:
        """Open a consistent view of the database."""
        return self.database.reading()

    @contextmanager
    def writing(self, *, durable: bool = True) -> Iterator[Connection]:
        """Open a writing transaction; it commits at the end of the block, or leaves nothing.

        Args:
            durable: as in `Database.writing`.
        """
        try:
            with self.database.writing(durable=durable) as conn:
                yield conn
        except BaseException:
            # They may have been seen inside of the transaction that is undone now.
            self._known = self._recorded_run = None
            self._structures.clear()
            self._places.clear()
            raise

    def find_policy(self, conn: Connection) -> PolicyRef | None:
        """Look the policy up; None while nothing was ever written to it."""
        if self._known is None:
            found = conn.scalar(_POLICY, {"policy": self.policy})
            self._known = None if found is None else PolicyRef(found, self.policy)
        return self._known

    def policy_ref(self, conn: Connection) -> PolicyRef:
        """Look the policy up, making its row if this is the first write to it."""
        found = self.find_policy(conn)
        if found is not None:
            return found
        made = conn.execute(
            insert(Policy).values(name=self.policy, last_number=0, last_order=0, created_at=now())
        ).inserted_primary_key
        assert made is not None
        return PolicyRef(made[0], self.policy)

    def policies(self, conn: Connection) -> list[str]:
        """Return the names of all policies, sorted."""
        return damage.read(conn, select(Policy.name).order_by(Policy.name), {}, lambda row: str(row[0]))

    def run_id(self, conn: Connection) -> str:
        """Return this process's run, recording it once."""
        run = self.locks.current()
        if self._recorded_run != run.id:
            if conn.scalar(_RUN, {"run": run.id}) is None:
                conn.execute(
                    insert(Run).values(
                        id=run.id,
                        user=run.user,
                        host=run.host,
                        pid=run.pid,
                        program=run.program,
                        started_at=run.started_at,
                    )
                )
            self._recorded_run = run.id
        return run.id

    def event(
        self,
        conn: Connection,
        kind: str,
        *,
        version: int | None = None,
        worker: str | None = None,
        reason: str = "",
        details: Mapping[str, Any] | None = None,
    ) -> None:
        """Append one line to the journal."""
        self.events(conn, [(kind, version, worker, reason, details or {})])

    def events(
        self,
        conn: Connection,
        lines: Sequence[tuple[str, int | None, str | None, str, Mapping[str, Any]]],
    ) -> None:
        """Append lines of (kind, version, worker, reason, details) to the journal."""
        if not lines:
            return
        policy, run, at = self.policy_ref(conn), self.run_id(conn), now()
        user = self.locks.current().user
        _ADD_EVENT.run_each(
            conn,
            ("kind", "version", "worker", "reason", "details"),
            [
                (kind, version, worker, reason, values.encode(dict(details), "event details"))
                for kind, version, worker, reason, details in lines
            ],
            policy_id=policy.id,
            at=at,
            run_id=run,
            user=user,
        )

    def structure_id(self, conn: Connection, structure: Mapping[str, Any]) -> int:
        """Return the row of a structure, which nobody changes, making it if no version had it before."""
        last, fingerprint = self._fingerprinted
        if last is not structure:
            fingerprint = fingerprint_of(_structure_text(structure))
            self._fingerprinted = (structure, fingerprint)
        found = self._structures.get(fingerprint)
        if found is None:
            found = conn.scalar(select(Structure.id).where(Structure.fingerprint == fingerprint))
        if found is None:
            made = conn.execute(
                insert(Structure).values(fingerprint=fingerprint, body=_structure_text(structure))
            ).inserted_primary_key
            assert made is not None
            found = int(made[0])
        if len(self._structures) >= _STRUCTURES:
            self._structures.clear()
        self._structures[fingerprint] = found
        return found

    # ------------------------------------------------------------------ looking versions up

    def head_number(self, conn: Connection) -> int | None:
        """Return the head's number; None while nothing is stored.

        Raises:
            CorruptionError: A newer version has a damaged state, so that nobody can tell which one is the head.
        """
        policy = self.find_policy(conn)
        return None if policy is None else heads.head_number(conn, policy)

    def head(self, conn: Connection) -> Version:
        """Return the head.

        Raises:
            NotFoundError: the policy has no stored version.
        """
        number = self.head_number(conn)
        if number is None:
            raise NotFoundError(self._nothing_yet(conn))
        return self.version(conn, number)

    def version(self, conn: Connection, number: int) -> Version:
        """Return one version, whatever its state.

        Raises:
            NotFoundError: no row has that number.
        """
        policy = self.find_policy(conn)
        found: list[Version] = []
        # A larger number than a row can have would be the driver's error, not ours.
        if policy is not None and 0 < number <= arguments.MOST:
            found = self._read(conn, policy, _VERSION, {"number": number})
        if not found:
            raise NotFoundError(self._no_such_version(conn, number))
        return found[0]

    def versions(self, conn: Connection, limit: int | None = None) -> list[Version]:
        """Return stored, pruned and damaged versions, oldest first; with a limit the newest so many."""
        policy = self.find_policy(conn)
        if policy is None:
            return []
        found: list[Version] = []
        for where, suspect in ((VersionRow.state == "stored", False), (_NO_STATE, True)):
            query = _VERSIONS.where(where).order_by(VersionRow.number.desc()).limit(limit)
            rows = damage.listed(conn, query, {"policy": policy.id}, _Read, suspect=suspect)
            metrics, worse = self._metrics(conn, [each.row.id for each in rows])
            found += [
                _version(policy.name, each, metrics, _both(each.damaged, worse.get(each.row.id, "")))
                for each in rows
            ]
        found.sort(key=lambda version: version.number or 0)
        return found if limit is None else found[max(0, len(found) - limit) :]

    def kept_versions(self, conn: Connection) -> list[Version]:
        """Return the versions that have their weights, oldest first; of a long training most were pruned."""
        policy = self.find_policy(conn)
        if policy is None:
            return []
        kept = or_(Snapshot.stored, Snapshot.id.is_(None))  # what names no snapshot is damaged
        return self._read(conn, policy, _VERSIONS.where(VersionRow.state == "stored", kept))

    def resolve(self, conn: Connection, ref: Ref | Meaning) -> Version:
        """Return the version that a reference names; see `refs`.

        Raises:
            NotFoundError: nothing bears that name, or several contents do; the text says what exists.
            TypeError: `ref` is no reference.
        """
        return resolution.resolve(self, conn, ref)

    def usable(self, conn: Connection, ref: Ref | Meaning, what: str) -> Version:
        """Return a version whose weights can be loaded.

        Raises:
            NotFoundError: it does not exist, was lost or pruned; the text names the nearest kept versions.
        """
        found = self.resolve(conn, ref)
        if found.stored:
            return found
        why = {
            "pruned": "its weights were pruned",
            "lost": "its writer died before it was stored",
            "writing": "it is still being written",
        }[found.state]
        near = self._nearest_stored(conn, found.number)
        hint = f"the nearest kept versions are {near}" if near else "no version has weights any more"
        raise NotFoundError(f"cannot {what} v{found.number} of policy {self.policy!r}: {why}; {hint}")

    def since(self, conn: Connection, number: int) -> list[Version]:
        """Return the stored versions after a number, oldest first."""
        policy = self.find_policy(conn)
        if policy is None:
            return []
        return self._read(
            conn, policy, _VERSIONS.where(VersionRow.number > number, VersionRow.state == "stored")
        )

    def places(self, conn: Connection, numbers: Collection[int]) -> dict[int, Place]:
        """Return the rows of versions by number; those that there are not are left out."""
        policy = self.find_policy(conn)
        missing = [number for number in numbers if number not in self._places]
        if policy is not None and missing:
            for number, key, digest in conn.execute(_PLACES, {"policy": policy.id, "numbers": missing}):
                self.learn(number, Place(key, digest))
        return {number: self._places[number] for number in numbers if number in self._places}

    def learn(self, number: int, place: Place) -> None:
        """Remember where a version stands."""
        if len(self._places) >= _KNOWN_PLACES:
            self._places.clear()
        self._places[number] = place

    def files_of(self, conn: Connection, number: int) -> tuple[FileEntry, FileEntry | None]:
        """Return the snapshot of a version, and that of its extra state."""
        row = self.row(conn, number)
        weights = self.file(conn, row.snapshot_id)
        self._check_own(number, weights, row.digest)
        return weights, None if row.extra_snapshot_id is None else self.file(conn, row.extra_snapshot_id)

    def files_by_number(self, conn: Connection) -> dict[int, tuple[int, int | None]]:
        """Return, for every version that has its weights, the rows of its snapshot and of its extra state's."""
        policy = self.find_policy(conn)
        if policy is None:
            return {}
        rows = conn.execute(
            select(VersionRow.number, VersionRow.snapshot_id, VersionRow.extra_snapshot_id)
            .join(Snapshot, Snapshot.id == VersionRow.snapshot_id)
            .where(VersionRow.policy_id == policy.id, VersionRow.state == "stored", Snapshot.stored)
        )
        return {number: (weights, extra) for number, weights, extra in rows}

    def stored_as(self, conn: Connection, number: int) -> tuple[FileEntry, dict[str, Any]]:
        """Return the snapshot of a version that there is, and how its weights are put together."""
        found = self._stored_as(conn, _STORED_AS, number)
        assert found is not None
        file, structure, digest = found
        self._check_own(number, file, digest)
        return file, structure

    def extra_stored_as(self, conn: Connection, number: int) -> tuple[FileEntry, dict[str, Any]] | None:
        """Return the same of a version's extra state; None when it has none."""
        found = self._stored_as(conn, _EXTRA_STORED_AS, number)
        return None if found is None else found[:2]

    def same_content(self, conn: Connection, version: Version) -> list[int]:
        """Return the numbers of the other stored or pruned versions that have a version's content, oldest first."""
        policy = self.find_policy(conn)
        assert policy is not None
        found = conn.execute(
            select(VersionRow.number, VersionRow.state)
            .where(VersionRow.policy_id == policy.id, VersionRow.digest == version.digest)
            .order_by(VersionRow.number)
        )
        return [number for number, state in found if state == "stored" and number != version.number]

    def lineage_of_head(self, conn: Connection) -> tuple[tuple[int, int], ...]:
        """Return the closed number ranges that the head descends through, newest first."""
        policy, head = self.find_policy(conn), self.head_number(conn)
        if policy is None or head is None:
            return ()
        return lineage_of(conn, policy, head)

    def previous_content(self, conn: Connection) -> Version:
        """Return the nearest stored version on the head's lineage whose content differs from the head's.

        One without NaN and infinity, if there is any: of a run that broke several versions ago none of the broken ones
        is worth going back to. Where a mask holds infinities on purpose there is none, and the nearest is taken.

        Raises:
            NotFoundError: there is none to go back to.
        """
        head, policy = self.head(conn), self.find_policy(conn)
        assert policy is not None
        ranges = self.lineage_of_head(conn)
        other = (
            select(func.max(VersionRow.number))
            .join(Snapshot, Snapshot.id == VersionRow.snapshot_id)
            .where(
                VersionRow.policy_id == policy.id,
                VersionRow.state == "stored",
                VersionRow.digest != head.digest,
                Snapshot.stored,
            )
        )
        for query in (other.where(cast(VersionRow.nonfinite, Text) == "[]"), other):
            for low, high in ranges:
                number = conn.scalar(query.where(VersionRow.number.between(low, high)))
                if number is not None:
                    return self.version(conn, number)
        raise NotFoundError(
            f"nothing to roll back to: no stored version on the lineage of v{head.number} of policy "
            f"{self.policy!r}, which begins at v{ranges[-1][0]}, has other content than it; name a version to restore "
            f"({self.span(conn)})"
        )

    def aliases(self, conn: Connection) -> dict[str, int]:
        """Return every alias and the number it stands for.

        Raises:
            CorruptionError: one of them is damaged.
        """
        policy = self.find_policy(conn)
        if policy is None:
            return {}
        return dict(damage.read(conn, _ALIASES, {"policy": policy.id}, lambda row: (row.name, row.number)))

    def listed_aliases(self, conn: Connection) -> tuple[dict[str, int], list[str]]:
        """Return the aliases that can be read, and what is damaged of the others."""
        policy = self.find_policy(conn)
        if policy is None:
            return {}, []
        found = damage.listed(
            conn, _ALIASES, {"policy": policy.id}, lambda row, why: (row.name, row.number, why)
        )
        return {name: number for name, number, why in found if not why}, [why for *_, why in found if why]

    def pins(self, conn: Connection) -> list[Pin]:
        """Return the pins, oldest first."""
        policy = self.find_policy(conn)
        if policy is None:
            return []
        return audit.pins(conn, policy)

    # ------------------------------------------------------------------ helpers

    def row(self, conn: Connection, number: int) -> Row[Any]:
        policy = self.find_policy(conn)
        row = None
        if policy is not None:
            row = conn.execute(_ROW, {"policy": policy.id, "number": number}).first()
        if row is None:
            raise NotFoundError(self._no_such_version(conn, number))
        return row

    def file(self, conn: Connection, snapshot_id: int) -> FileEntry:
        return file_entry(conn.execute(_FILE, {"snapshot": snapshot_id}).one())

    def _stored_as(
        self, conn: Connection, statement: Statement, number: int
    ) -> tuple[FileEntry, dict[str, Any], str] | None:
        row = statement.first(conn, policy=self.policy_ref(conn).id, number=number)
        if row is None:
            return None
        key, digest, uri, file_bytes, stored, fingerprint, body, of_version = row
        file = FileEntry(key, digest, uri, file_bytes, bool(stored))
        return file, self._structure(number, fingerprint, body), of_version

    def _check_own(self, number: int, file: FileEntry, digest: str) -> None:
        """Refuse a version's file that the record has another content for: the row may point at a neighbour's."""
        if file.digest != digest:
            raise CorruptionError(
                f"the record of v{number} of policy {self.policy!r} is damaged: expected a file with the content "
                f"{digest}, found that it points at one with {file.digest}. `weightledger verify` lists every damaged "
                "row; restore the database from a backup"
            )

    def _structure(self, number: int, fingerprint: Any, body: Any) -> dict[str, Any]:
        found = fingerprint_of(body) if isinstance(body, str) else None
        if found is None or found != fingerprint:
            raise CorruptionError(
                f"how v{number} of policy {self.policy!r} is put together is damaged in the database: expected a text "
                f"with the SHA-256 {arguments.shown(fingerprint)}, found "
                f"{f'one with {found}' if found else arguments.shown(body)}. Its weights are whole in their file; "
                "restore registry.db from a backup, or load the file itself with safetensors"
            )
        try:
            structure: dict[str, Any] = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise CorruptionError(
                f"how v{number} of policy {self.policy!r} is put together cannot be read in the database: "
                f"{type(error).__name__}: {error}"
            ) from error
        return structure

    def _read(
        self,
        conn: Connection,
        policy: PolicyRef,
        query: damage.AnySelect,
        named: Mapping[str, Any] | None = None,
    ) -> list[Version]:
        """Return versions, oldest first; raises if one of them is damaged."""
        rows = damage.read(
            conn, query.order_by(VersionRow.number), {"policy": policy.id, **(named or {})}, _Read
        )
        metrics, worse = self._metrics(conn, [each.row.id for each in rows])
        if worse:
            raise CorruptionError(damage.told(conn, list(worse.values())))
        return [_version(policy.name, each, metrics) for each in rows]

    def _metrics(
        self, conn: Connection, keys: Sequence[int]
    ) -> tuple[dict[int, dict[str, float]], dict[int, str]]:
        """Return, by the row of a version, its metrics, and what of them is damaged."""
        metrics: dict[int, dict[str, float]] = {}
        worse: dict[int, str] = {}
        for chunk in _chunks(keys):
            for key, name, value, why in damage.listed(
                conn, _METRICS, {"versions": chunk}, lambda row, why: (*row, why)
            ):
                if why:
                    worse[key] = _both(worse.get(key, ""), why)
                else:
                    metrics.setdefault(key, {})[name] = float("nan") if value is None else value
        return metrics, worse

    def _nearest_stored(self, conn: Connection, number: int) -> str:
        policy = self.find_policy(conn)
        if policy is None:
            return ""
        stored = (
            select(VersionRow.number)
            .join(Snapshot, Snapshot.id == VersionRow.snapshot_id)
            .where(VersionRow.policy_id == policy.id, VersionRow.state == "stored", Snapshot.stored)
        )
        below = conn.scalar(
            stored.where(VersionRow.number < number).order_by(VersionRow.number.desc()).limit(1)
        )
        above = conn.scalar(stored.where(VersionRow.number > number).order_by(VersionRow.number).limit(1))
        return " and ".join(f"v{found}" for found in (below, above) if found is not None)

    def span(self, conn: Connection) -> str:
        """Say which versions there are."""
        policy = self.find_policy(conn)
        low = high = None
        if policy is not None:
            low, high = conn.execute(
                select(func.min(VersionRow.number), func.max(VersionRow.number)).where(
                    VersionRow.policy_id == policy.id, VersionRow.state == "stored"
                )
            ).one()
        return "it has no versions yet" if low is None else f"versions are {low}..{high}"

    def _no_such_version(self, conn: Connection, number: int) -> str:
        which = str(number) if abs(number) <= arguments.MOST else "of so large a number"
        return f"no version {which} in policy {self.policy!r}: {self.span(conn)}"

    def _nothing_yet(self, conn: Connection) -> str:
        others = ", ".join(repr(name) for name in self.policies(conn) if name != self.policy)
        known = f"; other policies are: {others}" if others else ""
        return f"policy {self.policy!r} has no versions yet; publish one first{known}"

    def metric_names(self, conn: Connection) -> str:
        policy = self.find_policy(conn)
        names: list[str] = []
        if policy is not None:
            names = sorted(conn.scalars(select(Metric.name).where(Metric.policy_id == policy.id).distinct()))
        return f"; metrics that were recorded: {', '.join(names) or 'none'}"


class _Read:
    """A version's row, with what was kept as JSON in it decoded."""

    def __init__(self, row: Any, damaged: str = "") -> None:
        self.row = row
        self.damaged = damaged
        if not damaged and (row.parent or 0) >= row.number:
            raise ValueError("a version's parent is older than it")
        self.metadata = {} if row.metadata is None else values.decode(row.metadata)
        self.nonfinite = () if row.nonfinite is None else tuple(row.nonfinite)


def _version(
    policy: str, read: _Read, metrics: Mapping[int, Mapping[str, float]], damaged: str = ""
) -> Version:
    row = read.row
    state: Any = "damaged" if damaged else row.state
    if state == "stored" and not row.file_stored:
        state = "pruned"
    return Version(
        policy=policy,
        number=row.number,
        digest=row.digest,
        parent=row.parent,
        restores=row.restores,
        run=row.run_id,
        step=row.step,
        metrics=metrics.get(row.id, {}),
        metadata=read.metadata,
        message=row.message,
        size_bytes=row.size_bytes,
        created_at=row.created_at,
        stored=state == "stored",
        state=state,
        nonfinite=read.nonfinite,
        has_extra=row.extra_snapshot_id is not None,
        dtypes=row.dtypes,
        damage=damaged,
    )


def _both(one: str, other: str) -> str:
    return f"{one}; {other}" if one and other else one or other


def file_entry(row: Row[Any]) -> FileEntry:
    return FileEntry(row.id, row.digest, row.uri, row.file_bytes, row.stored)


def _structure_text(structure: Mapping[str, Any]) -> str:
    return json.dumps(structure, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def _chunks(keys: Sequence[int]) -> Iterator[Sequence[int]]:
    for start in range(0, len(keys), _IN_CHUNK):
        yield keys[start : start + _IN_CHUNK]

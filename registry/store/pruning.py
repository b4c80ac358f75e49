"""Deleting snapshot files that no rule keeps and nobody needs.

The rows that say so are committed first, in the transaction that looks at what protects them; files are unlinked after.
A publish of equal content takes its share in a transaction that sees the row stored, so either the share protects the
file or the publish writes its own. A file that cannot be unlinked stays marked and is tried again by the next prune.

A file that versions of several policies name goes with the last of them: each policy's prune notes what it let go of,
and the prune that lets go last, if nobody needs the others' by then, takes them all.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import Connection, select, update
from sqlalchemy.orm import InstrumentedAttribute

from weightledger.registry.errors import NotFoundError
from weightledger.registry.log import fleet
from weightledger.registry.log.ledger import Ledger
from weightledger.registry.log.models import HoldingRow, Policy, Snapshot, VersionRow, Worker
from weightledger.registry.records import PruneReport
from weightledger.registry.store import retention
from weightledger.registry.store.recovery import delete_marked
from weightledger.registry.store.snapshots import SnapshotStore

BestRule = tuple[str, int] | tuple[str, int, str]

_IN_CHUNK = 500  # bound parameters a statement, well under every database's limit
_Key = tuple[int, int]
"""A version: the row of its policy, and its number."""


@dataclass(frozen=True)
class _Named:
    """A version that has its weights, or is being written, and the files that it names."""

    key: _Key
    policy: str
    writing: bool
    released: bool
    weights: int
    extra: int | None

    @property
    def files(self) -> set[int]:
        return {self.weights} if self.extra is None else {self.weights, self.extra}


def prune(
    ledger: Ledger,
    store: SnapshotStore,
    *,
    keep_last: int | None,
    keep_every: int | None,
    keep_best: BestRule | None,
    forget_worker: str | None,
    dry_run: bool,
) -> tuple[PruneReport, list[str]]:
    """Prune one policy; returns the report, and the files that could not be deleted, each with its reason."""
    with ledger.reading() if dry_run else ledger.writing() as conn:
        forgotten: list[tuple[int, str]] = []
        if forget_worker is not None:
            forgotten = fleet.forgettable(ledger, conn, forget_worker, ledger.locks.alive)
        # Only what has its weights: a prune must not cost more with every version that was pruned before.
        versions = ledger.kept_versions(conn)
        files = ledger.files_by_number(conn)
        # Only the weights' file counts: many versions may share one small extra state, and that must not keep them all.
        candidates = [
            retention.Candidate(each.number, files[each.number][0], metrics=each.metrics) for each in versions
        ]
        kept = retention.keep_reasons(
            candidates,
            **_needs(ledger, conn, {key for key, _ in forgotten}),
            keep_last=keep_last,
            keep_every=keep_every,
            keep_best=keep_best,
        )
        if keep_best is not None and candidates:
            _check_recorded(ledger, conn, candidates, keep_best[0])
        loose = [each.number for each in versions if each.number not in kept]
        partners = _partners(ledger, conn, {files[number][0] for number in loose})
        needed = _needed(ledger, conn, partners)
        for number in loose:
            if files[number][0] in needed:
                kept[number] = (needed[files[number][0]],)
        going = [each for each in versions if each.number not in kept]
        report = PruneReport(going, kept)
        if dry_run:
            return report, []
        if forgotten:
            fleet.forget(ledger, conn, forgotten)
        policy = ledger.find_policy(conn)
        if policy is not None:
            stays = [number for number in loose if number in kept]
            _note_released(conn, policy.id, [each.number for each in versions], stays)
        if going and policy is not None:
            weights = {files[each.number][0] for each in going}
            others = [each for each in partners if each.weights in weights]
            _let_go(
                conn, {(policy.id, each.number) for each in going} | {each.key for each in others}, weights
            )
            ledger.event(conn, "prune", details={"versions": [each.number for each in going]})
            _tell_others(ledger, conn, others)
            report = PruneReport([replace(each, state="pruned", stored=False) for each in going], kept)
    return report, _delete_marked(ledger, store)


def _check_recorded(
    ledger: Ledger, conn: Connection, candidates: Iterable[retention.Candidate], metric: str
) -> None:
    # A name that no version has would protect nothing: a slip of the pen must not cost the best weights.
    if not any(metric in each.metrics for each in candidates):
        raise NotFoundError(
            f"prune: keep_best names {metric!r}, which no stored version of policy {ledger.policy!r} has; "
            f"nothing was pruned{ledger.metric_names(conn)}"
        )


# ---------------------------------------------------------------------- who needs what


def _needs(ledger: Ledger, conn: Connection, forgotten: Collection[int] = ()) -> retention.Needs:
    """Look at who needs versions of a policy; workers that are forgotten, given by row, need none."""
    held, pending = _holders(ledger, conn, forgotten)
    return retention.Needs(
        head=ledger.head_number(conn),
        goal=_goal(ledger, conn),
        aliases=_names_by_version((number, name) for name, number in ledger.aliases(conn).items()),
        pins=_names_by_version((pin.version, pin.worker) for pin in ledger.pins(conn)),
        held=held,
        pending=pending,
    )


def _goal(ledger: Ledger, conn: Connection) -> int | None:
    try:
        return ledger.previous_content(conn).number
    except NotFoundError:
        return None  # nothing was published, or there was nothing to go back to before this prune either


def _holders(
    ledger: Ledger, conn: Connection, forgotten: Collection[int]
) -> tuple[dict[int, tuple[str, ...]], dict[int, tuple[str, ...]]]:
    """Return, by version, the workers that hold it or may, and those that it was pushed to without an answer."""
    policy = ledger.find_policy(conn)
    if policy is None:
        return {}, {}
    rows = conn.execute(
        select(HoldingRow.number, HoldingRow.confirmed_at, Worker.id, Worker.name, Worker.run_id)
        .join(Worker, Worker.id == HoldingRow.worker_id)
        .where(HoldingRow.policy_id == policy.id, HoldingRow.ended_at.is_(None))
    ).all()
    living = {run: ledger.locks.alive(run) for run in {row.run_id for row in rows}}
    open_rows = [
        (row.number, row.name if living[row.run_id] else f"{row.name} (its run is gone)", row.confirmed_at)
        for row in rows
        if row.id not in forgotten
    ]
    return (
        _names_by_version((number, name) for number, name, confirmed in open_rows if confirmed is not None),
        _names_by_version((number, name) for number, name, confirmed in open_rows if confirmed is None),
    )


def _names_by_version(pairs: Iterable[tuple[int, str]]) -> dict[int, tuple[str, ...]]:
    names: dict[int, list[str]] = {}
    for number, name in pairs:
        names.setdefault(number, []).append(name)
    return {number: tuple(listed) for number, listed in names.items()}


# ---------------------------------------------------------------------- files of several policies


def _partners(ledger: Ledger, conn: Connection, weights: Collection[int]) -> list[_Named]:
    """Return what else names these files of weights: versions of other policies, and those that are being written."""
    policy = ledger.find_policy(conn)
    return [
        each
        for each in _naming(conn, VersionRow.snapshot_id, weights)
        if each.writing or policy is None or each.key[0] != policy.id
    ]


def _needed(ledger: Ledger, conn: Connection, partners: Sequence[_Named]) -> dict[int, str]:
    """Return those files that others than the pruned policy need, and who does, in words."""
    needed: dict[int, str] = {}
    released: dict[str, list[_Named]] = {}
    for each in partners:
        if each.writing:
            needed[each.weights] = "shares its file with a version being written"
        elif not each.released:
            needed[each.weights] = _shared(each)
        else:
            released.setdefault(each.policy, []).append(each)
    for name, versions in released.items():
        other = Ledger(ledger.database, ledger.locks, name)
        wanted = {number for number, _ in retention.reasons_of(_needs(other, conn))}
        needed.update({each.weights: _shared(each) for each in versions if each.key[1] in wanted})
    return needed


def _shared(other: _Named) -> str:
    return f"shares its file with v{other.key[1]} of another policy, {other.policy!r}"


def _naming(conn: Connection, column: InstrumentedAttribute[Any], files: Collection[int]) -> Iterator[_Named]:
    for some in _chunks(sorted(files)):
        rows = conn.execute(
            select(
                VersionRow.policy_id,
                VersionRow.number,
                Policy.name,
                VersionRow.state,
                VersionRow.released,
                VersionRow.snapshot_id,
                VersionRow.extra_snapshot_id,
            )
            .join(Policy, Policy.id == VersionRow.policy_id)
            .join(Snapshot, Snapshot.id == VersionRow.snapshot_id)
            .where(
                column.in_(some),
                (VersionRow.state == "writing") | ((VersionRow.state == "stored") & Snapshot.stored),
            )
        )
        for policy, number, name, state, released, weights, extra in rows:
            yield _Named((policy, number), name, state == "writing", bool(released), weights, extra)


def _chunks(keys: Sequence[int]) -> Iterator[Sequence[int]]:
    for start in range(0, len(keys), _IN_CHUNK):
        yield keys[start : start + _IN_CHUNK]


# ---------------------------------------------------------------------- letting go


def _note_released(conn: Connection, policy: int, stored: Sequence[int], released: Collection[int]) -> None:
    """Note, of the stored versions of a policy, which ones only others keep the file of by now."""
    for numbers in _chunks(stored):
        these = (VersionRow.policy_id == policy, VersionRow.number.in_(numbers))
        noted = set(conn.scalars(select(VersionRow.number).where(*these, VersionRow.released.is_(True))))
        wanted = set(numbers) & set(released)
        for value, changed in ((True, wanted - noted), (False, noted - wanted)):
            conn.execute(
                update(VersionRow).where(these[0], VersionRow.number.in_(changed)).values(released=value)
            )


def _let_go(conn: Connection, going: Collection[_Key], weights: Collection[int]) -> None:
    """Mark the files that only versions which go name."""
    named = [each for each in _naming(conn, VersionRow.snapshot_id, weights) if each.key in going]
    gone = {file for each in named for file in each.files}
    for column in (VersionRow.snapshot_id, VersionRow.extra_snapshot_id):
        for each in _naming(conn, column, sorted(gone)):
            if each.key not in going:
                gone -= each.files
    for key in sorted(gone):
        conn.execute(update(Snapshot).where(Snapshot.id == key).values(stored=False, deleting=True))


def _tell_others(ledger: Ledger, conn: Connection, others: Iterable[_Named]) -> None:
    """Write into the journals of other policies which of their versions went with this prune."""
    numbers: dict[str, list[int]] = {}
    for each in others:
        numbers.setdefault(each.policy, []).append(each.key[1])
    for name, gone in numbers.items():
        Ledger(ledger.database, ledger.locks, name).event(
            conn,
            "prune",
            reason=f"policy {ledger.policy!r} let go of the same content",
            details={"versions": sorted(gone)},
        )


def _delete_marked(ledger: Ledger, store: SnapshotStore) -> list[str]:
    with ledger.reading() as conn:
        rows = conn.execute(select(Snapshot.id, Snapshot.uri).where(Snapshot.deleting)).all()
    return delete_marked(ledger, store, [(key, uri) for key, uri in rows])

"""Deleting snapshot files that no rule keeps and nobody needs.

The rows that say so are committed first, in the transaction that looks at what protects them; files are unlinked after.
A publish of equal content takes its share in a transaction that sees the row stored, so either the share protects the
file or the publish writes its own. A file that cannot be unlinked stays marked and is tried again by the next prune.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from sqlalchemy import Connection, select, update

from weightledger.registry.errors import NotFoundError
from weightledger.registry.log.ledger import Ledger
from weightledger.registry.log.models import HoldingRow, Snapshot, VersionRow, Worker
from weightledger.registry.records import PruneReport, Version
from weightledger.registry.store import retention
from weightledger.registry.store.recovery import delete_marked
from weightledger.registry.store.snapshots import SnapshotStore

BestRule = tuple[str, int] | tuple[str, int, str]


def prune(
    ledger: Ledger,
    store: SnapshotStore,
    *,
    keep_last: int | None,
    keep_every: int | None,
    keep_best: BestRule | None,
    dry_run: bool,
) -> tuple[PruneReport, list[str]]:
    """Prune one policy; returns the report, and the files that could not be deleted, each with its reason."""
    with ledger.reading() if dry_run else ledger.writing() as conn:
        files = ledger.files_by_number(conn)
        candidates, versions = _candidates(ledger, conn, files)
        kept = retention.keep_reasons(
            candidates,
            head=ledger.head_number(conn),
            aliases=_names_by_version((number, name) for name, number in ledger.aliases(conn).items()),
            pins=_names_by_version((pin.version, pin.worker) for pin in ledger.pins(conn)),
            held=_holders(ledger, conn),
            keep_last=keep_last,
            keep_every=keep_every,
            keep_best=keep_best,
        )
        if keep_best is not None and candidates:
            _check_recorded(ledger, conn, candidates, keep_best[0])
        elsewhere = _named_elsewhere(ledger, conn)
        for version in versions:
            if files[version.number][0] in elsewhere:
                shared = "shares its file with another policy, or with a version being written"
                kept[version.number] = (*kept.get(version.number, ()), shared)
        going = [version for version in versions if version.number not in kept]
        report = PruneReport(going, kept)
        if dry_run:
            return report, []
        if going:
            needed = elsewhere | {key for number in kept for key in files[number]}
            _mark_gone(conn, {key for version in going for key in files[version.number]} - needed)
            ledger.event(conn, "prune", details={"versions": [version.number for version in going]})
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


def _candidates(
    ledger: Ledger, conn: Connection, files: Mapping[int, tuple[int, int | None]]
) -> tuple[list[retention.Candidate], list[Version]]:
    # Only what has its weights: a prune must not cost more with every version that was pruned before.
    versions = ledger.kept_versions(conn)
    # Only the weights' file counts: many versions may share one small extra state, and that must not keep them all.
    candidates = [
        retention.Candidate(
            number=version.number,
            snapshot=files[version.number][0],
            extra_snapshot=None,
            metrics=version.metrics,
        )
        for version in versions
    ]
    return candidates, versions


def _named_elsewhere(ledger: Ledger, conn: Connection) -> set[int | None]:
    policy = ledger.find_policy(conn)
    found: set[int | None] = set()
    if policy is not None:
        query = (
            select(VersionRow.snapshot_id, VersionRow.extra_snapshot_id)
            .join(Snapshot, Snapshot.id == VersionRow.snapshot_id)
            .where(
                (VersionRow.state == "writing")
                | ((VersionRow.policy_id != policy.id) & (VersionRow.state == "stored") & Snapshot.stored)
            )
        )
        for pair in conn.execute(query):
            found.update(pair)
    return found


def _holders(ledger: Ledger, conn: Connection) -> dict[int, tuple[str, ...]]:
    """Return, by version, the workers that hold it, may hold it, or are about to."""
    policy = ledger.find_policy(conn)
    if policy is None:
        return {}
    rows = conn.execute(
        select(HoldingRow.number, Worker.name)
        .join(Worker, Worker.id == HoldingRow.worker_id)
        .where(HoldingRow.policy_id == policy.id, HoldingRow.ended_at.is_(None))
    )
    return _names_by_version((number, name) for number, name in rows)


def _names_by_version(pairs: Iterable[tuple[int, str]]) -> dict[int, tuple[str, ...]]:
    names: dict[int, tuple[str, ...]] = {}
    for number, name in pairs:
        names[number] = (*names.get(number, ()), name)
    return names


def _mark_gone(conn: Connection, keys: set[int | None]) -> None:
    for key in keys - {None}:
        conn.execute(update(Snapshot).where(Snapshot.id == key).values(stored=False, deleting=True))


def _delete_marked(ledger: Ledger, store: SnapshotStore) -> list[str]:
    with ledger.reading() as conn:
        rows = conn.execute(select(Snapshot.id, Snapshot.uri).where(Snapshot.deleting)).all()
    return delete_marked(ledger, store, [(key, uri) for key, uri in rows])

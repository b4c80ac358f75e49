"""What the next open does about writers that died half-way.

A writer holds its policy's lock, and the lock dies with it. So whoever gets the lock knows that a `writing` row, or a
temporary file with the policy's tag, has no living owner: the row becomes `lost`, the file goes. A row is marked before
its files are deleted, and they keep a mark until they are gone, so that whoever dies in between leaves nothing unfound.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import ExitStack

from sqlalchemy import or_, select, update

from weightledger.registry.database import Database
from weightledger.registry.errors import StorageError
from weightledger.registry.locks import Locks
from weightledger.registry.log import versioning
from weightledger.registry.log.ledger import Ledger
from weightledger.registry.log.models import Policy, Snapshot, VersionRow
from weightledger.registry.logs import log
from weightledger.registry.store.snapshots import SnapshotStore

_TEMPORARY = re.compile(r"([0-9a-f]{8}-)[0-9a-f]{16}")
"""A temporary file of ours: its policy's tag, and a part that no other file has."""
_WRITING = select(VersionRow.id).where(VersionRow.policy_id == Policy.id, VersionRow.state == "writing")
_UNDELETED = (
    select(VersionRow.id)
    .join(Snapshot, Snapshot.id.in_((VersionRow.snapshot_id, VersionRow.extra_snapshot_id)))
    .where(VersionRow.policy_id == Policy.id, VersionRow.state == "lost", Snapshot.deleting)
)


def recover(database: Database, locks: Locks, store: SnapshotStore) -> None:
    """Tell apart what dead writers of any policy left; policies with a live writer are passed by.

    A registry that this process may not write to is left as it is: a reader has nothing to mend there.
    """
    if database.read_only:
        return
    with database.reading() as conn:
        names = conn.scalars(select(Policy.name).where(or_(_WRITING.exists(), _UNDELETED.exists()))).all()
    for name in sorted(names):
        with ExitStack() as stack:
            if stack.enter_context(locks.try_policy(name)):
                recover_locked(Ledger(database, locks, name), store)
    for tag in sorted(set(filter(None, map(tag_of, store.leftovers())))):
        with locks.try_tag(tag) as free:
            # Listed again: who held the lock until now may have committed or removed its own.
            for file_id in store.leftovers() if free else ():
                if tag_of(file_id) == tag:
                    store.discard(file_id)


def recover_locked(ledger: Ledger, store: SnapshotStore) -> None:
    """Do it for the rows of one policy, whose lock the caller holds."""
    with ledger.reading() as conn:
        found = versioning.unfinished(ledger, conn)
    if found:
        with ledger.writing() as conn:
            for number in found:
                versioning.lose_version(ledger, conn, number, "its writer died before it was stored")
        numbers = ", ".join(f"v{number}" for number in found)
        log.info(
            "the writer of %s of policy %r died before it was stored: it is marked lost",
            numbers,
            ledger.policy,
        )
    clear_lost(ledger, store)


def clear_lost(ledger: Ledger, store: SnapshotStore) -> list[str]:
    """Delete the files of a policy's lost versions; returns why some could not be, which the next open tries again."""
    with ledger.reading() as conn:
        marked = versioning.lost_files(ledger, conn)
    return delete_marked(ledger, store, marked)


def delete_marked(ledger: Ledger, store: SnapshotStore, marked: Iterable[tuple[int, str]]) -> list[str]:
    """Delete files that are marked for it, given by row and URI, and take the mark away.

    Returns:
        Why some could not be deleted; they keep their mark.
    """
    done, failed = [], []
    for key, uri in marked:
        try:
            store.delete(uri)
            done.append(key)
        except StorageError as error:
            failed.append(str(error))
    if done:
        with ledger.writing() as conn:
            for key in done:
                conn.execute(update(Snapshot).where(Snapshot.id == key).values(deleting=False))
    return failed


def is_written(locks: Locks, file_id: str) -> bool:
    """Tell whether a temporary file may have a living writer."""
    tag = tag_of(file_id)
    return tag is not None and locks.tag_is_held(tag)


def tag_of(file_id: str) -> str | None:
    """Return the tag of the policy that a temporary file belongs to; None when the file is none of ours."""
    found = _TEMPORARY.fullmatch(file_id)
    return None if found is None else found[1]

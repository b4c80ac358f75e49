"""What the next open does about writers that died half-way.

A writer holds its policy's lock, and the lock dies with it. So whoever gets the lock knows that a `writing` row, or a
temporary file with the policy's tag, has no living owner: the row becomes `lost`, the file goes.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from contextlib import ExitStack
from pathlib import Path

from sqlalchemy import Engine, select

from weightledger.registry.log import versioning
from weightledger.registry.log.engine import reading
from weightledger.registry.log.ledger import Ledger
from weightledger.registry.log.models import Policy, VersionRow
from weightledger.registry.log.runs import RunKeeper, file_tag, try_policy_lock
from weightledger.registry.store.snapshots import SnapshotStore


def recover(engine: Engine, runs: RunKeeper, store: SnapshotStore, folder: Path) -> None:
    """Tell apart what dead writers of any policy left; policies with a live writer are passed by.

    A folder that this process may not write to is left as it is: a reader has nothing to mend there.
    """
    if not os.access(folder, os.W_OK):
        return
    leftovers = store.leftovers()
    with reading(engine) as conn:
        names = set(
            conn.scalars(
                select(Policy.name)
                .join(VersionRow, VersionRow.policy_id == Policy.id)
                .where(VersionRow.state == "writing")
            )
        )
        if leftovers:
            tags = {file_tag(name): name for name in conn.scalars(select(Policy.name))}
            names |= {name for tag, name in tags.items() if any(found.startswith(tag) for found in leftovers)}
    for name in sorted(names):
        with ExitStack() as stack:
            if stack.enter_context(try_policy_lock(folder, name)):
                recover_locked(Ledger(engine, runs, name), store)


def recover_locked(
    ledger: Ledger, store: SnapshotStore, *, sweep: bool = True, spare: Collection[str] = ()
) -> None:
    """Do it for one policy, whose lock the caller holds.

    Args:
        sweep: look for temporary files even if no row tells of a dead writer. That lists the folder, which takes the
            longer the more files it holds.
        spare: temporary files of the caller's own.
    """
    with ledger.reading() as conn:
        found = versioning.unfinished(ledger, conn)
    if found:
        with ledger.writing() as conn:
            for number, _ in found:
                versioning.lose_version(ledger, conn, number, "its writer died before it was stored")
        for _, files in found:
            for file in files:
                store.delete(file.uri)
    if not (found or sweep):
        return
    tag = file_tag(ledger.policy)
    for file_id in store.leftovers():
        if file_id.startswith(tag) and file_id not in spare:
            store.discard(file_id)

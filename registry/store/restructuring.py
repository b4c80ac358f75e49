"""Whether a version has the names and shapes of another: a fingerprint tells, and only where it differs a file is read.

The next version of a policy, and one that is rolled back to, takes the head's place in every worker and learner. One of
another structure fits none of them, so that it is refused unless it is meant.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sqlalchemy import Connection, select

from weightledger.registry.errors import CorruptionError, InvalidWeightsError, StorageError
from weightledger.registry.log import audit, fleet
from weightledger.registry.log.ledger import Ledger
from weightledger.registry.log.models import VersionRow, Worker
from weightledger.registry.records import Version
from weightledger.registry.store.snapshots import SnapshotStore
from weightledger.registry.weights.shapes import Shapes, differences, shapes_in


@dataclass(frozen=True)
class Form:
    """The names and shapes of one side."""

    fingerprint: str | None
    """None for a version that an older library wrote."""
    read: Callable[[], Shapes | None]
    """Gives them; None when the file cannot be read."""


def form_of(ledger: Ledger, store: SnapshotStore, conn: Connection, number: int) -> Form:
    """Return the form of a stored version."""
    file, _ = ledger.files_of(conn, number)

    def read() -> Shapes | None:
        try:
            return shapes_in(store.read_header(file.uri))
        except (CorruptionError, StorageError, ValueError):
            # `verify` tells of it; whoever publishes on a damaged head mends it by that.
            return None

    return Form(ledger.row(conn, number).shapes, read)


def compare(there: Form, here: Form) -> str | None:
    """Say how one side differs from the other; None when it does not, or nobody can tell."""
    if there.fingerprint is not None and there.fingerprint == here.fingerprint:
        return None
    before, after = there.read(), here.read()
    if before is not None and after is not None:
        return differences(before, after) or None
    if there.fingerprint is None or here.fingerprint is None:
        return None
    return "\n  (a file cannot be read, so that they are not named)"


def check_publish(ledger: Ledger, store: SnapshotStore, conn: Connection, head: int, weights: Form) -> None:
    """Refuse weights of another structure than the head's.

    Raises:
        InvalidWeightsError: names or shapes differ; names them.
    """
    found = compare(form_of(ledger, store, conn, head), weights)
    if found is not None:
        raise InvalidWeightsError(
            f"these weights do not have the names and shapes of v{head}, the head of policy {ledger.policy!r} "
            f"(there: v{head}, here: the new ones); nothing was published:{found}\n"
            "restructure=True publishes them all the same; other weights than the policy's, such as averaged ones, "
            "belong to a policy of their own"
        )


def check_rollback(
    ledger: Ledger,
    store: SnapshotStore,
    conn: Connection,
    wanted: Version,
    *,
    alive: Callable[[str], bool],
    restructure: bool,
) -> str:
    """Refuse a rollback to a version of another structure than the head's.

    Args:
        alive: tells whether a run still lives.
        restructure: whether it is meant.

    Returns:
        Who could not follow, in words; empty when everybody can.

    Raises:
        InvalidWeightsError: names or shapes differ, and that is not meant; names them, and the live runs.
    """
    head = ledger.head_number(conn)
    if head is None or head == wanted.number:
        return ""
    there, here = (form_of(ledger, store, conn, number) for number in (head, wanted.number))
    found = compare(there, here)
    if found is None:
        return ""
    who = _followers(ledger, conn, head, alive)
    if not restructure:
        hint = f", but could not be followed by {who}" if who else ""
        raise InvalidWeightsError(
            f"v{wanted.number} of policy {ledger.policy!r} does not have the names and shapes of v{head}, the head "
            f"(there: v{head}, here: v{wanted.number}); nothing was rolled back:{found}\n"
            f"restructure=True (--restructure) rolls back all the same{hint}"
        )
    return who


def _followers(ledger: Ledger, conn: Connection, head: int, alive: Callable[[str], bool]) -> str:
    """Name the live runs that train or steer with the head's structure."""
    policy = ledger.policy_ref(conn)
    steering = select(Worker.run_id).where(Worker.policy_id == policy.id, Worker.state.not_in(fleet.FREE))
    writing = select(VersionRow.run_id).where(VersionRow.policy_id == policy.id, VersionRow.number == head)
    runs = {run for run in conn.scalars(steering.union(writing)) if alive(run)}
    return ", ".join(audit.describe_runs(conn, runs).values())

"""Reading stored files and comparing them with the record."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sqlalchemy import Connection, or_, select

from weightledger.registry.errors import CorruptionError, StorageError
from weightledger.registry.locks import Locks
from weightledger.registry.log import damage
from weightledger.registry.log.ledger import FileEntry, Ledger
from weightledger.registry.log.models import Policy, Snapshot, VersionRow
from weightledger.registry.log.refs import Meaning
from weightledger.registry.records import Fault, FaultKind
from weightledger.registry.store.arriving import Arrival
from weightledger.registry.store.recovery import is_written
from weightledger.registry.store.snapshots import SnapshotStore

if TYPE_CHECKING:
    from weightledger.registry.weights.arrays import Bytes
    from weightledger.registry.weights.payload import Payload

_WATCHED_BYTES = 4 << 20
"""From here on a file is verified while it is read."""
_LEFT = "a file that a dead writer left; it goes at the next open"
_NAMELESS = "no version names this file; it can be deleted"


def read_payload(store: SnapshotStore, file: FileEntry, what: str, into: Bytes | None = None) -> Payload:
    """Read a whole file and verify it against its digest.

    Args:
        what: how an error names it.
        into: a uint8 buffer of the file's size to read into; a new one is made when it is left out.

    Raises:
        CorruptionError: missing, cut short, or other bytes than were stored.
    """
    try:
        return _read_payload(store, file, what, into)
    except CorruptionError:
        if not store.forget(file.uri):
            raise
    # It was a copy that is damaged; the file itself may be whole.
    return _read_payload(store, file, what, into)


def _read_payload(store: SnapshotStore, file: FileEntry, what: str, into: Bytes | None) -> Payload:
    from weightledger.registry.weights.arrays import page_buffer
    from weightledger.registry.weights.layout import LENGTH_BYTES
    from weightledger.registry.weights.payload import parse

    named = f"{what} ({store.where(file.uri)})"
    # Memory and file agree in size, or the store says so.
    data = page_buffer(file.file_bytes) if into is None else into
    if data.nbytes < _WATCHED_BYTES:
        with _reading(what):
            store.read(file.uri, data)
        payload = parse(data, named)
        payload.check(file.digest, named)
        return payload
    with Arrival(lambda note: store.read(file.uri, data, note)) as arrival:

        def wait(nbytes: int) -> None:
            with _reading(what):
                arrival.wait(min(nbytes, data.nbytes))

        wait(LENGTH_BYTES)
        wait(LENGTH_BYTES + int.from_bytes(data[:LENGTH_BYTES].tobytes(), "little"))
        payload = parse(data, named)
        payload.check(file.digest, named, wait)
        wait(data.nbytes)
    return payload


@contextmanager
def _reading(what: str) -> Iterator[None]:
    try:
        yield
    except (CorruptionError, StorageError) as error:
        raise type(error)(f"{what} cannot be read: {error}") from error


def check_there(ledger: Ledger, store: SnapshotStore, conn: Connection, number: int) -> None:
    """Make sure that the file of a stored version is there and has its size, without reading it.

    Raises:
        CorruptionError: it is missing, or longer or shorter than it was.
        StorageError: nobody can look, or it is no regular file.
    """
    what = f"v{number} of policy {ledger.policy!r}"
    file, _ = ledger.files_of(conn, number)
    with _reading(what):
        size = store.size(file.uri)
    if size != file.file_bytes:
        raise CorruptionError(
            f"{what} ({store.where(file.uri)}): expected {file.file_bytes} bytes, found "
            f"{'no file' if size is None else f'{size} bytes'}; restore the file from a backup"
        )


def is_whole(store: SnapshotStore, file: FileEntry) -> bool:
    """Tell whether a stored file is there and holds what its row says."""
    try:
        store.forget(file.uri)  # a whole copy of it elsewhere is none of it
        read_payload(store, file, "a stored file of equal content")
    except (CorruptionError, StorageError):
        return False
    return True


def read_hashes(store: SnapshotStore, file: FileEntry, what: str) -> dict[str, str]:
    """Read the per-tensor hashes out of a file's header, and check that they make the digest on record.

    Raises:
        CorruptionError: the file is missing, its header is damaged, or its hashes are others.
    """
    from weightledger.registry.weights.digest import content_digest
    from weightledger.registry.weights.layout import hashes_in

    named = f"{what} ({store.where(file.uri)})"
    try:
        header = store.read_header(file.uri)
    except CorruptionError as error:
        raise CorruptionError(f"the header of {what} cannot be read: {error}") from error
    hashes = hashes_in(header, named)
    found = content_digest(hashes)
    if found != file.digest:
        raise CorruptionError(
            f"the header of {named} is damaged: its hashes make {found}, the record has {file.digest}; restore the "
            "file from a backup"
        )
    return dict(sorted(hashes.items()))


@dataclass(frozen=True)
class _Stored:
    file: FileEntry
    versions: tuple[int, ...]


def verify(ledger: Ledger, store: SnapshotStore, ref: Meaning | None) -> list[Fault]:
    """Re-read the files of one version, or of all and look for strays and at the whole record. Changes nothing."""
    with ledger.reading() as conn:
        number = None if ref is None else ledger.usable(conn, ref, "verify").number
        damaged = _damaged_rows(ledger, conn) if number is None else _damaged_structure(ledger, conn, number)
        wanted = list(_stored_files(ledger, conn, number))
    faults = [fault for entry in wanted if (fault := _check(store, entry)) is not None]
    if faults:
        # What a prune took away since the rows were read is no fault.
        with ledger.reading() as conn:
            still = {entry.file.uri for entry in _stored_files(ledger, conn, number)}
        faults = [fault for fault in faults if fault.path in still]
    if ref is None:
        with ledger.reading() as conn:
            # Listed before asking the rows: a file whose row is younger than the list is not in it.
            present = store.uris()
            named = select(Snapshot.uri).where(Snapshot.stored | Snapshot.deleting)
            known = {uri for uri, _ in damage.listed(conn, named, {}, lambda row, why: (row.uri, why))}
            unfinished = _unfinished(conn)
        dead = _without_writer(ledger, unfinished)
        strays = set(present) - known - (unfinished.keys() - dead)
        if strays:
            strays &= set(store.uris())  # what a prune beside this took away meanwhile is no stray
        nameless = "no row that can be read names this file; keep it" if damaged else _NAMELESS
        faults += [Fault("stray", uri, (), _LEFT if uri in dead else nameless) for uri in sorted(strays)]
        faults += [Fault("stray", file_id, (), _LEFT) for file_id in _abandoned(store, ledger.locks)]
    return damaged + faults


def _damaged_rows(ledger: Ledger, conn: Connection) -> list[Fault]:
    policy, path = ledger.find_policy(conn), ledger.database.label
    return [
        Fault("damaged", path, () if policy is None else damage.versions_at(conn, policy, cell), str(cell))
        for cell in damage.survey(conn)
    ] + [Fault("damaged", path, (), text) for text in ledger.database.broken_pages(conn)]


def _damaged_structure(ledger: Ledger, conn: Connection, number: int) -> list[Fault]:
    try:
        ledger.stored_as(conn, number)
        ledger.extra_stored_as(conn, number)
    except CorruptionError as error:
        return [Fault("damaged", ledger.database.label, (number,), str(error))]
    return []


def _abandoned(store: SnapshotStore, locks: Locks) -> list[str]:
    """Return temporary files whose writer is dead: nobody holds their policy's lock."""
    found = [file_id for file_id in store.leftovers() if not is_written(locks, file_id)]
    # Listed again: what was committed or aborted meanwhile is no leftover.
    left = set(store.leftovers()) if found else set()
    return [file_id for file_id in found if file_id in left]


def _check(store: SnapshotStore, entry: _Stored) -> Fault | None:
    file = entry.file
    kind: FaultKind
    try:
        size = store.size(file.uri)
        if size == file.file_bytes:
            store.forget(file.uri)
            read_payload(store, file, "the file")
            return None
        if size is None:
            kind, detail = "missing", f"expected {file.file_bytes} bytes, found no file"
        else:
            kind = "truncated" if size < file.file_bytes else "corrupt"
            detail = f"expected {file.file_bytes} bytes, found {size}"
    except (CorruptionError, StorageError) as error:
        # One unreadable file must not hide what is wrong with the others.
        kind, detail = "corrupt", str(error)
    return Fault(kind, file.uri, entry.versions, detail)


def _stored_files(ledger: Ledger, conn: Connection, number: int | None) -> Iterator[_Stored]:
    policy = ledger.find_policy(conn)
    if policy is None:
        return
    query = (
        select(Snapshot, VersionRow.number)
        .join(
            VersionRow,
            or_(VersionRow.snapshot_id == Snapshot.id, VersionRow.extra_snapshot_id == Snapshot.id),
        )
        .where(VersionRow.policy_id == policy.id, VersionRow.state == "stored", Snapshot.stored)
        .order_by(Snapshot.id, VersionRow.number)
    )
    if number is not None:
        query = query.where(VersionRow.number == number)
    files: dict[int, FileEntry] = {}
    versions: dict[int, list[int]] = {}
    for row, why in damage.listed(conn, query, {}, lambda row, why: (row, why)):
        if why:
            continue  # told of as a damaged row
        files[row.id] = FileEntry(row.id, row.digest, row.uri, row.file_bytes, row.stored)
        versions.setdefault(row.id, []).append(row.number)
    for key, file in files.items():
        yield _Stored(file, tuple(versions[key]))


def _without_writer(ledger: Ledger, unfinished: Mapping[str, str]) -> set[str]:
    """Return those unfinished files whose writer is dead."""
    if not unfinished:
        return set()
    free = {policy for policy in unfinished.values() if not ledger.locks.policy_is_held(policy)}
    # A writer keeps the lock until its row is settled, so a row that outlives a free lock has none.
    with ledger.reading() as conn:
        still = _unfinished(conn)
    return {uri for uri, policy in unfinished.items() if policy in free and uri in still}


def _unfinished(conn: Connection) -> dict[str, str]:
    """Return the files of versions that are not stored yet, and their policies."""
    query = (
        select(Snapshot.uri, Policy.name)
        .join(
            VersionRow,
            or_(VersionRow.snapshot_id == Snapshot.id, VersionRow.extra_snapshot_id == Snapshot.id),
        )
        .join(Policy, Policy.id == VersionRow.policy_id)
        .where(VersionRow.state == "writing")
    )
    return {uri: policy for uri, policy in conn.execute(query)}  # noqa: C416 - rows are no pairs to a type checker


def differences(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, str]:
    """Compare per-tensor hashes: each name with `same`, `changed`, `removed` or `added`."""
    result = {}
    for name in sorted(before.keys() | after.keys()):
        if name not in after:
            result[name] = "removed"
        elif name not in before:
            result[name] = "added"
        else:
            result[name] = "same" if before[name] == after[name] else "changed"
    return result

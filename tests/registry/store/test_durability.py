"""What publish returned is there; what it did not return is whole or never offered; full disks and failing databases.

Children die by SIGKILL behind every single thing that a publish does to the disk or the database.
"""

from __future__ import annotations

import errno
import os
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from sqlalchemy import event

from tests.registry.helpers import (
    Fuse,
    exit_code_of,
    extra_file_of,
    file_of,
    files,
    memory_folder,
    numbers,
    publish_many,
    small_disk,
    value_of,
    weights,
)
from weightledger.registry import ConflictError, NotFoundError, Registry, StorageError
from weightledger.registry import files as own_files
from weightledger.registry.store import local

SMALL, BIG = 4, 1 << 19  # elements: one file is written at once, the other's body by a thread
MEGABYTE = 1 << 20


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    with Registry.open(tmp_path / "r") as opened:
        yield opened


# ---------------------------------------------------------------------- kill -9


def _publish_and_die(folder: Path, steps: int, size: int, extra: bool, returned: Path) -> None:
    fuse = Fuse(steps)
    registry = Registry.open(folder)
    fuse.lay(registry)
    registry.publish(weights(2, size), extra=_extra(2, size) if extra else None)
    returned.touch()


def _extra(value: float, size: int) -> dict[str, Any]:
    return {"momentum": torch.full((size,), -float(value)), "epoch": 3}


@pytest.mark.parametrize("extra", [False, True], ids=["weights", "weights and extra"])
@pytest.mark.parametrize("size", [SMALL, BIG], ids=["small", "big"])
def test_a_writer_killed_at_any_step_leaves_nothing_that_is_half_there(size: int, extra: bool) -> None:
    """CK-01 (a) and (b), promise 1."""
    with memory_folder() as folder:
        with Registry.open(folder / "r") as registry:
            registry.publish(weights(1, size))
        outcomes: set[str] = set()
        last = steps = 1
        for steps in range(1, 200):
            code = exit_code_of(_publish_and_die, folder / "r", steps, size, extra, folder / "returned")
            last, outcome = _look_after_it(folder / "r", last, size, extra)
            outcomes.add(outcome)
            if code == 0:
                assert outcome == "stored" and (folder / "returned").exists()
                break
            assert code == -9 and not (folder / "returned").exists()
        assert steps > 8, "many steps were tried"
        assert outcomes == {"nothing", "lost", "stored"}


def _look_after_it(folder: Path, last: int, size: int, extra: bool) -> tuple[int, str]:
    """Open the registry after the writer's death and return its highest number and what became of the version."""
    with Registry.open(folder) as registry:
        assert registry.verify() == [], "no temporary or unnamed file is left after an open"
        shown = {version.number for version in registry.versions()}
        outcome = "nothing"
        highest = last
        try:
            found = registry.get(last + 1)
        except NotFoundError:
            pass
        else:
            outcome, highest = found.state, found.number
        if outcome == "stored":
            assert registry.head().number == highest and value_of(registry.load()) == 2
            if extra:
                assert torch.equal(registry.load_extra()["momentum"], _extra(2, size)["momentum"])
        if outcome == "lost":
            _assert_never_offered(registry, highest, shown)
        # An own content, so that the next child shares no file of this one.
        after = registry.publish(weights(highest + 100, size))
        assert after.number == highest + 1 and after.parent in shown, "a lost one is no parent"
        assert value_of(registry.load()) == highest + 100
        registry.prune(keep_last=1)
        stays = [version for version in registry.versions() if version.stored]
        kept = {file_of(registry, version.number).name for version in stays}
        kept |= {extra_file_of(registry, version.number).name for version in stays if version.has_extra}
        assert registry.verify() == [] and set(files(registry)) == kept, "nothing of the dead is left"
        return after.number, outcome


def _assert_never_offered(registry: Registry, number: int, shown: set[int]) -> None:
    assert number not in shown and registry.head().number != number
    assert registry.target("w").number != number
    assert not registry.get(number).stored
    assert [found.version for found in registry.events(kind="lost")][-1] == number
    for call in (registry.load, registry.rollback, registry.load_extra):
        with pytest.raises(NotFoundError, match=f"v{number}.*died"):
            call(number)
    for name in (registry.pin, registry.set_alias):
        with pytest.raises(NotFoundError, match=f"v{number}.*died"):
            name("x", number)
    with pytest.raises(ConflictError):
        registry.publish(weights(0), parent=number)


def test_a_live_writer_is_not_taken_for_a_dead_one(registry: Registry) -> None:
    """An open beside a publish that is under way leaves its row and its file alone."""
    registry.publish(weights(1))
    reached, go_on = threading.Event(), threading.Event()
    sync = own_files.sync_folder

    def slow(folder: Path) -> None:
        reached.set()
        assert go_on.wait(60)
        sync(folder)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(own_files, "sync_folder", slow)
        writer = threading.Thread(target=registry.publish, args=(weights(2),))
        writer.start()
        assert reached.wait(60)
        with Registry.open(registry.location) as other:
            assert other.get(2).state == "writing" and other.head().number == 1
            with pytest.raises(NotFoundError, match=r"v2.*still being written"):
                other.load(2)
        go_on.set()
        writer.join(60)
    assert registry.head().number == 2 and value_of(registry.load()) == 2


@pytest.mark.folder
@pytest.mark.parametrize("size", [SMALL, 1 << 21], ids=["small", "written by a thread"])
def test_a_registry_that_was_open_when_a_writer_died_publishes_on(registry: Registry, size: int) -> None:
    """What the dead one left is cleared away, and what the new publish has begun to write is not."""
    publish_many(registry, 2)
    with registry.ledger.writing() as conn:
        # What a kill between the row and its end leaves.
        conn.exec_driver_sql("UPDATE versions SET state = 'writing' WHERE number = 2")
        conn.exec_driver_sql("UPDATE snapshots SET stored = 0 WHERE id = 2")
    assert registry.publish(weights(3, size), restructure=True).number == 3
    assert [registry.get(number).state for number in (1, 2, 3)] == ["stored", "lost", "stored"]
    assert value_of(registry.load()) == 3
    assert registry.verify() == []


# ---------------------------------------------------------------------- full disks


@pytest.mark.parametrize("size", [SMALL, 1 << 18], ids=["small", "big"])
def test_a_full_disk_is_told_and_later_publishes_work(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """CK-10 and CK-11 on a disk that really is full."""
    with small_disk(8, monkeypatch) as disk:
        registry = Registry.open(disk.folder / "r")
        publish_many(registry, 2)
        before = files(registry)
        with disk.full():
            for _ in range(2):
                with pytest.raises(StorageError, match=rf"{disk.folder}.*([0-9]+ bytes|space)"):
                    registry.publish(weights(9, size), step=3, restructure=True)
            assert value_of(registry.load()) == 2 and value_of(registry.load(1)) == 1
            assert numbers(registry.versions()) == [1, 2] and files(registry) == before
        after = registry.publish(weights(9, size), step=3, restructure=True)
        assert registry.head() == after and value_of(registry.load()) == 9
        assert numbers(registry.versions())[:2] == [1, 2] and len(registry.versions()) == 3
        assert registry.verify() == []
        registry.close()


def test_a_disk_with_room_for_rows_but_not_for_the_file_says_how_many_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """CK-11."""
    with small_disk(16, monkeypatch) as disk:
        registry = Registry.open(disk.folder / "r")
        publish_many(registry, 1)
        told = r"snapshots.*[0-9]{7} bytes.*make room"
        with disk.full(leave=MEGABYTE), pytest.raises(StorageError, match=told) as caught:
            registry.publish(weights(9, BIG), extra=_extra(9, BIG), restructure=True)
        assert isinstance(caught.value.__cause__, OSError) and caught.value.__cause__.errno == errno.ENOSPC
        assert len(files(registry)) == 1 and numbers(registry.versions()) == [1]
        registry.publish(weights(9, BIG), restructure=True)
        assert value_of(registry.load()) == 9
        registry.close()


class _Refusing:
    """Refuses the nth call of a function of the operating system with an error, then works again."""

    def __init__(self, function: Any, nth: int) -> None:
        self.function = function
        self.left = nth

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.left -= 1
        if self.left == 0:
            raise OSError(errno.EIO, "Input/output error")
        return self.function(*args, **kwargs)


@pytest.mark.parametrize("extra", [False, True], ids=["weights", "extra"])
@pytest.mark.parametrize("size", [SMALL, BIG], ids=["small", "big"])
@pytest.mark.parametrize("step", ["create", "write", "fdatasync", "name", "folder"])
def test_a_disk_error_at_any_step_leaves_no_file_and_no_version(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, step: str, size: int, extra: bool
) -> None:
    """CK-10: the error hits the weights' file, or that of the extra state after it."""
    registry.publish(weights(1, size))
    nth = 2 if extra else 1
    owner, name = {
        "create": (local.os, "open"),
        "write": (local, "_write"),
        "fdatasync": (local.os, "fdatasync"),
        "name": (local, "_give_name"),
        "folder": (own_files, "sync_folder"),
    }[step]
    function = getattr(owner, name)
    refusing = _Refusing(function, nth)

    def only_snapshots(path: Any, flags: int, *more: Any, **named: Any) -> int:
        return (
            refusing(path, flags, *more, **named)
            if flags & os.O_EXCL
            else function(path, flags, *more, **named)
        )

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, only_snapshots if step == "create" else refusing)
        with pytest.raises(StorageError, match="Input/output error"):
            registry.publish(weights(2, size), extra=_extra(2, size) if extra else None)
        assert refusing.left <= 0, "the error did happen"
    assert numbers(registry.versions()) == [1] and len(files(registry)) == 1
    after = registry.publish(weights(2, size), extra=_extra(2, size))
    assert after.parent == 1 and value_of(registry.load()) == 2 and registry.verify() == []


def test_an_error_that_is_no_disk_error_leaves_nothing_either(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control-C in the middle: after the number was taken, before the file has its name."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    registry.publish(weights(1))
    with monkeypatch.context() as patch:
        patch.setattr(local, "_give_name", interrupt)
        with pytest.raises(KeyboardInterrupt):
            registry.publish(weights(2))
    assert registry.get(2).state == "lost" and len(files(registry)) == 1
    assert registry.publish(weights(2)).number == 3 and registry.verify() == []


# ---------------------------------------------------------------------- a database that fails


def _limit_pages(registry: Registry, more: int) -> None:
    """Let the database grow by a few pages only; then SQLite says that it is full."""
    registry.database.engine.dispose()

    def limit(connection: Any, record: Any) -> None:
        (pages,) = connection.execute("PRAGMA page_count").fetchone()
        connection.execute(f"PRAGMA max_page_count={pages + more}")

    event.listen(registry.database.engine, "connect", limit)


@pytest.mark.folder
def test_a_database_that_is_full_at_the_first_transaction_leaves_nothing(registry: Registry) -> None:
    """CK-11, in the database."""
    registry.publish(weights(1))
    _limit_pages(registry, 0)
    with pytest.raises(StorageError, match=r"registry\.db.*space"):
        registry.publish(weights(2), metadata={"x": "y" * MEGABYTE})
    assert numbers(registry.versions()) == [1] and len(files(registry)) == 1
    with Registry.open(registry.location) as again:
        assert again.publish(weights(2)).number == 2


@pytest.mark.folder
def test_a_database_that_is_full_at_the_last_transaction_leaves_a_lost_number(registry: Registry) -> None:
    """CK-11: the file is durable by then, and goes again."""
    registry.publish(weights(1))
    _limit_pages(registry, 12)
    with pytest.raises(StorageError, match=r"registry\.db.*space"):
        registry.publish(weights(2), metrics={f"metric {at}": at for at in range(5000)})
    assert numbers(registry.versions()) == [1] and len(files(registry)) == 1
    assert registry.get(2).state == "lost"
    assert registry.publish(weights(2)).number == 3 and registry.verify() == []


def test_a_database_that_fails_for_good_leaves_the_rest_to_the_next_open(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the last transaction nor the one that would mark the version lost gets through."""
    registry.publish(weights(1))
    writing, calls = registry.ledger.writing, []

    def failing(**options: Any) -> Any:
        calls.append(None)
        if len(calls) > 1:
            raise StorageError("the database is gone")
        return writing(**options)

    with monkeypatch.context() as patch:
        patch.setattr(registry.ledger, "writing", failing)
        with pytest.raises(StorageError, match="gone") as caught:
            registry.publish(weights(2))
    assert any("the next open" in note for note in caught.value.__notes__)
    assert numbers(registry.versions()) == [1] and registry.get(2).state == "writing"
    with Registry.open(registry.location) as again:
        assert again.get(2).state == "lost" and len(files(again)) == 1 and again.verify() == []
        assert again.publish(weights(2)).number == 3


@pytest.mark.parametrize("answers", [True, False], ids=["database answers", "database is gone"])
def test_an_interrupt_after_the_last_commit_deletes_nothing(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    """The version is stored although publish did not return, so its file stays, even if nobody can look it up now."""
    writing, calls = registry.ledger.writing, []

    @contextmanager
    def interrupted(**options: Any) -> Iterator[Any]:
        calls.append(None)
        if len(calls) > 2 and not answers:
            raise StorageError("the database is gone")
        with writing(**options) as conn:
            yield conn
        if len(calls) == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(registry.ledger, "writing", interrupted)
        with pytest.raises(KeyboardInterrupt):
            registry.publish(weights(5))
    assert registry.head().number == 1 and value_of(registry.load()) == 5
    assert registry.verify() == []


def test_a_first_rollback_that_fails_at_the_commit_spoils_nothing_after_it(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process whose first write is taken back must not remember the rows that were taken back with it."""
    publish_many(registry, 2)
    with Registry.open(registry.location) as other:
        # Another life, as after a restart: this process's run has no row under the new identity.
        monkeypatch.setattr(type(other.locks), "current", lambda self: _another_run(registry))

        def fail(conn: Any) -> None:
            raise sqlite3.OperationalError("disk I/O error")

        event.listen(other.database.engine, "commit", fail)
        with pytest.raises((StorageError, sqlite3.OperationalError)):
            other.rollback(1)
        event.remove(other.database.engine, "commit", fail)
        assert other.rollback(1).number == 3
        assert other.publish(weights(4)).number == 4


def _another_run(registry: Registry) -> Any:
    from dataclasses import replace

    from weightledger.registry.locks.runs import this_run

    return replace(this_run(), id="f" * 32)


@pytest.mark.folder
def test_files_are_durable_before_any_row_says_stored(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Promise 1's order, as the operating system sees it: data, row, name and folder, and only then the last commit."""
    registry.publish(weights(1))
    told: list[str] = []

    def note(name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            told.append(name)
            return function(*args, **kwargs)

        return call

    monkeypatch.setattr(os, "fdatasync", note("data", os.fdatasync))
    monkeypatch.setattr(local, "_give_name", note("name", local._give_name))
    monkeypatch.setattr(own_files, "sync_folder", note("folder", own_files.sync_folder))
    event.listen(registry.database.engine, "commit", lambda conn: told.append("commit"))
    registry.publish(weights(2), extra=_extra(2, SMALL))
    assert told[-8:] == ["data", "data", "commit", "name", "folder", "name", "folder", "commit"]
    with registry.ledger.reading() as conn:
        assert conn.exec_driver_sql("PRAGMA synchronous").scalar() == 2, "SQLite itself syncs every commit"
        assert conn.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"

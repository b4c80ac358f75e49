"""Rows for tests: a registry's database filled by hand, in few words."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from sqlalchemy import func, insert, select, update

from weightledger.registry.database.sqlite import SqliteDatabase
from weightledger.registry.log import schema
from weightledger.registry.log.models import (
    About,
    Alias,
    Base,
    EventRow,
    HoldingRow,
    Metric,
    PinRow,
    Policy,
    PolicyRef,
    Run,
    Snapshot,
    Structure,
    VersionRow,
    Worker,
)

START = datetime(2026, 1, 1, tzinfo=UTC)
RUN = "a" * 32


def minute(count: float) -> datetime:
    """The time so many minutes after the story began."""
    return START + timedelta(minutes=count)


def digest(content: int | str) -> str:
    return f"blake3:{content:0>64}"


def run_python(code: str, *arguments: object, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run a program in a fresh interpreter, and give what it printed."""
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=root,  # so that it can import `tests`
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert not check or done.returncode == 0, done.stderr
    return done


class Rows:
    """A registry with one policy, its rows written one by one."""

    def __init__(self, folder: Path, policy: str = "default") -> None:
        self.path = folder / "registry.db"
        self.database = SqliteDatabase(self.path)
        schema.ensure(self.database, create=True, migrate=True)
        self._add(Run, id=RUN, user="ada", host="host", pid=1, program="train.py", started_at=START)
        self.policy = self.add_policy(policy)
        self._add(Structure, id=1, fingerprint=hashlib.sha256(b"{}").hexdigest(), body="{}")
        self.workers: dict[str, int] = {}

    def add_policy(self, name: str) -> PolicyRef:
        key = self._add(Policy, name=name, last_number=0, last_order=0, created_at=START)
        return PolicyRef(key, name)

    def add_run(self, run: str) -> str:
        self._add(Run, id=run, user="bob", host="other", pid=2, program="train.py", started_at=START)
        return run

    def version(
        self,
        number: int,
        content: int | str | None = None,
        *,
        parent: int | None = None,
        restores: int | None = None,
        depth: int | None = None,
        state: str = "stored",
    ) -> int:
        """Add a publish, or with `restores` a rollback; its content is called like its number."""
        content = number if content is None else content
        with self.database.writing() as conn:
            conn.execute(
                update(Policy)
                .where(Policy.id == self.policy.id, Policy.last_number < number)
                .values(last_number=number)
            )
        snapshot = self._add(
            Snapshot,
            digest=digest(content),
            uri=f"{self.policy.name}-{number}.safetensors",
            file_bytes=8,
            stored=state == "stored",
            deleting=False,
            created_at=minute(number),
        )
        return self._add(
            VersionRow,
            policy_id=self.policy.id,
            number=number,
            state=state,
            digest=digest(content),
            snapshot_id=snapshot,
            structure_id=1,
            parent=restores
            if restores is not None
            else parent
            if parent is not None
            else (number - 1 or None),
            restores=restores,
            depth=number if depth is None else depth,
            run_id=RUN,
            metadata={},
            message="",
            nonfinite=[],
            size_bytes=8,
            created_at=minute(number),
        )

    def worker(self, name: str, state: str = "confirmed", *, run: str = RUN, detail: str = "") -> int:
        self.workers[name] = self._add(
            Worker,
            policy_id=self.policy.id,
            name=name,
            run_id=run,
            incarnation="life-1",
            state=state,
            evidence_at=START,
            detail=detail,
        )
        return self.workers[name]

    def holding(
        self,
        worker: str,
        number: int,
        order: int,
        pushed: float,
        confirmed: float | None = None,
        ended: float | None = None,
        how: str | None = None,
    ) -> int:
        """Add a push, with its times in minutes; a holding once it is confirmed."""
        with self.database.reading() as conn:
            version, content = conn.execute(
                select(VersionRow.id, VersionRow.digest).where(
                    VersionRow.policy_id == self.policy.id, VersionRow.number == number
                )
            ).one()
        return self._add(
            HoldingRow,
            policy_id=self.policy.id,
            worker_id=self.workers[worker],
            version_id=version,
            number=number,
            digest=content,
            sent_digest=content,
            order=order,
            incarnation=None if confirmed is None else "life-1",
            run_id=RUN,
            pushed_at=minute(pushed),
            confirmed_at=None if confirmed is None else minute(confirmed),
            ended_at=None if ended is None else minute(ended),
            ended_how=how or ("replaced" if ended is not None else None),
        )

    def pin(
        self, worker: str, version: int | None = None, alias: str | None = None, *, literal: bool = False
    ) -> int:
        with self.database.reading() as conn:
            key = conn.scalar(
                select(VersionRow.id).where(
                    VersionRow.policy_id == self.policy.id, VersionRow.number == version
                )
            )
        return self._add(
            PinRow,
            policy_id=self.policy.id,
            worker=worker,
            literal=literal,
            version_id=key,
            alias=alias,
            reason="",
            created_at=START,
            run_id=RUN,
        )

    def alias(self, name: str, version_id: int) -> None:
        self._add(Alias, policy_id=self.policy.id, name=name, version_id=version_id, moved_at=START)

    def metric(self, version_id: int, name: str, value: float | None) -> None:
        self._add(Metric, policy_id=self.policy.id, version_id=version_id, name=name, value=value)

    def event(self, kind: str, at: float, *, worker: str | None = None, version: int | None = None) -> int:
        return self._add(
            EventRow,
            policy_id=self.policy.id,
            at=minute(at),
            kind=kind,
            run_id=RUN,
            user="ada",
            version=version,
            worker=worker,
            reason="",
            details={},
        )

    def story(self) -> None:
        """Write at least one row into every table."""
        first = self.version(1)
        self.version(2)
        self.version(3, 1, restores=1, depth=1)
        self.alias("best", first)
        self.metric(first, "reward", 1.5)
        self.metric(first, "loss", None)
        self.worker("w0")
        self.holding("w0", 1, 1, 1, 1.1, 2.1)
        self.holding("w0", 2, 2, 2, 2.1, 3.1)
        self.holding("w0", 3, 3, 3, 3.1)
        self.pin("eval-*", alias="best")
        self.pin("w1", version=2)
        self.event("publish", 1, version=1)
        self.event("rollback", 3, version=3)

    def counts(self) -> dict[str, int]:
        return row_counts(self.database)

    def _add(self, table: type[Base], **values: Any) -> Any:
        with self.database.writing() as conn:
            key = conn.execute(insert(table).values(**values)).inserted_primary_key
        assert key is not None
        return key[0]


def row_counts(database: SqliteDatabase) -> dict[str, int]:
    """Count the rows of every table."""
    with database.reading() as conn:
        return {
            table.name: conn.execute(select(func.count()).select_from(table)).scalar_one()
            for table in Base.metadata.sorted_tables
        }


def identity(database: SqliteDatabase) -> str:
    with database.reading() as conn:
        return conn.execute(select(About.uuid)).scalar_one()

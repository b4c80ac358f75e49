"""A registry with a row in every table, ways to damage it, and every public call: for tests that break things.

What may leave a call is an error of this library, or for a bad argument a `TypeError` or `ValueError`; what may leave a
command is exit code 1 or 2 with text on stderr that is no traceback.
"""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import torch
from typer.testing import CliRunner

from tests.registry.helpers import hold, weights
from weightledger.registry import Registry
from weightledger.registry.commands.app import app
from weightledger.registry.errors import WeightLedgerError
from weightledger.registry.log.models import Base

MANY = os.environ.get("WEIGHTLEDGER_TORTURE") == "1"
"""Whether all cases are to be run, as `make torture` asks for."""


def make_story(folder: Path) -> None:
    """Make a registry in which every column of every table has a value."""
    with Registry.open(folder) as registry:
        registry.publish(
            weights(1), step=10, metrics={"reward": 1.0}, metadata={"seed": (3, "x")}, message="first"
        )
        registry.publish(weights(2), step=20, metrics={"reward": 2.0, "loss": float("nan")})
        registry.publish(weights(float("inf")), extra={"m": torch.ones(2)}, step=30)
        registry.set_alias("best", 2)
        for number in (1, 2, 3):
            hold(registry, "w1", number)
        hold(registry, "w2", 2, confirm=False)
        hold(registry, "eval-0", 2)
        registry.pin("eval-*", "best", reason="compare")
        registry.pin("w2", 1)
        registry.rollback(2, reason="infinite")
        registry.publish(weights(5), step=50, metrics={"reward": 0.5})
        with registry.for_policy("opponent") as other:
            other.publish(weights(9))
    with closing(sqlite3.connect(folder / "registry.db")) as database:
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        database.execute("PRAGMA journal_mode=DELETE")


def copied(story: Path, target: Path) -> Path:
    """Copy a story."""
    shutil.copytree(story, target)
    return target


@dataclass(frozen=True)
class Damage:
    """One cell, and what is written over it."""

    table: str
    column: str
    row: int
    """Counted from 0, around the table's end."""
    value: Any

    def __str__(self) -> str:
        value = repr(self.value)
        return f"{self.table}.{self.column}[{self.row}] = {value if len(value) < 60 else value[:60] + '…'}"

    def do(self, folder: Path) -> None:
        """Write it, past every rule of the schema."""
        with closing(sqlite3.connect(folder / "registry.db", isolation_level=None)) as database:
            database.execute("PRAGMA foreign_keys=OFF")
            database.execute("PRAGMA ignore_check_constraints=ON")
            lax = None
            if self.value is None:
                lax = self._without_rules(database)
            keys = [key for (key,) in database.execute(f'SELECT rowid FROM "{self.table}" ORDER BY rowid')]
            value = self.value.decode("latin-1") if isinstance(self.value, BadText) else self.value
            cell = "CAST(? AS TEXT)" if isinstance(self.value, BadText) else "?"
            value = bytes(self.value) if isinstance(self.value, BadText) else value
            database.execute(
                f'UPDATE OR REPLACE "{self.table}" SET "{self.column}" = {cell} WHERE rowid = ?',
                (value, keys[self.row % len(keys)]),
            )
            if lax is not None:
                self._set_schema(database, lax)

    def _without_rules(self, database: sqlite3.Connection) -> str:
        (text,) = database.execute("SELECT sql FROM sqlite_master WHERE name = ?", (self.table,)).fetchone()
        self._set_schema(database, text.replace(" NOT NULL", ""))
        return str(text)

    def _set_schema(self, database: sqlite3.Connection, text: str) -> None:
        (version,) = database.execute("PRAGMA schema_version").fetchone()
        database.execute("PRAGMA writable_schema=ON")
        database.execute("UPDATE sqlite_master SET sql = ? WHERE name = ?", (text, self.table))
        database.execute(f"PRAGMA schema_version={version + 1}")
        database.execute("PRAGMA writable_schema=OFF")


class BadText(bytes):
    """Bytes that are written as text and are no UTF-8."""


COMMON: list[Any] = [
    "",
    "nonsense",
    BadText(b"\xff\xfeno"),
    BadText(b"ok\xc3"),
    b"\x00\xffblob",
    None,
    -1,
    0,
    2**63 - 1,
    1.5,
    float("inf"),
    "\x00nul",
    "é" * 300,
]
TIMES: list[Any] = [
    "2026-13-45 00:00:00",
    "now",
    "2026-01-01",
    "99999-01-01 00:00:00.000000",
    "2026-01-01 00:00:00+05:00",
]
DOCUMENTS: list[Any] = [
    "{",
    "[1, 2",
    "null",
    "5",
    '"x"',
    "[5]",
    "[" * 100_000,
    '{"$tuple": 5}',
    '{"$weird": 1}',
    '{"$map": [1]}',
    '{"$int": "zz"}',
    "NaN",
    '{"a": 1e999}',
    '{"a": 1,',
]


def damages() -> Iterator[Damage]:
    """Yield every column of every table with every value, and both first and last rows."""
    for table in Base.metadata.sorted_tables:
        for column in table.c:
            kind = type(column.type).__name__
            values = COMMON + (
                TIMES if kind == "UtcDateTime" else DOCUMENTS if kind in ("JSON", "Text") else []
            )
            if column.primary_key and kind in ("BigInteger", "Integer"):
                values = [-1, 0, 2**63 - 1]  # SQLite keeps nothing else in the key of a row
            for value in values:
                for row in (0, -1):
                    yield Damage(table.name, column.name, row, value)


# ---------------------------------------------------------------------- every call

Call = Callable[[Registry], object]


def calls() -> dict[str, Call]:
    """Return every public call of a registry, first those that read."""
    past, future = datetime.now(UTC) - timedelta(days=1), datetime.now(UTC) + timedelta(days=1)
    refs = (1, 2, 3, 5, "head", "head~1", "best:reward", "best:loss:min", "best", "blake3:00000000")
    asked: dict[str, Call] = {f"get({ref!r})": lambda r, ref=ref: r.get(ref) for ref in refs}
    return asked | {
        "head": lambda r: r.head(),
        "get(version)": lambda r: [r.get(version) for version in r.versions() if not version.damage],
        "versions": lambda r: r.versions(),
        "versions(limit)": lambda r: r.versions(2),
        "policies": lambda r: r.policies(),
        "load": lambda r: r.load(2),
        "load(head)": lambda r: r.load(),
        "load_extra": lambda r: r.load_extra(3),
        "restore": lambda r: r.restore(2, weights(0)),
        "tensor_hashes": lambda r: r.tensor_hashes(1),
        "export": lambda r: r.export(2, r.location.parent / "exported"),
        "pins": lambda r: r.pins(),
        "target": lambda r: [r.target(name) for name in ("w1", "eval-0", "w9")],
        "aliases": lambda r: r.aliases(),
        "best": lambda r: r.best("reward"),
        "workers": lambda r: r.workers(),
        "holdings": lambda r: r.holdings(),
        "holdings(at)": lambda r: r.holdings(datetime.now(UTC)),
        "history": lambda r: r.history(),
        "history(all)": lambda r: r.history(worker="w1", version=2, since=past, until=future, limit=5),
        "history(since)": lambda r: r.history(since=past),
        "staleness": lambda r: [r.staleness(number) for number in (1, 2, 4, 5)],
        "events": lambda r: r.events(),
        "events(all)": lambda r: r.events(kind="publish", worker=None, version=2, since=past, limit=5),
        "verify": lambda r: r.verify(),
        "verify(ref)": lambda r: r.verify(2),
        "prune(dry run)": lambda r: r.prune(keep_last=1, keep_best=("reward", 1), dry_run=True),
        "for_policy": lambda r: r.for_policy("opponent").close(),
        "to_dict": lambda r: [json.dumps(each.to_dict()) for each in listed(r)],
        "repr": lambda r: [(repr(each), each._repr_html_()) for each in listed(r)],
        "hold": lambda r: hold(r, "w1", 2),
        "publish": lambda r: r.publish(weights(7)),
        "publish(shared)": lambda r: r.publish(weights(2), extra={"m": torch.ones(2)}),
        "rollback": lambda r: r.rollback(reason="x"),
        "rollback(to)": lambda r: r.rollback(1),
        "pin": lambda r: r.pin("w1", "best"),
        "unpin": lambda r: r.unpin("eval-*"),
        "set_alias": lambda r: r.set_alias("best", 1),
        "record_metrics": lambda r: r.record_metrics(2, reward=9.0),
        "delete_alias": lambda r: r.delete_alias("best"),
        "prune": lambda r: r.prune(keep_last=2),
    }


def listed(registry: Registry) -> list[Any]:
    """Return the records of all listings."""
    found: list[Any] = []
    for listing in (
        registry.versions,
        registry.events,
        registry.history,
        registry.holdings,
        registry.workers,
    ):
        found += listing()  # type: ignore[operator]
    return found + list(registry.pins())


def stray(error: BaseException) -> bool:
    """Tell whether an error is none that may leave: not ours, and not one of a bad argument."""
    return not isinstance(error, WeightLedgerError)


def try_calls(folder: Path, chosen: dict[str, Call]) -> dict[str, BaseException | None]:
    """Open a registry and make calls on it; returns what each raised."""
    outcomes: dict[str, BaseException | None] = {}
    try:
        registry = Registry.open(folder)
    except Exception as error:  # noqa: BLE001 - what it is, is what is asked
        return {"open": error}
    with registry, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, call in chosen.items():
            try:
                call(registry)
                outcomes[name] = None
            except Exception as error:  # noqa: BLE001 - what it is, is what is asked
                outcomes[name] = error
    return outcomes


# ---------------------------------------------------------------------- every command

COMMANDS = (
    *("status", "status --json", "status --all", "log", "log --json", "log -n 2", "log --all"),
    *("show", "show 2 --json", "show best", "diff 1 2", "diff 1 2 --all"),
    *("audit", "audit --json", "audit --worker w1", "audit --version 2", "audit --at 0s", "audit --since 1d"),
    *("events", "events --json", "events --kind publish", "best reward", "best loss --mode min"),
    *(
        "pin",
        "pin --json",
        "alias",
        "alias --json",
        "verify",
        "verify 2 --json",
        "prune --keep-last 1 --dry-run",
    ),
    *(
        "export 2 out.safetensors --force",
        "alias best 1",
        "pin w1 best",
        "unpin w1",
        "rollback --reason x --to 2",
    ),
    *("rollback --reason x", "alias --delete best", "prune --keep-last 2", "upgrade"),
)


@dataclass(frozen=True)
class Ran:
    """How a command ended."""

    code: int
    out: str
    err: str
    error: BaseException | None


def run(*words: str, **environment: str | None) -> Ran:
    """Run a command in this process."""
    done = CliRunner(env={"COLUMNS": "200", "WEIGHTLEDGER_REGISTRY": None, **environment}).invoke(
        app, list(words)
    )
    error = None if isinstance(done.exception, SystemExit) else done.exception
    return Ran(done.exit_code, done.stdout, done.stderr, error)


def complaint(ran: Ran) -> str | None:
    """Return what is wrong with how a command ended; None when nothing is."""
    if ran.error is not None:
        return f"raised {type(ran.error).__name__}: {ran.error}"
    if ran.code not in (0, 1, 2):
        return f"exit code {ran.code}"
    if "Traceback" in ran.err or "Traceback" in ran.out:
        return "a traceback"
    if "sqlalche" in ran.err or "[SQL" in ran.err:
        return "words of SQLAlchemy"
    return None

"""Questions to the record: a million holdings of a thousand workers, beside ten thousand of the same workers."""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks.results import Limit, Result
from tests.benchmarks.setting import Setting
from tests.benchmarks.timing import Contender, interleave
from weightledger.registry import Registry

WORKERS, FEW, MANY = 1000, 10, 1000  # workers, and pushes to each
START = datetime(2026, 1, 1, tzinfo=UTC)
SUBJECT = "the long record"
_MOST = 0.020  # seconds

# One push a worker and version, a minute apart; the last is still held. The values of $run and of the first version
# come from a real one. No ANALYZE at the end: registries have no statistics, since the library makes none.
_FILL = """
WITH RECURSIVE n(k) AS (SELECT 2 UNION ALL SELECT k + 1 FROM n WHERE k < :pushes)
INSERT INTO versions (policy_id, number, state, digest, snapshot_id, structure_id, parent, depth, run_id, metadata,
                      message, nonfinite, size_bytes, created_at)
SELECT policy_id, k, state, printf('blake3:%064d', k), snapshot_id, structure_id, k - 1, k, run_id, metadata,
       message, nonfinite, size_bytes, datetime('2026-01-01', k || ' minutes') || '.000000'
FROM versions, n WHERE number = 1;

WITH RECURSIVE n(k) AS (SELECT 0 UNION ALL SELECT k + 1 FROM n WHERE k < :workers - 1)
INSERT INTO workers (policy_id, name, run_id, incarnation, state, evidence_at, detail)
SELECT policy_id, printf('worker-%04d', k), run_id, 'life-1', 'confirmed', '2026-01-01 00:00:00.000000', ''
FROM versions, n WHERE number = 1;

INSERT INTO holdings (policy_id, worker_id, version_id, number, digest, sent_digest, "order", incarnation, run_id,
                      pushed_at, confirmed_at, ended_at, ended_how)
SELECT v.policy_id, w.id, v.id, v.number, v.digest, v.digest, v.number, 'life-1', v.run_id,
       datetime('2026-01-01', v.number || ' minutes') || '.000000',
       datetime('2026-01-01', v.number || ' minutes', '1 second') || '.000000',
       CASE WHEN v.number < :pushes
            THEN datetime('2026-01-01', (v.number + 1) || ' minutes', '1 second') || '.000000' END,
       CASE WHEN v.number < :pushes THEN 'replaced' END
FROM versions v, workers w ORDER BY v.number;

INSERT INTO events (policy_id, at, kind, run_id, user, version, worker, reason, details)
SELECT policy_id, pushed_at, 'sync_failed', run_id, 'ada', number, 'worker-0001', '', '{}'
FROM holdings ORDER BY "order" LIMIT :events;

UPDATE policies SET last_number = :pushes, last_order = :pushes;
"""

Question = Callable[[Registry], list[Any]]
# Its answer grows with the record, so that only its time is promised.
WHOLE_LIFE = "history(worker)"


def questions(rows: int) -> dict[str, Question]:
    """Return what is asked. But for `WHOLE_LIFE`, answers are equally long in both records: up to so many rows."""
    then = START + timedelta(minutes=5.5)
    return {
        "workers()": lambda registry: registry.workers(),
        "holdings()": lambda registry: registry.holdings(),
        "holdings(at)": lambda registry: registry.holdings(then),
        WHOLE_LIFE: lambda registry: registry.history(worker="worker-0007"),
        "history(worker, limit=10)": lambda registry: registry.history(worker="worker-0007", limit=10),
        "history(version)": lambda registry: registry.history(version=5),
        "history(since, until)": lambda registry: registry.history(
            since=then, until=then + timedelta(seconds=10)
        ),
        f"history(limit={rows})": lambda registry: registry.history(limit=rows),
        f"events(limit={rows})": lambda registry: registry.events(limit=rows),
        "events(worker, limit=10)": lambda registry: registry.events(worker="worker-0001", limit=10),
        "staleness(version)": lambda registry: [registry.staleness(5)],
    }


def measure(setting: Setting) -> Iterator[Result]:
    few, many, count = (FEW, 50, 20) if setting.quick else (FEW, MANY, WORKERS)
    with setting.folder() as folder:
        short = _make(folder / "short", count, few)
        long = _make(folder / "long", count, many)
        with short, long:
            reference = f"{count * few:,} holdings"
            # A lookup in a sorted index takes so much longer when it is so much longer.
            growth = math.log(count * many) / math.log(count * few)
            for question, ask in questions(count).items():
                comparable = question != WHOLE_LIFE
                seconds = interleave(
                    [
                        _contender(SUBJECT, ask, long),
                        _contender(reference, ask, short),
                    ],
                    2 if setting.quick else 25,
                )
                assert not comparable or len(ask(long)) == len(ask(short))
                case = f"{question}, {count * many:,} holdings, {len(ask(long)):,} rows"
                yield Result("audit", case, SUBJECT, seconds[SUBJECT], {}, [Limit(_MOST, kind="value")])
                if comparable:
                    references = {reference: seconds[reference]}
                    yield Result(
                        "audit", case, "growth", seconds[SUBJECT], references, [Limit(growth, reference)]
                    )


def _contender(name: str, ask: Question, registry: Registry) -> Contender:
    def check(answer: Any, whole: bool) -> None:
        assert answer

    return Contender(name, lambda: ask(registry), check=check)


def _make(folder: Path, count: int, pushes: int) -> Registry:
    """Make a real registry of one version, then write the rest of the record in bulk."""
    with Registry.open(folder) as registry:
        registry.locks.keep_alive()
        registry.publish({"w": torch.zeros(4)})
    with closing(sqlite3.connect(folder / "registry.db")) as connection:
        connection.executescript("PRAGMA synchronous=OFF; PRAGMA cache_size=-200000")
        values = {"pushes": pushes, "workers": count, "events": min(2 * count, count * pushes)}
        for statement in _FILL.split(";"):
            if statement.strip():
                used = {name: value for name, value in values.items() if f":{name}" in statement}
                connection.execute(statement, used)
        connection.commit()
    opened = Registry.open(folder)
    opened.locks.keep_alive()
    assert len(opened.workers()) == count and all(each.state == "confirmed" for each in opened.workers())
    return opened

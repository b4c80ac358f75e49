"""A publish into a log of a hundred thousand versions, against one into a log of ten."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from tests.benchmarks import weights
from tests.benchmarks.results import Limit, Result
from tests.benchmarks.setting import KB, Setting
from tests.benchmarks.timing import Contender, interleave
from weightledger.registry import Registry

_MOST = 1.1  # as fast, but for noise

_FILL = """
WITH RECURSIVE n(k) AS (SELECT 2 UNION ALL SELECT k + 1 FROM n WHERE k < :versions)
INSERT INTO snapshots (digest, uri, file_bytes, stored, deleting, created_at)
SELECT printf('blake3:%064d', k), printf('%064d-filled.safetensors', k), file_bytes, 1, 0, created_at
FROM snapshots, n WHERE id = 1;

INSERT INTO versions (policy_id, number, state, digest, snapshot_id, structure_id, parent, depth, run_id, metadata,
                      message, nonfinite, size_bytes, created_at)
SELECT v.policy_id, s.id, v.state, s.digest, s.id, v.structure_id, s.id - 1, s.id, v.run_id, v.metadata, v.message,
       v.nonfinite, v.size_bytes, s.created_at
FROM versions v, snapshots s WHERE v.number = 1 AND s.id > 1 ORDER BY s.id;

INSERT INTO events (policy_id, at, kind, run_id, user, version, worker, reason, details)
SELECT policy_id, created_at, 'publish', run_id, 'ada', number, NULL, '', '{}' FROM versions WHERE number > 1;

UPDATE policies SET last_number = :versions
"""


def measure(setting: Setting) -> Iterator[Result]:
    many = 1000 if setting.quick else 100_000
    learner = weights.make(64 * KB)
    names = {count: f"at {count:,} versions" for count in (many, 10)}
    with setting.folder() as folder:
        registries = {count: _make(folder / str(count), count, learner) for count in names}
        contenders = [_contender(names[count], registries[count], learner) for count in names]
        seconds = interleave(contenders, 2 if setting.quick else 60, warmups=3)
        for count, registry in registries.items():
            assert registry.head().number > count
            registry.close()
    subject, reference = names.values()
    yield Result(
        "many-versions",
        "publish of 64 KB",
        subject,
        seconds[subject],
        {reference: seconds[reference]},
        [Limit(_MOST, reference)],
        size=64 * KB,
    )


def _contender(name: str, registry: Registry, learner: Any) -> Contender:
    def check(version: Any, whole: bool) -> None:
        assert registry.head().digest == version.digest
        if whole:
            target = weights.Net(64 * KB)
            registry.restore(version, target)
            assert weights.digest(target) == weights.digest(learner)

    return Contender(name, lambda: registry.publish(learner), lambda: weights.change(learner), check)


def _make(folder: Path, count: int, learner: Any) -> Registry:
    """Make a real registry of one version, then write the others' rows in bulk; their files are never read."""
    with Registry.open(folder) as registry:
        registry.publish(learner)
    with closing(sqlite3.connect(folder / "registry.db")) as connection:
        for statement in _FILL.split(";"):
            connection.execute(statement, {"versions": count} if ":versions" in statement else {})
        connection.commit()
    return Registry.open(folder)

"""Rollback to a version in the object store, and to one that is on disk only.

The references do what a rollback cannot do without: bring the workers to the old bytes, copy them into the learner,
and for the version on disk read its file first. Four contents take turns, so that bytes are sent in every turn.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.benchmarks import weights, workers
from tests.benchmarks.results import Limit, Result
from tests.benchmarks.setting import GB, MB, Setting, case_name, largest
from tests.benchmarks.timing import Contender, interleave, rounds_for
from weightledger.registry import Registry
from weightledger.updater import RayRemoteWeightUpdater

STORE, DISK = "rollback, in the object store", "rollback, on disk only"
SYNC, READ = "sync + one copy", "read + sync + one copy"
CONTENTS = 4


def measure(setting: Setting) -> Iterator[Result]:
    cases = setting.grid({4: (MB, 16 * MB, 256 * MB, GB)}, copies=13, copies_per_worker=1)
    with workers.cluster((CONTENTS + 2) * largest(cases)[0]):
        handles = workers.hire(largest(cases)[1])
        for size, count in cases:
            fleet = workers.Fleet(handles[:count], weights.make(size))
            workers.build(fleet.handles, size)
            with setting.folder() as folder:
                seconds = _turns(folder, fleet, rounds_for(size, quick=setting.quick))
            about: dict[str, Any] = {"size": size, "workers": count}
            name = case_name(size, count)
            for subject, reference, most in ((STORE, SYNC, 1.2), (DISK, READ, 1.3)):
                references = {reference: seconds[reference]}
                yield Result(
                    "rollback", name, subject, seconds[subject], references, [Limit(most, reference)], **about
                )


def _turns(folder: Path, fleet: workers.Fleet, rounds: int) -> dict[str, list[float]]:
    learner = fleet.learner
    with (
        Registry.open(folder / "kept") as kept,
        Registry.open(folder / "dropped") as dropped,
        RayRemoteWeightUpdater(learner, fleet.handles, registry=kept, timeout=workers.WAIT) as near,
        RayRemoteWeightUpdater(learner, fleet.handles, registry=dropped, timeout=workers.WAIT) as far,
    ):
        contents: list[list[torch.Tensor]] = []
        digests: list[str] = []
        for number in range(1, CONTENTS + 1):
            near.update_weights().raise_for_failures()
            # Pinned versions stay in the object store; nobody bears these names.
            kept.pin(f"keeper-{number}", number)
            far.update_weights().raise_for_failures()
            contents.append([tensor.clone() for tensor in weights.tensors(learner)])
            digests.append(weights.digest(learner))
            weights.change(learner)
        files = [
            _file_of(registry, number) for registry in (kept, dropped) for number in range(1, CONTENTS + 1)
        ]
        plain = np.zeros(max(path.stat().st_size for path in files), np.uint8)
        turn = _Turn()

        def check(outcome: Any, whole: bool) -> None:
            fleet.check(outcome, whole)
            assert not whole or weights.digest(learner) == digests[turn.content]

        def copy_in() -> None:
            for target, source in zip(weights.tensors(learner), contents[turn.content], strict=True):
                target.copy_(source)

        def sync() -> Any:
            report = near.sync(version=turn.content + 1)
            copy_in()
            return report

        def read_and_sync() -> Any:
            with files[turn.content].open("rb", buffering=0) as file:
                while file.readinto(plain.data):
                    pass
            return sync()

        def contender(name: str, run: Callable[[], Any]) -> Contender:
            return Contender(name, run, lambda: turn.next(files), check)

        return interleave(
            [
                contender(STORE, lambda: near.rollback(turn.content + 1)),
                contender(SYNC, sync),
                contender(DISK, lambda: far.rollback(turn.content + 1)),
                contender(READ, read_and_sync),
            ],
            rounds,
        )


class _Turn:
    """Which content is next. Each of four contenders sees another one in each round, and each turn changes it."""

    def __init__(self) -> None:
        self._count = -1
        self.content = 0

    def next(self, files: list[Path]) -> None:
        self._count += 1
        round_, place = divmod(self._count, 4)
        self.content = (round_ + place) % CONTENTS
        for path in files:
            # What the page cache holds would hide a read.
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _file_of(registry: Registry, number: int) -> Path:
    with registry.ledger.reading() as conn:
        file, _ = registry.ledger.files_of(conn, number)
    return Path(registry.location) / "snapshots" / file.uri

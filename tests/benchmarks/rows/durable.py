"""`Registry.publish` alone, against the bare write of the same bytes and against safetensors."""

from __future__ import annotations

from collections.abc import Iterator

from tests.benchmarks import weights
from tests.benchmarks.contenders import DISK, LEDGER, ledger_publish, save_safetensors, write_and_sync
from tests.benchmarks.results import Limit, Result
from tests.benchmarks.setting import MB, SIZES, Setting, size_name
from tests.benchmarks.timing import interleave, rounds_for

SAFETENSORS = "save_file + fdatasync"


def measure(setting: Setting) -> Iterator[Result]:
    for size, _ in setting.grid({0: SIZES}, copies=6, copies_per_worker=0):
        learner = weights.make(size)
        with setting.folder() as folder, ledger_publish(LEDGER, folder, learner) as ours:
            contenders = [
                ours,
                write_and_sync(DISK, folder, learner),
                save_safetensors(SAFETENSORS, folder, learner),
            ]
            seconds = interleave(contenders, rounds_for(size, quick=setting.quick))
        yield Result(
            "durable",
            size_name(size),
            LEDGER,
            seconds.pop(LEDGER),
            seconds,
            [Limit(1.25, DISK) if size >= 16 * MB else Limit(0.002, DISK, "more")],
            size=size,
        )

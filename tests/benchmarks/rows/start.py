"""How long everything takes to begin, each in a fresh process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks.results import Limit, Result
from tests.benchmarks.setting import Setting
from tests.benchmarks.timing import Contender, interleave
from weightledger.registry import Registry

BARE = "python -c pass"
STATUS = "weightledger status"
IMPORT = "from weightledger.registry import Registry"
TORCH = "import torch"
_MOST = 0.5  # seconds

_OPEN = """
import sys, time
from weightledger.registry import Registry
began = time.perf_counter()
Registry.open(sys.argv[1])
print(time.perf_counter() - began)
"""


def measure(setting: Setting) -> Iterator[Result]:
    with setting.folder() as folder:
        with Registry.open(folder / "registry") as registry:
            for number in range(20):
                registry.publish({"w": torch.full((4,), float(number))})
        command = [str(Path(sys.executable).with_name("weightledger")), "--registry", str(registry.location)]
        programs = {
            BARE: [sys.executable, "-c", "pass"],
            STATUS: [*command, "status"],
            IMPORT: [sys.executable, "-c", IMPORT],
            TORCH: [sys.executable, "-c", TORCH],
        }
        rounds = 2 if setting.quick else 7
        seconds = interleave([_contender(name, each) for name, each in programs.items()], rounds)
        opened = {
            name: [
                _open_seconds(folder / f"{name}-{count if name == 'new' else 0}") for count in range(rounds)
            ]
            for name in ("new", "existing")
        }
    bare = {BARE: seconds[BARE]}
    limits = [Limit(_MOST, kind="value")]
    yield Result("start", "from a cold start", STATUS, seconds[STATUS], bare, limits)
    yield Result("start", "fresh process", IMPORT, seconds[IMPORT], bare | {TORCH: seconds[TORCH]})
    yield Result("start", "fresh process", "first Registry.open, new folder", opened["new"])
    yield Result("start", "fresh process", "first Registry.open, existing", opened["existing"][1:])


def _contender(name: str, command: list[str]) -> Contender:
    def run() -> Any:
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)

    def check(done: Any, whole: bool) -> None:
        assert name != STATUS or "v20" in done.stdout

    return Contender(name, run, check=check)


def _open_seconds(folder: Path) -> float:
    done = subprocess.run(
        [sys.executable, "-c", _OPEN, folder], capture_output=True, text=True, timeout=60, check=True
    )
    return float(done.stdout)

"""The example of a transport of one's own: real processes, weights in shared memory, one process that dies."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parent.parent.parent / "docs" / "examples" / "shared_memory_transport.py"


def test_processes_with_shared_memory_are_steered_rolled_back_and_buried(tmp_path: Path) -> None:
    before = {path.name for path in Path("/dev/shm").glob("psm_*")}
    done = subprocess.run(
        [sys.executable, EXAMPLE], cwd=tmp_path, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr
    computed = set(re.findall(r"computes (\S+) with v3", done.stdout))
    assert len(computed) == 1, "each process computes with the weights of the rollback"
    assert "v4: 1 dead (process-0), 2 synced" in done.stdout
    assert "process-0: gone, holds None" in done.stdout
    assert "leaked" not in done.stderr
    assert {path.name for path in Path("/dev/shm").glob("psm_*")} <= before, "no memory is left behind"

"""Run tests with their registries on a PostgreSQL server: `python -m tests.on_postgres -m pytest …` starts one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.on_postgres.server import running_server


def main(arguments: list[str]) -> int:
    with running_server(durable=False) as server:
        here = str(Path(__file__).parent)
        env = os.environ | {
            "WEIGHTLEDGER_TEST_SERVER": server.url,
            "PYTHONPATH": os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH", "")])),
        }
        return subprocess.call([sys.executable, *arguments], env=env)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""What every test shares; it stands at the root because the examples in README.md and docs/ are tests, too.

Rules kept here
- One Ray cluster for the whole session, started by the first test that asks for `ray_cluster`.
- A Markdown page is one test: its `>>>` examples run in order in an empty folder, then its `$ weightledger` commands,
  in one shell and the same folder.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Machines that run tests differ in speed by an order of magnitude, so no example fails for being slow;
# what is measured is measured as a ratio, in tests/benchmarks.
settings.register_profile(
    "weightledger",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize="CI" in os.environ,
)
settings.load_profile("weightledger")

# The width of the terminal that tests are run in is none of the commands that they run.
os.environ.pop("COLUMNS", None)

COMMAND = re.compile(r"^\$ ((?:weightledger|export WEIGHTLEDGER_)(?:.*\\\n)*.*)$", re.MULTILINE)


def start_cluster() -> None:
    """Start a Ray cluster on this machine; actors belong to `weightledger-tests`."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is reported to anybody
    import ray

    ray.init(
        address="local",  # never a cluster that happens to run on this machine
        num_cpus=4,
        include_dashboard=False,
        object_store_memory=400_000_000,
        log_to_driver=False,
        namespace="weightledger-tests",
    )


def restart_cluster() -> None:
    """Start it again, for a page: libraries may have put a cluster of their own in its place, which prints into it."""
    import ray

    ray.shutdown()
    start_cluster()


def uses_the_cluster(item: pytest.Item) -> bool:
    if isinstance(item, pytest.DoctestItem):
        return "import ray" in item.path.read_text(encoding="utf-8")
    return "ray_cluster" in getattr(item, "fixturenames", ())


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Generator[None]:
    """Let one of the parallel processes have the cluster with all of its tests; the others share the rest, by file."""
    for item in items:
        item.add_marker(pytest.mark.xdist_group("cluster" if uses_the_cluster(item) else str(item.path)))
    yield


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """Run a Ray cluster on this machine until the session ends."""
    start_cluster()
    import ray

    yield
    ray.shutdown()


@pytest.fixture(autouse=True)
def place_for_examples(request: pytest.FixtureRequest) -> None:
    """Give each Markdown page an empty folder, and the session's cluster where it uses Ray."""
    if not isinstance(request.node, pytest.DoctestItem):
        return
    tmp_path: Path = request.getfixturevalue("tmp_path")
    request.getfixturevalue("monkeypatch").chdir(tmp_path)
    if uses_the_cluster(request.node):
        # Without it, the page's first remote call would start a cluster of its own that outlives the page.
        request.getfixturevalue("ray_cluster")
        restart_cluster()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    """Run a page's commands after its examples, on the registry that these have made."""
    yield
    if isinstance(item, pytest.DoctestItem):
        commands = COMMAND.findall(item.path.read_text(encoding="utf-8"))
        if commands:
            run_commands(commands)


def run_commands(commands: list[str]) -> None:
    """Run lines of shell, each as if it were typed; the first that fails is the error."""
    scripts = Path(sys.executable).parent
    done = subprocess.run(
        ["bash", "-c", "\n".join(["set -euo pipefail", "set -x", *commands])],
        env=os.environ | {"PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    if done.returncode != 0:
        raise AssertionError(f"exit code {done.returncode}:\n{done.stdout}{done.stderr}")

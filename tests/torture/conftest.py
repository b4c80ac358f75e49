"""The ground of the session, and the figures at its end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from tests.registry.helpers import memory_folder
from tests.torture import shim
from tests.torture.ground import Ground

_figures: Counter[str] = Counter()


@pytest.fixture(scope="session")
def ground() -> Iterator[Ground]:
    with memory_folder() as folder:
        made = Ground(shim.build(folder), folder, _figures)
        yield made
        made.close()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Hand the figures over, where the tests run in several processes."""
    handed = getattr(session.config, "workeroutput", None)
    if handed is not None:
        handed["torture"] = dict(_figures)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    _figures.update(getattr(node, "workeroutput", {}).get("torture", {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what was done."""
    if _figures:
        told = ", ".join(f"{count:,} {what}" for what, count in sorted(_figures.items()))
        terminalreporter.write_line(f"torture: {told}")

"""Records and reports show themselves: short at a prompt, as a table in a notebook."""

from __future__ import annotations

from pathlib import Path

import torch

import weightledger
import weightledger.registry
import weightledger.updater
from weightledger.registry import Registry
from weightledger.updater.reports import Held, SyncReport, WorkerOutcome
from weightledger.updater.testing import FakeWorkers


def outcome(name: str, status: str, held: int | None = 1, error: str = "") -> WorkerOutcome:
    return WorkerOutcome(name, status, held, 1, error, 0.0)  # type: ignore[arg-type]


def test_a_report_is_printed_as_one_line_that_counts_and_names_who_failed() -> None:
    workers = {
        0: outcome("env-0", "synced"),
        **{n: outcome(f"env-{n}", "timeout", None) for n in range(1, 6)},
    }
    report = SyncReport(101, workers)
    assert str(report) == "v101: 1 synced, 5 timeout (env-1, env-2, env-3, …)"
    assert repr(report) == f"<SyncReport {report}>"
    assert str(SyncReport(None, {})) == "no version: no workers"


def test_records_of_a_run_have_short_reprs(tmp_path: Path) -> None:
    with Registry.open(tmp_path / "runs") as registry:
        model = torch.nn.Linear(2, 1)
        with FakeWorkers(model, [torch.nn.Linear(2, 1)], registry=registry) as fleet:
            report = fleet.update_weights(step=1)
            registry.set_alias("good", "head")
            registry.pin("fake-0", "good")
            (holding,), (worker,), (pin,) = registry.history(), registry.workers(), registry.pins()
            assert repr(holding).startswith("<Holding fake-0 v1 held, 20")
            assert repr(worker) == "<WorkerStatus fake-0 confirmed: holds v1, target v1>"
            assert repr(pin) == "<Pin fake-0 v1 by alias 'good'>"
            assert repr(report) == "<SyncReport v1: 1 synced>"
            assert repr(report.workers[0]) == "<WorkerOutcome fake-0 synced, holds v1>"
            assert repr(fleet.probe()[0]) == "<Held fake-0 v1: matches>"
            published = registry.events(kind="publish")[0]
            assert repr(published) == f"<Event {published.id} publish v1 by {published.user}>"


def test_a_notebook_gets_tables_in_which_every_text_is_escaped(tmp_path: Path) -> None:
    with Registry.open(tmp_path / "runs") as registry:
        version = registry.publish({"w": torch.ones(1)}, message="<script>", metrics={"reward": 2.0})
    table = version._repr_html_()
    assert table.startswith("<table>")
    assert "<tr><th>message</th><td>&lt;script&gt;</td></tr>" in table
    assert "<tr><th>metrics</th><td>reward=2.0</td></tr>" in table
    report = SyncReport(1, {0: outcome("<b>", "failed", None, "a & b")})
    assert "<td>&lt;b&gt;</td><td>failed</td><td>–</td><td>1</td><td>a &amp; b</td>" in report._repr_html_()
    assert "<th>drift</th>" in Held("a", 1, None, True, (), None, "")._repr_html_()


def test_the_packages_show_what_is_public() -> None:
    for package in (weightledger, weightledger.registry, weightledger.updater):
        assert dir(package) == sorted(package.__all__)

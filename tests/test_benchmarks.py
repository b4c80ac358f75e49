"""The benchmarks work: rows run and are judged as they say. How fast anything is, is not looked at here."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks import running, soak, table, timing, weights
from tests.benchmarks.catalog import ROWS, Row
from tests.benchmarks.results import Limit, Result, spread
from tests.benchmarks.setting import GB, KB, MB, Setting, parse_size, size_name
from tests.benchmarks.timing import Contender, interleave

ROOT = Path(__file__).parent.parent


def bench(*arguments: str | Path, seconds: float = 115) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.benchmarks", *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )


def quick(tmp_path: Path, *rows: str) -> dict[str, Any]:
    """Run rows at their smallest size, and give what was saved."""
    done = bench("--quick", "--rows", *rows, "--out", tmp_path / "out", "--scratch", tmp_path / "scratch")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "out" / "results.svg").read_text(encoding="utf-8").startswith("<?xml")
    assert list((tmp_path / "scratch").iterdir()) == []
    report: dict[str, Any] = json.loads((tmp_path / "out" / "results.json").read_text(encoding="utf-8"))
    assert [row["name"] for row in report["rows"]] == list(rows)
    for row in report["rows"]:
        assert row["error"] == ""
        assert row["title"] in done.stdout
        assert row["results"]
        for result in row["results"]:
            assert all(len(samples) == len(result["samples"]) for samples in result["references"].values())
            assert result["reached"] in (True, False, None)
            assert set(result["ratios"]) == set(result["references"])
    return report


def test_rows_without_a_cluster_are_measured_saved_and_drawn(tmp_path: Path) -> None:
    report = quick(tmp_path, "durable", "many-versions", "audit")
    assert report["machine"]["cores"] >= 1
    assert report["machine"]["write_fdatasync_gb_s"] > 0
    (result,) = report["rows"][0]["results"]
    assert set(result["references"]) == {"write + fdatasync", "save_file + fdatasync"}


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize(
    "row",
    [
        "actors",
        *(
            pytest.param(row, marks=pytest.mark.long)
            for row in ("held", "proof", "rollback", "nodes", "scaling")
        ),
    ],
)
def test_rows_with_a_cluster_of_their_own_do_the_work_on_both_sides(tmp_path: Path, row: str) -> None:
    quick(tmp_path, row)


@pytest.mark.ray
@pytest.mark.long
@pytest.mark.parametrize("row", ["torchrl-updater", "torchrl-scheme"])
def test_rows_on_a_real_collector_do_the_work_on_both_sides(tmp_path: Path, row: str) -> None:
    quick(tmp_path, row)


@pytest.mark.ray
@pytest.mark.slow
def test_a_soak_looks_at_everything_at_intervals(tmp_path: Path) -> None:
    done = bench("soak", "--quick", "--out", tmp_path / "out", "--scratch", tmp_path / "scratch")
    report = json.loads((tmp_path / "out" / "soak.json").read_text(encoding="utf-8"))
    # So short a run may end while caches still fill.
    assert done.returncode == int(bool(report["grown"])), done.stderr
    assert report["looks"][-1]["updates"] == report["updates"]
    assert all(look["learner_private_bytes"] > 0 for look in report["looks"])


@pytest.mark.ray
@pytest.mark.long
@pytest.mark.timeout(900)
def test_nothing_grows_over_thousands_of_updates(tmp_path: Path) -> None:
    places = ("--out", tmp_path / "out", "--scratch", tmp_path / "scratch")
    done = bench("soak", "--updates", "4000", "--size", "64KB", "--workers", "2", *places, seconds=800)
    assert done.returncode == 0, done.stdout + done.stderr
    looks = json.loads((tmp_path / "out" / "soak.json").read_text(encoding="utf-8"))["looks"]
    assert [look["updates"] for look in looks] == list(range(100, 4001, 100))


def test_a_soak_tells_what_grew_and_lets_a_warm_up_pass() -> None:
    def look(number: int, **changes: int) -> soak.Look:
        fields = dict.fromkeys(soak.Look.__dataclass_fields__, 10)
        return soak.Look(**(fields | {"updates": number} | changes))

    warming = [look(number, learner_private_bytes=min(number, 3) << 30) for number in range(20)]
    assert soak.growth(warming) == []
    leaking = [look(number, store_bytes=number * 1000) for number in range(20)]
    (line,) = soak.growth(leaking)
    assert line.startswith("store_bytes grew from 9,000 to 19,000")
    assert soak.growth([look(number, worker_descriptors=number) for number in range(20)])
    assert soak.growth([look(number, database_bytes=number << 20) for number in range(20)]) == []


@pytest.mark.ray
def test_a_turn_that_brought_nothing_to_a_worker_is_found_out(ray_cluster: None) -> None:
    import ray

    from tests.benchmarks import workers
    from tests.benchmarks.contenders import PUT, put_and_load

    (handle,) = workers.hire(1)
    try:
        fleet = workers.Fleet([handle], weights.make(64 * KB))
        workers.build([handle], 64 * KB)
        honest = put_and_load(PUT, fleet)
        assert len(interleave([honest], 2)[PUT]) == 2
        idle = Contender("idle", lambda: None, honest.prepare, honest.check)
        with pytest.raises(AssertionError, match="workers hold"):
            interleave([idle], 2)
    finally:
        ray.kill(handle)


def test_turns_are_taken_one_by_one_and_checked_in_full_first_and_last() -> None:
    said: list[str] = []
    contenders = [
        Contender(
            name,
            lambda name=name: said.append(f"run {name}"),
            lambda name=name: said.append(f"prepare {name}"),
            lambda _, whole, name=name: said.append(f"check {name} {whole}"),
        )
        for name in "ab"
    ]
    seconds = interleave(contenders, 3, warmups=0)
    assert {name: len(each) for name, each in seconds.items()} == {"a": 3, "b": 3}
    assert [line for line in said if line.startswith("run")] == ["run a", "run b"] * 3
    assert [line for line in said if line.startswith("check a")] == [
        "check a True",
        "check a False",
        "check a True",
    ]
    assert said[:3] == ["prepare a", "run a", "check a True"]


def test_a_ratio_is_the_median_over_rounds_and_not_of_medians() -> None:
    result = Result("row", "case", "ours", [1.0, 8.0, 9.0], {"theirs": [2.0, 2.0, 9.0]})
    assert result.ratio("theirs").median == 1.0
    assert spread([1, 2, 3, 4, 5]).low == 2


def test_a_promise_is_reached_when_any_of_its_ways_is() -> None:
    times = {"theirs": [2.0, 2.0], "disk": [1.0, 1.0]}
    result = Result("row", "case", "ours", [1.2, 1.2], times, [Limit(0.2, "theirs"), Limit(1.25, "disk")])
    assert result.reached is True
    assert result.to_dict()["reached_by"] == "≤ 1.25 × disk"
    assert Result("row", "case", "ours", [1.3, 1.3], times, result.limits).reached is False
    assert Result("row", "case", "ours", [1.3], {}).reached is None
    assert Result("row", "case", "ours", [1.001], {"x": [1.0]}, [Limit(0.002, "x", "more")]).reached is True
    assert Result("row", "case", "ours", [0.6], {}, [Limit(0.5, kind="value")]).reached is False


def test_a_result_comes_back_from_its_record() -> None:
    result = Result("row", "case", "ours", [1.0], {"x": [2.0]}, [Limit(0.5, "x")], size=64 * KB, workers=4)
    back = Result.from_dict(json.loads(json.dumps(result.to_dict())))
    assert back.to_dict() == result.to_dict()


@pytest.mark.parametrize(("text", "size"), [("64KB", 64 * KB), ("1 MB", MB), ("1gb", GB), ("100", 100)])
def test_sizes_are_read_as_they_are_written(text: str, size: int) -> None:
    assert parse_size(text) == size
    assert parse_size(size_name(size)) == size


def test_what_is_no_size_is_refused() -> None:
    with pytest.raises(ValueError, match="a number with KB, MB or GB, found 'big'"):
        parse_size("big")


@pytest.mark.parametrize("size", [64 * KB, MB, 16 * MB])
def test_weights_have_the_size_that_was_asked_for_and_change_in_every_tensor(size: int) -> None:
    net = weights.make(size)
    assert 0.95 * size <= weights.nbytes(net) <= 1.1 * size
    before, value = [tensor.clone() for tensor in weights.tensors(net)], weights.value(net)
    weights.change(net)
    assert all((new != old).all() for new, old in zip(weights.tensors(net), before, strict=True))
    assert weights.value(net) != value


def test_cases_that_do_not_fit_into_memory_are_left_out_and_said(capsys: pytest.CaptureFixture[str]) -> None:
    setting = Setting("unused", sizes=[64 * KB, 1 << 60])
    assert setting.grid({4: ()}, copies=1, copies_per_worker=1) == [(64 * KB, 4)]
    assert "left out: 1073741824 GB, 4 workers needs" in capsys.readouterr().out


def test_a_row_that_breaks_is_told_with_its_last_words(tmp_path: Path) -> None:
    row = Row("no-such-row", "durable:measure", "a row that the child does not know", "")
    outcome = running.run(row, Setting(str(tmp_path), quick=True), tmp_path / "logs")
    assert outcome.results == []
    assert "exit code 1" in outcome.error
    assert "KeyError: 'no-such-row'" in outcome.error


def test_every_row_names_a_function_that_is_there_and_has_a_place_in_the_page() -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    for row in ROWS:
        module, function = row.measure.split(":")
        source = (ROOT / "tests" / "benchmarks" / "rows" / f"{module}.py").read_text(encoding="utf-8")
        assert function in {node.name for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}
        assert f"| `{row.name}` |" in page


def test_results_replace_what_stood_between_the_markers() -> None:
    begin, end = table.MARKERS
    page = f"above\n\n{begin}\n\nold\n\n{end}\n\nbelow\n"
    assert table.replace_block(page, "new\n") == f"above\n\n{begin}\n\nnew\n\n{end}\n\nbelow\n"
    with pytest.raises(ValueError, match="expected one"):
        table.replace_block("no markers", "new")


def test_bigger_weights_get_fewer_rounds_and_never_none() -> None:
    rounds = [timing.rounds_for(size, quick=False) for size in (64 * KB, MB, 16 * MB, 256 * MB, GB)]
    assert rounds == sorted(rounds, reverse=True)
    assert rounds[-1] >= 5

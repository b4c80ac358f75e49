"""The check finds what it is there to find: each kind of harm, made on purpose, is named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.torture import cases
from tests.torture.check import check
from tests.torture.ground import Ground
from tests.torture.story import read

Lines = list[dict[str, Any]]


def changed(lines: Lines, what: str, where: Callable[[dict[str, Any]], bool], **changes: Any) -> Lines:
    found = [line for line in lines if line["what"] == what and where(line)]
    assert found, f"no line {what}"
    found[-1].update(changes)
    return lines


def without(lines: Lines, where: Callable[[dict[str, Any]], bool]) -> Lines:
    kept = [line for line in lines if not where(line)]
    assert len(kept) < len(lines)
    return kept


def is_update(line: dict[str, Any]) -> bool:
    return line.get("call") == "update"


LIES: dict[str, tuple[Callable[[Lines], Lines], str]] = {
    "a version that was returned is gone": (
        lambda lines: changed(lines, "done", is_update, number=77),
        "v77 was returned and is not there",
    ),
    "a version holds something else": (
        lambda lines: changed(lines, "done", is_update, value=55.0),
        "holds 4.0, was 55.0",
    ),
    "a version has another digest": (
        lambda lines: changed(lines, "done", is_update, digest="blake3:0"),
        "had the digest blake3:0",
    ),
    "nobody was making a version": (
        lambda lines: without(lines, lambda line: is_update(line) and line["value"] == 3),
        "versions of 3.0 that no call was making",
    ),
    "a pin is another": (
        lambda lines: changed(lines, "done", lambda line: "pin" in line, pin=["w2", 3]),
        "names and scores are",
    ),
    "a worker got something else": (
        lambda lines: changed(lines, "got", lambda line: line["worker"] == "w1", value=2.0),
        "w1 never got what",
    ),
    "a worker got a mix": (
        lambda lines: changed(lines, "got", lambda line: line["worker"] == "w0", value=None),
        "w0 held a mix",
    ),
    "a worker got what no row says": (
        lambda lines: [*lines, {"what": "got", "time": 0.0, "worker": "w0", "value": 2.0}],
        "w0 got 2.0 at 0.0, and no row says so",
    ),
    "a worker was written to behind a holding's back": (
        lambda lines: [
            *lines,
            *(
                {**line, "time": line["time"] + 1, "value": 3.0}
                for line in lines[-9:]
                if line["what"] == "got"
            ),
        ],
        "while <Holding",
    ),
}


@pytest.fixture(scope="module")
def updated(ground: Ground, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Lines]:
    """Run the scenario of an update to its end; return its folder and its story."""
    folder = tmp_path_factory.mktemp("updated")
    (folder / "root").mkdir()
    told = folder / "story"
    plan = cases.shim.Plan(0)
    assert ground.call(cases.run, "update", folder / "root", told, plan).code == 0
    return folder / "root", read(told)


def checked(updated: tuple[Path, Lines], tmp_path: Path, lines: Lines) -> list[str]:
    shutil.copytree(updated[0], tmp_path / "root", dirs_exist_ok=True)
    (tmp_path / "story").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return check(tmp_path / "root", tmp_path / "story").problems


def test_a_true_story_is_no_problem(updated: tuple[Path, Lines], tmp_path: Path) -> None:
    assert checked(updated, tmp_path, updated[1]) == []


@pytest.mark.parametrize("name", LIES)
def test_a_story_that_the_registry_does_not_bear_out_is_a_problem(
    updated: tuple[Path, Lines], tmp_path: Path, name: str
) -> None:
    change, text = LIES[name]
    problems = checked(updated, tmp_path, change(json.loads(json.dumps(updated[1]))))
    assert any(text in problem for problem in problems), problems


def test_a_file_that_nobody_knows_is_a_problem(updated: tuple[Path, Lines], tmp_path: Path) -> None:
    snapshots = cases.place(tmp_path / "root") / "snapshots"
    shutil.copytree(updated[0], tmp_path / "root")
    (snapshots / "stray.safetensors").write_bytes(b"")
    assert any("stray" in problem for problem in checked(updated, tmp_path, updated[1]))


def test_a_child_that_raises_or_hangs_is_a_problem(ground: Ground) -> None:
    plan = cases.shim.Plan(cases.shim.CHANGES, 1, cases.shim.Action.FAIL, 5)
    assert "ZeroDivisionError" in ground.judge(ground.call(_divide), plan)[0]
    assert "in _wait" in ground.judge(ground.call(_wait, seconds=1), plan)[0]


def _divide() -> float:
    return 1 / 0


def _wait() -> None:
    import time

    time.sleep(600)

"""The documentation is whole: it builds, loads nothing from elsewhere, and tells every command and column there is.

That its examples and commands are true is tested page by page: see the root's `conftest.py`.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
import shutil
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.core import TyperGroup

from weightledger.registry.log.models import Base

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

SHORT = "# tests: run this"
"""The line by which a program in docs/examples says that it ends by itself within a minute."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built documentation; a warning of the build is an error."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", folder],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder


def test_the_documentation_has_every_page_and_loads_nothing_from_elsewhere(site: Path) -> None:
    sources = [page.relative_to(ROOT / "docs").with_suffix(".html") for page in PAGES if page.parent != ROOT]
    assert [page for page in sources if not (site / page).exists()] == []
    foreign = re.compile(r"<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=[\"']?(?:https?:)?//[^>]*>")
    assert [
        tag for page in site.rglob("*.html") for tag in foreign.findall(page.read_text(encoding="utf-8"))
    ] == []


@pytest.mark.parametrize("package", ["weightledger.registry", "weightledger.updater"])
def test_every_public_name_has_a_place_in_the_reference(site: Path, package: str) -> None:
    # Four lines of plain text, then one line for each name that a page explains.
    inventory = zlib.decompress((site / "objects.inv").read_bytes().split(b"\n", 4)[4]).decode()
    explained = {line.split(" ")[0] for line in inventory.splitlines()}
    public = importlib.import_module(package)
    homes = {name: getattr(getattr(public, name), "__module__", package) for name in public.__all__}
    assert [
        name for name, home in homes.items() if explained.isdisjoint({f"{home}.{name}", f"{package}.{name}"})
    ] == []


@pytest.mark.parametrize("page", PAGES, ids=[page.relative_to(ROOT).as_posix() for page in PAGES])
def test_every_python_block_is_an_example_that_runs(page: Path) -> None:
    blocks = re.findall(r"^```(?:python|pycon|py)\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)
    assert [block for block in blocks if not block.lstrip().startswith(">>>")] == []


def members(name: str, thing: Any) -> Iterator[tuple[str, Any]]:
    """What users can call of a public thing: itself, and a class's own public methods and properties."""
    yield name, thing
    if inspect.isclass(thing):
        for member, value in inspect.getmembers(thing):
            function: Any = value.fget if isinstance(value, property) else value
            ours = getattr(function, "__module__", None) or ""
            if (
                not member.startswith("_")
                and inspect.isroutine(function)
                and ours.startswith("weightledger.")
            ):
                yield f"{name}.{member}", value


@pytest.mark.parametrize("package", ["weightledger.registry", "weightledger.updater"])
def test_everything_that_users_call_has_a_docstring_whose_first_line_is_a_sentence(package: str) -> None:
    public = importlib.import_module(package)
    called = [pair for name in public.__all__ for pair in members(name, getattr(public, name))]
    first_lines = {name: (inspect.getdoc(thing) or "").split("\n\n")[0] for name, thing in called}
    assert first_lines
    assert [name for name, line in first_lines.items() if not line.endswith((".", ":"))] == []


def test_every_column_of_every_table_is_documented_and_no_other() -> None:
    page = (ROOT / "docs" / "reference" / "tables.md").read_text(encoding="utf-8")
    told = {
        (table, column)
        for table, body in re.findall(r"^## `(\w+)`\n(.*?)(?=^## |\Z)", page, re.M | re.S)
        for names in re.findall(r"^\| (`.*?) \|", body, re.M)
        for column in re.findall(r"`(\w+)`", names)
    }
    assert told == {
        (table.name, column.name) for table in Base.metadata.tables.values() for column in table.columns
    }


def commands() -> dict[str, set[str]]:
    """Every command of `weightledger`, and its options."""
    from weightledger.registry.commands.app import app

    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    return {name: {text for item in one.params for text in item.opts} for name, one in group.commands.items()}


def test_every_command_is_documented_and_every_documented_option_exists() -> None:
    page = (ROOT / "docs" / "reference" / "cli.md").read_text(encoding="utf-8")
    told = re.findall(r"^\| `weightledger ([a-z]+)([^`]*)`", page, re.M)
    assert {name for name, _ in told} == set(commands())
    for name, usage in told:
        assert set(re.findall(r"--[a-z-]+", usage)) <= commands()[name], name


def page_result(folder: Path, page: str) -> tuple[int, str]:
    """Run one Markdown page under the root's `conftest.py`, in a session of its own."""
    shutil.copy(ROOT / "conftest.py", folder)
    (folder / "page.md").write_text(page, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--doctest-glob=*.md", "page.md"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    return done.returncode, done.stdout


def test_a_page_fails_by_a_wrong_command_as_by_a_wrong_example(tmp_path: Path) -> None:
    example = ">>> import os\n>>> os.listdir()\n[]\n\n"
    assert page_result(tmp_path, example)[0] == 0
    assert page_result(tmp_path, example + "$ weightledger --help\n$ made-up-tool\n")[0] == 0
    code, told = page_result(tmp_path, example + "$ weightledger status --registry nowhere\n")
    assert code == 1
    assert "nowhere" in told
    assert page_result(tmp_path, example.replace("[]", "['something']"))[0] == 1


def short_programs() -> list[Path]:
    programs = sorted((ROOT / "docs" / "examples").glob("*.py"))
    return [program for program in programs if SHORT in program.read_text(encoding="utf-8").splitlines()]


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("program", short_programs(), ids=lambda program: program.stem)
def test_a_program_marked_short_runs_to_its_end(program: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, program], cwd=tmp_path, capture_output=True, text=True, timeout=380, check=False
    )
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"

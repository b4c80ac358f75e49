"""What is shipped: the wheel, the names that it installs, and the targets, versions and examples that texts name."""

from __future__ import annotations

import doctest
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from email.parser import HeaderParser
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
FOLDERS = ("registry", "updater", "migrations")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def source_files() -> list[str]:
    """Path in the wheel of each module of the tree."""
    front = [f"weightledger/{path.name}" for path in sorted((ROOT / "src" / "weightledger").glob("*.py"))]
    paths = (path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py")))
    return [*front, *(f"weightledger/{path.relative_to(ROOT).as_posix()}" for path in paths)]


def module_names() -> list[str]:
    """Every module that can be imported by itself: Alembic alone runs `env`, inside a migration."""
    names = (path.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for path in source_files())
    return [name for name in names if name not in ("weightledger.migrations.env", "weightledger.__main__")]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from a copy: a build inside the tree would leave folders there, and ship what old ones left."""
    source = tmp_path_factory.mktemp("source")
    for name in (*FOLDERS, "tests", "docs"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(
        ROOT / "src",
        source / "src",
        symlinks=True,
        ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"),
    )
    for name in ("pyproject.toml", "README.md", "LICENSE", "conftest.py"):
        shutil.copy(ROOT / name, source)
    target = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", target, source)
    (built,) = target.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel in a folder of its own, apart from the environment's editable install."""
    target = tmp_path_factory.mktemp("installed")
    run(sys.executable, "-m", "pip", "install", "--no-deps", "-q", "--no-index", "--target", target, wheel)
    return target


def from_wheel(installed: Path, program: str) -> str:
    """What `program` prints where the wheel comes first on the path and the source tree is not on it."""
    return run(
        sys.executable, "-c", f"import sys; sys.path.insert(0, {str(installed)!r})\n{program}", cwd=installed
    )


def test_the_wheel_holds_every_module_of_the_tree_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    extra = {
        "weightledger/py.typed",
        "weightledger/registry/py.typed",
        "weightledger/updater/py.typed",
        "weightledger/migrations/script.py.mako",
    }
    assert {name for name in names if ".dist-info/" not in name} == {*source_files(), *extra}


def test_the_wheel_installs_one_top_level_name(wheel: Path) -> None:
    tops = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert tops == {"weightledger", f"weightledger-{PROJECT['project']['version']}.dist-info"}


def test_the_wheel_tells_its_license_python_and_command(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        info = f"weightledger-{PROJECT['project']['version']}.dist-info"
        metadata = HeaderParser().parsestr(archive.read(f"{info}/METADATA").decode())
        assert metadata["License-Expression"] == "Apache-2.0"
        assert metadata["Requires-Python"] == ">=3.11"
        assert (
            "weightledger = weightledger.registry.cli:main"
            in archive.read(f"{info}/entry_points.txt").decode()
        )
        assert b"Apache License" in archive.read(f"{info}/licenses/LICENSE")


def test_every_module_of_the_installed_wheel_can_be_imported_and_none_under_a_bare_name(
    installed: Path,
) -> None:
    program = f"""
import importlib, json
files = [importlib.import_module(name).__file__ for name in {module_names()!r}]
print(json.dumps([files, sorted({set(FOLDERS)!r} & set(sys.modules))]))
"""
    files, bare = json.loads(from_wheel(installed, program))
    assert bare == []
    assert [file for file in files if not file.startswith(str(installed))] == []


def test_the_installed_wheel_finds_its_migrations(installed: Path) -> None:
    program = """
from alembic.config import Config
from alembic.script import ScriptDirectory
config = Config()
config.set_main_option("script_location", "weightledger.migrations:")
script = ScriptDirectory.from_config(config)
print(script.dir, *script.get_heads())
"""
    folder, *heads = from_wheel(installed, program).split()
    assert Path(folder) == installed / "weightledger" / "migrations"
    assert len(heads) == 1


def test_the_installed_command_says_what_it_can_do(installed: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(installed)}
    done = subprocess.run(
        [sys.executable, installed / "bin" / "weightledger", "--help"],
        cwd=installed,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "rollback" in done.stdout


def test_no_sub_package_is_loaded_under_its_bare_name_in_this_process() -> None:
    assert set(FOLDERS) & set(sys.modules) == set()


@pytest.mark.parametrize("name", module_names())
def test_examples_in_docstrings_are_true(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    failed, _ = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert failed == 0


def test_the_source_folder_holds_the_front_door_and_a_link_to_each_folder() -> None:
    links = {
        path.name: path.resolve() for path in (ROOT / "src" / "weightledger").iterdir() if path.is_symlink()
    }
    assert links == {name: ROOT / name for name in FOLDERS}


def test_every_folder_of_modules_is_a_package() -> None:
    folders = {path.parent for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}
    assert [folder for folder in sorted(folders) if not (folder / "__init__.py").exists()] == []


def test_the_front_door_of_the_installed_wheel_gives_registry_version_and_command_line(
    installed: Path,
) -> None:
    program = """
import sys
import weightledger
assert "sqlalchemy" not in sys.modules
from weightledger import Registry
from weightledger.registry import Registry as same
print(weightledger.__version__, Registry is same, sorted(set(weightledger.__all__) - set(dir(weightledger))))
"""
    assert from_wheel(installed, program).split() == [PROJECT["project"]["version"], "True", "[]"]
    done = subprocess.run(
        [sys.executable, "-m", "weightledger", "--help"],
        cwd=installed,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "rollback" in done.stdout


def test_one_version_is_told_by_project_installation_and_changelog() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.search(r"^## (\d\S*)", changelog, re.MULTILINE)
    assert newest is not None
    assert PROJECT["project"]["version"] == version("weightledger") == newest[1]


def test_every_dependency_is_pinned_at_a_release_that_its_bound_allows() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    tested = {canonicalize_name(name): release for name, release in pins.items()}
    groups = PROJECT["project"]["optional-dependencies"].values()
    wanted = [Requirement(text) for group in (PROJECT["project"]["dependencies"], *groups) for text in group]
    for need in wanted:
        if need.name != "weightledger":
            assert need.specifier.contains(tested[canonicalize_name(need.name)]), need


def test_every_make_target_that_a_text_names_exists() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z][a-z-]*):", makefile, re.MULTILINE))
    spoken = re.compile(r"(?:`|^\$ |^)make ([a-z][a-z-]*)", re.MULTILINE)
    named = {
        name for page in (*PAGES, ROOT / ".ci" / "run") for name in spoken.findall(page.read_text("utf-8"))
    }
    assert named
    assert named <= targets
    assert {"demo", "test", "check", "bench", "bench-soak", "docs", "help", "test-all", "torture"} <= targets


def test_make_help_lists_every_target() -> None:
    listed = set(re.findall(r"^make (\S+)", run("make", "-s", "help"), re.MULTILINE))
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert listed == set(re.findall(r"^([a-z][a-z-]*):", makefile, re.MULTILINE))


@pytest.mark.parametrize("failing", [None, "check", "test", "test-all"])
def test_continuous_integration_runs_every_target_and_fails_with_any(
    tmp_path: Path, failing: str | None
) -> None:
    fake = tmp_path / "make"
    fake.write_text(
        f'#!/bin/sh\necho "$1" >> {tmp_path}/ran\necho "closing line of $1"\n[ "$1" != "{failing}" ]\n'
    )
    fake.chmod(0o755)
    done = subprocess.run(
        [ROOT / ".ci" / "run"],
        env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    targets = ["check", "docs", "test", "test-all"]
    assert (tmp_path / "ran").read_text(encoding="utf-8").split() == targets
    assert (done.returncode == 0) == (failing is None)
    for target, line in zip(targets, done.stdout.splitlines()[-4:], strict=True):
        assert line.startswith(f"make {target}: {'FAILED' if target == failing else 'ok'} in ")
        assert line.endswith(f"closing line of {target}")

"""What README.md says of its surroundings is true: links, targets, releases, and what it says is missing.

Its example and its commands run with the other pages, under the root's `conftest.py`.
"""

from __future__ import annotations

import doctest
import re
import tomllib
from importlib.util import find_spec
from pathlib import Path

import typer.main
from typer.core import TyperGroup

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def test_every_link_leads_to_a_file_that_is_there() -> None:
    links = [link for link in re.findall(r"\]\(([^)#]+)", TEXT) if "://" not in link]
    assert len(links) > 10
    assert [link for link in links if not (ROOT / link).is_file()] == []


def test_every_make_target_it_names_exists() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    named = set(re.findall(r"(?:`|^\$ )make ([a-z-]+)", TEXT, re.M))
    assert {"demo", "test", "bench"} <= named
    assert named <= set(re.findall(r"^([a-z-]+):", makefile, re.M))


def test_the_releases_it_compares_with_are_those_that_the_tests_install() -> None:
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    for name, release in re.findall(r"\b(torchrl|ray) (\d+\.\d+\.\d+)", TEXT):
        assert f"{name}=={release}" in constraints


def test_its_page_is_among_those_that_are_run_as_tests_and_its_first_example_is_short() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["pytest"][
        "ini_options"
    ]
    assert "README.md" in settings["testpaths"]
    assert "--doctest-glob=*.md" in settings["addopts"]
    blocks = re.findall(r"^```pycon\n(.*?)^```", TEXT, re.M | re.S)
    statements = [example.source for example in doctest.DocTestParser().get_examples(blocks[0])]
    assert 5 < sum(source.count("\n") for source in statements) < 20


def test_what_it_says_is_not_there_is_not_there() -> None:
    (missing,) = re.findall(r"^Not there yet: (.*?)\n\n", TEXT, re.M | re.S)
    from weightledger.registry.commands.app import app

    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    there = {
        "TorchRL": find_spec("weightledger.updater.torchrl"),
        "RLlib": find_spec("weightledger.updater.rllib"),
        "timeline": "timeline" in group.commands,
        "web": "serve" in group.commands,
    }
    assert [word for word, found in there.items() if (word in missing) == bool(found)] == []

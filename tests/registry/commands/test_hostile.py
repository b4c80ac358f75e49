"""The command line met by hostile words, names, paths and outputs: an exit code and a sentence, never a traceback."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.registry.damaging import MANY, complaint, copied, make_story, run
from tests.registry.helpers import memory_folder
from weightledger.registry import Registry, StorageError
from weightledger.registry.database.sqlite import LONGEST_PATH


@pytest.fixture(scope="module")
def story() -> Iterator[Path]:
    with memory_folder() as folder:
        make_story(folder / "story")
        yield folder / "story"


def spawn(
    *words: str | bytes, out: int = subprocess.PIPE, err: int = subprocess.PIPE, **environment: bytes
) -> subprocess.CompletedProcess[bytes]:
    """Run a command in a process of its own."""
    kept = {name: value for name, value in os.environb.items() if name not in (b"COLUMNS", b"FORCE_COLOR")}
    return subprocess.run(
        [sys.executable, "-m", "weightledger", *words],
        env=kept | {name.encode(): value for name, value in environment.items()},
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=err,
        timeout=100,
        check=False,
    )


# ---------------------------------------------------------------------- outputs


@pytest.mark.parametrize("command", ["log", "log --json", "--help"])
def test_an_answer_that_cannot_be_written_is_an_error(command: str, story: Path) -> None:
    with Path("/dev/full").open("wb") as full:
        done = spawn("--registry", str(story), *command.split(), out=full.fileno())
    assert done.returncode == 1
    assert done.stderr == b"error: the answer could not be written: [Errno 28] No space left on device\n"


def test_an_error_that_cannot_be_written_keeps_its_exit_code(story: Path) -> None:
    with Path("/dev/full").open("wb") as full:
        done = spawn("--registry", str(story), "show", "99", err=full.fileno())
        assert (done.returncode, done.stdout) == (1, b"")
        done = spawn("--registry", str(story), "log", out=full.fileno(), err=full.fileno())
        assert done.returncode == 1


def test_a_closed_output_is_an_error_and_a_reader_that_went_away_is_none_to_read_of(story: Path) -> None:
    module = f"{sys.executable} -m weightledger --registry {story}"
    for line, code in (
        (f"{module} log >&-", 1),
        (f"{module} log --json >&- 2>&-", 1),
        (f"{module} log | true", 0),
    ):
        done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=100, check=False)
        assert done.returncode == code
        assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr
    assert (
        "the answer could not be written"
        in subprocess.run(
            ["bash", "-c", f"{module} log >&-"], capture_output=True, text=True, timeout=100, check=False
        ).stderr
    )


# ---------------------------------------------------------------------- names


@pytest.mark.folder
def test_names_of_user_and_program_that_are_no_utf8_are_kept_escaped(tmp_path: Path) -> None:
    program = os.fsencode(tmp_path) + b"/tr\xffin.py"
    with open(program, "w") as file:  # noqa: PTH123 - its name is bytes
        file.write(
            "import sys, torch\n"
            "from weightledger import Registry\n"
            "with Registry.open(sys.argv[1]) as registry:\n"
            "    registry.publish({'w': torch.ones(2)})\n"
            "    registry.set_alias('a', 1)\n"
            "    print(ascii(registry.events()[0].user))\n"
        )
    done = subprocess.run(
        [sys.executable, program, tmp_path / "r"],
        env=os.environb
        | {b"LOGNAME": b"ad\xe9", b"PYTHONPATH": os.fsencode(Path(__file__).parents[3] / "src")},
        capture_output=True,
        timeout=100,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout == b"'ad\\\\udce9'\n"
    ran = run("log", "--registry", str(tmp_path / "r"))
    assert (ran.code, ran.err) == (0, "") and "ad\\udce9" in ran.out


@pytest.mark.folder
def test_a_folder_and_a_file_that_are_no_utf8_work_and_are_shown_escaped(tmp_path: Path) -> None:
    folder, file = os.fsencode(tmp_path) + b"/r\xff", os.fsencode(tmp_path) + b"/w\xff.safetensors"
    save_file({"w": torch.ones(2)}, tmp_path / "w")
    os.rename(tmp_path / "w", file)  # noqa: PTH104 - its name is bytes
    named = os.fsdecode(folder)
    for words in (
        ("publish", os.fsdecode(file)),
        ("log",),
        ("status", "--json"),
        ("export", "1", f"{named}.out"),
        ("upgrade",),
    ):
        ran = run("--registry", named, *words)
        assert (ran.code, ran.err) == (0, ""), words
    assert "\\udcff" in ran.out
    done = spawn("--registry", folder + b"\xfe", "show", b"\xff")
    assert done.returncode == 1 and b"\\udcfe" in done.stderr and b"Traceback" not in done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("show", "\udcff"),
        ("audit", "--worker", "\udcff"),
        ("events", "--kind", "\udcff"),
        ("best", "\udcff"),
        ("pin", "\udcff", "1"),
        ("unpin", "\udcff"),
        ("alias", "\udcff", "1"),
        ("rollback", "--reason", "\udcff"),
        ("--policy", "\udcff", "log"),
        ("\udcff",),
        ("log", "--\udcff"),
    ],
    ids=ascii,
)
def test_words_that_are_no_utf8_are_refused(words: tuple[str, ...], story: Path) -> None:
    ran = run("--registry", str(story), *words)
    assert ran.code in (1, 2) and ran.out == "" and complaint(ran) is None
    assert "udcff" in ran.err.replace("\udcff", "udcff")


# ---------------------------------------------------------------------- paths


def deep(folder: Path, length: int) -> Path:
    """Return a folder in which the database's path has so many bytes."""
    left = length - len(str(folder / "registry.db"))
    while left > 200:
        folder, left = folder / ("d" * 150), left - 151
    return folder / ("d" * (left - 1))


@pytest.mark.folder
def test_a_path_that_is_longer_than_sqlite_takes_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    longest = deep(tmp_path, LONGEST_PATH)
    with Registry.open(longest) as registry:
        assert registry.publish({"w": torch.ones(1)}).number == 1
    for length in (LONGEST_PATH + 1, 600, 1500):
        folder = deep(tmp_path / "more", length)
        with pytest.raises(
            StorageError, match=rf"at most 504 bytes, which is SQLite's limit, found one of {length}"
        ):
            Registry.open(folder)
        ran = run("log", "--registry", str(folder))
        assert ran.code == 1 and "SQLite's limit" in ran.err
    assert not (tmp_path / "more").exists()
    far = deep(tmp_path / "far", 600)
    far.mkdir(parents=True)
    (tmp_path / "link").symlink_to(far)
    with pytest.raises(StorageError, match="a link to this one does not help"):
        Registry.open(tmp_path / "link")


@pytest.mark.folder
@pytest.mark.parametrize(
    "location", ["x" * 300, "x" * 5000, "a\0b", "~nobody-has-this-name/r", "file/r", "file"]
)
def test_a_place_where_no_registry_can_be_is_refused(
    location: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("precious")
    for create in (True, False):
        with pytest.raises((StorageError, ValueError, LookupError)) as caught:
            Registry.open(location, create=create)
        assert location[:10].strip("\0") in str(caught.value).replace("\\x00", "\0")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "precious"


def test_a_working_directory_that_is_gone_is_an_error_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(StorageError, match="'r' is relative, but there is no working directory"):
        Registry.open("r")
    with Registry.open(tmp_path / "r") as registry:
        registry.publish({"w": torch.ones(1)})
        with pytest.raises(StorageError, match="no working directory"):
            registry.export(1, "x")


# ---------------------------------------------------------------------- what stays behind, and what is said


def test_a_publish_that_is_refused_leaves_no_registry(tmp_path: Path) -> None:
    file, twice = tmp_path / "good.safetensors", tmp_path / "twice.safetensors"
    save_file({"w": torch.ones(2)}, file)
    save_file({"w": torch.ones(2), "_orig_mod.w": torch.zeros(2)}, twice)
    refused = (
        (str(twice),),
        (str(file), "--step", str(2**63)),
        (str(file), "--metric", "\x1b=1"),
        (str(file), "--metric", f"{'x' * 256}=1"),
        (str(file), "--message", "\udcff"),
        (str(file), "--metadata", "k=\udcff"),
        (str(file), "--parent", "3"),
        (str(file), "--policy", " "),
        (str(tmp_path),),
    )
    for words in refused:
        ran = run("publish", *words, "--registry", str(tmp_path / "new"))
        assert ran.code in (1, 2) and complaint(ran) is None, words
        assert not (tmp_path / "new").exists(), words
    assert run("publish", str(file), "--registry", str(tmp_path / "new")).code == 0


def test_an_export_names_the_path_that_was_given(story: Path, tmp_path: Path) -> None:
    target = tmp_path / "missing" / "out.safetensors"
    ran = run("export", "1", str(target), "--registry", str(story))
    assert ran.code == 1 and ran.err.count("\n") == 1
    assert f"{target} cannot be written: there is no folder {target.parent}" in ran.err
    assert ".tmp" not in ran.err
    ran = run("export", "1", "/proc/nothing", "--registry", str(story))
    assert ran.code == 1 and "/proc/nothing" in ran.err and ".tmp" not in ran.err


@pytest.mark.folder
def test_what_the_database_refuses_is_said_without_its_statement(story: Path, tmp_path: Path) -> None:
    folder = copied(story, tmp_path / "r")
    (folder / "registry.db").write_bytes((story / "registry.db").read_bytes()[:5000])
    for command in ("log", "status", "publish x", "rollback --reason x"):
        ran = run(*command.split(), "--registry", str(folder))
        assert ran.code == 1 and complaint(ran) is None
        for word in ("SELECT", "[SQL", "sqlalche", "parameters", "Background on this error"):
            assert word not in ran.err


# ---------------------------------------------------------------------- whatever is typed

WORDS = (
    *(
        "",
        " ",
        "-",
        "--",
        "-1",
        "0",
        "1",
        "2",
        "v2",
        "head",
        "head~1",
        "head~",
        "best",
        "best:reward",
        "best:",
        "*",
    ),
    *(
        "blake3:00000000",
        "9" * 30,
        "9" * 5000,
        "\udcff",
        "x" * 5000,
        "\x1b[2J",
        "[/red]",
        "[bold]",
        "{}",
        "%s",
        "é☃",
    ),
    *(
        "nan",
        "inf",
        "1e999",
        "x=1",
        "x=nan",
        "=",
        "k={",
        "k=" + "[" * 5000,
        "2h",
        "1d12h",
        "9" * 400 + "h",
        "now",
    ),
    *(
        "2026-01-01",
        "0001-01-01",
        "9999-12-31",
        "reward:1",
        "reward:0",
        "loss:9" + "9" * 5000,
        ".",
        "..",
        "/",
        "/dev/null",
    ),
    *(
        "/proc/self/mem",
        "out",
        "weights.safetensors",
        "--json",
        "--all",
        "--help",
        "--policy",
        "--registry",
        "--limit",
    ),
)
OPTIONS = {
    "status": ("--all", "--json", "--policy"),
    "log": ("--all", "--json", "--limit", "-n"),
    "show": ("--json",),
    "diff": ("--all",),
    "audit": ("--worker", "--version", "--at", "--since", "--until", "--limit", "--all"),
    "events": ("--kind", "--worker", "--version", "--since", "--until", "--limit"),
    "best": ("--mode",),
    "rollback": ("--reason", "--to", "--expected-head"),
    "pin": ("--reason",),
    "unpin": (),
    "alias": ("--delete",),
    "publish": ("--step", "--metric", "--metadata", "--message", "--parent"),
    "export": ("--force",),
    "verify": ("--json",),
    "prune": ("--keep-last", "--keep-every", "--keep-best", "--dry-run"),
    "upgrade": (),
    "nonsense": (),
}


@pytest.mark.torture
@pytest.mark.parametrize("seed", range(40 if MANY else 4))
def test_whatever_is_typed_ends_with_an_exit_code_and_a_sentence(
    seed: int, story: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = random.Random(seed)
    monkeypatch.chdir(tmp_path)
    save_file({"w": torch.ones(2)}, tmp_path / "weights.safetensors")
    folder = copied(story, tmp_path / "r")
    wrong = []
    for _ in range(100 if MANY else 30):
        command = source.choice(list(OPTIONS))
        words = [command]
        for _ in range(source.choice([0, 1, 1, 2, 2, 3, 4])):
            words += source.choices([*OPTIONS[command], source.choice(WORDS)], k=1)
            words += [source.choice(WORDS)] if source.random() < 0.6 else []
        if source.random() < 0.1:
            words = [source.choice(WORDS), *words]
        ran = run("--registry", str(folder), *words)
        what = complaint(ran)
        if what is None and ran.code and not ran.err and "--help" not in words:
            what = "failed without a word"
        if what is None and "fault of weightledger" in ran.err:
            what = ran.err
        if what is not None:
            wrong.append(f"{words}: {what}")
    assert wrong == []

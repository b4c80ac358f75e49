"""The command line as people and scripts use it: each command on a real registry, each way that it can be refused."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from tests.registry.copying import ON_SERVER, copy_registry
from weightledger import migrations
from weightledger.registry import Registry
from weightledger.registry.commands.app import app
from weightledger.registry.log import fleet, schema

READING = ("status", "log", "show", "diff 1 2", "audit", "events", "best reward", "verify", "pin", "alias")
WRITING = (
    "rollback --reason x",
    "pin w1 1",
    "unpin w1",
    "alias best 1",
    "alias --delete best",
    "export 1 out.safetensors",
    "prune --keep-last 1",
    "upgrade",
)


@dataclass
class Ran:
    code: int
    out: str
    err: str

    @property
    def data(self) -> Any:
        return json.loads(self.out)


def run(*arguments: object, **environment: str) -> Ran:
    """Run a command in this process, its words given apart."""
    done = CliRunner(env={"COLUMNS": "200", "WEIGHTLEDGER_REGISTRY": None, **environment}).invoke(
        app, [str(argument) for argument in arguments]
    )
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return Ran(done.exit_code, done.stdout, done.stderr)


def spawn(*arguments: object, cwd: Path | None = None, **environment: str) -> Ran:
    """Run a command in a process of its own, as the installed script does."""
    keep = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "FORCE_COLOR")}
    done = subprocess.run(
        [sys.executable, "-m", "weightledger.registry.cli", *map(str, arguments)],
        cwd=cwd,
        env=keep | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    return Ran(done.returncode, done.stdout, done.stderr)


def weights(seed: int, **more: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"layer.weight": torch.full((4, 2), float(seed)), "layer.bias": torch.zeros(4), **more}


def push(registry: Registry, number: int, *names: str) -> None:
    """Bring workers to a version, as an updater does."""
    with registry.ledger.writing() as conn:
        claims = fleet.claim(registry.ledger, conn, names, registry.locks.alive)
    confirm(registry, number, claims, intend(registry, number, claims))


def intend(registry: Registry, number: int, claims: Sequence[fleet.Claim]) -> int:
    digest = registry.get(number).digest
    with registry.ledger.writing() as conn:
        return fleet.intend(registry.ledger, conn, [fleet.Push(item.id, number, digest) for item in claims])


def confirm(registry: Registry, number: int, claims: Sequence[fleet.Claim], order: int) -> None:
    digest = registry.get(number).digest
    with registry.ledger.writing() as conn:
        fleet.settle(
            registry.ledger,
            conn,
            [
                fleet.Settlement(item.id, item.name, "confirmed", order, number, f"life-{item.name}", digest)
                for item in claims
            ],
        )


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, str]]]:
    """A registry with a rollback, an alias, pins and workers, steered by this process; and moments of its life.

    v1 – v2 – v3 – v4 (abandoned), v5 restores v2. `best` is v2, eval-* is pinned to it. w1 and w3 went from v3 to v5,
    w2 from v3 to v5 without an answer, eval-0 holds v2.
    """
    folder = tmp_path_factory.mktemp("runs") / "cartpole"
    moments = {}
    with Registry.open(folder) as registry:
        registry.locks.keep_alive()
        registry.publish(weights(1), step=100, metrics={"reward": 10.0, "loss": 0.5}, message="first")
        registry.publish(weights(2), step=200, metrics={"reward": 38.0, "loss": 0.25}, metadata={"seed": 3})
        registry.publish(
            weights(3, extra=torch.ones(2)),
            step=300,
            metrics={"reward": 5.0},
            message="[red]\x1b[2J",
            restructure=True,
        )
        push(registry, 3, "w1", "w2", "w3")
        moments["v3"] = datetime.now(UTC).isoformat()
        registry.set_alias("best", 2)
        push(registry, 2, "eval-0")
        registry.pin("eval-*", "best", reason="compare")
        registry.publish(weights(4), step=400, metrics={"reward": float("nan")}, restructure=True)
        registry.rollback(2, reason="reward collapsed")
        push(registry, 5, "w1", "w3")
        with registry.ledger.writing() as conn:
            claims = fleet.claim(registry.ledger, conn, ["w2"], registry.locks.alive)
        order = intend(registry, 5, claims)
        moments["pushed"] = datetime.now(UTC).isoformat()
        with registry.ledger.writing() as conn:
            fleet.settle(
                registry.ledger,
                conn,
                [fleet.Settlement(claims[0].id, "w2", "silent", order, 5, detail="no answer in 60 s")],
            )
        yield folder, moments


@pytest.fixture
def folder(history: tuple[Path, dict[str, str]]) -> Path:
    """The module's registry, for commands that only read."""
    return history[0]


@pytest.fixture
def copy(history: tuple[Path, dict[str, str]], tmp_path: Path) -> Path:
    """A registry of one's own to write to; the run that steered its workers is gone there."""
    if not ON_SERVER:
        with sqlite3.connect(history[0] / "registry.db") as database:
            database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        database.close()
    copy_registry(history[0], tmp_path / "copy", ignore=shutil.ignore_patterns("locks"))
    return tmp_path / "copy"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weights.safetensors"
    save_file(weights(7), path)
    return path


# ---------------------------------------------------------------------- ask


def test_the_log_shows_the_lineage_and_who_wrote_it(folder: Path) -> None:
    ran = run("log", "--registry", folder)
    assert ran.code == 0
    lines = ran.out.splitlines()
    assert [line.split("  ")[0].rstrip() for line in lines[1:6]] == ["●", "│ ○", "│ ○", "●─╯", "●"]
    assert "⤺ restores v2 [head] reward collapsed" in lines[1]
    assert "[best, pin eval-*]" in lines[4]
    assert all(Registry.open(folder).locks.current().user in line for line in lines[1:6])
    assert "\x1b" not in ran.out
    assert "[red]\\x1b[2J" in lines[3]


@pytest.mark.folder
def test_the_log_in_json_is_the_versions_and_is_complete(folder: Path) -> None:
    data = run("log", "--registry", folder, "--json").data
    with Registry.open(folder) as registry:
        assert data == [version.to_dict() for version in registry.versions()]
    assert [item["number"] for item in data] == [1, 2, 3, 4, 5]
    assert data[3]["metrics"] == {"reward": "nan"}
    assert data[2]["message"] == "[red]\x1b[2J"


def test_a_limited_log_shows_the_newest_and_says_that_there_is_more(folder: Path) -> None:
    ran = run("log", "-n", 2, "--registry", folder)
    assert "v5" in ran.out and "v4" in ran.out and "v3" not in ran.out
    assert "Older versions: -n N or --all." in ran.out
    assert "Older" not in run("log", "--all", "--registry", folder).out
    assert [item["number"] for item in run("log", "-n", 2, "--json", "--registry", folder).data] == [4, 5]


def test_a_long_log_is_cut_for_people_and_not_for_programs(tmp_path: Path) -> None:
    with Registry.open(tmp_path / "long") as registry:
        for _ in range(33):
            registry.publish({"w": torch.zeros(1)})
    people = run("log", "--registry", tmp_path / "long").out
    assert people.count("\n") == 32
    assert "v4 " in people and "v3 " not in people
    assert len(run("log", "--json", "--registry", tmp_path / "long").data) == 33


def test_show_tells_everything_of_a_version_and_takes_every_kind_of_reference(folder: Path) -> None:
    shown = run("show", "best", "--registry", folder).out
    for text in (
        "v2 of policy default",
        "best, pin eval-*",
        "reward 38",
        "seed 3",
        "held by",
        "eval-0",
        "blake3:",
    ):
        assert text in shown
    numbers = [
        run("show", ref, "--registry", folder, "--json").data["number"] for ref in ("2", "v2", "best", "head")
    ]
    assert numbers == [2, 2, 2, 5]
    data = run("show", "--json", "--registry", folder).data
    assert data["number"] == 5
    assert data["is_head"] is True
    assert data["staleness"] == 0
    assert data["held_by"] == ["eval-0", "w1", "w3"]
    with Registry.open(folder) as registry:
        assert registry.head().to_dict().items() <= data.items()


def test_diff_compares_tensor_by_tensor(folder: Path) -> None:
    ran = run("diff", 2, 3, "--registry", folder)
    assert ran.out.splitlines() == [
        "v2 → v3: 1 changed, 1 only in v3, 1 the same",
        "  changed     layer.weight",
        "  only in v3  extra",
    ]
    assert run("diff", 3, 2, "--json", "--registry", folder).data == {
        "a": 3,
        "b": 2,
        "equal": False,
        "changed": ["layer.weight"],
        "only_a": ["extra"],
        "only_b": [],
        "same": ["layer.bias"],
    }
    assert "equal content" in run("diff", 2, "--registry", folder).out
    assert "same" in run("diff", 2, 3, "--all", "--registry", folder).out.splitlines()[-1]


def test_the_status_shows_what_each_worker_holds_and_how_sure_that_is(folder: Path) -> None:
    """RL-01 and RAY-01: a worker whose push was not answered is unknown, not assumed."""
    ran = run("status", "--registry", folder)
    assert ran.code == 0
    rows = {line.split()[0]: line.split() for line in ran.out.splitlines() if line}
    assert rows["policy"][:4] == ["policy", "default", "head", "v5"]
    assert rows["w1"][1:4] == ["v5", "v5", "0"]
    assert rows["w2"][1:6] == ["?", "was", "v3", "v5", "?"]
    assert "unknown" in rows["w2"]
    assert rows["eval-0"][1:3] == ["v2", "v2"]
    assert "3 of 4 workers hold their target; 1 unknown" in ran.out
    data = run("status", "--json", "--registry", folder).data
    with Registry.open(folder) as registry:
        assert data["workers"] == [worker.to_dict() for worker in registry.workers()]
        assert data["head"] == registry.head().to_dict()
        assert data["pins"] == [pin.to_dict() for pin in registry.pins()]
        assert data["uuid"] == registry.uuid
    assert data["aliases"] == {"best": 2}
    assert data["registry"] == str(folder)


@pytest.mark.folder
def test_workers_whose_updater_is_gone_are_unknown_and_that_is_explained(copy: Path) -> None:
    """RL-11: what an earlier run knew is marked as such."""
    ran = run("status", "--registry", copy)
    assert "0 of 4 workers hold their target; 4 unknown" in ran.out
    assert {worker["held"] for worker in run("status", "--json", "--registry", copy).data["workers"]} == {
        None
    }


def test_an_audit_tells_who_held_a_version_also_by_its_equal_content(folder: Path) -> None:
    ran = run("audit", "--version", "v2", "--registry", folder)
    rows = [line.split() for line in ran.out.splitlines()[2:]]
    assert [row[0] for row in rows] == ["eval-0", "w1", "w3", "w2"]
    assert [row[1:4] for row in rows][1] == ["v5", "=", "v2"]
    data = run("audit", "--version", 2, "--json", "--registry", folder).data
    with Registry.open(folder) as registry:
        assert data == [row.to_dict() for row in registry.history(version=2)]
    assert [row["same_content_as"] for row in data] == [None, 2, 2, 2]
    assert data[3]["confirmed_at"] is None


def test_an_audit_of_one_worker_tells_its_versions_in_order(folder: Path) -> None:
    data = run("audit", "--worker", "w1", "--json", "--registry", folder).data
    assert [(row["version"], row["state"]) for row in data] == [(3, "ended"), (5, "held")]
    assert run("audit", "-n", 1, "--worker", "w1", "--json", "--registry", folder).data == data[1:]
    people = run("audit", "-n", 1, "--worker", "w1", "--registry", folder).out
    assert "Only the newest 1 are shown" in people


def test_an_audit_of_a_moment_tells_what_was_held_and_what_was_on_its_way(
    history: tuple[Path, dict[str, str]],
) -> None:
    folder, moments = history
    then = run("audit", "--at", moments["v3"], "--json", "--registry", folder).data
    assert {row["worker"]: row["version"] for row in then} == {"w1": 3, "w2": 3, "w3": 3}
    only = run("audit", "--at", moments["v3"], "--worker", "w2", "--json", "--registry", folder).data
    assert [row["worker"] for row in only] == ["w2"]
    ran = run("audit", "--at", moments["pushed"], "--registry", folder)
    assert "On its way then, and perhaps there: v5 to w2" in ran.out
    same = run("audit", "--at", "0s", "--version", "2", "--json", "--registry", folder).data
    assert [(row["worker"], row["version"], row["same_content_as"]) for row in same] == [
        ("eval-0", 2, None),
        ("w1", 5, 2),
        ("w3", 5, 2),
    ]
    assert run("audit", "--at", "1h", "--json", "--registry", folder).data == []


def test_an_audit_of_a_span_takes_both_ends(history: tuple[Path, dict[str, str]]) -> None:
    folder, moments = history
    data = run("audit", "--since", "1h", "--until", moments["v3"], "--json", "--registry", folder).data
    assert {row["version"] for row in data} == {3}
    assert run("audit", "--until", "1h", "--json", "--registry", folder).data == []


def test_the_journal_tells_what_happened_and_can_be_asked_for_parts(folder: Path) -> None:
    data = run("events", "--json", "--registry", folder).data
    with Registry.open(folder) as registry:
        assert data == [event.to_dict() for event in registry.events()]
    assert [
        event["version"] for event in run("events", "--kind", "publish", "--json", "--registry", folder).data
    ] == [
        1,
        2,
        3,
        4,
    ]
    assert {
        event["worker"] for event in run("events", "--worker", "w2", "--json", "--registry", folder).data
    } == {"w2"}
    kinds = {
        event["kind"] for event in run("events", "--version", "best", "--json", "--registry", folder).data
    }
    assert kinds == {"publish", "alias", "pin"}
    people = run("events", "-n", 3, "--registry", folder).out
    assert "rollback" in run("events", "--registry", folder).out
    assert people.splitlines()[-1] == "Only the newest 3 are shown: -n N or --all."


def test_the_best_version_is_told_and_nan_never_wins(folder: Path) -> None:
    """CK-15."""
    assert run("best", "reward", "--registry", folder).out.split() == ["v2", "reward", "38", "step", "200"]
    assert run("best", "reward", "--mode", "min", "--json", "--registry", folder).data["number"] == 3
    ran = run("best", "speed", "--registry", folder)
    assert ran.code == 1
    assert ran.err.startswith("error: no version with a finite 'speed' in policy 'default'")


# ---------------------------------------------------------------------- decide


def test_a_rollback_makes_a_new_version_and_keeps_the_reason(copy: Path) -> None:
    ran = run("rollback", "--to", "best", "--reason", "too greedy", "--registry", copy)
    assert (ran.code, ran.out) == (0, "v6 restores v2 and is the head.\n")
    with Registry.open(copy) as registry:
        assert registry.head().restores == 2
        assert registry.events(kind="rollback")[-1].reason == "too greedy"
    data = run("rollback", "--reason", "again", "--expected-head", 6, "--json", "--registry", copy).data
    assert (data["number"], data["restores"]) == (7, 1)


def test_a_rollback_against_another_head_changes_nothing(copy: Path) -> None:
    ran = run("rollback", "--reason", "x", "--expected-head", 4, "--registry", copy)
    assert ran.code == 1
    assert "expected the head to be v4" in ran.err and "v5" in ran.err
    assert run("show", "--json", "--registry", copy).data["number"] == 5


def test_a_rollback_asks_for_a_reason(copy: Path) -> None:
    assert run("rollback", "--to", 1, "--registry", copy).code == 2
    ran = run("rollback", "--to", 1, "--reason", " ", "--registry", copy)
    assert ran.code == 2
    assert "--reason" in ran.err


def test_pins_are_set_listed_and_removed(copy: Path) -> None:
    ran = run("pin", "canary", "v3", "--reason", "watch it", "--registry", copy)
    assert (ran.code, ran.out) == (0, "canary is pinned to v3.\n")
    assert run("pin", "w*", "best", "--registry", copy).out == "w* is pinned to v2 (alias best).\n"
    listed = run("pin", "--json", "--registry", copy).data
    assert [(pin["worker"], pin["ref"], pin["reason"]) for pin in listed] == [
        ("eval-*", "best", "compare"),
        ("canary", 3, "watch it"),
        ("w*", "best", ""),
    ]
    assert "watch it" in run("pin", "--registry", copy).out
    assert run("unpin", "canary", "--registry", copy).out == "canary is no longer pinned.\n"
    assert "canary" not in run("pin", "--registry", copy).out
    ran = run("unpin", "canary", "--registry", copy)
    assert ran.code == 1
    assert "'canary' is not pinned" in ran.err and "eval-*" in ran.err


def test_a_pin_to_what_does_not_exist_is_refused(copy: Path) -> None:
    """SQL-05: no pin on an unknown version."""
    ran = run("pin", "w1", 999, "--registry", copy)
    assert ran.code == 1
    assert "999" in ran.err
    assert len(run("pin", "--json", "--registry", copy).data) == 1


def test_aliases_are_set_listed_moved_and_deleted(copy: Path) -> None:
    assert run("alias", "stable", "head", "--registry", copy).out == "stable stands for v5.\n"
    assert run("alias", "stable", 1, "--json", "--registry", copy).data == {"best": 2, "stable": 1}
    assert run("alias", "--registry", copy).out.split() == ["alias", "version", "best", "v2", "stable", "v1"]
    assert run("alias", "--delete", "stable", "--registry", copy).out == "Deleted the alias stable.\n"
    ran = run("alias", "--delete", "best", "--registry", copy)
    assert ran.code == 1
    assert "eval-*" in ran.err
    ran = run("alias", "--delete", "stable", "--registry", copy)
    assert ran.code == 1
    assert "no alias 'stable'" in ran.err


# ---------------------------------------------------------------------- keep


def test_publish_makes_a_registry_and_what_it_stored_comes_back(tmp_path: Path, file: Path) -> None:
    folder = tmp_path / "new" / "registry"
    ran = run(
        *(
            "publish",
            file,
            "--registry",
            folder,
            "--policy",
            "main",
            "--step",
            7,
            "--message",
            "from outside",
        ),
        *(
            "--metric",
            "reward=1.5",
            "--metric",
            "loss=nan",
            "--metadata",
            "seed=3",
            "--metadata",
            "env=CartPole",
        ),
    )
    assert ran.code == 0
    assert ran.out.startswith("Published v1, ")
    with Registry.open(folder, policy="main") as registry:
        version = registry.head()
        assert (version.step, version.message, version.metadata) == (
            7,
            "from outside",
            {"seed": 3, "env": "CartPole"},
        )
        assert version.metrics["reward"] == 1.5
        assert version.metrics["loss"] != version.metrics["loss"]
        assert torch.equal(registry.load()["layer.weight"], weights(7)["layer.weight"])
    data = run("publish", file, "--registry", folder, "--policy", "main", "--parent", 1, "--json").data
    assert (data["number"], data["parent"], data["digest"]) == (2, 1, version.digest)
    ran = run("publish", file, "--registry", folder, "--policy", "main", "--parent", 1)
    assert ran.code == 1
    assert "v2" in ran.err


def test_a_file_that_cannot_be_published_leaves_no_registry_behind(tmp_path: Path, file: Path) -> None:
    """ST-21, and its neighbours: no file, a folder, an empty one, another kind of file."""
    folder = tmp_path / "new"
    short = tmp_path / "short.safetensors"
    short.write_bytes(file.read_bytes()[:-3])
    empty = tmp_path / "empty.safetensors"
    empty.write_bytes(b"")
    text = tmp_path / "notes.txt"
    text.write_text("no weights in here, only a line of text that is long enough")
    for path in (short, empty, text):
        ran = run("publish", path, "--registry", folder)
        assert ran.code == 1
        assert ran.err.startswith(f"error: cannot publish {str(path)!r}: expected a safetensors file")
        assert "caused by: " in ran.err
    for path in (tmp_path / "nowhere", tmp_path):
        ran = run("publish", path, "--registry", folder)
        assert ran.code == 1
        assert "there is no such file" in ran.err
    assert not folder.exists()


def test_an_exported_version_is_a_file_that_any_reader_loads(folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.safetensors"
    ran = run("export", "best", target, "--registry", folder)
    assert (ran.code, ran.out) == (0, f"Wrote v2 to {target}.\n")
    assert torch.equal(load_file(target)["layer.weight"], weights(2)["layer.weight"])
    data = run("export", 3, target, "--force", "--json", "--registry", folder).data
    assert (data["version"], data["path"]) == (3, str(target))
    again = run("publish", target, "--registry", tmp_path / "other", "--json").data
    assert again["digest"] == data["digest"]


def test_an_export_replaces_nothing_unless_it_is_told_to(folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.write_text("precious")
    ran = run("export", 1, target, "--registry", folder)
    assert ran.code == 1
    assert "exists: pass --force" in ran.err
    ran = run("export", 1, tmp_path, "--force", "--registry", folder)
    assert ran.code == 1
    assert "is a folder" in ran.err
    assert target.read_text() == "precious"


def test_verify_finds_a_flipped_bit_and_exits_with_one(copy: Path) -> None:
    """ST-22."""
    assert run("verify", "--registry", copy).out == "No faults in 5 stored versions.\n"
    assert run("verify", "3", "--registry", copy).out == "No faults in v3.\n"
    assert run("verify", "--json", "--registry", copy).data == []
    with Registry.open(copy) as registry, registry.ledger.reading() as conn:
        uri = registry.ledger.files_of(conn, 3)[0].uri
    damaged = copy / "snapshots" / uri
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.chmod(0o644)
    damaged.write_bytes(content)
    ran = run("verify", "--registry", copy)
    assert ran.code == 1
    assert ran.out.startswith("1 fault in 5 stored versions.\n")
    assert "v3" in ran.out and uri in ran.out
    ran = run("verify", "--json", "--registry", copy)
    assert ran.code == 1
    assert [fault["versions"] for fault in ran.data] == [[3]]
    assert run("verify", "2", "--registry", copy).code == 0


def test_a_dry_run_of_prune_tells_what_would_go_and_why_the_rest_stays(copy: Path) -> None:
    """CK-04."""
    rules = ("prune", "--keep-last", 1, "--keep-best", "reward:1", "--registry", copy)
    ran = run(*rules, "--dry-run")
    assert ran.code == 0
    assert "Would delete the weights of" in ran.out
    data = run(*rules, "--dry-run", "--json").data
    assert data["dry_run"] is True
    assert [version["number"] for version in data["pruned"]] == [4]
    assert set(data["kept"]) == {"1", "2", "3", "5"}
    assert data["kept"]["1"] == ["what a rollback goes back to"]
    assert any("best" in reason for reason in data["kept"]["2"])
    assert any("w2" in reason for reason in data["kept"]["3"])
    assert all(version["stored"] for version in run("log", "--json", "--registry", copy).data)

    ran = run(*rules)
    assert ran.out.startswith("Deleted the weights of 1 version")
    assert [v["number"] for v in run("log", "--json", "--registry", copy).data if not v["stored"]] == [4]
    ran = run("export", 4, copy / "x", "--registry", copy)
    assert ran.code == 1
    assert "pruned" in ran.err and "v3" in ran.err


@pytest.mark.parametrize(
    "rules",
    [
        (),
        ("--keep-last", "0"),
        ("--keep-last", "-1"),
        ("--keep-every", "0"),
        ("--keep-best", "reward:0"),
        ("--dry-run",),
    ],
)
def test_a_prune_that_would_keep_nothing_is_wrong_usage(copy: Path, rules: tuple[str, ...]) -> None:
    """CK-03."""
    assert run("prune", *rules, "--registry", copy).code == 2
    assert all(version["stored"] for version in run("log", "--json", "--registry", copy).data)


def test_a_file_that_prune_could_not_delete_is_one_warning(copy: Path) -> None:
    """CK-08: said on stderr, in one line, and no failure."""
    snapshots = copy / "snapshots"
    with Registry.open(copy) as registry, registry.ledger.reading() as conn:
        blocked = snapshots / registry.ledger.files_of(conn, 4)[0].uri
    blocked.unlink()
    blocked.mkdir()
    (blocked / "in the way").touch()
    ran = spawn("prune", "--keep-last", 1, "--registry", copy)
    assert ran.code == 0
    assert ran.err.startswith("warning: pruned, but 1 file(s) could not be deleted yet")
    assert ran.err.count("\n") == 1
    assert ".py" not in ran.err


def test_an_upgrade_of_a_current_registry_changes_nothing(copy: Path) -> None:
    ran = run("upgrade", "--registry", copy)
    assert (ran.code, ran.out) == (0, f"{copy} is up to date already.\n")
    assert run("upgrade", "--json", "--registry", copy).data == {"registry": str(copy), "upgraded": False}


@pytest.mark.folder
def test_an_older_registry_is_upgraded_by_commands_that_write_and_refused_by_those_that_read(
    copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library with one more migration meets a registry of this one."""
    scripts = tmp_path / "scripts"
    shutil.copytree(Path(migrations.__path__[0]), scripts)
    (scripts / "versions" / "v0004_more.py").write_text(
        "from alembic import op\nimport sqlalchemy as sa\nrevision, down_revision = '0004', '0003'\n"
        "def upgrade():\n    op.add_column('runs', sa.Column('more', sa.Text()))\n"
    )
    monkeypatch.setattr(schema, "SCRIPTS", str(scripts))
    monkeypatch.setattr(schema, "HEAD", "0004")
    for command in (*READING, "prune --keep-last 1 --dry-run", "export 1 out"):
        ran = run(*command.split(), "--registry", copy)
        assert ran.code == 1
        assert "weightledger upgrade" in ran.err
    assert run("upgrade", "--registry", copy).out == f"{copy} is upgraded.\n"
    assert run("upgrade", "--json", "--registry", copy).data["upgraded"] is False
    assert run("log", "--registry", copy).code == 0


@pytest.mark.folder
def test_a_decision_upgrades_an_older_registry_on_its_way(
    copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(Path(migrations.__path__[0]), tmp_path / "scripts")
    (tmp_path / "scripts" / "versions" / "v0004_none.py").write_text(
        "revision, down_revision = '0004', '0003'\ndef upgrade():\n    pass\n"
    )
    monkeypatch.setattr(schema, "SCRIPTS", str(tmp_path / "scripts"))
    monkeypatch.setattr(schema, "HEAD", "0004")
    assert run("rollback", "--to", 1, "--reason", "x", "--registry", copy).code == 0
    assert run("show", "--json", "--registry", copy).data["restores"] == 1


# ---------------------------------------------------------------------- where, and how it is refused


@pytest.mark.parametrize("command", [*READING, *WRITING])
def test_no_command_but_publish_creates_anything(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ran = run(*command.split(), "--registry", "typo")
    assert ran.code == 1
    assert ran.err.startswith("error: ")
    assert str(tmp_path / "typo") in ran.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", READING)
def test_reading_commands_change_no_byte_of_a_registry(command: str, copy: Path) -> None:
    def content() -> dict[str, bytes]:
        names = ("registry.db", "snapshots")
        return {
            str(path): path.read_bytes()
            for name in names
            for path in [copy / name, *(copy / name).glob("*")]
            if path.is_file()
        }

    before = content()
    assert run(*command.split(), "--registry", copy).code == 0
    assert run(*command.split(), "--registry", copy, "--json").code == 0
    assert content() == before


@pytest.mark.parametrize("command", [*READING, *WRITING])
def test_the_registry_must_be_named(command: str) -> None:
    ran = run(*command.split())
    assert ran.code == 2
    assert "--registry" in ran.err and "WEIGHTLEDGER_REGISTRY" in ran.err


def test_shared_options_stand_before_or_after_the_command_and_the_nearer_wins(
    folder: Path, tmp_path: Path
) -> None:
    expected = run("alias", "--registry", folder, "--json").data
    assert run("--registry", folder, "--json", "alias").data == expected
    assert run("--registry", folder, "alias", "--json").data == expected
    assert run("--registry", tmp_path / "no", "alias", "--json", "--registry", folder).data == expected
    assert run("alias", "--json", WEIGHTLEDGER_REGISTRY=str(folder)).data == expected
    assert (
        run("--registry", folder, "alias", "--json", WEIGHTLEDGER_REGISTRY=str(tmp_path / "no")).data
        == expected
    )
    assert run("alias", WEIGHTLEDGER_REGISTRY="").code == 2


def test_policies_are_kept_apart_and_a_misspelt_one_is_refused(tmp_path: Path, file: Path) -> None:
    folder = tmp_path / "r"
    run("publish", file, "--registry", folder, "--policy", "main")
    run("publish", file, "--registry", folder, "--policy", "opponent")
    run("publish", file, "--registry", folder, "--policy", "opponent")
    assert len(run("log", "--policy", "opponent", "--json", "--registry", folder).data) == 2
    assert len(run("--policy", "main", "log", "--json", "--registry", folder).data) == 1
    for command in (*READING, "prune --keep-last 1", "unpin w"):
        ran = run(*command.split(), "--policy", "oponent", "--registry", folder)
        assert ran.code == 1
        assert "no policy 'oponent'" in ran.err and "main, opponent" in ran.err
    assert run("log", "--policy", " ", "--registry", folder).code == 2


def test_an_empty_registry_is_described_and_refuses_what_needs_a_version(tmp_path: Path) -> None:
    """RL-22."""
    Registry.open(tmp_path).close()
    assert run("status", "--registry", tmp_path).out.startswith("policy default: no versions yet\n")
    assert run("log", "--registry", tmp_path).out == "No versions yet.\n"
    assert run("status", "--json", "--registry", tmp_path).data["head"] is None
    for command in (
        "show",
        "show 0",
        "rollback --reason x",
        "rollback --to 99 --reason x",
        "pin w head",
        "best reward",
    ):
        ran = run(*command.split(), "--registry", tmp_path)
        assert ran.code == 1, command
        assert ran.err.startswith("error: ")


def test_an_unknown_version_or_worker_is_refused_with_what_exists(folder: Path) -> None:
    """RL-22: the text names what there is."""
    for command in (
        "show 99",
        "diff 1 99",
        "audit --version 99",
        "events --version 99",
        "verify 99",
        "show 0",
    ):
        ran = run(*command.split(), "--registry", folder)
        assert ran.code == 1, command
        assert ran.err.startswith("error: ") and "5" in ran.err
        assert ran.out == ""
    ran = run("show", "bset", "--registry", folder)
    assert ran.code == 1
    assert "bset" in ran.err and "best" in ran.err
    for moment in ((), ("--at", "0s")):
        ran = run("audit", "--worker", "w9", *moment, "--registry", folder)
        assert ran.code == 1
        assert "w9" in ran.err and "w1, w2, w3" in ran.err


@pytest.mark.parametrize(
    "command",
    [
        "nonsense",
        "show 1 2 3",
        "diff",
        "audit --at yesterday",
        "audit --at 2h --since 1h",
        "audit --since 1h --until 2h",
        "log -n 0",
        "log -n 3 --all",
        "best",
        "best reward --mode most",
        "pin w1",
        "alias best",
        "alias --delete best other",
        "alias v5 1",
        "alias head 1",
        "publish",
        "export 1",
        "unpin",
        "prune --keep-best reward",
        "events --limit many",
    ],
)
def test_wrong_usage_exits_with_two_and_changes_nothing(command: str, copy: Path) -> None:
    before = run("events", "--json", "--registry", copy).data
    ran = run("--registry", copy, *command.split())
    assert ran.code == 2, ran.out + ran.err
    assert ran.out == ""
    assert "Error" in ran.err
    assert run("events", "--json", "--registry", copy).data == before


def test_metrics_and_metadata_that_cannot_be_read_are_wrong_usage(tmp_path: Path, file: Path) -> None:
    for wrong in (
        ("--metric", "reward"),
        ("--metric", "reward=high"),
        ("--metadata", "=3"),
        ("--parent", "-1"),
    ):
        assert run("publish", file, *wrong, "--registry", tmp_path / "new").code == 2
    assert not (tmp_path / "new").exists()


def set_revision(folder: Path, revision: str | None) -> None:
    with sqlite3.connect(folder / "registry.db") as database:
        database.execute("DELETE FROM alembic_version")
        if revision is not None:
            database.execute("INSERT INTO alembic_version VALUES (?)", (revision,))
    database.close()


@pytest.mark.folder
def test_a_registry_of_a_newer_library_is_refused_by_every_command(copy: Path) -> None:
    """SQL-09."""
    set_revision(copy, "deadbeef0001")
    for command in (*READING, *WRITING):
        ran = run(*command.split(), "--registry", copy)
        assert ran.code == 1
        assert "newer" in ran.err and "deadbeef0001" in ran.err


@pytest.mark.folder
def test_a_damaged_database_is_one_line_with_its_path(copy: Path) -> None:
    """SQL-16."""
    (copy / "registry.db").write_text("not a database at all, but long enough to be looked at" * 100)
    ran = run("status", "--registry", copy)
    assert ran.code == 1
    assert ran.err.startswith("error: ") and str(copy) in ran.err
    assert "Traceback" not in ran.err


def test_a_folder_with_special_characters_works(tmp_path: Path, file: Path) -> None:
    """SQL-10, by the command line."""
    folder = tmp_path / "a?b#c%20d é"
    assert run("publish", file, "--registry", folder).code == 0
    assert run("log", "--json", "--registry", folder).data[0]["number"] == 1


# ---------------------------------------------------------------------- as a process


def test_the_installed_script_and_the_module_are_the_same_program(folder: Path) -> None:
    script = Path(sys.executable).with_name("weightledger")
    shown = subprocess.run(
        [script, "log", "--registry", folder], capture_output=True, text=True, timeout=100, check=True
    )
    assert shown.stdout == spawn("log", "--registry", folder).out


def test_into_a_pipe_there_are_whole_lines_and_no_colours(folder: Path) -> None:
    ran = spawn("audit", "--registry", folder)
    assert ran.code == 0
    assert "\x1b" not in ran.out
    assert all(
        name in ran.out.splitlines()[1] for name in ("worker", "version", "state", "order", "life", "run")
    )


def test_a_relative_registry_is_found_from_where_the_command_runs(copy: Path) -> None:
    """SQL-14."""
    ran = spawn("status", "--json", "--registry", copy.name, cwd=copy.parent)
    assert ran.data["registry"] == str(copy)
    assert sorted(path.name for path in copy.parent.iterdir()) == ["copy"]


def test_a_reader_that_goes_away_is_no_traceback(folder: Path) -> None:
    """`weightledger events --json | head -1`"""
    with subprocess.Popen(
        [sys.executable, "-m", "weightledger.registry.cli", "events", "--json", "--registry", folder],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert "Traceback" not in process.stderr.read()


@pytest.mark.folder
def test_questions_and_decisions_load_neither_torch_nor_ray_nor_alembic(copy: Path) -> None:
    """In one fresh process; with --json, rich is not needed either."""
    program = (
        "import sys\n"
        "from weightledger.registry.commands.app import app\n"
        "for command in sys.argv[2:]:\n"
        "    app(['--json', '--registry', sys.argv[1], *command.split()], standalone_mode=False)\n"
        "loaded = {name.partition('.')[0] for name in sys.modules}\n"
        "print(*sorted(loaded & {'torch', 'ray', 'tensordict', 'alembic', 'rich'}), file=sys.stderr)\n"
    )
    decisions = ("rollback --reason x", "pin w1 1", "alias a 1", "prune --keep-last 9")
    done = subprocess.run(
        [sys.executable, "-c", program, copy, *READING, *decisions],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "\n")
    assert "restores" in done.stdout


def test_the_version_and_every_command_have_help() -> None:
    from importlib.metadata import version

    assert run("--version").out == f"weightledger {version('weightledger')}\n"
    shown = run("--help").out
    for command in (
        "status",
        "log",
        "show",
        "diff",
        "audit",
        "events",
        "best",
        "rollback",
        "pin",
        "unpin",
        "alias",
    ):
        assert command in shown
        told = run(command, "--help")
        assert told.code == 0
        assert all(option in told.out for option in ("--registry", "--policy", "--json"))
    assert "local time" in run("audit", "--help").out


def test_times_are_shown_in_the_local_zone_and_told_to_programs_in_utc(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQL-04."""
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "EST5")
        time.tzset()
        shown, data = (
            run("show", 1, "--registry", folder).out,
            run("show", 1, "--json", "--registry", folder).data,
        )
        written = datetime.fromisoformat(data["created_at"])
        local = f"{written.astimezone():%Y-%m-%d %H:%M:%S} (EST)"
    time.tzset()
    assert data["created_at"].endswith("+00:00")
    assert local in shown


def test_a_url_in_place_of_a_folder_is_a_usage_error_of_its_option() -> None:
    ran = run("log", "--registry", "s3://bucket/runs")
    assert ran.code == 2
    assert "--registry" in ran.err and "s3://" in ran.err and "--policy" not in ran.err


def test_a_metric_that_nobody_recorded_prunes_nothing(copy: Path) -> None:
    ran = run("prune", "--keep-best", "rewrad:1", "--registry", copy)
    assert ran.code == 1
    assert "'rewrad'" in ran.err and "nothing was pruned" in ran.err

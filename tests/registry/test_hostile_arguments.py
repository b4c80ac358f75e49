"""Arguments of every kind to every public call: what is refused is refused by an error of ours, and changes nothing."""

from __future__ import annotations

import inspect
import random
import warnings
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.registry.damaging import MANY
from tests.registry.helpers import memory_folder, weights
from weightledger.registry import Registry
from weightledger.registry.errors import WeightLedgerError
from weightledger.updater.testing import FakeWorkers


class Mute:
    """Cannot be shown."""

    def __repr__(self) -> str:
        raise RuntimeError("no words")


class Text(str):
    """Text of another class."""


def pool(foreign: Any) -> list[Any]:
    """Return values that nobody expects."""
    held: list[Any] = []
    held.append(held)
    return [
        *(
            None,
            True,
            False,
            0,
            1,
            2,
            -1,
            2**31,
            2**63,
            10**400,
            10**5000,
            1.5,
            float("nan"),
            float("inf"),
            1j,
        ),
        *(
            "",
            " ",
            "\0",
            "\ud800",
            "x" * 5000,
            "a\nb",
            "head",
            "v1",
            "head~1",
            "best:reward",
            "blake3:00",
            "*",
            "[",
            "é",
        ),
        *(
            Text("head"),
            b"",
            b"head",
            bytearray(b"x"),
            [],
            [1],
            ["head"],
            (),
            (1, 2),
            ("reward", 1),
            {1},
            {},
            {"a": 1},
        ),
        *(
            {"a": float("nan")},
            {"\ud800": 1},
            {1: 2},
            {"a": {"b": object()}},
            held,
            range(3),
            iter([1]),
        ),
        *(
            object(),
            object,
            Mute(),
            lambda *_: None,
            Exception("x"),
            NotImplemented,
            Decimal("NaN"),
            np.ma.masked,
        ),
        *(
            np.int64(1),
            np.array(1),
            np.array([1, 2]),
            np.float32("nan"),
            np.str_("head"),
            np.datetime64("NaT"),
        ),
        *(
            torch.tensor(1),
            torch.tensor([1.0]),
            torch.tensor(1j),
            torch.empty(2, device="meta"),
            torch.nn.Linear(2, 1),
        ),
        *(torch.ones(2).to_sparse(), {"w": torch.ones(2)}, {"w": torch.empty(2, device="meta")}, weights(1)),
        *(datetime.now(UTC), datetime(2026, 1, 1), datetime.min.replace(tzinfo=timezone(timedelta(hours=5)))),  # noqa: DTZ001
        *(Path("x"), Path("/proc/nothing"), Path("a\0b"), "~nobody-of-this-name", foreign),
    ]


UNTRIED = {"close", "open", "for_policy"}
"""For these a registry would be opened or gone; where one is opened is tried by the command line."""


@pytest.fixture
def scene() -> Iterator[tuple[Registry, FakeWorkers, Any]]:
    with memory_folder() as folder, Registry.open(folder / "r") as registry:
        for value in (1, 2, 3):
            registry.publish(weights(value), metrics={"reward": value})
        registry.set_alias("good", 2)
        with Registry.open(folder / "other") as other:
            foreign = other.publish(weights(9))
        with FakeWorkers(
            nn.Linear(2, 1), [nn.Linear(2, 1)], registry=registry.for_policy("fleet"), timeout=0.01
        ) as fleet:
            fleet.update_weights()
            yield registry, fleet, foreign
        fleet.registry.close()


def methods(owner: object) -> dict[str, Callable[..., Any]]:
    return {
        name: method
        for name, method in inspect.getmembers(owner, callable)
        if not name.startswith("_") and name not in UNTRIED and inspect.ismethod(method)
    }


def guess(
    method: Callable[..., Any], source: random.Random, values: list[Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Return arguments for a call: some of them hostile, those that may be left out sometimes left out."""
    words: list[Any] = []
    named: dict[str, Any] = {}
    for parameter in inspect.signature(method).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            named[source.choice(["reward", "x", "\ud800", "a\0b"])] = source.choice(values)
        elif parameter.kind is parameter.VAR_POSITIONAL:
            continue
        elif parameter.kind is parameter.KEYWORD_ONLY:
            if source.random() < 0.4:
                named[parameter.name] = source.choice(values)
        elif parameter.default is parameter.empty or source.random() < 0.7:
            words.append(source.choice([1, "head", source.choice(values), source.choice(values)]))
        else:
            break
    return words, named


@pytest.mark.torture
@pytest.mark.parametrize("seed", range(60 if MANY else 5))
def test_only_our_errors_leave_whatever_a_call_is_given(
    seed: int, scene: tuple[Registry, FakeWorkers, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    source = random.Random(seed)
    registry, fleet, foreign = scene
    wrong = []
    for owner in (registry, fleet):
        for name, method in sorted(methods(owner).items()):
            for _ in range(10 if MANY else 4):
                words, named = guess(method, source, pool(foreign))
                try:
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore")
                        method(*words, **named)
                except (WeightLedgerError, TypeError, ValueError) as error:
                    if len(str(error)) > 3000:
                        wrong.append(
                            f"{name}: {type(error).__name__} of {len(str(error))} characters: {str(error)[:300]}"
                        )
                except Exception as error:  # noqa: BLE001 - what it is, is what is asked
                    wrong.append(
                        f"{name}{tuple(map(kind, words))} {list(named)}: {type(error).__name__}: {error}"[
                            :400
                        ]
                    )
    assert wrong == []
    assert registry.verify() == [] and registry.load() is not None
    assert [version.number for version in registry.versions()] == list(range(1, registry.head().number + 1))


def kind(value: object) -> str:
    return type(value).__name__


FLAGS: dict[str, Callable[[Registry, Any], Any]] = {
    "create": lambda registry, value: Registry.open(registry.location, create=value),
    "migrate": lambda registry, value: Registry.open(registry.location, migrate=value),
    "publish(restructure)": lambda registry, value: registry.publish(weights(4), restructure=value),
    "rollback(restructure)": lambda registry, value: registry.rollback(restructure=value),
    "cast": lambda registry, value: registry.restore(1, weights(0), cast=value),
    "pin(literal)": lambda registry, value: registry.pin("w", 1, literal=value),
    "unpin(literal)": lambda registry, value: registry.unpin("w", literal=value),
    "dry_run": lambda registry, value: registry.prune(keep_last=1, dry_run=value),
    "updater(cast)": lambda registry, value: FakeWorkers(nn.Linear(2, 1), [], registry=registry, cast=value),
}


@pytest.mark.parametrize("call", FLAGS.values(), ids=FLAGS.keys())
def test_a_flag_is_true_or_false_and_nothing_that_counts_as_it(
    call: Callable[[Registry, Any], Any], scene: tuple[Registry, FakeWorkers, Any]
) -> None:
    registry, _, _ = scene
    before = [registry.versions(), registry.pins(), len(registry.events())]
    for value in ("no", 0, 1, [], torch.tensor(True), 10**400):
        with pytest.raises(TypeError, match="must be True or False, found"):
            call(registry, value)
    assert [registry.versions(), registry.pins(), len(registry.events())] == before


def test_an_update_waits_or_does_not(scene: tuple[Registry, FakeWorkers, Any]) -> None:
    _, fleet, _ = scene
    for name in ("wait", "force"):
        with pytest.raises(TypeError, match=f"{name} must be True or False, found str 'no'"):
            fleet.update_weights(**{name: "no"})  # pyright: ignore[reportArgumentType, reportCallIssue]
    assert fleet.update_weights(wait=np.bool_(True), force=np.bool_(False)).ok  # pyright: ignore[reportArgumentType, reportCallIssue]

"""One rule for numbers: a table of types over every public call that takes one."""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable, Iterator
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.registry.helpers import memory_folder, weights
from weightledger.registry import Registry
from weightledger.updater.compat import RemoteWeightUpdaterBase
from weightledger.updater.testing import FakeWorkers

# Nobody steers a worker here.
pytestmark = pytest.mark.filterwarnings("ignore:.* is pinned to v")

Make = Callable[[int], Any]
"""Turns a whole number into a value of some type."""


Choice: Any = enum.IntEnum("Choice", {f"N{number}": number for number in range(500)})

WHOLE: dict[str, Make] = {
    "int": int,
    "IntEnum": Choice,
    "np.int16": np.int16,
    "np.uint64": np.uint64,
    "np 0-d": np.array,
    "torch int64": torch.tensor,
    "torch int16": lambda n: torch.tensor(n, dtype=torch.int16),
}
REAL: dict[str, Make] = {
    "float": float,
    "np.float16": np.float16,
    "np.float64": np.float64,
    "np.longdouble": np.longdouble,
    "np 0-d float": lambda n: np.array(float(n)),
    "torch float32": lambda n: torch.tensor(float(n)),
    "torch bfloat16": lambda n: torch.tensor(n, dtype=torch.bfloat16),
    "torch parameter": lambda n: nn.Parameter(torch.tensor(float(n))),
}
NEITHER: dict[str, Make] = {
    "bool": lambda n: True,
    "np.bool": lambda n: np.bool_(True),
    "torch bool": lambda n: torch.tensor(True),
    "bytes": lambda n: b"%d" % n,
    "list": lambda n: [n],
    "np 1-d": lambda n: np.array([n]),
    "torch 1-d": lambda n: torch.tensor([n]),
    "torch 1-d float": lambda n: torch.tensor([float(n)]),
    "torch meta": lambda n: torch.tensor(n, device="meta"),
    "complex": complex,
    "np.complex64": np.complex64,
    "torch complex": lambda n: torch.tensor(complex(n)),
    "np.timedelta64": lambda n: np.timedelta64(n),
    "np.datetime64": lambda n: np.datetime64(n, "ns"),
    "masked": lambda n: np.ma.masked,
    "Fraction": Fraction,
    "Decimal": Decimal,
    "object": lambda n: object(),
    "cannot show itself": lambda n: Unprintable(),
}
TEXT: dict[str, Make] = {"str": str, "np.str": lambda n: np.str_(n)}


class Unprintable:
    """Raises when an error wants to show it."""

    def __repr__(self) -> str:
        raise RuntimeError("no words for it")


class Scene:
    """A registry with three versions and an updater with workers, one for a call."""

    def __init__(self, folder: Path) -> None:
        self.registry = Registry.open(folder)
        for value in (1, 2, 3):
            self.registry.publish(weights(value), metrics={"reward": value})
        learner = nn.Linear(2, 1)
        self.fleet = FakeWorkers(
            learner, [nn.Linear(2, 1) for _ in range(3)], registry=self.registry.for_policy("fleet")
        )
        for _ in range(3):
            with torch.no_grad():
                learner.weight += 1.0
            self.fleet.update_weights()

    def close(self) -> None:
        self.fleet.close()
        self.fleet.registry.close()
        self.registry.close()

    def moved(self) -> list[Any]:
        """Return everything that a call could have changed."""
        seen = []
        for registry in (self.registry, self.fleet.registry):
            seen += [registry.versions(), registry.pins(), registry.aliases(), len(registry.events())]
        return [*seen, self.fleet.all_worker_ids()]


def publish_on(scene: Scene, make: Make) -> bool:
    head = scene.registry.head().number
    return scene.registry.publish(weights(0), parent=make(head)).number == head + 1


def rollback_on(scene: Scene, make: Make) -> bool:
    head = scene.registry.head().number
    return scene.registry.rollback(1, expected_head=make(head)).number == head + 1


def pin_to(scene: Scene, make: Make) -> Any:
    scene.registry.pin("w", make(2))
    return [pin.version for pin in scene.registry.pins()]


def alias_to(scene: Scene, make: Make) -> Any:
    scene.registry.set_alias("a", make(2))
    return scene.registry.aliases()


def updater_pin(scene: Scene, make: Make) -> Any:
    scene.fleet.pin(make(1), 2)
    return [(pin.worker, pin.version) for pin in scene.fleet.registry.pins()]


def updater_pin_ref(scene: Scene, make: Make) -> Any:
    scene.fleet.pin(1, make(2))
    return [pin.version for pin in scene.fleet.registry.pins()]


def updater_unpin(scene: Scene, make: Make) -> Any:
    scene.fleet.registry.pin("fake-1", 2)
    try:
        return list(scene.fleet.unpin(make(1)).workers)
    finally:
        if scene.fleet.registry.pins():
            scene.fleet.registry.unpin("fake-1")


def remove(scene: Scene, make: Make) -> Any:
    added = scene.fleet.add_worker(nn.Linear(2, 1))
    before = len(scene.fleet.all_worker_ids())
    try:
        return scene.fleet.remove_worker(make(added)) is None and before - len(scene.fleet.all_worker_ids())
    finally:
        if added in scene.fleet.all_worker_ids():
            scene.fleet.remove_worker(added)


def made_with(option: str) -> Callable[[Scene, Make], Any]:
    def call(scene: Scene, make: Make) -> Any:
        with FakeWorkers(nn.Linear(2, 1), [], registry=scene.registry, **{option: make(2)}) as fleet:
            return getattr(fleet, option), type(getattr(fleet, option))

    return call


Call = Callable[[Scene, Make], Any]

REFERENCES: dict[str, Call] = {
    "get(ref)": lambda s, make: s.registry.get(make(2)).number,
    "load(ref)": lambda s, make: float(s.registry.load(make(2))["b"][0]),
    "load_extra(ref)": lambda s, make: load_extra(s, make),
    "restore(ref)": lambda s, make: s.registry.restore(make(2), weights(0)).number,
    "payload(ref)": lambda s, make: s.registry.payload(make(2)).digest,
    "read(ref)": lambda s, make: s.registry.read(make(2))[0].digest,
    "export(ref)": lambda s, make: (
        s.registry.export(make(2), Path(s.registry.location).parent / "x").stat().st_size
    ),
    "tensor_hashes(ref)": lambda s, make: s.registry.tensor_hashes(make(2)),
    "rollback(to)": lambda s, make: s.registry.rollback(make(2)).restores,
    "pin(ref)": pin_to,
    "set_alias(ref)": alias_to,
    "record_metrics(ref)": lambda s, make: s.registry.record_metrics(make(2), loss=1.0).number,
    "history(version)": lambda s, make: s.registry.history(version=make(2)),
    "events(version)": lambda s, make: {event.version for event in s.registry.events(version=make(2))},
    "staleness(version)": lambda s, make: s.registry.staleness(make(3)) is not None,
    "verify(ref)": lambda s, make: s.registry.verify(make(2)),
    "updater.sync(version)": lambda s, make: s.fleet.sync(0, version=make(2)).workers[0].held,
    "updater.rollback(to)": lambda s, make: (s.fleet.rollback(make(2)), s.fleet.registry.head().restores)[1],
    "updater.pin(ref)": updater_pin_ref,
}
NUMBERS: dict[str, Call] = {
    "publish(step)": lambda s, make: (v := s.registry.publish(weights(0), step=make(2)).step, type(v)),
    "publish(parent)": publish_on,
    "rollback(expected_head)": rollback_on,
    "versions(limit)": lambda s, make: len(s.registry.versions(limit=make(2))),
    "history(limit)": lambda s, make: len(s.fleet.registry.history(limit=make(2))),
    "events(limit)": lambda s, make: len(s.registry.events(limit=make(2))),
    "prune(keep_last)": lambda s, make: s.registry.prune(keep_last=make(2), dry_run=True).kept.keys(),
    "prune(keep_every)": lambda s, make: s.registry.prune(keep_every=make(2), dry_run=True).kept,
    "prune(keep_best)": lambda s, make: s.registry.prune(keep_best=("reward", make(1)), dry_run=True).kept,
    "updater(max_interval)": made_with("max_interval"),
    "updater.update_weights(step)": lambda s, make: updated(s, step=make(2)).step,
}
IDS: dict[str, Call] = {
    "updater.update_weights(worker_ids)": lambda s, make: list(
        s.fleet.update_weights(worker_ids=make(1)).workers
    ),
    "updater.sync(worker_ids)": lambda s, make: list(s.fleet.sync(make(1)).workers),
    "updater.pin(worker_id)": updater_pin,
    "updater.unpin(worker_id)": updater_unpin,
    "updater.remove_worker(worker_id)": remove,
}
REALS: dict[str, Call] = {
    "publish(metrics)": lambda s, make: numbers_of(s.registry.publish(weights(0), metrics={"x": make(2)})),
    "record_metrics(metrics)": lambda s, make: numbers_of(s.registry.record_metrics(1, x=make(2))),
    "updater(timeout)": made_with("timeout"),
    "updater.update_weights(metrics)": lambda s, make: numbers_of(updated(s, metrics={"x": make(2)})),
}


def numbers_of(version: Any) -> Any:
    return version.metrics["x"], type(version.metrics["x"])


def updated(scene: Scene, **about: Any) -> Any:
    with torch.no_grad():
        scene.fleet.policy_weights.weight += 1.0
    scene.fleet.update_weights(**about)
    return scene.fleet.registry.head()


def load_extra(scene: Scene, make: Make) -> Any:
    if "extra" not in {version.message for version in scene.registry.versions()}:
        scene.registry.publish(weights(4), extra={"k": 1}, message="extra")
    with_extra = next(v.number for v in scene.registry.versions() if v.message == "extra")
    return scene.registry.load_extra(make(with_extra))


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    with memory_folder() as folder:
        made = Scene(folder / "r")
        yield made
        made.close()


WHOLE_CALLS = REFERENCES | NUMBERS | IDS


@pytest.mark.parametrize("call", WHOLE_CALLS.values(), ids=WHOLE_CALLS.keys())
def test_a_whole_number_of_any_library_is_taken(scene: Scene, call: Call) -> None:
    expected = call(scene, int)
    for name, make in WHOLE.items():
        assert call(scene, make) == expected, name


@pytest.mark.parametrize("call", WHOLE_CALLS.values(), ids=WHOLE_CALLS.keys())
def test_what_is_no_whole_number_is_refused_by_name_and_changes_nothing(scene: Scene, call: Call) -> None:
    call(scene, int)
    refused = NEITHER | REAL
    if call in IDS.values():
        # What has elements is one of ids.
        refused = {name: make for name, make in refused.items() if "1-d" not in name and name != "list"}
    elif call not in REFERENCES.values():
        refused = refused | TEXT
    before = scene.moved()
    for name, make in refused.items():
        with pytest.raises((TypeError, ValueError, LookupError)) as caught:
            call(scene, make)
        assert type(make(2)).__name__ in str(caught.value), name
    assert scene.moved()[:3] == before[:3]
    if call is not remove and call is not updater_unpin:
        assert scene.moved() == before


@pytest.mark.parametrize("call", REALS.values(), ids=REALS.keys())
def test_a_real_number_of_any_library_is_taken(scene: Scene, call: Call) -> None:
    expected = call(scene, float)
    for name, make in (REAL | WHOLE).items():
        assert call(scene, make) == expected, name


@pytest.mark.parametrize("call", REALS.values(), ids=REALS.keys())
def test_what_is_no_number_is_refused_by_name_and_changes_nothing(scene: Scene, call: Call) -> None:
    before = scene.moved()
    for name, make in (NEITHER | TEXT).items():
        with pytest.raises((TypeError, ValueError)) as caught:
            call(scene, make)
        assert type(make(2)).__name__ in str(caught.value), name
    assert scene.moved() == before


def test_the_table_has_every_public_call_that_takes_a_number() -> None:
    """A parameter that is annotated as a number or a reference is in one of the tables above."""
    asked = set()
    for owner, prefix in ((Registry, ""), (RemoteWeightUpdaterBase, "updater.")):
        for name, method in inspect.getmembers(owner, inspect.isfunction):
            if name.startswith("_") and name != "__init__":
                continue
            for parameter in inspect.signature(method).parameters.values():
                kinds = str(parameter.annotation)
                if any(kind in kinds for kind in ("int", "float", "Ref")):
                    asked.add(f"{'updater' if name == '__init__' else prefix + name}({parameter.name})")
    asked -= {"read(room)"}  # a callable that is given a size
    known = WHOLE_CALLS.keys() | REALS.keys()
    assert asked - {call for call in known if "metrics)" not in call or "(ref)" in call} == set()


@pytest.mark.parametrize("number", [10**400, -(10**400), 10**5000], ids=["large", "small", "beyond words"])
def test_a_number_that_no_database_holds_is_refused_in_few_words(scene: Scene, number: int) -> None:
    registry = scene.registry
    calls: dict[str, Callable[[], object]] = {
        "get": lambda: registry.get(number),
        "step": lambda: registry.publish(weights(0), step=number),
        "parent": lambda: registry.publish(weights(0), parent=number),
        "expected_head": lambda: registry.rollback(expected_head=number),
        "metric": lambda: registry.record_metrics(1, x=number),
        "worker": lambda: scene.fleet.sync(number),
    }
    for name, call in calls.items():
        with pytest.raises((ValueError, LookupError)) as caught:
            call()
        assert len(str(caught.value)) < 300, name
        assert "sys.set_int_max_str_digits" not in str(caught.value), name


def test_more_than_there_can_be_is_all_there_is(scene: Scene) -> None:
    registry = scene.registry
    for huge in (2**63 - 1, 2**63, 10**5000):
        assert registry.versions(limit=huge) == registry.versions()
        assert registry.events(limit=huge) == registry.events()
        assert registry.history(limit=huge) == registry.history()
        assert registry.prune(keep_last=huge, keep_every=huge, keep_best=("reward", huge)) == []

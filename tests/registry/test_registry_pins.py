"""Aliases, pins and targets: who should hold what."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.registry.helpers import hold, publish_many, weights
from weightledger.registry import ConflictError, InUseError, InvalidWeightsError, NotFoundError, Registry

# Nobody steers a worker here; that a pin meets nobody is tried where it is the matter.
pytestmark = pytest.mark.filterwarnings("ignore:.* is pinned to v")


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    with Registry.open(tmp_path / "r") as opened:
        publish_many(opened, 5)
        yield opened


def test_without_a_pin_the_target_is_the_head(registry: Registry) -> None:
    assert registry.target("w").number == 5
    registry.rollback(1)
    assert registry.target("w").number == 6


def test_a_pin_holds_whatever_the_head_does(registry: Registry) -> None:
    registry.pin("w", 2, reason="evaluation")
    registry.publish(weights(9))
    registry.rollback(1)
    assert registry.target("w").number == 2 and registry.target("other").number == 7
    (pin,) = registry.pins()
    assert (pin.worker, pin.ref, pin.version, pin.reason) == ("w", 2, 2, "evaluation")
    assert pin.run == registry.locks.current().id


def test_a_pin_to_the_head_is_one_to_its_number(registry: Registry) -> None:
    registry.pin("w", "head")
    registry.publish(weights(9))
    assert registry.target("w").number == 5 and registry.pins()[0].ref == 5


def test_a_pin_to_an_alias_moves_with_it(registry: Registry) -> None:
    registry.set_alias("stable", 2)
    registry.pin("w", "stable")
    registry.set_alias("stable", 4)
    assert registry.target("w").number == 4
    assert (registry.pins()[0].ref, registry.pins()[0].version) == ("stable", 4)


def test_an_exact_name_beats_a_newer_glob(registry: Registry) -> None:
    registry.pin("eval-1", 1)
    registry.pin("eval-*", 2)
    assert (registry.target("eval-1").number, registry.target("eval-2").number) == (1, 2)


def test_of_two_globs_the_newer_wins(registry: Registry) -> None:
    registry.pin("eval-*", 1)
    registry.pin("*-1", 2)
    assert registry.target("eval-1").number == 2
    registry.pin("eval-*", 3)  # pinned anew, so the newer one now
    assert registry.target("eval-1").number == 3
    registry.unpin("eval-*")
    assert registry.target("eval-1").number == 2


def test_a_worker_whose_name_looks_like_a_glob_is_pinned_by_exactly_that_name(registry: Registry) -> None:
    registry.pin("w[1]", 1)
    assert registry.target("w[1]").number == 1 and registry.target("w1").number == 1
    registry.pin("w1", 2)
    assert registry.target("w[1]").number == 1 and registry.target("w1").number == 2


def test_a_literal_pin_moves_no_worker_that_a_glob_of_its_name_would_match(registry: Registry) -> None:
    registry.pin("env[12]", 1, literal=True)
    assert [(pin.worker, pin.version, pin.literal) for pin in registry.pins()] == [("env[12]", 1, True)]
    targets = [registry.target(name).number for name in ("env[12]", "env1", "env2")]
    assert targets == [1, 5, 5]
    registry.pin("env[12]", 2)  # the glob is another pin
    targets = [registry.target(name).number for name in ("env[12]", "env1", "env2")]
    assert targets == [1, 2, 2]
    with pytest.raises(ConflictError, match=r"'env\[12\]'.*literal=True.*literal=False"):
        registry.unpin("env[12]")
    registry.unpin("env[12]", literal=False)
    assert [(pin.worker, pin.literal) for pin in registry.pins()] == [("env[12]", True)]
    with pytest.raises(NotFoundError, match=r"not pinned as a glob.*env\[12\] \(a name\)"):
        registry.unpin("env[12]", literal=False)
    registry.unpin("env[12]")
    assert registry.pins() == []


def test_a_name_without_a_globs_characters_is_literal_in_any_case(registry: Registry) -> None:
    registry.pin("w0", 1, literal=True)
    registry.pin("w0", 2)
    assert [(pin.worker, pin.version, pin.literal) for pin in registry.pins()] == [("w0", 2, True)]
    registry.unpin("w0", literal=False)
    assert registry.pins() == []


def test_a_pin_that_meets_no_worker_says_so_and_is_made(registry: Registry) -> None:
    hold(registry, "eval-1", 2)
    hold(registry, "env[12]", 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        registry.pin("eval-1", 1)
        registry.pin("eval-*", 1)
        registry.pin("env[12]", 1)
        registry.pin("env[12]", 1, literal=True)
    for name, what in (("eval-2", "name"), ("evil-*", "glob")):
        with pytest.warns(UserWarning, match=rf"^'{re.escape(name)}' is pinned to v1.*by that {what} so far"):
            registry.pin(name, 1)
        assert registry.pins()[-1].worker == name
    with pytest.warns(UserWarning, match="by that name"):
        registry.pin("*", 1, literal=True)


def test_a_new_pin_of_a_name_replaces_the_older(registry: Registry) -> None:
    registry.pin("w", 1)
    registry.pin("w", 2)
    assert [(pin.worker, pin.version) for pin in registry.pins()] == [("w", 2)]


def test_unpinning_gives_the_head_back(registry: Registry) -> None:
    registry.pin("w", 1)
    registry.unpin("w")
    assert registry.pins() == [] and registry.target("w").number == 5
    with pytest.raises(NotFoundError, match=r"'w'.*nothing"):
        registry.unpin("w")


def test_a_worker_under_a_glob_is_not_pinned_by_its_own_name(registry: Registry) -> None:
    registry.pin("eval-*", 1)
    with pytest.raises(NotFoundError, match=r"'eval-1'.*eval-\*"):
        registry.unpin("eval-1")


@pytest.mark.parametrize("ref", [99, "nope"])
def test_a_pin_to_nothing_is_refused(registry: Registry, ref: int | str) -> None:
    """SQL-05, at the call."""
    with pytest.raises(NotFoundError, match=str(ref)):
        registry.pin("w", ref)
    with pytest.raises(NotFoundError, match=str(ref)):
        registry.set_alias("a", ref)
    assert registry.pins() == [] and registry.aliases() == {}


def test_pruned_versions_are_no_target(registry: Registry) -> None:
    registry.prune(keep_last=1)
    for call in (lambda: registry.pin("w", 2), lambda: registry.set_alias("a", 2)):
        with pytest.raises(NotFoundError, match=r"v2.*pruned.*v4"):
            call()


@pytest.mark.parametrize("name", ["", "  ", "a\nb", "x" * 256, "\ud800"])
def test_names_that_nobody_could_read_are_refused(registry: Registry, name: str) -> None:
    for call in (registry.pin, registry.set_alias):
        with pytest.raises(ValueError, match="name"):
            call(name, 1)
    with pytest.raises(ValueError, match="policy name"):
        Registry.open(registry.location, policy=name)


@pytest.mark.parametrize("name", ["head", "3", "v3"])
def test_an_alias_that_would_be_taken_for_a_version_is_refused(registry: Registry, name: str) -> None:
    with pytest.raises(ValueError, match=name):
        registry.set_alias(name, 1)


def test_reasons_that_no_database_keeps_are_refused(registry: Registry) -> None:
    with pytest.raises(InvalidWeightsError, match="reason"):
        registry.pin("w", 1, reason="\ud800")
    assert registry.pins() == []


def test_aliases_are_listed_and_deleted(registry: Registry) -> None:
    registry.set_alias("b", 1)
    registry.set_alias("a", "head")
    assert registry.aliases() == {"a": 5, "b": 1}
    registry.delete_alias("b")
    assert registry.aliases() == {"a": 5}
    with pytest.raises(NotFoundError, match=r"'b'.*a"):
        registry.delete_alias("b")


def test_an_alias_that_a_pin_follows_cannot_be_deleted(registry: Registry) -> None:
    registry.set_alias("stable", 2)
    registry.pin("eval-*", "stable")
    with pytest.raises(InUseError, match=r"'stable'.*eval-\*.*unpin"):
        registry.delete_alias("stable")
    assert registry.target("eval-1").number == 2
    registry.unpin("eval-*")
    registry.delete_alias("stable")
    assert registry.aliases() == {}


def test_every_move_is_an_event(registry: Registry) -> None:
    registry.set_alias("a", 1)
    registry.set_alias("a", 2)
    registry.pin("w", "a", reason="why")
    registry.unpin("w")
    registry.delete_alias("a")
    told = [
        (event.kind, event.version, event.worker) for event in registry.events() if event.kind != "publish"
    ]
    assert told == [
        ("alias", 1, None),
        ("alias", 2, None),
        ("pin", 2, "w"),
        ("unpin", None, "w"),
        ("alias_deleted", 2, None),
    ]
    assert [dict(event.details) for event in registry.events(kind="alias")] == [
        {"alias": "a", "before": None},
        {"alias": "a", "before": 1},
    ]


def test_policies_share_neither_aliases_nor_pins(registry: Registry) -> None:
    registry.set_alias("a", 1)
    registry.pin("w", 1)
    with registry.for_policy("opponent") as opponent:
        opponent.publish(weights(1))
        opponent.publish(weights(2))
        assert (opponent.aliases(), opponent.pins(), opponent.target("w").number) == ({}, [], 2)

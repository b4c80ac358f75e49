"""What a worker should hold."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.registry.rows import RUN, START
from weightledger.registry.log.targets import resolve_target, resolve_targets
from weightledger.registry.records import Pin


def pin(worker: str, version: int, *, literal: bool = False) -> Pin:
    return Pin(
        worker=worker, ref=version, version=version, reason="", created_at=START, run=RUN, literal=literal
    )


def test_a_worker_without_a_pin_follows_the_head() -> None:
    assert resolve_target("w0", [pin("w1", 2)], 7) == (7, None)


def test_a_worker_of_an_empty_policy_has_no_target() -> None:
    assert resolve_target("w0", [], None) == (None, None)


def test_an_exact_name_beats_a_newer_glob() -> None:
    pins = [pin("eval-1", 2), pin("eval-*", 3)]
    assert resolve_target("eval-1", pins, 7) == (2, pins[0])
    assert resolve_target("eval-2", pins, 7) == (3, pins[1])


def test_of_two_globs_the_newer_counts() -> None:
    pins = [pin("eval-*", 2), pin("*-1", 3)]
    assert resolve_target("eval-1", pins, 7)[0] == 3
    assert resolve_target("eval-2", pins, 7)[0] == 2


def test_globs_tell_upper_from_lower_case() -> None:
    assert resolve_target("EVAL-1", [pin("eval-*", 2)], 7) == (7, None)


def test_a_name_with_brackets_is_found_by_its_own_pin() -> None:
    pins = [pin("env[0]", 2)]
    assert resolve_target("env[0]", pins, 7)[0] == 2
    assert resolve_target("env0", pins, 7)[0] == 2


def test_a_literal_pin_holds_its_own_name_alone_and_beats_the_glob_that_reads_the_same() -> None:
    pins = [pin("env[12]", 2, literal=True), pin("env[12]", 3)]
    for some in (pins, pins[::-1], pins[:1]):
        assert resolve_target("env[12]", some, 7)[0] == 2
    assert resolve_target("env1", pins[:1], 7) == (7, None)
    assert resolve_target("env1", pins, 7)[0] == 3


names = st.text("ab[*?]", min_size=1, max_size=3)


@given(st.lists(names, max_size=5), st.lists(st.tuples(names, st.booleans()), max_size=5, unique=True))
def test_many_targets_at_once_are_the_targets_one_by_one(
    workers: list[str], pinned: list[tuple[str, bool]]
) -> None:
    pins = [pin(name, number, literal=literal) for number, (name, literal) in enumerate(pinned, start=1)]
    assert resolve_targets(workers, pins, 9) == {name: resolve_target(name, pins, 9) for name in workers}

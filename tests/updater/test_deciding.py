"""What to do with one worker: pure rules, and what holds for every situation."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from weightledger.updater.workers.deciding import (
    Known,
    Situation,
    Target,
    decide,
    refused_tensors,
    within_interval,
)

DIGESTS = ("blake3:a", "blake3:b")

knowns = st.builds(
    Known,
    version=st.integers(1, 4),
    sent_digest=st.sampled_from(DIGESTS),
    incarnation=st.just("life-0"),
    pinned=st.booleans(),
)
targets = st.builds(
    Target,
    version=st.integers(1, 4),
    sent_digest=st.sampled_from(DIGESTS),
    pinned=st.booleans(),
    nonfinite=st.sampled_from([(), ("mask",), ("mask", "weight")]),
)
situations = st.builds(
    Situation,
    known=st.none() | knowns,
    target=targets,
    in_flight=st.booleans(),
    forced=st.booleans(),
    resend=st.booleans(),
    on_lineage=st.booleans(),
)
allowances = st.sampled_from([False, True, (), ("mask",), ("*",)])


def situation(
    known: Known | None = None,
    *,
    target: int = 2,
    content: str = "blake3:b",
    pinned: bool = False,
    nonfinite: tuple[str, ...] = (),
    in_flight: bool = False,
    forced: bool = False,
    resend: bool = False,
    on_lineage: bool = True,
) -> Situation:
    goal = Target(target, content, pinned, nonfinite)
    return Situation(known, goal, in_flight, forced, resend, on_lineage)


def holding(version: int = 1, content: str = "blake3:a", *, pinned: bool = False) -> Known:
    return Known(version, content, "life-0", pinned)


def always() -> bool:
    return True


def never() -> bool:
    return False


def act(of: Situation, skip: Callable[[], bool] = never, *, relabels: bool = True) -> str:
    return decide(of, skip, allow_nonfinite=False, relabels=relabels)


def test_a_worker_that_holds_nothing_known_is_sent_its_target_whatever_the_interval() -> None:
    assert act(situation(None), always) == "push"


def test_a_worker_that_holds_its_target_is_left_alone() -> None:
    assert act(situation(holding(2, "blake3:b")), always) == "current"


def test_a_worker_behind_on_the_lineage_is_passed_by_while_the_interval_lasts() -> None:
    assert act(situation(holding()), always) == "skip"
    assert act(situation(holding()), never) == "push"


def test_equal_content_under_another_number_is_relabelled() -> None:
    assert act(situation(holding(1, "blake3:b"))) == "relabel"


def test_workers_that_load_in_their_own_way_are_never_relabelled() -> None:
    assert act(situation(holding(1, "blake3:b")), relabels=False) == "push"


def test_nothing_is_sent_while_an_earlier_push_is_unanswered() -> None:
    assert act(situation(None, in_flight=True)) == "wait"
    assert act(situation(holding(2, "blake3:b"), in_flight=True)) == "wait"


def test_a_resend_sends_the_bytes_to_a_worker_that_holds_them() -> None:
    assert act(situation(holding(2, "blake3:b"), resend=True, forced=True), always) == "push"
    assert act(situation(holding(1, "blake3:b"), resend=True, forced=True), always) == "push"


def test_nan_is_refused_even_if_the_interval_would_pass_the_worker_by() -> None:
    assert act(situation(holding(), nonfinite=("weight",)), always) == "refuse"


def test_a_worker_that_holds_a_version_with_nan_already_is_current() -> None:
    assert act(situation(holding(2, "blake3:b"), nonfinite=("weight",))) == "current"


def test_globs_let_masks_pass_and_nothing_else() -> None:
    assert refused_tensors(("0.mask", "head.weight"), ("*.mask",)) == ("head.weight",)
    assert refused_tensors(("0.mask",), ("*.mask",)) == ()
    assert refused_tensors(("0.mask",), ("MASK",)) == ("0.mask",)
    assert refused_tensors(("a", "b"), True) == ()
    assert refused_tensors(("a", "b"), False) == ("a", "b")


def test_the_interval_passes_a_worker_by_exactly_so_many_times() -> None:
    assert [within_interval(passed, 2) for passed in range(4)] == [True, True, False, False]
    assert not within_interval(0, 0)


@given(situations, allowances, st.booleans())
def test_only_one_who_follows_the_head_along_its_lineage_is_ever_passed_by(
    of: Situation, allowance: bool | tuple[str, ...], relabels: bool
) -> None:
    asked: list[bool] = []

    def skip() -> bool:
        asked.append(True)
        return True

    action = decide(of, skip, allow_nonfinite=allowance, relabels=relabels)
    if action == "skip":
        assert of.known is not None and of.on_lineage
        assert not (of.forced or of.target.pinned or of.known.pinned or of.in_flight)
    assert bool(asked) == (action == "skip")


@given(situations, allowances, st.booleans())
def test_every_decision_is_one_that_its_situation_allows(
    of: Situation, allowance: bool | tuple[str, ...], relabels: bool
) -> None:
    action = decide(of, never, allow_nonfinite=allowance, relabels=relabels)
    refused = refused_tensors(of.target.nonfinite, allowance)
    assert (action == "wait") == of.in_flight
    if action == "current":
        assert of.known is not None and of.known.version == of.target.version and not of.resend
    if action == "relabel":
        assert relabels and not of.resend and not refused
        assert of.known is not None and of.known.sent_digest == of.target.sent_digest
    if action == "push":
        assert not refused
    if action == "refuse":
        assert refused


@given(situations, st.booleans())
def test_whoever_is_not_at_its_target_is_brought_there_when_nothing_hinders(
    of: Situation, relabels: bool
) -> None:
    action = decide(of, never, allow_nonfinite=True, relabels=relabels)
    if not of.in_flight and (of.known is None or of.known.version != of.target.version):
        assert action in ("push", "relabel")

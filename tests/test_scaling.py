"""The scaling model says what it should, and docs/design/scaling.md says what the model says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.benchmarks.results import Limit, Result
from tests.benchmarks.scaling import fitting, model, page
from tests.benchmarks.scaling.model import Constants, Prediction, Site, predict
from tests.benchmarks.setting import GB, KB, MB

PAGE = Path(__file__).parent.parent / "docs" / "design" / "scaling.md"

CONSTANTS = Constants(
    begin=1e-3,
    pack_rate=4e9,
    hash_rate=3e9,
    scan_rate=10e9,
    put_fixed=0.5e-3,
    put_rate=4e9,
    prepare_rate=1e9,
    open=2e-3,
    intend=10e-6,
    send=100e-6,
    file_fixed=3e-3,
    file_rate=1e9,
    round_trip=2e-3,
    driver_work=300e-6,
    worker_work=700e-6,
    copy_rate=4e9,
    pull_fixed=5e-3,
    pull_rate=1e9,
    pull_work=2e-3,
    serve_rate=2e9,
    take=50e-6,
    record=20e-6,
    close=2e-3,
)
SITE = page.ASSUMED
ONE_MACHINE = Site(cores=2, memory_rate=5e9, bandwidth=1e9, latency=0.0, store=1e9, shared=True)

sites = st.sampled_from([SITE, model.with_network(SITE, 100), ONE_MACHINE])
nodes = st.integers(1, 64)
workers = st.integers(1, 64)
sizes = st.sampled_from([KB, 64 * KB, MB, 16 * MB, 256 * MB, GB])


@given(sites, nodes, workers, sizes, st.integers(1, 16))
def test_more_workers_never_make_an_update_faster(
    site: Site, nodes: int, workers: int, nbytes: int, more: int
) -> None:
    fewer = predict(CONSTANTS, site, nodes, workers, nbytes)
    assert predict(CONSTANTS, site, nodes, workers + more, nbytes).seconds >= fewer.seconds


@given(sites, nodes, workers, sizes, st.integers(1, 16))
def test_more_nodes_never_make_an_update_faster(
    site: Site, nodes: int, workers: int, nbytes: int, more: int
) -> None:
    fewer = predict(CONSTANTS, site, nodes, workers, nbytes)
    assert predict(CONSTANTS, site, nodes + more, workers, nbytes).seconds >= fewer.seconds


@given(sites, nodes, workers, st.integers(16, 2000), st.integers(1, 1000))
def test_more_bytes_never_make_an_update_faster(
    site: Site, nodes: int, workers: int, megabytes: int, more: int
) -> None:
    # From where all threads are at work; below, the next thread that sets in may gain more than the bytes cost.
    fewer = predict(CONSTANTS, site, nodes, workers, megabytes * MB)
    assert predict(CONSTANTS, site, nodes, workers, (megabytes + more) * MB).seconds >= fewer.seconds


@given(sites, nodes, workers, sizes)
def test_an_update_takes_as_long_as_the_slower_of_file_and_receipts_and_what_surrounds_them(
    site: Site, nodes: int, workers: int, nbytes: int
) -> None:
    found = predict(CONSTANTS, site, nodes, workers, nbytes)
    overlapping = {"file": found.file, "receipts": found.receipts}
    assert found.seconds == pytest.approx(found.before + overlapping[found.longest] + found.recording)
    assert overlapping[found.longest] == max(overlapping.values())
    assert min(found.file, found.receipts) >= found.sends * (1 - 1e-12)


@given(st.integers(2, 64), workers, sizes)
def test_with_a_boundless_network_another_node_costs_what_its_workers_cost(
    nodes: int, workers: int, nbytes: int
) -> None:
    boundless = replace(
        SITE, bandwidth=float("inf"), latency=0.0, cores=float("inf"), memory_rate=float("inf")
    )
    quick = replace(CONSTANTS, pull_fixed=0.0, pull_rate=float("inf"), serve_rate=float("inf"))
    spread = predict(quick, boundless, nodes, workers, nbytes)
    together = predict(quick, boundless, 1, nodes * workers, nbytes)
    assert spread.seconds == pytest.approx(together.seconds)


def test_one_node_alone_fetches_nothing_and_does_not_see_the_network() -> None:
    found = predict(CONSTANTS, SITE, 1, 4, GB)
    assert found.pull == 0.0
    assert predict(CONSTANTS, replace(SITE, bandwidth=1.0, latency=10.0), 1, 4, GB) == found


def test_the_learners_network_card_is_shared_by_all_nodes_that_fetch() -> None:
    def fetching(nodes: int) -> float:
        return predict(CONSTANTS, SITE, nodes, 1, GB).pull

    assert fetching(33) - fetching(17) == pytest.approx(16 * GB / SITE.bandwidth, rel=1e-6)


def test_a_faster_network_than_rays_sender_helps_no_further() -> None:
    sender = SITE.sending_threads() * CONSTANTS.serve_rate
    enough, plenty = (replace(SITE, bandwidth=times * sender) for times in (1, 100))
    assert predict(CONSTANTS, enough, 64, 4, GB) == predict(CONSTANTS, plenty, 64, 4, GB)


def test_small_weights_go_inside_the_calls_and_are_fetched_by_nobody() -> None:
    assert predict(CONSTANTS, SITE, 4, 4, model.INLINE_BYTES).pull == 0.0
    assert predict(CONSTANTS, SITE, 4, 4, model.INLINE_BYTES + 1).pull > CONSTANTS.pull_fixed


def test_the_bounds_between_small_and_large_weights_are_those_of_the_library() -> None:
    from weightledger.registry.store import publishing
    from weightledger.registry.weights.digest import threads_for
    from weightledger.updater.transports import ray_actors

    assert model.INLINE_BYTES == ray_actors.INLINE_BYTES
    assert model.ASIDE_BYTES == publishing.INLINE_BYTES
    assert threads_for(model.THREADS_BYTES - 1) == 1 < threads_for(model.THREADS_BYTES)


def test_a_slow_disk_is_waited_for_and_a_fast_one_is_not_noticed() -> None:
    slow = predict(replace(CONSTANTS, file_rate=0.1e9), SITE, 2, 4, 256 * MB)
    assert slow.longest == "file"
    fast, faster = (predict(replace(CONSTANTS, file_rate=rate), SITE, 2, 4, 256 * MB) for rate in (9e9, 90e9))
    assert fast.longest == "receipts"
    assert fast.seconds == faster.seconds


def test_on_one_machine_the_work_of_all_nodes_adds_up() -> None:
    few, many = (predict(CONSTANTS, ONE_MACHINE, count, 4, 256 * MB) for count in (4, 8))
    copies, moved = 16 * 256 * MB / ONE_MACHINE.memory_rate, 4 * 256 * MB / ONE_MACHINE.bandwidth
    assert many.receipts - few.receipts == pytest.approx(copies + moved, rel=0.05)


# ---------------------------------------------------------------------- where it ends


@given(st.floats(0.01, 100))
def test_as_many_workers_as_fit_into_a_time_are_recorded_in_it_and_one_more_is_not(seconds: float) -> None:
    def takes(count: int) -> float:
        each = CONSTANTS.intend + CONSTANTS.send + CONSTANTS.take + CONSTANTS.record
        return CONSTANTS.open + CONSTANTS.close + count * each

    count = model.workers_within(CONSTANTS, seconds)
    assert takes(count) <= seconds * (1 + 1e-9)
    assert takes(count + 1) >= seconds * (1 - 1e-9)


def test_as_many_nodes_as_are_confirmed_in_a_time_are_predicted_to_be() -> None:
    count = model.nodes_confirmed_within(CONSTANTS, SITE, 16, GB, 60.0)
    assert 1 < count < 1000
    assert predict(CONSTANTS, SITE, count, 16, GB).seconds <= 60.0
    assert predict(CONSTANTS, SITE, count + 1, 16, GB).seconds > 60.0


def test_nobody_is_confirmed_in_no_time() -> None:
    assert model.nodes_confirmed_within(CONSTANTS, SITE, 16, GB, 0.0) == 0
    assert model.workers_within(CONSTANTS, 0.0) == 0


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 8, 1000])
def test_the_largest_number_is_found_wherever_it_is(limit: int) -> None:
    assert model.most(lambda count: count <= limit) == limit


def test_a_search_without_an_end_ends() -> None:
    assert model.most(lambda _: True, up_to=64) >= 64


def test_every_pinned_version_takes_room_from_the_others() -> None:
    assert model.bytes_that_fit(SITE) == SITE.store / 2
    assert model.bytes_that_fit(SITE, 3) < model.bytes_that_fit(SITE, 2)


# ---------------------------------------------------------------------- the constants


def timeline(
    workers: int, nbytes: int, constants: Constants, *, ready: float = 0.0, work: float = 0.0
) -> fitting.Timeline:
    """The stages of an update of workers on the learner's node that takes exactly what the constants say."""
    sending = ready + constants.open + workers * constants.intend
    sent = sending + workers * constants.send
    arrived = sending + constants.round_trip + nbytes / constants.copy_rate
    taken = arrived + workers * constants.take
    ended = taken + constants.close + workers * constants.record
    return fitting.Timeline(
        began=0.0,
        ready=ready,
        sending=sending,
        sent=sent,
        durable=sent,
        arrived=arrived,
        taken=taken,
        ended=ended,
        ready_work=work,
        sending_work=workers * constants.send,
        work=workers * constants.driver_work,
    )


def measured(constants: Constants) -> fitting.Measured:
    sizes = small, _ = 256 * KB, 64 * MB

    def by_size(rate: float, fixed: float = 0.0) -> dict[int, float]:
        return {size: fixed + size / rate for size in sizes}

    parts = fitting.Parts(
        pack=by_size(constants.pack_rate),
        hash=by_size(constants.hash_rate),
        scan=by_size(constants.scan_rate),
        put=by_size(constants.put_rate, constants.put_fixed),
        file=by_size(constants.file_rate, constants.file_fixed),
    )
    steps = parts.pack[small] + parts.hash[small] + parts.scan[small] + parts.put[small]
    work = {size: size / constants.pack_rate + size / constants.prepare_rate for size in sizes}
    pull = by_size(constants.pull_rate, constants.pull_fixed)
    return fitting.Measured(
        cores=2,
        parts=parts,
        fakes={count: [timeline(count, 0, constants)] for count in (64, 1024)},
        updates={
            size: [timeline(1, size, constants, ready=constants.begin + steps, work=work[size])]
            for size in sizes
        },
        syncs={(size, count): [timeline(count, size, constants)] for size in sizes for count in (1, 8)},
        worker_work=constants.worker_work,
        pulls=fitting.Pulls(
            one=pull,
            every={size: 2 * seconds for size, seconds in pull.items()},
            nodes=2,
            serve=1 / constants.serve_rate,
            work=constants.pull_work,
        ),
    )


def test_the_constants_of_a_machine_that_takes_exactly_these_times_are_found_again() -> None:
    found = fitting.fit(measured(CONSTANTS))
    for number in model.numbers_of(Constants):
        assert getattr(found, number.name) == pytest.approx(getattr(CONSTANTS, number.name), rel=1e-6), number


def test_a_machine_is_a_place_where_all_workers_and_all_nodes_share() -> None:
    here = fitting.fit_site(measured(CONSTANTS), 1e9)
    assert (here.cores, here.shared) == (2, True)
    assert here.memory_rate == pytest.approx(8 * CONSTANTS.copy_rate)
    assert here.bandwidth == pytest.approx(CONSTANTS.pull_rate)


def test_noise_that_eats_a_difference_makes_no_negative_constant() -> None:
    assert fitting.rate({MB: 0.5, 64 * MB: 0.4}) == 64 * MB / 0.4
    assert fitting.rate({MB: 0.5}) == MB / 0.5
    assert fitting.fixed({MB: 0.5, 64 * MB: 0.4}) > 0
    assert fitting.fixed({MB: 1e-6, 64 * MB: 0.4}) == 0
    assert fitting.slope({1: 0.5, 8: 0.4}) == 0


# ---------------------------------------------------------------------- the page


def test_constants_come_back_from_the_table_that_shows_them() -> None:
    shown = model.to_shown(CONSTANTS)
    table = page.constants_table(CONSTANTS)
    text = f"<!-- scaling: constants -->\n\n{table}\n\n<!-- end of constants -->"
    assert model.to_shown(page.read_constants(text)) == shown


def test_a_measurement_gives_every_table_of_the_page() -> None:
    results = [
        Result("scaling", number.name, "constant", [model.to_shown(numbers)[number.name]], unit=number.unit)
        for numbers in (CONSTANTS, ONE_MACHINE)
        for number in model.numbers_of(type(numbers))
    ]
    limits = [Limit(1.5, "predicted", "factor")]
    results += [
        Result("scaling", name, "measured", [seconds], {"predicted": [1.0]}, limits)
        for name, seconds in (("slow", 1.6), ("right", 1.2), ("fast", 0.6))
    ]
    found = page.findings(results)
    assert model.to_shown(found.constants) == model.to_shown(CONSTANTS)
    assert found.here.shared
    table = page.check_table(found.checked)
    assert "| slow | 1 s | 1.6 s | 1.60 (1.60–1.60) | **no** |" in table
    assert "1 of 3 cases are within a factor 1.5 of the prediction." in table


def test_a_measurement_that_ended_early_gives_no_page() -> None:
    with pytest.raises(KeyError):
        page.findings([])


def test_the_pages_tables_are_what_the_model_gives_for_the_pages_constants() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for name, table in page.derived_blocks(page.read_constants(text)).items():
        assert page.block(text, name) == table, (
            "python -m tests.benchmarks.scaling --write brings it up to date"
        )


def test_a_page_without_its_markers_is_refused() -> None:
    with pytest.raises(ValueError, match="expected one block 'check' in the page, found 0"):
        page.replace_blocks("no markers", {"check": "table"})


def test_predictions_show_where_the_time_goes() -> None:
    found = predict(CONSTANTS, SITE, 16, 4, GB)
    assert isinstance(found, Prediction)
    assert found.before == pytest.approx(found.begin + found.pack + found.ready + found.intentions)
    assert 0 < found.pull < found.receipts < found.seconds

"""What runs inside a worker, on plain objects in this process: orders, locks, where the note is kept, never raising."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from ray import cloudpickle
from torch import nn

from weightledger.registry.weights import codec
from weightledger.registry.weights.live import live_digest
from weightledger.registry.weights.packing import Packer
from weightledger.updater import acting, held_version
from weightledger.updater.in_worker.receiver import receive
from weightledger.updater.messages import Inspection, Probe, Push, Receipt, Seen

SERIES = ("registry", "default")


class Worker:
    def __init__(self, policy: Any = None) -> None:
        self.policy: Any = constant(-1.0) if policy is None else policy


def constant(value: float, width: int = 3) -> nn.Linear:
    module = nn.Linear(width, 2)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(value)
    return module


def packed(weights: Any) -> tuple[np.ndarray[Any, Any], str, dict[str, Any]]:
    """Return weights as they travel: read-only, as an object store gives them."""
    content = codec.flatten(weights)
    payload = Packer().pack(content, policy="default", step=None)
    payload.hash()
    buffer = payload.buffer.copy()
    buffer.flags.writeable = False
    return buffer, payload.digest, content.structure


def send(
    worker: Any, weights: Any, order: int, *, version: int | None = None, bare: bool = False, **rest: Any
) -> Receipt:
    buffer, digest, structure = packed(weights)
    push = Push(
        series=rest.pop("series", SERIES),
        run=rest.pop("run", "run"),
        version=order if version is None else version,
        digest=digest,
        sent_digest=rest.pop("sent_digest", digest),
        order=order,
        nbytes=buffer.nbytes,
        locate=rest.pop("locate", "policy"),
        structure=structure,
        patience=rest.pop("patience", 30.0),
        registry=rest.pop("registry", "there"),
        **rest,
    )
    receipt = receive(worker, push, None if bare else buffer)
    assert isinstance(receipt, Receipt)
    assert pickle.loads(pickle.dumps(receipt)) == receipt
    return receipt


def probe(worker: Any, **rest: Any) -> Inspection:
    inspection = receive(
        worker, Probe(SERIES, rest.pop("locate", "policy"), None, rest.pop("patience", 30.0))
    )
    assert isinstance(inspection, Inspection)
    return inspection


def in_thread(call: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(call()), daemon=True)
    thread.start()
    return thread, answers


def test_a_push_is_copied_in_place_and_answered_with_what_is_held() -> None:
    worker = Worker()
    weight = worker.policy.weight
    receipt = send(worker, constant(1.0), 1)
    assert receipt.outcome == "applied" and receipt.before is None
    assert receipt.now is not None and receipt.now.sent_digest == live_digest(worker.policy)[0]
    assert worker.policy.weight is weight and held_version(worker) == 1


def test_an_order_that_is_not_higher_changes_nothing() -> None:
    """RAY-05 and RL-16: what came later counts, whatever its version's number is."""
    worker = Worker()
    send(worker, constant(2.0), 7, version=9)
    late = send(worker, constant(1.0), 6, version=10)
    assert late.outcome == "stale" and late.now == late.before
    assert (held_version(worker), float(worker.policy.weight.flatten()[0].item())) == (9, 2.0)
    back = send(worker, constant(1.0), 8, version=5)
    assert back.outcome == "applied" and held_version(worker) == 5


def test_the_same_push_delivered_twice_gets_the_same_answer() -> None:
    worker = Worker()
    first = send(worker, constant(1.0), 1)
    again = send(worker, constant(1.0), 1)
    assert (again.outcome, again.now) == ("applied", first.now)
    with torch.no_grad():
        worker.policy.weight.zero_()
    third = send(worker, constant(1.0), 1)
    assert (third.outcome, third.now) == ("stale", None) and "somebody wrote" in third.overwritten
    assert not worker.policy.weight.any(), "a repeated delivery copies nothing"


@pytest.mark.parametrize("other", [{"version": 7}, {"run": "other"}, {"value": 2.0}])
def test_an_order_that_comes_again_with_other_content_or_of_another_run_is_no_repeated_delivery(
    other: dict[str, Any],
) -> None:
    worker = Worker()
    send(worker, constant(1.0), 1, version=1)
    again = send(worker, constant(other.pop("value", 1.0)), 1, **{"version": 1} | other)  # pyright: ignore[reportArgumentType]
    assert again.outcome == "stale" and again.last == Seen(1, "run", "there")
    assert float(worker.policy.weight.flatten()[0].item()) == 1.0 and held_version(worker) == 1


def test_an_order_that_failed_is_not_carried_out_later() -> None:
    worker = Worker()
    assert send(worker, constant(1.0, width=4), 3).outcome == "kept"
    assert send(worker, constant(1.0), 2).outcome == "stale"


@pytest.mark.parametrize(
    "weights", [constant(1.0, width=4), nn.Linear(3, 2, bias=False), {"weight": torch.ones(2, 3)}]
)
def test_weights_that_do_not_fit_change_nothing(weights: Any) -> None:
    """RL-10: the worker goes on with what it held, and says so."""
    worker = Worker()
    send(worker, constant(1.0), 1)
    before = live_digest(worker.policy)[0]
    receipt = send(worker, weights, 2)
    assert receipt.outcome == "kept" and receipt.now == receipt.before
    assert "InvalidWeightsError" in receipt.error and ("weight" in receipt.error or "bias" in receipt.error)
    assert live_digest(worker.policy)[0] == before and held_version(worker) == 1


def test_bytes_that_were_cut_short_change_nothing() -> None:
    worker = Worker()
    buffer, digest, _ = packed(constant(1.0))
    push = Push(SERIES, "run", 1, digest, digest, 1, buffer.nbytes, "policy")
    receipt = receive(worker, push, buffer[:-4])
    assert isinstance(receipt, Receipt)
    assert (
        receipt.outcome == "kept"
        and str(buffer.nbytes) in receipt.error
        and str(buffer.nbytes - 4) in receipt.error
    )
    assert held_version(worker) is None


def test_a_worker_is_relabelled_only_if_it_holds_that_content() -> None:
    worker = Worker()
    assert send(worker, constant(1.0), 1, bare=True).outcome == "bytes_wanted"
    send(worker, constant(1.0), 2)
    assert send(worker, constant(1.0), 3, version=9, bare=True).outcome == "relabelled"
    assert held_version(worker) == 9
    assert send(worker, constant(2.0), 4, bare=True).outcome == "bytes_wanted"
    assert held_version(worker) == 9


def test_what_was_cast_is_named_and_held_under_another_digest() -> None:
    """TO-06: a worker's rounded weights are not reported as the version's."""
    worker = Worker(constant(-1.0).half())
    assert send(worker, constant(0.1), 1).outcome == "kept"
    receipt = send(worker, constant(0.1), 2, cast=True)
    assert receipt.now is not None and receipt.now.cast == ("bias", "weight")
    assert receipt.now.sent_digest == live_digest(worker.policy)[0] != receipt.now.digest


@pytest.mark.parametrize(
    ("locate", "named"),
    [("nothing", "nothing"), ("policy.inner.deep", "inner"), (lambda worker: worker.nowhere, "nowhere")],
)
def test_a_policy_that_is_not_there_is_a_receipt_that_says_where_it_was_looked_for(
    locate: Any, named: str
) -> None:
    worker = Worker()
    receipt = send(worker, constant(1.0), 1, locate=locate)
    assert receipt.outcome == "kept" and named in receipt.error
    assert named in probe(worker, locate=locate).error


def test_locate_may_be_dotted_or_a_callable() -> None:
    worker = Worker(nn.ModuleDict({"actor": constant(-1.0)}))
    assert send(worker, constant(1.0), 1, locate="policy.actor").outcome == "applied"
    assert send(worker, constant(2.0), 2, locate=lambda it: it.policy["actor"]).outcome == "applied"
    assert float(worker.policy["actor"].weight.flatten()[0].item()) == 2.0


def test_a_state_dict_or_mapping_in_the_worker_is_written_in_place() -> None:
    held = {"weight": torch.zeros(2, 3), "bias": torch.zeros(2)}
    worker = Worker(held)
    send(worker, constant(1.0), 1)
    assert worker.policy is held and bool((held["weight"] == 1).all())


def test_apply_gets_own_writable_tensors_in_the_kind_that_was_published() -> None:
    """RAY-11: the bytes that other workers read stay what they are."""
    taken: list[tuple[Any, int]] = []

    def load(worker: Worker, weights: Any, version: int) -> None:
        worker.policy.load_state_dict(weights)
        weights["weight"].add_(1)
        taken.append((weights, version))

    worker = Worker()
    buffer, digest, structure = packed(constant(1.0))
    untouched = buffer.copy()
    push = Push(
        SERIES, "run", 4, digest, digest, 1, buffer.nbytes, "nowhere", apply=load, structure=structure
    )
    receipt = receive(worker, push, buffer)
    assert isinstance(receipt, Receipt) and receipt.outcome == "applied"
    assert np.array_equal(buffer, untouched)
    assert taken[0][1] == 4 and list(taken[0][0]) == ["weight", "bias"]
    assert float(worker.policy.weight.flatten()[0].item()) == 1.0 and held_version(worker) == 4


@pytest.mark.parametrize("answer", [False, {"ok": False}])
def test_an_apply_that_answers_no_is_no_confirmation(answer: Any) -> None:
    """RAY-07: a failure that comes back as a value counts as one."""
    worker = Worker()
    send(worker, constant(1.0), 1)
    receipt = send(worker, constant(2.0), 2, apply=lambda *_: answer)
    assert receipt.outcome == "broken" and receipt.now is None and repr(answer) in receipt.error
    assert held_version(worker) is None


@pytest.mark.parametrize("answer", [None, True, {"ok": True}, 3])
def test_an_apply_that_answers_anything_else_is_taken_at_its_word(answer: Any) -> None:
    assert send(Worker(), constant(2.0), 2, apply=lambda *_: answer).outcome == "applied"


class UnspeakableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize("error", [RuntimeError("boom"), UnspeakableError(), MemoryError(), StopIteration()])
def test_an_apply_that_raises_leaves_the_worker_unknown_and_the_next_push_works(error: Exception) -> None:
    """RL-18: no lock and no half state blocks what comes next."""

    def load(*_: object) -> None:
        raise error

    worker = Worker()
    send(worker, constant(1.0), 1)
    receipt = send(worker, constant(2.0), 2, apply=load)
    assert receipt.outcome == "broken" and type(error).__name__ in receipt.error
    assert receipt.now is None and receipt.before is not None and held_version(worker) is None
    assert send(worker, constant(2.0), 3).outcome == "applied"


class Slotted:
    __slots__ = ("policy",)

    def __init__(self) -> None:
        self.policy = constant(-1.0)


class Frozen:
    def __init__(self) -> None:
        object.__setattr__(self, "policy", constant(-1.0))

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("frozen")


class Proxy:
    """Answers to every name, as handles and mocks do."""

    def __init__(self) -> None:
        self.policy = constant(-1.0)

    def __getattr__(self, name: str) -> Any:
        return self


@pytest.mark.parametrize("make", [Slotted, Frozen, Proxy, lambda: nn.ModuleDict({"policy": constant(-1.0)})])
def test_any_kind_of_object_can_be_a_worker(make: Callable[[], Any]) -> None:
    workers = [make() for _ in range(3)]
    for order, worker in enumerate(workers, start=1):
        where: Any = (lambda it: it["policy"]) if isinstance(worker, nn.ModuleDict) else "policy"
        assert send(worker, constant(float(order)), order, locate=where).outcome == "applied"
    assert [held_version(worker) for worker in workers] == [1, 2, 3]


def test_a_note_on_a_module_is_no_part_of_its_state() -> None:
    worker = nn.ModuleDict({"policy": constant(-1.0)})
    names = list(worker.state_dict())
    send(worker, constant(1.0), 1, locate=lambda it: it["policy"])
    assert list(worker.state_dict()) == names and len(list(worker.modules())) == 2


def test_a_policy_that_the_worker_replaced_is_not_kept_alive() -> None:
    worker = Worker()
    send(worker, constant(1.0), 1)
    former = weakref.ref(worker.policy)
    worker.policy = constant(-1.0)
    send(worker, constant(2.0), 2)
    gc.collect()
    assert former() is None
    assert float(worker.policy.weight.flatten()[0].item()) == 2.0


def test_series_do_not_touch_each_other() -> None:
    """RL-19: what is held is known for each policy and registry by itself."""
    worker = Worker()
    worker.opponent = constant(-1.0)  # type: ignore[attr-defined]
    main, other = ("registry", "main"), ("registry", "opponent")
    send(worker, constant(1.0), 5, series=main)
    send(worker, constant(2.0), 3, version=1, series=other, locate="opponent")
    assert (held_version(worker, "main"), held_version(worker, "opponent")) == (5, 1)
    assert float(worker.policy.weight.flatten()[0].item()) == 1.0
    with pytest.raises(ValueError, match=r"'main'.*'opponent'.*policy="):
        held_version(worker)
    with acting(worker, "opponent") as version:
        assert version == 1


def test_the_same_policy_name_in_two_registries_is_two_series() -> None:
    worker = Worker()
    send(worker, constant(1.0), 5, series=("one", "default"))
    assert send(worker, constant(2.0), 1, series=("two", "default")).outcome == "applied"
    assert held_version(worker) == held_version(worker, "default") == 1, (
        "of two registries the last push counts"
    )
    assert send(worker, constant(3.0), 6, series=("one", "default")).outcome == "applied"
    assert held_version(worker) == 6


def saved_and_loaded(worker: Worker) -> Worker:
    saved = io.BytesIO()
    torch.save(worker.__dict__, saved)
    saved.seek(0)
    restored = Worker()
    restored.__dict__.update(torch.load(saved, weights_only=False))
    return restored


@pytest.mark.parametrize(
    "copying",
    [
        copy.copy,
        copy.deepcopy,
        lambda worker: pickle.loads(pickle.dumps(worker)),
        lambda worker: cloudpickle.loads(cloudpickle.dumps(worker)),  # pyright: ignore[reportPrivateImportUsage]
        saved_and_loaded,
    ],
)
def test_a_copy_of_a_worker_holds_nothing_known_and_saving_one_saves_nothing_of_ours(
    copying: Callable[[Worker], Worker],
) -> None:
    """A worker's own checkpoint is its own: all of it can be pickled, and none of it needs this library."""
    worker = Worker()
    before = set(vars(worker))
    send(worker, constant(1.0), 5)
    with acting(worker):
        assert set(vars(worker)) == before
        twin = copying(worker)
    assert held_version(twin) is None and held_version(worker) == 5
    assert torch.equal(twin.policy.weight, worker.policy.weight)
    assert send(twin, constant(2.0), 1).outcome == "applied", "orders are the original's"
    shared = twin.policy is worker.policy
    assert (held_version(twin), held_version(worker)) == (1, None if shared else 5)


def test_what_is_known_of_a_worker_goes_with_it() -> None:
    worker = Worker()
    send(worker, constant(1.0), 1)
    policy = weakref.ref(worker.policy)
    del worker
    gc.collect()
    assert policy() is None


def test_nothing_is_held_before_the_first_push() -> None:
    worker = Worker()
    assert held_version(worker) is None and held_version(worker, "main") is None
    with acting(worker) as version:
        assert version is None


def test_a_push_waits_for_everybody_who_acts() -> None:
    worker = Worker()
    send(worker, constant(1.0), 1)
    with acting(worker) as version, acting(worker):
        thread, answers = in_thread(lambda: send(worker, constant(2.0), 2))
        thread.join(0.1)
        assert thread.is_alive() and version == held_version(worker) == 1
        assert float(worker.policy.weight.flatten()[0].item()) == 1.0
    thread.join(30)
    assert answers[0].outcome == "applied" and held_version(worker) == 2


def test_an_exception_in_a_rollout_lets_pushes_in_again() -> None:
    worker = Worker()
    with pytest.raises(ZeroDivisionError), acting(worker):
        raise ZeroDivisionError
    assert send(worker, constant(1.0), 1, patience=0.0).outcome == "applied"


def test_a_worker_that_never_stops_acting_says_so_and_keeps_its_weights() -> None:
    worker = Worker()
    send(worker, constant(1.0), 1)
    with acting(worker):
        receipt = send(worker, constant(2.0), 2, patience=0.02)
        inspection = probe(worker, patience=0.02)
    assert receipt.outcome == "busy" and "acting" in receipt.error and receipt.now == send_note(worker)
    assert inspection.note == send_note(worker) and inspection.digest is None and "acting" in inspection.error


def send_note(worker: Worker) -> Any:
    return probe(worker).note


def test_no_rollout_ever_sees_a_mix_of_two_versions() -> None:
    """RL-07: layers of one value each, pushed from several threads at once."""
    layers = nn.Sequential(*[constant(0.0, width=2) for _ in range(20)])
    worker = Worker(layers)
    versions = [nn.Sequential(*[constant(float(value), width=2) for _ in range(20)]) for value in (1, 2)]
    send(worker, versions[0], 1)
    pushes = [packed(each) for each in versions]
    orders = iter(range(2, 10_000))
    mixes: list[Any] = []
    running = threading.Event()

    def push_on() -> None:
        for _ in range(60):
            order = next(orders)
            buffer, digest, _ = pushes[order % 2]
            receive(
                worker, Push(SERIES, "run", order % 2, digest, digest, order, buffer.nbytes, "policy"), buffer
            )

    def act_on() -> None:
        while not running.is_set():
            with acting(worker) as version:
                seen = {float(value) for tensor in layers.state_dict().values() for value in tensor.flatten()}
                if len(seen) != 1 or (held_version(worker) or 0) != version:
                    mixes.append((version, seen))

    actors = [in_thread(act_on)[0] for _ in range(2)]
    pushers = [in_thread(push_on)[0] for _ in range(2)]
    for thread in pushers:
        thread.join(60)
    running.set()
    for thread in actors:
        thread.join(60)
    assert not mixes and not any(thread.is_alive() for thread in (*pushers, *actors))


def test_of_pushes_that_race_the_highest_order_is_held_in_the_end() -> None:
    """RAY-05: check, copy and note are one step."""
    worker = Worker()
    pushes = [(order, packed(constant(float(order)))) for order in range(1, 9)]
    start = threading.Barrier(len(pushes))

    def deliver(order: int, parts: tuple[Any, str, Any]) -> Any:
        start.wait(30)
        buffer, digest, _ = parts
        return receive(
            worker, Push(SERIES, "run", order, digest, digest, order, buffer.nbytes, "policy"), buffer
        )

    threads = [
        in_thread(lambda order=order, parts=parts: deliver(order, parts))[0] for order, parts in pushes
    ]
    for thread in threads:
        thread.join(60)
    assert held_version(worker) == 8 and float(worker.policy.weight.flatten()[0].item()) == 8.0


def test_a_probe_hashes_what_is_really_there() -> None:
    """RAY-18: the note says one thing, the module another."""
    worker = Worker()
    send(worker, constant(1.0), 1)
    worker.policy = constant(5.0)
    found = probe(worker)
    assert found.note is not None and found.note.version == 1 and found.last_order == 1
    assert found.digest == live_digest(constant(5.0))[0] != found.note.sent_digest


def test_a_probe_of_a_worker_that_was_never_pushed_to_changes_nothing() -> None:
    worker = Worker()
    found = probe(worker)
    assert found.note is None and found.last_order == 0 and found.digest == live_digest(worker.policy)[0]


def test_a_meta_module_is_a_clear_receipt() -> None:
    """RL-17: there is no memory to copy into."""
    receipt = send(Worker(nn.Linear(3, 2, device="meta")), constant(1.0), 1)
    assert receipt.outcome == "kept" and "meta" in receipt.error and "weight" in receipt.error


def test_a_lazy_module_is_a_clear_receipt() -> None:
    """TO-08: an uninitialised parameter has no shape yet."""
    receipt = send(Worker(nn.LazyLinear(2)), constant(1.0), 1)
    assert receipt.outcome == "kept" and "weight" in receipt.error


def test_a_push_does_not_say_what_it_is_not_told() -> None:
    push = Push(SERIES, "run", 1, "d", "d", 1, 8, "policy", structure={"secret": 1})
    assert "secret" not in repr(push) and replace(push, order=2).order == 2


def test_an_order_seen_before_with_another_version_is_no_repetition() -> None:
    worker = Worker()
    assert send(worker, constant(1.0), 5, version=1).outcome == "applied"
    assert send(worker, constant(1.0), 5, version=1).outcome == "applied"
    assert send(worker, constant(2.0), 5, version=2).outcome == "stale"
    assert held_version(worker) == 1

"""The model: from constants of one machine to the time of an update on N nodes with M workers each. Pure.

The order of the phases is that of `updater/update.py`; docs/design/scaling.md explains it in words. Times are seconds,
sizes bytes, rates bytes a second, work core-seconds. The first node is the learner's; it has M workers, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

INLINE_BYTES = 96 << 10
"""Up to so many bytes go inside the call: nothing is put into the object store, nothing is pulled."""
ASIDE_BYTES = 4 << 20
"""From here on the file is written, and the object put, in threads beside the hash."""
THREADS_BYTES = 64 << 20
"""From here on several threads hash."""
HASH_THREADS = 4
RETRY = 10.0
"""Seconds after which a Ray node asks again for an object that it has not got, of any node that has it by then."""

UNITS = {"ms": 1e-3, "µs": 1e-6, "GB/s": 1e9, "Gbit/s": 1e9 / 8, "GB": 1e9, "cores": 1.0}
"""How much of seconds, bytes or bytes a second each unit is."""


def _constant(unit: str, meaning: str) -> Any:
    return field(metadata={"unit": unit, "meaning": meaning})


@dataclass(frozen=True)
class Constants:
    """What one machine was measured to take."""

    begin: float = _constant(
        "ms", "before anything is copied or sent: look at the head, lock, ask the log, plan"
    )
    pack_rate: float = _constant("GB/s", "copying live tensors into the buffer")
    hash_rate: float = _constant("GB/s", "hashing, one core")
    scan_rate: float = _constant("GB/s", "looking for NaN and infinity")
    put_fixed: float = _constant("ms", "one put into the object store, whatever its size")
    put_rate: float = _constant("GB/s", "copying into the object store")
    prepare_rate: float = _constant(
        "GB/s", "one core's share of hashing, looking through, putting and writing large weights at once"
    )
    open: float = _constant("ms", "the transaction before the pushes, made durable, without its rows")
    intend: float = _constant("µs", "one worker's row in it, and its plan")
    send: float = _constant("µs", "sending one push: core's time of the updater's thread")
    file_fixed: float = _constant("ms", "making a file durable, whatever its size: sync, name, folder")
    file_rate: float = _constant("GB/s", "writing the file")
    round_trip: float = _constant(
        "ms", "one push to one idle worker, from its sending to its receipt, without bytes"
    )
    driver_work: float = _constant("ms", "cores' time in the updater's process for one push, all threads")
    worker_work: float = _constant(
        "ms", "cores' time on the worker's node for one push, the worker's and Ray's, without bytes"
    )
    copy_rate: float = _constant("GB/s", "one worker taking the bytes over, alone on the machine")
    pull_fixed: float = _constant("ms", "one node fetching an object from another one, whatever its size")
    pull_rate: float = _constant("GB/s", "one node fetching, alone")
    pull_work: float = _constant("ms", "cores' time of all that take part in one fetch, without bytes")
    serve_rate: float = _constant("GB/s", "one core of Ray's sending object manager")
    take: float = _constant("µs", "unpacking one receipt, in the updater's thread")
    record: float = _constant("µs", "reading one receipt and recording it")
    close: float = _constant("ms", "the last transaction, made durable, without its rows, and the report")


@dataclass(frozen=True)
class Site:
    """Where it runs. Parameters: nothing here is about this library."""

    cores: float = _constant("cores", "cores of a node with nothing else to do")
    memory_rate: float = _constant("GB/s", "copying by all workers of a node together")
    bandwidth: float = _constant("Gbit/s", "network card of a node, each way")
    latency: float = _constant("ms", "network, one way")
    store: float = _constant("GB", "object store of a node")
    shared: bool = False
    """All nodes are one machine: its cores, its memory and its loopback device (`bandwidth`) are there once."""

    def sending_threads(self) -> float:
        """Return how many threads Ray's object manager has on a node of so many cores."""
        return min(max(2.0, self.cores // 4), 8.0)

    def egress(self, constants: Constants) -> float:
        """Return the bytes a second that leave a node at most."""
        if self.shared:
            return self.bandwidth
        return min(self.bandwidth, self.sending_threads() * constants.serve_rate)


@dataclass(frozen=True)
class Number:
    """What one number of `Constants` or `Site` is."""

    name: str
    unit: str
    """In which it is shown; what the dataclass holds is seconds, bytes or bytes a second."""
    meaning: str


def numbers_of(kind: type[Constants] | type[Site]) -> list[Number]:
    """Return what the numbers of a kind are, in their order."""
    return [Number(each.name, **each.metadata) for each in fields(kind) if each.metadata]


def to_shown(numbers: Constants | Site) -> dict[str, float]:
    """Return each number in its unit, to the three digits that are shown."""
    return {
        each.name: float(f"{getattr(numbers, each.name) / UNITS[each.unit]:.3g}")
        for each in numbers_of(type(numbers))
    }


def from_shown(kind: type[Constants] | type[Site], shown: Mapping[str, float]) -> dict[str, float]:
    """Return the arguments for a kind, of the numbers that `to_shown` gave.

    Raises:
        KeyError: one is missing.
    """
    return {each.name: shown[each.name] * UNITS[each.unit] for each in numbers_of(kind)}


@dataclass(frozen=True)
class Prediction:
    """The time of one update, and where it goes. Phases overlap, so they do not add up."""

    begin: float
    pack: float
    ready: float
    """Hash, look for NaN, put into the object store: as far as it delays the pushes."""
    intentions: float
    sends: float
    file: float
    """From the first push until the file is durable."""
    pull: float
    """From the first push until the last node has the bytes; 0 when there is nothing to fetch."""
    receipts: float
    """From the first push until all receipts are there and unpacked."""
    recording: float
    seconds: float
    """All of it: from the call until the version is durable and every worker has confirmed."""

    @property
    def before(self) -> float:
        """Seconds until the first push leaves."""
        return self.begin + self.pack + self.ready + self.intentions

    @property
    def longest(self) -> str:
        """Which of the two that overlap the end waits for."""
        return "file" if self.file >= self.receipts else "receipts"


def predict(constants: Constants, site: Site, nodes: int, workers_per_node: int, nbytes: float) -> Prediction:
    """Predict one `update_weights` of changed weights, from the call to the report.

    Args:
        nodes: how many nodes have workers; the learner is on the first.
        nbytes: size of the weights.
    """
    workers = nodes * workers_per_node
    pack = nbytes / constants.pack_rate
    ready = _ready(constants, site, nbytes)
    intentions = constants.open + workers * constants.intend
    sends = workers * constants.send
    pull = _pull(constants, site, nodes, sends, nbytes)
    receipts = _receipts(constants, site, nodes, workers_per_node, nbytes, pull)
    receipts += workers * constants.take
    file = _file(constants, ready + intentions, sends, nbytes)
    recording = constants.close + workers * constants.record
    before = constants.begin + pack + ready + intentions
    return Prediction(
        begin=constants.begin,
        pack=pack,
        ready=ready,
        intentions=intentions,
        sends=sends,
        file=file,
        pull=pull,
        receipts=receipts,
        recording=recording,
        seconds=before + max(file, receipts) + recording,
    )


def _ready(constants: Constants, site: Site, nbytes: float) -> float:
    """The pushes need the digest (in the intentions) and the object."""
    work = nbytes / constants.hash_rate
    scan = nbytes / constants.scan_rate
    put = 0.0 if nbytes <= INLINE_BYTES else constants.put_fixed + nbytes / constants.put_rate
    if nbytes < ASIDE_BYTES:
        return work + scan + put
    threads = min(HASH_THREADS, site.cores) if nbytes >= THREADS_BYTES else 1
    # Several threads share the hashing, and one more looks for NaN beside them.
    walk = work + scan if threads == 1 else (work + scan) / threads
    return max(put, walk, nbytes / constants.prepare_rate / site.cores)


def _file(constants: Constants, since_pack: float, sends: float, nbytes: float) -> float:
    """Seconds from the first push: a large body is begun when it is packed, everything else when pushes are sent."""
    body = nbytes / constants.file_rate
    if nbytes >= ASIDE_BYTES:
        return max(body - since_pack, sends) + constants.file_fixed
    return sends + body + constants.file_fixed


def _pull(constants: Constants, site: Site, nodes: int, sends: float, nbytes: float) -> float:
    """All nodes ask at about the same time, when only the learner's node has the bytes: its sending is shared.

    The last node is asked for when its first push leaves, and takes the bytes no faster than one node can.
    """
    others = nodes - 1
    if not others or nbytes <= INLINE_BYTES:
        return 0.0
    one = nbytes / min(constants.pull_rate, site.egress(constants), site.bandwidth)
    # On one machine nobody's sending is a queue of its own: it is work, and counted as such.
    every = 0.0 if site.shared else others * nbytes / site.egress(constants)
    return constants.pull_fixed + 2 * site.latency + max(every, sends * others / nodes + one)


def _receipts(constants: Constants, site: Site, nodes: int, each: int, nbytes: float, pull: float) -> float:
    workers, others = nodes * each, nodes - 1
    inside = nbytes <= INLINE_BYTES
    # Bytes inside the calls leave the learner's node with them.
    sends = workers * constants.send + (others * each * nbytes / site.bandwidth if inside else 0.0)
    one = constants.round_trip + nbytes / constants.copy_rate + (2 * site.latency if others else 0.0)
    fetched = 0.0 if inside else float(others)

    def handling(count: int) -> float:
        """Core-seconds of so many workers; where memory is slower than the cores, these wait for it."""
        copies = count * nbytes * max(1 / constants.copy_rate, site.cores / site.memory_rate)
        return count * constants.worker_work + copies

    if site.shared:
        # Whatever all nodes do has the same cores, and what crosses between them keeps these busy, too.
        work = workers * constants.driver_work + handling(workers) + fetched * constants.pull_work
        path = max(sends, pull) + one
        return _between(path, work + site.cores * fetched * nbytes / site.bandwidth, site.cores)
    served = fetched * nbytes / constants.serve_rate
    work = workers * constants.driver_work + handling(each) + served
    learner = _between(sends + one, work, site.cores)
    return max(learner, pull + _between(one, handling(each), site.cores)) if others else learner


def _between(path: float, work: float, cores: float) -> float:
    """Return how long so much work takes so many cores, when its longest chain takes `path`.

    At best as long as the longer of chain and work for each core; at worst, with nobody idle while there is work,
    what is beside the chain is done by all cores and the chain by one (Graham's bound). Here the middle of both.
    """
    best = max(path, work / cores)
    worst = max(best, work / cores + path * (1 - 1 / cores))
    return (best + worst) / 2


# ---------------------------------------------------------------------- where it ends


def most(holds: Callable[[int], bool], *, up_to: int = 1 << 24) -> int:
    """Return the largest number for which something holds that, once it fails, never holds again; 0 for none."""
    if not holds(1):
        return 0
    high = 1
    while high < up_to and holds(2 * high):
        high *= 2
    low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def workers_within(constants: Constants, seconds: float) -> int:
    """Return how many workers the one updater can send to, hear and record in so many seconds, bytes apart."""
    each = constants.intend + constants.send + constants.take + constants.record
    return max(0, int((seconds - constants.open - constants.close) / each))


def nodes_within(constants: Constants, site: Site, nbytes: float, seconds: float) -> int:
    """Return how many nodes, the learner's among them, have the bytes after so many seconds of its sending."""
    return 1 + int(seconds * site.egress(constants) / nbytes)


def nodes_confirmed_within(
    constants: Constants, site: Site, workers_per_node: int, nbytes: float, seconds: float
) -> int:
    """Return for how many nodes an update ends in so many seconds."""
    return most(lambda nodes: predict(constants, site, nodes, workers_per_node, nbytes).seconds <= seconds)


def bytes_that_fit(site: Site, versions: int = 2) -> float:
    """Return the size of the largest weights of which so many versions fit into the learner's object store.

    An update holds two: what workers held before is let go at its end. Every version that is pinned is one more.
    """
    return site.store / versions


def with_network(site: Site, gbit: float) -> Site:
    """Return the same place with network cards of so many Gbit/s."""
    return replace(site, bandwidth=gbit * UNITS["Gbit/s"])

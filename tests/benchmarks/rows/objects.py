"""Snapshots in a bucket: what publishing costs beyond the upload, and reading through the cache beyond the disk."""

from __future__ import annotations

import os
import subprocess
import sys
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import obstore
from obstore.store import S3Store

from tests.benchmarks import weights
from tests.benchmarks.contenders import LEDGER
from tests.benchmarks.results import Limit, Result
from tests.benchmarks.setting import KB, MB, Setting, size_name
from tests.benchmarks.timing import Contender, interleave, rounds_for
from weightledger.registry import Registry
from weightledger.registry.log.ledger import FileEntry
from weightledger.registry.store.cache import CachedSnapshots
from weightledger.registry.store.inspection import read_payload
from weightledger.registry.store.local import LocalSnapshots
from weightledger.registry.store.objects import ObjectSnapshots
from weightledger.registry.store.snapshots import SnapshotStore
from weightledger.registry.weights.arrays import page_buffer

PUT = "obstore.put"
FOLDER = "read from a folder"
SIZES = (64 * KB, MB, 16 * MB, 256 * MB)

# An endpoint in a process of its own: it must not share this one's interpreter lock.
_SERVER = """
import logging, sys
from moto.server import ThreadedMotoServer
logging.getLogger("werkzeug").setLevel(logging.ERROR)
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""


def measure(setting: Setting) -> Iterator[Result]:
    with _bucket() as url:
        for size, _ in setting.grid({0: SIZES}, copies=8, copies_per_worker=0):
            learner = weights.make(size)
            with setting.folder() as folder, Registry.open(folder / "registry") as registry:
                store = ObjectSnapshots(f"{url}/{uuid.uuid4().hex}")
                registry.snapshots = store
                contenders = [_publish(registry, store, learner), _put(url, learner)]
                seconds = interleave(contenders, min(8, rounds_for(size, quick=setting.quick)))
            limit = Limit(1.25, PUT) if size >= 16 * MB else Limit(0.02, PUT, "more")
            yield Result(
                "object-store", size_name(size), LEDGER, seconds.pop(LEDGER), seconds, [limit], size=size
            )


def measure_cache(setting: Setting) -> Iterator[Result]:
    for size, _ in setting.grid({0: SIZES}, copies=4, copies_per_worker=0):
        with setting.folder() as folder:
            with Registry.open(folder / "registry") as registry:
                version = registry.publish(weights.make(size))
                far = registry.snapshots
            assert isinstance(far, LocalSnapshots)
            uri = far.uris()[0]
            nbytes = far.size(uri)
            assert nbytes is not None
            file = FileEntry(1, version.digest, uri, nbytes, True)
            near = CachedSnapshots(far, folder / "near")
            contenders = [_read(LEDGER, near, file), _read(FOLDER, far, file)]
            seconds = interleave(contenders, 3 * rounds_for(size, quick=setting.quick))
        limit = Limit(1.1, FOLDER) if size >= MB else Limit(0.0002, FOLDER, "more")
        yield Result("cache", size_name(size), LEDGER, seconds.pop(LEDGER), seconds, [limit], size=size)


def _publish(registry: Registry, store: ObjectSnapshots, learner: Any) -> Contender:
    def check(version: Any, whole: bool) -> None:
        if whole:
            target = weights.make(weights.nbytes(learner))
            registry.restore(version, target)
            assert weights.digest(target) == weights.digest(learner)

    def tidy() -> None:
        for uri in store.uris():
            store.delete(uri)

    return Contender(LEDGER, lambda: registry.publish(learner), lambda: weights.change(learner), check, tidy)


def _put(url: str, learner: Any) -> Contender:
    bucket = S3Store(url.removeprefix("s3://"), client_options={"allow_http": True})
    data = np.empty(weights.nbytes(learner), np.uint8)

    def prepare() -> None:
        data[:] = np.frombuffer(os.urandom(4096) * (data.nbytes // 4096 + 1), np.uint8)[: data.nbytes]

    def check(_: Any, whole: bool) -> None:
        assert obstore.head(bucket, "plain")["size"] == data.nbytes
        if whole:
            assert bytes(obstore.get(bucket, "plain").bytes()) == data.tobytes()

    return Contender(PUT, lambda: obstore.put(bucket, "plain", data), prepare, check)


def _read(name: str, store: SnapshotStore, file: FileEntry) -> Contender:
    buffer = page_buffer(file.file_bytes)
    return Contender(name, lambda: read_payload(store, file, "v1", buffer))


@contextmanager
def _bucket() -> Iterator[str]:
    server = subprocess.Popen(
        [sys.executable, "-c", _SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        endpoint = f"http://127.0.0.1:{server.stdout.readline().strip()}"
        os.environ |= {
            "AWS_ENDPOINT_URL": endpoint,
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "bench",
            "AWS_SECRET_ACCESS_KEY": "bench",
        }
        with urllib.request.urlopen(urllib.request.Request(f"{endpoint}/weights", method="PUT"), timeout=30):
            pass
        yield "s3://weights"
    finally:
        server.communicate(timeout=30)

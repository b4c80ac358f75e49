"""Snapshot files in a bucket: on a real S3 endpoint on loopback, and what may go wrong on the way to it."""

from __future__ import annotations

import logging
import pickle
import subprocess
import sys
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.registry.snapshot_helpers import packed, seal
from tests.registry.store.buckets import BUCKET, KEY_ID, S3, SECRET, TOKEN, Proxy, Request, serving, use
from weightledger.registry import Registry
from weightledger.registry.errors import CorruptionError, StorageError, WeightLedgerError
from weightledger.registry.log.ledger import FileEntry
from weightledger.registry.store.inspection import read_payload
from weightledger.registry.store.objects import PART_BYTES, ObjectSnapshots, Patience
from weightledger.registry.store.opening import open_snapshots
from weightledger.registry.store.snapshots import SnapshotStore
from weightledger.registry.testing import SnapshotStoreTests

BRIEF = Patience(connect=2.0, request=5.0, retries=1, retrying=5.0)
LARGE = 3 * PART_BYTES + 12_345


@pytest.fixture(scope="module")
def s3() -> Iterator[S3]:
    with serving() as found:
        yield found


@pytest.fixture
def proxy(s3: S3, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    with Proxy(s3.endpoint) as found:
        use(monkeypatch, found.endpoint)
        yield found


def bucket(patience: Patience = BRIEF) -> ObjectSnapshots:
    """Return a store under a prefix that nobody else uses."""
    return ObjectSnapshots(f"s3://{BUCKET}/{uuid.uuid4().hex}", patience=patience)


def random_bytes(nbytes: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.random.default_rng(nbytes).integers(0, 256, nbytes, dtype=np.uint8)


def committed(store: SnapshotStore, nbytes: int, name: str = "one.safetensors") -> str:
    content = random_bytes(nbytes)
    with store.create(uuid.uuid4().hex) as writer:
        writer.write_at(4096, content[4096:], lent=True)
        writer.write_at(0, content[:4096])
        writer.sync(name)
        return writer.commit(name)


def assert_whole(store: SnapshotStore, uri: str, nbytes: int) -> None:
    assert sha256(store.read(uri).data).digest() == sha256(random_bytes(nbytes).data).digest()


class TestSnapshotsInMemory(SnapshotStoreTests):
    finds_leftovers = False

    def make_store(self, folder: Path) -> SnapshotStore:
        return ObjectSnapshots(f"memory:/{folder}")


class TestSnapshotsInS3(SnapshotStoreTests):
    finds_leftovers = False

    @pytest.fixture(autouse=True)
    def endpoint(self, s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
        use(monkeypatch, s3.endpoint)

    def make_store(self, folder: Path) -> SnapshotStore:
        return ObjectSnapshots(f"s3://{BUCKET}{folder}")


# ---------------------------------------------------------------------- uploading


def test_a_large_file_is_uploaded_before_it_is_committed_and_seen_only_after(proxy: Proxy, s3: S3) -> None:
    store = bucket()
    with store.create("id-1") as writer:
        writer.write_at(4096, random_bytes(LARGE)[4096:], lent=True)
        writer.write_at(0, random_bytes(LARGE)[:4096])
        assert [request for request in proxy.seen if request.is_part] == []
        writer.sync("one.safetensors")
        deadline = time.monotonic() + 30
        while sum(request.is_part for request in proxy.seen) < 3 and time.monotonic() < deadline:
            time.sleep(0.02)
        assert sum(request.is_part for request in proxy.seen) == 3
        assert (store.uris(), s3.uploads()) == ([], 1)
        writer.commit("one.safetensors")
    assert (store.uris(), s3.uploads()) == (["one.safetensors"], 0)
    assert_whole(store, "one.safetensors", LARGE)


def test_a_small_file_is_one_request_that_a_taken_name_refuses(proxy: Proxy) -> None:
    store = bucket()
    store.create("id-0").abort()
    assert proxy.seen == []
    committed(store, 100_000)
    assert [request.method for request in proxy.seen] == ["PUT"]
    with pytest.raises(StorageError, match="the name is taken"):
        committed(store, 50_000)
    assert_whole(store, "one.safetensors", 100_000)


def test_a_header_is_read_without_the_data(proxy: Proxy) -> None:
    payload = packed({"w": torch.zeros(1 << 20)})
    seal(payload)
    store = bucket()
    with store.create("id-1") as writer:
        writer.write_at(0, payload.buffer)
        uri = writer.commit("one.safetensors")
    proxy.seen.clear()
    assert b"__metadata__" in store.read_header(uri)
    assert [request.method for request in proxy.seen] == ["GET"]


def test_a_writer_that_was_killed_amid_an_upload_offers_nothing(
    s3: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, s3.endpoint)
    store, before = bucket(), s3.uploads()
    program = (
        "import os, sys, time; from weightledger.registry.store.objects import ObjectSnapshots;"
        "writer = ObjectSnapshots(sys.argv[1]).create('dead-1'); writer.write_at(0, bytes(40_000_000));"
        "writer.sync('one.safetensors'); os.kill(os.getpid(), 9)"
    )
    run = subprocess.run([sys.executable, "-c", program, str(store.bucket)], check=False, timeout=60)
    assert run.returncode == -9
    assert s3.uploads() == before + 1  # what the bucket's lifecycle rule is for
    assert (store.uris(), store.leftovers(), store.size("one.safetensors")) == ([], [], None)
    with pytest.raises(CorruptionError, match="missing"):
        store.read("one.safetensors")
    committed(store, LARGE)
    assert_whole(store, "one.safetensors", LARGE)


def test_weights_are_published_to_a_bucket_and_loaded_from_it(
    s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, s3.endpoint)
    store = bucket()
    weights = {"large": torch.randn(6_000_000), "small": torch.arange(10)}
    with Registry.open(tmp_path / "registry", snapshots=store.where("x").removesuffix("/x")) as registry:
        first = registry.publish(weights)
        registry.publish({name: value + 1 for name, value in weights.items()})
    with Registry.open(tmp_path / "registry") as registry:
        loaded = registry.load(first)
        assert registry.verify() == []
    assert all(torch.equal(loaded[name], value) for name, value in weights.items())
    assert len(store.uris()) == 2 and not list((tmp_path / "registry").glob("**/*.safetensors"))


# ---------------------------------------------------------------------- faults


@pytest.mark.parametrize("nbytes", [100_000, LARGE])
@pytest.mark.parametrize("fault", ["503", "slow", "refuse", "lose", "cut"])
def test_what_passes_is_tried_again(fault: str, nbytes: int, proxy: Proxy) -> None:
    """Every second request goes wrong, and what is there in the end is whole."""
    turn = [0]

    def every_second(request: Request) -> object:
        turn[0] += 1
        return fault if turn[0] % 2 else "pass"

    proxy.fault = every_second  # type: ignore[assignment]
    store = bucket(Patience(connect=5.0, request=10.0, retries=4, retrying=30.0))
    uri = committed(store, nbytes)
    assert_whole(store, uri, nbytes)
    assert (store.size(uri), store.uris()) == (nbytes, [uri])
    store.delete(uri)
    proxy.always("pass")
    assert store.uris() == []


@pytest.mark.parametrize("nbytes", [100_000, LARGE])
def test_a_put_whose_answer_was_lost_is_found_to_have_arrived(nbytes: int, proxy: Proxy) -> None:
    """It is not taken for the work of another, though the name is taken by now."""
    store = bucket()
    proxy.at_first(
        "lose", 1, lambda request: request.completes or (request.method == "PUT" and not request.is_part)
    )
    uri = committed(store, nbytes)
    assert_whole(store, uri, nbytes)


@pytest.mark.parametrize("nbytes", [100_000, LARGE])
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("503", r"answered 503 SlowDown .*after 1 retries"),
        (
            "403",
            r"answered 403 SignatureDoesNotMatch \(the credentials in the environment are not accepted\)",
        ),
        ("hang", "no answer in time"),
        ("refuse", "the connection broke"),
    ],
)
def test_what_lasts_is_one_clear_error_within_the_bound(
    fault: str, said: str, nbytes: int, proxy: Proxy, s3: S3
) -> None:
    """And nothing is offered, nor left."""
    store, before = bucket(replace(BRIEF, request=0.4 if fault == "hang" else 5.0)), s3.uploads()
    proxy.slow = 0.6
    proxy.always(fault, lambda request: request.method == "PUT")  # type: ignore[arg-type]
    begin = time.monotonic()
    with pytest.raises(StorageError, match=said) as caught:
        committed(store, nbytes)
    assert time.monotonic() - begin < 20
    assert f"{store.bucket}/one.safetensors" in str(caught.value)
    proxy.always("pass")
    assert (store.uris(), s3.uploads()) == ([], before)
    uri = committed(ObjectSnapshots(str(store.bucket)), nbytes)
    proxy.always(fault)  # type: ignore[arg-type]
    for call in (store.read, store.size, store.delete)[: 1 if fault == "hang" else None]:
        with pytest.raises(StorageError, match=str(store.bucket)):
            call(uri)


def test_an_answer_that_is_always_cut_is_an_error_and_never_half_a_file(proxy: Proxy) -> None:
    store = bucket()
    uri = committed(store, LARGE)
    proxy.always("cut")
    with pytest.raises(StorageError, match="the connection broke"):
        store.read(uri)


def test_wrong_bytes_never_become_weights(proxy: Proxy) -> None:
    payload = packed({"w": torch.randn(2_000_000)})
    seal(payload)
    store = bucket()
    with store.create("id-1") as writer:
        writer.write_at(0, payload.buffer)
        uri = writer.commit("one.safetensors")
    file = FileEntry(1, payload.digest, uri, payload.buffer.nbytes, True)
    proxy.always("flip", lambda request: request.method == "GET")
    with pytest.raises(CorruptionError, match=str(store.bucket)):
        read_payload(store, file, "v1")
    proxy.always("pass")
    assert torch.equal(read_payload(store, file, "v1").tensors()["w"], payload.tensors()["w"])


def test_a_part_that_cannot_be_stored_takes_the_others_back(proxy: Proxy, s3: S3) -> None:
    store, before = bucket(), s3.uploads()
    proxy.always("503", lambda request: "partNumber=2" in request.path)
    with pytest.raises(StorageError, match="503 SlowDown"):
        committed(store, LARGE)
    assert (store.uris(), s3.uploads()) == ([], before)


def test_a_bucket_that_is_not_there_is_named(s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, s3.endpoint)
    store = ObjectSnapshots("s3://nowhere/prefix", patience=BRIEF)
    calls: list[Callable[[], object]] = [
        lambda: store.size("one.safetensors"),
        lambda: store.read("one.safetensors"),
        lambda: store.read_header("one.safetensors"),
        lambda: store.uris(),
        lambda: store.delete("one.safetensors"),
        lambda: store.owner(),
        lambda: store.claim("a" * 32),
        lambda: committed(store, 100_000),
        lambda: committed(store, LARGE),
    ]
    for call in calls:
        with pytest.raises(StorageError, match=r"s3://nowhere/prefix.*there is no such bucket"):
            call()


def test_a_store_that_is_not_reached_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, "http://127.0.0.1:9")
    with pytest.raises(StorageError, match=f"s3://{BUCKET}/.*no connection to the store.*after 1 retries"):
        bucket().uris()


def test_a_process_that_was_forked_is_told_and_does_not_wait_for_ever(proxy: Proxy) -> None:
    store = bucket()
    committed(store, 1000)
    program = (
        "import os, signal, sys; from weightledger.registry.store.objects import ObjectSnapshots\n"
        "store = ObjectSnapshots(sys.argv[1])\n"
        "assert store.size('one.safetensors') == 1000\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    signal.alarm(20)\n"
        "    try: store.read('one.safetensors')\n"
        "    except Exception as error: print(type(error).__name__, error, flush=True)\n"
        "    os._exit(0)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
        "assert store.size('one.safetensors') == 1000\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program, str(store.bucket)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (run.returncode, run.stdout.split(" ")[0]) == (0, "StorageError"), run.stderr
    assert "was forked" in run.stdout


# ---------------------------------------------------------------------- secrets


def test_secrets_are_in_no_error_repr_pickle_or_log(proxy: Proxy, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    store = bucket(Patience(connect=2.0, request=5.0, retries=0, retrying=1.0))
    uri = committed(store, 1000)
    texts = [repr(store), str(vars(store)), store.where(uri), repr(store.create("x"))]
    texts.append(pickle.dumps(store).decode("latin-1"))
    calls: list[Callable[[], object]] = [
        lambda: store.read(uri),
        lambda: store.read_header(uri),
        lambda: store.size(uri),
        lambda: store.uris(),
        lambda: store.delete(uri),
        lambda: store.claim("a" * 32),
        lambda: committed(store, 1000, "two.safetensors"),
        lambda: committed(store, LARGE, "three.safetensors"),
    ]
    errors = 0
    for fault in ("403", "503", "cut", "refuse"):
        proxy.always(fault)  # type: ignore[arg-type]
        for call in calls:
            try:
                call()
            except WeightLedgerError as error:
                errors += 1
                texts += traceback.format_exception(error)
                seen: BaseException | None = error
                while seen is not None:
                    assert isinstance(seen, WeightLedgerError)
                    texts += [str(seen), repr(seen), repr(vars(seen))]
                    seen = seen.__cause__ or seen.__context__
    assert errors >= 3 * len(calls)
    told = "\n".join([*texts, caplog.text])
    for secret in (KEY_ID, SECRET, TOKEN):
        assert secret not in told


@pytest.mark.parametrize(
    "url",
    [
        "s3://AKIASECRET:PASSWORD@bucket/prefix",
        "s3://bucket/prefix?secret_access_key=PASSWORD",
        "az://container/prefix?sig=PASSWORD",
        "s3://bucket/prefix#PASSWORD",
    ],
)
def test_credentials_in_a_url_are_refused_and_not_shown(url: str) -> None:
    with pytest.raises(ValueError, match="credentials and endpoint are read from the environment") as caught:
        open_snapshots(url)
    assert "PASSWORD" not in str(caught.value) and "AKIASECRET" not in str(caught.value)


# ---------------------------------------------------------------------- choosing


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://host/bucket", "begins with one of s3://, gs://, az://, memory://.*'http://'"),
        ("file:///tmp/x", "leave out file://"),
        ("s3://", "expected s3://BUCKET/PREFIX"),
        ("s3:///prefix", "expected s3://BUCKET/PREFIX"),
        ("s3://bucket//x", "expected s3://BUCKET/PREFIX"),
        ("s3://bucket/a/../b", "expected s3://BUCKET/PREFIX"),
        ("s3://bucket/a\nb", "plain characters"),
        ("s3://host:9000/bucket", "an endpoint is read from the environment"),
    ],
)
def test_a_url_of_another_form_is_refused_with_what_is_known(url: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        open_snapshots(url)


@pytest.mark.parametrize(
    "url", ["s3://bucket", "s3://bucket/a/b", "gs://bucket/a", "az://container/a", "memory://x"]
)
def test_a_url_is_written_as_it_was_given(url: str) -> None:
    store = open_snapshots(url)
    assert repr(store) == f"<ObjectSnapshots {url}>" and store.where("x") == f"{url}/x"
    assert repr(pickle.loads(pickle.dumps(store))) == repr(store)


def test_a_missing_client_names_what_to_install() -> None:
    program = (
        "import sys; sys.modules['obstore'] = None\n"
        "from weightledger.registry.store.opening import open_snapshots\n"
        "store = open_snapshots('s3://bucket/prefix')\n"
        "for call in (store.uris, lambda: store.read('x'), lambda: store.claim('x')):\n"
        "    try: call()\n"
        "    except Exception as error: print(type(error).__name__, error)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    lines = run.stdout.splitlines()
    assert len(lines) == 3
    assert all(line.startswith("StorageError") and "pip install 'weightledger[s3]'" in line for line in lines)


def test_snapshots_in_a_folder_load_no_client(tmp_path: Path) -> None:
    program = (
        "import sys; from weightledger.registry.store.opening import open_snapshots\n"
        "print(open_snapshots(sys.argv[1]).uris(), {'obstore', 'numpy', 'torch'} & set(sys.modules))"
    )
    run = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True, timeout=60
    )
    assert run.stdout.strip() == "[] set()"

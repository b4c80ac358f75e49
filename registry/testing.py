"""What any snapshot store must do, as tests to inherit from.

    from weightledger.registry.testing import SnapshotStoreTests

    class TestMyStore(SnapshotStoreTests):
        def make_store(self, folder):
            return MyStore(folder)

Needs pytest, which the package itself does not.
"""

from __future__ import annotations

import json
import pickle
import threading
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from weightledger.registry.errors import CorruptionError, StorageError
from weightledger.registry.store.snapshots import SnapshotStore

_HEADER: Final = json.dumps({"__metadata__": {"format": "pt"}}).encode()
_SMALL: Final = len(_HEADER).to_bytes(8, "little") + _HEADER
_LARGE_BYTES: Final = (24 << 20) + 12_345  # several system calls, and no whole number of pages


class SnapshotStoreTests:
    """Inherit, give `make_store`, and let pytest collect the subclass (its name begins with `Test`)."""

    finds_leftovers = True
    """Whether the store knows of files whose writer died. One that does not may never show them to anybody."""

    def make_store(self, folder: Path) -> SnapshotStore:
        """Return an empty store; `folder` is an empty place on disk that it may use.

        A second call with the same folder returns another object on the same files.
        """
        raise NotImplementedError

    def test_what_was_committed_is_read_back(self, tmp_path: Path) -> None:
        """Bytes come back, from another object on the same store too."""
        store = self.make_store(tmp_path)
        with store.create("id-1") as writer:
            writer.write_at(0, _SMALL)
            uri = writer.commit("one.safetensors")
        assert store.read(uri).tobytes() == _SMALL
        assert self.make_store(tmp_path).read(uri).tobytes() == _SMALL
        assert store.size(uri) == len(_SMALL)
        assert uri in store.where(uri)
        assert store.uris() == [uri]
        assert store.leftovers() == []

    def test_what_was_read_is_own_and_writable(self, tmp_path: Path) -> None:
        """Memory that was handed out neither follows the file nor leads back to it."""
        store = self.make_store(tmp_path)
        with store.create("id-1") as writer:
            writer.write_at(0, _SMALL)
            uri = writer.commit("one.safetensors")
        first = store.read(uri)
        first[:] = 0
        assert store.read(uri).tobytes() == _SMALL
        store.delete(uri)
        assert not first.any()

    def test_a_large_file_is_written_in_any_order_from_another_thread(self, tmp_path: Path) -> None:
        """The body may come first and from a worker thread, the beginning last."""
        store = self.make_store(tmp_path)
        content = np.random.default_rng(0).integers(0, 256, _LARGE_BYTES, dtype=np.uint8)
        writer = store.create("id-1")
        thread = threading.Thread(target=writer.write_at, args=(4096, content[4096:]))
        thread.start()
        thread.join()
        writer.write_at(0, content[:4096])
        uri = writer.commit("large.safetensors")
        assert (store.read(uri) == content).all()
        into = np.empty(_LARGE_BYTES, np.uint8)
        assert store.read(uri, into) is into
        assert (into == content).all()

    def test_what_was_made_durable_early_is_not_offered_before_it_is_committed(self, tmp_path: Path) -> None:
        """Under the name that was told, or under another one; what is written later is a part of it."""
        content = np.random.default_rng(0).integers(0, 256, _LARGE_BYTES, dtype=np.uint8)
        store = self.make_store(tmp_path)
        for turn, (told, name) in enumerate((("a", "a"), ("b", "c"), ("d", "d"))):
            with store.create(f"id-{turn}") as writer:
                writer.write_at(4096, content[4096:], lent=True)
                writer.write_at(0, content[:4096])
                writer.sync(told)
                assert name not in store.uris() and store.size(name) is None
                if turn == 2:
                    writer.write_at(_LARGE_BYTES, b"more")
                uri = writer.commit(name)
            assert store.read(uri).tobytes() == content.tobytes() + (b"more" if turn == 2 else b"")
        assert store.uris() == ["a", "c", "d"]

    def test_what_was_synced_and_aborted_was_never_there(self, tmp_path: Path) -> None:
        """Whatever was uploaded of it."""
        store = self.make_store(tmp_path)
        writer = store.create("id-1")
        writer.write_at(0, np.zeros(_LARGE_BYTES, np.uint8))
        writer.sync("one.safetensors")
        writer.abort()
        assert (store.uris(), store.leftovers(), store.size("one.safetensors")) == ([], [], None)

    def test_a_buffer_that_is_not_lent_is_the_callers_again(self, tmp_path: Path) -> None:
        """What it holds when it was written counts."""
        store, buffer = self.make_store(tmp_path), bytearray(_SMALL)
        with store.create("id-1") as writer:
            writer.write_at(0, buffer)
            buffer[:] = bytes(len(buffer))
            uri = writer.commit("one.safetensors")
        assert store.read(uri).tobytes() == _SMALL

    def test_pieces_may_overlap_and_leave_gaps(self, tmp_path: Path) -> None:
        """The later one counts, and a gap is zeros."""
        store = self.make_store(tmp_path)
        with store.create("id-1") as writer:
            writer.write_at(6, b"cccc")
            writer.write_at(0, b"aaaa")
            writer.write_at(2, b"bb")
            uri = writer.commit("one.safetensors")
        assert store.read(uri).tobytes() == b"aabb\0\0cccc"

    def test_what_arrives_is_told_from_the_beginning_on(self, tmp_path: Path) -> None:
        """Whoever looks at so many bytes finds them there."""
        content = np.random.default_rng(0).integers(0, 256, 2 * _LARGE_BYTES, dtype=np.uint8)
        store, into = self.make_store(tmp_path), np.zeros(2 * _LARGE_BYTES, np.uint8)
        with store.create("id-1") as writer:
            writer.write_at(0, content, lent=True)
            uri = writer.commit("one.safetensors")
        for _ in range(2):
            into[:] = 0
            told: list[int] = []

            def arrived(nbytes: int, told: list[int] = told) -> None:
                begin = told[-1] if told else 0
                assert (into[begin:nbytes] == content[begin:nbytes]).all()
                told.append(nbytes)

            store.read(uri, into, arrived)
            assert len(told) > 1 and told == sorted(told) and told[-1] == content.nbytes

    def test_what_is_forgotten_is_read_again(self, tmp_path: Path) -> None:
        """It drops copies only, never the file."""
        store = self.make_store(tmp_path)
        with store.create("id-1") as writer:
            writer.write_at(0, _SMALL)
            uri = writer.commit("one.safetensors")
        for _ in range(2):
            assert store.read(uri).tobytes() == _SMALL
            store.forget(uri)

    def test_a_place_is_whose_it_was_first(self, tmp_path: Path) -> None:
        """Two registries never share one."""
        store = self.make_store(tmp_path)
        assert store.owner() is None
        assert store.claim("a" * 32) == "a" * 32
        assert self.make_store(tmp_path).claim("b" * 32) == "a" * 32
        assert self.make_store(tmp_path).owner() == "a" * 32
        assert (store.uris(), store.leftovers()) == ([], [])

    def test_reading_into_memory_of_another_size_is_a_corruption_error(self, tmp_path: Path) -> None:
        """A file that is shorter or longer than recorded is damaged."""
        store = self.make_store(tmp_path)
        with store.create("id-1") as writer:
            writer.write_at(0, _SMALL)
            uri = writer.commit("one.safetensors")
        for size in (0, len(_SMALL) - 1, len(_SMALL) + 1):
            with pytest.raises(CorruptionError, match=f"expected {size} bytes, found {len(_SMALL)}"):
                store.read(uri, np.empty(size, np.uint8))

    def test_a_header_is_read_without_the_data(self, tmp_path: Path) -> None:
        """And a file that has none is damaged."""
        store = self.make_store(tmp_path)
        for at, (content, header) in enumerate(
            [(_SMALL + b"data", _HEADER), (b"1234", None), (b"\xff" * 8, None)]
        ):
            with store.create(f"id-{at}") as writer:
                writer.write_at(0, content)
                uri = writer.commit(f"{at}.safetensors")
            if header is None:
                with pytest.raises(CorruptionError):
                    store.read_header(uri)
            else:
                assert store.read_header(uri) == header

    def test_what_is_missing_is_a_corruption_error(self, tmp_path: Path) -> None:
        """Named, for reading; None, for looking; nothing, for removing."""
        store = self.make_store(tmp_path)
        for read in (store.read, store.read_header):
            with pytest.raises(CorruptionError, match=r"nowhere\.safetensors is missing"):
                read("nowhere.safetensors")
        assert store.size("nowhere.safetensors") is None
        store.delete("nowhere.safetensors")
        store.discard("nobody")

    def test_a_name_is_never_used_again(self, tmp_path: Path) -> None:
        """The file that has it stays what it is, and the other one leaves nothing."""
        store = self.make_store(tmp_path)
        with store.create("id-1") as writer:
            writer.write_at(0, _SMALL)
            uri = writer.commit("one.safetensors")
        with store.create("id-2") as writer:
            writer.write_at(0, b"other")
            with pytest.raises(StorageError, match=r"id-2.*could not be written"):
                writer.commit("one.safetensors")
        assert store.read(uri).tobytes() == _SMALL
        assert (store.uris(), store.leftovers()) == ([uri], [])

    def test_a_temporary_id_is_never_shared(self, tmp_path: Path) -> None:
        """Two writers under one id would mix their bytes."""
        store = self.make_store(tmp_path)
        with store.create("id-1") as writer:
            with pytest.raises(StorageError, match="id-1"):
                store.create("id-1")
            writer.write_at(0, _SMALL)
            assert store.read(writer.commit("one.safetensors")).tobytes() == _SMALL

    def test_what_was_not_committed_is_never_offered(self, tmp_path: Path) -> None:
        """It is a leftover until somebody discards it, and then it is gone."""
        store = self.make_store(tmp_path)
        writer = store.create("dead-1")
        writer.write_at(0, _SMALL)
        assert store.uris() == []
        assert self.make_store(tmp_path).leftovers() == (["dead-1"] if self.finds_leftovers else [])
        store.discard("dead-1")
        assert store.leftovers() == []
        writer.abort()

    def test_a_writer_that_is_left_without_a_commit_removes_its_file(self, tmp_path: Path) -> None:
        """By an error, by abort, or by reaching the end."""
        store = self.make_store(tmp_path)
        with store.create("id-1") as writer:
            writer.write_at(0, _SMALL)
        with pytest.raises(ZeroDivisionError), store.create("id-2") as writer:
            writer.write_at(0, bytes([1 // 0]))
        writer = store.create("id-3")
        writer.abort()
        writer.abort()
        assert (store.uris(), store.leftovers()) == ([], [])
        with pytest.raises(StorageError):
            writer.write_at(0, b"late")
        with pytest.raises(StorageError):
            writer.commit("late.safetensors")
        assert (store.uris(), store.leftovers()) == ([], [])

    def test_deleting_twice_is_no_error_and_readers_keep_what_they_read(self, tmp_path: Path) -> None:
        """And the name is free of any trace."""
        store = self.make_store(tmp_path)
        with store.create("id-1") as writer:
            writer.write_at(0, _SMALL)
            uri = writer.commit("one.safetensors")
        content = store.read(uri)
        store.delete(uri)
        store.delete(uri)
        assert content.tobytes() == _SMALL
        assert store.size(uri) is None
        assert store.uris() == []

    def test_a_uri_that_leads_elsewhere_is_refused(self, tmp_path: Path) -> None:
        """A damaged row never makes the store read or remove a file that is not its own."""
        store = self.make_store(tmp_path / "store")
        (tmp_path / "other").write_bytes(_SMALL)
        damaged: Any = b"\xff\xfe"
        for uri in ("../other", str(tmp_path / "other"), "", "..", "a\0b", damaged):
            with pytest.raises(CorruptionError):
                store.read(uri)
            with pytest.raises(CorruptionError):
                store.delete(uri)
        assert (tmp_path / "other").exists()

    def test_writers_side_by_side_never_mix(self, tmp_path: Path) -> None:
        """CK-13: each committed file is whole and its own."""
        store = self.make_store(tmp_path)

        def write(mark: int) -> None:
            for turn in range(25):
                with store.create(f"{mark}-{turn}") as writer:
                    writer.write_at(0, bytes([mark]) * 5000)
                    writer.commit(f"{mark}-{turn}.safetensors")

        threads = [threading.Thread(target=write, args=(mark,)) for mark in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(store.uris()) == 100
        for uri in store.uris():
            assert store.read(uri).tobytes() == bytes([int(uri[0])]) * 5000

    def test_a_store_survives_pickling(self, tmp_path: Path) -> None:
        """It is carried to other processes."""
        store = self.make_store(tmp_path)
        with store.create("id-1") as writer:
            writer.write_at(0, _SMALL)
            uri = writer.commit("one.safetensors")
        assert pickle.loads(pickle.dumps(store)).read(uri).tobytes() == _SMALL

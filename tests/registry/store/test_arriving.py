"""Reading in one thread, looking at what is there already in another."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from weightledger.registry.store.arriving import Arrival


def test_what_is_there_is_not_waited_for_and_what_is_not_there_is() -> None:
    go_on = threading.Event()

    def read(note: Callable[[int], None]) -> None:
        note(10)
        assert go_on.wait(60)
        note(20)

    with Arrival(read) as arrival:
        arrival.wait(10)
        waiter = threading.Thread(target=arrival.wait, args=(20,))
        waiter.start()
        waiter.join(0.05)
        assert waiter.is_alive()
        go_on.set()
        waiter.join(60)
        assert not waiter.is_alive()


def test_whoever_waits_for_what_cannot_come_is_told_why() -> None:
    def read(note: Callable[[int], None]) -> None:
        note(10)
        raise OSError("the disk is gone")

    with Arrival(read) as arrival, pytest.raises(OSError, match="gone"):
        arrival.wait(20)


def test_nobody_leaves_while_memory_is_still_being_written_to() -> None:
    read_on, ended = threading.Event(), []

    def read(note: Callable[[int], None]) -> None:
        assert read_on.wait(60)
        ended.append(True)

    with pytest.raises(KeyError), Arrival(read):
        read_on.set()
        raise KeyError("damaged")
    assert ended

"""The locks of a registry on a PostgreSQL server: advisory locks, which the server frees when their session ends.

Rules it keeps:
- They save waiting, and tell who lives. What is true does not rest on them: a writer whose session was lost finds its
  version's row taken or lost, and its publish fails.
- A process has one session for the locks of a registry, beside the pool. When it was lost, the next call opens another
  and takes the run's lock again.
- A session may take a lock twice, so that threads of a process queue at a lock of the process first.
- A run's lock is a shared one: its process may have another session, or one that the server does not know lost yet.
- A policy's lock is the pair (tag of the policy, registry): whoever has it has those of all policies with that tag.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final

import psycopg

from weightledger.registry.database.postgres import PostgresDatabase, is_lost
from weightledger.registry.errors import InUseError
from weightledger.registry.locks import LOCK_SECONDS, TAG_CHARS, policy_key
from weightledger.registry.locks.runs import RunInfo, this_run

_FIRST_PAUSE, _LONGEST_PAUSE = 0.002, 0.05
_RUN_HELD: Final = (
    "SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND database = (SELECT oid FROM pg_database WHERE datname = "
    "current_database()) AND objsubid = 1 AND classid = %s::bigint::oid AND objid = %s::bigint::oid AND granted LIMIT 1"
)
_PAIR_HELD: Final = _RUN_HELD.replace("objsubid = 1", "objsubid = 2")
_HOLDER: Final = _PAIR_HELD.replace(
    "SELECT 1 FROM pg_locks", "SELECT application_name FROM pg_locks JOIN pg_stat_activity USING (pid)"
).replace("AND granted", "AND granted AND pg_locks.database = pg_stat_activity.datid")


class _Session:
    """This process's session for the locks of one registry. Threads take turns."""

    def __init__(self, database: PostgresDatabase, registry: str) -> None:
        self._database = database
        self._registry = registry
        # Re-entrant: closing what nobody refers to any more may begin in the middle of anything.
        self._guard = threading.RLock()
        self._connection: psycopg.Connection[Any] | None = None
        self._thread_locks: dict[int, threading.Lock] = {}
        self.users: set[int] = set()
        """Whose locks it holds, by identity."""
        self.keepers: set[int] = set()
        """Those that keep this process's run alive."""

    def ask(self, statement: str, values: Sequence[Any]) -> Any:
        """Return the first row of an answer; a session that was lost is replaced once."""
        with self._guard, self._database.translating():
            for last in (False, True):
                connection = self._connection or self._connect()
                try:
                    return connection.execute(statement, values).fetchone()
                except psycopg.Error as error:
                    if connection.broken or connection.closed or is_lost(error):
                        self._connection = None
                    if last or self._connection is not None:
                        raise
        raise AssertionError("the loop returns or raises")

    def _connect(self) -> psycopg.Connection[Any]:
        self._connection = connection = self._database.own_connection()
        if self.keepers:
            connection.execute("SELECT pg_advisory_lock_shared(%s)", [self._own_key])
        return connection

    def thread_lock(self, tag: int) -> threading.Lock:
        with self._guard:
            return self._thread_locks.setdefault(tag, threading.Lock())

    def keep(self, keeper: int) -> None:
        with self._guard:
            if not self.keepers:
                self.ask("SELECT pg_advisory_lock_shared(%s)", [self._own_key])
            self.keepers.add(keeper)

    def let_go(self, user: int) -> None:
        with self._guard:
            kept = bool(self.keepers)
            self.users.discard(user)
            self.keepers.discard(user)
            connection = self._connection
            if not self.users:
                self.close()  # with the session goes what it holds
            elif connection is not None and kept and not self.keepers:
                with suppress(psycopg.Error):  # a session that was lost holds nothing
                    connection.execute("SELECT pg_advisory_unlock_shared(%s)", [self._own_key])

    def close(self) -> None:
        with self._guard:
            connection, self._connection = self._connection, None
            if connection is not None:
                connection.close()

    @property
    def _own_key(self) -> int:
        return run_key(self._registry, this_run().id)


_sessions: dict[tuple[str, str], _Session] = {}
os.register_at_fork(after_in_child=_sessions.clear)


@atexit.register
def _end() -> None:
    """Close what is left, last of all: whoever was registered later has ended its work."""
    for session in list(_sessions.values()):
        session.close()


class PostgresLocks:
    """Advisory locks in the database of a registry.

    Args:
        database: The database.
        registry: The registry's identity: several may share a database.
    """

    def __init__(self, database: PostgresDatabase, registry: str) -> None:
        self._database = database
        self._registry = registry
        self._space = _signed(registry, 4)
        self._kept = False
        # Whoever forgets to close it keeps nobody alive; at the very end the process's own end does that.
        weakref.finalize(self, _let_go, (database.name, registry), id(self)).atexit = False

    def __repr__(self) -> str:
        return f"<PostgresLocks {self._database.name} run {self.current().id}>"

    @property
    def _session(self) -> _Session:
        key = (self._database.name, self._registry)
        found = _sessions.get(key)
        if found is None:
            found = _sessions.setdefault(key, _Session(self._database, self._registry))
        found.users.add(id(self))
        return found

    # ------------------------------------------------------------------ runs

    def current(self) -> RunInfo:
        """Return this process's run."""
        return this_run()

    def keep_alive(self) -> RunInfo:
        """Let every process that shares the registry see this run as alive, until this process ends or `close`.

        Raises:
            StorageError: The server cannot be reached.
        """
        self._session.keep(id(self))
        self._kept = True
        return this_run()

    def look_again(self) -> None:
        """Open the session anew, if it was lost, and take the run's lock again.

        Raises:
            StorageError: The server cannot be reached.
        """
        if self._kept:
            self.keep_alive()
            self._session.ask("SELECT 1", [])

    def alive(self, run_id: str) -> bool:
        """Tell whether a process keeps that run alive now; a run that never asked for it is not.

        Raises:
            StorageError: The server cannot be reached.
        """
        high, low = divmod(run_key(self._registry, run_id) % (1 << 64), 1 << 32)
        return self._session.ask(_RUN_HELD, [high, low]) is not None

    def close(self) -> None:
        """Stop keeping this process's run alive, once everybody in it that asked for that has closed."""
        self._kept = False
        _let_go((self._database.name, self._registry), id(self))

    # ------------------------------------------------------------------ policies

    @contextmanager
    def policy(self, policy: str, timeout: float = LOCK_SECONDS) -> Iterator[None]:
        """Hold the one lock of a policy, against other processes and other threads. It is not re-entrant.

        Args:
            policy: Name of the policy.
            timeout: Seconds to wait for the present holder.

        Raises:
            InUseError: Somebody else kept the lock for that long; names them.
            StorageError: The server cannot be reached.
        """
        tag, deadline = _tag(policy_key(policy)), time.monotonic() + timeout
        thread = self._session.thread_lock(tag)
        if not thread.acquire(timeout=timeout):
            raise self._kept_from(policy, tag, timeout)
        try:
            if not self._wait_for(tag, deadline):
                raise self._kept_from(policy, tag, timeout)
            try:
                yield
            finally:
                self._free(tag)
        finally:
            thread.release()

    def _wait_for(self, tag: int, deadline: float) -> bool:
        pause = _FIRST_PAUSE
        while not self._try(tag):
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(pause, left))
            pause = min(2 * pause, _LONGEST_PAUSE)
        return True

    def _kept_from(self, policy: str, tag: int, timeout: float) -> InUseError:
        return InUseError(
            f"policy {policy!r}: expected its lock within {timeout:g} s, but {self._holder(tag)} holds it. "
            "Nothing was changed. Wait, or end that process."
        )

    @contextmanager
    def try_policy(self, policy: str) -> Iterator[bool]:
        """Hold the lock of a policy if it is free now; gives whether it was."""
        with self._try_for_now(_tag(policy_key(policy))) as free:
            yield free

    def policy_is_held(self, policy: str) -> bool:
        """Tell whether somebody, this process included, holds the lock of a policy. Changes nothing."""
        return self._is_held(_tag(policy_key(policy)))

    @contextmanager
    def try_tag(self, tag: str) -> Iterator[bool]:
        """Hold the lock that all policies with a tag share, if it is free now; gives whether it was."""
        with self._try_for_now(_tag(tag)) as free:
            yield free

    def tag_is_held(self, tag: str) -> bool:
        """Tell whether somebody holds the lock of a policy whose temporary files begin with a tag. Changes nothing."""
        return self._is_held(_tag(tag))

    @contextmanager
    def _try_for_now(self, tag: int) -> Iterator[bool]:
        thread = self._session.thread_lock(tag)
        if not thread.acquire(blocking=False):
            yield False
            return
        try:
            free = self._try(tag)
            try:
                yield free
            finally:
                if free:
                    self._free(tag)
        finally:
            thread.release()

    def _try(self, tag: int) -> bool:
        return bool(self._session.ask("SELECT pg_try_advisory_lock(%s, %s)", [tag, self._space])[0])

    def _free(self, tag: int) -> None:
        # Of a session that was lost meanwhile there is nothing to free, which the server only warns of.
        self._session.ask("SELECT pg_advisory_unlock(%s, %s)", [tag, self._space])

    def _is_held(self, tag: int) -> bool:
        return self._session.ask(_PAIR_HELD, [tag % (1 << 32), self._space % (1 << 32)]) is not None

    def _holder(self, tag: int) -> str:
        found = self._session.ask(_HOLDER, [tag % (1 << 32), self._space % (1 << 32)])
        return "another process" if found is None else f"the process that the server calls {found[0]!r}"


def run_key(registry: str, run: str) -> int:
    """Return the number of a run's lock."""
    return _signed(f"{registry}/{run}", 8)


def _signed(text: str, count: int) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:count], "big", signed=True)


def _tag(key: str) -> int:
    """Return a policy's tag as the server's signed number."""
    return int.from_bytes(bytes.fromhex(key[:TAG_CHARS]), "big", signed=True)


def _let_go(key: tuple[str, str], keeper: int) -> None:
    session = _sessions.get(key)
    if session is not None:
        session.let_go(keeper)

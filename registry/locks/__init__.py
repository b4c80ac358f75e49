"""Who writes, and whether they are still alive: what every kind of locks does for the rest of the registry.

A lock ends with its holder, however that ends, so that whoever gets one knows that nobody is left who had it.
"""

from __future__ import annotations

import hashlib
from contextlib import AbstractContextManager
from typing import Final, Protocol

from weightledger.registry.locks.runs import RunInfo

TAG_CHARS: Final = 8
LOCK_SECONDS: Final = 60.0


class Locks(Protocol):
    """The locks of one registry: one of each policy, and one that each run holds for as long as it lives."""

    # ------------------------------------------------------------------ runs

    def current(self) -> RunInfo:
        """Return this process's run."""
        ...

    def keep_alive(self) -> RunInfo:
        """Let every process that shares the registry see this run as alive, until this process ends or `close`.

        Raises:
            StorageError: Its lock could not be taken.
        """
        ...

    def look_again(self) -> None:
        """Take the lock of a run that is kept alive anew, if it was lost.

        Raises:
            StorageError: It could not be taken.
        """
        ...

    def alive(self, run_id: str) -> bool:
        """Tell whether a process keeps that run alive now; a run that never asked for it is not.

        Raises:
            StorageError: Nobody can tell.
        """
        ...

    def close(self) -> None:
        """Stop keeping this process's run alive, once everybody in it that asked for that has closed."""
        ...

    # ------------------------------------------------------------------ policies

    def policy(self, policy: str, timeout: float = LOCK_SECONDS) -> AbstractContextManager[None]:
        """Hold the one lock of a policy, against other processes and other threads. It is not re-entrant.

        Args:
            policy: Name of the policy.
            timeout: Seconds to wait for the present holder.

        Raises:
            InUseError: Somebody else kept the lock for that long; names them.
            StorageError: There are no locks to be had.
        """
        ...

    def try_policy(self, policy: str) -> AbstractContextManager[bool]:
        """Hold the lock of a policy if it is free now; gives whether it was."""
        ...

    def policy_is_held(self, policy: str) -> bool:
        """Tell whether somebody, this process included, holds the lock of a policy. Changes nothing."""
        ...

    def try_tag(self, tag: str) -> AbstractContextManager[bool]:
        """Hold the locks of all policies whose temporary files begin with a tag, if they are free now.

        Gives whether they were. A policy need not be known for that: before its first version is stored it has no row.
        """
        ...

    def tag_is_held(self, tag: str) -> bool:
        """Tell whether somebody holds the lock of a policy whose temporary files begin with a tag. Changes nothing."""
        ...


def policy_key(policy: str) -> str:
    """Return what a policy's lock is known by: a hash, as names are long, or differ from another by case alone."""
    return hashlib.sha256(policy.encode()).hexdigest()[:32]


def file_tag(policy: str) -> str:
    """Return what the temporary files of a policy begin with; what its lock is known by begins with it, too."""
    return policy_key(policy)[:TAG_CHARS] + "-"

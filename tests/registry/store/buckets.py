"""A real S3 endpoint on loopback, and a proxy in front of it that does what networks and stores do."""

from __future__ import annotations

import http.client
import logging
import socket
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any, Literal

import pytest

BUCKET = "weights"
KEY_ID = "AKIDNOBODYMAYSEEIT"
SECRET = "SECRETKEYNOBODYMAYSEEIT"
TOKEN = "SESSIONTOKENNOBODYMAYSEEIT"

Fault = Literal["pass", "503", "403", "slow", "hang", "refuse", "lose", "cut", "flip"]
"""What becomes of a request. `hang` and `refuse` never arrive; `lose` does, and its answer is lost."""


@dataclass(frozen=True)
class Request:
    """What a fault is chosen by."""

    method: str
    path: str

    @property
    def is_part(self) -> bool:
        return "partNumber=" in self.path

    @property
    def completes(self) -> bool:
        return self.method == "POST" and "uploadId=" in self.path


class S3:
    """The endpoint, with one bucket."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint

    def call(self, method: str, path: str) -> str:
        request = urllib.request.Request(f"{self.endpoint}/{path}", method=method)
        with urllib.request.urlopen(request, timeout=30) as answer:
            return str(answer.read().decode("utf-8", "replace"))

    def uploads(self) -> int:
        """Return how many uploads are neither complete nor aborted."""
        return self.call("GET", f"{BUCKET}?uploads").count("<Upload>")


@contextmanager
def serving() -> Iterator[S3]:
    """Run an endpoint in this process."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        s3 = S3(f"http://{host}:{port}")
        s3.call("PUT", BUCKET)
        yield s3
    finally:
        server.stop()


def use(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    """Name an endpoint and credentials where a user does."""
    for name, value in {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": KEY_ID,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_SESSION_TOKEN": TOKEN,
    }.items():
        monkeypatch.setenv(name, value)


class Proxy:
    """Passes requests on, but for those that `fault` chooses something else for."""

    def __init__(self, target: str) -> None:
        self.fault: Callable[[Request], Fault] = lambda request: "pass"
        self.seen: list[Request] = []
        self.slow = 0.3
        """Seconds that a slow request takes, and one that hangs."""
        self._target = target.removeprefix("http://")
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self._thread = Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Proxy:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(30)

    def at_first(
        self, fault: Fault, times: int, when: Callable[[Request], bool] = lambda request: True
    ) -> None:
        """Do it to the first so many requests of a kind."""
        left = [times]

        def choose(request: Request) -> Fault:
            if left[0] > 0 and when(request):
                left[0] -= 1
                return fault
            return "pass"

        self.fault = choose

    def always(self, fault: Fault, when: Callable[[Request], bool] = lambda request: True) -> None:
        """Do it to all requests of a kind."""
        self.fault = lambda request: fault if when(request) else "pass"

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_one_request(self) -> None:
                try:
                    super().handle_one_request()
                except OSError:
                    self.close_connection = True  # the client has given up

            def log_message(self, format: str, *args: Any) -> None:
                pass

            def serve(self) -> None:
                request = Request(self.command, self.path)
                proxy.seen.append(request)
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                fault = proxy.fault(request)
                if fault in ("slow", "hang"):
                    time.sleep(proxy.slow)
                if fault in ("hang", "refuse"):
                    return self.hang_up()
                if fault in ("503", "403"):
                    return self.refuse(fault)
                status, headers, answer = self.ask(body)
                if fault == "lose":
                    return self.hang_up()
                if fault == "flip" and answer:
                    middle = len(answer) // 2
                    answer = answer[:middle] + bytes([answer[middle] ^ 1]) + answer[middle + 1 :]
                self.answer(status, headers, answer, cut=fault == "cut")

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = serve

            def ask(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
                connection = http.client.HTTPConnection(proxy._target, timeout=30)
                try:
                    connection.request(self.command, self.path, body, dict(self.headers))
                    answer = connection.getresponse()
                    return answer.status, answer.getheaders(), answer.read()
                finally:
                    connection.close()

            def answer(self, status: int, headers: list[tuple[str, str]], body: bytes, *, cut: bool) -> None:
                self.send_response_only(status)
                for name, value in headers:
                    if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                        self.send_header(name, value)
                lengths = [value for name, value in headers if name.lower() == "content-length"]
                length = lengths[0] if self.command == "HEAD" and lengths else str(len(body))
                self.send_header("Content-Length", length)
                self.end_headers()
                self.wfile.write(body[: len(body) // 2] if cut else body)
                if cut:
                    self.hang_up()

            def refuse(self, status: str) -> None:
                # As real ones do, it says back what it was sent.
                said = (
                    f"{KEY_ID} {self.headers.get('Authorization')} {self.headers.get('x-amz-security-token')}"
                )
                code = "SlowDown" if status == "503" else "SignatureDoesNotMatch"
                body = f"<Error><Code>{code}</Code><Message>{said}</Message></Error>".encode()
                self.send_response_only(int(status))
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            def hang_up(self) -> None:
                self.close_connection = True
                self.wfile.flush()
                self.connection.shutdown(socket.SHUT_RDWR)

        return Handler

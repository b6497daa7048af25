"""Many idle, slow or busy connections: health checks are answered throughout, and the service recovers afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import uvicorn

from steppe.control.http import connections
from steppe.control.http.auth import AccessControl, RequestLimits, TokenStore
from steppe.control.http.connections import RESERVE, Connections
from steppe.control.http.middleware import AccessMiddleware
from steppe.records.store import OPEN_PER_THREAD, RunStore
from tests.support.service import SHORT, Served, bring_down, make, until

DESCRIPTORS = 1_024
HALF = b"GET /api/v1/runs HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: "
WHOLE = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A service with a low limit of open files."""
    service = Served(tmp_path_factory.mktemp("limited"), descriptors=DESCRIPTORS)
    service.start()
    yield service
    bring_down(service)


@contextlib.contextmanager
def open_connections(
    address: str, count: int, first: bytes, after_each_hundred: Callable[[int], None]
) -> Iterator[list[socket.socket]]:
    parts = urlsplit(address)
    with contextlib.ExitStack() as stack:
        opened = []
        for number in range(count):
            opened.append(stack.enter_context(socket.create_connection((parts.hostname, parts.port), timeout=60)))
            with contextlib.suppress(OSError):  # it was closed already for a newer one
                opened[-1].sendall(first)
            if number % 100 == 99:
                after_each_hundred(number)
        yield opened


@pytest.mark.integration
@pytest.mark.parametrize(("count", "first"), [(1_100, b""), (1_010, HALF)], ids=["idle", "slow"])
def test_many_connections_do_not_block_new_ones(limited: Served, count: int, first: bytes) -> None:
    def healthy(number: int) -> None:
        assert httpx.get(f"{limited.address}/healthz", timeout=60).status_code == 200, f"with {number} connections"

    with limited.client() as api, open_connections(limited.address, count, first, healthy) as held:
        for one in held:
            with contextlib.suppress(OSError):
                one.sendall(b"x" if first else b"")
        healthy(count)
        assert api.get("/api/v1/runs").status_code == 200
        assert make(api, SHORT, start=False)
    assert limited.process is not None
    assert limited.process.poll() is None
    with limited.client() as api:
        assert api.get("/api/v1/runs").status_code == 200


class Server(uvicorn.Server):
    """A server in a thread of this process, for a small application."""

    def __init__(self, app: Any, most: int) -> None:
        self.limited_connections = Connections(most)
        self.listener = self.limited_connections.listen("127.0.0.1", 0)
        self.address = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        super().__init__(uvicorn.Config(app, http=self.limited_connections.protocol, log_level="error", lifespan="off"))

    def __enter__(self) -> Server:
        self._thread = threading.Thread(target=self.run, kwargs={"sockets": [self.listener]})
        self._thread.start()
        until(lambda: self.started, "the server has started")
        return self

    def __exit__(self, *_: object) -> None:
        self.should_exit = self.force_exit = True
        self._thread.join(60)

    def connect(self) -> socket.socket:
        return socket.create_connection(self.listener.getsockname(), timeout=60)


def application(release: threading.Event) -> Any:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        while scope["path"] == "/slow" and not release.is_set():
            await asyncio.sleep(0.01)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    return app


def server_with_access_control(app: Any, tmp_path: Path, most: int = 2 * RESERVE, **limits: float) -> Server:
    middleware = AccessMiddleware(
        app, AccessControl(TokenStore(tmp_path / "tokens.json"), limits=RequestLimits(**limits))
    )  # type: ignore[arg-type]
    server = Server(middleware, most)
    middleware.connections = server.limited_connections
    return server


@pytest.mark.unit
def test_reads_leave_the_reserve_for_probes_and_changes(tmp_path: Path) -> None:
    release = threading.Event()
    with server_with_access_control(application(release), tmp_path) as server:
        token = TokenStore(tmp_path / "tokens.json").tokens["admin"]
        head = f"Host: 127.0.0.1\r\nAuthorization: Bearer {token}\r\n"
        with contextlib.ExitStack() as stack:
            for _ in range(RESERVE):
                busy = stack.enter_context(server.connect())
                busy.sendall(f"GET /slow HTTP/1.1\r\n{head}\r\n".encode())
            client = stack.enter_context(httpx.Client(headers={"Authorization": f"Bearer {token}"}, timeout=60))
            refused = until(
                lambda: found if (found := client.get(server.address)).status_code != 200 else None,
                "only the reserve is left",
            )
            assert (refused.status_code, refused.json()["code"]) == (503, "crowded")
            assert client.get(f"{server.address}/healthz").status_code == 200
            assert client.post(f"{server.address}/runs").status_code == 200
            release.set()
            until(lambda: client.get(server.address).status_code == 200, "service is normal")


@pytest.mark.unit
def test_new_connections_are_refused_while_all_are_busy(tmp_path: Path) -> None:
    release = threading.Event()
    with Server(application(release), 4) as server, contextlib.ExitStack() as stack:
        busy = [stack.enter_context(server.connect()) for _ in range(4)]
        for one in busy:
            one.sendall(b"GET /slow HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        until(lambda: len(server.server_state.tasks) == 4, "all four are busy")
        for _ in range(3):
            with server.connect() as extra:
                assert b" 503 " in extra.recv(4_096)
        release.set()
        assert all(b" 200 " in one.recv(4_096) for one in busy), "no busy connection was closed"


@pytest.mark.unit
@pytest.mark.parametrize("requests", [[], [HALF], [WHOLE, HALF]], ids=["idle", "first", "second"])
def test_headers_have_a_deadline(monkeypatch: pytest.MonkeyPatch, requests: list[bytes]) -> None:
    monkeypatch.setattr(connections, "HEADERS_S", 0.1)
    with Server(application(threading.Event()), 10) as server, server.connect() as slow:
        for request in requests:
            slow.sendall(request)
            if request == WHOLE:
                assert b" 200 " in slow.recv(4_096)
        with contextlib.suppress(ConnectionResetError):
            assert slow.recv(4_096) == b""


@pytest.mark.unit
def test_bodies_have_a_deadline(tmp_path: Path) -> None:
    with (
        server_with_access_control(application(threading.Event()), tmp_path, body_s=0.1) as server,
        server.connect() as slow,
    ):
        token = TokenStore(tmp_path / "tokens.json").tokens["admin"]
        head = f"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {token}\r\nContent-Length: 9\r\n\r\nx"
        slow.sendall(head.encode())
        assert b" 408 " in slow.recv(4_096)


_EXHAUSTED = """
import logging, os, resource, sys
from steppe.control.http.connections import preload_traceback_modules
logging.basicConfig(stream=sys.stderr)
preload_traceback_modules()
before = set(sys.modules)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
held = []
try:
    while True:
        held.append(os.open("/dev/null", os.O_RDONLY))
except OSError as error:
    logging.getLogger("asyncio").error("accept", exc_info=error)
    sys.stdout.write(repr(set(sys.modules) - before))
"""


@pytest.mark.unit
def test_errors_are_logged_without_imports_when_no_descriptor_is_left() -> None:
    done = subprocess.run([sys.executable, "-c", _EXHAUSTED], capture_output=True, text=True, timeout=120)
    assert done.stdout == "set()", done.stderr
    assert "Too many open files" in done.stderr


@pytest.mark.unit
def test_the_descriptors_held_for_runs_are_bounded(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    stores = [RunStore(tmp_path / f"{number}.sqlite") for number in range(2 * OPEN_PER_THREAD)]
    for store in stores:
        store.post("topic", {"a": 1})
    assert len(os.listdir("/proc/self/fd")) - before <= 3 * OPEN_PER_THREAD + 2
    assert all(store.read("topic") == [(1, {"a": 1})] for store in stores), "closed files are opened again"
    for store in stores:
        store.close()

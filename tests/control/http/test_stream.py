"""The WebSocket stream: a snapshot, numbered deltas without gaps, resuming, heartbeats; and the message buffer alone."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest
import uvicorn
from fastapi import FastAPI
from websockets.asyncio import client
from websockets.exceptions import ConnectionClosed
from websockets.frames import Frame
from websockets.streams import StreamReader

from steppe.control.factory import make_local_service
from steppe.control.http import app as app_module
from steppe.control.http import stream
from steppe.control.http.app import Routes
from steppe.control.http.auth import AccessControl, TokenStore
from steppe.control.http.server import bind_listener
from steppe.control.http.stream import Hub
from steppe.control.http.ws_frames import FrameSocket
from tests.support.service import LONG, SHORT, Served, finished, learning, listen, make, messages

pytestmark = pytest.mark.integration

HANDSHAKE = (
    "GET /api/v1/stream HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)


def next_of_kind(stream_messages: Iterator[dict], kind: str) -> tuple[dict, list[dict]]:
    """Return the next message of a kind, and all numbered messages up to it."""
    passed = []
    for message in stream_messages:
        if message["type"] not in ("heartbeat", "snapshot"):
            passed.append(message)
        if message["type"] == kind:
            break
    return message, passed


@pytest.mark.slow
def test_snapshot_deltas_and_resuming(served: Served, api: httpx.Client):
    waiting = make(api, SHORT, start=False)
    with listen(served) as socket:
        stream_messages = messages(socket)
        first, _ = next_of_kind(stream_messages, "snapshot")
        assert [run["id"] for run in first["runs"]] == [waiting]
        run = make(api, LONG)
        learning(api, run)
        points, passed = next_of_kind(stream_messages, "metrics")
        assert points["run"] == run
        assert points["series"]["train/updates"]
        last, more = next_of_kind(stream_messages, "run")
        numbers = [message["number"] for message in passed + more]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers))), "numbers are consecutive"
    assert finished(api, api.post(f"/api/v1/runs/{run}/stop"))["state"] == "succeeded"
    with listen(served, f"{first['epoch']}:{last['number']}") as socket:
        stream_messages = messages(socket)
        message = next(stream_messages)
        assert message["type"] != "snapshot"
        assert message["number"] == last["number"] + 1
        next_of_kind(stream_messages, "heartbeat")
    with listen(served, "00000000:3") as socket:
        assert next(messages(socket))["type"] == "snapshot", "numbers of an earlier service are not valid"


def test_the_buffer_drops_old_messages():
    hub = Hub(size=3)
    assert hub.after(0) == []
    for step in range(5):
        hub.put("step", step=step)
    assert [number for number, _ in hub.after(3) or ()] == [4, 5]
    assert hub.after(2) is not None
    assert hub.after(1) is None, "message 2 was overwritten"
    assert hub.after(9) is None, "a number in the future"
    large = Hub(size=100, size_bytes=1_000)
    for _ in range(5):
        large.put("step", text="x" * 400)
    assert large.after(2) is None, "the buffer is limited in bytes too"
    assert [number for number, _ in large.after(3) or ()] == [4, 5]


def messages_in(frame: bytes) -> list[dict]:
    """Return the messages in a frame, parsed by a client library."""
    reader = StreamReader()
    reader.feed_data(frame)
    with pytest.raises(StopIteration) as end:
        next(Frame.parse(reader.read_exact, mask=False))
    return [json.loads(line) for line in end.value.value.data.splitlines()]


def test_missed_messages_are_sent_in_frames_of_limited_size(monkeypatch: pytest.MonkeyPatch):
    hub = Hub()
    assert hub.frame(0) == (0, b"")
    for step in range(3):
        hub.put("step", step=step)
    assert [message["step"] for message in messages_in(hub.frame(1)[1])] == [1, 2]
    assert hub.frame(1)[0] == 3
    assert hub.frame(1)[1] is hub.frame(1)[1], "one frame for all clients at this position"
    hub.put("step", step=3, text="two\nlines, ünd more")
    assert [message["step"] for message in messages_in(hub.frame(1)[1])] == [1, 2, 3]
    assert messages_in(hub.frame(3)[1])[0]["text"] == "two\nlines, ünd more"
    assert hub.frame(4) == (4, b"")
    assert hub.frame(5) is None
    monkeypatch.setattr(stream, "FRAME_BYTES", 50)
    number, frame = hub.frame(0)
    assert (number, len(messages_in(frame))) == (2, 2), "the rest is in the next frame"
    assert hub.frame(number)[0] > number


def test_clients_are_notified_once_per_poll():
    async def scenario() -> list[int]:
        hub, notified = Hub(), list[int]()
        hub.serve_on(asyncio.get_running_loop())
        waiting = asyncio.ensure_future(hub.news(60.0))
        await asyncio.sleep(0)
        for _ in range(3):
            await asyncio.to_thread(hub.put, "step")
        notified.append(waiting.done())
        await asyncio.to_thread(hub.wake)
        await waiting
        again = asyncio.ensure_future(hub.news(0.0))
        hub.wake()  # without new messages
        await again
        return [*notified, hub.number]

    assert asyncio.run(scenario()) == [False, 3]


@contextlib.asynccontextmanager
async def serve_hub(hub: Hub, directory: Path) -> AsyncIterator[str]:
    """Serve the messages of a hub with a real server and without runs; yield the address of the stream."""
    service = make_local_service()
    app = FastAPI()
    app.include_router(Routes(service, hub, AccessControl(TokenStore(directory / "tokens.json"))).router)
    listener = bind_listener("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(app, ws=FrameSocket, ws_per_message_deflate=False, log_level="error"))
    hub.serve_on(asyncio.get_running_loop())
    serving, delivering = asyncio.ensure_future(server.serve([listener])), asyncio.ensure_future(hub.deliver())
    try:
        yield f"ws://127.0.0.1:{listener.getsockname()[1]}/api/v1/stream"
    finally:
        delivering.cancel()
        server.should_exit = True
        await serving
        service.close()


@pytest.fixture
def no_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STEPPE_RUNS", str(tmp_path / "runs"))
    return tmp_path


def test_a_slow_reader_receives_everything_in_order(monkeypatch: pytest.MonkeyPatch, no_runs: Path):
    """Send far more than socket buffers hold; it is sent as the client reads, without new messages."""
    monkeypatch.setattr(stream, "HEARTBEAT_INTERVAL_S", 3_600.0)

    async def scenario() -> list[int]:
        hub = Hub(size_bytes=1 << 30)
        async with (
            serve_hub(hub, no_runs) as address,
            client.connect(address, max_size=None, max_queue=1, compression=None) as socket,
        ):
            assert json.loads(await socket.recv())["type"] == "snapshot"
            for step in range(100):
                hub.put("step", step=step, text="x" * (1 << 18))
            hub.wake()
            found: list[int] = []
            while len(found) < 100:
                for line in str(await socket.recv()).splitlines():
                    found += [message["step"]] if (message := json.loads(line))["type"] == "step" else []
            return found

    assert asyncio.run(asyncio.wait_for(scenario(), 60)) == list(range(100))


def test_a_client_that_is_too_slow_is_dropped_with_a_notice(no_runs: Path):
    async def scenario() -> tuple[dict, int]:
        hub = Hub(size=3)
        async with serve_hub(hub, no_runs) as address, client.connect(address, compression=None) as socket:
            await socket.recv()
            for step in range(5):
                hub.put("step", step=step)
            hub.wake()
            notice = json.loads(await socket.recv())
            with pytest.raises(ConnectionClosed) as end:
                await socket.recv()
            return notice, end.value.rcvd.code

    notice, code = asyncio.run(asyncio.wait_for(scenario(), 60))
    assert (notice["type"], code) == ("dropped", 1013)
    assert "connect again" in notice["detail"]


def test_a_client_that_reads_nothing_is_disconnected(monkeypatch: pytest.MonkeyPatch, no_runs: Path):
    monkeypatch.setattr(stream, "SEND_TIMEOUT_S", 0.0)
    monkeypatch.setattr(app_module, "SEND_TIMEOUT_S", 0.0)

    async def scenario() -> int:
        hub = Hub(size_bytes=1 << 30)
        async with serve_hub(hub, no_runs) as address:
            _, writing = await asyncio.open_connection(*address.split("/")[2].split(":"), limit=1)
            writing.write(HANDSHAKE.encode())
            while not hub.clients:
                await asyncio.sleep(0.01)
            for step in range(100):
                hub.put("step", step=step, text="x" * (1 << 18))
            hub.wake()
            while hub.clients:
                await asyncio.sleep(0.01)
            writing.close()
            return hub.clients

    assert asyncio.run(asyncio.wait_for(scenario(), 60)) == 0

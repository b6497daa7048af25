"""The WebSocket: a snapshot, numbered deltas without a gap, resuming, heartbeats; and the ring by itself."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import httpx
import pytest
from control_kit import LONG, SHORT, Served, finished, learning, listen, make, messages

from steppe.control import stream
from steppe.control.stream import Hub

pytestmark = pytest.mark.integration


def heard(told: Iterator[dict], kind: str) -> tuple[dict, list[dict]]:
    """The next message of a kind, and all numbered ones up to it."""
    passed = []
    for message in told:
        if message["type"] not in ("heartbeat", "snapshot"):
            passed.append(message)
        if message["type"] == kind:
            break
    return message, passed


def test_snapshot_deltas_and_resuming(served: Served, api: httpx.Client):
    waiting = make(api, SHORT, start=False)
    with listen(served) as socket:
        told = messages(socket)
        first, _ = heard(told, "snapshot")
        assert [run["id"] for run in first["runs"]] == [waiting]
        run = make(api, LONG)
        learning(api, run)
        points, passed = heard(told, "metrics")
        assert points["run"] == run
        assert points["series"]["train/updates"]
        last, more = heard(told, "run")
        numbers = [message["number"] for message in passed + more]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers))), "nothing is left out"
    assert finished(api, api.post(f"/api/v1/runs/{run}/stop"))["state"] == "succeeded"
    with listen(served, f"{first['epoch']}:{last['number']}") as socket:
        told = messages(socket)
        message = next(told)
        assert message["type"] != "snapshot"
        assert message["number"] == last["number"] + 1
        heard(told, "heartbeat")
    with listen(served, "00000000:3") as socket:
        assert next(messages(socket))["type"] == "snapshot", "numbers of another life mean nothing"


def test_the_ring_drops_who_is_too_slow():
    hub = Hub(size=3)
    assert hub.after(0) == []
    for step in range(5):
        hub.put("step", step=step)
    assert [number for number, _ in hub.after(3) or ()] == [4, 5]
    assert hub.after(2) is not None
    assert hub.after(1) is None, "message 2 is gone"
    assert hub.after(9) is None, "a number that was never given"
    large = Hub(size=100, size_bytes=1_000)
    for _ in range(5):
        large.put("step", text="x" * 400)
    assert large.after(2) is None, "the ring is bounded in bytes too"
    assert [number for number, _ in large.after(3) or ()] == [4, 5]


def test_what_was_missed_goes_out_at_once_and_bounded(monkeypatch: pytest.MonkeyPatch):
    hub = Hub()
    assert hub.frame(0) == (0, "")
    for step in range(3):
        hub.put("step", step=step)
    assert [json.loads(line)["step"] for line in hub.frame(1)[1].splitlines()] == [1, 2]
    assert hub.frame(1)[0] == 3
    assert hub.frame(1)[1] is hub.frame(1)[1], "made once for all who have heard as much"
    hub.put("step", step=3, text="two\nlines")
    assert [json.loads(line)["step"] for line in hub.frame(1)[1].splitlines()] == [1, 2, 3]
    assert hub.frame(4) == (4, "")
    assert hub.frame(5) is None
    monkeypatch.setattr(stream, "FRAME_BYTES", 60)
    number, text = hub.frame(0)
    assert (number, len(text.splitlines())) == (2, 2), "the rest comes with the next"
    assert hub.frame(number)[0] > number


def test_news_wakes_a_waiting_client():
    async def scenario() -> int:
        hub = Hub()
        hub.serve_on(asyncio.get_running_loop())
        waiting = asyncio.ensure_future(hub.news(60.0))
        await asyncio.sleep(0)
        await asyncio.to_thread(hub.put, "step")
        await waiting
        return hub.number

    assert asyncio.run(scenario()) == 1

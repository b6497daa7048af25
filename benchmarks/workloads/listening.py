"""Many WebSocket clients in one process that cost little: plain sockets, and a text that all of them get is read once.

They stand in for browsers on other machines, so what they take of this one's processors is to be small, and is told apart.
"""

from __future__ import annotations

import base64
import json
import os
import selectors
import socket
import time
from multiprocessing.connection import Connection
from urllib.parse import urlsplit

Delays = list[tuple[float, float]]  # when a point was posted, and how long it took to a client
TEXT, CLOSE, PING = 0x1, 0x8, 0x9
RECEIVED_BYTES = 1 << 18
KEPT = 256  # texts that are remembered while clients get them
GATHER_S = 0.002  # between looks: clients elsewhere would not wake this machine's processors for every one of them


class Client:
    """One socket with an upgraded connection, and what has come of a frame that is not whole yet."""

    def __init__(self, address: str, headers: dict[str, str]) -> None:
        where = urlsplit(address)
        assert where.hostname is not None
        self.socket = socket.create_connection((where.hostname, where.port or 80), timeout=30)
        told = {
            "Host": where.netloc,
            "Upgrade": "websocket",
            "Connection": "Upgrade",
            "Sec-WebSocket-Key": base64.b64encode(os.urandom(16)).decode(),
            "Sec-WebSocket-Version": "13",
            **headers,
        }
        lines = "".join(f"{name}: {value}\r\n" for name, value in told.items())
        self.socket.sendall(f"GET {where.path} HTTP/1.1\r\n{lines}\r\n".encode())
        answer = b""
        while b"\r\n\r\n" not in answer:
            more = self.socket.recv(4_096)
            assert more, "the service hung up"
            answer += more
        head, _, self.rest = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 101"), head
        self.socket.setblocking(False)

    def texts(self) -> list[bytes]:
        """What has come; pings are answered."""
        data = self.socket.recv(RECEIVED_BYTES)
        assert data, "the service hung up"
        data, found = self.rest + data if self.rest else data, []
        at = 0
        while (frame := _frame(data, at)) is not None:
            code, begin, at = frame
            assert code != CLOSE, data[begin:at]
            if code == PING:
                self.socket.send(bytes((0x8A, 0x80 | (at - begin), 0, 0, 0, 0)) + data[begin:at])  # masked with noughts
            elif code == TEXT:
                found.append(data[begin:at])
        self.rest = data[at:]
        return found


def _frame(data: bytes, at: int) -> tuple[int, int, int] | None:
    """Kind, begin and end of the frame there; None while it is not whole. A service masks nothing and splits nothing."""
    if len(data) < at + 2:
        return None
    size = data[at + 1]
    begin = at + 2 + {126: 2, 127: 8}.get(size, 0)
    if size >= 126:
        size = int.from_bytes(data[at + 2 : begin], "big")
    return (data[at] & 0xF, begin, begin + size) if begin + size <= len(data) else None


def posted(text: bytes, run: str, series: str) -> list[float]:
    """When the points of a run's curve were posted that a text brings."""
    found = []
    for line in text.splitlines():
        message = json.loads(line)
        if message["type"] == "metrics" and message["run"] == run:
            found += [time_s for _, time_s, _ in message["series"].get(series, ())]
    return found


def hear(address: str, headers: dict[str, str], clients: int, run: str, series: str, pipe: Connection) -> None:
    """Clients in a process of their own, until told to end; sends the delays of the points of a run's curve at each of them."""
    waiting, delays, known = selectors.DefaultSelector(), Delays(), dict[bytes, list[float]]()
    waiting.register(pipe, selectors.EVENT_READ, None)
    for _ in range(clients):
        client = Client(address, headers)
        waiting.register(client.socket, selectors.EVENT_READ, client)
    while True:
        waiting.select()
        time.sleep(GATHER_S)  # and then all that are ready at once
        for key, _ in waiting.select():
            if key.data is None:
                return pipe.send(delays)
            for text in key.data.texts():
                now = time.time()
                if text not in known:
                    if len(known) >= KEPT:
                        known.clear()
                    known[text] = posted(text, run, series)
                delays.extend((posted_s, now - posted_s) for posted_s in known[text])

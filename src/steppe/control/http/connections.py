"""Limits on TCP connections, so that idle clients can neither block others nor exhaust the file descriptors.

There are at most `capacity()` connections, about half of the process's descriptor limit; run stores, logs and children
need the rest. A connection without a request in progress (idle, or slowly sending its headers) is closed after a
deadline, and the one that has waited longest is closed earlier if a new one needs its slot. Connections with a request
in progress are never closed for others. The last `RESERVE` slots are for probes and changes: see
`Connections.only_reserve_left`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import linecache
import logging
import resource
import socket
import tokenize  # noqa: F401  linecache imports it when a traceback is printed
import traceback
import weakref
from collections.abc import Callable
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_CONNECTIONS = 4_096
RESERVE = 32
HEADERS_S = 10.0  # from the first byte of a request, or from connecting, to the end of its headers
WRITE_S = 30.0  # how long a client may leave a response unread
_BUSY = b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\nretry-after: 1\r\ncontent-length: 0\r\n\r\n"


def capacity() -> int:
    """Return the maximum number of connections under this process's descriptor limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if soft == resource.RLIM_INFINITY else max(2 * RESERVE, min(MAX_CONNECTIONS, soft // 2))


class Connections:
    """The connections of one server; belongs to its event loop."""

    def __init__(self, most: int | None = None) -> None:
        self.most = most or capacity()
        self._open: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        # Without a protocol yet.
        self._new: weakref.WeakValueDictionary[int, socket.socket] = weakref.WeakValueDictionary()
        self._idle: dict[BoundedHttp, None] = {}  # without a request in progress, longest first

    @property
    def only_reserve_left(self) -> bool:
        """Whether only the reserve is left: busy connections fill all slots of ordinary requests."""
        return len(self._open) - len(self._idle) > self.most - RESERVE

    @property
    def protocol(self) -> Callable[..., BoundedHttp]:
        """Factory of the protocol that uvicorn creates for every connection."""
        return functools.partial(BoundedHttp, self)

    def listen(self, host: str, port: int) -> BoundedListener:
        """Bind and listen; raises OSError if that fails."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = BoundedListener(self, family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
            listener.listen(2_048)  # connections before the application is ready wait instead of being refused
        except OSError:
            listener.close()
            raise
        return listener

    @property
    def is_changing(self) -> bool:
        """Whether the free capacity is known only in the next iteration of the event loop.

        Until then, connections are being set up or closed.
        """
        return len(self._open) > self.most or (len(self._open) == self.most and len(self._new) > 0)

    def evict_idle(self) -> bool:
        """If at capacity, close the connection that has been idle longest; return False if all are busy."""
        if len(self._open) < self.most:
            return True
        if not self._idle:
            return False
        oldest = next(iter(self._idle))
        self.mark_busy(oldest)  # its transport is aborted next
        oldest.transport.abort()
        return True

    def opened(self, connection: socket.socket) -> None:
        self._open.add(connection)
        self._new[connection.fileno()] = connection

    def protocol_attached(self, descriptor: int) -> None:
        """Record that a connection has its protocol, or was closed before it got one."""
        self._new.pop(descriptor, None)

    def closed(self, connection: socket.socket) -> None:
        self._open.discard(connection)

    def mark_idle(self, protocol: BoundedHttp) -> None:
        """Record that no request is in progress there."""
        self._idle.setdefault(protocol)

    def mark_busy(self, protocol: BoundedHttp) -> None:
        """Record that a request is in progress there, or that the connection is gone."""
        self._idle.pop(protocol, None)


class CountedSocket(socket.socket):
    """One connection's socket, which is counted while it is open."""

    connections: Connections | None = None

    def close(self) -> None:
        descriptor = self.fileno()
        super().close()
        if self.connections is not None:
            self.connections.protocol_attached(descriptor)
            self.connections.closed(self)


class BoundedListener(socket.socket):
    """A listening socket that accepts connections only up to the limit."""

    def __init__(self, connections: Connections, family: int, kind: int) -> None:
        super().__init__(family, kind)
        self._connections = connections

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept a connection; raises BlockingIOError without free capacity, and the event loop then tries again."""
        if self._connections.is_changing:
            raise BlockingIOError
        descriptor, address = self._accept()  # type: ignore[attr-defined]
        connection = CountedSocket(self.family, self.type, self.proto, fileno=descriptor)
        if not self._connections.evict_idle():
            _reject(connection)
            raise BlockingIOError
        self._connections.opened(connection)
        connection.connections = self._connections
        return connection, address


def _reject(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.setblocking(False)
        connection.send(_BUSY)
    connection.close()


class BoundedHttp(H11Protocol):
    """uvicorn's HTTP/1.1 protocol with deadlines for receiving headers and for sending the response."""

    def __init__(self, connections: Connections, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._connections = connections
        self._upgraded = False  # to a WebSocket, which has its own protocol
        self._deadline: asyncio.TimerHandle | None = None
        self._write_deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._connections.protocol_attached(transport.get_extra_info("socket").fileno())
        self._connections.mark_idle(self)
        self._set_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._begin_request()
        self.resume_writing()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._is_responding:
            self._begin_request()
        elif self._deadline is None and not (self._upgraded or self.transport.is_closing()):
            self._set_deadline()

    def on_response_complete(self) -> None:
        super().on_response_complete()  # sets the deadline for idle connections, and starts a pipelined request
        if not self._is_responding and not self.transport.is_closing():
            self._connections.mark_idle(self)

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        self._upgraded = True
        self._begin_request()
        super().handle_websocket_upgrade(event)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_deadline = self._write_deadline or self.loop.call_later(WRITE_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_deadline is not None:
            self._write_deadline.cancel()
            self._write_deadline = None

    @property
    def _is_responding(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _set_deadline(self) -> None:
        self._deadline = self.loop.call_later(HEADERS_S, self.transport.abort)

    def _begin_request(self) -> None:
        self._connections.mark_busy(self)
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def preload_traceback_modules() -> None:
    """Import and cache what printing a traceback needs: without free descriptors nothing can be imported later."""
    try:
        raise OSError(24, "rehearsal")
    except OSError as error:
        linecache.checkcache()
        traceback.format_exception(error)
        logging.Formatter().formatException((type(error), error, error.__traceback__))

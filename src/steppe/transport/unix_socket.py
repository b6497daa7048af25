"""RPC between two processes of one machine, over a Unix socket in the run's shared directory.

A message is its length (8 bytes) and its bytes. A send blocks while the other side does not read (backpressure).
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from steppe.core.contracts.errors import RoleDied

_LENGTH = struct.Struct("<Q")
_POLL_INTERVAL_S = 0.01


class SocketRpcServer:
    """An RpcServer that listens at `path` and serves one client at a time."""

    def __init__(self, path: Path) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        temporary = path.with_name(f"{path.name}.tmp")
        self._listener.bind(str(temporary))
        self._listener.listen(1)
        temporary.rename(path)  # the path appears only once clients can connect
        self._client: socket.socket | None = None

    def take(self, timeout_s: float) -> bytearray | None:
        if not select.select([self._client or self._listener], [], [], timeout_s)[0]:
            return None
        if self._client is None:
            self._client, _ = self._listener.accept()
        try:
            return _read(self._client, _LENGTH.unpack(_read(self._client, _LENGTH.size))[0])
        except (ConnectionError, EOFError):  # the client is gone; another may connect
            self._client.close()
            self._client = None
            return None

    def reply(self, data: bytes) -> None:
        assert self._client is not None
        with contextlib.suppress(ConnectionError):  # the client no longer waits for the reply
            _write(self._client, data)

    def close(self) -> None:
        """Stop listening and close the connection."""
        self._listener.close()
        if self._client is not None:
            self._client.close()


class SocketRpcClient:
    """An RpcClient of the role `name`, whose server will listen at `path`; `is_cancelled` returns whether to stop waiting."""

    def __init__(self, name: str, path: Path, is_cancelled: Callable[[], bool]) -> None:
        self.name, self._path, self._is_cancelled = name, path, is_cancelled
        self._socket: socket.socket | None = None

    def send(self, request: bytes) -> None:
        with self._as_role_died():
            _write(self._connected(), request)

    def receive(self) -> bytearray:
        with self._as_role_died():
            return _read(self._connected(), _LENGTH.unpack(_read(self._connected(), _LENGTH.size))[0])

    def close(self) -> None:
        """Close the connection; the next call opens a new one."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _connected(self) -> socket.socket:
        if self._socket is None:
            while not self._path.exists():
                if self._is_cancelled():
                    raise RoleDied(f"{self.name} did not start before the run ended")
                time.sleep(_POLL_INTERVAL_S)
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                connection.connect(str(self._path))
            except OSError:
                connection.close()
                raise
            self._socket = connection
        return self._socket

    @contextlib.contextmanager
    def _as_role_died(self) -> Iterator[None]:
        try:
            yield
        except (ConnectionError, EOFError, FileNotFoundError):
            raise RoleDied(
                f"{self.name} is gone, and with it a part of the replay; the newest checkpoint has it"
            ) from None


def _write(connection: socket.socket, data: bytes) -> None:
    connection.sendall(_LENGTH.pack(len(data)))
    connection.sendall(data)


def _read(connection: socket.socket, count: int) -> bytearray:
    data = bytearray(count)
    unread = memoryview(data)
    while unread:
        count_read = connection.recv_into(unread)
        if not count_read:
            raise EOFError("the other side has ended")
        unread = unread[count_read:]
    return data

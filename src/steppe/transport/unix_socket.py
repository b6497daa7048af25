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
_LOOK_S = 0.01


class SocketRpcServer:
    """An RpcServer that listens at `path` and serves one client at a time."""

    def __init__(self, path: Path) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        aside = path.with_name(f"{path.name}.tmp")
        self._listener.bind(str(aside))
        self._listener.listen(1)
        aside.rename(path)  # the path appears only once clients can connect
        self._asker: socket.socket | None = None

    def take(self, timeout_s: float) -> bytearray | None:
        if not select.select([self._asker or self._listener], [], [], timeout_s)[0]:
            return None
        if self._asker is None:
            self._asker, _ = self._listener.accept()
        try:
            return _read(self._asker, _LENGTH.unpack(_read(self._asker, _LENGTH.size))[0])
        except (ConnectionError, EOFError):  # the client is gone; another may connect
            self._asker.close()
            self._asker = None
            return None

    def reply(self, answer: bytes) -> None:
        assert self._asker is not None
        with contextlib.suppress(ConnectionError):  # the client no longer waits for the reply
            _write(self._asker, answer)

    def close(self) -> None:
        """Stop listening and close the connection."""
        self._listener.close()
        if self._asker is not None:
            self._asker.close()


class SocketRpcClient:
    """An RpcClient of the role `name`, whose server will listen at `path`; `given_up` tells when to stop waiting."""

    def __init__(self, name: str, path: Path, given_up: Callable[[], bool]) -> None:
        self.name, self._path, self._is_cancelled = name, path, given_up
        self._socket: socket.socket | None = None

    def send(self, question: bytes) -> None:
        with self._blaming():
            _write(self._connected(), question)

    def receive(self) -> bytearray:
        with self._blaming():
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
                    raise RoleDied(f"{self.name} was not there before the run ended")
                time.sleep(_LOOK_S)
            found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                found.connect(str(self._path))
            except OSError:
                found.close()
                raise
            self._socket = found
        return self._socket

    @contextlib.contextmanager
    def _blaming(self) -> Iterator[None]:
        try:
            yield
        except (ConnectionError, EOFError, FileNotFoundError):
            raise RoleDied(
                f"{self.name} is gone, and with it a part of the replay; the newest checkpoint has it"
            ) from None


def _write(to: socket.socket, data: bytes) -> None:
    to.sendall(_LENGTH.pack(len(data)))
    to.sendall(data)


def _read(of: socket.socket, count: int) -> bytearray:
    data = bytearray(count)
    rest = memoryview(data)
    while rest:
        got = of.recv_into(rest)
        if not got:
            raise EOFError("the other side has ended")
        rest = rest[got:]
    return data

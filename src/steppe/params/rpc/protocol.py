"""The protocol between gRPC server and client: method names, request format, TLS settings, and local token files.

A request is one packed tree (core/io/codec.py): numbers are sent as raw bytes after their shape, validated and never
pickled. There is no checksum over them: TLS has its own, and without TLS they do not leave the machine.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from steppe.core.contracts.errors import ConfigError, DamagedFile
from steppe.core.io.codec import Buffer, unpack

SERVICE = "steppe.ParameterServer"
HEALTH = "/grpc.health.v1.Health/Check"  # the standard protocol; its two messages are encoded below
SERVING, NOT_SERVING = b"\x08\x01", b"\x08\x02"
ROUND_METADATA_KEY = "steppe-round"  # trailing metadata of a pull
TOKEN_VARIABLE = "STEPPE_PARAMS_TOKEN"
BULK_CHANNEL_OPTIONS = [  # send megabytes in few frames
    ("grpc.http2.lookahead_bytes", 16 << 20),
    ("grpc.http2.max_frame_size", 1 << 20),
    ("grpc.http2.write_buffer_size", 4 << 20),
    ("grpc.http2.bdp_probe", 0),
]
CHUNK = 1 << 20  # bytes; a longer row is sent in parts of this size, which are read while the next ones are in flight
SLACK = 1 << 20  # bytes of names, shapes and counters in the largest message


@dataclass(frozen=True)
class Tls:
    """PEM files of a server: its certificate chain and its private key."""

    certificate: str | Path
    key: str | Path


def iter_push_parts(header: bytes, row: np.ndarray) -> Iterator[bytes]:
    """Yield a push in parts: its header, then the row's bytes."""
    yield header
    raw = np.ascontiguousarray(row).view(np.uint8).data
    for start in range(0, len(raw), CHUNK):
        yield bytes(raw[start : start + CHUNK])


def method_path(method: str) -> str:
    """Return a method's full gRPC name."""
    return f"/{SERVICE}/{method}"


def read_request(data: Buffer, fields: Mapping[str, tuple[type, ...]]) -> dict[str, Any]:
    """Decode a request; raise DamagedFile unless it has exactly these fields, each of one of its types."""
    tree = unpack(data, copy=False, sealed=False)
    if not isinstance(tree, dict) or set(tree) != set(fields):
        raise DamagedFile(f"a request has the fields {', '.join(fields)}, and this one does not")
    for name, kinds in fields.items():
        if not isinstance(tree[name], kinds) or (isinstance(tree[name], bool) and bool not in kinds):
            raise DamagedFile(f"the request's {name!r} is a {type(tree[name]).__name__}")
    return tree


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach the host."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def new_token() -> str:
    return secrets.token_urlsafe(32)


def token_file(port: int) -> Path:
    """Return the file in which a server on loopback stores its token for clients of the same user."""
    home = os.environ.get("STEPPE_HOME")
    return (Path(home) if home else Path.home() / ".steppe") / "params" / f"{port}.token"


def write_token(port: int, token: str) -> Path:
    """Write the token to a file that only this user can read; return its path."""
    path = token_file(port)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        path.unlink()  # left by a killed server; do not trust its permissions
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(token)
    return path


def find_token(host: str, port: int) -> str | None:
    """Return the token from the environment or from a local server's token file, or None."""
    given = os.environ.get(TOKEN_VARIABLE)
    if given:
        return given
    if not is_loopback(host):
        return None
    try:
        return token_file(port).read_text().strip() or None
    except OSError:
        return None


def parse_address(url: str) -> tuple[bool, str, int]:
    """Return (TLS, host, port) of `grpc://host:port` or `grpcs://host:port`; raise ConfigError for other addresses."""
    scheme, _, rest = url.partition("://")
    host, _, port = rest.rpartition(":")
    if scheme not in ("grpc", "grpcs") or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"{url!r} is no address of a parameter server: say grpc://HOST:PORT, or grpcs:// with TLS")
    return scheme == "grpcs", host, int(port)

"""What service and client agree on: method names, how calls are named and secured, and where a local token lies.

A request is one packed tree (core/io/codec.py), so numbers travel as raw bytes behind their shape, checked and never pickled.
It has no checksum over them: TLS has its own, and without TLS they do not leave the machine.
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
HEALTH = "/grpc.health.v1.Health/Check"  # the standard protocol, whose two messages are small enough to write by hand
SERVING, NOT_SERVING = b"\x08\x01", b"\x08\x02"
ROUND_METADATA_KEY = "steppe-round"  # trailing metadata of a pull
TOKEN_VARIABLE = "STEPPE_PARAMS_TOKEN"
BULK_CHANNEL_OPTIONS = [  # megabytes in few frames
    ("grpc.http2.lookahead_bytes", 16 << 20),
    ("grpc.http2.max_frame_size", 1 << 20),
    ("grpc.http2.write_buffer_size", 4 << 20),
    ("grpc.http2.bdp_probe", 0),
]
CHUNK = 1 << 20  # bytes; a longer row comes in parts of this size, which are read while the next are under way
SLACK = 1 << 20  # names, shapes and counters beside the numbers of the largest message


@dataclass(frozen=True)
class Tls:
    """PEM files of a server: its certificate chain and its key."""

    certificate: str | Path
    key: str | Path


def iter_push_parts(header: bytes, row: np.ndarray) -> Iterator[bytes]:
    """A push in parts: its header, then the row's bytes."""
    yield header
    raw = np.ascontiguousarray(row).view(np.uint8).data
    for start in range(0, len(raw), CHUNK):
        yield bytes(raw[start : start + CHUNK])


def method_path(method: str) -> str:
    """A method's full name on the wire."""
    return f"/{SERVICE}/{method}"


def read_request(data: Buffer, fields: Mapping[str, tuple[type, ...]]) -> dict[str, Any]:
    """A request with exactly these fields, each of one of its types; DamagedFile says what is wrong."""
    tree = unpack(data, copy=False, sealed=False)
    if not isinstance(tree, dict) or set(tree) != set(fields):
        raise DamagedFile(f"a request has the fields {', '.join(fields)}, and this one does not")
    for name, kinds in fields.items():
        if not isinstance(tree[name], kinds) or (isinstance(tree[name], bool) and bool not in kinds):
            raise DamagedFile(f"the request's {name!r} is a {type(tree[name]).__name__}")
    return tree


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach it."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def new_token() -> str:
    return secrets.token_urlsafe(32)


def token_file(port: int) -> Path:
    """Where a server on loopback leaves its token for clients of the same user."""
    home = os.environ.get("STEPPE_HOME")
    return (Path(home) if home else Path.home() / ".steppe") / "params" / f"{port}.token"


def write_token(port: int, token: str) -> Path:
    """Write the token where only this user reads it."""
    path = token_file(port)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        path.unlink()  # of a server that was killed; its permissions are not trusted
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(token)
    return path


def find_token(host: str, port: int) -> str | None:
    """From the environment, or the file that a local server left."""
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
    """(TLS, host, port) of `grpc://host:port` or `grpcs://host:port`."""
    scheme, _, rest = url.partition("://")
    host, _, port = rest.rpartition(":")
    if scheme not in ("grpc", "grpcs") or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"{url!r} is no address of a parameter server: say grpc://HOST:PORT, or grpcs:// with TLS")
    return scheme == "grpcs", host, int(port)

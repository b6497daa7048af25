"""What gRPC server and client agree on beside the messages: addresses, TLS settings, token files, channel options.

There is no checksum over the messages: TLS has its own, and without TLS they do not leave the machine.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from steppe.core.contracts.errors import ConfigError

TOKEN_VARIABLE = "STEPPE_PARAMS_TOKEN"
BULK_CHANNEL_OPTIONS = [  # send megabytes in few frames
    ("grpc.http2.lookahead_bytes", 16 << 20),
    ("grpc.http2.max_frame_size", 1 << 20),
    ("grpc.http2.write_buffer_size", 4 << 20),
    ("grpc.http2.bdp_probe", 0),
]
SLACK = 1 << 20  # bytes of names, shapes and counters in the largest message


@dataclass(frozen=True)
class Tls:
    """PEM files of a server: its certificate chain and its private key."""

    certificate: str | Path
    key: str | Path


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

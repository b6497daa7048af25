"""The service as a process: bind, say where it is, serve until a signal."""

from __future__ import annotations

import socket

import uvicorn

from steppe.control.api import make_app
from steppe.control.auth import Gate, Keys, require_safe_bind
from steppe.control.service import Bounds, Service
from steppe.core.errors import UsageError

KEYS = "tokens.json"


def serve(host: str, port: int, allowed: tuple[str, ...], bounds: Bounds) -> None:
    """Blocks until SIGINT or SIGTERM; runs go on."""
    require_safe_bind(host, allowed)
    listener = _bind(host, port)
    service = Service(bounds)
    keys = Keys(service.private / KEYS)
    app = make_app(service, Gate(keys, allowed))
    address = f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"
    print(f"steppe serves {service.root} at {address}", flush=True)
    print(f"sign in once:  {address}/sign-in?code={keys.new_link()}", flush=True)
    print(f"tokens:        {keys.path}", flush=True)
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,  # addresses carry sign-in codes
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=3,
        ws="websockets-sansio",
        ws_max_size=4_096,
        limit_concurrency=1_000,
    )
    uvicorn.Server(config).run(sockets=[listener])


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise UsageError(f"cannot listen on {host}:{port}: {error.strerror}; choose another --port") from None
    return listener

"""`steppe serve`: the control plane of this machine's runs, on loopback unless somebody says otherwise."""

from __future__ import annotations

from typing import Annotated

import typer

from steppe.core.errors import MissingExtra, UsageError

Hosts = Annotated[
    list[str] | None,
    typer.Option("--allow-host", metavar="NAME", help="Answer to this host name too. May be repeated."),
]
Modules = Annotated[
    list[str] | None,
    typer.Option("--allow-env", metavar="MODULE:ID", help="Let runs use this environment too. May be repeated."),
]


def serve(
    host: Annotated[str, typer.Option(metavar="ADDR", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(metavar="N", min=0, max=65_535, help="Port; 0 takes a free one.")] = 8900,
    allow_host: Hosts = None,
    allow_env: Modules = None,
    max_actors: Annotated[int, typer.Option(metavar="N", min=1, help="Most actors of one run.")] = 16,
    max_runs: Annotated[int, typer.Option(metavar="N", min=1, help="Most runs under way at once.")] = 8,
) -> None:
    """Start, stop, watch, scale and tune runs over HTTP.

    Prints its address with a link that signs in once. Runs outlive it: stopped or killed and started again, it goes on
    where it was.
    """
    try:
        from steppe.control import serving
    except ImportError as error:
        if error.name not in ("fastapi", "uvicorn", "anyio", "starlette"):
            raise
        raise MissingExtra("steppe serve", "server") from None
    from steppe.control.service import Bounds

    for name in allow_env or ():
        if ":" not in name:
            raise UsageError(f"--allow-env {name}: give module:Id; registered environments need no leave")
    bounds = Bounds(actors=max_actors, live_runs=max_runs, modules=tuple(allow_env or ()))
    serving.serve(host, port, tuple(allow_host or ()), bounds)

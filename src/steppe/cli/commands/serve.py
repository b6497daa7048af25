"""`steppe serve` and `steppe mcp`: the control plane of this machine's runs, at an address or for one AI client."""

from __future__ import annotations

import os
from enum import StrEnum
from types import ModuleType
from typing import TYPE_CHECKING, Annotated

import typer

from steppe.core.contracts.errors import MissingExtra, UsageError

if TYPE_CHECKING:
    from steppe.control.service import Bounds
    from steppe.core.config.run import KafkaConfig

Hosts = Annotated[
    list[str] | None,
    typer.Option("--allow-host", metavar="NAME", help="Answer to this host name too. May be repeated."),
]
Modules = Annotated[
    list[str] | None,
    typer.Option("--allow-env", metavar="MODULE:ID", help="Let runs use this environment too. May be repeated."),
]
Kafka = Annotated[
    str | None,
    typer.Option(
        metavar="ADDR", help="Let runs go through these Kafka brokers, host:port; STEPPE_KAFKA__* says how to get in."
    ),
]
MaxActors = Annotated[int, typer.Option(metavar="N", min=1, help="Most actors of one run.")]
MaxRuns = Annotated[int, typer.Option(metavar="N", min=1, help="Most runs under way at once.")]


class Scope(StrEnum):
    """What a caller may do."""

    READ = "read"
    CONTROL = "control"
    ADMIN = "admin"


class Autoscale(StrEnum):
    """What is done about the number of actors."""

    OFF = "off"
    RECOMMEND = "recommend"
    SET = "set"


def serve(
    host: Annotated[str, typer.Option(metavar="ADDR", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(metavar="N", min=0, max=65_535, help="Port; 0 takes a free one.")] = 8900,
    allow_host: Hosts = None,
    allow_env: Modules = None,
    max_actors: MaxActors = 16,
    max_runs: MaxRuns = 8,
    kafka: Kafka = None,
    kubernetes: Annotated[
        str | None, typer.Option(metavar="NAMESPACE", help="Serve the run of this Kubernetes namespace instead.")
    ] = None,
    run: Annotated[
        str | None,
        typer.Option(metavar="ID", help="Serve this run over Kafka alone, whose roles others start."),
    ] = None,
    autoscale: Annotated[
        Autoscale, typer.Option(help="Say in a run's event log how many actors it needs, or set them.")
    ] = Autoscale.OFF,
    sign_in: Annotated[
        bool, typer.Option("--sign-in", help="Print a new sign-in link for the service that runs already, and exit.")
    ] = False,
) -> None:
    """Start, stop, watch, scale and tune runs over HTTP.

    Prints its address with a link that signs in once. Runs outlive it: stopped or killed and started again, it goes on
    where it was.
    """
    if sign_in:
        return _import_server("steppe serve").sign_in()  # type: ignore[no-any-return]
    bounds = make_bounds(allow_env, max_actors, max_runs)
    allowed, mode = tuple(allow_host or ()), autoscale.value
    if kubernetes or run:  # whose roles are told in the same way
        kafka = kafka or os.environ.get("STEPPE_KAFKA__ADDRESS")
    _import_server("steppe serve").serve(host, port, allowed, bounds, kubernetes, mode, kafka_config_at(kafka), run)
    return None


def mcp(
    scope: Annotated[Scope, typer.Option(help="What the client may do: look, change runs, or kill and delete too.")] = (
        Scope.READ
    ),
    allow_env: Modules = None,
    max_actors: MaxActors = 16,
    max_runs: MaxRuns = 8,
    kafka: Kafka = None,
) -> None:
    """Let an AI client look after runs, over standard input (MCP).

    It may only read unless told otherwise. What ends or removes a run is asked of the person. See docs/mcp.md.
    """
    bounds = make_bounds(allow_env, max_actors, max_runs)
    _import_server("steppe mcp").serve_mcp_stdio(scope.value, bounds, kafka_config_at(kafka))


def _import_server(command: str) -> ModuleType:
    try:
        from steppe.control.http import server
    except ImportError as error:
        if (error.name or "").partition(".")[0] not in ("fastapi", "uvicorn", "anyio", "starlette", "mcp"):
            raise
        raise MissingExtra(command, "server") from None
    return server


def make_bounds(modules: list[str] | None, max_actors: int, max_runs: int) -> Bounds:
    """What may be asked of this machine."""
    from steppe.control.service import Bounds

    for name in modules or ():
        if ":" not in name:
            raise UsageError(f"--allow-env {name}: give module:Id; registered environments need no leave")
    return Bounds(actors=max_actors, live_runs=max_runs, modules=tuple(modules or ()))


def kafka_config_at(address: str | None) -> KafkaConfig | None:
    """How to reach them; what is secret, and everything but the address, comes from the environment."""
    if address is None:
        return None
    from steppe.core.config.run import KafkaConfig, from_environ
    from steppe.core.config.validation import validate_config

    ways = {key.removeprefix("kafka."): value for key, value in from_environ().items() if key.startswith("kafka.")}
    found: KafkaConfig = validate_config(KafkaConfig, {**ways, "address": address}, "kafka.")
    return found

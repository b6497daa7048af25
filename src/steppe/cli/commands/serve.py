"""`steppe serve` and `steppe mcp`: the control service over HTTP, or over standard input for one MCP client."""

from __future__ import annotations

import os
from enum import StrEnum
from types import ModuleType
from typing import TYPE_CHECKING, Annotated

import typer

from steppe.core.contracts.errors import MissingExtra, UsageError

if TYPE_CHECKING:
    from steppe.control.run_requests import Bounds
    from steppe.core.config.run import KafkaConfig

Hosts = Annotated[
    list[str] | None,
    typer.Option("--allow-host", metavar="NAME", help="Accept requests for this host name too; repeatable."),
]
Modules = Annotated[
    list[str] | None,
    typer.Option("--allow-env", metavar="MODULE:ID", help="Allow runs with this environment; repeatable."),
]
Kafka = Annotated[
    str | None,
    typer.Option(
        metavar="ADDR",
        help="Kafka brokers, host:port, for runs with the runtime kafka. STEPPE_KAFKA__* has the credentials.",
    ),
]
MaxActors = Annotated[int, typer.Option(metavar="N", min=1, help="Maximum actors per run.")]
MaxRuns = Annotated[int, typer.Option(metavar="N", min=1, help="Maximum runs at the same time.")]


class Scope(StrEnum):
    """Permissions of a client."""

    READ = "read"
    CONTROL = "control"
    ADMIN = "admin"


class Autoscale(StrEnum):
    """What autoscaling does with the number of actors."""

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
        str | None, typer.Option(metavar="NAMESPACE", help="Serve the run in this Kubernetes namespace.")
    ] = None,
    run: Annotated[
        str | None,
        typer.Option(metavar="ID", help="Serve one run over Kafka whose roles are started elsewhere."),
    ] = None,
    autoscale: Annotated[
        Autoscale, typer.Option(help="recommend: write the needed number of actors to the event log; set: change it.")
    ] = Autoscale.OFF,
    sign_in: Annotated[
        bool, typer.Option("--sign-in", help="Print a new sign-in link for the running service, and exit.")
    ] = False,
) -> None:
    """Serve the web page and the REST API for runs.

    Prints its address with a sign-in link that works once. Runs continue when the service stops; after a restart it finds them
    again.
    """
    if sign_in:
        return _import_server("steppe serve").sign_in()  # type: ignore[no-any-return]
    bounds = make_bounds(allow_env, max_actors, max_runs)
    allowed, mode = tuple(allow_host or ()), autoscale.value
    if kubernetes or run:  # commands to their roles go over Kafka
        kafka = kafka or os.environ.get("STEPPE_KAFKA__ADDRESS")
    _import_server("steppe serve").serve(host, port, allowed, bounds, kubernetes, mode, kafka_config_at(kafka), run)
    return None


def mcp(
    scope: Annotated[
        Scope,
        typer.Option(help="Permissions of the client: read, control (change runs) or admin (kill and delete too)."),
    ] = (Scope.READ),
    allow_env: Modules = None,
    max_actors: MaxActors = 16,
    max_runs: MaxRuns = 8,
    kafka: Kafka = None,
) -> None:
    """Serve runs to an MCP client over standard input.

    By default the client may only read. Tools that end or delete a run need a confirmation. See docs/mcp.md.
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
    """Return the limits of the service."""
    from steppe.control.run_requests import Bounds

    for name in modules or ():
        if ":" not in name:
            raise UsageError(f"--allow-env {name}: give module:Id; registered environments are allowed without it")
    return Bounds(actors=max_actors, live_runs=max_runs, modules=tuple(modules or ()))


def kafka_config_at(address: str | None) -> KafkaConfig | None:
    """Return the Kafka settings for an address; credentials and all other keys come from environment variables."""
    if address is None:
        return None
    from steppe.core.config.run import KafkaConfig, from_environ
    from steppe.core.config.validation import validate_config

    values = {key.removeprefix("kafka."): value for key, value in from_environ().items() if key.startswith("kafka.")}
    config: KafkaConfig = validate_config(KafkaConfig, {**values, "address": address}, "kafka.")
    return config

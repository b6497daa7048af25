"""`steppe role actor|learner|manager`: run one role of a run over Kafka in this process. Containers use it."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from steppe.core.contracts.errors import ConfigError

if TYPE_CHECKING:
    from steppe.core.config.run import KafkaConfig, ResolvedConfig

app = typer.Typer(
    help="Run one role of a run over Kafka, as containers do. Roles can be started in any order and restarted.",
    rich_markup_mode=None,
    no_args_is_help=True,
)
Kafka = Annotated[
    str | None,
    typer.Option(metavar="ADDR", help="Address of the Kafka brokers, host:port. Default: STEPPE_KAFKA__ADDRESS."),
]
Run = Annotated[str, typer.Option("--run", metavar="ID", help="Name of the run.")]
Config = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="TOML file with configuration keys; [kafka] has address and credentials."),
]
Port = Annotated[
    int | None,
    typer.Option(
        "--metrics-port", metavar="N", min=0, max=65_535, help="Serve /healthz, /readyz and /metrics on this port."
    ),
]
LogJson = Annotated[bool, typer.Option("--log-json", help="Print log lines as JSON.")]
Pairs = Annotated[
    list[str] | None,
    typer.Option(
        "-s",
        "--set",
        metavar="KEY=VALUE",
        help="Set a configuration key; repeatable. Actors and managers take kafka.* only.",
    ),
]


@app.command()
def actor(
    run: Run,
    kafka: Kafka = None,
    index: Annotated[
        int | None, typer.Option(metavar="N", min=0, help="Index of the actor. Default: the first free index.")
    ] = None,
    config: Config = None,
    pairs: Pairs = None,
    port: Port = None,
    log_json: LogJson = False,
) -> None:
    """Run an actor until the run ends."""
    _serve("actor", run, kafka, config, pairs, (port, log_json), index=index)


@app.command()
def manager(
    run: Run,
    kafka: Kafka = None,
    config: Config = None,
    pairs: Pairs = None,
    port: Port = None,
    log_json: LogJson = False,
) -> None:
    """Run the manager (evaluation and records) until the run ends."""
    _serve("manager", run, kafka, config, pairs, (port, log_json))


@app.command()
def learner(
    run: Run,
    env: Annotated[
        str | None, typer.Argument(metavar="[ENV]", help="Environment of a new run.", show_default=False)
    ] = None,
    kafka: Kafka = None,
    config: Config = None,
    pairs: Pairs = None,
    port: Port = None,
    log_json: LogJson = False,
) -> None:
    """Run the learner until the run ends.

    It continues from the newest checkpoint. With ENV (or `env` in the file) it creates the run if it does not exist.
    """
    _serve("learner", run, kafka, config, pairs, (port, log_json), env=env)


def _serve(
    kind: str,
    run: str,
    address: str | None,
    file: Path | None,
    pairs: list[str] | None,
    telemetry: tuple[int | None, bool],
    *,
    env: str | None = None,
    index: int | None = None,
) -> NoReturn:
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(0))  # until the role installs its own handler
    if kind != "learner":
        _require_kafka_keys_only(kind, pairs or [])
    kafka, resolved = _settings(address, file, pairs or [], env)
    from steppe.records.telemetry.role_endpoint import start_role_endpoint

    port, log_json = telemetry
    # Before the slow imports: Kubernetes probes start early.
    endpoint = start_role_endpoint(run, kind, port, log_json=log_json)
    try:
        from steppe.runtimes.kafka.standalone import run_standalone_role

        run_standalone_role(kind, kafka, run, index, resolved if kind == "learner" else None, endpoint)
    finally:
        endpoint.close()
    _exit_now()


def _exit_now() -> NoReturn:
    """Exit without interpreter shutdown. With torch loaded, shutdown takes half a second of CPU time; many actors that stop at
    once on a busy node would exceed their grace period and be killed."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _require_kafka_keys_only(kind: str, pairs: list[str]) -> None:
    """Refuse other settings than kafka.*: actors and managers receive the run's settings from the learner."""
    for pair in pairs:
        if not pair.startswith("kafka."):
            raise ConfigError(f"-s {pair}: role {kind} accepts kafka.* settings only; give the others to the learner")


def _settings(
    address: str | None, file: Path | None, pairs: list[str], env: str | None
) -> tuple[KafkaConfig, ResolvedConfig | None]:
    """Return the Kafka settings and, if an environment is given, the configuration of the run."""
    from steppe.cli.options import layers
    from steppe.core.config.run import resolve_config

    given = {"runtime": "kafka", "kafka.address": address, "env": env}
    config_layers = layers({key: text for key, text in given.items() if text is not None}, pairs, file)
    has_env = any("env" in layer for _, layer in config_layers)
    resolved = (
        resolve_config(*config_layers) if has_env else resolve_config(*config_layers, ("default", {"env": "none"}))
    )
    if resolved.config.kafka.address is None:
        raise ConfigError("no address of the Kafka brokers: give --kafka HOST:PORT, or set STEPPE_KAFKA__ADDRESS")
    return resolved.config.kafka, resolved if has_env else None

"""`steppe role actor|learner|manager`: one role of a run over Kafka, which is what a container runs."""

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
    help="One role of a run over Kafka: what a container runs. Any of them may be started first, later, and again.",
    rich_markup_mode=None,
    no_args_is_help=True,
)
Kafka = Annotated[
    str | None, typer.Option(metavar="ADDR", help="Kafka brokers, host:port; STEPPE_KAFKA__ADDRESS if absent.")
]
Run = Annotated[str, typer.Option("--run", metavar="ID", help="The run's name.")]
Config = Annotated[Path | None, typer.Option(metavar="FILE", help="TOML file; its table [kafka] says how to get in.")]
Port = Annotated[
    int | None,
    typer.Option("--metrics-port", metavar="N", min=0, max=65_535, help="Answer /healthz, /readyz, /metrics there."),
]
Lines = Annotated[bool, typer.Option("--log-json", help="Print what happens as lines of JSON.")]
Pairs = Annotated[
    list[str] | None,
    typer.Option("-s", "--set", metavar="KEY=VALUE", help="Any key, repeatable; kafka.… only, but of a learner."),
]


@app.command()
def actor(
    run: Run,
    kafka: Kafka = None,
    index: Annotated[
        int | None, typer.Option(metavar="N", min=0, help="Which of the run's actors; the first free one if absent.")
    ] = None,
    config: Config = None,
    pairs: Pairs = None,
    port: Port = None,
    log_json: Lines = False,
) -> None:
    """Collect experience for a run, until it ends."""
    _serve("actor", run, kafka, config, pairs, (port, log_json), index=index)


@app.command()
def manager(
    run: Run,
    kafka: Kafka = None,
    config: Config = None,
    pairs: Pairs = None,
    port: Port = None,
    log_json: Lines = False,
) -> None:
    """Evaluate a run's newest weights and record its results, until it ends."""
    _serve("manager", run, kafka, config, pairs, (port, log_json))


@app.command()
def learner(
    run: Run,
    env: Annotated[
        str | None, typer.Argument(metavar="[ENV]", help="Of a run that does not exist yet.", show_default=False)
    ] = None,
    kafka: Kafka = None,
    config: Config = None,
    pairs: Pairs = None,
    port: Port = None,
    log_json: Lines = False,
) -> None:
    """Learn for a run, from its newest checkpoint, until it ends.

    With ENV (or env in the file) and settings it creates the run if there is none of that name.
    """
    _serve("learner", run, kafka, config, pairs, (port, log_json), env=env)


def _serve(
    kind: str,
    run: str,
    address: str | None,
    file: Path | None,
    pairs: list[str] | None,
    shows: tuple[int | None, bool],
    *,
    env: str | None = None,
    index: int | None = None,
) -> NoReturn:
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(0))  # until the role itself takes care of signals
    if kind != "learner":
        _require_kafka_keys_only(kind, pairs or [])
    found, resolved = _settings(address, file, pairs or [], env)
    from steppe.records.telemetry.role_endpoint import start_role_endpoint

    port, log_json = shows
    # Before all else that takes its time: probes ask soon.
    showing = start_role_endpoint(run, kind, port, log_json=log_json)
    try:
        from steppe.runtimes.kafka.standalone import run_standalone_role

        run_standalone_role(kind, found, run, index, resolved if kind == "learner" else None, showing)
    finally:
        showing.close()
    _exit_now()


def _exit_now() -> NoReturn:
    """End at once: all that was to be said is written down. The interpreter's own end, with torch in it, takes half a second
    of a core, and many actors that are asked to go at once on a busy node would be killed in the midst of it."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _require_kafka_keys_only(kind: str, pairs: list[str]) -> None:
    """What a run is made of is the learner's to say; whoever joins it takes that from there."""
    for pair in pairs:
        if not pair.startswith("kafka."):
            raise ConfigError(f"-s {pair}: a run's settings are its learner's, and a role {kind} takes kafka.… only")


def _settings(
    address: str | None, file: Path | None, pairs: list[str], env: str | None
) -> tuple[KafkaConfig, ResolvedConfig | None]:
    """How to reach the brokers, and the run that is described besides, if one is."""
    from steppe.cli.options import layers
    from steppe.core.config.run import resolve_config

    given = {"runtime": "kafka", "kafka.address": address, "env": env}
    found = layers({key: text for key, text in given.items() if text is not None}, pairs, file)
    described = any("env" in layer for _, layer in found)
    resolved = resolve_config(*found) if described else resolve_config(*found, ("default", {"env": "none"}))
    if resolved.config.kafka.address is None:
        raise ConfigError("where are the brokers? give --kafka HOST:PORT, or set STEPPE_KAFKA__ADDRESS")
    return resolved.config.kafka, resolved if described else None

"""`steppe kafka up|down|status`: start, stop and inspect a Kafka broker on this machine."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from steppe.cli.options import AsJson
from steppe.cli.output import emit

app = typer.Typer(
    help="Start and stop a local Kafka broker for development.", rich_markup_mode=None, no_args_is_help=True
)


@app.command()
def up(
    port: Annotated[
        int, typer.Option(metavar="N", min=0, max=65535, help="Port on loopback; 0 takes a free one.")
    ] = 9092,
    as_json: AsJson = False,
) -> None:
    """Start a broker, or print the address of the running one.

    Needs Java 17 or newer. The first call downloads Kafka's jars with Maven and verifies them. The broker listens on loopback
    only. Its data is in ~/.cache/steppe/kafka, or in STEPPE_KAFKA_HOME if it is set.
    """
    from steppe.transport.kafka.dev_broker import DevBroker, fetch_jars, find_java

    find_java()
    broker = DevBroker.default()
    if not as_json and not broker.jars.is_dir():
        print("steppe: downloading Kafka's jars (first call only)", file=sys.stderr)
    fetch_jars(broker.jars)
    running = broker.up(port)
    if as_json:
        return emit({"running": True, "address": running.address, "pid": running.pid})
    return print(
        f"The broker is running at {running.address} (process {running.pid}). "
        f"Use it with: steppe train ENV --runtime kafka --kafka {running.address}"
    )


@app.command()
def down(as_json: AsJson = False) -> None:
    """Stop the broker. Its topics and messages are kept."""
    from steppe.transport.kafka.dev_broker import DevBroker

    stopped = DevBroker.default().down()
    if as_json:
        return emit({"stopped": stopped})
    return print("The broker has stopped." if stopped else "No broker is running.")


@app.command()
def status(as_json: AsJson = False) -> None:
    """Print whether the broker is running; exit code 3 if it is not."""
    from steppe.transport.kafka.dev_broker import DevBroker

    broker = DevBroker.default()
    running = broker.running()
    if as_json:
        emit({"running": running is not None, "address": running and running.address, "home": broker.home})
    elif running is not None:
        print(f"The broker is running at {running.address} (process {running.pid}); its files are in {broker.home}.")
    else:
        print(f"No broker is running{broker.describe_crash()}. Start one with: steppe kafka up")
    if running is None:
        raise typer.Exit(3)

"""`steppe kafka up|down|status`: a Kafka broker on this machine."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from steppe.cli.options import AsJson
from steppe.cli.output import emit

app = typer.Typer(help="A Kafka broker on this machine, for development.", rich_markup_mode=None, no_args_is_help=True)


@app.command()
def up(
    port: Annotated[int, typer.Option(metavar="N", min=0, max=65535, help="On loopback; 0: one that is free.")] = 9092,
    as_json: AsJson = False,
) -> None:
    """Start a broker, or say where it is.

    Its jars are brought by Maven the first time and checked; Java 17 or newer runs it. It listens on loopback alone and keeps
    its data in ~/.cache/steppe/kafka, or where STEPPE_KAFKA_HOME says.
    """
    from steppe.transport.kafka.dev_broker import DevBroker, fetch_jars, find_java

    find_java()
    broker = DevBroker.default()
    if not as_json and not broker.jars.is_dir():
        print("steppe: bringing the broker's jars, once", file=sys.stderr)
    fetch_jars(broker.jars)
    running = broker.up(port)
    if as_json:
        return emit({"running": True, "address": running.address, "pid": running.pid})
    return print(
        f"a broker answers at {running.address} (process {running.pid}): steppe train … --runtime kafka --kafka {running.address}"
    )


@app.command()
def down(as_json: AsJson = False) -> None:
    """Stop the broker; what was sent is there again when it is started."""
    from steppe.transport.kafka.dev_broker import DevBroker

    stopped = DevBroker.default().down()
    if as_json:
        return emit({"stopped": stopped})
    return print("the broker has stopped" if stopped else "there is no broker to stop")


@app.command()
def status(as_json: AsJson = False) -> None:
    """Say whether the broker runs; exit code 3 when it does not."""
    from steppe.transport.kafka.dev_broker import DevBroker

    broker = DevBroker.default()
    running = broker.running()
    if as_json:
        emit({"running": running is not None, "address": running and running.address, "home": broker.home})
    elif running is not None:
        print(f"a broker answers at {running.address} (process {running.pid}); its files are in {broker.home}")
    else:
        print(f"no broker runs here{broker.describe_crash()}: steppe kafka up")
    if running is None:
        raise typer.Exit(3)

"""The `steppe` executable: registers the commands and turns errors into exit codes. To keep start-up fast, heavy packages
(rich, pydantic, NumPy, gymnasium, torch) are imported inside the command that needs them."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from steppe.cli.commands import (
    bench,
    ctl,
    doctor,
    export,
    groups,
    info,
    kafka,
    params,
    recovery,
    report,
    role,
    runs,
    serve,
    train,
    verify,
    warm,
)
from steppe.cli.options import FieldHelp
from steppe.core.contracts.errors import SteppeError

app = typer.Typer(
    name="steppe",
    help="Train, watch, stop, resume and evaluate reinforcement-learning agents.",
    epilog="Runs are stored in ./runs; set STEPPE_RUNS to use another directory. Exit codes: 0 success, 1 failure, 2 wrong usage, "
    "3 server or broker unreachable, 4 conflict with the current state, 130 interrupted.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
    no_args_is_help=True,
)
config = typer.Typer(help="Show the configuration of a run.", rich_markup_mode=None, no_args_is_help=True)

app.command(cls=FieldHelp)(groups.with_seeds(train.train))
app.command()(recovery.resume)
app.command()(recovery.checkpoints)
app.command()(recovery.rerun)
app.command()(recovery.reproduce)
app.command()(recovery.diff)
app.command("eval")(runs.evaluate)
app.command("runs")(runs.list_all)
app.command()(runs.watch)
app.command()(runs.stop)
app.command()(report.report)
app.command()(verify.verify)
app.command()(export.export)
app.command()(info.algos)
app.command()(info.envs)
app.add_typer(config, name="config")
config.command("show", cls=FieldHelp)(info.show_config)
app.add_typer(params.params, name="params")
app.command()(params.node)
app.add_typer(kafka.app, name="kafka")
app.add_typer(role.app, name="role")
app.command()(doctor.doctor)
app.command()(warm.warm)
app.command()(bench.bench)
app.command()(serve.serve)
app.command()(serve.mcp)
app.add_typer(ctl.app, name="ctl")


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"steppe {version('steppe')}")
        raise typer.Exit


@app.callback()
def _steppe(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None: ...


def entry() -> None:
    """Run the command line. A `SteppeError` prints one paragraph and sets the exit code; other exceptions keep their traceback."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # print "?" instead of failing on a terminal without Unicode
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # `steppe train mine:MyEnv` finds mine.py; last, so that it shadows no package
    try:
        from steppe.runtimes import join

        for word in sys.argv[1:]:
            join(word)  # join first, so that only rank 0 reports errors
        app(prog_name="steppe")
    except SteppeError as error:
        traceback = getattr(error, "details", {}).get("traceback")
        if traceback:
            print(traceback, file=sys.stderr)
        print(f"steppe: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)

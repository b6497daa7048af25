"""The `steppe` command: its commands, and what becomes of errors. Start-up stays light: whatever is heavy (rich, pydantic,
NumPy, gymnasium, torch) is imported inside the command that needs it."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from steppe.cli.commands import bench, ctl, doctor, info, kafka, params, recovery, role, runs, serve, train, warm
from steppe.cli.options import FieldHelp
from steppe.core.contracts.errors import SteppeError

app = typer.Typer(
    name="steppe",
    help="Train reinforcement-learning agents, watch them, stop them, resume them and judge them.",
    epilog="Runs are kept in ./runs, or where STEPPE_RUNS says. Exit codes: 0 done, 1 failed, 2 wrong usage, 3 unreachable, "
    "4 conflict, 130 interrupted.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
    no_args_is_help=True,
)
config = typer.Typer(help="What a run would be made of.", rich_markup_mode=None, no_args_is_help=True)

app.command(cls=FieldHelp)(train.train)
app.command()(recovery.resume)
app.command()(recovery.checkpoints)
app.command()(recovery.rerun)
app.command()(recovery.reproduce)
app.command()(recovery.diff)
app.command("eval")(runs.evaluate)
app.command("runs")(runs.list_all)
app.command()(runs.watch)
app.command()(runs.stop)
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
    """Run the command line: a user's mistake is one paragraph and an exit code, anything unexpected keeps its traceback."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal without Unicode gets question marks, not a traceback
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # `steppe train mine:MyEnv` finds mine.py; at the end, where it hides nothing
    try:
        if "mpi" in sys.argv:
            from steppe.runtimes.mpi import launch as mpi

            mpi.join("mpi")  # before anything can go wrong: the first rank of a world speaks for all
        app(prog_name="steppe")
    except SteppeError as error:
        traceback = getattr(error, "details", {}).get("traceback")
        if traceback:
            print(traceback, file=sys.stderr)
        print(f"steppe: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)

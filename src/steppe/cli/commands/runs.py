"""Commands on existing runs: list, watch, stop and evaluate. They read and write the run's directory only."""

from __future__ import annotations

import getpass
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from steppe.cli.options import AsJson
from steppe.cli.output import emit, print_table, reserved_stdout
from steppe.cli.text_charts import count, decimal
from steppe.core.contracts.errors import Conflict, RunFailed

if TYPE_CHECKING:
    from steppe.records.run_directory import RunDirectory, RunInfo
    from steppe.records.store import Status
    from steppe.records.view import RunView
    from steppe.training.seeds.group import SeedGroup

Run = Annotated[str, typer.Argument(metavar="RUN", help="A run's name, or its directory.", show_default=False)]
_POLL_S = 0.1


def list_all(as_json: AsJson = False) -> None:
    """List the runs, newest first."""
    from steppe.records.run_directory import list_runs, runs_root

    infos = list_runs()
    if as_json:
        return emit([_to_json(info) for info in infos])
    if not infos:
        return print(f"{runs_root()} contains no runs yet. Start one with: steppe train ENV")
    rows = [_row(info) for info in infos]
    return print_table(list(rows[0]), [list(row.values()) for row in rows], right=("steps", "return", "steps/s"))


def _row(info: RunInfo) -> dict[str, object]:
    summary = info.summary or {}
    reason = info.damage or info.status.reason
    return {
        "run": info.id,
        "state": "damaged" if info.damage else info.status.state,
        "env": info.env,
        "algo": info.algo,
        "steps": count(summary.get("env_steps")),
        "return": decimal(summary.get("eval_return_mean")),
        "steps/s": count(summary.get("steps_per_s")),
        "created": time.strftime("%Y-%m-%d %H:%M", time.localtime(info.created_s)),
        "reason": reason or "",
    }


def _to_json(info: RunInfo) -> dict[str, Any]:
    return {
        "run": info.id,
        "path": info.path,
        "state": info.status.state,
        "reason": info.status.reason,
        "message": info.status.message,
        "env": info.env,
        "algo": info.algo,
        "created_s": info.created_s,
        "summary": info.summary,
        "damage": info.damage,
    }


def watch(
    run: Run,
    interval_s: Annotated[float, typer.Option(metavar="S", min=0.05, help="Seconds between refreshes.")] = 0.25,
    as_json: AsJson = False,
) -> None:
    """Show the live view of a run until it ends.

    Ctrl-C ends the view, not the run. With --json, one line is printed per refresh.
    """
    from steppe.cli.live_view import live_view, render
    from steppe.cli.output import console
    from steppe.records.run_directory import RunDirectory
    from steppe.records.view import RunView

    view = RunView(RunDirectory.open(run))
    if as_json:
        return _follow(view, lambda seen: emit(seen.summary()), interval_s)
    with live_view(sys.stdout) as show:
        _follow(view, show, interval_s)
    if not sys.stdout.isatty():
        console().print(render(view))
    return None


def _follow(view: RunView, show: Callable[[RunView], None], interval_s: float) -> None:
    """Refresh and show a view until its run has ended; the final state is shown too."""
    view.refresh()
    show(view)
    while not view.ended:
        time.sleep(interval_s)
        view.refresh()
        show(view)


def stop(
    run: Run,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until the run has ended.")] = False,
    timeout_s: Annotated[float, typer.Option(metavar="S", min=0, help="Maximum wait in seconds.")] = 60.0,
    as_json: AsJson = False,
) -> None:
    """Stop a run or a group of seeds, with a checkpoint.

    Exit code 4 if the run has already ended, 1 if it did not end within --timeout-s.
    """
    from steppe.core.contracts.transport import COMMANDS
    from steppe.records.run_directory import RunDirectory
    from steppe.training.seeds.group import SeedGroup

    if (group := SeedGroup.find(run)) is not None:
        return _stop_group(group, wait=wait, timeout_s=timeout_s, as_json=as_json)

    directory = RunDirectory.open(run)
    _require_live(directory)
    command = {"command": "stop", "id": uuid.uuid4().hex, "issuer": f"cli:{getpass.getuser()}", "time_s": time.time()}
    directory.store.post(COMMANDS, command)
    status = _wait_until_ended(directory, timeout_s) if wait else directory.store.status()
    if as_json:
        emit({"run": directory.id, "state": status.state, "reason": status.reason, "command": command["id"]})
    else:
        print(f"{directory.id} has ended: {status.state}" if wait else f"{directory.id} was asked to stop")
    return None


def _stop_group(group: SeedGroup, *, wait: bool, timeout_s: float, as_json: bool) -> None:
    from steppe.records.view import ENDED

    unfinished = [result for result in group.results() if result.state not in ENDED]
    if not unfinished:
        raise Conflict(f"{group.id} cannot be stopped: all of its runs have already ended")
    group.stop(f"cli:{getpass.getuser()}")
    if wait:
        for run in group.existing().values():
            _wait_until_ended(run, timeout_s)
    states = {result.seed: result.state for result in group.results()}
    if as_json:
        emit({"group": group.id, "states": states})
    else:
        print(f"{group.id} has ended" if wait else f"{group.id} was asked to stop")


def _require_live(directory: RunDirectory) -> None:
    from steppe.records.view import ENDED

    status = directory.store.status()
    if status.state not in ENDED:
        return
    reason = f" ({status.reason})" if status.reason else ""
    raise Conflict(f"{directory.id} cannot be stopped: it has already ended, {status.state}{reason}")


def _wait_until_ended(directory: RunDirectory, timeout_s: float) -> Status:
    deadline = time.monotonic() + timeout_s
    from steppe.records.view import ENDED

    while (status := directory.store.status()).state not in ENDED:
        if time.monotonic() > deadline:
            raise RunFailed(
                f"{directory.id} is still {status.state} after {timeout_s:g} s (process {status.pid}): "
                "wait longer with --timeout-s, or kill the process and resume the run later"
            )
        time.sleep(_POLL_S)
    return status


def evaluate(
    run: Run,
    episodes: Annotated[int, typer.Option(metavar="N", min=1, help="Number of episodes.")] = 20,
    render: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write videos of episodes to this directory.")
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Seed of the environment and of sampled actions.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Run evaluation episodes and print their returns."""
    from steppe.training import evaluate as evaluate_module

    with ExitStack() as stack:
        stdout = stack.enter_context(reserved_stdout()) if as_json else None
        result = evaluate_module.evaluate(run, episodes=episodes, seed=seed, render_dir=render)
        if as_json:
            return emit(result, stdout)
    fields = {key: value for key, value in result.items() if value is not None}
    width = max(len(key) for key in fields)
    for key, value in fields.items():
        print(f"{key:<{width}}  {decimal(value) if isinstance(value, float) else value}")
    return None

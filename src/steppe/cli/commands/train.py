"""`steppe train`: resolve the configuration, run the experiment with a live view, and print the summary."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import typer

from steppe.cli.options import Layers, experiment_flags
from steppe.cli.output import emit, reserved_stdout
from steppe.core.contracts.errors import ConfigError

if TYPE_CHECKING:
    from steppe.records.view import RunView
    from steppe.training.result import RunResult
    from steppe.training.supervisor import Observer


@experiment_flags
def train(layers: Layers, as_json: bool) -> None:
    """Train an agent in an environment.

    The run ends after its steps or, with --target-return, when an evaluation reaches that return. A terminal shows a live view.
    Ctrl-C writes a checkpoint and stops the run.
    """
    from steppe.core.config.run import resolve_config

    if not any("env" in layer for _, layer in layers):
        raise ConfigError('no environment given: steppe train ENV, or env = "…" in a --config file')
    from steppe.training.train import run_experiment

    resolved = resolve_config(*layers)
    result = run_with_live_view(lambda observers: run_experiment(resolved, observers=observers), as_json=as_json)
    print_failure(result)
    raise typer.Exit(exit_code(result.summary))


def run_with_live_view(start: Callable[[list[Observer]], RunResult], *, as_json: bool) -> RunResult:
    """Start a run, show its live view and print its summary."""
    from steppe.cli.live_view import live_view
    from steppe.cli.summary import summary_text

    with ExitStack() as stack:
        stdout = stack.enter_context(reserved_stdout()) if as_json else None
        with live_view() as show:
            views: list[RunView] = []

            def observe(view: RunView) -> None:
                views[:] = [view]
                show(view)

            result = start([observe])
            for view in views:  # show the final state
                view.refresh()
                show(view)
        for damage in views[0].damaged if views else ():
            print(f"steppe: WARNING: skipped a damaged checkpoint: {damage}", file=sys.stderr)
        if as_json:
            emit(result.summary, stdout)
        else:
            print(summary_text(result.summary, result.path), flush=True)
    return result


def print_failure(result: RunResult) -> None:
    """Print why a run failed on stderr, with the traceback of its role."""
    traceback = result.fault.details.get("traceback") if result.fault else None
    if traceback:
        print(traceback, file=sys.stderr)
    if result.summary["state"] == "FAILED" and result.message:
        print(f"steppe: {result.message}", file=sys.stderr)


def exit_code(summary: Mapping[str, Any]) -> int:
    """Return 0 for a run that succeeded or was stopped, 1 for a failed run, 130 for an interrupted one."""
    if summary["state"] == "STOPPED" and summary.get("reason") == "interrupted":
        return 130
    return 0 if summary["state"] in ("SUCCEEDED", "STOPPED") else 1

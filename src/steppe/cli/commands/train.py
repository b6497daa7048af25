"""`steppe train`: resolve the configuration, hand it to the loops with a view as observer, and say what came of it."""

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

    The run ends when its steps are done or, with --target-return, when an evaluation reaches it. A terminal gets a live
    view; Ctrl-C stops the run with a checkpoint.
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
    """Let a run go under a live view, and print what came of it."""
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
            for view in views:  # once more, now that the run has its final state
                view.refresh()
                show(view)
        for damage in views[0].damaged if views else ():
            print(f"steppe: WARNING: passed over a checkpoint: {damage}", file=sys.stderr)
        if as_json:
            emit(result.summary, stdout)
        else:
            print(summary_text(result.summary, result.path), flush=True)
    return result


def print_failure(result: RunResult) -> None:
    """Say on stderr why a run failed, with the traceback of where it happened."""
    traceback = result.fault.details.get("traceback") if result.fault else None
    if traceback:
        print(traceback, file=sys.stderr)
    if result.summary["state"] == "FAILED" and result.message:
        print(f"steppe: {result.message}", file=sys.stderr)


def exit_code(summary: Mapping[str, Any]) -> int:
    """0 for a run that ended as asked (also by `steppe stop`), 1 for a failed one, 130 for one that was interrupted."""
    if summary["state"] == "STOPPED" and summary.get("reason") == "interrupted":
        return 130
    return 0 if summary["state"] in ("SUCCEEDED", "STOPPED") else 1

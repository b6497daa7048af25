"""`steppe train`: resolve the configuration, hand it to the loops with a view as observer, and say what came of it."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import typer

from steppe.cli.options import Layers, experiment
from steppe.cli.output import emit, reserved_stdout
from steppe.core.errors import ConfigError


@experiment
def train(layers: Layers, as_json: bool) -> None:
    """Train an agent in an environment.

    The run ends when its steps are done or, with --target-return, when an evaluation reaches it. A terminal gets a live
    view; Ctrl-C stops the run with a checkpoint.
    """
    from steppe.core.config import resolve

    if not any("env" in layer for _, layer in layers):
        raise ConfigError('no environment given: steppe train ENV, or env = "…" in a --config file')
    resolved = resolve(*layers)
    from steppe.cli.live import showing, summary_text
    from steppe.loops.main import run_experiment

    with ExitStack() as stack:
        stdout = stack.enter_context(reserved_stdout()) if as_json else None
        with showing() as show:
            summary = run_experiment(resolved, observers=[show])
        if as_json:
            emit(summary, stdout)
        else:
            print(summary_text(summary), flush=True)
    raise typer.Exit(exit_code(summary))


def exit_code(summary: dict[str, Any]) -> int:
    """0 for a run that ended as asked (also by `steppe stop`), 1 for a failed one, 130 for one that was interrupted."""
    if summary["state"] == "STOPPED" and summary.get("reason") == "interrupted":
        return 130
    return 0 if summary["state"] in ("SUCCEEDED", "STOPPED") else 1

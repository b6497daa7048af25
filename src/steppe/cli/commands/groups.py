"""Groups of runs that differ by their seed: `steppe train --seeds`, and what `steppe resume` does with a group."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from steppe.cli.options import Layers, experiment_flags
from steppe.cli.output import emit, print_table, reserved_stdout
from steppe.cli.text_charts import count, decimal
from steppe.core.contracts.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from steppe.training.seeds.group import GroupObserver, GroupResult, SeedGroup

Seeds = Annotated[
    str | None,
    typer.Option(
        metavar="N|LIST",
        help="Train a group of runs with N seeds, or with the seeds in a list: 5, or 1,7,42. `steppe report` evaluates it.",
    ),
]
Jobs = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, help="With --seeds: runs at once. Default: as many as cores and memory allow."),
]


def with_seeds(command: Callable[..., None]) -> Callable[..., None]:
    """Add --seeds and --jobs to a command with an experiment's flags."""

    def seeded(*, seeds: str | None = None, jobs: int | None = None, **flags: Any) -> None:
        if seeds is None:
            if jobs is not None:
                raise UsageError("--jobs goes with --seeds: give both, or neither")
            return command(**flags)
        return experiment_flags(lambda layers, as_json: train_group(layers, seeds, jobs, as_json=as_json))(**flags)

    options = {"seeds": Seeds, "jobs": Jobs}
    hints = get_type_hints(command, include_extras=True) | options
    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [
        *(
            one.replace(kind=keyword, annotation=hints[name])
            for name, one in inspect.signature(command).parameters.items()
        ),
        *(inspect.Parameter(name, keyword, default=None, annotation=kind) for name, kind in options.items()),
    ]
    seeded.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    seeded.__annotations__ = hints
    seeded.__name__, seeded.__doc__ = command.__name__, command.__doc__
    return seeded


def train_group(layers: Layers, seeds: str, jobs: int | None, *, as_json: bool) -> None:
    """Train a group of seeds with one live view."""
    from steppe.core.config.run import resolve_config
    from steppe.training.seeds import group as seed_group

    if not any("env" in layer for _, layer in layers):
        raise ConfigError('no environment given: steppe train ENV, or env = "…" in a --config file')
    resolved = resolve_config(*layers)
    if resolved.sources.get("seed") == "flag" and "," in seeds:
        raise UsageError("--seed and a list of --seeds contradict each other: leave one of them out")
    chosen = seed_group.parse_seeds(seeds, resolved.config.seed)
    _show_group(
        lambda observers: seed_group.train_group(resolved, chosen, jobs=jobs, observers=observers), as_json=as_json
    )


def resume_group(group: SeedGroup, *, steps: int | None, as_json: bool) -> None:
    """Resume all runs of a group that are not complete."""
    from steppe.training.seeds.group import run_group

    _show_group(lambda observers: run_group(group, steps=steps, observers=observers), as_json=as_json)


def _show_group(start: Callable[[list[GroupObserver]], GroupResult], *, as_json: bool) -> None:
    """Run a group with its live view, print the summary, and exit with 0, 1 if a run failed, or 130 if interrupted."""
    from steppe.cli.group_view import group_view

    with ExitStack() as stack:
        stdout = stack.enter_context(reserved_stdout()) if as_json else None
        with group_view() as show:
            result = start([show])
        if as_json:
            emit(result.summary(), stdout)
        else:
            _print_summary(result)
    for run in result.failed:
        print(f"steppe: seed {run.seed} failed: {run.message or run.reason or run.state} ({run.path})", file=sys.stderr)
    raise typer.Exit(130 if result.interrupted else 1 if result.failed else 0)


def _print_summary(result: GroupResult) -> None:
    rows = [
        [
            run.seed,
            run.state,
            run.reason or "",
            count(run.summary.get("env_steps")),
            decimal(run.summary.get("eval_return_mean")),
            run.path,
        ]
        for run in result.runs
    ]
    print_table(["seed", "state", "reason", "steps", "evaluation", "run"], rows, right=("seed", "steps", "evaluation"))
    unfinished = any(run.state in ("PENDING", "STOPPED", "FAILED", "LOST") for run in result.runs)
    print(f"to resume: steppe resume {result.path}" if unfinished else f"to evaluate: steppe report {result.path}")

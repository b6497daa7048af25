"""Commands that resume, repeat and compare runs: resume, checkpoints, rerun, reproduce, diff."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated, Any

import typer

from steppe.cli.commands.groups import resume_group
from steppe.cli.commands.runs import Run
from steppe.cli.commands.train import exit_code, print_failure, run_with_live_view
from steppe.cli.options import AsJson
from steppe.cli.output import emit, print_table, reserved_stdout
from steppe.cli.text_charts import count, duration
from steppe.core.contracts.errors import UsageError

if TYPE_CHECKING:
    from steppe.records.checkpoints import CheckpointInfo
    from steppe.training.reproduce import RaisedError, Reproduction

Steps = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="New total of environment steps. Default: the run's own total.")
]
RayAddress = Annotated[
    str | None, typer.Option(metavar="ADDR", help="Resume on this Ray cluster instead of the previous one.")
]

KafkaAddress = Annotated[
    str | None, typer.Option(metavar="ADDR", help="Resume with these Kafka brokers instead of the previous ones.")
]


def resume(
    run: Run,
    steps: Steps = None,
    ray_address: RayAddress = None,
    kafka: KafkaAddress = None,
    as_json: AsJson = False,
) -> None:
    """Resume a run from its newest intact checkpoint.

    Works after Ctrl-C, an error, kill -9 or a power failure. Damaged checkpoints are skipped and reported on stderr. A group of seeds is
    resumed as a whole.
    """
    from steppe.training import resume as resume_module
    from steppe.training.seeds.group import SeedGroup

    if (group := SeedGroup.find(run)) is not None:
        if ray_address or kafka:
            raise UsageError("--ray-address and --kafka are for single runs: resume the runs of the group one by one")
        resume_group(group, steps=steps, as_json=as_json)

    result = run_with_live_view(
        lambda observers: resume_module.resume(
            run, steps=steps, ray_address=ray_address, kafka=kafka, observers=observers
        ),
        as_json=as_json,
    )
    print_failure(result)
    raise typer.Exit(exit_code(result.summary))


def checkpoints(run: Run, as_json: AsJson = False) -> None:
    """List a run's checkpoints with age, size and state."""
    from steppe.records.checkpoints import Checkpoints
    from steppe.records.run_directory import RunDirectory

    directory = RunDirectory.open(run)
    infos = Checkpoints(directory.checkpoints, run=directory.key).list()
    rows = [_row(info) for info in infos]
    if as_json:
        return emit(rows)
    if not rows:
        return print(f"{directory.id} has no checkpoints yet.")
    headers = ["number", "age", "size", "steps", "version", "return", "health"]
    cells = [
        [
            f"{row['number']}{' (best)' if row['best'] else ''}",
            duration(row["age_s"]),
            _bytes(row["size_bytes"]),
            count(row["env_steps"]),
            count(row["version"]),
            count(row["score"]) if row["score"] is not None else "",
            row["damage"] or "good",
        ]
        for row in rows
    ]
    return print_table(headers, cells, right=headers[1:6])


def _row(info: CheckpointInfo) -> dict[str, Any]:
    return {
        "number": info.number,
        "path": info.path,
        "age_s": info.age_s,
        "size_bytes": info.size_bytes,
        "env_steps": info.counters.get("env_steps"),
        "updates": info.counters.get("updates"),
        "version": info.counters.get("version"),
        "best": info.best,
        "score": info.counters.get("score"),
        "healthy": info.damage is None,
        "damage": info.damage,
    }


def _bytes(size: int) -> str:
    return f"{size / 1024:.0f} KiB" if size < 1 << 20 else f"{size / (1 << 20):.1f} MiB"


def rerun(run: Run, as_json: AsJson = False) -> None:
    """Repeat a recorded async run and compare the weights.

    Starts a new run that learns from the same segments in the same order. The original run needs --record-arrivals. Exit code 1 if the
    weights differ.
    """
    from steppe.training import rerun as rerun_module

    result = run_with_live_view(lambda observers: rerun_module.rerun(run, observers), as_json=as_json)
    print_failure(result)
    if result.summary["matched"] is False:
        print(f"steppe: {result.message}", file=sys.stderr)
        raise typer.Exit(1)
    raise typer.Exit(exit_code(result.summary))


def reproduce(
    run: Run,
    fault: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Number of the recorded fault. Default: the newest.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Reproduce an exception that an environment raised in a run.

    Replays the recorded actions in this process. Exit code 0 if the same exception is raised at the same step, 1 otherwise.
    """
    from steppe.training import reproduce as reproduce_module

    with ExitStack() as stack:
        stdout = stack.enter_context(reserved_stdout()) if as_json else None
        result = reproduce_module.reproduce(run, fault)
        if result.found is not None:
            print(result.found.traceback, file=sys.stderr)
        if as_json:
            emit(_to_json(result), stdout)
        else:
            print("\n".join(_result_lines(result)))
    raise typer.Exit(0 if result.matched else 1)


def _to_json(result: Reproduction) -> dict[str, Any]:
    import msgspec

    return {**msgspec.to_builtins(result, enc_hook=str), "matched": result.matched}


def _result_lines(result: Reproduction) -> list[str]:
    """Format the result of `reproduce` as text."""
    lines = [f"{result.run}: {result.recording.name}, actor {result.actor}, {count(result.steps)} steps replayed"]
    lines += [f"note: {note}" for note in result.notes]
    recorded = f"{result.recorded.exception} {_location(result.recorded)}"
    if result.matched:
        return [*lines, f"reproduced: {recorded}, as recorded"]
    raised = (
        f"{result.found.exception} {_location(result.found)}" if result.found is not None else "no exception was raised"
    )
    return [*lines, f"NOT reproduced: the run recorded {recorded}; this time {raised}"]


def _location(raised: RaisedError) -> str:
    env, episode, step = (raised.place[key] for key in ("env_index", "episode", "step"))
    when = ("at the reset" if not step else f"at step {step}") + ("" if episode is None else f" of episode {episode}")
    return when + ("" if env is None else f" in environment {env}")


def diff(
    run: Run,
    other: Annotated[str, typer.Argument(metavar="RUN", help="The run to compare with.", show_default=False)],
    as_json: AsJson = False,
) -> None:
    """Compare two runs.

    Shows differences in configuration, sources of values, package versions, hardware and results.
    """
    from steppe.records.compare import compare_runs
    from steppe.records.run_directory import RunDirectory

    found = compare_runs(RunDirectory.open(run), RunDirectory.open(other))
    if as_json:
        return emit(found)
    rows = [
        [section, key, *(_cell(value) for value in pair)]
        for section, pairs in found.items()
        if section != "runs"
        for key, pair in pairs.items()
    ]
    if not rows:
        return print(f"{found['runs'][0]} and {found['runs'][1]} do not differ.")
    return print_table(["", "key", *found["runs"]], rows)


def _cell(value: Any) -> str:
    if isinstance(value, Mapping) and "source" in value:
        return f"{_cell(value['value'])} ({value['source']})"
    return "–" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)

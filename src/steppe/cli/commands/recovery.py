"""Commands for runs that did not go as planned, and for seeing again what happened: resume, rerun, reproduce, compare."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated, Any

import typer

from steppe.cli.commands.runs import Run
from steppe.cli.commands.train import exit_code, print_failure, run_with_live_view
from steppe.cli.options import AsJson
from steppe.cli.output import emit, print_table, reserved_stdout
from steppe.cli.text_charts import count, duration

if TYPE_CHECKING:
    from steppe.records.checkpoints import CheckpointInfo
    from steppe.training.reproduce import RaisedError, Reproduction

Steps = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="Environment steps in total, in place of those it was made for.")
]
RayAddress = Annotated[
    str | None, typer.Option(metavar="ADDR", help="A Ray cluster to go on at, in place of where the run was.")
]

KafkaAddress = Annotated[
    str | None, typer.Option(metavar="ADDR", help="Kafka brokers to go on at, in place of those the run was at.")
]


def resume(
    run: Run,
    steps: Steps = None,
    ray_address: RayAddress = None,
    kafka: KafkaAddress = None,
    as_json: AsJson = False,
) -> None:
    """Go on with a run from its newest whole checkpoint.

    After Ctrl-C, a fault, a kill or a power cut. Checkpoints that are damaged are named on stderr.
    """
    from steppe.training import resume as resuming

    result = run_with_live_view(
        lambda observers: resuming.resume(run, steps=steps, ray_address=ray_address, kafka=kafka, observers=observers),
        as_json=as_json,
    )
    print_failure(result)
    raise typer.Exit(exit_code(result.summary))


def checkpoints(run: Run, as_json: AsJson = False) -> None:
    """List a run's checkpoints with their age, size and health."""
    from steppe.records.checkpoints import Checkpoints
    from steppe.records.run_directory import RunDirectory

    directory = RunDirectory.open(run)
    infos = Checkpoints(directory.checkpoints, run=directory.key).list()
    rows = [_row(info) for info in infos]
    if as_json:
        return emit(rows)
    if not rows:
        return print(f"{directory.id} has no checkpoints yet")
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
    """Learn again what a recorded async run learned.

    Makes a new run beside it and compares the weights. The recorded one must have been trained with --record-arrivals. Exit code 1 when the weights are not the same.
    """
    from steppe.training import rerun as rerunning

    result = run_with_live_view(lambda observers: rerunning.rerun(run, observers), as_json=as_json)
    print_failure(result)
    if result.summary["matched"] is False:
        print(f"steppe: {result.message}", file=sys.stderr)
        raise typer.Exit(1)
    raise typer.Exit(exit_code(result.summary))


def reproduce(
    run: Run,
    fault: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Which recorded fault; the newest if absent.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Repeat what led an environment to its exception.

    In this process, with the actions that the run recorded up to there. Exit code 0 when the same exception is raised at the same step, 1 when it is not.
    """
    from steppe.training import reproduce as reproducing

    with ExitStack() as stack:
        stdout = stack.enter_context(reserved_stdout()) if as_json else None
        seen = reproducing.reproduce(run, fault)
        if seen.found is not None:
            print(seen.found.traceback, file=sys.stderr)
        if as_json:
            emit(_to_json(seen), stdout)
        else:
            print("\n".join(_result_lines(seen)))
    raise typer.Exit(0 if seen.matched else 1)


def _to_json(seen: Reproduction) -> dict[str, Any]:
    import msgspec

    return {**msgspec.to_builtins(seen, enc_hook=str), "matched": seen.matched}


def _result_lines(seen: Reproduction) -> list[str]:
    """What happened, for people."""
    lines = [f"{seen.run}: {seen.recording.name}, actor {seen.actor}, {count(seen.steps)} steps repeated"]
    lines += [f"note: {note}" for note in seen.notes]
    then = f"{seen.recorded.exception} {_location(seen.recorded)}"
    if seen.matched:
        return [*lines, f"reproduced: {then}, as recorded"]
    now = f"{seen.found.exception} {_location(seen.found)}" if seen.found is not None else "nothing was raised"
    return [*lines, f"NOT reproduced: recorded was {then}; now {now}"]


def _location(raised: RaisedError) -> str:
    env, episode, step = (raised.place[key] for key in ("env_index", "episode", "step"))
    words = ("at the reset" if not step else f"at step {step}") + ("" if episode is None else f" of episode {episode}")
    return words + ("" if env is None else f" in environment {env}")


def diff(
    run: Run,
    other: Annotated[str, typer.Argument(metavar="RUN", help="The run to compare with.", show_default=False)],
    as_json: AsJson = False,
) -> None:
    """Show what differs between two runs.

    Configuration with its sources, versions, hardware, results.
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
        return print(f"{found['runs'][0]} and {found['runs'][1]} do not differ")
    return print_table(["", "key", *found["runs"]], rows)


def _cell(value: Any) -> str:
    if isinstance(value, Mapping) and "source" in value:
        return f"{_cell(value['value'])} ({value['source']})"
    return "–" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)

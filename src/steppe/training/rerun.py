"""Repeat what an async run learned, from its log of arrivals: the same segments in the same groups, all in one process.

Hyperparameters that were set during the run are set again at the update where its learner applied them. A run that was
resumed is repeated attempt by attempt: each ends where the next one's checkpoint was made, and is resumed there.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from steppe.core.config import references
from steppe.core.config.fields import MAX_SETTING
from steppe.core.config.run import KafkaConfig, RayConfig, RunConfig, flatten
from steppe.core.config.tunables import tunable_fields
from steppe.core.contracts.errors import Conflict, UsageError
from steppe.core.contracts.reports import EventReport
from steppe.core.contracts.transport import COMMANDS, EVENTS, SET
from steppe.core.system.typecheck import typechecked
from steppe.envs import probe
from steppe.records.arrivals import RunAttempt, read_arrivals
from steppe.records.checkpoints import Checkpoints
from steppe.records.compare import differences
from steppe.records.run_directory import RunDirectory
from steppe.records.view import RunView
from steppe.roles.recorded_schedule import HyperparameterUpdate, RecordedSchedule
from steppe.runtimes.plan import Plan, make_plan
from steppe.training.experiment import finish_run
from steppe.training.result import RunResult
from steppe.training.supervisor import Observer, Outcome, StopSignalHandler, Supervisor


@dataclass(frozen=True)
class RecordedRun:
    """A run as recorded in its log: its attempts, where the last one ended and with which weights."""

    directory: RunDirectory
    attempts: list[RunAttempt]
    end: tuple[int, int]  # env_steps, updates
    weights_sha256: str
    reached: bool  # whether its final weights are older than its learner's last ones
    evaluated: bool  # whether its last weights were evaluated
    changes: list[HyperparameterUpdate]  # of hyperparameters, during the run


@typechecked
def rerun(run: str | Path, observers: Sequence[Observer] = ()) -> RunResult:
    """Learn again what a recorded async run learned, as a new run next to it, and compare the weights.

    The result has `rerun_of`, `expected_sha256` and `matched` in addition to the fields of every run.
    """
    references.stop_if_loading_main()
    recorded = _read_recorded_run(RunDirectory.open(run))
    original = recorded.directory
    config = _rerun_config(original)
    plan = _plan(config)
    changed = dict.fromkeys(differences(original.record["config"], flatten(config)), "rerun")
    directory = RunDirectory.create(plan.config, {**original.sources, **changed}, {"rerun_of": original.id})
    try:
        if original.start.exists():
            shutil.copytree(original.start, directory.start)
        with StopSignalHandler() as interrupts, directory.store.heartbeats():
            outcome, view = _repeat_run(plan, recorded, directory, interrupts, observers)
        return _compare_weights(recorded, directory, finish_run(directory, outcome, view))
    finally:
        directory.release()


def _read_recorded_run(directory: RunDirectory) -> RecordedRun:
    status = directory.store.status()
    if status.live:
        raise Conflict(f"{directory.id} is still {status.state}: it can be repeated when it has ended")
    if not directory.arrivals.exists():
        config = directory.config()
        remedy = "train it with --record-arrivals" if config.mode == "async" else "train again with the same seed"
        raise UsageError(f"{directory.id} has no log of arrivals to be repeated from: {remedy}")
    attempts = read_arrivals(directory.arrivals)
    if not attempts:
        raise UsageError(f"{directory.id} ended before its first checkpoint: there are no weights to compare with")
    _require_unbroken_episodes(directory)
    view = RunView(directory)
    view.refresh()
    changes = _read_hyperparameter_updates(directory)
    end, reached, final = attempts[-1].end, view.reached_evaluation, view.final_evaluation
    assert end is not None, "attempts without an end are not read"
    if reached is not None:  # the learner continued briefly; the run's final weights are those that reached the target
        return RecordedRun(
            directory,
            attempts,
            (reached.env_steps, reached.updates),
            reached.weights_sha256,
            reached=True,
            evaluated=True,
            changes=changes,
        )
    evaluated = final is not None and final.weights_sha256 == end.weights_sha256
    last = (end.env_steps, end.updates)
    return RecordedRun(
        directory, attempts, last, end.weights_sha256, reached=False, evaluated=evaluated, changes=changes
    )


def _read_hyperparameter_updates(directory: RunDirectory) -> list[HyperparameterUpdate]:
    """Return the hyperparameter updates that the learner applied, oldest first.

    Updates after a checkpoint that the run was resumed from are left out.
    """
    found: list[HyperparameterUpdate] = []
    restart_only = _restart_only_changes(directory)
    for number, record in directory.store.read(EVENTS, limit=MAX_SETTING):
        event = EventReport.read(record)
        details = event.details
        if event.kind == "resume" and event.role == "supervisor":
            changed = [name for posted, name in restart_only if posted < number]
            if changed:
                raise UsageError(
                    f"{changed[0]} of {directory.id} was changed before it was resumed, and is none of the values that can "
                    "be set again on the way: such a run cannot be repeated"
                )
            env_steps, updates = int(details.get("env_steps", 0)), int(details.get("updates", 0))
            found = [update for update in found if update.env_steps <= env_steps and update.updates <= updates]
        elif event.kind == "command" and details.get("command") == SET and details.get("obeyed") and details["live"]:
            values = {name: details["values"][name] for name in details["live"]}
            found.append(HyperparameterUpdate(values, details["env_steps"], details["updates"], details["version"]))
    return found


def _restart_only_changes(directory: RunDirectory) -> list[tuple[int, str]]:
    """Return (command number, name) of every value that a running learner cannot apply."""
    live, refused = tunable_fields(directory.config()), directory.store.refused_commands()
    commands = [
        (number, command)
        for number, command in directory.store.read(COMMANDS, limit=MAX_SETTING)
        if command.get("command") == SET and command.get("id") not in refused
    ]
    return [(number, name) for number, command in commands for name in command["values"] if name not in live]


def _require_unbroken_episodes(directory: RunDirectory) -> None:
    """Raise UsageError if an actor started new episodes at a time that the log does not record.

    That happens after an actor was killed, or scaled away and started again. An attempt that starts with new episodes
    as a whole can be repeated.
    """
    killed: set[str] = set()
    resumed: set[str] | None = None  # in a resumed attempt: actors that reported how they continued
    for _, record in directory.store.read(EVENTS, limit=MAX_SETTING):
        event = EventReport.read(record)
        if event.kind == "restart":
            killed.add(event.role)
        elif event.kind == "resume" and event.role == "supervisor":
            killed, resumed = set(), set()
        elif event.kind == "resume":
            if event.details.get("how") != "exact" and (resumed is None or event.role in killed | resumed):
                why = "killed" if event.role in killed else "scaled away, started again"
                raise UsageError(
                    f"{event.role} of {directory.id} was {why} and had to begin new episodes, as its environments have no "
                    "snapshots: such a run cannot be repeated"
                )
            if resumed is not None:
                resumed.add(event.role)


def _rerun_config(original: RunDirectory) -> RunConfig:
    """Return the original's configuration, changed to run in one process.

    There are no periodic evaluations, and no target that could end it early. An original that could be scaled has all
    of its actors from the start: each collects what the log says.
    """
    config = original.config()
    changes: dict[str, object] = {"record_arrivals": False}
    if config.flow.max_actors is not None:  # a single actor has two slots
        changes |= {"max_actors": None, "slots_per_actor": config.flow.slots_per_actor or 2}
    return config.model_copy(
        update={
            "runtime": "inline",
            "actors": config.flow.max_actors or config.actors,
            "ray": RayConfig(),
            "kafka": KafkaConfig(),
            "target_return": None,
            "restarts": 0,
            "name": None,
            "run_dir": _unused_path(original.path),
            "flow": config.flow.model_copy(update=changes),
            "evaluation": config.evaluation.model_copy(update={"every_steps": MAX_SETTING, "every_episodes": None}),
        }
    )


def _unused_path(path: Path) -> Path:
    """Return RUN-rerun in RUN's parent directory, or RUN-rerun-2, …"""
    name = f"{path.resolve().name}-rerun"
    names = [name, *(f"{name}-{number}" for number in range(2, 10_000))]
    return next(path.parent / free for free in names if not (path.parent / free).exists())


def _plan(config: RunConfig) -> Plan:
    spec = probe(config.env, config.environment)
    return make_plan(config, replace(spec, max_episode_steps=config.environment.time_limit or spec.max_episode_steps))


def _repeat_run(
    plan: Plan,
    recorded: RecordedRun,
    directory: RunDirectory,
    interrupts: StopSignalHandler,
    observers: Sequence[Observer],
) -> tuple[Outcome, RunView]:
    from steppe.runtimes.builder import SuppliedComponents
    from steppe.runtimes.inline import launch as inline

    outcome, view = Outcome("FAILED", "error"), RunView(directory)
    changes = list(recorded.changes)
    for attempt in recorded.attempts:
        last = attempt is recorded.attempts[-1]
        end, may_end_early = recorded.end if last else _end_counts(attempt), last and recorded.reached
        schedule = RecordedSchedule(attempt.batches, end, may_end_early=may_end_early, changes=changes)
        attempt_plan = replace(plan, config=plan.config.model_copy(update={"steps": attempt.begin.steps}))
        directory.store.set_status("STARTING")
        handle = inline.launch(
            _plan_from_newest(attempt_plan, directory), directory, SuppliedComponents(schedule=schedule)
        )
        done = (
            Outcome("SUCCEEDED", "log_done", evaluate=recorded.evaluated) if last else Outcome("STOPPED", "life_done")
        )
        supervisor = Supervisor(handle, directory, attempt_plan.config, interrupts, at_end=done)
        try:
            outcome, view = supervisor.run(observers), supervisor.view
        except KeyboardInterrupt:
            return Outcome("STOPPED", "interrupted", "stopped at once by a second signal"), view
        if outcome != done:
            break
    return outcome, view


def _end_counts(attempt: RunAttempt) -> tuple[int, int]:
    assert attempt.end is not None, "attempts without an end are not read"
    return attempt.end.env_steps, attempt.end.updates


def _plan_from_newest(plan: Plan, directory: RunDirectory) -> Plan:
    """Return the plan from the checkpoint that the previous attempt has just written."""
    newest = Checkpoints(directory.checkpoints, run=directory.key).latest()
    if newest is None:
        return plan
    details = {"checkpoint": newest.number, **newest.counters}
    directory.store.post(
        EVENTS, EventReport(run=directory.id, kind="resume", role="supervisor", details=details).record()
    )
    return replace(plan, resume=newest.number)


def _compare_weights(recorded: RecordedRun, directory: RunDirectory, result: RunResult) -> RunResult:
    finished = result.summary["reason"] == "log_done"
    matched = result.summary["weights_sha256"] == recorded.weights_sha256 if finished else None
    original = recorded.directory
    about = {"rerun_of": original.id, "expected_sha256": recorded.weights_sha256, "matched": matched}
    message = result.message
    if matched:
        message = f"the weights are those of {original.id}"
    elif matched is False:
        message = f"the weights are not those of {original.id}{_describe_differences(original, directory)}"
    summary = {**result.summary, **about}
    directory.write_summary({**summary, "message": message})
    return replace(result, summary=summary, message=message)


def _describe_differences(first: RunDirectory, other: RunDirectory) -> str:
    """Describe what could explain different weights: another machine or other libraries."""
    sections = [differences(first.record.get(key, {}), other.record.get(key, {})) for key in ("versions", "hardware")]
    changed = [f"{key} was {was}, is {now}" for section in sections for key, (was, now) in section.items()]
    return f"; what differs here: {'; '.join(changed)}" if changed else ""

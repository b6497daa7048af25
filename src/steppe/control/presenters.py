"""Convert the records of runs to the API's response models."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any, Literal

import msgspec

from steppe.control import models
from steppe.control.database import RequestedState
from steppe.control.operations import READY_S
from steppe.core.config.agent import AgentConfig
from steppe.core.config.algorithm_table import ALGORITHMS
from steppe.core.config.run import RunConfig
from steppe.core.config.runtime_table import capabilities_of
from steppe.core.contracts.reports import ActorReport
from steppe.core.contracts.transport import COMMANDS, EVALUATIONS, SCALE
from steppe.records.checkpoints import CheckpointInfo
from steppe.records.profiling.diagnosis import TimeShares, diagnose, measure_time_shares
from steppe.records.run_directory import RunDirectory, RunInfo
from steppe.records.store import NO_OWNER, PAUSED, PENDING
from steppe.records.view import DIAGNOSIS_S, ENDED, RunView, time_shares_of

_TEXT = 2_000  # maximum characters of untrusted text in a response


def present_run(info: RunInfo, view: RunView | None, requested: RequestedState) -> models.Run:
    """Return one entry of the run list."""
    status = info.status if view is None else view.status
    return models.Run(
        id=info.path.name,
        state=status.state,
        reason=status.reason,
        message=_truncate(status.message),
        desired=_desired_state(status.state, status.pid, requested.desired),
        generation=requested.generation,
        env=info.env,
        algo=info.algo,
        created_s=info.created_s,
        started_s=status.started_s,
        heartbeat_s=status.heartbeat_s,
        operation=requested.operation,
        progress=_present_progress(view) if view is not None else _progress_from_summary(info),
        damage=info.damage,
    )


def _desired_state(
    state: str, pid: int | None, requested: str | None
) -> Literal["waiting", "running", "paused", "stopped"]:
    if state in ENDED:
        return "stopped" if requested != "running" or state != "LOST" else "running"
    if state == PENDING and pid in (None, NO_OWNER):
        return "waiting"
    return requested or ("paused" if state == PAUSED else "running")  # type: ignore[return-value]


def _present_progress(view: RunView) -> models.RunProgress:
    evaluation = view.last_evaluation
    return models.RunProgress(
        env_steps=view.env_steps,
        total_steps=view.total_steps,
        updates=view.updates,
        version=view.version,
        train_return_mean=finite_or_none(view.train_return_mean),
        eval_return_mean=finite_or_none(evaluation.return_mean) if evaluation else None,
        steps_per_s=finite_or_none(view.recent_steps_per_s),
        episodes=view.episodes,
    )


def _progress_from_summary(info: RunInfo) -> models.RunProgress:
    """Return the progress from a run's summary; a stopped run has no final evaluation and shows its last one."""
    names = ("env_steps", "updates", "version", "train_return_mean", "eval_return_mean", "steps_per_s")
    known = {name: value for name in names if (value := (info.summary or {}).get(name)) is not None}
    if "eval_return_mean" not in known:
        store = RunDirectory(info.path).store
        for _, record in store.read(EVALUATIONS, store.newest(EVALUATIONS) - 1, 1):
            known["eval_return_mean"] = finite_or_none(record.get("return_mean"))
    return models.RunProgress(**known, total_steps=info.total_steps)


def max_scalable_actors(config: RunConfig) -> int:
    """Return the maximum number of actors of a run; 0 if their number cannot change."""
    if config.mode != "async" or not capabilities_of(config.runtime).scales_actors:
        return 0
    return config.flow.max_actors or config.actors


def present_actors(view: RunView) -> models.Actors:
    now = time.time()
    commands = view.directory.store.read(COMMANDS)
    scaled = [command["actors"] for _, command in commands if command.get("command") == SCALE]
    desired = scaled[-1] if scaled else view.config.actors
    actors = [
        models.ActorState(
            actor=report.actor,
            state="ended" if view.ended else _actor_state(report, desired, now),
            epoch=report.epoch,
            version=report.version,
            env_steps=report.env_steps,
            report_age_s=max(0.0, now - report.time_s),
            rss_bytes=report.rss_bytes,
        )
        for report in view.actors.values()
    ]
    ready = sum(actor.state == "running" for actor in actors)
    return models.Actors(
        desired=0 if view.ended else desired,
        ready=0 if view.ended else ready,
        most=max_scalable_actors(view.config),
        actors=actors,
    )


def _actor_state(report: ActorReport, desired: int, now: float) -> str:
    """Return `stopped` for an actor that was scaled away, `silent` for one that should report and does not."""
    if now - report.time_s < READY_S or report.state == "stopped":
        return report.state
    return "stopped" if report.actor >= desired else "silent"


def present_algorithm(name: str) -> models.Algorithm:
    kind = ALGORITHMS[name]
    defaults = {key: field.get_default() for key, field in kind.model_fields.items()}
    return models.Algorithm(
        name=name,
        summary=" ".join((kind.__doc__ or "").split()),
        actions=list(kind.actions),
        memory=kind.memory,
        hyperparameters=present_hyperparameters(kind, msgspec.json.decode(msgspec.json.encode(defaults))),
    )


def present_hyperparameters(
    kind: type[AgentConfig], values: Mapping[str, Any], live: Iterable[str] | None = None
) -> list[models.Hyperparameter]:
    """Return hyperparameters with their ranges and when a change takes effect.

    `live` has the run's names that can change while it runs; default: the algorithm's.
    """
    now = set(kind.live if live is None else live)
    schemas = kind.model_json_schema()["properties"]
    return [
        models.Hyperparameter(
            name=name,
            description=field.description or "",
            schema={key: value for key, value in schemas[name].items() if key not in ("title", "description")},
            value=values[name],
            effect="live" if name in now else "fixed" if name in kind.fixed else "restart",
        )
        for name, field in kind.model_fields.items()
    ]


def present_effects(before: Mapping[str, Any], after: Mapping[str, Any], live: Iterable[str]) -> list[models.Effect]:
    now = set(live)
    return [
        models.Effect(
            name=name,
            before=before[name],
            after=value,
            effect="takes effect with the next update" if name in now else "takes effect on restart",
        )
        for name, value in after.items()
    ]


def measured_numbers(measured: TimeShares) -> dict[str, float]:
    """Return the measured numbers that a diagnosis is based on."""
    numbers = {name: value for name, value in asdict(measured).items() if isinstance(value, int | float)}
    return {name: round(float(value), 4) for name, value in numbers.items() if not isinstance(value, bool)}


def present_event(number: int, record: Mapping[str, Any]) -> models.Event:
    details = {str(key)[:100]: to_json_value(value) for key, value in record.get("details", {}).items()}
    return models.Event(
        number=number,
        time_s=record.get("time_s", 0.0),
        kind=record.get("kind", ""),
        role=record.get("role", ""),
        details=details,
    )


def present_checkpoint(info: CheckpointInfo) -> models.CheckpointState:
    counters = info.counters
    return models.CheckpointState(
        number=info.number,
        best=info.best,
        age_s=info.age_s,
        size_bytes=info.size_bytes,
        env_steps=counters.get("env_steps"),
        updates=counters.get("updates"),
        version=counters.get("version"),
        score=finite_or_none(counters.get("score")),
        damage=None if info.damage is None else "damaged",  # the full message contains paths of this machine
    )


def present_evaluation(number: int, record: Mapping[str, Any]) -> models.EvaluationResult:
    return models.EvaluationResult(
        number=number,
        time_s=record["time_s"],
        version=record["version"],
        env_steps=record["env_steps"],
        episodes=len(record["returns"]),
        return_mean=finite_or_none(record["return_mean"]),
        return_std=finite_or_none(record["return_std"]),
        reached=record.get("reached", False),
        final=record.get("final", False),
        recording=(record.get("recording") or "").rpartition("/")[2] or None,
    )


def present_diagnosis(view: RunView, *, whole_life: bool) -> models.RunDiagnosis:
    spent = view.totals if whole_life else view.lately
    measured = measure_time_shares(view, spent)
    found = diagnose(measured)
    lags = spent.lags
    return models.RunDiagnosis(
        window_s=None if whole_life else DIAGNOSIS_S,
        window="the whole run" if whole_life else f"the last {DIAGNOSIS_S:g} s",
        rule=found.rule,
        sentence=found.sentence,
        numbers=measured_numbers(measured),
        shares=time_shares_of(spent.phases),
        lags={str(lag): lags[lag] for lag in sorted(lags)},
    )


def finite_or_none(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def to_json_value(value: Any) -> Any:
    """Convert the values of a record to JSON types and truncate long texts."""
    if isinstance(value, float):
        return finite_or_none(value)
    if isinstance(value, str):
        return _truncate(value)
    if isinstance(value, dict):
        return {str(key)[:100]: to_json_value(inner) for key, inner in value.items()}
    return [to_json_value(inner) for inner in value] if isinstance(value, list | tuple) else value


def _truncate(text: str | None) -> str | None:
    return text if text is None or len(text) <= _TEXT else text[:_TEXT] + "…"

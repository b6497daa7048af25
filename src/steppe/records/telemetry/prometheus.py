"""Converts roles' reports to Prometheus metrics (text format 0.0.4)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from steppe.core.contracts.reports import ActorReport, EvaluationReport, TrainingReport


@dataclass(frozen=True)
class MetricSample:
    """One value of a metric, with its name and labels."""

    name: str
    value: float
    labels: tuple[tuple[str, str], ...] = ()


# Name → type and help text.
METRIC_FAMILIES: dict[str, tuple[str, str]] = {
    "steppe_learner_env_steps_total": ("counter", "Environment steps learned from."),
    "steppe_learner_updates_total": ("counter", "Optimizer steps."),
    "steppe_learner_version": ("gauge", "The policy's version."),
    "steppe_learner_seconds_total": (
        "counter",
        "Seconds of the learner by phase: wait, sample, learn, publish, other.",
    ),
    "steppe_learner_segments_total": ("counter", "Segments learned from."),
    "steppe_learner_lag_versions_total": ("counter", "Versions behind, summed over segments: divide by the segments."),
    "steppe_learner_dropped_total": ("counter", "Segments that were not learned from, by cause."),
    "steppe_learner_memory": ("gauge", "The replay memory's own figures by name."),
    "steppe_learner_stat": ("gauge", "Losses and the like by name, averaged over the last report."),
    "steppe_actor_env_steps_total": ("counter", "Environment steps taken."),
    "steppe_actor_version": ("gauge", "The version it acts with."),
    "steppe_actor_up": ("gauge", "1 while it says that it runs."),
    "steppe_actor_restarts_total": ("counter", "How often it has been started again."),
    "steppe_actor_seconds_total": ("counter", "Seconds of the actor by phase: env, policy, blocked, other."),
    "steppe_evaluation_return_mean": ("gauge", "Mean return of the newest evaluation."),
    "steppe_evaluation_version": ("gauge", "The version that was evaluated."),
    "steppe_role_resident_bytes": ("gauge", "Memory of the role's process."),
    "steppe_role_cpu_seconds_total": ("counter", "CPU time of the role's process."),
}


def learner_samples(report: TrainingReport) -> Iterator[MetricSample]:
    run = (("run", report.run),)
    yield MetricSample("steppe_learner_env_steps_total", report.env_steps, run)
    yield MetricSample("steppe_learner_updates_total", report.updates, run)
    yield MetricSample("steppe_learner_version", report.version, run)
    yield MetricSample("steppe_learner_segments_total", sum(report.lags.values()), run)
    yield MetricSample("steppe_learner_lag_versions_total", sum(lag * count for lag, count in report.lags.items()), run)
    yield from _by("steppe_learner_seconds_total", "phase", report.phases, run)
    yield from _by("steppe_learner_dropped_total", "cause", report.dropped, run)
    yield from _by("steppe_learner_memory", "name", report.memory, run)
    yield from _by("steppe_learner_stat", "name", report.stats, run)
    yield from _process(report, (*run, ("role", "learner")))


def actor_samples(report: ActorReport) -> Iterator[MetricSample]:
    labels = (("run", report.run), ("actor", str(report.actor)))
    yield MetricSample("steppe_actor_env_steps_total", report.env_steps, labels)
    yield MetricSample("steppe_actor_version", report.version, labels)
    yield MetricSample("steppe_actor_up", float(report.state == "running"), labels)
    yield MetricSample("steppe_actor_restarts_total", report.epoch, labels)
    yield from _by("steppe_actor_seconds_total", "phase", report.phases, labels)
    yield from _process(report, (("run", report.run), ("role", f"actor-{report.actor}")))


def evaluation_samples(report: EvaluationReport) -> Iterator[MetricSample]:
    run = (("run", report.run),)
    yield MetricSample("steppe_evaluation_return_mean", report.return_mean, run)
    yield MetricSample("steppe_evaluation_version", report.version, run)


def format_samples(samples: Iterable[MetricSample]) -> Iterator[str]:
    """Yield the lines of the exposition format, each metric family under its HELP and TYPE lines."""
    found: dict[str, list[MetricSample]] = {}
    for sample in samples:
        found.setdefault(sample.name, []).append(sample)
    for name, members in found.items():
        kind, words = METRIC_FAMILIES[name]
        yield f"# HELP {name} {words}"
        yield f"# TYPE {name} {kind}"
        for sample in members:
            labels = ",".join(f'{key}="{_escaped(value)}"' for key, value in sample.labels)
            yield f"{name}{{{labels}}} {_number(sample.value)}"


def _by(
    name: str, label: str, values: Mapping[str, float], labels: tuple[tuple[str, str], ...]
) -> Iterator[MetricSample]:
    for key, value in values.items():
        yield MetricSample(name, value, (*labels, (label, key)))


def _process(report: TrainingReport | ActorReport, labels: tuple[tuple[str, str], ...]) -> Iterator[MetricSample]:
    if report.rss_bytes is not None:
        yield MetricSample("steppe_role_resident_bytes", report.rss_bytes, labels)
    if report.cpu_s is not None:
        yield MetricSample("steppe_role_cpu_seconds_total", report.cpu_s, labels)


def _number(value: float) -> str:
    if math.isfinite(value):
        return f"{value:.17g}"
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")

"""Convert roles' reports to Prometheus metrics; `prometheus_client` writes the text format 0.0.4."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from steppe.core.contracts.reports import ActorReport, EvaluationReport, Report, TrainingReport

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


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
    "steppe_learner_memory": ("gauge", "Statistics of the replay memory by name."),
    "steppe_learner_stat": ("gauge", "Losses and other statistics by name, averaged over the last report."),
    "steppe_actor_env_steps_total": ("counter", "Environment steps taken."),
    "steppe_actor_version": ("gauge", "Version of the weights that the actor acts with."),
    "steppe_actor_up": ("gauge", "1 while the actor reports that it is running."),
    "steppe_actor_restarts_total": ("counter", "Number of restarts."),
    "steppe_actor_seconds_total": ("counter", "Seconds of the actor by phase: env, policy, blocked, other."),
    "steppe_evaluation_return_mean": ("gauge", "Mean return of the newest evaluation."),
    "steppe_evaluation_version": ("gauge", "The version that was evaluated."),
    "steppe_role_resident_bytes": ("gauge", "Memory of the role's process."),
    "steppe_role_cpu_seconds_total": ("counter", "CPU time of the role's process."),
}


def learner_samples(report: TrainingReport) -> Iterator[MetricSample]:
    """Yield the samples of a learner's report."""
    run = (("run", report.run),)
    yield MetricSample("steppe_learner_env_steps_total", report.env_steps, run)
    yield MetricSample("steppe_learner_updates_total", report.updates, run)
    yield MetricSample("steppe_learner_version", report.version, run)
    yield MetricSample("steppe_learner_segments_total", sum(report.lags.values()), run)
    yield MetricSample("steppe_learner_lag_versions_total", sum(lag * count for lag, count in report.lags.items()), run)
    yield from _labelled_samples("steppe_learner_seconds_total", "phase", report.phases, run)
    yield from _labelled_samples("steppe_learner_dropped_total", "cause", report.dropped, run)
    yield from _labelled_samples("steppe_learner_memory", "name", report.memory, run)
    yield from _labelled_samples("steppe_learner_stat", "name", report.stats, run)
    yield from _process(report, (*run, ("role", "learner")))


def actor_samples(report: ActorReport) -> Iterator[MetricSample]:
    """Yield the samples of an actor's report."""
    labels = (("run", report.run), ("actor", str(report.actor)))
    yield MetricSample("steppe_actor_env_steps_total", report.env_steps, labels)
    yield MetricSample("steppe_actor_version", report.version, labels)
    yield MetricSample("steppe_actor_up", float(report.state == "running"), labels)
    yield MetricSample("steppe_actor_restarts_total", report.epoch, labels)
    yield from _labelled_samples("steppe_actor_seconds_total", "phase", report.phases, labels)
    yield from _process(report, (("run", report.run), ("role", f"actor-{report.actor}")))


def evaluation_samples(report: EvaluationReport) -> Iterator[MetricSample]:
    """Yield the samples of an evaluation's report."""
    run = (("run", report.run),)
    yield MetricSample("steppe_evaluation_return_mean", report.return_mean, run)
    yield MetricSample("steppe_evaluation_version", report.version, run)


def samples_of(report: Report) -> Iterator[MetricSample]:
    """Yield the samples of a report; none of a kind without metrics."""
    if isinstance(report, TrainingReport):
        yield from learner_samples(report)
    elif isinstance(report, ActorReport):
        yield from actor_samples(report)
    elif isinstance(report, EvaluationReport):
        yield from evaluation_samples(report)


def group_into_families(samples: Iterable[MetricSample]) -> list[Metric]:
    """Return one metric family per name, each with all samples of that name."""
    families: dict[str, Metric] = {}
    for sample in samples:
        if sample.name not in families:
            kind, help_text = METRIC_FAMILIES[sample.name]
            families[sample.name] = (CounterMetricFamily if kind == "counter" else GaugeMetricFamily)(
                sample.name, help_text
            )
        families[sample.name].add_sample(sample.name, dict(sample.labels), sample.value)
    return list(families.values())


class _FixedCollector(Collector):
    """Hands over families that were built beforehand."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def render_families(families: Iterable[Metric]) -> bytes:
    """Return metric families in the text format, without those that `prometheus_client` has of this process."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_FixedCollector(families))
    return generate_latest(registry)


def _labelled_samples(
    name: str, label: str, values: Mapping[str, float], labels: tuple[tuple[str, str], ...]
) -> Iterator[MetricSample]:
    for key, value in values.items():
        yield MetricSample(name, value, (*labels, (label, key)))


def _process(report: TrainingReport | ActorReport, labels: tuple[tuple[str, str], ...]) -> Iterator[MetricSample]:
    if report.rss_bytes is not None:
        yield MetricSample("steppe_role_resident_bytes", report.rss_bytes, labels)
    if report.cpu_s is not None:
        yield MetricSample("steppe_role_cpu_seconds_total", report.cpu_s, labels)

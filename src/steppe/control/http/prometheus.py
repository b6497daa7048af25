"""Prometheus metrics of the service, its runs and their roles."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from steppe.control.service import Service
from steppe.records.store import STATES
from steppe.records.telemetry.prometheus import (
    MetricSample,
    actor_samples,
    evaluation_samples,
    group_into_families,
    learner_samples,
    render_families,
)

_RUN_GAUGES = {
    "env_steps": "Environment steps learned from.",
    "updates": "Optimizer steps.",
    "steps_per_s": "Recent environment steps per second.",
    "train_return_mean": "Mean return of the last training episodes.",
}


def render_metrics(service: Service, *, clients: int, failures: int) -> bytes:
    """Return the metrics in text format 0.0.4."""
    return render_families(_families(service, clients, failures))


def _families(service: Service, clients: int, failures: int) -> Iterator[Metric]:
    runs = service.list_runs().runs
    count_by_state = Counter[str](run.state for run in runs)
    by_state = GaugeMetricFamily("steppe_runs", "Runs by state.", labels=["state"])
    for state in STATES:
        by_state.add_metric([state], count_by_state[state])
    yield by_state
    pending = len(service.database.operations(pending=True, limit=1_000))
    yield GaugeMetricFamily("steppe_operations_pending", "Operations in progress.", value=pending)
    yield GaugeMetricFamily("steppe_stream_clients", "Connected WebSocket clients.", value=clients)
    yield CounterMetricFamily("steppe_watch_failures_total", "Failed attempts to read the runs.", value=failures)
    live = [run for run in runs if run.state in ("RUNNING", "PAUSED")]
    for field, description in _RUN_GAUGES.items():
        gauge = GaugeMetricFamily(f"steppe_run_{field}", description, labels=["run"])
        for run in live:
            value = getattr(run.progress, field)
            if value is not None:
                gauge.add_metric([run.id], value)
        yield gauge
    yield from group_into_families(sample for run in live for sample in _role_samples(service, run.id))


def _role_samples(service: Service, run: str) -> list[MetricSample]:
    with service.run_view(run) as view:
        found = [*learner_samples(view.training)] if view.training else []
        found += [sample for report in view.actors.values() for sample in actor_samples(report)]
        return found + ([*evaluation_samples(view.last_evaluation)] if view.last_evaluation else [])

"""Prometheus metrics of the service, its runs and their roles."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from steppe.control.service import Service
from steppe.records.store import STATES
from steppe.records.telemetry.prometheus import (
    MetricSample,
    actor_samples,
    evaluation_samples,
    format_samples,
    learner_samples,
)


def render_metrics(service: Service, *, clients: int, failures: int) -> str:
    """Return the metrics in text format 0.0.4."""
    return "\n".join([*_lines(service, clients, failures), ""])


def _lines(service: Service, clients: int, failures: int) -> Iterator[str]:
    runs = service.list_runs().runs
    states = Counter(run.state for run in runs)
    yield from _head("steppe_runs", "gauge", "Runs by state.")
    yield from (f'steppe_runs{{state="{state}"}} {states[state]}' for state in STATES)  # type: ignore[index]
    pending = len(service.database.operations(pending=True, limit=1_000))
    for name, kind, words, value in (
        ("steppe_operations_pending", "gauge", "Changes under way.", pending),
        ("steppe_stream_clients", "gauge", "Connected WebSocket clients.", clients),
        ("steppe_watch_failures_total", "counter", "Looks at the runs that failed.", failures),
    ):
        yield from _head(name, kind, words)
        yield f"{name} {value}"
    live = [run for run in runs if run.state in ("RUNNING", "PAUSED")]
    for field, words in (
        ("env_steps", "Environment steps learned from."),
        ("updates", "Optimizer steps."),
        ("steps_per_s", "Environment steps per second, lately."),
        ("train_return_mean", "Mean return of the last training episodes."),
    ):
        yield from _head(f"steppe_run_{field}", "gauge", words)
        for run in live:
            value = getattr(run.progress, field)
            if value is not None:
                yield f'steppe_run_{field}{{run="{run.id}"}} {value}'
    yield from format_samples(sample for run in live for sample in _roles(service, run.id))


def _roles(service: Service, run: str) -> list[MetricSample]:
    with service.run_view(run) as view:
        found = [*learner_samples(view.training)] if view.training else []
        found += [sample for report in view.actors.values() for sample in actor_samples(report)]
        return found + ([*evaluation_samples(view.last_evaluation)] if view.last_evaluation else [])


def _head(name: str, kind: str, words: str) -> Iterator[str]:
    yield f"# HELP {name} {words}"
    yield f"# TYPE {name} {kind}"

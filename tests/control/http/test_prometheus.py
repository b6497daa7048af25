"""The metrics of roles and of the service, read by the parser of prometheus_client, and the dashboard that shows them."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from steppe.core.contracts.reports import ActorReport, EvaluationReport, TrainingReport
from steppe.records.telemetry.prometheus import (
    METRIC_FAMILIES,
    group_into_families,
    render_families,
    samples_of,
)
from tests.support.service import LONG, learning, make, until

DASHBOARD = Path(__file__).resolve().parents[3] / "deploy" / "grafana" / "steppe.json"


def parsed(text):
    """Return (name, labels) → value, read by the parser of prometheus_client; each family occurs once."""
    found, names = {}, []
    for family in text_string_to_metric_families(text):
        names.append(family.name)
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in found, "a sample occurs twice"
            found[key] = sample.value
    assert len(set(names)) == len(names)
    return found


def types(text):
    """Return name → type as the TYPE lines say, without the suffix that the parser takes from counters."""
    return {line.split()[2]: line.split()[3] for line in text.splitlines() if line.startswith("# TYPE ")}


@pytest.mark.unit
def test_reports_become_samples():
    training = TrainingReport(
        run='a"b', version=7, updates=9, env_steps=1_000, train_s=2.0, phases={"wait": 1.5, "learn": 0.5},
        lags={0: 3, 2: 4}, dropped={"too_old": 5}, stats={"loss": float("nan")}, rss_bytes=123, cpu_s=0.25,
    )  # fmt: skip
    actor = ActorReport(
        run="r", actor=3, epoch=1, version=6, sequence=2, env_steps=500, phases={"env": 2.0}, state="stopped"
    )
    evaluation = EvaluationReport(
        run="r", version=5, updates=1, env_steps=10, train_s=1.0, returns=[1.0, 3.0], lengths=[1, 1],
        return_mean=2.0, return_std=1.0, duration_s=0.1, weights_sha256="",
    )  # fmt: skip
    reports = (training, actor, evaluation)
    text = render_families(group_into_families(sample for one in reports for sample in samples_of(one))).decode()
    found = parsed(text)
    run = ("run", 'a"b')
    assert found["steppe_learner_segments_total", (run,)] == 7
    assert found["steppe_learner_lag_versions_total", (run,)] == 8
    assert found["steppe_learner_seconds_total", (("phase", "wait"), run)] == 1.5
    assert found["steppe_learner_dropped_total", (("cause", "too_old"), run)] == 5
    assert found["steppe_actor_up", (("actor", "3"), ("run", "r"))] == 0
    assert found["steppe_evaluation_return_mean", (("run", "r"),)] == 2.0
    assert found["steppe_role_cpu_seconds_total", (("role", "learner"), run)] == 0.25
    assert math.isnan(found["steppe_learner_stat", (("name", "loss"), run)])
    assert {name for name, _ in found} <= METRIC_FAMILIES.keys()
    assert types(text) == {name: METRIC_FAMILIES[name][0] for name in types(text)}
    assert types(text)["steppe_learner_env_steps_total"] == "counter"
    assert "_created" not in text


@pytest.mark.slow
@pytest.mark.integration
def test_a_live_run_has_metrics_of_every_role(api: httpx.Client):
    run = make(api, LONG)
    learning(api, run)

    def samples():
        return parsed(api.get("/metrics").text)

    def actors():
        return {dict(labels)["actor"] for name, labels in samples() if name == "steppe_actor_up"}

    until(lambda: actors() == {"0", "1"}, "both actors have reported")
    names = {name for name, labels in samples() if ("run", run) in labels}
    assert {"steppe_learner_seconds_total", "steppe_actor_seconds_total", "steppe_actor_up"} <= names


@pytest.mark.unit
def test_the_dashboard_queries_existing_metrics():
    board = json.loads(DASHBOARD.read_text())
    known = METRIC_FAMILIES.keys() | {"steppe_runs", "steppe_run_train_return_mean"}
    queried = {
        name for panel in board["panels"] for one in panel["targets"] for name in re.findall(r"steppe_\w+", one["expr"])
    }
    assert queried <= known
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    positions = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in board["panels"]]
    assert len(set(positions)) == len(positions)

"""What a role shows of itself over HTTP, and the lines it prints."""

from __future__ import annotations

import io
import json
import sys
from importlib.metadata import version

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from steppe.core.contracts.errors import MissingExtra, UsageError
from steppe.core.contracts.reports import ActorReport, EventReport
from steppe.core.contracts.transport import ACTORS, EVENTS
from steppe.records.telemetry import role_endpoint
from steppe.records.telemetry.role_endpoint import RoleEndpoint

pytestmark = pytest.mark.unit


class Kept:
    def __init__(self):
        self.posted = []

    def post(self, topic, record):
        self.posted.append((topic, record))
        return len(self.posted)

    def read(self, topic, after=0, limit=10_000):
        return [(1, {"read": topic})]


@pytest.fixture
def shown():
    printed = io.StringIO()
    made = RoleEndpoint("demo", "actor", lines=printed)
    made.printed = printed
    made.address = f"http://127.0.0.1:{made.serve(0, '127.0.0.1')}"
    yield made
    made.close()


def test_health_and_readiness_are_those_of_the_role(shown, monkeypatch):
    def status(path):
        return httpx.get(shown.address + path).status_code

    assert (status("/healthz"), status("/readyz")) == (200, 503)  # it waits for its run: alive, and not at work
    shown.heartbeat()
    assert (status("/healthz"), status("/readyz")) == (200, 200)
    monkeypatch.setattr(role_endpoint, "HANG_S", -1.0)
    assert status("/healthz") == 503
    assert status("/secrets") == 404


def test_what_it_reports_is_shown_and_passed_on(shown):
    kept = Kept()
    board = shown.observe(kept)
    report = ActorReport(run="demo", actor=2, epoch=0, version=4, sequence=1, env_steps=77)
    assert board.post(ACTORS, report.record()) == 1
    assert kept.posted == [(ACTORS, report.record())]
    assert board.read("any") == [(1, {"read": "any"})]
    response = httpx.get(shown.address + "/metrics")
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    samples = [sample for family in text_string_to_metric_families(response.text) for sample in family.samples]
    [steps] = [sample for sample in samples if sample.name == "steppe_actor_env_steps_total"]
    assert (steps.labels, steps.value) == ({"run": "demo", "actor": "2"}, 77)


def test_events_are_lines_with_run_role_and_version(shown):
    board = shown.observe(Kept())
    board.post(EVENTS, EventReport(run="demo", kind="checkpoint", details={"number": 3}).record())
    board.post(EVENTS, EventReport(run="demo", kind="span", details={}).record())
    [line] = [json.loads(line) for line in shown.printed.getvalue().splitlines()]
    assert line.pop("time_s") > 0
    about = {"run": "demo", "role": "actor", "version": version("steppe")}
    assert line == {**about, "kind": "checkpoint", "details": {"number": 3}}


def test_a_port_that_is_taken_is_one_clear_sentence(shown):
    with pytest.raises(UsageError, match="--metrics-port"):
        RoleEndpoint("demo", "actor").serve(int(shown.address.rpartition(":")[2]), "127.0.0.1")


def test_without_prometheus_client_the_sentence_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    monkeypatch.delitem(sys.modules, "steppe.records.telemetry.prometheus", raising=False)
    endpoint = RoleEndpoint("demo", "actor", lines=io.StringIO())
    endpoint.log_event("ends")  # JSON lines need no extra
    with pytest.raises(
        MissingExtra, match=r"--metrics-port needs an optional dependency: pip install 'steppe\[kafka\]'"
    ):
        endpoint.serve(0, "127.0.0.1")

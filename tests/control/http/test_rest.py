"""Behaviour of the REST API, on the application in this process: headers, pagination, errors, file permissions."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from steppe.control import run_requests
from steppe.control.backends.kafka_listener import StartCommandListener
from steppe.control.factory import make_local_service
from steppe.control.http.app import make_app
from steppe.control.http.auth import AccessControl, TokenStore
from steppe.control.periodic import PeriodicTask
from steppe.control.service import Service
from steppe.core.contracts.errors import UsageError
from steppe.core.contracts.reports import ActorReport, EvaluationReport, EventReport, TrainingReport
from steppe.core.contracts.transport import ACTORS, COMMANDS, EVALUATIONS, EVENTS, TRAINING
from steppe.records.run_directory import RunDirectory
from tests.support.service import SHORT, until

pytestmark = pytest.mark.unit

RUNS = "/api/v1/runs"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("STEPPE_RUNS", str(tmp_path_factory.mktemp("rest") / "runs"))
        made = make_local_service()
        yield made
        made.close()


@pytest.fixture(autouse=True)
def runs(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """Share one directory of runs between the tests of this module."""
    monkeypatch.setenv("STEPPE_RUNS", str(service.root))


@pytest.fixture(scope="module")
def http(service: Service) -> TestClient:
    keys = TokenStore(service.private / "tokens.json")
    headers = {"Authorization": f"Bearer {keys.tokens['admin']}"}
    return TestClient(make_app(service, AccessControl(keys)), base_url="http://127.0.0.1", headers=headers)


def make(http: TestClient, **changes: Any) -> str:
    answer = http.post(RUNS, json={**SHORT, "start": False, **changes})
    assert answer.status_code == 201, answer.text
    return str(answer.json()["id"])


def directory_of(service: Service, run: str) -> RunDirectory:
    return RunDirectory(service.root / run)


def pages(http: TestClient, path: str, key: str, limit: int = 2) -> list[Any]:
    """Return all items of a list, fetched page by page."""
    found, cursor = list[Any](), None
    while True:
        answer = http.get(path, params={"limit": limit} | ({"cursor": cursor} if cursor else {}))
        assert answer.status_code == 200, answer.text
        found += answer.json()[key]
        assert len(answer.json()[key]) <= limit
        cursor = answer.json()["next"]
        if cursor is None:
            return found


def test_a_new_run_has_a_location_and_a_quoted_etag(http: TestClient):
    made = http.post(RUNS, json={**SHORT, "start": False})
    assert made.headers["location"] == f"{RUNS}/{made.json()['id']}"
    got = http.get(made.headers["location"])
    tag = got.headers["etag"]
    assert tag == made.headers["etag"] == f'"{got.json()["generation"]}"'
    change = {"json": {"values": {"clip": 0.1}}}
    path = f"{made.headers['location']}/hyperparameters"
    assert http.patch(path, headers={"If-Match": '"77"'}, **change).status_code == 412
    assert http.patch(path, headers={"If-Match": tag}, **change).status_code == 202
    assert http.patch(path, headers={"If-Match": tag}, **change).status_code == 412
    bare = tag.strip('"')
    assert http.patch(path, headers={"If-Match": str(int(bare) + 1)}, **change).status_code == 202
    assert http.patch(path, headers={"If-Match": "*"}, **change).status_code == 202
    assert http.patch(path, headers={"If-Match": '"x"'}, **change).status_code == 422


def test_a_service_that_cannot_read_commands_is_not_ready(service: Service):
    task = PeriodicTask("command-listener", 1.0)
    app = make_app(service, AccessControl(TokenStore(service.private / "tokens.json")), [task])
    probe = TestClient(app, base_url="http://127.0.0.1")
    task.last_error = "commands.control cannot be read: not authorized"
    assert probe.get("/readyz").status_code == 200, "other tasks do not affect readiness"
    task.required_for_readiness = True
    answer = probe.get("/readyz")
    assert (answer.status_code, answer.json()["status"]) == (503, "unavailable")
    assert "not authorized" in answer.json()["detail"]
    assert StartCommandListener.required_for_readiness


def test_a_failing_task_keeps_its_error_until_it_succeeds():
    errors = ["not allowed"]

    def fail() -> None:
        if errors:
            raise UsageError(errors[0])

    task = PeriodicTask("fail", 0.001, fail)
    task.start()
    until(lambda: task.last_error == "not allowed", "the error is kept")
    errors.clear()
    until(lambda: task.last_error is None, "the error is cleared")
    task.stop()


def test_a_wrong_method_is_answered_with_the_allowed_ones(http: TestClient):
    for path, methods in ((RUNS, "GET, POST"), (f"{RUNS}/x", "DELETE, GET"), (f"{RUNS}/x/actors", "GET, PUT")):
        answer = http.request("OPTIONS", path)
        assert (answer.status_code, answer.headers["allow"]) == (405, methods)


def test_all_errors_of_a_request_are_in_one_response(http: TestClient):
    answer = http.post(RUNS, json={"env": [], "steps": -1, "actors": 0, "nothing": 1}).json()
    assert {error["field"] for error in answer["errors"]} == {"body.env", "body.steps", "body.actors", "body.nothing"}
    assert all(word in answer["detail"] for word in ("body.env", "body.steps", "body.actors", "body.nothing"))
    wrong = http.post(RUNS, json={**SHORT, "start": False, "agent": {"clip": -1, "gamma": 7}}).json()
    assert "clip" in wrong["detail"]
    assert "gamma" in wrong["detail"]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"clip": 1e308}, "clip=1e+308: input should be less than or equal to 10"),
        ({"hidden": [1_000_000_000]}, "less than or equal to 65536"),
        ({"hidden": [65_536] * 8}, "lower what needs most"),
    ],
)
def test_an_excessive_value_is_refused_in_one_sentence(http: TestClient, values: dict[str, Any], words: str):
    answer = http.post(RUNS, json={**SHORT, "start": False, "agent": values})
    assert (answer.status_code, words in answer.json()["detail"]) == (422, True), answer.text
    assert "\n" not in answer.json()["detail"]


def test_an_excessive_change_is_refused_in_one_sentence(http: TestClient):
    run = make(http)
    answer = http.patch(f"{RUNS}/{run}/hyperparameters", json={"values": {"clip": 1e308}})
    assert answer.status_code == 422
    assert "clip=1e+308: input should be less than or equal to 10" in answer.json()["detail"]


def test_arguments_of_an_environment_are_checked_against_its_signature(http: TestClient, service: Service):
    run = make(http, env="FrozenLake-v1", environment={"kwargs": {"map_name": "8x8", "is_slippery": False}})
    assert directory_of(service, run).config().environment.kwargs == {"map_name": "8x8", "is_slippery": False}
    for env, kwargs, words in (
        ("FrozenLake-v1", {"no_such": 1, "is_slippery": "yes"}, ["no_such", "is_slippery", "map_name"]),
        ("FrozenLake-v1", {"map_name": "../../etc/passwd"}, ["map_name"]),
        ("FrozenLake-v1", {"map_name": "os:system"}, ["no path, module or code"]),
        ("FrozenLake-v1", {"desc": ["SF", "__import__('os')"]}, ["desc"]),
        ("FrozenLake-v1", {"render_mode": "human"}, ["render_mode"]),
        ("CartPole-v1", {"sutton_barto_reward": 3}, ["sutton_barto_reward"]),
    ):
        answer = http.post(RUNS, json={**SHORT, "start": False, "env": env, "environment": {"kwargs": kwargs}})
        assert answer.status_code == 422, (kwargs, answer.text)
        assert all(word in answer.json()["detail"] for word in words), answer.text


def test_every_available_runtime_is_accepted_and_others_are_refused(http: TestClient, monkeypatch: pytest.MonkeyPatch):
    available = http.get("/api/v1/version").json()["runtimes"]
    assert {"inline", "processes"} <= set(available)
    for runtime in available:
        assert make(http, runtime=runtime)
    monkeypatch.setattr(run_requests, "available_runtimes", lambda kafka: ["inline", "processes"])
    refused = http.post(RUNS, json={**SHORT, "start": False, "runtime": "ray"})
    assert (refused.status_code, refused.json()["code"]) == (422, "config_error")
    assert "not available here" in refused.json()["detail"]


def test_every_list_is_paginated(http: TestClient):
    for _ in range(3):
        run = make(http)
        http.post(f"{RUNS}/{run}/stop")
    for path, key in (
        (RUNS, "runs"),
        ("/api/v1/environments", "environments"),
        ("/api/v1/operations", "operations"),
        ("/api/v1/audit", "entries"),
    ):
        whole = http.get(path, params={"limit": 1_000}).json()
        assert whole["next"] is None
        assert len(whole[key]) > 2
        assert pages(http, path, key, 100 if key == "environments" else 2) == whole[key]
    names = [one["name"] for one in http.get("/api/v1/algorithms").json()["algorithms"]]
    assert [one["name"] for one in pages(http, "/api/v1/algorithms", "algorithms", 10)] == names
    assert pages(http, f"{RUNS}/{run}/checkpoints", "checkpoints") == []
    for path in (RUNS, "/api/v1/operations", "/api/v1/audit", "/api/v1/algorithms"):
        assert http.get(path, params={"cursor": "nothing"}).status_code == 422


def test_pages_of_events_skip_spans(http: TestClient, service: Service):
    run = make(http)
    store = directory_of(service, run).store
    for number in range(30):
        kind = "note" if number in (0, 29) else "span"
        store.post(EVENTS, EventReport(run=run, kind=kind, details={"number": number}).record())
    seen, after = [], 0
    while (answer := http.get(f"{RUNS}/{run}/events", params={"after": after, "limit": 1}).json())["events"]:
        seen += [event["details"]["number"] for event in answer["events"]]
        after = answer["next"]
    assert seen == [0, 29]


def test_unknown_series_are_not_found(http: TestClient, service: Service):
    run = make(http)
    directory_of(service, run).store.post(TRAINING, training(run, 1))
    known = http.get(f"{RUNS}/{run}/metrics").json()["names"]
    assert http.get(f"{RUNS}/{run}/metrics", params={"series": known[0]}).status_code == 200
    unknown = http.get(f"{RUNS}/{run}/metrics", params={"series": [known[0], "no/such"]})
    assert (unknown.status_code, unknown.json()["code"]) == (404, "run_not_found")


def test_symlinked_logs_are_refused(http: TestClient, service: Service, tmp_path: Path):
    run = make(http)
    (tmp_path / "secret").write_text("hidden\n")
    logs = directory_of(service, run).path / "logs"
    logs.mkdir()
    (logs / "actor-0.log").write_text("printed\n")
    (logs / "actor-1.log").symlink_to(tmp_path / "secret")
    assert http.get(f"{RUNS}/{run}/logs").json()["sources"] == ["actor-0"]
    assert http.get(f"{RUNS}/{run}/logs", params={"source": "actor-1"}).status_code == 404
    other = make(http)
    (directory_of(service, other).path / "logs").symlink_to(logs)
    assert http.get(f"{RUNS}/{other}/logs").json()["sources"] == []


def test_only_the_owner_may_read_the_files_of_a_run(http: TestClient, service: Service):
    before = os.umask(0)
    try:
        path = directory_of(service, make(http)).path
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert stat.S_IMODE((path / "run.sqlite").stat().st_mode) == 0o600


def training(run: str, second: int, **phases: float) -> dict[str, Any]:
    report = TrainingReport(
        run=run, time_s=float(second), version=second, updates=second, env_steps=second, train_s=second, phases=phases
    )
    return report.record()


def test_a_diagnosis_covers_the_last_window_or_the_whole_run(http: TestClient, service: Service):
    """The learner waits for 100 s and then learns for 40 s."""
    run = make(http, mode="async", actors=1)
    store = directory_of(service, run).store
    for second in range(1, 141):
        waited, learned = min(second, 100), max(0, second - 100)
        phases = {"env": float(waited), "policy": 0.0, "blocked": float(learned)}
        report = ActorReport(
            run=run, time_s=second, actor=0, epoch=0, version=1, sequence=1, env_steps=1, phases=phases
        )
        store.post(ACTORS, report.record())
        store.post(TRAINING, training(run, second, wait=float(waited), learn=float(learned)))
    lately = http.get(f"{RUNS}/{run}/diagnosis").json()
    assert (lately["window_s"], lately["window"], lately["rule"]) == (30.0, "the last 30 s", "learner")
    assert lately["numbers"]["seconds"] == pytest.approx(30.0, abs=1.5)
    whole = http.get(f"{RUNS}/{run}/diagnosis", params={"whole_life": True}).json()
    assert (whole["window_s"], whole["window"], whole["rule"]) == (None, "the whole run", "environment")
    assert whole["numbers"]["seconds"] == 140.0


def test_actors_removed_by_scaling_are_stopped_and_missing_ones_are_silent(http: TestClient, service: Service):
    run = make(http, mode="async", actors=4)
    store = directory_of(service, run).store
    now = time.time()
    for actor, state, age_s in ((0, "running", 0.0), (1, "running", 60.0), (2, "stopped", 60.0), (3, "running", 60.0)):
        report = ActorReport(
            run=run, time_s=now - age_s, actor=actor, epoch=0, version=1, sequence=1, env_steps=1, state=state
        )
        store.post(ACTORS, report.record())
    store.post(COMMANDS, {"command": "scale", "actors": 2, "id": "x", "issuer": "test", "time_s": now})
    states = [actor["state"] for actor in http.get(f"{RUNS}/{run}/actors").json()["actors"]]
    assert states == ["running", "silent", "stopped", "stopped"]


def test_a_stopped_run_shows_its_last_evaluation_and_total_steps(http: TestClient, service: Service):
    run = make(http)
    directory = directory_of(service, run)
    for mean in (10.0, 20.0):
        evaluation = EvaluationReport(
            run=run, version=1, updates=1, env_steps=1, train_s=1.0, returns=[mean], lengths=[1], return_mean=mean,
            return_std=0.0, duration_s=1.0, weights_sha256="x",
        )  # fmt: skip
        directory.store.post(EVALUATIONS, evaluation.record())
    directory.write_summary({"env_steps": 1_000, "updates": 3, "eval_return_mean": None})
    directory.store.set_status("STOPPED", "stop_requested")
    progress = http.get(f"{RUNS}/{run}").json()["progress"]
    assert (progress["env_steps"], progress["total_steps"], progress["eval_return_mean"]) == (1_000, 4_000, 20.0)

"""Real training runs through the real service, from the request to the end, with every change in between.

The tests run with the embedded broker and with a real Kafka broker.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from steppe.records.run_directory import RunDirectory
from tests.support.cases import rest_slow
from tests.support.service import (
    LONG,
    SHORT,
    TABLE,
    Served,
    finished,
    in_state,
    learning,
    listen,
    make,
    messages,
    run_of,
    until,
)

pytestmark = pytest.mark.integration
CONTRACT = Path(__file__).parents[2] / "docs" / "openapi.json"


@pytest.fixture(scope="session", params=rest_slow("embedded", "kafka"))
def brokers(request: pytest.FixtureRequest) -> str | None:
    return str(request.getfixturevalue("kafka")) if request.param == "kafka" else None


def test_a_run_from_the_request_to_its_results(api: httpx.Client, brokers: str | None):
    assert api.get("/api/v1/openapi.json").json() == json.loads(CONTRACT.read_text()), (
        "both brokers have the same operations"
    )
    assert api.get("/version").json()["broker"] == ("kafka" if brokers else "embedded")
    assert api.get("/readyz").json()["status"] == "ok"
    run = make(api, SHORT, name="short")
    found = in_state(api, run, "SUCCEEDED")
    assert found["reason"] == "steps_done"
    assert found["progress"]["env_steps"] >= 4_000
    assert found["config"]["envs"] == 8
    assert found["config"]["runtime"] == ("kafka" if brokers else "processes")
    assert not {"run_dir", "kafka.key", "kafka.username"} & set(found["config"]), "keys of the host are not returned"
    assert found["config"]["agent.learning_rate"] is not None, "resolved defaults are recorded"
    assert found["sources"]["steps"] == "request"
    assert not any("resume" in event["kind"] for event in api.get(f"/api/v1/runs/{run}/events").json()["events"])
    metrics = api.get(f"/api/v1/runs/{run}/metrics", params={"series": ["train/return_mean", "loss/entropy"]}).json()
    assert [series["name"] for series in metrics["series"]] == ["train/return_mean", "loss/entropy"]
    assert all(series["points"] for series in metrics["series"])
    assert metrics["series"][0]["points"][-1][0] >= 4_000
    assert api.get(f"/api/v1/runs/{run}/metrics", params={"since": metrics["next"]}).json()["series"][0]["points"] == []
    evaluations = api.get(f"/api/v1/runs/{run}/evaluations").json()["evaluations"]
    assert evaluations[-1]["final"]
    assert evaluations[-1]["episodes"] == 2
    assert [kept["damage"] for kept in api.get(f"/api/v1/runs/{run}/checkpoints").json()["checkpoints"]].count(
        None
    ) >= 1
    logs = api.get(f"/api/v1/runs/{run}/logs").json()
    assert logs["source"] == "supervisor"
    assert any("SUCCEEDED" in line for line in logs["lines"])
    again = api.get(f"/api/v1/runs/{run}/logs", params={"after": logs["next"]}).json()
    assert again["lines"] == []
    assert api.get(f"/api/v1/runs/{run}/diagnosis").json()["sentence"]
    assert api.post(f"/api/v1/runs/{run}/start").status_code == 409, "the run is complete"
    assert api.delete(f"/api/v1/runs/{run}").status_code == 204
    assert api.get(f"/api/v1/runs/{run}").status_code == 404


@pytest.mark.long
@pytest.mark.slow  # in Chromium: page/test_story.py
def test_pause_resume_scale_tune_and_stop(api: httpx.Client):
    run = make(api, LONG)
    learning(api, run)
    until(lambda: api.get(f"/api/v1/runs/{run}/actors").json()["ready"] == 2, "both actors are ready")
    path = f"/api/v1/runs/{run}"

    assert finished(api, api.post(f"{path}/pause"))["state"] == "succeeded"
    assert run_of(api, run)["state"] == "PAUSED"
    assert run_of(api, run)["desired"] == "paused"
    assert api.post(f"{path}/pause").status_code == 409
    assert finished(api, api.post(f"{path}/resume"))["state"] == "succeeded"

    for count in (4, 1):
        done = finished(api, api.put(f"{path}/actors", json={"actors": count}))
        assert done["state"] == "succeeded", done
        assert api.get(f"{path}/actors").json()["ready"] == count
    assert api.put(f"{path}/actors", json={"actors": 5}).status_code == 422
    dropped = api.get(f"{path}/metrics").json()["names"]
    assert "dropped/missing" not in dropped, "no sent segment is lost"
    assert "dropped/repeated" not in dropped

    change = {"values": {"learning_rate": 1e-9, "max_grad_norm": 0.25}}
    preview = api.patch(f"{path}/hyperparameters", json={**change, "dry_run": True}).json()
    assert [effect["effect"] for effect in preview["effects"]] == [
        "takes effect with the next update",
        "takes effect on restart",
    ]
    assert preview["operation"] is None
    before = api.get(f"{path}/metrics").json()["next"]
    done = finished(api, api.patch(f"{path}/hyperparameters", json=change))
    assert done["state"] == "succeeded"
    assert "version" in done["message"]

    def rates() -> list[float]:
        params = {"series": "loss/learning_rate", "since": before}
        return [point[2] for point in api.get(f"{path}/metrics", params=params).json()["series"][0]["points"]]

    until(lambda: rates() and rates()[-1] == pytest.approx(1e-9), "the learner uses the new rate")
    event = next(
        event for event in api.get(f"{path}/events").json()["events"] if event["details"].get("id") == done["id"]
    )
    assert event["details"]["live"] == ["learning_rate"]
    assert event["details"]["version"] > 0

    assert finished(api, api.post(f"{path}/stop"))["state"] == "succeeded"
    assert run_of(api, run)["state"] == "STOPPED"
    started = api.post(f"{path}/start")
    stopping = finished(api, api.post(f"{path}/stop"))
    assert (stopping["state"], stopping["message"]) == ("succeeded", None), (
        "the run received the command while starting and was not killed"
    )
    assert run_of(api, run)["reason"] == "stop_requested"
    assert finished(api, started)["state"] == "succeeded"
    assert finished(api, api.post(f"{path}/start"))["state"] == "succeeded"
    in_state(api, run, "RUNNING")
    values = {one["name"]: one["value"] for one in api.get(f"{path}/hyperparameters").json()["hyperparameters"]}
    assert values["learning_rate"] == 1e-9
    assert values["max_grad_norm"] == 0.25
    until(lambda: api.get(f"{path}/actors").json()["ready"] == 1, "the resumed run has the scaled number of actors")
    learner = api.put(f"{path}/learner", json={"learner": 0})
    assert finished(api, learner)["state"] == "succeeded"
    assert run_of(api, run)["state"] == "STOPPED"


def updates_of(api: httpx.Client, run: str) -> list[list]:
    params = {"series": "train/updates", "max_points": 10_000}
    return api.get(f"/api/v1/runs/{run}/metrics", params=params).json()["series"][0]["points"]


def reports_lost(stream_messages: Iterator[dict[str, Any]], run: str, heartbeats: int) -> bool:
    """Return whether the stream reports the run as LOST within this number of heartbeats."""
    for message in stream_messages:
        if message["type"] == "run" and message["run"]["id"] == run and message["run"]["state"] == "LOST":
            return True
        heartbeats -= message["type"] == "heartbeat"
        if heartbeats < 0:
            break
    return False


@pytest.mark.long
@pytest.mark.slow
def test_a_killed_run_can_be_resumed_and_runs_outlive_the_service(served: Served):
    with served.client() as api:
        run = make(api, LONG, checkpoint={"every_s": 0.5})
        waiting = make(api, TABLE, start=False)
        learning(api, run)
        kill_and_start(served, api, run)
        before = learning(api, run)
        curve = until(lambda: updates_of(api, run), "points")
    served.kill()
    served.start()
    with served.client() as api:
        assert run_of(api, waiting)["state"] == "PENDING", "a run that was not started is not lost"
        after = run_of(api, run)
        assert after["state"] == "RUNNING"
        assert after["config"] == before["config"]
        until(lambda: run_of(api, run)["progress"]["updates"] > before["progress"]["updates"], "the run continues")
        assert updates_of(api, run)[: len(curve)] == curve, "its whole history is kept"
        assert finished(api, api.post(f"/api/v1/runs/{run}/stop"))["state"] == "succeeded"
        assert finished(api, api.post(f"/api/v1/runs/{waiting}/start"))["state"] == "succeeded"
        in_state(api, waiting, "RUNNING")
        assert api.delete(f"/api/v1/runs/{waiting}").status_code == 409, "the run is running"
        assert finished(api, api.post(f"/api/v1/runs/{waiting}/kill"))["state"] == "succeeded"
        found = run_of(api, waiting)
        assert (found["state"], found["reason"]) == ("STOPPED", "killed")


def kill_and_start(served: Served, api: httpx.Client, run: str) -> None:
    """Kill a run that has a checkpoint: it becomes LOST with a reason, and continues when it is started."""
    until(lambda: api.get(f"/api/v1/runs/{run}/checkpoints").json()["checkpoints"], "a checkpoint")
    pid = RunDirectory(served.root / "runs" / run).store.status().pid
    with listen(served) as socket:
        stream_messages = messages(socket)
        assert next(stream_messages)["type"] == "snapshot", "later changes arrive as deltas"
        os.killpg(pid, signal.SIGKILL)
        assert reports_lost(stream_messages, run, heartbeats=3)
    lost = in_state(api, run, "LOST")
    assert lost["reason"] == "process_dead"
    assert str(pid) in lost["message"]
    assert lost["desired"] == "running"
    assert api.post(f"/api/v1/runs/{run}/pause").status_code == 409
    assert finished(api, api.post(f"/api/v1/runs/{run}/start"))["state"] == "succeeded"


def test_a_run_that_cannot_start_reports_the_reason(api: httpx.Client):
    run = make(api, SHORT, env="Pendulum-v1", algo="dqn")
    found = in_state(api, run, "FAILED")
    assert found["reason"] == "cannot_start"
    assert "continuous" in found["message"]
    operation = api.get("/api/v1/operations", params={"run": run}).json()["operations"][0]
    assert operation["state"] == "failed"
    assert "continuous" in operation["message"]

"""`steppe serve --run`: a run whose roles are started elsewhere, as by Docker Compose, observed and controlled over a real broker."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid

import pytest

from tests.support.service import Served, finished, until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]
RUN = "/api/v1/runs/demo"
SMALL = """
env = "steppe/Sleep-v0"
mode = "async"
actors = 2
envs = 1
seed = 3
steps = 500000000
agent.hidden = [8]
agent.segment_steps = 16
agent.epochs = 1
evaluation.every_steps = 100000000
kafka.partitions = 2
"""


@pytest.fixture
def brokers(kafka):
    return {"STEPPE_KAFKA__ADDRESS": kafka, "STEPPE_KAFKA__PREFIX": f"t{uuid.uuid4().hex[:8]}."}


@pytest.fixture
def served(tmp_path, brokers, service_host):
    made = Served(tmp_path, host=service_host)
    made.environ |= brokers
    yield made
    if made.process is not None:
        made.stop()


@pytest.fixture
def role(torch_host, tmp_path, brokers):
    """Return a function that starts a role of the run in its own directory; all roles are killed afterwards."""
    (tmp_path / "run.toml").write_text(SMALL)
    started = []

    def role(kind, *message):
        directory = tmp_path / kind
        directory.mkdir(exist_ok=True)
        environ = os.environ | brokers | {"STEPPE_RUNS": str(directory)}
        started.append(torch_host.start(["role", kind, "--run", "demo", *message], environ, tmp_path, directory))
        return started[-1]

    yield role
    for process in started:
        process.kill()
        process.wait()


def in_state(api, state):
    until(lambda: api.get(RUN).json().get("state") == state, f"it is {state}")


def steps(api):
    return api.get(RUN).json()["progress"]["env_steps"]


@pytest.mark.long
@pytest.mark.slow
def test_a_run_is_observed_and_controlled_from_start_to_resume(served, role, tmp_path):
    config = ("--config", str(tmp_path / "run.toml"))
    served.start("--run", "demo")
    with served.client() as api:
        assert api.get("/api/v1/runs").json()["runs"] == []
        roles = role("learner", *config), role("actor")
        in_state(api, "RUNNING")
        until(
            lambda: steps(api) > 0 and api.get(f"{RUN}/actors").json()["ready"] == 1,
            "the learner receives experience from its actor",
        )
        assert api.get(RUN).json()["config"]["env"] == "steppe/Sleep-v0"

        assert finished(api, api.post(f"{RUN}/pause"))["state"] == "succeeded"
        in_state(api, "PAUSED")
        assert finished(api, api.post(f"{RUN}/resume"))["state"] == "succeeded"
        change = api.patch(f"{RUN}/hyperparameters", json={"values": {"learning_rate": 0.0125}})
        assert "in effect from version" in finished(api, change)["message"]

        refused = api.put(f"{RUN}/actors", json={"actors": 2})
        assert (refused.status_code, "--scale actor=N" in refused.json()["detail"]) == (422, True)
        assert api.patch(f"{RUN}/hyperparameters", json={"values": {"hidden": [16]}}).status_code == 422
        refused = api.patch(f"{RUN}/hyperparameters", json={"values": {"bounds_coef": 0.5}})
        assert (refused.status_code, "is for continuous actions" in refused.json()["detail"]) == (422, True)
        assert api.post("/api/v1/runs", json={"env": "CartPole-v1"}).status_code == 422

        assert finished(api, api.post(f"{RUN}/stop"))["state"] == "succeeded"
        in_state(api, "STOPPED")
        assert [process.wait(60) for process in roles] == [0, 0]
        before = steps(api)
        until(
            lambda: api.get(f"{RUN}/events", params={"limit": 1_000}).json()["events"][-1]["number"],
            "events are mirrored",
        )
        checkpoints = sorted((tmp_path / "learner" / "demo" / "checkpoints").iterdir())
        assert checkpoints
    served.kill()

    served.start("--run", "demo")
    with served.client() as api:
        in_state(api, "STOPPED")
        response = api.post(f"{RUN}/start")
        roles = role("learner", *config), role("actor")
        assert finished(api, response)["state"] == "succeeded"
        until(lambda: steps(api) > before, "the run continues from its checkpoint")
        roles[0].kill()
        in_state(api, "LOST")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--run", "demo"], "STEPPE_KAFKA__ADDRESS"),
        (["--run", "demo", "--kubernetes", "here"], "give one of them"),
        (["--kubernetes", "here", "--autoscale", "set"], "STEPPE_KAFKA__ADDRESS"),
    ],
)
def test_incompatible_options_are_refused_in_one_sentence(tmp_path, options, message):
    line = [sys.executable, "-c", "from steppe.cli.main import entry; entry()", "serve", "--port", "0", *options]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("STEPPE_KAFKA")}
    done = subprocess.run(line, capture_output=True, text=True, timeout=120, cwd=tmp_path, env=environ, check=False)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr

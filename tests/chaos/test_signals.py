"""Ctrl-C, SIGTERM and kill -9 for a real training process, at random moments: it ends and leaves nothing."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from steppe.core.contracts.errors import SteppeError
from steppe.core.contracts.transport import COMMANDS, TRAINING
from steppe.core.system.shared_dir import make_shared_dir, remove_shared_dir
from steppe.records.checkpoints import Checkpoints
from steppe.records.run_directory import RunDirectory
from tests.support import chaos_run
from tests.support.cases import rest_slow
from tests.support.chaos import session
from tests.support.chaos_envs import PACE

pytestmark = pytest.mark.integration

SCRIPT = Path(chaos_run.__file__)
RUN = f"chaos{os.getpid()}"  # other processes can run the same tests
PATIENCE_S = 180.0  # limits only how long a failure takes
ENDLESS = {"mode": "async", "actors": 2, "steps": 10**9, "envs": 4, "environment.vector": "loop"}
ENDLESS |= {"environment.wrappers": ["tests.support.chaos_envs:Paced"]}
NETWORK = ENDLESS | {"env": "CartPole-v1", "algo": "ppo", "segment_steps": 16, "hidden": [16], "epochs": 1}
TABLE = ENDLESS | {"env": "steppe/Identity-v0", "algo": "q-learning", "segment_steps": 16}  # imports no torch


@contextmanager
def training(tmp_path, agent=TABLE, **settings):
    """Start a run in a new session, so that a signal to its group reaches no other process; it sleeps 1 ms a step."""
    order = json.dumps({**agent, "run_dir": str(tmp_path / RUN), **settings})
    process = subprocess.Popen(
        [sys.executable, SCRIPT, order], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, PACE: "0.001"},
    )  # fmt: skip
    try:
        yield process
    finally:
        for pid in session(process.pid):
            os.kill(pid, signal.SIGKILL)
        process.communicate()


def wait_until(true, process=None):
    deadline = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < deadline, "it never came true"
        assert process is None or process.poll() is None, process.communicate()[1]
        time.sleep(0.005)


def status(tmp_path):
    try:
        return RunDirectory.open(tmp_path / RUN).store.status()
    except SteppeError:
        return None


def trained(tmp_path):
    """Return whether the learner has reported updates."""
    return status(tmp_path) is not None and bool(RunDirectory.open(tmp_path / RUN).store.read(TRAINING))


def shared_directories():
    return list(Path("/dev/shm").glob(f"steppe-{RUN}-*"))


def require_clean_end(process, tmp_path):
    """The process has ended with its session and its shared directory; return its output and error output."""
    out, errors = process.communicate(timeout=PATIENCE_S)
    wait_until(lambda: not session(process.pid))
    assert shared_directories() == []
    return out, errors


MOMENTS = {
    "importing": lambda tmp_path: True,
    "starting": lambda tmp_path: status(tmp_path) is not None,
    "running": lambda tmp_path: (found := status(tmp_path)) is not None and found.state == "RUNNING",
    "training": trained,
}


def send_to_group(process, number):
    os.killpg(process.pid, number)


def send_to_one(process, number):
    process.send_signal(number)


@pytest.mark.parametrize(
    ("number", "send", "moment", "agent"),
    rest_slow(
        (signal.SIGINT, send_to_group, "training", NETWORK),
        *[(signal.SIGINT, send_to_group, moment, TABLE) for moment in MOMENTS if moment != "training"],
        *[(signal.SIGTERM, send_to_one, moment, TABLE) for moment in ("starting", "training")],
        (signal.SIGTERM, send_to_group, "training", TABLE),
    ),
    ids=lambda value: (
        value["algo"] if isinstance(value, dict) else getattr(value, "name", None) or getattr(value, "__name__", value)
    ),
)
def test_one_signal_stops_a_run_in_an_orderly_way(number, send, moment, agent, tmp_path):
    extra_s = random.Random(f"{number} {moment}").uniform(0.0, 0.7)
    with training(tmp_path, agent) as process:
        wait_until(lambda: MOMENTS[moment](tmp_path), process)
        began = trained(tmp_path)
        time.sleep(extra_s)  # no condition to wait for: the moment is meant to be random
        send(process, number)
        out, errors = require_clean_end(process, tmp_path)
    if not out and status(tmp_path) is None:
        assert moment == "importing", errors  # it ended before there was a run
        return
    if moment == "importing" and not out:
        assert status(tmp_path).state in ("LOST", "FAILED", "STOPPED"), errors
        return
    assert json.loads(out)["reason"] == "interrupted", errors
    assert status(tmp_path).state == "STOPPED"
    assert "Traceback" not in errors
    if began:
        checkpoint = Checkpoints(tmp_path / RUN / "checkpoints").latest()
        assert checkpoint.weights.env_steps > 0
        assert checkpoint.weights.updates > 0


@pytest.mark.slow
def test_a_second_signal_ends_it_at_once(tmp_path):
    """An environment that never returns prevents an orderly stop."""
    marker = tmp_path / "stuck"
    env = {"env": "__main__:StuckEnv", "environment.kwargs": {"marker": str(marker)}}
    with training(tmp_path, **env) as process:
        wait_until(marker.exists, process)
        send_to_group(process, signal.SIGINT)
        wait_until(lambda: status(tmp_path).state != "RUNNING", process)
        send_to_group(process, signal.SIGINT)
        out, errors = require_clean_end(process, tmp_path)
    assert json.loads(out)["state"] == "STOPPED", errors
    assert status(tmp_path).state == "STOPPED"


@pytest.mark.slow
def test_further_signals_end_a_hanging_process(tmp_path):
    """If the environment is in this process, only a KeyboardInterrupt ends its step."""
    marker = tmp_path / "stuck"
    env = {"env": "__main__:StuckEnv", "environment.kwargs": {"marker": str(marker)}, "runtime": "inline"}
    with training(tmp_path, **env) as process:
        wait_until(marker.exists, process)
        while process.poll() is None:
            send_to_group(process, signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):  # a second one that comes too early merges with the first
                process.wait(timeout=2.0)
        out, errors = require_clean_end(process, tmp_path)
    assert json.loads(out)["state"] == "STOPPED", errors
    assert status(tmp_path).state == "STOPPED"


@pytest.mark.slow
def test_a_hanging_environment_is_not_waited_for(tmp_path):
    marker = tmp_path / "stuck"
    env = {"env": "__main__:StuckEnv", "environment.kwargs": {"marker": str(marker)}}
    with training(tmp_path, **env) as process:
        wait_until(marker.exists, process)
        send_to_one(process, signal.SIGTERM)
        out, errors = require_clean_end(process, tmp_path)
    assert json.loads(out) == {"state": "STOPPED", "reason": "interrupted", "message": "stopped by a signal"}, errors


def ask_to_stop(process, tmp_path):
    RunDirectory.open(tmp_path / RUN).store.post(COMMANDS, {"id": "1", "command": "stop", "issuer": "a test"})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stop", "reason", "message"),
    [
        (lambda process, _: send_to_group(process, signal.SIGINT), "interrupted", "stopped by a signal"),
        (lambda process, _: send_to_group(process, signal.SIGTERM), "interrupted", "stopped by a signal"),
        (ask_to_stop, "stop_requested", "stopped by a test"),
    ],
    ids=["SIGINT", "SIGTERM", "command"],
)
def test_a_hanging_last_evaluation_is_not_waited_for(stop, reason, message, tmp_path):
    marker = tmp_path / "stuck"
    env = {"env": "__main__:CrowdedEnv", "environment.kwargs": {"marker": str(marker)}, "evaluation.episodes": 20}
    with training(tmp_path, **env, steps=64) as process:
        wait_until(marker.exists, process)
        wait_until(lambda: status(tmp_path).state == "STOPPING", process)
        stop(process, tmp_path)
        out, errors = require_clean_end(process, tmp_path)
    said = {"state": "STOPPED", "reason": reason, "message": f"{message} during the last evaluation"}
    assert json.loads(out) == said, errors


def test_processes_end_when_the_supervisor_is_killed(tmp_path):
    with training(tmp_path) as process:
        wait_until(lambda: trained(tmp_path), process)
        assert len(session(process.pid)) > 4
        (left,) = shared_directories()
        process.kill()
        process.communicate()
        wait_until(lambda: not session(process.pid))
    found = status(tmp_path)
    assert (found.state, found.reason) == ("LOST", "process_dead")
    next_room = make_shared_dir("next", 1)  # as the next run would
    assert not left.exists()
    remove_shared_dir(next_room)

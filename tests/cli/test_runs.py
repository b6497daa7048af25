"""`runs`, `watch` and `stop` on a real run directory of the test, from another process."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from steppe.core.contracts.transport import COMMANDS

pytestmark = pytest.mark.integration
STEPPE = Path(sys.executable).with_name("steppe")


def start(live_run, *words: str, **options) -> subprocess.Popen:
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | options
    return subprocess.Popen([STEPPE, *words], cwd=live_run.path.parent.parent, **options)


def wait_for_command(live_run, process) -> dict:
    deadline = time.monotonic() + 180
    while not (commands := live_run.store.read(COMMANDS)):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        live_run.store.heartbeat()
        time.sleep(0.01)
    return commands[0][1]


def test_runs_in_an_empty_directory(steppe):
    assert "contains no runs yet" in steppe("runs").stdout
    assert json.loads(steppe("runs", "--json").stdout) == []


def test_runs_lists_state_and_results(steppe, live_run):
    live_run.store.set_status("SUCCEEDED", "target_reached")
    live_run.write_summary({"env_steps": 12_345, "eval_return_mean": 480.0, "steps_per_s": 2e5})
    row = steppe("runs").stdout.splitlines()[1].split()
    assert row[:7] == ["pole", "SUCCEEDED", "CartPole-v1", "ppo", "12,345", "480.0", "200,000"]
    assert row[-1] == "target_reached"
    (listed,) = json.loads(steppe("runs", "--json").stdout)
    assert (listed["run"], listed["state"], listed["summary"]["env_steps"]) == ("pole", "SUCCEEDED", 12_345)


def test_runs_are_found_in_steppe_runs(steppe, live_run):
    done = steppe("runs", "--json", STEPPE_RUNS=str(live_run.path.parent))
    assert [run["run"] for run in json.loads(done.stdout)] == ["pole"]


def test_stop_without_waiting_posts_one_command(steppe, live_run):
    before = time.time()
    done = steppe("stop", "pole", "--json")
    assert done.returncode == 0, done.stderr
    ((_, command),) = live_run.store.read(COMMANDS)
    assert command["command"] == "stop"
    assert command["issuer"].startswith("cli:")
    assert before <= command["time_s"] <= time.time()
    assert json.loads(done.stdout)["command"] == command["id"]


def test_stop_with_wait(live_run):
    process = start(live_run, "stop", "pole", "--wait")
    wait_for_command(live_run, process)
    assert process.poll() is None
    live_run.store.set_status("STOPPED", "stop_requested")
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (0, "pole has ended: STOPPED\n", "")


def test_stop_fails_after_the_timeout(steppe, live_run):
    done = steppe("stop", "pole", "--wait", "--timeout-s", "0")
    assert done.returncode == 1
    assert "still RUNNING after 0 s" in done.stderr


def test_stopping_an_ended_run_is_a_conflict(steppe, live_run):
    live_run.store.set_status("FAILED", "environment_fault")
    done = steppe("stop", "pole")
    assert done.returncode == 4
    assert "it has already ended, FAILED (environment_fault)" in done.stderr
    assert live_run.store.read(COMMANDS) == []


def test_stopping_a_run_whose_process_died_is_a_conflict(steppe, live_run):
    script = "import sys; from steppe.records.run_directory import RunDirectory as R; R.open(sys.argv[1]).store.set_status('RUNNING')"
    subprocess.run([sys.executable, "-c", script, str(live_run.path)], check=True)
    done = steppe("stop", str(live_run.path))
    assert done.returncode == 4
    assert "LOST" in done.stderr


def test_watching_an_ended_run_prints_the_final_view(steppe, live_run):
    live_run.store.set_status("SUCCEEDED", "steps_done")
    done = steppe("watch", "pole")
    assert done.returncode == 0
    assert "✔ SUCCEEDED (steps_done)" in done.stdout
    assert "500,000 / 1,000,000" in done.stdout
    assert "\x1b" not in done.stdout


def test_watch_follows_in_json_until_the_end(live_run):
    process = start(live_run, "watch", "pole", "--json", "--interval-s", "0.05")
    first = json.loads(process.stdout.readline())
    assert (first["state"], first["env_steps"]) == ("RUNNING", 500_000)
    live_run.store.set_status("SUCCEEDED", "steps_done")
    out, err = process.communicate(timeout=60)
    assert json.loads(out.splitlines()[-1])["state"] == "SUCCEEDED"
    assert (process.returncode, err) == (0, "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_watch_restores_the_terminal(live_run, number):
    ours, theirs = pty.openpty()
    process = start(
        live_run, "watch", "pole", stdin=theirs, stdout=theirs, stderr=theirs, env={**os.environ, "TERM": "xterm"}
    )
    os.close(theirs)
    seen = b""
    while b"actor 0" not in seen:
        live_run.store.heartbeat()
        seen += os.read(ours, 65536)
    assert b"\x1b[?25l" in seen  # the cursor is hidden while the view is updated
    process.send_signal(number)
    with contextlib.suppress(OSError):  # reading a closed pty raises an error
        while chunk := os.read(ours, 65536):
            seen += chunk
    os.close(ours)
    assert process.wait(timeout=60) == 130
    assert seen.rfind(b"\x1b[?25h") > seen.rfind(b"\x1b[?25l")
    assert b"Traceback" not in seen
    assert live_run.store.read(COMMANDS) == []


def test_reserved_stdout_contains_only_the_json_object():
    script = """
        import os, subprocess
        from steppe.cli.output import emit, reserved_stdout
        print("before", flush=True)
        with reserved_stdout() as stdout:
            print("from this process")
            subprocess.run(["echo", "from a child"])
            emit({"mean": float("nan"), "steps": 3}, stdout)
            print("late")
        print("after")
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True)
    assert done.stdout == 'before\n{"mean":null,"steps":3}\nafter\n'
    assert sorted(done.stderr.splitlines()) == ["from a child", "from this process", "late"]

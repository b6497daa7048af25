"""What the chaos tests and the long form share: settings, undisturbed twins, runs that can be killed, looking at what is left."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

from steppe.core.config.run import resolve_config
from steppe.core.contracts.errors import SteppeError
from steppe.core.contracts.transport import EVENTS
from steppe.records.checkpoints import Checkpoints
from steppe.records.run_directory import RunDirectory
from steppe.training.train import run_experiment
from tests.support.chaos_envs import PACE

HERE = Path(__file__).parent
PATIENCE_S = 120.0  # only bounds how long a failure takes
COMMON = {
    "env": "CartPole-v1", "mode": "sync", "actors": 2, "envs": 2, "seed": 3, "hidden": (16,),
    "environment.wrappers": ("tests.support.chaos_envs:Paced",), "environment.vector": "loop",
    "evaluation.every_steps": 400, "evaluation.episodes": 2, "evaluation.max_episode_steps": 20,
    "checkpoint.every_s": 0.02,
}  # fmt: skip
ALGOS = {
    "ppo": {"algo": "ppo", "segment_steps": 16, "minibatch_size": 32, "epochs": 2},
    "dqn": {
        "algo": "dqn", "segment_steps": 8, "batch_size": 16, "learning_starts": 100, "samples_per_insert": 4.0,
        "prioritized": True, "n_step": 3, "buffer_size": 1000,
    },
}  # fmt: skip


def settings(algo, steps, directory, **more):
    return {**COMMON, **ALGOS[algo], "steps": steps, "run_dir": str(directory), **more}


def train(layer, observers=()):
    return run_experiment(resolve_config(("call", layer)), observers=observers)


def twin(algo, steps, directory, **more):
    """The hash of the same run with nothing in its way."""
    with pace(0.0):
        result = train(settings(algo, steps, directory, runtime="inline", **more))
    assert result.state == "SUCCEEDED", result.message
    return result.weights_sha256


@contextmanager
def pace(delay_s):
    before = os.environ.get(PACE)
    os.environ[PACE] = str(delay_s)
    try:
        yield
    finally:
        os.environ.pop(PACE)
        if before is not None:
            os.environ[PACE] = before


class Host:
    """chaos_host.py and one run at a time under it."""

    def __init__(self):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
        self.process = subprocess.Popen([sys.executable, HERE / "chaos_host.py"], **pipes)

    def start(self, log, **order):
        """Begin to run or resume; returns the process's number, which is also its group's and session's."""
        self.process.stdin.write(json.dumps({**order, "log": str(log)}) + "\n")
        return int(self.process.stdout.readline())

    def wait(self):
        """How the process ended: 0 in good order, 1 by an exception, minus the signal that killed it."""
        return os.waitstatus_to_exitcode(int(self.process.stdout.readline()))

    def close(self):
        self.process.stdin.close()
        self.process.wait(PATIENCE_S)
        self.process.stdout.close()


def kill_at(pid, ready, delay_s):
    """Kill a whole group `delay_s` after `ready()`, or when it has ended without."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline and alive(pid) and not ready():
        time.sleep(0.005)
    time.sleep(delay_s)  # not to wait for anything: the moment is to be a random one
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    while session(pid) and time.monotonic() < deadline:
        time.sleep(0.005)


def moments(path):
    """Ways to see that a life of a run, begun after this call, has come to a certain point."""
    began, saved = time.time(), newest_number(path)
    return {
        "begun": lambda: (path / "run.json").exists(),
        "running": lambda: _running_since(path, began),
        "saved": lambda: newest_number(path) > saved,
        "saved again": lambda: newest_number(path) > saved + 2,
    }


def newest_number(path):
    return max((int(found.name) for found in Path(path).glob("checkpoints/[0-9]*")), default=0)


def _running_since(path, after):
    try:
        status = RunDirectory.open(path).store.status()
    except SteppeError:
        return False
    return status.state == "RUNNING" and (status.changed_s or 0.0) >= after


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except OSError:
        return False


def session(sid):
    """The processes of a session that are still alive."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, owner = path.read_bytes().rpartition(b")")[2].split()[:4]
        except OSError:
            continue
        if int(owner) == sid and state not in (b"Z", b"X"):
            found.append(int(path.parent.name))
    return found


def child(place):
    """The process of a place of the run in this process, if it lives."""
    name = f"steppe-{place}"
    return next((each for each in multiprocessing.active_children() if each.name == name and each.is_alive()), None)


def events(path, kind=None):
    records = [record for _, record in RunDirectory.open(path).store.read(EVENTS)]
    return [record for record in records if kind in (None, record["kind"])]


def require_ledger(path):
    """Every segment of every actor was learned from, in order, once: counted in the newest checkpoint."""
    checkpoint = Checkpoints(Path(path) / "checkpoints", run=RunDirectory.open(path).key).latest()
    ledger, rounds = checkpoint.state["ledger"], checkpoint.counters["version"]
    assert ledger["dropped"] == {}, "a segment came twice, or one was never seen"
    assert {actor: expected for actor, expected, _ in ledger["actors"]} == {0: rounds, 1: rounds}
    assert sum(count for _, count in checkpoint.state["lags"]) == 2 * rounds


def recorded(path):
    """Whether the manager has written reports down, so that another in its place could repeat them."""
    lines = Path(path) / "metrics.jsonl"
    return lines.exists() and lines.stat().st_size > 0


def require_single_records(path):
    """No report is twice in metrics.jsonl."""
    lines = [json.loads(line) for line in (Path(path) / "metrics.jsonl").read_text().splitlines()]
    numbers = [line["number"] for line in lines]
    assert len(set(numbers)) == len(numbers)
    return lines

"""Actors on another machine: a network namespace that reaches the broker over a virtual cable, and no file of the run."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from steppe.core.config.run import resolve_config
from steppe.records.checkpoints import Checkpoints
from steppe.records.run_directory import RunDirectory
from steppe.training.train import run_experiment
from tests.support.kafka import PATIENCE_S, own_broker, settings

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(600),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root may make network namespaces"),
]
STEPPE = Path(sys.executable).with_name("steppe")
SMALL = {
    "steps": 1500, "envs": 4, "hidden": [16, 16], "segment_steps": 32, "minibatch_size": 64, "epochs": 2, "seed": 3,
    "actors": 2, "mode": "sync", "evaluation.episodes": 2,
}  # fmt: skip


def ip(*words):
    subprocess.run(["ip", *map(str, words)], check=True, timeout=60)


@contextmanager
def machine():
    """Yield another machine's name, and the address by which it reaches this one; it is deleted afterwards."""
    number = os.getpid() % 250
    name, here, there = f"steppe-{os.getpid()}", f"sta{number}", f"stb{number}"
    try:
        ip("netns", "add", name)
        ip("link", "add", here, "type", "veth", "peer", "name", there, "netns", name)
        ip("addr", "add", f"10.213.{number}.1/30", "dev", here)
        ip("link", "set", here, "up")
        ip("-n", name, "addr", "add", f"10.213.{number}.2/30", "dev", there)
        ip("-n", name, "link", "set", there, "up")
        yield name, f"10.213.{number}.1"
    finally:
        subprocess.run(["ip", "netns", "del", name], check=False, timeout=60)


@pytest.mark.slow
def test_actors_on_another_machine_take_part_in_a_run(kafka, tmp_path, monkeypatch):
    with machine() as (name, address), ExitStack() as stack:
        broker = replace(own_broker(tmp_path / "broker"), host=address)
        stack.callback(broker.down)
        where = broker.up(0).address
        prefix = settings(where).prefix
        pairs = [word for key, value in SMALL.items() for word in ("-s", f"{key}={value}")]
        common = ["--kafka", where, "--run", "run", "-s", f"kafka.prefix={prefix}"]
        hidden = tmp_path / "here"
        hidden.mkdir()
        # The other machine has an empty directory where this one has the run's.
        over = f'mount -t tmpfs none {hidden} && exec "$@"'
        away = ["ip", "netns", "exec", name, "unshare", "-m", "sh", "-c", over, "sh", STEPPE, "role", "actor"]
        lines = [[*away, *common], [*away, *common], [STEPPE, "role", "learner", "CartPole-v1", *common, *pairs]]
        lines[2] += ["-s", "kafka.partitions=2"]
        processes = []
        for line, runs in zip(lines, ("far-a", "far-b", "here"), strict=True):
            environ = {**os.environ, "STEPPE_RUNS": str(tmp_path / runs)}
            process = subprocess.Popen(list(map(str, line)), stderr=subprocess.PIPE, text=True, env=environ)
            stack.callback(process.wait)
            stack.callback(process.kill)
            processes.append(process)
        for process in reversed(processes):
            _, errors = process.communicate(timeout=PATIENCE_S)
            assert process.returncode == 0, errors
    expected = run_experiment(resolve_config(("call", {"env": "CartPole-v1", "runtime": "inline", **SMALL})))
    found = Checkpoints(RunDirectory.open(tmp_path / "here" / "run").checkpoints).latest()
    assert found.weights.sha256() == expected.summary["weights_sha256"]

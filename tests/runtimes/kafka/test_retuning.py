"""A learner that is started again with other hyperparameters, as a rollout does it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import contextmanager

import pytest

from steppe.runtimes.kafka.manifest import find_manifest
from steppe.transport.kafka.client import KafkaConnection
from tests.support.kafka import PATIENCE_S, settings, wait_until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]
# What libraries do at the interpreter's end never returns here: a role that has ended does not wait for it.
ENDLESS = "import atexit, threading; atexit.register(threading.Event().wait); "
ENTRY = "from steppe.cli.main import entry; entry()"
SMALL = {"envs": 2, "hidden": "[8]", "segment_steps": 16, "mode": "async", "actors": 2, "steps": 1_000_000}


def line(kafka, prefix, before="", **more):
    pairs = [word for key, value in {**SMALL, **more}.items() for word in ("-s", f"{key}={value}")]
    begin = [sys.executable, "-c", before + ENTRY, "role", "learner", "CartPole-v1"]
    return [
        *begin,
        "--run",
        "tuned",
        "--kafka",
        kafka,
        "-s",
        f"kafka.prefix={prefix}",
        "-s",
        "kafka.partitions=2",
        *pairs,
    ]


@contextmanager
def learner(words):
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=os.environ)
    try:
        yield process
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0, errors
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


@pytest.mark.slow
def test_it_goes_on_with_them_and_everybody_is_told(kafka):
    config = settings(kafka)

    def rate():
        if (
            KafkaConnection(config, "tuned").topic("commands.control")
            not in KafkaConnection(config, "tuned").fetch_metadata().topics
        ):
            return None
        manifest = find_manifest(config, "tuned")
        return manifest and manifest.launch_spec.config["agent.learning_rate"]

    with learner(line(kafka, config.prefix, ENDLESS, learning_rate=0.001)) as process:
        wait_until(lambda: process.poll() is not None or rate() == 0.001, "the run is created")
    with learner(line(kafka, config.prefix, ENDLESS, learning_rate=0.0125)) as process:
        wait_until(lambda: process.poll() is not None or rate() == 0.0125, "the change is told")
    refused = subprocess.run(
        line(kafka, config.prefix, learning_rate=0.0125, envs=3),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert refused.returncode == 2
    assert "envs=2" in refused.stderr

"""SIGTERM to commands, and their help."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from steppe.cli.main import app

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[2]
_BENCHMARK = """
'''One part, which starts a process of its own.'''
import subprocess, sys
from suite.running import benchmark

def part(effort):
    child = subprocess.Popen(["sleep", "600"])
    try:
        print(child.pid, flush=True)
        child.wait()
    finally:
        child.kill()
        child.wait()

benchmark(__file__, {"one": part}, ["--quick", "--into", sys.argv[1]])
"""
_ROLE = """
import os, signal, sys, time
from steppe.runtimes.kafka.standalone import StopSignals
signals = StopSignals()
signals.exit_immediately = sys.argv[1] == "begins"
os.kill(os.getpid(), signal.SIGTERM)
print("went on", signals.stopped)
"""


def test_terminated_benchmark_stops_its_processes(tmp_path: Path) -> None:
    script = tmp_path / "sleeping.py"
    script.write_text(_BENCHMARK)
    environ = os.environ | {"PYTHONPATH": f"{ROOT / 'benchmarks'}:{os.environ.get('PYTHONPATH', '')}"}
    words = [sys.executable, str(script), str(tmp_path)]
    with subprocess.Popen(words, env=environ, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


@pytest.mark.parametrize(("moment", "said"), [("begins", ""), ("learns", "went on True\n")])
def test_role_without_state_exits_at_once(moment: str, said: str) -> None:
    """For example while torch is imported; later it stops cleanly."""
    done = subprocess.run([sys.executable, "-c", _ROLE, moment], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, said), done.stderr


def test_help_of_kafka_flag_is_one_sentence() -> None:
    text = CliRunner().invoke(app, ["train", "--help"]).output
    assert "Address of the Kafka brokers for --runtime kafka: host:port." in " ".join(text.split())
    assert "linger_ms" not in text

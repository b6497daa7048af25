"""SIGTERM to commands, and their help."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from steppe.cli.main import app
from tests.support.commands import under_way, wait_until
from tests.support.kafka_runs import alone, described, words

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
_PAUSED_IMPORT = """
import os, pathlib, sys, time

class Pause:
    def find_spec(self, name, path=None, target=None):
        if name == "torch.nn":
            sys.meta_path.remove(self)
            pathlib.Path(os.environ["TORCH_BEGUN"]).touch()
            while True:
                time.sleep(0.05)

sys.meta_path.insert(0, Pause())
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


@pytest.mark.slow
@pytest.mark.usefixtures("kafka")  # which has fetched the jars
def test_terminated_benchmark_of_kafka_leaves_no_broker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    script = [sys.executable, str(ROOT / "benchmarks" / "kafka.py"), "--quick", "--into", str(tmp_path / "reports")]
    with under_way(script) as process:
        wait_until(lambda: [*tmp_path.glob("steppe-kafka-*/broker.json")], process)
        (record,) = tmp_path.glob("steppe-kafka-*/broker.json")
        broker = json.loads(record.read_bytes())["pid"]
        assert b"kafka" in Path(f"/proc/{broker}/cmdline").read_bytes()
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(broker, 0)
    assert not [*tmp_path.glob("steppe-kafka-*")], "nor its files"


@pytest.mark.slow
def test_real_learner_exits_at_once_while_it_imports_torch(
    kafka: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The import of the real torch is held up half-way, so that the signal cannot come after it."""
    (tmp_path / "sitecustomize.py").write_text(_PAUSED_IMPORT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("TORCH_BEGUN", str(tmp_path / "begun"))
    given = {key: value for key, value in words(kafka)[1].items() if key != "runtime"}
    with under_way([*alone("learner", kafka, given["kafka.prefix"], given["env"]), *described(given)]) as process:
        wait_until((tmp_path / "begun").exists, process)
        assert "libtorch" in Path(f"/proc/{process.pid}/maps").read_text()
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0


@pytest.mark.parametrize(("moment", "said"), [("begins", ""), ("learns", "went on True\n")])
def test_role_without_state_exits_at_once(moment: str, said: str) -> None:
    """For example while torch is imported; later it stops cleanly."""
    done = subprocess.run([sys.executable, "-c", _ROLE, moment], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, said), done.stderr


def test_help_of_kafka_flag_is_one_sentence() -> None:
    text = CliRunner().invoke(app, ["train", "--help"]).output
    assert "Address of the Kafka brokers for --runtime kafka: host:port." in " ".join(text.split())
    assert "linger_ms" not in text

"""Runs every example as a user does, but shorter, and checks its output."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.warm_host import WarmHost

pytestmark = pytest.mark.integration

EXAMPLES = Path(__file__).parents[2] / "examples"
MAX_LINES = 60
Run = Callable[[str, list[str]], str]

RUNS = {
    "asynchronous_training.py": (["4000"], "updates old on average"),
    "callback.py": (["30"], "STOPPED (stopped_by_callback)"),
    "composition.py": (["40"], "evaluation: "),
    "custom_environment.py": (["2000"], "mean return -"),
    "custom_network.py": (["2000"], "with residual_network"),
    "distributed_training.py": (["60"], "worker-1: "),
    "ensemble.py": (["2"], "best member: member-"),
    "load_and_act.py": ([], "for CartPole-v1"),
    "pathfinding_film.py": (["walker", "32", "40"], "32 agents arrive in "),
    "pathfinding_success.py": ([], "walker "),
    "ray_actors.py": ([], "20 rounds of 2 actors and one learner"),
    "script_without_main_guard.py": (["2000"], "SUCCEEDED: "),
}


SLOW = {"ray_actors.py", "ensemble.py"}  # only in make test-all


@pytest.fixture
def run(warm_python: WarmHost, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Run an example with arguments and return its output; it must not print warnings."""
    environ = {**os.environ, "STEPPE_RUNS": str(tmp_path), "PYTHONWARNINGS": "error"}

    def run_example(name: str, arguments: list[str]) -> str:
        # In another directory: definitions of a script are found by its path.
        done = warm_python.run([str(EXAMPLES / name), *arguments], environ, tmp_path, tmp_path_factory.mktemp("logs"))
        return output_of(done)

    return run_example


def output_of(done: subprocess.CompletedProcess[str]) -> str:
    """Return the output of a process that succeeded with an empty stderr."""
    assert done.returncode == 0, done.stderr
    assert not done.stderr.strip(), done.stderr
    return done.stdout


def test_every_example_is_short_and_run_here() -> None:
    found = {path.name: path.read_text() for path in EXAMPLES.glob("*.py")}
    assert set(found) == {*RUNS, "several_machines.py", "train_cartpole.py"}
    for name, text in found.items():
        assert len(text.splitlines()) <= MAX_LINES, name
        assert text.startswith('"""'), f"{name} says what it shows"


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("composition.py", "MainLoop(environment, replay_buffer, agent, parameter_server=None)"),
        ("distributed_training.py", "ParameterServer(initial_params,"),
        ("distributed_training.py", "MainLoop(environment, replay_buffer, agent, param_server)"),
        ("asynchronous_training.py", "AsyncMainLoop(environment, replay_buffer, agent, param_server, num_workers=8)"),
        (
            "several_machines.py",
            "DistributedMainLoop(environment, replay_buffer, agent, param_server, node_id=node_id, cluster_config=config)",
        ),
    ],
)
def test_every_documented_pattern_has_an_example(name: str, call: str) -> None:
    """The examples are run by the other tests."""
    text = " ".join((EXAMPLES / name).read_text().split())
    assert call in text.replace("( ", "(").replace(" )", ")")


@pytest.mark.parametrize(
    "name", [*sorted(RUNS.keys() - SLOW), *(pytest.param(name, marks=pytest.mark.slow) for name in sorted(SLOW))]
)
def test_example(name: str, run: Run) -> None:
    arguments, said = RUNS[name]
    assert said in run(name, arguments)


def test_two_machines_train_together(
    warm_python: WarmHost, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Each machine is a process here. The second one starts first and waits for the server."""
    environ = {**os.environ, "STEPPE_RUNS": str(tmp_path), "PYTHONWARNINGS": "error"}
    script = str(EXAMPLES / "several_machines.py")
    nodes = [
        warm_python.start([script, name, "120"], environ, tmp_path, tmp_path_factory.mktemp("logs"))
        for name in ("worker_2", "worker_1")
    ]
    ended = [node.communicate(timeout=300) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], ended
    for (said, errors), rank in zip(ended, (1, 0), strict=True):
        assert not errors.strip(), errors
        assert f"is rank {rank}: " in said
        assert "worker_1: " in said
        assert "worker_2: " in said


@pytest.mark.long
def test_runtime_is_changed_by_one_word(tmp_path: Path) -> None:
    """Runs both with the interpreter itself, as a user does."""
    weights = set()
    environ = {**os.environ, "STEPPE_RUNS": str(tmp_path), "PYTHONWARNINGS": "error"}
    for runtime in ("inline", "processes"):
        command = [sys.executable, EXAMPLES / "train_cartpole.py", runtime, "5000"]
        done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=300)
        output = output_of(done)
        assert "SUCCEEDED after" in output
        weights.add(output.partition("weights ")[2].partition(",")[0])
    assert len(weights) == 1, "sync learns the same on every runtime"

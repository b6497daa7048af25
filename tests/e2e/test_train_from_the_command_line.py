"""The command line with real training in real processes, as a new user runs it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from steppe.records.run_directory import RunDirectory

pytestmark = pytest.mark.integration
STEPPE = Path(sys.executable).parent / "steppe"
KEYS = (
    "run state reason env algo runtime mode actors envs seed env_steps updates version weights_sha256 train_return_mean "
    "eval_return_mean eval_return_std eval_episodes wall_s train_s time_to_target_s steps_per_s lag_mean lag_max "
    "dropped_segments actor_restarts time_shares"
).split()


@pytest.fixture
def cli_host(torch_host):
    return torch_host


def executed(*words: str, timeout: float = 150) -> subprocess.CompletedProcess[str]:
    """Run the executable itself; elsewhere `steppe` is a fork of a process with its imports."""
    return subprocess.run([STEPPE, *words], capture_output=True, text=True, timeout=timeout, check=False)


@pytest.mark.long
def test_the_documented_command_reaches_its_target_and_prints_its_results(steppe):
    words = "train CartPole-v1 --algo ppo --runtime processes --mode async --actors 2 --target-return 475 --json --name demo"
    done = executed(*words.split())
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert set(KEYS) <= set(result)
    assert result["state"] == "SUCCEEDED"
    assert result["eval_return_mean"] >= 475
    assert result["eval_episodes"] == 20
    assert 0 < result["time_to_target_s"] <= result["train_s"] + 1e-9
    assert result["steps_per_s"] == pytest.approx(result["env_steps"] / result["train_s"])
    assert set(result["time_shares"]["actor"]) == {"env", "policy", "blocked", "other"}
    assert set(result["time_shares"]["learner"]) == {"wait", "sample", "remember", "learn", "publish", "other"}
    assert sum(result["time_shares"]["learner"].values()) == pytest.approx(1.0)
    directory = RunDirectory.open("demo")
    assert directory.result.exists()
    assert list((directory.path / "tb").glob("events*"))
    assert (directory.path / "metrics.jsonl").read_text().count("\n") >= 3
    judged = steppe("eval", "demo", "--episodes", "10", "--json")
    assert judged.returncode == 0, judged.stderr
    assert json.loads(judged.stdout)["return_mean"] >= 450


@pytest.mark.slow
def test_a_run_that_misses_its_target_fails_with_exit_1(steppe):
    done = steppe(*"train CartPole-v1 --steps 5000 --target-return 499 --json --name short".split())
    assert done.returncode == 1
    result = json.loads(done.stdout)
    assert (result["state"], result["reason"]) == ("FAILED", "target_not_reached")
    assert result["env_steps"] >= 5000
    judged = steppe("eval", "short", "--episodes", "2")
    assert "return_mean" in judged.stdout
    assert "None" not in judged.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("train CartPol-v1", "CartPole-v1"),
        ("train CartPole-v1 --algo ppoo", "'ppo'"),
        ("train CartPole-v1 --runtime proceses", "processes"),
        ("train CartPole-v1 -s lerning_rate=1", "learning_rate"),
        ("train CartPole-v1 -s learning_rate=-1", "greater than 0"),
        ("train CartPole-v1 --actors 3 --mode single", "mode 'single' has one actor"),
        ("train Pendulum-v1 --algo dqn", "these can: a2c, a3c, ppo"),
        ("train CartPole-v1 --device cuda", "device=auto"),
    ],
)
def test_bad_input_is_refused_with_one_sentence_and_exit_2(steppe, words, said, tmp_path):
    done = steppe(*words.split(), "--run-dir", str(tmp_path / "run"))
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_run_can_be_watched_and_stopped_from_another_terminal():
    words = [STEPPE, *"train CartPole-v1 --steps 1000000000 --json --name endless".split()]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as training:
        try:
            watch = [STEPPE, *"watch endless --json --interval-s 0.2".split()]
            wait_for_run("endless")
            with subprocess.Popen(watch, stdout=subprocess.PIPE, text=True) as watching:
                assert watching.stdout is not None
                states = {json.loads(watching.stdout.readline())["state"] for _ in range(3)}
                stopped = executed("stop", "endless", "--wait")
                assert stopped.returncode == 0, stopped.stderr
                watching.communicate(timeout=300)
            out, err = training.communicate(timeout=300)
        finally:
            training.kill()
    assert training.returncode == 0, err
    assert states <= {"PENDING", "STARTING", "RUNNING"}
    result = json.loads(out)
    assert (result["state"], result["reason"]) == ("STOPPED", "stop_requested")
    assert executed("stop", "endless").returncode == 4


def wait_for_run(name: str) -> None:
    """Wait until the run exists; the command under test reads its state."""
    import time

    from steppe.core.contracts.errors import RunNotFound

    deadline = time.monotonic() + 180
    while time.monotonic() < deadline:
        try:
            RunDirectory.open(name)
            return
        except RunNotFound:
            time.sleep(0.05)
    raise TimeoutError(name)

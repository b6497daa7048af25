"""Tables from the command line: every algorithm and mode, results, resuming, evaluating, and refusals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from steppe import load, train
from steppe.core.config.algorithm_table import ALGORITHMS
from steppe.core.contracts.errors import RoleDied, WorldError
from steppe.records.checkpoints import Checkpoints
from steppe.records.run_directory import RunDirectory
from steppe.training.evaluate import evaluate
from steppe.training.resume import resume

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

STEPPE = Path(sys.executable).with_name("steppe")
GAME = f"game{os.getpid()}"  # a name that the shared memory of no other test has
TABULAR = [name for name, kind in ALGORITHMS.items() if kind.in_table]
QUICK = {"evaluation.episodes": 5, "evaluation.every_steps": 10**9}
TAXI = {"steps": 2_000, "envs": 4, "segment_steps": 16, **QUICK}


def steppe(*words, code=0):
    done = subprocess.run([STEPPE, *words], capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    return done


@pytest.mark.slow
def test_two_workers_learn_tictactoe():
    done = steppe(
        "train", "steppe/TicTacToe-v0", "--algo", "q-learning", "--mode", "workers", "--actors", "2", "--steps", "3000000",
        "-s", "gamma=1.0", "-s", "learning_rate_end=0.02", "--name", GAME, "--json",
    )  # fmt: skip
    found = json.loads(done.stdout)
    assert found["state"] == "SUCCEEDED"
    assert 3_000_000 <= found["env_steps"] < 3_000_000 + 2 * 1024
    assert found["updates"] == found["env_steps"]
    assert found["eval_return_mean"] > 0.7
    assert set(found["time_shares"]) == {"actor", "learner"}
    judged = json.loads(steppe("eval", GAME, "--episodes", "50", "--json").stdout)
    assert judged["return_mean"] > 0.7
    assert not list(Path("/dev/shm").glob(f"steppe-{GAME}-*"))
    assert json.loads(steppe("runs", "--json").stdout)[0]["state"] == "SUCCEEDED"


@pytest.mark.slow
def test_a_run_with_a_table_never_imports_torch(tmp_path):
    script = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(tmp_path)!r})
Path({str(tmp_path)!r}, "torch.py").write_text("raise ImportError('torch is not for tables')")
from steppe import load, train
from steppe.training.evaluate import evaluate
from steppe.training.resume import resume
for runtime, mode in (("inline", "single"), ("processes", "sync"), ("processes", "workers")):
    result = train("Taxi-v4", algo="q-learning", runtime=runtime, mode=mode, steps=500, envs=2, name=mode)
    assert result.state == "SUCCEEDED", result.message
resume("single", steps=700)
evaluate("sync", episodes=2)
print(load("workers").act(3), "torch" in sys.modules)
"""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, env=environ)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == "False"


@pytest.mark.parametrize("algo", TABULAR)
def test_every_algorithm_learns_the_identity_task(algo):
    """Random answers are right 4 times in 16, trained ones nearly always after 3,000 steps (seed 1); every mode with
    one algorithm.
    """
    modes = {"sync": 2, "workers": 2} | ({"single": 1, "async": 2} if algo == "q-learning" else {})
    for mode, actors in modes.items():
        result = train(
            "steppe/Identity-v0",
            algo=algo,
            mode=mode,
            actors=actors,
            runtime="inline",
            steps=3_000,
            seed=1,
            gamma=0.5,
            **QUICK,
        )
        assert result.state == "SUCCEEDED", result.message
        assert result.eval_return_mean > 14.0, mode


def test_the_same_weights_on_every_runtime():
    hashes = {
        runtime: train("Taxi-v4", algo="sarsa", mode="sync", actors=2, runtime=runtime, seed=3, **TAXI).weights_sha256
        for runtime in ("inline", "processes")
    }
    assert len(set(hashes.values())) == 1, hashes
    assert (
        len({train("Taxi-v4", algo="sarsa", runtime="inline", seed=seed, **TAXI).weights_sha256 for seed in (1, 2)})
        == 2
    )
    workers = [
        train("Taxi-v4", algo="sarsa", mode="workers", actors=2, runtime="inline", seed=3, **TAXI).weights_sha256
        for _ in range(2)
    ]
    assert workers[0] == workers[1], "taking turns in one process, workers repeat themselves too"


@pytest.mark.parametrize("algo", TABULAR)
def test_a_resumed_run_ends_with_the_same_weights(algo):
    """The rates do not depend on the run's length, so that half of it is the beginning of the whole."""
    steady = {"epsilon": 0.3, "epsilon_end": 0.3}
    settings = {"algo": algo, "mode": "sync", "actors": 2, "runtime": "inline", "seed": 5, **steady}
    whole = train("Taxi-v4", **settings, **TAXI)
    train("Taxi-v4", **settings, name="half", **{**TAXI, "steps": 1_000})
    half = resume("half", steps=2_000)
    assert half.resume == "exact"
    assert half.env_steps == whole.env_steps
    assert half.weights_sha256 == whole.weights_sha256


def test_workers_continue_from_a_checkpoint():
    first = train("Taxi-v4", algo="q-learning", mode="workers", actors=2, name="run", **TAXI)
    assert first.env_steps >= 2_000
    again = resume("run", steps=5_000)
    assert again.state == "SUCCEEDED"
    assert again.resume == "episode-boundary"
    assert 5_000 <= again.env_steps < 5_000 + 2 * 16 * 4
    newest = Checkpoints(RunDirectory.open("run").checkpoints).latest()
    assert newest.counters["env_steps"] == again.env_steps
    assert newest.weights.sha256() == again.weights_sha256


@pytest.mark.slow
def test_an_interrupted_run_keeps_what_its_workers_learned():
    command = [STEPPE, "train", "Taxi-v4", "--algo", "q-learning", "--mode", "workers", "--actors", "2"]
    command += ["--steps", "1000000000", "--name", "run"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 180
    while not ((path := Path(os.environ["STEPPE_RUNS"], "run")) / "run.json").exists() or not _trained(path):
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    newest = Checkpoints(path / "checkpoints").latest()
    assert newest.counters["env_steps"] > 0
    assert newest.weights.arrays()["q_table"].any()


def _trained(path):
    from steppe.core.contracts.transport import TRAINING

    directory = RunDirectory.open(path)
    try:
        return bool(directory.store.read(TRAINING))
    finally:
        directory.store.close()


@pytest.mark.slow
def test_workers_continue_without_one_that_may_not_be_restarted(tmp_path, monkeypatch):
    from tests.support.tabular_envs import Fatal

    monkeypatch.setenv("FATAL_MARK", str(tmp_path / "mark"))
    told = []
    result = train(
        Fatal, algo="q-learning", mode="workers", actors=2, steps=20_000, envs=2, seed=1,
        callbacks=[lambda view: told.extend(event for event in view.events if event not in told)],
        **{"flow.max_restarts": 0, **QUICK},
    )  # fmt: skip
    assert (tmp_path / "mark").exists()
    assert result.state == "SUCCEEDED"
    assert result.env_steps >= 20_000
    assert result.actor_restarts == 0
    (loss,) = [event for event in told if event.kind == "warning"]
    assert "was killed by SIGKILL" in loss.details["message"]
    assert "the others continue" in loss.details["message"]
    assert 0 < loss.details["lost_steps"] <= 64


def test_killing_the_last_worker_fails_the_run(tmp_path, monkeypatch):
    from tests.support.tabular_envs import Fatal

    monkeypatch.setenv("FATAL_MARK", str(tmp_path / "mark"))
    with pytest.raises(RoleDied, match="worker-0 was killed by SIGKILL"):
        train(Fatal, algo="q-learning", mode="workers", steps=20_000, envs=2, **{"flow.max_restarts": 0, **QUICK})


def test_a_run_ends_at_its_target_and_can_be_loaded():
    result = train(
        "FrozenLake-v1", algo="q-learning", mode="workers", actors=2, steps=10**7, target_return=0.99, name="lake",
        **{"environment.kwargs": {"is_slippery": False}, "evaluation.every_steps": 2_000, "evaluation.episodes": 5},
    )  # fmt: skip
    assert (result.state, result.reason) == ("SUCCEEDED", "target_reached")
    import gymnasium as gym

    policy, env = load("lake"), gym.make("FrozenLake-v1", is_slippery=False)
    state, _ = env.reset(seed=0)
    over = False
    while not over:
        state, reward, terminated, truncated, _ = env.step(policy.act(state))
        over = terminated or truncated
    assert reward == 1.0
    assert evaluate("lake", episodes=3)["return_mean"] == 1.0


def test_multi_discrete_and_binned_spaces_work():
    from tests.support.tabular_envs import Several

    result = train(Several, algo="q-learning", runtime="inline", steps=6_000, seed=0, gamma=0.0, **QUICK)
    assert result.eval_return_mean > 8.0
    wrapper = "steppe.classic:DiscretizeWrapper"
    train(
        "MountainCar-v0", algo="q-learning", runtime="inline", steps=600, **QUICK, **{"environment.wrappers": [wrapper]}
    )
    with pytest.raises(WorldError, match=r"steppe\.classic:DiscretizeWrapper"):
        train("CartPole-v1", algo="q-learning", runtime="inline", steps=100)
    with pytest.raises(WorldError, match="cannot choose continuous actions"):
        train("Pendulum-v1", algo="q-learning", runtime="inline", steps=100, **{"environment.wrappers": [wrapper]})


@pytest.mark.slow
def test_invalid_settings_are_refused_in_one_sentence(steppe):
    for words, message in (
        (["--algo", "q-lerning"], "Did you mean 'q-learning'?"),
        (["--algo", "q-learning", "-s", "hidden=[8]"], "unknown key 'hidden'"),
        (["--algo", "sarsa", "-s", "n_step=3"], "unknown key 'n_step'"),
        (["--algo", "r2d2", "--mode", "workers"], "which workers do not have"),
        (["--algo", "q-learning", "--mode", "workers", "--actors", "0"], "actors=0"),
        (["--algo", "q-learning", "--device", "cuda"], "on the CPU"),
        (["--algo", "q-learning", "-s", "flow.threads=2"], "flow.threads is for torch"),
        (["--algo", "q-learning", "-s", "flow.refresh_every=2"], "flow.refresh_every is for mode 'workers'"),
    ):
        done = steppe("train", "Taxi-v4", *words)
        assert done.returncode == 2, done.stderr
        assert message in done.stderr, done.stderr
        assert done.stderr.count("\n") == 1, done.stderr
    listed = steppe("algos").stdout
    assert all(algo in listed for algo in TABULAR)
    assert "trace_decay" in steppe("algos", "q-lambda").stdout
    assert not Path(os.environ["STEPPE_RUNS"]).exists()

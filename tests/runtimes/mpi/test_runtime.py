"""The `mpi` runtime in real worlds: under the user's mpiexec and under ours, to a good end, an early one, and a bad one."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from steppe.core.config.run import resolve_config
from steppe.records.checkpoints import Checkpoints
from steppe.runtimes.mpi import launch as mpi
from steppe.training.resume import resume
from steppe.training.train import run_experiment
from tests.support.cases import rest_slow
from tests.support.chaos_envs import PACE
from tests.support.commands import PATIENCE_S, family, opened, parents, status, trained, under_way, wait_until

pytestmark = pytest.mark.integration

SUITE = Path(__file__).with_name("world_suite.py")
STEPPE = Path(sys.executable).with_name("steppe")
# What is shown of launching, signals and supervision does not depend on the agent; ranks of a table import no torch.
TABLE = "--algo q-learning --mode async --envs 2 -s segment_steps=16 -s evaluation.episodes=2 --name run".split()
ENDLESS = [*TABLE, "--steps", str(10**9)]


def world(ranks, *words, **more):
    return subprocess.run(
        [mpi.find_mpiexec(), "-n", str(ranks), *words], capture_output=True, text=True, timeout=800, check=False, **more
    )


def train(env, *words):
    return [STEPPE, "train", env, "--runtime", "mpi", *words]


def ranks_of(process):
    """pid → place of a world, by the logs they write."""
    found = {}
    for pid in family(process.pid):
        try:
            log = os.readlink(f"/proc/{pid}/fd/2")
        except OSError:
            continue
        if log.endswith(".log") and "mpiexec" not in log:
            found[pid] = Path(log).stem
    return found


def files_of(pids):
    """What these processes have in shared memory."""
    maps = "".join(Path(f"/proc/{pid}/maps").read_text() for pid in pids)
    return {Path(file) for file in re.findall(r"/dev/shm/mpich\S+", maps)}


@pytest.mark.long
@pytest.mark.slow
def test_runs_of_one_world(tmp_path):
    """The contract of runtimes, runs beside those of one process, and commands that change hyperparameters in every mode."""
    done = world(4, sys.executable, SUITE, str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"[67] passed", done.stdout), done.stdout
    found = json.loads(done.stdout.splitlines()[-1])
    for case in ("ppo", "a2c", "dhc"):
        assert found[f"{case} mpi"] == found[f"{case} inline"]
        assert found[f"{case} mpi"]["state"] == "SUCCEEDED"
        assert found[f"{case} mpi"]["updates"] > 0
    assert found["a3c"]["state"] == "SUCCEEDED"
    assert found["a3c"]["updates"] >= found["a3c"]["version"] > 0
    assert found["a3c"]["env_steps"] >= 6000
    assert found["stopped"]["reason"] == "stopped_by_callback"
    assert 0 < found["stopped"]["env_steps"] < found["resumed"]["env_steps"]
    assert found["resumed"] == found["whole"]
    assert found["uneven"]["state"] == "SUCCEEDED"
    slow, fast = found["uneven"]["actors"]["0"], found["uneven"]["actors"]["1"]
    assert 0 < slow < fast, "a slow actor held up the other"
    (before, used_before), (after, used_after) = found["asleep"]["learner"][0], found["asleep"]["learner"][-1]
    slept_s = 0.02 * (after - before) / 2  # two actors, each with an environment that sleeps 20 ms a step
    assert slept_s > 1.0
    assert used_after - used_before < 0.5 * slept_s, "a learner that waits burns its core"


@pytest.mark.slow
def test_wrong_number_of_ranks(tmp_path):
    done = world(2, *train("CartPole-v1", "--actors", "4"))
    assert done.returncode == 2
    assert done.stderr.strip() == (
        "steppe: mpiexec started 2 ranks, but this run takes 6 (1 for the learner, 1 for the manager, 4 for actors): "
        "use mpiexec -n 6, or another --actors"
    )
    assert not (tmp_path / "runs").exists()
    done = world(2, *train("CartPole-v1", "-s", "flow.max_restarts=3"))
    assert (done.returncode, done.stderr.count("use --restarts")) == (2, 1), done.stderr
    done = world(2, *train("CartPole-v1", "-s", "learning_rat=1"))
    assert (done.returncode, done.stderr.count("learning_rat")) == (2, 2), done.stderr  # the key, and the nearest


@pytest.mark.parametrize("missing", ["mpi4py", "mpiexec"])
def test_mpi_that_is_not_installed(missing, tmp_path):
    script = (
        "import shutil, sys\n"
        "from steppe.cli.main import entry\n"
        "from steppe.runtimes.mpi import launch as mpi\n"
        f"if {missing!r} == 'mpi4py': sys.modules['mpi4py'] = None\n"
        "else: sys.executable = '/nowhere/python'; shutil.which = lambda name: None\n"
        "sys.argv = ['steppe', 'train', 'CartPole-v1', '--runtime', 'mpi']\n"
        "entry()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1
    assert "pip install 'steppe[mpi]'" in done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_a_killed_rank_fails_the_run_and_resuming_mends_it(monkeypatch, tmp_path):
    """The run that goes on after the kill ends with the weights of one that was never in trouble."""
    given = {
        "algo": "q-learning",
        "mode": "sync",
        "actors": 1,
        "envs": 2,
        "steps": 2000,
        "seed": 3,
        "segment_steps": 16,
    }
    given |= {"checkpoint.every_s": 0.1, "evaluation.episodes": 2}
    given |= {"environment.wrappers": ["tests.support.chaos_envs:Paced"], "environment.vector": "loop"}
    words = [word for key, value in given.items() for word in ("-s", f"{key}={json.dumps(value)}")]
    monkeypatch.setenv(PACE, "0.005")  # of a step: it lasts ten seconds, and is killed at its first checkpoint
    with under_way(train("Taxi-v4", *words, "--name", "run")) as process:
        wait_until(lambda: Checkpoints(Path(os.environ["STEPPE_RUNS"], "run", "checkpoints")).latest(), process)
        places = ranks_of(process)
        assert sorted(places.values()) == ["actor-0", "learner", "manager"]
        files = files_of(places)
        assert files
        os.kill(next(pid for pid, place in places.items() if place == "actor-0"), signal.SIGKILL)
        out, errors = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 1, out
        assert "the process of actor-0 was killed or crashed" in errors
        wait_until(lambda: not set(places) & set(parents()))
    assert not [file for file in files if file.exists()]
    assert (status().state, status().reason) == ("FAILED", "role_died")
    monkeypatch.delenv(PACE)
    ours = resume("run")
    assert ours.state == "SUCCEEDED", ours.message
    calm = {**given, "env": "Taxi-v4", "runtime": "inline", "run_dir": tmp_path / "calm"}
    theirs = run_experiment(resolve_config(("call", calm)))
    assert ours.weights_sha256 == theirs.weights_sha256
    assert ours.eval_return_mean == theirs.eval_return_mean


SCRIPT = """
import steppe
from steppe.envs.toy.builtin import CountingEnv
print("before")

def make():
    return CountingEnv()

small = dict(runtime="mpi", mode="single", envs=2, steps=64, segment_steps=8, hidden=(8,))
result = steppe.train(make, **small, **{"evaluation.episodes": 2})
print(result.state, result.summary["eval_episodes"])
"""
TUNED = """
from pathlib import Path
from tests.support.tuning import MATRIX, require_tuned
for mode, kind in MATRIX:
    if mode == "single":
        require_tuned(kind, Path(kind), runtime="mpi", mode=mode)
print("tuned")
"""


@pytest.mark.parametrize("launcher", rest_slow([], ["-n", "2"]), ids=["by steppe", "by the user"])
def test_a_script_without_a_main_guard(launcher, tmp_path):
    """Its training call runs once, on the first rank; the others take part where it stands. So does a second call."""
    (tmp_path / "script.py").write_text(SCRIPT + (TUNED if launcher else ""))
    command = [*([mpi.find_mpiexec(), *launcher] if launcher else []), sys.executable, "script.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stdout.splitlines() if line in ("SUCCEEDED 2", "tuned")]
    assert said == ["SUCCEEDED 2", *(["tuned"] if launcher else [])], done.stdout
    assert done.stdout.count("SUCCEEDED") == 1


@pytest.mark.slow
@pytest.mark.parametrize("launched", ["by steppe", "by the user"])
def test_a_signal_ends_it_in_good_order(launched):
    words = train("steppe/Identity-v0", *ENDLESS, "--actors", "1")
    number = signal.SIGINT if launched == "by the user" else signal.SIGTERM
    with under_way(words if launched == "by steppe" else [mpi.find_mpiexec(), "-n", "3", *words]) as process:
        wait_until(trained, process)
        members = family(process.pid)
        process.send_signal(number)
        _, errors = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 130, errors
        wait_until(lambda: not set(members) & set(parents()))
    assert (status().state, status().reason) == ("STOPPED", "interrupted")
    checkpoint = Checkpoints(opened().checkpoints).latest()
    assert checkpoint.weights.updates > 0
    assert "Traceback" not in errors


@pytest.mark.slow
def test_an_environment_that_hangs_is_found_and_left_behind():
    with under_way(train("tests.runtimes.mpi.world_suite:Stuck", *TABLE, "-s", "flow.hang_s=10")) as process:
        _, errors = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 1
        assert "actor-0 took longer than flow.hang_s=10 for one step" in errors
        assert "world_suite.py" in errors, "it does not say where"
    assert (status().state, status().reason) == ("FAILED", "hung")


@pytest.mark.slow
def test_a_rank_that_does_not_answer_is_not_waited_for():
    """Under the user's mpiexec, after one Ctrl-C."""
    command = [mpi.find_mpiexec(), "-n", "3", *train("tests.runtimes.mpi.world_suite:Stuck", *TABLE, "--actors", "1")]
    with under_way(command) as process:
        wait_until(lambda: status() is not None and status().state == "RUNNING", process)
        members = family(process.pid)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 130, errors
        wait_until(lambda: not set(members) & set(parents()))
    assert (status().state, status().reason) == ("STOPPED", "interrupted")


@pytest.mark.slow
def test_a_rank_killed_under_the_users_mpiexec(monkeypatch):
    """mpiexec kills all the others: whoever looks next finds the run lost, and the next run sweeps what MPI left."""
    command = [mpi.find_mpiexec(), "-n", "3", *train("steppe/Identity-v0", *ENDLESS, "--actors", "1")]
    with under_way(command) as process:
        wait_until(trained, process)
        places = ranks_of(process)
        files = files_of(places)
        os.kill(next(pid for pid, place in places.items() if place == "manager"), signal.SIGKILL)
        process.communicate(timeout=PATIENCE_S)
        assert process.returncode != 0
        wait_until(lambda: not set(places) & set(parents()))
    assert (status().state, status().reason) == ("LOST", "process_dead")
    monkeypatch.setattr(mpi, "STALE_S", 0.0)
    mpi.remove_stale_shm_files()
    assert not [file for file in files if file.exists()]


@pytest.mark.slow
def test_a_killed_supervisor_takes_its_ranks_along():
    with under_way(train("steppe/Identity-v0", *ENDLESS, "--actors", "1")) as process:
        wait_until(trained, process)
        members = family(process.pid)
        files = files_of(ranks_of(process))
        process.kill()
        process.communicate()
        wait_until(lambda: not set(members) & set(parents()))
    assert (status().state, status().reason) == ("LOST", "process_dead")
    assert not [file for file in files if file.exists()]

"""The `mpi` runtime in real worlds: under the user's mpiexec and under ours, to a good end, an early one, and a bad one."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from steppe.core.links import TRAINING
from steppe.records.checkpoints import Checkpoints
from steppe.records.directory import RunDirectory
from steppe.runtimes import mpi
from tests.support.cases import rest_slow
from tests.support.commands import PATIENCE_S, family, opened, parents, status, trained, under_way, wait_until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

SUITE = Path(__file__).with_name("mpi_world_suite.py")
STEPPE = Path(sys.executable).with_name("steppe")
SMALL = "--envs 2 -s segment_steps=16 -s hidden=[16] -s epochs=1 -s minibatch_size=16 -s evaluation.episodes=2".split()


def world(ranks, *words, **more):
    return subprocess.run(
        [mpi.mpiexec(), "-n", str(ranks), *words], capture_output=True, text=True, timeout=300, check=False, **more
    )


@contextmanager
def training(*words):
    """A command in a session of its own, with what it and its ranks leave behind ended in any case."""
    command = [STEPPE, "train", "CartPole-v1", "--runtime", "mpi", *SMALL, *words]
    with under_way(command) as process:
        yield process


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


@pytest.mark.slow
def test_contract_of_runtimes_in_a_world():
    done = world(4, sys.executable, SUITE, "conformance")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"[67] passed", done.stdout), done.stdout


@pytest.mark.long
@pytest.mark.slow
def test_runs_of_one_world(tmp_path):
    done = world(4, sys.executable, SUITE, "runs", str(tmp_path))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    for case in ("ppo", "dqn", "r2d2", "recurrent", "a2c"):
        assert found[f"{case} mpi"] == found[f"{case} inline"]
        assert found[f"{case} mpi"]["state"] == "SUCCEEDED"
        assert found[f"{case} mpi"]["updates"] > 0
    assert found["a3c"]["state"] == "SUCCEEDED"
    assert found["a3c"]["updates"] >= found["a3c"]["version"] > 0
    assert found["a3c"]["env_steps"] >= 6000
    assert found["stopped"]["reason"] == "stopped_by_callback"
    assert 0 < found["stopped"]["env_steps"] < 120_000
    assert found["ppo resumed"] == found["ppo inline"]
    assert found["uneven"]["state"] == "SUCCEEDED"
    slow, fast = found["uneven"]["actors"]["0"], found["uneven"]["actors"]["1"]
    assert 0 < slow < fast, "a slow actor held up the other"


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "modes"), [(2, {"single"}), (4, {"sync", "async", "workers"})])
def test_all_live_hyperparameters_in_one_command(ranks, modes, tmp_path):
    done = world(ranks, sys.executable, SUITE, "tune", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert {mode for mode, _ in json.loads(done.stdout.splitlines()[-1])} == modes


@pytest.mark.slow
def test_waiting_ranks_do_not_burn_their_cores(tmp_path):
    """The learner waits for an environment that sleeps 20 ms a step; what it computes in that time is its processor's."""
    words = "--steps 160 --envs 1 -s environment.kwargs={delay_s=0.02} -s segment_steps=16 -s evaluation.episodes=1"
    run = tmp_path / "run"
    done = world(3, STEPPE, "train", "steppe/Sleep-v0", "--runtime", "mpi", *words.split(), "--run-dir", str(run))
    assert done.returncode == 0, done.stderr
    records = [record for _, record in RunDirectory.open(run).store.read(TRAINING)]
    slept_s = 0.02 * (records[-1]["env_steps"] - records[0]["env_steps"])
    assert slept_s > 1.0
    assert records[-1]["cpu_s"] - records[0]["cpu_s"] < 0.5 * slept_s


@pytest.mark.slow
def test_wrong_number_of_ranks(tmp_path):
    done = world(3, STEPPE, "train", "CartPole-v1", "--runtime", "mpi", "--actors", "4")
    assert done.returncode == 2
    assert done.stderr.strip() == (
        "steppe: mpiexec started 3 ranks, but this run takes 6 (1 for the learner, 1 for the manager, 4 for actors): "
        "use mpiexec -n 6, or another --actors"
    )
    assert not (tmp_path / "runs").exists()
    done = world(3, STEPPE, "train", "CartPole-v1", "--runtime", "mpi", "-s", "flow.max_restarts=3")
    assert (done.returncode, done.stderr.count("use --restarts")) == (2, 1), done.stderr
    done = world(3, STEPPE, "train", "CartPole-v1", "--runtime", "mpi", "-s", "learning_rat=1")
    assert (done.returncode, done.stderr.count("learning_rat")) == (2, 2), done.stderr  # the key, and the nearest


@pytest.mark.parametrize("missing", ["mpi4py", "mpiexec"])
def test_mpi_that_is_not_installed(missing, tmp_path):
    script = (
        "import shutil, sys\n"
        "from steppe.cli.main import entry\n"
        "from steppe.runtimes import mpi\n"
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


@pytest.mark.long
@pytest.mark.slow
def test_a_killed_rank_fails_the_run_and_resuming_mends_it():
    """The run that goes on after the kill ends with the weights of one that was never in trouble."""
    words = ["--actors", "2", "--steps", "6000", "-s", "checkpoint.every_s=0.1", "-s", "seed=3"]
    with training(*words, "--name", "run") as process:
        wait_until(lambda: Checkpoints(Path(os.environ["STEPPE_RUNS"], "run", "checkpoints")).latest(), process)
        places = ranks_of(process)
        assert sorted(places.values()) == ["actor-0", "actor-1", "learner", "manager"]
        files = files_of(places)
        assert files
        os.kill(next(pid for pid, place in places.items() if place == "actor-1"), signal.SIGKILL)
        out, errors = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 1, out
        assert "the process of actor-1 was killed or crashed" in errors
        wait_until(lambda: not set(places) & set(parents()))
    assert not [file for file in files if file.exists()]
    assert (status().state, status().reason) == ("FAILED", "role_died")
    resumed = subprocess.run([STEPPE, "resume", "run", "--json"], capture_output=True, text=True, check=False)
    assert resumed.returncode == 0, resumed.stderr
    command = [STEPPE, "train", "CartPole-v1", "--runtime", "inline", *SMALL, *words, "--name", "calm", "--json"]
    calm = subprocess.run(command, capture_output=True, text=True, check=True)
    ours, theirs = json.loads(resumed.stdout), json.loads(calm.stdout)
    assert ours["weights_sha256"] == theirs["weights_sha256"]
    assert ours["eval_return_mean"] == theirs["eval_return_mean"]


SCRIPT = """
import steppe
from steppe.envs.builtin import CountingEnv
print("before")

def make():
    return CountingEnv()

small = dict(runtime="mpi", mode="single", envs=2, steps=64, segment_steps=8, hidden=(8,))
result = steppe.train(make, **small, **{"evaluation.episodes": 2})
print(result.state, result.summary["eval_episodes"])
"""


@pytest.mark.parametrize("launcher", rest_slow([], ["-n", "2"]), ids=["by steppe", "by the user"])
def test_a_script_without_a_main_guard(launcher, tmp_path):
    """Its training call runs once, on the first rank; the others take part where it stands."""
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [*([mpi.mpiexec(), *launcher] if launcher else []), sys.executable, "script.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "SUCCEEDED 2"
    assert done.stdout.count("SUCCEEDED") == 1


@pytest.mark.slow
@pytest.mark.parametrize("launched", ["by steppe", "by the user"])
def test_a_signal_ends_it_in_good_order(launched):
    words = [STEPPE, "train", "CartPole-v1", "--runtime", "mpi", *SMALL]
    words += ["--mode", "async", "--actors", "2", "--steps", str(10**9), "--name", "run"]
    number = signal.SIGINT if launched == "by the user" else signal.SIGTERM
    with under_way(words if launched == "by steppe" else [mpi.mpiexec(), "-n", "4", *words]) as process:
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
    command = [
        STEPPE,
        "train",
        "tests.runtimes.mpi_world_suite:Stuck",
        "--runtime",
        "mpi",
        *SMALL,
        "-s",
        "flow.hang_s=10",
        "--name",
        "run",
    ]
    with under_way(command) as process:
        _, errors = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 1
        assert "actor-0 took longer than flow.hang_s=10 for one step" in errors
        assert "mpi_world_suite.py" in errors, "it does not say where"
    assert (status().state, status().reason) == ("FAILED", "hung")


@pytest.mark.slow
def test_a_rank_that_does_not_answer_is_not_waited_for():
    """Under the user's mpiexec, after one Ctrl-C."""
    command = [
        mpi.mpiexec(),
        "-n",
        "3",
        STEPPE,
        "train",
        "tests.runtimes.mpi_world_suite:Stuck",
        "--runtime",
        "mpi",
        *SMALL,
    ]
    with under_way([*command, "--name", "run"]) as process:
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
    words = ["--actors", "1", "--steps", str(10**9), "--name", "run"]
    command = [mpi.mpiexec(), "-n", "3", STEPPE, "train", "CartPole-v1", "--runtime", "mpi", *SMALL, *words]
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
    mpi.sweep()
    assert not [file for file in files if file.exists()]


@pytest.mark.slow
def test_a_killed_supervisor_takes_its_ranks_along():
    with training("--actors", "1", "--steps", str(10**9), "--name", "run") as process:
        wait_until(trained, process)
        members = family(process.pid)
        files = files_of(ranks_of(process))
        process.kill()
        process.communicate()
        wait_until(lambda: not set(members) & set(parents()))
    assert (status().state, status().reason) == ("LOST", "process_dead")
    assert not [file for file in files if file.exists()]

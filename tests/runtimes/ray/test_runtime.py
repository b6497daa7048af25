"""The `ray` runtime on real clusters: one of two nodes, and those that runs start for themselves and bring down again."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

import steppe
from steppe.core.contracts.transport import EVENTS
from steppe.records.checkpoints import Checkpoints
from tests.support.chaos_envs import PACE
from tests.support.commands import PATIENCE_S, family, opened, parents, status, trained, under_way, wait_until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

SUITE = Path(__file__).with_name("world_suite.py")
STEPPE = Path(sys.executable).with_name("steppe")
# What is shown of launching, signals and supervision does not depend on the agent; seats of a table import no torch.
SETTINGS = {"algo": "q-learning", "envs": 2, "segment_steps": 16, "evaluation.episodes": 2}


def train(**settings):
    given = {**SETTINGS, "ray.object_store_mb": 80, **settings}
    words = [word for key, value in given.items() for word in ("-s", f"{key}={json.dumps(value)}")]
    return [STEPPE, "train", "Taxi-v4", "--runtime", "ray", "--name", "run", *words]


def process_locations(process):
    """place → pid of the run's Ray actors, by the logs they write."""
    found = {}
    for pid in family(process.pid):
        try:
            log = os.readlink(f"/proc/{pid}/fd/2")
        except OSError:
            continue
        if log.endswith(".log") and Path(log).parent.name == "logs" and Path(log).stem != "ray":
            found[Path(log).stem] = pid
    return found


def named(process, name):
    return next(pid for pid in family(process.pid) if Path(f"/proc/{pid}/comm").read_text().strip() == name)


def scratch(process):
    """What the cluster of this run keeps its sockets and logs in; other tests may have one of their own at the same time."""
    lines = []
    for pid in family(process.pid):
        with suppress(OSError):  # it has ended
            lines.append(Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace"))
    found = {Path(name) for line in lines for name in re.findall(r"/tmp/steppe-ray-[^/\s\0]+", line)}
    assert found
    return found


def restarted():
    return [event for _, event in opened().store.read(EVENTS) if event["kind"] == "restart"]


def test_a_whole_run_is_that_of_one_process():
    """With a table, for which nobody imports torch; what networks learn is compared on the cluster of two nodes."""
    settings = {
        "algo": "q-learning",
        "mode": "sync",
        "actors": 2,
        "envs": 2,
        "segment_steps": 16,
        "steps": 2000,
        "seed": 3,
    }
    found = [
        steppe.train("Taxi-v4", runtime=runtime, **settings, **more).summary
        for runtime, more in (("inline", {}), ("ray", {"ray.object_store_mb": 80}))
    ]
    assert [summary["state"] for summary in found] == ["SUCCEEDED"] * 2
    assert found[0]["updates"] == found[1]["updates"] > 10
    assert found[0]["weights_sha256"] == found[1]["weights_sha256"]


@pytest.mark.long
@pytest.mark.slow
def test_runs_on_a_cluster_of_two_nodes():
    done = subprocess.run([sys.executable, SUITE], capture_output=True, text=True, timeout=590, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed, done.stdout
    assert int(passed[1]) >= 30
    assert "skipped" not in done.stdout


def require_failed_without(head, process):
    """Kill it: the run's own processes and files are gone, and the reason is told."""
    members, shared_dirs = family(process.pid), scratch(process)
    os.kill(named(process, head), signal.SIGKILL)
    out, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1, out
    assert re.search(f"the {head} of the run's own Ray cluster|the Ray driver ended", errors), errors
    wait_until(lambda: not set(members) & set(parents()), every_s=0.2)
    assert not any(shared_dir.exists() for shared_dir in shared_dirs)
    assert (status().state, status().reason) == ("FAILED", "role_died")


@pytest.mark.slow
def test_a_killed_gcs_server_ends_the_run():
    with under_way(train(mode="sync", actors=1, steps=10**9)) as process:
        wait_until(trained, process, every_s=0.2)
        require_failed_without("gcs_server", process)


@pytest.mark.long
@pytest.mark.slow
def test_killed_actor_then_killed_raylet(monkeypatch):
    """The run goes on without the one, and resumes exactly without the other."""
    settings = {"mode": "sync", "actors": 1, "steps": 6000, "checkpoint.every_s": 2.0, "seed": 3}
    settings |= {"environment.wrappers": ["tests.support.chaos_envs:Paced"], "environment.vector": "loop"}
    monkeypatch.setenv(PACE, "0.01")  # of a step: it lasts a minute, and is killed at its first checkpoint
    with under_way(train(**settings)) as process:
        wait_until(trained, process, every_s=0.2)
        locations = process_locations(process)
        assert sorted(locations) == ["actor-0", "learner", "manager"]
        os.kill(locations["actor-0"], signal.SIGKILL)
        wait_until(restarted, process, every_s=0.2)
        wait_until(
            lambda: process_locations(process).get("actor-0") not in (None, locations["actor-0"]), process, every_s=0.2
        )
        wait_until(lambda: Checkpoints(opened().checkpoints).latest() is not None, process)
        require_failed_without("raylet", process)
    monkeypatch.delenv(PACE)
    resumed = subprocess.run([STEPPE, "resume", "run", "--json"], capture_output=True, text=True, check=False)
    assert resumed.returncode == 0, resumed.stderr
    calm = steppe.train("Taxi-v4", runtime="inline", **SETTINGS, **settings)
    assert json.loads(resumed.stdout)["weights_sha256"] == calm.summary["weights_sha256"]


@pytest.mark.slow
def test_a_signal_ends_it_in_good_order():
    with under_way(train(mode="async", actors=2, steps=10**9)) as process:
        wait_until(trained, process, every_s=0.2)
        members, shared_dirs = family(process.pid), scratch(process)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 130, errors
        wait_until(lambda: not set(members) & set(parents()), every_s=0.2)
    assert (status().state, status().reason) == ("STOPPED", "interrupted")
    assert Checkpoints(opened().checkpoints).latest().weights.updates > 0
    assert "Traceback" not in errors
    assert not any(shared_dir.exists() for shared_dir in shared_dirs)


SCRIPT = """
import steppe
from steppe.envs.toy.builtin import IdentityEnv
print("before")

class Mine(IdentityEnv):
    def step(self, action):
        raise ArithmeticError("this world has an edge")

small = dict(runtime="ray", algo="q-learning", mode="single", envs=2, steps=64, segment_steps=8)
steppe.train(Mine, **small, **{"evaluation.episodes": 2, "ray.object_store_mb": 80})
"""


@pytest.mark.slow
def test_a_script_without_a_main_guard_sees_its_own_traceback(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "script.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 1
    assert done.stdout == "before\n"
    assert "this world has an edge" in done.stderr
    assert 'script.py", line 8, in step' in done.stderr


@pytest.mark.slow
def test_a_killed_supervisor_takes_everything_along():
    with under_way(train(mode="single", steps=10**9)) as process:
        wait_until(trained, process, every_s=0.2)
        members = family(process.pid)
        process.kill()
        process.communicate()
        wait_until(lambda: not set(members) & set(parents()), every_s=0.2)
    assert (status().state, status().reason) == ("LOST", "process_dead")


def said(*words):
    done = subprocess.run([STEPPE, "train", "CartPole-v1", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1
    return done.stderr


def test_mistakes_are_said_before_anything_is_written(tmp_path):
    ray = ("--runtime", "ray")
    assert "ray.address is for runtime 'ray', not 'processes'" in said("--ray-address", "auto")
    assert "there is no Ray cluster at 127.0.0.1:1" in said(*ray, "--ray-address", "127.0.0.1:1")
    assert "must be host:port" in said(*ray, "--ray-address", "ray://127.0.0.1:1")
    assert "leave ray.address out" in said(*ray, "--ray-address", "auto", "-s", "ray.object_store_mb=100")
    assert not (tmp_path / "runs").exists()


def test_ray_that_is_not_installed(tmp_path):
    script = (
        "import sys\n"
        "from steppe.cli.main import entry\n"
        "sys.modules['ray'] = None\n"
        "sys.argv = ['steppe', 'train', 'CartPole-v1', '--runtime', 'ray']\n"
        "entry()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert done.stderr == "steppe: runtime 'ray' needs an optional dependency: pip install 'steppe[ray]'\n"
    assert not (tmp_path / "runs").exists()

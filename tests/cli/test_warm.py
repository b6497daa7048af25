"""`steppe warm`: later runs compile nothing."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from steppe.cli.commands import warm as warming
from steppe.cli.commands.warm import delete_stale_kernels

pytestmark = pytest.mark.integration
STEPPE = Path(sys.executable).with_name("steppe")

SHORT = {"runtime": "processes", "steps": 2000, "evaluation.episodes": 1, "evaluation.every_steps": 1_000_000}
RUNS = {
    "ppo": {"env": "CartPole-v1", "mode": "async", "actors": 2},
    "dqn": {"env": "CartPole-v1", "algo": "dqn"},
    "r2d2": {"env": "CartPole-v1", "algo": "r2d2"},
    "recurrent": {"env": "CartPole-v1", "recurrent": True, "cell": "gru"},
    "q-learning": {"env": "steppe/TicTacToe-v0", "algo": "q-learning", "mode": "workers", "actors": 2},
}
# All in one process, so that their roles are forks of one fork server with torch imported.
TRAINING = f"""
from steppe import train
for name, settings in {RUNS}.items():
    assert train(**settings, **{SHORT}, name=name).updates > 0
"""
TABLES = """
from steppe import classic
env = classic.TicTacToeEnv(opponent="random")
agent = classic.OptimalQLearning(env.observation_space_size, env.action_space_size)
agent.train_episode(env)
classic.GameTrainer(agent, classic.tictactoe()).run(5000)
"""
UPDATES = """
import numpy as np
from steppe import FederatedParameterServer, ParameterServer
for method in ("average", "median", "multi_krum"):
    server = ParameterServer({"w": np.zeros(9)}, method, 3, optimizer="adam")
    for name in "abc":
        server.register_worker(name)
        assert server.push_gradients(name, {"w": np.ones(9)})
    assert server.version == 1
from steppe.params.privacy import PrivacyPlan
plan = PrivacyPlan("ledger.json", epsilon=100.0, expected_clients=2)
server = FederatedParameterServer({"w": np.zeros(9)}, differential_privacy=True, privacy=plan)
for name in "ab":
    server.register_worker(name)
server.federated_averaging({"a": {"w": np.ones(9)}, "b": {"w": np.ones(9)}})
"""


def kernels_in(text: str) -> set[str]:
    """Return the cache files that numba reports as loaded or written, with NUMBA_DEBUG_CACHE set."""
    return set(re.findall(r"\[cache\] data (?:loaded from|saved to) '(.+\.nbc)'", text))


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(600)  # compiles all kernels if the set-up has not done so
def test_default_runs_compile_nothing_after_warm(tmp_path):
    """Each kernel that they load is one that `steppe warm` loads or compiles."""
    place = {**os.environ, "NUMBA_DEBUG_CACHE": "1", "STEPPE_RUNS": str(tmp_path / "runs")}

    def run(*command):
        done = subprocess.run(command, env=place, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    covered = kernels_in(run(STEPPE, "warm"))
    assert len(covered) > 50
    assert not (tmp_path / "runs").exists()

    told, needed = run(sys.executable, "-c", TRAINING), {}
    for name in RUNS:
        logs = [path.read_text() for path in (tmp_path / "runs" / name / "logs").iterdir()]
        needed[name] = kernels_in("\n".join([told, *logs]))
    for name, script in {"tables": TABLES, "updates": UPDATES}.items():
        needed[name] = kernels_in(run(sys.executable, "-c", script))
    assert all(needed.values()), needed
    left_out = {name: sorted(kernels - covered) for name, kernels in needed.items() if kernels - covered}
    assert not left_out


@pytest.mark.slow
def test_compiled_kernels_are_counted_and_cached(tmp_path, monkeypatch, capsys):
    """Uses its own cache and compiles only the group of tabular workers."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "kernels"))
    monkeypatch.setattr(warming, "PARALLEL_GROUPS", (("workers",),))
    warming.warm(as_json=True)
    compiled = json.loads(capsys.readouterr().out)["compiled"]
    assert compiled == len(set((tmp_path / "kernels").rglob("*.nbc"))) > 1
    warming.warm()
    assert capsys.readouterr().out == "All kernels were already compiled.\n"


def test_unwritable_cache_is_one_sentence(steppe, tmp_path):
    nowhere = tmp_path / "file"
    nowhere.write_text("not a directory")
    done = steppe("warm", NUMBA_CACHE_DIR=str(nowhere / "inside"))
    assert done.returncode == 2
    assert done.stderr.startswith(
        "steppe: compiled kernels cannot be cached: no writable directory; set NUMBA_CACHE_DIR"
    )
    assert done.stderr.count("\n") == 1


def test_stale_kernels_are_deleted(tmp_path):
    """b.py calls a kernel of a.py; only a.py has changed, which numba does not detect."""
    cache = tmp_path / "__pycache__"
    cache.mkdir()
    times = {"b.py": 100, "plain.py": 900, "a.py": 500}
    times |= {
        "__pycache__/b.f-1.py311.nbi": 200,
        "__pycache__/b.f-1.py311.1.nbc": 200,
        "__pycache__/a.g-1.py311.nbi": 600,
    }
    for name, at in times.items():
        (tmp_path / name).write_text("import numba" if name in ("a.py", "b.py") else "")
        os.utime(tmp_path / name, (at, at))
    assert delete_stale_kernels(tmp_path) == 2
    assert [path.name for path in cache.iterdir()] == ["a.g-1.py311.nbi"]
    assert delete_stale_kernels(tmp_path) == 0

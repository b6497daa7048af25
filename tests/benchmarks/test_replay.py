"""Steppe's sides of the replay benchmark at a tiny size: every task runs, and its figures are plausible."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
EVERYTHING = """
    import json, sys
    sys.path[:0] = sys.argv[1:]
    import buffers, replaying
    from protocol import Request

    found = {}
    for side, tasks in buffers.SIDES.items():
        for task, run in tasks.items():
            result = run(Request(task, None, 1, {"capacity": "8000", "seconds": "0.005"}))
            found[f"{side} {task}"] = {"steps": result.steps, "seconds": result.seconds, **result.extra}
    frames = replaying.Frames(0)
    first, second = frames.transitions(5), frames.transitions(5)
    assert (first["next_obs"][:-1] == first["obs"][1:]).all()
    assert (first["next_obs"][-1] == second["obs"][0]).all()
    assert (first["obs"][1, :3] == first["obs"][0, 1:]).all()
    assert len({frame.tobytes() for frame in first["obs"][:, 0]}) == 5
    print(json.dumps(found))
"""


@pytest.mark.slow
def test_every_task_of_steppe_runs(tmp_path):
    """In a separate process, since the module that they share with peers changes settings of the whole process."""
    homes = [str(BENCHMARKS / "workloads"), str(BENCHMARKS / "peers")]
    words = [sys.executable, "-c", textwrap.dedent(EVERYTHING), *homes]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert {"steppe replay-prioritized", "steppe replay-images", "numpy replay-save", "one replay-save"} <= set(found)
    for figures in found.values():
        assert all(math.isfinite(value) for value in figures.values())
        assert figures["steps"] > 0
        assert figures["seconds"] > 0
    for side in ("one", "numpy"):
        assert found[f"{side} replay-save"]["saved_mib"] > 8000 * 77 / 2**20  # the size of the columns alone

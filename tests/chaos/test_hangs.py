"""Environments that hang or exhaust the memory are detected, reported with position or size, and replaced where that
helps.
"""

from __future__ import annotations

import pytest

from tests.support.chaos import events, train

pytestmark = pytest.mark.integration

SMALL = {"mode": "sync", "actors": 2, "envs": 2, "segment_steps": 16, "hidden": (8,), "epochs": 1, "steps": 2000}


def test_a_hung_environment_is_detected_and_replaced(tmp_path):
    kwargs = {"marker": str(tmp_path / "somebody-was-here")}
    layer = {
        **SMALL,
        "env": "tests.support.chaos_envs:HangsOnceEnv",
        "environment.kwargs": kwargs,
        "runtime": "processes",
    }
    result = train({**layer, "run_dir": tmp_path / "hang", "flow.hang_s": 15.0})
    assert result.state == "SUCCEEDED", result.message
    assert result.actor_restarts == 1
    (restart,) = events(tmp_path / "hang", "restart")
    assert "flow.hang_s=15" in restart["details"]["message"]
    assert "in hang_here" in restart["details"]["traceback"]
    assert "chaos_envs.py" in restart["details"]["traceback"]


@pytest.mark.parametrize("env", ["OutOfMemoryEnv", "GreedyEnv"])
@pytest.mark.parametrize("runtime", ["inline", "processes"])
def test_exhausted_memory_is_reported_with_the_size(env, runtime, tmp_path):
    result = train(
        {**SMALL, "env": f"tests.support.chaos_envs:{env}", "runtime": runtime, "run_dir": tmp_path / "memory"}
    )
    assert (result.state, result.reason) == ("FAILED", "out_of_memory")
    role = result.fault.role
    assert role in ("actor-0", "actor-1")
    words = result.message.split()
    assert result.message.startswith(f"{role} ran out of memory at ")
    assert int(words[words.index("at") + 1]) > 10  # MiB: the size of any Python process
    assert words[words.index("at") + 2].startswith("MiB")
    assert "MemoryError" in result.fault.details["traceback"]
    assert result.fault.details["seed"] is not None

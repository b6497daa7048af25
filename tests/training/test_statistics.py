"""Statistics of environment, agent and pool during and after runs of every kind, against what arithmetic says.

Every episode of this environment has 16 steps, and so has every segment: whole segments are whole episodes.
"""

from __future__ import annotations

import pytest

from steppe import AsyncMainLoop, DistributedAgent, DistributedEnvironment, MainLoop, ReplayBufferPool
from tests.support.cases import rest_slow

pytestmark = pytest.mark.integration

LENGTH, ENVS, STEPS = 16, 2, 640
CONFIG = {"evaluation.episodes": 2, "segment_steps": LENGTH, "envs": ENVS, "steps": STEPS}


def made(kind: str, algo: str, runtime: str, pool: ReplayBufferPool | None):
    environment = DistributedEnvironment("steppe/Identity-v0", 2, runtime=runtime)
    agent = DistributedAgent(algo, seed=0).bind(environment)
    if kind == "workers":
        return AsyncMainLoop(environment, pool, agent, None, num_workers=2, config=CONFIG)
    return MainLoop(environment, pool, agent, config=CONFIG | {"mode": kind})


@pytest.mark.parametrize(
    ("kind", "algo", "runtime"),
    rest_slow(
        ("sync", "ppo", "inline"),
        ("sync", "dqn", "inline"),
        ("workers", "a2c", "inline"),
        ("async", "ppo", "inline"),
        ("sync", "ppo", "processes"),
        ("workers", "a2c", "processes"),
        ("async", "dqn", "processes"),
    ),
)
def test_statistics_are_right_during_and_after_a_run(kind: str, algo: str, runtime: str) -> None:
    pool = ReplayBufferPool(1, 1000) if algo == "dqn" else None
    loop = made(kind, algo, runtime, pool)
    environment, agent = loop.environment, loop.agent
    seen: list[tuple[int, int, int]] = []

    def look(view) -> None:
        stats, learned = environment.get_environment_stats(), agent.get_training_stats()
        assert stats["steps"] == LENGTH * stats["episodes"]
        assert (learned["env_steps"], learned["updates"]) == (view.env_steps, view.updates)
        seen.append((stats["steps"], learned["env_steps"], learned["updates"]))

    result = loop.run([look])
    result.raise_for_fault()
    stats, learned = environment.get_environment_stats(), agent.get_training_stats()
    assert seen == sorted(seen)
    assert stats["steps"] == LENGTH * stats["episodes"] >= learned["env_steps"] >= STEPS
    assert learned["env_steps"] % (LENGTH * ENVS) == 0
    assert kind == "async" or learned["env_steps"] == STEPS
    assert kind == "async" or stats["steps"] <= STEPS + 2 * 2 * LENGTH * ENVS, "actors are two segments ahead at most"
    assert (learned["env_steps"], learned["updates"]) == (result.summary["env_steps"], result.summary["updates"])
    assert (learned["updates"] > 0) == (algo != "dqn"), "so few steps only begin to fill a pool"
    assert stats["length_mean"] == LENGTH
    if pool is not None:
        assert pool.get_buffer_stats()["buffers"][0]["added"] == learned["env_steps"]
        assert pool.get_total_experiences() == min(1000, learned["env_steps"])
    loop.run().raise_for_fault()
    again = environment.get_environment_stats()
    assert again["steps"] == LENGTH * again["episodes"] >= stats["steps"] + STEPS
    assert agent.get_training_stats()["updates"] >= 2 * learned["updates"]

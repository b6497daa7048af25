"""Statistics of environment, agent and pool during and after runs of composed loops, against what arithmetic says.

Every episode of this environment has 16 steps, and so has every segment: whole segments are whole episodes.
"""

from __future__ import annotations

from typing import Any

from steppe import AsyncMainLoop, DistributedAgent, DistributedEnvironment, MainLoop, ReplayBufferPool

LENGTH, ENVS, STEPS = 16, 2, 640
CONFIG = {"evaluation.episodes": 2, "segment_steps": LENGTH, "envs": ENVS, "steps": STEPS}
IN_PLACE = ("inline", "processes")
ELSEWHERE = [("sync", "ppo"), ("async", "dqn"), ("workers", "a2c")]  # cases for runtimes with the learner elsewhere


def make_loop(kind: str, algo: str, runtime: str, pool: ReplayBufferPool | None, more: dict[str, Any]) -> Any:
    environment = DistributedEnvironment("steppe/Identity-v0", 2, runtime=runtime if runtime in IN_PLACE else None)
    agent = DistributedAgent(algo, seed=0).bind(environment)
    config = CONFIG | {"runtime": runtime} | more
    if kind == "workers":
        return AsyncMainLoop(environment, pool, agent, None, num_workers=2, config=config)
    return MainLoop(environment, pool, agent, config=config | {"mode": kind})


def require_right_statistics(kind: str, algo: str, runtime: str, **more: Any) -> None:
    """Run a loop and require statistics that are right while it goes on, afterwards, and over a second run."""
    pool = ReplayBufferPool(1, 1000) if algo == "dqn" else None
    loop = make_loop(kind, algo, runtime, pool, more)
    environment, agent = loop.environment, loop.agent
    seen: list[tuple[int, int, int]] = []

    def look(view: Any) -> None:
        stats, learned = environment.get_environment_stats(), agent.get_training_stats()
        assert stats["steps"] == LENGTH * stats["episodes"]
        assert (learned["env_steps"], learned["updates"]) == (view.env_steps, view.updates)
        if pool is not None and view.training is not None and runtime not in IN_PLACE:
            assert pool.get_buffer_stats()["run"] == view.training.memory
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
        require_filled(pool, learned["env_steps"], in_place=runtime in IN_PLACE)
    if runtime in IN_PLACE:
        loop.run().raise_for_fault()
        again = environment.get_environment_stats()
        assert again["steps"] == LENGTH * again["episodes"] >= stats["steps"] + STEPS
        assert agent.get_training_stats()["updates"] >= 2 * learned["updates"]


def require_filled(pool: ReplayBufferPool, steps: int, *, in_place: bool) -> None:
    stats = pool.get_buffer_stats()
    if in_place:
        assert stats["buffers"][0]["added"] == steps
        assert pool.get_total_experiences() == min(1000, steps)
        assert "run" not in stats, "what it tells of itself is all there is"
    else:
        assert stats["run"]["size"] == min(1000, steps), "where the learner is"
        assert stats["total_experiences"] == 0, "nothing is in the pool of this process"

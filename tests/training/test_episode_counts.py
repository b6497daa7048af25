"""A run of N episodes plays N episodes, on every runtime and with every kind of memory, and steps no environment beyond
its share. In mode async actors run freely: the learner uses the first N episodes and nothing after them.
"""

from __future__ import annotations

import multiprocessing
import os
import signal

import gymnasium as gym
import numpy as np
import pytest

import steppe
from steppe import (
    AsyncMainLoop,
    DistributedAgent,
    DistributedEnvironment,
    MainLoop,
    ParameterServer,
    ReplayBufferPool,
)
from steppe.params.rounds import Rounds
from steppe.records.run_directory import RunDirectory
from steppe.records.view import RunView
from tests.support.cases import rest_slow
from tests.support.kafka_runs import on

pytestmark = pytest.mark.integration

SHORT = {"evaluation.episodes": 2}


class Counting(gym.Wrapper):
    """Counts steps and episode ends of all instances in this process."""

    steps = ends = 0

    def step(self, action):
        found = super().step(action)
        Counting.steps += 1
        Counting.ends += bool(found[2] or found[3])
        return found


class CountingLake(gym.Wrapper):
    """A frozen lake that counts the episodes of all instances in this process."""

    ends = 0

    def __init__(self):
        super().__init__(gym.make("FrozenLake-v1"))

    def step(self, action):
        found = super().step(action)
        CountingLake.ends += bool(found[2] or found[3])
        return found


def view_of(path: object) -> RunView:
    view = RunView(RunDirectory.open(path))
    view.refresh()
    return view


def counted_cartpole() -> gym.Env:
    return Counting(gym.make("CartPole-v1"))


@pytest.mark.parametrize(
    ("algo", "workers", "config", "total"),
    [
        ("ppo", 4, {}, 60),
        ("ppo", 3, {"envs": 2, "segment_steps": 32}, 7),
        ("ppo", 1, {}, 1),
        ("ppo", 2, {"runtime": "processes", "segment_steps": 32}, 10),
        ("dqn", 2, {"learning_starts": 64}, 13),
        ("q-learning", 2, {}, 25),
        ("r2d2", 1, {"learning_starts": 64}, 5),
    ],
)
def test_a_run_plays_the_requested_episodes(algo: str, workers: int, config: dict, total: int) -> None:
    env = "FrozenLake-v1" if algo == "q-learning" else "CartPole-v1"
    rarely = {"update_frequency": 64} if algo in ("dqn", "r2d2") else {}
    agent = DistributedAgent(algo, seed=0, **rarely)
    loop = MainLoop(DistributedEnvironment(env, workers), None, agent, config=SHORT | config)
    summary = loop.run_training(total_episodes=total, max_steps_per_episode=100)
    assert summary["reason"] == "episodes_done"
    assert loop.get_training_progress()["episode"] == loop.episode == total
    assert view_of(summary["path"]).episodes == total


def test_no_environment_is_stepped_beyond_its_share() -> None:
    Counting.steps = Counting.ends = 0
    environment = DistributedEnvironment(counted_cartpole, 4, envs_per_worker=2, runtime="inline")
    loop = MainLoop(environment, None, DistributedAgent("ppo", seed=0), config={"evaluation.episodes": 2})
    seen = []
    summary = loop.run_training(total_episodes=20, callbacks=[lambda view: seen.append(view.episodes)])
    assert max(seen) <= 20
    judged = 2 * len(view_of(summary["path"]).evaluations)
    assert 20 + judged <= Counting.ends <= 20 + judged + 2, (
        "evaluations may have played an episode more than they count"
    )


@pytest.mark.parametrize("in_rounds", [False, True])
def test_workers_that_push_gradients_play_the_requested_episodes(in_rounds: bool) -> None:
    environment = DistributedEnvironment("CartPole-v1", 3, runtime="inline")
    agent = DistributedAgent("a2c", seed=0).bind(environment)
    server = ParameterServer(
        agent.get_policy_parameters(), "weighted", 3 if in_rounds else 1, rounds=Rounds(synchronous=in_rounds)
    )
    loop = MainLoop(environment, None, agent, server, config=SHORT)
    loop.run_training(total_episodes=20)
    assert loop.episode == 20
    assert np.isfinite(server.weights().buffer.view(np.float32)).all()


@pytest.mark.parametrize("runtime", rest_slow("inline", "processes"))
def test_workers_of_an_asynchronous_loop_play_the_requested_episodes(runtime: str) -> None:
    environment = DistributedEnvironment("CartPole-v1", 2, runtime=runtime)
    agent = DistributedAgent("a3c", seed=0).bind(environment)
    loop = AsyncMainLoop(environment, None, agent, None, num_workers=3, config=SHORT)
    summary = loop.run_training(total_episodes=60, max_steps_per_episode=50)
    assert summary["reason"] == "episodes_done"
    assert loop.episode == view_of(summary["path"]).episodes == 60
    assert environment.get_environment_stats()["episodes"] == 60


@pytest.mark.parametrize(
    ("env", "algo", "runtime", "envs", "total"),
    rest_slow(
        ("FrozenLake-v1", "q-learning", "inline", 4, 60),
        ("steppe/TicTacToe-v0", "q-learning", "inline", 64, 1000),
        ("FrozenLake-v1", "q-learning", "processes", 4, 60),
        ("Taxi-v4", "sarsa", "inline", 2, 7),
        ("CliffWalking-v1", "n-step-q", "processes", 3, 31),
        ("steppe/TicTacToe-v0", "q-learning", "processes", 64, 30),
    ),
)
def test_workers_that_share_a_table_play_the_requested_episodes(
    env: str, algo: str, runtime: str, envs: int, total: int
) -> None:
    environment = DistributedEnvironment(env, 3, runtime=runtime)
    agent = DistributedAgent(algo, seed=0).bind(environment)
    loop = AsyncMainLoop(environment, None, agent, None, num_workers=3, config=SHORT | {"envs": envs})
    summary = loop.run_training(total_episodes=total, max_steps_per_episode=50)
    assert summary["reason"] == "episodes_done"
    assert loop.episode == view_of(summary["path"]).episodes == total
    assert environment.get_environment_stats()["episodes"] == total


@pytest.mark.slow
def test_workers_that_share_a_table_by_messages_play_the_requested_episodes() -> None:
    """On MPI; tests/runtimes/ray/world_suite.py does it on Ray, on an existing cluster."""
    settings = {"algo": "q-learning", "mode": "workers", "actors": 3, "envs": 4, "episodes": 60, "runtime": "mpi"}
    result = steppe.train("FrozenLake-v1", **settings, **SHORT)
    assert result.summary["reason"] == "episodes_done"
    assert view_of(result.path).episodes == 60


def test_workers_that_share_a_table_step_no_environment_beyond_its_share() -> None:
    CountingLake.ends = 0
    environment = DistributedEnvironment(CountingLake, 2, runtime="inline")
    agent = DistributedAgent("q-learning", seed=0).bind(environment)
    loop = AsyncMainLoop(environment, None, agent, None, num_workers=2, config=SHORT | {"envs": 4})
    summary = loop.run_training(total_episodes=20)
    judged = 2 * len(view_of(summary["path"]).evaluations)
    assert loop.episode == 20
    assert 20 + judged <= CountingLake.ends <= 20 + judged + 2, (
        "evaluations may have played an episode more than they count"
    )


def test_a_resumed_run_plays_the_remaining_episodes() -> None:
    settings = {
        "episodes": 100,
        "seed": 1,
        "envs": 2,
        "segment_steps": 32,
        "evaluation.episodes": 2,
        "runtime": "inline",
    }
    whole = steppe.train("CartPole-v1", **settings)
    stopped = steppe.train("CartPole-v1", callbacks=[lambda view: True], **settings)
    assert stopped.summary["reason"] == "stopped_by_callback"
    resumed = steppe.resume(stopped.path)
    assert view_of(whole.path).episodes == 100
    assert resumed.summary["weights_sha256"] == whole.summary["weights_sha256"]


@pytest.mark.parametrize(("algo", "runtime"), rest_slow(("dqn", "inline"), ("ppo", "inline"), ("ppo", "processes")))
def test_the_learner_uses_the_requested_episodes_of_free_running_actors(algo: str, runtime: str) -> None:
    """Segments of eight environments hold several episodes each, so without masking the last group would have too many."""
    environment = DistributedEnvironment("CartPole-v1", 2, envs_per_worker=8, runtime=runtime)
    agent, pool = DistributedAgent(algo, seed=0), ReplayBufferPool(1, 5000) if algo == "dqn" else None
    loop = MainLoop(environment, pool, agent, config=SHORT | {"mode": "async", "segment_steps": 128})
    seen = []
    summary = loop.run_training(total_episodes=7, callbacks=[lambda view: seen.append(view.episodes)])
    assert summary["reason"] == "episodes_done"
    assert summary["episodes"] == loop.episode == view_of(summary["path"]).episodes == max(seen) == 7
    stats = agent.get_training_stats()
    assert (stats["episodes"], stats["env_steps"]) == (7, summary["env_steps"])
    assert environment.get_environment_stats()["episodes"] > 7, "they had played more before the learner looked"
    if pool is not None:
        assert pool.get_buffer_stats()["buffers"][0]["added"] == summary["env_steps"]


@pytest.mark.slow
def test_the_learner_uses_the_requested_episodes_of_actors_in_other_processes(kafka: str) -> None:
    settings = {"mode": "async", "actors": 2, "envs": 8, "segment_steps": 64, "episodes": 30}
    result = steppe.train("CartPole-v1", **settings, **on(kafka), **SHORT)
    assert result.summary["reason"] == "episodes_done"
    assert result.summary["episodes"] == view_of(result.path).episodes == 30


class KillOnce:
    """An observer that kills an actor with -9 once the learner has counted some episodes."""

    killed = False

    def __call__(self, view: RunView) -> None:
        if not self.killed and view.episodes > 50:
            (victim,) = [child for child in multiprocessing.active_children() if child.name == "steppe-actor-1"]
            os.kill(victim.pid, signal.SIGKILL)
            self.killed = True


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["async", "sync"])
def test_the_episodes_of_a_killed_actor_count_once(mode: str) -> None:
    settings = {"mode": mode, "actors": 2, "envs": 8, "segment_steps": 32, "episodes": 2000, "runtime": "processes"}
    kill = KillOnce()
    result = steppe.train("CartPole-v1", callbacks=[kill], **settings, **SHORT)
    view = view_of(result.path)
    assert kill.killed
    assert (result.summary["reason"], view.actor_restarts) == ("episodes_done", 1)
    assert result.summary["episodes"] == view.episodes == 2000
    assert view.played_episodes >= 2000
    assert mode == "async" or view.played_episodes == 2000


def test_an_async_run_with_an_episode_limit_can_be_repeated() -> None:
    settings = {"mode": "async", "actors": 2, "envs": 4, "segment_steps": 64, "episodes": 9, "runtime": "inline"}
    original = steppe.train("CartPole-v1", **settings, **{"flow.record_arrivals": True}, **SHORT)
    again = steppe.rerun(original.path)
    assert again.summary["matched"]
    assert again.summary["episodes"] == 9

"""MainLoop with components: the same training as `steppe.train`, in this process or others, stopped, paused, saved."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

import steppe
from steppe import DistributedAgent, DistributedEnvironment, MainLoop, ReplayBufferPool
from steppe.core.contracts.errors import ConfigError, EnvironmentFault, FactoryError, RunNotFound, UsageError
from steppe.records.run_directory import RunDirectory

pytestmark = pytest.mark.integration

IDENTITY = "steppe/Identity-v0"
SHORT = {"evaluation.episodes": 2, "segment_steps": 16, "envs": 2}


def environment(workers: int = 1, env: str = IDENTITY, **given) -> DistributedEnvironment:
    return DistributedEnvironment(env, workers, **given)


@pytest.mark.parametrize(
    ("algo", "settings"),
    [
        ("ppo", {"learning_rate": 0.001, "minibatch_size": 32}),
        ("dqn", {"learning_rate": 0.001, "batch_size": 32, "samples_per_insert": 8.0, "target_every": 100,
                 "buffer_size": 600, "learning_starts": 50}),
    ],
)  # fmt: skip
def test_components_learn_bit_for_bit_what_train_learns(algo: str, settings: dict) -> None:
    trained = steppe.train(IDENTITY, algo=algo, runtime="inline", actors=2, steps=500, seed=3, **SHORT, **settings)
    more = {"learning_starts": 50} if algo == "dqn" else {}
    pool = ReplayBufferPool(1, 600) if algo == "dqn" else None
    loop = MainLoop(environment(2), pool, DistributedAgent(algo), config={"steps": 500, "seed": 3, **SHORT, **more})
    assert (loop.config.runtime, loop.config.mode, loop.config.actors) == ("processes", "sync", 2)
    result = loop.run()
    assert result.state == "SUCCEEDED"
    assert result.weights_sha256 == trained.weights_sha256
    assert loop.agent.agent.weights().sha256() == result.weights_sha256, "the agent that was given did the work"
    if pool is not None:
        assert pool.get_total_experiences() == 512


def test_workers_that_cannot_be_imported_stay_in_this_process() -> None:
    loop = MainLoop(environment(2, lambda: gym.make("CartPole-v1")), None, DistributedAgent("ppo"), config=SHORT)
    assert loop.config.runtime == "inline"
    assert MainLoop(environment(1), None, DistributedAgent("ppo"), config=SHORT).config.runtime == "inline"
    assert MainLoop(environment(3), None, DistributedAgent("ppo"), config=SHORT).config.runtime == "processes"


def test_with_a_learner_in_another_process_the_agent_gets_the_final_weights() -> None:
    loop = MainLoop(
        environment(2), None, DistributedAgent("ppo"), config={"steps": 200, "runtime": "processes", **SHORT}
    )
    first = loop.run()
    assert loop.agent.agent.weights().sha256() == first.weights_sha256
    here = MainLoop(environment(2), None, DistributedAgent("ppo"), config={"steps": 200, **SHORT})
    assert here.run().weights_sha256 == first.weights_sha256
    second, second_here = loop.run(), here.run()
    assert second.weights_sha256 != first.weights_sha256
    assert second.weights_sha256 == second_here.weights_sha256, "a second run begins with what the first one learned"


def test_run_training_counts_episodes() -> None:
    loop = MainLoop(environment(1), None, DistributedAgent("ppo"), config=SHORT)
    seen: list[dict] = []
    summary = loop.run_training(40, 10, 10, 10, callbacks=[lambda view: seen.append(loop.get_training_progress())])
    assert (summary["state"], summary["reason"], summary["mode"]) == ("SUCCEEDED", "episodes_done", "sync")
    assert 40 <= loop.episode <= 44
    assert 400 <= summary["env_steps"] < 400 + 32, "episodes are cut after ten steps"
    events = [record["kind"] for _, record in RunDirectory.open(summary["path"]).store.read("events")]
    assert events.count("checkpoint") == 4, "after about 10, 20 and 30 episodes, and at the end"
    judged = [record["env_steps"] for _, record in RunDirectory.open(summary["path"]).store.read("metrics.evaluations")]
    assert 3 <= len(judged) <= 5
    assert seen
    assert loop.get_training_progress()["state"] == "SUCCEEDED"
    assert loop.get_training_progress()["episode"] == loop.episode


def test_a_failing_environment_raises_from_run_training() -> None:
    config = steppe.EnvConfig(kwargs={"at_step": 20})
    loop = MainLoop(environment(1, "steppe/Failing-v0", config=config), None, DistributedAgent("ppo"), config=SHORT)
    with pytest.raises(EnvironmentFault, match="made to fail"):
        loop.run_training(100)
    assert loop.get_training_progress()["state"] == "FAILED"


def test_single_episodes_can_be_run_with_the_components() -> None:
    pool = ReplayBufferPool(2, 500, use_prioritized=True)
    with environment(1, runtime="inline") as world:
        agent = DistributedAgent("dqn", batch_size=8, update_frequency=4)
        loop = MainLoop(world, pool, agent, config={"learning_starts": 20, **SHORT})
        told = [loop.run_single_episode() for _ in range(4)]
        assert [one["length"] for one in told] == [16] * 4
        assert [one["episode"] for one in told] == [1, 2, 3, 4]
        assert [one["updates"] for one in told] == [0, 4, 4, 4], "one update per 4 steps after 20 transitions"
        assert pool.get_total_experiences() == 64
        assert "loss" in told[-1]
        on_policy = MainLoop(world, None, DistributedAgent("ppo"))
        before = on_policy.agent.get_policy_parameters()
        assert on_policy.run_single_episode()["updates"] > 0
        after = on_policy.agent.get_policy_parameters()
        assert any(not np.array_equal(before[name], after[name]) for name in before)
        assert set(on_policy.evaluate_policy(3)) >= {"return_mean", "return_std", "episodes"}


@pytest.mark.parametrize(
    "pool",
    [{"num_buffers": 1}, {"num_buffers": 3, "use_prioritized": True, "routing": "least_filled"}],
    ids=["one", "three"],
)
def test_a_checkpoint_of_the_loop_restores_agent_and_pool(tmp_path: Path, pool: dict[str, Any]) -> None:
    def make(world: DistributedEnvironment) -> MainLoop:
        agent = DistributedAgent("dqn", batch_size=8)
        buffers = ReplayBufferPool(buffer_capacity=500, seed=1, **pool)
        return MainLoop(world, buffers, agent, config={"learning_starts": 20, **SHORT})

    with environment(1, runtime="inline") as world:
        loop = make(world)
        for _ in range(3):
            loop.run_single_episode()
        assert loop.save_checkpoint(3, tmp_path / "kept") == tmp_path / "kept"
        other = make(world)
        assert other.load_checkpoint(tmp_path / "kept") == 3
        assert other.replay_buffer.get_total_experiences() == 48
        batches = loop.replay_buffer.sample_batch(8), other.replay_buffer.sample_batch(8)
        metrics = loop.agent.learn_from_batch(batches[0]), other.agent.learn_from_batch(batches[1])
        np.testing.assert_equal(metrics[0], metrics[1])
        assert loop.save_checkpoint(3).exists()
    with pytest.raises(RunNotFound, match="no checkpoint of a loop"):
        loop.load_checkpoint(tmp_path / "nothing")


@pytest.mark.parametrize("runtime", ["inline", "processes"])
def test_pause_resume_and_stop_from_another_thread(runtime: str) -> None:
    loop = MainLoop(environment(1), None, DistributedAgent("ppo"), config={"runtime": runtime, **SHORT})
    states: list[str] = []
    trained, paused, resumed = threading.Event(), threading.Event(), threading.Event()
    rested: list[int] = []

    def watch(view: steppe.RunView) -> None:
        states.append(view.state)
        if view.updates:
            trained.set()
        if view.state == "PAUSED":
            rested.append(view.updates)
            if len(rested) > 3:
                paused.set()
        if paused.is_set() and view.state == "RUNNING":
            resumed.set()

    def direct() -> None:
        assert trained.wait(60)
        loop.pause_training()
        assert paused.wait(60)
        loop.resume_training()
        assert resumed.wait(60)
        loop.stop_training()

    director = threading.Thread(target=direct)
    director.start()
    summary = loop.run_training(10**6, callbacks=[watch])
    director.join()
    assert (summary["state"], summary["reason"]) == ("STOPPED", "stop_requested")
    assert rested[-1] - rested[1] == 0, "nothing is learned while paused"
    assert summary["updates"] > rested[-1]
    with pytest.raises(UsageError, match="no training under way to pause"):
        loop.pause_training()


def test_the_agent_cannot_be_used_while_it_learns_in_another_process() -> None:
    loop = MainLoop(environment(1), None, DistributedAgent("ppo"), config={"runtime": "processes", **SHORT})
    refusals: list[str] = []

    def callback(view: steppe.RunView) -> bool:
        with pytest.raises(UsageError, match="the learner works in another process") as refused:
            loop.evaluate_policy(1)
        refusals.append(str(refused.value))
        return True

    loop.run_training(10**6, callbacks=[callback])
    assert refusals
    assert loop.evaluate_policy(1)["episodes"] == 1


def test_lambdas_stay_inline() -> None:
    world = DistributedEnvironment(lambda: gym.make("CartPole-v1"), 1)
    result = MainLoop(world, None, DistributedAgent("ppo"), config={"steps": 64, **SHORT}).run()
    assert result.state == "SUCCEEDED"
    with pytest.raises(FactoryError, match="another process cannot import"):
        steppe.train(lambda: gym.make("CartPole-v1"), runtime="processes", steps=64)
    with pytest.raises(FactoryError, match="another process cannot import"):
        MainLoop(world, None, DistributedAgent("ppo"), config={"runtime": "processes"}).run()


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: MainLoop(environment(), ReplayBufferPool(1, 10), DistributedAgent("ppo")), "keeps no replay buffer"),
        (
            lambda: MainLoop(environment(2), None, DistributedAgent("ppo"), config={"actors": 3}),
            "actors is 2 by the environment, but 3 by the configuration",
        ),
        (
            lambda: MainLoop(environment(), None, DistributedAgent("ppo"), config={"algo": "dqn"}),
            "algo|minibatch_size",
        ),
        (
            lambda: MainLoop(environment(), None, DistributedAgent("ppo"), config={"learning_rate": 0.5}),
            "learning_rate is 0.001 by the agent, but 0.5 by the configuration",
        ),
        (
            lambda: MainLoop(
                environment(), ReplayBufferPool(2, 50), DistributedAgent("dqn"), config={"buffer_size": 99}
            ),
            "buffer_size is 100 by the replay buffer, but 99 by the configuration",
        ),
        (
            lambda: MainLoop(
                environment(), ReplayBufferPool(2, 50), DistributedAgent("dqn", config={"buffer_size": 60})
            ),
            "buffer_size is 60 by the agent, but 100 by the replay buffer",
        ),
        (
            lambda: MainLoop(environment(seed=1), None, DistributedAgent("ppo", seed=2)),
            "seed is 1 by the environment, but 2 by the agent",
        ),
        (lambda: MainLoop(environment(), None, DistributedAgent("ppo"), object()), "violates type hint"),
        (lambda: MainLoop(environment(), None, DistributedAgent("ppo"), config={"stpes": 3}), "Did you mean 'steps'"),
        (lambda: MainLoop(environment(), None, DistributedAgent("ppo")).run_training(0), "at least 1"),
    ],
)
def test_incompatible_components_are_refused_in_one_sentence(make, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=sentence):
        make()
    assert not (tmp_path / "runs").exists(), "nothing is written"


def test_settings_of_the_configuration_reach_the_components() -> None:
    world, agent = environment(), DistributedAgent("ppo")
    loop = MainLoop(world, None, agent, config={"gamma": 0.5, "environment.time_limit": 7, "name": "mine"})
    assert agent.config.gamma == 0.5
    assert world.spec.max_episode_steps == 7
    assert loop.sources["agent.gamma"] == "config"
    assert loop.sources["agent.learning_rate"] == "parts"


@pytest.mark.parametrize("runtime", ["inline", "processes"])
def test_statistics_of_the_components_include_all_runs_of_a_loop(runtime: str) -> None:
    world, agent = environment(2, runtime=runtime), DistributedAgent("dqn", seed=0)
    pool = ReplayBufferPool(1, 600)
    loop = MainLoop(world, pool, agent, config={"learning_starts": 50, **SHORT})
    seen: list[dict[str, Any]] = []
    told = loop.run_training(6, callbacks=[lambda view: seen.append(world.get_environment_stats())])
    after, learned = world.get_environment_stats(), agent.get_training_stats()
    assert [stats["steps"] for stats in seen] == sorted(stats["steps"] for stats in seen)
    assert (after["steps"], after["episodes"]) == (told["env_steps"], 6)
    assert after["length_mean"] == 16
    assert (learned["updates"], learned["env_steps"]) == (told["updates"], told["env_steps"])
    assert pool.get_buffer_stats()["total_experiences"] == told["env_steps"]
    loop.run_training(4)
    assert world.get_environment_stats()["episodes"] == 10
    world.generate_experiences(agent, 2)
    assert world.get_environment_stats()["episodes"] == 12
    world.shutdown()

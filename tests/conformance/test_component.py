"""The five components of the house pass the suites that are shipped to users, and so do a user's own; a loop takes both."""

from __future__ import annotations

import threading

import pytest

from steppe import DistributedAgent, DistributedEnvironment, MainLoop, ParameterServer, ReplayBufferPool
from steppe.compose.async_loop import AsyncMainLoop
from steppe.core.contracts.errors import ConfigError, UsageError
from steppe.testing.components import (
    AgentPartConformance,
    EnvironmentPartConformance,
    LoopPartConformance,
    ParameterPartConformance,
    ReplayPartConformance,
)
from tests.support.own_components import LENGTH, OwnAgent, OwnEnvironment, OwnPool, OwnServer

pytestmark = pytest.mark.integration

IDENTITY = "steppe/Identity-v0"


def environment():
    return DistributedEnvironment(IDENTITY, 1, runtime="inline", seed=0)


class TestOurEnvironment(EnvironmentPartConformance):
    def make_environment(self):
        return environment()

    def make_policy(self, environment):
        return DistributedAgent("ppo", seed=0)


class TestOwnEnvironment(EnvironmentPartConformance):
    def make_environment(self):
        return OwnEnvironment()

    def make_policy(self, environment):
        return OwnAgent()


class TestOurPool(ReplayPartConformance):
    def make_pool(self):
        return ReplayBufferPool(2, 100)


class TestOwnPool(ReplayPartConformance):
    def make_pool(self):
        return OwnPool()


class TestOurAgent(AgentPartConformance):
    algo = "dqn"

    def make_agent(self):
        self.environment = environment()
        return DistributedAgent(self.algo, 0.01, seed=0).bind(self.environment)

    def experiences(self, agent):
        return self.environment.generate_experiences(agent, 3)


class TestOurAgentOnPolicy(TestOurAgent):
    algo = "a2c"


class TestOurAgentWithEpochs(TestOurAgent):
    algo = "ppo"


class TestOwnAgent(AgentPartConformance):
    def make_agent(self):
        return OwnAgent()

    def experiences(self, agent):
        return OwnEnvironment(1).generate_experiences(agent, 4)


class TestOurServer(ParameterPartConformance):
    def make_server(self, initial):
        return ParameterServer(initial)


class TestOwnServer(ParameterPartConformance):
    def make_server(self, initial):
        return OwnServer(initial)


class TestOurLoop(LoopPartConformance):
    def make_loop(self):
        config = {"envs": 1, "segment_steps": 16, "evaluation.episodes": 2}
        return MainLoop(environment(), None, DistributedAgent("a2c", seed=0), config=config)


class TestOurLoopOverOwnParts(LoopPartConformance):
    def make_loop(self):
        return MainLoop(OwnEnvironment(), None, OwnAgent())


@pytest.mark.parametrize("kind", ["in order", "replay", "server", "replay and server"])
def test_a_loop_over_parts_of_a_users_own_learns(kind, tmp_path, monkeypatch):
    """200 episodes of five steps: every context has its own best answer in the end."""
    monkeypatch.chdir(tmp_path)
    world, agent = OwnEnvironment(), OwnAgent()
    pool = OwnPool() if "replay" in kind else None
    server = OwnServer(agent.get_policy_parameters(), at_once=2.0) if "server" in kind else None
    loop = MainLoop(world, pool, agent, server)
    assert loop.evaluate_policy()["return_mean"] < LENGTH
    told = loop.run_training(200, evaluation_frequency=50)
    assert (told["state"], told["reason"]) == ("SUCCEEDED", "episodes_done")
    assert told["eval_return_mean"] == LENGTH
    assert (told["episode"], told["env_steps"]) == (200, 200 * LENGTH)
    assert loop.get_training_progress()["state"] == "SUCCEEDED"
    if server is not None:
        assert server.accepted == told["updates"] > 50
    if pool is not None:
        assert pool.get_total_experiences() == 200 * LENGTH


@pytest.mark.parametrize(
    "parts",
    [
        lambda: (OwnEnvironment(), ReplayBufferPool(1, 2000), OwnAgent(), None),
        lambda: (environment(), OwnPool(), DistributedAgent("dqn", batch_size=8, seed=0, config={"learning_starts": 8}).bind(environment()), None),
        lambda: (environment(), None, (agent := DistributedAgent("a2c", seed=0).bind(environment())), OwnServer(agent.get_policy_parameters(), 0.01)),
    ],
    ids=["our pool", "own pool", "own server"],
)  # fmt: skip
def test_one_part_may_be_another(parts):
    loop = MainLoop(*parts())
    before = loop.agent.get_policy_parameters()
    assert loop.run_training(10, 16, 5, 5)["state"] == "SUCCEEDED"
    after = loop.agent.get_policy_parameters()
    assert any((before[name] != after[name]).any() for name in before)


def test_pause_resume_and_stop_by_hand():
    loop = MainLoop(OwnEnvironment(), None, OwnAgent())
    states, paused = [], threading.Event()

    def watch(progress):
        states.append(progress["state"])
        if len(states) == 5:
            loop.pause_training()
            paused.set()

    def direct():
        assert paused.wait(60)
        while loop.get_training_progress()["state"] != "PAUSED":
            training.join(0.01)
        loop.resume_training()
        loop.stop_training()

    training, director = threading.Thread(target=loop.run_training, args=(10**9,), kwargs={"callbacks": [watch]}), None
    director = threading.Thread(target=direct)
    training.start()
    director.start()
    training.join(60)
    director.join(60)
    assert loop.get_training_progress()["state"] == "STOPPED"
    with pytest.raises(UsageError, match="no training under way to stop"):
        loop.stop_training()


def test_what_only_parts_of_the_house_can_do():
    with pytest.raises(ConfigError, match="config is for DistributedEnvironment and DistributedAgent"):
        MainLoop(OwnEnvironment(), None, OwnAgent(), config={"steps": 3})
    with pytest.raises(UsageError, match="your own parts are trained manually"):
        MainLoop(OwnEnvironment(), None, OwnAgent()).plan()
    with pytest.raises(ConfigError, match="violates type hint"):
        MainLoop(object(), None, OwnAgent())
    with pytest.raises(ConfigError, match="they must be built-in"):
        AsyncMainLoop(environment(), OwnPool(), DistributedAgent("dqn"), None)
    with pytest.raises(ConfigError, match="at least 1"):
        MainLoop(OwnEnvironment(), None, OwnAgent()).run_training(0)

"""Workers and their keeper over one table, here in one process: what they learn, count, give back and report."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steppe.algorithms import make_agent
from steppe.algorithms.tabular.agent import ClassicAgent
from steppe.classic import OptimalQLearning, tictactoe
from steppe.core.config.references import make_reference
from steppe.core.config.run import EnvConfig, resolve_config
from steppe.core.contracts.transport import ACTORS, EVENTS, TRAINING
from steppe.core.system.timing import RunClock
from steppe.envs import make_segment_env, probe
from steppe.roles.context import FINISH, PAUSE, RUN, STOP, Context
from steppe.roles.learner import RunLimits
from steppe.roles.tabular.learner import TabularLearner
from steppe.roles.tabular.rollouts import (
    EpisodeTabularRollout,
    GameTabularRollout,
    VectorTabularRollout,
    make_game_trainer,
)
from steppe.roles.tabular.worker import TabularWorker
from steppe.transport.local import LocalBoard, LocalWeights
from steppe.transport.tables.shared import LocalTable
from tests.support.tabular_envs import Corridor, Maze

pytestmark = pytest.mark.unit
INDEX = EnvConfig(observations="index")


class House:
    """A keeper and workers that take turns."""

    def __init__(self, agent, crews, *, chunk=32, limits=None):
        self.asked, self.board, self.weights, self.table = RUN, LocalBoard(), LocalWeights(), LocalTable()
        self.limits, self.saved = limits or RunLimits(steps=1_000), []
        self.keeper = TabularLearner(agent, len(crews), self.limits, self._save, self.context("learner"))
        self.workers = [
            TabularWorker(number, crew, chunk, self.limits.steps, self.context(f"worker-{number}"))
            for number, crew in enumerate(crews)
        ]
        for worker in self.workers:
            worker.claims_episodes = self.limits.episodes is not None

    def context(self, name):
        none = object()
        return Context("run", name, none, self.weights, self.board, lambda: self.asked, RunClock(), table=self.table)

    def _save(self, weights, state, counters):
        self.saved.append((weights.copy(), state, counters))

    def run(self):
        while not self.keeper.done:
            for role in (*self.workers, self.keeper):
                role.step()
        for role in (*self.workers, self.keeper):
            role.close()
        return self.keeper.agent.algorithm.q_table


def classic(env, **options):
    config = {"env": "x", "algo": make_reference(ClassicAgent), "agent.learner": make_reference(OptimalQLearning)}
    made = resolve_config(("test", {**config, "agent.options": options})).config.agent
    return ClassicAgent(made, probe(make_reference(env), INDEX), seed=0)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 1000), chunk=st.integers(1, 200), steps=st.integers(50, 800))
def test_one_worker_learns_what_a_learner_alone_does(seed, chunk, steps):
    alone, env = OptimalQLearning(6, 3, learning_rate=0.2, epsilon=0.5, seed=seed), Maze()
    env.reset(seed=seed)
    while alone.step_count < steps:
        alone.train_episode(env)
    agent = classic(Maze, learning_rate=0.2, epsilon=0.5)
    agent.algorithm.words = type(alone.words)(seed)
    house = House(
        classic(Maze), [EpisodeTabularRollout(agent, Maze(), seed)], chunk=chunk, limits=RunLimits(steps=steps)
    )  # fmt: skip
    np.testing.assert_array_equal(house.run(), alone.q_table)
    assert house.keeper.totals.steps == alone.step_count
    assert house.keeper.totals.episodes == alone.episode_count
    assert agent.algorithm.epsilon == alone.epsilon


@pytest.mark.parametrize("num_workers", [1, 3])
@pytest.mark.parametrize("algo", ["q-learning", "double-q", "n-step-q"])
def test_workers_come_to_the_values_of_value_iteration(algo, num_workers):
    """Exploring at random, with a learning rate that falls: every value within 0.25 after 60,000 steps (seed 0)."""
    options = {"learning_rate": 0.03, "learning_rate_end": 0.0, "epsilon_end": 1.0, "gamma": 0.8}
    if algo == "n-step-q":
        options |= {"n_step": 1}
    config = resolve_config(("test", {"env": make_reference(Maze), "algo": algo, **options})).config
    spec = probe(config.env, config.environment)
    agents = [make_agent(algo, config.agent, spec, seed=number) for number in range(num_workers + 1)]
    crews = [
        VectorTabularRollout(agent, make_segment_env(config.env, config.environment, 8, np.random.SeedSequence(n)), 16, np.random.SeedSequence(n))
        for n, agent in enumerate(agents[1:])
    ]  # fmt: skip
    for number, crew in enumerate(crews):
        crew.agent.begin(8, np.random.default_rng(number))
    table = House(agents[0], crews, chunk=128, limits=RunLimits(steps=60_000)).run()
    error = np.abs(table[:-1] - Maze().exact(0.8))
    assert error.max() < 0.25, error.round(2)


def lake_crew(vector, number):
    config = resolve_config(
        ("test", {"env": "FrozenLake-v1", "algo": "q-learning", "environment.vector": vector})
    ).config
    agent = make_agent("q-learning", config.agent, probe(config.env, config.environment), seed=number)
    agent.begin(5, np.random.default_rng(number))
    seeds = np.random.SeedSequence(number)
    return VectorTabularRollout(agent, make_segment_env(config.env, config.environment, 5, seeds), 16, seeds)


def game_crew(number):
    config = resolve_config(("test", {"env": "steppe/TicTacToe-v0", "algo": "q-learning"})).config
    agent = make_agent("q-learning", config.agent, probe(config.env, config.environment), seed=number)
    return GameTabularRollout(agent, make_game_trainer(agent, config.env, config.environment, 16, number))


@pytest.mark.parametrize(
    "crew_of",
    [
        lambda number: lake_crew("loop", number),
        lambda number: lake_crew("auto", number),
        game_crew,
        lambda number: EpisodeTabularRollout(classic(Maze), Maze(), number),
    ],
    ids=["loop", "vector", "games", "episodes"],
)
@pytest.mark.parametrize("total", [1, 23, 700])
def test_workers_play_as_many_episodes_as_asked_for(crew_of, total):
    crews = [crew_of(number) for number in range(3)]
    house = House(crew_of(9).agent, crews, chunk=80, limits=RunLimits(episodes=total))
    house.run()
    reports = [record for _, record in house.board.read(ACTORS)]
    assert house.keeper.totals.episodes == total
    assert sum(record["num_episodes"] for record in reports) == total
    assert sum(record["env_steps"] for record in reports if record["state"] == "stopped") == house.keeper.totals.steps


def test_an_environment_that_waited_begins_its_episode_where_it_was():
    """The environment objects to moves that it did not allow, and steps that it waited are in no episode's length."""
    agent = classic(Corridor, epsilon=1.0, epsilon_decay=1.0)
    agent.begin(2, np.random.default_rng(0))
    seeds = np.random.SeedSequence(0)
    crew = VectorTabularRollout(agent, make_segment_env(make_reference(Corridor), INDEX, 2, seeds), 64, seeds)
    left, steps, finished = 0, 0, []
    for more in (1, 2, 1, 2, 1, 2):
        left += more
        while left:
            taken = crew.run(10_000, max_episodes=left)
            left -= taken.episodes
            steps, finished = steps + taken.steps, finished + taken.finished
    assert len(finished) == 9
    assert sum(length for _, length in finished) == steps
    assert [total for total, _ in finished] == [1.0] * 9


def test_compiled_games_are_learned_together():
    config = resolve_config(("test", {"env": "steppe/TicTacToe-v0", "algo": "q-learning"})).config
    spec = probe(config.env, config.environment)
    agents = [make_agent("q-learning", config.agent, spec, seed=number) for number in range(3)]
    crews = [
        GameTabularRollout(agent, make_game_trainer(agent, config.env, config.environment, 256, n))
        for n, agent in enumerate(agents[1:])
    ]
    house = House(agents[0], crews, chunk=32 * 256, limits=RunLimits(steps=400_000))
    table = house.run()
    totals = house.keeper.totals
    assert 400_000 <= totals.steps < 400_000 + 2 * 256
    touched = np.flatnonzero(table.any(axis=1))
    assert set(touched) <= set(np.flatnonzero(tictactoe().reachable & (tictactoe().legal > 0)))
    assert len(touched) > 3_000
    for agent in agents[1:]:
        np.testing.assert_allclose(agent.table[touched], table[touched], atol=0.5)


def test_games_that_are_set_up_differently_are_not_compiled():
    spec = probe("steppe/TicTacToe-v0", INDEX)
    agent = make_agent(
        "q-learning", resolve_config(("t", {"env": "x", "algo": "q-learning"})).config.agent, spec, seed=0
    )
    for options in ({"vector": "loop"}, {"reward_scale": 2.0}, {"time_limit": 3}):
        assert make_game_trainer(agent, "steppe/TicTacToe-v0", EnvConfig(observations="index", **options), 4, 0) is None
    assert make_game_trainer(agent, "Taxi-v4", INDEX, 4, 0) is None
    sarsa = make_agent("sarsa", resolve_config(("t", {"env": "x", "algo": "sarsa"})).config.agent, spec, seed=0)
    assert make_game_trainer(sarsa, "steppe/TicTacToe-v0", INDEX, 4, 0) is None
    assert make_game_trainer(agent, "steppe/TicTacToe-v0", INDEX, 4, 0).num_games == 4


@pytest.mark.parametrize("kind", ["world", "episodes"])
def test_long_work_shows_life_and_ends_early_when_asked(kind):
    beats = []
    if kind == "episodes":
        crew = EpisodeTabularRollout(classic(Maze, epsilon=1.0), Maze(), 0)
    else:
        agent = make_agent(
            "q-learning",
            resolve_config(("t", {"env": "x", "algo": "q-learning"})).config.agent,
            probe(make_reference(Maze), INDEX),
            seed=0,
        )
        seeds = np.random.SeedSequence(0)
        crew = VectorTabularRollout(agent, make_segment_env(make_reference(Maze), INDEX, 2, seeds), 500, seeds)

    def on_step():
        beats.append(1)
        return len(beats) >= 30

    taken = crew.run(1_000, on_step)
    assert 0 < taken.steps <= 60
    assert len(beats) >= 30
    before = len(beats)
    crew.run(100, lambda: beats.append(1))
    assert len(beats) > before


def test_masks_are_kept_to():
    agent = classic(Corridor, epsilon=1.0)
    house = House(classic(Corridor), [EpisodeTabularRollout(agent, Corridor(), 0)], limits=RunLimits(episodes=20))
    house.run()  # the environment itself objects to moves that it did not allow
    assert house.keeper.totals.episodes >= 20


def test_reports_add_up_and_the_end_is_written_down():
    agent = classic(Corridor, epsilon=0.3)
    house = House(classic(Corridor), [EpisodeTabularRollout(agent, Corridor(), 0)])
    table = house.run().copy()
    actors = [record for _, record in house.board.read(ACTORS)]
    training = [record for _, record in house.board.read(TRAINING)]
    steps = house.keeper.totals.steps
    assert actors[-1]["state"] == "stopped"
    assert actors[-1]["env_steps"] == steps == training[-1]["env_steps"] == training[-1]["updates"]
    assert sum(record["num_episodes"] for record in actors) == house.keeper.totals.episodes
    assert training[-1]["final"]
    weights, state, counters = house.saved[-1]
    np.testing.assert_array_equal(weights.arrays()["q_table"], table)
    assert counters["env_steps"] == steps
    assert training[-1]["weights_sha256"] == weights.sha256()
    newest = house.weights.newer_than("policy", -1)
    np.testing.assert_array_equal(newest.arrays()["q_table"], table)
    assert (newest.env_steps, newest.episodes) == (steps, house.keeper.totals.episodes)
    again = House(
        classic(Corridor), [EpisodeTabularRollout(classic(Corridor), Corridor(), 1)], limits=RunLimits(steps=2_000)
    )
    again.keeper.restore(weights, state, counters)
    again.run()
    assert 2_000 <= again.keeper.totals.steps < 2_100
    assert again.keeper.totals.episodes > counters["episodes"]


def test_resting_ending_and_a_worker_that_comes_again():
    house = House(
        classic(Corridor),
        [EpisodeTabularRollout(classic(Corridor, epsilon=0.3), Corridor(), 0)],
        limits=RunLimits(steps=None),
    )
    worker = house.workers[0]
    assert not worker.step(), "there is no table yet"
    house.keeper.step()
    assert worker.step()
    house.asked = PAUSE
    assert not worker.step()
    house.asked = RUN
    house.table.claim(0, 500, 0.0)  # and is killed
    again = TabularWorker(
        0, EpisodeTabularRollout(classic(Corridor), Corridor(), 1), 32, None, house.context("worker-0")
    )
    assert again.step()
    (_, event) = house.board.read(EVENTS)[-1]
    assert event["kind"] == "warning"
    assert "the 500 steps that it had not merged are taken again" in event["details"]["message"]
    house.asked = FINISH
    assert not again.step()
    assert again.done
    house.asked = STOP
    house.keeper.step()
    assert house.keeper.done
    house.keeper.close()
    assert house.saved[-1][2]["env_steps"] == house.table.totals().steps
    assert house.board.read(TRAINING)[-1][1]["stats"]["lost_steps"] == 500

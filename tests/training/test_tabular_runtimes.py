"""The three runtimes of classic learners: the documented calls, what they learn, and what they refuse."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from steppe.classic import (
    SARSA,
    DistAsyncQLearning,
    DoubleQLearning,
    LinearSchedule,
    ListQLearning,
    NumpyQLearning,
    OptimalQLearning,
    ParallelQLearning,
    SingleThreadQLearning,
    TicTacToeEnv,
    TrainingStatistics,
    exact_return,
    tictactoe,
)
from steppe.core.contracts.errors import ConfigError, FactoryError, MissingExtra, NotFinite, RunFailed, UsageError
from tests.support.tabular_envs import Astray, Corridor, Doubles, Fatal, Maze, NotANumber, maze

pytestmark = pytest.mark.integration
GAMMA = 0.8


def test_the_documented_signatures():
    def shape(function):
        return [
            (p.name, p.default) for p in inspect.signature(function).parameters.values() if p.kind is not p.KEYWORD_ONLY
        ]

    empty = inspect.Parameter.empty
    assert shape(SingleThreadQLearning) == [("algorithm_class", OptimalQLearning), ("kwargs", empty)]
    assert shape(SingleThreadQLearning.train)[1:] == [("env", empty), ("episodes", None), ("steps", None)]
    assert shape(ParallelQLearning) == [
        ("algorithm_class", OptimalQLearning),
        ("num_processes", None),
        ("kwargs", empty),
    ]
    assert shape(ParallelQLearning.train)[1:] == [("env_factory", empty), ("steps", empty), ("steps_per_sync", 1000)]
    assert shape(DistAsyncQLearning) == [
        ("algorithm_class", OptimalQLearning), ("batch_size", 32), ("sync_frequency", 100), ("kwargs", empty),
    ]  # fmt: skip
    assert shape(DistAsyncQLearning.train)[1:] == [("env", empty), ("steps", empty)]


def test_one_core_by_episodes_and_by_steps():
    runtime = SingleThreadQLearning(OptimalQLearning, state_size=5, action_size=2, epsilon=0.3, seed=1)
    stats = runtime.train(Corridor(), episodes=30)
    assert isinstance(stats, TrainingStatistics)
    assert stats is runtime.training_stats
    assert stats.get_summary()["total_episodes"] == runtime.algorithm.episode_count == 30
    assert sum(stats.episode_lengths) == runtime.algorithm.step_count
    before = runtime.algorithm.step_count
    runtime.train(Corridor(), steps=100)
    assert before + 100 <= runtime.algorithm.step_count < before + 200
    alone = OptimalQLearning(5, 2, epsilon=0.3, seed=1)
    env = Corridor()
    for _ in range(30):
        alone.train_episode(env)
    repeated = SingleThreadQLearning(state_size=5, action_size=2, epsilon=0.3, seed=1)
    repeated.train(Corridor(), episodes=30)
    np.testing.assert_array_equal(repeated.algorithm.q_table, alone.q_table)


@pytest.mark.parametrize("kind", [OptimalQLearning, NumpyQLearning, ListQLearning, SARSA, DoubleQLearning, Doubles])
def test_one_core_with_every_learner_and_a_separate_environment_to_judge_in(kind):
    env = maze()
    runtime = SingleThreadQLearning(kind, state_size=6, action_size=3, epsilon=0.5, seed=0)
    judge = maze()
    judge.reset(seed=1)
    runtime.train(env, steps=4_000, validation_env=judge, validation_every=1_000, validation_episodes=30)
    steps, scores = zip(*runtime.validation, strict=True)
    assert len(steps) >= 4
    assert steps[-1] == runtime.algorithm.step_count
    assert runtime.training_stats.metrics["validation_return"] == list(scores)
    assert runtime.algorithm.epsilon > 0.0, "judging must not change exploration"
    with pytest.raises(ConfigError, match="make another"):
        runtime.train(env, steps=10, validation_env=env)


def test_bad_numbers():
    runtime = SingleThreadQLearning(state_size=5, action_size=2)
    for given in ({}, {"episodes": 1, "steps": 1}):
        with pytest.raises(ConfigError, match="either episodes or steps"):
            runtime.train(Corridor(), **given)
    with pytest.raises(ConfigError, match="episodes=0"):
        runtime.train(Corridor(), episodes=0)
    with pytest.raises(ConfigError, match="num_processes=0"):
        ParallelQLearning(OptimalQLearning, num_processes=0)
    with pytest.raises(ConfigError, match="batch_size=0"):
        DistAsyncQLearning(batch_size=0)
    with pytest.raises(ConfigError, match="steps_per_sync=0"):
        ParallelQLearning(num_processes=1).train(maze, 10, steps_per_sync=0)


def test_lists_cannot_be_shared():
    for kind in (ParallelQLearning, DistAsyncQLearning):
        with pytest.raises(
            ConfigError, match="in Python lists, which cannot lie in shared memory: use OptimalQLearning"
        ):
            kind(ListQLearning, state_size=5, action_size=2)


def test_mpi_that_is_not_installed(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"pip install 'steppe\[mpi\]'"):
        DistAsyncQLearning(state_size=5, action_size=2)


def test_processes_share_one_table_and_come_to_the_values_of_value_iteration():
    """Two processes, 60,000 steps in total at random, rate falling to 0 (seed 5): every value within 0.25."""
    steps = 60_000
    runtime = ParallelQLearning(
        OptimalQLearning, num_processes=2, state_size=6, action_size=3, discount_factor=GAMMA, epsilon=1.0,
        epsilon_decay=1.0, learning_rate=LinearSchedule(0.05, 0.0, steps), seed=5,
    )  # fmt: skip
    with pytest.raises(UsageError, match="call train first"):
        _ = runtime.q_table
    stats = runtime.train(maze, steps, steps_per_sync=200, validation_every=20_000, validation_episodes=10)
    assert steps <= runtime.algorithm.step_count < steps + 2 * 20
    assert runtime.result.env_steps == runtime.algorithm.step_count
    error = np.abs(runtime.q_table[:-1] - Maze().exact(GAMMA))
    assert error.max() < 0.25, error.round(2)
    assert runtime.validation[-1][0] == runtime.algorithm.step_count
    assert stats.get_summary()["total_episodes"] == runtime.algorithm.episode_count > 100
    assert not Path(runtime.result.path).exists()
    before = runtime.q_table.copy()
    runtime.train(maze, 50)
    assert np.abs(runtime.q_table - before).max() < 2.0, "a second call goes on with what was learned"


@pytest.mark.slow
def test_any_number_of_runs_at_once():
    """Three programs with two processes each, and a table each: everyone's values are those of its own discount."""
    gammas = (0.8, 0.5, 0.2)
    words = [[sys.executable, str(Path(__file__).with_name("parallel_program.py")), str(gamma)] for gamma in gammas]
    programs = [subprocess.Popen(each, stdout=subprocess.PIPE, text=True) for each in words]
    for gamma, program in zip(gammas, programs, strict=True):
        table = np.array(json.loads(program.communicate(timeout=120)[0]))
        error = np.abs(table[:-1] - Maze().exact(gamma))
        assert error.max() < 0.25, (gamma, error.round(2))


def test_one_process_learns_what_one_core_would():
    """The same words and the same episodes: what the run hands its worker is the stream named for it."""
    from steppe.algorithms.tabular.rng import WordStream
    from steppe.core.system import seeding

    names = ("worker", 0, 0, 0)
    runtime = ParallelQLearning(num_processes=1, epsilon=0.4, learning_rate=0.3, seed=9)
    runtime.train(maze, 700, steps_per_sync=50, runtime="inline")
    alone, env = OptimalQLearning(6, 3, epsilon=0.4, learning_rate=0.3), maze()
    alone.words = WordStream(int(seeding.generator(9, *names, "policy").integers(2**63)))
    env.reset(seed=seeding.integer_seed(9, *names, "env"))
    while alone.step_count < 700:
        alone.train_episode(env)
    np.testing.assert_array_equal(runtime.q_table, alone.q_table)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Doubles, DoubleQLearning, SARSA])
def test_other_tables_are_shared_too(kind):
    runtime = ParallelQLearning(kind, num_processes=2, epsilon=0.5, seed=2)
    runtime.train(maze, 3_000, runtime="inline", steps_per_sync=100)
    assert np.asarray(runtime.q_table).any()
    assert runtime.algorithm.step_count >= 3_000


def test_compiled_games_in_processes():
    runtime = ParallelQLearning(num_processes=2, learning_rate=0.2, discount_factor=1.0, epsilon=0.3, epsilon_decay=1.0)
    runtime.train("steppe/TicTacToe-v0", 2_000_000, validation_episodes=5)
    first, second = exact_return(tictactoe(), runtime.algorithm)
    assert (first + second) / 2 > 0.85
    assert runtime.result.actors == 2


def test_a_killed_process_is_replaced_and_its_loss_told(tmp_path, monkeypatch):
    monkeypatch.setenv("FATAL_MARK", str(tmp_path / "mark"))
    told = []

    def watch(view):
        told.extend(event for event in view.events if event not in told)

    runtime = ParallelQLearning(num_processes=2, epsilon=1.0, epsilon_decay=1.0, seed=1)
    runtime.train(Fatal, 2_000, steps_per_sync=20, callbacks=[watch])
    assert (tmp_path / "mark").exists()
    assert runtime.algorithm.step_count >= 2_000
    assert runtime.result.actor_restarts == 1
    restart = next(event for event in told if event.kind == "restart")
    assert "was killed by SIGKILL" in restart.details["message"]
    assert any(event.kind == "warning" and "taken again" in event.details["message"] for event in told)
    np.testing.assert_allclose(runtime.q_table[3, 1], 1.0, atol=0.05)


def test_bad_rewards_states_and_environments():
    for kind in (NotANumber, Astray):
        with pytest.raises((NotFinite, RunFailed), match=r"reward is nan|outside the table"):
            ParallelQLearning(num_processes=1, seed=0).train(kind, 100)
    with pytest.raises(FactoryError, match="another process cannot import"):
        ParallelQLearning(num_processes=1).train(lambda: Corridor(), 100)
    with pytest.raises(ConfigError, match="state_size=7, but the environment has 5 states"):
        ParallelQLearning(num_processes=1, state_size=7, action_size=2).train(Corridor, 100)
    with pytest.raises(TypeError, match="learning_rat"):
        ParallelQLearning(num_processes=1, learning_rat=0.5).train(Corridor, 100)


def test_a_table_that_no_memory_holds_is_named_before_it_is_made(monkeypatch):
    monkeypatch.setattr("steppe.algorithms.tabular.memory_limits.free_memory_bytes", lambda: 1000)
    with pytest.raises(ConfigError, match=r"a table of 19683 states × 9 actions would take 692.0 KiB"):
        ParallelQLearning(num_processes=1).train("steppe/TicTacToe-v0", 100)


def test_alone_without_mpiexec():
    runtime = DistAsyncQLearning(batch_size=8, sync_frequency=4, epsilon=1.0, epsilon_decay=1.0, seed=0)
    assert (runtime.rank, runtime.size) == (0, 1)
    env = Corridor()
    runtime.train(env, 500, validation_episodes=3)
    assert runtime.algorithm.step_count >= 500
    assert runtime.validation[-1][1] == 1.0
    np.testing.assert_allclose(runtime.q_table[3, 1], 1.0, atol=0.2)


def test_the_environment_of_the_seed_is_taken_by_all():
    env = TicTacToeEnv(opponent="random")
    single = SingleThreadQLearning(state_size=env.observation_space_size, action_size=env.action_space_size)
    single.train(env, episodes=20)
    assert single.algorithm.q_table.any()
    alone = DistAsyncQLearning(state_size=19_683, action_size=9)
    alone.train(env, 100, validation_episodes=2)


def test_a_table_in_the_composition_api():
    from steppe import DistributedAgent, DistributedEnvironment, MainLoop

    environment = DistributedEnvironment(Corridor, num_workers=1, runtime="inline")
    agent = DistributedAgent("q-learning", learning_rate=0.5, config={"epsilon": 1.0})
    loop = MainLoop(environment, None, agent, config={"steps": 400, "evaluation.episodes": 2})
    assert loop.run().state == "SUCCEEDED"
    assert loop.run_single_episode()["length"] >= 4
    assert agent.get_policy_parameters()["q_table"][3, 1] > 0.9

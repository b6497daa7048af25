"""What learners promise besides their rules: episodes, rates, masks, memory, files, and one sentence for each mistake."""

import json
import re
import tracemalloc

import gymnasium as gym
import numpy as np
import pytest

from steppe.algorithms.tabular import memory_limits
from steppe.classic import (
    SARSA,
    BaseAlgorithm,
    ConstantSchedule,
    DoubleQLearning,
    ExpectedSARSA,
    ExponentialSchedule,
    LinearSchedule,
    ListQLearning,
    MemoryOptimizedQLearning,
    MemoryPool,
    NStepQLearning,
    NumpyQLearning,
    OptimalQLearning,
    QLambda,
    vectorized_q_update,
)
from steppe.core.contracts.errors import ConfigError, DamagedFile, NotFinite, WorldError
from steppe.testing import MockEnvironment
from tests.support.tabular_oracles import RandomMDP

pytestmark = pytest.mark.unit
TABLES = [
    OptimalQLearning, NumpyQLearning, MemoryOptimizedQLearning, SARSA, ExpectedSARSA, DoubleQLearning, NStepQLearning,
    QLambda,
]  # fmt: skip
EVERY = [*TABLES, ListQLearning]


class ByHand(BaseAlgorithm):
    """The least that a learner of one's own has."""

    def _initialize_q_table(self):
        return np.zeros((self.state_size, self.action_size), np.float32)

    def update(self, state, action, reward, next_state, done):
        following = 0 if done else np.max(self.q_table[next_state])
        target = reward + self.discount_factor * following
        self.q_table[state, action] += self.learning_rate * (target - self.q_table[state, action])

    def select_action(self, state):
        return int(np.argmax(self.q_table[state]))


class Script(gym.Env):
    """Gives rows that were written down, and keeps the actions; the last row says how it ends."""

    def __init__(self, rows, num_agents=1):
        self.rows, self.taken, self.num_agents = rows, [], num_agents

    def reset(self, *, seed=None, options=None):
        self.left = list(self.rows)
        return 0, {}

    def step(self, action):
        self.taken.append(action)
        return self.left.pop(0)


@pytest.mark.parametrize("kind", [*EVERY, ByHand])
def test_an_episode_ends_at_either_end_and_only_termination_is_one(kind):
    """Value 10 waits in state 1: a cut leads there, an end does not."""
    for done, expected in ((True, 1.0), (False, 1.0 + 0.5 * 10.0)):
        agent = kind(2, 1, learning_rate=1.0, discount_factor=0.5)
        if isinstance(agent.q_table, list):
            agent.q_table = [[0.0], [10.0]]
        else:
            agent.q_table = np.array([[0.0], [10.0]], np.float32)
        for _ in range(200):  # double Q-learning tosses a coin for the table that learns
            agent.train_episode(Script([(1, 1.0, done, not done, {})]))
        assert np.asarray(agent.q_table)[0, 0] == expected
        assert (agent.step_count, agent.episode_count) == (200, 200)


@pytest.mark.parametrize("kind", EVERY)
def test_an_environments_own_step_limit_cuts_episodes(kind):
    env = MockEnvironment(length=10**9)
    env.max_episode_steps = 7
    agent = kind(10, 4)
    agent.train_episode(env)
    assert agent.step_count == len(env.calls) == 7


@pytest.mark.parametrize("kind", [*EVERY, ByHand])
def test_two_agents_in_turns_learn_that_the_others_gain_is_their_loss(kind):
    """The second player's best reply in state 1 wins: the move that leads there is worth −1 to the first."""
    agent = kind(2, 1, learning_rate=1.0, discount_factor=1.0, epsilon=0.0)
    env = Script([(1, 0.0, False, False, {}), (0, 1.0, True, False, {})], num_agents=2)
    for _ in range(200):
        total = agent.train_episode(env)
    assert total == -1.0  # as the first player sees it
    assert np.asarray(agent.q_table).ravel().tolist() == [-1.0, 1.0]


def test_three_agents_are_refused():
    with pytest.raises(WorldError, match="one agent, or two that take turns"):
        OptimalQLearning(2, 1).train_episode(Script([], num_agents=3))


@pytest.mark.parametrize(
    "rates", [{}, {"learning_rate": LinearSchedule(0.5, 0.1, 300), "epsilon": LinearSchedule(1, 0.1, 200)}]
)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kind", TABLES)
def test_the_fast_episode_is_the_plain_one(kind, rates, masked):
    """The same bits, choices and chance as the loop that calls select_action and learns from batches of one row."""

    class Plain(kind):
        def update(self, *args, **kwargs):
            super().update(*args, **kwargs)

    def world():
        env = RandomMDP(1)
        if masked:
            step = env.step
            env.step = lambda action: (*step(action)[:4], {"action_mask": [env.state % 2, 1, 1]})
        env.reset(seed=3)
        return env

    fast, plain = (made(5, 3, **rates, seed=4) for made in (kind, Plain))
    one, other = world(), world()
    assert [fast.train_episode(one) for _ in range(200)] == [plain.train_episode(other) for _ in range(200)]
    np.testing.assert_array_equal(fast.storage, plain.storage)
    assert vars(fast)["epsilon"] == plain.epsilon
    assert fast.words.take(5).tolist() == plain.words.take(5).tolist()


def test_action_masks_are_respected():
    env = gym.make("Taxi-v4")
    agent = OptimalQLearning(500, 6, epsilon=1.0, epsilon_decay=1.0, seed=0)
    state, info = env.reset(seed=0)
    for _ in range(300):
        action = agent.select_action(state, info["action_mask"])
        assert info["action_mask"][action]
        state, _, terminated, truncated, info = env.step(action)
        if terminated or truncated:
            state, info = env.reset()


@pytest.mark.parametrize("kind", EVERY)
def test_deterministic_is_deterministic_and_costs_no_chance(kind):
    agent = kind(3, 4, epsilon=1.0, seed=0)
    if kind is ListQLearning:
        agent.q_table[1] = [0.0, 2.0, 2.0, 1.0]
    else:
        agent.storage[..., 1, :] = np.float32([0, 2, 2, 1])
    assert {agent.select_action(1, deterministic=True) for _ in range(50)} == {1}
    assert {agent.select_action(1, [1, 0, 1, 1], deterministic=True) for _ in range(50)} == {2}
    if kind is not ListQLearning:
        assert agent.select_actions(np.ones(9, int), deterministic=True).tolist() == [1] * 9
    fresh = kind(3, 4, epsilon=1.0, seed=0)
    assert agent.words.take(3).tolist() == fresh.words.take(3).tolist()


def test_sarsa_takes_the_action_it_learned_from():
    agent = SARSA(2, 50, epsilon=1.0, learning_rate=1.0, discount_factor=1.0, seed=0)
    agent.q_table[1] = np.arange(50)
    for _ in range(20):
        agent.update(0, 0, 0.0, 1, False)
        assert agent.select_action(1) == agent.q_table[0, 0]


def test_rates_follow_their_schedules():
    linear, exponential = LinearSchedule(1.0, 0.2, 100), ExponentialSchedule.over(0.5, 0.05, 1000)
    assert [linear(step) for step in (0, 25, 100, 500)] == pytest.approx([1.0, 0.8, 0.2, 0.2])
    assert [exponential(step) for step in (0, 500, 1000, 9000)] == pytest.approx([0.5, 0.5 * 0.1**0.5, 0.05, 0.05])
    assert ConstantSchedule(0.3)(7) == 0.3
    agent = OptimalQLearning(10, 4, learning_rate=exponential, epsilon=linear)
    assert (agent.learning_rate, agent.epsilon) == (0.5, 1.0)
    agent.train_episode(MockEnvironment(length=25))
    assert agent.epsilon == pytest.approx(0.8)
    assert agent.learning_rate == exponential(25)
    rates, epsilons = agent.rates(3, 10)
    np.testing.assert_allclose(rates, [exponential(step) for step in (25, 35, 45)])
    np.testing.assert_allclose(epsilons, [linear(step) for step in (25, 35, 45)])


def test_a_plain_epsilon_falls_after_each_episode_and_never_rises():
    agent = OptimalQLearning(10, 4, epsilon=0.5, epsilon_decay=0.9, epsilon_min=0.44)
    epsilons = [agent.epsilon]
    for _ in range(3):
        agent.train_episode(MockEnvironment())
        epsilons.append(agent.epsilon)
    assert epsilons == pytest.approx([0.5, 0.45, 0.44, 0.44])
    greedy = OptimalQLearning(10, 4, epsilon=0.0)
    greedy.train_episode(MockEnvironment())
    assert greedy.epsilon == 0.0
    many = OptimalQLearning(10, 4, epsilon=0.5, epsilon_decay=0.9)
    many.count_episodes(4)
    assert many.epsilon == pytest.approx(0.5 * 0.9**4)


def test_learners_with_a_seed_repeat_and_without_one_differ():
    def choices(seed):
        return OptimalQLearning(1, 9, epsilon=1.0, seed=seed).select_actions(np.zeros(40, int)).tolist()

    assert choices(3) == choices(3) != choices(4)
    assert choices(None) != choices(None)


def test_a_table_may_live_in_memory_of_others():
    memory_of_others = np.zeros(40, np.float32)
    agent = OptimalQLearning(10, 4, learning_rate=1.0)
    agent.q_table = memory_of_others.reshape(10, 4)
    agent.update(0, 1, 5.0, 1, True)
    assert memory_of_others[1] == 5.0
    for wrong in (np.zeros((4, 10), np.float32), np.zeros((10, 4)), [[0.0] * 4] * 10, np.zeros((4, 10), np.float32).T):
        with pytest.raises(ConfigError, match="the table must"):
            agent.q_table = wrong


def test_the_pool_lends_each_array_once():
    pool = MemoryPool()
    one, two = pool.acquire(5, np.int64), pool.acquire(5, np.int64)
    assert one is not two
    pool.release(one)
    assert pool.acquire((5,), np.int64) is one
    assert pool.acquire(5, np.float32).dtype == np.float32
    assert pool.num_made == 3
    with pool.borrow((2, np.bool_), (3, np.bool_)) as (a, b):
        assert (a.shape, b.shape) == ((2,), (3,))
    pool.release(two)
    with pytest.raises(ConfigError, match="not on loan"):
        pool.release(two)


def test_no_array_is_made_after_the_first_batch():
    agent = MemoryOptimizedQLearning(state_size=50, action_size=4, seed=0)
    batch = [(i % 50, i % 4, 1.0, (i + 1) % 50, i % 9 == 0) for i in range(5000)]
    for _ in range(2):
        agent.batch_update(batch)
        agent.update(1, 1, 1.0, 2, False)
    made = agent.memory_pool.num_made
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        agent.batch_update(batch)
        agent.update(1, 1, 1.0, 2, False)
        grown = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert agent.memory_pool.num_made == made
    assert grown < 5000 * 8  # less than one of the five columns


# Bad input: one sentence each, and nothing learned.

BATCH = {"states": [0, 1], "actions": [0, 1], "rewards": [0.5, 1.0], "next_states": [1, 2], "dones": [False, True]}


@pytest.mark.parametrize("kind", EVERY)
@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"state": 3}, ConfigError, "state 3 is outside the table: there are 3, numbered from 0"),
        ({"state": -1}, ConfigError, "state -1 is outside the table"),
        ({"state": 1.5}, ConfigError, "state 1.5 is not a whole number.*FlattenMultiDiscreteWrapper.*Discretize"),
        ({"action": 2}, ConfigError, "action 2 is outside the table: there are 2"),
        ({"next_state": 9}, ConfigError, "next state 9 is outside the table"),
        ({"reward": float("nan")}, NotFinite, "the reward is nan"),
        ({"reward": float("inf")}, NotFinite, "the reward is inf"),
    ],
)
def test_a_bad_step_is_one_sentence(kind, change, error, words):
    agent = kind(3, 2)
    step = {"state": 0, "action": 0, "reward": 1.0, "next_state": 1, "done": False}
    with pytest.raises(error, match=words):
        agent.update(**{**step, **change})
    assert not np.asarray(agent.q_table).any()
    with pytest.raises(ConfigError, match="state 3 is outside the table"):
        agent.select_action(3)


@pytest.mark.parametrize("kind", TABLES)
@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"states": [0, 3]}, ConfigError, "row 1: state 3 is outside the table.*nothing of the batch was learned"),
        ({"actions": [-1, 0]}, ConfigError, "row 0: action -1 is outside"),
        ({"next_states": [5, 0]}, ConfigError, "row 0: next state 5 is outside"),
        ({"rewards": [1.0, np.nan]}, NotFinite, "the reward is nan"),
        ({"states": [0.5, 1.0]}, ConfigError, "states must be whole numbers, not float64"),
        ({"actions": [0]}, ConfigError, r"one axis and one length, not states \(2,\), actions \(1,\)"),
        ({"states": [[0, 1]]}, ConfigError, "one axis and one length"),
    ],
)
def test_an_invalid_batch_raises_a_clear_error_and_changes_nothing(kind, change, error, words):
    more = {"next_actions": [0, 0]} if kind is SARSA else {}
    for convert in (list, np.array):
        agent = kind(3, 2)
        with pytest.raises(error, match=words):
            agent.learn(*(convert(column) for column in {**BATCH, **change}.values()), **more)
        assert not agent.storage.any()
    agent = kind(3, 2)
    agent.learn(*map(np.array, BATCH.values()), **more)
    agent.learn(*(np.array(column)[:0] for column in BATCH.values()), **({"next_actions": []} if more else {}))
    agent.learn(*(np.array(column)[::2] for column in BATCH.values()), **({"next_actions": [0]} if more else {}))


def test_the_bare_kernel_also_refuses_it():
    table = np.zeros((3, 2), np.float32)
    for change in ({"states": [0, 3]}, {"rewards": [1.0, np.inf]}, {"actions": [0, 1, 1]}):
        with pytest.raises(ConfigError, match="nothing was learned"):
            vectorized_q_update(table, *map(np.array, {**BATCH, **change}.values()), 0.1, 0.9)
    assert not table.any()


@pytest.mark.parametrize("kind", EVERY)
def test_a_mask_must_have_the_right_shape_and_allow_an_action(kind):
    agent = kind(3, 2)
    for choose in (lambda: agent.select_action(1, [0, 0]), lambda: agent.update(0, 0, 1.0, 1, False, [False, False])):
        with pytest.raises(ConfigError, match=r"action mask of .*1.* allows no action"):
            choose()
    with pytest.raises(ConfigError, match=r"has shape \(3,\), but there are 2 actions"):
        agent.select_action(1, [1, 1, 1])
    if kind is not ListQLearning:
        with pytest.raises(ConfigError, match=r"action mask of row 1 \(state 2\) allows no action"):
            agent.select_actions(np.array([0, 2]), np.array([[1, 0], [0, 0]]))
        with pytest.raises(ConfigError, match=r"masks have shape \(1, 2\), not \(2, 2\)"):
            agent.select_actions(np.array([0, 2]), np.array([[1, 0]]))
    assert not np.asarray(agent.q_table).any()


def test_an_episode_with_invalid_rows_is_refused_by_name():
    cases = [
        ((7, 1.0, False, False, {}), ConfigError, "next state 7 is outside"),
        ((1, np.nan, False, False, {}), NotFinite, "the reward is nan"),
        ((np.array([1.0]), 1.0, False, False, {}), ConfigError, "not a whole number"),
        ((1, 1.0, False, False, {"action_mask": [0, 0]}), ConfigError, "mask of state 1 allows no action"),
        ((1, 1.0, False, False, {"action_mask": [1]}), ConfigError, r"has shape \(1,\), but there are 2 actions"),
    ]
    for row, error, words in cases:
        agent = OptimalQLearning(3, 2)
        with pytest.raises(error, match=words):
            agent.train_episode(Script([row]))
        assert not agent.q_table.any()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"state_size": 0}, "state_size=0 must be at least 1"),
        ({"state_size": 2.5}, "state_size=2.5 must be a whole number"),
        ({"learning_rate": 1.5}, "learning_rate=1.5 must be between 0 and 1"),
        ({"learning_rate": float("nan")}, "must be a number"),
        ({"discount_factor": -0.1}, "discount_factor=-0.1 must be"),
        ({"epsilon": "much"}, "epsilon='much' must be a number or a schedule"),
        ({"epsilon": LinearSchedule(1, 0, 5), "epsilon_decay": 0.9}, "would have no effect"),
    ],
)
def test_bad_settings_are_one_sentence(options, words):
    with pytest.raises(ConfigError, match=words):
        OptimalQLearning(**{"state_size": 3, "action_size": 2, **options})


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: NStepQLearning(3, 2, n_step=0), "n_step=0"),
        (lambda: QLambda(3, 2, trace_decay=2), "trace_decay=2"),
        (lambda: LinearSchedule(1.0, 0.0, 0), "num_steps=0"),
        (lambda: LinearSchedule(2.0, 0.0, 5), "LinearSchedule: start=2.0"),
        (lambda: ExponentialSchedule(0.1, 0.9, 0.5), "minimum=0.5 is above start"),
        (lambda: ExponentialSchedule.over(0.1, 0.5, 9), "cannot fall from 0.1 to 0.5"),
        (
            lambda: NStepQLearning(3, 2).learn(*map(np.array, BATCH.values()), streams=np.array([0, -1])),
            "from 0, not -1",
        ),
        (lambda: SARSA(3, 2).learn(*map(np.array, BATCH.values())), "give next_actions"),
        (lambda: SARSA(3, 2).learn(*map(np.array, BATCH.values()), next_actions=[5, 0]), "row 0: next action 5"),
        (lambda: OptimalQLearning(3, 2).batch_update([(1, 2, 3)]), "every experience needs 5 values"),
        (lambda: MemoryOptimizedQLearning(3, 2).batch_update([(1, 2, 3)]), "every experience needs 5 values"),
        (lambda: OptimalQLearning(3, 2).batch_update({"state": [1]}), "need the columns state, action"),
    ],
)
def test_other_mistakes_are_one_sentence(make, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        make()


@pytest.mark.parametrize("kind", EVERY)
def test_a_table_too_large_is_refused_by_its_size_before_it_is_made(kind):
    with pytest.raises(ConfigError, match=r"10000000000000 states × 100 actions would take \d.* PiB, but .* are free"):
        kind(10**13, 100)
    with pytest.raises(ConfigError, match=r"would take .* EiB"):
        kind(10**18, 10**6)


def test_a_containers_limit_counts(monkeypatch, tmp_path):
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("400000\n")
    monkeypatch.setattr(memory_limits, "_CGROUP", tmp_path)
    assert memory_limits.free_memory_bytes() == 600_000
    OptimalQLearning(1000, 100)
    with pytest.raises(ConfigError, match=r"2000 states × 100 actions would take 781.2 KiB, but 585.9 KiB are free"):
        OptimalQLearning(2000, 100)
    (tmp_path / "memory.max").write_text("max\n")
    assert memory_limits.free_memory_bytes() > 10**6


# Files


def trained(kind, **options):
    agent = kind(5, 3, epsilon=0.5, seed=1, **options)
    env = RandomMDP(1)
    env.reset(seed=0)
    for _ in range(30):
        agent.train_episode(env)
    return agent


def go_on(agent):
    env = RandomMDP(1)
    env.reset(seed=9)
    return [agent.train_episode(env) for _ in range(20)]


@pytest.mark.parametrize("kind", EVERY)
@pytest.mark.parametrize("scheduled", [False, True])
def test_a_loaded_learner_continues_exactly(kind, scheduled, tmp_path):
    rate = {"learning_rate": LinearSchedule(0.5, 0.1, 400)} if scheduled else {}
    agent = trained(kind, **rate)
    if kind in (NStepQLearning, QLambda):
        agent.update(0, 1, 1.0, 2, False)  # something waits
    agent.save(tmp_path / "agent.safetensors")
    loaded = kind.load(tmp_path / "agent.safetensors")
    restored = kind(5, 3, seed=99, **rate)
    restored.restore(str(tmp_path / "agent.safetensors"))
    expected = go_on(agent)
    for other in (loaded, restored):
        assert (other.step_count, other.episode_count) > (0, 29)
        assert go_on(other) == expected
        np.testing.assert_array_equal(other.q_table, agent.q_table)
        assert (other.step_count, other.learning_rate) == (agent.step_count, agent.learning_rate)


def test_any_tool_reads_the_table(tmp_path):
    from safetensors.numpy import load_file

    agent = trained(OptimalQLearning)
    agent.save(tmp_path / "a.safetensors")
    np.testing.assert_array_equal(load_file(tmp_path / "a.safetensors")["q_table"], agent.q_table)


def test_a_file_must_fit_the_learner(tmp_path):
    path = tmp_path / "a.safetensors"
    trained(OptimalQLearning).save(path)
    other = OptimalQLearning(6, 3)
    with pytest.raises(
        ConfigError, match=r"does not fit this learner: q_table is float32\[5, 3\] in the file, float32\[6, 3\]"
    ):
        other.restore(path)
    assert not other.q_table.any()
    assert other.step_count == 0
    with pytest.raises(
        ConfigError, match=r"holds a OptimalQLearning, not a SARSA: load it with OptimalQLearning\.load"
    ):
        SARSA.load(path)


def test_a_damaged_file_is_named(tmp_path):
    path = tmp_path / "a.safetensors"
    agent = trained(OptimalQLearning)
    agent.save(path)
    whole = path.read_bytes()
    head = 8 + int.from_bytes(whole[:8], "little")
    for damage in (whole[:-3], whole[: head + 4] + b"\x00\x01" + whole[head + 6 :], b"", b"not a table", whole[8:]):
        path.write_bytes(damage)
        with pytest.raises(DamagedFile, match=r"a\.safetensors is damaged"):
            OptimalQLearning.load(path)
    path.write_bytes(whole.replace(b'\\"step_count\\": ', b'\\"step_count\\":9'))
    with pytest.raises(DamagedFile, match="does not match its sha256"):
        OptimalQLearning.load(path)
    with pytest.raises(DamagedFile, match="cannot be read: No such file"):
        OptimalQLearning.load(tmp_path / "missing")


def test_a_newer_format_is_named(tmp_path, monkeypatch):
    from steppe.algorithms.tabular import io

    monkeypatch.setattr(io, "FORMAT", 2)
    trained(OptimalQLearning).save(tmp_path / "a")
    monkeypatch.undo()
    with pytest.raises(DamagedFile, match="format 2 is newer than 1"):
        OptimalQLearning.load(tmp_path / "a")


def test_a_schedule_of_ones_own_cannot_be_saved(tmp_path):
    class Mine(ConstantSchedule):
        pass

    with pytest.raises(ConfigError, match="a Mine cannot be saved"):
        OptimalQLearning(3, 2, learning_rate=Mine(0.5)).save(tmp_path / "a")
    assert not list(tmp_path.iterdir())


def test_settings_are_plain(tmp_path):
    agent = NStepQLearning(3, 2, n_step=2, learning_rate=LinearSchedule(0.5, 0.1, 400))
    settings = json.loads(json.dumps(agent.settings()))
    assert settings["n_step"] == 2
    assert settings["learning_rate"] == {"kind": "LinearSchedule", "start": 0.5, "end": 0.1, "num_steps": 400}

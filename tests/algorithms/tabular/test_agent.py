"""Tables as agents of the house: rollouts in, the values of one-by-one updates out; masks, weights and settings."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steppe.algorithms import make_agent
from steppe.algorithms.tabular.agent import flatten_rollout
from steppe.classic import NStepQLearning, OptimalQLearning, QLambda
from steppe.core.config.algorithm_table import ALGORITHMS
from steppe.core.config.run import resolve_config
from steppe.core.contracts.algorithm import Agent, Progress
from steppe.core.contracts.errors import ConfigError, UsageError
from steppe.core.contracts.segment import Batch
from steppe.core.contracts.specs import ActionSpec, EnvSpec, FieldSpec

pytestmark = pytest.mark.unit

TABULAR = [name for name, kind in ALGORITHMS.items() if kind.in_table]
STATES, ACTIONS = 6, 3
SPEC = EnvSpec("test", FieldSpec("obs", (), "int64"), ActionSpec("discrete", (ACTIONS,)), num_states=STATES)


def made(algo="q-learning", spec=SPEC, **options):
    config = resolve_config(("test", {"env": "test", "algo": algo, **options})).config.agent.resolve_defaults(
        spec, 1, 2
    )[0]
    return make_agent(algo, config, spec, seed=0)


def rollout(seed, num_steps=7, num_envs=3, *, masked=False):
    """Any rollout: cuts of both kinds, autoreset rows after some of them, and masks that allow the actions taken."""
    stream = np.random.default_rng(seed)
    shape = (num_steps, num_envs)
    terminated = stream.random(shape) < 0.2
    truncated = (stream.random(shape) < 0.2) & ~terminated
    valid = np.ones(shape, bool)
    for t in range(1, num_steps):
        valid[t] = ~((terminated[t - 1] | truncated[t - 1]) & valid[t - 1] & (stream.random(num_envs) < 0.5))
    terminated &= valid
    truncated &= valid
    action = stream.integers(0, ACTIONS, shape)
    mask = np.ones((num_steps + 1, num_envs, ACTIONS), bool)
    if masked:
        mask = stream.random(mask.shape) < 0.6
        np.put_along_axis(mask[:-1], action[..., None], True, axis=2)
        mask[-1, :, 0] = True
    return Batch(
        {
            "obs": stream.integers(0, STATES, (num_steps + 1, num_envs)),
            "action": action,
            "reward": stream.normal(size=shape).astype(np.float32),
            "terminated": terminated,
            "truncated": truncated,
            "valid": valid,
            "final_obs": stream.integers(0, STATES, shape),
            "mask": mask,
        }
    )


def steps_of(batch):
    """(state, action, reward, next state, done, next mask, cut, environment) one by one, by the rule of segments."""
    for t in range(len(batch["action"])):
        for b in range(batch["action"].shape[1]):
            if not batch["valid"][t, b]:
                continue
            cut = batch["terminated"][t, b] or batch["truncated"][t, b]
            after = batch["final_obs"][t, b] if cut else batch["obs"][t + 1, b]
            row = (batch["obs"][t, b], batch["action"][t, b], float(batch["reward"][t, b]), after)
            yield *row, bool(batch["terminated"][t, b]), batch["mask"][t + 1, b], bool(batch["truncated"][t, b]), b


@pytest.mark.parametrize("masked", [False, True])
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_a_rollout_is_its_steps_one_by_one(masked, seed):
    batch = rollout(seed, masked=masked)
    agent, alone = made(learning_rate=0.3), OptimalQLearning(STATES, ACTIONS, learning_rate=0.3)
    count = 0
    for state, action, reward, after, done, mask, truncated, _ in steps_of(batch):
        if masked and truncated:
            continue  # what would be allowed after it is not known
        alone.update(state, action, reward, after, done, mask)
        count += 1
    assert agent.learn(batch).updates == count
    np.testing.assert_array_equal(agent.algorithm.q_table, alone.q_table)


@pytest.mark.parametrize(("algo", "kind"), [("n-step-q", NStepQLearning), ("q-lambda", QLambda)])
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_trajectories_are_followed_through_a_rollout_and_end_with_it(algo, kind, seed):
    batch = rollout(seed, num_envs=1)
    agent, alone = made(algo, learning_rate=0.3), kind(STATES, ACTIONS, learning_rate=0.3)
    last = max(t for t in range(7) if batch["valid"][t, 0])
    for number, (state, action, reward, after, done, _, truncated, _) in enumerate(steps_of(batch)):
        cut = truncated or (number == np.count_nonzero(batch["valid"]) - 1 and last == 6 and not done)
        alone.learn([state], [action], [reward], [after], [done], truncated=[cut])
    agent.learn(batch)
    np.testing.assert_array_equal(agent.algorithm.q_table, alone.q_table)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), num_envs=st.integers(1, 4), masked=st.booleans())
def test_every_trajectory_ends_where_nothing_more_is_known_of_it(seed, num_envs, masked):
    columns, more = flatten_rollout(rollout(seed, num_envs=num_envs, masked=masked), STATES)
    open_ = set()
    for stream, done, cut in zip(more["streams"], columns[4], more["truncated"], strict=True):
        open_.add(stream)
        if done or cut:
            open_.discard(stream)
    assert len(open_) == 0 or masked  # a truncated first step that is left out begins nothing
    assert not (columns[4] & more["truncated"]).any()


def test_sarsa_learns_from_what_was_done_next():
    agent = made("sarsa", learning_rate=1.0, gamma=0.5, epsilon=0.0, epsilon_end=0.0)
    agent.algorithm.q_table[...] = np.arange(STATES * ACTIONS).reshape(STATES, ACTIONS)
    columns = {
        "obs": np.array([[0], [1], [2]]), "action": np.array([[0], [1]]), "reward": np.zeros((2, 1), np.float32),
        "terminated": np.zeros((2, 1), bool), "truncated": np.zeros((2, 1), bool), "valid": np.ones((2, 1), bool),
        "final_obs": np.zeros((2, 1), np.int64), "mask": np.ones((3, 1, ACTIONS), bool),
    }  # fmt: skip
    agent.learn(Batch(columns))
    assert agent.algorithm.q_table[0, 0] == 0.5 * 4  # Q(1, 1), which was taken
    assert agent.algorithm.q_table[1, 1] == 0.5 * 8  # Q(2, 2), which would be taken


def test_a_game_of_turns_is_learned_with_the_sign_of_the_mover():
    from dataclasses import replace

    agent = made(spec=replace(SPEC, in_turns=True), learning_rate=1.0, gamma=1.0)
    agent.algorithm.q_table[1] = [2.0, 5.0, 3.0]
    batch = rollout(0, 1, 1)
    batch.columns |= {"obs": np.array([[0], [1]]), "terminated": np.zeros((1, 1), bool)}
    batch.columns |= {"truncated": np.zeros((1, 1), bool), "reward": np.ones((1, 1), np.float32)}
    agent.learn(batch)
    assert agent.algorithm.q_table[0, int(batch["action"][0, 0])] == 1.0 - 5.0


@pytest.mark.parametrize("algo", TABULAR)
def test_an_agent_of_the_house(algo):
    agent = made(algo)
    assert isinstance(agent, Agent)
    agent.begin(2, np.random.default_rng(0))
    obs, starts = np.array([0, 5]), np.ones(2, bool)
    masks = np.array([[False, True, False], [True, True, True]])
    for _ in range(20):
        noted = agent.act(obs, starts, masks=masks)
        assert noted["action"][0] == 1
        np.testing.assert_array_equal(noted["mask"], masks)
    agent.learn(rollout(1))
    twin = made(algo)
    twin.load(agent.weights().stamped(version=4, updates=1, env_steps=2))
    assert twin.version == 4
    assert twin.weights().sha256() == agent.weights().sha256()
    twin.restore(agent.state())
    twin.restore_acting(agent.acting_state())
    one, other = (who.act(obs, starts)["action"] for who in (agent, twin))
    np.testing.assert_array_equal(one, other)
    agent.learn(rollout(2))
    twin.learn(rollout(2))
    assert twin.weights().sha256() == agent.weights().sha256()
    with pytest.raises(UsageError, match="without gradients"):
        agent.gradients(rollout(1))


def test_rates_follow_the_run():
    agent = made(learning_rate=0.5, learning_rate_end=0.1, epsilon=1.0, epsilon_end=0.2, exploration_fraction=0.5)
    for steps, rate, epsilon in ((0, 0.5, 1.0), (250, 0.4, 0.6), (500, 0.3, 0.2), (1000, 0.1, 0.2), (2000, 0.1, 0.2)):
        agent.follow(Progress(steps, 1000))
        assert agent.algorithm.learning_rate == pytest.approx(rate)
        assert agent.algorithm.epsilon == pytest.approx(epsilon)
    twin = made()
    twin.load(agent.weights())
    assert twin.algorithm.epsilon == pytest.approx(0.2), "exploration goes with the weights"


@pytest.mark.parametrize(
    ("key", "nearest"),
    [("hidden", ""), ("network", ""), ("n_step", ""), ("trace_decay", ""), ("epsilon_ent", "epsilon_end")],
)
def test_settings_of_others_are_errors(key, nearest):
    with pytest.raises(ConfigError, match=f"unknown key '{key}'.*{nearest}"):
        resolve_config(("flag", {"env": "test", "algo": "q-learning", key: 1}))


def test_settings_that_no_table_can_have():
    for key, value in (("learning_rate", 1.5), ("epsilon", 2.0), ("trace_decay", -1), ("n_step", 0)):
        algo = {"trace_decay": "q-lambda", "n_step": "n-step-q"}.get(key, "q-learning")
        with pytest.raises(ConfigError, match=key):
            resolve_config(("flag", {"env": "test", "algo": algo, key: value}))
    with pytest.raises(ConfigError, match="on the CPU"):
        make_agent("q-learning", made().config, SPEC, seed=0, device="cuda:0")


def test_workers_with_tables_have_no_gradients():
    with pytest.raises(ConfigError, match=r"params.damping is for workers whose gradients are applied"):
        resolve_config(("flag", {"env": "test", "algo": "sarsa", "mode": "workers", "params.damping": 0.5}))
    with pytest.raises(ConfigError, match=r"flow.max_lag means nothing in mode 'workers'"):
        resolve_config(("flag", {"env": "test", "algo": "sarsa", "mode": "workers", "flow.max_lag": 3}))
    with pytest.raises(ConfigError, match="leave that key out"):
        made(**{"environment.observations": "values"}).config.require(
            EnvSpec("test", FieldSpec("obs", (3,), "float32"), SPEC.action), "q-learning"
        )

"""Agents that remember, in the composition API and in the user's hands: what works, and what is refused in a sentence."""

from __future__ import annotations

import numpy as np
import pytest

import steppe
from steppe import DistributedAgent, DistributedEnvironment, MainLoop, ReplayBufferPool
from steppe.core.config import resolve
from steppe.core.errors import ConfigError, UsageError
from steppe.core.specs import FieldSpec, SegmentSpec
from steppe.loops.calibrating import calibrated
from steppe.replay import make_memory

pytestmark = pytest.mark.integration
RECALL = "steppe/Recall-v0"
SMALL = {"hidden": (8,), "cell_size": 8}
R2D2 = {**SMALL, "learning_starts": 100, "sequence_length": 6, "burn_in": 2}
PPO = {**SMALL, "recurrent": True, "segment_steps": 16}
SHORT = {"runtime": "inline", "steps": 600, "envs": 4, "evaluation.episodes": 2, "evaluation.every_steps": 10**6}


@pytest.fixture
def environment():
    with DistributedEnvironment(RECALL, 2, runtime="inline", seed=1) as made:
        yield made


def test_arguments_keep_their_meaning_for_sequences():
    """An update of 32 sequences every 4 steps."""
    config = DistributedAgent("r2d2", config={"sequence_length": 10}).config
    assert (config.batch_size, config.samples_per_insert, config.target_every) == (32, 32 * 10 / 4, 100)


@pytest.mark.parametrize(("algo", "config"), [("r2d2", R2D2), ("ppo", PPO)])
def test_a_loop_trains_an_agent_that_remembers(algo, config, environment):
    loop = MainLoop(environment, None, DistributedAgent(algo, config=config))
    summary = loop.run_training(40, evaluation_frequency=1000, checkpoint_frequency=1000)
    assert loop.episode >= 40
    assert summary["env_steps"] >= 40 * 8
    assert summary["updates"] > 0


def test_a_pool_of_ones_own_holds_sequences(environment):
    pool = ReplayBufferPool(1, 2_000, use_prioritized=True, alpha=0.5)
    loop = MainLoop(environment, pool, DistributedAgent("r2d2", config=R2D2))
    assert loop.run_training(40, evaluation_frequency=1000, checkpoint_frequency=1000)["updates"] > 0
    assert len(pool.store) > 300


def test_single_steps_are_refused(environment):
    for algo, config, sentence in (
        ("r2d2", R2D2, "r2d2 learns from sequences with stored state, which runs gather"),
        ("ppo", PPO, r"ppo with a memory learns from rollouts \[T, B\]"),
    ):
        agent = DistributedAgent(algo, config=config).bind(environment)
        steps = environment.generate_experiences(agent, 2)
        assert len(steps) == 16
        for learn in (agent.update_policy, agent.observe):
            with pytest.raises(UsageError, match=sentence):
                learn(steps)
        loop = MainLoop(environment, None, DistributedAgent(algo, config=config))
        with pytest.raises(UsageError, match=sentence):
            loop.run_single_episode()
    flat = environment.generate_batch_experiences(agent, 8)
    with pytest.raises(UsageError, match="not from flat transitions"):
        agent.learn_from_batch(flat)
    with pytest.raises(UsageError, match="r2d2 learns from sequences"):
        DistributedAgent("r2d2", config=R2D2).bind(environment).compute_gradients(flat)


def test_a_rollout_is_learned_from_with_the_state_it_began_with(environment):
    agent = DistributedAgent("ppo", config=PPO).bind(environment)
    stream = np.random.default_rng(0)
    batch = {
        "obs": stream.random((17, 3, 5)), "action": stream.integers(0, 4, (16, 3)), "reward": stream.random((16, 3)),
        "terminated": np.zeros((16, 3), bool), "truncated": np.zeros((16, 3), bool), "valid": np.ones((16, 3), bool),
        "final_obs": np.zeros((16, 3, 5)), "logp": np.full((16, 3), -1.0), "value": np.zeros((16, 3)),
        "hidden": stream.random((1, 3, 16)),
    }  # fmt: skip
    assert agent.learn_from_batch(batch)["updates"] > 0
    with pytest.raises(UsageError, match=r"'hidden' has shape \(16, 3, 16\), where \(1, 3, 16\) is needed"):
        agent.learn_from_batch({**batch, "hidden": stream.random((16, 3, 16))})


@pytest.mark.parametrize(("algo", "config"), [("r2d2", R2D2), ("ppo", PPO)])
def test_a_loaded_policy_remembers_until_it_is_reset(algo, config, tmp_path):
    result = steppe.train(RECALL, algo=algo, run_dir=tmp_path / "run", **SHORT, **config)
    policy = steppe.load(result.path)
    cues = np.eye(5, dtype=np.float32)[:4]
    nothing = np.zeros((4, 5), np.float32)
    policy.act(cues)
    after = policy.agent.acting_state()["hidden"]
    assert np.abs(np.diff(after, axis=0)).max() > 1e-4, "each of the cues is remembered otherwise"
    policy.act(nothing)
    policy.reset()
    policy.act(nothing)
    forgotten = policy.agent.acting_state()["hidden"]
    np.testing.assert_array_equal(forgotten, np.broadcast_to(forgotten[:1], forgotten.shape))


@pytest.mark.slow
@pytest.mark.parametrize(("algo", "config"), [("r2d2", {}), ("ppo", {"recurrent": True})])
def test_numbers_are_chosen_by_trying(algo, config):
    chosen = calibrated(resolve(("call", {"env": RECALL, "algo": algo, "envs": "auto", "actors": "auto", **config})))
    assert chosen.config.envs >= 1


def test_what_means_nothing_is_refused():
    for settings, sentence in (
        ({"algo": "ppo", "cell": "gru"}, "cell is for recurrent=true"),
        ({"algo": "dqn", "recurrent": True}, "unknown key 'recurrent'"),
        ({"algo": "r2d2", "normalize_reward": True}, "unknown key 'normalize_reward'"),
        ({"algo": "r2d2", "cell": "rnn"}, "agent.cell='rnn'"),
        ({"algo": "r2d2", "mode": "workers"}, "sequences are drawn by priorities, which workers do not keep"),
        ({"algo": "r2d2", "sequence_length": 4, "sequence_stride": 5}, "sequence_stride=5 would leave steps out"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            resolve(("call", {"env": RECALL, **settings}))


def test_a_column_of_segments_is_for_rollouts():
    once = FieldSpec("hidden", (3,), "float32", once=True)
    spec = SegmentSpec(4, 2, FieldSpec("obs", (3,), "float32"), FieldSpec("action", (), "int64"), (once,))
    assert spec.columns(bytearray(spec.nbytes))["hidden"].shape == (1, 2, 3)
    with pytest.raises(ConfigError, match="'hidden' has one row per segment"):
        make_memory(steppe.DQNConfig(), spec, stream=np.random.default_rng(), total_steps=None)

"""Agents that remember, in the composition API and in the user's hands: what works, and what is refused in a sentence."""

from __future__ import annotations

import numpy as np
import pytest

import steppe
from steppe import DistributedAgent, DistributedEnvironment, MainLoop, ReplayBufferPool
from steppe.core.config.run import resolve_config
from steppe.core.contracts.errors import ConfigError, SteppeError, UsageError
from steppe.core.contracts.specs import ActionSpec, EnvSpec, FieldSpec, SegmentSpec
from steppe.replay import GlobalBuffer, LocalBuffer, Windowing, make_memory
from steppe.training.autotune import resolve_auto_settings

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
        ("r2d2", R2D2, "r2d2 learns from sequences with stored state, not from single steps"),
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
    with pytest.raises(UsageError, match=r"windows have columns \[R, N, …\]"):
        DistributedAgent("r2d2", config=R2D2).bind(environment).compute_gradients(flat)


def drawn_from(steps, agent):
    """Episodes of an environment as windows of time, through the buffers that a user has."""
    buffer = GlobalBuffer(500, Windowing(6, burn_in=2, n_step=2), batch_size=8, seed=0)
    for number in {step["episode"] for step in steps}:
        episode = [step for step in steps if step["episode"] == number]
        local = LocalBuffer(episode[0]["obs"])
        for step in episode:
            local.add(step["action"], step["reward"], step["next_obs"], step["hidden"], [True], step["q_val"])
        buffer.add(local.finish(terminated=bool(episode[-1]["terminated"])))
    return buffer, buffer.get_batch()


def moved(agent, before):
    after = agent.get_policy_parameters()
    return any(not np.array_equal(before[name], after[name]) for name in before)


def test_r2d2_collects_and_learns_by_hand(environment):
    agent = DistributedAgent("r2d2", config=R2D2, seed=0).bind(environment)
    buffer, batch = drawn_from(environment.generate_experiences(agent, 4), agent)
    before = agent.get_policy_parameters()
    metrics = agent.learn_from_batch(batch)
    assert metrics["updates"] == 1
    assert metrics["priorities"].shape == (8,)
    assert moved(agent, before)
    assert agent.get_training_stats()["experiences"] == np.count_nonzero(batch["learn"])
    buffer.update_priorities(batch.indices, metrics["priorities"])
    before = agent.get_policy_parameters()
    gradients = agent.compute_gradients(batch)
    assert not moved(agent, before)
    agent.apply_gradients(gradients)
    assert moved(agent, before)


@pytest.mark.parametrize(
    ("column", "value", "sentence"),
    [
        ("action", 10**8, "'action' is 100000000"),
        ("following", 10**8, "'following' is 100000000"),
        ("following", -1, "'following' is -1"),
        ("reward", np.nan, "'reward' is nan"),
        ("hidden", np.inf, "'hidden' is inf"),
        ("learn", False, "no row to learn from"),
    ],
)
def test_windows_with_values_that_cannot_be_learned_from_are_refused(column, value, sentence, environment):
    agent = DistributedAgent("r2d2", config=R2D2, seed=0).bind(environment)
    _, batch = drawn_from(environment.generate_experiences(agent, 2), agent)
    spoiled = {name: np.array(values) for name, values in batch.columns.items()}
    if column == "learn":
        spoiled[column][...] = value
    else:
        spoiled[column].flat[1] = value
    before = agent.get_policy_parameters()
    for learn in (agent.learn_from_batch, agent.compute_gradients):
        with pytest.raises(SteppeError, match=sentence):
            learn(spoiled)
    assert not moved(agent, before)


def test_dhc_learns_from_episodes_of_a_team_by_hand():
    """Three agents with rewards of their own, gathered as the pathfinding project does."""
    spec = EnvSpec("team", FieldSpec("obs", (6, 9, 9), "float32"), ActionSpec("discrete", (5,)), num_agents=3)
    agent = DistributedAgent("dhc", config={"channels": 8}, seed=0).bind(spec)
    stream, size = np.random.default_rng(0), next(f for f in agent.config.columns(spec) if f.name == "hidden").shape
    buffer = GlobalBuffer(200, Windowing(4, n_step=2), batch_size=4, seed=0)
    for terminated in (True, False):
        local = LocalBuffer(stream.random((3, 6, 9, 9), np.float32))
        for _ in range(9):
            seen, values = stream.random((3, 6, 9, 9), np.float32), stream.random((3, 5), np.float32)
            heard, state = np.ones((3, 3), bool), np.zeros((3, *size), np.float16)
            local.add(stream.integers(5, size=3), stream.random(3), seen, state, heard, values)
        buffer.add(local.finish(terminated=terminated))
    batch = buffer.get_batch(32)
    assert batch["terminated"].shape == batch["reward"].shape == (6, 32, 3)
    assert np.array_equal(batch["terminated"], np.repeat(batch["terminated"][..., :1], 3, axis=2)), "they end together"
    before = agent.get_policy_parameters()
    assert agent.learn_from_batch(batch)["updates"] == 1
    assert moved(agent, before)
    before = agent.get_policy_parameters()
    agent.apply_gradients(agent.compute_gradients(batch))
    assert moved(agent, before)


def test_an_episode_has_an_end_for_every_reward():
    episode = {"obs": np.zeros((3, 2, 4)), "action": np.zeros((3, 2), int), "reward": np.zeros((3, 2), np.float32)}
    with pytest.raises(UsageError, match=r"not shapes \(3,\) and \(3, 2\)"):
        GlobalBuffer(50).add({**episode, "terminated": np.zeros(3, bool)})


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
    chosen = resolve_auto_settings(
        resolve_config(("call", {"env": RECALL, "algo": algo, "envs": "auto", "actors": "auto", **config}))
    )
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
            resolve_config(("call", {"env": RECALL, **settings}))


def test_a_column_of_segments_is_for_rollouts():
    once = FieldSpec("hidden", (3,), "float32", once=True)
    spec = SegmentSpec(4, 2, FieldSpec("obs", (3,), "float32"), FieldSpec("action", (), "int64"), (once,))
    assert spec.columns(bytearray(spec.nbytes))["hidden"].shape == (1, 2, 3)
    with pytest.raises(ConfigError, match="'hidden' has one row per segment"):
        make_memory(steppe.DQNConfig(), spec, stream=np.random.default_rng(), total_steps=None)

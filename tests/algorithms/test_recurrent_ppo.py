"""PPO with a memory against torch's own cells: the state it begins with, where it forgets, and what it learns from."""

import numpy as np
import pytest
import torch

from steppe.algorithms.nn.forward_backward import RecurrentPass, RolloutTargets
from steppe.algorithms.nn.rnn.cell import RecurrentCell
from steppe.algorithms.ppo.config import PPOConfig
from steppe.algorithms.ppo.ppo import PPO
from steppe.core.config.run import EnvConfig
from steppe.core.contracts.errors import ConfigError
from steppe.core.contracts.segment import Batch, Segment, SegmentHeader
from steppe.core.contracts.specs import ActionSpec, EnvSpec, FieldSpec, SegmentSpec
from steppe.core.io import codec
from steppe.envs import make_segment_env
from tests.support.recurrent_oracles import leaves_of, unrolled

pytestmark = pytest.mark.unit
both = pytest.mark.parametrize("cell", ["lstm", "gru"])
worlds = pytest.mark.parametrize(
    ("env", "vector"),
    [("steppe/Counting-v0", "loop"), ("steppe/Recall-v0", "native"), ("steppe/Recall-v0", "loop")],
)
NUM_ENVS, NUM_STEPS = 4, 11


def make(env="steppe/Counting-v0", vector="loop", cell="lstm", **values):
    """An agent in a world, and a function that collects the next segment."""
    world = make_segment_env(env, EnvConfig(vector=vector), NUM_ENVS, np.random.SeedSequence(3))
    given = {"hidden": (7,), "cell_size": 6, "minibatch_size": 32, "segment_steps": NUM_STEPS, "gae_lambda": 0.0}
    agent = PPO(PPOConfig(recurrent=True, cell=cell, **{**given, **values}), world.spec, seed=1)
    if "Counting" in env:
        agent.network.body.tower.gates[0].weight.data[0] = 0.0  # identities are large numbers
    agent.begin(NUM_ENVS, np.random.default_rng(0))
    obs = np.zeros((NUM_ENVS, *world.spec.obs.shape), np.float32)
    world.reset(obs)
    spec = SegmentSpec(NUM_STEPS, NUM_ENVS, world.spec.obs, world.spec.action.field, agent.config.columns(world.spec))

    def collect():
        segment = Segment.blank(spec)
        segment["obs"][0] = obs
        for t in range(NUM_STEPS):
            segment.write(t, agent.act(segment["obs"][t], world.starts))
            world.step(segment["action"][t], segment, t)
        obs[...] = segment["obs"][-1]
        segment.header = SegmentHeader("", 0, 0, 0, 0)
        return segment

    return agent, collect


def stretches(segment, env):
    """(first row, row after the last) of what one environment lived through in one go, without reset steps."""
    found, first = [], 0
    for t in range(NUM_STEPS):
        if not segment["valid"][t, env]:
            first = t + 1
        elif segment.cut[t, env]:
            found.append((first, t + 1))
            first = t + 1
    return [*found, (first, NUM_STEPS)] if first < NUM_STEPS else found


def by_torch(agent, leaves, segment, env, first, until, then=None):
    """(outputs, values) of a stretch; `then` is one more observation after it."""
    obs = list(segment["obs"][first:until, env]) + ([] if then is None else [then])
    state = torch.from_numpy(segment["hidden"][0, env].copy()).double() if first == 0 else None
    outputs, _ = unrolled(leaves, obs, state, agent.config.cell, torch.tanh)
    return outputs[:, :-1], outputs[:, -1]


def rollout_of(segment):
    """What the passes read of a rollout; the advantages are for the loss alone."""
    batch, none = Batch(segment.columns), np.zeros(NUM_STEPS * NUM_ENVS)
    return RolloutTargets(
        batch=batch,
        rows=np.flatnonzero(batch["valid"]),
        action=batch["action"].reshape(NUM_STEPS * NUM_ENVS, *batch["action"].shape[2:]),
        logp=batch["logp"].ravel(),
        advantage=none,
        returns=none,
        explained_variance=0.0,
    )


def observation_after(segment, env, until):
    """What follows a stretch."""
    return segment["final_obs"][until - 1, env] if segment.cut[until - 1, env] else segment["obs"][until, env]


def one_step_returns(agent, leaves, segment):
    """[T · B]: the reward and the discounted value after it, noted while acting or, after a stretch, as it is now."""
    found = np.zeros((NUM_STEPS, NUM_ENVS))
    for b in range(NUM_ENVS):
        for first, until in stretches(segment, b):
            values = by_torch(agent, leaves, segment, b, first, until, observation_after(segment, b, until))[1]
            last = 0.0 if segment["terminated"][until - 1, b] else values[-1].item()
            following = np.append(segment["value"][first + 1 : until, b].astype(np.float64), last)
            found[first:until, b] = segment["reward"][first:until, b] + agent.config.gamma * following
    return found.ravel()


def log_probabilities(logits, action):
    return torch.log_softmax(logits, dim=1)[torch.arange(len(action)), torch.from_numpy(action)]


@both
@worlds
def test_what_was_noted_while_acting_is_an_unroll_from_the_segments_start(env, vector, cell):
    """Values and probabilities over several segments, whose episodes begin before and within them."""
    agent, collect = make(env, vector, cell)
    leaves, inner = leaves_of(agent.network), 0
    for _ in range(4):
        segment = collect()
        for b in range(NUM_ENVS):
            for first, until in stretches(segment, b):
                logits, values = by_torch(agent, leaves, segment, b, first, until)
                logp = log_probabilities(logits, segment["action"][first:until, b])
                np.testing.assert_allclose(segment["value"][first:until, b], values.detach(), rtol=1e-4, atol=1e-5)
                np.testing.assert_allclose(segment["logp"][first:until, b], logp.detach(), rtol=1e-4, atol=1e-5)
                inner += first > 0
    assert inner > 4, "episodes began within segments"
    assert segment["hidden"].shape[0] == 1


@both
@worlds
def test_nothing_has_moved_before_the_first_update(env, vector, cell):
    """The learner comes to the same probabilities as the actor did, in any minibatch of whole environments."""
    agent, collect = make(env, vector, cell)
    for _ in range(3):
        rollout, through = rollout_of(collect()), RecurrentPass(agent.network)
        for rows in through.minibatches(rollout, 2 * NUM_STEPS, np.random.default_rng(0)):
            outputs, _ = through.trace(rollout, rows)
            logp = agent.choices.evaluate(outputs, rollout.action[rows])[0]
            np.testing.assert_allclose(logp, rollout.logp[rows], rtol=1e-4, atol=1e-5)


@both
def test_values_after_a_cut_remember_what_was_before_it(cell):
    """Truncated episodes go on from the state at the cut; the last row goes on from its own."""
    agent, collect = make(cell=cell)
    leaves, cuts = leaves_of(agent.network), 0
    for _ in range(4):
        segment = collect()
        last_value, final_value = RecurrentPass(agent.network).bootstrap(Batch(segment.columns))
        for b in range(NUM_ENVS):
            for first, until in stretches(segment, b):
                then = observation_after(segment, b, until)
                expected = by_torch(agent, leaves, segment, b, first, until, then)[1][-1].item()
                if segment["truncated"][until - 1, b]:
                    assert final_value[until - 1, b] == pytest.approx(expected, rel=1e-4, abs=1e-5)
                    cuts += 1
                elif until == NUM_STEPS and not segment.cut[until - 1, b]:
                    assert last_value[b] == pytest.approx(expected, rel=1e-4, abs=1e-5)
        assert not final_value[~segment["truncated"]].any()
    assert cuts > 5


@both
@worlds
def test_gradients_are_those_of_the_formula(env, vector, cell):
    """Autograd through every stretch of a rollout, with weights that have moved since it was collected."""
    agent, collect = make(env, vector, cell, entropy_coef=0.01)
    collect()
    segment = collect()
    stream = torch.Generator().manual_seed(0)
    agent.flat.parameters += 0.1 * torch.randn(agent.flat.parameters.shape, generator=stream)
    if "Counting" in env:
        agent.network.body.tower.gates[0].weight.data[0] = 0.0
    leaves, rollout, total = leaves_of(agent.network), rollout_of(segment), 0.0
    returns, count = one_step_returns(agent, leaves, segment), len(rollout.rows)
    gain = (returns - segment["value"].ravel())[rollout.rows]
    gains = np.zeros(NUM_STEPS * NUM_ENVS)
    gains[rollout.rows] = (gain - gain.mean()) / (gain.std() + 1e-8)
    for b in range(NUM_ENVS):
        for first, until in stretches(segment, b):
            rows = np.arange(first, until) * NUM_ENVS + b
            logits, values = by_torch(agent, leaves, segment, b, first, until)
            ratio = (log_probabilities(logits, rollout.action[rows]) - torch.from_numpy(rollout.logp[rows])).exp()
            aim = torch.from_numpy(gains[rows])
            policy = torch.min(ratio * aim, ratio.clamp(0.8, 1.2) * aim)
            entropy = torch.distributions.Categorical(logits=logits).entropy()
            error = (values - torch.from_numpy(returns[rows])) ** 2
            total = total + (-policy + 0.5 * error - 0.01 * entropy).sum() / count
    total.backward()
    expected = np.concatenate([leaf.grad.numpy().ravel() for leaf in leaves.values()])
    found = agent.gradients(rollout.batch)
    np.testing.assert_allclose(found, expected, rtol=2e-3, atol=2e-5 * np.abs(expected).max())


def test_minibatches_are_whole_environments():
    agent, collect = make()
    rollout = rollout_of(collect())
    parts = list(RecurrentPass(agent.network).minibatches(rollout, 2 * NUM_STEPS, np.random.default_rng(0)))
    assert len(parts) == 2
    assert sorted(np.concatenate(parts)) == rollout.rows.tolist()
    envs = [set(rows % NUM_ENVS) for rows in parts]
    assert [len(each) for each in envs] == [2, 2]
    assert not envs[0] & envs[1]


@both
def test_going_on_in_the_middle_of_an_episode_is_exact(cell):
    agent, collect = make(cell=cell)
    collect()
    state = codec.unpack(codec.pack(agent.acting_state()))
    resumed, _ = make(cell=cell)
    resumed.restore_acting(state)
    assert state["hidden"].any(), "within episodes"
    obs, starts = np.random.default_rng(0).normal(size=(3, NUM_ENVS, 3)).astype(np.float32), np.zeros(NUM_ENVS, bool)
    for seen in obs:
        first, second = agent.act(seen, starts), resumed.act(seen, starts)
        for name in first:
            np.testing.assert_array_equal(first[name], second[name], err_msg=name)


@pytest.mark.parametrize("kind", ["multi_discrete", "box"])
def test_other_actions_are_learned_from_as_well(monkeypatch, kind):
    """The gradient is that of the graph, which a GPU would take; deviations included."""
    action = ActionSpec("box", (2,), (-1.0,) * 2, (1.0,) * 2) if kind == "box" else ActionSpec(kind, (2, 3))
    spec = EnvSpec("invented", FieldSpec("obs", (3,), "float32"), action)
    config = PPOConfig(
        recurrent=True, hidden=(5,), cell_size=4, minibatch_size=32, segment_steps=6, normalize_obs=False
    )
    agent = PPO(config, spec, seed=0)
    agent.begin(2, np.random.default_rng(0))
    segment = Segment.blank(SegmentSpec(6, 2, spec.obs, action.field, agent.config.columns(spec)))
    segment["obs"][...] = np.random.default_rng(1).normal(size=segment["obs"].shape)
    segment["reward"][...] = np.random.default_rng(2).normal(size=(6, 2))
    segment["valid"][...] = True
    for t in range(6):
        segment.write(t, agent.act(segment["obs"][t], np.zeros(2, bool)))
    batch = Batch(segment.columns)
    compiled = agent.gradients(batch)
    monkeypatch.setattr(RecurrentCell, "bound", False)
    np.testing.assert_allclose(agent.gradients(batch), compiled, rtol=1e-3, atol=1e-5)
    assert np.abs(compiled).max() > 0


def test_options_that_do_not_go_together_are_refused():
    for name, value in (("cell", "gru"), ("cell_size", 32)):
        with pytest.raises(ConfigError, match=f"{name} is for recurrent=true: set that too, or leave {name} out"):
            PPOConfig(**{name: value})
    spec = EnvSpec("invented", FieldSpec("obs", (3,), "float32"), ActionSpec("discrete", (2,)))
    with pytest.raises(ConfigError, match="minibatch_size=16 holds no whole sequence of 32 steps"):
        PPOConfig(recurrent=True, minibatch_size=16, segment_steps=32).resolve_defaults(spec, 1, 8)
    fitted, _ = PPOConfig(recurrent=True, segment_steps=1000).resolve_defaults(spec, 1, 8)
    assert fitted.minibatch_size >= 1000
    assert fitted.resolve_defaults(spec, 1, 8)[0] == fitted


def test_without_the_option_nothing_is_remembered():
    spec = EnvSpec("invented", FieldSpec("obs", (3,), "float32"), ActionSpec("discrete", (2,)))
    plain = PPO(PPOConfig(), spec)
    assert plain.act(np.zeros((2, 3), np.float32), np.ones(2, bool)).keys() == {"action", "logp", "value"}
    assert plain.acting_state().keys() == {"stream"}
    assert [column.name for column in plain.config.columns(spec)] == ["logp", "value"]

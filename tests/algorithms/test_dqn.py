"""DQN's arithmetic against torch's autograd; schedules and the target network against plain numbers."""

import copy

import numpy as np
import pytest
import torch

from steppe.algorithms.dqn.config import DQNConfig
from steppe.algorithms.dqn.dqn import DQN
from steppe.algorithms.nn.flat_module import FlatModule
from steppe.core.config.fields import SCHEDULE_STEPS
from steppe.core.contracts.algorithm import Progress
from steppe.core.contracts.errors import NotFinite, WorldError
from steppe.core.contracts.specs import ActionSpec, EnvSpec, FieldSpec
from steppe.testing.agent import invented_draw, invented_segment

pytestmark = pytest.mark.unit

SPEC = EnvSpec("invented", FieldSpec("obs", (3,), "float32"), ActionSpec("discrete", (4,)))


def make(**values):
    agent = DQN(DQNConfig(hidden=(16,), **values), SPEC, seed=2)
    agent.begin(4, np.random.default_rng(0))
    return agent


def segment_for(agent):
    return invented_segment(agent, agent.config, SPEC, np.random.default_rng(1))


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("dueling", [True, False])
def test_gradient_and_priorities_are_autograds(double, dueling):
    agent = make(double=double, dueling=dueling)
    agent.observe(segment_for(agent), Progress(0, 100))  # builds the target network
    target = copy.deepcopy(agent.network)
    agent.flat.parameters += 0.5 * torch.randn(agent.flat.parameters.shape, generator=torch.Generator().manual_seed(0))
    batch = invented_draw(SPEC, np.random.default_rng(3))
    batch["reward"][:5] *= 8.0  # beyond the Huber threshold
    columns = {name: torch.from_numpy(column) for name, column in batch.columns.items()}
    agent.network.zero_grad(set_to_none=False)
    with torch.no_grad():
        following = target(columns["next_obs"])
        best = (agent.network if double else target)(columns["next_obs"]).argmax(1, keepdim=True)
        goal = columns["reward"] + columns["discount"] * ~columns["terminated"] * following.gather(1, best)[:, 0]
    values = agent.network(columns["obs"]).gather(1, columns["action"][:, None])[:, 0]
    losses = torch.nn.functional.smooth_l1_loss(values, goal, reduction="none")
    loss = (losses * torch.from_numpy(batch.weights)).mean()
    loss.backward()
    expected = agent.flat.gradient.numpy().copy()
    errors = (values - goal).abs().detach().numpy()
    assert (errors > 1).any()
    assert (errors < 1).any()
    np.testing.assert_allclose(agent.gradients(batch), expected, rtol=1e-4, atol=1e-6)
    learned = agent.learn(batch)
    assert learned.updates == agent.updates == 1
    assert learned.stats["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert learned.stats["q_mean"] == pytest.approx(values.mean().item(), rel=1e-4)
    assert learned.stats["td_error"] == pytest.approx(errors.mean(), rel=1e-4)
    np.testing.assert_allclose(learned.priorities, errors + 1e-6, rtol=1e-4)


def test_the_first_step_is_adams():
    """From zero moments a step is the learning rate times g / (|g| + 1e-8) of the clipped gradient."""
    agent = make(learning_rate=0.01)
    batch = invented_draw(SPEC, np.random.default_rng(3))
    before = agent.flat.parameters.numpy().copy()
    gradient = agent.gradients(batch)
    large = np.abs(gradient) > 1e-4
    assert large.sum() > 20
    agent.learn(batch)
    moved = agent.flat.parameters.numpy() - before
    np.testing.assert_allclose(moved[large], -0.01 * np.sign(gradient[large]), rtol=2e-3)


def test_observations_are_normalized_by_those_that_were_acted_on():
    agent = make(normalize_obs=True)
    segment = segment_for(agent)
    agent.observe(segment, Progress(0, 100))
    seen = segment["obs"][:-1][segment["valid"]].astype(np.float64)
    arrays = agent.weights().arrays()
    assert float(arrays["normalizer.count"]) == len(seen)
    np.testing.assert_allclose(arrays["normalizer.mean"], seen.mean(axis=0))
    np.testing.assert_allclose(arrays["normalizer.var"], seen.var(axis=0))


def test_without_a_seed_it_is_seed_zero():
    config = DQNConfig(hidden=(16,))
    assert DQN(config, SPEC).weights().sha256() == DQN(config, SPEC, seed=0).weights().sha256()


def test_dueling_values_are_value_plus_centred_advantage():
    agent = make(dueling=True)
    obs = torch.randn(9, 3)
    features = agent.network.torso(obs)
    head = agent.network.head
    advantage = head.advantage(features)
    torch.testing.assert_close(agent.network(obs).mean(1), head.value(features)[:, 0])
    torch.testing.assert_close(
        agent.network(obs) - agent.network(obs).mean(1, keepdim=True), advantage - advantage.mean(1, keepdim=True)
    )


@pytest.mark.parametrize(
    ("env_steps", "total", "expected"),
    [(0, 1000, 1.0), (100, 1000, 0.55), (200, 1000, 0.1), (900, 1000, 0.1), (0.1 * SCHEDULE_STEPS, None, 0.55)],
)
def test_epsilon_falls_linearly_and_travels_with_the_weights(env_steps, total, expected):
    agent = make(epsilon_start=1.0, epsilon_end=0.1, exploration_fraction=0.2)
    assert agent.epsilon == 1.0
    agent.observe(segment_for(agent), Progress(int(env_steps), total))
    assert agent.epsilon == pytest.approx(expected)
    actor = make(epsilon_start=1.0, epsilon_end=0.1)
    actor.load(agent.weights().copy())
    assert actor.epsilon == agent.epsilon


@pytest.mark.parametrize(("total", "expected"), [(10_000, 1_600), (10**6, 8_000), (None, 8_000)])
def test_without_a_fraction_long_runs_explore_no_longer_than_short_ones(total, expected):
    agent = make(epsilon_start=1.0, epsilon_end=0.5)
    agent.observe(segment_for(agent), Progress(expected // 2, total))
    assert agent.epsilon == pytest.approx(0.75)
    agent.observe(segment_for(agent), Progress(expected, total))
    assert agent.epsilon == pytest.approx(0.5)


def test_the_share_of_random_actions_is_epsilon():
    agent = make(epsilon_start=0.3)
    obs = np.zeros((20_000, 3), np.float32)
    best = agent.act(obs, np.zeros(len(obs), bool), explore=False)["action"]
    chosen = agent.act(obs, np.zeros(len(obs), bool))["action"]
    assert (chosen != best).mean() == pytest.approx(0.3 * 3 / 4, abs=0.015)
    assert set(chosen) == {0, 1, 2, 3}


def test_the_target_network_follows_environment_steps_and_stays_within_a_block():
    agent = make(target_every=100)
    segment = segment_for(agent)
    agent.observe(segment, Progress(40, 1000))
    first = agent.state()["target"]
    for seed in range(3):
        agent.learn(invented_draw(SPEC, np.random.default_rng(seed)))
    np.testing.assert_array_equal(agent.state()["target"], first)
    agent.observe(segment, Progress(99, 1000))
    np.testing.assert_array_equal(agent.state()["target"], first)
    agent.observe(segment, Progress(104, 1000))
    np.testing.assert_array_equal(agent.state()["target"], agent.weights().buffer)
    moved = agent.state()["target"]
    agent.learn(invented_draw(SPEC, np.random.default_rng(9)))
    agent.observe(segment, Progress(203, 1000))
    np.testing.assert_array_equal(agent.state()["target"], moved)
    agent.observe(segment, Progress(204, 1000))
    assert (agent.state()["target"] != moved).any()


def test_an_actor_builds_neither_optimizer_nor_target(monkeypatch):
    agent, twins = make(), []
    twin = FlatModule.clone
    monkeypatch.setattr(FlatModule, "clone", lambda flat: twins.append(flat) or twin(flat))
    agent.act(np.zeros((4, 3), np.float32), np.zeros(4, bool))
    agent.load(agent.weights().copy())
    assert twins == []
    assert agent.state()["adam"] == {}
    assert twins == [agent.flat], "a checkpoint needs one"


def test_a_loss_that_is_not_a_number_is_named_with_its_update():
    agent = make()
    batch = invented_draw(SPEC, np.random.default_rng(0))
    batch["reward"][3] = np.inf
    with pytest.raises(NotFinite, match="loss is inf at update 0"):
        agent.learn(batch)


def test_worlds_it_cannot_act_in_are_refused_with_who_can():
    spec = EnvSpec("Pendulum-v1", SPEC.obs, ActionSpec("box", (1,), (-2.0,), (2.0,)))
    with pytest.raises(
        WorldError, match="dqn cannot choose continuous actions, which Pendulum-v1 has; these can: a2c, a3c, ppo"
    ):
        DQN(DQNConfig(), spec)

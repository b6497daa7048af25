"""PPO's arithmetic against torch's autograd and plain Python; learning itself is in tests/learning."""

import numpy as np
import pytest
import torch

from steppe.algorithms.nn.forward_backward import split_evenly
from steppe.algorithms.ppo.config import PPOConfig
from steppe.algorithms.ppo.ppo import PPO
from steppe.core.contracts.algorithm import Progress
from steppe.core.contracts.errors import ConfigError, NotFinite
from steppe.core.contracts.segment import Batch
from steppe.core.contracts.specs import ActionSpec, EnvSpec, FieldSpec
from steppe.testing.agent import invented_segment

pytestmark = pytest.mark.unit

VECTOR = FieldSpec("obs", (3,), "float32")
ACTIONS = {
    "discrete": ActionSpec("discrete", (4,)),
    "multi_discrete": ActionSpec("multi_discrete", (2, 3)),
    "box": ActionSpec("box", (2,), (-1.0, -1.0), (1.0, 1.0)),
}


def agent_and_batch(kind="discrete", seed=0, **values):
    """An agent whose weights moved a little since the batch was collected, so that ratios differ from 1."""
    spec = EnvSpec("invented", VECTOR, ACTIONS[kind])
    plain = {"minibatch_size": 8, "normalize_obs": False, "normalize_reward": False}
    config = PPOConfig(hidden=(16,), **{**plain, **values})
    agent = PPO(config, spec, seed=seed)
    agent.begin(4, np.random.default_rng(seed))
    segment = invented_segment(agent, config, spec, np.random.default_rng(seed))
    stream = torch.Generator().manual_seed(seed)
    agent.flat.parameters += 0.15 * torch.randn(agent.flat.parameters.shape, generator=stream)
    return agent, Batch(segment.columns)


def one_step_advantages(agent, batch):
    """With lambda = 0 an advantage is r + γ V(what was seen next) − V; longer chains are test_returns's."""
    columns = batch.columns
    cut = columns["terminated"] | columns["truncated"]
    seen = np.where(cut[..., None], columns["final_obs"], columns["obs"][1:])
    with torch.no_grad():
        after = written_out(agent.network, torch.from_numpy(seen.reshape(-1, 3)))[1].numpy().reshape(cut.shape)
    recorded = np.concatenate([columns["value"][1:], after[-1:]])  # the actor's own, where the episode went on
    after = np.where(columns["terminated"], 0.0, np.where(cut, after, recorded))
    return np.where(columns["valid"], columns["reward"] + agent.config.gamma * after - columns["value"], 0.0)


def written_out(network, obs):
    """The same network as a formula that autograd can follow."""
    parts = []
    for tower in (network.towers.policy, network.towers.value):
        layer = obs
        for part in tower[:-1]:
            layer = torch.tanh(layer @ part.weight + part.bias)
        parts.append(layer @ tower[-1].weight + tower[-1].bias)
    outputs, value = parts
    if network.log_std is not None:
        outputs = torch.cat([outputs, network.log_std.expand_as(outputs)], dim=1)
    return outputs, value.squeeze(1)


def autograd_gradient(agent, batch, advantage):
    """The paper's loss written with torch.distributions."""
    config, columns, valid = agent.config, batch.columns, batch["valid"]
    returns = torch.from_numpy((advantage + columns["value"])[valid]).float()
    gain = torch.from_numpy(advantage[valid]).float()
    if config.normalize_advantage:
        gain = (gain - gain.mean()) / (gain.std(unbiased=False) + 1e-8)
    action = torch.from_numpy(columns["action"][valid])
    agent.network.zero_grad(set_to_none=False)
    outputs, value = written_out(agent.network, torch.from_numpy(columns["obs"][:-1][valid]))
    if action.dtype == torch.float32:
        chosen = [torch.distributions.Normal(outputs[:, d], outputs[:, 2 + d].exp()) for d in range(2)]
    else:
        sizes = [4] if action.ndim == 1 else [2, 3]
        chosen = [torch.distributions.Categorical(logits=part) for part in outputs.split(sizes, dim=1)]
    columns_of_action = action.reshape(len(action), -1)
    logp = sum(choice.log_prob(columns_of_action[:, k]) for k, choice in enumerate(chosen))
    entropy = sum(choice.entropy() for choice in chosen).mean()
    ratio = (logp - torch.from_numpy(columns["logp"][valid])).exp()
    policy = -torch.min(ratio * gain, ratio.clamp(1 - config.clip, 1 + config.clip) * gain).mean()
    loss = policy + config.value_coef * (value - returns).square().mean() - config.entropy_coef * entropy
    loss.backward()
    outside = ((ratio - 1).abs() > config.clip).float().mean()
    return agent.flat.gradient.numpy().copy(), {"policy_loss": policy.item(), "clip_fraction": outside.item()}


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("kind", ACTIONS)
def test_the_gradient_is_autograds(kind, normalize):
    agent, batch = agent_and_batch(kind, entropy_coef=0.02, gae_lambda=0.0, normalize_advantage=normalize)
    expected, terms = autograd_gradient(agent, batch, one_step_advantages(agent, batch))
    assert 0.1 < terms["clip_fraction"] < 0.9  # both sides of the clip are exercised
    np.testing.assert_allclose(agent.gradients(batch), expected, rtol=1e-4, atol=1e-6)


def test_means_beyond_the_bounds_cost_the_mean_square_of_how_far():
    gradients = []
    for coef in (0.0, 0.3):
        agent, batch = agent_and_batch("box", bounds_coef=coef)
        with torch.no_grad():
            agent.network.towers.policy[-1].bias.copy_(torch.tensor([1.2, -0.9]))
        gradients.append(agent.gradients(batch))
    agent.network.zero_grad(set_to_none=False)
    means = written_out(agent.network, torch.from_numpy(batch["obs"][:-1][batch["valid"]]))[0][:, :2]
    beyond = (means.abs() - 1).clamp(min=0)
    assert (beyond > 0).any()
    assert (beyond == 0).any()
    (0.3 * beyond.square().sum(1).mean()).backward()
    np.testing.assert_allclose(gradients[1] - gradients[0], agent.flat.gradient.numpy(), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("learners", [1, 3])
def test_several_learners_normalize_advantages_by_what_all_of_them_have(learners):
    """Learners with equal rows have the mean and the deviation of one of them."""
    agent, batch = agent_and_batch()
    alone = agent.gradients(batch)
    agent.joint_sum = lambda sums: learners * sums
    np.testing.assert_allclose(agent.gradients(batch), alone, rtol=1e-4, atol=1e-7)
    batch["valid"][...] = False
    batch["valid"][0, 0] = True
    batch["reward"][0, 0] = 1.0
    lone = agent.gradients(batch)
    agent.joint_sum = None
    if learners == 1:
        np.testing.assert_array_equal(agent.gradients(batch), lone)  # one row in all is not normalized


def test_gradient_norms_are_averaged_and_rollouts_counted():
    agent, batch = agent_and_batch(epochs=3, minibatch_size=1000, learning_rate=1e-12)
    norm = np.linalg.norm(agent.gradients(batch).astype(np.float64))
    learned = agent.learn(batch)
    assert learned.updates == 3
    assert learned.stats["grad_norm"] == pytest.approx(norm, rel=1e-3)
    agent.learn(batch)
    assert agent.state()["rollouts"] == 2


@pytest.mark.parametrize(("allowed", "epochs"), [(0.99, 1), (1.01, 3)])
def test_the_allowed_divergence_is_of_an_epochs_mean(allowed, epochs):
    """With hardly any learning, every epoch has the divergence of the first."""
    settings = {"minibatch_size": 4, "learning_rate": 1e-12}
    first = agent_and_batch(epochs=1, **settings)[0].learn(agent_and_batch()[1])
    assert first.updates > 2
    agent, batch = agent_and_batch(epochs=3, target_kl=allowed * first.stats["approx_kl"], **settings)
    assert agent.learn(batch).updates == epochs * first.updates


def test_statistics_of_one_whole_pass_are_autograds():
    agent, batch = agent_and_batch(epochs=1, minibatch_size=1000, gae_lambda=0.0)
    _, terms = autograd_gradient(agent, batch, one_step_advantages(agent, batch))
    learned = agent.learn(batch)
    assert learned.updates == 1
    for name, number in terms.items():
        assert learned.stats[name] == pytest.approx(number, rel=1e-4, abs=1e-6)


def test_the_first_ratio_is_one_even_while_observations_are_normalized():
    spec = EnvSpec("invented", VECTOR, ACTIONS["discrete"])
    config = PPOConfig(hidden=(16,), minibatch_size=1000, epochs=1, normalize_obs=True)
    agent = PPO(config, spec, seed=1)
    agent.begin(4, np.random.default_rng(1))
    for round_number in range(3):
        segment = invented_segment(agent, config, spec, np.random.default_rng(round_number))
        agent.observe(segment, Progress(0, 100))
        stats = agent.learn(Batch(segment.columns)).stats
        assert stats["approx_kl"] == pytest.approx(0.0, abs=1e-6)
        assert stats["clip_fraction"] == 0.0
    assert float(agent.weights().arrays()["normalizer.count"]) > 24


@pytest.mark.parametrize(("rows", "size"), [(1, 8), (7, 8), (8, 8), (9, 8), (4001, 512), (100, 1)])
def test_minibatches_hold_every_row_once_in_nearly_equal_parts(rows, size):
    parts = list(split_evenly(np.random.default_rng(0).permutation(rows), size))
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(rows))
    lengths = [len(part) for part in parts]
    assert max(lengths) <= size
    assert max(lengths) - min(lengths) <= 1


def test_reset_rows_take_no_part():
    """Everything in them is poison: the invented segment's rewards there are NaN, and here the rest as well."""
    agent, batch = agent_and_batch()
    clean = agent.gradients(batch)
    resets = ~batch["valid"]
    assert resets.any()
    for name in ("value", "logp"):
        batch[name][resets] = np.nan
    batch["obs"][:-1][resets] = np.nan
    batch["action"][resets] = 10**9
    np.testing.assert_array_equal(agent.gradients(batch), clean)


def test_nothing_valid_means_no_update():
    agent, batch = agent_and_batch()
    batch["valid"][...] = False
    before = agent.weights().sha256()
    assert agent.learn(batch).updates == 0
    assert agent.weights().sha256() == before


def test_a_loss_that_is_not_a_number_is_named_with_its_update():
    agent, batch = agent_and_batch(minibatch_size=1000)
    agent.updates = 41
    batch["reward"][0, 0] = np.nan
    batch["valid"][0, 0] = True
    before = agent.weights().sha256()
    with pytest.raises(NotFinite, match=r"policy_loss is nan at update 41"):
        agent.learn(batch)
    assert agent.weights().sha256() == before


def test_the_learning_rate_falls_to_zero_when_annealed():
    agent, batch = agent_and_batch(anneal=True, learning_rate=0.01)
    spec = EnvSpec("invented", VECTOR, ACTIONS["discrete"])
    segment = invented_segment(agent, agent.config, spec, np.random.default_rng(0))
    agent.observe(segment, Progress(750, 1000))
    assert agent.learn(batch).stats["learning_rate"] == pytest.approx(0.0025)
    agent.observe(segment, Progress(1000, 1000))
    before = agent.weights().sha256()
    agent.learn(batch)
    assert agent.weights().sha256() == before
    with pytest.raises(ConfigError, match="anneal"):
        agent.observe(segment, Progress(1000, None))


def test_epochs_end_early_beyond_the_allowed_divergence():
    free, batch = agent_and_batch(epochs=6, learning_rate=0.05)
    bound, _ = agent_and_batch(epochs=6, learning_rate=0.05, target_kl=1e-6)
    assert bound.learn(batch).updates * 6 == free.learn(batch).updates


def test_the_optimizer_is_built_at_the_first_update_only():
    agent, batch = agent_and_batch()
    agent.act(batch["obs"][0], np.zeros(4, bool))
    agent.gradients(batch)
    assert agent.state()["adam"] == {}
    agent.learn(batch)
    assert agent.state()["adam"] != {}


def test_acting_leaves_torchs_generator_alone():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    agent, batch = agent_and_batch()
    agent.act(batch["obs"][0], np.zeros(4, bool))
    agent.learn(batch)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_value_loss_and_the_entropy_are_means_over_the_rows():
    agent, batch = agent_and_batch(epochs=1, minibatch_size=1000, gae_lambda=0.0)
    valid = batch["valid"]
    returns = (one_step_advantages(agent, batch) + batch["value"])[valid]
    with torch.no_grad():
        outputs, value = written_out(agent.network, torch.from_numpy(batch["obs"][:-1][valid]))
    entropy = torch.distributions.Categorical(logits=outputs).entropy().mean().item()
    stats = agent.learn(batch).stats
    assert stats["value_loss"] == pytest.approx(np.mean((value.numpy() - returns) ** 2), rel=1e-4)
    assert stats["entropy"] == pytest.approx(entropy, rel=1e-4)


@pytest.mark.parametrize("rows", [1, 2])
def test_two_rows_are_normalized_and_one_is_not(rows):
    """Alone and beside learners that add nothing: of two rows the advantages become 1 and -1."""
    agent, batch = agent_and_batch(gae_lambda=0.0, value_coef=0.0, entropy_coef=0.0)
    batch["valid"][...] = False
    batch["valid"].reshape(-1)[:rows] = True
    batch["reward"].reshape(-1)[:2] = [1.0, -3.0]
    expected, _ = autograd_gradient(agent, batch, one_step_advantages(agent, batch))
    alone = agent.gradients(batch)
    agent.joint_sum = lambda sums: sums
    together = agent.gradients(batch)
    np.testing.assert_allclose(together, alone, rtol=1e-4, atol=1e-6)
    if rows == 2:
        np.testing.assert_allclose(alone, expected, rtol=1e-4, atol=1e-6)
    else:
        assert np.abs(alone).max() > 1e-3, "less its own mean, a single advantage would be 0"


def test_learners_together_normalize_only_if_asked():
    agent, batch = agent_and_batch(normalize_advantage=False)
    alone = agent.gradients(batch)
    agent.joint_sum = lambda sums: sums
    np.testing.assert_array_equal(agent.gradients(batch), alone)


def test_without_a_seed_it_is_0():
    spec = EnvSpec("invented", VECTOR, ACTIONS["discrete"])
    assert PPO(PPOConfig(), spec).weights().sha256() == PPO(PPOConfig(), spec, seed=0).weights().sha256()

"""Images on their way through the network: scaled, convolved and carried back as plain layers in double precision do it."""

import numpy as np
import pytest
import torch
from torch.nn import functional

from steppe.algorithms import make_agent
from steppe.algorithms.dqn.config import DQNConfig
from steppe.algorithms.nn.q_network import QFunction
from steppe.algorithms.nn.torsos import CNN, FlattenChannelsLast, ScalePixels
from steppe.algorithms.ppo.config import PPOConfig
from steppe.core.contracts.specs import ActionSpec, EnvSpec, FieldSpec

pytestmark = pytest.mark.unit

SHAPES = [(4, 84, 84), (1, 36, 50), (3, 12, 12)]


def spec_of(shape):
    return EnvSpec("image", FieldSpec("obs", shape, "uint8"), ActionSpec("discrete", (5,)))


def images(shape, count, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (count, *shape), np.uint8)


def by_hand(torso, obs):
    """The torso's features from its parameters alone, in double precision and torch's usual order of axes."""
    seen = torch.from_numpy(obs).double() / 255
    for layer in torso:
        if isinstance(layer, torch.nn.Conv2d):
            seen = functional.conv2d(seen, layer.weight.double(), layer.bias.double(), layer.stride).relu()
        elif isinstance(layer, FlattenChannelsLast):
            seen = torch.stack([seen[:, :, y, x] for y in range(seen.shape[2]) for x in range(seen.shape[3])], dim=1)
            seen = seen.reshape(len(obs), -1)
        elif isinstance(layer, torch.nn.Linear):
            seen = functional.linear(seen, layer.weight.double(), layer.bias.double()).relu()
    return seen


@pytest.mark.parametrize("shape", SHAPES)
def test_pixels_are_scaled_and_their_channels_lie_side_by_side(shape):
    obs = images(shape, 3)
    scaled = ScalePixels()(torch.from_numpy(obs))
    assert scaled.dtype == torch.float32
    assert scaled.is_contiguous(memory_format=torch.channels_last)
    np.testing.assert_allclose(scaled.numpy(), obs / 255.0, rtol=1e-6)


def test_a_view_with_gaps_is_scaled_as_it_is():
    obs = images((4, 8, 8), 6)
    np.testing.assert_allclose(
        ScalePixels()(torch.from_numpy(obs)[::2, :, 1:7]).numpy(), obs[::2, :, 1:7] / 255.0, rtol=1e-6
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_features_and_gradients_are_those_of_plain_layers(shape):
    torch.manual_seed(0)
    torso = CNN(spec_of(shape), (16,))
    obs, slopes = images(shape, 7), torch.randn(7, 16)
    features = torso(torch.from_numpy(obs))
    features.backward(slopes)
    mine = [parameter.grad.clone() for parameter in torso.parameters()]
    torso.zero_grad()
    expected = by_hand(torso, obs)
    np.testing.assert_allclose(features.detach(), expected.detach(), rtol=1e-4, atol=1e-5)
    expected.backward(slopes.double())
    for gradient, parameter in zip(mine, torso.parameters(), strict=True):
        np.testing.assert_allclose(gradient, parameter.grad, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("config", [PPOConfig(hidden=(16,)), DQNConfig(hidden=(16,))])
def test_what_acts_is_what_learns(config):
    """`run` and `trace` give the same numbers, and neither changes the observations."""
    algo = "ppo" if isinstance(config, PPOConfig) else "dqn"
    agent = make_agent(algo, config, spec_of((4, 84, 84)), seed=3)
    obs = images((4, 84, 84), 8)
    given = obs.copy()
    if algo == "ppo":
        run, traced = agent.network.run(obs), agent.network.trace(obs)
    else:
        values = QFunction(agent.flat)
        run, traced = (values(obs).copy(),), (values.trace(obs),)
    for one, other in zip(run, traced, strict=True):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(obs, given)

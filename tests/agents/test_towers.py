"""Towers against the same formula followed by autograd."""

import copy

import pytest
import torch

from steppe.agents.flat import FlatModule
from steppe.agents.towers import Towers

pytestmark = pytest.mark.unit


def formula(towers, obs):
    """[K, N, width], written out; returns it with the parameters that autograd followed."""
    weights = [weight.detach().clone().requires_grad_() for weight in towers.weight]
    biases = [bias.detach().clone().requires_grad_() for bias in towers.bias]
    activation = torch.tanh if towers.tanh else torch.relu
    layer = obs.expand(towers.num_towers, *obs.shape)
    for weight, bias in zip(weights, biases, strict=True):
        layer = activation(torch.einsum("kni,kio->kno", layer, weight) + bias[:, None])
    return layer, weights + biases


@pytest.mark.parametrize("activation", ["tanh", "relu"])
@pytest.mark.parametrize("hidden", [(6,), (7, 5), (8, 3, 4)])
@pytest.mark.parametrize("num_towers", [1, 2])
def test_features_and_gradients_are_autograds(num_towers, hidden, activation):
    torch.manual_seed(3)
    towers = Towers(num_towers, 5, hidden, activation)
    flat = FlatModule(towers)
    flat.parameters += 0.1 * torch.randn_like(flat.parameters)
    for rows in (11, 4, 11):  # memory is kept by the number of rows
        obs, gradient = torch.randn(rows, 5), torch.randn(num_towers, rows, hidden[-1])
        expected, followed = formula(towers, obs)
        expected.backward(gradient)
        with torch.no_grad():
            torch.testing.assert_close(towers(obs), expected.detach())
            towers.backward(gradient.clone())
        for parameter, other in zip([*towers.weight, *towers.bias], followed, strict=True):
            torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-4, atol=1e-5)


def test_a_copy_has_values_and_memory_of_its_own():
    towers = Towers(2, 3, (4,), "tanh")
    flat = FlatModule(towers)
    obs = torch.randn(5, 3)
    with torch.no_grad():
        before = towers(obs).clone()
        twin = copy.deepcopy(towers)
        flat.parameters.zero_()
        torch.testing.assert_close(twin(obs), before)
        assert (towers(obs) == 0).all()

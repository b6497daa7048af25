"""The compiled ways through a Rectified against the same formula followed by autograd."""

import numpy as np
import pytest
import torch

from steppe.agents.flat import FlatModule
from steppe.agents.rectified import Rectified, Ways

pytestmark = pytest.mark.unit


def make(num_in=3, hidden=(16, 24), num_out=4):
    torch.manual_seed(0)
    return FlatModule(Rectified(num_in, hidden, num_out))


def rows(count, num_in=3, seed=1):
    return np.random.default_rng(seed).standard_normal((count, num_in)).astype(np.float32)


@pytest.mark.parametrize("num_rows", [1, 7, 64])
@pytest.mark.parametrize(("num_in", "hidden", "num_out"), [(3, (16,), 1), (5, (17, 40), 4), (1, (8, 9, 10), 2)])
def test_results_and_gradients_are_autograds(num_in, hidden, num_out, num_rows):
    flat = make(num_in, hidden, num_out)
    ways, obs = Ways(flat.module), rows(num_rows, num_in)
    outputs = ways.forth(obs)
    d_outputs = rows(num_rows, num_out, seed=2)
    expected = flat.module(torch.from_numpy(obs))
    np.testing.assert_allclose(outputs, expected.detach().numpy(), rtol=1e-5, atol=1e-6)
    expected.backward(torch.from_numpy(d_outputs))
    gradient = flat.gradient.numpy().copy()
    assert np.count_nonzero(gradient) > len(gradient) / 4
    flat.gradient.fill_(99.0)  # gradients are written, not added
    ways.back(d_outputs)
    np.testing.assert_allclose(flat.gradient.numpy(), gradient, rtol=1e-4, atol=1e-6)


def test_the_initial_weights_are_torchs_own():
    flat = make()
    torch.manual_seed(0)
    layers = [torch.nn.Linear(3, 16), torch.nn.Linear(16, 24), torch.nn.Linear(24, 4)]
    plain = torch.nn.Sequential(layers[0], torch.nn.ReLU(), layers[1], torch.nn.ReLU(), layers[2])
    obs = torch.from_numpy(rows(5))
    torch.testing.assert_close(flat.module(obs), plain(obs))


def test_weights_that_are_loaded_later_are_seen():
    flat, other = make(), make()
    ways = Ways(flat.module)
    before = ways.forth(rows(4)).copy()
    other.parameters.mul_(2.0)
    flat.load(other.weights(), "this network")
    np.testing.assert_allclose(ways.forth(rows(4)), Ways(other.module).forth(rows(4)))
    assert (before != ways.forth(rows(4))).any()


def test_rows_of_different_number_do_not_disturb_each_other():
    flat = make()
    ways = Ways(flat.module)
    expected = Ways(flat.module).forth(rows(6)).copy()
    for count in [*range(1, 40), 6]:  # more numbers than are kept
        outputs = ways.forth(rows(count))
    np.testing.assert_array_equal(outputs, expected)


def test_what_is_not_a_number_is_not_rectified_away():
    obs = rows(4)
    obs[2, 1] = np.nan
    outputs = Ways(make().module).forth(obs)
    assert np.isnan(outputs[2]).all()
    assert np.isfinite(outputs[[0, 1, 3]]).all()

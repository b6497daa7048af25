"""Sampling against frequencies, logp, entropy and gradients against torch.distributions and autograd."""

import math

import numpy as np
import pytest
import torch

from steppe.algorithms.nn.distributions import Categorical, Gaussian, make_distribution
from steppe.core.contracts.specs import ActionSpec

pytestmark = pytest.mark.unit

DISCRETE = ActionSpec("discrete", (4,))
SEVERAL = ActionSpec("multi_discrete", (3, 2, 5))
BOX = ActionSpec("box", (3,), (-2.0, 0.0, -math.inf), (2.0, 10.0, math.inf))


def torch_terms(action_spec, outputs, action):
    """(logp, entropy) as torch's own distributions give them."""
    if action_spec.kind == "box":
        middle, extent = torch.tensor([0.0, 5.0, 0.0]), torch.tensor([2.0, 5.0, 1.0])
        normal = torch.distributions.Normal(middle + extent * outputs[:, :3], extent * outputs[:, 3:].exp())
        return normal.log_prob(action).sum(1), normal.entropy().sum(1)
    parts = outputs.split(list(action_spec.sizes), dim=1)
    choices = [torch.distributions.Categorical(logits=part) for part in parts]
    columns = action.reshape(len(outputs), -1)
    logp = sum(choice.log_prob(columns[:, k]) for k, choice in enumerate(choices))
    return logp, sum(choice.entropy() for choice in choices)


@pytest.fixture(params=[DISCRETE, SEVERAL, BOX], ids=lambda spec: spec.kind)
def case(request):
    distribution = make_distribution(request.param)
    outputs = np.random.default_rng(1).normal(size=(64, distribution.width)).astype(np.float32)
    action, logp = distribution.sample(outputs, np.random.default_rng(2))
    return request.param, distribution, outputs, action, logp


def test_forms_are_the_declared_ones(case):
    spec, _, _, action, logp = case
    assert (action.shape, action.dtype.name) == ((64, *spec.field.shape), spec.field.dtype)
    assert (logp.shape, logp.dtype.name) == ((64,), "float32")


def test_logp_and_entropy_are_torchs(case):
    spec, distribution, outputs, action, sampled_logp = case
    logp, entropy = torch_terms(spec, torch.from_numpy(outputs).double(), torch.from_numpy(action))
    found_logp, found_entropy, _ = distribution.evaluate(outputs, action)
    np.testing.assert_allclose(found_logp, logp, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(found_entropy, entropy, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(sampled_logp, logp, rtol=1e-4, atol=1e-4)


def test_gradients_are_autograds(case):
    spec, distribution, outputs, action, _ = case
    d_logp = np.random.default_rng(3).normal(size=64)
    leaf = torch.from_numpy(outputs).double().requires_grad_()
    logp, entropy = torch_terms(spec, leaf, torch.from_numpy(action))
    (logp @ torch.from_numpy(d_logp) + 0.3 * entropy.sum()).backward()
    _, _, inner = distribution.evaluate(outputs, action)
    found = distribution.backward(inner, action, d_logp, 0.3)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, leaf.grad, rtol=1e-5, atol=1e-6)


def test_means_beyond_the_bounds_are_pulled_back_and_no_others():
    """Against autograd; the third component has no bounds, and 0 ± 1 are those of the others."""
    distribution = Gaussian(BOX)
    outputs = np.array([[0.9, -3.0, 50.0, 0, 0, 0], [1.5, -1.0, -50.0, 0, 0, 0]], np.float32)
    action, _ = distribution.sample(outputs, np.random.default_rng(0))
    _, _, inner = distribution.evaluate(outputs, action)
    leaf = torch.from_numpy(outputs).double().requires_grad_()
    (0.7 * torch.relu(leaf[:, :2].abs() - 1.0).square().sum()).backward()
    assert np.count_nonzero(leaf.grad) == 2
    still = distribution.backward(inner, action, np.zeros(2), 0.0)
    assert not still.any()
    np.testing.assert_allclose(distribution.backward(inner, action, np.zeros(2), 0.0, 0.7), leaf.grad, rtol=1e-6)


def test_extreme_logits_stay_finite_and_impossible_choices_are_never_made():
    distribution = Categorical(ActionSpec("discrete", (3,)))
    outputs = np.tile(np.array([[-1e4, 1e4, -1e4]], np.float32), (500, 1))
    action, logp = distribution.sample(outputs, np.random.default_rng(0))
    assert (action == 1).all()
    np.testing.assert_allclose(logp, 0.0)
    _, entropy, inner = distribution.evaluate(outputs, action)
    np.testing.assert_allclose(entropy, 0.0)
    assert np.isfinite(distribution.backward(inner, action, np.ones(500), 1.0)).all()


def test_choices_have_the_given_probabilities():
    distribution = Categorical(SEVERAL)
    logits = np.array([0.0, 1.0, -1.0, 2.0, 0.5, 0.1, 0.2, 0.3, 0.4, 1.5], np.float32)
    num_rows = 40_000
    action, _ = distribution.sample(np.tile(logits, (num_rows, 1)), np.random.default_rng(0))
    for k, part in enumerate(np.split(logits, [3, 5])):
        expected = np.exp(part) / np.exp(part).sum()
        found = np.bincount(action[:, k], minlength=len(part)) / num_rows
        np.testing.assert_allclose(found, expected, atol=5 * 0.5 / math.sqrt(num_rows))


def test_normal_samples_have_their_mean_and_deviation_in_units_of_the_box():
    distribution = Gaussian(BOX)
    outputs = np.tile(np.array([0.5, -0.2, 3.0, 0.0, -1.0, 0.5], np.float32), (40_000, 1))
    action, _ = distribution.sample(outputs, np.random.default_rng(0))
    deviation = np.array([2.0, 5.0 * math.exp(-1.0), math.exp(0.5)])
    np.testing.assert_allclose(action.mean(0), [1.0, 4.0, 3.0], atol=0.05)
    np.testing.assert_allclose(action.std(0), deviation, rtol=0.03)


def test_without_a_stream_the_most_likely_action_is_taken(case):
    spec, distribution, outputs, _, _ = case
    action, _ = distribution.sample(outputs, None)
    if spec.kind == "box":
        expected = np.array([0.0, 5.0, 0.0]) + np.array([2.0, 5.0, 1.0]) * outputs[:, :3]
        np.testing.assert_allclose(action, expected, rtol=1e-5, atol=1e-6)
    else:
        bounds = np.cumsum(spec.sizes)[:-1]
        best = np.stack([part.argmax(1) for part in np.split(outputs, bounds, axis=1)], axis=1)
        np.testing.assert_array_equal(action.reshape(best.shape), best)

"""Compiled perceptrons against the same formula written out in NumPy, followed by torch's autograd."""

import copy

import numpy as np
import pytest
import torch

from steppe.algorithms.nn.flat_module import FlatModule
from steppe.algorithms.nn.mlp_kernels import TILE, HeadSpec, ParallelMLPs

pytestmark = pytest.mark.unit


def make(hidden=(7, 5), sizes=(3, 1), activation="tanh", num_in=4):
    torch.manual_seed(3)
    heads = {f"head{index}": HeadSpec(size, gain=0.5) for index, size in enumerate(sizes)}
    flat = FlatModule(ParallelMLPs(num_in, hidden, heads, activation))
    flat.parameters += 0.1 * torch.randn_like(flat.parameters)
    return flat.module, flat


def written_out(net, rows):
    """Outputs by plain sums, with the leaf tensors that autograd followed, by name."""
    leaves = {name: value.detach().double().clone().requires_grad_() for name, value in net.named_parameters()}
    outputs = []
    for head in dict(net.named_children()):
        layer = torch.from_numpy(rows).double()
        num_layers = sum(name.startswith(f"{head}.") for name in leaves) // 2
        for index in range(num_layers):
            layer = layer @ leaves[f"{head}.{index}.weight"] + leaves[f"{head}.{index}.bias"]
            if index < num_layers - 1:
                layer = torch.tanh(layer) if net.tanh else layer.clamp(min=0.0)
        outputs.append(layer)
    return torch.cat(outputs, dim=1), leaves


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("activation", ["tanh", "relu"])
@pytest.mark.parametrize("hidden", [(6,), (7, 5), (8, 3, 4)])
@pytest.mark.parametrize("sizes", [(2,), (3, 1), (2, 2, 1)])
def test_outputs_and_gradients_are_those_of_the_formula(sizes, hidden, activation):
    net, flat = make(hidden, sizes, activation)
    for count in (11, 1, TILE, 4 * TILE + 3, 5):  # tiles that are full and not, turned weights and not
        rows, d_outputs = numbers(count, 4, seed=count), numbers(count, sum(sizes), seed=count + 1)
        expected, leaves = written_out(net, rows)
        expected.backward(torch.from_numpy(d_outputs).double())
        np.testing.assert_allclose(net.run(rows), expected.detach(), rtol=2e-5, atol=2e-6)
        flat.gradient.fill_(99.0)  # gradients are written, not added
        np.testing.assert_array_equal(net.trace(rows), net.run(rows))
        net.trace(rows)
        net.backward(d_outputs)
        for name, parameter in net.named_parameters():
            np.testing.assert_allclose(parameter.grad, leaves[name].grad, rtol=2e-4, atol=2e-5 * count, err_msg=name)


def test_torch_autograd_gives_the_same():
    net, _ = make()
    rows = numbers(20, 4)
    np.testing.assert_allclose(net(torch.from_numpy(rows)).detach(), net.run(rows), rtol=1e-5, atol=1e-6)


def test_tanh_is_tanh_to_the_last_few_bits_everywhere():
    net, flat = make(hidden=(1,), sizes=(1,), num_in=1)
    flat.parameters.zero_()
    net.head0[0].weight.data.fill_(1.0)
    net.head0[1].weight.data.fill_(1.0)
    x = np.concatenate([np.linspace(-12, 12, 200_001), np.logspace(-30, 0, 1000), [np.inf, -np.inf, 3e38]])
    rows = x.astype(np.float32)[:, None]
    np.testing.assert_allclose(net.run(rows)[:, 0], np.tanh(rows[:, 0].astype(np.float64)), rtol=5e-7)
    assert np.abs(net.run(rows)).max() <= 1.0


@pytest.mark.parametrize("activation", ["tanh", "relu"])
def test_nan_input_gives_nan_output(activation):
    net, _ = make(activation=activation)
    rows = numbers(6, 4)
    rows[2, 1] = np.nan
    outputs = net.run(rows)
    assert np.isnan(outputs[2]).all()
    assert np.isfinite(np.delete(outputs, 2, axis=0)).all()


def test_running_in_between_does_not_disturb_the_way_back():
    net, flat = make()
    rows, d_outputs = numbers(10, 4), numbers(10, 4, seed=1)
    net.trace(rows)
    net.backward(d_outputs)
    expected = flat.gradient.clone()
    net.trace(rows)
    net.run(numbers(300, 4, seed=2))
    net.backward(d_outputs)
    assert torch.equal(flat.gradient, expected)


def test_a_copy_has_values_and_memory_of_its_own():
    net, flat = make()
    rows = numbers(5, 4)
    before = net.run(rows).copy()
    twin = flat.clone()
    flat.parameters.zero_()
    np.testing.assert_array_equal(twin.module.run(rows), before)
    assert (net.run(rows) == 0).all()


def test_without_a_flat_home_only_torchs_way_is_there():
    net, _ = make()
    assert net.bound
    assert not copy.deepcopy(ParallelMLPs(4, (3,), {"only": HeadSpec(1)}, "relu")).bound

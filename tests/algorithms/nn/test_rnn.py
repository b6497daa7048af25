"""The compiled LSTM and GRU, forth and back, against torch's own cells in double precision, followed by its autograd."""

import copy

import numpy as np
import pytest
import torch

from steppe.algorithms.nn.flat_module import FlatModule
from steppe.algorithms.nn.mlp_kernels import HeadSpec
from steppe.algorithms.nn.rnn.cell import MAX_CACHED_SHAPES, RecurrentCell

pytestmark = pytest.mark.unit
both = pytest.mark.parametrize("cell", ["lstm", "gru"])
SIZE, OUT = 5, 3


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def flags(*shape, seed=0, share=0.3):
    return np.random.default_rng(seed).random(shape) < share


def make(cell, size=SIZE):
    torch.manual_seed(1)
    flat = FlatModule(RecurrentCell(cell, size, [HeadSpec(2), HeadSpec(1, gain=1.0)]))
    flat.parameters += 0.1 * torch.randn_like(flat.parameters)
    return flat.module, flat


def by_torch(net, x, state, clear, stop):
    """Outputs, states after the last row, and the leaves that autograd followed: torch's cell, one environment at a time."""
    leaves = {name: value.detach().double().clone().requires_grad_() for name, value in net.named_parameters()}
    inputs = torch.from_numpy(x).double().requires_grad_()
    kind = torch.nn.LSTMCell if net.cell == "lstm" else torch.nn.GRUCell
    plain = kind(net.num_in, net.size, bias=False).double()
    cell = lambda *given: torch.func.functional_call(  # noqa: E731
        plain, {"weight_ih": torch.eye(net.num_in).double(), "weight_hh": leaves["weight"].T}, given
    )
    num_steps, num_envs = clear.shape
    outputs, last = [[None] * num_envs for _ in range(num_steps)], []
    for n in range(num_envs):
        known = torch.from_numpy(state[n : n + 1]).double()
        for t in range(num_steps):
            known = torch.zeros_like(known) if clear[t, n] else known.detach() if stop[t, n] else known
            if net.cell == "lstm":
                known = torch.cat(cell(inputs[t, n : n + 1], known.split(net.size, dim=1)), dim=1)
            else:
                known = cell(inputs[t, n : n + 1], known)
            outputs[t][n] = (known[:, : net.size] @ leaves["head_weight"] + leaves["head_bias"])[0]
        last.append(known[0])
    return torch.stack([torch.stack(row) for row in outputs]), torch.stack(last), inputs, leaves


@both
@pytest.mark.parametrize("shape", [(6, 4), (1, 3), (9, 1), (4, 33)])
def test_outputs_states_and_gradients_are_those_of_torch(cell, shape):
    net, flat = make(cell)
    x, state = numbers(*shape, net.num_in, seed=1), numbers(shape[1], net.num_state, seed=2)
    clear, stop, d_outputs = flags(*shape, seed=3), flags(*shape, seed=4), numbers(*shape, OUT, seed=5)
    expected, last, inputs, leaves = by_torch(net, x, state, clear, stop)
    expected.backward(torch.from_numpy(d_outputs).double())

    before = state.copy()
    unrolled = net.unroll(x.reshape(-1, net.num_in), state, clear)
    np.testing.assert_allclose(unrolled.outputs, expected.detach(), rtol=1e-5, atol=2e-6)
    np.testing.assert_allclose(unrolled.states(-1), last.detach(), rtol=1e-5, atol=2e-6)
    np.testing.assert_array_equal(state, before)
    d_x = net.backward(d_outputs, stop)
    np.testing.assert_allclose(d_x.reshape(x.shape), inputs.grad, rtol=1e-4, atol=1e-5)
    for name, leaf in leaves.items():
        np.testing.assert_allclose(
            dict(net.named_parameters())[name].grad, leaf.grad, rtol=1e-4, atol=2e-5, err_msg=name
        )
    assert flat.gradient.abs().sum() > 0


@both
def test_the_way_through_the_graph_is_the_same(cell):
    """What a GPU takes."""
    net, _ = make(cell)
    x, state = numbers(6, 4, net.num_in, seed=1), numbers(4, net.num_state, seed=2)
    clear, stop, d_outputs = flags(6, 4, seed=3), flags(6, 4, seed=4), numbers(6, 4, OUT, seed=5)
    unrolled = net.unroll(x.reshape(-1, net.num_in), state, clear)
    net.backward(d_outputs, stop)
    compiled = {name: parameter.grad.clone() for name, parameter in net.named_parameters()}
    net.zero_grad(set_to_none=False)
    outputs, after = net(*(torch.from_numpy(given) for given in (x, state, clear, stop)))
    outputs.backward(torch.from_numpy(d_outputs))
    np.testing.assert_allclose(outputs.detach(), unrolled.outputs, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(after.detach(), unrolled.after, rtol=1e-4, atol=1e-5)
    for name, parameter in net.named_parameters():
        np.testing.assert_allclose(parameter.grad, compiled[name], rtol=1e-4, atol=1e-5, err_msg=name)


@both
def test_one_step_at_a_time_is_the_whole_way(cell):
    net, _ = make(cell)
    x, state, clear = numbers(7, 4, net.num_in), numbers(4, net.num_state, seed=2), flags(7, 4, seed=3)
    whole = net.unroll(x.reshape(-1, net.num_in), state, clear)
    outputs, last = whole.outputs.copy(), whole.states(-1)
    for t in range(7):
        step = net.unroll(x[t], state, clear[t : t + 1])
        np.testing.assert_allclose(step.outputs[0], outputs[t], rtol=1e-5, atol=1e-6)
        state = step.states(-1)
    np.testing.assert_allclose(state, last, rtol=1e-5, atol=1e-6)


@both
def test_environments_do_not_affect_each_other(cell):
    net, _ = make(cell)
    x, state, clear = numbers(6, 4, net.num_in), numbers(4, net.num_state), flags(6, 4)
    first = net.unroll(x.reshape(-1, net.num_in), state, clear).outputs.copy()
    x[:, 2], state[2] = 7.0, -3.0
    second = net.unroll(x.reshape(-1, net.num_in), state, clear).outputs
    others = [0, 1, 3]
    np.testing.assert_array_equal(first[:, others], second[:, others])
    assert np.abs(first[:, 2] - second[:, 2]).max() > 0.01


@both
def test_states_are_found_by_row_and_environment(cell):
    net, _ = make(cell)
    unrolled = net.unroll(numbers(6 * 4, net.num_in), numbers(4, net.num_state), flags(6, 4))
    places = np.array([0, 3, 5]), np.array([2, 0, 3])
    found = unrolled.states(places)
    for row, (t, n) in enumerate(zip(*places, strict=True)):
        np.testing.assert_array_equal(found[row], np.concatenate([part[t, n] for part in unrolled.after]))


@both
def test_a_twin_has_memory_and_weights_of_its_own(cell):
    net, flat = make(cell)
    x, state, clear = numbers(6, net.num_in), numbers(3, net.num_state), np.zeros((2, 3), bool)
    before = net.unroll(x, state, clear).outputs.copy()
    twin = flat.clone().module
    flat.parameters.mul_(0.5)
    np.testing.assert_array_equal(twin.unroll(x, state, clear).outputs, before)
    assert np.abs(net.unroll(x, state, clear).outputs - before).max() > 1e-3
    assert copy.deepcopy(net).kind is net.kind


def test_memory_is_kept_for_few_shapes_only():
    net, _ = make("gru")

    def outputs(rows):
        return net.unroll(numbers(rows, net.num_in), numbers(rows, net.num_state), np.zeros((1, rows), bool)).outputs

    found = [(rows, outputs(rows)) for rows in range(1, 3 * MAX_CACHED_SHAPES)]
    reused = [rows for rows, before in reversed(found) if np.shares_memory(outputs(rows), before)]
    assert reused == list(range(3 * MAX_CACHED_SHAPES - 1, 2 * MAX_CACHED_SHAPES - 1, -1))


def test_nan_is_not_hidden():
    for cell in ("lstm", "gru"):
        net, _ = make(cell)
        x = numbers(2, net.num_in)
        x[0] = np.nan
        outputs = net.unroll(x, np.zeros((2, net.num_state), np.float32), np.zeros((1, 2), bool)).outputs
        assert np.isnan(outputs[0, 0]).all()
        assert np.isfinite(outputs[0, 1]).all()

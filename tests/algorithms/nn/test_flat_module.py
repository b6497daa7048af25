"""A module in one buffer: the same function, the same gradients and the same Adam as the module had on its own."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from steppe.algorithms.nn.flat_module import FlatModule
from steppe.algorithms.nn.optimizers import FlatAdam
from steppe.core.contracts.errors import ConfigError, NotFinite

pytestmark = pytest.mark.unit


class Odd(nn.Module):
    """Sizes that leave no alignment by luck, a frozen parameter, and buffers of several types."""

    def __init__(self):
        super().__init__()
        self.one = nn.Linear(3, 5)
        self.frozen = nn.Parameter(torch.full((3,), 2.0), requires_grad=False)
        self.two = nn.Linear(5, 1)
        self.register_buffer("flag", torch.tensor(True))
        self.register_buffer("scale", torch.tensor([1.5, 2.5], dtype=torch.float64))
        self.register_buffer("count", torch.tensor(7))

    def forward(self, x):
        return self.two(torch.tanh(self.one(x * self.frozen))) * self.scale[0].float()


def pair():
    torch.manual_seed(0)
    plain = Odd()
    return plain, FlatModule(copy.deepcopy(plain))


def test_trainable_entries_come_first_without_a_gap_and_the_rest_is_aligned():
    _, flat = pair()
    names = [entry.name for entry in flat.layout.entries]
    assert names == ["one.weight", "one.bias", "two.weight", "two.bias", "frozen", "flag", "scale", "count"]
    assert [entry.offset for entry in flat.layout.entries[:5]] == [0, 60, 80, 100, 104]
    assert flat.parameters.numel() == flat.gradient.numel() == 26
    for entry in flat.layout.entries:
        assert entry.offset % np.dtype(entry.dtype).itemsize == 0


def test_values_are_the_modules_and_memory_is_shared():
    plain, flat = pair()
    arrays = flat.weights().arrays()
    tensors = dict(plain.named_parameters()) | dict(plain.named_buffers())
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(arrays[name], tensor.detach().numpy())
    arrays["scale"][0] = 9.0
    arrays["one.bias"][2] = -4.0
    assert float(flat.module.scale[0]) == 9.0
    assert flat.module.one.bias[2].item() == -4.0


def test_several_steps_are_those_of_clipped_adam_on_separate_tensors():
    plain, flat = pair()
    reference = torch.optim.Adam([p for p in plain.parameters() if p.requires_grad], lr=0.01, eps=1e-5)
    adam = FlatAdam(flat, eps=1e-5, max_grad_norm=0.7)
    for step in range(5):
        x = torch.randn(11, 3)
        reference.zero_grad()
        plain(x).square().mean().backward()
        norm = nn.utils.clip_grad_norm_([p for p in plain.parameters() if p.requires_grad], 0.7)
        reference.step()
        flat.gradient.zero_()
        flat.module(x).square().mean().backward()
        assert adam.step(0.01, step) == pytest.approx(float(norm), rel=1e-5)
    for name, tensor in plain.named_parameters():
        np.testing.assert_allclose(flat.weights().arrays()[name], tensor.detach(), rtol=1e-4, atol=1e-6, err_msg=name)


def test_a_twin_has_the_values_but_not_the_memory():
    _, flat = pair()
    twin = flat.clone()
    assert twin.weights().sha256() == flat.weights().sha256()
    with torch.no_grad():
        flat.module.one.weight += 1.0
    assert twin.weights().sha256() != flat.weights().sha256()
    twin.copy_from(flat)
    assert twin.weights().sha256() == flat.weights().sha256()
    x = torch.ones(2, 3)
    torch.testing.assert_close(twin.module(x), flat.module(x))


def test_an_infinite_gradient_stops_before_the_weights_change():
    _, flat = pair()
    before = flat.weights().sha256()
    flat.gradient.fill_(float("nan"))
    with pytest.raises(NotFinite, match="update 12"):
        FlatAdam(flat, eps=1e-8, max_grad_norm=1.0).step(0.1, 12)
    assert flat.weights().sha256() == before


def test_parameters_of_another_precision_are_refused_by_name():
    with pytest.raises(ConfigError, match=r"'weight' is torch\.float64"):
        FlatModule(nn.Linear(2, 2).double())

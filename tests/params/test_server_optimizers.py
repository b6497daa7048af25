"""Server-side optimizers against torch's, and the federated ones against their papers' lines written in NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from steppe.core.contracts.errors import ConfigError
from steppe.params.optimizers import Optimizer, OptimizerState

pytestmark = pytest.mark.unit

SIZE, STEPS = 37, 12


def gradients() -> list[np.ndarray]:
    stream = np.random.default_rng(3)
    return [stream.normal(size=SIZE).astype(np.float32) for _ in range(STEPS)]


def ours(settings: Optimizer) -> np.ndarray:
    values, stepper = np.ones(SIZE, np.float32), OptimizerState(settings, SIZE)
    for gradient in gradients():
        assert stepper.step(values, gradient, values)  # in place is fine
    return values


@pytest.mark.parametrize(
    ("settings", "make"),
    [
        (Optimizer("sgd", 0.1), lambda p: torch.optim.SGD(p, 0.1)),
        (Optimizer("momentum", 0.1, beta1=0.8), lambda p: torch.optim.SGD(p, 0.1, momentum=0.8)),
        (Optimizer("adam", 0.1), lambda p: torch.optim.Adam(p, 0.1)),
    ],
)
def test_the_same_as_torch(settings: Optimizer, make) -> None:
    parameter = torch.ones(SIZE, dtype=torch.float64, requires_grad=True)
    optimizer = make([parameter])
    for gradient in gradients():
        parameter.grad = torch.from_numpy(gradient.astype(np.float64))
        optimizer.step()
    np.testing.assert_allclose(ours(settings), parameter.detach().numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["fedavg", "fedadam", "fedyogi"])
def test_federated_ones_follow_the_paper(kind: str) -> None:
    """Reddi et al. 2021, algorithm 2: x += η m / (√v + τ), v₋₁ = τ²."""
    x, m, v = np.ones(SIZE), np.zeros(SIZE), np.full(SIZE, 1e-6)
    for delta in (gradient.astype(np.float64) for gradient in gradients()):
        if kind == "fedavg":
            x = x + 0.5 * delta
            continue
        m = 0.9 * m + 0.1 * delta
        square = delta**2
        v = 0.99 * v + 0.01 * square if kind == "fedadam" else v - 0.01 * square * np.sign(v - square)
        x = x + 0.5 * m / (np.sqrt(v) + 1e-3)
    np.testing.assert_allclose(ours(Optimizer(kind, 0.5)), x, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["sgd", "momentum", "adam", "fedyogi"])
def test_training_continues_exactly_from_a_state(kind: str) -> None:
    first = OptimizerState(Optimizer(kind, 0.1), SIZE)
    values = np.ones(SIZE, np.float32)
    for gradient in gradients()[:5]:
        first.step(values, gradient, values)
    second, copied = OptimizerState(Optimizer(kind, 0.1), SIZE), values.copy()
    second.load(first.state())
    for gradient in gradients()[5:]:
        first.step(values, gradient, values)
        second.step(copied, gradient, copied)
    assert values.tobytes() == copied.tobytes()


def test_the_rate_is_halved_on_time_and_after_a_restart_too() -> None:
    settings, one = Optimizer("sgd", 1.0, halve_at=(2, 3)), np.ones(1, np.float32)
    stepper, found = OptimizerState(settings, 1), []
    for _ in range(5):
        other = OptimizerState(settings, 1)
        other.load(stepper.state())
        out = np.empty(1, np.float32)
        assert other.step(np.zeros(1, np.float32), one, out)
        found.append(-float(out[0]))
        stepper = other
    assert found == [1.0, 1.0, 0.5, 0.25, 0.25]


def test_a_rate_for_one_step() -> None:
    values, out = np.zeros(2, np.float32), np.empty(2, np.float32)
    assert OptimizerState(Optimizer("sgd", 0.1), 2).step(values, np.ones(2, np.float32), out, 0.5)
    assert out.tolist() == [-0.5, -0.5]
    assert values.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("kind", ["sgd", "momentum", "adam", "fedyogi"])
def test_an_update_that_becomes_infinite_is_reported(kind: str) -> None:
    huge, out = np.full(3, 3e38, np.float32), np.empty(3, np.float32)
    assert not OptimizerState(Optimizer(kind, 1e38), 3).step(
        huge, np.full(3, -10.0 if kind[:3] != "fed" else 10.0, np.float32), out
    )


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kind": "adm"}, "Did you mean 'adam'"),
        ({"kind": "sgd", "beta1": 0.9}, "has no beta1"),
        ({"kind": "momentum", "eps": 0.1}, "has no eps"),
        ({"kind": "adam", "learning_rate": 0.0}, "above 0"),
        ({"kind": "adam", "beta2": 1.0}, "beta2"),
    ],
)
def test_wrong_settings_are_refused(settings: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Optimizer(**settings)


def test_another_kinds_state_is_refused() -> None:
    with pytest.raises(ConfigError, match="optimizer 'sgd', not 'adam'"):
        OptimizerState(Optimizer("adam"), 2).load(OptimizerState(Optimizer("sgd"), 2).state())

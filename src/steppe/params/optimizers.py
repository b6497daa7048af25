"""Server-side optimizers for aggregated updates.

sgd, momentum and adam take gradients; fedavg, fedadam and fedyogi take deltas, which are gradients with the opposite
sign (Reddi et al., 2021, without bias correction).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from steppe.core.contracts.errors import ConfigError, did_you_mean
from steppe.params import kernels

# Defaults of learning_rate, momentum or beta1, beta2, eps
DEFAULTS: dict[str, tuple[float, float, float, float]] = {
    "sgd": (1e-3, 0.0, 0.0, 0.0),
    "momentum": (1e-3, 0.9, 0.0, 0.0),
    "adam": (1e-3, 0.9, 0.999, 1e-8),
    "fedavg": (1.0, 0.0, 0.0, 0.0),
    "fedadam": (1e-2, 0.9, 0.99, 1e-3),
    "fedyogi": (1e-2, 0.9, 0.99, 1e-3),
}
_NUM_MOMENTS = {"sgd": 0, "fedavg": 0, "momentum": 1, "adam": 2, "fedadam": 2, "fedyogi": 2}


@dataclass(frozen=True)
class Optimizer:
    """An optimizer kind and its settings; None stands for the kind's default. `beta1` is also the factor of "momentum".

    `max_norm`: updates with a larger norm are scaled down to it first. `halve_at`: updates after which the learning
    rate is halved.
    """

    kind: str = "sgd"
    learning_rate: float | None = None
    beta1: float | None = None
    beta2: float | None = None
    eps: float | None = None
    max_norm: float | None = None
    halve_at: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in DEFAULTS:
            raise ConfigError(
                f"there is no optimizer {self.kind!r}: choose from {', '.join(DEFAULTS)}.{did_you_mean(self.kind, DEFAULTS)}"
            )
        limits = {"beta1": (1, self.beta1), "beta2": (2, self.beta2), "eps": (2, self.eps)}
        unused = [
            name for name, (arrays, value) in limits.items() if value is not None and _NUM_MOMENTS[self.kind] < arrays
        ]
        if unused:
            raise ConfigError(f"optimizer {self.kind!r} has no {unused[0]}: leave it out")
        rate, beta1, beta2, eps = self.rates
        if not (0.0 < rate < math.inf and 0.0 <= beta1 < 1.0 and 0.0 <= beta2 < 1.0 and 0.0 <= eps < math.inf):
            raise ConfigError(f"{self}: learning_rate above 0, beta1 and beta2 from 0 up to 1, eps at least 0")
        if self.max_norm is not None and not 0.0 < self.max_norm < math.inf:
            raise ConfigError(f"max_norm={self.max_norm} must be above 0; leave it out for none")

    @property
    def rates(self) -> tuple[float, float, float, float]:
        """learning_rate, beta1, beta2 and eps, with the kind's defaults for those not given."""
        given = (self.learning_rate, self.beta1, self.beta2, self.eps)
        rate, beta1, beta2, eps = (
            usual if value is None else float(value) for usual, value in zip(DEFAULTS[self.kind], given, strict=True)
        )
        return rate, beta1, beta2, eps

    @property
    def for_deltas(self) -> bool:
        """Whether updates are deltas, which are added, and not gradients, which are subtracted."""
        return self.kind.startswith("fed")


class OptimizerState:
    """An optimizer with its moments for `size` parameters."""

    def __init__(self, settings: Optimizer, size: int) -> None:
        self.settings = settings
        self.steps = 0
        self.moments = np.zeros((_NUM_MOMENTS[settings.kind], size), np.float32)
        if settings.kind in ("fedadam", "fedyogi"):
            self.moments[1] = settings.rates[3] ** 2

    def step(self, values: np.ndarray, update: np.ndarray, out: np.ndarray, learning_rate: float | None = None) -> bool:
        """Write the values after one aggregated update to `out`; return whether all of them are finite."""
        rate, beta1, beta2, eps = self.settings.rates
        halved = rate * 0.5 ** sum(self.steps >= at for at in self.settings.halve_at)
        rate = halved if learning_rate is None else learning_rate
        self.steps += 1
        update = self._clipped(update)
        signed = -rate if self.settings.for_deltas else rate
        kind = self.settings.kind
        if kind in ("sgd", "fedavg"):
            return kernels.run_threaded(kernels.sgd_step, values, update, signed, out)
        if kind == "momentum":
            return kernels.run_threaded(kernels.momentum_step, values, update, self.moments[0], (signed, beta1), out)
        if kind == "adam":
            narrow, wide = 1.0 - beta1**self.steps, math.sqrt(1.0 - beta2**self.steps)
            signed, eps = signed * wide / narrow, eps * wide
        rates = (signed, beta1, beta2, eps)
        return kernels.run_threaded(kernels.adaptive_step, values, update, *self.moments, rates, kind == "fedyogi", out)

    def _clipped(self, update: np.ndarray) -> np.ndarray:
        longest = self.settings.max_norm
        norm = 0.0 if longest is None else math.sqrt(np.dot(update, update))
        return update * np.float32(longest / norm) if longest is not None and norm > longest else update

    def state(self) -> dict[str, Any]:
        """Return everything that `load` needs, as plain values and arrays."""
        return {"kind": self.settings.kind, "steps": self.steps, "moments": self.moments}

    def load(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned; raise ConfigError if it is of another kind or size."""
        if state["kind"] != self.settings.kind or state["moments"].shape != self.moments.shape:
            raise ConfigError(f"the checkpoint was made with optimizer {state['kind']!r}, not {self.settings.kind!r}")
        self.steps, self.moments = int(state["steps"]), np.array(state["moments"], np.float32)

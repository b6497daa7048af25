"""Train your own network: a function that takes an EnvSpec and returns a torch module. Steppe adds the heads.

python custom_network.py [STEPS]
"""

import sys

import torch
from torch import nn

import steppe


class Residual(nn.Module):
    """Residual block of two layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)


def residual_network(spec: steppe.EnvSpec) -> nn.Module:
    return nn.Sequential(nn.Linear(spec.obs.shape[0], 64), Residual(64), nn.ReLU())


if __name__ == "__main__":
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    result = steppe.train("CartPole-v1", algo="ppo", network=residual_network, steps=steps)
    print(f"mean return {result.eval_return_mean:.1f} with {residual_network.__name__}")

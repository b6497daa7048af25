"""Algorithms, one folder each. Importing this package imports no torch; making an agent does."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from steppe.core.config.agent import AgentConfig
from steppe.core.config.algorithm_table import agent_class

if TYPE_CHECKING:
    from steppe.algorithms.a2c.a2c import A2C
    from steppe.algorithms.dhc.dhc import DHC
    from steppe.algorithms.dqn.dqn import DQN
    from steppe.algorithms.nn.device import resolve_device
    from steppe.algorithms.ppo.ppo import PPO
    from steppe.algorithms.r2d2.r2d2 import R2D2
    from steppe.core.contracts.algorithm import Agent
    from steppe.core.contracts.specs import EnvSpec

__all__ = ["A2C", "DHC", "DQN", "PPO", "R2D2", "make_agent", "resolve_device"]

_HOMES = {
    "A2C": "steppe.algorithms.a2c.a2c",
    "DHC": "steppe.algorithms.dhc.dhc",
    "DQN": "steppe.algorithms.dqn.dqn",
    "PPO": "steppe.algorithms.ppo.ppo",
    "R2D2": "steppe.algorithms.r2d2.r2d2",
    "resolve_device": "steppe.algorithms.nn.device",
}


def make_agent(algo: str, config: AgentConfig, spec: EnvSpec, *, seed: int, device: str = "cpu") -> Agent:
    """Build the agent of an algorithm, given by name or as `module:Class`, with initial weights from `seed`."""
    config.require(spec, algo)
    if config.policies != "shared":
        from steppe.algorithms.shared.multi_policy import MultiPolicyAgent

        return MultiPolicyAgent(algo, config, spec, seed=seed, device=device)
    agent: Agent = agent_class(algo)(config, spec, seed=seed, device=device)
    return agent


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)

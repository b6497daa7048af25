"""What acts and learns: one file per algorithm. Importing this room imports no torch; making an agent does."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from steppe.core.algorithms import AgentConfig, implementation

if TYPE_CHECKING:
    from steppe.agents.a2c import A2C
    from steppe.agents.device import resolve_device
    from steppe.agents.dhc import DHC
    from steppe.agents.dqn import DQN
    from steppe.agents.ppo import PPO
    from steppe.agents.r2d2 import R2D2
    from steppe.core.agent import Agent
    from steppe.core.specs import EnvSpec

__all__ = ["A2C", "DHC", "DQN", "PPO", "R2D2", "make_agent", "resolve_device"]

_HOMES = {
    "A2C": "steppe.agents.a2c",
    "DHC": "steppe.agents.dhc",
    "DQN": "steppe.agents.dqn",
    "PPO": "steppe.agents.ppo",
    "R2D2": "steppe.agents.r2d2",
    "resolve_device": "steppe.agents.device",
}


def make_agent(algo: str, config: AgentConfig, spec: EnvSpec, *, seed: int, device: str = "cpu") -> Agent:
    """The agent of an algorithm by name (or `module:Class`), with fresh weights drawn from `seed`."""
    config.require(spec, algo)
    if config.policies != "shared":
        from steppe.agents.grouped import Grouped

        return Grouped(algo, config, spec, seed=seed, device=device)
    agent: Agent = implementation(algo)(config, spec, seed=seed, device=device)
    return agent


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)

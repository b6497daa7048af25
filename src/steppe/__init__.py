"""Steppe: reinforcement learning from a Q-table on one core to a cluster, with one set of parts.

Every public name is loaded when it is first used, so that importing this costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from steppe.algorithms.a2c.config import A2CConfig, A3CConfig
    from steppe.algorithms.dhc.config import DHCConfig
    from steppe.algorithms.dqn.config import DQNConfig
    from steppe.algorithms.ppo.config import PPOConfig
    from steppe.algorithms.r2d2.config import R2D2Config
    from steppe.compose.agent import DistributedAgent
    from steppe.compose.async_loop import AsyncAgent, AsyncMainLoop
    from steppe.compose.cluster import DistributedMainLoop
    from steppe.compose.ensemble import MultiAgentLearner
    from steppe.compose.environment import DistributedEnvironment
    from steppe.compose.main_loop import MainLoop
    from steppe.core.config.agent import AgentConfig
    from steppe.core.config.run import EnvConfig, RunConfig
    from steppe.core.contracts.algorithm import Agent, Learned, Progress
    from steppe.core.contracts.errors import RunFailed, SteppeError, UsageError
    from steppe.core.contracts.segment import Batch, Segment
    from steppe.core.contracts.specs import EnvSpec, FieldSpec
    from steppe.core.contracts.weights import Weights
    from steppe.params.client import ParameterClient
    from steppe.params.federated import FederatedParameterServer
    from steppe.params.server import ParameterServer
    from steppe.records.view import RunView
    from steppe.replay.buffer import ExperienceBuffer, PrioritizedReplayBuffer, ReplayBuffer
    from steppe.replay.pool import ReplayBufferPool
    from steppe.training.evaluate import evaluate
    from steppe.training.load import LoadedPolicy, load
    from steppe.training.rerun import rerun
    from steppe.training.result import RunResult
    from steppe.training.resume import resume
    from steppe.training.train import train

    __version__: str

__all__ = [
    "A2CConfig",
    "A3CConfig",
    "Agent",
    "AgentConfig",
    "AsyncAgent",
    "AsyncMainLoop",
    "Batch",
    "DHCConfig",
    "DQNConfig",
    "DistributedAgent",
    "DistributedEnvironment",
    "DistributedMainLoop",
    "EnvConfig",
    "EnvSpec",
    "ExperienceBuffer",
    "FederatedParameterServer",
    "FieldSpec",
    "Learned",
    "LoadedPolicy",
    "MainLoop",
    "MultiAgentLearner",
    "PPOConfig",
    "ParameterClient",
    "ParameterServer",
    "PrioritizedReplayBuffer",
    "Progress",
    "R2D2Config",
    "ReplayBuffer",
    "ReplayBufferPool",
    "RunConfig",
    "RunFailed",
    "RunResult",
    "RunView",
    "Segment",
    "SteppeError",
    "UsageError",
    "Weights",
    "__version__",
    "evaluate",
    "load",
    "rerun",
    "resume",
    "train",
]

_HOMES = {
    "A2CConfig": "algorithms.a2c.config",
    "A3CConfig": "algorithms.a2c.config",
    "Agent": "core.contracts.algorithm",
    "AgentConfig": "core.config.agent",
    "AsyncAgent": "compose.async_loop",
    "AsyncMainLoop": "compose.async_loop",
    "Batch": "core.contracts.segment",
    "DHCConfig": "algorithms.dhc.config",
    "DQNConfig": "algorithms.dqn.config",
    "DistributedAgent": "compose.agent",
    "DistributedEnvironment": "compose.environment",
    "DistributedMainLoop": "compose.cluster",
    "EnvConfig": "core.config.run",
    "EnvSpec": "core.contracts.specs",
    "ExperienceBuffer": "replay.buffer",
    "FederatedParameterServer": "params.federated",
    "FieldSpec": "core.contracts.specs",
    "Learned": "core.contracts.algorithm",
    "LoadedPolicy": "training.load",
    "MainLoop": "compose.main_loop",
    "MultiAgentLearner": "compose.ensemble",
    "PPOConfig": "algorithms.ppo.config",
    "ParameterClient": "params.client",
    "ParameterServer": "params.server",
    "PrioritizedReplayBuffer": "replay.buffer",
    "Progress": "core.contracts.algorithm",
    "R2D2Config": "algorithms.r2d2.config",
    "ReplayBuffer": "replay.buffer",
    "ReplayBufferPool": "replay.pool",
    "RunConfig": "core.config.run",
    "RunFailed": "core.contracts.errors",
    "RunResult": "training.result",
    "RunView": "records.view",
    "Segment": "core.contracts.segment",
    "SteppeError": "core.contracts.errors",
    "UsageError": "core.contracts.errors",
    "Weights": "core.contracts.weights",
    "evaluate": "training.evaluate",
    "load": "training.load",
    "rerun": "training.rerun",
    "resume": "training.resume",
    "train": "training.train",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("steppe")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

"""Steppe: reinforcement learning from a Q-table on one core to a cluster, with one set of parts.

Every public name is loaded when it is first used, so that importing this costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from steppe.core.agent import Agent, Learned, Progress
    from steppe.core.algorithms import A2CConfig, A3CConfig, AgentConfig, DHCConfig, DQNConfig, PPOConfig, R2D2Config
    from steppe.core.config import EnvConfig, RunConfig
    from steppe.core.errors import RunFailed, SteppeError, UsageError
    from steppe.core.experience import Batch, Segment
    from steppe.core.specs import EnvSpec, FieldSpec
    from steppe.core.weights import Weights
    from steppe.loops.agent import DistributedAgent
    from steppe.loops.asynchronous import AsyncAgent, AsyncMainLoop
    from steppe.loops.cluster import DistributedMainLoop
    from steppe.loops.ensemble import MultiAgentLearner
    from steppe.loops.environment import DistributedEnvironment
    from steppe.loops.evaluation import evaluate
    from steppe.loops.loading import LoadedPolicy, load
    from steppe.loops.main import MainLoop, train
    from steppe.loops.rerunning import rerun
    from steppe.loops.result import RunResult
    from steppe.loops.resuming import resume
    from steppe.params.client import ParameterClient
    from steppe.params.federated import FederatedParameterServer
    from steppe.params.server import ParameterServer
    from steppe.records.view import RunView
    from steppe.replay.buffer import ExperienceBuffer, PrioritizedReplayBuffer, ReplayBuffer
    from steppe.replay.pool import ReplayBufferPool

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
    "A2CConfig": "core.algorithms",
    "A3CConfig": "core.algorithms",
    "Agent": "core.agent",
    "AgentConfig": "core.algorithms",
    "AsyncAgent": "loops.asynchronous",
    "AsyncMainLoop": "loops.asynchronous",
    "Batch": "core.experience",
    "DHCConfig": "core.algorithms",
    "DQNConfig": "core.algorithms",
    "DistributedAgent": "loops.agent",
    "DistributedEnvironment": "loops.environment",
    "DistributedMainLoop": "loops.cluster",
    "EnvConfig": "core.config",
    "EnvSpec": "core.specs",
    "ExperienceBuffer": "replay.buffer",
    "FederatedParameterServer": "params.federated",
    "FieldSpec": "core.specs",
    "Learned": "core.agent",
    "LoadedPolicy": "loops.loading",
    "MainLoop": "loops.main",
    "MultiAgentLearner": "loops.ensemble",
    "PPOConfig": "core.algorithms",
    "ParameterClient": "params.client",
    "ParameterServer": "params.server",
    "PrioritizedReplayBuffer": "replay.buffer",
    "Progress": "core.agent",
    "R2D2Config": "core.algorithms",
    "ReplayBuffer": "replay.buffer",
    "ReplayBufferPool": "replay.pool",
    "RunConfig": "core.config",
    "RunFailed": "core.errors",
    "RunResult": "loops.result",
    "RunView": "records.view",
    "Segment": "core.experience",
    "SteppeError": "core.errors",
    "UsageError": "core.errors",
    "Weights": "core.weights",
    "evaluate": "loops.evaluation",
    "load": "loops.loading",
    "rerun": "loops.rerunning",
    "resume": "loops.resuming",
    "train": "loops.main",
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

"""The learner's memories: rollouts, replay buffers and pools. Imported lazily: the compiled kernels load slowly."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from steppe.replay.buffer import ExperienceBuffer, PrioritizedReplayBuffer, ReplayBuffer
    from steppe.replay.episode_buffer import GlobalBuffer, LocalBuffer
    from steppe.replay.factory import make_memory
    from steppe.replay.pool import ReplayBufferPool
    from steppe.replay.rollout import RolloutBuffer
    from steppe.replay.sequence_memory import SequenceMemory, SequenceSamplingConfig
    from steppe.replay.sequence_windows import Windowing
    from steppe.replay.transition_memory import ReplayMemory, SamplingConfig

__all__ = [
    "ExperienceBuffer",
    "GlobalBuffer",
    "LocalBuffer",
    "PrioritizedReplayBuffer",
    "ReplayBuffer",
    "ReplayBufferPool",
    "ReplayMemory",
    "RolloutBuffer",
    "SamplingConfig",
    "SequenceMemory",
    "SequenceSamplingConfig",
    "Windowing",
    "make_memory",
]

_HOMES = {
    "SamplingConfig": "transition_memory",
    "ExperienceBuffer": "buffer",
    "GlobalBuffer": "episode_buffer",
    "LocalBuffer": "episode_buffer",
    "PrioritizedReplayBuffer": "buffer",
    "ReplayBuffer": "buffer",
    "ReplayBufferPool": "pool",
    "ReplayMemory": "transition_memory",
    "RolloutBuffer": "rollout",
    "SequenceSamplingConfig": "sequence_memory",
    "SequenceMemory": "sequence_memory",
    "Windowing": "sequence_windows",
    "make_memory": "factory",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)

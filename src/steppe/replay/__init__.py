"""What a learner remembers: rollouts, replay buffers and pools. Loaded lazily, as the compiled parts take a while."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from steppe.replay.buffer import ExperienceBuffer, PrioritizedReplayBuffer, ReplayBuffer
    from steppe.replay.episodes import GlobalBuffer, LocalBuffer
    from steppe.replay.making import make_memory
    from steppe.replay.memory import Draws, ReplayMemory
    from steppe.replay.pool import ReplayBufferPool
    from steppe.replay.rollout import Rollout
    from steppe.replay.sequence_memory import SequenceDraws, SequenceMemory
    from steppe.replay.sequences import Windowing

__all__ = [
    "Draws",
    "ExperienceBuffer",
    "GlobalBuffer",
    "LocalBuffer",
    "PrioritizedReplayBuffer",
    "ReplayBuffer",
    "ReplayBufferPool",
    "ReplayMemory",
    "Rollout",
    "SequenceDraws",
    "SequenceMemory",
    "Windowing",
    "make_memory",
]

_HOMES = {
    "Draws": "memory",
    "ExperienceBuffer": "buffer",
    "GlobalBuffer": "episodes",
    "LocalBuffer": "episodes",
    "PrioritizedReplayBuffer": "buffer",
    "ReplayBuffer": "buffer",
    "ReplayBufferPool": "pool",
    "ReplayMemory": "memory",
    "Rollout": "rollout",
    "SequenceDraws": "sequence_memory",
    "SequenceMemory": "sequence_memory",
    "Windowing": "sequences",
    "make_memory": "making",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)

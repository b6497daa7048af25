"""What a learner remembers: rollouts, replay buffers and pools. Loaded lazily, as the compiled parts take a while."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from steppe.replay.buffer import ExperienceBuffer, PrioritizedReplayBuffer, ReplayBuffer
    from steppe.replay.making import make_memory
    from steppe.replay.memory import Draws, ReplayMemory
    from steppe.replay.pool import ReplayBufferPool
    from steppe.replay.rollout import Rollout

__all__ = [
    "Draws",
    "ExperienceBuffer",
    "PrioritizedReplayBuffer",
    "ReplayBuffer",
    "ReplayBufferPool",
    "ReplayMemory",
    "Rollout",
    "make_memory",
]

_HOMES = {
    "Draws": "memory",
    "ExperienceBuffer": "buffer",
    "PrioritizedReplayBuffer": "buffer",
    "ReplayBuffer": "buffer",
    "ReplayBufferPool": "pool",
    "ReplayMemory": "memory",
    "Rollout": "rollout",
    "make_memory": "making",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)

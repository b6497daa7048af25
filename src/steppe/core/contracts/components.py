"""The five components of a composed training, as contracts: what a MainLoop asks of parts that are a user's own.

`steppe.testing.components` has a suite for each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

Experiences = Sequence[Mapping[str, Any]]  # one dictionary per step, in the order in which they happened


@runtime_checkable
class EnvironmentComponent(Protocol):
    """Makes experience: a DistributedEnvironment, or something in its place."""

    def generate_experiences(self, policy: Any, num_episodes: int, max_steps_per_episode: int = 1000) -> Any:
        """Whole episodes with a policy, as one dictionary per step (obs, action, reward, next_obs, terminated, truncated)."""

    def generate_batch_experiences(self, policy: Any, batch_size: int) -> Any:
        """So many steps, as one array per key."""

    def update_policy(self, new_policy_params: Mapping[str, np.ndarray]) -> None:
        """Use these parameters in later calls."""

    def reset_environments(self) -> None:
        """Abandon every episode under way."""

    def get_environment_stats(self) -> dict[str, Any]:
        """Steps and episodes so far, and whatever else is worth telling."""

    def shutdown(self) -> None:
        """Give everything back; again is harmless."""


@runtime_checkable
class ReplayComponent(Protocol):
    """Remembers experience: a ReplayBufferPool, or something in its place."""

    def add_experiences(self, experiences: Any, buffer_id: int | None = None) -> Any:
        """Remember experiences."""

    def sample_batch(self, batch_size: int, buffer_id: int | None = None) -> Any:
        """So many of them at random, as one array per key."""

    def get_buffer_stats(self) -> Any:
        """How full it is."""

    def clear_all_buffers(self) -> None:
        """Forget everything."""

    def save_buffers(self, path: Any = None) -> Any:
        """Write everything down."""

    def load_buffers(self, path: Any = None) -> Any:
        """Remember what was written down."""

    def get_total_experiences(self) -> int:
        """How many are remembered."""

    def balance_buffers(self) -> None:
        """Spread them evenly."""


@runtime_checkable
class AgentComponent(Protocol):
    """Acts and learns: a DistributedAgent, or something in its place."""

    def learn_from_batch(self, batch: Mapping[str, np.ndarray]) -> dict[str, Any]:
        """Improve from a batch; what is worth telling."""

    def update_policy(self, experiences: Experiences) -> dict[str, Any]:
        """Improve from experiences in order; what is worth telling."""

    def get_policy_parameters(self) -> dict[str, np.ndarray]:
        """Copies of the parameters by name."""

    def set_policy_parameters(self, parameters: Mapping[str, np.ndarray]) -> None:
        """Take these over."""

    def compute_gradients(self, batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The gradient of the loss on a batch by parameter; nothing changes."""

    def apply_gradients(self, gradients: Mapping[str, np.ndarray]) -> None:
        """One step with gradients by parameter."""

    def evaluate_policy(self, num_episodes: int = 10) -> dict[str, Any]:
        """Play whole episodes; `return_mean` among what is told."""

    def save_checkpoint(self, path: str | Path) -> None:
        """Write everything down that the next update depends on."""

    def load_checkpoint(self, path: str | Path) -> None:
        """Go on from there."""

    def get_training_stats(self) -> dict[str, Any]:
        """What was learned from so far."""

    def reset_training_stats(self) -> None:
        """Count anew."""


@runtime_checkable
class ParameterSource(Protocol):
    """Where workers get parameters and hand in updates: a ParameterServer, or a ParameterClient of one elsewhere."""

    def register_worker(self, worker_id: str) -> bool:
        """Let a worker push; False when it was registered already."""

    def unregister_worker(self, worker_id: str) -> bool:
        """Wait for it no longer; False when it was not registered."""

    def get_parameters(self, worker_id: str) -> dict[str, np.ndarray]:
        """Copies of the newest parameters."""

    def push_gradients(self, worker_id: str, gradients: Mapping[str, np.ndarray], weight: float = 1.0) -> Any:
        """Hand in one update."""

    def get_server_stats(self) -> dict[str, Any]:
        """What was accepted and refused."""


@runtime_checkable
class ParameterServerComponent(ParameterSource, Protocol):
    """Keeps parameters that many improve: a ParameterServer, or something in its place."""

    def aggregate_gradients(self) -> dict[str, np.ndarray]:
        """Combine what was pushed."""

    def update_parameters(self, learning_rate: float = 0.001) -> Any:
        """Apply what was combined."""

    def broadcast_parameters(self) -> Any:
        """Let everyone have the newest."""


@runtime_checkable
class MainLoopComponent(Protocol):
    """Brings the others together: a MainLoop, or something in its place."""

    def run_training(
        self,
        total_episodes: int = 1000,
        max_steps_per_episode: int = 1000,
        evaluation_frequency: int = 100,
        checkpoint_frequency: int = 500,
    ) -> dict[str, Any]:
        """Train for so many episodes; what came of it."""

    def run_single_episode(self) -> dict[str, Any]:
        """Play one episode and learn from it."""

    def evaluate_policy(self, num_episodes: int = 10) -> dict[str, Any]:
        """Play with the best actions."""

    def save_checkpoint(self, episode: int, path: str | Path | None = None) -> Any:
        """Write everything down."""

    def load_checkpoint(self, path: str | Path) -> int:
        """Go on from there; its episode."""

    def get_training_progress(self) -> dict[str, Any]:
        """How far it is; `episode` among what is told."""

    def stop_training(self) -> None:
        """End the training under way."""

    def pause_training(self) -> None:
        """Let it rest."""

    def resume_training(self) -> None:
        """Let it go on."""

"""Contracts of the five components of a composed training: what a MainLoop requires of user-defined components.

`steppe.testing.components` has a conformance suite for each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

Experiences = Sequence[Mapping[str, Any]]  # one dictionary per step, in order of time


@runtime_checkable
class EnvironmentComponent(Protocol):
    """Collects experience: a DistributedEnvironment or a replacement."""

    def generate_experiences(self, policy: Any, num_episodes: int, max_steps_per_episode: int = 1000) -> Any:
        """Run complete episodes with a policy; return one dictionary per step.

        Its keys are obs, action, reward, next_obs, terminated, truncated.
        """

    def generate_batch_experiences(self, policy: Any, batch_size: int) -> Any:
        """Collect `batch_size` steps, as one array per key."""

    def update_policy(self, new_policy_params: Mapping[str, np.ndarray]) -> None:
        """Use these parameters in later calls."""

    def reset_environments(self) -> None:
        """Abandon every episode in progress."""

    def get_environment_stats(self) -> dict[str, Any]:
        """Return the number of steps and episodes so far, and other statistics."""

    def shutdown(self) -> None:
        """Release all resources; idempotent."""


@runtime_checkable
class ReplayComponent(Protocol):
    """Stores experience: a ReplayBufferPool or a replacement."""

    def add_experiences(self, experiences: Any, buffer_id: int | None = None) -> Any:
        """Store experiences."""

    def sample_batch(self, batch_size: int, buffer_id: int | None = None) -> Any:
        """Sample `batch_size` experiences at random, as one array per key."""

    def get_buffer_stats(self) -> Any:
        """Return fill levels."""

    def clear_all_buffers(self) -> None:
        """Remove all experiences."""

    def save_buffers(self, path: Any = None) -> Any:
        """Save all experiences."""

    def load_buffers(self, path: Any = None) -> Any:
        """Load saved experiences."""

    def get_total_experiences(self) -> int:
        """Return the number of stored experiences."""

    def balance_buffers(self) -> None:
        """Distribute the experiences evenly over the buffers."""


@runtime_checkable
class AgentComponent(Protocol):
    """Acts and learns: a DistributedAgent or a replacement."""

    def learn_from_batch(self, batch: Mapping[str, np.ndarray]) -> dict[str, Any]:
        """Update from a batch; return statistics."""

    def update_policy(self, experiences: Experiences) -> dict[str, Any]:
        """Update from experiences in order; return statistics."""

    def get_policy_parameters(self) -> dict[str, np.ndarray]:
        """Return copies of the parameters by name."""

    def set_policy_parameters(self, parameters: Mapping[str, np.ndarray]) -> None:
        """Replace the parameters with these."""

    def compute_gradients(self, batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the gradient of the loss on a batch by parameter; changes nothing."""

    def apply_gradients(self, gradients: Mapping[str, np.ndarray]) -> None:
        """Take one optimizer step with gradients by parameter."""

    def evaluate_policy(self, num_episodes: int = 10) -> dict[str, Any]:
        """Run complete episodes; the result includes `return_mean`."""

    def save_checkpoint(self, path: str | Path) -> None:
        """Save everything that the next update depends on."""

    def load_checkpoint(self, path: str | Path) -> None:
        """Continue from a saved checkpoint."""

    def get_training_stats(self) -> dict[str, Any]:
        """Return statistics of the training so far."""

    def reset_training_stats(self) -> None:
        """Reset the statistics."""


@runtime_checkable
class ParameterSource(Protocol):
    """Serves parameters to workers and accepts their updates: a ParameterServer or a ParameterClient."""

    def register_worker(self, worker_id: str) -> bool:
        """Allow a worker to push; return False when it was already registered."""

    def unregister_worker(self, worker_id: str) -> bool:
        """Stop waiting for a worker; return False when it was not registered."""

    def get_parameters(self, worker_id: str) -> dict[str, np.ndarray]:
        """Return copies of the newest parameters."""

    def push_gradients(self, worker_id: str, gradients: Mapping[str, np.ndarray], weight: float = 1.0) -> Any:
        """Submit one update."""

    def get_server_stats(self) -> dict[str, Any]:
        """Return how many updates were accepted and refused, and other statistics."""


@runtime_checkable
class ParameterServerComponent(ParameterSource, Protocol):
    """Holds parameters that many workers update: a ParameterServer or a replacement."""

    def aggregate_gradients(self) -> dict[str, np.ndarray]:
        """Aggregate the pushed updates."""

    def update_parameters(self, learning_rate: float = 0.001) -> Any:
        """Apply the aggregated update."""

    def broadcast_parameters(self) -> Any:
        """Make the newest parameters available to all workers."""


@runtime_checkable
class MainLoopComponent(Protocol):
    """Runs the training with the other components: a MainLoop or a replacement."""

    def run_training(
        self,
        total_episodes: int = 1000,
        max_steps_per_episode: int = 1000,
        evaluation_frequency: int = 100,
        checkpoint_frequency: int = 500,
    ) -> dict[str, Any]:
        """Train for `total_episodes` episodes; return the results."""

    def run_single_episode(self) -> dict[str, Any]:
        """Run one episode and learn from it."""

    def evaluate_policy(self, num_episodes: int = 10) -> dict[str, Any]:
        """Run episodes with greedy actions."""

    def save_checkpoint(self, episode: int, path: str | Path | None = None) -> Any:
        """Save the complete training state."""

    def load_checkpoint(self, path: str | Path) -> int:
        """Continue from a saved checkpoint; return its episode."""

    def get_training_progress(self) -> dict[str, Any]:
        """Return the progress; the result includes `episode`."""

    def stop_training(self) -> None:
        """Stop the running training."""

    def pause_training(self) -> None:
        """Pause the running training."""

    def resume_training(self) -> None:
        """Resume the paused training."""

"""FlattenMultiDiscreteWrapper: maps MultiDiscrete actions and observations to one integer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from steppe.core.contracts.errors import ConfigError, WorldError


class FlattenMultiDiscreteWrapper(gym.Env[Any, Any]):
    """Represent every combination of choices by one integer, the last component varying fastest.

    Wraps Gymnasium environments with MultiDiscrete spaces or Tuples of Discrete ones, and any object with `reset`,
    `step` and `action_space_sizes` or `action_space_size`. All other attributes are those of the wrapped environment.
    """

    def __init__(self, env: Any) -> None:
        self.env = env
        acts = _sizes(env, "action")
        if acts is None:
            space = getattr(env, "action_space", None)
            raise WorldError(f"cannot number the actions of {space}: FlattenMultiDiscreteWrapper knows MultiDiscrete")
        self.action_space_sizes, self._action_starts = acts
        self.action_space_size = math.prod(self.action_space_sizes)
        self._seen = _sizes(env, "observation")
        # A single integer is passed through unchanged.
        self._joins_actions = len(self.action_space_sizes) > 1 or _several(getattr(env, "action_space", None))
        self._joins_seen = self._seen is not None and _several(getattr(env, "observation_space", None))

    @property
    def wrapped_env(self) -> Any:
        """The wrapped environment."""
        return self.env

    @cached_property
    def action_space(self) -> spaces.Space[Any]:  # type: ignore[override]
        """The combinations of choices as one Discrete space."""
        return spaces.Discrete(self.action_space_size)

    @cached_property
    def observation_space(self) -> spaces.Space[Any]:  # type: ignore[override]
        """The combinations as one Discrete space if there are several components, else the environment's own space."""
        if self._joins_seen or not hasattr(self.env, "observation_space"):
            return spaces.Discrete(self.observation_space_size)
        space: spaces.Space[Any] = self.env.observation_space
        return space

    @property
    def observation_space_size(self) -> int:
        """The number of possible observations; WorldError if it is not known."""
        if self._seen is None:
            raise WorldError(f"{getattr(self.env, 'observation_space', self.env)} has no number of observations")
        return math.prod(self._seen[0])

    # gym.Env defines the next three attributes, so `__getattr__` would not reach the environment's.
    @property
    def metadata(self) -> dict[str, Any]:  # type: ignore[override]
        """The environment's metadata."""
        return getattr(self.env, "metadata", {})

    @property
    def render_mode(self) -> str | None:  # type: ignore[override]
        """The environment's render mode."""
        return getattr(self.env, "render_mode", None)

    @property
    def spec(self) -> Any:  # type: ignore[override]
        """The environment's registration."""
        return getattr(self.env, "spec", None)

    @property
    def unwrapped(self) -> Any:
        """The innermost environment."""
        return getattr(self.env, "unwrapped", self.env)

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Start an episode."""
        observation, info = self.env.reset(**kwargs)
        return self._flatten_observation(observation), info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step with a flattened action."""
        chosen = self._unflatten_action(action) if self._joins_actions else action
        observation, reward, terminated, truncated, info = self.env.step(chosen)
        return self._flatten_observation(observation), reward, terminated, truncated, info

    def render(self, *args: Any, **kwargs: Any) -> Any:
        """Render the environment."""
        return self.env.render(*args, **kwargs)

    def close(self) -> None:
        """Close the environment, if it can be closed."""
        close = getattr(self.env, "close", None)
        if close is not None:
            close()

    def _unflatten_action(self, flat_action: Any) -> list[int] | np.ndarray:
        """Return the choices of a flattened action: an array in the shape of a MultiDiscrete space, else a list."""
        flat = int(flat_action)
        if not 0 <= flat < self.action_space_size:
            raise ConfigError(f"action {flat} is out of range: there are {self.action_space_size}, numbered from 0")
        choices = []
        for size, start in zip(reversed(self.action_space_sizes), reversed(self._action_starts), strict=True):
            choices.append(flat % size + start)
            flat //= size
        choices.reverse()
        space = getattr(self.env, "action_space", None)
        return (
            np.array(choices, space.dtype).reshape(space.shape) if isinstance(space, spaces.MultiDiscrete) else choices
        )

    def _flatten_observation(self, observation: Any) -> Any:
        if not self._joins_seen or self._seen is None:
            return observation
        flat = 0
        for choice, size, start in zip(np.ravel(observation).tolist(), *self._seen, strict=True):
            if not 0 <= choice - start < size:
                raise WorldError(f"the observation {observation} is not in {self.env.observation_space}")
            flat = flat * size + int(choice - start)
        return flat

    def __getattr__(self, name: str) -> Any:
        if name == "env":  # not set yet: avoid infinite recursion
            raise AttributeError(name)
        return getattr(self.env, name)


def as_gym_env(env: Any) -> gym.Env[Any, Any]:
    """Return a Gymnasium environment unchanged; wrap any other object in FlattenMultiDiscreteWrapper."""
    return env if isinstance(env, gym.Env) else FlattenMultiDiscreteWrapper(env)


def _several(space: Any) -> bool:
    return isinstance(space, spaces.MultiDiscrete | spaces.Tuple)


def _sizes(env: Any, what: str) -> tuple[list[int], list[int]] | None:
    """Return the number of choices of each component and its first value; None if they are not known."""
    space, sizes = getattr(env, f"{what}_space", None), getattr(env, f"{what}_space_sizes", None)
    if isinstance(space, spaces.MultiDiscrete):
        return [int(n) for n in space.nvec.ravel()], [int(s) for s in space.start.ravel()]
    if isinstance(space, spaces.Tuple):
        parts = [part for part in space.spaces if isinstance(part, spaces.Discrete)]
        same = len(parts) == len(space.spaces)
        return ([int(part.n) for part in parts], [int(part.start) for part in parts]) if same else None
    if isinstance(sizes, Sequence | np.ndarray):
        return [int(n) for n in sizes], [0] * len(sizes)
    if isinstance(space, spaces.Discrete):
        return [int(space.n)], [int(space.start)]
    size = getattr(env, f"{what}_space_size", None)
    return None if size is None else ([int(size)], [0])

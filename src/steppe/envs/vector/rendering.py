"""Render environments to RGB images, for videos."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np

from steppe.core.contracts.errors import MissingExtra


def render_rgb(env: gym.Env[Any, Any] | gym.vector.VectorEnv[Any, Any, Any]) -> np.ndarray | None:
    """Return an RGB image [height, width, 3] of the (first) environment, or None if it has none.

    Raises MissingExtra if a package for rendering is not installed.
    """
    if env.render_mode is None:
        return None
    try:
        frame: Any = env.render()
    except gym.error.DependencyNotInstalled as error:
        raise MissingExtra(f"rendering ({error})", "render") from error
    if isinstance(frame, (list, tuple)):
        frame = frame[0] if frame else None
    if frame is None:
        return None
    image = np.asarray(frame)
    return image.astype(np.uint8, copy=False) if image.ndim == 3 and image.shape[2] == 3 else None

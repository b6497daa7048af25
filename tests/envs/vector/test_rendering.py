"""What is said where rendering fails."""

from __future__ import annotations

import gymnasium as gym
import pytest

from steppe.core.contracts.errors import WorldError
from steppe.envs.vector.rendering import render_rgb

pytestmark = pytest.mark.unit


class Blind(gym.Env):
    render_mode = "rgb_array"

    def render(self):
        raise RuntimeError("an OpenGL platform library has not been loaded")


def test_mujoco_without_opengl_is_answered_with_the_variable(monkeypatch):
    monkeypatch.setattr(Blind, "__module__", "gymnasium.envs.mujoco.hopper_v5")
    with pytest.raises(WorldError, match=r"OpenGL platform.*: set the environment variable MUJOCO_GL to egl"):
        render_rgb(Blind())


def test_errors_of_other_environments_are_theirs():
    with pytest.raises(RuntimeError, match="OpenGL platform"):
        render_rgb(Blind())

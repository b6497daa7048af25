"""Arguments that come from outside, against the signature of an environment like those of MuJoCo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from steppe.core.contracts.errors import ConfigError
from steppe.envs import arguments
from steppe.envs.arguments import require_env_kwargs

pytestmark = pytest.mark.unit


class Simulated:
    """Takes a model file and how often to repeat actions."""

    def __init__(self, model_path: str, frame_skip: int = 5, camera: str | None = None) -> None: ...


class Cheetah(Simulated):
    """Passes on what it does not know."""

    def __init__(
        self,
        xml_file: str = "half_cheetah.xml",
        scene: str = "scenes/plain.xml",
        forward_reward_weight: float = 1.0,
        reset: bool = True,
        limits: tuple[float, float] = (-1.0, 1.0),
        score: Callable[[float], float] = abs,
        **kwargs: Any,
    ) -> None: ...


@pytest.fixture(autouse=True)
def cheetah(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "find_env", lambda env: Cheetah)


def test_arguments_of_the_signature_are_accepted() -> None:
    require_env_kwargs("x", {"forward_reward_weight": 2, "reset": False, "limits": [-2.0, 2.0], "frame_skip": 4})
    require_env_kwargs("x", {"camera": "side"})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("xml_file", "evil"),
        ("model_path", "evil"),
        ("scene", "evil"),  # whose default is a path
        ("score", "evil"),  # whose default is a function
        ("no_such", 1),
        ("kwargs", 1),
        ("reset", 1),
        ("forward_reward_weight", True),
        ("forward_reward_weight", None),
        ("frame_skip", 1.5),
        ("limits", 1.0),
        ("camera", "/etc/passwd"),
        ("camera", "os.system"),
        ("camera", "module:function"),
        ("camera", "x" * 100),
        ("camera", ["a/b"]),
        ("camera", {"a": 1}),
    ],
)
def test_unsafe_and_invalid_arguments_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"environment\.kwargs\.{name} "):
        require_env_kwargs("x", {name: value})


def test_all_errors_are_reported_at_once() -> None:
    with pytest.raises(ConfigError, match=r"no_such .*; environment\.kwargs\.reset "):
        require_env_kwargs("x", {"no_such": 1, "reset": 3})

"""Worlds: environments by id or by function, the loop that steps them, checks for those that users write.

Importing this registers the built-in `steppe/…` environments with Gymnasium.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from steppe.envs.registry import register_builtins

if TYPE_CHECKING:
    from steppe.envs.factory import make_world, probe
    from steppe.envs.lookup import known_environments
    from steppe.envs.validation.single import check, require_sound
    from steppe.envs.vector.finite import require_finite

__all__ = ["check", "known_environments", "make_world", "probe", "require_finite", "require_sound"]

_HOMES = {
    "check": "validation.single",
    "known_environments": "lookup",
    "make_world": "factory",
    "probe": "factory",
    "require_finite": "vector.finite",
    "require_sound": "validation.single",
}

register_builtins()


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)

"""Environments: lookup by id or by function, vectorized stepping, wrappers, snapshots and validation.

Importing this package registers the built-in `steppe/…` environments with Gymnasium.
"""

from __future__ import annotations

import importlib
import warnings
from typing import TYPE_CHECKING, Any

from steppe.envs.registry import register_builtins

if TYPE_CHECKING:
    from steppe.envs.factory import make_segment_env, probe
    from steppe.envs.lookup import known_environments
    from steppe.envs.validation.single import check_env, require_valid_env
    from steppe.envs.vector.finite import require_finite

__all__ = ["check_env", "known_environments", "make_segment_env", "probe", "require_finite", "require_valid_env"]

_HOMES = {
    "check_env": "validation.single",
    "known_environments": "lookup",
    "make_segment_env": "factory",
    "probe": "factory",
    "require_finite": "vector.finite",
    "require_valid_env": "validation.single",
}

_RENAMED = {"check": "check_env", "make_world": "make_segment_env", "require_sound": "require_valid_env"}

register_builtins()


def __getattr__(name: str) -> Any:
    if name in _RENAMED:
        new = _RENAMED[name]
        warnings.warn(f"{__name__}.{name} is now called {new}", DeprecationWarning, stacklevel=2)
        name = new
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)

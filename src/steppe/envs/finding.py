"""From the text that names an environment to what makes it: a Gymnasium registration or a function."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from typing import Any

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec as Registration
from gymnasium.envs.registration import find_highest_version, get_env_id, parse_env_id

from steppe.core import factory
from steppe.core.errors import MissingExtra, WorldError, nearest

Source = Registration | Callable[..., Any]
ATARI = "ALE"  # the namespace of current Atari games
_SHIMS = ("GymV21Environment", "GymV26Environment")  # doors to another library, not environments


def find(env: str) -> Source:
    """What makes `env`: a Gymnasium id, `module:Id`, or a `module:function` that returns an environment."""
    module, colon, name = env.partition(":")
    if not colon:
        if env.startswith(f"{ATARI}/") and not _register_atari():
            raise MissingExtra(env, "atari")
        return _registered(env, env)
    if module in ("local", "__main__"):
        return _function(factory.resolve(env), env)
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise WorldError(f"cannot import {module!r} for the environment {env!r}: {error}") from error
    if factory.is_reference(env) and hasattr(sys.modules[module], name.partition(".")[0]):
        return _function(factory.resolve(env), env)
    return _registered(name, env)


def known_environments() -> list[str]:
    """The ids that can be used without naming a module, sorted; some need a package that may not be installed."""
    _register_atari()
    return sorted(spec.id for spec in gym.registry.values() if spec.name not in _SHIMS)


def is_atari(source: Source) -> bool:
    """Whether this is one of ale-py's current games, for which atari.py has the usual preprocessing."""
    return isinstance(source, Registration) and source.namespace == ATARI


def _register_atari() -> bool:
    """Let ale-py name its games to Gymnasium, where it is installed."""
    if importlib.util.find_spec("ale_py") is None:
        return False
    importlib.import_module("ale_py")
    return True


def _function(found: Any, env: str) -> Callable[..., Any]:
    if not callable(found):
        raise WorldError(f"{env!r} is a {type(found).__name__}, not a function that makes an environment")
    return found  # type: ignore[no-any-return]


def _registered(name: str, env: str) -> Registration:
    if name in gym.registry:
        return gym.registry[name]
    try:
        namespace, bare, version = parse_env_id(name)
    except gym.error.Error:
        raise WorldError(f"there is no environment {env!r}.{_suggestion(name)}") from None
    newest = find_highest_version(namespace, bare)
    if newest is None:
        unknown = namespace is not None and all(spec.namespace != namespace for spec in gym.registry.values())
        advice = _package(name, module=":" in env) if unknown else _suggestion(name)
        raise WorldError(f"there is no environment {env!r}.{advice}")
    current = get_env_id(namespace, bare, newest)
    if version is None:
        return gym.registry[current]
    if version < newest:
        raise WorldError(f"{env!r} is no longer part of its package: use {current!r}, which is current")
    raise WorldError(f"there is no version {version} of {bare!r} yet: use {current!r}, which is current")


def _suggestion(name: str) -> str:
    return nearest(name, known_environments()) or " `steppe envs` lists what there is."


def _package(name: str, *, module: bool) -> str:
    if module:
        return " The module registers no such name."
    return f" Install the package that registers it and name that too, as in 'package:{name}'."

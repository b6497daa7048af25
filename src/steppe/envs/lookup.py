"""Resolve the name of an environment to its source: a Gymnasium registration or a function.

PettingZoo environments are named by their module (`pettingzoo.sisl.pursuit_v5`), whose `parallel_env` or `env` builds
them, or by PettingZoo's own id (`sisl/pursuit-v5`).
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import re
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec as Registration
from gymnasium.envs.registration import find_highest_version, get_env_id, parse_env_id

from steppe.core.config import references
from steppe.core.contracts.errors import MissingExtra, WorldError, did_you_mean

EnvSource = Registration | Callable[..., Any]
ATARI = "ALE"  # the namespace of current Atari games
_MAKERS = ("parallel_env", "env")  # functions by which PettingZoo-style modules build their environments
_SHIMS = ("GymV21Environment", "GymV26Environment")  # adapters to the old gym library, not environments


def find_env(env: str) -> EnvSource:
    """Return the source of `env`: a Gymnasium registration, or a function that returns an environment.

    `env` is a Gymnasium or PettingZoo id, a PettingZoo-style module, `module:Id`, or `module:function`. Raises
    WorldError if there is no such environment, and MissingExtra if an extra that it needs is not installed.
    """
    module, colon, name = env.partition(":")
    if not colon:
        if env.startswith(f"{ATARI}/") and not _register_atari():
            raise MissingExtra(env, "atari")
        if "." in env and all(part.isidentifier() for part in env.split(".")):
            return _find_in_pettingzoo(env.removeprefix("pettingzoo.").replace(".", "/")) or _find_in_module(env)
        return _find_in_pettingzoo(env) or _find_registered(env, env)
    if module in ("local", "__main__"):
        return _require_callable(references.resolve_reference(env), env)
    module = references.current_module(module)
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise WorldError(
            f"cannot import {module!r} for the environment {env!r}: {error}; install it, or run the command in its directory"
        ) from error
    if references.is_reference(env) and hasattr(sys.modules[module], name.partition(".")[0]):
        return _require_callable(references.resolve_reference(env), env)
    return _find_registered(name, env)


def known_environments() -> list[str]:
    """Return the sorted ids that need no module name; some need a package that may not be installed."""
    _register_atari()
    return sorted(spec.id for spec in gym.registry.values() if spec.name not in _SHIMS)


def is_atari(source: EnvSource) -> bool:
    """Return whether `source` is one of ale-py's current games, which envs/wrappers/atari.py preprocesses as usual."""
    return isinstance(source, Registration) and source.namespace == ATARI


def _find_in_module(env: str) -> Callable[..., Any]:
    """Return the function that builds the environment of a PettingZoo-style module, preferring its `parallel_env`."""
    package, _, last = env.rpartition(".")
    if package.partition(".")[0] == "pettingzoo" and importlib.util.find_spec("pettingzoo") is None:
        raise MissingExtra(env, "multiagent")
    try:
        found = importlib.import_module(references.current_module(env))
    except ImportError as error:
        raise WorldError(f"cannot import {env!r} for the environment: {error}.{_sibling(package, last)}") from error
    for name in _MAKERS:
        if callable(getattr(found, name, None)):
            return getattr(found, name)  # type: ignore[no-any-return]
    raise WorldError(f"the module {env!r} has neither parallel_env nor env: name the function, as in '{env}:make'")


def _sibling(package: str, name: str) -> str:
    """Return a hint with the most similar name among the modules of `package`, or an empty string."""
    paths = getattr(sys.modules.get(package), "__path__", [])
    close = did_you_mean(name, [module.name for module in pkgutil.iter_modules(paths)])
    return close.replace("'", f"'{package}.", 1)


def _find_in_pettingzoo(env: str) -> Callable[..., Any] | None:
    """Return a function that builds the environment that PettingZoo registered under this id, or None."""
    if "/" not in env or env in gym.registry or importlib.util.find_spec("pettingzoo") is None:
        return None
    pettingzoo = importlib.import_module("pettingzoo")
    name = re.sub(r"_v(?=\d+$)", "-v", env)
    for kind in ("parallel", "aec"):
        if name in getattr(pettingzoo, f"{kind}_registry", {}):
            return partial(pettingzoo.make, kind, name)
    return None


def _register_atari() -> bool:
    """Import ale-py, which registers its games with Gymnasium; return False if it is not installed."""
    if importlib.util.find_spec("ale_py") is None:
        return False
    importlib.import_module("ale_py")
    return True


def _require_callable(found: Any, env: str) -> Callable[..., Any]:
    if not callable(found):
        raise WorldError(f"{env!r} is a {type(found).__name__}, not a function that makes an environment")
    return found  # type: ignore[no-any-return]


def _find_registered(name: str, env: str) -> Registration:
    if name in gym.registry:
        return gym.registry[name]
    try:
        namespace, bare, version = parse_env_id(name)
    except gym.error.Error:
        raise WorldError(f"there is no environment {env!r}.{_suggestion(name)}") from None
    newest = find_highest_version(namespace, bare)
    if newest is None:
        unknown = namespace is not None and all(spec.namespace != namespace for spec in gym.registry.values())
        hint = _install_hint(name, module=":" in env) if unknown else _suggestion(name)
        raise WorldError(f"there is no environment {env!r}.{hint}")
    current = get_env_id(namespace, bare, newest)
    if version is None:
        return gym.registry[current]
    if version < newest:
        raise WorldError(f"{env!r} is no longer part of its package: use {current!r}, which is current")
    raise WorldError(f"there is no version {version} of {bare!r} yet: use {current!r}, which is current")


def _suggestion(name: str) -> str:
    return did_you_mean(name, known_environments()) or " `steppe envs` lists what there is."


def _install_hint(name: str, *, module: bool) -> str:
    if module:
        return " The module registers no such name."
    return f" Install the package that registers it and name that too, as in 'package:{name}'."

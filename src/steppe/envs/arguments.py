"""Validate keyword arguments for an environment from a client that may not run code here, against its signature.

Arguments that could name a file, a module or a function are rejected, by their name or their default. So are
strings with more than 64 characters or others than letters, digits, spaces, `_`, `+` and `-`. The environment is looked
up, but not built.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any

from gymnasium.envs.registration import EnvSpec, load_env_creator
from gymnasium.error import DependencyNotInstalled

from steppe.core.contracts.errors import ConfigError, did_you_mean
from steppe.envs.lookup import find_env

_PLAIN = re.compile(r"[A-Za-z0-9 _+-]{0,64}")
_UNSAFE_NAME = re.compile(
    r"(^|_)(file|path|dir|directory|folder|root|url|uri|module|import|entry|xml|rom|game|fn|func|function|callback|callable|class"
    r"|cls|kwargs|args|wrapper|wrappers|hook|command|cmd|code)s?(_|$)|render|window|log|save|record",
    re.IGNORECASE,
)


def require_env_kwargs(env: str, given: Mapping[str, Any]) -> None:
    """Raise ConfigError with every mistake, unless the environment takes these arguments and all are plain values."""
    known = _parameters(env)
    wrong = [words for name, value in given.items() if (words := _explain_rejection(name, value, known)) is not None]
    if wrong:
        raise ConfigError("; ".join(f"environment.kwargs.{words}" for words in wrong))


def _explain_rejection(name: str, value: Any, known: Mapping[str, Any]) -> str | None:
    name = name[:100]
    if _UNSAFE_NAME.search(name) or _is_unsafe(known.get(name)):
        return f"{name} cannot be set from here: it may name files, code or windows of this machine"
    if name not in known:
        takes = ", ".join(
            key for key, default in known.items() if not (_UNSAFE_NAME.search(key) or _is_unsafe(default))
        )
        return f"{name} is not an argument of this environment; it takes: {takes or 'none'}.{did_you_mean(name, known)}"
    if not _is_plain(value):
        return f"{name} must be a number, a truth value, a plain word, or a list of those: no path, module or code"
    default = known[name]
    if default is not None and default is not inspect.Parameter.empty and not _fits(value, default):
        return f"{name} must be like its default, {default!r}"
    return None


def _is_unsafe(default: Any) -> bool:
    """Return whether a default value is a path, a module or a function, so that the argument may be one too."""
    if default is inspect.Parameter.empty:
        return False
    return callable(default) or (isinstance(default, str) and not _PLAIN.fullmatch(default))


def _is_plain(value: Any) -> bool:
    if isinstance(value, str):
        return _PLAIN.fullmatch(value) is not None
    if isinstance(value, list | tuple):
        return all(_is_plain(one) for one in value)
    return value is None or isinstance(value, bool | int | float)


def _fits(value: Any, default: Any) -> bool:
    if value is None:
        return False
    if isinstance(default, bool) or isinstance(value, bool):
        return isinstance(default, bool) and isinstance(value, bool)
    if isinstance(default, float):
        return isinstance(value, int | float)
    if isinstance(default, list | tuple):
        return isinstance(value, list | tuple)
    return isinstance(value, type(default)) if isinstance(default, int | str) else True


def _parameters(env: str) -> dict[str, Any]:
    """Return an environment's arguments by name, with their defaults."""
    source = find_env(env)
    registered: dict[str, Any] = dict(source.kwargs) if isinstance(source, EnvSpec) else {}
    creator: Any = source
    if isinstance(source, EnvSpec):
        entry = source.entry_point
        try:
            creator = load_env_creator(entry) if isinstance(entry, str) else entry
        except (ImportError, DependencyNotInstalled) as error:
            raise ConfigError(f"{env} needs a package that is not installed: {error}") from None
    return _of_creator(creator) | registered


def _of_creator(creator: Any) -> dict[str, Any]:
    """Return the arguments of a function or class with their defaults; `**kwargs` adds those of the base classes."""
    makers = (
        [vars(base)["__init__"] for base in creator.__mro__[:-1] if "__init__" in vars(base)]
        if inspect.isclass(creator)
        else [creator]
    )
    found: dict[str, Any] = {}
    for maker in makers:
        parameters = inspect.signature(maker).parameters.values()
        named = [one for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
        for one in named:
            if one.name != "self":
                found.setdefault(one.name, one.default)
        if not any(one.kind is one.VAR_KEYWORD for one in parameters):
            break
    return found

"""Run-time type checks for the public API, which also accepts NumPy and torch numbers. Hot paths are not checked."""

from __future__ import annotations

import functools
import inspect
import re
import types
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from beartype import BeartypeConf, beartype

from steppe.core.contracts.errors import ConfigError

T = TypeVar("T")
_NUMBER = re.compile(r"\b(int|float|bool)\b")

# A wrong argument is the caller's mistake, hence a ConfigError; a wrong return value is a bug. An int is a valid float.
_typed = beartype(conf=BeartypeConf(violation_param_type=ConfigError, is_color=False, is_pep484_tower=True))


def typechecked(target: T) -> T:
    """Check the arguments of a function, or of a class's methods, against their annotations.

    Where the annotation is a number, a NumPy or torch number is converted first.
    """
    found: Any = _typed(target)  # type: ignore[type-var]
    if not isinstance(found, type):
        return _convert_numbers(found)  # type: ignore[return-value]
    for name, value in list(vars(found).items()):
        if isinstance(value, types.FunctionType) and (name == "__init__" or not name.startswith("_")):
            setattr(found, name, _convert_numbers(value))
    return found  # type: ignore[return-value]


def to_python_number(value: Any) -> Any:
    """Convert a NumPy scalar, or an array or tensor without axes, to a Python number; return others unchanged."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray) or type(value).__module__ == "torch":
        return value.item() if getattr(value, "ndim", None) == 0 else value
    return value


def _convert_numbers(function: Callable[..., Any]) -> Callable[..., Any]:
    parameters = list(inspect.signature(function).parameters.values())
    indices = [index for index, found in enumerate(parameters) if _NUMBER.search(str(found.annotation))]
    names = {parameters[index].name for index in indices}
    if not names:
        return function

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        for index in indices:
            if index < len(args) and type(args[index]) not in _PLAIN:
                args = tuple(to_python_number(value) if n in indices else value for n, value in enumerate(args))
                break
        for name in names.intersection(kwargs) if kwargs else ():
            kwargs[name] = to_python_number(kwargs[name])
        return function(*args, **kwargs)

    return call


_PLAIN = frozenset({int, float, bool, str, type(None)})

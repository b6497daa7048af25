"""Deprecated names of configuration keys."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from steppe.core.contracts.errors import ConfigError, RenamedKeyWarning


def replace_renamed_keys(
    values: Mapping[str, Any], renamed: Mapping[str, str], *, recorded: bool = False
) -> dict[str, Any]:
    """Replace deprecated names of hyperparameters, which may have the prefix `agent.`, and warn about each.

    ConfigError if a key is given by both names. With `recorded`, for values that Steppe stored: no warning, and the last
    value of a key counts.
    """
    replaced: dict[str, Any] = {}
    for key, value in values.items():
        section, dot, name = key.rpartition(".")
        new = renamed.get(name) if section in ("", "agent") else None
        if new is not None and not recorded:
            if new in values or f"agent.{new}" in values:
                raise ConfigError(f"{key} is the deprecated name of {new}: set only {new}")
            warnings.warn(f"the configuration key {key} is now called {new}", RenamedKeyWarning, stacklevel=2)
        replaced[key if new is None else f"{section}{dot}{new}"] = value
    return replaced

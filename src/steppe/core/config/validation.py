"""Validate configuration from files and arguments; errors become one sentence each."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from steppe.core.config.fields import FrozenConfig
from steppe.core.contracts.errors import ConfigError


def read_toml(path: Path) -> dict[str, Any]:
    """A TOML file's tables."""
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None


def validate_config(kind: type[FrozenConfig], values: Mapping[str, Any], prefix: str) -> Any:
    """Return a configuration object; ConfigError lists all invalid values."""
    try:
        return kind(**values)
    except ValidationError as error:
        raise ConfigError("; ".join(_format_error(found, prefix) for found in error.errors())) from None


def _format_error(found: Mapping[str, Any], prefix: str) -> str:
    key = prefix + ".".join(str(part) for part in found["loc"])
    if found["type"] == "missing":
        return f"{key} is required"
    message = found["msg"].removeprefix("Value error, ")
    return f"{key}={found['input']!r}: {message[0].lower()}{message[1:]}"

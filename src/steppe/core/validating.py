"""From what somebody wrote to a checked configuration object, or to one sentence about what is wrong with it."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from steppe.core.algorithms import Frozen
from steppe.core.errors import ConfigError


def read_toml(path: Path) -> dict[str, Any]:
    """A TOML file's tables."""
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None


def validated(kind: type[Frozen], values: Mapping[str, Any], prefix: str) -> Any:
    """Make a configuration object, with pydantic's findings turned into one sentence."""
    try:
        return kind(**values)
    except ValidationError as error:
        first = error.errors()[0]
        key = prefix + ".".join(str(part) for part in first["loc"])
        if first["type"] == "missing":
            raise ConfigError(f"{key} is required") from None
        message = first["msg"].removeprefix("Value error, ")
        raise ConfigError(f"{key}={first['input']!r}: {message[0].lower()}{message[1:]}") from None

"""Checkpoints of a server: one checksummed file, replaced atomically, with the previous one kept beside it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

from steppe.core.contracts.errors import ConfigError, DamagedFile, UsageError
from steppe.core.io.atomic_files import write_atomic
from steppe.core.io.codec import pack, unpack

SCHEMA = 1
_NEEDED = {"parameters", "carried", "optimizer", "method", "roster", "pending", "waiting", "counters", "staleness"}


def write_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Replace the checkpoint at `path`; a crash at any moment leaves the old one or the new one there."""
    if not path.parent.is_dir():
        raise ConfigError(f"there is no directory {path.parent} for the checkpoint: make it first")
    data = pack({"kind": "parameter server", "schema": SCHEMA, "state": state})
    aside = path.with_name(f".{path.name}.previous.tmp")
    with contextlib.suppress(FileNotFoundError):
        aside.unlink()
    with contextlib.suppress(FileNotFoundError):
        os.link(path, aside)
        os.replace(aside, previous_path(path))
    write_atomic(path, data)


def read_checkpoint(path: Path) -> tuple[dict[str, Any], bool]:
    """Return the newest intact state, and whether it is the previous one because the newest is corrupt."""
    if not path.exists() and not previous_path(path).exists():
        raise UsageError(f"there is no checkpoint at {path}")
    try:
        return _read(path), False
    except DamagedFile:
        if not previous_path(path).exists():
            raise
        return _read(previous_path(path)), True


def previous_path(path: Path) -> Path:
    """Return the path of the previous checkpoint."""
    return path.with_name(f"{path.name}.previous")


def _read(path: Path) -> dict[str, Any]:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DamagedFile(f"{path} cannot be read: {error.strerror}") from None
    try:
        tree = unpack(data)
    except DamagedFile as error:
        raise DamagedFile(f"{path}: {error}") from None
    if not isinstance(tree, dict) or tree.get("kind") != "parameter server" or not isinstance(tree.get("schema"), int):
        raise DamagedFile(f"{path} is not a parameter server's checkpoint")
    if tree["schema"] > SCHEMA:
        raise DamagedFile(f"{path} has schema {tree['schema']}, newer than {SCHEMA}, the newest this version reads")
    state = tree.get("state")
    if not isinstance(state, dict) or not set(state) >= _NEEDED:
        raise DamagedFile(f"{path} is not whole: parts of a parameter server's state are missing")
    return state

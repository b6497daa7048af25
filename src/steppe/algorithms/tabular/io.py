"""Saved tabular algorithms: one safetensors file, with settings, counters and a hash in its metadata."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from steppe.core.contracts.errors import ConfigError, DamagedFile
from steppe.core.io.atomic_files import raising_disk_full, write_atomic

if TYPE_CHECKING:
    from steppe.algorithms.tabular.base import BaseAlgorithm

FORMAT = 1
_BROKEN = (ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError, RecursionError)


@dataclass(frozen=True)
class SavedLearner:
    """The contents of a file that was read and verified."""

    path: Path
    settings: dict[str, Any]
    counters: dict[str, Any]
    words: dict[str, Any]
    arrays: dict[str, np.ndarray]


def save(path: Path, agent: BaseAlgorithm) -> None:
    """Write `agent` to a file, durably and atomically, replacing what was there."""
    from safetensors.numpy import save as encode

    words = agent.words.state()
    arrays = {**agent.arrays(), "words": words.pop("left")}
    counters = {"step_count": agent.step_count, "episode_count": agent.episode_count}
    rates = {"learning_rate": agent.learning_rate, "epsilon": agent.epsilon}
    about = json.dumps(
        {
            "format": FORMAT,
            "class": type(agent).__name__,
            "settings": agent.settings(),
            "counters": {**counters, **rates},
            "words": words,
        }
    )
    data = bytes(encode(arrays, {"steppe_table": about, "sha256": _digest(about, arrays)}))
    with raising_disk_full(path):
        write_atomic(path, data)


def read(path: Path, kind: str) -> SavedLearner:
    """Read and verify a file of `save`; ConfigError unless it was saved by the class named `kind`."""
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        data = path.read_bytes()
    except OSError as error:
        raise DamagedFile(f"{path} cannot be read: {error.strerror}") from None
    try:
        arrays = load(data)
        metadata = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")]).get("__metadata__", {})
        if "steppe_table" not in metadata:
            raise ValueError("its metadata is not that of a saved table")
        if _digest(metadata["steppe_table"], arrays) != metadata.get("sha256"):
            raise ValueError("it does not match its sha256")
        about = json.loads(metadata["steppe_table"])
        if about["format"] > FORMAT:
            raise ValueError(
                f"format {about['format']} is newer than {FORMAT}, the newest this version of Steppe reads"
            )
        words = {**about["words"], "left": arrays.pop("words")}
        found, saved = about["class"], SavedLearner(path, about["settings"], about["counters"], words, arrays)
    except (SafetensorError, *_BROKEN) as error:
        raise DamagedFile(f"{path} is damaged: {error}") from None
    if found != kind:
        raise ConfigError(f"{path} holds a {found}, not a {kind}: load it with {found}.load")
    return saved


def require_fit(saved: SavedLearner, current: dict[str, np.ndarray]) -> None:
    """Raise ConfigError unless the file's arrays have the names, shapes and dtypes of `current`."""
    differences = [
        f"{name} is {_describe_array(saved.arrays.get(name))} in the file, {_describe_array(current.get(name))} here"
        for name in sorted(current.keys() | saved.arrays.keys())
        if _describe_array(saved.arrays.get(name)) != _describe_array(current.get(name))
    ]
    if differences:
        raise ConfigError(f"{saved.path} does not fit this learner: {'; '.join(differences)}")


def _describe_array(array: np.ndarray | None) -> str:
    return "absent" if array is None else f"{array.dtype}{list(array.shape)}"


def _digest(about: str, arrays: dict[str, np.ndarray]) -> str:
    digest = hashlib.sha256(about.encode())
    for name in sorted(arrays):
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(arrays[name]).data)
    return digest.hexdigest()

"""A store on disk: bundles of one safetensors file per buffer and a JSON description, sized and hashed by their manifest.

    DIR/save-<n>/manifest.json            written by core/durable.py: size and SHA-256 of each file below
    DIR/save-<n>/pool.json                format 1: capacity, rings, the caller's own state
    DIR/save-<n>/buffer-<part>.safetensors    the filled rows of every column, and "#leaves" of a prioritized buffer

A save appears whole or not at all, and the one before it goes only then. Nothing is pickled.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from steppe.core.agent import Tree
from steppe.core.durable import read_bundle, sweep, write_bundle
from steppe.core.errors import DamagedFile, UsageError

FORMAT = 1
POOL = "pool.json"
LEAVES = "#leaves"


class Ring(msgspec.Struct, frozen=True):
    """One buffer's fill."""

    size: int
    cursor: int
    added: int


class Description(msgspec.Struct, frozen=True):
    """What a saved store consists of; `extra` is the caller's own, as JSON text."""

    format: int
    capacity: int
    prioritized: bool
    max_priority: float
    rings: list[Ring]
    extra: str


def save_state(directory: Path, state: Tree, capacity: int, extra: str) -> None:
    """Write what `Store.state` returned; a reader sees either this save or the one before."""
    directory.mkdir(parents=True, exist_ok=True)
    sweep(directory)
    ends = np.cumsum(state["size"])
    files = {}
    for part, (size, end) in enumerate(zip(state["size"], ends, strict=True)):
        arrays = {name: np.ascontiguousarray(rows[end - size : end]) for name, rows in state["columns"].items()}
        if "leaves" in state:
            arrays[LEAVES] = np.ascontiguousarray(state["leaves"][end - size : end])
        files[_file(part)] = save(arrays)
    numbers = zip(state["size"].tolist(), state["cursor"].tolist(), state["added"].tolist(), strict=True)
    rings = [Ring(*ring) for ring in numbers]
    description = Description(FORMAT, capacity, "leaves" in state, float(state["max_priority"]), rings, extra)
    files[POOL] = msgspec.json.encode(description)
    before = _saves(directory)
    write_bundle(directory / f"save-{_number(before[-1]) + 1 if before else 0}", files)
    for old in before:
        shutil.rmtree(old, ignore_errors=True)


def load_state(directory: Path) -> tuple[Tree, Description]:
    """What the newest save holds, checked, in the form that `Store.restore` takes."""
    saves = _saves(directory)
    if not saves:
        raise UsageError(f"there are no saved buffers at {directory}: save_buffers() makes them")
    files = read_bundle(saves[-1])
    description = _description(saves[-1] / POOL, files.get(POOL, b""))
    if len(files) != len(description.rings) + 1 or not all(_file(p) in files for p in range(len(description.rings))):
        raise DamagedFile(f"{saves[-1]} has not one file for each of its {len(description.rings)} buffers")
    parts = [
        _arrays(saves[-1] / _file(part), files[_file(part)], ring.size, prioritized=description.prioritized)
        for part, ring in enumerate(description.rings)
    ]
    shapes = [{name: (rows.dtype, rows.shape[1:]) for name, rows in arrays.items()} for arrays in parts]
    for part, shape in enumerate(shapes):
        if shape != shapes[0]:
            raise DamagedFile(f"{saves[-1] / _file(part)} has other columns than {_file(0)}")
    joined = {name: np.concatenate([arrays[name] for arrays in parts]) for name in parts[0]}
    state: Tree = {key: np.array([getattr(ring, key) for ring in description.rings], np.int64) for key in _RING}
    state["max_priority"] = description.max_priority
    if description.prioritized:
        state["leaves"] = joined.pop(LEAVES)
    return {**state, "columns": joined}, description


_RING = ("size", "cursor", "added")


def _file(part: int) -> str:
    return f"buffer-{part}.safetensors"


def _number(path: Path) -> int:
    return int(path.name.removeprefix("save-"))


def _saves(directory: Path) -> list[Path]:
    """Complete saves, oldest first."""
    found = [path for path in directory.glob("save-*") if path.name.removeprefix("save-").isdecimal()]
    return sorted(found, key=_number)


def _description(path: Path, data: bytes) -> Description:
    try:
        description = msgspec.json.decode(data, type=Description)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DamagedFile(f"{path} does not describe saved buffers: {error}") from None
    if description.format != FORMAT:
        raise DamagedFile(f"{path} has format {description.format}; this version of Steppe reads format {FORMAT}")
    capacity = description.capacity
    rings = description.rings
    if not rings or not all(0 <= r.size <= capacity and 0 <= r.cursor < capacity and r.added >= r.size for r in rings):
        raise DamagedFile(f"{path} contradicts itself: its rings do not fit their capacity")
    return description


def _arrays(path: Path, data: bytes, size: int, *, prioritized: bool) -> dict[str, Any]:
    try:
        arrays: dict[str, Any] = load(data)
    except (SafetensorError, ValueError, KeyError) as error:
        raise DamagedFile(f"{path} is not a safetensors file: {error}") from None
    for name, rows in arrays.items():
        if rows.ndim == 0 or len(rows) != size:
            raise DamagedFile(f"{path}: column {name!r} has not {size} rows, as {POOL} says")
    if (LEAVES in arrays) != prioritized or len(arrays) < 1 + prioritized:
        raise DamagedFile(f"{path} lacks columns that {POOL} promises")
    if prioritized:
        leaves = arrays[LEAVES]
        if leaves.dtype != np.float32 or leaves.ndim != 1 or not (np.isfinite(leaves) & (leaves >= 0)).all():
            raise DamagedFile(f"{path}: column {LEAVES!r} holds something else than priorities")
    return arrays

"""Saved buffers: an atomic bundle per save, which shares unchanged rows with the previous save.

    DIR/save-<n>/manifest.json    written by core/io/atomic_files.py: size and SHA-256 of each of the files below
    DIR/save-<n>/pool.json        format, number of buffers, capacity, kind
    DIR/save-<n>/state.bin        counters, cursors, random states (core/io/codec.py)
    DIR/save-<n>/rows.json        location and SHA-256 of each column's rows (core/io/row_chunks.py), stored in *.rows

docs/replay-format.md describes this format, and format 1, which can still be read. Nothing is pickled.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load

from steppe.core.contracts.algorithm import Tree
from steppe.core.contracts.errors import DamagedFile, DiskFull, UsageError
from steppe.core.io import codec, row_chunks
from steppe.core.io.atomic_files import is_disk_full, read_bundle, remove_temporary_files, write_bundle
from steppe.core.io.rings import ROWS, Ring

FORMAT = 2
POOL, STATE = "pool.json", "state.bin"
LEAVES = "#leaves"


class PoolDescription(msgspec.Struct, frozen=True):
    """The kind and size of a saved pool."""

    format: int
    num_buffers: int
    capacity: int
    prioritized: bool


class RingV1(msgspec.Struct, frozen=True):
    """Format 1: the fill of one buffer."""

    size: int
    cursor: int
    added: int


class PoolDescriptionV1(msgspec.Struct, frozen=True):
    """Format 1: description of a saved store; `extra` holds the remaining state as JSON text."""

    format: int
    capacity: int
    prioritized: bool
    max_priority: float
    rings: list[RingV1]
    extra: str


def save_state(directory: Path, state: Tree, description: PoolDescription) -> None:
    """Write a tree that contains `ReplayStore.live_state`; a reader sees either this save or the previous one."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        remove_temporary_files(directory)
        before = _saves(directory)
        newest = before[-1] if before else None
        write_save(directory / f"save-{_number(newest) + 1 if newest else 0}", state, description, newest)
    except OSError as error:
        if is_disk_full(error):
            raise DiskFull(
                f"there is no disk space to save buffers at {directory}; the previous save is unchanged"
            ) from error
        raise
    for old in before:
        shutil.rmtree(old, ignore_errors=True)


def write_save(save: Path, state: Tree, description: PoolDescription, before: Path | None) -> None:
    """Write one save; rows that are unchanged since the save `before` are shared with it."""
    rings: list[Ring] = []
    plain = row_chunks.extract_rings(state, rings)
    files = {POOL: msgspec.json.encode(description), STATE: codec.pack(plain)}
    write_bundle(save, files, lambda aside: row_chunks.write_rows(aside, rings, before))


def load_state(directory: Path) -> tuple[Tree, PoolDescription]:
    """Return the newest save's tree, with its rings still on disk. Everything except their rows is verified."""
    saves = _saves(directory)
    if not saves:
        raise UsageError(f"there are no saved buffers at {directory}: save_buffers() makes them")
    return read_save(saves[-1])


def read_save(save: Path) -> tuple[Tree, PoolDescription]:
    """Return what `write_save` wrote, as `load_state` does."""
    files = read_bundle(save)
    path = save / POOL
    if _format(path, files.get(POOL, b"")) == 1:
        return _load_format_1(save, files)
    description = _decoded(path, files[POOL], PoolDescription)
    missing = [name for name in (STATE, ROWS) if name not in files]
    if missing:
        raise DamagedFile(f"{save} is damaged: it holds no {missing[0]}")
    try:
        tree = codec.unpack(files[STATE])
    except DamagedFile as error:
        raise DamagedFile(f"{save / STATE}: {error}") from None
    return row_chunks.insert_rings(tree, row_chunks.read_rows(save, files[ROWS])), description


def _load_format_1(save: Path, files: dict[str, bytes]) -> tuple[Tree, PoolDescription]:
    """Read format 1: one safetensors file per buffer, with all its columns."""
    old = _decoded(save / POOL, files[POOL], PoolDescriptionV1)
    _require_valid(save / POOL, old)
    if len(files) != len(old.rings) + 1 or not all(_file(part) in files for part in range(len(old.rings))):
        raise DamagedFile(f"{save} has not one file for each of its {len(old.rings)} buffers")
    parts = [
        _arrays(save / _file(part), files[_file(part)], ring.size, prioritized=old.prioritized)
        for part, ring in enumerate(old.rings)
    ]
    shapes = [{name: (rows.dtype, rows.shape[1:]) for name, rows in arrays.items()} for arrays in parts]
    for part, shape in enumerate(shapes):
        if shape != shapes[0]:
            raise DamagedFile(f"{save / _file(part)} has other columns than {_file(0)}")
    joined = {name: np.concatenate([arrays[name] for arrays in parts]) for name in parts[0]}
    store: Tree = {key: np.array([getattr(ring, key) for ring in old.rings], np.int64) for key in _RING}
    store["max_priority"] = old.max_priority
    if old.prioritized:
        store["leaves"] = joined.pop(LEAVES)
    try:
        extra = json.loads(old.extra)
        tree = {"store": {**store, "columns": joined}, "turn": extra["turn"], "stream": extra["stream"]}
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise DamagedFile(f"{save / POOL} is damaged: {error}") from None
    return tree, PoolDescription(1, len(old.rings), old.capacity, old.prioritized)


def column_names(store: Tree) -> list[str]:
    """Return the column names of a saved store of either format."""
    if "columns" in store:
        return list(store["columns"])
    return [name for name, _, _ in store["rings"][0].record.columns]


_RING = ("size", "cursor", "added")


def _file(part: int) -> str:
    return f"buffer-{part}.safetensors"


def _number(path: Path) -> int:
    return int(path.name.removeprefix("save-"))


def _saves(directory: Path) -> list[Path]:
    """Return the complete saves, oldest first."""
    found = [path for path in directory.glob("save-*") if path.name.removeprefix("save-").isdecimal()]
    return sorted(found, key=_number)


def _format(path: Path, data: bytes) -> int:
    version = _decoded(path, data, dict[str, Any]).get("format")
    if not isinstance(version, int) or not 1 <= version <= FORMAT:
        raise DamagedFile(f"{path} has format {version}; this version of Steppe reads formats 1 to {FORMAT}")
    return version


def _decoded(path: Path, data: bytes, kind: Any) -> Any:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise DamagedFile(f"{path} does not describe saved buffers: {error}") from None


def _require_valid(path: Path, old: PoolDescriptionV1) -> None:
    capacity, rings = old.capacity, old.rings
    if not rings or not all(0 <= r.size <= capacity and 0 <= r.cursor < capacity and r.added >= r.size for r in rings):
        raise DamagedFile(f"{path} contradicts itself: its rings do not fit their capacity")


def _arrays(path: Path, data: bytes, size: int, *, prioritized: bool) -> dict[str, Any]:
    try:
        arrays: dict[str, Any] = load(data)
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
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

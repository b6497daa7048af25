"""Checkpoints: numbered bundles, written atomically. The newest few are kept, and the best one as well.

    checkpoints/00000012/   weights.safetensors   state.bin   counters.json   manifest.json   rows.json   *.rows
    checkpoints/00000012/replay-0/   written by a replay role (replay/store/files.py), if the run has replay roles
    checkpoints/best/00000009/   weights.safetensors   counters.json   manifest.json

The learner writes the first kind and the manager the best one: each directory has one writer.
`state.bin` is the tree that the learner needs for an exact resume (core/io/codec.py). A replay buffer's columns are in
`*.rows`; a checkpoint shares them with the previous one as far as they have not changed (core/io/row_chunks.py). A
checkpoint that is damaged, from another run or of a newer format is reported, and the previous one is used.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from steppe.core.contracts.algorithm import Tree
from steppe.core.contracts.errors import DamagedFile
from steppe.core.contracts.weights import Weights
from steppe.core.io import codec, row_chunks
from steppe.core.io.atomic_files import read_bundle, remove_temporary_files, write_atomic, write_bundle
from steppe.core.io.rings import ROWS, NestedBundle, Ring

WEIGHTS, STATE, COUNTERS = "weights.safetensors", "state.bin", "counters.json"
FORMAT = 1
_GAP_BYTES = 4096
_DECODE_ERRORS = (ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError, RecursionError)
_NUMBER = re.compile(r"\d{8,}")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was read and is valid; `damaged` describes newer ones that are not."""

    path: Path
    number: int
    weights: Weights
    state: Tree
    counters: dict[str, Any]
    damaged: tuple[str, ...] = ()


@dataclass(frozen=True)
class CheckpointInfo:
    """One row in a list of checkpoints; `damage` is None for a valid one."""

    path: Path
    number: int
    age_s: float
    size_bytes: int
    best: bool
    counters: dict[str, Any] = field(default_factory=dict)
    damage: str | None = None


class Checkpoints:
    """The checkpoints of one run. One process calls `save`, one `save_best`; any may read."""

    def __init__(self, directory: Path, keep: int = 3, run: str | None = None) -> None:
        """`run` is a run's key: checkpoints store it, and those of another run are rejected."""
        if keep < 1:
            raise ValueError(f"keep={keep}: at least one checkpoint has to be kept")
        self.directory = directory
        self._keep = keep
        self._run = run

    def save(self, weights: Weights, state: Tree, counters: dict[str, Any]) -> Path:
        """Write the next checkpoint, then remove all but the newest `keep`. Nothing is removed if writing fails."""
        rings: list[Ring] = []
        others: list[NestedBundle] = []
        plain = row_chunks.extract_rings(state, rings, others)
        files = {WEIGHTS: weights_bytes(weights), STATE: codec.pack(plain), COUNTERS: self._encode_counters(counters)}
        return _append(self.directory, files, self._keep, rings, others)

    def save_best(self, weights: Weights, score: float, counters: dict[str, Any] | None = None) -> Path:
        """Store weights as the best so far, replacing the previous best; `save` never removes them."""
        all_counters = {"score": score, **codec.counters(weights), **(counters or {})}
        files = {WEIGHTS: weights_bytes(weights), COUNTERS: self._encode_counters(all_counters)}
        return _append(self.directory / "best", files, 1)

    def latest(self, *, check_rows: bool = True) -> Checkpoint | None:
        """Return the newest valid checkpoint, with the damaged ones that were skipped; None if there is none.

        DamagedFile if there are checkpoints and none is valid. Pass `check_rows=False` if only the weights are needed: a
        replay buffer's columns, which can be gigabytes, are then not checked.
        """
        return _newest(self.directory, self._run, check_rows=check_rows)

    def load(self, number: int) -> Checkpoint:
        """Return the checkpoint of that number. DamagedFile if it is not valid.

        A replay buffer's columns are checked as they are read.
        """
        return _load(number, self.directory / f"{number:08d}", self._run)

    def best(self) -> Checkpoint | None:
        """Return the best weights so far, with `counters["score"]`; the state is empty."""
        return _newest(self.directory / "best", self._run, check_rows=True)

    def list(self) -> list[CheckpointInfo]:
        """Return every checkpoint, oldest first, the best last; each is read in full to validate it."""
        best = self.directory / "best"
        numbered = [_describe(number, path, self._run, best=False) for number, path in _numbered(self.directory)]
        return numbered + [_describe(number, path, self._run, best=True) for number, path in _numbered(best)]

    def _encode_counters(self, counters: dict[str, Any]) -> bytes:
        return (json.dumps({"format": FORMAT, "run": self._run, "counters": counters}, indent=2) + "\n").encode()


def _numbered(directory: Path) -> list[tuple[int, Path]]:
    """Return the numbered checkpoints, oldest first; empty if there is no such directory."""
    if not directory.is_dir():
        return []
    return sorted((int(path.name), path) for path in directory.iterdir() if _NUMBER.fullmatch(path.name))


def _append(
    directory: Path,
    files: dict[str, bytes],
    keep: int,
    rings: Sequence[Ring] = (),
    others: Sequence[NestedBundle] = (),
) -> Path:
    """Write the next numbered bundle, then remove all but the newest `keep`."""
    directory.mkdir(parents=True, exist_ok=True)
    remove_temporary_files(directory)
    number, before = max(_numbered(directory), default=(0, None))
    path = directory / f"{number + 1:08d}"

    def write_rows(temporary: Path) -> dict[str, bytes]:
        row_chunks.write_nested_bundles(temporary, others, before)
        return row_chunks.write_rows(temporary, rings, before) if rings else {}

    write_bundle(path, files, write_rows)
    for _, old in _numbered(directory)[:-keep]:
        _remove(old)
    return path


def save_weights(path: Path, weights: Weights) -> None:
    """Write a safetensors file that any tool can read, with layout and counters in its metadata."""
    write_atomic(path, weights_bytes(weights))


def load_weights(path: Path) -> Weights:
    """Read weights from a file of `save_weights`. DamagedFile if it is not one."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DamagedFile(f"{path} cannot be read: {error.strerror}") from None
    return weights_from(data, str(path))


def weights_bytes(weights: Weights) -> bytes:
    """Return weights as the bytes of a safetensors file."""
    from safetensors.numpy import save

    rows = [[entry.name, entry.shape, entry.dtype, entry.offset] for entry in weights.layout.entries]
    metadata = json.dumps({"format": FORMAT, "counters": codec.counters(weights), "layout": rows})
    return bytes(save(weights.arrays(), {"steppe": metadata, "sha256": _digest(metadata, weights)}))


def weights_from(data: bytes, where: str) -> Weights:
    """Read weights from the bytes of a safetensors file, verified against the layout and hash in its metadata."""
    from safetensors import SafetensorError
    from safetensors.numpy import load as load_arrays

    try:
        arrays = load_arrays(data)
        metadata = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")]).get("__metadata__", {})
        if "steppe" not in metadata:
            raise ValueError("its metadata does not say that Steppe wrote it")
        weights = _to_weights(arrays, json.loads(metadata["steppe"]))
        if _digest(metadata["steppe"], weights) != metadata.get("sha256"):
            raise ValueError("it does not match its sha256")
    except (SafetensorError, msgspec.MsgspecError, *_DECODE_ERRORS) as error:
        raise DamagedFile(f"{where} is damaged: {error}") from None
    return weights


def _to_weights(arrays: dict[str, np.ndarray], metadata: dict[str, Any]) -> Weights:
    if metadata["format"] > FORMAT:
        raise ValueError(f"format {metadata['format']} is newer than {FORMAT}, the newest this version of Steppe reads")
    rows = metadata["layout"]
    layout = codec.validate_layout(rows, max((row[3] + arrays[row[0]].nbytes for row in rows), default=0))
    # The offsets come from the file: allocate no more than its arrays and a bounded gap per array.
    if layout.nbytes > sum(array.nbytes for array in arrays.values()) + _GAP_BYTES * len(rows):
        raise ValueError("its layout has holes that are too wide")
    buffer = np.zeros(layout.nbytes, np.uint8)
    for entry, view in zip(layout.entries, layout.views(buffer).values(), strict=True):
        if arrays[entry.name].shape != entry.shape or arrays[entry.name].dtype != entry.dtype:
            raise ValueError(f"{entry.name!r} is not as the layout says")
        view[...] = arrays[entry.name]
    return Weights(layout, buffer, **codec.validate_counters(metadata["counters"]))


def _digest(metadata: str, weights: Weights) -> str:
    return hashlib.sha256(metadata.encode() + bytes.fromhex(weights.sha256())).hexdigest()


def _load(number: int, path: Path, run: str | None, *, check_rows: bool = False) -> Checkpoint:
    files = read_bundle(path)
    if WEIGHTS not in files or COUNTERS not in files:
        raise DamagedFile(f"{path} is damaged: it holds no {WEIGHTS if WEIGHTS not in files else COUNTERS}")
    counters = _counters(files[COUNTERS], path / COUNTERS, run)
    weights = weights_from(files[WEIGHTS], str(path / WEIGHTS))
    state = codec.unpack(files[STATE]) if STATE in files else {}
    rings = row_chunks.read_rows(path, files[ROWS]) if ROWS in files else []
    for ring in rings if check_rows else ():
        ring.check()
    state = row_chunks.insert_rings(state, rings, path)
    if check_rows:
        row_chunks.check_nested_bundles(path)
    return Checkpoint(path, number, weights, state, counters)


def _counters(data: bytes, path: Path, run: str | None) -> dict[str, Any]:
    try:
        metadata = json.loads(data)
        version, owner, counters = metadata["format"], metadata["run"], dict(metadata["counters"])
    except _DECODE_ERRORS as error:
        raise DamagedFile(f"{path} is damaged: {error}") from None
    if version > FORMAT:
        raise DamagedFile(f"{path} has format {version}, newer than {FORMAT}, the newest this version of Steppe reads")
    if run is not None and owner != run:
        raise DamagedFile(f"{path.parent} is a checkpoint of another run ({owner}, not {run})")
    return counters


def _newest(directory: Path, run: str | None, *, check_rows: bool) -> Checkpoint | None:
    damaged: list[str] = []
    for number, path in reversed(_numbered(directory)):
        try:
            return replace(_load(number, path, run, check_rows=check_rows), damaged=tuple(damaged))
        except DamagedFile as error:
            damaged.append(str(error))
    if damaged:
        raise DamagedFile("no checkpoint is valid: " + "; ".join(damaged))
    return None


def _describe(number: int, path: Path, run: str | None, *, best: bool) -> CheckpointInfo:
    try:
        age = time.time() - path.stat().st_mtime
        size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        counters = _load(number, path, run, check_rows=True).counters
    except FileNotFoundError:
        return CheckpointInfo(path, number, 0.0, 0, best, damage=f"{path} was removed while it was read")
    except DamagedFile as error:
        return CheckpointInfo(path, number, age, size, best, damage=str(error))
    return CheckpointInfo(path, number, age, size, best, counters)


def _remove(path: Path) -> None:
    """Rename the checkpoint before removing it, so that no reader takes a partly removed one for a damaged one."""
    removed = path.with_name(f".{path.name}.old.tmp")
    path.rename(removed)
    shutil.rmtree(removed, ignore_errors=True)

"""Ring buffers of rows to be saved, the saves that they continue, and the schema of rows.json.

docs/replay-format.md describes the format; core/io/row_chunks.py writes and reads the rows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from steppe.core.contracts.errors import DamagedFile
from steppe.core.contracts.specs import FieldSpec
from steppe.core.io.atomic_files import PLAIN_NAME

FORMAT = 2
ROWS, TAIL = "rows.json", "tail.rows"
MAX_REMEMBERED_SAVES = 8  # earlier saves that a ring remembers as continued
_DTYPES = frozenset(np.dtype(code).name for code in "?bhilBHILefdFD")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass
class SaveHistory:
    """The saves since which a ring has only been appended to: save id → rows added by then."""

    saves: dict[str, int] = field(default_factory=dict)

    def reset(self) -> None:
        """Forget all saves, after rows have changed in any way other than by appending."""
        self.saves.clear()

    def record_save(self, save: str, added: int) -> None:
        """Record that this save holds the ring as it is now."""
        self.saves[save] = added
        while len(self.saves) > MAX_REMEMBERED_SAVES:
            del self.saves[next(iter(self.saves))]


@dataclass(frozen=True)
class Ring:
    """Columns [capacity, …] whose first `size` rows are filled; rows are appended at `cursor`, `added` counts them.

    Shares the owner's memory, so it must be saved before the next row is added. Without a history every save writes all
    rows. Where rows are not filled in order, `stamps` has the value of `added` after each row was last written.
    """

    name: str
    columns: Mapping[str, np.ndarray]
    size: int
    cursor: int = 0
    added: int = 0
    history: SaveHistory | None = None
    stamps: np.ndarray | None = None

    def chunks_written_since(self, since: int, chunk_rows: int) -> set[int]:
        """Return the chunks with rows that were written after `added` was `since`."""
        if self.stamps is not None:
            return set(np.unique(np.flatnonzero(self.stamps[: self.size] > since) // chunk_rows).tolist())
        fresh = min(self.added - since, self.capacity)
        start = self.cursor - fresh  # negative: wraps around to the end of the ring
        stretches = [(start, self.cursor)] if start >= 0 else [(start + self.capacity, self.capacity), (0, self.cursor)]
        return {
            index
            for low, high in stretches
            if low < high
            for index in range(low // chunk_rows, (high - 1) // chunk_rows + 1)
        }

    @property
    def capacity(self) -> int:
        return len(next(iter(self.columns.values())))

    def described(self) -> tuple[tuple[str, str, tuple[int, ...]], ...]:
        """Return name, dtype and row shape of each column."""
        return tuple((name, rows.dtype.name, rows.shape[1:]) for name, rows in self.columns.items())


@dataclass(frozen=True)
class NestedBundle:
    """Rows that another writer saves, as a bundle within a bundle.

    `begin(directory, previous bundle or None)` starts the write and returns a function that blocks until it is on disk.
    """

    name: str
    begin: Callable[[Path, Path | None], Callable[[], object]]


class ChunkRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One range of rows: its columns are stored consecutively from `offset`, each with its own hash."""

    file: str
    offset: int
    sha256: tuple[str, ...]


class RingRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A saved ring; `columns` are (name, dtype, row shape)."""

    name: str
    capacity: int
    size: int
    cursor: int
    added: int
    chunk_rows: int
    columns: tuple[tuple[str, str, tuple[int, ...]], ...]
    chunks: tuple[ChunkRecord, ...]

    def fields(self) -> tuple[FieldSpec, ...]:
        return tuple(FieldSpec(name, shape, dtype) for name, dtype, shape in self.columns)

    def spans(self) -> list[tuple[int, int]]:
        """Return the row range [low, high) of each chunk."""
        return [(low, min(self.size, low + self.chunk_rows)) for low in range(0, self.size, self.chunk_rows)]


class RowsRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Contents of rows.json."""

    format: int
    id: str
    rings: tuple[RingRecord, ...]


def decode_rows_record(path: Path, data: bytes) -> RowsRecord:
    """Decode and validate the bytes of rows.json; DamagedFile when they are invalid."""
    try:
        version = msgspec.json.decode(data, type=dict[str, Any]).get("format")
        if isinstance(version, int) and version > FORMAT:
            raise DamagedFile(
                f"{path} has format {version}, newer than {FORMAT}, the newest this version of Steppe reads"
            )
        record = msgspec.json.decode(data, type=RowsRecord)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise DamagedFile(f"{path} does not describe saved rows: {error}") from None
    for ring in record.rings:
        _require_sound(path, ring)
    return record


def _require_sound(path: Path, ring: RingRecord) -> None:
    names = [name for name, _, _ in ring.columns]
    for name, dtype, shape in ring.columns:
        if dtype not in _DTYPES or len(shape) > 31 or any(length < 0 for length in shape):
            raise DamagedFile(f"{path} is damaged: column {name!r} of {ring.name} is {dtype}{list(shape)}")
    fill = 0 <= ring.size <= ring.capacity and 0 <= ring.cursor < max(1, ring.capacity) and ring.added >= 0
    if not fill or ring.chunk_rows < 1 or len(set(names)) != len(names):
        raise DamagedFile(f"{path} contradicts itself about {ring.name}: its fill, its chunks or its columns")
    if len(ring.chunks) != -(-ring.size // ring.chunk_rows):
        raise DamagedFile(
            f"{path} contradicts itself: {len(ring.chunks)} chunks are not {ring.size} rows of {ring.name}"
        )
    for chunk in ring.chunks:
        hashes = len(chunk.sha256) == len(names) and all(map(_SHA256.fullmatch, chunk.sha256))
        if not hashes or chunk.offset < 0 or not PLAIN_NAME.fullmatch(chunk.file):
            raise DamagedFile(f"{path} is damaged: it does not say where a chunk of {ring.name} lies")

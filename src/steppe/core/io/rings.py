"""Rings of rows: what is to be saved, by which saves it is known already, and what rows.json says of it.

docs/replay-format.md has the format; core/io/row_chunks.py writes and reads the rows.
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
MAX_REMEMBERED_SAVES = 8  # saves that a ring knows itself to continue
_DTYPES = frozenset(np.dtype(code).name for code in "?bhilBHILefdFD")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass
class SaveHistory:
    """The saves that a ring has only been appended to since: save id → rows added by then."""

    saves: dict[str, int] = field(default_factory=dict)

    def reset(self) -> None:
        """Rows have changed in another way: no earlier save says anything about them."""
        self.saves.clear()

    def record_save(self, save: str, added: int) -> None:
        """This save holds the ring as it is now."""
        self.saves[save] = added
        while len(self.saves) > MAX_REMEMBERED_SAVES:
            del self.saves[next(iter(self.saves))]


@dataclass(frozen=True)
class Ring:
    """Columns [capacity, …] whose first `size` rows are filled; rows are appended at `cursor`, `added` counts them.

    Shares the owner's memory: whoever writes it down does so before the next row is added. Without a history every save
    writes it whole. Where rows are not filled in turn, `stamps` has what `added` was after each row was last written.
    """

    name: str
    columns: Mapping[str, np.ndarray]
    size: int
    cursor: int = 0
    added: int = 0
    history: SaveHistory | None = None
    stamps: np.ndarray | None = None

    def chunks_written_since(self, since: int, chunk_rows: int) -> set[int]:
        """The chunks that have rows which were written after `since` of them had been added."""
        if self.stamps is not None:
            return set(np.unique(np.flatnonzero(self.stamps[: self.size] > since) // chunk_rows).tolist())
        fresh = min(self.added - since, self.capacity)
        start = self.cursor - fresh  # negative: before the end of the ring
        stretches = [(start, self.cursor)] if start >= 0 else [(start + self.capacity, self.capacity), (0, self.cursor)]
        return {
            place
            for low, high in stretches
            if low < high
            for place in range(low // chunk_rows, (high - 1) // chunk_rows + 1)
        }

    @property
    def capacity(self) -> int:
        return len(next(iter(self.columns.values())))

    def described(self) -> tuple[tuple[str, str, tuple[int, ...]], ...]:
        """Name, dtype and shape of a row of each column."""
        return tuple((name, rows.dtype.name, rows.shape[1:]) for name, rows in self.columns.items())


@dataclass(frozen=True)
class NestedBundle:
    """Rows that somebody else writes into a bundle, as a bundle within it: `begin(directory, the one before it, if any)`
    returns what waits until they are on the disk."""

    name: str
    begin: Callable[[Path, Path | None], Callable[[], object]]


class ChunkRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One stretch of rows: its columns lie one after the other from `offset` on, each with its own hash."""

    file: str
    offset: int
    sha256: tuple[str, ...]


class RingRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A ring as it was saved; `columns` are (name, dtype, shape of a row)."""

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
        """First and last + 1 row of each chunk."""
        return [(low, min(self.size, low + self.chunk_rows)) for low in range(0, self.size, self.chunk_rows)]


class RowsRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What rows.json says."""

    format: int
    id: str
    rings: tuple[RingRecord, ...]


def decode_rows_record(path: Path, data: bytes) -> RowsRecord:
    """What rows.json says, from its bytes; DamagedFile when that cannot be."""
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

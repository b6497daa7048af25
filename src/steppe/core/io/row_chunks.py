"""Columns too large to rewrite with every save: stored in chunk files inside a bundle, hashed by column.

    rows.json     format, the save's id, and per ring: columns, fill, and the location of each chunk (core/io/rings.py)
    tail.rows     rewritten by every save: the chunk under each ring's cursor, and rings without a history
    <id>-<n>.rows     one chunk, unchanged until its ring wraps around; later saves link to the same file

The contents of a ring and the other files of a bundle are up to the callers.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from steppe.core.contracts.errors import DamagedFile
from steppe.core.contracts.specs import FieldSpec
from steppe.core.io.atomic_files import link_or_copy, read_bundle, read_file
from steppe.core.io.rings import (
    FORMAT,
    ROWS,
    TAIL,
    ChunkRecord,
    NestedBundle,
    Ring,
    RingRecord,
    RowsRecord,
    decode_rows_record,
)

CHUNK_BYTES = 16 << 20
MAX_OPEN_FILES = 16  # waiting to be synced
MAX_UNHASHED = 16  # columns of chunks that were read but not hashed yet
_RING_KEY = "#ring"  # placeholder in a tree for a ring that is written separately
_BUNDLE_KEY = "#bundle"  # placeholder for a nested bundle, by its name


def write_rows(directory: Path, rings: Sequence[Ring], before: Path | None = None) -> dict[str, bytes]:
    """Write rings into a bundle's directory, synced, and return the file that describes them.

    Chunks that have not changed since the bundle `before`, if these rings continue it, are linked from there.
    """
    known = _read_record(before)
    writer = _ChunkWriter(directory)
    with writer.workers:
        done = [writer.ring(ring, _continued(ring, known), before) for ring in rings]
        writer.finish()
    record = RowsRecord(FORMAT, writer.id, tuple(make() for make in done))
    for ring in rings:
        if ring.history is not None:
            ring.history.record_save(writer.id, ring.added)
    return {ROWS: msgspec.json.encode(record)}


def read_rows(directory: Path, data: bytes) -> list[SavedRing]:
    """Return the rings that rows.json describes (`data` is its verified content), validated except for the hashes."""
    record = decode_rows_record(directory / ROWS, data)
    ends: defaultdict[str, int] = defaultdict(int)
    for ring in record.rings:
        row_bytes = sum(spec.nbytes for spec in ring.fields())
        for chunk, (low, high) in zip(ring.chunks, ring.spans(), strict=True):
            ends[chunk.file] = max(ends[chunk.file], chunk.offset + (high - low) * row_bytes)
    return [SavedRing(directory, record.id, ring, ends) for ring in record.rings]


@dataclass(frozen=True)
class SavedRing:
    """A ring on disk."""

    directory: Path
    save: str
    record: RingRecord
    ends: Mapping[str, int]  # file → its size

    def read_into(self, columns: Mapping[str, np.ndarray]) -> None:
        """Read all rows into the beginning of these columns, which must have the saved shapes.

        Raises DamagedFile that names the first corrupt column.
        """
        self._require_files()
        with ThreadPoolExecutor(2) as worker:
            found: list[tuple[ChunkRecord, FieldSpec, int, int, Future[str]]] = []
            for chunk, low, high in self._chunks():
                for spec, rows in self._read(chunk, {name: rows[low:high] for name, rows in columns.items()}):
                    found.append((chunk, spec, low, high, worker.submit(_sha256, rows)))
                if len(found) > MAX_UNHASHED:
                    found[-MAX_UNHASHED][-1].result()
            for chunk, spec, low, high, digest in found:
                self._require_hash(chunk, spec, low, high, digest.result())
        self._require_bools(columns)

    def check(self) -> None:
        """Read and verify all rows without keeping them; DamagedFile names the first corrupt column."""
        if not self.record.size:
            return
        self._require_files()  # file sizes bound the shapes before anything is allocated
        scratch = {
            spec.name: np.empty((min(self.record.size, self.record.chunk_rows), *spec.shape), spec.dtype)
            for spec in self.record.fields()
        }
        for chunk, low, high in self._chunks():
            for spec, rows in self._read(chunk, {name: rows[: high - low] for name, rows in scratch.items()}):
                self._require_hash(chunk, spec, low, high, _sha256(rows))

    def _require_files(self) -> None:
        for chunk in self.record.chunks:
            os.close(self._open_chunk(chunk, self.directory / chunk.file, self.ends[chunk.file]))

    def _chunks(self) -> Iterator[tuple[ChunkRecord, int, int]]:
        for chunk, (low, high) in zip(self.record.chunks, self.record.spans(), strict=True):
            yield chunk, low, high

    def _read(self, chunk: ChunkRecord, into: Mapping[str, np.ndarray]) -> Iterator[tuple[FieldSpec, np.ndarray]]:
        path, offset = self.directory / chunk.file, chunk.offset
        descriptor = self._open_chunk(chunk, path, self.ends[chunk.file])
        try:
            for spec in self.record.fields():
                target = into[spec.name]
                rows = target if target.flags.c_contiguous else np.empty(target.shape, target.dtype)
                _read_exactly(descriptor, offset, rows, path)
                offset += rows.nbytes
                if rows is not target:
                    target[...] = rows
                yield spec, rows
        finally:
            os.close(descriptor)

    def _open_chunk(self, chunk: ChunkRecord, path: Path, size: int) -> int:
        """Open a regular file of this size. Never blocks, for example on a FIFO."""
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            word = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read: {error.strerror}"
            raise DamagedFile(f"{path} {word}; it holds {self._first_missing_rows(chunk, 0)}") from None
        found = os.fstat(descriptor)
        if stat.S_ISREG(found.st_mode) and found.st_size == size:
            return descriptor
        os.close(descriptor)
        if found.st_size > size:
            raise DamagedFile(f"{path} is damaged: too long, {found.st_size} bytes instead of {size}")
        lost = self._first_missing_rows(chunk, found.st_size)
        raise DamagedFile(f"{path} is damaged: truncated, {found.st_size} bytes instead of {size}; it lacks {lost}")

    def _first_missing_rows(self, chunk: ChunkRecord, size: int) -> str:
        """Describe the first column and rows of this chunk that a file of `size` bytes lacks."""
        low, high = self.record.spans()[self.record.chunks.index(chunk)]
        end = chunk.offset
        for spec in self.record.fields():
            end += spec.nbytes * (high - low)
            if end > size:
                return f"column {spec.name!r} of {self.record.name}, rows {low} to {high - 1}"
        return f"rows of {self.record.name}"

    def _require_hash(self, chunk: ChunkRecord, spec: FieldSpec, low: int, high: int, digest: str) -> None:
        index = [name for name, _, _ in self.record.columns].index(spec.name)
        if digest != chunk.sha256[index]:
            raise DamagedFile(
                f"{self.directory / chunk.file} is damaged: column {spec.name!r} of {self.record.name}, rows {low} to "
                f"{high - 1}, does not match its sha256"
            )

    def _require_bools(self, columns: Mapping[str, np.ndarray]) -> None:
        """Check that booleans are 0 or 1: NumPy's behavior is undefined for other bytes."""
        for name, rows in columns.items():
            if rows.dtype == np.bool_ and rows[: self.record.size].view(np.uint8).max(initial=0) > 1:
                raise DamagedFile(
                    f"{self.directory} is damaged: column {name!r} of {self.record.name} is not of truth values"
                )


def write_nested_bundles(directory: Path, others: Sequence[NestedBundle], before: Path | None) -> None:
    """Write nested bundles into this one concurrently; return when everything is on disk."""
    known = {other.name: before / other.name for other in others if before is not None}
    waits = [other.begin(directory / other.name, known.get(other.name)) for other in others]
    first: Exception | None = None
    for wait in waits:  # wait for all, even if one fails: no writer may be active when this raises
        try:
            wait()
        except Exception as error:  # noqa: BLE001 - raised below
            first = first or error
    if first is not None:
        raise first


def check_nested_bundles(directory: Path) -> None:
    """Read and verify the nested bundles of this one without keeping them; DamagedFile names the first corrupt one."""
    for bundle in sorted(path for path in directory.iterdir() if path.is_dir()):
        files = read_bundle(bundle)
        for ring in read_rows(bundle, files[ROWS]) if ROWS in files else ():
            ring.check()


def extract_rings(tree: Any, rings: list[Ring], others: list[NestedBundle] | None = None) -> Any:
    """Replace rings, and nested bundles if `others` is given, by placeholders; append them to the lists."""
    if isinstance(tree, Ring):
        rings.append(tree)
        return {_RING_KEY: len(rings) - 1}
    if isinstance(tree, NestedBundle) and others is not None:
        others.append(tree)
        return {_BUNDLE_KEY: tree.name}
    if isinstance(tree, dict):
        return {key: extract_rings(item, rings, others) for key, item in tree.items()}
    if isinstance(tree, list | tuple):
        return [extract_rings(item, rings, others) for item in tree]
    return tree


def insert_rings(tree: Any, rings: Sequence[SavedRing], directory: Path | None = None) -> Any:
    """Replace the placeholders of `extract_rings` by saved rings and by paths of nested bundles in `directory`."""
    if isinstance(tree, dict):
        if tree.keys() == {_BUNDLE_KEY} and directory is not None:
            bundle = directory / str(tree[_BUNDLE_KEY])
            if bundle.parent != directory or not bundle.is_dir():
                raise DamagedFile(f"{bundle} is missing")
            return bundle
        if tree.keys() == {_RING_KEY}:
            index = tree[_RING_KEY]
            if not isinstance(index, int) or not 0 <= index < len(rings):
                raise DamagedFile(f"there is no ring {index!r} among the {len(rings)} that were saved")
            return rings[index]
        return {key: insert_rings(item, rings, directory) for key, item in tree.items()}
    return [insert_rings(item, rings, directory) for item in tree] if isinstance(tree, list) else tree


class _ChunkWriter:
    """Writes chunks into one directory while two worker threads hash the chunks and sync complete files."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.id = os.urandom(8).hex()
        self.workers = ThreadPoolExecutor(2)
        self._synced: list[Future[None]] = []
        self._tail: list[Sequence[np.ndarray]] = []
        self._tail_bytes = 0
        self._files = 0

    def ring(self, ring: Ring, known: RingRecord | None, before: Path | None) -> Any:
        """Write the changed chunks; return a function that builds the record once all hashes are known."""
        row_bytes = sum(rows[:1].nbytes for rows in ring.columns.values()) if ring.size else 1
        record = RingRecord(
            ring.name, ring.capacity, ring.size, ring.cursor, ring.added, _chunk_rows(row_bytes), ring.described(), ()
        )
        shared = _unchanged_chunks(ring, record, known)
        chunks = []
        for index, (low, high) in enumerate(record.spans()):
            old = None
            if index in shared and known is not None and before is not None:
                old = self._link_chunk(known.chunks[index], before, (high - low) * row_bytes)
            chunks.append(old or self._chunk(ring, record, low, high))
        return lambda: msgspec.structs.replace(record, chunks=tuple(chunk() for chunk in chunks))

    def finish(self) -> None:
        """Write the common file of open chunks; everything is on disk when this returns."""
        if self._tail:
            self._write(TAIL, [rows for part in self._tail for rows in part])
        for future in self._synced:
            future.result()

    def _chunk(self, ring: Ring, record: RingRecord, low: int, high: int) -> Any:
        # Copies columns that are not contiguous, a chunk at a time.
        rows = [np.ascontiguousarray(column[low:high]) for column in ring.columns.values()]
        digests = [self.workers.submit(_sha256, part) for part in rows]
        full = min(low + record.chunk_rows, record.capacity) == high
        at_cursor = ring.stamps is None and low <= ring.cursor < high
        is_open = ring.history is None or not full or at_cursor
        if is_open:
            name, offset = TAIL, self._tail_bytes
            self._tail.append(rows)
            self._tail_bytes += sum(part.nbytes for part in rows)
        else:
            name, offset = f"{self.id}-{self._files}.rows", 0
            self._files += 1
            self._write(name, rows)
        return lambda: ChunkRecord(name, offset, tuple(digest.result() for digest in digests))

    def _link_chunk(self, chunk: ChunkRecord, before: Path, size: int) -> Any:
        """Link the chunk file of the previous save; None if it is missing or has the wrong size: rewrite it."""
        source = before / chunk.file
        if not source.is_file() or source.stat().st_size != size:
            return None
        link_or_copy(source, self.directory / chunk.file)
        return lambda: chunk

    def _write(self, name: str, parts: Sequence[np.ndarray]) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        descriptor = os.open(self.directory / name, flags, 0o644)
        try:
            for part in parts:
                rest = _as_bytes(part)
                while rest:
                    rest = rest[os.write(descriptor, rest) :]
        except BaseException:
            os.close(descriptor)
            raise
        self._synced.append(self.workers.submit(_sync, descriptor))
        if len(self._synced) >= MAX_OPEN_FILES:
            self._synced.pop(0).result()


def _unchanged_chunks(ring: Ring, now: RingRecord, known: RingRecord | None) -> frozenset[int]:
    """Return the chunks with files of their own whose rows were not written since the earlier save."""
    if known is None or now.chunk_rows != known.chunk_rows:
        return frozenset()
    touched = ring.chunks_written_since(known.added, now.chunk_rows)
    return frozenset(index for index, chunk in enumerate(known.chunks) if index not in touched and chunk.file != TAIL)


def _continued(ring: Ring, known: RowsRecord | None) -> RingRecord | None:
    """Return the earlier save's record of this ring, if the ring has only been appended to since."""
    if known is None or ring.history is None or known.id not in ring.history.saves:
        return None
    for record in known.rings:
        same = record.name == ring.name and record.columns == ring.described() and record.capacity == ring.capacity
        if same and record.added == ring.history.saves[known.id] <= ring.added:
            return record
    return None


def _read_record(before: Path | None) -> RowsRecord | None:
    """Read rows.json of an earlier bundle; None if there is none or it is corrupt."""
    if before is None:
        return None
    try:
        return decode_rows_record(before / ROWS, read_file(before, ROWS))
    except DamagedFile:
        return None


def _chunk_rows(row_bytes: int) -> int:
    """Return the rows per chunk: a power of two, so that a chunk has about CHUNK_BYTES."""
    return int(1 << (max(1, CHUNK_BYTES // max(1, row_bytes)).bit_length() - 1))


def _as_bytes(rows: np.ndarray) -> memoryview:
    assert rows.flags.c_contiguous  # otherwise this is a copy, and data read into it is lost
    return rows.reshape(-1).view(np.uint8).data


def _sha256(rows: np.ndarray) -> str:
    return hashlib.sha256(_as_bytes(rows)).hexdigest()  # releases the GIL


def _sync(descriptor: int) -> None:
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read_exactly(descriptor: int, offset: int, rows: np.ndarray, path: Path) -> None:
    rest = _as_bytes(rows)
    while rest:
        try:
            count = os.preadv(descriptor, [rest], offset)
        except OSError as error:
            raise DamagedFile(f"{path} cannot be read: {error.strerror}") from None
        if count == 0:
            raise DamagedFile(f"{path} is damaged: it ends early")
        rest, offset = rest[count:], offset + count

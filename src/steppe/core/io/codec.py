"""Trees of plain values and arrays ↔ bytes: versioned, checksummed, validated before allocation, never pickle.

    ┌ head, 32 bytes ──────────────────────────────────┬ structure ┬ pad ┬ array 0 ┬ pad ┬ array 1 ┬ … ┐
    │ "STPK" · format · total · structure size · crc32 │  msgpack  │     │ raw, little-endian, C order │
    └──────────────────────────────────────────────────┴───────────┴─────┴─────────────────────────────┘

The structure has only dtype and shape of an array; its bytes are the next ones, so no two arrays can overlap. Any
invalid input raises DamagedFile. The checksum of an unsealed message ("STPO") does not cover the arrays: for
connections that protect their data, such as TLS, where a checksum over megabytes would take longer than sending them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import struct
from collections.abc import Iterator
from typing import Any, TypeAlias

import msgspec
import numpy as np
from isal.isal_zlib import crc32  # same result as zlib.crc32, fifteen times as fast

from steppe.core.contracts.errors import DamagedFile
from steppe.core.contracts.segment import Segment, SegmentHeader
from steppe.core.contracts.specs import SegmentSpec
from steppe.core.contracts.weights import Weights, WeightsEntry, WeightsLayout

FORMAT = 1
SEGMENT_SCHEMA = 1
WEIGHTS_SCHEMA = 1
_MAGIC, _OPEN = b"STPK", b"STPO"
_HEAD = struct.Struct("<4sIQQI4x")
_ALIGN = 64
_ARRAY, _BIG_INT, _SCALAR = 1, 2, 3  # msgpack extension codes
_DTYPES = {
    np.dtype(name).name: np.dtype(name).newbyteorder("<")
    for name in ["?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"]
}
_AS_IS = frozenset({type(None), bool, float, str, bytes})
_PLAIN: tuple[type[Any], ...] = (str, bytes, float, dict, list, tuple)
_DECODE_ERRORS = (msgspec.MsgspecError, ValueError, TypeError, KeyError, OverflowError, RecursionError, AttributeError)
_COUNTERS = [field.name for field in dataclasses.fields(Weights) if field.name not in ("layout", "buffer")]
Buffer: TypeAlias = bytes | bytearray | memoryview


def pack(tree: Any, *, sealed: bool = True) -> bytes:
    """Encode a tree of plain values and arrays.

    A tree is nested dicts (keys str or int) and lists of None, bool, int of any size, float, str, bytes and numeric
    arrays. Tuples are decoded as lists; NumPy scalars keep their type. Anything else is a TypeError that names its path
    in the tree. Without `sealed`, the checksum does not cover the arrays.
    """
    arrays: list[np.ndarray] = []
    try:
        plain = _to_plain(tree, arrays)
    except TypeError as error:
        raise TypeError(f"{_path_to_unpackable(tree)}: {error}") from None
    return _assemble(msgspec.msgpack.encode(plain), arrays, sealed=sealed)


def unpack(data: Buffer, *, copy: bool = True, sealed: bool = True) -> Any:
    """Decode what `pack` encoded.

    Arrays are new and writable, or without `copy` views of `data`, which they keep alive. `sealed` must be the same as
    in `pack`.
    """
    return _unpack(data, copy=copy, sealed=sealed)


def encode_segment(segment: Segment) -> bytes:
    """Encode a segment with its header; `final_obs` only where an episode was cut."""
    if segment.header is None:
        raise ValueError("a segment without a header cannot be sent")
    arrays: list[np.ndarray] = []
    columns = _to_plain({**segment.columns, "final_obs": segment["final_obs"][segment.cut]}, arrays)
    about = {"kind": "segment", "schema": SEGMENT_SCHEMA, "header": segment.header, "columns": columns}
    return _assemble(msgspec.msgpack.encode(about), arrays)


def decode_segment(data: Buffer, spec: SegmentSpec, into: Segment | None = None) -> Segment:
    """Decode a segment that must match `spec` exactly, into new memory or into `into`, which is overwritten.

    Where no episode was cut, `final_obs` is left unchanged: zero in new memory.
    """
    message = _message(data, "segment", SEGMENT_SCHEMA)
    with _raise_damaged("segment"):
        header, received = msgspec.convert(message["header"], SegmentHeader), message["columns"]
        segment = into or Segment.blank(spec)
        if received.keys() != segment.columns.keys():
            raise ValueError(f"columns are {sorted(received)} instead of {sorted(segment.columns)}")
        for name, column in segment.columns.items():
            if name != "final_obs":
                _require(received[name], column.dtype, column.shape, name)
                column[...] = received[name]
        cut, final = segment.cut, received["final_obs"]
        _require(final, segment["final_obs"].dtype, (int(np.count_nonzero(cut)), *spec.obs.shape), "final_obs")
        if len(final):
            segment["final_obs"][cut] = final
        segment.header, segment.state = header, None
        return segment


def segment_header(data: Buffer) -> SegmentHeader:
    """Return the header of an encoded segment after verifying its checksum; the columns are not validated."""
    message = _message(data, "segment", SEGMENT_SCHEMA)
    with _raise_damaged("segment"):
        return msgspec.convert(message["header"], SegmentHeader)


def encode_weights(weights: Weights, *, sealed: bool = True) -> bytes:
    """Encode weights with their layout and counters."""
    layout = [[entry.name, entry.shape, entry.dtype, entry.offset] for entry in weights.layout.entries]
    message = {"kind": "weights", "schema": WEIGHTS_SCHEMA, "counters": counters(weights), "layout": layout}
    return pack({**message, "buffer": weights.buffer}, sealed=sealed)


def decode_weights(data: Buffer, *, sealed: bool = True) -> Weights:
    """Decode weights into a new buffer, after checking that every entry is inside it."""
    message = _message(data, "weights", WEIGHTS_SCHEMA, sealed=sealed)
    with _raise_damaged("weights"):
        known = validate_counters(message["counters"])
        buffer = message["buffer"]
        if not isinstance(buffer, np.ndarray) or buffer.dtype != np.uint8 or buffer.ndim != 1:
            raise ValueError("the buffer is not a flat array of bytes")
        layout = validate_layout(message["layout"], buffer.nbytes)
        return Weights(layout, buffer.copy(), **known)


def counters(weights: Weights) -> dict[str, Any]:
    """Return the counters of weights (all fields but layout and buffer), by name."""
    return {name: getattr(weights, name) for name in _COUNTERS}


def validate_counters(values: dict[str, Any]) -> dict[str, Any]:
    """Validate decoded counters: seconds are floats, all others integers; ValueError for an unknown name."""
    unknown = sorted(values.keys() - set(_COUNTERS))
    if unknown:
        raise ValueError(f"unknown counter {unknown[0]!r}")
    return {name: msgspec.convert(v, float if name.endswith("_s") else int) for name, v in values.items()}


def validate_layout(rows: Any, nbytes: int) -> WeightsLayout:
    """Return a layout from (name, shape, dtype, offset) rows; ValueError unless they fill `nbytes` without overlap."""
    entries, end = [], 0
    for name, shape, dtype, offset in msgspec.convert(rows, list[tuple[str, tuple[int, ...], str, int]]):
        size = _size(dtype, shape)
        if offset < end or offset % _DTYPES[dtype].itemsize or offset + size > nbytes:
            raise ValueError(f"entry {name!r} does not lie where it should")
        entries.append(WeightsEntry(name, shape, dtype, offset))
        end = offset + size
    if end != nbytes or len({entry.name for entry in entries}) != len(entries):
        raise ValueError("the entries do not fill the buffer, or a name occurs twice")
    return WeightsLayout(tuple(entries))


def _assemble(structure: bytes, arrays: list[np.ndarray], *, sealed: bool = True) -> bytes:
    """Build the message from an encoded structure and its contiguous arrays."""
    parts: list[Any] = [structure]
    end = _HEAD.size + len(structure)
    for array in arrays:
        parts += [bytes(-end % _ALIGN), array]
        end += len(parts[-2]) + array.nbytes
    magic = _MAGIC if sealed else _OPEN
    checksum = crc32(_HEAD.pack(magic, FORMAT, end, len(structure), 0))
    for part in parts if sealed else parts[:1]:
        checksum = crc32(part, checksum)
    return b"".join([_HEAD.pack(magic, FORMAT, end, len(structure), checksum), *parts])


def _to_plain(value: Any, arrays: list[np.ndarray]) -> Any:
    """Convert `value` to msgpack types, with arrays moved to the list.

    On the hot path: an actor's state is packed after every segment, and is mostly small plain values.
    """
    kind = type(value)
    if kind in _AS_IS:
        return value
    if kind is dict:
        return {key if type(key) is str else _key(key): _to_plain(item, arrays) for key, item in value.items()}
    if kind is list or kind is tuple:
        return [_to_plain(item, arrays) for item in value]
    if kind is np.ndarray:
        array = np.asarray(value, dtype=_little(value.dtype), order="C")
        arrays.append(array)
        return _array_head(array.dtype, array.shape)
    if isinstance(value, np.generic):
        little = np.asarray(value, dtype=_little(value.dtype))
        return msgspec.msgpack.Ext(_SCALAR, msgspec.msgpack.encode([value.dtype.name, little.tobytes()]))
    if isinstance(value, int):
        return value if -(2**63) <= value < 2**64 else msgspec.msgpack.Ext(_BIG_INT, _big(value))
    for plain in _PLAIN:
        if isinstance(value, plain):  # an instance of a subclass
            return _to_plain(plain(value), arrays)
    raise TypeError(f"a {kind.__name__} cannot be packed")


@functools.lru_cache(maxsize=1024)
def _array_head(dtype: np.dtype[Any], shape: tuple[int, ...]) -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(_ARRAY, msgspec.msgpack.encode([dtype.name, shape]))


@functools.lru_cache(maxsize=64)
def _little(dtype: np.dtype[Any]) -> np.dtype[Any]:
    if dtype.name not in _DTYPES:
        raise TypeError(f"dtype {dtype} cannot be packed")
    return _DTYPES[dtype.name]


def _key(key: Any) -> str | int:
    if isinstance(key, bool) or not isinstance(key, str | int) or (isinstance(key, int) and key.bit_length() > 63):
        raise TypeError(f"the key {key!r} cannot be packed: keys are text or 64-bit integers")
    return key


def _path_to_unpackable(value: Any, where: str = "tree") -> str:
    """Return the path of the part of a tree that cannot be packed."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    for key, item in items:
        try:
            _to_plain(item, [])
        except TypeError:
            return _path_to_unpackable(item, f"{where}[{key!r}]")
    return where


def _big(value: int) -> bytes:
    return value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)


def _unpack(data: Buffer, *, copy: bool, sealed: bool = True) -> Any:
    view = memoryview(data).cast("B")
    if len(view) < _HEAD.size:
        raise DamagedFile(f"a message of {len(view)} bytes is truncated: its head alone has {_HEAD.size}")
    magic, version, total, size, checksum = _HEAD.unpack_from(view)
    if magic != (_MAGIC if sealed else _OPEN):
        raise DamagedFile("these bytes are not a Steppe message")
    if version > FORMAT:
        raise DamagedFile(
            f"a message has format {version}, newer than {FORMAT}, the newest this version of Steppe reads"
        )
    if total != len(view) or size > total - _HEAD.size:
        raise DamagedFile(f"a message is truncated or too long: {len(view)} bytes instead of {total}")
    body = view[_HEAD.size :]
    summed = body if sealed else body[:size]
    if crc32(summed, crc32(_HEAD.pack(magic, version, total, size, 0))) != checksum or view[28:32] != bytes(4):
        raise DamagedFile("a message does not match its checksum")
    reader = _ArrayReader(view, _HEAD.size + size, copy=copy)
    with _raise_damaged("message"):
        tree = msgspec.msgpack.Decoder(ext_hook=reader.extension).decode(body[:size])
        if reader.position != total:
            raise ValueError("bytes are left over behind the last array")
        return tree


class _ArrayReader:
    """Assigns the raw bytes behind the structure to its arrays, in order."""

    def __init__(self, view: memoryview, position: int, *, copy: bool) -> None:
        self.position = position
        self._view = view
        self._copy = copy

    def extension(self, code: int, data: memoryview) -> Any:
        if code == _ARRAY:
            return self._array(*_parse_array_head(bytes(data)))
        if code == _SCALAR:
            return _scalar(*msgspec.msgpack.decode(data, type=tuple[str, bytes]))
        if code == _BIG_INT:
            return int.from_bytes(data, "little", signed=True)
        raise ValueError(f"unknown extension {code}")

    def _array(self, dtype: np.dtype[Any], shape: tuple[int, ...], size: int) -> np.ndarray:
        start = self.position + -self.position % _ALIGN
        self.position = start + size
        if self.position > len(self._view):
            raise ValueError(f"{len(self._view)} bytes end before {dtype.name}{list(shape)} does")
        array = _require_bools(np.ndarray(shape, dtype, buffer=self._view, offset=start))
        return array.copy() if self._copy else array


@functools.lru_cache(maxsize=1024)
def _parse_array_head(head: bytes) -> tuple[np.dtype[Any], tuple[int, ...], int]:
    """Decode dtype, shape and size in bytes of an array from the structure."""
    name, shape = msgspec.msgpack.decode(head, type=tuple[str, tuple[int, ...]])
    size = _size(name, shape)
    return _DTYPES[name], shape, size


def _scalar(name: str, raw: bytes) -> np.generic:
    if len(raw) != _size(name, ()):
        raise ValueError(f"{len(raw)} bytes cannot be {name}")
    value: np.generic = _require_bools(np.frombuffer(raw, _DTYPES[name]))[0]
    return value


def _require_bools(array: np.ndarray) -> np.ndarray:
    if array.dtype.char == "?" and array.view(np.uint8).max(initial=0) > 1:
        raise ValueError("a truth value that is neither 0 nor 1")
    return array


def _size(name: str, shape: tuple[int, ...]) -> int:
    """Return the size of an array in bytes, in exact arithmetic; ValueError for an invalid dtype or shape."""
    if name not in _DTYPES:
        raise ValueError(f"dtype {name!r} is not allowed")
    if len(shape) > 32 or any(length < 0 for length in shape):
        raise ValueError(f"shape {shape} is not allowed")
    return math.prod(shape) * _DTYPES[name].itemsize


def _message(data: Buffer, kind: str, schema: int, *, sealed: bool = True) -> dict[str, Any]:
    tree = _unpack(data, copy=False, sealed=sealed)
    named = isinstance(tree, dict) and isinstance(tree.get("kind"), str) and isinstance(tree.get("schema"), int)
    if not isinstance(tree, dict) or not named or tree["kind"] != kind:
        raise DamagedFile(f"these bytes are not {kind}")
    if tree["schema"] > schema:
        raise DamagedFile(f"{kind} has schema {tree['schema']}, newer than {schema}, the newest this version reads")
    return tree


def _require(received: Any, dtype: np.dtype[Any], shape: tuple[int, ...], name: str) -> None:
    if not isinstance(received, np.ndarray) or received.dtype != dtype or received.shape != shape:
        found = f"{received.dtype}{received.shape}" if isinstance(received, np.ndarray) else type(received).__name__
        raise ValueError(f"column {name!r} is {found} instead of {dtype}{shape}")


@contextlib.contextmanager
def _raise_damaged(what: str) -> Iterator[None]:
    try:
        yield
    except _DECODE_ERRORS as error:
        raise DamagedFile(f"{what} is damaged: {error}") from None

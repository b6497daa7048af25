"""Coverage-guided fuzzing of the codec with atheris: `make fuzz`. Only DamagedFile may be raised.

It begins with real messages. Those whose first byte is 1 get a right head and checksum, behind which mistakes would be.
Arguments are libFuzzer's: -runs=N, -max_total_time=S.
"""

from __future__ import annotations

import contextlib
import struct
import sys
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import atheris
import numpy as np

with atheris.instrument_imports(include=["steppe.core"]):
    from steppe.core.contracts.errors import DamagedFile
    from steppe.core.contracts.segment import Segment, SegmentHeader
    from steppe.core.contracts.specs import FieldSpec, SegmentSpec
    from steppe.core.contracts.weights import Weights
    from steppe.core.io import codec

SPEC = SegmentSpec(2, 2, FieldSpec("obs", (3,), "float32"), FieldSpec("action", (), "int64"))
HEAD = struct.Struct("<4sIQQI4x")


def sealed(structure: bytes, raw: bytes) -> bytes:
    """Return a message with a valid header, from a structure and the bytes of its arrays."""
    body = structure + bytes(-(HEAD.size + len(structure)) % 64 if raw else 0) + raw
    plain = HEAD.pack(b"STPK", codec.FORMAT, HEAD.size + len(body), len(structure), 0)
    checksum = zlib.crc32(body, zlib.crc32(plain))
    return HEAD.pack(b"STPK", codec.FORMAT, HEAD.size + len(body), len(structure), checksum) + body


def one(data: bytes) -> None:
    size = int.from_bytes(data[1:3], "little")
    message = sealed(data[3 : 3 + size], data[3 + size :]) if data[:1] == b"\1" else data[1:]
    for read in (codec.unpack, codec.decode_weights, lambda told: codec.decode_segment(told, SPEC)):
        with contextlib.suppress(DamagedFile):
            read(message)


def beginnings() -> Iterator[bytes]:
    """Return valid messages as seeds for `one`: complete, and without their header."""
    segment = Segment.blank(SPEC)
    segment["truncated"][1, 0] = True
    segment.header = SegmentHeader("run", 1, 0, 3, 2)
    weights = Weights.from_arrays({"w": np.arange(6, dtype=np.float32).reshape(2, 3)})
    tree = {"k": [1, 2**70, None, b"x", np.float32(2)], "a": np.ones((2, 2), bool)}
    for message in (codec.encode_segment(segment), codec.encode_weights(weights), codec.pack(tree)):
        size = HEAD.unpack_from(message)[3]
        begin = HEAD.size + size
        structure, raw = message[HEAD.size : begin], message[begin + -begin % 64 :]
        yield b"\0" + message
        yield b"\1" + size.to_bytes(2, "little") + structure + raw


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as corpus:
        for number, known in enumerate(beginnings()):
            one(known)
            (Path(corpus) / str(number)).write_bytes(known)
        atheris.Setup([*sys.argv, corpus], one)
        atheris.Fuzz()

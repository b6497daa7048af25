"""Coverage-guided fuzzing of the codec with atheris: `make fuzz`. Only DamagedFile may be raised.

The corpus starts with real messages. Those whose first byte is 1 get a valid header and checksum, so that the code after
those checks is fuzzed too. Arguments are libFuzzer's: -runs=N, -max_total_time=S.
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
HEADER = struct.Struct("<4sIQQI4x")


def sealed(structure: bytes, raw: bytes) -> bytes:
    """Return a message with a valid header, from a structure and the bytes of its arrays."""
    body = structure + bytes(-(HEADER.size + len(structure)) % 64 if raw else 0) + raw
    plain = HEADER.pack(b"STPK", codec.FORMAT, HEADER.size + len(body), len(structure), 0)
    checksum = zlib.crc32(body, zlib.crc32(plain))
    return HEADER.pack(b"STPK", codec.FORMAT, HEADER.size + len(body), len(structure), checksum) + body


def check_message(data: bytes) -> None:
    size = int.from_bytes(data[1:3], "little")
    message = sealed(data[3 : 3 + size], data[3 + size :]) if data[:1] == b"\1" else data[1:]
    for read in (codec.unpack, codec.decode_weights, lambda data: codec.decode_segment(data, SPEC)):
        with contextlib.suppress(DamagedFile):
            read(message)


def seed_messages() -> Iterator[bytes]:
    """Yield valid messages as seeds of the corpus: complete, and without their header."""
    segment = Segment.blank(SPEC)
    segment["truncated"][1, 0] = True
    segment.header = SegmentHeader("run", 1, 0, 3, 2)
    weights = Weights.from_arrays({"w": np.arange(6, dtype=np.float32).reshape(2, 3)})
    tree = {"k": [1, 2**70, None, b"x", np.float32(2)], "a": np.ones((2, 2), bool)}
    for message in (codec.encode_segment(segment), codec.encode_weights(weights), codec.pack(tree)):
        size = HEADER.unpack_from(message)[3]
        begin = HEADER.size + size
        structure, raw = message[HEADER.size : begin], message[begin + -begin % 64 :]
        yield b"\0" + message
        yield b"\1" + size.to_bytes(2, "little") + structure + raw


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as corpus:
        for number, known in enumerate(seed_messages()):
            check_message(known)
            (Path(corpus) / str(number)).write_bytes(known)
        atheris.Setup([*sys.argv, corpus], check_message)
        atheris.Fuzz()

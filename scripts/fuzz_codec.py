"""Feeds the codec bytes that atheris makes up, guided by what they reach: `make fuzz`. Nothing but DamagedFile may come out.

Half of them go behind a right head and checksum, where mistakes would be. Arguments are libFuzzer's: -runs=N, -max_total_time=S.
"""

from __future__ import annotations

import contextlib
import struct
import sys
import zlib

import atheris

with atheris.instrument_imports(include=["steppe.core"]):
    from steppe.core import codec
    from steppe.core.errors import DamagedFile
    from steppe.core.specs import FieldSpec, SegmentSpec

SPEC = SegmentSpec(2, 2, FieldSpec("obs", (3,), "float32"), FieldSpec("action", (), "int64"))
HEAD = struct.Struct("<4sIQQI4x")


def sealed(structure: bytes, raw: bytes) -> bytes:
    """A message with a right head: the structure, and bytes for its arrays where they belong."""
    body = structure + bytes(-(HEAD.size + len(structure)) % 64 if raw else 0) + raw
    plain = HEAD.pack(b"STPK", codec.FORMAT, HEAD.size + len(body), len(structure), 0)
    checksum = zlib.crc32(body, zlib.crc32(plain))
    return HEAD.pack(b"STPK", codec.FORMAT, HEAD.size + len(body), len(structure), checksum) + body


def one(data: bytes) -> None:
    provider = atheris.FuzzedDataProvider(data)
    if provider.ConsumeBool():
        size = provider.ConsumeIntInRange(0, 256)
        structure = provider.ConsumeBytes(size)
        data = sealed(structure, provider.ConsumeBytes(512))
    for read in (codec.unpack, codec.decode_weights, lambda told: codec.decode_segment(told, SPEC)):
        with contextlib.suppress(DamagedFile):
            read(data)


if __name__ == "__main__":
    atheris.Setup(sys.argv, one)
    atheris.Fuzz()

"""core/io/codec.py: what goes in comes out, and no bytes whatever raise anything but DamagedFile."""

from __future__ import annotations

import contextlib
import struct
import tracemalloc
import zlib

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from steppe.core.contracts.errors import DamagedFile
from steppe.core.contracts.segment import Segment, SegmentHeader
from steppe.core.contracts.specs import FieldSpec, SegmentSpec
from steppe.core.contracts.weights import Weights
from steppe.core.io import codec

pytestmark = pytest.mark.unit

HEAD = struct.Struct("<4sIQQI4x")  # magic, format, total size, size of the structure, checksum
NUMERIC = [
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
]
arrays = st.sampled_from(NUMERIC).flatmap(
    lambda name: hnp.arrays(np.dtype(name), hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4))
)
plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
trees = st.recursive(
    plain | arrays,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text() | st.integers(-9, 9), inner, max_size=4),
    max_leaves=12,
)


def same(left, right) -> bool:
    if isinstance(left, np.ndarray):
        return (left.dtype, left.shape, left.tobytes()) == (right.dtype, right.shape, right.tobytes())
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return type(right) is list and len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, float):
        return struct.pack("d", left) == struct.pack("d", right)
    return type(left) is type(right) and left == right


def forged(structure, raw: bytes = b"") -> bytes:
    """A message with a right checksum around any structure: what an enemy, not an accident, would send."""
    body = msgspec.msgpack.encode(structure) if not isinstance(structure, bytes) else structure
    if raw:
        body_end = HEAD.size + len(body)
        raw = bytes(-body_end % 64) + raw
    head = HEAD.pack(b"STPK", 1, HEAD.size + len(body) + len(raw), len(body), 0)
    checksum = zlib.crc32(head + body + raw)
    return HEAD.pack(b"STPK", 1, HEAD.size + len(body) + len(raw), len(body), checksum) + body + raw


def array_claim(dtype, shape):
    return msgspec.msgpack.Ext(1, msgspec.msgpack.encode([dtype, shape]))


@given(trees)
@settings(max_examples=300, deadline=None)
def test_trees_come_back_as_they_were(tree):
    assert same(tree, codec.unpack(codec.pack(tree)))


def test_a_generator_state_comes_back_exactly():
    stream = np.random.Generator(np.random.PCG64(5))
    stream.standard_normal(7)
    again = np.random.Generator(np.random.PCG64())
    again.bit_generator.state = codec.unpack(codec.pack(stream.bit_generator.state))
    assert np.array_equal(stream.random(100), again.random(100))


@pytest.mark.parametrize("value", [np.float32(0.1), np.int8(-3), np.bool_(True), np.float64(2.5), np.uint64(2**64 - 1)])
def test_scalars_keep_their_type(value):
    back = codec.unpack(codec.pack([value]))[0]
    assert type(back) is type(value)
    assert back == value


def test_strided_and_big_endian_arrays_come_back_in_plain_order():
    grid = np.arange(12).reshape(3, 4)
    back = codec.unpack(codec.pack([grid.T, grid[::2, ::-1], grid.astype(">i4")]))
    assert np.array_equal(back[0], grid.T)
    assert np.array_equal(back[1], grid[::2, ::-1])
    assert np.array_equal(back[2], grid)
    assert back[2].dtype == np.dtype("int32")


def test_arrays_are_aligned_and_writable():
    data = codec.pack({"a": np.ones(3, np.uint8), "b": np.full(5, 7.0)})
    place = data.index(struct.pack("5d", *[7.0] * 5))
    assert place % 64 == 0
    codec.unpack(data)["b"][0] = 1


@pytest.mark.parametrize(
    ("tree", "where"),
    [
        ({"a": [1, {2}]}, r"tree\['a'\]\[1\]: a set"),
        ({"a": np.array(["x"])}, "dtype"),
        ({"a": np.array([object()])}, "dtype"),
        ({"a": {1.5: 0}}, "key 1.5"),
        ({"a": {True: 0}}, "key True"),
        ({"a": {2**63: 0}}, "key 9223372036854775808"),
        ([np.datetime64("2020-01-01")], "dtype"),
        (print, "builtin_function"),
    ],
)
def test_unpackable_values_are_named_with_their_path(tree, where):
    with pytest.raises(TypeError, match=where):
        codec.pack(tree)


@given(trees, st.data())
@settings(max_examples=200, deadline=None)
def test_truncations_are_damage(tree, data):
    packed = codec.pack(tree)
    with pytest.raises(DamagedFile):
        codec.unpack(packed[: data.draw(st.integers(0, len(packed) - 1))])
    with pytest.raises(DamagedFile):
        codec.unpack(packed + b"\0")


def test_every_flipped_bit_is_damage():
    packed = codec.pack({"a": np.arange(20.0), "b": [1, "text", None], "c": 2**90})
    for place in range(len(packed)):
        for bit in range(8):
            with pytest.raises(DamagedFile):
                codec.unpack(packed[:place] + bytes([packed[place] ^ 1 << bit]) + packed[place + 1 :])


@given(st.binary(max_size=300))
@settings(max_examples=300, deadline=None)
def test_random_bytes_are_damage(data):
    with pytest.raises(DamagedFile):
        codec.unpack(data)


@given(st.binary(max_size=80), st.binary(max_size=80))
@settings(max_examples=1000, deadline=None)
def test_random_structures_behind_a_right_checksum_raise_nothing_else(structure, raw):
    data = forged(structure, raw)
    for read in (codec.unpack, codec.decode_weights, lambda data: codec.decode_segment(data, SPEC)):
        with contextlib.suppress(DamagedFile):
            read(data)


@pytest.mark.parametrize(
    "structure",
    [
        array_claim("float64", [2**40]),
        array_claim("float64", [2**62, 2**62]),
        array_claim("float64", [2**64 - 1]),
        array_claim("float64", [-1]),
        array_claim("float64", [1] * 60),
        array_claim("float64", [0, 2**62, 2**62]),
        array_claim("object", [1]),
        array_claim("str", [1]),
        array_claim(7, [1]),
        array_claim("int8", "x"),
        array_claim("int8", [2.5]),
        [array_claim("int8", [64])] * 20_000,  # the same bytes claimed again and again
        msgspec.msgpack.Ext(3, msgspec.msgpack.encode(["float64", b"123"])),
        msgspec.msgpack.Ext(3, msgspec.msgpack.encode(["bool", b"\x02"])),
        msgspec.msgpack.Ext(9, b""),
        b"\xdd\xff\xff\xff\xff",  # a list of four thousand million items
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\x91" * 100_000,  # lists in lists
        b"\x81\xc7\x00\x01\x00",  # an array as a key
        b"\xa1\xff",  # text that is not UTF-8
    ],
)
def test_forged_claims_are_damage_and_allocate_little(structure):
    data = forged(structure, bytes(64))
    tracemalloc.start()
    try:
        with pytest.raises(DamagedFile):
            codec.unpack(data)
        assert tracemalloc.get_traced_memory()[1] < 20_000_000
    finally:
        tracemalloc.stop()


def test_bytes_behind_the_last_array_are_damage():
    with pytest.raises(DamagedFile, match="left over"):
        codec.unpack(forged([array_claim("int8", [10])], bytes(11)))
    assert np.array_equal(codec.unpack(forged([array_claim("int8", [10])], bytes(10)))[0], np.zeros(10, np.int8))


def test_a_newer_format_is_named_as_such():
    data = bytearray(codec.pack(1))
    data[4] = 9
    with pytest.raises(DamagedFile, match="format 9, newer than"):
        codec.unpack(bytes(data))


def test_bytes_of_another_kind_are_named_as_such():
    for other in (codec.pack(1, sealed=False), b"\x89PNG" + codec.pack(1)[4:]):
        with pytest.raises(DamagedFile, match="not a Steppe message"):
            codec.unpack(other)
    with pytest.raises(DamagedFile, match="not a Steppe message"):
        codec.unpack(codec.pack(1), sealed=False)


SPEC = SegmentSpec(
    4,
    3,
    FieldSpec("obs", (2,), "float32"),
    FieldSpec("action", (), "int64"),
    (FieldSpec("logp", (), "float32"), FieldSpec("hidden", (5,), "float16")),
)


def segment(cuts=((1, 0), (3, 2)), spec=SPEC, seed=0) -> Segment:
    stream = np.random.default_rng(seed)
    filled = Segment.blank(spec)
    for name, column in filled.columns.items():
        if column.dtype != bool and name != "final_obs":
            column[...] = stream.integers(0, 100, column.shape)
    filled["valid"][...] = True
    for number, (t, b) in enumerate(cuts):
        filled["terminated" if number % 2 else "truncated"][t, b] = True
        filled["final_obs"][t, b] = stream.random(spec.obs.shape)
    filled.header = SegmentHeader("run-1", 2, 1, 7, 5, started_s=1.5)
    return filled


def test_segments_come_back_as_they_were():
    sent = segment()
    got = codec.decode_segment(codec.encode_segment(sent), SPEC)
    assert got.header == sent.header
    assert got.spec == SPEC
    for name in sent.columns:
        assert same(sent[name], got[name]), name
    assert np.array_equal(got.next_obs(), sent.next_obs())


def test_a_segment_takes_the_memory_of_another():
    other, sent = segment(cuts=((0, 0),), seed=1), segment()
    other.state = b"where it was"
    got = codec.decode_segment(codec.encode_segment(sent), SPEC, other)
    assert got is other
    assert (got.header, got.state) == (sent.header, None)
    for name in sent.columns.keys() - {"final_obs"}:
        assert same(sent[name], got[name]), name
    assert np.array_equal(got.next_obs(), sent.next_obs())


def test_final_observations_travel_only_where_an_episode_was_cut():
    spec = SegmentSpec(64, 8, FieldSpec("obs", (4, 84, 84), "uint8"), FieldSpec("action", (), "int64"))
    sent = segment(cuts=((5, 1),), spec=spec)
    frames = 65 * 8 + 1
    assert len(codec.encode_segment(sent)) < (frames + 1) * 4 * 84 * 84
    sent["final_obs"][6, 1] = 9  # not cut: has no meaning and is not sent
    assert codec.decode_segment(codec.encode_segment(sent), spec)["final_obs"][6, 1].max() == 0


def test_a_segment_needs_its_header():
    with pytest.raises(ValueError, match="header"):
        codec.encode_segment(Segment.blank(SPEC))


@pytest.mark.parametrize(
    "spec",
    [
        SegmentSpec(5, 3, SPEC.obs, SPEC.action, SPEC.extras),
        SegmentSpec(4, 2, SPEC.obs, SPEC.action, SPEC.extras),
        SegmentSpec(4, 3, FieldSpec("obs", (2,), "float64"), SPEC.action, SPEC.extras),
        SegmentSpec(4, 3, SPEC.obs, SPEC.action, SPEC.extras[:1]),
        SegmentSpec(4, 3, SPEC.obs, SPEC.action, (*SPEC.extras, FieldSpec("value", (), "float32"))),
    ],
)
def test_a_segment_of_another_shape_is_refused(spec):
    with pytest.raises(DamagedFile, match="segment is damaged"):
        codec.decode_segment(codec.encode_segment(segment()), spec)


@pytest.mark.parametrize(
    "change",
    [
        {"columns": {}},
        {"columns": 3},
        {"header": {"run": 1}},
        {"header": None},
        {"kind": "weights"},
        {"schema": 99},
        {"schema": "x"},
        {"header": {"run": "r", "actor": "0", "epoch": 0, "sequence": 0, "version": 0}},
    ],
)
def test_a_wrong_message_is_damage(change):
    sent = segment()
    message = {
        "kind": "segment",
        "schema": 1,
        "header": msgspec.to_builtins(sent.header),
        "columns": {**sent.columns, "final_obs": sent["final_obs"][sent.cut]},
    }
    assert codec.decode_segment(codec.pack(message), SPEC).header == sent.header
    with pytest.raises(DamagedFile):
        codec.decode_segment(codec.pack({**message, **change}), SPEC)


def test_too_few_final_observations_are_damage():
    sent = segment()
    header = msgspec.to_builtins(sent.header)
    columns = {**sent.columns, "final_obs": sent["final_obs"][sent.cut][:1]}
    with pytest.raises(DamagedFile, match="final_obs"):
        codec.decode_segment(codec.pack({"kind": "segment", "schema": 1, "header": header, "columns": columns}), SPEC)


def some_weights() -> Weights:
    named = {
        "actor.weight": np.arange(6, dtype=np.float32).reshape(2, 3),
        "count": np.array(3, np.int64),
        "mean": np.array([0.5, -1.0]),
        "flag": np.array([True, False, True]),
    }
    return Weights.from_arrays(named).stamped(version=4, updates=40, env_steps=4000, train_s=2.5)


def test_weights_come_back_as_they_were():
    sent = some_weights()
    got = codec.decode_weights(codec.encode_weights(sent))
    assert got.layout == sent.layout
    assert (got.version, got.updates, got.env_steps, got.train_s) == (4, 40, 4000, 2.5)
    assert got.sha256() == sent.sha256()
    got.buffer[0] = 1  # its own memory


@pytest.mark.parametrize(
    "rows",
    [
        [["a", [2], "float32", 0]],  # does not fill the buffer
        [["a", [4], "float32", 0]],  # reaches beyond it
        [["a", [2], "float32", 0], ["b", [2], "float32", 4]],  # overlaps
        [["a", [1], "float32", 0], ["a", [2], "float32", 4]],  # one name twice
        [["a", [1], "int8", 0], ["b", [2], "float32", 1], ["c", [3], "int8", 9]],  # not aligned
        [["a", [-3], "float32", 0]],
        [["a", [2**62, 2**62], "float32", 0]],
        [["a", [3], "object", 0]],
        [["a", [3], "float32", -12]],
        [["a", [3], "float32"]],
        "x",
    ],
)
def test_a_wrong_layout_is_damage(rows):
    message = {
        "kind": "weights",
        "schema": 1,
        "counters": {"version": 1, "train_s": 4},
        "buffer": np.zeros(12, np.uint8),
    }
    codec.decode_weights(codec.pack({**message, "layout": [["a", [3], "float32", 0]]}))
    with pytest.raises(DamagedFile):
        codec.decode_weights(codec.pack({**message, "layout": rows}))


@pytest.mark.parametrize("buffer", [np.zeros(12, np.int8), np.zeros((3, 4), np.uint8), bytes(12)])
def test_a_buffer_that_is_no_row_of_bytes_is_damage(buffer):
    message = {"kind": "weights", "schema": 1, "counters": {}, "layout": [["a", [3], "float32", 0]]}
    with pytest.raises(DamagedFile, match="not a flat array of bytes"):
        codec.decode_weights(codec.pack({**message, "buffer": buffer}))


def test_every_flipped_byte_of_weights_is_damage():
    packed = codec.encode_weights(some_weights())
    for place in range(len(packed)):
        with pytest.raises(DamagedFile):
            codec.decode_weights(packed[:place] + bytes([packed[place] ^ 0xFF]) + packed[place + 1 :])


@pytest.mark.parametrize("counters", [{"version": 1.5}, {"version": "1"}, {"unknown": 1}, [1], None, {1: 1}])
def test_wrong_counters_are_damage(counters):
    message = {"kind": "weights", "schema": 1, "layout": [], "buffer": np.zeros(0, np.uint8)}
    codec.decode_weights(codec.pack({**message, "counters": {}}))
    with pytest.raises(DamagedFile):
        codec.decode_weights(codec.pack({**message, "counters": counters}))


def test_the_first_unknown_counter_is_named():
    with pytest.raises(ValueError, match="unknown counter 'a'"):
        codec.validate_counters({"b": 1, "version": 1, "a": 1})


def ext(code: int, data: bytes) -> bytes:
    """A msgpack extension of fewer than 256 bytes (ext 8)."""
    return bytes([0xC7, len(data), code]) + data


def message(magic: bytes, structure: bytes, raw: bytes, *, covers_arrays: bool) -> bytes:
    total = HEAD.size + len(structure) + len(raw)
    covered = HEAD.pack(magic, 1, total, len(structure), 0) + structure + (raw if covers_arrays else b"")
    return HEAD.pack(magic, 1, total, len(structure), zlib.crc32(covered)) + structure + raw


@pytest.mark.parametrize("sealed", [True, False])
def test_the_bytes_are_those_of_the_format(sealed):
    """Written by hand: files and messages of other versions have these bytes."""
    tree = {
        "a": [1, -1, 2**64 - 1, -(2**63)],
        "b": [2**64, -(2**63) - 1],
        "c": np.float32(1.5),
        "d": np.array([1, 2], np.int16),
        "e": np.array([[True], [False]]),
    }
    structure = (
        b"\x85\xa1a\x94\x01\xff\xcf" + b"\xff" * 8 + b"\xd3\x80" + bytes(7)
        + b"\xa1b\x92" + ext(2, bytes(8) + b"\x01") + ext(2, b"\xff" * 7 + b"\x7f\xff")
        + b"\xa1c" + ext(3, b"\x92\xa7float32\xc4\x04\x00\x00\xc0\x3f")
        + b"\xa1d" + ext(1, b"\x92\xa5int16\x91\x02")
        + b"\xa1e" + ext(1, b"\x92\xa4bool\x92\x02\x01")
    )  # fmt: skip
    gap = -(HEAD.size + len(structure)) % 64
    raw = bytes(gap) + b"\x01\x00\x02\x00" + bytes(60) + b"\x01\x00"
    magic = b"STPK" if sealed else b"STPO"
    assert codec.pack(tree, sealed=sealed) == message(magic, structure, raw, covers_arrays=sealed)
    assert same(tree, codec.unpack(codec.pack(tree, sealed=sealed), sealed=sealed))


def test_representation_of_segments_and_weights():
    for data in (codec.encode_segment(segment()), codec.encode_weights(some_weights())):
        tree = codec.unpack(data)
        assert (tree["schema"], tree["kind"]) in [(1, "segment"), (1, "weights")]


def test_the_checksum_of_an_unsealed_message_covers_head_and_structure():
    packed = codec.pack({"a": 1, "b": np.arange(40, dtype=np.uint8)}, sealed=False)
    structure_end = HEAD.size + HEAD.unpack_from(packed)[3]
    for position in range(structure_end):
        with pytest.raises(DamagedFile):
            codec.unpack(packed[:position] + bytes([packed[position] ^ 1]) + packed[position + 1 :], sealed=False)
    changed = packed[:-1] + b"\x07"
    assert codec.unpack(changed, sealed=False)["b"][-1] == 7
    assert codec.decode_weights(codec.encode_weights(some_weights(), sealed=False), sealed=False).version == 4


def test_instances_of_subclasses_are_packed_as_what_they_are():
    class Name(str):
        __slots__ = ()

    class Share(float):
        __slots__ = ()

    class Table(dict): ...

    class Row(list): ...

    unpacked = codec.unpack(codec.pack([Name("x"), Share(0.5), Table(a=1), Row([1]), True]))
    assert same(unpacked, ["x", 0.5, {"a": 1}, [1], True])


def test_truncated_messages_and_trailing_bytes_are_reported():
    packed = codec.pack([np.arange(9)])
    for wrong in (packed[:-1], packed + b"\0"):
        with pytest.raises(DamagedFile, match="truncated or too long"):
            codec.unpack(wrong)
    head = HEAD.pack(b"STPK", 1, 40, 9, 0)  # a structure of 9 bytes in a message with 8
    with pytest.raises(DamagedFile, match="truncated or too long"):
        codec.unpack(head + bytes(8))


@pytest.mark.parametrize("shape", [[-1], [-1, -1], [3, -2], [1] * 33])
def test_lengths_below_0_and_too_many_of_them_are_refused(shape):
    with pytest.raises(DamagedFile, match=r"shape .* is not allowed"):
        codec.unpack(forged([array_claim("int8", shape)], bytes(8)))
    assert codec.unpack(forged([array_claim("int8", [1] * 32)], bytes(1)))[0].shape == (1,) * 32


def test_a_byte_of_2_is_no_truth_value():
    with pytest.raises(DamagedFile, match="neither 0 nor 1"):
        codec.unpack(forged([array_claim("bool", [3])], b"\x00\x01\x02"))


def test_errors_name_the_entry_and_its_value():
    rows = [["a", [1], "float32", 0], ["b", [3], "float32", 4]]
    with pytest.raises(ValueError, match="entry 'b' is not at its expected offset"):
        codec.validate_layout(rows, 12)
    tree = codec.unpack(codec.encode_segment(segment()))
    for value, found in [(np.zeros(3), r"float64\(3,\)"), ("x", "str")]:
        wrong = {**tree, "columns": {**tree["columns"], "reward": value}}
        with pytest.raises(DamagedFile, match=f"column 'reward' is {found} instead of float32"):
            codec.decode_segment(codec.pack(wrong), SPEC)


def test_options_are_given_by_name():
    with pytest.raises(TypeError, match="positional"):
        codec.pack(1, False)
    with pytest.raises(TypeError, match="positional"):
        codec.unpack(codec.pack(1), False)
    with pytest.raises(TypeError, match="positional"):
        codec.encode_weights(some_weights(), False)

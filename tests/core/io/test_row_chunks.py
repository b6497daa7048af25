"""Rings in chunk files: exact, only what changed is written, damage is named with its column."""

from __future__ import annotations

import hashlib
import json
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steppe.core.contracts.errors import DamagedFile
from steppe.core.io import atomic_files, row_chunks
from steppe.core.io.rings import ROWS, TAIL, Ring, SaveHistory
from steppe.core.io.row_chunks import extract_rings, insert_rings, read_rows, write_rows

pytestmark = pytest.mark.unit

CHUNK = 4  # rows; a row has 8 + 3 bytes


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(row_chunks, "CHUNK_BYTES", CHUNK * 11)


class Source:
    """A ring that is filled in the plainest way."""

    def __init__(self, capacity):
        self.columns = {"number": np.zeros(capacity, np.int64), "bytes": np.zeros((capacity, 3), np.uint8)}
        self.size = self.cursor = self.added = 0
        self.history = SaveHistory()

    def append(self, count):
        for _ in range(count):
            self.columns["number"][self.cursor] = self.added
            self.columns["bytes"][self.cursor] = self.added % 251
            self.cursor = (self.cursor + 1) % len(self.columns["number"])
            self.size = min(self.size + 1, len(self.columns["number"]))
            self.added += 1

    def ring(self, **options):
        return Ring("it", self.columns, self.size, self.cursor, self.added, self.history, **options)


def save(directory, rings, before=None):
    def beside(aside):
        files = write_rows(aside, rings, before)
        assert ROWS not in {path.name for path in aside.iterdir()}
        return files

    atomic_files.write_bundle(directory, {}, beside)
    return directory


def load(directory):
    rings = read_rows(directory, (directory / ROWS).read_bytes())
    found = []
    for saved in rings:
        columns = {f.name: np.zeros((saved.record.capacity, *f.shape), f.dtype) for f in saved.record.fields()}
        saved.check()
        saved.read_into(columns)
        found.append(columns)
    return found


def files_of(directory):
    return {path.name: path.stat().st_ino for path in directory.glob("*.rows") if path.name != TAIL}


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 23), st.lists(st.integers(0, 30), min_size=1, max_size=6))
def test_saves_that_follow_each_other_are_each_exact(tmp_path_factory, capacity, counts):
    root, source, before = tmp_path_factory.mktemp("rings"), Source(capacity), None
    for number, count in enumerate(counts):
        source.append(count)
        before = save(root / str(number), [source.ring()], before)
        (found,) = load(before)
        np.testing.assert_equal(found, source.columns)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 40), st.integers(0, 100), st.integers(0, 60), st.integers(1, 9))
def test_the_chunks_that_were_touched(capacity, first, more, chunk_rows):
    source = Source(capacity)
    source.append(first)
    before = source.columns["number"].copy()
    filled = source.size
    source.append(more)
    positions = np.arange(source.size)
    changed = (positions >= filled) | (source.columns["number"][: source.size] != before[: source.size])
    assert source.ring().chunks_written_since(first, chunk_rows) == set((positions[changed] // chunk_rows).tolist())


def test_only_what_changed_is_written(tmp_path):
    source = Source(40)
    source.append(38)
    first = save(tmp_path / "0", [source.ring()])
    assert len(files_of(first)) == 9  # the tenth chunk is not full yet
    source.append(4)  # over the end: the last chunk and half of the first one
    second = save(tmp_path / "1", [source.ring()], first)
    shared = files_of(first).items() & files_of(second).items()
    assert len(shared) == 8
    assert len(files_of(second)) == 9  # the last one is complete now, the first one is under the cursor
    third = save(tmp_path / "2", [source.ring()], second)
    assert files_of(third) == files_of(second)
    np.testing.assert_equal(load(third), [source.columns])


def test_rows_filled_out_of_order_have_their_insertion_number(tmp_path):
    source = Source(40)
    source.append(40)
    stamps = np.arange(1, 41)
    first = save(tmp_path / "0", [source.ring(stamps=stamps)])
    source.added += 2
    for row in (5, 21):
        source.columns["number"][row] = 1000 + row
        stamps[row] = source.added
    second = save(tmp_path / "1", [source.ring(stamps=stamps)], first)
    assert len(files_of(first).items() & files_of(second).items()) == 8
    np.testing.assert_equal(load(second), [source.columns])


@pytest.mark.parametrize("change", ["reset", "stranger", "shape", "capacity"])
def test_a_buffer_that_does_not_continue_a_save_is_written_completely(tmp_path, change):
    source = Source(40)
    source.append(40)
    first = save(tmp_path / "0", [source.ring()])
    if change == "reset":
        source.columns["number"][:] = 7
        source.history.reset()
    elif change == "stranger":
        source.history = SaveHistory({"0123456789abcdef": 40})
    elif change == "shape":
        source.columns["bytes"] = np.ones((40, 5), np.uint8)
    else:
        source.columns = {name: rows[:36].copy() for name, rows in source.columns.items()}
        source.size, source.cursor = 36, 0
    second = save(tmp_path / "1", [source.ring()], first)
    assert not files_of(first).keys() & files_of(second).keys()
    np.testing.assert_equal(load(second), [source.columns])


def test_two_that_went_separate_ways_do_not_mix(tmp_path):
    """Both have a save in common; what one wrote after it says nothing about the other."""
    one, other = Source(40), Source(40)
    one.append(20)
    first = save(tmp_path / "0", [one.ring()])
    for column in ("number", "bytes"):
        other.columns[column][:] = one.columns[column]
    other.size, other.cursor, other.added = 20, 20, 20
    other.history = SaveHistory(dict(one.history.saves))
    one.append(12)
    second = save(tmp_path / "1", [one.ring()], first)
    other.append(16)
    other.columns["number"][20:36] += 5000
    third = save(tmp_path / "2", [other.ring()], second)
    np.testing.assert_equal(load(third), [other.columns])


def test_a_damaged_chunk_is_written_again(tmp_path):
    source = Source(40)
    source.append(40)
    first = save(tmp_path / "0", [source.ring()])
    names = sorted(files_of(first))
    (first / names[0]).write_bytes(b"short")
    (first / names[1]).unlink()
    second = save(tmp_path / "1", [source.ring()], first)
    assert len(files_of(first).items() & files_of(second).items()) == 7
    np.testing.assert_equal(load(second), [source.columns])


def test_where_there_are_no_links_files_are_copied(tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    source = Source(40)
    source.append(40)
    first = save(tmp_path / "0", [source.ring()])
    second = save(tmp_path / "1", [source.ring()], first)
    assert files_of(first).keys() == files_of(second).keys()
    assert not set(files_of(first).values()) & set(files_of(second).values())
    np.testing.assert_equal(load(second), [source.columns])


@pytest.mark.parametrize("kind", ["flip", "cut", "remove", "longer", "directory", "pipe"])
def test_damage_is_named_with_its_column(tmp_path, kind):
    source = Source(40)
    source.append(40)
    saved = save(tmp_path / "0", [source.ring()])
    rings = read_rows(saved, (saved / ROWS).read_bytes())
    chunk = rings[0].record.chunks[3]
    path = saved / chunk.file
    data = bytearray(path.read_bytes())
    path.unlink()
    if kind == "flip":
        data[CHUNK * 8 + 2] ^= 1  # in the second column
        path.write_bytes(data)
    elif kind == "cut":
        path.write_bytes(data[:-1])
    elif kind == "longer":
        path.write_bytes(data + b"x")
    elif kind == "directory":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    columns = {name: np.empty_like(rows) for name, rows in source.columns.items()}
    for read in (rings[0].check, lambda: rings[0].read_into(columns)):
        with pytest.raises(DamagedFile, match=chunk.file) as caught:
            read()
        if kind in ("flip", "cut"):
            assert "column 'bytes' of it, rows 12 to 15" in str(caught.value)


def check(saved, data):
    for ring in read_rows(saved, data):
        ring.check()


def _change(record, path, value):
    *steps, last = path
    place = record
    for step in steps:
        place = place[step]
    place[last] = value


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (["format"], 3, "format 3, newer than 2"),
        (["format"], "2", "does not describe"),
        (["rings", 0, "size"], 41, "contradicts itself"),
        (["rings", 0, "size"], -1, "contradicts itself"),
        (["rings", 0, "size"], 39, "9 bytes|bytes instead of|contradicts"),
        (["rings", 0, "cursor"], 40, "contradicts itself"),
        (["rings", 0, "chunk_rows"], 0, "contradicts itself"),
        (["rings", 0, "chunk_rows"], 2**62, "contradicts itself"),
        (["rings", 0, "size"], 2**62, "contradicts itself"),
        (["rings", 0, "columns", 0, 1], "object", "column 'number' of it is object"),
        (["rings", 0, "columns", 0, 1], "float64x", "column 'number' of it is float64x"),
        (["rings", 0, "columns", 0, 2], [-1], "column 'number'"),
        (["rings", 0, "columns", 0, 2], [2**40, 2**40], "bytes instead of"),
        (["rings", 0, "columns", 0, 0], "bytes", "contradicts itself"),
        (["rings", 0, "chunks"], [], "0 chunks are not 40 rows"),
        (["rings", 0, "chunks", 0, "file"], "../../etc/passwd", "the position of a chunk"),
        (["rings", 0, "chunks", 0, "offset"], -1, "the position of a chunk"),
        (["rings", 0, "chunks", 0, "offset"], 2**63 - 1, "bytes instead of"),
        (["rings", 0, "chunks", 0, "sha256"], [], "the position of a chunk"),
        (["rings", 0, "chunks", 0, "sha256", 0], "0" * 64, "column 'number' of it, rows 0 to 3, does not match"),
        (["rings", 0, "surprise"], 1, "does not describe"),
    ],
)
def test_an_invalid_record_is_refused(tmp_path, path, value, words):
    source = Source(40)
    source.append(40)
    saved = save(tmp_path / "0", [source.ring()])
    record = json.loads((saved / ROWS).read_bytes())
    _change(record, path, value)
    with pytest.raises(DamagedFile, match=words):
        check(saved, json.dumps(record).encode())


def test_truth_values_are_checked(tmp_path):
    rows = np.array([True, False, True])
    saved = save(tmp_path / "0", [Ring("it", {"done": rows}, 3)])
    record = json.loads((saved / ROWS).read_bytes())
    (saved / TAIL).write_bytes(b"\x01\x02\x00")
    record["rings"][0]["chunks"][0]["sha256"] = [hashlib.sha256(b"\x01\x02\x00").hexdigest()]
    (ring,) = read_rows(saved, json.dumps(record).encode())
    for target in (np.empty(3, bool), np.empty((3, 2), bool)[:, 0]):
        with pytest.raises(DamagedFile, match="column 'done' of it is not of truth values"):
            ring.read_into({"done": target})


def test_columns_side_by_side_are_written_and_read_like_others(tmp_path):
    """The same bytes on disk, and back into their places without touching what lies between them."""
    row = np.dtype([("number", np.int64), ("other", np.int32), ("done", np.bool_)], align=True)
    rows = np.zeros(11, row)
    rows["number"], rows["done"] = np.arange(11), np.arange(11) % 3 == 0
    spread = {name: rows[name] for name in ("number", "done")}
    apart = {name: column.copy() for name, column in spread.items()}
    one, other = (
        save(tmp_path / str(k), [Ring("it", c, 11, 5, 16, SaveHistory())]) for k, c in enumerate((spread, apart))
    )
    chunks_of = [sorted(path.read_bytes() for path in directory.glob("*.rows")) for directory in (one, other)]
    assert chunks_of[0] == chunks_of[1]
    assert len(chunks_of[0]) > 1
    found = np.zeros(11, row)
    found["other"] = 7
    (ring,) = read_rows(other, (other / ROWS).read_bytes())
    ring.read_into({name: found[name] for name in apart})
    assert found["number"].tolist() == list(range(11))
    assert found["done"].tolist() == apart["done"].tolist()
    assert (found["other"] == 7).all()


def test_trees_with_rings_in_them(tmp_path):
    one, other = Source(5), Source(5)
    one.append(3)
    rings = []
    plain = extract_rings({"a": [one.ring(), 1, "x"], "b": {"c": other.ring()}}, rings)
    assert [ring.added for ring in rings] == [3, 0]
    saved = save(tmp_path / "0", rings)
    tree = insert_rings(json.loads(json.dumps(plain)), read_rows(saved, (saved / ROWS).read_bytes()))
    assert tree["a"][0].record.added == 3
    assert tree["a"][1:] == [1, "x"]
    assert tree["b"]["c"].record.size == 0
    with pytest.raises(DamagedFile, match="no ring 7"):
        insert_rings({"#ring": 7}, [])

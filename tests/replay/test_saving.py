"""Pools on disk: exact against a plain model, incremental, old formats, full disks and damage."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import itertools
import json
import os
import shutil
import subprocess
from collections import deque
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from steppe.core.contracts.errors import DamagedFile, DiskFull, UsageError
from steppe.core.io import atomic_files, codec, rings, row_chunks
from steppe.replay import ReplayBufferPool, ReplayMemory, SamplingConfig
from steppe.testing.memory import SPEC, ScriptedActor

pytestmark = pytest.mark.unit

FIXTURES = Path(__file__).parent / "fixtures"


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Four rows to a chunk, so that a few experiences are many files."""
    monkeypatch.setattr(row_chunks, "CHUNK_BYTES", 4 * 17)


def experiences(*numbers):
    return {
        "obs": np.repeat(np.array(numbers, np.float32)[:, None], 2, 1),
        "action": np.array(numbers, np.int64),
        "done": np.array(numbers) % 3 == 0,
    }


def content(pool):
    """The numbers in each buffer, oldest first; every row is looked at whole."""
    found = []
    for part in range(pool.num_buffers):
        rows = (
            pool.store.gather(pool.store.slots_oldest_first(part))
            if pool.buffers[part].size()
            else {"action": np.array([])}
        )
        numbers = rows["action"].tolist()
        if numbers:
            np.testing.assert_equal(rows, experiences(*numbers))
        found.append(numbers)
    return found


ACTIONS = st.one_of(
    st.tuples(st.just("add"), st.integers(0, 2), st.integers(1, 25)),
    st.tuples(st.just("save"), st.booleans()),
    st.tuples(st.just("load"), st.booleans()),
    st.tuples(st.just("clear")),
    st.tuples(st.just("clear one"), st.integers(0, 2)),
    st.tuples(st.just("balance")),
    st.tuples(st.just("prioritize")),
)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(ACTIONS, max_size=14), st.booleans())
def test_any_history_of_saves_against_a_model(tmp_path_factory, actions, prioritized):
    """Three deques; two places to save to; a save is a copy of the deques."""
    root = tmp_path_factory.mktemp("saves")
    pool = ReplayBufferPool(3, 10, use_prioritized=prioritized, seed=0)
    model, kept, number = [deque(maxlen=10) for _ in range(3)], {}, 0
    pool.add_experiences(experiences(-1), buffer_id=0)
    model[0].append(-1)
    for action, *given_words in actions:
        if action == "add":
            part, count = given_words
            block = range(number, number + count)
            number += count
            pool.add_experiences(experiences(*block), buffer_id=part)
            model[part].extend(block)
        elif action == "save":
            pool.save_buffers(root / str(given_words[0]))
            kept[given_words[0]] = copy.deepcopy(model), pool.store.state()
        elif action == "load" and given_words[0] in kept:
            pool = pool if number % 2 else ReplayBufferPool(3, 10, use_prioritized=prioritized, seed=1)
            pool.load_buffers(root / str(given_words[0]))
            model, state = copy.deepcopy(kept[given_words[0]][0]), kept[given_words[0]][1]
            np.testing.assert_equal(pool.store.state(), state)
        elif action == "clear":
            pool.clear_all_buffers()
            model = [deque(maxlen=10) for _ in range(3)]
        elif action == "clear one":
            pool.buffers[given_words[0]].clear()
            model[given_words[0]].clear()
        elif action == "balance":
            pool.balance_buffers()
            model = [deque(numbers, maxlen=10) for numbers in content(pool)]
        elif action == "prioritize" and prioritized and pool.get_total_experiences() > 3:
            batch = pool.sample_batch(4)
            pool.update_priorities(batch["indices"], np.arange(1.0, 5.0))
        assert content(pool) == [list(numbers) for numbers in model]


def filled(count=40, **options):
    pool = ReplayBufferPool(2, 40, seed=3, **options)
    pool.add_experiences(experiences(*range(count)), buffer_id=0)
    pool.add_experiences(experiences(*range(100, 107)), buffer_id=1)
    return pool


def rows_files(directory):
    (save,) = directory.glob("save-*")
    return {path.name: path.stat().st_ino for path in save.glob("*.rows") if path.name != rings.TAIL}


def test_a_second_save_writes_what_changed(tmp_path):
    pool = filled()
    pool.save_buffers(tmp_path)
    first = rows_files(tmp_path)
    pool.add_experiences(experiences(50, 51), buffer_id=0)
    pool.save_buffers(tmp_path)
    assert rows_files(tmp_path) == first  # nine chunks and one; the rest is in the tail, with what is new
    assert len(first) == 10
    loaded = ReplayBufferPool(2, 40)
    loaded.load_buffers(tmp_path)
    assert content(loaded) == content(pool)
    loaded.add_experiences(experiences(52, 53, 54), buffer_id=0)  # into the second chunk
    loaded.save_buffers(tmp_path)  # whoever loaded it goes on from it
    assert len(first.items() & rows_files(tmp_path).items()) == 9


@pytest.mark.parametrize("way", ["clear", "clear all", "balance", "load"])
def test_what_was_filled_anew_is_saved_anew(tmp_path, way):
    """With more rows than before, so that numbers alone would look like a continuation."""
    pool = filled(20)
    pool.save_buffers(tmp_path / "other")
    pool.add_experiences(experiences(*range(500, 510)), buffer_id=0)
    pool.save_buffers(tmp_path / "pool")
    if way == "clear":
        pool.buffers[0].clear()
    elif way == "clear all":
        pool.clear_all_buffers()
    elif way == "balance":
        pool.balance_buffers()
    else:
        pool.load_buffers(tmp_path / "other")
    pool.add_experiences(experiences(*range(300, 335)), buffer_id=0)
    pool.add_experiences(experiences(*range(600, 620)), buffer_id=1)
    pool.save_buffers(tmp_path / "pool")
    loaded = ReplayBufferPool(2, 40)
    loaded.load_buffers(tmp_path / "pool")
    assert content(loaded) == content(pool)


def test_copies_that_went_separate_ways_do_not_mix(tmp_path):
    one = filled()
    one.save_buffers(tmp_path)
    other = ReplayBufferPool(2, 40)
    other.load_buffers(tmp_path)
    one.add_experiences(experiences(*range(200, 220)), buffer_id=0)
    one.save_buffers(tmp_path)
    other.add_experiences(experiences(*range(300, 325)), buffer_id=0)
    other.save_buffers(tmp_path)
    loaded = ReplayBufferPool(2, 40)
    loaded.load_buffers(tmp_path)
    assert content(loaded) == content(other)
    one.save_buffers(tmp_path)
    loaded.load_buffers(tmp_path)
    assert content(loaded) == content(one)


@pytest.mark.parametrize("version", [1, 2])
def test_every_format_is_read(version, tmp_path):
    """Written once by the version of Steppe that introduced the format: see fixtures/README.md."""
    pool = ReplayBufferPool(2, 6, use_prioritized=True)
    pool.load_buffers(FIXTURES / f"pool-format-{version}")
    assert content(pool) == [[2, 3, 4, 5, 6, 7], [100, 101, 102]]
    leaves = pool.store.tree.leaves
    np.testing.assert_allclose(leaves[0, :6], np.array([1, 7, 3, 4, 5, 6]) ** 0.6, rtol=1e-6)
    np.testing.assert_allclose(leaves[1, :3], 6**0.6, rtol=1e-6)
    assert pool.turn == 1
    pool.save_buffers(tmp_path)
    again = ReplayBufferPool(2, 6, use_prioritized=True)
    again.load_buffers(tmp_path)
    stream = np.random.default_rng()
    stream.bit_generator.state = json.loads((FIXTURES / "stream.json").read_text())
    expected, _, _ = again.store.take(stream, 9, again.beta)
    drawn = pool.sample_batch(9)
    np.testing.assert_equal({name: drawn[name] for name in expected}, expected)
    np.testing.assert_equal(again.sample_batch(9), drawn)


def test_a_format_from_the_future_is_refused(tmp_path):
    shutil.copytree(FIXTURES / "pool-format-2", tmp_path / "pool")
    rewrite(tmp_path / "pool", "pool.json", lambda text: text.replace('"format":2', '"format":3'))
    with pytest.raises(DamagedFile, match="has format 3; this version of Steppe reads formats 1 to 2"):
        ReplayBufferPool(2, 6, use_prioritized=True).load_buffers(tmp_path / "pool")


def rewrite(directory, name, change):
    """Change a file of a save, and its manifest with it, as someone would who means harm."""
    (save,) = directory.glob("save-*")
    path = save / name
    path.write_text(change(path.read_text()))
    seal(save)


def seal(save):
    names = [path.name for path in save.iterdir() if path.suffix != ".rows" and path.name != atomic_files.MANIFEST]
    files = {name: (save / name).read_bytes() for name in names}
    entries = {name: {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in files.items()}
    (save / atomic_files.MANIFEST).write_bytes(atomic_files.encode_manifest(entries))


@pytest.mark.slow
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_no_damage_goes_unnoticed(tmp_path_factory, data):
    """Any byte changed, any file cut, lengthened or gone: an error that names the file, and the pool stays as it was."""
    root = tmp_path_factory.mktemp("fuzz")
    filled(use_prioritized=True).save_buffers(root)
    (save,) = root.glob("save-*")
    path = data.draw(st.sampled_from(sorted(save.iterdir())))
    content_before = path.read_bytes()
    kind = data.draw(st.sampled_from(["flip", "cut", "longer", "remove", "zero"]))
    place = data.draw(st.integers(0, len(content_before) - 1))
    changed = bytearray(content_before)
    if kind == "flip":
        changed[place] ^= 1 << data.draw(st.integers(0, 7))
    elif kind == "zero":
        changed[place:] = bytes(len(changed) - place)
    elif kind == "cut":
        del changed[place:]
    elif kind == "longer":
        changed += data.draw(st.binary(min_size=1, max_size=9))
    if kind == "remove":
        path.unlink()
    elif bytes(changed) == content_before:
        return
    else:
        path.write_bytes(changed)
    pool = ReplayBufferPool(2, 40, use_prioritized=True, seed=8)
    pool.add_experiences(experiences(*range(12)))
    before = content(pool)
    with pytest.raises(DamagedFile, match=path.name):
        pool.load_buffers(root)
    assert content(pool) == before


HOSTILE = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(), st.text(max_size=5), st.lists(st.integers(), max_size=2),
    st.sampled_from([0, 1, -1, 2**31, "tail.rows", "../x", "object", "leaf", [], {}, [2**62], {"#ring": 0}, {"#ring": 99}]),
)  # fmt: skip


def places(tree, path=()):
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, item in items:
        yield (*path, key)
        yield from places(item, (*path, key))


def put(tree, path, value):
    for step in path[:-1]:
        tree = tree[step]
    tree[path[-1]] = value


@pytest.mark.slow
@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_hostile_headers_end_in_an_error_or_in_a_sound_pool(tmp_path_factory, data):
    """Values of any kind anywhere in the descriptions, with every checksum right."""
    root = tmp_path_factory.mktemp("hostile")
    filled(use_prioritized=True).save_buffers(root)
    (save,) = root.glob("save-*")
    name = data.draw(st.sampled_from(["pool.json", "rows.json", "state.bin"]))
    raw = (save / name).read_bytes()
    tree = codec.unpack(raw) if name == "state.bin" else json.loads(raw)
    put(tree, data.draw(st.sampled_from(list(places(tree)))), data.draw(HOSTILE))
    try:
        (save / name).write_bytes(codec.pack(tree) if name == "state.bin" else json.dumps(tree).encode())
    except (TypeError, ValueError):
        return
    seal(save)
    pool = ReplayBufferPool(2, 40, use_prioritized=True, seed=8)
    pool.add_experiences(experiences(*range(12)))
    with contextlib.suppress(DamagedFile, UsageError):
        pool.load_buffers(root)
    if pool.store.tree.totals.any():
        content_of = pool.sample_batch(5)
        np.testing.assert_equal(content_of["obs"][:, 0], content_of["action"].astype(np.float32))


def stacks(first, count):
    """Transitions of one long episode; frame t says t in every pixel row."""
    frames = np.zeros((count + 4, 20, 20), np.uint8)
    frames[:, :, :2] = np.arange(first, first + count + 4, dtype=np.uint16).view(np.uint8).reshape(-1, 1, 2)
    windows = np.lib.stride_tricks.sliding_window_view(frames, 4, axis=0).transpose(0, 3, 1, 2)
    return {"obs": windows[:count].copy(), "next_obs": windows[1:].copy(), "number": np.arange(first, first + count)}


@pytest.mark.parametrize("on_disk", [False, True])
def test_frames_are_saved_once_and_come_back(tmp_path, monkeypatch, on_disk):
    monkeypatch.setattr(row_chunks, "CHUNK_BYTES", 16 * 400)
    disk = tmp_path / "disk" if on_disk else None
    pool = ReplayBufferPool(2, 64, frame_stack=4, seed=5, disk_path=disk)
    written = []
    for number in range(9):
        pool.add_experiences(stacks(number * 20, 20), buffer_id=number % 2)
        pool.save_buffers(tmp_path / "pool")
        (save,) = (tmp_path / "pool").glob("save-*")
        written.append({path.stat().st_ino for path in save.glob("*.rows")})
        loaded = ReplayBufferPool(2, 64, frame_stack=4)
        loaded.load_buffers(tmp_path / "pool")
        batch = loaded.sample_batch(20)
        np.testing.assert_equal(batch, pool.sample_batch(20))
        for row, first in enumerate(batch["number"].tolist()):
            expected = stacks(first, 1)
            np.testing.assert_array_equal(batch["obs"][row], expected["obs"][0])
            np.testing.assert_array_equal(batch["next_obs"][row], expected["next_obs"][0])
        if number % 3 == 2:
            pool = loaded  # goes on, and its saves are still shared
    assert all(len(after & before) > 0 for before, after in itertools.pairwise(written[2:]))
    total = sum(path.stat().st_size for path in save.glob("*.rows"))
    assert total < 1.6 * 400 * 128  # about a frame per row


def test_ids_of_frames_that_are_not_there_are_refused(tmp_path):
    pool = ReplayBufferPool(1, 64, frame_stack=4)
    pool.add_experiences(stacks(0, 30))
    pool.store.columns["obs"][7, 2] = 5000
    pool.save_buffers(tmp_path)
    pool.store.columns["obs"][7, 2] = -1
    with pytest.raises(DamagedFile, match="column 'obs' of buffer 0 names no frames"):
        ReplayBufferPool(1, 64, frame_stack=4).load_buffers(tmp_path)
    other = ReplayBufferPool(1, 64)
    other.add_experiences({"obs": np.zeros((3, 4)), "number": [1, 2, 3], "next_obs": np.zeros((3, 4))})
    with pytest.raises(UsageError, match="the saved columns"):
        other.load_buffers(tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a disk")
def test_a_full_disk_is_one_sentence_and_keeps_the_save_before(tmp_path, monkeypatch):
    monkeypatch.setattr(row_chunks, "CHUNK_BYTES", 1 << 16)
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], check=True)
    try:
        pool = ReplayBufferPool(1, 100_000)
        pool.add_experiences(experiences(*range(20_000)))
        pool.save_buffers(disk / "pool")
        pool.add_experiences(experiences(*range(60_000)))
        with pytest.raises(
            DiskFull, match=r"there is no disk space to save buffers at .*; the previous save is unchanged"
        ):
            pool.save_buffers(disk / "pool")
        assert [path.name for path in (disk / "pool").iterdir()] == ["save-0"]
        loaded = ReplayBufferPool(1, 100_000)
        loaded.load_buffers(disk / "pool")
        assert content(loaded) == [list(range(20_000))]
        with pytest.raises(DiskFull, match=r"there is no disk space for .* bytes of experience at"):
            ReplayBufferPool(1, 100_000, disk_path=disk).add_experiences(experiences(1))
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)


@pytest.mark.parametrize("use_prioritized", [False, True])
def test_experience_on_disk_is_as_in_memory(tmp_path, use_prioritized):
    here = ReplayBufferPool(2, 30, use_prioritized=use_prioritized, seed=4)
    there = ReplayBufferPool(2, 30, use_prioritized=use_prioritized, seed=4, disk_path=tmp_path / "disk")
    for number in range(0, 90, 9):
        for pool in (here, there):
            pool.add_experiences(experiences(*range(number, number + 9)))
        np.testing.assert_equal(here.sample_batch(8), there.sample_batch(8))
    there.save_buffers(tmp_path / "save")
    here.load_buffers(tmp_path / "save")
    np.testing.assert_equal(here.sample_batch(20), there.sample_batch(20))
    assert list((tmp_path / "disk").iterdir()) == []
    maps = Path("/proc/self/maps").read_text()
    assert str(tmp_path / "disk") in maps


def test_experience_cannot_lie_where_there_is_no_directory(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="experience cannot be kept at"):
        ReplayBufferPool(2, 30, disk_path=tmp_path / "file").add_experiences(experiences(1))


def test_a_checkpoint_from_before_there_were_chunks(tmp_path):
    def make():
        pool = ReplayBufferPool(2, 30, use_prioritized=True)
        return ReplayMemory(SPEC, pool, SamplingConfig(8, n_step=3, total_steps=300), stream=np.random.default_rng(5))

    fed, restored = make(), make()
    actors = [ScriptedActor(SPEC, actor=number, seed=3) for number in range(2)]
    for _ in range(5):
        fed.add([actor.segment() for actor in actors])
    restored.restore(codec.unpack((FIXTURES / "memory-format-1.bin").read_bytes()))
    for _ in range(4):
        segments = [actor.segment() for actor in actors]
        for memory in (fed, restored):
            memory.add(segments)
        one, other = fed.sample(), restored.sample()
        np.testing.assert_equal(other.columns, one.columns)
        np.testing.assert_equal(other.weights, one.weights)

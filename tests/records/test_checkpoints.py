"""Checkpoints: exact, pruned, never torn; damage is named and the one before is used."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import load_file, save, save_file

from steppe.core.contracts.errors import DamagedFile
from steppe.core.contracts.weights import Weights, WeightsEntry, WeightsLayout
from steppe.core.io import atomic_files, codec, rings, row_chunks
from steppe.records.checkpoints import Checkpoints, load_weights, save_weights, weights_bytes, weights_from

pytestmark = pytest.mark.integration


def some_weights(value: float = 1.0, version: int = 3) -> Weights:
    named = {
        "b.weight": np.full((2, 3), value, np.float32),
        "a.count": np.array(7, np.int64),
        "a.flags": np.array([True, False, True]),
        "norm": np.array([0.5, -value]),
    }
    return Weights.from_arrays(named).stamped(version=version, updates=30, env_steps=300, episodes=5, train_s=1.25)


STATE = {
    "optimizer": {"moments": np.arange(6, dtype=np.float32), "step": 12},
    "rng": np.random.PCG64(3).state,
    "streams": [np.random.PCG64(4).state, None, (1, 2.5)],
}


def flip(path, place):
    data = bytearray(path.read_bytes())
    data[place] ^= 0x10
    path.write_bytes(data)


def test_a_checkpoint_comes_back_exactly(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=3)
    assert checkpoints.latest() is None
    path = checkpoints.save(some_weights(), STATE, {"env_steps": 300, "score": 1.5})
    found = checkpoints.latest()
    assert found.path == path
    assert found.damaged == ()
    assert found.counters == {"env_steps": 300, "score": 1.5}
    assert found.weights.layout == some_weights().layout
    assert found.weights.sha256() == some_weights().sha256()
    stamps = ("version", "updates", "env_steps", "episodes", "train_s")
    assert [getattr(found.weights, name) for name in stamps] == [3, 30, 300, 5, 1.25]
    assert np.array_equal(found.state["optimizer"]["moments"], STATE["optimizer"]["moments"])
    assert found.state["rng"] == STATE["rng"]
    assert found.state["streams"][2] == [1, 2.5]


def test_only_the_newest_are_kept_and_numbers_grow(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    best = checkpoints.save_best(some_weights(9.0), 10.0)
    names = [checkpoints.save(some_weights(k), {}, {"k": k}).name for k in range(5)]
    assert names == sorted(set(names))
    assert sorted(os.listdir(tmp_path)) == sorted([*names[-2:], "best"])
    assert checkpoints.latest().counters == {"k": 4}
    assert best.exists()
    assert Checkpoints(tmp_path, keep=2).save(some_weights(), {}, {}).name > names[-1]


def test_the_best_replaces_the_best_before_it(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.best() is None
    checkpoints.save_best(some_weights(1.0, version=1), 10.0)
    checkpoints.save_best(some_weights(2.0, version=5), 20.0)
    best = checkpoints.best()
    assert best.counters["score"] == 20.0
    assert best.weights.version == 5
    assert len(os.listdir(tmp_path / "best")) == 1


@pytest.mark.parametrize("name", ["weights.safetensors", "state.bin", "counters.json", "manifest.json"])
def test_a_damaged_one_is_named_and_the_one_before_is_used(tmp_path, name):
    checkpoints = Checkpoints(tmp_path, keep=3)
    for k in range(3):
        checkpoints.save(some_weights(k), STATE, {"k": k})
    newest = checkpoints.latest().path
    flip(newest / name, 5)
    found = checkpoints.latest()
    assert found.counters == {"k": 1}
    assert len(found.damaged) == 1
    assert str(newest / name) in found.damaged[0]
    (found.path / name).unlink()
    found = checkpoints.latest()
    assert found.counters == {"k": 0}
    assert "missing" in found.damaged[1]


def test_when_none_is_whole_all_are_named(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    for k in range(2):
        flip(checkpoints.save(some_weights(k), {}, {}) / "state.bin", 3)
    with pytest.raises(DamagedFile, match=r"00000002.*00000001"):
        checkpoints.latest()


def test_a_newer_format_is_passed_over_with_its_reason(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(some_weights(), {}, {"k": 0})
    manifest = checkpoints.save(some_weights(), {}, {"k": 1}) / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "format": 9}))
    found = checkpoints.latest()
    assert found.counters == {"k": 0}
    assert "format 9" in found.damaged[0]


def test_counters_of_a_newer_format_are_passed_over_too(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    first = checkpoints.save(some_weights(), {}, {"k": 0})
    files = atomic_files.read_bundle(first)
    about = json.loads(files["counters.json"])
    assert about["format"] == 1
    atomic_files.write_bundle(
        tmp_path / "00000002", {**files, "counters.json": json.dumps({**about, "format": 2}).encode()}
    )
    found = checkpoints.latest()
    assert found.path == first
    assert "counters.json has format 2, newer than 1" in found.damaged[0]


@pytest.mark.parametrize("name", ["weights.safetensors", "counters.json"])
def test_a_whole_bundle_that_is_no_checkpoint_is_passed_over(tmp_path, name):
    """Each file matches the manifest, and still one is missing or says nothing."""
    checkpoints = Checkpoints(tmp_path)
    first = checkpoints.save(some_weights(), {}, {"k": 0})
    files = atomic_files.read_bundle(first)
    atomic_files.write_bundle(tmp_path / "00000002", {other: data for other, data in files.items() if other != name})
    atomic_files.write_bundle(tmp_path / "00000003", {**files, name: b"[]"})
    found = checkpoints.latest()
    assert found.path == first
    assert f"00000003/{name} is damaged" in found.damaged[0]
    assert f"00000002 is damaged: it holds no {name}" in found.damaged[1]


def test_a_checkpoint_of_another_run_is_passed_over(tmp_path):
    own, other = Checkpoints(tmp_path, run="one"), Checkpoints(tmp_path, run="two")
    first = own.save(some_weights(), {}, {"k": 0})
    second = other.save(some_weights(), {}, {"k": 1})
    assert own.latest().path == first
    assert "00000002 is a checkpoint of another run (two, not one)" in own.latest().damaged[0]
    assert other.latest().path == second
    assert Checkpoints(tmp_path).latest().path == second  # who names no run takes any


def test_a_full_disk_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(some_weights(1), {}, {"k": 0})
    real = os.fsync
    calls = []

    def fsync(descriptor):
        calls.append(descriptor)
        if len(calls) == 3:
            raise OSError(28, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(atomic_files.os, "fsync", fsync)
    with pytest.raises(OSError, match="No space"):
        checkpoints.save(some_weights(2), {}, {"k": 1})
    monkeypatch.undo()
    assert os.listdir(tmp_path) == ["00000001"]
    assert checkpoints.latest().counters == {"k": 0}


def test_a_killed_writer_leaves_a_whole_newest_checkpoint(tmp_path):
    script = (
        "import sys, numpy as np; from pathlib import Path\n"
        "from steppe.core.contracts.weights import Weights; from steppe.records.checkpoints import Checkpoints\n"
        "checkpoints = Checkpoints(Path(sys.argv[1]), keep=2)\n"
        "for k in range(10**9):\n"
        "    weights = Weights.from_arrays({'w': np.full(20_000, k, np.float32)})\n"
        "    checkpoints.save(weights, {'w': np.full(20_000, k, np.float32)}, {'k': k})\n"
        "    if k == 4: print('ready', flush=True)\n"
    )
    for _ in range(3):
        writer = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE)
        assert writer.stdout.readline() == b"ready\n"
        writer.kill()
        writer.wait()
        writer.stdout.close()
        found = Checkpoints(tmp_path, keep=2).latest()
        assert found.damaged == ()
        assert found.counters["k"] >= 4
        assert (found.weights.arrays()["w"] == found.counters["k"]).all()
        assert (found.state["w"] == found.counters["k"]).all()
    Checkpoints(tmp_path, keep=2).save(some_weights(), {}, {})
    assert len(os.listdir(tmp_path)) == 2  # what the killed ones left aside is gone


def test_the_list_shows_size_age_and_health(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    first = checkpoints.save(some_weights(), STATE, {"k": 0})
    second = checkpoints.save(some_weights(), STATE, {"k": 1})
    checkpoints.save_best(some_weights(), 12.0)
    flip(first / "state.bin", 40)
    os.utime(second, (1_000_000, 1_000_000))
    infos = checkpoints.list()
    assert [(info.number, info.best) for info in infos] == [(1, False), (2, False), (1, True)]
    assert "state.bin" in infos[0].damage
    assert infos[1].damage is None
    assert infos[1].counters == {"k": 1}
    assert infos[1].age_s > 1_000_000
    assert infos[1].size_bytes == sum(file.stat().st_size for file in second.iterdir())
    assert infos[2].counters["score"] == 12.0


def test_the_list_names_a_checkpoint_that_is_gone_when_it_is_read(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(some_weights(), {}, {"k": 0})
    (tmp_path / "00000002").symlink_to(tmp_path / "gone")  # its name is there, and nothing else
    check_rows, gone = checkpoints.list()
    assert check_rows.damage is None
    assert "00000002 was removed while it was read" in gone.damage
    assert (gone.number, gone.age_s, gone.size_bytes, gone.counters) == (2, 0.0, 0, {})


def test_an_old_checkpoint_that_cannot_be_removed_does_not_fail_the_save(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(some_weights(), {}, {"k": 0})

    def busy(*_, **__):
        raise OSError(16, "Device or resource busy")

    monkeypatch.setattr(os, "rmdir", busy)
    second = checkpoints.save(some_weights(), {}, {"k": 1})
    monkeypatch.undo()
    assert [info.path for info in checkpoints.list()] == [second]
    assert len(os.listdir(tmp_path)) == 2
    third = checkpoints.save(some_weights(), {}, {"k": 2})  # which removes what was left
    assert os.listdir(tmp_path) == [third.name]


def test_keeping_nothing_is_refused(tmp_path):
    with pytest.raises(ValueError, match="keep=0"):
        Checkpoints(tmp_path, keep=0)


def test_other_tools_read_our_weights(tmp_path):
    save_weights(tmp_path / "w.safetensors", some_weights())
    arrays = load_file(tmp_path / "w.safetensors")
    assert np.array_equal(arrays["b.weight"], np.ones((2, 3), np.float32))
    assert arrays["a.count"] == 7


def test_the_layout_keeps_its_order(tmp_path):
    save_weights(tmp_path / "w", some_weights())
    back = load_weights(tmp_path / "w")
    assert [entry.name for entry in back.layout.entries] == ["b.weight", "a.count", "a.flags", "norm"]
    assert back.layout == some_weights().layout
    assert back.sha256() == some_weights().sha256()


def test_a_layout_with_its_own_places_is_kept(tmp_path):
    layout = WeightsLayout((WeightsEntry("x", (2,), "float32", 0), WeightsEntry("y", (1,), "float32", 64)))
    buffer = np.zeros(68, np.uint8)
    buffer[64:] = np.array([2.5], np.float32).view(np.uint8)
    save_weights(tmp_path / "w", Weights(layout, buffer))
    assert load_weights(tmp_path / "w").layout == layout
    assert load_weights(tmp_path / "w").arrays()["y"][0] == 2.5


def spread(offset: int) -> Weights:
    """Two arrays of 12 bytes in all; the second begins at `offset`."""
    layout = WeightsLayout((WeightsEntry("x", (2,), "float32", 0), WeightsEntry("y", (1,), "float32", offset)))
    return Weights(layout, np.zeros(offset + 4, np.uint8))


def test_a_layout_may_have_4096_bytes_of_holes_for_each_array(tmp_path):
    save_weights(tmp_path / "w", spread(2 * 4096 + 8))
    assert load_weights(tmp_path / "w").layout == spread(2 * 4096 + 8).layout
    save_weights(tmp_path / "w", spread(2 * 4096 + 12))
    with pytest.raises(DamagedFile, match="holes that are too wide"):
        load_weights(tmp_path / "w")


def test_weights_without_arrays_are_kept(tmp_path):
    save_weights(tmp_path / "w", Weights.from_arrays({}).stamped(version=3, updates=1, env_steps=10))
    back = load_weights(tmp_path / "w")
    assert (back.version, back.arrays()) == (3, {})


def rewritten(weights: Weights, arrays: dict[str, np.ndarray], **about) -> bytes:
    """The file of these weights with other arrays in it or another description of them; its hash is that of the weights."""
    check_rows = weights_bytes(weights)
    header = json.loads(check_rows[8 : 8 + int.from_bytes(check_rows[:8], "little")])
    text = json.dumps({**json.loads(header["__metadata__"]["steppe"]), **about})
    digest = hashlib.sha256(text.encode() + bytes.fromhex(weights.sha256())).hexdigest()
    return save({**weights.arrays(), **arrays}, {"steppe": text, "sha256": digest})


@pytest.mark.parametrize("other", [np.zeros((3, 2), np.float32), np.zeros((2, 3), np.int32)])
def test_arrays_of_another_shape_or_dtype_than_the_layout_says_are_damage(other):
    assert weights_from(rewritten(some_weights(0.0), {}), "these bytes").version == 3
    with pytest.raises(DamagedFile, match=r"these bytes is damaged: 'b\.weight' is not as the layout says"):
        weights_from(rewritten(some_weights(0.0), {"b.weight": other}), "these bytes")


def test_weights_of_a_newer_format_are_refused():
    with pytest.raises(DamagedFile, match="format 2 is newer than 1"):
        weights_from(rewritten(some_weights(), {}, format=2), "these bytes")


def test_a_file_of_another_tool_is_refused(tmp_path):
    save_file({"x": np.arange(4, dtype=np.float32)}, tmp_path / "w")
    with pytest.raises(DamagedFile, match="Steppe wrote it"):
        load_weights(tmp_path / "w")


def loaded(data: bytes) -> Weights | None:
    try:
        return weights_from(data, "these bytes")
    except DamagedFile:
        return None


def test_no_flipped_bit_of_a_weights_file_changes_what_is_loaded():
    check_rows, sound = weights_bytes(some_weights()), some_weights()
    refused = 0
    for place in range(len(check_rows)):
        for bit in (0, 2, 5, 7):
            found = loaded(check_rows[:place] + bytes([check_rows[place] ^ 1 << bit]) + check_rows[place + 1 :])
            refused += found is None
            if found is not None:  # a flip in what has no meaning, such as white space
                assert found.sha256() == sound.sha256()
                assert codec.counters(found) == codec.counters(sound)
                assert found.layout == sound.layout
    assert refused > 0.9 * 4 * len(check_rows)


def test_every_truncation_of_a_weights_file_is_damage():
    check_rows = weights_bytes(some_weights())
    assert all(loaded(check_rows[:length]) is None for length in range(len(check_rows)))


def test_a_missing_weights_file_is_named(tmp_path):
    with pytest.raises(DamagedFile, match="nowhere"):
        load_weights(tmp_path / "nowhere")


class Rows:
    """A ring of rows as a replay memory has it."""

    def __init__(self, capacity: int = 64) -> None:
        self.columns = {"obs": np.zeros((capacity, 3), np.float32), "action": np.zeros(capacity, np.int64)}
        self.added, self.history = 0, rings.SaveHistory()

    def append(self, count: int) -> None:
        for _ in range(count):
            at = self.added % len(self.columns["action"])
            self.columns["obs"][at], self.columns["action"][at] = self.added, self.added
            self.added += 1

    def state(self) -> dict:
        capacity = len(self.columns["action"])
        size = min(self.added, capacity)
        ring = rings.Ring("buffer 0", self.columns, size, self.added % capacity, self.added, self.history)
        return {"memory": {"rings": [ring]}, "agent": {"step": self.added}}


@pytest.fixture
def rows(monkeypatch):
    monkeypatch.setattr(row_chunks, "CHUNK_BYTES", 8 * 20)  # of 8 rows
    return Rows()


def content(checkpoint):
    ring = checkpoint.state["memory"]["rings"][0]
    found = {"obs": np.zeros((64, 3), np.float32), "action": np.zeros(64, np.int64)}
    ring.read_into(found)
    return found


def test_rows_are_written_once_and_each_checkpoint_is_exact(tmp_path, rows):
    checkpoints, seen = Checkpoints(tmp_path, keep=2), set()
    for number in range(8):
        rows.append(20)
        path = checkpoints.save(some_weights(), rows.state(), {"k": number})
        own = {file.stat().st_ino for file in path.glob("*.rows")}
        assert len(own - seen) <= 20 // 8 + 2  # whole chunks since, at most, and the tail
        seen |= own
        np.testing.assert_equal(content(checkpoints.latest()), rows.columns)
        assert checkpoints.latest().state["agent"] == {"step": rows.added}
    assert len(list(tmp_path.iterdir())) == 2
    assert [info.damage for info in checkpoints.list()] == [None, None]


def test_a_checkpoint_outlives_those_it_shares_rows_with(tmp_path, rows):
    rows.append(64)
    first = Checkpoints(tmp_path, keep=1).save(some_weights(), rows.state(), {})
    kept = {file.name for file in first.glob("*-*.rows")}
    second = Checkpoints(tmp_path, keep=1).save(some_weights(), rows.state(), {})
    assert not first.exists()
    assert {file.name for file in second.glob("*-*.rows")} == kept
    np.testing.assert_equal(content(Checkpoints(tmp_path).latest()), rows.columns)


def test_damaged_rows_are_named_and_the_one_before_is_used(tmp_path, rows):
    checkpoints = Checkpoints(tmp_path)
    rows.append(30)
    checkpoints.save(some_weights(1), rows.state(), {"k": 0})
    before = {name: column.copy() for name, column in rows.columns.items()}
    rows.append(30)
    newest = checkpoints.save(some_weights(2), rows.state(), {"k": 1})
    flip(newest / "tail.rows", 7)
    found = checkpoints.latest()
    assert found.counters == {"k": 0}
    assert "column 'obs' of buffer 0" in found.damaged[0]
    assert str(newest / "tail.rows") in found.damaged[0]
    np.testing.assert_equal(content(found)["action"][:30], before["action"][:30])
    assert checkpoints.latest(check_rows=False).counters == {"k": 1}  # the weights are good
    assert "column 'obs'" in checkpoints.list()[1].damage
    with pytest.raises(DamagedFile, match=r"tail\.rows"):
        content(checkpoints.load(2))


def test_damaged_rows_that_another_role_wrote_are_named_and_the_one_before_is_used(tmp_path):
    def begin(directory, before):
        atomic_files.write_bundle(directory, {"rows.bin": bytes(100)})
        return lambda: None

    checkpoints = Checkpoints(tmp_path)
    state = {"memory": rings.NestedBundle("replay-0", begin)}
    first = checkpoints.save(some_weights(), state, {"k": 0})
    newest = checkpoints.save(some_weights(), state, {"k": 1})
    assert checkpoints.latest().state == {"memory": newest / "replay-0"}
    flip(newest / "replay-0" / "rows.bin", 50)
    found = checkpoints.latest()
    assert found.path == first
    assert str(newest / "replay-0" / "rows.bin") in found.damaged[0]
    assert checkpoints.latest(check_rows=False).path == newest


def test_without_room_for_rows_the_checkpoint_before_stays(tmp_path, rows, monkeypatch):
    checkpoints = Checkpoints(tmp_path)
    rows.append(40)
    checkpoints.save(some_weights(1), rows.state(), {"k": 0})
    real, left = os.write, [300]

    def write(descriptor, data):
        left[0] -= len(data)
        if left[0] < 0:
            raise OSError(28, "No space left on device")
        return real(descriptor, data)

    monkeypatch.setattr(os, "write", write)
    rows.append(40)
    with pytest.raises(OSError, match="No space"):
        checkpoints.save(some_weights(2), rows.state(), {"k": 1})
    assert sorted(os.listdir(tmp_path)) == ["00000001"]
    assert checkpoints.latest().counters == {"k": 0}

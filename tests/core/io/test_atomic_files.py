"""core/io/atomic_files.py against crashes at every system call and against every kind of damage."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steppe.core.contracts.errors import DamagedFile
from steppe.core.io import atomic_files

pytestmark = pytest.mark.unit

CALLS = ("open", "write", "fsync", "replace", "rename", "mkdir", "close")


class Crash(BaseException):
    """The process dies here: nothing after it runs, not even clean-up."""


class Syscalls:
    """Counts the calls that core/io/atomic_files.py makes and, at the k-th, crashes or fails; `dead` forbids clean-up afterwards."""

    def __init__(self, monkeypatch, fatal_at=None, *, error=None, half=False):
        self.count, self.fatal_at, self.error, self.half, self.dead = 0, fatal_at, error, half, False
        self.real = {name: getattr(os, name) for name in (*CALLS, "unlink")}
        for name in CALLS:
            monkeypatch.setattr(atomic_files.os, name, self._wrapped(name))
        monkeypatch.setattr(atomic_files.os, "unlink", self._cleanup(self.real["unlink"]))
        monkeypatch.setattr(atomic_files.shutil, "rmtree", self._cleanup(atomic_files.shutil.rmtree))

    def _wrapped(self, name):
        def call(*args, **kwargs):
            if self.dead:
                if name == "close":  # descriptors of a dead process go with it
                    return self.real["close"](*args)
                raise Crash
            self.count += 1
            if self.count == self.fatal_at:
                if self.half and name == "write":
                    self.real["write"](args[0], bytes(args[1])[: len(args[1]) // 2])
                if name == "close":
                    self.real["close"](*args)
                self.dead = self.error is None
                raise self.error or Crash
            return self.real[name](*args, **kwargs)

        return call

    def _cleanup(self, real):
        def call(*args, **kwargs):
            if self.dead:
                raise Crash
            return real(*args, **kwargs)

        return call


@contextlib.contextmanager
def crashing(monkeypatch, k, *, half):
    with monkeypatch.context() as patch, pytest.raises(Crash):
        yield Syscalls(patch, k, half=half)


@contextlib.contextmanager
def failing(monkeypatch, k):
    with monkeypatch.context() as patch, pytest.raises(OSError, match="disk full"):
        yield Syscalls(patch, k, error=OSError(28, "disk full"))


def calls_of(monkeypatch, action) -> int:
    with monkeypatch.context() as patch:
        counter = Syscalls(patch)
        action()
    return counter.count


@pytest.mark.parametrize("half", [False, True])
def test_a_crash_at_any_call_leaves_the_old_file_or_the_new_one(tmp_path, monkeypatch, half):
    old, new = b"old content", b"new and longer content" * 1000
    total = calls_of(monkeypatch, lambda: atomic_files.write_atomic(tmp_path / "probe", new))
    assert total >= 7  # open, write, fsync, close, replace, and open, fsync, close of the directory
    contents_read = set()
    for k in range(1, total + 1):
        path = tmp_path / f"file{k}"
        path.write_bytes(old)
        with crashing(monkeypatch, k, half=half):
            atomic_files.write_atomic(path, new)
        assert path.read_bytes() in (old, new), f"call {k} tore the file"
        contents_read.add(path.read_bytes())
    assert contents_read == {old, new}


def test_a_failing_call_leaves_nothing_behind(tmp_path, monkeypatch):
    total = calls_of(monkeypatch, lambda: atomic_files.write_atomic(tmp_path / "file", b"old"))
    for k in range(1, total + 1):
        with failing(monkeypatch, k):
            atomic_files.write_atomic(tmp_path / "file", b"new")
        assert os.listdir(tmp_path) == ["file"]
        (tmp_path / "file").write_bytes(b"old")


def test_the_file_is_synced_before_it_is_renamed_and_the_directory_after(tmp_path, monkeypatch):
    order = []
    real_fsync, real_replace = os.fsync, os.replace

    def fsync(descriptor):
        order.append("sync directory" if os.path.isdir(f"/proc/self/fd/{descriptor}") else "sync file")
        real_fsync(descriptor)

    def replace(source, target):
        assert Path(source).parent == Path(target).parent
        order.append("rename")
        real_replace(source, target)

    monkeypatch.setattr(atomic_files.os, "fsync", fsync)
    monkeypatch.setattr(atomic_files.os, "replace", replace)
    atomic_files.write_atomic(tmp_path / "file", b"x")
    assert order == ["sync file", "rename", "sync directory"]


def test_short_writes_are_completed(tmp_path, monkeypatch):
    real = os.write
    monkeypatch.setattr(atomic_files.os, "write", lambda descriptor, data: real(descriptor, bytes(data)[:7]))
    atomic_files.write_atomic(tmp_path / "file", bytes(range(256)))
    assert (tmp_path / "file").read_bytes() == bytes(range(256))


def test_a_killed_writer_never_tears_a_file(tmp_path):
    """A real process, killed while it rewrites a file again and again."""
    script = (
        "import sys; from pathlib import Path; from steppe.core.io.atomic_files import write_atomic\n"
        "path = Path(sys.argv[1])\n"
        "for k in range(10**9):\n"
        "    write_atomic(path, bytes([k % 256]) * 50_000)\n"
        "    if k == 3: print('ready', flush=True)\n"
    )
    path = tmp_path / "file"
    for _ in range(3):
        writer = subprocess.Popen([sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE)
        assert writer.stdout.readline() == b"ready\n"
        writer.kill()
        writer.wait()
        writer.stdout.close()
        data = path.read_bytes()
        assert len(data) == 50_000
        assert len(set(data)) == 1
    atomic_files.remove_temporary_files(tmp_path)
    assert os.listdir(tmp_path) == ["file"]


FILES = {"weights": bytes(range(200)), "state.bin": b"s" * 33, "empty": b""}


def test_a_crash_at_any_call_leaves_no_bundle_or_a_whole_one(tmp_path, monkeypatch):
    total = calls_of(monkeypatch, lambda: atomic_files.write_bundle(tmp_path / "probe", FILES))
    appeared = set()
    for k in range(1, total + 1):
        directory = tmp_path / f"bundle{k}"
        with crashing(monkeypatch, k, half=True):
            atomic_files.write_bundle(directory, FILES)
        if directory.exists():
            assert atomic_files.read_bundle(directory) == FILES
        appeared.add(directory.exists())
    assert appeared == {True, False}
    atomic_files.remove_temporary_files(tmp_path)
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


def test_a_failing_call_leaves_no_half_bundle(tmp_path, monkeypatch):
    total = calls_of(monkeypatch, lambda: atomic_files.write_bundle(tmp_path / "probe", FILES))
    for k in range(1, total + 1):
        with failing(monkeypatch, k):
            atomic_files.write_bundle(tmp_path / f"bundle{k}", FILES)
        left = set(os.listdir(tmp_path)) - {"probe", *(f"bundle{j}" for j in range(1, k + 1))}
        assert not left


@pytest.mark.slow
def test_every_flipped_bit_of_a_bundle_is_found_and_its_file_named(tmp_path):
    atomic_files.write_bundle(tmp_path / "b", FILES)
    for name in (*FILES, atomic_files.MANIFEST):
        path = tmp_path / "b" / name
        whole = path.read_bytes()
        for place in range(len(whole)):
            for bit in (0, 3, 5, 7):
                path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << bit]) + whole[place + 1 :])
                with pytest.raises(DamagedFile, match=name.replace(".", r"\.")):
                    atomic_files.read_bundle(tmp_path / "b")
        path.write_bytes(whole)
    assert atomic_files.read_bundle(tmp_path / "b") == FILES


def test_every_truncation_of_a_bundle_is_found(tmp_path):
    atomic_files.write_bundle(tmp_path / "b", FILES)
    for name in ("weights", atomic_files.MANIFEST):
        path = tmp_path / "b" / name
        whole = path.read_bytes()
        for length in range(len(whole)):
            path.write_bytes(whole[:length])
            with pytest.raises(DamagedFile, match=name):
                atomic_files.read_bundle(tmp_path / "b")
        path.write_bytes(whole + b"x")
        with pytest.raises(DamagedFile, match=name):
            atomic_files.read_bundle(tmp_path / "b")
        path.write_bytes(whole)


@pytest.mark.parametrize("name", ["weights", atomic_files.MANIFEST])
def test_a_missing_file_is_named(tmp_path, name):
    atomic_files.write_bundle(tmp_path / "b", FILES)
    (tmp_path / "b" / name).unlink()
    with pytest.raises(DamagedFile, match=f"{name} is missing"):
        atomic_files.read_bundle(tmp_path / "b")


def test_a_newer_format_is_named_as_such(tmp_path):
    atomic_files.write_bundle(tmp_path / "b", FILES)
    path = tmp_path / "b" / atomic_files.MANIFEST
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 99}))
    with pytest.raises(DamagedFile, match="format 99, newer than"):
        atomic_files.read_bundle(tmp_path / "b")


def test_a_manifest_cannot_point_outside_its_bundle(tmp_path):
    (tmp_path / "secret").write_bytes(b"x")
    (tmp_path / "b").mkdir()
    entries = {"../secret": {"size": 1, "sha256": "0" * 64}}
    (tmp_path / "b" / atomic_files.MANIFEST).write_bytes(atomic_files.encode_manifest(entries))
    with pytest.raises(DamagedFile, match="plain file name"):
        atomic_files.read_bundle(tmp_path / "b")
    for name in ("../x", "a/b", "", ".hidden", atomic_files.MANIFEST):
        with pytest.raises(ValueError, match="plain file name"):
            atomic_files.write_bundle(tmp_path / "c", {name: b""})
    assert not (tmp_path / "c").exists()


def test_a_bundle_is_never_overwritten(tmp_path):
    atomic_files.write_bundle(tmp_path / "b", FILES)
    with pytest.raises(FileExistsError):
        atomic_files.write_bundle(tmp_path / "b", {"other": b""})
    assert atomic_files.read_bundle(tmp_path / "b") == FILES


@given(
    st.dictionaries(st.from_regex(r"[a-z0-9][a-z0-9._-]{0,20}", fullmatch=True), st.binary(max_size=200), max_size=5)
)
@settings(max_examples=50, deadline=None)
def test_bundles_come_back_as_they_were(tmp_path_factory, files):
    files.pop(atomic_files.MANIFEST, None)
    directory = tmp_path_factory.mktemp("bundles") / "b"
    atomic_files.write_bundle(directory, files)
    assert atomic_files.read_bundle(directory) == files


def test_json_comes_back_and_what_is_not_json_is_damage(tmp_path):
    atomic_files.write_json(tmp_path / "x.json", {"a": [1, None, "é"]})
    assert atomic_files.read_json(tmp_path / "x.json") == {"a": [1, None, "é"]}
    with pytest.raises(ValueError, match="JSON compliant"):
        atomic_files.write_json(tmp_path / "x.json", float("nan"))
    assert atomic_files.read_json(tmp_path / "x.json") == {"a": [1, None, "é"]}
    (tmp_path / "x.json").write_bytes(b'{"a": \xff')
    with pytest.raises(DamagedFile, match=r"x\.json"):
        atomic_files.read_json(tmp_path / "x.json")

"""A disk that fills up during a run and is emptied again: a real one, small and in memory."""

from __future__ import annotations

import os
import subprocess
import threading
from collections import Counter

import pytest

from steppe.cli.live_view import PlainLines
from steppe.core.contracts.errors import DiskFull
from steppe.records.checkpoints import Checkpoints
from steppe.records.run_directory import RunDirectory
from steppe.training.resume import resume
from tests.support.cases import rest_slow
from tests.support.chaos import events, pace, require_ledger, require_single_records, settings, train, twin

pytestmark = [pytest.mark.integration, pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a disk")]

STEPS = 3200
both = pytest.mark.parametrize("runtime", rest_slow("processes", "inline"))


@pytest.fixture
def disk(tmp_path):
    path = tmp_path / "disk"
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", path], check=True)
    yield path
    subprocess.run(["umount", "--lazy", path], check=True)


class Filler:
    """An observer that fills a disk once there is a checkpoint on it, and empties it after some polls."""

    def __init__(self, disk, looks):
        self.disk, self.looks = disk, looks
        self.full_at = None  # the newest checkpoint when the disk became full
        self.warned = Counter()
        self.emptied = threading.Event()

    def __call__(self, view):
        if self.full_at is None:
            if self._newest():
                self.fill()
                self.full_at = self._newest()
        elif self.looks > 0:
            self.looks -= 1
            self.fill()
            self.warned[view.warning is not None] += 1
            assert view.state in ("RUNNING", "STOPPING")
        elif not self.emptied.is_set():
            (self.disk / "filler").unlink()
            self.emptied.set()

    def _newest(self):
        return max((path.name for path in self.disk.glob("run/checkpoints/[0-9]*")), default=None)

    def fill(self):
        """Fill it to the last byte: whole pages, then single bytes."""
        with (self.disk / "filler").open("ab", buffering=0) as file:
            for size in (1 << 16, 1 << 12, 1):
                try:
                    while file.write(bytes(size)) == size:
                        pass
                except OSError:
                    continue


@pytest.mark.slow
@pytest.mark.parametrize(("algo", "runtime"), rest_slow(("ppo", "processes"), ("dqn", "inline")))
def test_a_run_continues_after_the_disk_was_full(algo, runtime, disk, tmp_path):
    expected = twin(algo, STEPS, tmp_path / "twin")
    filler, shown = Filler(disk, looks=8), (tmp_path / "shown").open("w+")
    lines = PlainLines(shown, clock=iter(range(0, 10**9, 10)).__next__)
    with pace(0.004 if runtime == "processes" else 0.002):
        result = train(settings(algo, STEPS, disk / "run", runtime=runtime), [filler, lines])
    assert filler.emptied.is_set(), "the run was over before the disk was emptied"
    assert (result.state, result.reason) == ("SUCCEEDED", "steps_done"), result.message
    assert result.weights_sha256 == expected
    assert filler.warned == {True: 8}, "the warning has to be there for as long as the disk is full"
    shown.seek(0)
    assert shown.read().count("WARNING: the disk is full") >= 8
    shown.close()
    require_ledger(disk / "run")
    require_single_records(disk / "run")
    newest = Checkpoints(disk / "run" / "checkpoints").latest()
    assert newest.damaged == ()
    assert newest.weights.sha256() == expected
    assert any("no disk space" in event["details"]["message"] for event in events(disk / "run", "warning"))
    assert RunDirectory.open(disk / "run").store.status().state == "SUCCEEDED"
    assert RunDirectory.open(disk / "run").summary()["weights_sha256"] == expected
    assert not list(disk.glob("run/reserve"))


@both
def test_a_run_ends_at_its_limit_on_a_full_disk(runtime, disk):
    filler = Filler(disk, looks=10**9)
    with pace(0.001):
        layer = settings("ppo", 10**9, disk / "run", runtime=runtime)
        result = train({**layer, "checkpoint.full_disk": "stop"}, [filler])
    assert (result.state, result.reason) == ("FAILED", "disk_full")
    assert "no disk space" in result.message
    found = RunDirectory.open(disk / "run")
    assert (found.store.status().state, found.store.status().reason) == ("FAILED", "disk_full")
    assert found.summary()["reason"] == "disk_full"
    newest = Checkpoints(found.checkpoints, run=found.key).latest()
    assert newest.damaged == ()
    assert newest.weights.updates > 0


@both
def test_a_run_that_ends_on_a_full_disk_reports_it_and_can_be_resumed(runtime, disk, tmp_path):
    expected = twin("ppo", STEPS, tmp_path / "twin")
    filler = Filler(disk, looks=10**9)
    with pace(0.001):
        result = train(settings("ppo", STEPS, disk / "run", runtime=runtime), [filler])
    assert (result.state, result.reason) == ("FAILED", "disk_full")
    (disk / "filler").unlink()
    again = resume(disk / "run")
    assert again.state == "SUCCEEDED", again.message
    assert again.weights_sha256 == expected
    assert again.resume == "exact"


def test_a_run_on_a_full_disk_is_refused(disk):
    Filler(disk, 0).fill()
    with pytest.raises(DiskFull, match="there is no disk space to write"):
        train(settings("ppo", STEPS, disk / "run", runtime="inline"))

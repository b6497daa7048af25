"""Videos, read back frame by frame."""

from __future__ import annotations

import os

import numpy as np
import pytest
from PIL import Image, ImageSequence

from steppe.core.io import atomic_files
from steppe.records.video import save_gif

pytestmark = pytest.mark.unit


def frames(count=5):
    made = [np.zeros((24, 32, 3), np.uint8) for _ in range(count)]
    for number, frame in enumerate(made):
        frame[:, 4 * number : 4 * number + 4] = (250, 10 * number, 5)
    return made


def test_frames_are_read_back_in_order_and_time(tmp_path):
    save_gif(tmp_path / "deep" / "x.gif", frames(), fps=20)
    with Image.open(tmp_path / "deep" / "x.gif") as image:
        assert (image.format, image.size, image.n_frames) == ("GIF", (32, 24), 5)
        assert image.info["duration"] == 50
        assert image.info["loop"] == 0
        back = [np.array(frame.convert("RGB")) for frame in ImageSequence.Iterator(image)]
    for sent, got in zip(frames(), back, strict=True):
        assert np.abs(sent.astype(int) - got).max() <= 8


@pytest.mark.parametrize("fps", [1000, 0.5])
def test_unsupported_frame_rates_are_approximated(tmp_path, fps):
    save_gif(tmp_path / "x.gif", frames(2), fps=fps)
    with Image.open(tmp_path / "x.gif") as image:
        assert image.info["duration"] == (20 if fps == 1000 else 2000)


@pytest.mark.parametrize(
    "wrong", [[], [np.zeros((4, 4), np.uint8)], [np.zeros((4, 4, 3))], [np.zeros((4, 4, 4), np.uint8)]]
)
def test_invalid_frames_are_refused(tmp_path, wrong):
    with pytest.raises(ValueError, match="frame"):
        save_gif(tmp_path / "x.gif", wrong)
    assert not os.listdir(tmp_path)


def test_a_failed_write_keeps_the_old_video(tmp_path, monkeypatch):
    save_gif(tmp_path / "x.gif", frames())
    before = (tmp_path / "x.gif").read_bytes()

    def full(descriptor):
        raise OSError(28, "disk full")

    monkeypatch.setattr(atomic_files.os, "fsync", full)
    with pytest.raises(OSError, match="disk full"):
        save_gif(tmp_path / "x.gif", frames(2))
    assert os.listdir(tmp_path) == ["x.gif"]
    assert (tmp_path / "x.gif").read_bytes() == before

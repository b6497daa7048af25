"""Videos of episodes."""

from __future__ import annotations

import importlib
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from steppe.core.contracts.errors import UsageError
from steppe.core.io.atomic_files import write_atomic


def save_video(path: Path, frames: Sequence[np.ndarray], fps: float = 30.0) -> None:
    """Write frames as a GIF or, if the path ends in .mp4, as MP4. UsageError if the packages for MP4 are not installed."""
    (save_mp4 if path.suffix == ".mp4" else save_gif)(path, frames, fps)


def require_mp4() -> Any:
    """Return the module that writes MP4. UsageError if it is not installed."""
    try:
        importlib.import_module("imageio_ffmpeg")  # what imageio writes MP4 with
        return importlib.import_module("imageio.v2")
    except ImportError:
        raise UsageError(
            "MP4 videos need imageio with ffmpeg: pip install 'imageio[ffmpeg]', or write GIF files"
        ) from None


def save_mp4(path: Path, frames: Sequence[np.ndarray], fps: float = 30.0) -> None:
    """Write uint8 RGB frames [height, width, 3] as MP4, atomically; an odd height or width loses a pixel."""
    writer = require_mp4()
    even = [frame[: frame.shape[0] // 2 * 2, : frame.shape[1] // 2 * 2] for frame in frames]
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.tmp.mp4")
    try:
        writer.mimwrite(aside, even, fps=fps, macro_block_size=2)
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def save_gif(path: Path, frames: Sequence[np.ndarray], fps: float = 30.0) -> None:
    """Write uint8 RGB frames [height, width, 3] as a looping GIF, atomically."""
    from PIL import Image

    if not frames:
        raise ValueError("a recording needs at least one frame")
    for frame in frames:
        if frame.dtype != np.uint8 or frame.ndim != 3 or frame.shape[2] != 3:
            raise ValueError(f"a frame is uint8 [height, width, 3], not {frame.dtype} {list(frame.shape)}")
    # GIF stores hundredths of a second, and viewers slow down frames shorter than two of them.
    duration_ms = 10 * max(2, round(100 / fps))
    first, *rest = (Image.fromarray(frame).quantize(colors=128) for frame in frames)
    buffer = io.BytesIO()
    first.save(buffer, "GIF", save_all=True, append_images=rest, duration=duration_ms, loop=0)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, buffer.getvalue())

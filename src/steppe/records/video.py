"""Videos of episodes."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from steppe.core.io.atomic_files import write_atomic


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

"""Encode images as rows: channels first, and converted to grayscale or resized if configured."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces
from PIL import Image

from steppe.core.contracts.errors import ConfigError


def is_image(space: spaces.Space[Any]) -> bool:
    """Return whether a space is an image, as defined in envs/vector/spaces.py; uint8 with other bounds is not."""
    return (
        isinstance(space, spaces.Box)
        and space.dtype == np.uint8
        and len(space.shape) in (2, 3)
        and bool((space.low == 0).all() and (space.high == 255).all())
    )


def channels_last(shape: tuple[int, ...]) -> tuple[tuple[int, ...], bool]:
    """Return the shape as (height, width, channels), and whether the channels are first."""
    if len(shape) == 2:
        return (*shape, 1), False
    first = shape[0] < shape[2]
    return ((shape[1], shape[2], shape[0]) if first else shape), first


class ImageEncoder:
    """Writes a raw image into a uint8 row (channels, height, width)."""

    def __init__(self, layout: tuple[tuple[int, ...], bool], grayscale: bool, resize: int | None) -> None:
        (height, width, channels), self.channels_first = layout
        self.raw_shape = (height, width, channels)
        self.grayscale = grayscale and channels > 1
        if self.grayscale and channels != 3:
            raise ConfigError(f"environment.grayscale needs images with 3 colours, not {channels} channels")
        self.size = None if resize is None or resize == height == width else (resize, resize)
        self.shape = (1 if self.grayscale else channels, *(self.size or (height, width)))

    def put(self, target: np.ndarray, index: int, raw: Any) -> None:
        """Write one image; without grayscale and resizing this is one strided copy."""
        image = np.asarray(raw, np.uint8)
        planes = image if self.channels_first else image.reshape(self.raw_shape).transpose(2, 0, 1)
        if self.grayscale:
            planes = np.asarray(Image.fromarray(np.ascontiguousarray(planes.transpose(1, 2, 0))).convert("L"))[None]
        if self.size is None:
            target[index] = planes
            return
        for channel, plane in enumerate(planes):
            # BOX averages the merged pixels: thin objects fade instead of disappearing.
            small = Image.fromarray(np.ascontiguousarray(plane)).resize(self.size[::-1], Image.Resampling.BOX)
            target[index, channel] = small

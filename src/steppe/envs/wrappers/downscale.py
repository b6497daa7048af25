"""Combine two screens into one smaller image: pixelwise maximum, then the mean over the area of each new pixel.

Areas are measured in integer fractions of a pixel, and all sums are integers that float32 represents exactly. So the
mean is rounded only once (half up), and is the same on every machine.
"""

from __future__ import annotations

import math

import numba
import numpy as np

_EXACT = 2**24  # float32 represents every integer up to here


class AreaDownscaler:
    """Downscales screens (height, width) or (height, width, colours) to images of `size` pixels."""

    def __init__(self, screen: tuple[int, ...], size: tuple[int, int]) -> None:
        self._colours = math.prod(screen[2:])
        self._shape = (*size, *screen[2:])
        self._rows, tall = _coverage(screen[0], size[0])
        self._columns, wide = _coverage(screen[1], size[1])
        if 256 * tall * wide > _EXACT:
            raise ValueError(f"screens of {screen} are too large to be averaged into {size}")
        self._area = tall * wide

    def __call__(self, one: np.ndarray, other: np.ndarray) -> np.ndarray:
        """Return a new image from two screens, which are not modified."""
        image = np.empty(self._shape, np.uint8)
        height = len(one)
        _downscale(
            one.reshape(height, -1),
            other.reshape(height, -1),
            *self._rows,
            *self._columns,
            self._colours,
            self._area,
            image.reshape(self._shape[0], -1),
        )
        return image


def _coverage(old: int, new: int) -> tuple[tuple[np.ndarray, np.ndarray], int]:
    """Return, per new pixel, the first old pixel it covers and the weights from there on; and the weights' sum."""
    part = math.gcd(old, new)
    old_parts, new_parts = old // part, new // part  # a new pixel is old_parts long, an old one new_parts
    starts = np.arange(new) * old_parts
    first = starts // new_parts
    count = int(((starts + old_parts - 1) // new_parts - first).max()) + 1
    first = np.minimum(first, old - count)  # so that all have `count` pixels, some with weight 0
    edges = (first[:, None] + np.arange(count + 1)) * new_parts
    inside = np.clip(edges, starts[:, None], starts[:, None] + old_parts)
    return (first.astype(np.int64), np.diff(inside, axis=1).astype(np.float32)), old_parts


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _downscale(
    one: np.ndarray,
    other: np.ndarray,
    first_row: np.ndarray,
    row_share: np.ndarray,
    first_column: np.ndarray,
    column_share: np.ndarray,
    colours: int,
    area: int,
    image: np.ndarray,
) -> None:
    """Average vertically over whole lines first, then horizontally."""
    width, count = one.shape[1], column_share.shape[1]
    line = np.empty(width, np.float32)
    whole, half = np.float32(area), np.float32(area // 2)
    for i in range(len(first_row)):
        line[:] = 0
        for r in range(row_share.shape[1]):
            left, right, share = one[first_row[i] + r], other[first_row[i] + r], row_share[i, r]
            for x in range(width):
                line[x] += share * np.float32(max(left[x], right[x]))
        for j in range(len(first_column)):
            shares = column_share[j]
            for colour in range(colours):
                part = line[first_column[j] * colours + colour :]
                total = half
                for c in range(count):
                    total += shares[c] * part[c * colours]
                image[i, j * colours + colour] = np.uint8(total / whole)

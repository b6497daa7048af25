"""Means over areas, against exact fractions."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steppe.envs.wrappers.downscale import AreaDownscaler

pytestmark = pytest.mark.unit


def exact(screen, size):
    """Every new pixel by fractions: what each old pixel's area within it is worth, rounded half up."""
    image = np.zeros((*size, *screen.shape[2:]), np.uint8)
    scale = [Fraction(old, new) for old, new in zip(screen.shape, size, strict=False)]
    for place in np.ndindex(*image.shape):
        total = Fraction(0)
        for pixel in np.ndindex(*screen.shape[:2]):
            area = Fraction(1)
            for axis in range(2):
                low, high = place[axis] * scale[axis], (place[axis] + 1) * scale[axis]
                area *= max(Fraction(0), min(high, pixel[axis] + 1) - max(low, Fraction(pixel[axis])))
            total += area * int(screen[(*pixel, *place[2:])])
        image[place] = int(total / (scale[0] * scale[1]) + Fraction(1, 2))
    return image


sides = st.integers(1, 9)


@settings(deadline=None, max_examples=60)
@given(sides, sides, sides, sides, st.sampled_from([(), (3,)]), st.integers(0, 2**32 - 1))
def test_every_pixel_is_the_rounded_mean(height, width, tall, wide, colours, seed):
    one, other = np.random.default_rng(seed).integers(0, 256, (2, height, width, *colours), np.uint8)
    given = one.copy(), other.copy()
    image = AreaDownscaler(one.shape, (tall, wide))(one, other)
    np.testing.assert_array_equal(image, exact(np.maximum(one, other), (tall, wide)))
    np.testing.assert_array_equal((one, other), given)


def test_halves_are_rounded_up():
    screen = np.array([[0, 1]], np.uint8)
    assert AreaDownscaler((1, 2), (1, 1))(screen, screen) == 1


def test_white_stays_white():
    screen = np.full((210, 160), 255, np.uint8)
    assert (AreaDownscaler((210, 160), (84, 84))(screen, np.zeros_like(screen)) == 255).all()


def test_sizes_beyond_float32_precision_are_refused():
    with pytest.raises(ValueError, match="too large"):
        AreaDownscaler((1009, 1013), (7, 7))

"""Draw pathfinding worlds as RGB images; records/video.py makes videos of them.

Obstacles are dark. Goals are frames and agents discs, in one colour per agent; trails are lines. A line connects two
agents if at least one receives messages from the other.
"""

from __future__ import annotations

import colorsys

import numpy as np
from PIL import Image, ImageDraw

_GROUND, _OBSTACLE, _GRID, _COMM_LINE, _EDGE = (
    (250, 250, 248),
    (62, 66, 76),
    (232, 232, 228),
    (20, 20, 24),
    (40, 40, 46),
)
_GOLDEN = 0.618034  # golden ratio: hues stay far apart for any number of agents
Colour = tuple[int, int, int]
Point = tuple[int, int]


def draw(
    obstacles: np.ndarray,
    positions: np.ndarray,
    goals: np.ndarray,
    comm_mask: np.ndarray | None = None,
    trail: np.ndarray | None = None,
    *,
    cell: int = 16,
) -> np.ndarray:
    """Draw one world; return an RGB image, uint8 [height × cell, width × cell, 3].

    `positions` and `goals` are rows and columns [agents, 2], `trail` the earlier positions [steps, agents, 2], oldest
    first.
    """
    image = Image.fromarray(_ground(obstacles, cell))
    pen = ImageDraw.Draw(image)
    colours = [colour_of(agent) for agent in range(len(positions))]
    centers, ends = _middles(positions, cell), _middles(goals, cell)
    for agent, colour in enumerate(colours):
        if trail is not None and len(trail) > 1:
            pen.line(_middles(trail[:, agent], cell), _pale(colour), max(1, cell // 6), joint="curve")
    for end, colour in zip(ends, colours, strict=True):
        pen.rectangle(_box(end, 3 * cell // 8), outline=colour, width=max(1, cell // 8))
    for one, other in _communicating_pairs(comm_mask):
        pen.line([centers[one], centers[other]], _COMM_LINE, max(1, cell // 10))
    for center, end, colour in zip(centers, ends, colours, strict=True):
        if center == end:
            pen.rectangle(_box(end, 3 * cell // 8), fill=_pale(colour), outline=colour, width=max(1, cell // 8))
        pen.ellipse(_box(center, 5 * cell // 16), fill=colour, outline=_EDGE)
    return np.asarray(image).copy()


def colour_of(agent: int) -> Colour:
    """Return the colour of an agent, the same in every image."""
    red, green, blue = colorsys.hsv_to_rgb(agent * _GOLDEN % 1.0, 0.75, (0.9, 0.7)[agent % 2])
    return round(255 * red), round(255 * green), round(255 * blue)


def _ground(obstacles: np.ndarray, cell: int) -> np.ndarray:
    wide = np.kron(obstacles, np.ones((cell, cell), np.bool_))
    ground = np.empty((*wide.shape, 3), np.uint8)
    ground[:] = _GROUND
    ground[::cell] = ground[:, ::cell] = _GRID
    ground[wide] = _OBSTACLE
    return ground


def _middles(cells: np.ndarray, cell: int) -> list[Point]:
    return [(column * cell + cell // 2, row * cell + cell // 2) for row, column in cells.tolist()]


def _box(middle: Point, reach: int) -> tuple[int, int, int, int]:
    return middle[0] - reach, middle[1] - reach, middle[0] + reach, middle[1] + reach


def _communicating_pairs(comm_mask: np.ndarray | None) -> list[tuple[int, int]]:
    """Return the pairs of agents of which at least one receives messages from the other, each pair once."""
    if comm_mask is None:
        return []
    ones, others = np.nonzero(np.triu(comm_mask | comm_mask.T, 1))
    return list(zip(ones.tolist(), others.tolist(), strict=True))


def _pale(colour: Colour) -> Colour:
    red, green, blue = ((part + 2 * 255) // 3 for part in colour)
    return red, green, blue

"""Compiled resets of pathfinding worlds: random or given obstacles, starts and goals, and shortest paths to the goals.

Randomness comes from one 64-bit counter per world (SplitMix64), so a random world is a function of its counter alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np

from steppe.core.system.random_words import random_below, splitmix64

NumbaInt = Any  # an int64, or a uint64 if it is called a word: numba scalars are not ints to a type checker

OBSTACLE, OUTSIDE, AGENT = 1, 2, 4  # bits of a cell
BLOCKED = OBSTACLE | OUTSIDE
VISITED = 128  # in `ways`: this cell is final, or blocked
MAX_MAP_TRIES = 1000  # attempts to draw a map with enough free cells for starts and goals

_GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_LOWEST, _LIKELIEST, _HIGHEST = 0.0, 0.33, 0.5  # of the triangular density


class PathfindingState(NamedTuple):
    """State of B worlds with up to N agents and P padded cells."""

    cells: np.ndarray  # uint8 [B, P]: OBSTACLE, OUTSIDE, AGENT
    who: np.ndarray  # int16 [B, P]: 1 + index of the agent on the cell, 0 for none
    closer_moves: np.ndarray  # uint8 [B, N, P]: bit k is set if action k + 1 leads closer to the agent's goal
    at: np.ndarray  # int64 [B, N]: the agent's cell
    goal: np.ndarray  # int64 [B, N]: the cell of its goal
    episode: np.ndarray  # int64 [B, 4]: agents, height, width, steps taken
    wanted: np.ndarray  # int64 [B, 3]: agents, height, width of the next episode
    words: np.ndarray  # uint64 [B]: random counters


class MapPool(NamedTuple):
    """Source of maps: S given ones, or random maps if S is 0."""

    density: float  # of obstacles; negative for the triangular distribution
    maps: np.ndarray  # uint8 [S, height, width]: 1 for an obstacle
    sizes: np.ndarray  # int64 [S, 2]: height, width
    starts: np.ndarray  # int64 [S, N]: padded cells, −1 for random ones
    goals: np.ndarray  # int64 [S, N]


class PathfindingWorkspace(NamedTuple):
    """Geometry of the padded map, and scratch memory, shared by all worlds."""

    stride: int
    pad: int
    offsets: np.ndarray  # int64 [5]: change of the cell index by each action
    claims: np.ndarray  # int64 [P]: 1 + index of the agent that may enter; 0 between steps
    target: np.ndarray  # int64 [N]
    standing: np.ndarray  # int64 [N]
    rows: np.ndarray  # int64 [N]
    columns: np.ndarray  # int64 [N]
    order: np.ndarray  # int64 [P]: cells, component by component
    first: np.ndarray  # int64 [P]: by cell, index in `order` where its component begins; negative if it has none
    until: np.ndarray  # int64 [P]: by index where a component begins, index where it ends
    drawn: np.ndarray  # int64 [P]: shuffled indices into `order`
    used: np.ndarray  # int64 [P]: by index where a component begins, number of its cells that are goals


@numba.njit(cache=True, nogil=True)
def reset_world(state: PathfindingState, pool: MapPool, workspace: PathfindingWorkspace, b: NumbaInt) -> bool:
    """Start an episode in one world; return False if no map had enough free cells for its agents."""
    num_agents = state.wanted[b, 0]
    state.episode[b, 0], state.episode[b, 3] = num_agents, 0
    for _ in range(MAX_MAP_TRIES):
        if len(pool.maps) > 0:
            which = random_below(_word(state.words, b), len(pool.maps))
            _copy_obstacles(state, workspace, b, pool.sizes[which, 0], pool.sizes[which, 1], pool.maps[which])
        else:
            which = -1
            _draw_obstacles(state, workspace, b, pool.density)
        if which >= 0 and pool.starts[which, 0] >= 0:
            state.at[b, :num_agents] = pool.starts[which, :num_agents]
            state.goal[b, :num_agents] = pool.goals[which, :num_agents]
            place_agents(state, workspace, b)
            return True
        num_cells = _components(state.cells[b], state.episode[b], workspace)
        if num_cells >= num_agents:
            _draw_starts_and_goals(state, workspace, b, num_cells)
            place_agents(state, workspace, b)
            return True
    return False


@numba.njit(cache=True, nogil=True)
def place_agents(state: PathfindingState, workspace: PathfindingWorkspace, b: NumbaInt) -> None:
    """Place the agents of one world and compute `closer_moves`; its obstacles, `at` and `goal` must be set."""
    cells, who = state.cells[b], state.who[b]
    who[:] = 0
    for cell in range(len(cells)):
        cells[cell] &= BLOCKED
    for i in range(state.episode[b, 0]):
        _find_closer_moves(cells, state.closer_moves[b, i], state.goal[b, i], workspace.stride, workspace.order)
    for i in range(state.episode[b, 0]):
        cells[state.at[b, i]] |= AGENT
        who[state.at[b, i]] = i + 1


@numba.njit(cache=True, nogil=True)
def _find_closer_moves(
    cells: np.ndarray, ways: np.ndarray, goal: NumbaInt, stride: NumbaInt, queue: np.ndarray
) -> None:
    """Mark the moves that lead closer to the goal, by breadth-first search from the goal.

    Distances of neighbours differ by exactly one, so a neighbour that is not visited yet is farther away. The loop has
    no branch that depends on the map, because it would be mispredicted: a neighbour that is already known is also
    written to the end of the queue, where the next one overwrites it. Unsigned indices need no wraparound check.
    """
    for cell in range(len(cells)):
        ways[cell] = VISITED if cells[cell] & BLOCKED else 0
    row, one = np.uint64(stride), np.uint64(1)
    queue[0] = goal
    head, tail = 0, 1
    while head < tail:
        here = np.uint64(queue[np.uint64(head)])
        head += 1
        ways[here] |= VISITED
        lower, upper, right, left = here + row, here - row, here + one, here - one
        known_lower, known_upper, known_right, known_left = ways[lower], ways[upper], ways[right], ways[left]
        ways[lower] = known_lower | (~known_lower >> 7 & 1)  # from the cell below, up leads closer
        ways[upper] = known_upper | (~known_upper >> 7 & 1) << 1
        ways[right] = known_right | (~known_right >> 7 & 1) << 2
        ways[left] = known_left | (~known_left >> 7 & 1) << 3
        queue[np.uint64(tail)] = lower
        tail += known_lower == 0
        queue[np.uint64(tail)] = upper
        tail += known_upper == 0
        queue[np.uint64(tail)] = right
        tail += known_right == 0
        queue[np.uint64(tail)] = left
        tail += known_left == 0


@numba.njit(cache=True, nogil=True)
def _draw_obstacles(state: PathfindingState, workspace: PathfindingWorkspace, b: NumbaInt, density: float) -> None:
    """Draw random obstacles on a map of the requested size."""
    height, width = state.wanted[b, 1], state.wanted[b, 2]
    state.episode[b, 1], state.episode[b, 2] = height, width
    if density < 0:
        density = _triangular(_uniform(state.words, b))
    cells = state.cells[b]
    cells[:] = OUTSIDE
    for row in range(height):
        begin = (row + workspace.pad) * workspace.stride + workspace.pad
        for column in range(width):
            cells[begin + column] = OBSTACLE if _uniform(state.words, b) < density else 0


@numba.njit(cache=True, nogil=True)
def _copy_obstacles(
    state: PathfindingState,
    workspace: PathfindingWorkspace,
    b: NumbaInt,
    height: NumbaInt,
    width: NumbaInt,
    given: np.ndarray,
) -> None:
    """Copy the obstacles of a given map."""
    state.episode[b, 1], state.episode[b, 2] = height, width
    cells = state.cells[b]
    cells[:] = OUTSIDE
    for row in range(height):
        begin = (row + workspace.pad) * workspace.stride + workspace.pad
        for column in range(width):
            cells[begin + column] = given[row, column]


@numba.njit(cache=True, nogil=True)
def _components(cells: np.ndarray, episode: np.ndarray, workspace: PathfindingWorkspace) -> NumbaInt:
    """Fill `order`, `first` and `until`; return the number of cells in components of at least two cells.

    An isolated cell cannot hold both a start and a different goal.
    """
    order, first, until, offsets = workspace.order, workspace.first, workspace.until, workspace.offsets
    first[:] = -1
    count = 0
    for row in range(episode[1]):
        for column in range(episode[2]):
            cell = (row + workspace.pad) * workspace.stride + workspace.pad + column
            if cells[cell] & BLOCKED or first[cell] >= 0:
                continue
            begin = head = count
            order[count], first[cell] = cell, begin
            count += 1
            while head < count:
                for k in range(1, 5):
                    there = order[head] + offsets[k]
                    if not cells[there] & BLOCKED and first[there] < 0:
                        order[count], first[there] = there, begin
                        count += 1
                head += 1
            until[begin] = count
            if count == begin + 1:
                count, first[cell] = begin, -1
    return count


@numba.njit(cache=True, nogil=True)
def _draw_starts_and_goals(
    state: PathfindingState, workspace: PathfindingWorkspace, b: NumbaInt, num_cells: NumbaInt
) -> None:
    """Draw distinct starts, and distinct goals, each in the component of its start but not on it."""
    order, first, until, drawn, used = (
        workspace.order,
        workspace.first,
        workspace.until,
        workspace.drawn,
        workspace.used,
    )
    at, goal, words = state.at[b], state.goal[b], state.words
    num_agents = state.episode[b, 0]
    for index in range(num_cells):
        drawn[index], used[index] = index, 0
    for i in range(num_agents):
        other = i + random_below(_word(words, b), num_cells - i)
        drawn[i], drawn[other] = drawn[other], drawn[i]
        at[i] = order[drawn[i]]
    for index in range(num_cells):
        drawn[index] = index
    for i in range(num_agents):
        begin = first[at[i]]
        low, high = begin + used[begin], until[begin]
        used[begin] += 1
        index = low + random_below(_word(words, b), high - low)
        while order[drawn[index]] == at[i] and high - low > 1:
            index = low + random_below(_word(words, b), high - low)
        drawn[low], drawn[index] = drawn[index], drawn[low]
        goal[i] = order[drawn[low]]
        if goal[i] == at[i]:  # the last free cell of a full component: swap goals with another agent in it
            for j in range(i):
                if first[at[j]] == begin:
                    goal[i], goal[j] = goal[j], goal[i]
                    break


@numba.njit(cache=True, nogil=True, forceinline=True)
def _word(words: np.ndarray, b: NumbaInt) -> NumbaInt:
    word = splitmix64(words[b])
    words[b] += _GOLDEN_GAMMA
    return word


@numba.njit(cache=True, nogil=True)
def _uniform(words: np.ndarray, b: NumbaInt) -> NumbaInt:
    """Return a uniform random number in [0, 1)."""
    return np.float64(_word(words, b) >> np.uint64(11)) * 2.0**-53


@numba.njit(cache=True, nogil=True)
def _triangular(uniform: float) -> NumbaInt:
    """Return an obstacle density from the triangular distribution, by its inverse CDF."""
    span = _HIGHEST - _LOWEST
    if uniform < (_LIKELIEST - _LOWEST) / span:
        return _LOWEST + np.sqrt(uniform * span * (_LIKELIEST - _LOWEST))
    return _HIGHEST - np.sqrt((1.0 - uniform) * span * (_HIGHEST - _LIKELIEST))

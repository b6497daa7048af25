"""Compiled beginnings of pathfinding episodes: obstacles, starts and goals by chance or as given, and the ways to goals.

Chance comes from one 64-bit word per world that counts on (SplitMix64), so a world is a function of its word alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np

from steppe.core.play import random_below, splitmix64

NumbaInt = Any  # an int64, or a uint64 where it is called a word: numba's scalars are no ints to a type checker

OBSTACLE, OUTSIDE, AGENT = 1, 2, 4  # bits of a cell
BLOCKED = OBSTACLE | OUTSIDE
VISITED = 128  # in `ways`: nothing more will be found out about this cell
MAX_MAP_TRIES = 1000  # tries until starts and goals find room

_GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_LOWEST, _LIKELIEST, _HIGHEST = 0.0, 0.33, 0.5  # of the triangular density


class PathfindingState(NamedTuple):
    """All that B worlds with room for N agents and P padded cells are."""

    cells: np.ndarray  # uint8 [B, P]: OBSTACLE, OUTSIDE, AGENT
    who: np.ndarray  # int16 [B, P]: 1 + the agent that stands there
    closer_moves: np.ndarray  # uint8 [B, N, P]: bit k is set where action k + 1 leads nearer to the agent's goal
    at: np.ndarray  # int64 [B, N]: the agent's cell
    goal: np.ndarray  # int64 [B, N]: its goal's
    episode: np.ndarray  # int64 [B, 4]: agents, height, width, steps taken
    wanted: np.ndarray  # int64 [B, 3]: agents, height, width of the next episode
    words: np.ndarray  # uint64 [B]: chance


class MapPool(NamedTuple):
    """Where maps come from: S given ones, or chance where there are none."""

    density: float  # of obstacles; negative for the triangular distribution
    maps: np.ndarray  # uint8 [S, height, width]: 1 for an obstacle
    sizes: np.ndarray  # int64 [S, 2]: height, width
    starts: np.ndarray  # int64 [S, N]: padded cells, −1 where chance decides
    goals: np.ndarray  # int64 [S, N]


class PathfindingWorkspace(NamedTuple):
    """Numbers of the padded map, and memory to work in, shared by all worlds."""

    stride: int
    pad: int
    offsets: np.ndarray  # int64 [5]: what an action adds to a cell
    claims: np.ndarray  # int64 [P]: 1 + who may enter; 0 between steps
    target: np.ndarray  # int64 [N]
    standing: np.ndarray  # int64 [N]
    rows: np.ndarray  # int64 [N]
    columns: np.ndarray  # int64 [N]
    order: np.ndarray  # int64 [P]: cells, component by component
    first: np.ndarray  # int64 [P]: of a cell, where in `order` its component begins; negative where it has none
    until: np.ndarray  # int64 [P]: of where a component begins, where it ends
    drawn: np.ndarray  # int64 [P]: places in `order`, mixed
    used: np.ndarray  # int64 [P]: of where a component begins, how many of its cells are goals


@numba.njit(cache=True, nogil=True)
def reset_world(state: PathfindingState, pool: MapPool, workspace: PathfindingWorkspace, b: NumbaInt) -> bool:
    """Begin an episode in one world; False if no map had room for its agents."""
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
    """Put the agents of one world on their cells and find the ways to their goals; its obstacles, `at`, `goal` are known."""
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
    """Breadth first from the goal. Neighbours' distances differ by one, so those not settled yet are further away.

    No branch depends on the map, since none could be predicted: a neighbour that is known already is written to the end
    of the queue too, where the next one replaces it. Indices without a sign are known not to count from the end.
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
        ways[lower] = known_lower | (~known_lower >> 7 & 1)  # from below, the way is up
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
    """Obstacles by chance, on a map of the wanted size."""
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
    """Obstacles as given."""
    state.episode[b, 1], state.episode[b, 2] = height, width
    cells = state.cells[b]
    cells[:] = OUTSIDE
    for row in range(height):
        begin = (row + workspace.pad) * workspace.stride + workspace.pad
        for column in range(width):
            cells[begin + column] = given[row, column]


@numba.njit(cache=True, nogil=True)
def _components(cells: np.ndarray, episode: np.ndarray, workspace: PathfindingWorkspace) -> NumbaInt:
    """Fill `order`, `first` and `until`; how many cells have a neighbour: alone, a cell can be no start with a goal."""
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
    """Starts anywhere, no two the same; goals in the start's component, no two the same and none one's own start."""
    order, first, until, drawn, used = (
        workspace.order,
        workspace.first,
        workspace.until,
        workspace.drawn,
        workspace.used,
    )
    at, goal, words = state.at[b], state.goal[b], state.words
    num_agents = state.episode[b, 0]
    for place in range(num_cells):
        drawn[place], used[place] = place, 0
    for i in range(num_agents):
        other = i + random_below(_word(words, b), num_cells - i)
        drawn[i], drawn[other] = drawn[other], drawn[i]
        at[i] = order[drawn[i]]
    for place in range(num_cells):
        drawn[place] = place
    for i in range(num_agents):
        begin = first[at[i]]
        low, high = begin + used[begin], until[begin]
        used[begin] += 1
        place = low + random_below(_word(words, b), high - low)
        while order[drawn[place]] == at[i] and high - low > 1:
            place = low + random_below(_word(words, b), high - low)
        drawn[low], drawn[place] = drawn[place], drawn[low]
        goal[i] = order[drawn[low]]
        if goal[i] == at[i]:  # the last free cell of a full component: change goals with whoever else is in it
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
    """A number from [0, 1)."""
    return np.float64(_word(words, b) >> np.uint64(11)) * 2.0**-53


@numba.njit(cache=True, nogil=True)
def _triangular(uniform: float) -> NumbaInt:
    """A density, by the inverse of its distribution function."""
    span = _HIGHEST - _LOWEST
    if uniform < (_LIKELIEST - _LOWEST) / span:
        return _LOWEST + np.sqrt(uniform * span * (_LIKELIEST - _LOWEST))
    return _HIGHEST - np.sqrt((1.0 - uniform) * span * (_HIGHEST - _LIKELIEST))

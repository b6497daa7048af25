"""Compiled steps of B pathfinding worlds: moves, rewards, observations and communication masks.

A map is padded by the radius of the view, so a view never exceeds it; cells are indexed row by row over the padded map.
episode_kernels.py starts episodes; worlds.py allocates memory, validates arguments and raises errors.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np

from steppe.envs.pathfinding.episode_kernels import (
    AGENT,
    BLOCKED,
    MapPool,
    PathfindingState,
    PathfindingWorkspace,
    reset_world,
)

NumbaInt = Any  # an int64: numba scalars are not ints to a type checker

STAY, UP, DOWN, LEFT, RIGHT = range(5)
NUM_ACTIONS, NUM_PLANES = 5, 6
NO_FAULT, BAD_ACTION, NO_SPACE = 0, 1, 2

_USUAL_VIEW = 9
_STEP = np.float32(-0.075)
_COLLISION = np.float32(-0.5)
_ALL_ARRIVED_REWARD = np.float32(3.0)
_INFINITE_DISTANCE = 1 << 60
_LOWEST_BITS = np.uint64(0x0101010101010101)


class PathfindingOutput(NamedTuple):
    """Output of a step; rows of absent agents are 0. `final_…` is only written for worlds whose episode ended."""

    obs: np.ndarray  # uint8 [B, N, 6, view, view]
    comm_mask: np.ndarray  # bool [B, N, N]: from which agents each receives messages, itself included
    rewards: np.ndarray  # float32 [B, N]
    terminated: np.ndarray  # bool [B]: all agents are at their goals
    truncated: np.ndarray  # bool [B]: the step limit is reached
    final_obs: np.ndarray  # uint8 [B, N, 6, view, view]
    final_mask: np.ndarray  # bool [B, N, N]


class PathfindingSettings(NamedTuple):
    """Constants of a PathfindingWorlds."""

    window: int  # side length of an agent's view in cells (numba reserves the name `view`)
    max_steps: int
    autoreset: bool
    progress: float  # added to the reward of a step closer to the goal, subtracted for a step away


@numba.njit(cache=True, nogil=True)
def reset_worlds(
    state: PathfindingState,
    pool: MapPool,
    workspace: PathfindingWorkspace,
    limits: PathfindingSettings,
    chosen: np.ndarray,
    output: PathfindingOutput,
) -> tuple[NumbaInt, NumbaInt]:
    """Start an episode in the chosen worlds and write the observations of all; return a fault code and its world.

    After a fault, only the worlds before the faulty one are done.
    """
    for b in range(len(chosen)):
        if chosen[b] and not reset_world(state, pool, workspace, b):
            return NO_SPACE, b
        _write_observations(state, workspace, limits.window, b, output.obs, output.comm_mask)
    return NO_FAULT, 0


@numba.njit(cache=True, nogil=True)
def step_worlds(
    state: PathfindingState,
    pool: MapPool,
    workspace: PathfindingWorkspace,
    limits: PathfindingSettings,
    actions: np.ndarray,
    output: PathfindingOutput,
) -> tuple[NumbaInt, NumbaInt]:
    """Move every agent once; return a fault code and its world. Actions are checked before any agent moves."""
    for b in range(len(actions)):
        for i in range(state.episode[b, 0]):
            if not 0 <= actions[b, i] < NUM_ACTIONS:
                return BAD_ACTION, b
    for b in range(len(actions)):
        n = state.episode[b, 0]
        arrived = _move_agents(state, workspace, limits.progress, b, n, actions[b], output.rewards[b])
        if n < output.rewards.shape[1]:
            output.rewards[b, n:] = np.float32(0)
        state.episode[b, 3] += 1
        output.terminated[b] = arrived
        output.truncated[b] = not arrived and state.episode[b, 3] >= limits.max_steps
        if limits.autoreset and (output.terminated[b] or output.truncated[b]):
            _write_observations(state, workspace, limits.window, b, output.final_obs, output.final_mask)
            if not reset_world(state, pool, workspace, b):
                return NO_SPACE, b
        _write_observations(state, workspace, limits.window, b, output.obs, output.comm_mask)
    return NO_FAULT, 0


@numba.njit(cache=True, nogil=True)
def _move_agents(
    state: PathfindingState,
    workspace: PathfindingWorkspace,
    progress: float,
    b: NumbaInt,
    n: NumbaInt,
    actions: np.ndarray,
    rewards: np.ndarray,
) -> bool:
    """Move the agents of one world and resolve conflicts; return whether all are at their goals."""
    cells, who, at, goal = state.cells[b], state.who[b], state.at[b], state.goal[b]
    target, offsets = workspace.target, workspace.offsets
    for i in range(n):
        action, here = actions[i], at[i]
        there = here + offsets[action]
        rewards[i] = _STEP
        if action == STAY and here == goal[i]:
            rewards[i] = np.float32(0)
        elif cells[there] & BLOCKED:
            rewards[i] = _COLLISION
            there = here
        target[i] = there
    for i in range(n):
        other = who[target[i]] - 1
        if other > i and target[other] == at[i]:  # a swap: if agent i stays, other == i
            for k in (i, other):
                target[k], rewards[k] = at[k], _COLLISION
    _resolve_conflicts(workspace, n, at, actions, rewards)
    arrived = True
    for i in range(n):
        cells[at[i]] &= BLOCKED
        who[at[i]] = 0
        arrived &= target[i] == goal[i]
    if arrived:
        rewards[:n] = _ALL_ARRIVED_REWARD
    if progress != 0.0:
        _reward_progress(state.closer_moves[b], at, target, actions, progress, rewards[:n])
    for i in range(n):
        here = target[i]
        at[i] = here
        cells[here] |= AGENT
        who[here] = i + 1
    return arrived


@numba.njit(cache=True, nogil=True)
def _reward_progress(
    ways: np.ndarray, at: np.ndarray, target: np.ndarray, actions: np.ndarray, progress: float, rewards: np.ndarray
) -> None:
    """Add the progress reward: a move leads closer to the goal or away, as distances of neighbours always differ."""
    for i in range(len(rewards)):
        if target[i] != at[i]:
            nearer = ways[i, at[i]] >> (actions[i] - UP) & 1
            rewards[i] += np.float32(progress if nearer else -progress)


@numba.njit(cache=True, nogil=True)
def _resolve_conflicts(
    workspace: PathfindingWorkspace, n: NumbaInt, at: np.ndarray, actions: np.ndarray, rewards: np.ndarray
) -> None:
    """Admit at most one agent to each cell.

    The agent with the lowest index claims a cell. An agent that does not move, by choice or because it was sent back,
    cancels the claim on its own cell, and the claimant is sent back too. So each agent is handled once, and the result
    does not depend on the order.
    """
    target, claims, standing = workspace.target, workspace.claims, workspace.standing
    top = 0
    for i in range(n):
        if target[i] != at[i] and claims[target[i]] == 0:
            claims[target[i]] = i + 1
            continue
        if target[i] != at[i]:
            target[i], rewards[i] = at[i], _COLLISION
        standing[top] = i
        top += 1
    while top > 0:
        top -= 1
        here = at[standing[top]]
        claimant = claims[here] - 1
        if claimant >= 0:
            target[claimant], rewards[claimant] = at[claimant], _COLLISION
            standing[top] = claimant
            top += 1
    for i in range(n):
        claims[at[i] + workspace.offsets[actions[i]]] = 0


@numba.njit(cache=True, nogil=True)
def _write_observations(
    state: PathfindingState,
    workspace: PathfindingWorkspace,
    view: NumbaInt,
    b: NumbaInt,
    obs: np.ndarray,
    masks: np.ndarray,
) -> None:
    """Write the observations and the communication mask of one world."""
    n, stride, num_cells, area = state.episode[b, 0], workspace.stride, state.cells.shape[1], view * view
    cells, ways, out = state.cells.reshape(-1), state.closer_moves.reshape(-1), obs.reshape(-1)
    for i in range(n):
        agent = b * obs.shape[1] + i
        corner = state.at[b, i] - view // 2 * (stride + 1)
        ground, way, offset = b * num_cells + corner, agent * num_cells + corner, agent * NUM_PLANES * area
        if view == _USUAL_VIEW:  # a constant lets the compiler unroll the rows
            _copy_view(cells, ways, out, ground, way, offset, stride, _USUAL_VIEW)
        else:
            _copy_view(cells, ways, out, ground, way, offset, stride, view)
    if n < obs.shape[1]:  # skip the assignment: even an empty slice has a cost
        obs[b, n:] = 0
    _write_comm_mask(state.at[b], n, stride, view // 2, workspace, masks[b])


@numba.njit(cache=True, nogil=True, forceinline=True)
def _copy_view(
    cells: np.ndarray,
    ways: np.ndarray,
    out: np.ndarray,
    ground: NumbaInt,
    way: NumbaInt,
    offset: NumbaInt,
    stride: NumbaInt,
    view: NumbaInt,
) -> None:
    """Copy a view from `ground` in `cells` and `way` in `ways` to `place` in `out`, eight cells at a time."""
    area = np.uint64(view * view)
    for row in range(view):
        source, other = np.uint64(ground + row * stride), np.uint64(way + row * stride)
        line = np.uint64(offset + row * view)
        for first in range(0, view - 7, 8):
            here, there = _eight(cells, source + np.uint64(first)), _eight(ways, other + np.uint64(first))
            target = line + np.uint64(first)
            _put_eight(out, target, here >> np.uint64(2))
            _put_eight(out, target + area, here)
            for plane in range(4):
                _put_eight(out, target + np.uint64(2 + plane) * area, there >> np.uint64(plane))
        for column in range(view // 8 * 8, view):
            seen, nearer = cells[source + np.uint64(column)], ways[other + np.uint64(column)]
            target = line + np.uint64(column)
            out[target] = seen >> 2 & 1
            out[target + area] = seen & 1
            for plane in range(4):
                out[target + np.uint64(2 + plane) * area] = nearer >> plane & 1
    out[np.uint64(offset) + area // np.uint64(2)] = 0  # the agent itself


@numba.njit(cache=True, nogil=True, forceinline=True)
def _eight(cells: np.ndarray, begin: NumbaInt) -> NumbaInt:
    """Return eight cells as one word, which compiles to one load; unsigned indices need no wraparound check."""
    word = np.uint64(0)
    for k in range(8):
        word |= np.uint64(cells[begin + np.uint64(k)]) << np.uint64(8 * k)
    return word


@numba.njit(cache=True, nogil=True, forceinline=True)
def _put_eight(out: np.ndarray, begin: NumbaInt, word: NumbaInt) -> None:
    """Write the lowest bits of eight cells with one store."""
    word &= _LOWEST_BITS
    for k in range(8):
        out[begin + np.uint64(k)] = np.uint8(word >> np.uint64(8 * k) & np.uint64(255))


@numba.njit(cache=True, nogil=True)
def _write_comm_mask(
    at: np.ndarray, n: NumbaInt, stride: NumbaInt, half: NumbaInt, workspace: PathfindingWorkspace, mask: np.ndarray
) -> None:
    """Let each agent receive messages from itself and, of the two nearest agents on the map, those within its view."""
    rows, columns = workspace.rows, workspace.columns
    for i in range(n):
        rows[i], columns[i] = at[i] // stride, at[i] % stride
    for i in range(len(mask)):
        for j in range(len(mask)):
            mask[i, j] = i == j and i < n
    for i in range(n):
        first = second = -1
        near = further = _INFINITE_DISTANCE
        row, column = rows[i], columns[i]
        for j in range(n):
            down, right = rows[j] - row, columns[j] - column
            distance = down * down + right * right
            if distance < further and j != i:
                if distance < near:
                    second, further = first, near
                    first, near = j, distance
                else:
                    second, further = j, distance
        for j in (first, second):
            if j >= 0 and abs(rows[j] - row) <= half and abs(columns[j] - column) <= half:
                mask[i, j] = True

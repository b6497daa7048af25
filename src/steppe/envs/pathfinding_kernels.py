"""Compiled pathfinding: agents that move in B worlds at once, what each sees, and whom each hears.

A map is padded by the radius of the view, so a window never leaves it, and cells are numbered row by row over the padded
map. How an episode begins is for pathfinding_beginning.py; memory, arguments and errors are for pathfinding.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np

from steppe.envs.pathfinding_beginning import AGENT, BLOCKED, Pool, Room, State, begin_world

Whole = Any  # an int64: numba's scalars are no ints to a type checker

STAY, UP, DOWN, LEFT, RIGHT = range(5)
NUM_ACTIONS, NUM_PLANES = 5, 6
NO_FAULT, BAD_ACTION, NO_ROOM = 0, 1, 2

_USUAL_VIEW = 9
_STEP = np.float32(-0.075)
_COLLISION = np.float32(-0.5)
_ARRIVED = np.float32(3.0)
_FAR = 1 << 60


class Seen(NamedTuple):
    """What a step writes; rows of agents that a world has not are 0. `final_…` is only written where an episode ended."""

    obs: np.ndarray  # uint8 [B, N, 6, view, view]
    comm_mask: np.ndarray  # bool [B, N, N]: whom each agent hears, itself included
    rewards: np.ndarray  # float32 [B, N]
    terminated: np.ndarray  # bool [B]: everyone is at its goal
    truncated: np.ndarray  # bool [B]: the steps are used up
    final_obs: np.ndarray  # uint8 [B, N, 6, view, view]
    final_mask: np.ndarray  # bool [B, N, N]


class Limits(NamedTuple):
    """Numbers that stay the same for as long as the worlds live."""

    window: int  # cells that an agent sees each way (numba reserves the name `view`)
    max_steps: int
    autoreset: bool


@numba.njit(cache=True, nogil=True)
def begin_worlds(
    state: State, pool: Pool, room: Room, limits: Limits, chosen: np.ndarray, seen: Seen
) -> tuple[Whole, Whole]:
    """Begin an episode in the chosen worlds and write what is seen in all; a fault and its world, the worlds before done."""
    for b in range(len(chosen)):
        if chosen[b] and not begin_world(state, pool, room, b):
            return NO_ROOM, b
        _perceive(state, room, limits.window, b, seen.obs, seen.comm_mask)
    return NO_FAULT, 0


@numba.njit(cache=True, nogil=True)
def step_worlds(
    state: State, pool: Pool, room: Room, limits: Limits, actions: np.ndarray, seen: Seen
) -> tuple[Whole, Whole]:
    """Move everyone once; a fault and the world it is in. A bad action is found before anything has moved."""
    for b in range(len(actions)):
        for i in range(state.episode[b, 0]):
            if not 0 <= actions[b, i] < NUM_ACTIONS:
                return BAD_ACTION, b
    for b in range(len(actions)):
        n = state.episode[b, 0]
        arrived = _move(state, room, b, n, actions[b], seen.rewards[b])
        seen.rewards[b, n:] = np.float32(0)
        state.episode[b, 3] += 1
        seen.terminated[b] = arrived
        seen.truncated[b] = not arrived and state.episode[b, 3] >= limits.max_steps
        if limits.autoreset and (seen.terminated[b] or seen.truncated[b]):
            _perceive(state, room, limits.window, b, seen.final_obs, seen.final_mask)
            if not begin_world(state, pool, room, b):
                return NO_ROOM, b
        _perceive(state, room, limits.window, b, seen.obs, seen.comm_mask)
    return NO_FAULT, 0


@numba.njit(cache=True, nogil=True)
def _move(state: State, room: Room, b: Whole, n: Whole, actions: np.ndarray, rewards: np.ndarray) -> bool:
    """Move the agents of one world and settle their conflicts; whether all are at their goals."""
    cells, who, at, goal = state.cells[b], state.who[b], state.at[b], state.goal[b]
    target, offsets = room.target, room.offsets
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
        if other > i and target[other] == at[i]:  # an agent that stays meets itself here, so both are moving
            for k in (i, other):
                target[k], rewards[k] = at[k], _COLLISION
    _settle(room, n, at, actions, rewards)
    for i in range(n):
        cells[at[i]] &= ~AGENT
        who[at[i]] = 0
    arrived = True
    for i in range(n):
        here = target[i]
        at[i] = here
        cells[here] |= AGENT
        who[here] = i + 1
        arrived &= here == goal[i]
    if arrived:
        rewards[:n] = _ARRIVED
    return arrived


@numba.njit(cache=True, nogil=True)
def _settle(room: Room, n: Whole, at: np.ndarray, actions: np.ndarray, rewards: np.ndarray) -> None:
    """Let one agent into each cell at most.

    The lowest id has a claim to a cell; whoever stands, from the beginning or because it was sent back, breaks the claim
    to its cell, and the claimant stands too. So everyone is looked at once, in whatever order, with the same result.
    """
    target, claims, standing = room.target, room.claims, room.standing
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
        claims[at[i] + room.offsets[actions[i]]] = 0


@numba.njit(cache=True, nogil=True)
def _perceive(state: State, room: Room, view: Whole, b: Whole, obs: np.ndarray, masks: np.ndarray) -> None:
    """Write what the agents of one world see and whom they hear."""
    n, stride = state.episode[b, 0], room.stride
    flat = obs[b].reshape(obs.shape[1], NUM_PLANES * view * view)
    for i in range(n):
        if view == _USUAL_VIEW:  # a constant lets the compiler unroll the rows: twice as fast
            _look(state.cells[b], state.ways[b, i], state.at[b, i], stride, _USUAL_VIEW, flat[i])
        else:
            _look(state.cells[b], state.ways[b, i], state.at[b, i], stride, view, flat[i])
    flat[n:] = 0
    _hear(state.at[b], n, stride, view // 2, room, masks[b])


@numba.njit(cache=True, nogil=True, forceinline=True)
def _look(cells: np.ndarray, ways: np.ndarray, at: Whole, stride: Whole, view: Whole, out: np.ndarray) -> None:
    """Copy one window; indices without a sign spare the compiler the question whether they count from the end."""
    area, corner = np.uint64(view * view), np.uint64(at - view // 2 * (stride + 1))
    for row in range(view):
        source, line = corner + np.uint64(row * stride), np.uint64(row * view)
        for column in range(view):
            ground, way = cells[source + np.uint64(column)], ways[source + np.uint64(column)]
            place = line + np.uint64(column)
            out[place] = ground >> 2 & 1
            out[place + area] = ground & 1
            out[place + np.uint64(2) * area] = way & 1
            out[place + np.uint64(3) * area] = way >> 1 & 1
            out[place + np.uint64(4) * area] = way >> 2 & 1
            out[place + np.uint64(5) * area] = way >> 3 & 1
    out[area // np.uint64(2)] = 0


@numba.njit(cache=True, nogil=True)
def _hear(at: np.ndarray, n: Whole, stride: Whole, half: Whole, room: Room, mask: np.ndarray) -> None:
    """Everyone hears itself and, of the two agents nearest to it on the whole map, those within its view."""
    rows, columns = room.rows, room.columns
    for i in range(n):
        rows[i], columns[i] = at[i] // stride, at[i] % stride
    mask[:] = False
    for i in range(n):
        mask[i, i] = True
        first = second = -1
        near = further = _FAR
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

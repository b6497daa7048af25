"""Multi-agent pathfinding: B worlds of agents with one goal each, stepped by one compiled call.

`PathfindingWorlds` takes and returns plain arrays in preallocated memory. parallel.py is its PettingZoo interface,
vector.py its Gymnasium interface, and drawing.py renders it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from steppe.core.contracts.algorithm import Tree
from steppe.core.contracts.errors import CannotResume, ConfigError, WorldError
from steppe.envs.pathfinding.episode_kernels import (
    BLOCKED,
    OBSTACLE,
    OUTSIDE,
    MapPool,
    PathfindingState,
    PathfindingWorkspace,
    place_agents,
)
from steppe.envs.pathfinding.expert import greedy_walk
from steppe.envs.pathfinding.kernels import (
    BAD_ACTION,
    NO_FAULT,
    NUM_ACTIONS,
    NUM_PLANES,
    PathfindingOutput,
    PathfindingSettings,
    reset_worlds,
    step_worlds,
)
from steppe.envs.pathfinding.maps import Scenario, as_scenario, load_map, load_scenario

__all__ = ["PathfindingOutput", "PathfindingWorlds", "Scenario", "greedy_walk", "load_map", "load_scenario"]

Size = int | tuple[int, int]
Map = Scenario | np.ndarray | str | Path
_USUAL_SIZE = 40
_MAX_AGENTS = 2**15 - 1
_SAVED = ("at", "goal", "episode", "wanted", "words")


class PathfindingWorlds:
    """B worlds with up to N agents. A world whose episode ended is reset within the step, unless `autoreset` is False.

    Every episode has a new map: a random one of `size` (default 40 × 40) and obstacle `density` (default: drawn for
    each map from a triangular distribution between 0 and 0.5), or one of `maps` at random: scenarios, obstacle arrays,
    or paths of `.map` and `.scen` files. `progress` is added to the reward of a step closer to the goal and subtracted
    for a step away; over an episode this sums to `progress` times the distance gained, whatever the path. `reset` and
    `step` write into `into`, or into `seen`, which the next call overwrites. Not thread-safe.
    """

    def __init__(
        self,
        num_worlds: int,
        num_agents: int,
        *,
        size: Size | None = None,
        density: float | None = None,
        maps: Sequence[Map] = (),
        view: int = 9,
        max_steps: int = 256,
        progress: float = 0.0,
        autoreset: bool = True,
    ) -> None:
        if len(maps) > 0 and (size is not None or density is not None):
            raise ConfigError("size and density are for maps by chance: given maps have their own")
        shape = _shape(_USUAL_SIZE if size is None else size)
        _require_valid_arguments(num_worlds, num_agents, density, view, max_steps)
        if not isinstance(progress, int | float) or not math.isfinite(progress):
            raise ConfigError(f"progress={progress!r} must be a finite number: what a step nearer is worth besides")
        self.num_worlds, self.num_agents, self.view, self.max_steps = num_worlds, num_agents, view, max_steps
        self.scenarios = tuple(as_scenario(each, num_agents) for each in maps)
        self.density = density
        if self.scenarios:
            heights, widths = zip(*(each.obstacles.shape for each in self.scenarios), strict=True)
            shape = max(heights), max(widths)
        self.max_size = shape
        self._limits = PathfindingSettings(view, max_steps, autoreset, float(progress))
        self._room = _make_workspace(shape, num_agents, view)
        self._pool = _make_map_pool(self.scenarios, density, shape, num_agents, self._room)
        self._state = _make_state(num_worlds, num_agents, (shape[0] + view - 1) * self._room.stride)
        self._everywhere = np.ones(num_worlds, np.bool_)
        self._seeded = self._begun = False
        self.seen = self.blank()
        self._state.wanted[:, 1:] = shape
        self.assign(num_agents)

    @property
    def agents(self) -> np.ndarray:
        """The number of agents of each world in this episode [B]; they have the first rows."""
        return self._state.episode[:, 0].copy()

    @property
    def sizes(self) -> np.ndarray:
        """Height and width of each world's map in this episode [B, 2]."""
        return self._state.episode[:, 1:3].copy()

    @property
    def largest_stage(self) -> tuple[int, int] | None:
        """The maximum number of agents and side length in cells for `assign`; None if maps are given or not square."""
        height, width = self.max_size
        return None if self.scenarios or height != width else (self.num_agents, height)

    @property
    def elapsed(self) -> np.ndarray:
        """The number of steps so far in each world's episode [B]."""
        return self._state.episode[:, 3].copy()

    def blank(self) -> PathfindingOutput:
        """Allocate memory for the output of one step, owned by the caller."""
        worlds, agents, view = self.num_worlds, self.num_agents, self.view
        obs, masks = (worlds, agents, NUM_PLANES, view, view), (worlds, agents, agents)
        return PathfindingOutput(
            np.zeros(obs, np.uint8),
            np.zeros(masks, np.bool_),
            np.zeros((worlds, agents), np.float32),
            np.zeros(worlds, np.bool_),
            np.zeros(worlds, np.bool_),
            np.zeros(obs, np.uint8),
            np.zeros(masks, np.bool_),
        )

    def assign(self, num_agents: int | None = None, size: Size | None = None, *, worlds: Any = slice(None)) -> None:
        """Set the number of agents and the map size of the next episodes of `worlds` (an index)."""
        wanted = self._state.wanted[worlds].copy()
        if num_agents is not None:
            if not 1 <= num_agents <= self.num_agents:
                raise ConfigError(f"num_agents={num_agents}: these worlds were made for 1 to {self.num_agents} agents")
            wanted[..., 0] = num_agents
        if size is not None:
            shape = _shape(size)
            if self.scenarios:
                raise ConfigError(f"size={size}: given maps have a size of their own")
            if not all(side <= most for side, most in zip(shape, self.max_size, strict=True)):
                most = " × ".join(map(str, self.max_size))
                raise ConfigError(f"size={size}: these worlds were made for maps of up to {most} cells")
            wanted[..., 1:] = shape
        self._require_room(wanted.reshape(-1, 3))
        self._state.wanted[worlds] = wanted

    def reset(
        self,
        seed: int | np.random.SeedSequence | None = None,
        *,
        worlds: Any = None,
        into: PathfindingOutput | None = None,
    ) -> PathfindingOutput:
        """Start new episodes in all worlds or in `worlds` (an index), and write the observations of all worlds.

        With a seed, everything that follows depends on it alone (world b on the seed and b). Without one, the random
        streams continue.
        """
        seen = self._memory(into)
        if seed is not None or not self._seeded:
            sequence = seed if isinstance(seed, np.random.SeedSequence) else np.random.SeedSequence(seed)
            self._state.words[:] = sequence.generate_state(self.num_worlds, np.uint64)
            self._seeded = True
        chosen = self._everywhere
        if worlds is not None:
            self._require_reset()
            chosen = np.zeros(self.num_worlds, np.bool_)
            chosen[worlds] = True
        fault, world = reset_worlds(self._state, self._pool, self._room, self._limits, chosen, seen)
        self._check(fault, world)
        self._begun = True
        for array in (seen.rewards, seen.terminated, seen.truncated):
            array[chosen] = 0
        return seen

    def step(self, actions: np.ndarray, into: PathfindingOutput | None = None) -> PathfindingOutput:
        """Move every agent once: `actions` [B, N] are 0 to stay, 1 up, 2 down, 3 left, 4 right."""
        seen = self._memory(into)
        moves = np.ascontiguousarray(actions, np.int64)
        if moves.shape != (self.num_worlds, self.num_agents):
            raise ConfigError(f"actions have the shape {moves.shape}, not {(self.num_worlds, self.num_agents)}")
        if not self._begun:
            self._require_reset()
        fault, world = step_worlds(self._state, self._pool, self._room, self._limits, moves, seen)
        if fault != NO_FAULT:
            self._check(fault, world)
        return seen

    def place(self, world: int, scenario: Scenario, into: PathfindingOutput | None = None) -> PathfindingOutput:
        """Start an episode of the given scenario in one world; later episodes are not affected."""
        self._require_reset()
        seen = self._memory(into)
        if scenario.starts is None or scenario.goals is None:
            raise WorldError(f"{scenario.name} has no starts and goals to place agents by")
        if len(scenario.starts) > self.num_agents:
            raise WorldError(
                f"{scenario.name} has {len(scenario.starts)} agents, more than the {self.num_agents} made for"
            )
        height, width = scenario.obstacles.shape
        if height > self.max_size[0] or width > self.max_size[1]:
            raise WorldError(f"{scenario.name} has {height} × {width} cells, more than the worlds were made for")
        self._set_obstacles(world, scenario.obstacles)
        state, count = self._state, len(scenario.starts)
        state.episode[world] = count, height, width, 0
        state.at[world, :count] = _to_padded_cells(scenario.starts, self._room)
        state.goal[world, :count] = _to_padded_cells(scenario.goals, self._room)
        place_agents(state, self._room, world)
        return self._look(seen)

    def obstacles(self, world: int) -> np.ndarray:
        """Return the obstacles of one world, bool [height, width]."""
        return (self._crop_padding(self._state.cells[world], world) & OBSTACLE).astype(np.bool_)

    def positions(self, world: int) -> np.ndarray:
        """Return the positions of one world's agents [agents, 2]: row and column."""
        return self._places(self._state.at, world)

    def goals(self, world: int) -> np.ndarray:
        """Return the goals of one world's agents [agents, 2]: row and column."""
        return self._places(self._state.goal, world)

    def snapshot(self) -> Tree | None:
        """Return a copy of everything the next steps depend on; None before the first reset."""
        if not self._begun:
            return None
        state = self._state
        maps = np.packbits(state.cells & OBSTACLE, axis=1)
        return {"maps": maps} | {name: getattr(state, name).copy() for name in _SAVED}

    def restore(self, tree: Tree) -> PathfindingOutput:
        """Restore a `snapshot()` of worlds built with the same arguments, and write the observations into `seen`.

        Raises CannotResume.
        """
        state = self._state
        saved = {name: _fitting(tree, name, getattr(state, name)) for name in _SAVED}
        maps = _fitting(tree, "maps", np.packbits(state.cells, axis=1))
        self._require_valid_snapshot(saved)
        obstacles = np.unpackbits(maps, axis=1, count=state.cells.shape[1]).astype(np.bool_)
        self._begun = self._seeded = False  # until the whole snapshot is validated
        for name, array in saved.items():
            getattr(state, name)[:] = array
        for world in range(self.num_worlds):
            self._set_obstacles(world, self._crop_padding(obstacles[world], world))
            ends = np.concatenate(
                [state.at[world, : state.episode[world, 0]], state.goal[world, : state.episode[world, 0]]]
            )
            if (state.cells[world, ends] & BLOCKED).any():
                raise CannotResume("the snapshot has agents or goals where there is no free cell")
            place_agents(state, self._room, world)
        self._begun = self._seeded = True
        return self._look(self.seen)

    def _look(self, seen: PathfindingOutput) -> PathfindingOutput:
        nowhere = np.zeros(self.num_worlds, np.bool_)
        reset_worlds(self._state, self._pool, self._room, self._limits, nowhere, seen)
        return seen

    def _set_obstacles(self, world: int, obstacles: np.ndarray) -> None:
        height, width = obstacles.shape
        self._state.cells[world] = OUTSIDE
        grid = self._state.cells[world].reshape(-1, self._room.stride)
        pad = self._room.pad
        grid[pad : pad + height, pad : pad + width] = obstacles

    def _crop_padding(self, cells: np.ndarray, world: int) -> np.ndarray:
        _, height, width, _ = self._state.episode[world]
        pad = self._room.pad
        return cells.reshape(-1, self._room.stride)[pad : pad + height, pad : pad + width]

    def _places(self, cells: np.ndarray, world: int) -> np.ndarray:
        found = cells[world, : self._state.episode[world, 0]]
        return np.stack(np.divmod(found, self._room.stride), axis=1) - self._room.pad

    def _memory(self, into: PathfindingOutput | None) -> PathfindingOutput:
        if into is None:
            return self.seen
        for name, array, own in zip(PathfindingOutput._fields, into, self.seen, strict=True):
            if array.shape != own.shape or array.dtype != own.dtype or not array.flags.carray:
                raise ConfigError(f"into.{name} is {array.dtype}{array.shape}, not plain {own.dtype}{own.shape}")
        return into

    def _require_reset(self) -> None:
        if not self._begun:
            raise ConfigError("these worlds have not begun yet: call reset() first")

    def _check(self, fault: int, world: int) -> None:
        if fault == BAD_ACTION:
            raise ConfigError(f"an action in world {world} is not a number from 0 to {NUM_ACTIONS - 1}")
        if fault != NO_FAULT:
            self._begun = False
            agents, height, width = self._state.wanted[world].tolist()
            raise WorldError(
                f"{agents} agents found no room on any map of {height} × {width} cells: "
                "make maps larger, obstacles fewer, or agents fewer"
            )

    def _require_room(self, wanted: np.ndarray) -> None:
        """Raise WorldError if agents certainly exceed the free cells or tasks, before any map is drawn."""
        for agents, height, width in np.unique(wanted, axis=0).tolist():
            for each in self.scenarios:
                if each.num_agents < agents:
                    what = "free cells" if each.starts is None else "tasks"
                    raise WorldError(f"{agents} agents are more than the {each.num_agents} {what} of {each.name}")
            free = round(height * width * (1.0 - (self.density or 0.0)), 6)
            if not self.scenarios and (agents > free or height * width < 2):
                raise WorldError(
                    f"{agents} agents are more than the {int(free)} free cells of a map of {height} × {width}"
                    + (f" at density {self.density:g}" if self.density else "")
                )

    def _require_valid_snapshot(self, saved: dict[str, np.ndarray]) -> None:
        """Raise CannotResume for numbers out of range in a snapshot: compiled code does not check bounds."""
        episode, wanted, num_cells = saved["episode"], saved["wanted"], self._state.cells.shape[1]
        most = np.array([self.num_agents, *self.max_size])
        sound = all(((each[:, :3] >= 1) & (each[:, :3] <= most)).all() for each in (episode, wanted))
        sound = sound and all(((saved[name] >= 0) & (saved[name] < num_cells)).all() for name in ("at", "goal"))
        if not sound or (episode[:, 3] < 0).any():
            raise CannotResume("the snapshot has numbers that these worlds cannot have")


def _shape(size: Any) -> tuple[int, int]:
    sides = tuple(size) if isinstance(size, Sequence) else (size, size)
    if len(sides) != 2 or not all(isinstance(side, int | np.integer) and side >= 1 for side in sides):
        raise ConfigError(f"size={size} must be a whole number from 1, or two: height and width")
    return int(sides[0]), int(sides[1])


def _require_valid_arguments(
    num_worlds: int, num_agents: int, density: float | None, view: int, max_steps: int
) -> None:
    for name, value in (("num_worlds", num_worlds), ("num_agents", num_agents), ("max_steps", max_steps)):
        if value < 1:
            raise ConfigError(f"{name}={value} must be at least 1")
    if num_agents > _MAX_AGENTS:
        raise ConfigError(f"num_agents={num_agents} must be at most {_MAX_AGENTS}")
    if view < 3 or view % 2 == 0:
        raise ConfigError(f"view={view} must be odd and at least 3: an agent sees as far to each side")
    if density is not None and not 0.0 <= density < 1.0:
        raise ConfigError(f"density={density} must be from 0 to below 1, or None for a new one with every map")


def _make_workspace(shape: tuple[int, int], num_agents: int, view: int) -> PathfindingWorkspace:
    pad = view // 2
    stride = shape[1] + 2 * pad
    cells, agents = (shape[0] + 2 * pad) * stride, num_agents
    offsets = np.array([0, -stride, stride, -1, 1])
    by_agent = [np.zeros(agents, np.int64) for _ in range(4)]
    by_cell = [np.zeros(cells, np.int64) for _ in range(5)]
    return PathfindingWorkspace(stride, pad, offsets, np.zeros(cells, np.int64), *by_agent, *by_cell)


def _make_state(num_worlds: int, num_agents: int, num_cells: int) -> PathfindingState:
    return PathfindingState(
        np.full((num_worlds, num_cells), OUTSIDE, np.uint8),
        np.zeros((num_worlds, num_cells), np.int16),
        np.zeros((num_worlds, num_agents, num_cells), np.uint8),
        np.zeros((num_worlds, num_agents), np.int64),
        np.zeros((num_worlds, num_agents), np.int64),
        np.zeros((num_worlds, 4), np.int64),
        np.zeros((num_worlds, 3), np.int64),
        np.zeros(num_worlds, np.uint64),
    )


def _make_map_pool(
    scenarios: Sequence[Scenario],
    density: float | None,
    shape: tuple[int, int],
    num_agents: int,
    workspace: PathfindingWorkspace,
) -> MapPool:
    count = len(scenarios)
    maps, sizes = np.zeros((count, *shape), np.uint8), np.zeros((count, 2), np.int64)
    starts, goals = np.full((2, count, num_agents), -1)
    for index, each in enumerate(scenarios):
        height, width = sizes[index] = each.obstacles.shape
        maps[index, :height, :width] = each.obstacles
        for cells, places in ((starts, each.starts), (goals, each.goals)):
            if places is not None:
                few = places[:num_agents]
                cells[index, : len(few)] = _to_padded_cells(few, workspace)
    return MapPool(-1.0 if density is None else float(density), maps, sizes, starts, goals)


def _to_padded_cells(places: np.ndarray, workspace: PathfindingWorkspace) -> np.ndarray:
    """Return the padded cell indices of rows and columns [agents, 2]."""
    padded: np.ndarray = (places[:, 0] + workspace.pad) * workspace.stride + places[:, 1] + workspace.pad
    return padded


def _fitting(tree: Tree, name: str, own: np.ndarray) -> np.ndarray:
    saved = tree.get(name)
    if not isinstance(saved, np.ndarray) or saved.shape != own.shape or saved.dtype != own.dtype:
        raise CannotResume(
            f"the snapshot's {name!r} is not {own.dtype}{own.shape}: it is of worlds made in another way"
        )
    return saved

"""Maps with optional starts and goals, from arrays or from MovingAI's `.map` and `.scen` files.

All input is validated here, with one sentence per mistake, so a Scenario is safe for compiled code.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numba
import numpy as np

from steppe.core.contracts.errors import WorldError

_FREE, _BLOCKED = frozenset(".GS"), frozenset("@OTW")
_SCEN_FIELDS = 9  # bucket, map, width, height, start x, start y, goal x, goal y, length


@dataclass(frozen=True, eq=False)
class Scenario:
    """A map with the agents' starts and goals; without them, starts and goals are random in every episode."""

    obstacles: np.ndarray  # [height, width], nonzero is an obstacle; stored as bool
    starts: np.ndarray | None = None  # [agents, 2]: row, column
    goals: np.ndarray | None = None  # [agents, 2]
    name: str = "the map"

    def __post_init__(self) -> None:
        obstacles = np.array(self.obstacles, np.bool_, order="C")
        if obstacles.ndim != 2 or obstacles.size == 0:
            raise WorldError(f"{self.name} must have rows and columns, not the shape {np.shape(self.obstacles)}")
        object.__setattr__(self, "obstacles", obstacles)
        if (self.starts is None) != (self.goals is None):
            raise WorldError(f"{self.name} needs both starts and goals, or neither")
        if self.starts is not None:
            for what in ("starts", "goals"):
                object.__setattr__(self, what, _cells(getattr(self, what), what, self))
            _require_connected(self)

    @cached_property
    def num_agents(self) -> int:
        """The maximum number of agents."""
        if self.starts is not None:
            return len(self.starts)
        sizes = np.bincount(_components(self.obstacles).ravel())[1:]
        return int(sizes[sizes > 1].sum())  # an isolated free cell cannot hold both a start and a goal


def as_scenario(given: Any, num_agents: int) -> Scenario:
    """Return a scenario for `num_agents` agents from a Scenario, an obstacle array, or a `.map` or `.scen` path."""
    if isinstance(given, Scenario):
        return given
    if isinstance(given, str | Path):
        if Path(given).suffix == ".scen":
            return load_scenario(given, num_agents)
        return Scenario(load_map(given), name=str(given))
    return Scenario(np.asarray(given))


def load_map(path: str | Path) -> np.ndarray:
    """Load the obstacles [height, width] of a MovingAI `.map` file; raises WorldError.

    `.`, `G` and `S` are free cells; `@`, `O`, `T` and `W` are obstacles.
    """
    lines = _lines(path)
    try:
        begin = lines.index("map")
        header = dict(line.split(maxsplit=1) for line in lines[:begin] if line)
        height, width = int(header["height"]), int(header["width"])
    except (ValueError, KeyError):
        raise WorldError(f"{path} is not a MovingAI map: it must begin with type, height, width and map") from None
    rows = lines[begin + 1 : begin + 1 + height]
    if len(rows) < height or height < 1 or any(len(row) != width for row in rows):
        raise WorldError(f"{path} promises {height} rows of {width} cells and has others")
    strange = set("".join(rows)) - _FREE - _BLOCKED
    if strange:
        known = "".join(sorted(_FREE | _BLOCKED))
        raise WorldError(f"{path} has the cell {min(strange)!r}, which is none of {known}")
    return np.array([[cell in _BLOCKED for cell in row] for row in rows])


def load_scenario(path: str | Path, num_agents: int | None = None, *, map_path: str | Path | None = None) -> Scenario:
    """Load the first `num_agents` tasks (default: all) of a MovingAI `.scen` file with its map; raises WorldError.

    By default the map is the file that the scenario names, in the directory of the scenario.
    """
    tasks = [line.split("\t" if "\t" in line else None) for line in _lines(path) if line]
    if not tasks or tasks[0][0] != "version":
        raise WorldError(f"{path} is not a MovingAI scenario: it must begin with its version")
    tasks = tasks[1:][:num_agents]
    if not tasks or (num_agents is not None and len(tasks) < num_agents):
        raise WorldError(f"{path} has {len(tasks)} tasks, too few for {num_agents or 1} agents")
    try:
        if any(len(task) != _SCEN_FIELDS for task in tasks):
            raise ValueError
        numbers = np.array([[int(text) for text in task[2:8]] for task in tasks])
    except ValueError:
        raise WorldError(f"{path} has a line that is not the {_SCEN_FIELDS} fields of a task") from None
    where = Path(map_path) if map_path is not None else Path(path).parent / Path(tasks[0][1]).name
    obstacles = load_map(where)
    for width, height in numbers[:, :2]:
        if (height, width) != obstacles.shape:
            own = f"{obstacles.shape[1]} × {obstacles.shape[0]}"
            raise WorldError(f"{path} is for a map of {width} × {height} cells, but {where} has {own}")
    return Scenario(obstacles, numbers[:, [3, 2]], numbers[:, [5, 4]], name=str(path))


def _lines(path: str | Path) -> list[str]:
    try:
        return [line.rstrip() for line in Path(path).read_text("ascii").splitlines()]
    except OSError as error:
        raise WorldError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise WorldError(f"{path} is not a text file") from None


def _cells(given: Any, what: str, scenario: Scenario) -> np.ndarray:
    """Return cells as int64 [agents, 2]; raise WorldError unless they are distinct free cells of the map."""
    cells = np.array(given)
    if cells.ndim != 2 or cells.shape[1] != 2 or len(cells) == 0 or cells.dtype.kind not in "iu":
        raise WorldError(f"the {what} of {scenario.name} must be whole numbers [agents, 2]: row and column")
    cells = cells.astype(np.int64)
    height, width = scenario.obstacles.shape
    for agent, (row, column) in enumerate(cells):
        if not (0 <= row < height and 0 <= column < width):
            place = f"row {row}, column {column} of a map of {height} × {width}"
            raise WorldError(
                f"{scenario.name} does not fit its map: agent {agent} {_verb(what)} outside it, in {place}"
            )
        if scenario.obstacles[row, column]:
            place = f"row {row}, column {column}"
            raise WorldError(
                f"{scenario.name} does not fit its map: agent {agent} {_verb(what)} in an obstacle ({place})"
            )
    _, index, counts = np.unique(cells, axis=0, return_index=True, return_counts=True)
    if (counts > 1).any():
        row, column = cells[index[counts > 1][0]]
        raise WorldError(f"two of the {what} of {scenario.name} are the same cell: row {row}, column {column}")
    return cells


def _verb(what: str) -> str:
    return "starts" if what == "starts" else "has its goal"


def _require_connected(scenario: Scenario) -> None:
    starts, goals = np.asarray(scenario.starts), np.asarray(scenario.goals)
    if len(starts) != len(goals):
        raise WorldError(
            f"{scenario.name} has {len(starts)} starts and {len(goals)} goals: it needs one of each per agent"
        )
    labels = _components(scenario.obstacles)
    apart = np.flatnonzero(labels[tuple(starts.T)] != labels[tuple(goals.T)])
    if len(apart):
        agent = int(apart[0])
        begin, end = starts[agent].tolist(), goals[agent].tolist()
        raise WorldError(f"in {scenario.name} no way leads agent {agent} from its start {begin} to its goal {end}")


@numba.njit(cache=True, nogil=True)
def _components(obstacles: np.ndarray) -> np.ndarray:
    """Return the label of each cell's connected component, from 1; 0 for obstacles."""
    height, width = obstacles.shape
    labels, queue = np.zeros((height, width), np.int64), np.empty((obstacles.size, 2), np.int64)
    count = 0
    for cell in range(height * width):
        row, column = cell // width, cell % width
        if obstacles[row, column] or labels[row, column] > 0:
            continue
        count += 1
        labels[row, column] = count
        queue[0, 0], queue[0, 1] = row, column
        head, tail = 0, 1
        while head < tail:
            for down, right in ((-1, 0), (1, 0), (0, -1), (0, 1)):
                row, column = queue[head, 0] + down, queue[head, 1] + right
                inside = 0 <= row < height and 0 <= column < width
                if inside and not obstacles[row, column] and labels[row, column] == 0:
                    labels[row, column] = count
                    queue[tail, 0], queue[tail, 1] = row, column
                    tail += 1
            head += 1
    return labels

"""Steps pathfinding worlds on one core, or begins new ones, as fast as it goes: run by pathfinding.py."""

from __future__ import annotations

import argparse
import json
import statistics
import time

import numpy as np

from steppe.envs.pathfinding.worlds import PathfindingWorlds

SIZE, DENSITY, NUM_ACTIONS = 40, 0.3, 5
DRAWN = 64  # batches of actions, drawn before the clock runs


def steps_per_s(worlds: PathfindingWorlds, steps: int) -> float:
    """World steps a second, all agents of a world being one step; new episodes included as they come."""
    shape = (worlds.num_worlds, worlds.num_agents)
    actions = np.random.default_rng(0).integers(0, NUM_ACTIONS, (DRAWN, *shape))
    calls = max(1, steps // worlds.num_worlds)
    began = time.perf_counter()
    for call in range(calls):
        worlds.step(actions[call % DRAWN])
    return calls * worlds.num_worlds / (time.perf_counter() - began)


def map_ms(worlds: PathfindingWorlds, times: int) -> list[float]:
    """Milliseconds of each new map with all its heuristics and first observations."""
    found = []
    for _ in range(times):
        began = time.perf_counter()
        worlds.reset()
        found.append(1000 * (time.perf_counter() - began) / worlds.num_worlds)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("steps", "maps"))
    parser.add_argument("--agents", type=int, required=True)
    parser.add_argument("--worlds", type=int, default=1)
    parser.add_argument("--times", type=int, required=True, help="world steps, or maps")
    given = parser.parse_args()
    worlds = PathfindingWorlds(given.worlds, given.agents, size=SIZE, density=DENSITY)
    worlds.reset(0)  # compiles, or loads what was compiled
    worlds.step(np.zeros((given.worlds, given.agents), np.int64))
    used = {"agents": given.agents, "worlds": given.worlds, "size": SIZE, "density": DENSITY, "times": given.times}
    if given.what == "steps":
        figures = {"value": steps_per_s(worlds, given.times)}
    else:
        taken = map_ms(worlds, given.times)
        figures = {"value": statistics.median(taken), "worst_ms": max(taken)}
    print(json.dumps({**figures, "settings": used}))


if __name__ == "__main__":
    main()

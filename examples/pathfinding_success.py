"""Success on fresh maps, a run's policy beside a walker that only steps nearer: python pathfinding_success.py [RUN] [EPISODES]

The walker takes any step that leads nearer to its goal, and with one chance in ten anything. Without RUN a little is trained.
"""

import sys

import numpy as np

import steppe
from steppe.envs.pathfinding.worlds import PathfindingWorlds, greedy_walk
from steppe.records.run_directory import RunDirectory

FRESH = 10**6  # a seed that no training has


def trained() -> str:
    kwargs = {"num_agents": 2, "size": 5, "density": 0.2, "max_steps": 32}
    settings = {"algo": "dhc", "runtime": "inline", "steps": 2_000, "environment.kwargs": kwargs}
    return str(steppe.train("steppe/Pathfinding-v0", **settings).path)


def walk(kwargs: dict, episodes: int) -> float:
    """The share of episodes in which all walkers arrive."""
    worlds = PathfindingWorlds(episodes, **kwargs)
    stream, arrived, over = np.random.default_rng(FRESH), np.zeros(episodes, bool), np.zeros(episodes, bool)
    seen = worlds.reset(FRESH)
    while not over.all():
        seen = worlds.step(greedy_walk(seen.obs, stream))
        arrived |= seen.terminated & ~over
        over |= seen.terminated | seen.truncated
    return float(arrived.mean())


run = sys.argv[1] if len(sys.argv) > 1 else trained()
episodes = int(sys.argv[2]) if len(sys.argv) > 2 else 200
kwargs = RunDirectory.open(run).config().environment.kwargs
found = steppe.evaluate(run, episodes=episodes, seed=FRESH)
print(f"policy {100 * found['terminated_share']:.1f} % of {episodes} fresh maps, after {found['env_steps']:,} steps")
print(f"walker {100 * walk(kwargs, episodes):.1f} %, with {kwargs}")

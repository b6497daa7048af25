"""Success rate on new maps, of a run's policy and of a greedy policy: python pathfinding_success.py [RUN] [EPISODES]

The greedy policy ("walker") always steps nearer to the goal, with one random action in ten. Without RUN it trains a short run.
"""

import sys

import numpy as np

import steppe
from steppe.envs.pathfinding.worlds import PathfindingWorlds, greedy_walk
from steppe.records.run_directory import RunDirectory

SEED = 10**6  # not used in training


def train() -> str:
    kwargs = {"num_agents": 2, "size": 5, "density": 0.2, "max_steps": 32}
    settings = {"algo": "dhc", "runtime": "inline", "steps": 2_000, "environment.kwargs": kwargs}
    return str(steppe.train("steppe/Pathfinding-v0", **settings).path)


def walk(kwargs: dict, episodes: int) -> float:
    """Return the share of episodes in which all agents reach their goals with the greedy policy."""
    worlds = PathfindingWorlds(episodes, **kwargs)
    stream, solved, done = np.random.default_rng(SEED), np.zeros(episodes, bool), np.zeros(episodes, bool)
    seen = worlds.reset(SEED)
    while not done.all():
        seen = worlds.step(greedy_walk(seen.obs, stream))
        solved |= seen.terminated & ~done
        done |= seen.terminated | seen.truncated
    return float(solved.mean())


run = sys.argv[1] if len(sys.argv) > 1 else train()
episodes = int(sys.argv[2]) if len(sys.argv) > 2 else 200
kwargs = RunDirectory.open(run).config().environment.kwargs
found = steppe.evaluate(run, episodes=episodes, seed=SEED)
print(f"policy {100 * found['terminated_share']:.1f} % of {episodes} new maps, after {found['env_steps']:,} steps")
print(f"walker {100 * walk(kwargs, episodes):.1f} %, with {kwargs}")

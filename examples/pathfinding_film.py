"""Video of agents that all reach their goals: python pathfinding_film.py [RUN | walker] [AGENTS] [SIZE] [FILE]

Tries maps until the policy solves one: a run's policy, for any number of agents, or the greedy policy ("walker").
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np

import steppe
from steppe.envs.pathfinding.drawing import draw
from steppe.envs.pathfinding.parallel import parallel_env
from steppe.envs.pathfinding.worlds import greedy_walk
from steppe.records.run_directory import RunDirectory
from steppe.records.video import save_gif
from steppe.training.load_multi_agent import LoadedMultiAgentPolicy

FIRST_SEED, TRIES, TRAIL = 10**6, 200, 16


def load_policy(run: str, env: Any, kwargs: dict[str, Any]) -> LoadedMultiAgentPolicy:
    """Load the policy of a run for the number of agents in `env`."""
    config = RunDirectory.open(run).config()
    config = config.model_copy(update={"environment": config.environment.model_copy(update={"kwargs": kwargs})})
    return LoadedMultiAgentPolicy(config, steppe.load(run).weights, env, seed=FIRST_SEED)


def frames(env: Any, policy: LoadedMultiAgentPolicy | None, seed: int) -> list[np.ndarray]:
    """Play one episode and return its frames, or nothing if an agent does not reach its goal."""
    stream, worlds, paths, masks, arrived = np.random.default_rng(seed), env.worlds, [], [], {}
    obs, infos = env.reset(seed=seed)
    if policy is not None:
        policy.reset()
    while env.agents:
        paths.append(worlds.positions(0))
        masks.append(np.array([infos[agent]["comm_mask"] for agent in env.agents]))
        greedy = greedy_walk(np.array(list(obs.values())), stream).tolist()
        actions = policy.act(obs, infos=infos) if policy else dict(zip(env.agents, greedy, strict=True))
        obs, _, arrived, _, infos = env.step(actions)
    paths.append(worlds.positions(0))
    obstacles, goals = worlds.obstacles(0), worlds.goals(0)
    images = (
        draw(obstacles, positions, goals, mask, np.array(paths[max(0, t - TRAIL) : t + 1]), cell=12)
        for t, (positions, mask) in enumerate(zip(paths, [*masks, None], strict=True))
    )
    return list(images) if all(arrived.values()) else []


run, agents, size, file = (*sys.argv[1:], *("walker", "32", "40", "film.gif")[len(sys.argv) - 1 :])
trained = {"density": 0.3} if run == "walker" else RunDirectory.open(run).config().environment.kwargs
kwargs = {**trained, "num_agents": int(agents), "size": int(size)}
env = parallel_env(**kwargs)
policy = None if run == "walker" else load_policy(run, env, kwargs)
seed, video = next(((s, f) for s in range(FIRST_SEED, FIRST_SEED + TRIES) if (f := frames(env, policy, s))), (0, []))
if not video:
    sys.exit(f"none of {TRIES} maps was solved: use fewer agents")
save_gif(Path(file), video + video[-1:] * 8, fps=8)
print(f"{file}: {agents} agents arrive in {len(video) - 1} steps, map {seed}, {Path(file).stat().st_size} bytes")

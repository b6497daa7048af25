"""A film of agents who all arrive: python pathfinding_film.py [RUN | walker] [AGENTS] [SIZE] [FILE]

Maps are tried until one is solved, by a run's policy, for any number of agents, or by the walker of pathfinding_success.py.
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

FRESH, TRIES, TRAIL = 10**6, 200, 16


def team(run: str, env: Any, kwargs: dict[str, Any]) -> LoadedMultiAgentPolicy:
    """What a run learned, for as many agents as there are here."""
    config = RunDirectory.open(run).config()
    config = config.model_copy(update={"environment": config.environment.model_copy(update={"kwargs": kwargs})})
    return LoadedMultiAgentPolicy(config, steppe.load(run).weights, env, seed=FRESH)


def frames(env: Any, policy: LoadedMultiAgentPolicy | None, seed: int) -> list[np.ndarray]:
    """One map from beginning to end; nothing if some never arrive."""
    stream, worlds, ways, masks, arrived = np.random.default_rng(seed), env.worlds, [], [], {}
    seen, infos = env.reset(seed=seed)
    if policy is not None:
        policy.reset()
    while env.agents:
        ways.append(worlds.positions(0))
        masks.append(np.array([infos[agent]["comm_mask"] for agent in env.agents]))
        walked = greedy_walk(np.array(list(seen.values())), stream).tolist()
        actions = policy.act(seen, infos=infos) if policy else dict(zip(env.agents, walked, strict=True))
        seen, _, arrived, _, infos = env.step(actions)
    ways.append(worlds.positions(0))
    about = worlds.obstacles(0), worlds.goals(0)
    drawn = (
        draw(about[0], way, about[1], mask, np.array(ways[max(0, t - TRAIL) : t + 1]), cell=12)
        for t, (way, mask) in enumerate(zip(ways, [*masks, None], strict=True))
    )
    return list(drawn) if all(arrived.values()) else []


run, agents, size, file = (*sys.argv[1:], *("walker", "32", "40", "film.gif")[len(sys.argv) - 1 :])
trained = {"density": 0.3} if run == "walker" else RunDirectory.open(run).config().environment.kwargs
kwargs = {**trained, "num_agents": int(agents), "size": int(size)}
env = parallel_env(**kwargs)
policy = None if run == "walker" else team(run, env, kwargs)
seed, film = next(((s, f) for s in range(FRESH, FRESH + TRIES) if (f := frames(env, policy, s))), (0, []))
if not film:
    sys.exit(f"none of {TRIES} maps was solved: use fewer agents")
save_gif(Path(file), film + film[-1:] * 8, fps=8)
print(f"{file}: {agents} agents arrive in {len(film) - 1} steps, map {seed}, {Path(file).stat().st_size / 1000:.0f} kB")

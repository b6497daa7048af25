"""DHC as its authors published it: `steps` in one world with masks, `maps`, and `actor`, its loop with its network.

Its repository is no package. `git clone https://github.com/ZiyuanMa/DHC benchmarks/.venvs/dhc-source` brings it.
"""

from __future__ import annotations

import multiprocessing
import random
import sys
import time
import types
from pathlib import Path
from typing import Any

from protocol import Request, Result, run

# isort: split
import numpy as np

SOURCE = Path(__file__).resolve().parents[1] / ".venvs" / "dhc-source"
SIZE, DENSITY, NEAREST, WARM_UPS = 40, 0.3, 3, 3
SETTINGS = {"agents": 4, "source": ""}
ACTOR_SETTINGS = {**SETTINGS, "actors": 2}


def environment(settings: dict[str, Any], seed: int) -> Any:
    """A world of theirs. What it imports only to draw is left out, and NumPy's names of its day are given back."""
    source = Path(settings["source"] or SOURCE)
    if not (source / "environment.py").is_file():
        sys.exit(f"DHC is not in {source}: git clone https://github.com/ZiyuanMa/DHC {source}")
    sys.path.append(str(source))
    plots, drawing = types.ModuleType("matplotlib"), types.ModuleType("matplotlib.pyplot")
    drawing.ion = lambda: None
    plots.colors, plots.pyplot = types.ModuleType("matplotlib.colors"), drawing
    sys.modules |= {"matplotlib": plots, "matplotlib.pyplot": drawing}
    np.int = int
    if not hasattr(np, "bool"):
        np.bool = bool
    random.seed(seed)
    np.random.seed(seed)
    from environment import Environment

    return Environment(num_agents=settings["agents"], map_length=SIZE, fix_density=DENSITY)


def hears(places: np.ndarray, radius: int) -> np.ndarray:
    """Within the view and among the nearest: what DHC computes in its network's step."""
    apart = places[:, None] - places[None]
    far = np.sqrt((apart**2).sum(-1))
    mask = np.zeros(far.shape, bool)
    np.put_along_axis(mask, np.argsort(far, axis=1, kind="stable")[:, :NEAREST], True, axis=1)
    return mask & (np.abs(apart) <= radius).all(-1)


def steps(request: Request) -> Result:
    settings = request.settings(SETTINGS)
    env, count = environment(settings, request.seed), request.steps or 1000
    env.reset()
    actions = np.random.randint(0, 5, (count + WARM_UPS, settings["agents"])).tolist()
    for taken, action in enumerate(actions):
        if taken == WARM_UPS:
            began = time.perf_counter()
        (_, places), _, _, _ = env.step(action)
        hears(places, env.obs_radius)
    return Result(count, time.perf_counter() - began, {"agents": settings["agents"], "worlds": 1})


def maps(request: Request) -> Result:
    settings = request.settings(SETTINGS)
    env, count = environment(settings, request.seed), request.steps or 10
    began = time.perf_counter()
    for _ in range(count):
        env.reset()
    seconds = time.perf_counter() - began
    extra = {"map_ms": 1000 * seconds / count}
    return Result(count, seconds, {"agents": settings["agents"], "worlds": 1}, extra)


def walk(settings: dict[str, Any], seed: int, count: int, start: Any, seconds: Any) -> None:
    """One of their actors without Ray: network, world and local buffer, episode after episode; tells how long it took."""
    env = environment(settings, seed)
    import torch
    from buffer import LocalBuffer
    from model import Network

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    network = Network().eval()
    taken = -WARM_UPS
    while taken < count:
        network.reset()
        obs, places = env.reset()
        kept, steps = LocalBuffer(0, settings["agents"], SIZE, obs), 0
        done = False
        while not done and steps < 256 and taken < count:
            if taken == 0:
                start.wait()
                began = time.perf_counter()
            seen = torch.from_numpy(obs.astype(np.float32)), torch.from_numpy(places.astype(np.float32))
            actions, q_val, hidden, mask = network.step(*seen)
            if random.random() < 0.1:
                actions[0] = np.random.randint(0, 5)
            (obs, places), rewards, done, _ = env.step(actions)
            kept.add(q_val[0], actions[0], rewards[0], obs, hidden, mask)
            taken, steps = taken + 1, steps + 1
    seconds.put(time.perf_counter() - began)


def actor(request: Request) -> Result:
    settings = request.settings(ACTOR_SETTINGS)
    each = max(1, (request.steps or 400) // settings["actors"])
    spawn = multiprocessing.get_context("spawn")
    start, seconds = spawn.Barrier(settings["actors"]), spawn.Queue()
    actors = [
        spawn.Process(target=walk, args=(settings, request.seed + number, each, start, seconds))
        for number in range(settings["actors"])
    ]
    for each_actor in actors:
        each_actor.start()
    slowest = max(seconds.get() for _ in actors)
    for each_actor in actors:
        each_actor.join()
    shown = {"agents": settings["agents"], "actors": settings["actors"], "channels": 128, "worlds": 1}
    return Result(each * settings["actors"], slowest, shown)


if __name__ == "__main__":
    run("dhc", {"numpy": "numpy", "torch": "torch"}, {"steps": steps, "maps": maps, "actor": actor})

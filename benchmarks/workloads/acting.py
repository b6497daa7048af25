"""Actors of `dhc` at work on 40 × 40 cells, one process for each core, nobody learning: run by pathfinding.py."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from typing import Any

SIZE, DENSITY, WARM_UP = 40, 0.3, 2
SEGMENT_STEPS = 8


def walk(agents: int, worlds: int, channels: int, calls: int, start: Any, seconds: Any) -> None:
    """One actor: `calls` steps of all its worlds, as roles/actor.py makes them; tells how long they took."""
    import numpy as np
    import torch

    from steppe.algorithms import make_agent
    from steppe.algorithms.dhc.config import DHCConfig
    from steppe.core.config.run import EnvConfig
    from steppe.core.contracts.segment import Segment
    from steppe.envs import make_segment_env
    from steppe.roles.evaluation import act_in_env
    from steppe.runtimes.plan import segment_spec

    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    kwargs = {"num_agents": agents, "size": SIZE, "density": DENSITY}
    world = make_segment_env("steppe/Pathfinding-v0", EnvConfig(kwargs=kwargs), worlds, np.random.SeedSequence(0))
    config = DHCConfig(channels=channels, segment_steps=SEGMENT_STEPS).resolve_defaults(world.spec, 1, worlds)[0]
    policy = make_agent("dhc", config, world.spec, seed=0)
    policy.begin(worlds * agents, np.random.default_rng(0))
    segment = Segment.blank(segment_spec(config, world.spec, worlds))
    world.reset(segment["obs"][0])
    for call in range(calls + WARM_UP):
        if call == WARM_UP:
            start.wait()
            began = time.perf_counter()
        t = call % SEGMENT_STEPS
        if t == 0 and call:
            segment["obs"][0] = segment["obs"][-1]
        segment["comm_mask"][t] = world.comm_mask
        segment.write(t, act_in_env(policy, world, segment["obs"][t]))
        world.step(segment["action"][t], segment, t)
    seconds.put(time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--agents", type=int, required=True)
    parser.add_argument("--channels", type=int, required=True)
    parser.add_argument("--worlds", type=int, default=16, help="of each actor")
    parser.add_argument("--actors", type=int, default=2)
    parser.add_argument("--steps", type=int, required=True, help="of worlds, over all actors")
    given = parser.parse_args()
    calls = max(1, given.steps // (given.worlds * given.actors))
    spawn = multiprocessing.get_context("spawn")
    start, seconds = spawn.Barrier(given.actors), spawn.Queue()
    words = (given.agents, given.worlds, given.channels, calls, start, seconds)
    actors = [spawn.Process(target=walk, args=words) for _ in range(given.actors)]
    for actor in actors:
        actor.start()
    slowest = max(seconds.get() for _ in actors)
    for actor in actors:
        actor.join()
    value = calls * given.worlds * given.actors / slowest
    print(json.dumps({"value": value, "agent_steps_per_s": value * given.agents, "settings": vars(given)}))


if __name__ == "__main__":
    main()

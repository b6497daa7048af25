"""The parts of the composition API in an environment that sleeps 5 ms in every step: run by composition.py."""

from __future__ import annotations

import json
import sys
import time

from steppe import DistributedAgent, DistributedEnvironment, EnvConfig, MainLoop

DELAY_S, SEGMENT = 0.005, 64


def environment(workers: int) -> DistributedEnvironment:
    return DistributedEnvironment("steppe/Sleep-v0", workers, config=EnvConfig(kwargs={"delay_s": DELAY_S}))


def batches(workers: int, steps: int) -> float:
    """Steps per second of `generate_batch_experiences`, by workers that are up already."""
    with environment(workers) as world:
        agent = DistributedAgent("ppo", seed=0).bind(world)
        world.generate_batch_experiences(agent, SEGMENT * workers)
        started = time.perf_counter()
        world.generate_batch_experiences(agent, steps)
        return steps / (time.perf_counter() - started)


def loop(workers: int, steps: int) -> float:
    """Steps per second of a MainLoop that nobody told where its workers live, from its first step to its last update."""
    world = environment(workers)
    config = {"envs": 1, "segment_steps": SEGMENT, "steps": steps, "evaluation.episodes": 1}
    made = MainLoop(
        world, None, DistributedAgent("ppo", seed=0).bind(world), config=config | {"evaluation.every_steps": 10**9}
    )
    return float(made.run().summary["steps_per_s"])


def main() -> None:
    what, workers, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    found = {"batches": batches, "loop": loop}[what](workers, steps)
    used = {"workers": workers, "steps": steps, "delay_s": DELAY_S}
    print(json.dumps({"value": found, "settings": used, "share_of_ideal": found * DELAY_S / workers}))


if __name__ == "__main__":
    main()

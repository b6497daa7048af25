"""How long the checks of arrays take beside the work that they guard: run by checks.py.

`train ALGO STEPS` trains in this process, with a clock around every check of a segment (learner) and of what an
environment said (actor). `call NAME ROWS ROUNDS` times a public call, and then what it does before the work itself.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import steppe
from steppe import DistributedAgent, DistributedEnvironment, ReplayBufferPool
from steppe.compose.batches import to_segment, to_transition_batch
from steppe.core.array_checks import require_segment
from steppe.roles import actor, learner

Work = Callable[[], object]
AT_ONCE = 20  # calls between two looks at the clock
CAPACITY = 100_000


class Clock:
    """How long a function took that it wraps, call by call, and the process's account at its first and newest call."""

    def __init__(self) -> None:
        self.spent_s: list[float] = []
        self.first_s = self.newest_s = 0.0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*given: Any) -> Any:
            self.newest_s = time.process_time()
            self.first_s = self.first_s or self.newest_s
            before = time.perf_counter()
            try:
                return function(*given)
            finally:
                self.spent_s.append(time.perf_counter() - before)

        return timed

    @property
    def total_s(self) -> float:
        """All calls together, each counted as the median: what other programs of the machine took meanwhile is left out."""
        return statistics.median(self.spent_s) * len(self.spent_s)


def train(algo: str, steps: int) -> dict[str, Any]:
    """The checks' share of a run's processor time, from the first segment that the learner takes in to its last."""
    at_learner, at_actor = Clock(), Clock()
    learner.require_segment = at_learner.around(learner.require_segment)  # type: ignore[attr-defined]
    actor.require_finite = at_actor.around(actor.require_finite)  # type: ignore[attr-defined]
    settings = {"evaluation.every_steps": 10**9, "evaluation.episodes": 1}
    steppe.train("CartPole-v1", algo=algo, steps=steps, runtime="inline", seed=0, **settings)
    whole_s = at_learner.newest_s - at_learner.first_s
    shares = {
        f"{name}_percent": 100 * clock.total_s / whole_s
        for name, clock in (("learner", at_learner), ("actor", at_actor))
    }
    found = {"segments": len(at_learner.spent_s), "check_us": 1e6 * statistics.median(at_learner.spent_s)}
    return {"value": sum(shares.values()), **shares, **found}


def call(name: str, rows: int, rounds: int) -> dict[str, Any]:
    """Median times of a public call and of its checks alone, and their share."""
    whole, other = adding(rows) if name == "replay" else learning(name, rows)
    whole_us, other_us = (_median_us(work, rounds) for work in (whole, other))
    checks_us = max(0.0, whole_us - other_us) if name == "replay" else other_us
    return {"value": 100 * checks_us / whole_us, "call_us": whole_us, "check_us": checks_us}


def _median_us(work: Work, rounds: int) -> float:
    work()
    found = []
    for _ in range(rounds):
        before = time.perf_counter()
        for _ in range(AT_ONCE):
            work()
        found.append((time.perf_counter() - before) / AT_ONCE * 1e6)
    return statistics.median(found)


def learning(algo: str, rows: int) -> tuple[Work, Work]:
    """`learn_from_batch` of DQN with flat transitions or PPO with a rollout of 8 environments."""
    environment = DistributedEnvironment("CartPole-v1", 1, runtime="inline")
    agent = DistributedAgent(algo, batch_size=min(rows, 256), seed=0).bind(environment)
    spec, stream = environment.spec, np.random.default_rng(0)
    if algo == "dqn":
        seen = stream.random((rows + 1, 4), np.float32)
        batch = {"obs": seen[:-1].copy(), "next_obs": seen[1:].copy(), "action": stream.integers(2, size=rows)}
        batch |= {"reward": np.ones(rows, np.float32), "terminated": np.zeros(rows, bool)}
        return lambda: agent.learn_from_batch(batch), lambda: to_transition_batch(batch, spec, 0.99)
    shape = (rows // 8, 8)
    rollout = {name: np.zeros(shape, bool) for name in ("terminated", "truncated")} | {"valid": np.ones(shape, bool)}
    rollout |= {name: np.full(shape, -0.7, np.float32) for name in ("logp", "value", "reward")}
    rollout |= {"obs": stream.random((shape[0] + 1, 8, 4), np.float32), "final_obs": np.zeros((*shape, 4), np.float32)}
    rollout |= {"action": stream.integers(2, size=shape)}
    segment = to_segment(rollout, spec, agent.config.columns(spec))
    return lambda: agent.learn_from_batch(rollout), lambda: require_segment(segment)


def adding(rows: int) -> tuple[Work, Work]:
    """`add_experiences` of a block of arrays into a pool; the checks are what it does besides writing them."""
    pool = ReplayBufferPool(1, CAPACITY, use_prioritized=True, seed=0)
    seen = np.zeros((rows, 8), np.float32)
    block = {"obs": seen, "action": np.zeros(rows, np.int64), "reward": np.zeros(rows, np.float32), "next_obs": seen}
    pool.add_experiences(block)
    columns = [block[field.name] for field in pool.store.fields]
    return lambda: pool.add_experiences(block), lambda: pool.store.append(0, columns, None)


def main() -> None:
    what, name, *numbers = sys.argv[1:]
    found = {"train": train, "call": call}[what](name, *map(int, numbers))
    used = {"what": name, "numbers": numbers}
    print(json.dumps({**found, "settings": used}))


if __name__ == "__main__":
    main()

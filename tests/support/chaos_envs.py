"""Worlds for the chaos suite: CartPole at a chosen pace, one that hangs once, and some that need too much memory."""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path

import gymnasium as gym
import numpy as np

from steppe.envs.toy.builtin import CountingEnv

PACE = "CHAOS_DELAY_S"  # an environment variable, so that a run and its undisturbed twin have one configuration


class Paced(gym.Wrapper):
    """Sleeps in every step, so that a run lasts as long on a fast machine as on a slow one; results stay the same."""

    def step(self, action):
        delay_s = float(os.environ.get(PACE, "0"))
        if delay_s:
            time.sleep(delay_s)
        return self.env.step(action)


class HangsOnceEnv(CountingEnv):
    """Stays in its fortieth step for ever, unless somebody has been there before."""

    def __init__(self, marker):
        super().__init__()
        self.marker, self.taken = marker, 0

    def step(self, action):
        self.taken += 1
        if self.taken == 40 and self._is_first():
            self.hang_here()
        return super().step(action)

    def _is_first(self):
        try:
            Path(self.marker).touch(exist_ok=False)  # one of two that come at the same time
        except FileExistsError:
            return False
        return True

    def hang_here(self):
        while True:
            time.sleep(3600.0)


class OutOfMemoryEnv(CountingEnv):
    """Says at its twentieth step that there is no memory left."""

    taken = 0

    def step(self, action):
        self.taken += 1
        if self.taken == 20:
            raise MemoryError("nothing left")
        return super().step(action)


class GreedyEnv(OutOfMemoryEnv):
    """Asks at its twentieth step for more memory than its process may have."""

    def step(self, action):
        if self.taken == 19:
            now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (now + (64 << 20), resource.RLIM_INFINITY))
            try:
                np.ones(1 << 28)
            finally:
                resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        self.taken += 1
        return CountingEnv.step(self, action)

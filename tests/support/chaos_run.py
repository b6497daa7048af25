"""A training run as a user starts it: `python chaos_run.py '{"env": …}'` prints its result as one line of JSON."""

import json
import os
import sys
import time

import numpy as np

from steppe.core.config.run import resolve_config
from steppe.envs.toy.builtin import CountingEnv, IdentityEnv
from steppe.training.train import run_experiment


class StuckEnv(IdentityEnv):
    """Never comes back from its tenth step, and says so in a file."""

    def __init__(self, marker):
        super().__init__()
        self.marker, self.taken = marker, 0

    def step(self, action):
        self.taken += 1
        if self.taken == 10:
            with open(self.marker, "w") as file:
                file.write(str(os.getpid()))
            while True:
                time.sleep(3600.0)
        return super().step(action)


class CrowdedEnv(IdentityEnv):
    """The tenth copy in one process is never made, and says so in a file: few act, many are needed to judge."""

    copies = 0

    def __init__(self, marker):
        super().__init__()
        CrowdedEnv.copies += 1
        if CrowdedEnv.copies == 10:
            with open(marker, "w") as file:
                file.write(str(os.getpid()))
            while True:
                time.sleep(3600.0)


class NoisyEnv(CountingEnv):
    """Prints in every step, from Python and past it."""

    def step(self, action):
        print("noise from an environment")
        os.write(1, b"noise from a library\n")
        return super().step(action)


class InfiniteEnv(CountingEnv):
    """Pays infinity at its twentieth step."""

    taken = 0

    def step(self, action):
        obs, reward, *rest = super().step(action)
        self.taken += 1
        return obs, np.inf if self.taken == 20 else reward, *rest


if __name__ == "__main__":
    result = run_experiment(resolve_config(("call", json.loads(sys.argv[1]))))
    print(json.dumps({"state": result.state, "reason": result.reason, "message": result.message}), flush=True)

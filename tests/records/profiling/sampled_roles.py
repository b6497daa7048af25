"""Two roles that measure their own time, sampled in a separate process: prints both results as JSON."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np

from steppe.records.profiling.sampler import sample_roles

ROW = np.ones(40_000)
spent = {}


def charged(part):
    def inner():
        started = time.perf_counter()
        part()
        spent[part.__name__] = spent.get(part.__name__, 0.0) + time.perf_counter() - started

    return inner


@charged
def plain_python():
    total = 0
    for number in range(4_000):
        total += number * number


@charged
def operators():
    row = ROW
    for _ in range(3):
        row = row * ROW + ROW - row / ROW


@charged
def asleep():
    time.sleep(0.0003)


@charged
def long_call():
    np.sort(np.arange(500_000.0)[::-1] % 977.0)


class Worker:
    """Executes its parts in every step until its time is up."""

    def __init__(self, name, *parts):
        self.name, self.parts, self.done = name, parts, False
        self.closed = False

    def step(self):
        for part in self.parts:
            part()
        return True

    def close(self):
        self.closed = True


if __name__ == "__main__":
    directory, seconds = Path(sys.argv[1]), float(sys.argv[2])
    workers = [Worker("actor-0", plain_python, operators), Worker("learner", asleep, long_call)]
    with sample_roles(workers, directory, "learner") as roles:
        end = time.perf_counter() + seconds
        steps = 0
        while time.perf_counter() < end:
            roles[0].step()
            if steps % 100 == 0:
                roles[1].step()
            steps += 1
        for role in roles:
            role.close()
    assert all(worker.closed for worker in workers)
    print(json.dumps(spent))

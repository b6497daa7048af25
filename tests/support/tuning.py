"""Small runs whose hyperparameters are changed on the way, stepped by hand in this process."""

from __future__ import annotations

import math
import shutil
import time
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import gymnasium as gym
import numpy as np

from steppe.core.config.run import resolve_config
from steppe.core.config.tunables import tunable_fields
from steppe.core.contracts.algorithm import trainable_entries
from steppe.core.contracts.transport import COMMANDS, EVENTS
from steppe.envs.factory import probe
from steppe.records.checkpoints import Checkpoints
from steppe.records.run_directory import RunDirectory
from steppe.runtimes.inline import launch as inline
from steppe.runtimes.plan import make_plan
from steppe.training.resume import with_set_hyperparameters
from steppe.training.train import run_experiment

SMALL = {
    "env": "CartPole-v1", "environment.vector": "loop", "actors": 1, "envs": 2, "seed": 5, "mode": "sync",
    "runtime": "inline", "steps": 10_000, "checkpoint.every_s": 1e9, "evaluation.every_steps": 10**9,
    "evaluation.episodes": 1, "evaluation.max_episode_steps": 10,
}  # fmt: skip
ROLLOUT = {"segment_steps": 16, "hidden": (8,)}
REPLAY = {"segment_steps": 8, "batch_size": 8, "learning_starts": 32, "samples_per_insert": 1.0, "hidden": (8,)}
REPLAY |= {"buffer_size": 1_000}
SEQUENCES = REPLAY | {"batch_size": 2, "sequence_length": 5, "burn_in": 2}
TABLE = {"env": "Taxi-v4", "segment_steps": 16, "exploration_fraction": 0.05}
ALGORITHMS = {
    "ppo": ROLLOUT | {"minibatch_size": 16, "epochs": 2, "learning_rate": 0.003},
    "a2c": ROLLOUT | {"learning_rate": 0.003},
    "a3c": ROLLOUT | {"learning_rate": 0.003},
    "dqn": REPLAY | {"target_every": 10_000, "exploration_fraction": 0.02, "environment.reward_scale": 0.05},
    "r2d2": SEQUENCES | {"target_every": 10_000, "cell_size": 8},
    "dhc": {name: value for name, value in SEQUENCES.items() if name != "hidden"}
    | {"env": "steppe/Pathfinding-v0", "environment.kwargs": {"num_agents": 2, "size": 4, "max_steps": 16}}
    | {"environment.vector": "auto", "channels": 8, "target_every": 10_000, "lesson_agents": (), "lesson_sizes": ()},
    **dict.fromkeys(("q-learning", "sarsa", "expected-sarsa", "double-q", "n-step-q", "q-lambda"), TABLE),
}
KINDS = {"rollout": "a2c", "minibatches": "ppo", "transitions": "dqn", "sequences": "r2d2", "table": "q-learning"}
MODES = ("single", "sync", "async", "workers")
MATRIX = [(mode, kind) for mode in MODES for kind in ("rollout", "transitions", "sequences")]
CHANGES = {
    "learning_rate": 0.02, "learning_rate_end": 0.9, "gamma": 0.5, "gae_lambda": 0.3, "value_coef": 2.0,
    "entropy_coef": 0.3, "bounds_coef": 5.0, "epochs": 3, "minibatch_size": 32, "clip": 1e-4, "target_kl": 1e-9,
    "target_every": 5, "epsilon_start": 0.1, "epsilon_end": 0.9, "epsilon": 0.1, "exploration_fraction": 0.9,
}  # fmt: skip
STILL = {"learning_rate": 1e-9}  # for runs whose updates nobody can repeat: their weights stay where they are


class Upwards(gym.Env):
    """Continuous actions of which the greatest is the best: with large steps, means soon lie beyond the bounds."""

    observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gym.spaces.Box(-1, 1, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.np_random.uniform(-1, 1, 2).astype(np.float32), {}

    def step(self, action):
        return self.np_random.uniform(-1, 1, 2).astype(np.float32), float(action[0]), False, False, {}


class PacedCartPole(gym.Wrapper):
    """Takes a millisecond a step while that file is there: a run makes few updates until what it is asked for has been done."""

    def __init__(self, pace):
        super().__init__(gym.make("CartPole-v1"))
        self.pace = Path(pace)

    def step(self, action):
        if self.pace.exists():
            time.sleep(0.001)
        return self.env.step(action)


def settings(algo, field=None):
    """The keys of a small run of an algorithm, in which that field has an effect."""
    more = {"env": "tests.support.tuning:Upwards", "learning_rate": 0.3} if field == "bounds_coef" else {}
    return SMALL | {"algo": algo} | ALGORITHMS[algo] | more


def plan_of(config):
    """A plan for a configuration."""
    return make_plan(config, probe(config.env, config.environment))


def command_of(values, live=(), identity="change"):
    """A command as the service posts it; nothing is live in a run that is stopped."""
    return {"command": "set", "id": identity, "issuer": "test", "values": dict(values), "live": list(live)}


class Life:
    """One life of a run, stepped by hand."""

    def __init__(self, plan, directory):
        self.plan, self.directory = plan, directory
        self.handle = inline.launch(plan, directory)
        (self.learner,) = self.handle._roles["learner"]

    @classmethod
    def begin(cls, path, layer):
        """A new run."""
        config = resolve_config(("call", {**layer, "run_dir": path})).config
        plan = plan_of(config)
        return cls(plan, RunDirectory.create(plan.config, {}))

    @classmethod
    def resume(cls, path):
        """What a stopped run is when it goes on from its newest checkpoint, with what was set meanwhile."""
        directory = RunDirectory.open(path)
        plan = plan_of(with_set_hyperparameters(directory.config(), directory))
        newest = Checkpoints(directory.checkpoints, run=directory.key).latest()
        return cls(replace(plan, resume=newest.number), directory)

    def set(self, values):
        """Ask the run to change these hyperparameters."""
        self.directory.store.post(COMMANDS, command_of(values, values))

    def learn(self, rounds):
        """The hash of the weights after each of the next publications."""
        hashes, version = [], self.learner.version
        for _ in range(100_000):
            if len(hashes) == rounds:
                return hashes
            self.handle.wait_for_segment(0.0)
            if self.learner.version > version:
                version = self.learner.version
                hashes.append(self.learner.agent.weights().sha256())
        raise AssertionError("the run does not go on")

    def stop(self):
        """Write a checkpoint and end."""
        self.handle.close(0.0)
        self.directory.release()
        assert not self.handle.faults()
        self.directory.store.close()

    def answers(self):
        """What the event log says of changes of hyperparameters."""
        events = [record for _, record in self.directory.store.read(EVENTS)]
        return [event["details"] for event in events if event["kind"] == "command"]


def copy_of(path, into):
    """The same run in another directory."""
    shutil.copytree(path, into)
    return into


class Change:
    """Observes a run: asks for a change once it learns, and ends it when the change is answered, an update reports it, and `more`
    updates came after it."""

    def __init__(self, values, more=0):
        self.values, self.answer, self.posted, self.more = values, None, False, more
        self.rates = []

    def __call__(self, view):
        store = view.directory.store
        if view.updates and not self.posted:
            self.posted = True
            store.post(COMMANDS, command_of(self.values, self.values))
        if self.posted and self.answer is None:
            events = [record["details"] for _, record in store.read(EVENTS) if record["kind"] == "command"]
            self.answer = next((one for one in events if one.get("id") == "change"), None)
        if self.answer is None or view.training is None or view.updates <= self.answer["updates"] + self.more:
            return False
        rate = view.training.stats.get("learning_rate")
        self.rates += [rate] if rate is not None else []
        return not self.answer["live"] or (rate is not None and math.isclose(rate, self.values["learning_rate"]))


def require_tuned(kind, run_dir, **layer):
    """Run an algorithm of that kind of memory, set all its live hyperparameters at once, and require that it learns with them."""
    mode = layer["mode"]
    algo = KINDS[kind]
    given = settings(algo) | {"steps": 10**9, "run_dir": run_dir, "actors": 1 if mode == "single" else 2}
    pace = run_dir.with_name(f"{run_dir.name}-pace")
    pace.touch()
    if given["env"] == "CartPole-v1":
        given |= {"env": "tests.support.tuning:PacedCartPole", "environment.kwargs": {"pace": str(pace)}}
    if kind == "table":
        given |= {"learning_rate_end": CHANGES["learning_rate"]}
    if kind == "sequences" and mode == "workers":
        given |= {"prioritized": False}
    repeatable = mode in ("single", "sync")
    moves = not repeatable and kind != "table"
    if moves:
        given |= STILL | ({"value_coef": 0.0} if kind == "rollout" else {})
    resolved = resolve_config(("call", given | layer))
    live = [name for name in tunable_fields(resolved.config) if name not in ("bounds_coef", "learning_rate_end")]
    values = {name: CHANGES[name] for name in live} or {"learning_rate": CHANGES["learning_rate"]}
    more = 40 if moves else 0  # pushes that were under way then were made with the values before
    change = Change(values, more)
    result = run_experiment(resolved, observers=[change])
    pace.unlink()
    assert (result.state, result.reason) == ("STOPPED", "stopped_by_callback"), result.message
    assert change.answer["obeyed"], change.answer
    assert change.answer["live"] == sorted(live), change.answer
    if live:
        assert math.isclose(change.rates[-1], CHANGES["learning_rate"]), change.rates
    if moves:
        require_moved(given, run_dir, result.updates, only="value" if kind == "rollout" else "")
    if repeatable:
        alike = given | {"mode": mode, "runtime": "inline"}
        repeated = [
            repeat_inline(alike | {"run_dir": run_dir.with_name(f"{run_dir.name}-{name}")}, result.updates, taken)
            for name, taken in (("tuned", change.answer), ("plain", None))
        ]
        assert repeated[0] == result.weights_sha256, "not the updates of a run that took the values over there"
        assert repeated[1] != result.weights_sha256, "the values changed nothing"


def require_moved(layer, run_dir, updates, only):
    """Require weights, of those with `only` in their names, that so many updates with the values of STILL cannot have made.

    Adam moves a weight by less than four times the learning rate: (1 - 0.9) / sqrt(1 - 0.999). A value network whose loss has
    the weight 0 it does not move at all, so one that moved had gradients that were computed with the new weight.
    """
    life = Life.begin(run_dir.with_name(f"{run_dir.name}-start"), layer | {"mode": "sync", "runtime": "inline"})
    agent = life.learner.agent
    names = [entry.name for entry in trainable_entries(agent) if only in entry.name]
    before = {name: agent.weights().arrays()[name].copy() for name in names}
    life.stop()
    directory = RunDirectory.open(run_dir)
    after = Checkpoints(directory.checkpoints, run=directory.key).latest().weights.arrays()
    moved = max(float(np.abs(after[name] - before[name]).max()) for name in names)
    assert moved > 4 * STILL["learning_rate"] * updates, f"{moved}: the values are reported, and changed nothing"


def repeat_inline(layer, updates, taken=None):
    """The hash of the weights after so many updates of a run in this process that takes values over where `taken` says."""
    life = Life.begin(layer["run_dir"], layer)
    learner = life.learner

    def commands(after):
        reached = taken is not None and learner.updates >= taken["updates"] and learner.env_steps >= taken["env_steps"]
        due = reached and learner.version >= taken["version"] and after < 1
        return [(1, command_of(taken["values"], taken["live"]))] if due else []

    learner.context = replace(learner.context, commands=commands)
    with patch("steppe.roles.learner.POLL_COMMANDS_EVERY_S", 0.0):
        for _ in range(1_000_000):
            if learner.updates >= updates:
                break
            life.handle.wait_for_segment(0.0)
    assert taken is None or learner.updates == updates  # ppo without the change takes more steps at once
    found = learner.agent.weights().sha256()
    life.stop()
    return found

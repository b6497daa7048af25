"""Failures inside a run, on both runtimes: environments that raise or return invalid values, and killed roles."""

from __future__ import annotations

import multiprocessing
import os
import signal

import gymnasium as gym
import pytest

from steppe.core.config import references
from steppe.core.config.run import resolve_config
from steppe.core.contracts.errors import EnvironmentFault, FactoryError, NotFinite, RoleDied
from steppe.core.contracts.transport import EVENTS
from steppe.envs.toy.builtin import CountingEnv
from steppe.records.checkpoints import Checkpoints
from steppe.records.run_directory import RunDirectory
from steppe.runtimes.processes.worker import FAULT_EXIT_CODE
from steppe.training.train import run_experiment

pytestmark = pytest.mark.integration

SMALL = {"mode": "sync", "actors": 2, "envs": 2, "segment_steps": 16, "hidden": (8,), "epochs": 1}
both = pytest.mark.parametrize("runtime", ["inline", "processes"])


def run(env, tmp_path, observers=(), **settings):
    layer = {**SMALL, "env": env, "run_dir": tmp_path / "run", "steps": 10**9, **settings}
    return run_experiment(resolve_config(("call", layer)), observers=observers)


@both
def test_a_raising_environment_fails_the_run(runtime, tmp_path):
    result = run("steppe/Failing-v0", tmp_path, runtime=runtime, **{"environment.kwargs": {"at_step": 40}})
    assert (result.state, result.reason) == ("FAILED", "environment_fault")
    fault = result.fault
    assert fault.role in ("actor-0", "actor-1")
    details = fault.details
    assert details["traceback"].rstrip().endswith("RuntimeError: this environment was made to fail")
    assert "builtin.py" in details["traceback"]
    assert isinstance(details["seed"], int)
    assert details["last_action"] in (0, 1)
    assert details["step"] >= 1
    assert str(details["seed"]) in fault.message
    with pytest.raises(EnvironmentFault, match="this environment was made to fail") as raised:
        result.raise_for_fault()
    assert raised.value.details == details
    status = RunDirectory.open(tmp_path / "run").store.status()
    assert (status.state, status.reason) == ("FAILED", "environment_fault")
    assert Checkpoints(tmp_path / "run" / "checkpoints").latest().weights.updates > 0, "what was learned is lost"


@both
def test_the_reported_details_reproduce_the_failure(runtime, tmp_path):
    """Seed, number of steps and last action are those of the failing environment, repeated by hand."""
    kwargs = {"at_step": 9}
    result = run("steppe/Failing-v0", tmp_path, runtime=runtime, **{"environment.kwargs": kwargs})
    details = result.fault.details
    env = gym.make("steppe/Failing-v0", **kwargs)
    env.reset(seed=details["seed"])
    for _ in range(9):
        try:
            _, _, terminated, truncated, _ = env.step(details["last_action"])
        except RuntimeError:
            break
        if terminated or truncated:
            env.reset()
    assert details["step"] == env.unwrapped.elapsed + 1
    env.close()


@both
@pytest.mark.parametrize(("field", "value"), [("obs", "nan"), ("reward", "nan")])
def test_nan_values_fail_the_run(runtime, field, value, tmp_path):
    kwargs = {"environment.kwargs": {"at_step": 21, "field": field}}
    result = run("steppe/NaN-v0", tmp_path, runtime=runtime, **kwargs)
    assert (result.state, result.reason) == ("FAILED", "not_finite")
    # Step 21 is the fifth of the second segment of 16; an observation is seen one row later than its reward.
    row = 4 + (field == "obs")
    assert f"segment 1: {field} is {value} at step {row} of the segment" in result.message
    assert result.fault.role in result.message
    with pytest.raises(NotFinite, match=field):
        result.raise_for_fault()


@both
def test_infinite_rewards_fail_the_run(runtime, tmp_path):
    result = run("tests.support.chaos_run:InfiniteEnv", tmp_path, runtime=runtime)
    assert result.reason == "not_finite"
    assert "reward is inf at step 3" in result.message


def test_output_of_environments_does_not_disturb_the_run(tmp_path, capfd):
    result = run("tests.support.chaos_run:NoisyEnv", tmp_path, runtime="processes", steps=200)
    assert result.state == "SUCCEEDED"
    printed = capfd.readouterr()
    assert "noise" not in printed.out + printed.err
    log = (tmp_path / "run" / "logs" / "actor-0.log").read_text()
    assert "noise from an environment" in log
    assert "noise from a library" in log


def test_a_lambda_is_refused_before_anything_is_created(tmp_path):
    env = references.make_reference(lambda: CountingEnv())
    with pytest.raises(FactoryError):
        run(env, tmp_path, runtime="processes")
    assert not (tmp_path / "run").exists()


class Killer:
    """An observer that kills a role's process once the learner has reported."""

    def __init__(self, name, number=signal.SIGKILL):
        self.name, self.number, self.killed = f"steppe-{name}", number, None

    def __call__(self, view):
        if self.killed is None and view.training is not None:
            (victim,) = [child for child in multiprocessing.active_children() if child.name == self.name]
            self.killed = victim.pid
            os.kill(victim.pid, self.number)


@pytest.mark.parametrize("role", ["learner", "actor-1", "manager"])
@pytest.mark.parametrize("mode", ["sync"])
def test_a_killed_role_that_may_not_be_restarted_ends_the_run(role, mode, tmp_path):
    killer = Killer(role)
    result = run("CartPole-v1", tmp_path, [killer], runtime="processes", mode=mode, **{"flow.max_restarts": 0})
    assert killer.killed is not None
    assert (result.state, result.reason) == ("FAILED", "role_died")
    assert result.fault.role == role
    assert f"{role} was killed by SIGKILL" in result.message
    with pytest.raises(RoleDied, match="SIGKILL"):
        result.raise_for_fault()
    status = RunDirectory.open(tmp_path / "run").store.status()
    assert (status.state, status.reason) == ("FAILED", "role_died")


@pytest.mark.parametrize("role", ["actor-0", "manager"])
def test_a_killed_actor_or_manager_is_replaced(role, tmp_path):
    killer, after = Killer(role), []

    def enough(view):
        if killer.killed and any(event.kind == "restart" for event in view.events):
            after.append(view.env_steps)
        return len(after) > 1 and after[-1] > after[0]

    result = run("CartPole-v1", tmp_path, [killer, enough], runtime="processes")
    assert (result.state, result.reason) == ("STOPPED", "stopped_by_callback"), result.message
    events = [record for _, record in RunDirectory.open(tmp_path / "run").store.read(EVENTS)]
    (restart,) = [event for event in events if event["kind"] == "restart"]
    assert restart["role"] == role
    assert "SIGKILL" in restart["details"]["message"]


def test_a_role_that_exits_is_reported_with_its_exit_code(tmp_path):
    result = run("tests.chaos.test_faults:LeavingEnv", tmp_path, runtime="processes")
    assert (result.state, result.reason) == ("FAILED", "role_died")
    assert "ended with exit code 3" in result.message
    assert FAULT_EXIT_CODE != 3


def LeavingEnv():
    """An environment whose library ends the process without a message."""
    env = CountingEnv()
    step = env.step

    def leave(action):
        if multiprocessing.parent_process() is not None and env.elapsed == 2:
            os._exit(3)
        return step(action)

    env.step = leave
    return env

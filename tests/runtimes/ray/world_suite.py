"""Run by test_runtime.py: a Ray cluster of two nodes, and many small runs on it by seats that import torch only once.

A seat is taken again by the next run that asks for the same of Ray, so tests with the same rules stand together: first networks
by the default rules, then tables, whose seats import no torch.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from steppe.classic import LinearSchedule, OptimalQLearning, ParallelQLearning
from steppe.core.config.run import resolve_config
from steppe.core.contracts.errors import UsageError
from steppe.core.contracts.reports import EventReport
from steppe.core.contracts.transport import ACTORS, EVENTS, TRAINING
from steppe.envs import probe
from steppe.envs.toy.builtin import CountingEnv, IdentityEnv
from steppe.records.checkpoints import Checkpoints
from steppe.records.run_directory import RunDirectory
from steppe.records.view import RunView
from steppe.runtimes.launch_spec import LaunchSpec
from steppe.runtimes.plan import make_plan
from steppe.runtimes.ray import launch as ray_runtime
from steppe.runtimes.ray.driver import RayDriverHandle
from steppe.runtimes.ray.placement import RAY_SYSTEM_CONFIG, RayCluster
from steppe.testing.runtime import RuntimeConformance, advance
from steppe.training.resume import resume
from steppe.training.train import run_experiment
from steppe.transport.ray.links import import_ray
from tests.determinism.test_dhc_runs import SMALL as DHC
from tests.support.loop_statistics import ELSEWHERE, require_right_statistics
from tests.support.refusals import require_refusals
from tests.support.tabular_envs import Maze
from tests.support.tuning import MATRIX, require_tuned

pytestmark = pytest.mark.integration

SMALL = {"mode": "sync", "actors": 2, "envs": 4, "hidden": (16, 16), "seed": 7, "evaluation.episodes": 3}
PPO = {**SMALL, "algo": "ppo", "env": "CartPole-v1", "segment_steps": 32, "minibatch_size": 64, "steps": 3000}
DQN = {
    **SMALL, "algo": "dqn", "env": "steppe/Identity-v0", "segment_steps": 16, "batch_size": 32, "learning_starts": 200,
    "samples_per_insert": 8.0, "prioritized": True, "n_step": 3, "steps": 1500,
}  # fmt: skip
A2C = {**SMALL, "algo": "a2c", "mode": "workers", "env": "CartPole-v1", "segment_steps": 16, "steps": 3000}
CASES = {"ppo": PPO, "a2c": A2C, "dhc": DHC}  # replay of transitions and sequences is in MATRIX
FIGURES = ("state", "reason", "weights_sha256", "env_steps", "updates", "version", "eval_return_mean", "eval_episodes")
FAST = {
    **RAY_SYSTEM_CONFIG, "health_check_initial_delay_ms": 500, "health_check_period_ms": 500, "health_check_failure_threshold": 5,
}  # fmt: skip
ray = import_ray()
nodes = {}  # name → the node, of ray.cluster_utils
kept = []  # the one Cluster of ours
machines = []  # the one of ray.cluster_utils


def launch(plan, directory):
    """As `ray.launch` in a program that has called ray.init, but with the seats of the run before."""
    if not kept:
        kept.append(RayCluster(plan))
    return RayDriverHandle(LaunchSpec.of(plan, directory, None), directory, kept[0], keep_cluster=True)


ray_runtime.launch = launch


@pytest.fixture(autouse=True)
def _nothing_left_behind():
    """Seats are left here, for the next test. That runs of their own leave nothing is seen in test_runtime.py."""


class SlowForOne(CountingEnv):
    """Slow where the actor is the one whose log this process writes."""

    def step(self, action):
        if "actor-0" in os.readlink("/proc/self/fd/1"):
            time.sleep(0.001)
        return super().step(action)


class Paced(IdentityEnv):
    """Takes 20 ms a step while that file is there, so that a run lasts until the test has done to it what it wants."""

    def __init__(self, pace):
        super().__init__()
        self.pace = Path(pace)

    def step(self, action):
        if self.pace.exists():
            time.sleep(0.02)
        return super().step(action)


class Stuck(IdentityEnv):
    """Never comes back from its 20th step, in the first actor's first life."""

    steps = 0

    def step(self, action):
        self.steps += 1
        while self.steps == 20 and "actor-0" in os.readlink("/proc/self/fd/1"):
            time.sleep(0.01)
        return super().step(action)


def train(directory, observers=(), **settings):
    result = run_experiment(
        resolve_config(("call", {"runtime": "ray", "run_dir": directory, **settings})), observers=observers
    )
    return {name: result.summary[name] for name in FIGURES}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_weights_of_inline(case, tmp_path):
    ours = train(tmp_path / "ray", **case)
    assert ours == train(tmp_path / "inline", **case, runtime="inline")
    assert ours["state"] == "SUCCEEDED"
    assert ours["updates"] > 0


@pytest.mark.parametrize(("mode", "kind"), MATRIX)
def test_all_live_hyperparameters_in_one_command(mode, kind, tmp_path):
    require_tuned(kind, tmp_path / "run", runtime="ray", mode=mode)


@pytest.mark.parametrize(("kind", "algo"), ELSEWHERE)
def test_statistics_of_loops_during_and_after_runs(kind, algo):
    require_right_statistics(kind, algo, "ray")


def test_an_actor_that_sends_actions_out_of_range_is_refused(tmp_path):
    require_refusals(tmp_path / "run", runtime="ray")


def paced(tmp_path):
    return {"env": "tests.runtimes.ray.world_suite:Paced", "environment.kwargs": {"pace": str(tmp_path / "pace")}}


def restarts(directory):
    events = [EventReport.read(record) for _, record in directory.store.read(EVENTS)]
    return [(event.role, event.details) for event in events if event.kind == "restart"]


def watched(tmp_path, act, case=PPO, **settings):
    """A run whose handle is given to `act`, and what came of it."""
    resolved = resolve_config(("call", {"runtime": "ray", "run_dir": tmp_path / "run", **case, **settings}))
    plan = make_plan(resolved.config, probe(resolved.config.env, resolved.config.environment))
    directory = RunDirectory.create(plan.config, resolved.sources)
    handle = launch(plan, directory)
    try:
        advance(handle, lambda: len(handle.state()["ranks"]) == len(plan.worker_slots()))
        act(handle, directory)
    finally:
        handle.close(timeout_s=120.0)
        directory.release()


def test_a_run_that_was_stopped_resumes_exactly(tmp_path):
    stopped = train(tmp_path / "halves", [lambda view: view.env_steps > 0], **{**PPO, "steps": 10**9})
    assert stopped["reason"] == "stopped_by_callback"
    assert stopped["env_steps"] > 0
    steps = stopped["env_steps"] + 1000
    again = resume(tmp_path / "halves", steps=steps)
    whole = train(tmp_path / "whole", **{**PPO, "steps": steps}, runtime="inline")
    assert {name: again.summary[name] for name in FIGURES} == whole


def test_async_does_not_wait_for_the_slow(tmp_path):
    settings = {
        "env": "tests.runtimes.ray.world_suite:SlowForOne",
        "mode": "async",
        "flow.max_lag": 10**6,
        "steps": 15_000,
    }
    assert train(tmp_path / "run", **{**PPO, **settings})["state"] == "SUCCEEDED"
    records = [record for _, record in RunDirectory.open(tmp_path / "run").store.read(ACTORS)]
    steps = {record["actor"]: record["env_steps"] for record in records}
    assert 0 < steps[0] < steps[1], "a slow actor held up the other"


class TestWorld(RuntimeConformance):
    """After the other tests with networks: those of failures take seats away."""

    runtime = "ray"

    def launch(self, plan, directory):
        return launch(plan, directory)


def test_a_hung_actor_says_where_and_is_started_again(tmp_path):
    def act(handle, directory):
        advance(handle, lambda: restarts(directory))
        role, details = restarts(directory)[0]
        assert role == "actor-0"
        assert "actor-0 took longer than flow.hang_s=15 for one step" in details["message"]
        assert "world_suite.py" in details["traceback"], "it does not say where"

    stuck = {"algo": "q-learning", "env": "tests.runtimes.ray.world_suite:Stuck", "segment_steps": 16, "steps": 10**9}
    watched(tmp_path, act, {**stuck, "mode": "sync", "actors": 2, "envs": 4, "seed": 7, "flow.hang_s": 15})


REPLAY_ROLES = {**DQN, "flow.replay_roles": 2, "buffer_size": 700}


def test_replay_lies_on_both_nodes(tmp_path):
    """One Ray actor per buffer, on different nodes, and the weights of two buffers in one process. When one is killed, the
    run ends with the reason and resumes exactly."""
    case = {**REPLAY_ROLES, **paced(tmp_path), "checkpoint.every_s": 2.0}
    expected = train(tmp_path / "inline", **case, runtime="inline")
    (tmp_path / "pace").touch()

    def act(handle, directory):
        first, second = (handle.state()["ranks"][f"replay-{index}"] for index in range(2))
        assert {first["node"], second["node"]} == {node.node_id for node in nodes.values()}
        advance(handle, lambda: Checkpoints(directory.checkpoints).latest() is not None or handle.faults())
        os.kill(second["pid"], signal.SIGKILL)
        advance(handle, handle.faults)
        fault = handle.faults()[0]
        assert fault.reason == "role_died"
        assert "replay-1" in fault.message
        assert not restarts(directory)

    watched(tmp_path, act, case)
    (tmp_path / "pace").unlink()
    again = resume(tmp_path / "run")
    assert {name: again.summary[name] for name in FIGURES} == expected


def test_a_learner_takes_a_gpu_where_there_is_one(tmp_path):
    """Ray counts one on a node that says it has one; torch, which finds none there, goes on with the CPU."""
    node = machines[0].add_node(num_cpus=1, num_gpus=1, object_store_memory=80 << 20)
    try:
        for device, taken in (("cpu", 0.0), ("auto", 1.0)):

            def act(handle, directory, taken=taken):
                assert (handle.state()["ranks"]["learner"]["node"] == node.node_id) == bool(taken)
                assert ray.available_resources().get("GPU", 0.0) == 1.0 - taken
                advance(handle, lambda: directory.store.read(TRAINING) or handle.faults())
                assert handle.faults() == []

            watched(tmp_path / device, act, mode="single", actors=1, steps=10**9, device=device)
    finally:
        machines[0].remove_node(node)


def test_no_room_is_said_in_one_sentence(tmp_path):
    def plan_of(**settings):
        resolved = resolve_config(("call", {"runtime": "ray", **PPO, **settings}))
        return make_plan(resolved.config, probe("CartPole-v1", resolved.config.environment))

    for settings, words in (
        ({"actors": 40}, "takes 41 of Ray's CPU, but the cluster has"),
        ({"actors": 2, "ray.actor_resources": {"gold": 1}}, "takes 2 of Ray's gold, but the cluster has 0"),
        ({"actors": 3, "ray.actors_per_node": 1}, "have no room for 3 actors"),
        ({"actors": 2, "segment_steps": 400_000}, "object store of 80 MiB"),
    ):
        with pytest.raises(UsageError, match=words):
            kept[0].require_resources(plan_of(**settings))


def test_a_cluster_by_its_address_is_left_running(tmp_path):
    """Joined by a command that knows only the address; one that does not fit says what it lacks."""
    address = ray.get_runtime_context().gcs_address
    command = [Path(sys.executable).with_name("steppe"), "train", "Taxi-v4", "--runtime", "ray", "--json"]
    command += ["--ray-address", address, "--algo", "q-learning", "--mode", "single", "--envs", "2", "--steps", "500"]
    before = set(kept[0].nodes())
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["state"] == "SUCCEEDED"
    assert set(kept[0].nodes()) == before
    done = subprocess.run([*command, "-s", "ray.learner_cpus=100"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "this run takes 100 of Ray's CPU, but the cluster has 8" in done.stderr


TABLE = {
    "algo": "q-learning", "env": "steppe/TicTacToe-v0", "mode": "workers", "actors": 2, "seed": 7, "steps": 1_000_000,
    "evaluation.episodes": 200, "ray.actors_per_node": 1, "ray.placement": "spread",
}  # fmt: skip


def test_workers_share_a_table(tmp_path):
    """On both nodes, as many steps as were asked for, and it plays better than it began."""
    found = train(tmp_path / "run", **TABLE)
    assert found["state"] == "SUCCEEDED"
    assert TABLE["steps"] <= found["env_steps"] < 1.05 * TABLE["steps"], "steps were given out twice, or got lost"
    assert found["eval_return_mean"] > 0.5, "of a player that never learned it is about 0"


def test_a_killed_worker_is_started_again(tmp_path):
    """The others go on meanwhile, and it merges again what it learns."""

    def told(directory, epoch):
        records = [record for _, record in directory.store.read(ACTORS)]
        return [one for one in records if (one["actor"], one["epoch"]) == (1, epoch) and one["env_steps"] > 0]

    def act(handle, directory):
        advance(handle, lambda: told(directory, 0) or handle.faults())
        os.kill(handle.state()["ranks"]["worker-1"]["pid"], signal.SIGKILL)
        advance(handle, lambda: told(directory, 1) or handle.faults())
        assert handle.faults() == []
        assert [role for role, _ in restarts(directory)] == ["worker-1"]

    watched(tmp_path, act, {**TABLE, "steps": 10**12})


def test_workers_that_share_a_table_play_as_many_episodes_as_asked_for(tmp_path):
    settings = {name: value for name, value in TABLE.items() if name != "steps"}
    result = run_experiment(
        resolve_config(("call", {**settings, "runtime": "ray", "run_dir": tmp_path / "run", "episodes": 60, "envs": 4}))
    )
    view = RunView(RunDirectory.open(tmp_path / "run"))
    view.refresh()
    assert (result.reason, view.episodes) == ("episodes_done", 60)


def test_a_classic_learner_comes_to_the_values_of_value_iteration():
    """Two workers, 60,000 steps in total at random, rate falling to 0 (seed 5): every value within 0.25, as on processes."""
    steps, exact = 60_000, Maze().exact(0.8)
    learner = ParallelQLearning(
        OptimalQLearning, num_processes=2, discount_factor=0.8, epsilon=1.0, epsilon_decay=1.0,
        learning_rate=LinearSchedule(0.05, 0.0, steps), seed=5,
    )  # fmt: skip
    learner.train(Maze, steps, steps_per_sync=200, validation_episodes=5, runtime="ray")
    assert steps <= learner.algorithm.step_count < steps + 2 * 20
    error = np.abs(learner.q_table[:-1] - exact)
    assert error.max() < 0.25, error.round(2)
    learner.train(Maze, 50, runtime="ray")
    assert np.abs(learner.q_table[:-1] - exact).max() < 2.0, "a second call goes on with what was learned"


def test_a_killed_actor_and_a_killed_node_are_survived(tmp_path):
    """Both in one run, which ends with the weights of one that was never in trouble."""
    case = {
        **paced(tmp_path), "algo": "q-learning", "mode": "sync", "actors": 2, "envs": 4, "segment_steps": 8, "seed": 7,
        "steps": 4000, "evaluation.episodes": 3,
    }  # fmt: skip
    calm = train(tmp_path / "calm", **case, runtime="inline")
    (tmp_path / "pace").touch()

    def act(handle, directory):
        first, second = (handle.state()["ranks"][f"actor-{index}"] for index in range(2))
        assert {first["node"], second["node"]} == {node.node_id for node in nodes.values()}
        here = next(name for name, node in nodes.items() if node.node_id == second["node"])
        os.kill(second["pid"], signal.SIGKILL)
        advance(handle, lambda: restarts(directory))
        assert "the process of actor-1 was killed or crashed" in restarts(directory)[0][1]["message"]
        advance(handle, lambda: handle.state()["ranks"]["actor-1"]["pid"] != second["pid"])
        assert here == "far", "the driver's node comes first"
        os.kill(raylet(nodes["far"]), signal.SIGKILL)
        lost = "the node of actor-1"
        advance(handle, lambda: handle.faults() or any(lost in told["message"] for _, told in restarts(directory)))
        (tmp_path / "pace").unlink()
        advance(handle, lambda: handle.ended("learner") or handle.faults())
        assert handle.faults() == []
        assert {role for role, _ in restarts(directory)} == {"actor-1"}, restarts(directory)
        assert handle.state()["ranks"]["actor-1"]["node"] == nodes["near"].node_id

    watched(tmp_path, act, case, **{"ray.actors_per_node": 2, "ray.placement": "spread"})
    assert Checkpoints(tmp_path / "run" / "checkpoints").latest().weights.sha256() == calm["weights_sha256"]


def raylet(node):
    return node.all_processes["raylet"][0].process.pid


if __name__ == "__main__":
    from ray.cluster_utils import Cluster as Machines

    sys.modules["tests.runtimes.ray.world_suite"] = sys.modules["__main__"]
    found = Machines()
    machines.append(found)
    try:
        sizes = {"num_cpus": 4, "object_store_memory": 80 << 20}
        nodes["near"] = found.add_node(include_dashboard=False, _system_config=FAST, **sizes)
        nodes["far"] = found.add_node(**sizes)
        ray.init(address=found.address, log_to_driver=False, logging_level="ERROR")
        code = pytest.main(["-q", "-p", "no:xdist", "--assert=plain", __file__, *sys.argv[1:]])
        for cluster in kept:
            cluster.close()
        ray.shutdown()
    finally:
        found.shutdown()
    sys.exit(code)

"""kill -9 at seeded random moments, of all processes and of single roles: the run ends like an undisturbed one."""

from __future__ import annotations

import os
import random
import signal

import pytest

from steppe.core.system.shared_dir import make_shared_dir, remove_shared_dir
from steppe.training.resume import resume
from tests.support.cases import rest_slow
from tests.support.chaos import (
    Host,
    child,
    events,
    kill_at,
    moments,
    pace,
    recorded,
    require_ledger,
    require_single_records,
    settings,
    train,
    twin,
)
from tests.support.chaos_envs import PACE

pytestmark = pytest.mark.integration

STEPS = {"ppo": 3200, "dqn": 1600}
AHEAD = "flow.ahead"
CASES = [("ppo", 0), ("dqn", 1)]
KILLS = int(os.environ.get("KILLS", "2"))  # for each algorithm on each runtime; `make chaos` uses many
KILLED = [("dqn", 1, "inline"), ("ppo", 0, "processes")]
if "KILLS" in os.environ:
    KILLED += [("dqn", 1, "processes"), ("ppo", 0, "inline")]
DELAY_S = 0.001  # per step; a run then takes some seconds
MOMENTS = ["begun", "running", "saved", "saved", "saved again", "saved again"]
MOST_S = 0.3  # that a process has left after its moment


@pytest.fixture(scope="module")
def host():
    host = Host()
    yield host
    host.close()


@pytest.fixture(scope="module")
def hashes(tmp_path_factory):
    room = tmp_path_factory.mktemp("twins")
    return {(algo, ahead): twin(algo, STEPS[algo], room / f"{algo}-{ahead}", **{AHEAD: ahead}) for algo, ahead in CASES}


@pytest.mark.long
@pytest.mark.parametrize(("algo", "ahead", "runtime"), rest_slow(*KILLED))
def test_a_run_whose_processes_are_killed_repeatedly_resumes_exactly(algo, ahead, runtime, host, hashes, tmp_path):
    path, chance = tmp_path / f"killed-{algo}", random.Random(f"{algo} {runtime}")
    order = {"run": settings(algo, STEPS[algo], path, runtime=runtime, **{AHEAD: ahead})}
    for when in [*chance.choices(MOMENTS, k=KILLS - 1), "saved again"]:
        ready = moments(path)[when]
        pid = host.start(tmp_path / "log", environ={PACE: str(DELAY_S)}, **order)
        kill_at(pid, ready, chance.uniform(0.0, MOST_S))
        assert host.wait() == -signal.SIGKILL, (tmp_path / "log").read_text()
        if (path / "run.json").exists():
            order = {"resume": str(path)}
    remove_shared_dir(make_shared_dir("sweep", 1))  # the next run deletes the shared directories of the killed ones
    result = resume(path)
    assert result.state == "SUCCEEDED", result.message
    assert result.resume == "exact"
    assert result.weights_sha256 == hashes[algo, ahead]
    assert result.env_steps == STEPS[algo]
    resumes = [event["details"] for event in events(path, "resume") if event["role"] == "supervisor"]
    assert len(resumes) >= KILLS - 1
    assert resumes[-1]["env_steps"] > 0
    require_ledger(path)
    require_single_records(path)


class RoleKiller:
    """An observer that kills the processes of worker slots one after the other, each when the run has progressed again."""

    def __init__(self, places, seed):
        self.places, self.chance, self.killed = list(places), random.Random(seed), []
        self._wait = 0

    def __call__(self, view):
        self._wait -= 1
        if not self.places or self._wait > 0 or view.training is None:
            return
        if self.places[0] == "manager" and not recorded(view.directory.path):
            return
        victim = child(self.places[0])
        if victim is not None:
            self.killed.append(self.places.pop(0))
            os.kill(victim.pid, signal.SIGKILL)
            self._wait = self.chance.randint(1, 4)  # polls, five a second


@pytest.mark.slow
@pytest.mark.parametrize(("algo", "ahead"), rest_slow(*CASES))
def test_killed_roles_are_replaced_and_the_run_ends_with_the_same_weights(algo, ahead, hashes, tmp_path):
    path = tmp_path / f"roles-{algo}"
    reaper = RoleKiller(["actor-0", "manager", "actor-1", "actor-0"], algo)
    with pace(4 * DELAY_S):
        result = train(settings(algo, STEPS[algo], path, runtime="processes", **{AHEAD: ahead}), [reaper])
    assert len(reaper.killed) == 4
    assert result.state == "SUCCEEDED", result.message
    assert result.weights_sha256 == hashes[algo, ahead]
    assert result.actor_restarts == 3
    assert [event["role"] for event in events(path, "restart")] == reaper.killed
    require_ledger(path)
    lines = require_single_records(path)
    judged = [line["env_steps"] for line in lines if line["kind"] == "evaluation" and not line["final"]]
    assert judged == sorted(set(judged)), "a manager that was started again judged the same weights again"


@pytest.mark.slow
@pytest.mark.parametrize(("algo", "ahead"), rest_slow(*CASES))
def test_a_killed_learner_is_resumed_up_to_the_configured_limit(algo, ahead, hashes, tmp_path):
    path = tmp_path / f"learner-{algo}"
    reaper = RoleKiller(["learner", "learner"], algo)
    with pace(2 * DELAY_S):
        result = train(settings(algo, STEPS[algo], path, runtime="processes", restarts=2, **{AHEAD: ahead}), [reaper])
    assert reaper.killed == ["learner", "learner"]
    assert result.state == "SUCCEEDED", result.message
    assert result.weights_sha256 == hashes[algo, ahead]
    assert len(events(path, "resume")) >= 2
    require_ledger(path)
    require_single_records(path)

"""A fault of an environment is written down with everything it takes to see it again in this process."""

from __future__ import annotations

import pytest

from steppe.compose.environment import DistributedEnvironment
from steppe.core.config.run import resolve_config
from steppe.core.contracts.errors import DamagedFile, EnvironmentFault, RunNotFound
from steppe.core.io import codec
from steppe.training.reproduce import reproduce
from steppe.training.resume import resume
from steppe.training.train import run_experiment

pytestmark = pytest.mark.integration

SMALL = {"actors": 2, "envs": 3, "segment_steps": 16, "hidden": (8,), "epochs": 1, "minibatch_size": 32}


def broken_run(env: str, name: str = "broken", **settings):
    layer = {**SMALL, "env": env, "name": name, "steps": 200_000, "runtime": "inline", **settings}
    result = run_experiment(resolve_config(("call", layer)))
    assert (result.state, result.reason) == ("FAILED", "environment_fault"), result.message
    return result


def kept(result):
    return codec.unpack((result.path / result.fault.details["recording"]).read_bytes())


@pytest.mark.parametrize(
    ("env", "settings", "beginning"),
    [
        ("tests.support.broken_envs:Unlucky", {}, "state"),
        ("tests.support.broken_envs:tests/Unlucky-v0", {"envs": 8}, "state"),
        ("tests.support.broken_envs:Opaque", {}, "after"),
    ],
    ids=["loop", "native", "unreadable"],
)
def test_the_same_exception_at_the_same_step(env, settings, beginning):
    result = broken_run(env, seed=3, **settings)
    told = result.fault.details
    assert told["recording"] == "faults/001.bin"
    assert result.message.endswith("; reproduce it with: steppe reproduce broken --fault 1")
    circumstances = kept(result)
    assert beginning in circumstances["origin"], "this world was meant to be followed in another way"
    assert result.updates > 0, "the fault came in the first segment: it shows little"
    seen = reproduce("broken")
    assert seen.matched
    assert (seen.found.exception, seen.found.place["step"]) == ("ArithmeticError", told["step"])
    assert seen.found.place["env_index"] == told["env_index"]
    assert seen.found.traceback.rstrip().endswith("ArithmeticError: out of luck")
    assert "broken_envs.py" in seen.found.traceback
    assert not seen.notes
    assert reproduce("broken").found == seen.found, "again it is the same"


def test_it_takes_the_recorded_actions():
    """Oracle: with the actions changed, the environment's numbers fall otherwise, and nothing is reproduced."""
    result = broken_run("tests.support.broken_envs:Unlucky", seed=3)
    path = result.path / result.fault.details["recording"]
    circumstances = codec.unpack(path.read_bytes())
    assert len(circumstances["actions"]) <= SMALL["segment_steps"]
    circumstances["actions"][-1] = 0  # an even action never raises
    path.write_bytes(codec.pack(circumstances))
    seen = reproduce("broken")
    assert not seen.matched
    assert seen.found is None


def test_what_no_seed_decides_is_not_reproduced_and_not_claimed():
    broken_run("tests.support.broken_envs:Moody", seed=1)
    seen = reproduce("broken")
    assert not seen.matched


@pytest.mark.parametrize("where", ["step", "reset"])
def test_faults_of_processes_and_of_resets(where):
    settings = {"runtime": "processes", "environment.kwargs": {"at_step": 20, "where": where}}
    result = broken_run("steppe/Failing-v0", mode="sync", **settings)
    told = result.fault.details
    number = int(told["reproduce"].removeprefix("steppe reproduce broken --fault "))
    seen = reproduce("broken", number)
    assert seen.matched
    assert seen.found.exception == "RuntimeError"
    assert seen.found.place["step"] == told["step"]
    assert bool(told["step"]) == (where == "step")
    assert seen.recording == result.path / told["recording"]
    assert all(reproduce("broken", other).matched for other in range(1, len(list(seen.recording.parent.iterdir())) + 1))


def test_a_first_reset_that_raises():
    broken_run("steppe/Failing-v0", **{"environment.kwargs": {"at_step": 0, "where": "reset"}})
    seen = reproduce("broken")
    assert seen.matched
    assert seen.steps == 0


def test_a_resumed_run_adds_to_its_faults():
    broken_run("tests.support.broken_envs:Unlucky", seed=3)
    again = resume("broken")
    assert again.reason == "environment_fault"
    assert again.fault.details["recording"] == "faults/002.bin"
    for number in (1, 2, None):
        assert reproduce("broken", number).matched
    with pytest.raises(RunNotFound, match="has no fault 3; there are: 1, 2"):
        reproduce("broken", 3)


def test_a_run_elsewhere_is_named_by_its_path(tmp_path):
    place = tmp_path / "elsewhere" / "run"
    result = broken_run("tests.support.broken_envs:Unlucky", name=None, run_dir=place, seed=3)
    assert result.message.endswith(f"steppe reproduce {place} --fault 1")
    assert reproduce(place).matched


def test_workers_of_an_environment_keep_nothing():
    """Their directory goes with them, so nobody is sent there."""
    from steppe.compose.agent import DistributedAgent

    environment = DistributedEnvironment("tests.support.broken_envs:Unlucky", 1, runtime="inline", seed=3)
    agent = DistributedAgent("ppo", config={"hidden": (8,)}).bind(environment)
    with environment, pytest.raises(EnvironmentFault, match="out of luck") as raised:
        environment.generate_batch_experiences(agent, 20_000)
    assert "reproduce" not in str(raised.value)
    assert "recording" not in raised.value.details


def test_a_run_without_faults_and_a_damaged_record(tmp_path):
    fine = run_experiment(resolve_config(("call", {**SMALL, "env": "CartPole-v1", "steps": 200, "runtime": "inline"})))
    with pytest.raises(RunNotFound, match="has no recorded fault"):
        reproduce(fine.path)
    result = broken_run("tests.support.broken_envs:Unlucky", seed=3)
    path = result.path / result.fault.details["recording"]
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(DamagedFile, match=r"001\.bin is damaged"):
        reproduce("broken")
    path.write_bytes(codec.pack({"schema": 1, "actor": 0}))
    with pytest.raises(DamagedFile, match="does not describe a fault"):
        reproduce("broken")


def test_actions_are_kept_from_the_seeds_on_where_nothing_can_be_read(monkeypatch):
    """Without room for all of them, the record says that it is not whole."""
    from steppe.roles import action_log

    result = broken_run("tests.support.broken_envs:Opaque", name="all", seed=3)
    circumstances = kept(result)
    rounds, length = result.version + 1, SMALL["segment_steps"]  # what the last round taught was not out yet
    assert rounds > 1
    assert rounds * length < len(circumstances["actions"]) <= (rounds + 1) * length, "a part of the segment under way"
    assert circumstances["whole"]
    monkeypatch.setattr(action_log, "MAX_ACTION_BYTES", 0)
    short = kept(broken_run("tests.support.broken_envs:tests/Closed-v0", name="short", seed=3, envs=8))
    assert not short["whole"]
    assert len(short["actions"]) <= SMALL["segment_steps"]
    assert any("only the last actions were kept" in note for note in reproduce("short").notes)

"""Numbers of actors and environments chosen by trying."""

import itertools
import json
import subprocess
import sys

import pytest

from steppe.core.config.run import resolve_config
from steppe.core.contracts.errors import ConfigError
from steppe.training import autotune
from steppe.training.autotune import StepCost, choose_actors, choose_envs, resolve_auto_settings

pytestmark = pytest.mark.integration
US = 1e-6


def costs(*rows):
    return [StepCost(envs, collect * US, learn * US, 1.0) for envs, collect, learn in rows]


class TestEnvs:
    def test_the_fewest_that_come_near_the_best(self):
        trial = costs((1, 30, 5), (2, 20, 5), (4, 11.5, 5), (8, 10.2, 5), (16, 10, 5))
        assert choose_envs(trial, overlap=True).envs == 8  # 4 come to 87 %

    def test_a_slow_learner_makes_more_of_them_useless(self):
        trial = costs((1, 30, 40), (2, 20, 40), (4, 10, 40))
        assert choose_envs(trial, overlap=True).envs == 1

    def test_copies_that_sleep_one_after_the_other_bring_nothing(self):
        trial = costs((1, 10_010, 10), (2, 10_008, 10), (4, 10_007, 10), (8, 10_006, 10))
        assert choose_envs(trial, overlap=True).envs == 1

    def test_taking_turns_both_count(self):
        trial = costs((1, 30, 40), (2, 10, 40), (4, 8, 40))
        assert choose_envs(trial, overlap=False).envs == 2


class TestActors:
    def test_one_that_feeds_the_learner_is_enough(self):
        assert choose_actors(StepCost(128, 1 * US, 2 * US, 1.0), cores=16) == 1

    def test_as_many_as_feed_it(self):
        assert choose_actors(StepCost(8, 40 * US, 9 * US, 1.0), cores=16) == 4

    def test_actors_that_compute_leave_a_core_to_a_busy_learner(self):
        assert choose_actors(StepCost(8, 10 * US, 4 * US, 1.0), cores=2) == 1
        assert choose_actors(StepCost(8, 1000 * US, 4 * US, 1.0), cores=2) == 2

    def test_actors_that_wait_need_no_cores(self):
        assert choose_actors(StepCost(1, 10_000 * US, 10 * US, 0.02), cores=2) == autotune.MAX_ACTORS
        assert choose_actors(StepCost(1, 10_000 * US, 1000 * US, 0.02), cores=2) == 9


def test_an_environment_that_sleeps_gets_many_actors():
    chosen = resolve_auto_settings(
        resolve_config(("call", {"env": "steppe/Sleep-v0", "actors": "auto", "envs": "auto"}))
    )
    assert chosen.config.actors == autotune.MAX_ACTORS  # sleeping takes 10 ms, learning from a step some µs
    assert chosen.sources["actors"] == chosen.sources["envs"] == "calibration"
    assert chosen.auto == ()


def test_only_what_is_asked_for_is_chosen():
    resolved = resolve_config(("call", {"env": "steppe/Sleep-v0", "actors": "auto", "envs": 3, "mode": "async"}))
    assert resolved.auto == ("actors",)
    chosen = resolve_auto_settings(resolved)
    assert (chosen.config.envs, chosen.sources["envs"]) == (3, "call")
    assert chosen.config.actors > 1
    plain = resolve_config(("call", {"env": "CartPole-v1"}))
    assert resolve_auto_settings(plain) is plain


def test_a_single_run_has_one_actor():
    resolved = resolve_config(("call", {"env": "steppe/Sleep-v0", "actors": "auto", "envs": 1, "mode": "single"}))
    assert resolve_auto_settings(resolved).config.actors == 1


@pytest.mark.parametrize("algo", ["ppo", "dqn"])
def test_a_vector_world_gets_many_environments_and_one_actor_on_two_cores(monkeypatch, algo):
    monkeypatch.setattr(autotune, "usable_cores", lambda: 2)
    chosen = resolve_auto_settings(
        resolve_config(("call", {"env": "CartPole-v1", "algo": algo, "actors": "auto", "envs": "auto"}))
    )
    assert chosen.config.actors == 1
    assert chosen.config.envs in autotune.VECTOR_ENV_COUNTS


class TenStepsAreTried:
    """A clock that moves only when it is read: 1 step to compile, then 3 in each of 3 tries."""

    def __init__(self):
        self.reads = itertools.count()

    def perf_counter(self):
        return 0.02 * next(self.reads)

    thread_time = perf_counter


@pytest.mark.regression
def test_trying_may_end_between_two_episodes(monkeypatch):
    """All environments see a cue, wait and answer: nine steps, and the tenth resets all of them."""
    monkeypatch.setattr(autotune, "time", TenStepsAreTried())
    settings = {"algo": "r2d2", "envs": 256, "actors": "auto", "mode": "async", "environment.kwargs": {"delay": 7}}
    chosen = resolve_auto_settings(resolve_config(("call", {"env": "steppe/Recall-v0", **settings})))
    assert chosen.config.actors >= 1


def test_other_words_are_no_numbers():
    with pytest.raises(ConfigError, match="actors='many'"):
        resolve_config(("call", {"env": "CartPole-v1", "actors": "many"}))
    with pytest.raises(ConfigError, match="steps='auto'"):
        resolve_config(("call", {"env": "CartPole-v1", "steps": "auto"}))


@pytest.mark.slow
def test_from_the_command_line_the_numbers_become_the_runs_own(tmp_path):
    slow = "-s environment.kwargs={delay_s=0.05}"  # so long that a busy machine's learner still wants more than there may be
    words = f"train steppe/Sleep-v0 --actors auto --envs auto --steps 600 --name mine --json -s segment_steps=4 -s evaluation.episodes=1 {slow}"
    code = "from steppe.cli.main import entry; entry()"
    done = subprocess.run(
        [sys.executable, "-c", code, *words.split()], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["actors"], summary["envs"]) == (autotune.MAX_ACTORS, 1)
    written = json.loads((tmp_path / "runs" / "mine" / "run.json").read_text())
    assert written["config"]["actors"] == autotune.MAX_ACTORS
    assert written["sources"]["actors"] == "calibration"

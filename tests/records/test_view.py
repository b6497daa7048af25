"""The view of a run, compared with sums calculated by hand."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import pytest

from steppe.core.config.run import resolve_config
from steppe.core.contracts.errors import DamagedFile
from steppe.core.contracts.reports import ActorReport, EvaluationReport, EventReport, TrainingReport
from steppe.core.contracts.transport import ACTORS, EVALUATIONS, EVENTS, TRAINING
from steppe.records import view as module
from steppe.records.buffered_board import BufferedBoard
from steppe.records.run_directory import RunDirectory
from steppe.records.view import RunView

pytestmark = pytest.mark.integration

SUMMARY = (  # as `steppe train --json` documents it
    "run, state, reason, env, algo, runtime, mode, actors, envs, seed, env_steps, episodes, agent_steps, updates, version, weights_sha256, "
    "train_return_mean, eval_return_mean, eval_return_std, eval_episodes, eval_terminated_share, eval_agent_returns, wall_s, train_s, time_to_target_s, "
    "steps_per_s, lag_mean, lag_max, dropped_segments, refused_segments, actor_restarts, resume, time_shares, profile"
)


@pytest.fixture
def directory(tmp_path):
    keys = {"env": "CartPole-v1", "actors": 2, "mode": "async", "envs": 4, "seed": 5, "steps": 9000}
    made = resolve_config(("flag", {**keys, "run_dir": tmp_path / "run", "target_return": 400.0}))
    directory = RunDirectory.create(made.config, made.sources)
    yield directory
    directory.store.close()
    directory.release()


class Roles:
    """Posts the reports of a run's roles; time advances by a second per report."""

    def __init__(self, directory):
        self.store, self.now = directory.store, 1000.0

    def _post(self, topic, kind, keys):
        self.now += 1.0
        self.store.post(topic, kind(run="run", time_s=self.now, **keys).record())

    def training(self, env_steps, train_s, **keys):
        counts = {"version": env_steps // 100, "updates": env_steps // 50, "env_steps": env_steps, "train_s": train_s}
        self._post(TRAINING, TrainingReport, {**counts, **keys})

    def actor(self, actor, episodes=(), **keys):
        counts = {"epoch": 0, "version": 1, "sequence": 2, "env_steps": 10}
        self._post(ACTORS, ActorReport, {**counts, "actor": actor, "episodes": list(episodes), **keys})

    def evaluation(self, env_steps, returns, **keys):
        mean = sum(returns) / len(returns)
        counts = {"version": env_steps // 100, "updates": 1, "env_steps": env_steps, "train_s": env_steps / 1000}
        verdict = {"returns": returns, "lengths": [1] * len(returns), "return_mean": mean, "return_std": 2.5}
        sums = {"duration_s": 0.1, "weights_sha256": f"evaluated at {env_steps}"}
        self._post(EVALUATIONS, EvaluationReport, {**counts, **verdict, **sums, **keys})

    def event(self, kind, role, **details):
        self._post(EVENTS, EventReport, {"kind": kind, "role": role, "details": details})


@pytest.fixture
def roles(directory):
    return Roles(directory)


def seen(directory) -> RunView:
    view = RunView(directory)
    view.refresh()
    return view


def test_view_of_a_run_without_reports(directory):
    view = seen(directory)
    assert (view.state, view.ended, view.env_steps, view.version, view.episodes) == ("PENDING", False, 0, 0, 0)
    assert view.total_steps == 9000
    unknown = (view.steps_per_s, view.recent_steps_per_s, view.train_return_mean, view.lag_mean, view.lag_max)
    assert unknown == (None,) * 5
    assert (view.dropped, view.actor_restarts, view.time_shares, view.target_reached) == (0, 0, {}, False)
    summary = view.summary()
    assert ", ".join(summary) == SUMMARY
    for key in ("reason", "weights_sha256", "train_return_mean", "eval_return_mean", "eval_episodes", "steps_per_s"):
        assert summary[key] is None, key
    assert summary["time_shares"] is None
    json.dumps(summary, allow_nan=False)


def test_counts_and_speeds(directory, roles):
    roles.training(1000, 2.0)
    roles.training(4000, 20.0, lags={0: 2, 1: 1, 3: 1}, dropped={"stale": 3, "other": 1})
    view = seen(directory)
    assert (view.env_steps, view.version, view.updates, view.train_s) == (4000, 40, 80, 20.0)
    assert view.steps_per_s == 200.0
    assert view.recent_steps_per_s == 3000 / 18
    assert (view.lag_mean, view.lag_max, view.dropped) == (1.0, 3, 4)


@pytest.mark.regression
def test_episodes_after_the_checkpoint_of_a_resumed_run_are_counted_once(directory, roles):
    """Actors play and report them again."""
    roles.actor(0, [(1.0, 5)] * 6)
    roles.actor(1, [(1.0, 5)] * 4)
    roles.event("resume", "supervisor", checkpoint=3, episodes=7, env_steps=40)
    roles.event("resume", "actor-0", how="exact")
    roles.actor(0, [(1.0, 5)] * 2)
    roles.actor(1, [(1.0, 5)], num_episodes=5)
    assert seen(directory).episodes == 7 + 2 + 5
    roles.event("resume", "supervisor", checkpoint=None)
    roles.actor(0, [(1.0, 5)])
    assert seen(directory).episodes == 1, "without a checkpoint everything is played again"


def test_recent_speed_ignores_old_reports(directory, roles):
    for k in range(1, 41):
        roles.training(1000 * k if k <= 20 else 20_000 + 100 * (k - 20), float(k))
    assert seen(directory).recent_steps_per_s == 100.0


def test_the_training_return_is_over_the_last_hundred_episodes_of_all_actors(directory, roles):
    roles.actor(0, [(1000.0, 50)] * 30)
    roles.actor(1, [(10.0, 5)] * 60)
    roles.actor(0, [(20.0, 15)] * 40)
    view = seen(directory)
    assert view.episodes == 130
    assert view.train_return_mean == (60 * 10 + 40 * 20) / 100
    assert view.train_length_mean == (60 * 5 + 40 * 15) / 100


def test_a_late_reader_sees_the_same_as_a_continuous_one(directory, roles):
    watching = RunView(directory)
    for k in range(1, 30):
        roles.actor(k % 2, [(float(k), k)], phases={"env": k, "policy": 1.0})
        roles.training(100 * k, float(k), lags={1: k})
        if k % 7 == 0:
            roles.evaluation(100 * k, [float(k)])
            roles.event("note", "manager", k=k)
        if k % 3 == 0:
            watching.refresh()
    watching.refresh()
    late = seen(directory)
    assert watching.history == late.history
    assert [steps for steps, _ in late.history] == [100 * k for k in range(1, 30)]
    assert late.history[2] == (300, 2.0)
    assert watching.evaluations == late.evaluations == [(700, 7.0), (1400, 14.0), (2100, 21.0), (2800, 28.0)]
    assert list(watching.events) == list(late.events)
    now = {"wall_s": None}
    assert watching.summary() | now == late.summary() | now


def test_refresh_reads_only_what_is_new(directory, roles, monkeypatch):
    roles.training(100, 1.0)
    view = seen(directory)
    asked = []
    real = directory.store.read
    monkeypatch.setattr(directory.store, "read", lambda *args: asked.append(args[1]) or real(*args))
    roles.training(200, 2.0)
    view.refresh()
    assert max(asked) > 0
    assert view.env_steps == 200


def test_many_records_are_read_in_pages(directory, roles, monkeypatch):
    monkeypatch.setattr(module, "_PAGE", 4)
    for k in range(1, 12):
        roles.actor(0, [(float(k), 1)])
    assert seen(directory).episodes == 11


def test_history_stays_bounded_and_keeps_its_ends(directory, roles, monkeypatch):
    monkeypatch.setattr(module, "_HISTORY", 16)
    roles.actor(0, [(1.0, 1)])
    for k in range(1, 201):
        roles.training(k, float(k))
    history = seen(directory).history
    assert len(history) <= 16
    assert (history[0][0], history[-1][0]) == (1, 200)
    assert history == sorted(history)


def test_time_shares_are_averaged_over_actors(directory, roles):
    roles.actor(0, phases={"env": 3.0, "policy": 1.0, "blocked": 0.0, "other": 0.0})
    roles.actor(1, phases={"env": 1.0, "policy": 1.0, "blocked": 2.0, "other": 0.0})
    roles.training(1, 1.0, phases={"wait": 1.0, "sample": 0.0, "learn": 3.0, "publish": 0.0, "other": 0.0})
    shares = seen(directory).time_shares
    assert shares["actor"] == {"env": 0.5, "policy": 0.25, "blocked": 0.25, "other": 0.0}
    assert shares["learner"] == {"wait": 0.25, "sample": 0.0, "learn": 0.75, "publish": 0.0, "other": 0.0}


def test_restarts_are_counted(directory, roles):
    roles.actor(0, epoch=2)
    roles.actor(1, epoch=1)
    assert seen(directory).actor_restarts == 3
    for _ in range(4):
        roles.event("restart", "actor-0")
    roles.event("restart", "manager")
    assert seen(directory).actor_restarts == 4


def test_events_leave_spans_out(directory, roles):
    roles.event("span", "actor-0", phase="collect", start_s=0, end_s=1)
    roles.event("checkpoint", "learner", path="x")
    assert [event.kind for event in seen(directory).events] == ["checkpoint"]


def test_the_summary_of_a_run_that_reached_its_target(directory, roles):
    roles.evaluation(1000, [100.0, 300.0])
    roles.evaluation(2000, [450.0, 450.0], reached=True, final=True)
    roles.evaluation(3000, [460.0, 440.0], reached=True)
    roles.training(3000, 3.0, weights_sha256="learner's", final=True)
    directory.store.set_status("SUCCEEDED", "target_reached")
    view = seen(directory)
    assert view.target_reached
    assert view.ended
    assert (view.last_evaluation.env_steps, view.best_evaluation.env_steps) == (3000, 2000)
    summary = view.summary()
    assert ", ".join(summary) == SUMMARY
    expected = {
        "run": "run",
        "state": "SUCCEEDED",
        "reason": "target_reached",
        "env": "CartPole-v1",
        "algo": "ppo",
        "runtime": "processes",
        "mode": "async",
        "actors": 2,
        "envs": 4,
        "seed": 5,
        "env_steps": 3000,
        "episodes": 0,
        "agent_steps": None,
        "updates": 60,
        "version": 20,
        "weights_sha256": "evaluated at 2000",
        "eval_return_mean": 450.0,
        "eval_return_std": 2.5,
        "eval_episodes": 2,
        "eval_agent_returns": None,
        "train_s": 3.0,
        "time_to_target_s": 2.0,
        "steps_per_s": 1000.0,
    }
    assert {key: summary[key] for key in expected} == expected


def test_the_learner_counts_episodes_and_repeated_reports_of_a_restarted_actor_count_once(directory, roles):
    roles.actor(0, [(1.0, 10), (2.0, 10)], total_episodes=2)
    roles.actor(1, [(9.0, 10)], total_episodes=1)
    roles.training(20, 1.0, episodes=2)
    roles.actor(0, [(3.0, 10), (4.0, 10)], total_episodes=4)
    view = seen(directory)
    assert (view.episodes, view.played_episodes) == (2, 5)
    roles.actor(0, [(3.0, 10)], epoch=1, total_episodes=3)  # killed, and continued from an earlier segment
    roles.actor(0, [(4.0, 10), (5.0, 10)], epoch=1, total_episodes=5)
    roles.training(50, 2.0, episodes=5)
    view.refresh()
    assert [score for score, _ in view.recent] == [1.0, 2.0, 9.0, 3.0, 4.0, 5.0]
    assert (view.episodes, view.played_episodes, view.summary()["episodes"]) == (5, 6, 5)
    roles.event("resume", "supervisor", env_steps=20, episodes=2)
    roles.actor(0, [(3.5, 10)], total_episodes=3)
    roles.training(30, 3.0, episodes=3)
    view.refresh()
    assert view.recent[-1] == (3.5, 10)
    assert view.episodes == 3


def test_without_a_final_evaluation_the_learners_return_is_used(directory, roles):
    roles.evaluation(1000, [100.0])
    roles.training(3000, 3.0, weights_sha256="learner's", final=True)
    summary = seen(directory).summary(envs=9)
    assert (summary["version"], summary["weights_sha256"]) == (30, "learner's")
    assert (summary["eval_return_mean"], summary["eval_episodes"], summary["time_to_target_s"]) == (None, None, None)
    assert summary["envs"] == 9


def test_a_summary_with_non_finite_numbers_is_json(directory, roles):
    roles.actor(0, [(math.nan, 1)])
    roles.training(10, 1.0)
    summary = seen(directory).summary()
    assert summary["train_return_mean"] is None
    json.dumps(summary, allow_nan=False)


def test_elapsed_time_ends_with_the_run(directory, monkeypatch):
    started = directory.store.status().started_s
    monkeypatch.setattr(module.time, "time", lambda: started + 50.0)
    assert seen(directory).wall_s == 50.0
    directory.store.set_status("STOPPED", "interrupted")
    view = seen(directory)
    assert view.wall_s == view.status.changed_s - started


def test_a_long_history_is_read_in_pages(directory, roles, monkeypatch):
    """However many records are unread, one page of each kind is in memory, and reports of actors and learner stay in
    order of time.
    """
    monkeypatch.setattr(module, "_PAGE", 4)
    for k in range(1, 41):
        roles.actor(0, [(float(k), 1)])
        roles.training(100 * k, float(k))
    view, pages, held, read = RunView(directory), [], [], BufferedBoard.read

    def watched(*words):
        pages.append(read(*words))
        taken = view.episodes + (view.training.env_steps // 100 if view.training is not None else 0)
        held.append(sum(map(len, pages)) - taken)
        return pages[-1]

    monkeypatch.setattr(BufferedBoard, "read", watched)
    view.refresh()
    assert sum(map(len, pages)) == 80
    assert 4 < max(held) <= 2 * 4, "reports that were read and not taken yet"
    in_order = [(100 * k, pytest.approx((k + 1) / 2)) for k in range(1, 41)]  # the mean of the returns 1, 2, … k
    assert view.history == in_order


def test_a_dead_owner_is_detected(directory):
    script = (
        "import sys; from pathlib import Path; from steppe.records.store import RunStore\n"
        "RunStore(Path(sys.argv[1])).set_status('RUNNING')\n"
    )
    subprocess.run([sys.executable, "-c", script, str(directory.store.path)], check=True)
    view = seen(directory)
    assert (view.state, view.reason, view.ended) == ("LOST", "process_dead", True)


def test_an_invalid_record_is_reported(directory):
    directory.store.post(TRAINING, {"run": "r", "version": "many"})
    with pytest.raises(DamagedFile, match=r"metrics\.training"):
        RunView(directory).refresh()

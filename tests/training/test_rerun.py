"""An async run is repeated bit for bit from its log of arrivals, whatever happened during it."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal

import pytest

from steppe.core.config.run import resolve_config
from steppe.core.contracts.errors import ConfigError, Conflict, DamagedFile, UsageError
from steppe.core.contracts.reports import EventReport
from steppe.core.contracts.transport import COMMANDS, EVENTS
from steppe.records.arrivals import read_arrivals
from steppe.records.run_directory import RunDirectory
from steppe.training.rerun import rerun
from steppe.training.resume import resume
from steppe.training.train import run_experiment
from tests.support.tuning import command_of

pytestmark = pytest.mark.integration

ASYNC = {
    "env": "CartPole-v1",
    "mode": "async",
    "name": "first",
    "flow.record_arrivals": True,
    "hidden": (16,),
    "seed": 5,
}
JUDGE = {"evaluation.episodes": 2, "evaluation.every_steps": 10**9}
PPO = {"algo": "ppo", "actors": 3, "envs": 4, "segment_steps": 32, "epochs": 2, "steps": 8_000}
DQN = {
    "algo": "dqn", "actors": 2, "envs": 2, "segment_steps": 8, "learning_starts": 300, "batch_size": 16, "steps": 2_500,
    "prioritized": True, "n_step": 3, "flow.publish_every": 3, "buffer_size": 1_000,
}  # fmt: skip


def train(*layers, observers=(), **settings):
    merged = {key: value for layer in layers for key, value in layer.items()}
    return run_experiment(resolve_config(("call", {**ASYNC, **JUDGE, **merged, **settings})), observers=observers)


def lines(result):
    return [json.loads(line) for line in (result.path / "arrivals.jsonl").read_text().splitlines()]


def rewrite(result, entries):
    (result.path / "arrivals.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))


def assert_repeated(original, again):
    assert again.matched is True, again.message
    assert again.weights_sha256 == again.expected_sha256 == original.weights_sha256
    assert (again.state, again.reason, again.rerun_of) == ("SUCCEEDED", "log_done", original.run)
    for key in ("env_steps", "updates", "version", "lag_mean", "eval_return_mean", "dropped_segments"):
        assert getattr(again, key) == getattr(original, key), key


@pytest.mark.parametrize(
    ("settings", "drops"),
    [
        ((PPO, {"flow.max_lag": 0}), True),
        ((PPO, {"environment.vector": "loop", "environment.frame_stack": 2, "normalize_obs": True}), False),
        ((DQN, {}), False),
        ((PPO, {"actors": 1, "steps": 4_000}), False),
    ],
    ids=["ppo native", "ppo loop", "dqn prioritized", "lone actor"],
)
def test_a_run_in_processes_is_repeated_in_one(settings, drops):
    original = train(*settings, runtime="processes")
    assert original.reason == "steps_done"
    assert original.lag_mean > 0 or original.dropped_segments > 0, "nothing was asynchronous: this shows little"
    assert bool(original.dropped_segments) == drops or not drops
    again = rerun("first")
    assert_repeated(original, again)
    record = RunDirectory.open(again.path).record
    assert (again.path.name, record["rerun_of"]) == ("first-rerun", "first")
    assert record["sources"]["runtime"] == "rerun"
    assert record["sources"]["seed"] == "call"


def test_the_log_has_the_segments_that_were_learned_from():
    """Counted independently: the kept arrivals are exactly the run's segments, the others its dropped ones."""
    original = train(PPO, {"flow.max_lag": 0}, runtime="inline")
    (life,) = read_arrivals(original.path / "arrivals.jsonl")
    rows = [row for batch in life.batches for row in batch]
    assert sum(not row.kept for row in rows) == original.dropped_segments
    for actor in range(3):
        assert [row.sequence for row in rows if row.actor == actor] == list(range(sum(r.actor == actor for r in rows)))
    assert (life.begin.steps, life.end.updates, life.end.env_steps) == (8_000, original.updates, original.env_steps)
    assert life.end.weights_sha256 == original.weights_sha256


def after_updates(count):
    return lambda view: view.training is not None and view.updates >= count


def test_a_run_stopped_while_learning_is_repeated():
    """Its last group would allow hundreds of updates, most of which the stop prevents."""
    greedy = {"samples_per_insert": 200.0, "segment_steps": 32, "steps": 50_000}
    original = train(DQN, greedy, runtime="processes", observers=[after_updates(300)])
    assert original.state == "STOPPED"
    assert_repeated(original, rerun("first"))


def test_a_run_resumed_with_another_length_is_repeated():
    train(DQN, {"steps": 50_000}, runtime="processes", observers=[after_updates(200)])
    half = rerun("first")
    assert half.matched
    whole = resume("first", steps=2_000)
    assert whole.resume == "exact"
    assert len(read_arrivals(whole.path / "arrivals.jsonl")) == 2
    again = rerun("first")
    assert again.path.name == "first-rerun-2"
    assert_repeated(whole, again)


class Setter:
    """An observer that sets hyperparameters once the learner has reported, and ends the run some updates after the
    reply.
    """

    def __init__(self, **values):
        self.values, self.posted, self.answer = values, False, None

    def __call__(self, view):
        store = view.directory.store
        if view.updates and not self.posted:
            self.posted = True
            store.post(COMMANDS, command_of(self.values, self.values, "on the way"))
        answers = [event["details"] for _, event in store.read(EVENTS) if event["kind"] == "command"]
        self.answer = next((one for one in answers if one["id"] == "on the way"), None)
        return self.answer is not None and view.updates > self.answer["updates"] + 20


@pytest.mark.regression
def test_hyperparameters_set_during_the_run_are_set_again_at_the_same_update():
    """Once while it runs and once while it is stopped; both change all later updates."""
    setter = Setter(learning_rate=0.02, epsilon_end=0.5)
    stopped = train(DQN, {"steps": 10**9}, runtime="inline", observers=[setter])
    assert (stopped.state, setter.answer["obeyed"]) == ("STOPPED", True)
    RunDirectory.open("first").store.post(COMMANDS, command_of({"learning_rate": 0.001}, identity="while stopped"))
    whole = resume("first", steps=stopped.env_steps + 500)
    again = rerun("first")
    assert_repeated(whole, again)
    events = [event for _, event in RunDirectory.open(again.path).store.read(EVENTS)]
    made = [event["details"]["values"] for event in events if event["kind"] == "command"]
    assert made == [{"learning_rate": 0.02, "epsilon_end": 0.5}, {"learning_rate": 0.001}]


@pytest.mark.regression
def test_a_run_resumed_with_other_settings_is_refused():
    train(DQN, {"steps": 500}, runtime="inline")
    store = RunDirectory.open("first").store
    store.post(COMMANDS, command_of({"max_grad_norm": 1.0}))
    assert rerun("first").matched, "nothing was learned with it yet"
    resume("first", steps=1_000)
    with pytest.raises(UsageError, match="max_grad_norm of first was changed before it was resumed"):
        rerun("first")


class Killer:
    """An observer that kills one process of the run with -9 once the learner has reported."""

    def __init__(self, role, after=0):
        self.role, self.after, self.done = f"steppe-{role}", after, False

    def __call__(self, view):
        if not self.done and view.training is not None and view.updates > self.after:
            self.done = True
            (victim,) = [child for child in multiprocessing.active_children() if child.name == self.role]
            os.kill(victim.pid, signal.SIGKILL)


@pytest.mark.slow
def test_a_run_whose_learner_was_killed_and_resumed_is_repeated():
    killer = Killer("learner", after=300)
    settings = {"restarts": 1, "checkpoint.every_s": 0.2, "steps": 6_000}
    original = train(DQN, settings, runtime="processes", observers=[killer])
    assert killer.done
    assert (original.state, original.resume) == ("SUCCEEDED", "exact")
    assert_repeated(original, rerun("first"))


@pytest.mark.slow
def test_a_run_whose_actor_was_killed_is_repeated():
    killer = Killer("actor-1")
    original = train(DQN, {"steps": 6_000}, runtime="processes", observers=[killer])
    assert killer.done
    assert original.actor_restarts == 1
    assert_repeated(original, rerun("first"))


class Scaling:
    """An observer that changes the number of actors, and waits each time until the learner has continued."""

    def __init__(self, *counts):
        self.counts, self.after = list(counts), 0

    def __call__(self, view):
        if self.counts and view.updates > self.after:
            count, self.after = self.counts.pop(0), view.updates + 20
            command = {"command": "scale", "id": f"to {count}", "issuer": "test", "actors": count}
            view.directory.store.post(COMMANDS, command)


@pytest.mark.regression
@pytest.mark.slow
def test_a_run_that_was_scaled_is_repeated():
    """One actor is added, removed, and added again at its former position."""
    scaling = Scaling(2, 1, 2)
    settings = {"actors": 1, "flow.max_actors": 2, "steps": 6_000}
    original = train(DQN, settings, runtime="processes", observers=[scaling])
    assert not scaling.counts
    assert {row[0] for entry in lines(original) for row in entry.get("take", [])} == {0, 1}
    assert_repeated(original, rerun("first"))


def test_a_run_that_reached_its_target_is_repeated_up_to_that_point():
    settings = {"target_return": 5.0, "steps": 100_000, "evaluation.every_steps": 2_000, "evaluation.max_share": 1.0}
    original = train(PPO, settings, runtime="inline")
    assert original.reason == "target_reached"
    again = rerun("first")
    assert again.matched
    assert (again.version, again.eval_return_mean) == (original.version, original.eval_return_mean)


@pytest.mark.slow
def test_a_killed_run_is_repeated_up_to_its_newest_checkpoint():
    """A kill leaves groups after the last mark, an incomplete line, and no valid summary."""
    original = train(DQN, {"checkpoint.every_episodes": 20}, runtime="inline")
    entries = lines(original)
    marks = [index for index, entry in enumerate(entries) if "mark" in entry]
    assert len(marks) > 2
    cut = marks[-2]
    rewrite(original, entries[: cut + 3])
    with open(original.path / "arrivals.jsonl", "ab") as log:
        log.write(b'{"take":[[0,1')
    again = rerun("first")
    assert again.matched
    assert again.weights_sha256 == entries[cut]["mark"]["weights_sha256"] != original.weights_sha256
    assert again.updates == entries[cut]["mark"]["updates"]


def test_another_order_gives_other_weights_and_is_reported():
    """The log decides: the same segments in another order do not repeat the recorded run."""
    original = train(PPO, {"environment.vector": "loop"}, runtime="inline")
    entries = lines(original)
    for entry in entries:
        entry.get("take", []).reverse()
    rewrite(original, entries)
    again = rerun("first")
    assert again.matched is False
    assert (again.updates, again.env_steps) == (original.updates, original.env_steps)
    assert again.message == "the weights are not those of first"


def test_an_impossible_log_is_an_error_without_waiting():
    original = train(PPO, {"steps": 3_000}, runtime="inline")
    entries = lines(original)
    entries[-1]["mark"]["updates"] += 1
    rewrite(original, entries)
    again = rerun("first")
    assert again.state == "FAILED"
    assert "its log ended" in again.message


def test_a_missing_version_is_an_error_without_waiting():
    original = train(PPO, {"steps": 3_000}, runtime="inline")
    entries = lines(original)
    last = max(index for index, entry in enumerate(entries) if "take" in entry)
    entries[last]["take"][-1][2] += 50
    rewrite(original, entries)
    again = rerun("first")
    assert again.state == "FAILED"
    assert again.matched is None
    assert "cannot be repeated here" in again.message


def test_initial_weights_of_another_run_are_used_again():
    taught = run_experiment(resolve_config(("call", {**JUDGE, **PPO, "env": "CartPole-v1", "name": "taught", "actors": 1,
                                              "hidden": (16,), "runtime": "inline"})))  # fmt: skip
    original = train(PPO, {"init_from": "taught"}, runtime="processes")
    assert original.weights_sha256 != taught.weights_sha256
    assert_repeated(original, rerun("first"))


def test_runs_that_cannot_be_repeated_are_refused_with_nothing_written(tmp_path):
    plain = train(PPO, {"flow.record_arrivals": False, "steps": 500}, name="plain", runtime="inline")
    with pytest.raises(UsageError, match="train it with --record-arrivals"):
        rerun("plain")
    with pytest.raises(ConfigError, match="record_arrivals is for mode 'async', not 'sync'"):
        train(PPO, {"mode": "sync"})
    recorded = train(PPO, {"steps": 500}, runtime="inline")
    directory = RunDirectory.open("first")
    whole = lines(recorded)
    rewrite(recorded, [entry for entry in whole if "mark" not in entry])
    with pytest.raises(UsageError, match="ended before its first checkpoint"):
        rerun("first")
    rewrite(recorded, [whole[0], *whole[2:]])
    with pytest.raises(DamagedFile, match="lacks segment 0 of actor"):
        rerun("first")
    rewrite(recorded, whole)
    directory.store.set_status("RUNNING")
    with pytest.raises(Conflict, match="first is still RUNNING"):
        rerun("first")
    directory.store.set_status("STOPPED")
    for kind, details in (("restart", {}), ("resume", {"how": "episode-boundary"})):
        event = EventReport(run="first", kind=kind, role="actor-1", details=details)
        directory.store.post(EVENTS, event.record())
    with pytest.raises(UsageError, match="actor-1 of first was killed and had to begin new episodes"):
        rerun("first")
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"first", plain.path.name}


def test_a_run_whose_scaled_actor_started_new_episodes_is_refused():
    """A resume in which all actors start new episodes can be repeated; one actor doing so during a run cannot."""
    train(PPO, {"steps": 500}, runtime="inline")
    store = RunDirectory.open("first").store
    again = EventReport(run="first", kind="resume", role="actor-2", details={"how": "episode-boundary"})
    store.post(EVENTS, EventReport(run="first", kind="resume", role="supervisor").record())
    store.post(EVENTS, again.record())
    assert rerun("first").matched
    store.post(EVENTS, again.record())
    with pytest.raises(
        UsageError, match="actor-2 of first was scaled away, started again and had to begin new episodes"
    ):
        rerun("first")

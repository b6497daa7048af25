"""Which rule speaks for which shares, and the shares of runs whose reports are written by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from steppe.core.config.run import resolve_config
from steppe.core.contracts.reports import ActorReport, EvaluationReport, EventReport, TrainingReport
from steppe.core.contracts.transport import ACTORS, EVALUATIONS, EVENTS, TRAINING
from steppe.records.profiling.diagnosis import RULES, TimeShares, diagnose, measure_time_shares
from steppe.records.run_directory import RunDirectory
from steppe.records.view import RunView

pytestmark = pytest.mark.unit

ASYNC = TimeShares(60.0, mode="async", actors=4, cores=8, used_cores=3.0, busy=3.0)
SYNC = replace(ASYNC, mode="sync")
SINGLE = TimeShares(60.0, mode="single", cores=8, used_cores=1.0)
INLINE = replace(SINGLE, inline=True)
HUNGRY = {"waits": 0.62, "learn": 0.3}
SATED = {"waits": 0.04, "learn": 0.95, "blocked": 0.8, "env": 0.1, "policy": 0.1}

CASES = [
    ("refused", replace(ASYNC, seconds=1.4, refused=0.5), "50 % of the segments were refused"),
    ("too_short", replace(ASYNC, seconds=1.4), "too short to judge: 1.4 s were measured"),
    ("dropped", replace(ASYNC, dropped=0.23), "23 % of the segments were dropped for lag"),
    ("checkpoints", replace(SYNC, checkpoints=0.31), "checkpoints take 31 % of the learner's time"),
    ("evaluation", replace(INLINE, evaluation=0.4), "evaluation takes 40 % of the one thread's time"),
    (
        "evaluation",
        replace(ASYNC, evaluation=0.6, used_cores=2.0, cores=2, busy=3.0),
        "evaluation takes 60 % of a core, and the run uses all 2",
    ),
    (
        "crowded",
        replace(ASYNC, used_cores=1.95, cores=2, busy=4.8, **SATED),
        "more roles than cores: 4.8 busy roles on 2 cores: fewer actors",
    ),
    (
        "environment",
        replace(ASYNC, **HUNGRY, env=0.7, policy=0.2),
        "the learner waits 62 % for experience, and the environment takes 70 % of the actors' time: more actors",
    ),
    ("environment", replace(SINGLE, waits=0.8, env=0.7, policy=0.1), "the environment takes 70 % of the actors' time: more"),
    ("environment", replace(INLINE, waits=0.8, env=0.7), "--runtime processes --actors N"),
    (
        "environment",
        replace(ASYNC, **HUNGRY, env=0.7, used_cores=2.0, cores=2, busy=2.2),
        "a faster environment or more cores, as the run already uses all 2 of them",
    ),
    ("policy", replace(SYNC, waits=0.7, env=0.2, policy=0.6), "choosing actions takes 60 % of the actors' time: more envi"),
    ("handing_over", replace(SYNC, waits=0.7, env=0.1, policy=0.1, sending=0.3), "sending segments takes 30 %"),
    ("sampling", replace(ASYNC, waits=0.1, blocked=0.5, sample=0.6, learn=0.3), "spends 60 % of its time on gathering"),
    ("publishing", replace(ASYNC, waits=0.1, blocked=0.5, publish=0.6, learn=0.3), "publishing weights takes 60 %"),
    (
        "learner",
        replace(ASYNC, **SATED),
        "the actors are blocked 80 % because the learner learns 95 % of its time: fewer epochs, a larger minibatch_size, or "
        "fewer actors",
    ),
    ("learner", replace(ASYNC, **SATED, epochs=False), "fewer updates (samples_per_insert), a larger batch_size"),
    ("learner", replace(SYNC, **SATED), "fewer epochs, a larger minibatch_size, or a smaller network"),
    ("learner", replace(SINGLE, waits=0.2, learn=0.79), "the learner learns 79 % of its time, and acting waits for it"),
    ("turns", replace(SYNC, waits=0.55, learn=0.4), "acting takes 55 % of a round and learning 45 %: flow.ahead=1 or --mode async"),
    ("turns", replace(SINGLE, waits=0.5, learn=0.4), "--mode sync or async in processes, where both run at once"),
    ("balanced", replace(SYNC, ahead=True, waits=0.1, learn=0.85, blocked=0.2), "nothing stands out"),
    ("learner", replace(SYNC, ahead=True, **SATED), "the actors are blocked 80 %"),
    ("environment", replace(SYNC, ahead=True, waits=0.4, env=0.8), "the learner waits 40 % for experience"),
    ("balanced", replace(ASYNC, waits=0.1, learn=0.85, blocked=0.1), "nothing stands out"),
    ("balanced", replace(SINGLE, waits=0.5, cores=1), "nothing stands out"),
    ("workers", replace(ASYNC, mode="workers", merge=0.3), "merging takes 30 % of the workers' time: longer stretches"),
    ("workers", replace(ASYNC, mode="workers", merge=0.05, actors=1), "a faster environment, or more workers (--actors)"),
    ("workers", replace(ASYNC, mode="workers", merge=0.05, actors=8), "as the run already uses all 8 cores"),
    ("gradients", replace(ASYNC, mode="gradients", blocked=0.5), "the workers wait for 50 % of their time"),
    ("gradients", replace(ASYNC, mode="gradients", blocked=0.1, gradients=0.8, actors=1), "computing gradients takes 80 % of the workers' time: more workers (--actors) help"),
    ("gradients", replace(ASYNC, mode="gradients", blocked=0.1, env=0.7, actors=8), "the environment takes 70 % of the workers' time: the run already uses all 8 cores"),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "measured", "said"), CASES)
def test_the_rule_that_speaks(rule, measured, said):
    found = diagnose(measured)
    assert (found.rule, said in found.sentence) == (rule, True), found


def test_every_rule_is_shown():
    assert {rule for rule, _, _ in CASES} == {rule.name for rule in RULES}


def test_sentences_are_one_line_without_a_full_stop():
    for _, measured, _ in CASES:
        sentence = diagnose(measured).sentence
        assert "\n" not in sentence
        assert not sentence.endswith(".")


def test_waste_is_told_before_speed_and_sleeping_is_no_crowd():
    assert diagnose(replace(ASYNC, **SATED, dropped=0.2, checkpoints=0.2)).rule == "dropped"
    asleep = replace(ASYNC, **HUNGRY, env=0.95, busy=16.5, actors=16, cores=2, used_cores=0.4)
    assert diagnose(asleep).rule == "environment"


@pytest.fixture
def run(tmp_path):
    made = []

    def create(**keys):
        given = {"env": "CartPole-v1", "actors": 2, "mode": "async", "run_dir": tmp_path / "run", **keys}
        resolved = resolve_config(("flag", given))
        made.append(RunDirectory.create(resolved.config, resolved.sources))
        made[-1].record["hardware"]["usable_cores"] = 4
        return made[-1]

    yield create
    for directory in made:
        directory.store.close()
        directory.release()


def post_actor(directory, actor, *seconds, at=10.0, cpu_s=None, epoch=0):
    phases = dict(zip(("env", "policy", "blocked", "other"), seconds, strict=True))
    report = ActorReport(run="run", time_s=at, actor=actor, epoch=epoch, version=1, sequence=1, env_steps=1, phases=phases, cpu_s=cpu_s)  # fmt: skip
    directory.store.post(ACTORS, report.record())


def post_learner(directory, *seconds, at=10.0, cpu_s=None, **keys):
    phases = dict(zip(("wait", "sample", "learn", "publish", "other"), seconds, strict=True))
    report = TrainingReport(run="run", time_s=at, version=1, updates=1, env_steps=1, train_s=1.0, phases=phases, cpu_s=cpu_s, **keys)  # fmt: skip
    directory.store.post(TRAINING, report.record())


def post_evaluation(directory, duration_s, *, final=False, at=11.0):
    report = EvaluationReport(
        run="run", time_s=at, version=1, updates=1, env_steps=1, train_s=1.0, returns=[1.0], lengths=[1], return_mean=1.0,
        return_std=0.0, duration_s=duration_s, weights_sha256="0", final=final,
    )  # fmt: skip
    directory.store.post(EVALUATIONS, report.record())


def post_event(directory, kind, role, at=12.0, **details):
    directory.store.post(EVENTS, EventReport(run="run", time_s=at, kind=kind, role=role, details=details).record())


def measured(directory):
    view = RunView(directory)
    view.refresh()
    return measure_time_shares(view)


def test_shares_of_a_run_in_processes(run):
    directory = run()
    post_actor(directory, 0, 6.0, 2.0, 1.0, 1.0, cpu_s=3.0)
    post_actor(directory, 1, 8.0, 1.0, 1.0, 0.0, cpu_s=4.0)
    post_learner(directory, 6.0, 1.0, 2.0, 0.5, 0.5, cpu_s=5.0, lags={0: 6, 2: 3}, dropped={"too_old": 3, "missing": 9})
    post_evaluation(directory, 2.5)
    post_evaluation(directory, 9.0, final=True)
    post_event(directory, "checkpoint", "learner", write_s=0.3)
    post_event(directory, "checkpoint", "learner", write_s=0.1)
    found = measured(directory)
    assert (found.seconds, found.cores, found.actors, found.mode, found.inline) == (10.0, 4, 2, "async", False)
    assert (found.env, found.policy, found.blocked, found.sending) == pytest.approx((0.7, 0.15, 0.1, 0.05))
    assert (found.waits, found.sample, found.learn, found.publish) == pytest.approx((0.6, 0.1, 0.2, 0.05))
    assert (found.checkpoints, found.evaluation, found.dropped) == pytest.approx((0.04, 0.25, 0.25))
    assert found.busy == pytest.approx(0.9 + 0.9 + 0.4 + 0.25)
    assert found.used_cores == pytest.approx(0.3 + 0.4 + 0.5 + 0.25)


def test_where_acting_and_learning_share_a_thread_evaluation_is_no_waiting(run):
    directory = run(runtime="inline", mode="single", actors=1)
    post_actor(directory, 0, 2.0, 1.0, 7.0, 0.0)  # 3 s of acting, 1 s of learning, 6 s of evaluation
    post_learner(directory, 9.0, 0.0, 1.0, 0.0, 0.0)
    post_evaluation(directory, 6.0)
    found = measured(directory)
    assert found.waits == pytest.approx(0.75)
    assert diagnose(found).rule == "evaluation"


def test_time_adds_up_over_restarts_and_lives(run):
    directory = run(actors=1)
    post_actor(directory, 0, 1.0, 0.0, 0.0, 0.0, at=1.0)
    post_learner(directory, 4.0, 0.0, 0.0, 0.0, 0.0, at=1.0)
    post_event(directory, "restart", "actor-0", at=2.0)
    post_actor(directory, 0, 0.5, 1.0, 0.0, 0.0, at=3.0, epoch=1)
    post_event(directory, "resume", "supervisor", at=4.0)
    post_actor(directory, 0, 0.0, 0.0, 7.5, 0.0, at=5.0)
    post_learner(directory, 0.0, 0.0, 12.0, 0.0, 0.0, at=5.0)
    view = RunView(directory)
    view.refresh()
    assert view.phases["actor-0"] == {"env": 1.5, "policy": 1.0, "blocked": 7.5, "other": 0.0}
    assert view.phases["learner"] == {"wait": 4.0, "sample": 0.0, "learn": 12.0, "publish": 0.0, "other": 0.0}
    assert view.time_shares["actor"]["env"] == pytest.approx(0.15)
    assert measure_time_shares(view).learn == pytest.approx(0.75)


def test_a_run_without_reports_is_too_short(run):
    assert diagnose(measured(run())).rule == "too_short"

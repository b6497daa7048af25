"""Curves, read back with independent tools: json and TensorBoard's own reader."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys

import pytest

from steppe.core.contracts.reports import ActorReport, EvaluationReport, EventReport, TrainingReport
from steppe.core.contracts.transport import ACTORS, EVALUATIONS, EVENTS, TRAINING
from steppe.records.metrics import MetricsWriter

pytestmark = pytest.mark.integration


def training(env_steps=1000, **keys) -> TrainingReport:
    return TrainingReport(run="r", **{"version": 2, "updates": 8, "env_steps": env_steps, "train_s": 2.0, **keys})


def actor(episodes, number=0) -> ActorReport:
    return ActorReport(run="r", actor=number, epoch=0, version=2, sequence=3, env_steps=500, episodes=episodes)


def evaluation(**keys) -> EvaluationReport:
    values = {"version": 2, "updates": 8, "env_steps": 1500, "train_s": 2.5, "returns": [1.0, 3.0], "lengths": [4, 5]}
    verdict = {"return_mean": 2.0, "return_std": 1.0, "duration_s": 0.5, "weights_sha256": "00"}
    return EvaluationReport(run="r", **{**values, **verdict, **keys})


def lines(directory):
    return [
        json.loads(line, parse_constant=pytest.fail) for line in (directory / "metrics.jsonl").read_text().splitlines()
    ]


def events(directory):
    """Read the event files record by record: length, checksum, protocol buffer."""
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event

    for file in sorted((directory / "tb").iterdir()):
        for raw in RawEventFileLoader(str(file)).Load():
            yield Event.FromString(raw)


def scalars(directory) -> dict[str, list[tuple[int, float]]]:
    found: dict[str, list[tuple[int, float]]] = {}
    for event in events(directory):
        for value in event.summary.value:
            found.setdefault(value.tag, []).append((event.step, value.simple_value))
    return found


def test_every_report_is_one_line(tmp_path):
    recorder = MetricsWriter(tmp_path)
    sent = [training(lags={0: 3}), actor([(5.0, 6)]), evaluation()]
    for report in sent:
        recorder.record(report)
    found = lines(tmp_path)  # before close: a line is written when record returns
    recorder.close()
    recorder.close()
    assert [line.pop("kind") for line in found] == ["training", "actor", "evaluation"]
    assert TrainingReport.read(found[0]) == sent[0]
    assert ActorReport.read(found[1]) == sent[1]
    assert EvaluationReport.read(found[2]) == sent[2]


def test_numbers_that_are_not_finite_survive_in_strict_json(tmp_path):
    recorder = MetricsWriter(tmp_path)
    recorder.record(training(stats={"a": math.nan, "b": math.inf, "c": -math.inf}))
    recorder.close()
    line = lines(tmp_path)[0]
    assert line["stats"] == {"a": "NaN", "b": "Infinity", "c": "-Infinity"}
    back = TrainingReport.read(line)
    assert math.isnan(back.stats["a"])
    assert (back.stats["b"], back.stats["c"]) == (math.inf, -math.inf)
    assert math.isnan(scalars(tmp_path)["loss/a"][0][1])


def test_curves_over_environment_steps(tmp_path):
    recorder = MetricsWriter(tmp_path)
    recorder.record(actor([(10.0, 4)]))
    recorder.record(actor([(20.0, 8)], number=1))
    phases = {"learn": 1.5, "wait": 0.5}
    recorder.record(training(1000, stats={"policy": 0.5}, lags={0: 3, 2: 1}, dropped={"stale": 2}, phases=phases))
    recorder.record(training(4000, train_s=3.0, phases={"learn": 1.6, "wait": 1.4}, memory={"fill": 0.25}))
    recorder.record(evaluation(env_steps=5000))
    recorder.close()
    found = scalars(tmp_path)
    assert found["train/return_mean"] == [(1000, 15.0), (4000, 15.0)]
    assert found["train/length_mean"] == [(1000, 6.0), (4000, 6.0)]
    assert found["loss/policy"] == [(1000, 0.5)]
    assert found["lag/mean"] == [(1000, 0.5)]
    assert found["lag/max"] == [(1000, 2.0)]
    assert found["dropped/stale"] == [(1000, 2.0)]
    assert found["memory/fill"] == [(4000, 0.25)]
    assert found["time/steps_per_s"] == [(1000, 500.0), (4000, 3000.0)]
    assert found["time/learn"] == [(1000, 0.75), (4000, pytest.approx(0.1))]
    assert found["eval/return_mean"] == [(5000, 2.0)]
    assert found["eval/return_std"] == [(5000, 1.0)]


def test_the_training_return_is_over_the_last_hundred_episodes(tmp_path):
    recorder = MetricsWriter(tmp_path)
    recorder.record(actor([(1000.0, 1)] * 50))
    recorder.record(actor([(3.0, 1)] * 100))
    recorder.record(training())
    recorder.close()
    assert scalars(tmp_path)["train/return_mean"] == [(1000, 3.0)]


def test_reports_of_actors_after_the_learners_last_one_are_in_the_curves(tmp_path):
    recorder = MetricsWriter(tmp_path)
    recorder.record(training(1000, final=True))
    recorder.record(actor([(4.0, 2), (8.0, 4)]))
    recorder.close()
    assert scalars(tmp_path)["train/return_mean"] == [(1000, 6.0)]
    assert scalars(tmp_path)["train/length_mean"] == [(1000, 3.0)]


def test_a_killed_recorder_leaves_every_line_and_event(tmp_path):
    script = (
        "import sys; from pathlib import Path\n"
        "from steppe.core.contracts.reports import TrainingReport; from steppe.records.metrics import MetricsWriter\n"
        "recorder = MetricsWriter(Path(sys.argv[1]))\n"
        "for k in range(1, 21):\n"
        "    recorder.record(TrainingReport(run='r', version=k, updates=k, env_steps=k, train_s=1.0))\n"
        "print('recorded', flush=True)\n"
        "sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"recorded\n"
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()
    assert [line["env_steps"] for line in lines(tmp_path)] == list(range(1, 21))
    assert [step for step, _ in scalars(tmp_path)["train/updates"]] == list(range(1, 21))


def test_a_second_recorder_continues_after_an_incomplete_line(tmp_path):
    first = MetricsWriter(tmp_path)
    first.record(training(1))
    first.close()
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"kind": "trai')
    second = MetricsWriter(tmp_path)
    second.record(training(2))
    second.close()
    raw = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["env_steps"] for line in (raw[0], raw[2])] == [1, 2]
    assert len(raw) == 3


def test_recording_imports_neither_torch_nor_tensorflow(tmp_path):
    script = (
        "import sys; from pathlib import Path; from steppe.records.metrics import MetricsWriter\n"
        "from steppe.core.contracts.reports import TrainingReport\n"
        "recorder = MetricsWriter(Path(sys.argv[1]))\n"
        "recorder.record(TrainingReport(run='r', version=1, updates=1, env_steps=1, train_s=1.0))\n"
        "recorder.close()\n"
        "print([name for name in ('torch', 'tensorflow') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def resumed(env_steps) -> EventReport:
    details = {"checkpoint": 3, "env_steps": env_steps}
    return EventReport(run="r", kind="resume", role="supervisor", details=details)


class TestSecondRecorder:
    """A second recorder on the same directory, as after a kill of the first."""

    def test_a_second_recorder_knows_the_newest_number_of_each_topic(self, tmp_path):
        recorder = MetricsWriter(tmp_path)
        assert recorder.written == {}
        recorder.record(training(1000), 4)
        recorder.record(training(2000), 9)
        recorder.record(actor([]), 7)
        recorder.record(evaluation(), 8)
        recorder.record(resumed(500), 11)
        recorder.close()
        again = MetricsWriter(tmp_path)
        assert again.written == {TRAINING: 9, ACTORS: 7, EVALUATIONS: 8, EVENTS: 11}
        again.close()
        assert [line["number"] for line in lines(tmp_path)] == [4, 9, 7, 8, 11]

    def test_an_incomplete_line_is_ignored(self, tmp_path):
        recorder = MetricsWriter(tmp_path)
        recorder.record(training(1000), 4)
        recorder.close()
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.write('{"kind":"training","number":99')
        again = MetricsWriter(tmp_path)
        assert again.written == {TRAINING: 4}
        again.record(training(2000), 5)
        again.close()
        assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])["number"] == 5

    def test_averages_include_the_episodes_before(self, tmp_path):
        recorder = MetricsWriter(tmp_path)
        recorder.record(actor([(10.0, 4)]))
        recorder.close()
        again = MetricsWriter(tmp_path)
        again.record(actor([(20.0, 8)]))
        again.record(training(1000))
        again.close()
        assert scalars(tmp_path)["train/return_mean"] == [(1000, 15.0)]

    def test_curves_are_truncated_for_a_resumed_run(self, tmp_path):
        recorder = MetricsWriter(tmp_path)
        recorder.record(training(4000, train_s=4.0))
        recorder.record(resumed(1000))
        recorder.record(training(2000, train_s=2.0))
        recorder.close()
        assert [step for step, _ in scalars(tmp_path)["train/updates"]] == [4000, 2000]
        assert [line["kind"] for line in lines(tmp_path)] == ["training", "resume", "training"]
        assert all(value >= 0 for _, value in scalars(tmp_path)["time/steps_per_s"])
        sessions = [event for event in events(tmp_path) if event.HasField("session_log")]
        assert [(event.step, event.session_log.status) for event in sessions] == [
            (1000, 1)
        ]  # START: forget later steps

    def test_an_actors_resume_event_truncates_no_curve(self, tmp_path):
        recorder = MetricsWriter(tmp_path)
        recorder.record(training(4000))
        recorder.record(EventReport(run="r", kind="resume", role="actor-0", details={"how": "exact"}))
        recorder.record(EventReport(run="r", kind="metric", details={"env_steps": 0, "values": {"mine": 1.0}}))
        recorder.close()
        assert scalars(tmp_path)["custom/mine"] == [(4000, 1.0)]
        assert not any(event.HasField("session_log") for event in events(tmp_path))

    def test_a_second_writer_truncates_as_far_as_the_first(self, tmp_path):
        recorder = MetricsWriter(tmp_path)
        recorder.record(training(4000))
        recorder.record(resumed(1000))
        recorder.close()
        again = MetricsWriter(tmp_path)
        again.record(EventReport(run="r", kind="metric", details={"env_steps": 0, "values": {"mine": 1.0}}))
        again.close()
        assert scalars(tmp_path)["custom/mine"] == [(1000, 1.0)]

    def test_tensorboard_purges_undone_steps(self, tmp_path):
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        recorder = MetricsWriter(tmp_path)
        for env_steps in (1000, 2000, 3000):
            recorder.record(training(env_steps))
        recorder.close()
        again = MetricsWriter(tmp_path)
        again.record(resumed(1500))
        again.record(training(2500))
        again.close()
        read = EventAccumulator(str(tmp_path / "tb"))
        read.Reload()
        assert [point.step for point in read.Scalars("train/updates")] == [1000, 2500]


class TestFullDisk:
    """Writes for which the disk has no space, or space for a part only."""

    @pytest.mark.parametrize("room", [0, 1, 37])
    def test_no_line_is_incomplete_or_lost(self, room, tmp_path, monkeypatch):
        recorder = MetricsWriter(tmp_path)
        recorder.record(training(1000), 1)
        write = os.write

        def full(descriptor, data):
            if not room:
                raise OSError(28, "No space left on device")
            return write(descriptor, data[:room])

        with monkeypatch.context() as patch:
            patch.setattr(os, "write", full)
            for number in (2, 3, 4):
                recorder.record(training(1000 * number), number)
        assert [line["number"] for line in lines(tmp_path)] == [1]
        recorder.record(training(5000), 5)
        recorder.close()
        assert [line["number"] for line in lines(tmp_path)] == [1, 2, 3, 4, 5]
        assert [step for step, _ in scalars(tmp_path)["train/updates"]] == [1000, 2000, 3000, 4000, 5000]

    def test_a_line_waits_until_its_event_can_be_written(self, tmp_path, monkeypatch):
        recorder = MetricsWriter(tmp_path)
        recorder.record(training(1000), 1)
        write, calls = os.write, []

        def full_for_the_second(descriptor, data):
            calls.append(descriptor)
            if len(calls) == 2:
                raise OSError(122, "Disk quota exceeded")
            return write(descriptor, data)

        with monkeypatch.context() as patch:
            patch.setattr(os, "write", full_for_the_second)
            recorder.record(training(2000), 2)
        assert [line["number"] for line in lines(tmp_path)] == [1]
        recorder.close()
        assert [line["number"] for line in lines(tmp_path)] == [1, 2]
        assert [step for step, _ in scalars(tmp_path)["train/updates"]] == [1000, 2000]

    def test_other_errors_are_raised(self, tmp_path, monkeypatch):
        recorder = MetricsWriter(tmp_path)

        def broken(descriptor, data):
            raise OSError(5, "Input/output error")

        with monkeypatch.context() as patch:
            patch.setattr(os, "write", broken)
            with pytest.raises(OSError, match="Input/output"):
                recorder.record(training(1000), 1)
        recorder.close()

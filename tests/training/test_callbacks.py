"""Callbacks see the run, add metrics to its curves, and can stop it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import steppe
from steppe.records.run_directory import RunDirectory

pytestmark = pytest.mark.integration

SHORT = {"evaluation.episodes": 2, "segment_steps": 16, "envs": 2}


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def scalars(path: Path, tag: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(path / "tb"))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)] if tag in events.Tags()["scalars"] else []


@pytest.mark.parametrize("runtime", ["inline", "processes"])
def test_callbacks_add_metrics_and_stop_early(runtime: str) -> None:
    looks: list[int] = []

    def measure(view: steppe.RunView) -> dict[str, float]:
        looks.append(view.env_steps)
        return {"looks": len(looks), "half": np.float32(0.5)}

    def stop(view: steppe.RunView) -> np.bool_:
        return np.bool_(view.updates > 0 and len(looks) >= 5)

    result = steppe.train("steppe/Identity-v0", runtime=runtime, steps=10**8, callbacks=[measure, stop], **SHORT)
    assert (result.state, result.reason) == ("STOPPED", "stopped_by_callback")
    recorded = [line["details"]["values"] for line in lines(result.path) if line["kind"] == "metric"]
    assert [values["looks"] for values in recorded] == list(range(1, len(recorded) + 1)), "each once, in order"
    assert len(recorded) >= 5
    assert {values["half"] for values in recorded} == {0.5}
    assert [value for _, value in scalars(result.path, "custom/looks")] == [v["looks"] for v in recorded]
    view = steppe.RunView(RunDirectory.open(result.path))
    view.refresh()
    assert view.metrics["looks"] == recorded[-1]["looks"]
    assert not any(event.kind == "metric" for event in view.events)


def test_empty_results_change_nothing() -> None:
    answers = iter([None, {}, False, 0, "x", [1]] + [None] * 10_000)
    result = steppe.train(
        "steppe/Identity-v0", runtime="inline", steps=200, callbacks=[lambda _: next(answers)], **SHORT
    )
    assert (result.state, result.reason) == ("SUCCEEDED", "steps_done")


def test_exceptions_of_a_callback_are_raised_and_recorded() -> None:
    def broken(view: steppe.RunView) -> None:
        raise RuntimeError("my own mistake")

    with pytest.raises(RuntimeError, match="my own mistake"):
        steppe.train("steppe/Identity-v0", runtime="inline", name="broken", callbacks=[broken], **SHORT)
    status = RunDirectory.open("broken").store.status()
    assert (status.state, status.message) == ("FAILED", "RuntimeError: my own mistake")


def test_a_metric_that_is_no_number_is_refused_in_one_sentence() -> None:
    with pytest.raises(steppe.UsageError, match="a callback returned 'loss': 'low', which is no number"):
        steppe.train("steppe/Identity-v0", runtime="inline", callbacks=[lambda view: {"loss": "low"}], **SHORT)

"""Whole runs in several modes: what is set while a run goes on is acknowledged and in use."""

from __future__ import annotations

import pytest

from steppe.core.config import resolve
from steppe.core.links import COMMANDS, EVENTS
from steppe.core.tuning import live_fields
from steppe.loops.main import run_experiment
from tests.support.tuning import CHANGES, command_of, settings

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]
KINDS = {"rollout": "a2c", "transitions": "dqn", "table": "q-learning"}
CASES = [
    ("inline", "single", "rollout"),
    ("inline", "single", "transitions"),
    ("inline", "workers", "transitions"),
    ("inline", "workers", "table"),
    ("processes", "workers", "rollout"),
]


class Change:
    """Observes a run: asks for a change once it learns, and ends it when the change is answered and updates have followed."""

    def __init__(self, values):
        self.values, self.answer, self.posted = values, None, False
        self.rates = []

    def __call__(self, view):
        store = view.directory.store
        if view.updates and not self.posted:
            self.posted = True
            store.post(COMMANDS, command_of(self.values, self.values))
        if self.posted and self.answer is None:
            events = [record["details"] for _, record in store.read(EVENTS) if record["kind"] == "command"]
            self.answer = next((one for one in events if one.get("id") == "change"), None)
        if self.answer is None or view.training is None or view.updates <= self.answer["updates"]:
            return False
        rate = view.training.stats.get("learning_rate")
        self.rates += [rate] if rate is not None else []
        return not self.answer["live"] or rate == pytest.approx(self.values["learning_rate"])


@pytest.mark.parametrize(("runtime", "mode", "kind"), CASES)
def test_all_live_fields_in_one_command(runtime, mode, kind, tmp_path):
    layer = settings(KINDS[kind]) | {"runtime": runtime, "mode": mode, "steps": 10**9, "run_dir": tmp_path / "run"}
    layer |= {"actors": 1 if mode == "single" else 2}
    if kind == "table":
        layer |= {"learning_rate_end": CHANGES["learning_rate"]}
    resolved = resolve(("call", layer))
    live = [name for name in live_fields(resolved.config) if name not in ("bounds_coef", "learning_rate_end")]
    change = Change({name: CHANGES[name] for name in live} or {"learning_rate": CHANGES["learning_rate"]})
    result = run_experiment(resolved, observers=[change])
    assert (result.state, result.reason) == ("STOPPED", "stopped_by_callback"), result.message
    assert change.answer["obeyed"], change.answer
    assert change.answer["live"] == sorted(live)
    if live:
        assert change.rates[-1] == pytest.approx(CHANGES["learning_rate"]), "an update reports the new value"

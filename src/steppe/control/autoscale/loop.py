"""Autoscaling loop over all live runs: logs the recommended number of actors as events, and sets it if allowed."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from steppe.control.autoscale.policy import Autoscaler, LoadWindows, ScalingDecision, ScalingPolicy
from steppe.control.periodic import PeriodicTask
from steppe.control.service import Service
from steppe.core.contracts.errors import SteppeError
from steppe.core.contracts.reports import EventReport
from steppe.core.contracts.transport import EVENTS
from steppe.records.run_directory import RunDirectory
from steppe.records.view import RunView

POLL_INTERVAL_S = 5.0
NAME = "autoscaler"


@dataclass
class _AutoscaledRun:
    view: RunView
    scaler: Autoscaler
    load_windows: LoadWindows = field(default_factory=LoadWindows)
    said: tuple[int, str] | None = None


class AutoscaleLoop(PeriodicTask):
    """Handles only runs whose number of actors can change."""

    def __init__(self, service: Service, how: Literal["recommend", "set"], policy: ScalingPolicy) -> None:
        super().__init__(NAME, POLL_INTERVAL_S, lambda: self.look(time.time()))
        self._service, self._how, self._policy = service, how, policy
        self._runs: dict[str, _AutoscaledRun] = {}
        self._refused: dict[str, str] = {}

    def look(self, now_s: float) -> None:
        """Poll every run once."""
        going = {run.id for run in self._service.list_runs().runs if run.state == "RUNNING"}
        self._runs = {run: tended for run, tended in self._runs.items() if run in going}
        for run in sorted(going):
            try:
                self._tend(run, now_s)
            except SteppeError as error:
                if self._refused.get(run) != str(error):
                    self._say(run, "refused", {"message": str(error)})
                self._refused[run] = str(error)

    def _tend(self, run: str, now_s: float) -> None:
        actors = self._service.get_actors(run)
        if not actors.most or not actors.desired or actors.ready != actors.desired:
            return  # fixed, switched off manually, or still changing
        tended = self._runs.get(run) or self._begin(run, actors.most)
        tended.view.refresh()
        load = tended.load_windows.next(tended.view, actors.ready)
        if load is None:
            return
        advice = tended.scaler.look(load, now_s)
        if advice.act and self._how == "set":
            self._service.scale_actors(run, advice.wanted, NAME)
            self._tell(run, tended, advice, "set")
        elif (advice.wanted, advice.reason) != tended.said:
            self._tell(run, tended, advice, "recommended")

    def _begin(self, run: str, most: int) -> _AutoscaledRun:
        view = RunView(RunDirectory(self._service.root / run))
        policy = replace(self._policy, most=min(self._policy.most, most))
        self._runs[run] = _AutoscaledRun(view, Autoscaler(policy))
        return self._runs[run]

    def _tell(self, run: str, tended: _AutoscaledRun, advice: ScalingDecision, what: str) -> None:
        tended.said = (advice.wanted, advice.reason)
        details = {"actors": advice.actors, "wanted": advice.wanted, "reason": advice.reason, "message": advice.words}
        self._say(run, what, details)

    def _say(self, run: str, what: str, details: Mapping[str, object]) -> None:
        event = EventReport(run=run, kind="note", role=NAME, details={"what": what, **details})
        RunDirectory(self._service.root / run).board.post(EVENTS, event.record())

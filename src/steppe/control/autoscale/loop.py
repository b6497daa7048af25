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
    reported: tuple[int, str] | None = None  # the newest decision in the event log


class AutoscaleLoop(PeriodicTask):
    """Handles only runs whose number of actors can change."""

    def __init__(self, service: Service, mode: Literal["recommend", "set"], policy: ScalingPolicy) -> None:
        super().__init__(NAME, POLL_INTERVAL_S, lambda: self.poll(time.time()))
        self._service, self._mode, self._policy = service, mode, policy
        self._runs: dict[str, _AutoscaledRun] = {}
        self._refused: dict[str, str] = {}

    def poll(self, now_s: float) -> None:
        """Poll every run once."""
        running = {run.id for run in self._service.list_runs().runs if run.state == "RUNNING"}
        self._runs = {run: autoscaled for run, autoscaled in self._runs.items() if run in running}
        for run in sorted(running):
            try:
                self._poll_run(run, now_s)
            except SteppeError as error:
                if self._refused.get(run) != str(error):
                    self._log_event(run, "refused", {"message": str(error)})
                self._refused[run] = str(error)

    def _poll_run(self, run: str, now_s: float) -> None:
        actors = self._service.get_actors(run)
        if not actors.most or not actors.desired or actors.ready != actors.desired:
            return  # fixed, switched off manually, or still changing
        autoscaled = self._runs.get(run) or self._begin(run, actors.most)
        autoscaled.view.refresh()
        load = autoscaled.load_windows.next(autoscaled.view, actors.ready)
        if load is None:
            return
        decision = autoscaled.scaler.decide(load, now_s)
        if decision.act and self._mode == "set":
            self._service.scale_actors(run, decision.target, NAME)
            self._report(run, autoscaled, decision, "set")
        elif (decision.target, decision.reason) != autoscaled.reported:
            self._report(run, autoscaled, decision, "recommended")

    def _begin(self, run: str, most: int) -> _AutoscaledRun:
        view = RunView(RunDirectory(self._service.root / run))
        policy = replace(self._policy, most=min(self._policy.most, most))
        self._runs[run] = _AutoscaledRun(view, Autoscaler(policy))
        return self._runs[run]

    def _report(self, run: str, autoscaled: _AutoscaledRun, decision: ScalingDecision, what: str) -> None:
        autoscaled.reported = (decision.target, decision.reason)
        details = {"actors": decision.actors, "wanted": decision.target, "reason": decision.reason}
        self._log_event(run, what, {**details, "message": decision.message})

    def _log_event(self, run: str, what: str, details: Mapping[str, object]) -> None:
        event = EventReport(run=run, kind="note", role=NAME, details={"what": what, **details})
        RunDirectory(self._service.root / run).board.post(EVENTS, event.record())

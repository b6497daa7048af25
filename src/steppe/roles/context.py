"""What a runtime passes to a role: links to other roles, the run's clock, and control requests."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from steppe.core.contracts.reports import EventReport
from steppe.core.contracts.transport import EVENTS, Board, Channel, Role, RpcClient, RpcServer, SharedTable, WeightStore
from steppe.core.system.timing import RunClock
from steppe.records.telemetry.tracing import RecordSpan, make_span_recorder

CommandReader = Callable[[int], Sequence[tuple[int, dict[str, Any]]]]
RUN, RESTART, PAUSE, FINISH, STOP = range(5)  # continue; with new episodes; wait; end gracefully; end now
POLICY = "policy"  # the name under which weights are published
_IDLE_SLEEP_S = 0.001


@dataclass
class Context:
    """Everything that a role can reach outside itself. It does not reveal the runtime."""

    run: str
    name: str  # of the role: "learner", "actor-3"
    channel: Channel
    weights: WeightStore
    board: Board
    requested: Callable[[], int]  # RUN, RESTART, PAUSE, FINISH or STOP
    clock: RunClock
    trace_spans: int = 0
    epoch: int = 0  # number of restarts of the role
    heartbeat: Callable[[], object] = lambda: None  # called at least once per step, to detect a hung role
    table: SharedTable | None = None  # the table that tabular workers share
    replay_clients: Sequence[RpcClient] = ()  # of the learner: clients of the replay roles, if any
    rpc_server: RpcServer | None = None  # of a replay role: receives the learner's requests
    commands: CommandReader = lambda after: ()  # commands with a number above `after`, if roles receive any
    _spans: list[EventReport] = field(default_factory=list)
    _trace: RecordSpan | None = field(init=False)

    def __post_init__(self) -> None:
        self._trace = make_span_recorder(self.run, self.name)

    @property
    def ending(self) -> bool:
        """Whether the role was asked to end (FINISH or STOP)."""
        return self.requested() >= FINISH

    def event(self, kind: str, **details: object) -> None:
        """Post an event to the event log."""
        self.board.post(EVENTS, EventReport(run=self.run, kind=kind, role=self.name, details=details).record())

    def span(self, phase: str, start_s: float, **details: object) -> None:
        """Record a span from `start_s` until now, up to `trace_spans` of them, and pass it to the tracer, if any."""
        if self.trace_spans > 0:
            self.trace_spans -= 1
            times = {"phase": phase, "start_s": start_s, "end_s": self.clock()}
            self._spans.append(EventReport(run=self.run, kind="span", role=self.name, details=times | details))
        if self._trace is not None:
            self._trace(phase, self.clock() - start_s, details)

    def flush_spans(self) -> None:
        """Post the recorded spans to the event log."""
        for span in self._spans:
            self.board.post(EVENTS, span.record())
        self._spans.clear()


def run_role(role: Role) -> None:
    """Step a role to its end in the caller's thread. It polls while idle; runtimes use their own loops with wakeups."""
    while not role.done:
        if not role.step():
            time.sleep(_IDLE_SLEEP_S)
    role.close()

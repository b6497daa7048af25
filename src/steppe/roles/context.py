"""What a runtime gives a role: its links to the others, the run's clock, and word of when to end."""

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
RUN, RESTART, PAUSE, FINISH, STOP = range(5)  # go on; with new episodes; rest; end in good order; end now
POLICY = "policy"  # the name under which weights are published
_IDLE_SLEEP_S = 0.001


@dataclass
class Context:
    """A role's whole world outside itself. Nothing in it tells which runtime it is on."""

    run: str
    name: str  # of the role: "learner", "actor-3"
    channel: Channel
    weights: WeightStore
    board: Board
    asked: Callable[[], int]  # one of the words above
    clock: RunClock
    trace_spans: int = 0
    epoch: int = 0  # how often the role has been started again
    heartbeat: Callable[[], object] = lambda: None  # called at least once a step, so that a hung one is found
    table: SharedTable | None = None  # what workers learn together
    shelves: Sequence[RpcClient] = ()  # of the learner: to the replay roles, where there are some
    desk: RpcServer | None = None  # of a replay role: where the learner asks
    commands: CommandReader = lambda after: ()  # those numbered above, where roles hear them
    _spans: list[EventReport] = field(default_factory=list)
    _trace: RecordSpan | None = field(init=False)

    def __post_init__(self) -> None:
        self._trace = make_span_recorder(self.run, self.name)

    @property
    def ending(self) -> bool:
        """Whether the role has been asked to come to its end."""
        return self.asked() >= FINISH

    def event(self, kind: str, **details: object) -> None:
        """Write something that happened into the event log."""
        self.board.post(EVENTS, EventReport(run=self.run, kind=kind, role=self.name, details=details).record())

    def span(self, phase: str, start_s: float, **details: object) -> None:
        """Remember when a piece of work began and that it ended now, while there is room for it in the trace; and tell
        whoever collects traces."""
        if self.trace_spans > 0:
            self.trace_spans -= 1
            times = {"phase": phase, "start_s": start_s, "end_s": self.clock()}
            self._spans.append(EventReport(run=self.run, kind="span", role=self.name, details=times | details))
        if self._trace is not None:
            self._trace(phase, self.clock() - start_s, details)

    def flush_spans(self) -> None:
        """Post the remembered pieces of work."""
        for span in self._spans:
            self.board.post(EVENTS, span.record())
        self._spans.clear()


def run_role(role: Role) -> None:
    """Step a role to its end, for a caller with a thread for it; runtimes have ways of their own, by which it is woken."""
    while not role.done:
        if not role.step():
            time.sleep(_IDLE_SLEEP_S)
    role.close()

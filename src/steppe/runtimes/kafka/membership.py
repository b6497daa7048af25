"""Membership of rounds over Kafka: which actors joined, which are missing, and when rounds continue without one.

The learner decides. It posts the members to commands.control and to the event log whenever they change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from steppe.core.contracts.errors import Unreachable
from steppe.core.contracts.transport import ACTORS, COMMANDS, Role
from steppe.roles.context import PAUSE
from steppe.roles.learner import Learner
from steppe.roles.scheduling import RoundBatchPolicy
from steppe.runtimes.kafka.manifest import MEMBERSHIP, make_command
from steppe.transport.kafka.board import KafkaBoard
from steppe.transport.kafka.channel import KafkaReader

WARN_MISSING_S = 30.0  # how long a round waits for a member before a warning
POLL_INTERVAL_S = 2.0  # between liveness checks while a member is missing


class RoundMembership:
    """Maintains the members of a learner's rounds; does nothing for other roles and modes."""

    def __init__(
        self,
        roles: Sequence[Role],
        channel: object,
        board: KafkaBoard,
        replan_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._learner = next((role for role in roles if isinstance(role, Learner)), None)
        self._channel, self._clock = channel, clock
        self._liveness = LivenessMonitor(board, clock)
        self._replan_s, self._board = replan_s, board
        self._planned: set[int] | None = None  # the members that were last announced
        self._missing: list[int] = []
        self._since_s: float | None = None  # since when they are missing; None: warned

    def update(self) -> None:
        """Process joins and missing members, and announce changes; called when the worker slot is idle."""
        if self._learner is None or not isinstance(self._channel, KafkaReader):
            return
        learner, channel, batch_policy = self._learner, self._channel, self._learner.batch_policy
        joined = []
        while channel.joined:
            actor, replaced = channel.joined.popleft()
            joined.append(actor)
            learner.context.event("member", actor=actor, replaced=replaced, version=learner.version)
        if isinstance(batch_policy, RoundBatchPolicy):
            for actor in joined:
                if actor not in batch_policy.members:
                    batch_policy.join(actor)
            if learner.context.requested() != PAUSE:
                self._check_missing(learner, batch_policy)
            self._announce(learner, batch_policy, channel)

    def _check_missing(self, learner: Learner, batch_policy: RoundBatchPolicy) -> None:
        missing = batch_policy.missing()
        if missing != self._missing:
            self._missing, self._since_s = missing, self._clock()
            self._liveness.reset()
        if not missing:
            return
        if self._since_s is not None and self._clock() - self._since_s > WARN_MISSING_S:
            self._since_s = None
            words = f"the round after version {learner.version} has waited {WARN_MISSING_S:g} s for {_join_actor_names(missing)}"
            learner.context.event("warning", message=f"{words}: an actor that takes its worker slot joins the round")
        if (
            self._replan_s and set(missing) != batch_policy.members
        ):  # some segments have arrived, so the brokers respond
            for actor in self._liveness.silent(missing, self._replan_s):
                batch_policy.leave(actor)

    def _announce(self, learner: Learner, batch_policy: RoundBatchPolicy, channel: KafkaReader) -> None:
        """Announce changed members, and send returning actors their round offset."""
        for actor, offset in batch_policy.tracker.round_offsets.items():
            channel.set_round_offset(actor, offset)
        members, before = set(batch_policy.members), self._planned
        if members == before:
            return
        self._planned = members
        plan: dict[str, Any] = {"round": batch_policy.round, "members": sorted(members)}
        self._board.post(COMMANDS, make_command(MEMBERSHIP, "learner", run=learner.context.run, expires_s=None, **plan))
        if before is None:
            return
        gone, back = sorted(before - members), sorted(members - before)
        words = (
            [f"continues without {_join_actor_names(gone)}, which has not reported for {self._replan_s:g} s"]
            if gone
            else []
        )
        words += [f"waits for {_join_actor_names(back)} again"] if back else []
        message = f"round {plan['round']} {' and '.join(words)}: its members are {_join_actor_names(sorted(members))}"
        learner.context.event("plan", message=message, version=learner.version, **plan)


class LivenessMonitor:
    """Tracks when actors last reported, by the local clock: clocks of other hosts may be wrong."""

    def __init__(self, board: KafkaBoard, clock: Callable[[], float]) -> None:
        self._board, self._clock = board, clock
        self.reset()

    def reset(self) -> None:
        """Restart the tracking: every actor counts as alive now."""
        self._began_s = self._polled_s = self._clock()
        self._read_up_to: int | None = None  # records up to this number were read
        self._last_report_s: dict[int, float] = {}

    def silent(self, actors: Sequence[int], for_s: float) -> list[int]:
        """Return those actors that have not reported for `for_s` seconds; none if no broker responds."""
        now_s = self._clock()
        if now_s - self._polled_s >= POLL_INTERVAL_S:
            self._polled_s = now_s
            try:
                self._read_reports(now_s)
            except Unreachable:  # no actor can be observed
                self.reset()
                return []
        return [actor for actor in actors if now_s - self._last_report_s.get(actor, self._began_s) > for_s]

    def _read_reports(self, now_s: float) -> None:
        if self._read_up_to is None:  # skip earlier reports
            self._read_up_to, self._began_s = self._board.end(ACTORS), now_s
            return
        for number, report in self._board.read(ACTORS, self._read_up_to):
            self._read_up_to = number
            if report.get("state") != "stopped":
                self._last_report_s[int(report["actor"])] = now_s


def _join_actor_names(actors: Sequence[int]) -> str:
    return ", ".join(f"actor-{actor}" for actor in actors)

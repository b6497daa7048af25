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

    def look(self) -> None:
        """Process joins and missing members, and announce changes; called when the worker slot is idle."""
        if self._learner is None or not isinstance(self._channel, KafkaReader):
            return
        learner, channel, intake = self._learner, self._channel, self._learner.batch_policy
        joined = []
        while channel.joined:
            actor, replaced = channel.joined.popleft()
            joined.append(actor)
            learner.context.event("member", actor=actor, replaced=replaced, version=learner.version)
        if isinstance(intake, RoundBatchPolicy):
            for actor in joined:
                if actor not in intake.members:
                    intake.join(actor)
            if learner.context.requested() != PAUSE:
                self._watch(learner, intake)
            self._tell(learner, intake, channel)

    def _watch(self, learner: Learner, intake: RoundBatchPolicy) -> None:
        missing = intake.missing()
        if missing != self._missing:
            self._missing, self._since_s = missing, self._clock()
            self._liveness.begin()
        if not missing:
            return
        if self._since_s is not None and self._clock() - self._since_s > WARN_MISSING_S:
            self._since_s = None
            words = f"the round after version {learner.version} has waited {WARN_MISSING_S:g} s for {_join_actor_names(missing)}"
            learner.context.event("warning", message=f"{words}: whoever takes that place is in it")
        if self._replan_s and set(missing) != intake.members:  # some segments have arrived, so the brokers respond
            for actor in self._liveness.silent(missing, self._replan_s):
                intake.part(actor)

    def _tell(self, learner: Learner, intake: RoundBatchPolicy, channel: KafkaReader) -> None:
        """Announce changed members, and send returning actors their round offset."""
        for actor, shift in intake.tracker.round_offsets.items():
            channel.place(actor, shift)
        members, before = set(intake.members), self._planned
        if members == before:
            return
        self._planned = members
        plan: dict[str, Any] = {"round": intake.round, "members": sorted(members)}
        self._board.post(COMMANDS, make_command(MEMBERSHIP, "learner", run=learner.context.run, expires_s=None, **plan))
        if before is None:
            return
        gone, back = sorted(before - members), sorted(members - before)
        words = (
            [f"goes on without {_join_actor_names(gone)}, which showed no life for {self._replan_s:g} s"]
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
        self.begin()

    def begin(self) -> None:
        """Restart the tracking: every actor counts as alive now."""
        self._began_s = self._looked_s = self._clock()
        self._read: int | None = None  # records up to this number were read
        self._seen_s: dict[int, float] = {}

    def silent(self, actors: Sequence[int], for_s: float) -> list[int]:
        """Return those actors that have not reported for `for_s` seconds; none if no broker responds."""
        now_s = self._clock()
        if now_s - self._looked_s >= POLL_INTERVAL_S:
            self._looked_s = now_s
            try:
                self._listen(now_s)
            except Unreachable:  # no actor can be observed
                self.begin()
                return []
        return [actor for actor in actors if now_s - self._seen_s.get(actor, self._began_s) > for_s]

    def _listen(self, now_s: float) -> None:
        if self._read is None:  # skip earlier reports
            self._read, self._began_s = self._board.end(ACTORS), now_s
            return
        for number, told in self._board.read(ACTORS, self._read):
            self._read = number
            if told.get("state") != "stopped":
                self._seen_s[int(told["actor"])] = now_s


def _join_actor_names(actors: Sequence[int]) -> str:
    return ", ".join(f"actor-{actor}" for actor in actors)

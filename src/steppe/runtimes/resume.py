"""Restore the actors' positions in the channel from a checkpoint."""

from __future__ import annotations

from typing import Protocol

from steppe.records.checkpoints import Checkpoints
from steppe.records.run_directory import RunDirectory
from steppe.runtimes.plan import Plan


class Primeable(Protocol):
    """A channel, or a substitute for it, from which actors learn where to resume."""

    def prime(self, actor: int, sequence: int, state: bytes | None) -> None: ...


def prime_channel(channel: Primeable, plan: Plan, directory: RunDirectory) -> None:
    """Set each actor's last segment in the channel from the checkpoint that the plan resumes from, if any."""
    if plan.resume is None:
        return
    checkpoint = Checkpoints(directory.checkpoints, run=directory.key).load(plan.resume)
    for actor, expected, state in checkpoint.state["ledger"]["actors"]:
        channel.prime(actor, expected - 1, state)

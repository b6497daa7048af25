"""Where a resumed run begins: the actors' places in the channel, as the checkpoint has them."""

from __future__ import annotations

from typing import Protocol

from steppe.records.checkpoints import Checkpoints
from steppe.records.run_directory import RunDirectory
from steppe.runtimes.plan import Plan


class Primeable(Protocol):
    """Whatever actors ask where to begin: a channel, or what is there before one."""

    def prime(self, actor: int, sequence: int, state: bytes | None) -> None: ...


def prime_channel(channel: Primeable, plan: Plan, directory: RunDirectory) -> None:
    """Tell the channel what each actor had offered by the checkpoint that the plan goes on from, if it does."""
    if plan.resume is None:
        return
    checkpoint = Checkpoints(directory.checkpoints, run=directory.key).at(plan.resume)
    for actor, expected, state in checkpoint.state["ledger"]["actors"]:
        channel.prime(actor, expected - 1, state)

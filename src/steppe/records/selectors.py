"""Checkpoint selectors: which weights of a run are meant.

RUN               the weights that the run is evaluated by: the final ones, else those of the newest checkpoint
RUN@best          the weights with the best evaluation so far
RUN@latest        the newest intact checkpoint
RUN@12            the checkpoint with this number in `steppe checkpoints`
RUN@step=400000   the newest kept weights of at most this many environment steps
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from steppe.core.contracts.errors import DamagedFile, RunNotFound, UsageError
from steppe.core.contracts.weights import Weights
from steppe.records.checkpoints import Checkpoint, Checkpoints, KeptWeights, load_weights
from steppe.records.run_directory import RECORD, RunDirectory, runs_root

FORMS = "best, latest, a checkpoint's number, or step=N"
_MAX_LISTED = 8
_NUMBER, _STEP = re.compile(r"\d{1,18}"), re.compile(r"step=([\d_,]{1,24})")


@dataclass(frozen=True)
class CheckpointSelector:
    """What follows RUN@; `value` is a checkpoint's number or a count of steps."""

    kind: Literal["result", "best", "latest", "number", "step"] = "result"
    value: int = 0

    @classmethod
    def parse(cls, text: str | int) -> CheckpointSelector:
        """Parse the part after the @. Raises UsageError for anything but the forms above."""
        word = str(text)
        if word == "best":
            return cls("best")
        if word == "latest":
            return cls("latest")
        if not isinstance(text, bool) and _NUMBER.fullmatch(word):
            return cls("number", int(word))
        step = _STEP.fullmatch(word)
        if step is not None and (digits := step[1].replace("_", "").replace(",", "")):
            return cls("step", int(digits))
        raise UsageError(f"{word[:100]!r} selects no checkpoint: use {FORMS}")

    def __str__(self) -> str:
        return {"number": str(self.value), "step": f"step={self.value}"}.get(self.kind, self.kind)


RESULT = CheckpointSelector()


def open_run(run: str | Path, checkpoint: str | int | None = None) -> tuple[RunDirectory, CheckpointSelector]:
    """Open RUN or RUN@SELECTOR; `checkpoint` is the selector if it is given apart from the run."""
    address, at, word = str(run).rpartition("@")
    if not at or "/" in word or _is_run(run):
        address, at = str(run), ""
    if at and checkpoint is not None:
        raise UsageError(f"{run} names a checkpoint, and checkpoint={checkpoint!r} another: give one of them")
    chosen = word if at else checkpoint
    selector = CheckpointSelector() if chosen is None else CheckpointSelector.parse(chosen)
    return RunDirectory.open(address), selector


def select_weights(directory: RunDirectory, selector: CheckpointSelector = RESULT) -> Weights:
    """Return the weights that a selector means. RunNotFound names what the run has instead."""
    checkpoints = Checkpoints(directory.checkpoints, run=directory.key)
    if selector.kind == "result":
        return _result(directory, checkpoints)
    found: Checkpoint | None
    if selector.kind == "best":
        found = checkpoints.best()
    elif selector.kind == "latest":
        found = checkpoints.latest(check_rows=False)
    else:
        found = _find(checkpoints.kept(), selector, checkpoints)
    if found is None:
        raise _nothing_selected(directory, selector, checkpoints.kept())
    return found.weights


def select_checkpoint(directory: RunDirectory, selector: CheckpointSelector) -> int:
    """Return the number of the checkpoint with the learner's whole state that a selector means."""
    checkpoints = Checkpoints(directory.checkpoints, run=directory.key)
    kept = [entry for entry in checkpoints.kept() if not entry.best]
    if selector.kind == "best":
        raise UsageError(
            f"the best weights of {directory.id} are kept without the learner's state, so no run can resume from them: "
            f"start a new run with --init-from {directory.address}@best, or resume from a checkpoint.{_listed(kept)}"
        )
    found = (
        checkpoints.latest()
        if selector.kind in ("latest", "result")
        else _find(kept, selector, checkpoints, check_rows=True)
    )
    if found is None:
        raise _nothing_selected(directory, selector, kept)
    return found.number


def _result(directory: RunDirectory, checkpoints: Checkpoints) -> Weights:
    """Return a run's final weights, or else those of its newest checkpoint, or else of its best one."""
    if directory.result.exists():
        return load_weights(directory.result)
    try:
        found = checkpoints.latest(check_rows=False) or checkpoints.best()
    except DamagedFile as error:
        found = checkpoints.best()
        if found is None:
            raise error from None
    if found is None:
        raise RunNotFound(f"{directory.id} has no weights yet: its first checkpoint is still to come")
    return found.weights


def _find(
    kept: Sequence[KeptWeights], selector: CheckpointSelector, checkpoints: Checkpoints, *, check_rows: bool = False
) -> Checkpoint | None:
    """Return the checkpoint with this number, or the newest one of at most this many steps."""
    if selector.kind == "number":
        matching = [entry for entry in kept if entry.number == selector.value and not entry.best]
    else:
        matching = [entry for entry in kept if entry.env_steps <= selector.value]
    if not matching:
        return None
    return checkpoints.read(max(matching, key=lambda entry: (entry.env_steps, not entry.best)), check_rows=check_rows)


def _nothing_selected(
    directory: RunDirectory, selector: CheckpointSelector, kept: Sequence[KeptWeights]
) -> RunNotFound:
    if not kept:
        return RunNotFound(f"{directory.id} has no checkpoints yet")
    wanted = {
        "best": "no evaluated weights yet",
        "number": f"no checkpoint {selector.value}",
        "step": f"no checkpoint of {selector.value:,} steps or fewer",
    }.get(selector.kind, "no checkpoint with the learner's state")
    return RunNotFound(f"{directory.id} has {wanted}.{_listed(kept)}")


def _listed(kept: Sequence[KeptWeights]) -> str:
    """Name the newest of the kept weights, as the end of a sentence."""
    if not kept:
        return ""
    newest = sorted(kept, key=lambda entry: (entry.env_steps, entry.best))[-_MAX_LISTED:]
    words = [f"{'best' if entry.best else entry.number} (step {entry.env_steps:,})" for entry in newest]
    return f" There {'is' if len(kept) == 1 else 'are'}: {', '.join(words)}"


def _is_run(run: str | Path) -> bool:
    return any((path / RECORD).exists() for path in (runs_root() / run, Path(run)))

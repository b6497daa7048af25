"""Hyperparameters that change while a run goes on: what a learner was told, what is in effect, and how workers hear of it.

A learner takes values over between two updates. Where workers compute the gradients, it publishes all live values under the
name SETTINGS just before the weights: who adopts those weights adopts the values with them, so every gradient that was made
with one version of the weights was made with the same values.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from steppe.core.contracts.algorithm import Agent, Tree, Tunable
from steppe.core.contracts.errors import ConfigError, UsageError
from steppe.core.contracts.transport import SET
from steppe.core.contracts.weights import Weights
from steppe.roles.context import Context

SETTINGS = "settings"  # the name under which live values are published
_RECORD_BYTES = 4_096
_MAX_ANSWERED_IDS = 256  # ids of commands that were answered


class LiveHyperparameters:
    """The live hyperparameters of one learner's agent."""

    def __init__(self, agent: Agent, live: Sequence[str] | None = None) -> None:
        """`live` are the fields that may change now; None: those that a command says."""
        self._agent, self._live = agent, live
        config = getattr(agent, "config", None)
        self._began: Tree = {name: getattr(config, name) for name in live or () if hasattr(config, name)}
        self.values: Tree = dict(self._began)
        self._answered: deque[str] = deque(maxlen=_MAX_ANSWERED_IDS)

    def is_new(self, command: Mapping[str, Any]) -> bool:
        """Whether this command was not answered yet, in this life of the run or one before."""
        return command.get("id") is None or str(command["id"]) not in self._answered

    def wanted(self, command: Mapping[str, Any]) -> dict[str, Any]:
        """What a command changes now; the rest of it waits for a restart."""
        live = command.get("live", ()) if self._live is None else self._live
        return {name: value for name, value in command["values"].items() if name in live}

    def take(self, values: Mapping[str, Any]) -> str | None:
        """Let the agent learn with these values from now on; returns why it does not, or None."""
        if values and not isinstance(self._agent, Tunable):
            return f"{type(self._agent).__name__} takes over no hyperparameters while it learns"
        try:
            if isinstance(self._agent, Tunable) and values:
                self._agent.retune(values)
        except UsageError as error:
            return str(error)
        self.values |= values
        return None

    def answer(
        self,
        context: Context,
        command: Mapping[str, Any],
        live: Mapping[str, Any],
        counts: Mapping[str, int],
        refusal: str | None = None,
    ) -> None:
        """Write into the event log what became of a command, and with which update."""
        about = {"id": command.get("id"), "command": SET, "values": command["values"], "live": sorted(live)}
        context.event("command", **about, **counts, obeyed=refusal is None, message=refusal)
        if command.get("id") is not None:
            self._answered.append(str(command["id"]))

    def state(self) -> Tree:
        """For a checkpoint: what this life began with, what is in effect, and which commands led there."""
        return {"began": dict(self._began), "values": dict(self.values), "answered": list(self._answered)}

    def restore(self, state: Tree | None) -> None:
        """Go on with the values that were in effect, but for those that the configuration has changed since.

        The agent was made from the configuration as it is now, and then took over the checkpoint's step size.
        """
        if not state:
            return
        self._answered = deque(state["answered"], maxlen=_MAX_ANSWERED_IDS)
        began, effective = state["began"], state["values"]
        kept = {name: value for name, value in effective.items() if name in self.values}
        changed = {name: value for name, value in self._began.items() if name in began and began[name] != value}
        values = {
            name: value for name, value in (kept | changed).items() if name in changed or value != self.values[name]
        }
        refusal = self.take(values)
        if refusal is not None:
            raise ConfigError(refusal)

    def record(self, version: int) -> Weights:
        """The values in effect as they are published; the same size whatever they are."""
        data = json.dumps(self.values).encode()
        if len(data) > _RECORD_BYTES:
            raise ConfigError(f"the live hyperparameters take {len(data)} bytes, and {_RECORD_BYTES} can be published")
        padded = np.frombuffer(data.ljust(_RECORD_BYTES), np.uint8)
        return Weights.from_arrays({"values": padded}).stamped(version=version, updates=0, env_steps=0)


def apply_live_hyperparameters(agent: Agent, record: Weights) -> None:
    """Let a worker's agent compute gradients with what `Tuning.record` says."""
    values = json.loads(record.arrays()["values"].tobytes())
    config = getattr(agent, "config", None)
    changed = {name: value for name, value in values.items() if getattr(config, name, None) != value}
    if changed and isinstance(agent, Tunable):
        agent.retune(changed)

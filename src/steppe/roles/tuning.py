"""Live hyperparameters: values that commands change during a run, and how workers receive them.

A learner applies values between two updates. If workers compute the gradients, it publishes all live values under the
name SETTINGS just before the weights. A worker that adopts those weights adopts the values with them, so all gradients
computed with one version of the weights use the same values.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from steppe.core.config.agent import AgentConfig
from steppe.core.contracts.algorithm import Agent, ConfiguredAgent, Tree, Tunable
from steppe.core.contracts.errors import ConfigError, UsageError
from steppe.core.contracts.transport import SET
from steppe.core.contracts.weights import Weights
from steppe.roles.context import Context

SETTINGS = "settings"  # the name under which live values are published
_RECORD_BYTES = 4_096
_MAX_ANSWERED_IDS = 256  # newest ids of answered commands that are remembered


class LiveHyperparameters:
    """The live hyperparameters of one learner's agent."""

    def __init__(self, agent: Agent, live: Sequence[str] | None = None) -> None:
        """`live` are the fields that may change during the run; None: the command names them."""
        self._agent, self._live = agent, live
        config = config_values(agent)
        self._initial: Tree = {name: config[name] for name in live or () if name in config}
        self.values: Tree = dict(self._initial)
        self._answered_ids: deque[str] = deque(maxlen=_MAX_ANSWERED_IDS)

    def is_new(self, command: Mapping[str, Any]) -> bool:
        """Whether this command was not answered yet, in this attempt of the run or an earlier one."""
        return command.get("id") is None or str(command["id"]) not in self._answered_ids

    def live_values(self, command: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values that a command changes now; the others wait for a restart."""
        live = command.get("live", ()) if self._live is None else self._live
        return {name: value for name, value in command["values"].items() if name in live}

    def apply(self, values: Mapping[str, Any]) -> str | None:
        """Apply these values to the agent; return the reason if the agent refuses them, else None."""
        if values and not isinstance(self._agent, Tunable):
            return f"{type(self._agent).__name__} cannot change hyperparameters during a run"
        try:
            if isinstance(self._agent, Tunable) and values:
                self._agent.retune(values)
        except UsageError as error:
            return str(error)
        self.values |= values
        return None

    def post_result(
        self,
        context: Context,
        command: Mapping[str, Any],
        live: Mapping[str, Any],
        counts: Mapping[str, int],
        refusal: str | None = None,
    ) -> None:
        """Post a command's outcome and the learner's counts to the event log."""
        fields = {"id": command.get("id"), "command": SET, "values": command["values"], "live": sorted(live)}
        context.event("command", **fields, **counts, obeyed=refusal is None, message=refusal)
        if command.get("id") is not None:
            self._answered_ids.append(str(command["id"]))

    def state(self) -> Tree:
        """Return the checkpoint's part: initial values of this attempt, values in effect, ids of answered commands."""
        return {"began": dict(self._initial), "values": dict(self.values), "answered": list(self._answered_ids)}

    def restore(self, state: Tree | None) -> None:
        """Restore the values that were in effect, except those that the configuration has changed since.

        The agent was built from the present configuration, and then restored the checkpoint's learning rate.
        """
        if not state:
            return
        self._answered_ids = deque(state["answered"], maxlen=_MAX_ANSWERED_IDS)
        initial, effective = state["began"], state["values"]
        kept = {name: value for name, value in effective.items() if name in self.values}
        changed = {name: value for name, value in self._initial.items() if name in initial and initial[name] != value}
        values = {
            name: value for name, value in (kept | changed).items() if name in changed or value != self.values[name]
        }
        refusal = self.apply(values)
        if refusal is not None:
            raise ConfigError(refusal)

    def record(self, version: int) -> Weights:
        """Return the values in effect as weights to publish, padded to a fixed size."""
        data = json.dumps(self.values).encode()
        if len(data) > _RECORD_BYTES:
            raise ConfigError(f"the live hyperparameters take {len(data)} bytes, and {_RECORD_BYTES} can be published")
        padded = np.frombuffer(data.ljust(_RECORD_BYTES), np.uint8)
        return Weights.from_arrays({"values": padded}).stamped(version=version, updates=0, env_steps=0)


def config_values(agent: Agent) -> Mapping[str, Any]:
    """Return the agent's hyperparameters by name; empty if it does not show its configuration."""
    config = agent.config if isinstance(agent, ConfiguredAgent) else None
    return dict(config) if isinstance(config, AgentConfig) else {}


def apply_live_hyperparameters(agent: Agent, record: Weights) -> None:
    """Apply the values of `LiveHyperparameters.record` to a worker's agent."""
    values = json.loads(record.arrays()["values"].tobytes())
    config = config_values(agent)
    changed = {name: value for name, value in values.items() if config.get(name) != value}
    if changed and isinstance(agent, Tunable):
        agent.retune(changed)

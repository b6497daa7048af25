"""Sampled sequences of many agents, and their unrolling through the recurrent, communicating network.

Axes: [R, N, A, …]: rows of a window in time, windows, agents. Trailing agents that are in no window are cut off, only
agents that are present are encoded, and gradients flow only through the rows that are learned from.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from steppe.algorithms.dhc.expert import expert_action_mask
from steppe.algorithms.dhc.network import DHCNetwork
from steppe.algorithms.nn.flat_module import as_tensor
from steppe.core.contracts.segment import Batch


class MultiAgentSequences:
    """A batch from sequence replay, for one update. `counted` [R, N, A] marks the steps that are learned from."""

    def __init__(self, batch: Batch, device: torch.device, *, first_only: bool) -> None:
        self.device = device
        self._batch = batch = _add_agent_axis(batch)
        live = batch["live"] & batch["valid"][..., None]
        self.num_agents = agents = 1 + int(live.any(axis=(0, 1)).nonzero()[0].max(initial=0))
        self.live = live = live[..., :agents]
        learn = batch["learn"]
        self.first = learn.argmax(axis=0)  # [N]: the first learned row
        self.until = len(learn) - learn[::-1].argmax(axis=0)
        row = np.arange(len(learn))[:, None]
        self._traced = live & ((self.first <= row) & (row < self.until))[..., None]
        self._obs = batch["obs"][:, :, :agents]
        self._mask = as_tensor(batch["comm_mask"][:, :, :agents, :agents], device)
        self._memory = as_tensor(batch["hidden"][:, :agents].astype(np.float32), device)
        terminated = batch["terminated"][..., :agents]
        stays = np.take_along_axis(live, batch["following"][..., None], axis=0)  # present where it bootstraps from
        self.counted = live & learn[..., None] & (terminated | stays)
        if first_only:
            self.counted[..., 1:] = False

    def unroll(self, network: DHCNetwork, *, traced: bool) -> torch.Tensor:
        """Return action values [R, N · A, actions] of all rows; those of absent agents have no meaning."""
        taken_in = self._encode(network, self._traced if traced else np.zeros_like(self._traced))
        quiet, end = (int(self.first.min()), int(self.until.max())) if traced else (len(taken_in), len(taken_in))
        first = as_tensor(self.first, self.device)
        memory, memories = self._memory, []
        for row, seen in enumerate(taken_in.unbind()):
            with torch.set_grad_enabled(quiet <= row < end):
                if row > quiet:  # the hidden state before a window's first learned row is a constant
                    memory = torch.where((first == row)[:, None, None], memory.detach(), memory)
                memory = network.step(seen, memory, self._mask[row])
            memories.append(memory)
        with torch.set_grad_enabled(traced):
            values = network.values(torch.stack(memories).flatten(0, 2))
        return values.view(len(memories), -1, values.shape[1])

    def _encode(self, network: DHCNetwork, traced: np.ndarray) -> torch.Tensor:
        """Encode the observations of the agents that are present [R, N, A, …]; 0 for the others."""
        obs = self._obs.reshape(-1, *self._obs.shape[3:])
        taken_in = torch.zeros((self.live.size, 3 * network.hidden_size), device=self.device)
        for chosen, with_gradient in ((self.live & ~traced, False), (traced, True)):
            rows = np.flatnonzero(chosen)
            if len(rows):
                with torch.set_grad_enabled(with_gradient):
                    seen = network.encode(as_tensor(obs[rows], self.device))
                    taken_in = taken_in.index_copy(0, as_tensor(rows, self.device), seen)
        return taken_in.view(*self.live.shape, -1)

    def flatten_agents(self) -> Batch:
        """Return the columns of the loss, with every agent of every window as its own sequence: [R, N · A]."""
        batch, shape, rows = self._batch, self.live.shape, len(self.live)
        columns = {name: batch[name][..., : self.num_agents] for name in ("action", "reward", "terminated")}
        columns |= {name: np.broadcast_to(batch[name][..., None], shape) for name in ("discount", "following")}
        columns["learn"] = self.counted
        weights = None if batch.weights is None else np.repeat(batch.weights, self.num_agents)
        return Batch({name: column.reshape(rows, -1) for name, column in columns.items()}, weights=weights)

    def expert_action_mask(self) -> np.ndarray:
        """Return a mask of the actions [R, N · A, actions] that the agents' observations recommend."""
        found = expert_action_mask(self._obs)
        return found.reshape(len(found), -1, found.shape[-1])

    def average_over_agents(self, errors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Average errors [R, N · A] over the counted agents; return means [R, N], and where there are any."""
        number = self.counted.sum(axis=2)
        means: np.ndarray = errors.reshape(self.live.shape).sum(axis=2) / np.maximum(number, 1)
        return means, number > 0


def _add_agent_axis(batch: Batch) -> Batch:
    """Add an agent axis to a batch of single-agent environments."""
    if "live" in batch.columns:
        return batch
    every = {name: batch[name][:, :, None] for name in ("obs", "action", "reward", "terminated", "comm_mask")}
    alone = {"live": batch["valid"][:, :, None], "hidden": batch["hidden"][:, None]}
    return replace(batch, columns={**batch.columns, **every, **alone})

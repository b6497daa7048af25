"""Recurrent networks: map observations [T, N, …] and the state before them to outputs [T, N, out], NumPy in and out.

    obs → front (compiled MLPs, or any torso in torch) → inputs of the cell's gates → cell → linear heads

On the CPU the cell is always compiled, whatever the front is; on a GPU all of it is torch's graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from torch import nn

from steppe.algorithms.nn.flat_module import as_tensor
from steppe.algorithms.nn.mlp_kernels import HeadSpec, ParallelMLPs
from steppe.algorithms.nn.normalizers import ObsNormalizer
from steppe.algorithms.nn.rnn.cell import RecurrentCell, UnrollResult
from steppe.algorithms.nn.torsos import build_torso
from steppe.algorithms.r2d2.config import R2D2Config
from steppe.algorithms.shared.actor_critic_config import ActorCriticConfig
from steppe.core.config.agent import default_cell_size
from steppe.core.contracts.errors import ConfigError
from steppe.core.contracts.specs import EnvSpec


class RecurrentNetwork(nn.Module):
    """Front, cell and heads. Results are in memory that the next call reuses."""

    def __init__(
        self,
        config: ActorCriticConfig | R2D2Config,
        spec: EnvSpec,
        heads: Sequence[HeadSpec],
        activation: Literal["tanh", "relu"],
    ) -> None:
        super().__init__()
        if config.normalize_obs and spec.is_image:
            raise ConfigError("normalize_obs is for vector observations; images are scaled to [0, 1] already")
        self.normalizer = ObsNormalizer(spec.obs.shape) if config.normalize_obs else None
        self.recurrence = RecurrentCell(config.cell or "lstm", config.cell_size or default_cell_size(spec), heads)
        width, hidden = self.recurrence.num_in, config.hidden or ()
        if config.network in ("auto", "mlp") and not spec.is_image and hidden:
            self.tower: ParallelMLPs | None = ParallelMLPs(
                spec.obs.shape[0], hidden, {"gates": HeadSpec(width)}, activation
            )
        else:
            self.tower = None
            self.torso, features = build_torso(config.network, spec, hidden, activation)
            self.gates = nn.Linear(features, width)
        self._open_forget_gate(f"tower.gates.{len(hidden)}" if self.tower is not None else "gates")
        self._traced: list[torch.Tensor] = []
        self._stop: np.ndarray = np.zeros((0, 0), np.bool_)

    @property
    def num_state(self) -> int:
        """Size of the recurrent state."""
        return self.recurrence.num_state

    def unroll(self, obs: np.ndarray, state: np.ndarray, clear: np.ndarray | None = None) -> UnrollResult:
        """Run from `state` [N, num_state] through `obs` [T, N, …]; `clear` [T, N] zeroes the state before a row."""
        return self._unroll(obs, state, clear, None, trace=False)

    def trace(
        self, obs: np.ndarray, state: np.ndarray, clear: np.ndarray | None = None, stop: np.ndarray | None = None
    ) -> UnrollResult:
        """Do the same, keeping what `backward` needs; gradients stop at rows where `stop` [T, N] is set."""
        return self._unroll(obs, state, clear, stop, trace=True)

    def backward(self, d_outputs: np.ndarray) -> None:
        """Fill the gradients, which must be zero, from d(loss)/d(outputs) [T, N, out] of the last `trace`."""
        traced, self._traced = self._traced, []
        gradient = d_outputs
        if self.recurrence.bound:
            gradient = self.recurrence.backward(d_outputs, self._stop)
            if self.tower is not None:
                self.tower.backward(gradient)
                return
        torch.autograd.backward(traced, [as_tensor(gradient, traced[0].device)])

    def _open_forget_gate(self, gates: str) -> None:
        """Open the gate that keeps the state: an LSTM's forget gate, a GRU's update gate (Jozefowicz et al. 2015)."""
        size = self.recurrence.size
        with torch.no_grad():
            self.get_submodule(gates).get_parameter("bias")[size : 2 * size] = 1.0

    def _unroll(
        self, obs: np.ndarray, state: np.ndarray, clear: np.ndarray | None, stop: np.ndarray | None, *, trace: bool
    ) -> UnrollResult:
        shape = obs.shape[:2]
        nowhere: np.ndarray = np.zeros(shape, np.bool_)
        clear, self._stop = nowhere if clear is None else clear, nowhere if stop is None else stop
        rows = obs.reshape(shape[0] * shape[1], *obs.shape[2:])
        if not self.recurrence.bound:
            return self._unroll_torch(rows, state, clear, trace=trace)
        return self.recurrence.unroll(self._gate_inputs(rows, trace=trace), state, clear)

    def _gate_inputs(self, rows: np.ndarray, *, trace: bool) -> np.ndarray:
        """Return the inputs' contribution to the gates."""
        if self.tower is not None:
            scaled = np.ascontiguousarray(rows) if self.normalizer is None else self.normalizer.normalize(rows)
            return self.tower.trace(scaled) if trace else self.tower.run(scaled)
        with torch.set_grad_enabled(trace):
            gated = self._gates(as_tensor(rows, torch.device("cpu")))
        self._traced = [gated] if trace else []
        added: np.ndarray = gated.detach().numpy()
        return added

    def _gates(self, rows: torch.Tensor) -> torch.Tensor:
        scaled = rows if self.normalizer is None else self.normalizer(rows)
        gated: torch.Tensor = self.gates(self.torso(scaled)) if self.tower is None else self.tower(scaled)
        return gated

    def _unroll_torch(self, rows: np.ndarray, state: np.ndarray, clear: np.ndarray, *, trace: bool) -> UnrollResult:
        """Run everything as torch's graph."""
        device = self.recurrence.weight.device
        with torch.set_grad_enabled(trace):
            gated = self._gates(as_tensor(rows, device)).reshape(*clear.shape, -1)
            flags = as_tensor(clear, device), as_tensor(self._stop, device)
            outputs, after = self.recurrence(gated, as_tensor(state, device), *flags)
        self._traced = [outputs] if trace else []
        return UnrollResult(outputs.detach().cpu().numpy(), after.detach().cpu().numpy())

"""The network of DHC: convolutions, a GRU, two rounds of communication, and a dueling head.

A round is attention over the agents that an agent receives from, followed by a second GRU.

Axes: R rows are agents in any number of environments; [N, A] are the same rows by environment. The communication mask
[N, A, A] says from which agents each agent receives, itself included; other agents have no influence on an agent that
receives only from itself. An absent agent receives from none, not even itself: its rows are not computed, or have no
meaning.

`channels` is the only size. All others follow it in the proportions of the published network (128 channels, 2.0 million
parameters): hidden state 2 · channels, messages channels / 2, and channels / 8 feature planes, at least 8, as input of
the first GRU.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from steppe.algorithms.nn.torsos import DuelingHead
from steppe.core.contracts.specs import EnvSpec

ROUNDS, HEADS, BLOCKS = 2, 2, 3
# The fused convolution that torch's own compiler uses. It is not public API, so its absence is tolerated.
_FUSED = getattr(torch.ops.mkldnn, "_convolution_pointwise", None) if torch._C._has_mkldnn else None
MIN_PLANES = 8  # in proportion, a network of 16 channels would have only 2


class DHCNetwork(nn.Module):
    """Action values from the current observation, the hidden state and the messages of other agents."""

    def __init__(self, spec: EnvSpec, channels: int) -> None:
        super().__init__()
        planes, height, width = spec.obs.shape
        kept = max(MIN_PLANES, channels // 8)
        self.hidden_size = 2 * channels
        self.num_features = kept * (height - 2) * (width - 2)
        self.scale = 1.0 / spec.obs.most
        self.first = nn.Conv2d(planes, channels, 3)
        self.blocks = nn.ModuleList(
            nn.ModuleList(nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2)) for _ in range(BLOCKS)
        )
        self.last = nn.Conv2d(channels, kept, 1)
        self.remember = SplitGRUCell(self.num_features, self.hidden_size)
        self.listen = CommAttention(self.hidden_size, channels // 2)
        self.heed = SplitGRUCell(channels // 2, self.hidden_size)
        self.head = DuelingHead(self.hidden_size, spec.action.sizes[0])
        for name, part in self.named_modules():
            if isinstance(part, nn.Linear | nn.Conv2d) and not name.startswith(("remember.", "heed.")):
                nn.init.xavier_uniform_(part.weight)
                if part.bias is not None:
                    nn.init.zeros_(part.bias)

    def encode(self, obs: torch.Tensor) -> torch.Tensor:
        """Encode observations [R, planes, height, width] as inputs to the GRU's gates [R, 3 · hidden]."""
        x = obs.to(torch.float32, memory_format=torch.channels_last)
        if self.scale != 1.0:
            x = x * self.scale
        x = _conv_relu(self.first, x)
        for block in self.blocks:
            assert isinstance(block, nn.ModuleList)
            first, second = block
            x = _conv_relu(second, _conv_relu(first, x), x)
        return self.remember.input_gates(_conv_relu(self.last, x).flatten(1))

    def step(self, gate_inputs: torch.Tensor, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return the hidden state [N, A, hidden] after one step: first the observation, then two rounds of messages.

        `gate_inputs` [N, A, 3 · hidden] are what `encode` returned; `mask` [N, A, A] is the communication mask.
        """
        hidden = self.remember(gate_inputs, hidden)
        receives = mask.sum(dim=2) > 1
        if not bool(receives.any()):
            return hidden
        ignore_mask = ~(mask | torch.eye(mask.shape[1], dtype=torch.bool, device=mask.device))
        for _ in range(ROUNDS):
            updated = self.heed(self.heed.input_gates(self.listen(hidden, ignore_mask)), hidden)
            hidden = torch.where(receives.unsqueeze(2), updated, hidden)
        return hidden

    def values(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return action values [R, actions] of hidden states [R, hidden]."""
        values: torch.Tensor = self.head(hidden)
        return values


def _conv_relu(layer: nn.Module, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
    """Return relu(convolution(x) + residual).

    Without gradients on the CPU this is one call of oneDNN instead of three, with the same bits, in 7 to 8 % less CPU
    time.
    """
    assert isinstance(layer, nn.Conv2d)
    if _FUSED is None or x.device.type != "cpu" or torch.is_grad_enabled():
        result: torch.Tensor = layer(x)
        return (result if residual is None else result.add_(residual)).relu_()
    options = (layer.weight, layer.bias, list(layer.padding), [1, 1], [1, 1], 1)
    fused: torch.Tensor = (
        _FUSED(x, *options, "relu", [], "")
        if residual is None
        else _FUSED.binary(x, residual, *options, "add", 1.0, "relu", [], "")
    )
    return fused


class SplitGRUCell(nn.Module):
    """A GRU cell in two halves (Cho et al. 2014): the input half can be computed for all time steps at once."""

    def __init__(self, num_inputs: int, size: int) -> None:
        super().__init__()
        self.outside = nn.Linear(num_inputs, 3 * size)
        self.inside = nn.Linear(size, 3 * size)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -1.0 / math.sqrt(size), 1.0 / math.sqrt(size))

    def input_gates(self, inputs: torch.Tensor) -> torch.Tensor:
        """Compute the input half, [..., inputs] → [..., 3 · size]."""
        gates: torch.Tensor = self.outside(inputs)
        return gates

    def forward(self, gate_inputs: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Compute the recurrent half: the next hidden state [..., size]."""
        size = hidden.shape[-1]
        kept = self.inside(hidden)
        gates = torch.sigmoid(gate_inputs[..., : 2 * size] + kept[..., : 2 * size])
        reset, update = gates[..., :size], gates[..., size:]
        fresh = torch.tanh(torch.addcmul(gate_inputs[..., 2 * size :], reset, kept[..., 2 * size :]))
        return torch.lerp(fresh, hidden, update)


class CommAttention(nn.Module):
    """Scaled dot-product attention over communicating agents (Vaswani et al. 2017), [N, A, hidden] → [N, A, size]."""

    def __init__(self, memory_size: int, size: int) -> None:
        super().__init__()
        self.size = size
        self.project = nn.Linear(memory_size, 3 * HEADS * size)
        self.join = nn.Linear(HEADS * size, size, bias=False)

    def forward(self, hidden: torch.Tensor, ignore_mask: torch.Tensor) -> torch.Tensor:
        """`ignore_mask` [N, A, A] is True where an agent does not receive from another, never for a whole row."""
        envs, agents, _ = hidden.shape
        queries, keys, values = self.project(hidden).view(envs, agents, 3, HEADS, self.size).permute(2, 0, 3, 1, 4)
        scores = (queries @ keys.transpose(2, 3)) * (1.0 / math.sqrt(self.size))
        shares = torch.softmax(scores.masked_fill(ignore_mask.unsqueeze(1), -torch.inf), dim=3)
        updated: torch.Tensor = self.join((shares @ values).transpose(1, 2).reshape(envs, agents, HEADS * self.size))
        return updated

"""The network of agents that see a window, remember and talk: convolutions, a GRU, two rounds of attention over those whom
each hears, also remembered by a GRU, and a dueling head.

Axes: R rows are agents in any number of environments; [N, A] the same rows by environment. What an agent hears is a mask
[N, A, A] with itself in it; one that hears nobody else is untouched by the others. Who is absent hears nobody at all:
its rows are never computed, or mean nothing.

`channels` is the only size. Everything else follows it in the proportions of the published network (128 channels, 2.0
million parameters): memory 2 · channels, messages channels / 2, and channels / 8 planes, 8 at least, to remember from.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from steppe.algorithms.nn.torsos import DuelingHead
from steppe.core.contracts.specs import EnvSpec

ROUNDS, HEADS, BLOCKS = 2, 2, 3
# What torch's own compiler makes of a convolution and what follows it; not public, so done without where it is missing.
_FUSED = getattr(torch.ops.mkldnn, "_convolution_pointwise", None) if torch._C._has_mkldnn else None
MIN_PLANES = 8  # in proportion, a network of 16 channels would remember from 2


class DHCNetwork(nn.Module):
    """Action values from what is seen now, what was seen before and what others say."""

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
        """What rows see [R, planes, height, width], as what the memory takes in [R, 3 · memory]."""
        seen = obs.to(torch.float32, memory_format=torch.channels_last)
        if self.scale != 1.0:
            seen = seen * self.scale
        seen = _conv_relu(self.first, seen)
        for block in self.blocks:
            assert isinstance(block, nn.ModuleList)
            first, second = block
            seen = _conv_relu(second, _conv_relu(first, seen), seen)
        return self.remember.input_gates(_conv_relu(self.last, seen).flatten(1))

    def step(self, gate_inputs: torch.Tensor, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """The memory [N, A, memory] after one step: what was seen [N, A, 3 · memory], then what was heard, twice."""
        hidden = self.remember(gate_inputs, hidden)
        hears = mask.sum(dim=2) > 1
        if not bool(hears.any()):
            return hidden
        deaf = ~(mask | torch.eye(mask.shape[1], dtype=torch.bool, device=mask.device))
        for _ in range(ROUNDS):
            heard = self.heed(self.heed.input_gates(self.listen(hidden, deaf)), hidden)
            hidden = torch.where(hears.unsqueeze(2), heard, hidden)
        return hidden

    def values(self, hidden: torch.Tensor) -> torch.Tensor:
        """Action values [R, actions] of rows [R, memory]."""
        values: torch.Tensor = self.head(hidden)
        return values


def _conv_relu(layer: nn.Module, seen: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
    """A convolution, with `beside` added to it, and of that what is positive.

    Without gradients on the CPU that is one call of oneDNN's and not three, with the same bits, in 7 to 8 % less processor time.
    """
    assert isinstance(layer, nn.Conv2d)
    if _FUSED is None or seen.device.type != "cpu" or torch.is_grad_enabled():
        found: torch.Tensor = layer(seen)
        return (found if residual is None else found.add_(residual)).relu_()
    how = (layer.weight, layer.bias, list(layer.padding), [1, 1], [1, 1], 1)
    fused: torch.Tensor = (
        _FUSED(seen, *how, "relu", [], "")
        if residual is None
        else _FUSED.binary(seen, residual, *how, "add", 1.0, "relu", [], "")
    )
    return fused


class SplitGRUCell(nn.Module):
    """A GRU cell in two halves (Cho et al. 2014): what comes from outside can be computed for all times at once."""

    def __init__(self, num_inputs: int, size: int) -> None:
        super().__init__()
        self.outside = nn.Linear(num_inputs, 3 * size)
        self.inside = nn.Linear(size, 3 * size)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -1.0 / math.sqrt(size), 1.0 / math.sqrt(size))

    def input_gates(self, inputs: torch.Tensor) -> torch.Tensor:
        """The outer half, [..., inputs] → [..., 3 · size]."""
        taken: torch.Tensor = self.outside(inputs)
        return taken

    def forward(self, gate_inputs: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """The inner half: the next memory [..., size]."""
        size = hidden.shape[-1]
        kept = self.inside(hidden)
        gates = torch.sigmoid(gate_inputs[..., : 2 * size] + kept[..., : 2 * size])
        reset, update = gates[..., :size], gates[..., size:]
        fresh = torch.tanh(torch.addcmul(gate_inputs[..., 2 * size :], reset, kept[..., 2 * size :]))
        return torch.lerp(fresh, hidden, update)


class CommAttention(nn.Module):
    """Scaled dot products over those who are heard (Vaswani et al. 2017), [N, A, memory] → [N, A, size]."""

    def __init__(self, memory_size: int, size: int) -> None:
        super().__init__()
        self.size = size
        self.project = nn.Linear(memory_size, 3 * HEADS * size)
        self.join = nn.Linear(HEADS * size, size, bias=False)

    def forward(self, hidden: torch.Tensor, ignore_mask: torch.Tensor) -> torch.Tensor:
        """`deaf` [N, A, A] is True where one does not hear the other; each hears someone."""
        worlds, agents, _ = hidden.shape
        asked, keys, said = self.project(hidden).view(worlds, agents, 3, HEADS, self.size).permute(2, 0, 3, 1, 4)
        scores = (asked @ keys.transpose(2, 3)) * (1.0 / math.sqrt(self.size))
        shares = torch.softmax(scores.masked_fill(ignore_mask.unsqueeze(1), -torch.inf), dim=3)
        heard: torch.Tensor = self.join((shares @ said).transpose(1, 2).reshape(worlds, agents, HEADS * self.size))
        return heard

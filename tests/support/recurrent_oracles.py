"""A recurrent network by torch's own cells in double precision, one environment and one step at a time: slow and plain."""

import numpy as np
import torch


def leaves_of(module):
    """Copies of a module's parameters in double precision, for autograd to follow."""
    return {name: value.detach().double().clone().requires_grad_() for name, value in module.named_parameters()}


def layers(rows, leaves, prefix, activation):
    """Fully connected layers, the last without activation."""
    count = sum(name.startswith(prefix) for name in leaves) // 2
    for index in range(count):
        rows = rows @ leaves[f"{prefix}{index}.weight"] + leaves[f"{prefix}{index}.bias"]
        rows = rows if index == count - 1 else activation(rows)
    return rows


def unrolled(leaves, obs, state, cell, activation, body="body."):
    """(outputs [T, out], states after each step [T, K]) of one environment from `state` [K] on; `state` None: nothing."""
    size = leaves[f"{body}recurrence.weight"].shape[0]
    num_gates = {"lstm": 4, "gru": 3}[cell]
    kind = torch.nn.LSTMCell if cell == "lstm" else torch.nn.GRUCell
    plain = kind(num_gates * size, size, bias=False).double()
    weights = {
        "weight_ih": torch.eye(num_gates * size).double(),
        "weight_hh": leaves[f"{body}recurrence.weight"].T,
    }
    known = torch.zeros(size * (2 if cell == "lstm" else 1)).double() if state is None else state
    known, outputs, states = known[None], [], []
    for observation in obs:
        row = torch.as_tensor(np.asarray(observation, np.float64))[None]
        gates = layers(row, leaves, f"{body}tower.gates.", activation)
        if cell == "lstm":
            known = torch.cat(torch.func.functional_call(plain, weights, (gates, known.split(size, dim=1))), dim=1)
        else:
            known = torch.func.functional_call(plain, weights, (gates, known))
        heads = known[:, :size] @ leaves[f"{body}recurrence.head_weight"] + leaves[f"{body}recurrence.head_bias"]
        outputs.append(heads[0])
        states.append(known[0])
    return torch.stack(outputs), torch.stack(states)

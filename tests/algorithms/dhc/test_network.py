"""The communicating network against plain NumPy loops, and what a mask must mean."""

import math

import numpy as np
import pytest
import torch

from steppe.algorithms.dhc.network import DHCNetwork
from steppe.core.contracts.specs import ActionSpec, EnvSpec, FieldSpec

pytestmark = pytest.mark.unit

SPEC = EnvSpec("grid", FieldSpec("obs", (6, 9, 9), "uint8", most=1), ActionSpec("discrete", (5,)), num_agents=4)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(3)


def network(channels=8):
    return DHCNetwork(SPEC, channels)


def rows(count, seed=0):
    return np.random.default_rng(seed).integers(0, 2, (count, 6, 9, 9), np.uint8)


def memories(net, worlds, agents=4, seed=1):
    return np.random.default_rng(seed).uniform(-1, 1, (worlds, agents, net.hidden_size)).astype(np.float32)


def stepped(net, obs, memory, mask):
    """Values and memory [N, A, …] of one step."""
    worlds, agents = mask.shape[:2]
    with torch.no_grad():
        taken_in = net.encode(torch.from_numpy(obs.reshape(-1, 6, 9, 9))).view(worlds, agents, -1)
        after = net.step(taken_in, torch.from_numpy(memory), torch.from_numpy(mask))
        return net.values(after.flatten(0, 1)).view(worlds, agents, -1).numpy(), after.numpy()


# The oracle: loops over pixels, agents and heads, in double precision.


def parameters(net):
    return {name: tensor.detach().numpy().astype(np.float64) for name, tensor in net.named_parameters()}


def convolved(planes, weight, bias, pad):
    size = weight.shape[2]
    padded = np.pad(planes, ((0, 0), (pad, pad), (pad, pad)))
    height, width = padded.shape[1] - size + 1, padded.shape[2] - size + 1
    out = np.empty((len(weight), height, width))
    for y in range(height):
        for x in range(width):
            out[:, y, x] = np.tensordot(weight, padded[:, y : y + size, x : x + size], axes=3) + bias
    return out


def logistic(x):
    return 1.0 / (1.0 + np.exp(-x))


def gru_step(p, name, x, memory):
    """A GRU as its paper writes it, with the candidate's reset inside the bias as torch has it."""
    size = len(memory)
    outside = p[f"{name}.outside.weight"] @ x + p[f"{name}.outside.bias"]
    inside = p[f"{name}.inside.weight"] @ memory + p[f"{name}.inside.bias"]
    reset, update = logistic(outside[:size] + inside[:size]), logistic((outside + inside)[size : 2 * size])
    fresh = np.tanh(outside[2 * size :] + reset * inside[2 * size :])
    return (1 - update) * fresh + update * memory


def encoded(p, obs):
    x = np.maximum(convolved(obs.astype(float), p["first.weight"], p["first.bias"], 0), 0)
    for block in range(3):
        through = np.maximum(convolved(x, p[f"blocks.{block}.0.weight"], p[f"blocks.{block}.0.bias"], 1), 0)
        x = np.maximum(x + convolved(through, p[f"blocks.{block}.1.weight"], p[f"blocks.{block}.1.bias"], 1), 0)
    return np.maximum(convolved(x, p["last.weight"], p["last.bias"], 0), 0).reshape(-1)


def listened(p, memory, mask, agent, size, heads=2):
    """What one agent makes of all whom it hears."""
    projected = memory @ p["listen.project.weight"].T + p["listen.project.bias"]
    asked, keys, said = (part.reshape(len(memory), heads, size) for part in np.split(projected, 3, axis=1))
    joined = []
    for head in range(heads):
        others = np.flatnonzero(mask[agent])
        scores = np.array([asked[agent, head] @ keys[other, head] / math.sqrt(size) for other in others])
        shares = np.exp(scores - scores.max())
        joined.append((shares / shares.sum()) @ said[others, head])
    return p["listen.join.weight"] @ np.concatenate(joined)


def expected(net, obs, memory, mask):
    p, size = parameters(net), net.hidden_size // 4
    memory = np.array([gru_step(p, "remember", encoded(p, o), m) for o, m in zip(obs, memory, strict=True)])
    for _ in range(2):
        updated = [
            gru_step(p, "heed", listened(p, memory, mask, a, size), memory[a]) if mask[a].sum() > 1 else memory[a]
            for a in range(len(memory))
        ]
        memory = np.array(updated)
    advantage = memory @ p["head.advantage.weight"].T + p["head.advantage.bias"]
    value = memory @ p["head.value.weight"].T + p["head.value.bias"]
    return value + advantage - advantage.mean(axis=1, keepdims=True), memory


def test_a_step_equals_the_papers_equations():
    net = network()
    obs, memory = rows(8).reshape(2, 4, 6, 9, 9), memories(net, 2)
    mask = np.random.default_rng(5).random((2, 4, 4)) < 0.4
    mask |= np.eye(4, dtype=bool)
    mask[1, 2] = np.arange(4) == 2  # one who hears nobody
    values, after = stepped(net, obs, memory, mask)
    for world in range(2):
        known, kept = expected(net, obs[world], memory[world].astype(float), mask[world])
        np.testing.assert_allclose(after[world], kept, atol=2e-5)
        np.testing.assert_allclose(values[world], known, atol=2e-5)


def test_the_published_size_has_two_million_parameters():
    """Counted from the layers' shapes as they were published, with one bias vector for each linear map."""
    convolutions = 6 * 128 * 9 + 128 + 6 * (128 * 128 * 9 + 128) + 128 * 16 + 16
    gru = 3 * 256 * (16 * 7 * 7 + 256) + 2 * 3 * 256
    attention = 3 * (256 * 128 + 128) + 128 * 64
    update = 3 * 256 * (64 + 256) + 2 * 3 * 256
    heads = 256 * 5 + 5 + 256 + 1
    count = sum(parameter.numel() for parameter in network(128).parameters())
    assert count == convolutions + gru + attention + update + heads
    assert 2.0e6 < count < 2.1e6


def test_the_small_size_fits_a_megabyte():
    assert 4 * sum(parameter.numel() for parameter in network(32).parameters()) < 1_000_000


def alone(mask, agent):
    mask[:, agent, :] = mask[:, :, agent] = False
    mask[:, agent, agent] = True
    return mask


def test_agents_without_messages_are_unaffected_by_others():
    net = network()
    mask = alone(np.ones((1, 4, 4), bool), 1)
    obs, memory = rows(4).reshape(1, 4, 6, 9, 9), memories(net, 1)
    values, after = stepped(net, obs, memory, mask)
    for seed in range(3):
        other_obs, other_memory = rows(4, seed=10 + seed).reshape(1, 4, 6, 9, 9), memories(net, 1, seed=20 + seed)
        other_obs[0, 1], other_memory[0, 1] = obs[0, 1], memory[0, 1]
        changed, left = stepped(net, other_obs, other_memory, mask)
        np.testing.assert_array_equal(changed[0, 1], values[0, 1])
        np.testing.assert_array_equal(left[0, 1], after[0, 1])
        assert (np.abs(changed[0, 0] - values[0, 0]) > 1e-6).any()


def test_messages_reach_agents_two_rounds_away_and_no_further():
    """0 hears 1, 1 hears 2, 2 hears 3: in two rounds 0 learns of 2, and of 3 nothing."""
    net = network()
    mask = np.eye(4, dtype=bool)[None].copy()
    for agent in range(3):
        mask[0, agent, agent + 1] = True
    obs, memory = rows(4).reshape(1, 4, 6, 9, 9), memories(net, 1)
    values, _ = stepped(net, obs, memory, mask)
    moved = {}
    for speaker in range(4):
        other = obs.copy()
        other[0, speaker] = rows(1, seed=77)[0]
        changed, _ = stepped(net, other, memory, mask)
        moved[speaker] = {agent for agent in range(4) if (changed[0, agent] != values[0, agent]).any()}
    assert moved == {0: {0}, 1: {0, 1}, 2: {0, 1, 2}, 3: {1, 2, 3}}


def test_absent_agents_do_not_affect_others():
    """A row of the mask that is all False is of an agent that is not there; whatever it sees, others do not change."""
    net = network()
    mask = np.ones((1, 4, 4), bool)
    mask[0, 3, :] = mask[0, :, 3] = False
    obs, memory = rows(4).reshape(1, 4, 6, 9, 9), memories(net, 1)
    values, after = stepped(net, obs, memory, mask)
    assert np.isfinite(values).all()
    few, kept = stepped(net, obs[:, :3], memory[:, :3], mask[:, :3, :3])
    np.testing.assert_allclose(values[0, :3], few[0], atol=1e-6)
    np.testing.assert_allclose(after[0, :3], kept[0], atol=1e-6)


def test_agents_are_alike_wherever_they_stand():
    net = network()
    obs, memory = rows(4).reshape(1, 4, 6, 9, 9), memories(net, 1)
    mask = (np.random.default_rng(8).random((1, 4, 4)) < 0.5) | np.eye(4, dtype=bool)
    order = np.array([2, 0, 3, 1])
    values, _ = stepped(net, obs, memory, mask)
    other, _ = stepped(net, obs[:, order], memory[:, order], mask[:, order][:, :, order])
    np.testing.assert_allclose(other[0], values[0, order], atol=1e-6)


def test_environments_do_not_communicate():
    net = network()
    obs, memory = rows(8).reshape(2, 4, 6, 9, 9), memories(net, 2)
    mask = np.ones((2, 4, 4), bool)
    values, _ = stepped(net, obs, memory, mask)
    obs[1] = rows(4, seed=9)
    changed, _ = stepped(net, obs, memory, mask)
    np.testing.assert_array_equal(changed[0], values[0])
    assert (changed[1] != values[1]).any()

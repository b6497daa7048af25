"""Forward and backward passes of PPO and A2C, for acting and over a rollout [T, B, …]: row by row, or recurrent.

Rows of a rollout are numbered t · B + b. A minibatch is a subset of them; of a recurrent network, all rows of some
environments.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import nn

from steppe.algorithms.nn.actor_critic import (
    ActorCriticNetwork,
    PolicyAndValue,
    SeparateActorCritic,
    SharedTorsoActorCritic,
    build_actor_critic,
    join_output_gradients,
    split_policy_value,
)
from steppe.algorithms.nn.mlp_kernels import HeadSpec
from steppe.algorithms.nn.normalizers import ObsNormalizer, RewardNormalizer
from steppe.algorithms.nn.rnn.network import RecurrentNetwork
from steppe.algorithms.shared.actor_critic_config import ActorCriticConfig
from steppe.algorithms.shared.td_learning import RecurrentState
from steppe.core.contracts.segment import Batch
from steppe.core.contracts.specs import EnvSpec


@dataclass
class RolloutTargets:
    """A batch with the targets of the loss, flat by row number; `rows` are the valid ones."""

    batch: Batch
    rows: np.ndarray
    action: np.ndarray
    logp: np.ndarray
    advantage: np.ndarray
    returns: np.ndarray
    explained_variance: float


class ForwardBackwardPass(Protocol):
    """A network as PPO and A2C use it; results may be in memory that the next call reuses."""

    recurrent_state: RecurrentState | None

    def act(self, obs: np.ndarray, starts: np.ndarray) -> tuple[PolicyAndValue, Mapping[str, np.ndarray]]:
        """Return results for acting, and additional columns to record."""

    def bootstrap(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        """Return values after the last row [B], and of final observations [T, B] where an episode was truncated."""

    def minibatches(self, rollout: RolloutTargets, size: int, stream: np.random.Generator) -> Iterator[np.ndarray]:
        """Yield row numbers in nearly equal parts of at most about `size`, every row once."""

    def trace(self, rollout: RolloutTargets, rows: np.ndarray) -> PolicyAndValue:
        """Return results of these rows, keeping what `backward` needs."""

    def backward(self, d_outputs: np.ndarray, d_value: np.ndarray) -> None:
        """Fill the gradients, which must be zero, from d(loss)/d(results) of the last `trace`."""


class FeedForwardPass:
    """Row by row, without recurrent state."""

    def __init__(self, network: ActorCriticNetwork) -> None:
        self.network = network
        self.recurrent_state: RecurrentState | None = None

    def act(self, obs: np.ndarray, starts: np.ndarray) -> tuple[PolicyAndValue, Mapping[str, np.ndarray]]:
        return self.network.run(obs), {}

    def bootstrap(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        cut = _truncated_only(batch)
        last_obs = batch["obs"][-1]
        _, values = self.network.run(np.concatenate([last_obs, batch["final_obs"][cut]]))
        num_envs = len(last_obs)
        final_value = np.zeros(cut.shape, np.float32)
        final_value[cut] = values[num_envs:]
        return values[:num_envs], final_value

    def minibatches(self, rollout: RolloutTargets, size: int, stream: np.random.Generator) -> Iterator[np.ndarray]:
        for part in split_evenly(stream.permutation(len(rollout.rows)), size):
            yield rollout.rows[part]

    def trace(self, rollout: RolloutTargets, rows: np.ndarray) -> PolicyAndValue:
        obs = rollout.batch["obs"]
        return self.network.trace(obs.reshape(-1, *obs.shape[2:]).take(rows, axis=0))

    def backward(self, d_outputs: np.ndarray, d_value: np.ndarray) -> None:
        self.network.backward(d_outputs, d_value)


class RecurrentPass:
    """Backpropagation through time from the segment's initial state; the state is zero at the start of an episode."""

    def __init__(self, network: RecurrentActorCritic) -> None:
        self.network, self.body = network, network.body
        self._hidden_state = RecurrentState((self.body.num_state,))
        self.recurrent_state: RecurrentState | None = self._hidden_state
        self._picked = np.zeros(0, np.int64)
        self._shape: tuple[int, ...] = ()

    def act(self, obs: np.ndarray, starts: np.ndarray) -> tuple[PolicyAndValue, Mapping[str, np.ndarray]]:
        hidden = self._hidden_state.reset_where(starts)
        unrolled = self.body.unroll(obs[None], hidden)
        self._hidden_state.keep(unrolled.states(-1))
        return split_policy_value(unrolled.outputs[0], self.network.log_std), {"hidden": hidden}

    def bootstrap(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        """Compute the hidden state at a truncation from the rows before it, not from the rows after it."""
        cut = _truncated_only(batch)
        over = _episode_boundaries(batch)
        unrolled = self.body.unroll(batch["obs"], batch["hidden"][0], _reset_mask(over, len(over) + 1))
        last_value, states = unrolled.outputs[-1, :, -1].copy(), unrolled.states(np.nonzero(cut))
        final_value = np.zeros(cut.shape, np.float32)
        if len(states):
            final_value[cut] = self.body.unroll(batch["final_obs"][cut][None], states).outputs[0, :, -1]
        return last_value, final_value

    def minibatches(self, rollout: RolloutTargets, size: int, stream: np.random.Generator) -> Iterator[np.ndarray]:
        num_steps, num_envs = rollout.batch["valid"].shape
        env = rollout.rows % num_envs
        for part in split_evenly(stream.permutation(num_envs), max(1, size // num_steps)):
            rows = rollout.rows[np.isin(env, part)]
            if len(rows):
                yield rows

    def trace(self, rollout: RolloutTargets, rows: np.ndarray) -> PolicyAndValue:
        batch, num_envs = rollout.batch, rollout.batch["valid"].shape[1]
        envs, column = np.unique(rows % num_envs, return_inverse=True)
        obs = batch["obs"][:-1].take(envs, axis=1)
        clear = _reset_mask(_episode_boundaries(batch), len(obs))[:, envs]
        outputs = self.body.trace(obs, batch["hidden"][0, envs], np.ascontiguousarray(clear)).outputs
        self._picked, self._shape = rows // num_envs * len(envs) + column, outputs.shape
        return split_policy_value(outputs.reshape(-1, outputs.shape[2])[self._picked], self.network.log_std)

    def backward(self, d_outputs: np.ndarray, d_value: np.ndarray) -> None:
        gradient = np.zeros(self._shape, np.float32)
        gradient.reshape(-1, self._shape[2])[self._picked] = join_output_gradients(
            d_outputs, d_value, self.network.log_std
        )
        self.body.backward(gradient)


class RecurrentActorCritic(nn.Module):
    """Policy and value as two heads of one recurrent network."""

    def __init__(self, config: ActorCriticConfig, spec: EnvSpec, width: int) -> None:
        super().__init__()
        is_box = spec.action.kind == "box"
        num_outputs = width // 2 if is_box else width
        self.body = RecurrentNetwork(config, spec, [HeadSpec(num_outputs, gain=0.01), HeadSpec(1, gain=1.0)], "tanh")
        self.reward_normalizer = RewardNormalizer(config.gamma) if config.normalize_reward else None
        self.log_std = nn.Parameter(torch.zeros(num_outputs)) if is_box else None

    @property
    def normalizer(self) -> ObsNormalizer | None:
        return self.body.normalizer


def build_network(
    config: ActorCriticConfig, spec: EnvSpec, width: int
) -> SeparateActorCritic | SharedTorsoActorCritic | RecurrentActorCritic:
    """Build the network that the configuration describes; `width` is the number of the distribution's outputs."""
    if config.recurrent:
        return RecurrentActorCritic(config, spec, width)
    return build_actor_critic(config, spec, width)


def make_pass(network: SeparateActorCritic | SharedTorsoActorCritic | RecurrentActorCritic) -> ForwardBackwardPass:
    """Return the forward and backward pass for a network of `build_network`."""
    return RecurrentPass(network) if isinstance(network, RecurrentActorCritic) else FeedForwardPass(network)


def _truncated_only(batch: Batch) -> np.ndarray:
    """Mark the valid steps whose episode was truncated and not terminated."""
    cut: np.ndarray = batch["truncated"] & ~batch["terminated"] & batch["valid"]
    return cut


def _episode_boundaries(batch: Batch) -> np.ndarray:
    """Mark rows whose state does not carry over to the next row: episode ends of either kind, and autoreset steps."""
    over: np.ndarray = batch["terminated"] | batch["truncated"] | ~batch["valid"]
    return over


def _reset_mask(over: np.ndarray, num_rows: int) -> np.ndarray:
    """Mark, among `num_rows` rows, those before which the state is cleared."""
    clear = np.zeros((num_rows, over.shape[1]), np.bool_)
    clear[1:] = over[: num_rows - 1]
    return clear


def split_evenly(order: np.ndarray, size: int) -> Iterator[np.ndarray]:
    """Split `order` into nearly equal parts of at most `size`, without a tiny remainder."""
    count = -(-len(order) // size)
    for part in range(count):
        yield order[part * len(order) // count : (part + 1) * len(order) // count]

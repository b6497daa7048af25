"""Load a trained policy: maps raw observations to actions for `env.step`."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces

from steppe.core.config.run import RunConfig
from steppe.core.contracts.algorithm import Agent
from steppe.core.contracts.errors import UsageError
from steppe.core.contracts.specs import EnvSpec
from steppe.core.contracts.weights import Weights
from steppe.core.system import seeding
from steppe.core.system.typecheck import typechecked
from steppe.envs.factory import is_multi_agent, make_env
from steppe.envs.lookup import find_env
from steppe.envs.vector.spaces import make_action_decoder, make_observation_encoder, make_state_index_encoder
from steppe.envs.wrappers.frame_stack import FrameStack
from steppe.records.run_directory import RunDirectory
from steppe.training.evaluate import result_weights
from steppe.training.load_multi_agent import LoadedMultiAgentPolicy, require_finite, require_observation

Space = spaces.Space[Any]


class LoadedPolicy:
    """Policy of a finished run, for one environment or a batch of them.

    If the run stacked frames or its agent is recurrent, call `reset` before the first observation of each episode.
    `agent` chooses the actions, with the run's weights; `spec` describes its observations.
    """

    def __init__(self, config: RunConfig, weights: Weights, env: Any, seed: int) -> None:
        from steppe.algorithms import make_agent

        self.weights = weights
        self._seed = seed
        self._space, self._discrete = env.observation_space, isinstance(env.action_space, spaces.Discrete)
        self._actions = make_action_decoder(env.action_space, config.env)
        environment = config.environment.resolve_defaults(config.env)
        grayscale, resize = bool(environment.grayscale), environment.resize or None
        num_states = None
        if environment.observations == "index":
            self._encoder, num_states = make_state_index_encoder(self._space, config.env)
        else:
            self._encoder = make_observation_encoder(self._space, config.env, grayscale=grayscale, resize=resize)
        self._stacked = environment.frame_stack or 1
        field = FrameStack(1, self._encoder, self._stacked).field if self._stacked > 1 else self._encoder.field
        self.spec = EnvSpec(config.env, field, self._actions.spec, num_states=num_states)
        agent = config.agent.resolve_defaults(self.spec, config.actors, config.envs)[0]
        self.agent: Agent = make_agent(config.algo, agent, self.spec, seed=seeding.integer_seed(config.seed, "agent"))
        self.agent.load(weights)
        self._frames: FrameStack | None = None
        self._num_rows = 0
        self._starts = np.ones(0, np.bool_)

    @typechecked
    def act(self, obs: Any, *, explore: bool = False, action_mask: Any = None) -> Any:
        """Return the action for one raw observation, or an array of actions for a batch.

        Actions are greedy, or sampled if `explore`. `action_mask` marks the allowed actions, like
        `info["action_mask"]`, for an agent that learned with masks.
        """
        with require_observation(self.spec.id):
            size = _batch_size(self._space, obs)
            rows = [obs] if size is None else [_row(self._space, obs, index) for index in range(size)]
        if len(rows) != self._num_rows:
            self._begin(len(rows))
        encoded = np.zeros((len(rows), *self.spec.obs.shape), self.spec.obs.dtype)
        with require_observation(self.spec.id), np.errstate(all="ignore"):
            for index, raw in enumerate(rows):
                self._encode(encoded, index, raw)
        require_finite(encoded)
        chosen = self._choose(encoded, action_mask, explore=explore)
        self._starts = np.zeros(len(rows), np.bool_)
        actions = self._actions.batch(chosen)
        if size is not None:
            return actions
        return int(actions[0]) if self._discrete else actions[0]

    def _choose(self, encoded: np.ndarray, mask: Any, *, explore: bool) -> np.ndarray:
        if mask is None:
            return self.agent.act(encoded, self._starts, explore=explore)["action"]
        if self.spec.num_states is None:
            raise UsageError("this agent has a network and did not learn with masks: leave action_mask out")
        act: Any = self.agent.act
        try:
            masks = np.asarray(mask, np.bool_).reshape(len(encoded), *self.spec.action.sizes)
        except (TypeError, ValueError) as error:
            raise UsageError(f"action_mask has one flag per action, and a row per observation: {error}") from None
        chosen: np.ndarray = act(encoded, self._starts, explore=explore, masks=masks)["action"]
        return chosen

    def reset(self) -> None:
        """Mark the next observation as the first of an episode, in all environments."""
        self._starts = np.ones(self._num_rows, np.bool_)

    def _begin(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self.agent.begin(num_rows, seeding.generator(self._seed, "loaded"))
        self._frames = FrameStack(num_rows, self._encoder, self._stacked) if self._stacked > 1 else None
        self.reset()

    def _encode(self, encoded: np.ndarray, index: int, raw: Any) -> None:
        if self._frames is None:
            self._encoder.put_checked(encoded, index, raw)
        elif self._starts[index]:
            self._frames.restart(encoded, index, raw)
        else:
            self._frames.put(encoded, index, raw)


@typechecked
def load(run: str | Path, *, seed: int = 0) -> LoadedPolicy | LoadedMultiAgentPolicy:
    """Load the policy that a run learned, by the run's name or directory; `seed` is for sampled actions.

    The policy of a run with several agents takes and returns dictionaries by agent.
    """
    directory = RunDirectory.open(run)
    config, weights = directory.config(), result_weights(directory)
    with closing(make_env(config.env, find_env(config.env), config.environment)) as env:
        return (LoadedMultiAgentPolicy if is_multi_agent(env) else LoadedPolicy)(config, weights, env, seed)


def _batch_size(space: Space, obs: Any) -> int | None:
    """Return the batch size of an observation; None for a single one."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        keys: Any = list(space.spaces) if isinstance(space, spaces.Dict) else range(len(space.spaces))
        sizes = {_batch_size(space[key], obs[key]) for key in keys}
        if len(sizes) != 1:
            raise UsageError(f"the parts of this observation are not all single or all of one batch: sizes {sizes}")
        return sizes.pop()
    shape, one = np.shape(obs), space.shape or ()
    if shape == one:
        return None
    if shape[1:] == one and shape:
        return int(shape[0])
    raise UsageError(f"an observation of {space} has shape {one}, a batch {('N', *one)}; this one has {shape}")


def _row(space: Space, obs: Any, index: int) -> Any:
    if isinstance(space, spaces.Dict):
        return {key: _row(part, obs[key], index) for key, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_row(part, obs[key], index) for key, part in enumerate(space.spaces))
    return obs[index]

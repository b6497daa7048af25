"""Build segment environments: look the environment up, apply the configured wrappers, and choose between Gymnasium's
native vector version and our own loop over single environments."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple, TypeVar

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import EnvSpec as Registration
from gymnasium.envs.registration import load_env_creator

from steppe.core.config import references
from steppe.core.config.run import EnvConfig
from steppe.core.contracts.env import SegmentEnv
from steppe.core.contracts.errors import ConfigError, SteppeError, UsageError, WorldError
from steppe.core.contracts.specs import EnvSpec
from steppe.core.system.seeding import env_seeds
from steppe.envs.lookup import EnvSource, find_env, is_atari
from steppe.envs.multi_agent.aec import is_aec, to_parallel_env
from steppe.envs.multi_agent.env import ParallelSegmentEnv
from steppe.envs.multi_agent.spec import make_multi_agent_codec, make_multi_agent_spec
from steppe.envs.registry import PATHFINDING
from steppe.envs.tictactoe.rules import TurnGame
from steppe.envs.vector.loop import GymEnv, LoopSegmentEnv
from steppe.envs.vector.native import NativeSegmentEnv, require_supported_vector_env
from steppe.envs.vector.spaces import (
    ActionDecoder,
    ObservationEncoder,
    make_action_decoder,
    make_observation_encoder,
    make_state_index_encoder,
)
from steppe.envs.wrappers.flatten import FlattenMultiDiscreteWrapper
from steppe.envs.wrappers.frame_stack import FrameStack
from steppe.envs.wrappers.rewards import EpisodeStatistics

Made = TypeVar("Made")
_SEVERAL = (gym.spaces.MultiDiscrete, gym.spaces.Tuple)


def make_segment_env(
    env: str,
    config: EnvConfig,
    num_envs: int,
    seed: np.random.SeedSequence,
    *,
    render: bool = False,
    whole_games: bool = False,
) -> SegmentEnv:
    """Build a segment environment with `num_envs` copies of an environment, seeded from `seed`.

    With `render`, the first copy renders RGB images if it supports that. With `whole_games`, as used in evaluation,
    losing a life in an Atari game does not end the episode.
    """
    source, config = find_env(env), config.resolve_defaults(env)
    if whole_games and config.kwargs.get("episodic_life") and is_atari(source):
        config = config.model_copy(update={"kwargs": {**config.kwargs, "episodic_life": False}})
    if config.vector == "native":
        return _make_native_env(env, source, config, num_envs, seed, render=render)
    if config.vector == "auto" and not render:
        try:
            return _make_native_env(env, source, config, num_envs, seed, render=False)
        except UsageError:
            pass  # no vector version for this configuration: use the loop, which reports any real mistake
    return _make_loop_env(env, source, config, num_envs, seed, render=render)


class CompiledGame(NamedTuple):
    """The tables of a game, and the agent's opponent in it."""

    rules: TurnGame
    opponent: Any


def compiled_game(env: str, config: EnvConfig) -> CompiledGame | None:
    """Return the tables of the game behind an environment, for learners that train on them directly.

    None if the environment is not a turn-based game with tables.
    """
    source = find_env(env)
    if _why_not_native(source, config) is not None or not isinstance(source, Registration):
        return None
    made = _build(env, config.kwargs, lambda: gym.make_vec(source, 1, "vector_entry_point", **config.kwargs))
    made.close()
    game = getattr(made, "game", None)
    return CompiledGame(game, made.opponent) if isinstance(game, TurnGame) else None  # type: ignore[attr-defined]


def probe(env: str, config: EnvConfig) -> EnvSpec:
    """Return the spec of the environments that `make_segment_env` builds; builds one environment and closes it."""
    world = make_segment_env(env, config, 1, np.random.SeedSequence(0))
    try:
        return world.spec
    finally:
        world.close()


def _make_loop_env(
    env: str, source: EnvSource, config: EnvConfig, num_envs: int, seed: np.random.SeedSequence, *, render: bool
) -> LoopSegmentEnv | ParallelSegmentEnv:
    envs: list[Any] = []
    with ExitStack() as on_error:
        for index in range(num_envs):
            envs.append(make_env(env, source, config, render=render and index == 0))
            on_error.callback(envs[-1].close)
        if len({id(made) for made in envs}) < num_envs:
            raise WorldError(f"{env} gave the same environment twice: it must make a new one at each call")
        world: LoopSegmentEnv | ParallelSegmentEnv
        if is_multi_agent(envs[0]):
            world = _make_multi_agent_env(env, envs, config, env_seeds(seed, num_envs))
            on_error.pop_all()
            return world
        limit = config.time_limit or getattr(envs[0].spec, "max_episode_steps", None)
        spec, observations, actions = _make_spec_and_codecs(env, config, num_envs, envs[0], native=False, limit=limit)
        statistics = EpisodeStatistics(num_envs, config.reward_scale, config.reward_clip or None)
        world = LoopSegmentEnv(envs, spec, observations, actions, statistics, env_seeds(seed, num_envs))
        on_error.pop_all()
    return world


def _make_multi_agent_env(env: str, envs: list[Any], config: EnvConfig, seeds: list[int]) -> ParallelSegmentEnv:
    rules, num_states = make_multi_agent_codec(envs[0], env, config, len(envs))
    if num_states is not None:
        _require_no_image_options(config)
    spec = make_multi_agent_spec(env, envs[0], rules, num_states, limit=config.time_limit)
    statistics = EpisodeStatistics(len(envs), config.reward_scale, config.reward_clip or None, spec.num_agents)
    return ParallelSegmentEnv(envs, spec, rules, statistics, seeds, config.time_limit)


def _make_native_env(
    env: str, source: EnvSource, config: EnvConfig, num_envs: int, seed: np.random.SeedSequence, *, render: bool
) -> SegmentEnv:
    reason = _why_not_native(source, config)
    if reason is not None or not isinstance(source, Registration):
        raise ConfigError(f"environment.vector='native' is not possible for {env}: {reason}")
    if source.id == PATHFINDING:
        from steppe.envs.pathfinding.segment_env import make_pathfinding_env  # imports numba: only when needed

        return make_pathfinding_env(env, config, num_envs, seed)
    kwargs = dict(config.kwargs)
    if config.time_limit is not None:
        kwargs["max_episode_steps"] = config.time_limit
    if render:
        kwargs.setdefault("render_mode", "rgb_array")
    vector = _build(env, kwargs, lambda: gym.make_vec(source, num_envs, "vector_entry_point", **kwargs))
    with ExitStack() as on_error:
        on_error.callback(vector.close)
        require_supported_vector_env(vector, env, numbered=config.observations == "index")
        limit = config.time_limit or source.max_episode_steps
        spec, observations, actions = _make_spec_and_codecs(env, config, num_envs, vector, native=True, limit=limit)
        statistics = EpisodeStatistics(num_envs, config.reward_scale, config.reward_clip or None)
        world = NativeSegmentEnv(vector, spec, observations, actions, statistics, env_seeds(seed, 1)[0])
        on_error.pop_all()
    return world


def _why_not_native(source: EnvSource, config: EnvConfig) -> str | None:
    if not isinstance(source, Registration):
        return "it comes from a function"
    if source.vector_entry_point is None:
        return "Gymnasium has no vector version of it"
    if is_atari(source):
        return "its vector version can neither be saved nor go on with a game after a lost life"
    if config.wrappers or config.grayscale or config.resize:
        return "environment.wrappers, grayscale and resize work on single environments"
    if source.additional_wrappers:
        return "its registration adds wrappers"
    return None


def _make_spec_and_codecs(
    env: str, config: EnvConfig, num_envs: int, made: Any, *, native: bool, limit: int | None
) -> tuple[EnvSpec, ObservationEncoder | FrameStack, ActionDecoder]:
    """Return the spec, observation encoder and action decoder of `made`: one environment or, if `native`, a vector."""
    names = ("single_observation_space", "single_action_space") if native else ("observation_space", "action_space")
    observation_space, action_space = (getattr(made, name) for name in names)
    stacked, num_states = config.frame_stack or 1, None
    if config.observations == "index":
        rule, num_states = make_state_index_encoder(observation_space, env)
        _require_no_image_options(config)
    else:
        rule = make_observation_encoder(
            observation_space, env, grayscale=bool(config.grayscale), resize=config.resize or None
        )
    observations = FrameStack(num_envs, rule, stacked) if stacked > 1 else rule
    actions = make_action_decoder(action_space, env)
    in_turns = getattr(made.unwrapped, "num_agents", 1) == 2
    spec = EnvSpec(env, observations.field, actions.spec, native, limit, num_states, in_turns)
    return spec, observations, actions


def _require_no_image_options(config: EnvConfig) -> None:
    for name, plain in (("frame_stack", 1), ("grayscale", False), ("resize", 0)):
        if getattr(config, name) not in (None, plain):
            raise ConfigError(f"environment.{name} is for observations that are no numbers: leave it out")


def is_multi_agent(made: Any) -> bool:
    """Return whether `made` is a PettingZoo environment, or has the same interface."""
    if isinstance(made, gym.Env):
        return False
    return hasattr(made, "possible_agents") or hasattr(type(made), "max_num_agents") or is_aec(made)


def make_env(env: str, source: EnvSource, config: EnvConfig, *, render: bool = False) -> Any:
    """Build one environment with the configured wrappers, without Gymnasium's checks on every step.

    A PettingZoo environment is returned as a parallel environment.
    """
    config = config.resolve_defaults(env)
    if isinstance(source, Registration) and is_atari(source):
        made = _build(env, config.kwargs, lambda: _from_emulator(source, config, render=render))
    elif isinstance(source, Registration):
        made = _build(env, config.kwargs, lambda: _from_registration(source, config, render=render))
    else:
        made = _build(env, config.kwargs, lambda: _from_function(source, config, render=render))
        _require_environment(made, env)
        if config.time_limit is not None and not is_multi_agent(made):
            made = gym.wrappers.TimeLimit(made, config.time_limit)
    for text in config.wrappers:
        made = _build(f"{env} wrapped by {text}", {}, partial(references.resolve_reference(text), made))
        _require_environment(made, f"the wrapper {text}")
        _require_no_statistics(made, text)
    if is_multi_agent(made):
        return _as_parallel_env(made, env, config)
    for name in ("observation_space", "action_space"):
        if not isinstance(getattr(made, name, None), gym.Space):
            raise WorldError(f"{env} has no {name}: set it to a gymnasium space in its constructor")
    return _as_tabular_env(made, config) if config.observations == "index" else made


def _require_environment(made: Any, whose: str) -> None:
    if not (isinstance(made, gym.Env) or is_multi_agent(made)):
        raise WorldError(
            f"{whose} returned a {type(made).__name__}, neither a gymnasium.Env nor a PettingZoo environment"
        )


def _as_parallel_env(made: Any, env: str, config: EnvConfig) -> Any:
    """Return a PettingZoo environment as a parallel one; raise WorldError unless its agents are known and distinct."""
    agents = list(getattr(made, "possible_agents", ()))
    if not agents:
        raise WorldError(f"{env} has no possible_agents: every agent that may ever come needs a row of its own")
    if len({str(agent) for agent in agents}) < len(agents):
        raise WorldError(f"{env} has two agents of the same name among its possible_agents")
    return to_parallel_env(made, numbered=config.observations == "index") if is_aec(made) else made


def _as_tabular_env(made: GymEnv, config: EnvConfig) -> GymEnv:
    """Adapt an environment to tabular agents: flatten composite spaces to one index, and apply its own step limit."""
    if any(isinstance(space, _SEVERAL) for space in (made.observation_space, made.action_space)):
        made = FlattenMultiDiscreteWrapper(made)
    limit = getattr(made.unwrapped, "max_episode_steps", None)
    if isinstance(limit, int) and config.time_limit is None and getattr(made.spec, "max_episode_steps", None) is None:
        made = gym.wrappers.TimeLimit(made, limit)
    return made


def _require_no_statistics(made: GymEnv, text: str) -> None:
    """Reject normalizing wrappers: their statistics differ between actors and are not saved with the weights."""
    for kind, key in ((gym.wrappers.NormalizeObservation, "obs"), (gym.wrappers.NormalizeReward, "reward")):
        if isinstance(made, kind):
            raise ConfigError(
                f"environment.wrappers: {text} keeps its statistics in each environment, apart from the weights: "
                f"use normalize_{key}=true, which keeps them with the weights"
            )


def _from_registration(source: Registration, config: EnvConfig, *, render: bool) -> Any:
    entry: Any = source.entry_point
    creator = load_env_creator(entry) if isinstance(entry, str) else entry
    if hasattr(creator, "max_num_agents"):  # true of PettingZoo's environments, not of Gymnasium's
        return creator(**_render_kwargs(creator, {**source.kwargs, **config.kwargs}, render=render))
    # The segment environment always resets before it steps, so checking the order on every step is wasted time.
    plain = copy.copy(source)
    plain.order_enforce = False
    kwargs = _render_kwargs(source.entry_point, config.kwargs, render=render)
    return gym.make(plain, max_episode_steps=config.time_limit, disable_env_checker=True, **kwargs)


def _from_emulator(source: Registration, config: EnvConfig, *, render: bool) -> GymEnv:
    from steppe.envs.wrappers.atari import make_atari_env  # imports ale-py, an optional dependency

    game: GymEnv = make_atari_env(source, config, render=render)
    return game if config.time_limit is None else gym.wrappers.TimeLimit(game, config.time_limit)


def _from_function(source: Callable[..., Any], config: EnvConfig, *, render: bool) -> Any:
    return source(**_render_kwargs(source, config.kwargs, render=render))


def _render_kwargs(creator: Any, kwargs: dict[str, Any], *, render: bool) -> dict[str, Any]:
    """Return the keyword arguments, adding `render_mode` if the environment is known to accept it."""
    if not render or "render_mode" in kwargs:
        return dict(kwargs)
    made_by = load_env_creator(creator) if isinstance(creator, str) else creator
    metadata = getattr(made_by, "metadata", None)
    if isinstance(metadata, dict):
        able = "rgb_array" in metadata.get("render_modes", ())
    else:
        parameters = inspect.signature(made_by).parameters
        able = "render_mode" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return {**kwargs, "render_mode": "rgb_array"} if able else dict(kwargs)


def _build(whose: str, kwargs: dict[str, Any], build: Callable[[], Made]) -> Made:
    """Return the result of `build`; turn any exception other than SteppeError into a WorldError with one sentence."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*WARN: ")  # Gymnasium's advice to authors of environments
            return build()
    except SteppeError:
        raise
    except (gym.error.DependencyNotInstalled, ImportError) as error:
        raise WorldError(f"{whose} needs a package that is not installed: {error}") from error
    except Exception as error:
        given = f" with {kwargs}" if kwargs else ""
        raise WorldError(f"cannot make {whose}{given}: {type(error).__name__}: {error}") from error

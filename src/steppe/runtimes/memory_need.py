"""Estimate a run's memory before anything is allocated, and refuse the run if the machine has less.

The command line, the Python API and the service use it. The service does not open environments: it estimates with the
smallest environment that a request may mean (`smallest_env_spec`), and the run's own process checks again with the real
one.
"""

from __future__ import annotations

import math
from itertools import pairwise

from steppe.core.config.agent import AgentConfig
from steppe.core.config.run import RunConfig
from steppe.core.contracts.errors import ConfigError
from steppe.core.contracts.specs import ActionSpec, EnvSpec, FieldSpec, SegmentSpec
from steppe.replay import factory
from steppe.runtimes.plan import segment_spec

_BYTES_PER_WEIGHT = 4
_LEARNER_COPIES = 9  # parameters, gradient, two moments, a target network with its gradient, three publications
_ACTOR_COPIES = 2  # parameters and gradient


def require_memory(config: RunConfig, spec: EnvSpec, *, replay: bool = True) -> None:
    """Raise ConfigError, with the estimate and what the machine has, unless the run fits into its memory.

    `replay` is False if the caller already has a replay buffer.
    """
    if config.ray.address is not None:
        return  # the run uses other machines' memory
    agent, envs = config.agent.resolve_defaults(spec, config.actors, config.envs)
    if replay and agent.memory != "rollout":
        factory.require_replay_memory(agent, segment_spec(agent, spec, envs), config.actors)
    needs = estimate_memory(config, spec, replay=replay)
    total, available = sum(needs.values()), factory.available_bytes()
    if total > factory.MAX_MEMORY_SHARE * available:
        most = max(needs, key=lambda name: needs[name])
        raise ConfigError(
            f"the run needs about {_gib(total)} of memory, of which {most} {_gib(needs[most])}, but {_gib(available)} are "
            "available here: lower what needs most"
        )


def estimate_memory(config: RunConfig, spec: EnvSpec, *, replay: bool = True) -> dict[str, int]:
    """Return the bytes that the run's arrays need, by what needs them."""
    agent, envs = config.agent.resolve_defaults(spec, config.actors, config.envs)
    segment = segment_spec(agent, spec, envs)
    return {
        "networks (hidden)": _network_bytes(agent, spec, config.actors),
        "replay (buffer_size)": _replay_bytes(agent, segment, config.actors) if replay else 0,
        "segments (actors × envs × segment_steps)": _segment_bytes(
            config, segment, config.flow.max_actors or config.actors
        ),
        "a batch": _batch_bytes(agent, segment),
    }


def smallest_env_spec(config: RunConfig) -> EnvSpec:
    """Return the smallest spec that the configuration allows: the image size if images are resized, else one number."""
    environment = config.environment.resolve_defaults(config.env)
    obs = FieldSpec("obs", (1,), "float32")
    if environment.resize:
        channels = (environment.frame_stack or 1) * (1 if environment.grayscale else 3)
        obs = FieldSpec(
            "obs", (channels, environment.resize, environment.resize), "uint8", frames=environment.frame_stack or 1
        )
    action = ActionSpec("box", (1,), (-1.0,), (1.0,)) if "discrete" not in config.agent.actions else None
    states = 1 if config.agent.observations == "index" else None
    return EnvSpec(config.env, obs, action or ActionSpec("discrete", (2,)), num_states=states)


def _network_bytes(agent: AgentConfig, spec: EnvSpec, num_actors: int) -> int:
    if agent.in_table:
        return 0
    layers = [_input_width(spec), *(agent.hidden or ())]
    count = sum(inputs * outputs + outputs for inputs, outputs in pairwise(layers))
    cell = getattr(agent, "cell_size", None) or 0
    count += 4 * cell * (layers[-1] + cell)
    channels = getattr(agent, "channels", 0)
    count += 200 * channels * channels  # DHC's convolutions, recurrent cell and communication
    towers = 2 if agent.memory == "rollout" and not spec.is_image else 1
    return _BYTES_PER_WEIGHT * towers * count * (_LEARNER_COPIES + _ACTOR_COPIES * (num_actors + 1))


def _input_width(spec: EnvSpec) -> int:
    """Return the input width of the first layer; convolutions reduce each side of an image to a twelfth."""
    if not spec.is_image:
        return math.prod(spec.obs.shape)
    return 64 * math.prod(max(1, side // 12) for side in spec.obs.shape[1:])


def _replay_bytes(agent: AgentConfig, segment: SegmentSpec, num_actors: int) -> int:
    capacity = getattr(agent, "buffer_size", None)
    if agent.memory == "rollout" or capacity is None or getattr(agent, "buffer_storage", "memory") == "disk":
        return 0
    return factory.estimate_replay_bytes(agent, segment, num_actors)[2]


def _segment_bytes(config: RunConfig, segment: SegmentSpec, num_writers: int) -> int:
    """Return the bytes of segments in flight, and of one more per writer, into which it collects or copies."""
    slots = 0 if config.by_gradients else config.flow.slots_per_actor or 1
    return segment.nbytes * (slots * num_writers + config.actors)


def _batch_bytes(agent: AgentConfig, segment: SegmentSpec) -> int:
    """Return the bytes of one update's rows and their activations."""
    rows = getattr(agent, "batch_size", 0) * (getattr(agent, "sequence_length", 1) + getattr(agent, "burn_in", 0))
    widths = sum(agent.hidden or ()) + (getattr(agent, "cell_size", None) or 0)
    return int(rows) * (2 * segment.obs.nbytes + 2 * _BYTES_PER_WEIGHT * widths)


def _gib(size: int) -> str:
    return f"{size / 2**30:,.1f} GiB"

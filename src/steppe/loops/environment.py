"""DistributedEnvironment: a world described once, and experience from several workers at a time."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

from steppe.core import factory
from steppe.core.config import EnvConfig
from steppe.core.specs import EnvSpec
from steppe.envs import probe


class DistributedEnvironment:
    """An environment by id or factory, with `num_workers` actors in it."""

    def __init__(
        self,
        env_factory: Callable[..., Any] | str,
        num_workers: int = 4,
        use_gpu: bool = False,
        device: str | None = None,
        *,
        config: EnvConfig | None = None,
    ) -> None:
        self.env = factory.reference(env_factory)
        self.num_workers = num_workers
        self.config = config or EnvConfig()

    @cached_property
    def spec(self) -> EnvSpec:
        """What the world looks like to an agent; makes one environment and closes it."""
        return probe(self.env, self.config)

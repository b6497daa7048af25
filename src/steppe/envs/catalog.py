"""List the registered environments with their main properties, without building any of them."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import gymnasium

from steppe.envs.lookup import known_environments

# Gymnasium registers these whether or not they can be built: prefix of the entry point → the module they need
REQUIRED_PACKAGES = {
    "steppe.envs.toy.teamwork": "pettingzoo",
    "gymnasium.envs.box2d": "Box2D",
    "gymnasium.envs.mujoco": "mujoco",
    "gymnasium.envs.phys2d": "jax",
    "gymnasium.envs.tabular": "jax",
}


def list_environments(*, every: bool = False) -> Iterator[dict[str, Any]]:
    """Yield the id and properties of every registered environment: all versions with `every`, else only the newest."""
    specs = [gymnasium.registry[name] for name in known_environments()]
    newest: dict[tuple[str | None, str], int] = {}
    for spec in specs:
        kind = (spec.namespace, spec.name)
        newest[kind] = max(newest.get(kind, 0), spec.version or 0)
    for spec in specs:
        if not every and (spec.version or 0) < newest[spec.namespace, spec.name]:
            continue
        module = spec.entry_point if isinstance(spec.entry_point, str) else ""
        needs = next((package for prefix, package in REQUIRED_PACKAGES.items() if module.startswith(prefix)), None)
        yield {
            "id": spec.id,
            "max_episode_steps": spec.max_episode_steps,
            "solved_at": spec.reward_threshold,
            "native_vector": spec.vector_entry_point is not None,
            "needs": needs if needs and importlib.util.find_spec(needs) is None else None,
        }

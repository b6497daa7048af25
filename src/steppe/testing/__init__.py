"""Conformance suites for your own implementations: inherit one in a test file, say how to make yours, run pytest.

agent.py AgentConformance · board.py BoardConformance · channel.py ChannelConformance · env.py WorldConformance ·
team.py TeamConformance · memory.py MemoryConformance · runtime.py RuntimeConformance ·
weights.py WeightStoreConformance · mock_env.py MockEnvironment ·
components.py one suite for each of the five components of a MainLoop
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from steppe.testing.mock_env import MockEnvironment

__all__ = ["MockEnvironment"]


def __getattr__(name: str) -> Any:
    if name != "MockEnvironment":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from steppe.testing import mock_env

    return mock_env.MockEnvironment

"""Which rows of a segment the learner masks after the run's last episode, compared with a count by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from steppe.core.contracts.segment import Segment
from steppe.core.contracts.specs import FieldSpec, SegmentSpec
from steppe.roles.quota import invalidate_after_episodes

pytestmark = pytest.mark.unit

OBS, ACTION = FieldSpec("obs", (1,), "float32"), FieldSpec("action", (), "int64")


def made(num_envs: int, num_agents: int, ends: list[tuple[int, int]]) -> Segment:
    """Return five steps in which the episodes of environments end at (step, environment)."""
    spec = replace(SegmentSpec(5, num_envs * num_agents, OBS, ACTION), num_agents=num_agents)
    segment = Segment.blank(spec)
    segment["valid"][...] = True
    for t, env in ends:
        segment["terminated"][t, env * num_agents : (env + 1) * num_agents] = True
    return segment


@pytest.mark.parametrize("num_agents", [1, 2])
@pytest.mark.parametrize(
    ("episodes", "rows", "left"),
    [
        (0, [0, 0, 0], 0),
        (1, [0, 2, 0], 1),
        (2, [3, 2, 0], 2),
        (3, [3, 3, 0], 3),
        (4, [3, 3, 5], 4),
        (5, [5, 5, 5], 4),
    ],
)
def test_environments_keep_their_rows_up_to_the_last_episode_that_counts(
    num_agents: int, episodes: int, rows: list[int], left: int
) -> None:
    segment = made(3, num_agents, [(1, 1), (2, 0), (2, 1), (4, 2)])
    invalidate_after_episodes(segment, episodes)
    expected = np.array([[t < kept for kept in rows for _ in range(num_agents)] for t in range(5)])
    np.testing.assert_array_equal(segment["valid"], expected)
    assert np.count_nonzero(segment.ended) == left


def test_invalid_rows_stay_invalid() -> None:
    segment = made(2, 1, [(1, 0), (3, 0)])
    segment["valid"][2, 0] = False
    invalidate_after_episodes(segment, 2)
    assert segment["valid"][:, 0].tolist() == [True, True, False, True, False]
    assert not segment["valid"][:, 1].any()

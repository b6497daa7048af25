"""Recall is solved by agents that remember, and by no other: the question looks the same whatever the cue was.

Four cues: without a memory the best mean return is .25; 200 episodes of an evaluation scatter by .03 around it.
"""

import pytest

import steppe
from tests.support.cases import rest_slow

pytestmark = pytest.mark.integration
JUDGED = {"runtime": "inline", "evaluation.episodes": 200, "evaluation.every_steps": 2_000, "evaluation.max_share": 0.3}


@pytest.mark.parametrize(("cell", "vector"), rest_slow(("lstm", "native"), ("gru", "loop")))
def test_r2d2_remembers(cell, vector):
    """Seed 0, at most 40,000 steps, .95."""
    settings = {**JUDGED, "cell": cell, "environment.vector": vector}
    result = steppe.train("steppe/Recall-v0", algo="r2d2", steps=40_000, target_return=0.95, **settings)
    assert result.state == "SUCCEEDED", result.summary
    assert result.eval_return_mean >= 0.95


@pytest.mark.parametrize(("cell", "vector"), rest_slow(("lstm", "native"), ("gru", "loop")))
def test_ppo_remembers(cell, vector):
    """Seed 0, at most 100,000 steps, .95."""
    settings = {**JUDGED, "recurrent": True, "cell": cell, "environment.vector": vector}
    result = steppe.train("steppe/Recall-v0", algo="ppo", steps=100_000, target_return=0.95, **settings)
    assert result.state == "SUCCEEDED", result.summary
    assert result.eval_return_mean >= 0.95


@pytest.mark.parametrize(("algo", "steps"), [("dqn", 20_000), ("ppo", 100_000)])
def test_without_a_memory_there_is_only_chance(algo, steps):
    result = steppe.train("steppe/Recall-v0", algo=algo, steps=steps, **JUDGED | {"evaluation.every_steps": steps})
    assert 0.1 < result.eval_return_mean < 0.4

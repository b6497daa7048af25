"""The policies of examples/policies: small, complete, without traces of the training machine, and as good as
documented.
"""

from pathlib import Path

import pytest

import steppe

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]
POLICIES = sorted((Path(__file__).parents[2] / "examples" / "policies").iterdir())


@pytest.mark.parametrize("policy", POLICIES, ids=lambda path: path.name)
def test_a_policy_is_small_and_has_no_traces_of_its_machine(policy):
    assert (policy / "weights.safetensors").stat().st_size < 1_000_000
    told = (policy / "run.json").read_text()
    assert not [word for word in ("/tmp", "/home", "/root", "/work") if word in told]


@pytest.mark.slow
def test_sixteen_agents_arrive_on_most_maps():
    """89 % of 500 maps were solved; the chance of fewer than ten of sixteen is below one in a thousand."""
    (policy,) = [path for path in POLICIES if path.name == "pathfinding-20x20"]
    before = sorted(policy.iterdir())
    assert steppe.evaluate(str(policy), episodes=16, seed=10**6)["terminated_share"] >= 10 / 16
    assert sorted(policy.iterdir()) == before, "nothing is written there"

"""Optional inputs that a policy and its environment exchange if both support them."""

from __future__ import annotations

import numpy as np
import pytest

from steppe.roles.bound_policy import BoundPolicy
from tests.support.role_fakes import ScriptedPolicy, ScriptedWorld

pytestmark = pytest.mark.unit

OBS = np.zeros((2, 2), np.float32)
STAGES = np.array([[1, 8], [2, 8]])


class RecordingPolicy(ScriptedPolicy):
    def __init__(self, **attributes):
        super().__init__()
        self.inputs = {}
        self.__dict__.update(attributes)

    def act(self, obs, starts, *, explore=True, **inputs):
        self.inputs = {"explore": explore, **inputs}
        return {"action": np.zeros(len(obs), np.int64)}


class MaskedWorld(ScriptedWorld):
    def __init__(self):
        super().__init__()
        self.masks, self.comm_mask = None, np.array([[True], [False]])


class StagedWorld(ScriptedWorld):
    def __init__(self):
        super().__init__()
        self.assigned = []

    def assign(self, stages):
        self.assigned.append(stages)


def test_a_policy_without_optional_inputs_gets_none():
    policy = RecordingPolicy()
    BoundPolicy(policy, ScriptedWorld()).act(OBS, explore=False)
    assert policy.inputs == {"explore": False}


def test_action_masks_are_passed_whenever_the_environment_has_them():
    policy, env = RecordingPolicy(), MaskedWorld()
    bound = BoundPolicy(policy, env)
    bound.act(OBS)
    assert policy.inputs == {"explore": True}
    env.masks = np.ones((2, 3), bool)
    bound.act(OBS)
    assert policy.inputs["masks"] is env.masks
    assert bound.action_masks is env.masks


@pytest.mark.parametrize("communicates", [True, False])
def test_only_a_communicating_policy_gets_the_communication_mask(communicates):
    policy, env = RecordingPolicy(communicates=communicates), MaskedWorld()
    BoundPolicy(policy, env).act(OBS)
    assert ("comm_mask" in policy.inputs) == communicates
    assert not communicates or policy.inputs["comm_mask"] is env.comm_mask


def test_without_a_mask_of_the_environment_all_agents_communicate():
    bound = BoundPolicy(RecordingPolicy(), ScriptedWorld())
    np.testing.assert_array_equal(bound.comm_mask, np.ones((2, 1), bool))


def test_curriculum_stages_go_from_the_policy_to_the_environment():
    env, asked = StagedWorld(), []
    stages = {"now": STAGES}

    def curriculum_stages(num_envs):
        asked.append(num_envs)
        return stages["now"]

    bound = BoundPolicy(RecordingPolicy(curriculum_stages=curriculum_stages), env)
    bound.assign_curriculum_stages()
    stages["now"] = None
    bound.assign_curriculum_stages()
    assert asked == [2, 2]
    assert len(env.assigned) == 1
    assert env.assigned[0] is STAGES
    BoundPolicy(RecordingPolicy(), env).assign_curriculum_stages()
    BoundPolicy(RecordingPolicy(curriculum_stages=curriculum_stages), ScriptedWorld()).assign_curriculum_stages()
    assert len(env.assigned) == 1

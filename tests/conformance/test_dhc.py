"""DHC passes the suite that is shipped to users, alone in its world and learning from real sequences."""

import numpy as np
import pytest
import torch

from steppe.algorithms import make_agent
from steppe.algorithms.dhc.config import DHCConfig
from steppe.core.contracts.specs import ActionSpec, EnvSpec, FieldSpec
from steppe.replay import make_memory
from steppe.testing.agent import AgentConformance, invented_segment

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class TestDHC(AgentConformance):
    spec = EnvSpec("planes", FieldSpec("obs", (3, 7, 5), "uint8"), ActionSpec("discrete", (3,)))
    config = DHCConfig(channels=8, batch_size=5, sequence_length=2, burn_in=1, learning_starts=0, target_every=2)

    def make_agent(self):
        return make_agent("dhc", self.config, self.spec, seed=3)

    def batch(self, agent, segment, stream):
        """What its memory gives after that segment; segments in which no episode ends come before ones that have some."""
        memory = make_memory(agent.config, segment.spec, stream=np.random.default_rng(0), total_steps=None)
        memory.add([segment])
        while not memory.ready():
            memory.add([invented_segment(agent, agent.config, self.spec, stream)])
        return memory.sample()

    def test_columns_are_the_declared_ones(self):
        """All but those that only the world knows."""
        agent = self.begun()
        chosen = self.act(agent)
        declared = {column.name: column for column in (self.spec.action.field, *agent.config.columns(self.spec))}
        assert chosen.keys() == declared.keys() - {"final_comm_mask"}
        for name, column in chosen.items():
            assert (column.shape[1:], column.dtype.name) == (declared[name].shape, declared[name].dtype), name


class TestDHCOfTheFirstAgent(TestDHC):
    config = TestDHC.config.model_copy(update={"double": False, "learn_from": "first", "value_rescaling": True})

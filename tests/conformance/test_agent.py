"""Every agent of the house passes the suite that is shipped to users."""

import pytest
import torch

from steppe.algorithms import make_agent
from steppe.algorithms.a2c.config import A2CConfig
from steppe.algorithms.dqn.config import DQNConfig
from steppe.algorithms.ppo.config import PPOConfig
from steppe.algorithms.r2d2.config import R2D2Config
from steppe.core.contracts.specs import ActionSpec, EnvSpec, FieldSpec
from steppe.testing.agent import AgentConformance

pytestmark = pytest.mark.unit

VECTOR = FieldSpec("obs", (5,), "float32")
IMAGE = FieldSpec("obs", (2, 36, 40), "uint8")
TINY_IMAGE = FieldSpec("obs", (3, 10, 10), "uint8")
DISCRETE = ActionSpec("discrete", (3,))
SEVERAL = ActionSpec("multi_discrete", (2, 4, 3))
BOX = ActionSpec("box", (2,), (-2.0, -1.0), (2.0, 3.0))
GRID_BOX = ActionSpec("box", (2, 2), (-float("inf"),) * 4, (float("inf"),) * 4)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def small_network(spec: EnvSpec) -> torch.nn.Module:
    frozen = torch.nn.Linear(7, 6)
    frozen.weight.requires_grad_(False)
    return torch.nn.Sequential(torch.nn.Linear(spec.obs.shape[0], 7), torch.nn.ELU(), frozen)


class TestPPODiscrete(AgentConformance):
    spec = EnvSpec("discrete", VECTOR, DISCRETE)
    config = PPOConfig(minibatch_size=8, hidden=(8, 8), entropy_coef=0.01)

    def make_agent(self):
        return make_agent("ppo", self.config, self.spec, seed=3)


class TestPPOMultiDiscrete(TestPPODiscrete):
    spec = EnvSpec("several", VECTOR, SEVERAL)


class TestPPOBox(TestPPODiscrete):
    spec = EnvSpec("box", VECTOR, BOX)


class TestPPOUnboundedGridBox(TestPPODiscrete):
    spec = EnvSpec("grid", VECTOR, GRID_BOX)


class TestPPONormalizing(TestPPODiscrete):
    config = PPOConfig(minibatch_size=8, hidden=(8,), normalize_obs=True, normalize_reward=True, anneal=True)


class TestPPOImage(TestPPODiscrete):
    spec = EnvSpec("image", IMAGE, DISCRETE)
    config = PPOConfig(minibatch_size=16, epochs=1, hidden=(32,))


class TestPPOTinyImage(TestPPODiscrete):
    spec = EnvSpec("tiny", TINY_IMAGE, DISCRETE)


class TestPPOImageAsVector(TestPPODiscrete):
    spec = EnvSpec("tiny", TINY_IMAGE, DISCRETE)
    config = PPOConfig(minibatch_size=8, hidden=(8,), network="mlp")


class TestPPOOneNumber(TestPPODiscrete):
    spec = EnvSpec("narrow", FieldSpec("obs", (1,), "float32"), ActionSpec("discrete", (2,)))


class TestPPOFlattenedDictionary(TestPPODiscrete):
    spec = EnvSpec("dict", FieldSpec("obs", (23,), "float32"), DISCRETE)
    config = PPOConfig()


class TestPPOOwnNetwork(TestPPODiscrete):
    config = PPOConfig(minibatch_size=8, network=f"{__name__}:small_network")


class TestDQN(AgentConformance):
    spec = EnvSpec("discrete", VECTOR, DISCRETE)
    config = DQNConfig(hidden=(16,), target_every=100)

    def make_agent(self):
        return make_agent("dqn", self.config, self.spec, seed=3)


class TestPlainDQN(TestDQN):
    config = DQNConfig(hidden=(16,), double=False, target_every=100)


class TestDuelingDQN(TestDQN):
    config = DQNConfig(hidden=(16,), dueling=True)


class TestNormalizingDQN(TestDQN):
    config = DQNConfig(hidden=(16,), normalize_obs=True, normalize_reward=True)


class TestImageDQN(TestDQN):
    spec = EnvSpec("image", IMAGE, DISCRETE)
    config = DQNConfig(dueling=True, hidden=(32,))


class TestOwnNetworkDQN(TestDQN):
    config = DQNConfig(network=f"{__name__}:small_network")


class TestPPORecurrent(TestPPODiscrete):
    config = PPOConfig(recurrent=True, segment_steps=6, minibatch_size=12, hidden=(8,), cell_size=5, entropy_coef=0.01)


class TestPPORecurrentGRU(TestPPODiscrete):
    spec = EnvSpec("box", VECTOR, BOX)
    config = PPOConfig(
        recurrent=True, cell="gru", segment_steps=6, minibatch_size=12, hidden=(8,), cell_size=5, normalize_reward=True
    )


class TestPPORecurrentImage(TestPPODiscrete):
    spec = EnvSpec("image", TINY_IMAGE, DISCRETE)
    config = PPOConfig(recurrent=True, segment_steps=6, minibatch_size=12, epochs=1, hidden=(8,), cell_size=5)


class TestPPORecurrentOwnNetwork(TestPPODiscrete):
    config = PPOConfig(
        recurrent=True, segment_steps=6, minibatch_size=12, cell_size=5, network=f"{__name__}:small_network"
    )


class TestR2D2(AgentConformance):
    spec = EnvSpec("discrete", VECTOR, DISCRETE)
    config = R2D2Config(hidden=(8,), cell_size=5, sequence_length=4, burn_in=2, normalize_obs=True)

    def make_agent(self):
        return make_agent("r2d2", self.config, self.spec, seed=3)


class TestR2D2GRU(TestR2D2):
    config = R2D2Config(
        cell="gru", hidden=(8,), cell_size=5, sequence_length=4, burn_in=0, dueling=False, value_rescaling=False
    )


class TestR2D2Image(TestR2D2):
    spec = EnvSpec("image", TINY_IMAGE, DISCRETE)
    config = R2D2Config(hidden=(8,), cell_size=5, sequence_length=4, burn_in=2)


class TestR2D2NoLayers(TestR2D2):
    config = R2D2Config(hidden=(), cell_size=5, sequence_length=4, burn_in=2, double=False)


class TestA2CDiscrete(AgentConformance):
    spec = EnvSpec("discrete", VECTOR, DISCRETE)
    config = A2CConfig(hidden=(8, 8), entropy_coef=0.01)

    def make_agent(self):
        return make_agent("a2c", self.config, self.spec, seed=3)


class TestA2CBoxNormalizing(TestA2CDiscrete):
    spec = EnvSpec("box", VECTOR, BOX)
    config = A2CConfig(hidden=(8,), normalize_obs=True, normalize_reward=True, anneal=True)


class TestA2CImage(TestA2CDiscrete):
    spec = EnvSpec("image", IMAGE, DISCRETE)
    config = A2CConfig(hidden=(32,))


class TestA2COwnNetwork(TestA2CDiscrete):
    config = A2CConfig(network=f"{__name__}:small_network")


class TestA2CRecurrent(TestA2CDiscrete):
    config = A2CConfig(recurrent=True, hidden=(8,), cell_size=5)

"""Torsos, the device word, and making agents by name."""

import subprocess
import sys

import numpy as np
import pytest
import torch

import steppe.algorithms
from steppe.algorithms import make_agent, resolve_device
from steppe.algorithms.dqn.config import DQNConfig
from steppe.algorithms.nn.torsos import MLP, build_seeded, build_torso
from steppe.algorithms.ppo.config import PPOConfig
from steppe.core.contracts.errors import ConfigError, FactoryError
from steppe.core.contracts.specs import ActionSpec, EnvSpec, FieldSpec

pytestmark = pytest.mark.unit

DISCRETE = ActionSpec("discrete", (3,))
VECTOR = EnvSpec("vector", FieldSpec("obs", (6,), "float32"), DISCRETE)


def image(*shape):
    return EnvSpec("image", FieldSpec("obs", shape, "uint8"), DISCRETE)


def ten_lines(spec: EnvSpec) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(spec.obs.shape[0], 9), torch.nn.SiLU())


def no_features(spec: EnvSpec) -> torch.nn.Module:
    return torch.nn.Flatten(0)


@pytest.mark.parametrize(
    ("network", "spec", "features"),
    [
        ("auto", VECTOR, 24),
        ("auto", image(4, 84, 84), 24),
        ("cnn", image(1, 36, 50), 24),
        ("cnn", image(4, 10, 10), 24),
        ("mlp", image(3, 8, 8), 24),
        (f"{__name__}:ten_lines", VECTOR, 9),
    ],
)
def test_features_have_the_promised_width(network, spec, features):
    torso, width = build_torso(network, spec, (24,), "relu")
    assert width == features
    blank = torch.zeros((5, *spec.obs.shape), dtype=getattr(torch, spec.obs.dtype))
    assert torso(blank).shape == (5, features)


def test_the_convolutions_for_84_pixels_are_the_published_ones():
    torso, _ = build_torso("cnn", image(4, 84, 84), (512,), "relu")
    sizes = [tuple(p.shape) for p in torso.parameters() if p.ndim > 1]
    assert sizes == [(32, 4, 8, 8), (64, 32, 4, 4), (64, 64, 3, 3), (512, 3136)]


def test_pixels_are_scaled_once():
    torso, _ = build_torso("mlp", image(1, 2, 2), (1,), "relu")
    layer = next(part for part in torso if isinstance(part, torch.nn.Linear))
    with torch.no_grad():
        layer.weight.fill_(1.0)
        layer.bias.zero_()
        assert torso(torch.full((1, 1, 2, 2), 255, dtype=torch.uint8)).item() == pytest.approx(4.0)


def test_tanh_layers_start_orthogonal():
    torso = build_seeded(0, lambda: MLP(VECTOR, (6,), "tanh"))
    weight = torso[0].weight.detach()
    torch.testing.assert_close(weight @ weight.T, 2.0 * torch.eye(6), atol=1e-5, rtol=0)
    assert (torso[0].bias == 0).all()


def test_initial_weights_come_from_the_seed_alone():
    torch.manual_seed(1)
    one = make_agent("ppo", PPOConfig(), VECTOR, seed=4).weights().sha256()
    torch.manual_seed(2)
    assert make_agent("ppo", PPOConfig(), VECTOR, seed=4).weights().sha256() == one
    assert make_agent("ppo", PPOConfig(), VECTOR, seed=5).weights().sha256() != one


@pytest.mark.parametrize(
    ("network", "spec", "error", "words"),
    [
        ("cnn", VECTOR, ConfigError, "use network=mlp"),
        ("cnn", image(1, 4, 4), ConfigError, "too small"),
        ("lstm", VECTOR, ConfigError, "auto, mlp, cnn or module:function"),
        ("nowhere.at.all:thing", VECTOR, FactoryError, "cannot import"),
        (f"{__name__}:no_features", VECTOR, ConfigError, "not to"),
    ],
)
def test_what_does_not_fit_gets_one_sentence(network, spec, error, words):
    with pytest.raises(error, match=words):
        build_torso(network, spec, (8,), "relu")


def test_images_are_not_normalized_twice():
    for algo, config in (("ppo", PPOConfig(normalize_obs=True)), ("dqn", DQNConfig(normalize_obs=True))):
        with pytest.raises(ConfigError, match="normalize_obs"):
            make_agent(algo, config, image(4, 40, 40), seed=0)


def test_devices(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == resolve_device("cpu") == "cpu"
    with pytest.raises(ConfigError, match="no GPU was found: use device=auto or device=cpu"):
        resolve_device("cuda")
    with pytest.raises(ConfigError, match="must be auto"):
        resolve_device("tpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [resolve_device(word) for word in ("auto", "cuda", "cuda:1")] == ["cuda:0", "cuda:0", "cuda:1"]
    with pytest.raises(ConfigError, match=r"2 GPU\(s\) were found"):
        resolve_device("cuda:2")


def test_fitting_twice_changes_nothing_and_given_values_stay():
    for config in (PPOConfig(learning_rate=0.5), DQNConfig(hidden=(7,)), PPOConfig(minibatch_size=3)):
        for spec in (VECTOR, image(4, 84, 84), EnvSpec("n", VECTOR.obs, DISCRETE, native_vector=True)):
            once, envs = config.resolve_defaults(spec, 2, None)
            assert once.resolve_defaults(spec, 2, envs) == (once, envs)
            for name in config.model_fields_set:
                assert getattr(once, name) == getattr(config, name)
            assert None not in (once.learning_rate, once.hidden, once.segment_steps, once.normalize_obs)


def test_ppo_normalizes_continuous_worlds_only():
    box = ActionSpec("box", (1,), (-2.0,), (2.0,))
    for spec, obs, reward in [
        (VECTOR, False, False),
        (EnvSpec("v", VECTOR.obs, box), True, True),
        (EnvSpec("i", FieldSpec("obs", (4, 84, 84), "uint8"), box), False, True),
    ]:
        fitted, _ = PPOConfig().resolve_defaults(spec, 1, None)
        assert (fitted.normalize_obs, fitted.normalize_reward) == (obs, reward)
    fitted, _ = PPOConfig(normalize_obs=False).resolve_defaults(EnvSpec("v", VECTOR.obs, box), 1, None)
    assert (fitted.normalize_obs, fitted.normalize_reward) == (False, True)


def test_the_room_is_entered_without_torch():
    code = "import sys, steppe.algorithms; assert 'torch' not in sys.modules; steppe.algorithms.PPO; assert 'torch' in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    with pytest.raises(AttributeError, match="nothing"):
        _ = steppe.algorithms.nothing


def test_greedy_values_do_not_depend_on_how_many_rows_are_asked_about_beyond_rounding():
    agent = make_agent("ppo", PPOConfig(), VECTOR, seed=0)
    obs = np.random.default_rng(0).normal(size=(64, 6)).astype(np.float32)
    together = agent.act(obs, np.zeros(64, bool), explore=False)["value"]
    alone = [agent.act(row[None], np.zeros(1, bool), explore=False)["value"][0] for row in obs]
    np.testing.assert_allclose(together, alone, rtol=1e-4, atol=1e-5)

"""Finding, making and wrapping environments; every mistake gets one sentence."""

import sys
import types
import warnings

import gymnasium as gym
import numpy as np
import pytest

from steppe.core.config import references
from steppe.core.config.run import EnvConfig
from steppe.core.contracts.errors import ConfigError, FactoryError, MissingExtra, UsageError, WorldError
from steppe.core.contracts.specs import ActionSpec, FieldSpec
from steppe.envs import known_environments, make_segment_env, probe
from steppe.envs.factory import env_seeds
from steppe.envs.toy.builtin import CountingEnv, IdentityEnv
from steppe.testing.env import collect

pytestmark = pytest.mark.unit
LOOP = EnvConfig(vector="loop")


class Doubling(gym.RewardWrapper):
    def reward(self, reward):
        return 2 * reward


class Painted(CountingEnv):
    """Renders a picture whose first pixel is the step."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 4}  # noqa: RUF012

    def __init__(self, render_mode=None):
        super().__init__()
        self.render_mode = render_mode

    def render(self):
        picture = np.zeros((4, 6, 3), np.uint8)
        picture[0, 0] = self.elapsed
        return picture


class Breaking(IdentityEnv):
    def __init__(self):
        raise RuntimeError("no such maze")


def not_an_env():
    return 3


_one = IdentityEnv()


def always_the_same():
    return _one


def _seed(number=0):
    return np.random.SeedSequence(number)


def _journal(env, config, num_envs=2, rows=30):
    return collect(make_segment_env(env, config, num_envs, _seed()), rows, 7)


def test_probe_reads_spaces_and_native_version():
    spec = probe("CartPole-v1", EnvConfig())
    assert spec.obs == FieldSpec("obs", (4,), "float32")
    assert spec.action == ActionSpec("discrete", (2,))
    assert spec.native_vector
    assert spec.max_episode_steps == 500
    assert not probe("CartPole-v1", LOOP).native_vector
    assert not probe("Pendulum-v1", EnvConfig()).native_vector


def test_probe_of_a_box():
    spec = probe("Pendulum-v1", EnvConfig())
    assert spec.action == ActionSpec("box", (1,), (-2.0,), (2.0,))
    assert spec.max_episode_steps == 200


@pytest.mark.parametrize("vector", ["loop", "native"])
def test_probe_agrees_with_make_world(vector):
    config = EnvConfig(vector=vector, frame_stack=3, time_limit=9)
    world = make_segment_env("CartPole-v1", config, 3, _seed())
    assert world.spec == probe("CartPole-v1", config)
    assert world.spec.obs.shape == (12,)
    assert world.spec.max_episode_steps == 9
    world.close()


@pytest.mark.parametrize(
    ("env", "sentence"),
    [
        ("CartPol-v1", "there is no environment 'CartPol-v1'. Did you mean 'CartPole-v1'?"),
        ("steppe/Identiti-v0", "Did you mean 'steppe/Identity-v0'?"),
        ("Taxi-v3", "use 'Taxi-v4', which is current"),
        ("Taxi-v9", "use 'Taxi-v4', which is current"),
        ("Nowhere/Pong-v5", "as in 'package:Nowhere/Pong-v5'"),
        ("no such thing", "there is no environment 'no such thing'"),
        ("nowhere_at_all:Thing-v0", "cannot import 'nowhere_at_all'"),
        ("math:Thing-v0", "there is no environment 'math:Thing-v0'"),
        ("math:nothing", "there is no environment 'math:nothing'"),
        ("math:pi", "'math:pi' is a float, not a function that makes an environment"),
        ("math:Nowhere/Thing-v0", "The module registers no such name."),
        ("", "there is no environment ''"),
    ],
)
def test_an_unknown_environment_raises_a_clear_error(env, sentence):
    with pytest.raises(WorldError) as caught:
        probe(env, EnvConfig())
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_older_version_that_still_exists_is_taken_without_a_warning():
    assert probe("CartPole-v0", EnvConfig()).max_episode_steps == 200


def test_an_id_without_version_means_the_newest():
    assert probe("CartPole", EnvConfig()).max_episode_steps == 500


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "Box2D", None)
    monkeypatch.delitem(sys.modules, "gymnasium.envs.box2d", raising=False)
    with pytest.raises(WorldError, match="LunarLander-v3 needs a package that is not installed: Box2D"):
        probe("LunarLander-v3", EnvConfig())


def test_a_function_of_a_module_and_a_class_make_environments():
    spec = probe("steppe.envs.toy.builtin:CountingEnv", EnvConfig())
    assert spec.id == "steppe.envs.toy.builtin:CountingEnv"
    assert spec.obs.shape == (3,)


def test_a_lambda_makes_environments_here():
    spec = probe(
        references.make_reference(lambda num_choices: IdentityEnv(num_choices)), EnvConfig(kwargs={"num_choices": 7})
    )
    assert spec.action.sizes == (7,)


def test_a_lambda_of_another_process_is_one_sentence():
    with pytest.raises(FactoryError, match="another process"):
        probe("local:123456", EnvConfig())


def test_a_module_is_imported_for_its_registrations(monkeypatch, tmp_path):
    (tmp_path / "own_envs_for_test.py").write_text(
        "import gymnasium\ngymnasium.register('Own/Counting-v3', 'steppe.envs.toy.builtin:CountingEnv')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    try:
        assert probe("own_envs_for_test:Own/Counting-v3", EnvConfig()).obs.shape == (3,)
    finally:
        gym.registry.pop("Own/Counting-v3", None)


def test_an_attribute_wins_over_a_registration(monkeypatch):
    module = types.ModuleType("module_with_both")
    module.CartPole = CountingEnv
    monkeypatch.setitem(sys.modules, "module_with_both", module)
    assert probe("module_with_both:CartPole", EnvConfig()).obs.shape == (3,)


def test_keyword_arguments_reach_the_environment():
    assert probe("steppe/Identity-v0", EnvConfig(kwargs={"num_choices": 9})).obs.shape == (9,)


def test_wrong_keyword_arguments_raise_a_clear_error():
    with pytest.raises(WorldError, match=r"cannot make steppe/Identity-v0 with {'colour': 3}: TypeError"):
        probe("steppe/Identity-v0", EnvConfig(kwargs={"colour": 3}))


@pytest.mark.parametrize(
    ("maker", "sentence"),
    [
        (Breaking, "RuntimeError: no such maze"),
        (not_an_env, "returned a int, neither a gymnasium.Env nor a PettingZoo environment"),
        (always_the_same, "gave the same environment twice"),
    ],
)
def test_a_bad_function_is_one_sentence(maker, sentence):
    with pytest.raises(WorldError, match=sentence):
        make_segment_env(references.make_reference(maker), EnvConfig(), 2, _seed())


def test_an_environment_without_spaces_is_one_sentence():
    class Bare(gym.Env):
        pass

    with pytest.raises(WorldError, match="has no observation_space"):
        probe(references.make_reference(Bare), EnvConfig())


def test_advice_from_gymnasium_does_not_stop_anyone():
    class Unpolished(IdentityEnv):
        metadata = {}  # noqa: RUF012

    gym.register("Unpolished-v0", Unpolished)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert probe("Unpolished-v0", EnvConfig()).obs.shape == (4,)
    finally:
        gym.registry.pop("Unpolished-v0")


def test_wrappers_are_applied_in_order():
    plain = _journal("steppe/Counting-v0", EnvConfig())
    text = references.make_reference(Doubling)
    wrapped = _journal("steppe/Counting-v0", EnvConfig(wrappers=(text, text)))
    np.testing.assert_array_equal(wrapped["reward"], 4 * plain["reward"])
    np.testing.assert_array_equal(wrapped["obs"], plain["obs"])


def test_an_invalid_wrapper_raises_a_clear_error():
    with pytest.raises(WorldError, match="the wrapper builtins:repr returned a str"):
        probe("steppe/Counting-v0", EnvConfig(wrappers=("builtins:repr",)))


@pytest.mark.parametrize("env", ["steppe/Identity-v0", "steppe.envs.toy.builtin:IdentityEnv"])
def test_the_time_limit_truncates_registered_and_own_environments(env):
    journal = _journal(env, EnvConfig(time_limit=5))
    np.testing.assert_array_equal(np.flatnonzero(journal["truncated"][:, 0]), [4, 9, 14, 19, 24, 29])
    assert not journal["terminated"].any()
    assert probe(env, EnvConfig(time_limit=5)).max_episode_steps == 5


@pytest.mark.parametrize("vector", ["loop", "native"])
def test_rewards_are_scaled_then_clipped_and_returns_are_not(vector):
    config = EnvConfig(vector=vector, reward_scale=3.0, reward_clip=2.0)
    journal = _journal("CartPole-v1", config, rows=150)
    assert set(np.unique(journal["reward"][journal["valid"]])) == {2.0}
    assert journal.finished
    assert all(total == length for total, length in journal.finished)


def test_reward_scale_alone():
    journal = _journal("steppe/Counting-v0", EnvConfig(reward_scale=0.5))
    plain = _journal("steppe/Counting-v0", EnvConfig())
    np.testing.assert_array_equal(journal["reward"], plain["reward"] / 2)
    assert journal.finished == plain.finished


@pytest.mark.parametrize(("wrapper", "key"), [("NormalizeObservation", "obs"), ("NormalizeReward", "reward")])
def test_statistics_outside_the_weights_are_refused(wrapper, key):
    config = EnvConfig(wrappers=(f"gymnasium.wrappers:{wrapper}",))
    with pytest.raises(ConfigError, match=f"{wrapper} keeps its statistics .* use normalize_{key}=true"):
        probe("CartPole-v1", config)


def test_frames_are_those_of_gymnasiums_wrapper():
    world = make_segment_env("CartPole-v1", EnvConfig(vector="loop", frame_stack=4), 2, _seed(5))
    assert world.spec.obs.shape == (16,)
    journal = collect(world, 80, 7)
    for index, seed in enumerate(env_seeds(_seed(5), 2)):
        env = gym.wrappers.FrameStackObservation(gym.make("CartPole-v1"), 4)
        frames, _ = env.reset(seed=seed)
        for t in range(80):
            np.testing.assert_array_equal(journal["obs"][t, index], frames.ravel())
            frames, _, terminated, truncated, _ = env.step(int(journal["action"][t, index]))
            if terminated or truncated:
                np.testing.assert_array_equal(journal["final_obs"][t, index], frames.ravel())
                frames, _ = env.reset()
        env.close()


def test_frames_of_images_are_joined_along_the_channels():
    class Film(gym.Env):
        observation_space = gym.spaces.Box(0, 255, (4, 5, 3), np.uint8)
        action_space = gym.spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            self.count = 0
            return np.full((4, 5, 3), 0, np.uint8), {}

        def step(self, action):
            self.count += 1
            return np.full((4, 5, 3), self.count, np.uint8), 0.0, self.count == 6, False, {}

    world = make_segment_env(references.make_reference(Film), EnvConfig(frame_stack=3), 1, _seed())
    assert world.spec.obs == FieldSpec("obs", (9, 4, 5), "uint8", frames=3)
    journal = collect(world, 8, 3)
    frames = journal["obs"][:, 0, ::3, 0, 0]  # the first channel of each frame, oldest first
    np.testing.assert_array_equal(
        frames, np.array([list(row) for row in ["000", "001", "012", "123", "234", "345", "000", "001", "012"]], int)
    )
    np.testing.assert_array_equal(journal["final_obs"][5, 0, ::3, 0, 0], [4, 5, 6])


@pytest.mark.parametrize("options", [{"wrappers": ("builtins:repr",)}, {"grayscale": True}, {"resize": 10}])
def test_native_refuses_what_works_on_single_environments(options):
    with pytest.raises(ConfigError, match="vector='native' is not possible for CartPole-v1"):
        probe("CartPole-v1", EnvConfig(vector="native", **options))


@pytest.mark.parametrize("env", ["Pendulum-v1", "steppe.envs.toy.builtin:CountingEnv"])
def test_native_needs_a_vector_version(env):
    with pytest.raises(ConfigError, match=f"vector='native' is not possible for {env}"):
        probe(env, EnvConfig(vector="native"))


def test_auto_takes_the_loop_where_the_vector_version_does_not_fit():
    def identity(env):
        return env

    assert not probe("CartPole-v1", EnvConfig(wrappers=(references.make_reference(identity),))).native_vector


def test_kwargs_that_only_the_plain_version_takes_mean_the_loop(monkeypatch):
    gym.register(
        "Odd/Pole-v0",
        "gymnasium.envs.classic_control.cartpole:CartPoleEnv",
        vector_entry_point=lambda num_envs, max_episode_steps=0: pytest.fail("called with the wrong arguments"),
        max_episode_steps=20,
    )
    try:
        config = EnvConfig(kwargs={"sutton_barto_reward": True})
        assert not probe("Odd/Pole-v0", config).native_vector
        with pytest.raises(WorldError, match="sutton_barto_reward"):
            probe("Odd/Pole-v0", config.model_copy(update={"vector": "native"}))
    finally:
        gym.registry.pop("Odd/Pole-v0")


def test_kwargs_reach_the_native_version():
    config = EnvConfig(vector="native", kwargs={"sutton_barto_reward": True})
    journal = _journal("CartPole-v1", config, rows=150)
    np.testing.assert_array_equal(journal["reward"], -journal["terminated"].astype(np.float32))
    assert journal["terminated"].any()


def test_seeds_are_those_of_spawned_children_and_spawn_nothing():
    sequence = np.random.SeedSequence(11, spawn_key=(3,))
    expected = [int(child.generate_state(1)[0]) // 2 for child in np.random.SeedSequence(11, spawn_key=(3,)).spawn(4)]
    assert env_seeds(sequence, 4) == expected
    assert env_seeds(sequence, 4) == expected
    assert sequence.n_children_spawned == 0
    assert len(set(expected)) == 4


def test_the_first_environment_renders():
    world = make_segment_env(references.make_reference(Painted), EnvConfig(), 2, _seed(), render=True)
    collect(world, 3, 3)
    picture = world.render()
    assert picture.shape == (4, 6, 3)
    assert picture[0, 0, 0] in (0, 3)  # the third step, or a new episode after it


@pytest.mark.parametrize("env", ["steppe/Counting-v0", "steppe.envs.toy.builtin:CountingEnv"])
def test_rendering_an_environment_without_images_returns_none(env):
    world = make_segment_env(env, EnvConfig(), 1, _seed(), render=True)
    world.reset(np.zeros((1, 3), np.float32))
    assert world.render() is None
    world.close()


@pytest.mark.parametrize("vector", ["auto", "native"])
def test_rendering_without_its_package_names_the_extra(vector, monkeypatch):
    monkeypatch.setitem(sys.modules, "pygame", None)
    world = make_segment_env("CartPole-v1", EnvConfig(vector=vector), 1, _seed(), render=True)
    world.reset(np.zeros((1, 4), np.float32))
    with pytest.raises(MissingExtra, match=r"steppe\[render\]"):
        world.render()
    world.close()


@pytest.mark.parametrize("vector", ["auto", "native"])
def test_cartpole_renders(vector):
    pytest.importorskip("pygame")
    world = make_segment_env("CartPole-v1", EnvConfig(vector=vector), 2, _seed(), render=True)
    world.reset(np.zeros((2, 4), np.float32))
    picture = world.render()
    assert picture.shape == (400, 600, 3)
    assert len(np.unique(picture)) > 1
    world.close()


def test_environments_made_before_a_failure_are_closed():
    closed = []

    class Fragile(IdentityEnv):
        made = 0

        def __init__(self):
            super().__init__()
            Fragile.made += 1
            if Fragile.made == 3:
                raise RuntimeError("out of licences")

        def close(self):
            closed.append(self)

    with pytest.raises(WorldError, match="out of licences"):
        make_segment_env(references.make_reference(Fragile), EnvConfig(), 3, _seed())
    assert len(closed) == 2


def test_known_environments_lists_built_ins_and_gymnasiums():
    known = known_environments()
    assert known == sorted(known)
    assert {"CartPole-v1", "Taxi-v4", "steppe/Identity-v0", "steppe/Counting-v0"} <= set(known)
    assert not any(name.startswith("GymV") for name in known)


def test_every_sentence_is_a_usage_error():
    with pytest.raises(UsageError) as caught:
        probe("CartPol-v1", EnvConfig())
    assert caught.value.exit_code == 2

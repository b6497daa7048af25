"""Atari games: every step against the bare emulator, stepped and averaged by hand; lives, rewards, seeds, mistakes."""

import importlib.util

import numpy as np
import pytest
from ale_py import Action, ALEInterface, LoggerMode, roms

from steppe.core.config.run import EnvConfig
from steppe.core.contracts.errors import ConfigError, MissingExtra
from steppe.core.contracts.specs import ActionSpec, FieldSpec
from steppe.envs import known_environments, make_segment_env, probe
from steppe.envs.wrappers.atari import AtariGame, AtariSettings
from steppe.testing.env import collect

pytestmark = pytest.mark.integration

PLAIN = {"repeat_action_probability": 0.0, "noop_max": 0}


def bare(game, max_frames=108_000):
    """An emulator without any of our code around it."""
    ALEInterface.setLoggerMode(LoggerMode.Error)
    ale = ALEInterface()
    ale.setFloat("repeat_action_probability", 0.0)
    ale.setInt("max_num_frames_per_episode", max_frames)
    ale.loadROM(roms.get_rom_path(game))
    ale.reset_game()
    return ale


def averaged(screen, size=84):
    """The mean over the area of each new pixel, by two matrices in double precision, rounded half up."""

    def cover(old):
        edges = np.arange(size + 1) * old / size
        pixel = np.arange(old)
        overlap = np.minimum(edges[1:, None], pixel + 1) - np.maximum(edges[:-1, None], pixel)
        return np.clip(overlap, 0, None) * size / old

    down, across = cover(screen.shape[0]), cover(screen.shape[1])
    planes = [down @ plane @ across.T for plane in np.atleast_3d(screen).astype(float).transpose(2, 0, 1)]
    mean = np.stack(planes, axis=2).reshape(size, size, *screen.shape[2:])
    return np.floor(mean + 0.5 + 1e-9).astype(np.uint8)


def generator(seed):
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed)))


@pytest.mark.parametrize("game", ["pong", "breakout", "ms_pacman", "air_raid"])
@pytest.mark.parametrize("rules", [PLAIN, {}, {"frameskip": 1}, {"frameskip": 3, "repeat_action_probability": 0.6}])
def test_a_step_equals_the_emulators(game, rules):
    env, ale, coins = AtariGame(AtariSettings(game, **rules)), bare(game), generator(5)
    actions = ale.getMinimalActionSet()
    assert env.action_space.n == len(actions)
    observation, _ = env.reset(seed=5)
    if env.rules.noop_max:
        for _ in range(coins.integers(1, 31)):
            ale.act(Action.NOOP)
    np.testing.assert_array_equal(observation, averaged(ale.getScreenGrayscale()))
    held = Action.NOOP
    for chosen in np.random.default_rng(1).integers(0, len(actions), 60):
        frames, paid = [], 0
        draws = coins.random(env.rules.frameskip) if env.rules.repeat_action_probability else [1.0] * 9
        for draw in draws[: env.rules.frameskip]:
            held = held if draw < env.rules.repeat_action_probability else actions[chosen]
            paid += ale.act(held)
            frames.append(ale.getScreenGrayscale())
        observation, reward, terminated, truncated, info = env.step(chosen)
        assert (reward, terminated, truncated, info["lives"]) == (paid, ale.game_over(), False, ale.lives())
        np.testing.assert_array_equal(observation, averaged(np.maximum.reduce(frames[-2:])))


def test_an_action_that_always_sticks_never_begins():
    env, ale = AtariGame(AtariSettings("pong", repeat_action_probability=1.0, noop_max=0)), bare("pong")
    env.reset(seed=0)
    for _ in range(40):
        observation = env.step(3)[0]
        frames = [ale.act(Action.NOOP) or ale.getScreenGrayscale() for _ in range(4)]
    np.testing.assert_array_equal(observation, averaged(np.maximum(*frames[-2:])))


def test_colours_and_other_sizes():
    env, ale = AtariGame(AtariSettings("pong", **PLAIN), grayscale=False, size=42), bare("pong")
    observation, _ = env.reset(seed=0)
    np.testing.assert_array_equal(observation, averaged(ale.getScreenRGB(), 42))
    whole = AtariGame(AtariSettings("pong", **PLAIN), size=0)
    np.testing.assert_array_equal(whole.reset(seed=0)[0], ale.getScreenGrayscale())


def test_a_long_game_is_truncated():
    env = AtariGame(AtariSettings("pong", max_num_frames_per_episode=50, **PLAIN))
    env.reset(seed=0)
    ends = [env.step(0)[2:4] for _ in range(13)]
    assert ends == [(False, False)] * 12 + [(False, True)]


def test_a_lost_life_ends_an_episode_but_not_the_game():
    env = AtariGame(AtariSettings("breakout", episodic_life=True, **PLAIN))
    env.reset(seed=0)
    fire, lives, frames = 1, [], []
    while len(lives) < 6:
        _, _, terminated, truncated, info = env.step(fire)
        assert not truncated
        if terminated:
            lives.append(info["lives"])
            frames.append(env.ale.getEpisodeFrameNumber())
            env.reset()
    assert lives == [4, 3, 2, 1, 0, 4]
    assert frames[:5] == sorted(frames[:5]), "the game began anew after a lost life"
    assert frames[5] < frames[4], "the game did not begin anew after the last life"


def test_without_lives_only_the_game_over_ends_an_episode():
    """Lost Luggage goes on with 0 lives shown; that the count fell to 0 ends nothing, as is usual."""
    env = AtariGame(AtariSettings("lost_luggage", episodic_life=True, frameskip=1, **PLAIN))
    env.reset(seed=0)
    choices, going_on = np.random.default_rng(0), 0
    for _ in range(3300):
        _, _, terminated, _, info = env.step(choices.integers(env.action_space.n))
        if info["lives"] == 0:
            assert terminated == env.ale.game_over()
            going_on += not terminated
        if terminated:
            env.reset()
    assert going_on, "the game never showed 0 lives while it went on: play longer"


def test_a_saved_game_remembers_the_action_that_sticks():
    rules = AtariSettings("pong", repeat_action_probability=0.9, noop_max=0)
    one, other = AtariGame(rules), AtariGame(rules)
    one.reset(seed=3)
    other.reset(seed=4)
    differed = 0
    for step in range(60):
        one.step(2 + step // 7 % 2)
        state, numbers = one.snapshot(), one.np_random.bit_generator.state
        other.restore(state)
        other.np_random.bit_generator.state = numbers
        differed += state["held"] != Action.NOOP.value
        after = one.step(0), other.step(0)
        np.testing.assert_array_equal(after[0][0], after[1][0])
        assert one.snapshot() == other.snapshot()
    assert differed > 10


@pytest.mark.parametrize("game", ["pong", "beam_rider", "tennis"])
def test_a_seed_determines_everything_after_any_previous_games(game):
    """Beam Rider and Tennis leave traces in memory that change the next game."""

    def played(env):
        observation = [env.reset(seed=7)[0], *(env.step(action)[0] for action in actions)]
        return np.stack(observation)

    used, fresh = AtariGame(AtariSettings(game)), AtariGame(AtariSettings(game))
    actions = np.random.default_rng(0).integers(0, used.action_space.n, 80)
    used.reset(seed=1)
    for action in actions:
        used.step(action)
    np.testing.assert_array_equal(played(used), played(fresh))


def test_evaluations_play_whole_games():
    """Breakout has five lives, so there are about five times as many episodes by life."""
    config = EnvConfig(kwargs={"episodic_life": True})
    worlds = [
        make_segment_env("ALE/Breakout-v5", config, 1, np.random.SeedSequence(0), whole_games=whole)
        for whole in (False, True)
    ]
    by_life, by_game = (len(collect(world, 1500, 100).finished) for world in worlds)
    assert by_game >= 4
    assert by_life >= 4 * by_game


def test_rewards_are_clipped_and_returns_are_not():
    config = EnvConfig(kwargs={"max_num_frames_per_episode": 1200})
    journal = collect(make_segment_env("ALE/MsPacman-v5", config, 2, np.random.SeedSequence(0)), 320, 64)
    assert set(np.unique(journal["reward"])) == {0.0, 1.0}
    returns = [total for total, _ in journal.finished]
    assert returns
    assert all(total % 10 == 0 and total >= 50 for total in returns), "dots are worth 10 each"
    unclipped = EnvConfig(kwargs=config.kwargs, reward_clip=0)
    plain = collect(make_segment_env("ALE/MsPacman-v5", unclipped, 2, np.random.SeedSequence(0)), 320, 64)
    assert plain["reward"].max() >= 10
    assert plain.finished == journal.finished


def test_frames_are_joined_with_the_oldest_first():
    journal = collect(make_segment_env("ALE/Pong-v5", EnvConfig(kwargs=PLAIN), 1, np.random.SeedSequence(0)), 12, 12)
    obs = journal["obs"][:, 0]
    for back in range(3):
        np.testing.assert_array_equal(obs[0, back], obs[0, 3])
        np.testing.assert_array_equal(obs[1:, back], obs[:-1, back + 1])


def test_specs_of_atari_games():
    spec = probe("ALE/Pong-v5", EnvConfig())
    assert spec.obs == FieldSpec("obs", (4, 84, 84), "uint8", frames=4)
    assert spec.action == ActionSpec("discrete", (6,))
    assert not spec.native_vector
    assert probe("ALE/Pong-v5", EnvConfig(grayscale=False, resize=42)).obs.shape == (12, 42, 42)
    assert probe("ALE/Pong-v5", EnvConfig(resize=0, frame_stack=1)).obs.shape == (1, 210, 160)
    assert probe("ALE/Pong-v5", EnvConfig(kwargs={"full_action_space": True})).action.sizes == (18,)
    assert probe("ALE/Pong-v5", EnvConfig(time_limit=7)).max_episode_steps == 7


def test_the_defaults_are_for_atari_games_only_and_resolving_twice_changes_nothing():
    names = ("frame_stack", "reward_clip", "grayscale", "resize")

    def chosen(config):
        return tuple(getattr(config, name) for name in names)

    assert chosen(EnvConfig().resolve_defaults("ALE/Pong-v5")) == (4, 1.0, True, 84)
    assert chosen(EnvConfig().resolve_defaults("ale_py:ALE/Pong-v5")) == (4, 1.0, True, 84)
    assert chosen(EnvConfig().resolve_defaults("CartPole-v1")) == (1, 0.0, False, 0)
    own = EnvConfig(frame_stack=2, reward_clip=0, grayscale=False, resize=60)
    assert own.resolve_defaults("ALE/Pong-v5") == own
    assert EnvConfig().resolve_defaults("ALE/Pong-v5").resolve_defaults("CartPole-v1") == EnvConfig().resolve_defaults(
        "ALE/Pong-v5"
    )


def test_the_screen_is_rendered_in_colour():
    world = make_segment_env("ALE/Pong-v5", EnvConfig(), 1, np.random.SeedSequence(0), render=True)
    world.reset(np.zeros((1, 4, 84, 84), np.uint8))
    assert world.render().shape == (210, 160, 3)
    world.close()


def test_without_ale_py_the_error_names_the_package(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, package=None: None)
    with pytest.raises(
        MissingExtra, match=r"^ALE/Pong-v5 needs an optional dependency: pip install 'steppe\[atari\]'$"
    ):
        probe("ALE/Pong-v5", EnvConfig())


def test_games_are_listed():
    assert "ALE/Pong-v5" in known_environments()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kwargs": {"noop_mx": 3}}, "no 'noop_mx' for Atari games.*Did you mean 'noop_max'"),
        ({"kwargs": {"obs_type": "ram"}}, "no 'obs_type' for Atari games"),
        ({"kwargs": {"frameskip": 0}}, "frameskip ≥ 1"),
        ({"kwargs": {"frameskip": (2, 5)}}, "frameskip ≥ 1"),
        ({"kwargs": {"repeat_action_probability": 1.5}}, "repeat_action_probability ≤ 1"),
        ({"kwargs": {"mode": 77}}, "pong has no mode 77"),
        ({"vector": "native"}, "can neither be saved nor continue a game after a lost life"),
    ],
)
def test_invalid_arguments_are_refused_in_one_sentence(options, words):
    with pytest.raises(ConfigError, match=words):
        make_segment_env("ALE/Pong-v5", EnvConfig(**options), 1, np.random.SeedSequence(0))

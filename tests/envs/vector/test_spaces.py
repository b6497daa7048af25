"""Rules from spaces to arrays, against Gymnasium's own flattening and arithmetic done by hand."""

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from PIL import Image

from steppe.core.contracts.errors import ConfigError, WorldError
from steppe.envs.vector.spaces import make_action_decoder, make_observation_encoder

pytestmark = pytest.mark.unit


def _row(space, raw, **options):
    rule = make_observation_encoder(space, "World-v0", **options)
    target = np.full((3, *rule.field.shape), 77, rule.field.dtype)
    rule.put_checked(target, 1, raw)
    assert (target[[0, 2]] == 77).all(), "a neighbour's row was touched"
    return target[1]


@pytest.mark.parametrize(
    "space",
    [
        spaces.Box(-1, 1, (3,), np.float32),
        spaces.Box(-np.inf, np.inf, (2, 3), np.float64),
        spaces.Box(-1, 1, (), np.float32),
        spaces.Box(0, 9, (2, 2), np.int32),
        spaces.Box(0, 2, (3, 3), np.uint8),
        spaces.Box(0, 1, (4, 4, 2), bool),
        spaces.Discrete(5),
        spaces.Discrete(5, start=-2),
        spaces.MultiDiscrete([2, 3, 4]),
        spaces.MultiDiscrete([[2, 3], [4, 2]], start=[[1, 0], [-1, 5]]),
        spaces.MultiBinary(4),
        spaces.MultiBinary([2, 3]),
        spaces.Tuple((spaces.Discrete(3), spaces.Box(-1, 1, (2,)))),
        spaces.Dict(
            {"z": spaces.Discrete(3), "a": spaces.Dict({"q": spaces.MultiBinary(2), "b": spaces.Box(0, 1, (2, 2))})}
        ),
    ],
    ids=str,
)
def test_vectors_are_what_gymnasium_flattens(space):
    space.seed(3)
    for _ in range(20):
        raw = space.sample()
        row = _row(space, raw)
        assert row.dtype == np.float32
        np.testing.assert_array_equal(row, np.asarray(spaces.flatten(space, raw), np.float32).ravel())


def test_an_image_inside_a_dict_is_scaled():
    space = spaces.Dict({"eye": spaces.Box(0, 255, (2, 2, 3), np.uint8), "arm": spaces.Box(-1, 1, (1,))})
    image = np.arange(12, dtype=np.uint8).reshape(2, 2, 3) * 20
    row = _row(space, {"eye": image, "arm": np.array([0.5], np.float32)})
    np.testing.assert_allclose(row, [0.5, *(np.arange(12) * 20 / 255)], rtol=1e-6)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((8, 6, 3), (3, 8, 6)),
        ((3, 8, 6), (3, 8, 6)),
        ((8, 6), (1, 8, 6)),
        ((4, 4, 4), (4, 4, 4)),
        ((2, 8, 9), (2, 8, 9)),
    ],
)
def test_images_have_channels_first(shape, expected):
    raw = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    row = _row(spaces.Box(0, 255, shape, np.uint8), raw)
    assert row.shape == expected
    assert row.dtype == np.uint8
    for channel, y, x in np.ndindex(*expected):
        original = {(8, 6, 3): (y, x, channel), (8, 6): (y, x), (4, 4, 4): (y, x, channel)}.get(shape, (channel, y, x))
        assert row[channel, y, x] == raw[original]


@pytest.mark.parametrize("shape", [(8, 6, 3), (3, 8, 6)])
def test_grayscale_weighs_colours_as_the_eye_does(shape):
    raw = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    row = _row(spaces.Box(0, 255, shape, np.uint8), raw, grayscale=True)
    red, green, blue = np.moveaxis(raw, 2, 0) if shape[2] == 3 else raw
    assert row.shape == (1, 8, 6)
    np.testing.assert_allclose(row[0], 0.299 * red + 0.587 * green + 0.114 * blue, atol=1)


def test_resizing_by_a_whole_factor_averages_blocks():
    raw = np.random.default_rng(0).integers(0, 256, (8, 8, 3), np.uint8)
    row = _row(spaces.Box(0, 255, (8, 8, 3), np.uint8), raw, resize=4)
    blocks = raw.reshape(4, 2, 4, 2, 3).mean(axis=(1, 3)).transpose(2, 0, 1)
    np.testing.assert_allclose(row, blocks, atol=1.0)  # rows, then columns: rounded twice


def test_grey_then_small():
    raw = np.random.default_rng(0).integers(0, 256, (210, 160, 3), np.uint8)
    row = _row(spaces.Box(0, 255, (210, 160, 3), np.uint8), raw, grayscale=True, resize=84)
    expected = Image.fromarray(raw).convert("L").resize((84, 84), Image.Resampling.BOX)
    np.testing.assert_array_equal(row, np.asarray(expected)[None])


@pytest.mark.parametrize("options", [{"grayscale": True}, {"resize": 84}])
def test_picture_options_need_pictures(options):
    with pytest.raises(ConfigError, match=r"is for images, but World-v0 observes Box"):
        make_observation_encoder(spaces.Box(-1, 1, (3,)), "World-v0", **options)


def test_grayscale_needs_three_colours():
    with pytest.raises(ConfigError, match="3 colours, not 4 channels"):
        make_observation_encoder(spaces.Box(0, 255, (8, 8, 4), np.uint8), "World-v0", grayscale=True)


@pytest.mark.parametrize(
    "space", [spaces.Text(5), spaces.Sequence(spaces.Discrete(2)), spaces.Graph(spaces.Discrete(2), None)]
)
def test_other_spaces_are_named(space):
    with pytest.raises(WorldError, match=f"World-v0 observes .* {type(space).__name__} space"):
        make_observation_encoder(space, "World-v0")
    with pytest.raises(WorldError, match=f"World-v0 takes .* {type(space).__name__} space"):
        make_action_decoder(space, "World-v0")


def test_a_space_inside_a_dict_is_named_too():
    with pytest.raises(WorldError, match="a Text space"):
        make_observation_encoder(spaces.Dict({"words": spaces.Text(5)}), "World-v0")


@pytest.mark.parametrize("raw", [np.float32(1), np.zeros(1, np.float32), np.zeros((3, 3), np.float32)])
def test_a_shape_that_would_spread_is_refused(raw):
    with pytest.raises(ValueError, match="its space has"):
        _row(spaces.Box(-1, 1, (3,)), raw)


@pytest.mark.parametrize(
    ("space", "raw"), [(spaces.Discrete(3), 3), (spaces.Discrete(3), -1), (spaces.MultiDiscrete([2, 2]), [1, 2])]
)
def test_a_choice_that_does_not_exist_is_refused(space, raw):
    with pytest.raises(ValueError, match="is not in"):
        _row(space, raw)


def test_discrete_actions_begin_where_the_space_does():
    space = spaces.Discrete(3, start=5)
    rule = make_action_decoder(space, "World-v0")
    assert rule.spec.kind == "discrete"
    assert rule.spec.sizes == (3,)
    given = rule.each(np.array([0, 2, 1]))
    assert [int(action) for action in given] == [5, 7, 6]
    assert all(action in space for action in given)


def test_multi_discrete_actions_keep_axes_and_start():
    space = spaces.MultiDiscrete([[2, 3], [4, 5]], start=[[0, 1], [2, 3]])
    rule = make_action_decoder(space, "World-v0")
    assert rule.spec.sizes == (2, 3, 4, 5)
    first, last = rule.each(np.array([[0, 0, 0, 0], [1, 2, 3, 4]]))
    np.testing.assert_array_equal(first, [[0, 1], [2, 3]])
    np.testing.assert_array_equal(last, [[1, 3], [5, 7]])
    assert last in space


def test_multi_binary_actions_are_choices_of_two():
    space = spaces.MultiBinary(3)
    rule = make_action_decoder(space, "World-v0")
    assert (rule.spec.kind, rule.spec.sizes) == ("multi_discrete", (2, 2, 2))
    assert rule.each(np.array([[0, 1, 1]]))[0] in space


def test_box_actions_are_clipped_in_the_precision_of_the_space():
    low, high = np.array([-0.1, -np.inf]), np.array([0.1, np.inf])
    space = spaces.Box(low, high, dtype=np.float64)
    rule = make_action_decoder(space, "World-v0")
    assert (rule.spec.low, rule.spec.high) == ((-0.1, -np.inf), (0.1, np.inf))
    actions = np.array([[0.1, 9.0], [-3.0, -9.0], [0.05, 0.0]], np.float32)
    given = rule.each(actions)
    assert all(action in space for action in given)  # float32's 0.1 is larger than float64's
    np.testing.assert_allclose(given, [[0.1, 9.0], [-0.1, -9.0], [0.05, 0.0]], rtol=1e-6)


def test_whole_box_actions_are_rounded():
    space = spaces.Box(0, 4, (1,), np.int32)
    given = make_action_decoder(space, "World-v0").each(np.array([[1.6], [9.0], [-2.0]], np.float32))
    assert all(action in space for action in given)
    np.testing.assert_array_equal(np.concatenate(given), [2, 4, 0])


def test_an_environment_may_keep_the_action_array():
    rule = make_action_decoder(spaces.Box(-1, 1, (1,)), "World-v0")
    actions = np.array([[0.25]], np.float32)
    kept = rule.each(actions)[0]
    actions[...] = 0.75
    rule.each(actions)
    assert kept[0] == 0.25


def test_the_rule_of_a_real_environment_fits_its_space():
    env = gym.make("Blackjack-v1")
    raw, _ = env.reset(seed=1)
    row = _row(env.observation_space, raw)
    assert [int(k) for k in np.flatnonzero(row)] == [raw[0], 32 + raw[1], 43 + raw[2]]

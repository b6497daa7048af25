"""Atari games on ale-py's emulator with the usual preprocessing.

Defaults, e.g. of `ALE/Pong-v5`: frame skip 4, maximum over the last two frames, grayscale, 84 × 84 pixels, 4 stacked
frames, 1 to 30 no-op frames at the start, sticky actions with probability 0.25, rewards clipped to ± 1 (returns are
not). Sticky actions are sampled here and not by the emulator, because its saved state lacks the previous action.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
from ale_py import Action, ALEInterface, ALEState, LoggerMode, roms
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec as Registration

from steppe.core.config.run import EnvConfig
from steppe.core.contracts.algorithm import Tree
from steppe.core.contracts.errors import ConfigError, did_you_mean
from steppe.envs.wrappers.downscale import AreaDownscaler

Info = dict[str, Any]


@dataclass(frozen=True)
class AtariSettings:
    """Settings of a game: the keys of `environment.kwargs`, with defaults from ale-py's registration of the game."""

    game: str
    frameskip: int = 4  # frames per action
    repeat_action_probability: float = 0.25  # probability that a frame repeats the previous action
    noop_max: int = 30  # a game starts with 1 to this many no-op frames; 0: none
    episodic_life: bool = False  # a lost life ends the episode; the next one continues the game
    full_action_space: bool = False  # all 18 actions, also those that the game does not use
    max_num_frames_per_episode: int = 108_000  # truncate after this many frames; 0: never
    mode: int | None = None
    difficulty: int | None = None

    @classmethod
    def of(cls, known: dict[str, Any], given: dict[str, Any]) -> AtariSettings:
        """Return the registered settings updated by the given ones; ConfigError for unknown names or invalid values."""
        names = [field.name for field in dataclasses.fields(cls) if field.name != "game"]
        for name in given:
            if name not in names:
                raise ConfigError(
                    f"environment.kwargs has no {name!r} for Atari games; there are: {', '.join(names)}."
                    f"{did_you_mean(name, names)}"
                )
        rules = cls(**known | given)
        sound = isinstance(rules.frameskip, int) and rules.frameskip > 0 and rules.noop_max >= 0
        if not sound or not 0.0 <= rules.repeat_action_probability <= 1.0:
            raise ConfigError("environment.kwargs: frameskip ≥ 1, noop_max ≥ 0 and 0 ≤ repeat_action_probability ≤ 1")
        return rules


class AtariGame(gym.Env[np.ndarray, np.int64]):
    """One Atari game on the emulator `ale`; its complete state can be saved, so a run resumes exactly."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 15}  # noqa: RUF012  # declared so by gym.Env

    def __init__(
        self, rules: AtariSettings, *, grayscale: bool = True, size: int = 84, render_mode: str | None = None
    ) -> None:
        self.rules = rules
        self.render_mode = render_mode
        self.ale = _load_emulator(rules)
        self._initial_state = self.ale.cloneState(include_rng=True)
        self._actions = self.ale.getLegalActionSet() if rules.full_action_space else self.ale.getMinimalActionSet()
        height, width = self.ale.getScreenDims()
        screen = (height, width) if grayscale else (height, width, 3)
        self._see = self.ale.getScreenGrayscale if grayscale else self.ale.getScreenRGB
        self._frames = np.zeros(screen, np.uint8), np.zeros(screen, np.uint8)  # the last two screens
        self._downscale = AreaDownscaler(screen, (size or height, size or width))
        obs_shape = self._downscale(*self._frames).shape
        self.observation_space = spaces.Box(0, 255, obs_shape, np.uint8)
        self.action_space = spaces.Discrete(len(self._actions))
        self._held = Action.NOOP
        self._lives = 0
        self._life_lost = False  # the last episode ended with a lost life: `reset` continues the game

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[np.ndarray, Info]:
        """Start a new game, or after a lost life continue the current one."""
        super().reset(seed=seed)
        if seed is None and self._life_lost:
            self.ale.act(Action.NOOP)
        else:
            self._begin(anew=seed is not None)
        self._held, self._life_lost = Action.NOOP, False
        self._lives = self.ale.lives()
        self._see(self._frames[1])
        return self._downscale(self._frames[1], self._frames[1]), self._info()

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, Info]:
        ale, new_action, last = self.ale, self._actions[action], self.rules.frameskip - 1
        reward, alone = 0, True
        for frame, sticks in enumerate(self._sample_sticky_frames()):
            if not sticks:
                self._held = new_action
            reward += ale.act(self._held)
            if ale.game_over():
                break
            if frame == last - 1:
                self._see(self._frames[0])
                alone = False
        self._see(self._frames[1])
        terminated = ale.game_over(with_truncation=False)
        truncated = ale.game_truncated() and not terminated
        lives = ale.lives()
        self._life_lost = self.rules.episodic_life and 0 < lives < self._lives and not (terminated or truncated)
        self._lives = lives
        obs = self._downscale(self._frames[alone], self._frames[1])
        return obs, float(reward), terminated or self._life_lost, truncated, self._info()

    def render(self) -> np.ndarray:
        """Return the emulator's current RGB screen."""
        screen: np.ndarray = self.ale.getScreenRGB()
        return screen

    def snapshot(self) -> Tree:
        """Return the game's state; the snapshot reader saves the random stream, as for every environment."""
        return {
            "emulator": self.ale.cloneState(include_rng=True).serialize(),
            "held": self._held.value,
            "lives": self._lives,
            "goes_on": self._life_lost,
        }

    def restore(self, state: Tree) -> None:
        """Restore the state of a `snapshot`."""
        self.ale.restoreState(ALEState(state["emulator"]))
        self._held, self._lives, self._life_lost = Action(state["held"]), state["lives"], state["goes_on"]

    def _begin(self, *, anew: bool) -> None:
        """Start a game with no-op frames; `anew` also clears emulator memory that survives from game to game."""
        if anew:
            self.ale.restoreState(self._initial_state)
        self.ale.reset_game()
        if not self.rules.noop_max:
            return
        for _ in range(int(self.np_random.integers(1, self.rules.noop_max + 1))):
            self.ale.act(Action.NOOP)
            if self.ale.game_over():
                self.ale.reset_game()

    def _sample_sticky_frames(self) -> list[bool]:
        """Sample for each frame of a step whether it repeats the previous action."""
        stickiness = self.rules.repeat_action_probability
        if not stickiness:
            return [False] * self.rules.frameskip
        sticks: list[bool] = (self.np_random.random(self.rules.frameskip) < stickiness).tolist()
        return sticks

    def _info(self) -> Info:
        return {"lives": self._lives}


def make_atari_env(source: Registration, config: EnvConfig, *, render: bool = False) -> AtariGame:
    """Build a game that ale-py registered, from a configuration with resolved defaults."""
    return AtariGame(
        AtariSettings.of(source.kwargs, config.kwargs),
        grayscale=bool(config.grayscale),
        size=config.resize or 0,
        render_mode="rgb_array" if render else None,
    )


def _load_emulator(rules: AtariSettings) -> ALEInterface:
    """Return an emulator with the game loaded; its seed has no effect, because its own sticky actions are off."""
    ALEInterface.setLoggerMode(LoggerMode.Error)
    ale = ALEInterface()
    ale.setInt("random_seed", 0)
    ale.setFloat("repeat_action_probability", 0.0)
    ale.setInt("max_num_frames_per_episode", rules.max_num_frames_per_episode)
    rom = roms.get_rom_path(rules.game)
    assert rom is not None, "ale-py registers only the games it contains"
    ale.loadROM(rom)
    for name, value, choices, choose in (
        ("mode", rules.mode, ale.getAvailableModes(), ale.setMode),
        ("difficulty", rules.difficulty, ale.getAvailableDifficulties(), ale.setDifficulty),
    ):
        if value is not None and value not in choices:
            raise ConfigError(f"environment.kwargs: {rules.game} has no {name} {value!r}; there are: {choices}")
        if value is not None:
            choose(value)
    return ale

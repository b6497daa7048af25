"""Exact evaluation of a deterministic policy in an environment whose model is known, beside the optimum.

Models come from `env.unwrapped.P` (Gymnasium's toy text environments) or, for Blackjack, from its rules. The return is the
expected sum of rewards of an episode, cut off by the environment's time limit if it has one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from steppe.core.config.run import RunConfig
from steppe.records.run_directory import RunDirectory

Array = np.ndarray
CARDS = {**dict.fromkeys(range(1, 10), 1 / 13), 10: 4 / 13}
BUST, STICK = 0, 0
NUMBERING = "steppe.classic:FlattenMultiDiscreteWrapper"  # changes how observations are written, not the task
MAX_ITERATIONS = 100_000


@dataclass(frozen=True)
class Model:
    """A finite Markov decision process: probabilities [S, A, S], expected rewards [S, A], start distribution [S].

    A transition that terminates leads nowhere, so rows may sum to less than 1. `time_limit`: steps of an episode at most.
    """

    transitions: Array
    rewards: Array
    start: Array
    time_limit: int | None = None


@dataclass(frozen=True)
class ExactResult:
    """Expected return of a policy and of the best policy."""

    value: float
    optimum: float


def model_of(env: Any, time_limit: int | None) -> Model | None:
    """Return the model of an environment that publishes its transition table; None for others."""
    table = getattr(env.unwrapped, "P", None)
    start = getattr(env.unwrapped, "initial_state_distrib", None)
    if not isinstance(table, dict) or start is None:
        return None
    states, actions = len(table), len(table[0])
    transitions, rewards = np.zeros((states, actions, states)), np.zeros((states, actions))
    for state, row in table.items():
        for action, outcomes in row.items():
            for probability, following, reward, terminated in outcomes:
                rewards[state, action] += probability * reward
                if not terminated:
                    transitions[state, action, following] += probability
    return Model(transitions, rewards, np.asarray(start, float) / np.sum(start), time_limit)


def policy_value(model: Model, actions: Array) -> float:
    """Return the expected return of a policy that takes `actions[state]`; -inf or inf if no episode's end bounds it."""
    rows = np.arange(len(actions))
    steps, rewards = model.transitions[rows, actions], model.rewards[rows, actions]
    if model.time_limit is not None:
        values = np.zeros(len(actions))
        for _ in range(model.time_limit):
            values = rewards + steps @ values
        return float(model.start @ values)
    reached = _reachable(steps, model.start > 0)
    ends = _ends(steps, reached)
    if not ends:
        drift = float(rewards[reached].sum())
        return float(np.copysign(np.inf, drift)) if drift else 0.0
    inside = np.flatnonzero(reached)
    values = np.zeros(len(actions))
    values[inside] = np.linalg.solve(np.eye(len(inside)) - steps[np.ix_(inside, inside)], rewards[inside])
    return float(model.start @ values)


def optimal_value(model: Model) -> float:
    """Return the expected return of the best policy, by value iteration; with a time limit it may depend on the time left."""
    values = np.zeros(len(model.rewards))
    for _ in range(model.time_limit or MAX_ITERATIONS):
        newer = (model.rewards + model.transitions @ values).max(axis=1)
        if model.time_limit is None and np.abs(newer - values).max() < 1e-12:
            break
        values = newer
    return float(model.start @ values)


def _reachable(steps: Array, start: Array) -> Array:
    reached = start.copy()
    while True:
        more = reached | (steps[reached].sum(axis=0) > 0)
        if (more == reached).all():
            return reached
        reached = more


def _ends(steps: Array, reached: Array) -> bool:
    """Return whether an episode ends with probability 1 from every reached state."""
    leaving = reached & (steps.sum(axis=1) < 1 - 1e-9)
    while True:
        more = leaving | (reached & (steps[:, leaving].sum(axis=1) > 0))
        if (more == leaving).all():
            return bool((leaving == reached).all())
        leaving = more


def _add_card(total: int, usable: bool, card: int) -> tuple[int, bool]:
    """Return sum and usable ace after another card; the sum counts a usable ace as 11."""
    hard = total - 10 * usable + card
    has_ace = usable or card == 1
    return (hard + 10, True) if has_ace and hard + 10 <= 21 else (hard, False)


@lru_cache
def _dealer_totals(total: int, usable: bool) -> dict[int, float]:
    """Return the distribution of the dealer's final sum, 0 if bust."""
    if total > 21:
        return {BUST: 1.0}
    if total >= 17:
        return {total: 1.0}
    found: dict[int, float] = {}
    for card, probability in CARDS.items():
        for final, share in _dealer_totals(*_add_card(total, usable, card)).items():
            found[final] = found.get(final, 0.0) + probability * share
    return found


def _stick_value(total: int, dealer: int, *, natural: bool, sab: bool, bonus: bool) -> float:
    """Return the expected reward of sticking. `natural`: the player holds an ace and a ten, and no more."""
    value = 0.0
    for card, probability in CARDS.items():
        dealer_natural = {dealer, card} == {1, 10}
        hand = _add_card(*_add_card(0, False, dealer), card)
        for final, share in _dealer_totals(*hand).items():
            reward = float(np.sign(total - final))
            if sab and natural and not dealer_natural:
                reward = 1.0
            elif not sab and bonus and natural and reward == 1.0:
                reward = 1.5
            value += probability * share * reward
    return value


def blackjack_values(choose: Callable[[int, int, bool], int], *, sab: bool, natural: bool) -> ExactResult:
    """Return the expected reward of a policy of (sum, dealer's card, usable ace) and of the best one."""

    def value(policy: Callable[[int, int, bool], int] | None, total: int, dealer: int, ace: bool, held: bool) -> float:
        def stick() -> float:
            return _stick_value(total, dealer, natural=held, sab=sab, bonus=natural)

        def hit() -> float:
            hands = ((_add_card(total, ace, card), probability) for card, probability in CARDS.items())
            return sum(p * (-1.0 if hand[0] > 21 else known(policy, hand[0], dealer, hand[1])) for hand, p in hands)

        if policy is None:
            return max(stick(), hit())
        return stick() if policy(total, dealer, ace) == STICK else hit()

    @lru_cache(None)
    def known(policy: Callable[[int, int, bool], int] | None, total: int, dealer: int, ace: bool) -> float:
        return value(policy, total, dealer, ace, False)

    def whole(policy: Callable[[int, int, bool], int] | None) -> float:
        result = 0.0
        for dealer, dealer_share in CARDS.items():
            for first, first_share in CARDS.items():
                for second, second_share in CARDS.items():
                    total, ace = _add_card(*_add_card(0, False, first), second)
                    share = dealer_share * first_share * second_share
                    result += share * value(policy, total, dealer, ace, {first, second} == {1, 10})
        return result

    return ExactResult(whole(choose), whole(None))


def evaluate_exactly(run: RunDirectory) -> ExactResult | None:
    """Evaluate the greedy policy of a run's final weights exactly; None if its environment has no known model."""
    from contextlib import closing

    from gymnasium import spaces

    from steppe.envs.factory import is_multi_agent, make_env
    from steppe.envs.lookup import find_env
    from steppe.training.load import load

    config = run.config()
    world = config.environment
    if set(world.wrappers) - {NUMBERING} or world.reward_clip or world.reward_scale != 1.0:
        return None
    with closing(make_env(config.env, find_env(config.env), config.environment)) as env:
        if is_multi_agent(env):
            return None
        inner: Any = env.unwrapped
        policy: Any = load(run.path)
        if type(inner).__name__ == "BlackjackEnv" and type(inner).__module__.startswith("gymnasium."):
            numbered = isinstance(env.observation_space, spaces.Discrete)
            table = _blackjack_actions(policy, numbered=numbered)
            return blackjack_values(
                lambda total, dealer, ace: int(table[total, dealer, int(ace)]), sab=inner.sab, natural=inner.natural
            )
        model = model_of(env, _time_limit(config, env))
        if model is None or not isinstance(env.observation_space, spaces.Discrete):
            return None
        actions = np.asarray(policy.act(np.arange(len(model.rewards))))
        return ExactResult(policy_value(model, actions), optimal_value(model))


def _time_limit(config: RunConfig, env: Any) -> int | None:
    return config.environment.time_limit or (env.spec.max_episode_steps if env.spec else None)


def _blackjack_actions(policy: Any, *, numbered: bool) -> Array:
    """Return the policy's action for every sum, dealer's card and usable ace; `numbered`: as FlattenMultiDiscreteWrapper does."""
    shape = (32, 11, 2)
    observations = np.arange(np.prod(shape)) if numbered else tuple(np.indices(shape).reshape(3, -1))
    return np.asarray(policy.act(observations)).reshape(shape)

"""A script without `if __name__ == "__main__"`: worker processes import it up to its first training call.

python script_without_main_guard.py [STEPS]
"""

import sys

import gymnasium as gym

import steppe


def make_env() -> gym.Env:
    """CartPole with half the reward."""
    return gym.wrappers.TransformReward(gym.make("CartPole-v1"), lambda reward: 0.5 * reward)


steps = int(sys.argv[1]) if len(sys.argv) > 1 else 50_000
result = steppe.train(make_env, algo="ppo", runtime="processes", actors=2, mode="async", steps=steps)
print(f"{result.state}: {result.env_steps} steps, mean return {result.eval_return_mean:.1f}")

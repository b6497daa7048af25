"""Train PPO on CartPole. One word selects the runtime: python train_cartpole.py [inline|processes] [STEPS]"""

import sys

import steppe

runtime = sys.argv[1] if len(sys.argv) > 1 else "processes"
steps = int(sys.argv[2]) if len(sys.argv) > 2 else 200_000

result = steppe.train("CartPole-v1", algo="ppo", actors=2, mode="sync", runtime=runtime, steps=steps, seed=1)
print(f"{result.state} after {result.env_steps:,} steps, {result.steps_per_s:,.0f} per second")
print(f"mean return of {result.eval_episodes} episodes: {result.eval_return_mean:.1f}")
print(f"weights {result.weights_sha256[:16]}, run directory {result.path}")

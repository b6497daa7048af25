"""Use what a run learned in a loop of your own: python load_and_act.py [RUN]   (without RUN it trains a little first)"""

import sys

import gymnasium as gym

import steppe

run = sys.argv[1] if len(sys.argv) > 1 else steppe.train("CartPole-v1", runtime="inline", steps=30_000).path
policy = steppe.load(run)

env = gym.make("CartPole-v1")
obs, _ = env.reset(seed=1)
total, over = 0.0, False
while not over:
    obs, reward, terminated, truncated, _ = env.step(policy.act(obs))
    total, over = total + float(reward), terminated or truncated
env.close()
print(f"return {total:.0f} with weights {policy.weights.sha256()[:16]} for {policy.spec.id}")

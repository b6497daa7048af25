"""Use a trained policy in your own loop: python load_and_act.py [RUN]   (without RUN it trains a short run first)"""

import sys

import gymnasium as gym

import steppe

run = sys.argv[1] if len(sys.argv) > 1 else steppe.train("CartPole-v1", runtime="inline", steps=30_000).path
policy = steppe.load(run)

env = gym.make("CartPole-v1")
obs, _ = env.reset(seed=1)
total, done = 0.0, False
while not done:
    obs, reward, terminated, truncated, _ = env.step(policy.act(obs))
    total, done = total + float(reward), terminated or truncated
env.close()
print(f"return {total:.0f} with weights {policy.weights.sha256()[:16]} for {policy.spec.id}")

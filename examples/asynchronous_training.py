"""Asynchronous training (A3C): workers collect experience and push gradients without waiting for each other.

python asynchronous_training.py [STEPS]
"""

import sys

from steppe import AsyncMainLoop, DistributedAgent, DistributedEnvironment, ParameterServer
from steppe.params.optimizers import Optimizer
from steppe.params.rounds import Rounds

steps = int(sys.argv[1]) if len(sys.argv) > 1 else 300_000

environment = DistributedEnvironment("CartPole-v1")
replay_buffer = None  # a3c is on-policy: no replay
agent = DistributedAgent("a3c", learning_rate=0.003).bind(environment)

param_server = ParameterServer(
    agent.get_policy_parameters(),
    update_frequency=1,  # apply every gradient when it arrives
    optimizer=Optimizer("adam", learning_rate=0.003, max_norm=0.5),
    rounds=Rounds(damping=0.5, max_staleness=50),  # scale down stale gradients, refuse very stale ones
)
async_loop = AsyncMainLoop(environment, replay_buffer, agent, param_server, num_workers=8)
summary = async_loop.run_async_training(total_steps=steps)

stats = param_server.get_server_stats()
ages = stats["staleness"]
mean_age = sum(age * count for age, count in ages.items()) / max(1, sum(ages.values()))
print(f"{summary['env_steps']} steps by {summary['actors']} workers: {summary['eval_return_mean']:.1f}")
print(f"{stats['accepted_pushes']} pushes, {mean_age:.1f} updates old on average, refused: {stats['refused_pushes']}")

"""Distributed training with a separate parameter server: workers push gradients in rounds, the server applies their mean.

python distributed_training.py [EPISODES]
"""

import sys

from steppe import DistributedAgent, DistributedEnvironment, MainLoop, ParameterServer
from steppe.params.optimizers import Optimizer
from steppe.params.rounds import Rounds

episodes = int(sys.argv[1]) if len(sys.argv) > 1 else 2000

environment = DistributedEnvironment("CartPole-v1", num_workers=2)
replay_buffer = None  # a2c is on-policy: no replay
agent = DistributedAgent("a2c", learning_rate=0.003).bind(environment)
initial_params = agent.get_policy_parameters()

param_server = ParameterServer(
    initial_params,
    aggregation_method="weighted",  # by the number of steps of each gradient
    rounds=Rounds(synchronous=True),
    optimizer=Optimizer("adam", learning_rate=0.003, max_norm=0.5),
)
main_loop = MainLoop(environment, replay_buffer, agent, param_server)
summary = main_loop.run_training(total_episodes=episodes, evaluation_frequency=500)

stats = param_server.get_server_stats()
print(f"version {stats['version']} after {stats['accepted_pushes']} pushes: {summary['eval_return_mean']:.1f}")
for name, worker in stats["workers"].items():
    print(f"{name}: {worker['accepted']} accepted, {sum(worker['refused'].values())} refused")

# The workers of the environment act with the server's newest parameters.
with environment:
    steps = environment.generate_experiences(agent, num_episodes=2)
    version = environment.get_environment_stats()["policy_version"]
    print(f"{len(steps)} steps with version {version}")

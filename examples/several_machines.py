"""Train on several machines. Each has its own actors and learner; a parameter server combines their updates.

python several_machines.py worker_1 [EPISODES]    # on the first machine, which also runs the parameter server
python several_machines.py worker_2 [EPISODES]    # on the second
"""

import sys
import tomllib
from pathlib import Path

from steppe import DistributedAgent, DistributedEnvironment, DistributedMainLoop, FederatedParameterServer

node_id = sys.argv[1] if len(sys.argv) > 1 else "worker_1"
episodes = int(sys.argv[2]) if len(sys.argv) > 2 else 1000
config = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())

environment = DistributedEnvironment("CartPole-v1", num_workers=1)
replay_buffer = None  # ppo is on-policy: no replay
agent = DistributedAgent("ppo").bind(environment)

param_server = None  # runs on another node
if node_id == config["nodes"][0]:
    param_server = FederatedParameterServer(agent.get_policy_parameters(), min_workers_for_update=config["quorum"])

distributed_loop = DistributedMainLoop(
    environment, replay_buffer, agent, param_server, node_id=node_id, cluster_config=config
)
summary = distributed_loop.run_distributed_training(total_episodes=episodes)
cluster = summary["cluster"]
print(f"{node_id} is rank {cluster['rank']}: {summary['eval_return_mean']:.1f} after {summary['env_steps']} steps")
for name, node in cluster.get("nodes", {}).items():
    print(f"{name}: {node['accepted']} deltas, {node['metrics'].get('env_steps', 0):.0f} steps")
distributed_loop.close()
